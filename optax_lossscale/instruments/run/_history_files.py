"""Reads and writes histories as CSV files."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import csv
import io
import os
import pathlib
import secrets
import shutil

import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale.instruments.run import _history

# The rule for the values of a column, as text and as a test.
_COLUMNS: dict[str, tuple[str, Callable[[float], object]]] = {
  "step": ("an integer from 0", lambda x: x.is_integer() and 0 <= x < 2**53),
  "loss_scale": ("a positive, normal float32", arguments.is_usable_scale),
  "amax": ("a number from 0, inf or nan", lambda x: not x < 0),
  "overflow": ("0 or 1", lambda x: x in (0, 1)),
}
_HEADER = "name the columns between commas, one of them amax"
_FLAGS = {"false": "0", "true": "1"}
_DEVICES = ("/dev", "/dev/fd", "/proc/self/fd")


def read_history(path: str | os.PathLike[str]) -> _history.History:
  r"""Reads a history from a CSV file.

  The first line names the columns, between commas. One of them must be `amax`,
  scaled by the `loss_scale` of the same line. Without a column `loss_scale`, S
  is 1. The columns `overflow` (0 or 1; by default, whether amax is inf or NaN)
  and `step` (from 0, increasing) are optional. Other columns are ignored.

  Args:
    path: the file of one run. Leave out steps whose loss was not scaled.

  Returns:
    The history, for `replay` and `advise`.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if the file does not have this form (the message names the place
      and what is there), or if it is a folder, a device or a pipe.

  Examples:
    >>> import pathlib, tempfile
    >>> import optax_lossscale as ols
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder, "history.csv")
    ...   _ = path.write_text("loss_scale,amax\n1024,16376\n1024,inf\n")
    ...   history = ols.instruments.read_history(path)
    >>> print(history.step, history.overflow, history.headroom())
    [1 2] [False  True] [ 2. nan]
  """
  path = arguments.check_file("path", path)
  name = arguments.printable(path)
  # Reading a device such as /dev/zero would never end.
  if path.exists() and not path.is_file():
    raise ValueError(f"{name}: must be a file, got a folder, device or pipe.")
  try:
    with path.open(newline="", encoding="utf-8-sig") as file:
      columns = _read(file)
  except UnicodeDecodeError as error:
    raise ValueError(f"{name}: must be text in UTF-8, got {error}.") from error
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error
  # Values too large for float32 become inf, as in a float32 amax.
  with np.errstate(over="ignore"):
    amax = np.array(columns["amax"], np.float32)
  size = amax.size
  return _history.History(
    step=np.array(columns.get("step", range(1, size + 1)), np.int64),
    loss_scale=np.array(columns.get("loss_scale", np.ones(size)), np.float32),
    amax=amax,
    overflow=np.array(columns.get("overflow", np.zeros(size)), bool)
    | ~np.isfinite(amax),
  )


def write_history(
  path: str | os.PathLike[str], history: _history.History
) -> None:
  """Writes a history as a CSV file that `read_history` can read.

  The text first goes into a new file beside it, so an error such as a full disk
  does not harm the old one.

  Args:
    path: the file, whatever its name ends in. An existing one is replaced, and
      so is a link, which is not followed. Devices and pipes are written to.
    history: the history to write.

  Raises:
    OSError: if the file cannot be written.
    TypeError: if an argument has the wrong type.
    ValueError: if the arrays of `history` have different lengths.
  """
  path = arguments.check_file("path", path)
  _history.check_history(history)
  shapes = [np.shape(x) for x in history]
  if len({*shapes}) > 1 or len(shapes[0]) != 1:
    raise ValueError(f"`history` must have arrays of one length, got {shapes}.")
  lines = [",".join(history._fields)]
  # The text of a float32 is the shortest that reads back as the same one.
  kinds = (str, np.float32, np.float32, int)
  for row in zip(*map(np.asarray, history), strict=True):
    lines.append(",".join(map(_text_of, row, kinds)))
  text = "\n".join([*lines, ""])
  try:
    _read(io.StringIO(text))
  except ValueError as error:
    raise ValueError(
      f"`history` must hold the steps of a run, got one where {error}"
    ) from error
  _replace(path, text)


def _text_of(value: object, kind: type) -> str:
  """Returns a number as text, and anything else as it is."""
  with contextlib.suppress(TypeError, ValueError):
    return str(kind(value))
  return str(value)


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file as a whole or not at all."""
  is_old = path.is_file() and not path.is_symlink()
  is_other = path.exists() and not is_old and not path.is_symlink()
  # /dev/stdout is a link, perhaps to a file.
  if is_other or str(path.absolute().parent) in _DEVICES:
    path.write_text(text, encoding="utf-8", newline="\n")
    return
  # A name that nobody can foresee, so nobody can have put a link there.
  beside = path.with_name(f".{secrets.token_hex(8)}.tmp")
  try:
    if is_old:
      path.open("r+b").close()  # Renaming would replace a read-only file.
    with beside.open("x", encoding="utf-8", newline="\n") as file:
      file.write(text)
    if is_old:
      shutil.copymode(path, beside)
    beside.replace(path)
  except OSError as error:
    error.filename = str(path)
    raise
  finally:
    beside.unlink(missing_ok=True)


def _lines(file: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
  """Yields the name of each line, and its cells."""
  reader = csv.reader(file, strict=True)
  try:
    for cells in reader:
      yield f"line {reader.line_num}", cells
  except csv.Error as error:
    rule, why = "have cells between commas", f": {error}"
    if reader.line_num < 2:
      rule, why = _HEADER, ""
    raise ValueError(
      f"line {reader.line_num}: must {rule}, got text that is not CSV{why}."
    ) from error


def _read(file: Iterable[str]) -> dict[str, list[float]]:
  """Returns the columns that make up a history."""
  lines = _lines(file)
  names = [name.strip() for name in next(lines, ("", []))[1]]
  if "amax" not in names:
    got = shown(",".join(names))
    raise ValueError(f"line 1: must {_HEADER}, got {got}.")
  columns: dict[str, list[float]] = {x: [] for x in _COLUMNS if x in names}
  for name in columns:
    if names.count(name) > 1:
      raise ValueError(f"line 1: column {name} must come once, got it twice.")
  for line, cells in lines:
    if not cells:
      continue  # A blank line, such as at the end.
    if len(cells) != len(names):
      raise ValueError(
        f"{line}: must have as many cells as line 1, {len(names)}, got "
        f"{len(cells)}."
      )
    for name, values in columns.items():
      values.append(_parse(line, name, cells[names.index(name)].strip()))
    match columns.get("step", [])[-2:]:
      case [before, after] if after <= before:
        raise ValueError(
          f"{line}, column step: steps must increase, got {after:.0f} after "
          f"{before:.0f}; a file holds one run."
        )
  if not columns["amax"]:
    raise ValueError("must have a line for each step, got no steps.")
  return columns


def _parse(line: str, column: str, text: str) -> float:
  rule, holds = _COLUMNS[column]
  # Python and pandas write flags as words.
  number = _FLAGS.get(text.lower(), text) if column == "overflow" else text
  with contextlib.suppress(ValueError):
    if holds(float(number)):
      return float(number)
  raise ValueError(
    f"{line}, column {column}: must be {rule}, got {shown(text)}."
  )
