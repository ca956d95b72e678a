"""The scalers of fairseq and metaseq."""

import numpy as np

from optax_lossscale._rules.engine import Failure
from optax_lossscale.presets._keys import Key
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale

_FAIRSEQ_KEYS: dict[str, object] = {"loss_scale": Key("S", float)}


def _just_above(bound: float) -> float:
  """Returns the next float32 above a bound. S is below it iff S <= bound."""
  nearest = np.float32(bound)
  if float(nearest) > bound:
    return float(nearest)
  return float(np.nextafter(nearest, np.float32(np.inf)))


@preset(
  growth_test="multiple",
  hold_below=Argument("min_loss_scale", _just_above),
  failure=Failure.BELOW_MINIMUM,
  saves=_FAIRSEQ_KEYS,
)
def fairseq(
  *,
  init_scale: float = 2.0**15,
  scale_factor: float = 2.0,
  scale_window: int = 2000,
  tolerance: float = 0.0,
  threshold: float | None = None,
  min_loss_scale: float = 1e-4,
) -> PresetLossScale:
  """Fairseq's `DynamicLossScaler`.

  S shrinks on an overflow if the overflows since its last shrink, divided by
  the steps since it last moved, are at least `tolerance`. It grows after every
  `scale_window` clean steps in a row. If S would shrink to `min_loss_scale` or
  less, fairseq ends the run; here S stays the same and `raise_if_failed`
  raises. If the factor is not a power of two, the run may end one overflow
  earlier or later.

  Args:
    min_loss_scale: S stays above this.

  Examples:
    >>> rule = ols.presets.fairseq(init_scale=8.0, tolerance=0.5)
    >>> state = rule.init()
    >>> for overflow in (False, False, True, True):
    ...   state = rule.update(state, overflow)
    >>> print(state.loss_scale)
    4.0

  References:
    fairseq 0.12.2, fairseq/optim/dynamic_loss_scaler.py.
  """


@preset(
  growth_factor=Argument("scale_factor"),
  growth_test="multiple",
  hold_below=Argument("min_loss_scale"),
  interval_factor=Argument("scale_factor"),
  saves=_FAIRSEQ_KEYS,
)
def metaseq(
  *,
  init_scale: float = 4.0,
  scale_factor: float = 2.0,
  scale_window: int = 256,
  tolerance: float = 0.0,
  threshold: float | None = None,
  min_loss_scale: float = 2.0**-5,
) -> PresetLossScale:
  """Metaseq's `DynamicLossScaler`.

  Like `fairseq`, but `scale_window` moves with S. If S would shrink below
  `min_loss_scale`, S stays the same and the run goes on. S and the window are
  float32 here. With a factor such as 1.1, whose windows must be rounded, growth
  may come on a different step.

  Args:
    scale_factor: multiplies or divides S and the window; above 1.
    scale_window: S first grows after this many clean steps in a row.
    min_loss_scale: S does not shrink below this.

  Examples:
    >>> rule = ols.presets.metaseq(scale_window=1)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...   state = rule.update(state, overflow=False)
    >>> print(state.loss_scale, state.growth_interval)
    16.0 4.0

  References:
    metaseq 0ba5657, metaseq/optim/dynamic_loss_scaler.py.
  """
