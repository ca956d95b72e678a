"""`check_step`: the laws of a step, proved from its jaxpr and seen in runs."""

from optax_lossscale.instruments.step._check_step import check_step
from optax_lossscale.instruments.step._verdicts import Law
from optax_lossscale.instruments.step._verdicts import StepReport

__all__ = [
  "Law",
  "StepReport",
  "check_step",
]
