"""The effect of a precision on a function: errors, dtypes, an overflow."""

from optax_lossscale.instruments.function._gradient_error import gradient_error
from optax_lossscale.instruments.function._gradient_error import (
  GradientErrorReport,
)
from optax_lossscale.instruments.function._precision_report import (
  precision_report,
)
from optax_lossscale.instruments.function._precision_report import (
  PrecisionReport,
)
from optax_lossscale.instruments.function._tune_precision import tune_precision
from optax_lossscale.instruments.function._tune_precision import TunedScope
from optax_lossscale.instruments.function._tune_precision import TuningReport
from optax_lossscale.instruments.function._where_overflow import Place
from optax_lossscale.instruments.function._where_overflow import where_overflow

__all__ = [
  "GradientErrorReport",
  "Place",
  "PrecisionReport",
  "TunedScope",
  "TuningReport",
  "gradient_error",
  "precision_report",
  "tune_precision",
  "where_overflow",
]
