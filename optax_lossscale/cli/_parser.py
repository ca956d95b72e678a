"""An argument parser that answers bad input with one line, and types for it."""

import argparse
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import errno
import importlib.util
import math
import pathlib
import shutil
import sys
import tempfile
import textwrap
from typing import Any
from typing import NoReturn

# An overflow is inf, or the dtype's largest finite value.
HARDWARE = ("ieee", "saturating")

_NAME = "optax-lossscale"


def command() -> str:
  """Returns how this command can be typed again."""
  typed = pathlib.Path(sys.argv[0])
  if typed.name == _NAME and shutil.which(_NAME) is None:
    return str(typed)
  return _NAME


class BadInputError(Exception):
  """The user asked for something impossible; the text is the line to print."""


class _Formatter(argparse.HelpFormatter):
  """Breaks lines at spaces only, and keeps those that are indented.

  argparse breaks options at their hyphens, and has no public switch for it. Its
  own formatters override the same two methods.
  """

  def _split_lines(self, text: str, width: int) -> list[str]:
    words = " ".join(text.split())
    return textwrap.wrap(
      words, width, break_on_hyphens=False, break_long_words=False
    )

  def _fill_text(self, text: str, width: int, indent: str) -> str:
    return "\n".join(
      indent + line
      for part in text.splitlines()
      for line in (
        [part] if part[:1] == " " else self._split_lines(part, width)
      )
    )


class Parser(argparse.ArgumentParser):
  """argparse without abbreviations, and without the usage before an error."""

  def __init__(self, **kwargs: object) -> None:
    kwargs.update(allow_abbrev=False, formatter_class=_Formatter)
    super().__init__(**kwargs)  # type: ignore[arg-type]

  def error(self, message: str) -> NoReturn:
    """Raises `BadInputError`."""
    raise BadInputError(f"{self.prog}: error: {' '.join(message.split())}")

  def require(self, packages: Iterable[str]) -> None:
    """Raises `BadInputError` if a package of the demo extra is not there."""
    for package in packages:
      if importlib.util.find_spec(package) is None:
        self.error(
          f"it needs {package}, which is not installed; in a clone of the "
          f'repository: {sys.executable} -m pip install ".[demo]"'
        )

  @contextlib.contextmanager
  def writing(self, output: pathlib.Path) -> Iterator[None]:
    """Raises `BadInputError` if something for `--output` cannot be written."""
    try:
      yield
    except OSError as error:
      self.error(
        f"argument --output: cannot write {error.filename or output}: "
        f"{error.strerror or error}"
      )


def as_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
  """Returns an argparse type that prints the text of a ValueError."""

  def parse_option(text: str) -> Any:
    try:
      return parse(text)
    except ValueError as error:
      raise argparse.ArgumentTypeError(str(error)) from error

  return parse_option


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
  """Returns an argparse type that takes an integer from `least` to `most`."""

  def parse(text: str) -> int:
    try:
      value = int(text)
    except ValueError:
      raise argparse.ArgumentTypeError(
        f"must be an integer, got {text!r}"
      ) from None
    if not least <= value <= most:
      raise argparse.ArgumentTypeError(
        f"must be from {least} to {most}, got {text!r}"
      )
    return value

  return parse


def positive(text: str) -> float:
  """Parses a positive, finite number; for argparse."""
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not 0 < value < math.inf:
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
  return value


def make_writable(paths: Iterable[pathlib.Path]) -> None:
  """Makes the folders of some files, and ensures that they can be written."""
  for path in paths:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
      raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    with tempfile.TemporaryFile(dir=path.parent):
      pass
