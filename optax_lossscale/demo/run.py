"""A run: its configuration, its steps and result, and the files of several."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import csv
import dataclasses
import itertools
import json
import os
import pathlib
import re
from typing import Any
from typing import NamedTuple

import numpy as np

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale._precision.precision_schedule import PrecisionSchedule
from optax_lossscale.instruments import history_files

# The parts of a label, in this order.
PARTS = ("precision", "level", "loss scale", "check", "schedule")

# The figures of a result in a file, in this order.
_FIGURES = (
  "run",
  "seed",
  "loss",
  "start",
  "held_out",
  "applied_steps",
  "skipped_steps",
  "loss_scale",
  "switched_after",
)


@dataclasses.dataclass(frozen=True)
class Run:
  """One way to train: a precision, a rule of loss scaling, a check, a level."""

  # The dtype that the model computes in, or that `level` lowers to.
  precision: str
  # The rule as on the command line, and the rule; None disables loss scaling.
  loss_scale: str
  rule: ols.LossScale | None
  # "nonfinite" or "saturated". None, which the label does not name, is what
  # `loss_scaling` has by default.
  check: str | None = None
  # Of autocast, around a model that computes in float32.
  level: str | None = None
  # As `precision_schedule` takes it: `precision` and `level` are then those of
  # the first part, and the rest is in float32.
  accelerate: str | None = None
  target_loss: float | None = None

  @property
  def lowest_precision(self) -> str:
    """The lowest dtype in which something is computed; O0 lowers nothing."""
    return "float32" if self.level == "O0" else self.precision

  @property
  def parts(self) -> dict[str, str]:
    """The parts of the label, by their names."""
    parts = (
      self.lowest_precision,
      self.level,
      self.loss_scale,
      self.check,
      self.accelerate,
    )
    return {
      name: part
      for name, part in zip(PARTS, parts, strict=True)
      if part is not None
    }

  @property
  def label(self) -> str:
    """The name of the run in the table, the plot and the files."""
    return ", ".join(self.parts.values())

  def make_schedule(self, steps: int) -> PrecisionSchedule | None:
    """Returns its precision schedule, if it has one."""
    if self.accelerate is None:
      return None
    return ols.precision_schedule(
      self.accelerate,
      total_steps=steps if self.target_loss is None else None,
      target_loss=self.target_loss,
    )


class Step(NamedTuple):
  """One training step. The last four are None without loss scaling.

  A precision schedule scales only its float16 steps: on the others the loss
  scale alone is None.
  """

  step: int  # From 1.
  precision: str  # The lowest dtype in which it was computed.
  loss: float  # Of its batch, before the step.
  loss_scale: float | None = None  # The S that it used.
  overflow: bool | None = None
  skipped: bool | None = None
  amax: float | None = None


@dataclasses.dataclass
class Result:
  """One run with one seed: its steps so far, and its scores."""

  run: str  # Its label.
  seed: int
  steps: list[Step] = dataclasses.field(default_factory=list)
  held_out: float | None = None  # The score after the last step.
  start: float | None = None  # The score before the first step.

  @property
  def loss(self) -> float:
    """Of the last step."""
    return self.steps[-1].loss

  @property
  def skipped_steps(self) -> int:
    """Steps on which the optimizer did not run."""
    return sum(bool(step.skipped) for step in self.steps)

  @property
  def applied_steps(self) -> int:
    """Steps on which it did."""
    return len(self.steps) - self.skipped_steps

  @property
  def loss_scale(self) -> float | None:
    """The last S that a step used."""
    used = [x.loss_scale for x in self.steps if x.loss_scale is not None]
    return used[-1] if used else None

  @property
  def switched_after(self) -> int | None:
    """The last step before the precision changed."""
    for before, after in itertools.pairwise(self.steps):
      if before.precision != after.precision:
        return before.step
    return None

  @property
  def history(self) -> instruments.History:
    """The steps that were scaled."""
    scaled = [x for x in self.steps if None not in (x.loss_scale, x.amax)]
    return instruments.History(
      step=np.array([x.step for x in scaled], np.int64),
      loss_scale=np.array([x.loss_scale for x in scaled], np.float32),
      amax=np.array([x.amax for x in scaled], np.float32),
      overflow=np.array([bool(x.overflow) for x in scaled], bool),
    )


def write_csv(path: pathlib.Path, results: Iterable[Result]) -> None:
  """Writes a line for each step; what is None is left empty."""
  with (
    replacing(path) as temporary,
    temporary.open("w", newline="", encoding="utf-8") as file,
  ):
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("run", "seed", *Step._fields))
    for result in results:
      for step in result.steps:
        values = (int(x) if isinstance(x, bool) else x for x in step)
        writer.writerow((result.run, result.seed, *values))


def write_json(
  path: pathlib.Path,
  configuration: Mapping[str, Any],
  results: Iterable[Result],
) -> None:
  """Writes the configuration, and the figures and the history of each run."""
  runs = [_summary(result) for result in results]
  text = json.dumps({**configuration, "runs": runs}, indent=2, allow_nan=False)
  # A list of numbers on one line, instead of a line for each. A string never
  # contains a line break.
  text = re.sub(
    r"\[\n\s*([^][{}]*?)\s*\]",
    lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]",
    text,
  )
  with replacing(path) as temporary:
    temporary.write_text(text + "\n", encoding="utf-8")


def _summary(result: Result) -> dict[str, Any]:
  columns = history_files.as_columns(result.history)
  columns["amax"] = [history_files.as_json(x) for x in columns["amax"]]
  return {
    **{name: history_files.as_json(getattr(result, name)) for name in _FIGURES},
    "history": columns if columns["step"] else None,
  }


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a temporary path that becomes `path` when all went well."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    yield temporary
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)
