"""Instruments that show how loss scaling behaves and where gradients lie."""

import typing as _typing

from optax_lossscale._base import doors as _doors

if _typing.TYPE_CHECKING:
  from optax_lossscale.compiled import *
  from optax_lossscale.instruments.function import *
  from optax_lossscale.instruments.run import *
  from optax_lossscale.instruments.step import *

_ROOMS = {
  "Advice": ".run",
  "CompileReport": "..compiled",
  "CompiledStep": "..compiled",
  "GradientErrorReport": ".function",
  "History": ".run",
  "Law": ".step",
  "LeafStats": ".run",
  "Place": ".function",
  "PrecisionReport": ".function",
  "RecordState": ".run",
  "ReplayedRun": ".run",
  "StepReport": ".step",
  "TunedScope": ".function",
  "TuningReport": ".function",
  "advise": ".run",
  "check_step": ".step",
  "compile_report": "..compiled",
  "get_history": ".run",
  "gradient_error": ".function",
  "leaf_stats": ".run",
  "precision_report": ".function",
  "print_loss_scale": ".run",
  "read_history": ".run",
  "record": ".run",
  "replay": ".run",
  "swallowed_share": ".run",
  "tune_precision": ".function",
  "where_overflow": ".function",
  "write_history": ".run",
}

if not _typing.TYPE_CHECKING:  # Type checkers read the rooms themselves.
  __all__ = sorted(_ROOMS)
  __getattr__ = _doors.open_door(__name__, _ROOMS)


def __dir__() -> list[str]:
  return sorted(_ROOMS)
