"""PaddlePaddle's scalers."""

from typing import Any

from optax_lossscale.presets._keys import Key
from optax_lossscale.presets._keys import one_float32
from optax_lossscale.presets._keys import one_int32
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale

_PADDLE: dict[str, Any] = {
  "growth_test": "equal",
  "shrink_test": "equal",
  "refill": frozenset({"clean", "backoff"}),
}


@preset(
  **_PADDLE,
  enabled=Argument("enable"),
  moves=Argument("use_dynamic_loss_scaling"),
  saves={
    "scale": Key("S", one_float32),
    "incr_ratio": float,
    "decr_ratio": float,
    "incr_every_n_steps": int,
    "decr_every_n_nan_or_inf": int,
    "incr_count": Key("clean_steps", int),
    "decr_count": Key("overflows", int),
    "use_dynamic_loss_scaling": bool,
  },
)
def paddle(
  *,
  enable: bool = True,
  init_loss_scaling: float = 2.0**16,
  incr_ratio: float = 2.0,
  decr_ratio: float = 0.5,
  incr_every_n_steps: int = 2000,
  decr_every_n_nan_or_inf: int = 1,
  use_dynamic_loss_scaling: bool = True,
) -> PresetLossScale:
  """PaddlePaddle's `paddle.amp.GradScaler`, for dygraph mode.

  S shrinks on the `decr_every_n_nan_or_inf`-th overflow in a row. A shrink or a
  clean step resets the count, although the documentation says "accumulated".

  Examples:
    >>> rule = ols.presets.paddle(decr_every_n_nan_or_inf=2)
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale, rule.update(state, overflow=True).loss_scale)
    65536.0 32768.0

  References:
    PaddlePaddle 3.3.1, python/paddle/amp/grad_scaler.py.
  """


@preset(
  **_PADDLE,
  min_scale=1.0,
  saves={
    "loss_scaling_0": Key("S", one_float32),
    "num_good_steps_0": Key("clean_steps", one_int32),
    "num_bad_steps_0": Key("overflows", one_int32),
  },
)
def paddle_op(
  *,
  init_loss_scaling: float = 2.0**16,
  incr_every_n_steps: int = 2000,
  decr_every_n_nan_or_inf: int = 1,
  incr_ratio: float = 2.0,
  decr_ratio: float = 0.5,
) -> PresetLossScale:
  """PaddlePaddle's operator `update_loss_scaling`, for static graphs.

  Like `paddle`, but with a floor of 1. The defaults are those of
  `paddle.static.amp.decorate(optimizer)`. With `use_pure_fp16`, and in the
  operator's older uses, they are 2**15, 1000, 2, 2.0 and 0.8. The operator sets
  overflowing gradients to 0 and lets the optimizer run; here the step is
  skipped.

  Examples:
    >>> rule = ols.presets.paddle_op(init_loss_scaling=1.0)
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    1.0

  References:
    PaddlePaddle 3.3.1, paddle/phi/kernels/impl/amp_kernel_impl.h and
    python/paddle/static/amp/decorator.py.
  """
