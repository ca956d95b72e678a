"""What differs between systems: one row each, in columns of the one engine."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._rules.engine import Failure


@dataclasses.dataclass(frozen=True)
class Argument:
  """A cell that the user fills, by an argument of the system's own.

  Attributes:
    name: the argument's name.
    convert: what makes the cell of its value; None for the value itself.
    check: what refuses a bad value; None for what its column checks.
    is_optional: whether None leaves the cell empty.
  """

  name: str
  convert: Callable[[Any], Any] | None = None
  check: Callable[[str, Any], Any] | None = None
  is_optional: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
  """A system.

  Attributes:
    columns: fields of the engine, with a constant or an `Argument` each.
    least_init_scale: the system refuses to start below this.
    starts_within_bounds: the system refuses to start beyond its own bounds.
  """

  columns: Mapping[str, Any]
  least_init_scale: float = 0.0
  starts_within_bounds: bool = False


def row(
  *,
  least_init_scale: float = 0.0,
  starts_within_bounds: bool = False,
  **columns: Any,
) -> Row:
  """Returns a row; the columns are fields of `Engine`."""
  return Row(columns, least_init_scale, starts_within_bounds)


def inverse(factor: float) -> float:
  """Returns 1 / factor."""
  return 1 / factor


def _one_more(steps: int) -> int:
  return min(steps + 1, arguments.LARGEST_COUNT)


def _unless_zero(bound: float) -> float:
  return bound or math.inf


def _just_above(bound: float) -> float:
  """Returns the float32 above a bound: S < it, if and only if S <= bound."""
  nearest = np.float32(bound)
  if float(nearest) > bound:
    return float(nearest)
  return float(np.nextafter(nearest, np.float32(np.inf)))


def _refilled_by(event: str) -> frozenset[str]:
  return frozenset({event})


def _deepspeed_refill(consecutive: bool) -> frozenset[str]:
  return frozenset({"clean" if consecutive else "growth"})


def _npu_growth_below(incr_ratio: float) -> float:
  return 3.4e38 / incr_ratio


_TORCH: dict[str, Any] = {
  "init_scale": Argument("init_scale"),
  "growth_factor": Argument("growth_factor"),
  "backoff_factor": Argument("backoff_factor"),
  "growth_interval": Argument("growth_interval"),
  "growth_test": "equal",
}
_MEGATRON: dict[str, Any] = _TORCH | {
  "init_scale": Argument("initial_scale"),
  "hysteresis": Argument("hysteresis"),
}
_DEEPSPEED: dict[str, Any] = {
  "init_scale": Argument("init_scale"),
  "growth_interval": Argument("scale_window"),
  "hysteresis": Argument("delayed_shift"),
  "min_scale": Argument("min_scale"),
  "growth_test": "multiple",
  "refill": Argument(
    "consecutive_hysteresis", _deepspeed_refill, check=arguments.check_flag
  ),
  "failure": Failure.AT_MINIMUM,
  "notes_failure": Argument("raise_error_at_min_scale"),
  "counts_steps": True,
}
_FAIRSEQ: dict[str, Any] = {
  "init_scale": Argument("init_scale"),
  "growth_factor": Argument("scale_factor"),
  "backoff_factor": Argument("scale_factor"),
  "backoff_divides": True,
  "growth_interval": Argument("scale_window"),
  "growth_test": "multiple",
  "min_scale": Argument("threshold", is_optional=True),
  "tolerance": Argument("tolerance"),
}
_TF_EXPONENTIAL: dict[str, Any] = {
  "init_scale": Argument("init_loss_scale"),
  "growth_factor": Argument("incr_ratio"),
  "backoff_factor": Argument("decr_ratio"),
  "growth_interval": Argument("incr_every_n_steps"),
  "hysteresis": Argument("decr_every_n_nan_or_inf"),
  "refill": frozenset({"growth", "backoff"}),
  "min_scale": 1.0,
}
_PADDLE: dict[str, Any] = {
  "init_scale": Argument("init_loss_scaling"),
  "growth_factor": Argument("incr_ratio"),
  "backoff_factor": Argument("decr_ratio"),
  "growth_interval": Argument("incr_every_n_steps"),
  "growth_test": "equal",
  "hysteresis": Argument("decr_every_n_nan_or_inf"),
  "shrink_test": "equal",
  "refill": frozenset({"clean", "backoff"}),
}

SYSTEMS: dict[str, Row] = {
  "torch": row(**_TORCH),
  "torch_sharded": row(**_TORCH),
  "megatron": row(
    **_MEGATRON,
    min_scale=Argument("min_scale", check=arguments.check_scale),
    refill=Argument("refill", _refilled_by),
    starts_within_bounds=True,
  ),
  "colossalai": row(
    **_MEGATRON,
    min_scale=Argument("min_scale", is_optional=True),
    max_scale=Argument(
      "max_scale",
      _unless_zero,
      check=arguments.check_not_negative,
      is_optional=True,
    ),
    refill=frozenset({"growth"}),
    starts_within_bounds=True,
  ),
  "deepspeed": row(
    **_DEEPSPEED,
    growth_factor=2.0,
    backoff_factor=0.5,
    initial_clean_steps=-1,
  ),
  "deepspeed_legacy": row(
    **_DEEPSPEED,
    growth_factor=Argument("scale_factor"),
    backoff_factor=Argument("scale_factor"),
    backoff_divides=True,
  ),
  "apex": row(
    init_scale=Argument("init_scale"),
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=Argument("scale_window"),
    growth_test="equal",
    min_scale=Argument("min_loss_scale", is_optional=True),
    max_scale=Argument("max_loss_scale"),
  ),
  "apex_hysteresis": row(
    **_TORCH,
    hysteresis=Argument("hysteresis"),
  ),
  "fairseq": row(
    **_FAIRSEQ,
    hold_below=Argument("min_loss_scale", _just_above),
    failure=Failure.BELOW_MINIMUM,
  ),
  "metaseq": row(
    **_FAIRSEQ,
    hold_below=Argument("min_loss_scale"),
    interval_factor=Argument("scale_factor"),
  ),
  "tf_exponential": row(**_TF_EXPONENTIAL),
  "npu_exponential": row(
    **_TF_EXPONENTIAL,
    growth_below=Argument("incr_ratio", _npu_growth_below),
  ),
  "tensorflow": row(
    init_scale=Argument("initial_loss_scale"),
    growth_factor=Argument("multiplier"),
    backoff_factor=Argument("multiplier"),
    backoff_divides=True,
    growth_interval=Argument("increment_period"),
    min_scale=1.0,
  ),
  "keras": row(
    init_scale=Argument("initial_scale"),
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=Argument("dynamic_growth_steps"),
    growth_test="equal",
  ),
  "mindspore": row(
    init_scale=Argument("init_loss_scale"),
    growth_factor=Argument("scale_factor"),
    backoff_factor=Argument("scale_factor", inverse),
    growth_interval=Argument("scale_window"),
    growth_test="multiple",
    min_scale=1.0,
    failure=Failure.TOO_MANY_OVERFLOWS,
    counts_steps=True,
    least_init_scale=1.0,
  ),
  "mindspore_amp": row(
    init_scale=Argument("scale_value"),
    growth_factor=Argument("scale_factor"),
    backoff_factor=Argument("scale_factor"),
    backoff_divides=True,
    growth_interval=Argument("scale_window"),
    growth_test="multiple",
    min_scale=1.0,
    least_init_scale=1.0,
  ),
  "mindspore_cell": row(
    init_scale=Argument("loss_scale_value"),
    growth_factor=Argument("scale_factor"),
    backoff_factor=Argument("scale_factor", inverse),
    growth_interval=Argument("scale_window"),
    min_scale=1.0,
    counts_steps=True,
  ),
  "paddle": row(**_PADDLE),
  "paddle_op": row(**_PADDLE, min_scale=1.0),
  "flax": row(
    init_scale=Argument("scale"),
    growth_factor=Argument("growth_factor"),
    backoff_factor=Argument("backoff_factor"),
    # It compares before it counts.
    growth_interval=Argument("growth_interval", _one_more),
    growth_test="equal",
    min_scale=Argument("minimum_scale", is_optional=True),
    max_scale=arguments.LARGEST_SCALE,
  ),
  "jmp": row(
    init_scale=Argument("loss_scale"),
    growth_factor=Argument("factor"),
    backoff_factor=Argument("factor"),
    backoff_divides=True,
    growth_interval=Argument("period"),
    growth_test="multiple",
    min_scale=Argument("min_loss_scale"),
  ),
}
