"""Plain-Python models of loss-scale rules, which the tests take as the truth.

A model has `scale`, `failed` and `update(overflow)`. If a restart from the
system's checkpoint loses counts, `resume()` loses them too. Each model has its
own system's state variables, in the order of that system's source, and shares
no code with the library or with the other models. The systems differ in what
restarts a count, in the bounds and in the arithmetic; each docstring says how.

A float32 is a Python float of the same value. The double product of two float32
values is exact and their double quotient is precise enough, so `float32` rounds
either to the float32 result.

`ascend` models when `accelerate_train_mode` switches.
"""

from tests.reference import deepspeed
from tests.reference import fairseq
from tests.reference import jax_libraries
from tests.reference import megatron
from tests.reference import mindspore
from tests.reference import paddle
from tests.reference import pytorch
from tests.reference import tensorflow
from tests.reference.fairseq import Metaseq as Metaseq
from tests.reference.pytorch import Torch as Torch
from tests.reference.this_library import Dynamic as Dynamic

# The model of each preset. Its arguments are the preset's, except for one that
# switches the scaler off.
MODELS = {
  "torch": Torch,
  "torch_sharded": pytorch.TorchSharded,
  "megatron": megatron.Megatron,
  "megatron_constant": megatron.MegatronConstant,
  "deepspeed": deepspeed.DeepSpeed,
  "deepspeed_legacy": deepspeed.DeepSpeedLegacy,
  "apex": pytorch.Apex,
  "apex_hysteresis": pytorch.ApexHysteresis,
  "fairseq": fairseq.Fairseq,
  "metaseq": Metaseq,
  "colossalai": megatron.ColossalAI,
  "npu_exponential": tensorflow.NpuExponential,
  "npu_fixed": tensorflow.NpuFixed,
  "tf_exponential": tensorflow.TensorFlowContrib,
  "tensorflow": tensorflow.TensorFlow,
  "keras": tensorflow.Keras,
  "mindspore": mindspore.MindSpore,
  "mindspore_fixed": mindspore.MindSporeFixed,
  "mindspore_amp": mindspore.MindSporeAmp,
  "mindspore_cell": mindspore.MindSporeCell,
  "paddle": paddle.Paddle,
  "paddle_op": paddle.PaddleOp,
  "flax": jax_libraries.Flax,
  "jmp": jax_libraries.Jmp,
}
