"""Loss scales and checkpoints of other systems, with the same S on every step.

Each preset has the argument names and defaults of its system, all keyword-only,
and returns an ordinary rule:

  >>> import optax
  >>> import optax_lossscale as ols
  >>> rule = ols.presets.megatron(initial_scale=2.0**32, hysteresis=2)
  >>> tx = ols.loss_scaling(optax.adam(1e-3), rule)

If the factors are powers of two, S equals the system's bit for bit. Otherwise
each change of S may add a relative difference of 2**-23, because S and the
factors are float32 here and some systems compute in double. If a system's S
would become 0, subnormal or infinite, as some let it, it stays unchanged here,
and the wrapper's state reports `stalled`. If a system would end the run,
`ols.raise_if_failed` raises here.

`npu_loss_scale_optimizer` does not return a rule: like the original on Ascend,
it wraps an optimizer and takes a rule as its manager. `accelerate_train_mode`,
also Ascend's, returns a `PrecisionSchedule`.
"""

import functools as _functools
import importlib as _importlib
import typing as _typing

from optax_lossscale._base import doors as _doors
from optax_lossscale._base.other_systems import of_preset as _of_preset

if _typing.TYPE_CHECKING:
  from optax_lossscale.presets._accelerate_train_mode import *
  from optax_lossscale.presets._fairseq import *
  from optax_lossscale.presets._jax import *
  from optax_lossscale.presets._megatron import *
  from optax_lossscale.presets._mindspore import *
  from optax_lossscale.presets._npu import *
  from optax_lossscale.presets._paddle import *
  from optax_lossscale.presets._pytorch import *
  from optax_lossscale.presets._state_dicts import *
  from optax_lossscale.presets._tensorflow import *
  from optax_lossscale.presets.declaration import *

_ROOMS = {
  "PresetLossScale": ".declaration",
  "accelerate_train_mode": "._accelerate_train_mode",
  "apex": "._pytorch",
  "apex_hysteresis": "._pytorch",
  "colossalai": "._megatron",
  "deepspeed": "._megatron",
  "deepspeed_legacy": "._megatron",
  "fairseq": "._fairseq",
  "flax": "._jax",
  "from_state_dict": "._state_dicts",
  "jmp": "._jax",
  "keras": "._tensorflow",
  "megatron": "._megatron",
  "megatron_constant": "._megatron",
  "metaseq": "._fairseq",
  "mindspore": "._mindspore",
  "mindspore_amp": "._mindspore",
  "mindspore_cell": "._mindspore",
  "mindspore_fixed": "._mindspore",
  "npu_exponential": "._npu",
  "npu_fixed": "._npu",
  "npu_loss_scale_optimizer": "._npu",
  "paddle": "._paddle",
  "paddle_op": "._paddle",
  "tensorflow": "._tensorflow",
  "tf_exponential": "._tensorflow",
  "to_state_dict": "._state_dicts",
  "torch": "._pytorch",
  "torch_sharded": "._pytorch",
}

__all__ = sorted(_ROOMS)

if not _typing.TYPE_CHECKING:
  __getattr__ = _doors.open_door(
    __name__, _ROOMS, _functools.partial(_of_preset, presets=__all__)
  )

# Presets are also found by the names in checkpoints and on the command line, so
# one brings all.
for _room in sorted({*_ROOMS.values()}):
  _importlib.import_module(_room, __name__)


def __dir__() -> list[str]:
  return __all__
