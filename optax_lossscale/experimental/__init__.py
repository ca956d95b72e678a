"""What may change or go in any version.

This module promises nothing. Its functions are tested like all others, but too
few trainings have used them to know that their arguments are right::

  guard = ols.experimental.SpikeGuard(window=64)

`SpikeGuard` finds steps to skip because a loss or a norm is far above the last
ones, and `scale_cotangent` gives a part of a model a loss scale of its own.
"""

from optax_lossscale.experimental._scale_cotangent import scale_cotangent
from optax_lossscale.experimental._spike_guard import SpikeGuard
from optax_lossscale.experimental._spike_guard import SpikeGuardState

__all__ = ["SpikeGuard", "SpikeGuardState", "scale_cotangent"]
