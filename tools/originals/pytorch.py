"""The loss scalers of PyTorch and of the libraries on top of it.

All run on the CPU. They need two environments, in which all but torch may be
installed with `--no-deps`:

- torch, with deepspeed from 0.17.1 on (DS_BUILD_OPS=0, and the packages that
  its import asks for) and with colossalai. megatron-core, fairseq and
  nemo_toolkit 2.7 have to be on the path too, be it as unpacked wheels: only
  the file of the scaler is loaded, and found by the package's metadata.
- for `deepspeed_legacy`, torch and deepspeed before 0.17.1.

`apex_hysteresis` also needs g++, with which its kernel is compiled for the CPU.
The code of two projects is in no package (apex and metaseq on PyPI are other
projects), so environment variables hold where it lies:

- APEX_SOURCE, a folder with apex/amp/scaler.py of github.com/HYGON-AI/apex-das
  at commit 505119957377, and csrc/update_scale_hysteresis.cu of
  github.com/NVIDIA/apex at commit 79b7f4f256c3.
- METASEQ_SOURCE, a folder with metaseq/optim/dynamic_loss_scaler.py of
  github.com/facebookresearch/metaseq at commit 0ba5657a7f51.
"""

import ast
import contextlib
import copy
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from unittest import mock

INFINITY = float("inf")


def _load(path):
  """Returns the module in one file, without the package around it."""
  name = "original_" + "_".join(pathlib.Path(path).with_suffix("").parts[-4:])
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
  return sys.modules[name]


def _installed(distribution, path):
  """Returns the path of an installed file, without importing its package."""
  return importlib.metadata.distribution(distribution).locate_file(path)


def _version(distribution):
  return f"{distribution} {importlib.metadata.version(distribution)}"


def _package(name, path=()):
  """Puts a package into place that has the submodules, but runs no code."""
  if name not in sys.modules:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(item) for item in path]
  return sys.modules[name]


@contextlib.contextmanager
def _cuda_is_cpu():
  """Puts on the CPU what the original asks to have on the GPU."""
  import torch
  from torch.overrides import TorchFunctionMode

  class Redirect(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
      kwargs = dict(kwargs or {})
      if kwargs.get("device") == "cuda":
        kwargs["device"] = "cpu"
      if function is torch.Tensor.cuda:
        return args[0]  # As where the tensor is on that device already.
      return function(*args, **kwargs)

  with (
    Redirect(),
    mock.patch.object(torch.cuda, "current_device", lambda: 0),
    mock.patch.object(torch.cuda, "IntTensor", torch.IntTensor),
  ):
    yield


@functools.cache
def _process_group():
  """Makes this process the only one of a group."""
  import torch.distributed

  torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
  )


def _copied(state_dict):
  """Returns a copy that later steps do not change."""
  return {
    key: value.clone() if hasattr(value, "clone") else copy.copy(value)
    for key, value in state_dict.items()
  }


class _Stepped:
  """A scaler of torch's interface, stepped with one parameter's gradient.

  The gradient is finite or not as the test wants it. It is not taken from the
  scaled loss, which is not finite in any step once S is not.
  """

  def _set_up(self, scaler):
    import torch

    self._scaler = scaler
    self._parameter = torch.nn.Parameter(torch.zeros(1))
    self._optimizer = torch.optim.SGD([self._parameter], lr=0.0)

  def update(self, overflow):
    import torch

    self._scaler.scale(torch.zeros(()))
    self._parameter.grad = torch.tensor([INFINITY if overflow else 1.0])
    self._scaler.step(self._optimizer)
    self._scaler.update()

  def scale(self):
    return self._scaler.get_scale()

  def state_dict(self):
    return _copied(self._scaler.state_dict())

  def load_state_dict(self, state_dict):
    self._scaler.load_state_dict(state_dict)


class Torch(_Stepped):
  """`step` and `update`, with the CPU's kernel."""

  ORIGINAL = "torch.amp.GradScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"init_scale": 2.0**120, "growth_interval": 1},
    {
      "init_scale": 2.0**-110,
      "growth_factor": 4.0,
      "backoff_factor": 0.25,
      "growth_interval": 7,
    },
    {
      "init_scale": 1000.0,
      "growth_factor": 1.1,
      "backoff_factor": 0.8,
      "growth_interval": 3,
    },
    {"growth_factor": 1.5, "growth_interval": 2, "enabled": False},
  )

  @staticmethod
  def version():
    return _version("torch")

  def __init__(self, **arguments):
    import torch

    self._set_up(torch.amp.GradScaler("cpu", **arguments))


class TorchSharded(_Stepped):
  """The same on a group of one process. On the CPU it has a rule of its own."""

  ORIGINAL = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
  FAILURES = ()
  ARGUMENTS = Torch.ARGUMENTS

  @staticmethod
  def version():
    return _version("torch")

  def __init__(self, **arguments):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    _process_group()
    self._set_up(ShardedGradScaler("cpu", **arguments))


class Megatron:
  """`update` with the flag, as the mixed-precision optimizer calls it."""

  ORIGINAL = "megatron.core.optimizer.grad_scaler.DynamicGradScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"initial_scale": 2.0**16, "growth_interval": 2},
    {"initial_scale": 2.0**120, "growth_interval": 1, "hysteresis": 1},
    {
      "initial_scale": 1.0,
      "min_scale": 2.0**-6,
      "growth_factor": 4.0,
      "backoff_factor": 0.25,
      "growth_interval": 7,
      "hysteresis": 3,
    },
    {
      "initial_scale": 1000.0,
      "min_scale": 0.3,
      "growth_factor": 1.5,
      "backoff_factor": 0.75,
      "growth_interval": 3,
      "hysteresis": 2,
    },
    {
      "initial_scale": 2.0**16,
      "min_scale": 3.0,
      "growth_factor": 1.1,
      "backoff_factor": 0.8,
      "growth_interval": 5,
      "hysteresis": 4,
    },
  )
  CLASS = "DynamicGradScaler"
  # The class has no defaults. These are of Megatron's configuration, and the
  # factors of the function that makes the optimizer.
  DEFAULTS = types.MappingProxyType(
    {
      "min_scale": 1.0,
      "growth_factor": 2.0,
      "backoff_factor": 0.5,
      "hysteresis": 2,
    }
  )

  @staticmethod
  def version():
    return f"{_version('megatron-core')}, {_version('torch')}"

  def __init__(self, **arguments):
    file = _installed("megatron-core", "megatron/core/optimizer/grad_scaler.py")
    with _cuda_is_cpu():
      self._scaler = getattr(_load(file), self.CLASS)(
        **{**self.DEFAULTS, **arguments}
      )

  def update(self, overflow):
    self._scaler.update(overflow)

  def scale(self):
    return self._scaler.scale.item()

  def state_dict(self):
    return _copied(self._scaler.state_dict())

  def load_state_dict(self, state_dict):
    with _cuda_is_cpu():
      self._scaler.load_state_dict(_copied(state_dict))


class MegatronConstant(Megatron):
  """The same of the scaler that never moves S."""

  ORIGINAL = "megatron.core.optimizer.grad_scaler.ConstantGradScaler"
  ARGUMENTS = ({"initial_scale": 2.0**12}, {"initial_scale": 0.3})
  CLASS = "ConstantGradScaler"
  DEFAULTS = types.MappingProxyType({})


class Deepspeed:
  """`update_scale` with the flag, as ZeRO's optimizers call it."""

  ORIGINAL = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
  FAILURES = (Exception,)  # The original raises no narrower one.
  ARGUMENTS = (
    {"scale_window": 1, "min_scale": 2.0**10},
    {"init_scale": 2.0**120, "scale_window": 3, "delayed_shift": 1},
    {
      "init_scale": 64.0,
      "scale_window": 7,
      "min_scale": 0.25,
      "delayed_shift": 3,
      "consecutive_hysteresis": True,
    },
    {
      "init_scale": 100.0,
      "scale_window": 3,
      "min_scale": 0.3,
      "raise_error_at_min_scale": False,
    },
    {
      "init_scale": 0.5,
      "scale_window": 5,
      "min_scale": 1.0,
      "delayed_shift": 4,
      "raise_error_at_min_scale": False,
    },
  )
  # The class has no defaults. These are of DeepSpeed's configuration.
  DEFAULTS = types.MappingProxyType(
    {
      "init_scale": 2.0**16,
      "scale_window": 1000,
      "min_scale": 1.0,
      "delayed_shift": 2,
      "consecutive_hysteresis": False,
    }
  )
  LEGACY = False

  @classmethod
  def version(cls):
    release = importlib.metadata.version("deepspeed")
    legacy = tuple(int(part) for part in release.split(".")[:3]) < (0, 17, 1)
    if legacy != cls.LEGACY:
      raise RuntimeError(f"deepspeed {release} has the other rule")
    return f"deepspeed {release}"

  def __init__(self, **arguments):
    self.version()
    from deepspeed.runtime.fp16 import loss_scaler

    # It asks for the rank to know who logs, and there are no ranks here.
    loss_scaler.dist.get_rank = lambda: 0
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    self._scaler = loss_scaler.DynamicLossScaler(
      **{**self.DEFAULTS, **arguments}
    )

  def update(self, overflow):
    self._scaler.update_scale(overflow)

  def scale(self):
    return self._scaler.loss_scale

  # ZeRO's checkpoint holds the pickled object. These are its attributes, less
  # `dtype`, which is torch.float16.
  def state_dict(self):
    attributes = _copied(vars(self._scaler))
    del attributes["dtype"]
    return attributes

  def load_state_dict(self, state_dict):
    vars(self._scaler).update(_copied(state_dict))


class DeepspeedLegacy(Deepspeed):
  """The same of the releases before 0.17.1, in which it has defaults."""

  ARGUMENTS = (
    {"init_scale": 2.0**16, "scale_window": 1, "min_scale": 2.0**10},
    {"init_scale": 2.0**120, "scale_window": 3},
    {
      "init_scale": 64.0,
      "scale_window": 7,
      "min_scale": 0.25,
      "delayed_shift": 3,
      "consecutive_hysteresis": True,
    },
    {
      "init_scale": 1000.0,
      "scale_factor": 1.5,
      "scale_window": 3,
      "min_scale": 0.3,
      "delayed_shift": 2,
      "raise_error_at_min_scale": False,
    },
    {
      "init_scale": 0.5,
      "scale_factor": 4.0,
      "scale_window": 5,
      "min_scale": 1.0,
      "delayed_shift": 4,
      "raise_error_at_min_scale": False,
    },
  )
  DEFAULTS = types.MappingProxyType({})
  LEGACY = True


class Apex:
  """The calls at the end of `amp.scale_loss`, without the GPU's kernels.

  The code is that of a fork that follows NVIDIA's. In NVIDIA's repository at
  commit b82c6bd7613f the maximum does not limit the initial S yet, and the
  rest of the rule is the same.
  """

  ORIGINAL = "apex.amp.scaler.LossScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"scale_window": 1, "min_loss_scale": 2.0**12},
    {
      "init_scale": 2.0**30,
      "scale_window": 7,
      "min_loss_scale": 0.3,
      "max_loss_scale": 1000.0,
    },
    {"init_scale": 3.0, "scale_window": 2, "min_loss_scale": 0.0},
    {
      "init_scale": 2.0**120,
      "scale_window": 3,
      "min_loss_scale": 2.0**60,
      "max_loss_scale": 2.0**127,
    },
    {"loss_scale": 128.0},
  )

  @staticmethod
  def version():
    return f"HYGON-AI/apex-das 505119957377, {_version('torch')}"

  def __init__(self, loss_scale="dynamic", **arguments):
    import torch

    amp = pathlib.Path(os.environ["APEX_SOURCE"], "apex", "amp")
    _package("apex")
    _package("apex.amp", [amp])
    # What the file imports beside torch: here, that there are no kernels.
    state = _package("apex.amp._amp_state")
    state._amp_state = state.master_params = None
    state.maybe_print = lambda *args: None
    _package(
      "apex.multi_tensor_apply"
    ).multi_tensor_applier = types.SimpleNamespace(
      available=False, import_err=None
    )
    from apex.amp.scaler import LossScaler

    with _cuda_is_cpu():
      self._scaler = LossScaler(loss_scale, **arguments)
    self._gradients = {
      False: [torch.zeros(1)],
      True: [torch.tensor([INFINITY])],
    }

  def update(self, overflow):
    gradients = [gradient.clone() for gradient in self._gradients[overflow]]
    self._scaler.clear_overflow_state()
    self._scaler.unscale(
      gradients, gradients, self._scaler.loss_scale(), models_are_masters=True
    )
    self._scaler.update_scale()

  def scale(self):
    return self._scaler.loss_scale()

  # As `amp.state_dict` saves the first of its scalers.
  def state_dict(self):
    return {
      "loss_scaler0": {
        "loss_scale": self._scaler.loss_scale(),
        "unskipped": self._scaler._unskipped,
      }
    }

  def load_state_dict(self, state_dict):
    self._scaler._loss_scale = state_dict["loss_scaler0"]["loss_scale"]
    self._scaler._unskipped = state_dict["loss_scaler0"]["unskipped"]


@functools.cache
def _hysteresis_kernel():
  """Returns the kernel, compiled as the C function that it is but for CUDA."""
  file = pathlib.Path(
    os.environ["APEX_SOURCE"], "csrc", "update_scale_hysteresis.cu"
  )
  text = file.read_text()
  kernel = text[text.index("__global__") : text.index("at::Tensor")]
  head = (
    '#include <cmath>\nusing std::isfinite;\n#define __global__ extern "C"\n'
  )
  library = pathlib.Path(tempfile.mkdtemp(), "kernel.so")
  subprocess.run(
    ["g++", "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o", library],
    input=head + kernel,
    text=True,
    check=True,
  )
  function = ctypes.CDLL(str(library)).update_scale_hysteresis_cuda_kernel
  function.argtypes = [
    *[ctypes.c_void_p] * 4,
    *[ctypes.c_double] * 2,
    *[ctypes.c_int] * 2,
  ]
  function.restype = None

  def update_scale_hysteresis(*arguments):
    function(
      *[getattr(item, "data_ptr", lambda x=item: x)() for item in arguments]
    )

  return update_scale_hysteresis


@functools.cache
def _nemo_grad_scaler():
  """Returns NeMo's class, around Apex's kernel, on the CPU."""
  import collections
  import typing

  import torch

  class GradScaler(torch.amp.GradScaler):
    def __init__(self, **arguments):
      super().__init__("cpu", **arguments)

  file = _installed(
    "nemo_toolkit", "nemo/collections/common/parts/nlp_overrides.py"
  )
  (source,) = (
    node
    for node in ast.parse(pathlib.Path(file).read_text()).body
    if isinstance(node, ast.ClassDef) and node.name == "GradScaler"
  )
  # What the class uses of its module, which imports the whole of NeMo.
  namespace = {
    "__name__": "nlp_overrides",
    "HAVE_AMP_C": True,
    "Optional": typing.Optional,
    "_refresh_per_optimizer_state": (
      torch.amp.grad_scaler._refresh_per_optimizer_state
    ),
    "amp_C": types.SimpleNamespace(
      update_scale_hysteresis=_hysteresis_kernel()
    ),
    "defaultdict": collections.defaultdict,
    "parallel_state": types.SimpleNamespace(
      get_model_parallel_group=lambda: None
    ),
    "torch": torch,
  }
  with mock.patch.object(torch.cuda.amp, "GradScaler", GradScaler):
    exec(
      compile(ast.Module([source], []), "nlp_overrides.py", "exec"), namespace
    )
  return namespace["GradScaler"]


class ApexHysteresis(_Stepped):
  """Apex's kernel in NeMo's scaler, on a group of one process."""

  ORIGINAL = "nemo.collections.common.parts.nlp_overrides.GradScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"growth_interval": 7, "hysteresis": 4},
    {"init_scale": 2.0**120, "growth_interval": 1},
    {
      "init_scale": 2.0**-110,
      "growth_factor": 4.0,
      "backoff_factor": 0.25,
      "growth_interval": 2,
      "hysteresis": 3,
    },
    {
      "init_scale": 1000.0,
      "growth_factor": 1.1,
      "backoff_factor": 0.8,
      "growth_interval": 3,
      "hysteresis": 2,
    },
  )

  @staticmethod
  def version():
    return (
      f"{_version('nemo_toolkit')}, NVIDIA/apex 79b7f4f256c3, "
      f"{_version('torch')}"
    )

  def __init__(self, **arguments):
    _process_group()
    self._set_up(_nemo_grad_scaler()(**arguments))

  def load_state_dict(self, state_dict):
    with _cuda_is_cpu():
      super().load_state_dict(state_dict)


# Of fairseq and its successor.
_TOLERANT = (
  {
    "init_scale": 64.0,
    "scale_factor": 4.0,
    "scale_window": 7,
    "tolerance": 0.25,
    "threshold": 0.3,
  },
  {
    "init_scale": 1000.0,
    "scale_factor": 1.5,
    "scale_window": 3,
    "tolerance": 0.1,
    "min_loss_scale": 2.0,
  },
)


class Fairseq:
  """`check_overflow` with the norm and, where it is finite, `update`."""

  ORIGINAL = "fairseq.optim.dynamic_loss_scaler.DynamicLossScaler"
  FAILURES = (FloatingPointError,)
  ARGUMENTS = (
    {"scale_window": 2},
    {"init_scale": 2.0**120, "scale_window": 3, "min_loss_scale": 2.0**90},
    *_TOLERANT,
    {
      "init_scale": 2.0**10,
      "scale_window": 5,
      "tolerance": 0.6,
      "threshold": 8.0,
      "min_loss_scale": 8.0,
    },
  )

  @staticmethod
  def version():
    return _version("fairseq")

  @staticmethod
  def _file():
    return _installed("fairseq", "fairseq/optim/dynamic_loss_scaler.py")

  def __init__(self, **arguments):
    self._scaler = _load(self._file()).DynamicLossScaler(**arguments)

  def update(self, overflow):
    try:
      self._scaler.check_overflow(INFINITY if overflow else 1.0)
    except OverflowError:  # The trainer discards the step and goes on.
      return
    self._scaler.update()

  def scale(self):
    return self._scaler.loss_scale

  # S alone is saved, under this key in the optimizer's state dictionary.
  def state_dict(self):
    return {"loss_scale": self._scaler.loss_scale}

  def load_state_dict(self, state_dict):
    self._scaler.loss_scale = state_dict["loss_scale"]


class Metaseq(Fairseq):
  """The same of its successor, which raises no error at the minimum."""

  ORIGINAL = "metaseq.optim.dynamic_loss_scaler.DynamicLossScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"scale_window": 8},
    {"init_scale": 2.0**120, "scale_window": 1, "min_loss_scale": 1.0},
    *_TOLERANT,
    {
      "init_scale": 2.0**10,
      "scale_window": 5,
      "tolerance": 0.6,
      "threshold": 8.0,
      "min_loss_scale": 16.0,
    },
  )

  @staticmethod
  def version():
    return "facebookresearch/metaseq 0ba5657a7f51"

  @staticmethod
  def _file():
    return pathlib.Path(
      os.environ["METASEQ_SOURCE"], "metaseq/optim/dynamic_loss_scaler.py"
    )


class Colossalai:
  """`update` with the flag, as its mixed-precision mixin calls it."""

  ORIGINAL = "colossalai.amp.naive_amp.grad_scaler.DynamicGradScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"growth_interval": 7, "min_scale": 0.0, "hysteresis": 4},
    {"initial_scale": 2.0**120, "growth_interval": 1, "hysteresis": 1},
    {
      "initial_scale": 1.0,
      "growth_factor": 4.0,
      "backoff_factor": 0.25,
      "growth_interval": 2,
      "min_scale": 2.0**-6,
      "max_scale": 2.0**10,
      "hysteresis": 3,
    },
    {
      "initial_scale": 1000.0,
      "growth_factor": 1.1,
      "backoff_factor": 0.8,
      "growth_interval": 3,
      "min_scale": 0.3,
      "max_scale": 3000.0,
    },
    {
      "initial_scale": 1000.0,
      "growth_factor": 1.1,
      "backoff_factor": 0.8,
      "growth_interval": 5,
      "hysteresis": 1,
    },
  )

  @staticmethod
  def version():
    return f"{_version('colossalai')}, {_version('torch')}"

  def __init__(self, **arguments):
    _package("colossalai", [_installed("colossalai", "colossalai")])
    from colossalai.accelerator import CpuAccelerator
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    # The constructor counts the devices, which on the CPU is an error.
    with mock.patch.object(CpuAccelerator, "device_count", lambda self: 1):
      self._scaler = DynamicGradScaler(**arguments)

  def update(self, overflow):
    self._scaler.update(overflow)

  def scale(self):
    return self._scaler.scale.item()

  def state_dict(self):
    return _copied(self._scaler.state_dict())

  def load_state_dict(self, state_dict):
    self._scaler.load_state_dict(_copied(state_dict))


SYSTEMS = {
  "torch": Torch,
  "torch_sharded": TorchSharded,
  "megatron": Megatron,
  "megatron_constant": MegatronConstant,
  "deepspeed": Deepspeed,
  "deepspeed_legacy": DeepspeedLegacy,
  "apex": Apex,
  "apex_hysteresis": ApexHysteresis,
  "fairseq": Fairseq,
  "metaseq": Metaseq,
  "colossalai": Colossalai,
}
