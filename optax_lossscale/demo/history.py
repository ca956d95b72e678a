"""What is kept of the runs: a record of each step, a summary of each run."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
from typing import Any
from typing import NamedTuple


class Record(NamedTuple):
  """One training step. The last four are None without loss scaling.

  In a run with a precision schedule only what is float16 is scaled, and the
  loss scale alone is None elsewhere.

  Attributes:
    run: the run's label.
    seed: the run's seed.
    step: from 1.
    precision: the lowest dtype in which the step was computed.
    loss: of the step's batch, before the step.
    loss_scale: the loss scale S that the step used.
    overflow: whether its gradients were not usable.
    skipped: whether the optimizer did not run.
    amax: the largest absolute value among its scaled gradients.
  """

  run: str
  seed: int
  step: int
  precision: str
  loss: float
  loss_scale: float | None = None
  overflow: bool | None = None
  skipped: bool | None = None
  amax: float | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
  """One run with one seed, as far as it came.

  Attributes:
    run: the run's label.
    seed: the run's seed.
    loss: of the last step.
    held_out: the score after the last step; None if it did not come so far.
    applied_steps: steps on which the optimizer ran.
    skipped_steps: steps on which it did not.
    loss_scale: the last S that a step used; None without loss scaling.
    switched_after: the last step before the precision changed; None if it did
      not.
  """

  run: str
  seed: int
  loss: float
  held_out: float | None
  applied_steps: int
  skipped_steps: int
  loss_scale: float | None
  switched_after: int | None = None


def by_run(records: Iterable[Record]) -> dict[tuple[str, int], list[Record]]:
  """Returns the records of each run and seed, in the order they came."""
  runs: dict[tuple[str, int], list[Record]] = {}
  for record in records:
    runs.setdefault((record.run, record.seed), []).append(record)
  return runs


def summarize(
  records: Iterable[Record], held_out: Mapping[tuple[str, int], float]
) -> list[Summary]:
  """Returns a summary of each run and seed that has a record."""
  return [
    Summary(
      run=run,
      seed=seed,
      loss=steps[-1].loss,
      held_out=held_out.get((run, seed)),
      applied_steps=sum(not step.skipped for step in steps),
      skipped_steps=sum(bool(step.skipped) for step in steps),
      loss_scale=next(
        (
          step.loss_scale
          for step in reversed(steps)
          if step.loss_scale is not None
        ),
        None,
      ),
      switched_after=switched_after(steps),
    )
    for (run, seed), steps in by_run(records).items()
  ]


def switched_after(steps: Iterable[Record]) -> int | None:
  """Returns the last step before the precision changed; None if it did not."""
  for before, after in itertools.pairwise(steps):
    if before.precision != after.precision:
      return before.step
  return None


def write_csv(path: pathlib.Path, records: Iterable[Record]) -> None:
  """Writes a line for each record; what is None is left empty."""
  with (
    replacing(path) as temporary,
    temporary.open("w", newline="", encoding="utf-8") as file,
  ):
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Record._fields)
    for record in records:
      writer.writerow(
        int(value) if isinstance(value, bool) else value for value in record
      )


def write_json(
  path: pathlib.Path,
  configuration: Mapping[str, Any],
  summaries: Sequence[Summary],
  records: Iterable[Record] = (),
) -> None:
  """Writes the configuration, the summaries and the traces.

  JSON has no inf or NaN, so these are the strings "inf", "-inf" and "nan".
  """
  steps = by_run(records)
  runs = [
    {key: _jsonable(value) for key, value in dataclasses.asdict(run).items()}
    | {"trace": _trace(steps.get((run.run, run.seed), ()))}
    for run in summaries
  ]
  text = json.dumps({**configuration, "runs": runs}, indent=2, allow_nan=False)
  # A list of numbers on one line, instead of a line for each. Inside a string
  # there is no line break.
  text = re.sub(
    r"\[\n\s*([^][{}]*?)\s*\]",
    lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]",
    text,
  )
  with replacing(path) as temporary:
    temporary.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a temporary path that becomes `path` when all went well."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    yield temporary
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


def _trace(steps: Iterable[Record]) -> dict[str, list[Any]] | None:
  """Returns the columns of what was scaled; None if nothing was."""
  scaled = [s for s in steps if None not in (s.loss_scale, s.amax)]
  if not scaled:
    return None
  return {
    "step": [s.step for s in scaled],
    "loss_scale": [s.loss_scale for s in scaled],
    "overflow": [int(bool(s.overflow)) for s in scaled],
    "amax": [_jsonable(s.amax) for s in scaled],
  }


def _jsonable(value: Any) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value
