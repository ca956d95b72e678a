"""The earlier scalers for JAX: Flax's and jmp's."""

import numpy as np

from optax_lossscale._base import arguments as _arguments
from optax_lossscale.presets._keys import Key
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale


@preset(
  init_scale=Argument("scale"),
  # Flax compares the count before incrementing it.
  growth_interval=Argument(
    "growth_interval", lambda steps: min(steps + 1, _arguments.LARGEST_COUNT)
  ),
  growth_test="equal",
  min_scale=Argument("minimum_scale", is_optional=True),
  max_scale=_arguments.LARGEST_SCALE,
  saves={
    "fin_steps": Key("clean_steps", np.int32),
    "scale": Key("S", np.float32),
  },
)
def flax(
  *,
  scale: float = 65536.0,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 2000,
  minimum_scale: float | None = 2.0**-126,
) -> PresetLossScale:
  """Flax's `DynamicScale`.

  S shrinks on every overflow and grows after `growth_interval` + 1 clean steps
  in a row, although Flax's documentation says `growth_interval`.

  Args:
    growth_factor: multiplies S on growth, up to the largest float32; above 1.
    growth_interval: the clean steps before S grows, minus one.

  Examples:
    >>> rule = ols.presets.flax(growth_interval=1)
    >>> state = rule.update(rule.init(), overflow=False)
    >>> print(state.loss_scale, rule.update(state, overflow=False).loss_scale)
    65536.0 131072.0

  References:
    Flax 0.12.12, flax/training/dynamic_scale.py.
  """


@preset(
  init_scale=Argument("loss_scale"),
  growth_test="multiple",
  saves={
    "loss_scale": Key("S", np.float32),
    "counter": Key("window_steps", np.int32),
  },
)
def jmp(
  *,
  loss_scale: float,
  period: int = 2000,
  factor: float = 2,
  min_loss_scale: float = 1.0,
) -> PresetLossScale:
  """Jmp's `DynamicLossScale`.

  S shrinks on every overflow and grows after `period` clean steps in a row.
  Under jit, jmp drops `min_loss_scale` and uses 1; here the floor is kept.

  Examples:
    >>> rule = ols.presets.jmp(loss_scale=2.0**15, period=1)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    65536.0

  References:
    jmp 0.0.4, jmp/_src/loss_scale.py.
  """
