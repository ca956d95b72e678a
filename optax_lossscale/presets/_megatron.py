"""The scalers of Megatron-LM, DeepSpeed and ColossalAI."""

import functools
import math
from typing import Any
from typing import Literal

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._rules.engine import Failure
from optax_lossscale.presets._keys import ConstantKey
from optax_lossscale.presets._keys import int_or_float
from optax_lossscale.presets._keys import Key
from optax_lossscale.presets._keys import one_float32
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale

_DEEPSPEED: dict[str, Any] = {
  "growth_test": "multiple",
  "refill": Argument(
    "consecutive_hysteresis",
    lambda consecutive: frozenset({"clean" if consecutive else "growth"}),
    _arguments.check_flag,
  ),
  "failure": Failure.AT_MINIMUM,
  "notes_failure": Argument("raise_error_at_min_scale"),
  "counts_steps": True,
}
_DEEPSPEED_KEYS: dict[str, object] = {
  "cur_scale": Key("S", float),
  "cur_iter": Key("steps", int),
  "last_overflow_iter": Key("last_overflow", int),
  "scale_window": int,
  "min_scale": int_or_float,
  "delayed_shift": int,
  "cur_hysteresis": Key("overflows_to_shrink", int),
  "consecutive_hysteresis": bool,
  "raise_error_at_min_scale": bool,
  "dynamic": ConstantKey(True),
  "dtype": None,  # torch.float16, an attribute of the object.
}


@preset(
  growth_test="equal",
  min_scale=Argument("min_scale", check=_arguments.check_scale),
  refill=Argument(
    "refill",
    lambda event: frozenset({event}),
    functools.partial(_arguments.check_choice, choices=("growth", "clean")),
  ),
  starts_within_bounds=True,
  saves={
    "scale": Key("S", one_float32),
    "growth_tracker": Key("clean_steps", int),
    "hysteresis_tracker": Key("hysteresis_left", int),
  },
)
def megatron(
  *,
  initial_scale: float = 2.0**32,
  min_scale: float = 1.0,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 1000,
  hysteresis: int = 2,
  refill: Literal["growth", "clean"] = "growth",
) -> PresetLossScale:
  """Megatron-LM's `DynamicGradScaler`, with the defaults of OptimizerConfig.

  S shrinks on the `hysteresis`-th overflow since it last grew, and on each
  further overflow until it grows. Megatron's documentation says "consecutive",
  but in its code a clean step does not reset the count.

  Args:
    min_scale: the floor, at most `initial_scale`.
    refill: the event that resets the count of overflows: "growth", as in the
      code, or "clean", any clean step, as documented. Not in Megatron.

  Examples:
    >>> rule = ols.presets.megatron(initial_scale=8.0)
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale, rule.update(state, overflow=True).loss_scale)
    8.0 4.0

  References:
    megatron-core 0.19.2, megatron/core/optimizer/grad_scaler.py.
  """


@preset(scale=Argument("initial_scale"))
def megatron_constant(*, initial_scale: float) -> PresetLossScale:
  """Megatron-LM's `ConstantGradScaler`: S is fixed, and overflows skip steps.

  Examples:
    >>> print(ols.presets.megatron_constant(initial_scale=8.0).skip)
    True

  References:
    megatron-core 0.19.2, megatron/core/optimizer/grad_scaler.py.
  """


@preset(
  **_DEEPSPEED,
  growth_factor=2.0,
  backoff_factor=0.5,
  initial_clean_steps=-1,
  saves={**_DEEPSPEED_KEYS, "scale_factor": ConstantKey(2.0)},
)
def deepspeed(
  *,
  init_scale: float = 2.0**16,
  scale_window: int = 1000,
  min_scale: float = 1.0,
  delayed_shift: int = 2,
  consecutive_hysteresis: bool = False,
  raise_error_at_min_scale: bool = True,
) -> PresetLossScale:
  """DeepSpeed's `DynamicLossScaler` since 0.17.1, with the config's defaults.

  S halves on the `delayed_shift`-th overflow since it last grew and on each
  further one. S first doubles after `scale_window` + 1 clean steps in a row,
  counted from the start or an overflow, then after each `scale_window` more. If
  the first S is below `min_scale`, the first shrink raises it to that.

  Examples:
    >>> rule = ols.presets.deepspeed(init_scale=8.0, scale_window=2)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...   state = rule.update(state, overflow=False)
    >>> print(state.loss_scale)
    16.0

  References:
    DeepSpeed 0.19.8, deepspeed/runtime/fp16/loss_scaler.py.
  """


@preset(
  **_DEEPSPEED,
  saves={**_DEEPSPEED_KEYS, "scale_factor": float},
)
def deepspeed_legacy(
  *,
  init_scale: float = 2.0**32,
  scale_factor: float = 2.0,
  scale_window: int = 1000,
  min_scale: float = 1,
  delayed_shift: int = 1,
  consecutive_hysteresis: bool = False,
  raise_error_at_min_scale: bool = True,
) -> PresetLossScale:
  """DeepSpeed's `DynamicLossScaler` before 0.17.1.

  Like `deepspeed`, but every growth waits for `scale_window` clean steps, and
  the factor is an argument.

  Examples:
    >>> rule = ols.presets.deepspeed_legacy(init_scale=8.0, scale_window=1)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    16.0

  References:
    DeepSpeed 0.17.0, deepspeed/runtime/fp16/loss_scaler.py.
  """


@preset(
  growth_test="equal",
  max_scale=Argument(
    "max_scale",
    lambda bound: bound or math.inf,
    _arguments.check_not_negative,
    is_optional=True,
  ),
  refill=frozenset({"growth"}),
  starts_within_bounds=True,
  saves={
    "scale": Key("S", one_float32),
    "growth_factor": int_or_float,
    "backoff_factor": float,
    "hysteresis": int,
  },
)
def colossalai(
  *,
  initial_scale: float = 2.0**16,
  growth_factor: float = 2,
  backoff_factor: float = 0.5,
  growth_interval: int = 1000,
  min_scale: float | None = None,
  max_scale: float | None = None,
  hysteresis: int = 2,
) -> PresetLossScale:
  """ColossalAI's `DynamicGradScaler`.

  Like `megatron`, but with a ceiling. The first S lies between the bounds.

  Examples:
    >>> rule = ols.presets.colossalai(growth_interval=1, max_scale=2.0**16)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    65536.0

  References:
    ColossalAI 0.5.0,
    colossalai/amp/naive_amp/grad_scaler/dynamic_grad_scaler.py.
  """
