"""Instruments: how loss scaling goes, and where the gradients are."""

from optax_lossscale._metrics import loss_scale_metrics
from optax_lossscale.instruments._history import History
from optax_lossscale.instruments._print import print_loss_scale
from optax_lossscale.instruments._record import history
from optax_lossscale.instruments._record import record
from optax_lossscale.instruments._record import RecordState

__all__ = [
  "History",
  "RecordState",
  "history",
  "loss_scale_metrics",
  "print_loss_scale",
  "record",
]
