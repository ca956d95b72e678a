"""Rules driven by amax.

Rules that count overflows learn how large S may be by losing steps. The largest
gradient shows the limit in advance, on every step::

  tx = ols.loss_scaling(inner, ols.rules.HeadroomLossScale())

`HeadroomLossScale` keeps a number of bits free above the largest amax of recent
steps, and `LogMaxLossScale` models log2(amax) as normally distributed.
`WarmStart` gives any rule a first S that fits the first step. An activation's
gradient may overflow even if no parameter's does: `ols.hardware.amax_tap`
measures it inside the model.
"""

from optax_lossscale.rules._headroom import HeadroomLossScale
from optax_lossscale.rules._headroom import HeadroomLossScaleState
from optax_lossscale.rules._log_max import LogMaxLossScale
from optax_lossscale.rules._log_max import LogMaxLossScaleState
from optax_lossscale.rules._warm_start import WarmStart
from optax_lossscale.rules._warm_start import WarmStartState

__all__ = [
  "HeadroomLossScale",
  "HeadroomLossScaleState",
  "LogMaxLossScale",
  "LogMaxLossScaleState",
  "WarmStart",
  "WarmStartState",
]
