"""Plain-Python models of loss-scale rules, which the tests take as the truth.

Every model has a `scale`, `update(overflow)`, `failed` and, but for this
library's own, `state_dict()`, the names and numbers of the system's checkpoint.
Where that lacks counts, `resume()` does what a restart does to them. A model is
written from its system's own state variables, in the order of its own source,
apart from the code under test and from the other models. The systems differ in
what restarts a count, in the bounds and in the arithmetic; each docstring names
the point.

A float32 is held as the Python float of the same value: the double product of
two float32 values is exact, and their double quotient is precise enough, for
`float32` of it to be their float32 product or quotient.

`ascend` is apart: it models when `accelerate_train_mode` switches.
"""

from tests.reference.deepspeed import DeepSpeed
from tests.reference.deepspeed import DeepSpeedLegacy
from tests.reference.fairseq import Fairseq
from tests.reference.fairseq import Metaseq
from tests.reference.floats import float32
from tests.reference.floats import Model
from tests.reference.jax_libraries import Flax
from tests.reference.jax_libraries import Jmp
from tests.reference.megatron import ColossalAI
from tests.reference.megatron import Megatron
from tests.reference.megatron import MegatronConstant
from tests.reference.mindspore import MindSpore
from tests.reference.mindspore import MindSporeAmp
from tests.reference.mindspore import MindSporeCell
from tests.reference.mindspore import MindSporeFixed
from tests.reference.paddle import Paddle
from tests.reference.paddle import PaddleOp
from tests.reference.pytorch import Apex
from tests.reference.pytorch import ApexHysteresis
from tests.reference.pytorch import Torch
from tests.reference.pytorch import TorchSharded
from tests.reference.tensorflow import Keras
from tests.reference.tensorflow import NpuExponential
from tests.reference.tensorflow import NpuFixed
from tests.reference.tensorflow import TensorFlow
from tests.reference.tensorflow import TensorFlowContrib
from tests.reference.this_library import Dynamic

# A preset's name, and the model that it must follow. A model has its preset's
# arguments, less the one that switches everything off.
MODELS = {
  "torch": Torch,
  "torch_sharded": TorchSharded,
  "megatron": Megatron,
  "megatron_constant": MegatronConstant,
  "deepspeed": DeepSpeed,
  "deepspeed_legacy": DeepSpeedLegacy,
  "apex": Apex,
  "apex_hysteresis": ApexHysteresis,
  "fairseq": Fairseq,
  "metaseq": Metaseq,
  "colossalai": ColossalAI,
  "npu_exponential": NpuExponential,
  "npu_fixed": NpuFixed,
  "tf_exponential": TensorFlowContrib,
  "tensorflow": TensorFlow,
  "keras": Keras,
  "mindspore": MindSpore,
  "mindspore_fixed": MindSporeFixed,
  "mindspore_amp": MindSporeAmp,
  "mindspore_cell": MindSporeCell,
  "paddle": Paddle,
  "paddle_op": PaddleOp,
  "flax": Flax,
  "jmp": Jmp,
}

__all__ = [
  "MODELS",
  "Apex",
  "ApexHysteresis",
  "ColossalAI",
  "DeepSpeed",
  "DeepSpeedLegacy",
  "Dynamic",
  "Fairseq",
  "Flax",
  "Jmp",
  "Keras",
  "Megatron",
  "MegatronConstant",
  "Metaseq",
  "MindSpore",
  "MindSporeAmp",
  "MindSporeCell",
  "MindSporeFixed",
  "Model",
  "NpuExponential",
  "NpuFixed",
  "Paddle",
  "PaddleOp",
  "TensorFlow",
  "TensorFlowContrib",
  "Torch",
  "TorchSharded",
  "float32",
]
