"""Kinds of keys in a state dictionary: what each holds, and how it is read."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments


@dataclasses.dataclass(frozen=True)
class StateKey:
  """A key that holds something of the state.

  Attributes:
    holds: "loss_scale"; "clean_steps"; "window_steps", the clean steps that
      count towards the next growth; "overflows"; "hysteresis_left", the
      overflows that a shrink still waits for; "overflows_to_shrink", as many
      with the one that shrinks S, so 1 at the least; "steps", the number of the
      next step; "last_overflow", the number of the step that overflowed last.
    make: makes the value, of its type, of a Python number.
    first: the number of the first step.
    is_lost: the system saves it, but does not read it again.
  """

  holds: str
  make: Callable[[Any], Any]
  first: int = 0
  is_lost: bool = False

  def read(self, value: Any) -> float | int:
    """Returns the value as a Python number."""
    if self.holds == "loss_scale":
      return _read_scale(value)
    return _read_integer(value)


@dataclasses.dataclass(frozen=True)
class ArgumentKey:
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
class ConstantKey:
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
class UnneededKey:
  """A key that is neither written nor used, but may come."""

  def read(self, value: Any) -> Any:
    """Returns the value."""
    return value


@dataclasses.dataclass(frozen=True)
class OwnKey:
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
class DerivedKey:
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
  if not arguments.SMALLEST_SCALE <= number <= arguments.LARGEST_SCALE:
    raise ValueError(f"must be a positive normal float32, got {value!r}")
  return number


def _read_integer(value: Any) -> int:
  number = _read_scalar(value)
  if isinstance(number, bool) or not isinstance(number, int):
    raise TypeError(f"must be an integer, got {value!r}")
  if abs(number) > arguments.LARGEST_COUNT:
    raise ValueError(f"must fit into int32, got {value!r}")
  return number


def _read_flag(value: Any) -> bool:
  flag = _read_scalar(value)
  if not isinstance(flag, bool):
    raise TypeError(f"must be True or False, got {value!r}")
  return flag


def int_or_float(value: float) -> float:
  """Returns a number that the system keeps as an integer if it came as one."""
  return value


def _read_int_or_float(value: Any) -> float:
  number = _read_number(value)
  return int(number) if isinstance(_read_scalar(value), int) else number


_READERS: dict[Any, Callable[[Any], Any]] = {
  float: _read_number,
  int_or_float: _read_int_or_float,
  int: _read_integer,
  bool: _read_flag,
}


def one_float32(value: float) -> np.ndarray:
  """Returns float32[1], as systems save that keep S in a one-element tensor."""
  return np.array([value], np.float32)


def one_int32(value: int) -> np.ndarray:
  """Returns int32[1]."""
  return np.array([value], np.int32)
