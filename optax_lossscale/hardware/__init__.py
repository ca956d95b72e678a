"""Devices, and how they treat numbers that do not fit.

Some hardware turns an overflow into inf and some clips it, and an overflow may
leave no trace in the gradients. These functions show what happens::

  check = ols.hardware.probe().check(jnp.float16)
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(), check=check)
"""

from optax_lossscale._step.reasons import FloatStatus
from optax_lossscale.hardware._emulate_saturation import emulate_saturation
from optax_lossscale.hardware._float_status import float_status
from optax_lossscale.hardware._probe import Arithmetic
from optax_lossscale.hardware._probe import Hardware
from optax_lossscale.hardware._probe import probe
from optax_lossscale.hardware._taps import amax_tap
from optax_lossscale.hardware._taps import status_tap

__all__ = [
  "Arithmetic",
  "FloatStatus",
  "Hardware",
  "amax_tap",
  "emulate_saturation",
  "float_status",
  "probe",
  "status_tap",
]
