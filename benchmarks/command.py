"""The options that commands have in common, and the head of their results."""

import argparse
from collections.abc import Sequence
import math
import os
import pathlib
import shlex
import tempfile
from typing import Any
from typing import NoReturn

from benchmarks import machine

_OUT = "benchmarks/results"


class Parser(argparse.ArgumentParser):
  """argparse without abbreviations, and without the usage before an error."""

  def __init__(self, name: str, description: str | None = None) -> None:
    super().__init__(
      prog=f"python -m benchmarks {name}".strip(),
      description=description,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )

  def error(self, message: str) -> NoReturn:
    """Says in one line what is wrong, and exits with status 2."""
    self.exit(2, f"{self.prog}: error: {message}\n")


def parser(
  name: str, description: str | None, *, rounds: int | None = None
) -> Parser:
  """Returns a parser of the options that commands have in common.

  Args:
    name: the command's.
    description: for its help.
    rounds: how many there are by default; None for no such option.
  """
  made = Parser(name, description)
  made.add_argument(
    "--tiny", action="store_true", help="tiny sizes, to see it work"
  )
  made.add_argument(
    "--out",
    type=folder,
    default=_OUT,
    metavar="DIR",
    help=f"where {name}.json goes; it is replaced (default: {_OUT})",
  )
  if rounds is not None:
    made.add_argument(
      "--rounds",
      type=count,
      default=rounds,
      metavar="N",
      help=f"turns of each contender (default: {rounds})",
    )
  return made


def begin(name: str, argv: Sequence[str]) -> dict[str, Any]:
  """Prints and returns what is run on which machine, and how busy that is.

  Args:
    name: the command's.
    argv: its options.

  Returns:
    A dict for JSON: `command`, `machine`, and `load`, the number of programs
    that wanted to run in the last minute, on average.
  """
  content = {
    "command": shlex.join(["python", "-m", "benchmarks", name, *argv]),
    "machine": machine.describe(),
    # Windows does not have it.
    "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
  }
  print(f"{content['command']}\n{machine.headline(content['machine'])}")
  print(f"load: {content['load']}\n", flush=True)
  return content


def count(text: str) -> int:
  """Returns the number of an option's text."""
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
  return int(text)


def minutes(text: str) -> float:
  """Returns the number of an option's text, of which a deadline is made."""
  if not 0 < float(text) < math.inf:
    raise argparse.ArgumentTypeError(
      f"must be finite and above 0, got {text!r}"
    )
  return float(text)


def folder(text: str) -> pathlib.Path:
  """Makes the folder, so that what is measured can be written."""
  try:
    (path := pathlib.Path(text)).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
  except OSError as error:
    raise argparse.ArgumentTypeError(
      f"must be a folder to write to: {error}"
    ) from error
  return path
