"""Loss scaling for JAX, as an optax gradient transformation.

In float16, small gradients underflow to 0. Loss scaling multiplies the loss by
S before the backward pass and divides the gradients by S afterwards::

  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  opt_state = tx.init(params)

  value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
  loss, scaled_grads = value_and_grad(params, batch)
  updates, opt_state = tx.update(scaled_grads, opt_state, params)
  params = optax.apply_updates(params, updates)

If a gradient overflows, the updates are -0.0, the optimizer's state stays the
same bit for bit, and S shrinks. After enough clean steps, S grows again.
"""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._autocast.marks import cast_inputs
from optax_lossscale._base import doors as _doors
from optax_lossscale._base.arguments import WiringWarning
from optax_lossscale._base.other_systems import of_name as _of_name
from optax_lossscale._precision.master_weights import master_weights
from optax_lossscale._precision.master_weights import MasterWeightsState
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.dynamic import DynamicLossScale
from optax_lossscale._rules.engine import DynamicLossScaleState
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._rules.fixed import FixedLossScaleState
from optax_lossscale._step.accumulation import accumulate
from optax_lossscale._step.averages import make_varying
from optax_lossscale._step.averages import pmean_gradients
from optax_lossscale._step.backward import scaled_value_and_grad
from optax_lossscale._step.backward import ScaledValueAndGrad
from optax_lossscale._step.by_hand import scale_loss
from optax_lossscale._step.by_hand import select_on_skip
from optax_lossscale._step.by_hand import unscale
from optax_lossscale._step.checks import Check
from optax_lossscale._step.checks import nonfinite
from optax_lossscale._step.checks import saturated
from optax_lossscale._step.failures import raise_if_failed
from optax_lossscale._step.loss_scaling import loss_scaling
from optax_lossscale._step.metrics import loss_scale_metrics
from optax_lossscale._step.reasons import WindowOverflow
from optax_lossscale._step.states import get_loss_scale
from optax_lossscale._step.states import LastStep
from optax_lossscale._step.states import LossScalingState
from optax_lossscale._step.states import StepCounts

__version__ = "0.1.0"

__all__ = [
  "Check",
  "DynamicLossScale",
  "DynamicLossScaleState",
  "FixedLossScale",
  "FixedLossScaleState",
  "LastStep",
  "LossScale",
  "LossScalingState",
  "MasterWeightsState",
  "Policy",
  "PrecisionSchedule",
  "PrecisionScheduleState",
  "ScaledValueAndGrad",
  "StepCounts",
  "WindowOverflow",
  "WiringWarning",
  "accumulate",
  "autocast",
  "cast_inputs",
  "get_loss_scale",
  "get_policy",
  "loss_scale_metrics",
  "loss_scaling",
  "low_precision_state",
  "make_varying",
  "master_weights",
  "nonfinite",
  "pmean_gradients",
  "presets",
  "raise_if_failed",
  "saturated",
  "scale_loss",
  "scaled_value_and_grad",
  "select_on_skip",
  "stochastic_rounding",
  "unscale",
]

# These are loaded only when used, since they are half of the library, and some
# of them load Flax or matplotlib.
_MODULES = [
  "checkpoints",
  "experimental",
  "hardware",
  "instruments",
  "linen",
  "nnx",
  "plot",
  "presets",
  "rules",
]
_ROOMS = {x: f".{x}" for x in _MODULES} | {
  "Policy": "._precision.policy",
  "PrecisionSchedule": "._precision.precision_schedule",
  "PrecisionScheduleState": "._precision.precision_schedule",
  "get_policy": "._precision.policy",
  "low_precision_state": "._precision.stochastic_rounding",
  "stochastic_rounding": "._precision.stochastic_rounding",
}


def _remedy(name: str) -> str:
  """Returns the end of the error for a name that does not exist."""
  # Nothing is loaded for names that tools ask for, nor for other submodules,
  # which `from optax_lossscale import cli` asks for before it imports them.
  if name[0] != "_" and not _util.find_spec(f"{__name__}.{name}"):
    for module in sorted({*_MODULES} - {"nnx", "plot"}):
      if name in _importlib.import_module(f".{module}", __name__).__all__:
        return f"; it is {module}.{name}"
  return _of_name(name, __all__)


if _typing.TYPE_CHECKING:
  from optax_lossscale import checkpoints as checkpoints
  from optax_lossscale import experimental as experimental
  from optax_lossscale import hardware as hardware
  from optax_lossscale import instruments as instruments
  from optax_lossscale import linen as linen
  from optax_lossscale import nnx as nnx
  from optax_lossscale import plot as plot
  from optax_lossscale import presets as presets
  from optax_lossscale import rules as rules
  from optax_lossscale._precision.policy import get_policy
  from optax_lossscale._precision.policy import Policy
  from optax_lossscale._precision.precision_schedule import PrecisionSchedule
  from optax_lossscale._precision.precision_schedule import (
    PrecisionScheduleState,
  )
  from optax_lossscale._precision.stochastic_rounding import low_precision_state
  from optax_lossscale._precision.stochastic_rounding import stochastic_rounding
else:  # Type checkers would accept any name.
  __getattr__ = _doors.open_door(__name__, _ROOMS, _remedy)


def __dir__() -> list[str]:
  # Omits private packages and any submodules that happen to be imported.
  return sorted({*__all__, *_MODULES, "__version__"})
