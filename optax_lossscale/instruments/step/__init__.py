"""`check_step`: the laws of a step, proved from its jaxpr and seen in runs."""

from optax_lossscale.instruments.step._check_step import check_step
from optax_lossscale.instruments.step._findings import Law
from optax_lossscale.instruments.step._findings import StepReport

__all__ = [
  "Law",
  "StepReport",
  "check_step",
]
