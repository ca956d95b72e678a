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

import typing as _typing

from optax_lossscale._base import doors as _doors
from optax_lossscale._base.arguments import did_you_mean as _did_you_mean
from optax_lossscale.presets._accelerate_train_mode import accelerate_train_mode
from optax_lossscale.presets._fairseq import fairseq
from optax_lossscale.presets._fairseq import metaseq
from optax_lossscale.presets._jax import flax
from optax_lossscale.presets._jax import jmp
from optax_lossscale.presets._megatron import colossalai
from optax_lossscale.presets._megatron import deepspeed
from optax_lossscale.presets._megatron import deepspeed_legacy
from optax_lossscale.presets._megatron import megatron
from optax_lossscale.presets._megatron import megatron_constant
from optax_lossscale.presets._mindspore import mindspore
from optax_lossscale.presets._mindspore import mindspore_amp
from optax_lossscale.presets._mindspore import mindspore_cell
from optax_lossscale.presets._mindspore import mindspore_fixed
from optax_lossscale.presets._npu import npu_exponential
from optax_lossscale.presets._npu import npu_fixed
from optax_lossscale.presets._npu import npu_loss_scale_optimizer
from optax_lossscale.presets._paddle import paddle
from optax_lossscale.presets._paddle import paddle_op
from optax_lossscale.presets._pytorch import apex
from optax_lossscale.presets._pytorch import apex_hysteresis
from optax_lossscale.presets._pytorch import torch
from optax_lossscale.presets._pytorch import torch_sharded
from optax_lossscale.presets._state_dicts import from_state_dict
from optax_lossscale.presets._state_dicts import to_state_dict
from optax_lossscale.presets._tensorflow import keras
from optax_lossscale.presets._tensorflow import tensorflow
from optax_lossscale.presets._tensorflow import tf_exponential
from optax_lossscale.presets.declaration import PresetLossScale

__all__ = [
  "PresetLossScale",
  "accelerate_train_mode",
  "apex",
  "apex_hysteresis",
  "colossalai",
  "deepspeed",
  "deepspeed_legacy",
  "fairseq",
  "flax",
  "from_state_dict",
  "jmp",
  "keras",
  "megatron",
  "megatron_constant",
  "metaseq",
  "mindspore",
  "mindspore_amp",
  "mindspore_cell",
  "mindspore_fixed",
  "npu_exponential",
  "npu_fixed",
  "npu_loss_scale_optimizer",
  "paddle",
  "paddle_op",
  "tensorflow",
  "tf_exponential",
  "to_state_dict",
  "torch",
  "torch_sharded",
]

# Names that people try first, and that are close to none of these.
_MEANT = {"pytorch": "torch", "ascend": "npu_exponential", "tf": "tensorflow"}


def _hint(name: str) -> str:
  """Returns the end of an error about a preset that does not exist."""
  meant = f"; did you mean {_MEANT.get(name)!r}?"
  return meant if name in _MEANT else _did_you_mean(name, __all__)


if not _typing.TYPE_CHECKING:  # Type checkers would accept any name.
  __getattr__ = _doors.open_door(__name__, {}, _hint)


def __dir__() -> list[str]:
  return __all__
