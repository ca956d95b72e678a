"""Experiments.

This module promises nothing: any version may change or remove its names.
`SpikeGuard` finds steps to skip because a loss or a norm is far above the last
ones, and `scale_cotangent` gives a part of a model a loss scale of its own::

  guard = ols.experimental.SpikeGuard(window=64)
"""

from optax_lossscale.experimental._scale_cotangent import scale_cotangent
from optax_lossscale.experimental._spike_guard import SpikeGuard
from optax_lossscale.experimental._spike_guard import SpikeGuardState

__all__ = ["SpikeGuard", "SpikeGuardState", "scale_cotangent"]
