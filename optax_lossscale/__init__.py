"""Loss scaling for JAX, as an optax gradient transformation.

In float16 small gradients become 0. Loss scaling multiplies the loss by S
before the backward pass and divides the gradients by S after it:

  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  opt_state = tx.init(params)

  loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)

If a gradient overflowed, the updates are -0.0, the optimizer's state stays bit
for bit, and S shrinks; after a while without overflow it grows.
"""

import importlib
from typing import Any

from optax_lossscale import presets
from optax_lossscale._accumulation import accumulated_value_and_grad
from optax_lossscale._checks import nonfinite
from optax_lossscale._checks import saturated
from optax_lossscale._devices import make_varying
from optax_lossscale._devices import pmean_gradients
from optax_lossscale._failures import raise_if_failed
from optax_lossscale._gradients import scale_loss
from optax_lossscale._gradients import scaled_value_and_grad
from optax_lossscale._gradients import unscale
from optax_lossscale._loss_scaling import loss_scaling
from optax_lossscale._metrics import loss_scale_metrics
from optax_lossscale._rules import DynamicLossScale
from optax_lossscale._rules import FixedLossScale
from optax_lossscale._rules import LossScale
from optax_lossscale._scale_cotangent import scale_cotangent
from optax_lossscale._select import select_on_skip
from optax_lossscale._state import get_loss_scale
from optax_lossscale._state import LossScalingState
from optax_lossscale._status_tap import status_tap
from optax_lossscale.jaxpr import autocast
from optax_lossscale.jaxpr import float_status
from optax_lossscale.jaxpr import saturating
from optax_lossscale.precision._accelerate_train_mode import precision_schedule
from optax_lossscale.precision._master_weights import master_weights
from optax_lossscale.precision._policy import Policy
from optax_lossscale.precision._policy_names import get_policy

__version__ = "0.1.0"

__all__ = [
  "DynamicLossScale",
  "FixedLossScale",
  "LossScale",
  "LossScalingState",
  "Policy",
  "accumulated_value_and_grad",
  "autocast",
  "float_status",
  "get_loss_scale",
  "get_policy",
  "loss_scale_metrics",
  "loss_scaling",
  "make_varying",
  "master_weights",
  "nonfinite",
  "pmean_gradients",
  "precision_schedule",
  "presets",
  "raise_if_failed",
  "saturated",
  "saturating",
  "scale_cotangent",
  "scale_loss",
  "scaled_value_and_grad",
  "select_on_skip",
  "status_tap",
  "unscale",
]

# Modules that load when they are first used: a program needs few of them, and
# some load Flax or matplotlib.
_ON_DEMAND = frozenset(
  {"checkpoints", "instruments", "linen", "nnx", "plot", "statistics"}
)


def __getattr__(name: str) -> Any:
  if name in _ON_DEMAND:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *_ON_DEMAND})
