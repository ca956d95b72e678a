"""Instruments that show how loss scaling behaves and where gradients lie."""

from optax_lossscale.instruments._advise import Advice
from optax_lossscale.instruments._advise import advise
from optax_lossscale.instruments._check_step import check_step
from optax_lossscale.instruments._compile_report import compile_report
from optax_lossscale.instruments._compile_report import CompiledStep
from optax_lossscale.instruments._compile_report import CompileReport
from optax_lossscale.instruments._gradient_error import gradient_error
from optax_lossscale.instruments._gradient_error import GradientErrorReport
from optax_lossscale.instruments._history import get_history
from optax_lossscale.instruments._history import History
from optax_lossscale.instruments._history import record
from optax_lossscale.instruments._history import RecordState
from optax_lossscale.instruments._history_files import read_history
from optax_lossscale.instruments._history_files import write_history
from optax_lossscale.instruments._leaf_stats import leaf_stats
from optax_lossscale.instruments._leaf_stats import LeafStats
from optax_lossscale.instruments._precision_report import precision_report
from optax_lossscale.instruments._precision_report import PrecisionReport
from optax_lossscale.instruments._print import print_loss_scale
from optax_lossscale.instruments._replay import replay
from optax_lossscale.instruments._replay import ReplayedRun
from optax_lossscale.instruments._shares import swallowed_share
from optax_lossscale.instruments._tune_precision import tune_precision
from optax_lossscale.instruments._tune_precision import TunedScope
from optax_lossscale.instruments._tune_precision import TuningReport
from optax_lossscale.instruments._verdicts import Law
from optax_lossscale.instruments._verdicts import StepReport
from optax_lossscale.instruments._where_overflow import Place
from optax_lossscale.instruments._where_overflow import where_overflow

__all__ = [
  "Advice",
  "CompileReport",
  "CompiledStep",
  "GradientErrorReport",
  "History",
  "Law",
  "LeafStats",
  "Place",
  "PrecisionReport",
  "RecordState",
  "ReplayedRun",
  "StepReport",
  "TunedScope",
  "TuningReport",
  "advise",
  "check_step",
  "compile_report",
  "get_history",
  "gradient_error",
  "leaf_stats",
  "precision_report",
  "print_loss_scale",
  "read_history",
  "record",
  "replay",
  "swallowed_share",
  "tune_precision",
  "where_overflow",
  "write_history",
]
