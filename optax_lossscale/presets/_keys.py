"""The keys of checkpoints: what each holds, and how it is written and read.

In a declaration, a type stands for a `Key` that holds the argument of the key's
name.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._rules.engine import Engine


@dataclasses.dataclass(frozen=True)
class Key:
  """A key that holds a number of a rule or of its state."""

  holds: str  # "S", a name in `COUNTS`, or an argument's name.
  make: Callable[[Any], object]  # Converts the number to the system's type.
  first: int = 0  # The number that the system gives to the first step.
  is_read: bool = True  # False if the system saves it but does not read it.

  def write(self, numbers: Mapping[str, Any]) -> object:
    """Returns the value that the system would save."""
    return self.make(numbers[self.holds] + self.first)

  def read(self, value: object) -> Any:
    """Returns the number that was saved, or raises."""
    if self.holds == "S":
      return _read_scale(value)
    if self.holds in COUNTS:
      return _read_integer(value) - self.first
    return READERS.get(self.make, _read_number)(value)


@dataclasses.dataclass(frozen=True)
class ConstantKey:
  """A key that always holds the same value."""

  value: object

  def write(self, numbers: Mapping[str, Any]) -> object:
    """Returns the value."""
    del numbers
    return self.value

  def read(self, value: object) -> object:
    """Returns the value, or raises if another one was saved."""
    scalar = _read_scalar(value)
    if not isinstance(scalar, (bool, int, float)) or scalar != self.value:
      raise ValueError(f"must be {self.value!r}")
    return self.value


@dataclasses.dataclass(frozen=True)
class LeafKey:
  """A key that holds a leaf of a state in this library's own form."""

  leaf: jax.Array
  is_loss_scale: bool

  def read(self, value: object) -> np.ndarray:
    """Returns a value as an array that can replace the leaf, or raises."""
    if self.is_loss_scale:
      _read_scale(value)
    array, leaf = np.asarray(value), self.leaf
    if (
      array.shape != leaf.shape
      or not _arguments.is_numeric(value)
      or not np.can_cast(array.dtype, leaf.dtype, "same_kind")
    ):
      raise TypeError(f"must be {leaf.dtype}{list(leaf.shape)}")
    with np.errstate(over="ignore"):  # Values that are too large become inf.
      kept = array.astype(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.integer) and np.any(array != kept):
      raise ValueError(f"must fit into {leaf.dtype}")
    # A user's rule may begin with inf for a value that it does not know yet.
    if np.any(np.isfinite(leaf) & ~np.isfinite(kept)):
      raise ValueError(f"must be finite in {leaf.dtype}")
    return kept


class Count(NamedTuple):
  """A counter of the state, and the number that a system saves in its place."""

  counter: str
  # Both convert a number, given the engine and the number of all steps.
  write: Callable[[int, Engine, int], int] = lambda number, *_: number
  read: Callable[[int, Engine, int], int] = lambda number, *_: number


def _unwrap(steps: int, engine: Engine, _: int) -> int:
  """Converts a count that wraps around into the engine's clean steps."""
  # If the interval was shortened, a saved count may be past it. Such a count
  # wraps around on the next step, without growing S.
  interval = engine.growth_interval
  return steps if steps < interval else (steps + 1) % interval - 1


def _hysteresis_left(number: int, engine: Engine, _: int) -> int:
  return engine.hysteresis - number


def _last_overflow(number: int, engine: Engine, steps: int) -> int:
  return steps - 1 - number + engine.initial_clean_steps


COUNTS = {
  "clean_steps": Count("clean_steps"),
  "overflows": Count("overflows"),
  "steps": Count("total_steps"),
  # Clean steps that count towards the next growth.
  "window_steps": Count(
    "clean_steps",
    write=lambda number, engine, _: max(number, 0) % engine.growth_interval,
    read=_unwrap,
  ),
  # Overflows that a shrink still waits for. The conversion is its own inverse.
  "hysteresis_left": Count("overflows", _hysteresis_left, _hysteresis_left),
  # Those overflows, but at least 1. A hysteresis of 1 needs no count.
  "overflows_to_shrink": Count(
    "overflows",
    write=lambda number, engine, _: max(engine.hysteresis - number, 1),
    read=lambda number, engine, _: (
      engine.hysteresis - number if engine.hysteresis > 1 else 0
    ),
  ),
  # The last step that overflowed; its own inverse, too.
  "last_overflow": Count("clean_steps", _last_overflow, _last_overflow),
}


def counts(engine: Engine, state: Any) -> dict[str, int]:
  """Returns a state's counters as systems save them."""
  steps = int(state.total_steps or 0)
  counters = state._asdict() | {"total_steps": steps}
  return {
    name: count.write(int(counters[count.counter]), engine, steps)
    for name, count in COUNTS.items()
  }


def counters(
  engine: Engine, numbers: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Returns a state's counters, int32[]; the inverse of `counts`."""
  steps, largest = numbers.get("steps", 0), _arguments.LARGEST_COUNT
  read = {
    count.counter: count.read(numbers[name], engine, steps)
    for name, count in COUNTS.items()
    if name in numbers
  }
  return {x: jnp.int32(np.clip(n, -largest, largest)) for x, n in read.items()}


# For systems that keep S and their counts in tensors with one element.
one_float32 = functools.partial(np.full, 1, dtype=np.float32)
one_int32 = functools.partial(np.full, 1, dtype=np.int32)


def int_or_float(value: float) -> float:
  """Returns a number unchanged, for systems that keep integers as integers."""
  return value


def _read_scale(value: object) -> float:
  """Returns a value as a Python number, which must be usable as S."""
  number = _read_number(value)
  if not _arguments.is_usable_scale(number):
    raise ValueError("must be a positive normal float32")
  return number


def _read_scalar(value: object) -> object:
  """Returns a scalar or one-element array as a Python scalar."""
  if isinstance(value, (bool, int, float, str, type(None), Mapping)):
    return value
  array = np.asarray(value)  # Also reads a framework's tensor on the CPU.
  is_number = array.size == 1 and _arguments.is_numeric(value)
  return array.item() if is_number else value


def _read_number(value: object) -> float:
  number = _read_scalar(value)
  if isinstance(number, bool) or not isinstance(number, (int, float)):
    raise TypeError("must be a number")
  try:
    return float(number)
  except OverflowError:
    raise ValueError("must be finite in float32") from None


def _read_int_or_float(value: object) -> object:
  _read_number(value)  # Raises unless it is an int or a float.
  return _read_scalar(value)


def _read_integer(value: object) -> int:
  number = _read_scalar(value)
  if isinstance(number, bool) or not isinstance(number, int):
    raise TypeError("must be an integer")
  if abs(number) > _arguments.LARGEST_COUNT:
    raise ValueError("must fit into int32")
  return number


def _read_flag(value: object) -> bool:
  flag = _read_scalar(value)
  if not isinstance(flag, bool):
    raise TypeError("must be True or False")
  return flag


# The keys of a system by name; None for one that is allowed but not needed.
Keys = Mapping[str, Key | ConstantKey | None]

# The types in which arguments are saved, each with its inverse.
READERS: dict[Callable[[Any], object], Callable[[object], object]] = {
  float: _read_number,
  int_or_float: _read_int_or_float,
  int: _read_integer,
  bool: _read_flag,
}
