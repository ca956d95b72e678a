"""What each system saves of its scaler: the keys, their types, their places."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arguments
from optax_lossscale import _engine


@dataclasses.dataclass(frozen=True)
class Key:
  """A key that holds something of the state.

  Attributes:
    holds: "loss_scale"; "clean_steps"; "window_steps", the clean steps that
      count towards the next growth; "overflows"; "hysteresis_left", the
      overflows that a shrink still waits for; "steps", the number of the next
      step; "last_overflow", the number of the step that overflowed last.
    make: makes the value, of its type, of a Python number.
    first: the number of the first step.
    least: the value is at least this.
    is_lost: the system saves it, but does not read it again.
  """

  holds: str
  make: Callable[[Any], Any]
  first: int = 0
  least: float = -math.inf
  is_lost: bool = False

  def read(self, value: Any) -> float | int:
    """Returns the value as a Python number."""
    if self.holds == "loss_scale":
      return _read_scale(value)
    return _read_integer(value)


@dataclasses.dataclass(frozen=True)
class Argument:
  """A key that holds an argument of the system.

  Attributes:
    name: the argument's name.
    make: makes the value, of its type.
  """

  name: str
  make: Callable[[Any], Any]

  def read(self, value: Any) -> float | int | bool:
    """Returns the value as a Python number or bool."""
    read: Callable[[Any], float | int | bool] = _READERS[self.make]
    return read(value)


@dataclasses.dataclass(frozen=True)
class Constant:
  """A key that always holds the same.

  Attributes:
    value: what it holds.
  """

  value: Any

  def read(self, value: Any) -> Any:
    """Returns the value, which must be the constant."""
    scalar = _read_scalar(value)
    if not isinstance(scalar, (bool, int, float)) or scalar != self.value:
      raise ValueError(f"must be {self.value!r}, got {value!r}")
    return self.value


@dataclasses.dataclass(frozen=True)
class Unneeded:
  """A key that is neither written nor used, but may come."""

  def read(self, value: Any) -> Any:
    """Returns the value."""
    return value


@dataclasses.dataclass(frozen=True)
class Own:
  """A key that holds a leaf of a state of this library's own.

  Attributes:
    dtype: the leaf's dtype.
    shape: its shape.
    is_loss_scale: whether it is S.
  """

  dtype: Any
  shape: tuple[int, ...]
  is_loss_scale: bool = False

  def read(self, value: Any) -> np.ndarray:
    """Returns the value as an array."""
    array = np.asarray(value)
    if array.shape != self.shape or not np.can_cast(
      array.dtype, self.dtype, "same_kind"
    ):
      raise TypeError(f"must be {self.dtype}{list(self.shape)}, got {value!r}")
    if self.is_loss_scale:
      _read_scale(value)
    if jnp.issubdtype(self.dtype, jnp.integer) and np.any(
      array != array.astype(self.dtype)
    ):
      raise ValueError(f"must fit into {self.dtype}, got {value!r}")
    return array


@dataclasses.dataclass(frozen=True)
class Derived:
  """A key that holds what follows from an argument, and is not used.

  Attributes:
    name: the argument's name.
    make: makes the value of the argument.
  """

  name: str
  make: Callable[[Any], Any]

  def read(self, value: Any) -> float:
    """Returns the value as a Python number."""
    return _read_number(value)


Layout = Mapping[
  tuple[str, ...], Key | Argument | Derived | Constant | Unneeded | Own
]


def layout(system: str, arguments: Mapping[str, Any]) -> Layout:
  """Returns the keys of a system by their paths.

  Args:
    system: the preset's name.
    arguments: its arguments; a scaler that is switched off saves nothing.
  """
  if not arguments.get("enabled", arguments.get("enable", True)):
    return {}
  return {
    tuple(path.split("/")): key
    for path, key in _LAYOUTS.get(system, {}).items()
  }


def _read_scalar(value: Any) -> Any:
  """Returns a Python scalar of one, or of an array of one element."""
  if isinstance(value, (bool, int, float, str, type(None), Mapping)):
    return value
  array = np.asarray(value)  # Also of a framework's tensor on the CPU.
  return array.item() if array.size == 1 else value


def _read_number(value: Any) -> float:
  number = _read_scalar(value)
  if isinstance(number, bool) or not isinstance(number, (int, float)):
    raise TypeError(f"must be a number, got {value!r}")
  return float(number)


def _read_scale(value: Any) -> float:
  number = _read_number(value)
  if not _arguments.SMALLEST_SCALE <= number <= _arguments.LARGEST_SCALE:
    raise ValueError(f"must be a positive normal float32, got {value!r}")
  return number


def _read_integer(value: Any) -> int:
  number = _read_scalar(value)
  if isinstance(number, bool) or not isinstance(number, int):
    raise TypeError(f"must be an integer, got {value!r}")
  if abs(number) > _arguments.LARGEST_COUNT:
    raise ValueError(f"must fit into int32, got {value!r}")
  return number


def _read_flag(value: Any) -> bool:
  flag = _read_scalar(value)
  if not isinstance(flag, bool):
    raise TypeError(f"must be True or False, got {value!r}")
  return flag


def _as_given(value: float) -> float:
  """Returns a number that the system keeps as an integer if it came as one."""
  return value


def _read_as_given(value: Any) -> float:
  number = _read_number(value)
  return int(number) if isinstance(_read_scalar(value), int) else number


_READERS: dict[Any, Callable[[Any], Any]] = {
  float: _read_number,
  _as_given: _read_as_given,
  int: _read_integer,
  bool: _read_flag,
}


def _one_float32(value: float) -> np.ndarray:
  """Returns float32[1], as systems save that keep S in a one-element tensor."""
  return np.array([value], np.float32)


def _one_int32(value: int) -> np.ndarray:
  """Returns int32[1]."""
  return np.array([value], np.int32)


def _inverse(value: float) -> float:
  return 1 / value


_TORCH: dict[str, Any] = {
  "scale": Key("loss_scale", float),
  "growth_factor": Argument("growth_factor", float),
  "backoff_factor": Argument("backoff_factor", float),
  "growth_interval": Argument("growth_interval", int),
  "_growth_tracker": Key("clean_steps", int),
}
_DEEPSPEED: dict[str, Any] = {
  "cur_scale": Key("loss_scale", float),
  "cur_iter": Key("steps", int),
  "last_overflow_iter": Key("last_overflow", int),
  "scale_window": Argument("scale_window", int),
  "min_scale": Argument("min_scale", _as_given),
  "delayed_shift": Argument("delayed_shift", int),
  "cur_hysteresis": Key("hysteresis_left", int, least=1),
  "consecutive_hysteresis": Argument("consecutive_hysteresis", bool),
  "raise_error_at_min_scale": Argument("raise_error_at_min_scale", bool),
  "dynamic": Constant(True),
  "dtype": Unneeded(),  # torch.float16, among the object's attributes.
}
_FAIRSEQ: dict[str, Any] = {"loss_scale": Key("loss_scale", float)}
_TF_EXPONENTIAL: dict[str, Any] = {
  "loss_scale": Key("loss_scale", np.float32),
  "good_steps": Key("clean_steps", np.int32),
  "bad_steps": Key("overflows", np.int32),
}
_PADDLE: dict[str, Any] = {
  "scale": Key("loss_scale", _one_float32),
  "incr_ratio": Argument("incr_ratio", float),
  "decr_ratio": Argument("decr_ratio", float),
  "incr_every_n_steps": Argument("incr_every_n_steps", int),
  "decr_every_n_nan_or_inf": Argument("decr_every_n_nan_or_inf", int),
  "incr_count": Key("clean_steps", int),
  "decr_count": Key("overflows", int),
  "use_dynamic_loss_scaling": Argument("use_dynamic_loss_scaling", bool),
}

# What is not here saves nothing.
_LAYOUTS: dict[str, dict[str, Any]] = {
  "torch": _TORCH,
  "torch_sharded": _TORCH,
  "megatron": {
    "scale": Key("loss_scale", _one_float32),
    "growth_tracker": Key("clean_steps", int),
    "hysteresis_tracker": Key("hysteresis_left", int),
  },
  "colossalai": {
    "scale": Key("loss_scale", _one_float32),
    "growth_factor": Argument("growth_factor", _as_given),
    "backoff_factor": Argument("backoff_factor", float),
    "hysteresis": Argument("hysteresis", int),
  },
  "deepspeed": _DEEPSPEED | {"scale_factor": Constant(2.0)},
  "deepspeed_legacy": _DEEPSPEED
  | {"scale_factor": Argument("scale_factor", float)},
  "apex": {
    "loss_scaler0/loss_scale": Key("loss_scale", float),
    "loss_scaler0/unskipped": Key("clean_steps", int),
  },
  "apex_hysteresis": _TORCH
  | {"_hysteresis_tracker": Key("hysteresis_left", _one_int32, is_lost=True)},
  "fairseq": _FAIRSEQ,
  "metaseq": _FAIRSEQ,
  "tf_exponential": _TF_EXPONENTIAL,
  "npu_exponential": _TF_EXPONENTIAL,
  "tensorflow": {
    "current_loss_scale": Key("loss_scale", np.float32),
    "good_steps": Key("clean_steps", np.int64),
  },
  "keras": {
    "step_counter": Key("clean_steps", np.int32),
    "dynamic_scale": Key("loss_scale", np.float32),
  },
  "mindspore": {
    "loss_scale": Key("loss_scale", float),
    "scale_window": Argument("scale_window", int),
    "scale_factor": Argument("scale_factor", _as_given),
    "increase_ratio": Derived("scale_factor", _as_given),
    "decrease_ratio": Derived("scale_factor", _inverse),
    "bad_step_max": Constant(_engine.MOST_OVERFLOWS_IN_A_ROW),
    "cur_iter": Key("steps", int, first=1),
    "last_overflow_iter": Key("last_overflow", int, first=1),
    "bad_step": Key("overflows", int),
  },
  "mindspore_amp": {
    "scale_value": Key("loss_scale", np.float32),
    "counter": Key("window_steps", np.int32),
  },
  "mindspore_cell": {
    "scale_sense": Key("loss_scale", np.float32),
    "current_iterator_step": Key("steps", np.int32, first=1),
    "last_overflow_iterator_step": Key("last_overflow", np.int32, first=1),
  },
  "paddle": _PADDLE,
  "paddle_op": {
    "loss_scaling_0": Key("loss_scale", _one_float32),
    "num_good_steps_0": Key("clean_steps", _one_int32),
    "num_bad_steps_0": Key("overflows", _one_int32),
  },
  "flax": {
    "fin_steps": Key("clean_steps", np.int32),
    "scale": Key("loss_scale", np.float32),
  },
  "jmp": {
    "loss_scale": Key("loss_scale", np.float32),
    "counter": Key("window_steps", np.int32),
  },
}
