"""What a run is: the precision, and how the loss is scaled."""

import dataclasses

import optax_lossscale as ols
from optax_lossscale._precision.precision_schedule import PrecisionSchedule

# What the label of a run is made of, in this order.
PARTS = ("precision", "level", "loss scale", "check", "schedule")


@dataclasses.dataclass(frozen=True)
class Run:
  """One way to train: a precision, a rule of loss scaling, a check, a level.

  Attributes:
    precision: the dtype that the model computes in, or that `level` lowers to.
    loss_scale: the rule as on the command line.
    rule: the rule; None is no loss scaling.
    check: "nonfinite" or "saturated"; None is the one that `loss_scaling` has
      by default, which the label does not name.
    level: of autocast, around a model that computes in float32; None is no
      autocast.
    accelerate: as `precision_schedule` takes it: `precision` and `level` are
      then those of the first part, and the rest is in float32. None is one
      precision throughout.
    target_loss: of the schedule, in its mode "loss".
  """

  precision: str
  loss_scale: str
  rule: ols.LossScale | None
  check: str | None = None
  level: str | None = None
  accelerate: str | None = None
  target_loss: float | None = None

  @property
  def lowest_precision(self) -> str:
    """The lowest dtype in which something is computed; O0 lowers nothing."""
    return "float32" if self.level == "O0" else self.precision

  @property
  def parts(self) -> dict[str, str]:
    """What the label is made of, by what it is."""
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
    """What the run is called in the table, the plot and the files."""
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
