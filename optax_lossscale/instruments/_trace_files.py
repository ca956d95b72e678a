"""Traces in files: what `train` writes, and what a user has at hand."""

from collections.abc import Iterable
from collections.abc import Iterator
import csv
import functools
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from optax_lossscale.instruments import _history
from optax_lossscale.instruments import _trace_columns

_Path = str | os.PathLike[str]


def read_history(
  path: _Path, run: str | None = None, seed: int | None = None
) -> _history.History:
  r"""Reads a trace from a CSV or JSON file.

  A CSV file needs a column `amax`, scaled, beside the `loss_scale` of the step;
  without such a column S was 1. `overflow` (0 or 1; without it, amax inf or
  NaN) and `step` (from 1; must increase) are optional, and so are `run` and
  `seed`, which tell several runs in one file apart. Steps whose amax or
  loss_scale is empty are left out: they were not scaled.

  A JSON file holds the same as lists, `{"amax": [...], "loss_scale": [...]}`,
  where a single number stands for all steps; or a list of amax alone. inf and
  NaN may be the strings "inf" and "nan", null is empty.

  Both are also as `optax-lossscale train` writes them.

  Args:
    path: of a file that ends in `.csv` or `.json`.
    run: which one, where several have an amax: as the file labels it.
    seed: which one, where there are several of that run.

  Returns:
    The history, as `replay` and `advise` take it.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not of this form, with the place and what is there; or
      if there are several runs to choose from, with their labels.

  Examples:
    >>> import pathlib, tempfile
    >>> import optax_lossscale as ols
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder, "trace.csv")
    ...   _ = path.write_text("loss_scale,amax\n1024,16376\n1024,inf\n")
    ...   history = ols.instruments.read_history(path)
    >>> print(history.step, history.overflow, history.headroom())
    [1 2] [False  True] [ 2. nan]
  """
  path = pathlib.Path(path)
  read = {".csv": _read_csv, ".json": _read_json}[_suffix(path)]
  try:
    sources = [source.scaled() for source in read(path)]
    return _choose(sources, run, seed).parse()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: not text in UTF-8: {error}.") from error
  except (ValueError, csv.Error, RecursionError) as error:
    raise ValueError(f"{path}: {error}") from error


def write_history(path: _Path, history: _history.History) -> None:
  """Writes a trace as a CSV or JSON file, which `read_history` reads.

  Args:
    path: of a file that ends in `.csv` or `.json`; it is replaced.
    history: what was recorded.

  Raises:
    OSError: if the file cannot be written.
    ValueError: if the path ends otherwise.
  """
  path = pathlib.Path(path)
  suffix = _suffix(path)
  columns: dict[str, list[Any]] = {
    "step": np.asarray(history.step).tolist(),
    "loss_scale": _shortest(history.loss_scale),
    "overflow": [int(x) for x in history.overflow],
    "amax": _shortest(history.amax),
  }
  if suffix == ".csv":
    with path.open("w", newline="", encoding="utf-8") as file:
      writer = csv.writer(file, lineterminator="\n")
      writer.writerow(columns)
      writer.writerows(zip(*columns.values(), strict=True))
  else:
    columns["amax"] = [
      x if math.isfinite(x) else str(x) for x in columns["amax"]
    ]
    path.write_text(json.dumps(columns) + "\n", encoding="utf-8")


def _shortest(values: Any) -> list[float]:
  """Returns what is written shortest of all that float32 takes for the same."""
  return [float(str(x)) for x in np.asarray(values, np.float32)]


def _choose(
  sources: Iterable[_trace_columns.Columns], run: str | None, seed: int | None
) -> _trace_columns.Columns:
  """Returns the run that was asked for, or the only one."""
  scaled = [source for source in sources if source.columns["amax"]]
  if not scaled:
    raise ValueError(
      "no step has an amax; a run without loss scaling has none, and one from "
      "before this library wrote it neither."
    )
  runs = list(dict.fromkeys(source.run for source in scaled))
  if run is not None:
    scaled = [source for source in scaled if source.run == run]
  elif len(runs) > 1:
    raise ValueError(
      f"it holds {len(runs)} runs with an amax; choose one by `run`: "
      f"{_listed(runs)}."
    )
  if not scaled:
    raise ValueError(
      f"it has no run {run!r} with an amax; there are: {_listed(runs)}."
    )
  seeds = [source.seed for source in scaled]
  if seed is not None:
    scaled = [source for source in scaled if source.seed == str(seed)]
  elif len(seeds) > 1:
    raise ValueError(
      f"it holds {len(seeds)} seeds of this run; choose one by `seed`: "
      f"{', '.join(map(str, seeds))}."
    )
  if not scaled:
    raise ValueError(
      f"it has no seed {seed} of this run; there are: "
      f"{', '.join(map(str, seeds))}."
    )
  return scaled[0]


def _listed(runs: Iterable[str | None]) -> str:
  return ", ".join(repr(run) for run in runs)


def _read_csv(path: pathlib.Path) -> Iterator[_trace_columns.Columns]:
  with path.open(newline="", encoding="utf-8-sig") as file:
    reader = csv.reader(file, strict=True)
    names = [name.strip() for name in next(reader, [])]
    if "amax" not in names:
      raise ValueError(
        f"line 1: one of the columns must be amax, got {', '.join(names)!r}."
      )
    runs: dict[tuple[str | None, str | None], list[tuple[int, list[str]]]] = {}
    index = {name: i for i, name in enumerate(names)}
    for values in reader:
      if not values:
        continue  # A blank line, as at the end.
      if len(values) != len(names):
        raise ValueError(
          f"line {reader.line_num}: must have {len(names)} columns as the "
          f"first line, got {len(values)}."
        )
      key = tuple(
        values[index[name]] if name in index else None
        for name in ("run", "seed")
      )
      runs.setdefault((key[0], key[1]), []).append((reader.line_num, values))
  for (run, seed), rows in runs.items():
    lines = [line for line, _ in rows]
    yield _trace_columns.Columns(
      columns={
        name: [values[index[name]] for _, values in rows]
        for name in _trace_columns.NAMES
        if name in index
      },
      place=functools.partial(_place_in_csv, lines),
      run=run,
      seed=seed,
    )


def _place_in_csv(lines: list[int], i: int, column: str) -> str:
  return f"line {lines[i]}, column {column}"


def _read_json(path: pathlib.Path) -> Iterator[_trace_columns.Columns]:
  content = json.loads(path.read_text(encoding="utf-8"))
  if isinstance(content, dict) and "runs" in content:
    for i, run in enumerate(_of_kind(list, "runs", content["runs"])):
      trace = _of_kind(dict, f"runs[{i}]", run).get("trace")
      if trace is not None:
        yield _json_source(
          f"runs[{i}].trace", trace, run.get("run"), str(run.get("seed"))
        )
  else:
    if isinstance(content, list):
      content = {"amax": content}
    yield _json_source("", content)


def _json_source(
  where: str, trace: Any, run: str | None = None, seed: str | None = None
) -> _trace_columns.Columns:
  _of_kind(dict, where or "the file", trace)
  prefix = f"{where}." if where else ""
  if "amax" not in trace:
    raise ValueError(f"it must have a list {prefix}amax, got {list(trace)}.")
  count = len(_of_kind(list, f"{prefix}amax", trace["amax"]))
  columns = {}
  for name in _trace_columns.NAMES:
    values = trace.get(name)
    if values is None:
      continue
    if name == "loss_scale" and not isinstance(values, list):
      values = [values] * count
    if len(_of_kind(list, f"{prefix}{name}", values)) != count:
      raise ValueError(
        f"{prefix}{name} must have an entry for each of the {count} of "
        f"{prefix}amax, got {len(values)}."
      )
    columns[name] = values
  return _trace_columns.Columns(
    columns, lambda i, column: f"{prefix}{column}[{i}]", run, seed
  )


def _of_kind(kind: Any, place: str, value: Any) -> Any:
  if not isinstance(value, kind):
    name = "a list" if kind is list else "an object"
    raise ValueError(
      f"{place} must be {name}, got {_trace_columns.shown(value)}."
    )
  return value


def _suffix(path: pathlib.Path) -> str:
  suffix = path.suffix.lower()
  if suffix not in (".csv", ".json"):
    raise ValueError(
      f"{path}: the file's name must end in .csv or .json, got {path.suffix!r}."
    )
  return suffix
