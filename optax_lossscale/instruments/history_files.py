"""Reads and writes histories in CSV and JSON files."""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import csv
import itertools
import json
import math
import os
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale.instruments import _history

_Path = str | os.PathLike[str]

# The names of the columns that make up a history.
_COLUMNS = ("amax", "loss_scale", "overflow", "step")


def read_history(
  path: _Path, run: str | None = None, seed: int | None = None
) -> _history.History:
  r"""Reads a history from a CSV or JSON file.

  A CSV file needs a column `amax`, scaled by the `loss_scale` of the same row.
  Without a column `loss_scale`, S is 1. The columns `overflow` (0 or 1; by
  default, whether amax is inf or NaN) and `step` (not negative, increasing) are
  optional, as are `run` and `seed`, which distinguish several runs in one file.
  Steps with an empty amax or loss_scale were not scaled and are left out.
  Semicolons or tabs may separate the columns. The decimal mark is a point.

  A JSON file has the columns as lists, `{"amax": [...], "loss_scale": [...]}`,
  and may label its only run, `"run": "a"`. A single loss_scale applies to all
  steps. The file may also be a list, which is then amax. Several runs have the
  form `{"runs": [{"run": "a", "seed": 0, "history": {"amax": [...]}}]}`. inf
  and NaN may be the strings "inf" and "nan", and null means empty.

  `optax-lossscale train` writes files of both kinds.

  Args:
    path: a file whose name ends in `.csv` or `.json`.
    run: the label of the run to read, if several runs have an amax.
    seed: the seed to read, if that run has several.

  Returns:
    The history, for `replay` and `advise`.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if the file does not have this form (the message names the place
      and what is there); if it is a folder, a device or a pipe; or if there are
      several runs to choose from (the message lists their labels).

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
  history, choices = read_first(path, run, seed)
  for kind, labels in choices.items():
    raise ValueError(
      f"{path}: it holds {len(labels)} {kind}s with an amax; choose one by "
      f"`{kind}`: {', '.join(labels)}."
    )
  return history


def read_first(
  path: _Path, run: str | None = None, seed: int | None = None
) -> tuple[_history.History, dict[str, list[str]]]:
  """Returns the first matching history, and the labels if others match."""
  path = pathlib.Path(path)
  read = {".csv": _read_csv, ".json": _read_json}[_suffix(path)]
  # Reading a device such as /dev/zero would never end.
  if path.exists() and not path.is_file():
    raise ValueError(f"{path}: must be a file, got a folder, device or pipe.")
  try:
    found = _choose(read(path), run, seed)
    choices = {kind: _labels(found, kind) for kind in ("run", "seed")}
    choices = {kind: x for kind, x in choices.items() if len(x) > 1}
    if len(found) > 1 and not choices:
      raise ValueError(
        "each run must have a `run` and `seed` of its own, got the same for "
        f"{', '.join(source.where for source in found)}."
      )
    return found[0].parse(), choices
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: not text in UTF-8: {error}.") from error
  except (ValueError, csv.Error, RecursionError) as error:
    raise ValueError(f"{path}: {error}") from error


def write_history(path: _Path, history: _history.History) -> None:
  """Writes a history as a CSV or JSON file that `read_history` can read.

  Args:
    path: a name that ends in `.csv` or `.json`; an existing file is replaced.
    history: the history to write.

  Raises:
    OSError: if the file cannot be written.
    ValueError: if the path has another suffix.
  """
  path = pathlib.Path(path)
  suffix = _suffix(path)
  columns = as_columns(history)
  for name in ("loss_scale", "amax"):
    # Writes the shortest text that reads back as the same float32.
    columns[name] = [float(str(np.float32(x))) for x in columns[name]]
  if suffix == ".csv":
    with path.open("w", newline="", encoding="utf-8") as file:
      writer = csv.writer(file, lineterminator="\n")
      writer.writerow(columns)
      writer.writerows(zip(*columns.values(), strict=True))
  else:
    columns["amax"] = [as_json(x) for x in columns["amax"]]
    path.write_text(json.dumps(columns) + "\n", encoding="utf-8")


def as_columns(history: _history.History) -> dict[str, list[Any]]:
  """Returns the columns of a history as lists, as in a file."""
  return {
    "step": np.asarray(history.step).tolist(),
    "loss_scale": np.asarray(history.loss_scale).tolist(),
    "overflow": [int(x) for x in history.overflow],
    "amax": np.asarray(history.amax).tolist(),
  }


def as_json(value: Any) -> Any:
  """Returns a value for JSON, in which inf and NaN become strings."""
  is_finite = not isinstance(value, float) or math.isfinite(value)
  return value if is_finite else str(value)


class _Source(NamedTuple):
  """One run of a file, before parsing."""

  columns: dict[str, list[Any]]  # Columns by name, one entry per step.
  places: list[str]  # The place of each step, for errors; {} is the column.
  run: str | None = None
  seed: str | None = None
  where: str = ""  # The place of the run in the file, if it has one.

  @property
  def scaled(self) -> list[int]:
    """The indices of the steps that have an amax and were scaled."""
    needed = [x for n, x in self.columns.items() if n in ("amax", "loss_scale")]
    return [
      i
      for i, values in enumerate(zip(*needed, strict=True))
      if not any(value is None or not str(value).strip() for value in values)
    ]

  def parse(self) -> _history.History:
    """Returns the scaled steps as arrays."""
    scaled = self.scaled
    parsed = {
      name: [self._parse(name, i) for i in scaled]
      for name in _COLUMNS
      if name in self.columns
    }
    # Values too large for float32 become inf, as in a float32 amax.
    with np.errstate(over="ignore"):
      amax = np.array(parsed["amax"], np.float32)
    scale = parsed.get("loss_scale", np.ones(amax.size))
    overflow = parsed.get("overflow", np.zeros(amax.size))
    step = parsed.get("step", range(1, amax.size + 1))
    for i, (before, after) in enumerate(itertools.pairwise(step), start=1):
      if after <= before:
        raise ValueError(
          f"{self._place('step', scaled[i])}: steps must increase, got {after} "
          f"after {before}; several runs need a column `run`, in JSON a list "
          "`runs`."
        )
    return _history.History(
      step=np.array(step, np.int64),
      loss_scale=np.array(scale, np.float32),
      amax=amax,
      overflow=np.array(overflow, bool) | ~np.isfinite(amax),
    )

  def _parse(self, column: str, i: int) -> Any:
    try:
      return _parse(column, self.columns[column][i])
    except ValueError as error:
      raise ValueError(f"{self._place(column, i)}: {error}") from None

  def _place(self, column: str, i: int) -> str:
    return self.places[i].format(column)


def _choose(
  sources: Iterable[_Source], run: str | None, seed: int | None
) -> list[_Source]:
  """Returns the sources that match `run` and `seed`."""
  scaled = [source for source in sources if source.scaled]
  if not scaled:
    raise ValueError(
      "no step has an amax; a run without loss scaling does not have one, nor "
      "does a run from before this library wrote it."
    )
  for kind, wanted, which in (
    ("run", run, "with an amax"),
    ("seed", None if seed is None else str(seed), "of this run"),
  ):
    found = [x for x in scaled if wanted in (None, getattr(x, kind))]
    if not found:
      raise ValueError(
        f"it has no {kind} {shown(wanted) if kind == 'run' else wanted} "
        f"{which}; there are: {', '.join(_labels(scaled, kind))}."
      )
    scaled = found
  return scaled


def _labels(sources: list[_Source], kind: str) -> list[str]:
  """Returns the distinct labels of runs in readable form."""
  labels = dict.fromkeys(getattr(source, kind) for source in sources)
  as_text = shown if kind == "run" else str
  return [as_text(x) if x else "none" for x in labels]


def _read_csv(path: pathlib.Path) -> Iterator[_Source]:
  with path.open(newline="", encoding="utf-8-sig") as file:
    separator = max(",;\t", key=file.readline().count)
    file.seek(0)
    reader = csv.reader(file, strict=True, delimiter=separator)
    names = [name.strip() for name in next(reader, [])]
    if "amax" not in names:
      raise ValueError(
        "line 1: one of the columns must be amax, got "
        f"{shown(', '.join(names))}."
      )
    for name in (*_COLUMNS, "run", "seed"):
      if names.count(name) > 1:
        raise ValueError(f"line 1: column {name} must come once, got it twice.")
    runs: dict[Any, list[tuple[int, dict[str, str]]]] = {}
    for values in reader:
      if not values:
        continue  # A blank line, such as at the end.
      if len(values) != len(names):
        raise ValueError(
          f"line {reader.line_num}: must have {len(names)} columns as the "
          f"first line, got {len(values)}."
        )
      row = dict(zip(names, map(str.strip, values), strict=True))
      key = row.get("run"), row.get("seed")
      runs.setdefault(key, []).append((reader.line_num, row))
  for key, rows in runs.items():
    yield _Source(
      {n: [row[n] for _, row in rows] for n in _COLUMNS if n in names},
      [f"line {line}, column {{}}" for line, _ in rows],
      *key,
    )


def _read_json(path: pathlib.Path) -> Iterator[_Source]:
  text = path.read_text(encoding="utf-8")
  content = json.loads(text, object_pairs_hook=_once_each)
  if isinstance(content, dict) and "runs" in content:
    for i, run in enumerate(_of_kind(list, "runs", content["runs"])):
      history = _of_kind(dict, f"runs[{i}]", run).get("history")
      if history is not None:
        where = f"runs[{i}]"
        _of_kind(dict, f"{where}.history", history)
        yield _json_source(f"{where}.history.", history, run, f"{where}.")
  else:
    if isinstance(content, list):
      content = {"amax": content}
    columns = _of_kind(dict, "the file", content)
    yield _json_source("", columns, columns)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns a JSON object; raises if a key is repeated, which Python allows."""
  keys = [key for key, _ in pairs]
  if len({*keys}) < len(keys):
    twice = collections.Counter(keys).most_common(1)[0][0]
    raise ValueError(f"key {shown(twice)} must come once, got it twice.")
  return dict(pairs)


def _json_source(
  prefix: str, columns: dict[str, Any], run: dict[str, Any], where: str = ""
) -> _Source:
  """Returns a run, given its columns and the object with its labels."""
  if "amax" not in columns:
    got = shown(list(columns))
    raise ValueError(f"it must have a list {prefix}amax, got {got}.")
  count = len(_of_kind(list, f"{prefix}amax", columns["amax"]))
  columns = {n: columns[n] for n in _COLUMNS if columns.get(n) is not None}
  if not isinstance(columns.get("loss_scale", []), list):
    columns["loss_scale"] = [columns["loss_scale"]] * count
  for name, values in columns.items():
    if len(_of_kind(list, f"{prefix}{name}", values)) != count:
      raise ValueError(
        f"{prefix}{name} must have an entry for each of the {count} of "
        f"{prefix}amax, got {len(values)}."
      )
  places = [f"{prefix}{{}}[{i}]" for i in range(count)]
  label = _of_kind(str | None, f"{where}run", run.get("run"))
  seed = _of_kind(int | str | None, f"{where}seed", run.get("seed"))
  seed = None if seed is None else str(seed).strip()
  return _Source(columns, places, label, seed, where.removesuffix("."))


def _of_kind(kind: Any, place: str, value: Any) -> Any:
  if not isinstance(value, kind):
    names = {list: "a list", dict: "an object", str | None: "text"}
    name = names.get(kind, "an integer")
    remedy = ""
    if isinstance(value, list) and kind is not dict:  # Labels, one per step.
      remedy = "; several runs are objects in a list `runs`"
    raise ValueError(f"{place} must be {name}, got {shown(value)}{remedy}.")
  return value


def _suffix(path: pathlib.Path) -> str:
  suffix = path.suffix.lower()
  if suffix not in (".csv", ".json"):
    raise ValueError(
      f"{path}: the file's name must end in .csv or .json, got {path.suffix!r}."
    )
  return suffix


def _parse(column: str, value: Any) -> Any:
  """Returns an entry of a column as a number or a flag."""
  if column == "overflow":
    flags = {"0": False, "1": True, "false": False, "true": True}
    flag = flags.get(str(value).strip().lower())
    if flag is None:
      raise ValueError(f"must be 0 or 1, got {shown(value)}.")
    return flag
  try:
    if isinstance(value, bool):
      raise TypeError
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    has_comma = isinstance(value, str) and "," in value
    remedy = "; write the decimal comma as a point" if has_comma else ""
    raise ValueError(f"must be a number, got {shown(value)}{remedy}.") from None
  rule, holds = _NUMBERS[column]
  if not holds(number):
    raise ValueError(f"must {rule}, got {shown(value)}.")
  return int(number) if column == "step" else number


# The condition on the numbers in each column, as text and as a test.
_NUMBERS: dict[str, tuple[str, Callable[[float], Any]]] = {
  "amax": ("not be negative", lambda x: not x < 0),
  "loss_scale": (
    "be positive and a normal float32",
    arguments.is_usable_scale,
  ),
  "step": ("be a step, from 0", lambda x: x.is_integer() and 0 <= x < 2**53),
}
