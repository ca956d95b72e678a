"""The kinds of keys in a checkpoint, and how each is written and read.

A key declared as a type holds the argument of the key's name, saved as that
type. A key declared as None is allowed but not needed.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._rules.engine import Engine
from optax_lossscale._rules.loss_scales import FixedLossScale
from optax_lossscale.presets.declaration import PresetLossScale


@dataclasses.dataclass(frozen=True)
class StateKey:
  """A key that holds a part of the state."""

  holds: str  # "loss_scale", a counter, or a number that `_count` returns.
  make: Callable[[Any], object]  # Converts the number to the system's type.
  first: int = 0  # The number that the system gives to the first step.
  is_lost: bool = False  # The system saves it but does not read it again.


@dataclasses.dataclass(frozen=True)
class DerivedKey:
  """A key whose value is derived from an argument and is not used when read."""

  argument: str
  make: Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class ConstantKey:
  """A key that always holds the same value."""

  value: object


@dataclasses.dataclass(frozen=True)
class LeafKey:
  """A key that holds a leaf of a state in this library's own form."""

  leaf: jax.Array
  is_loss_scale: bool


def write(name: str, key: Any, rule: PresetLossScale, state: Any) -> object:
  """Returns the value that the system would save under a key."""
  arguments = dict(rule.arguments)
  match key:
    case ConstantKey(value):
      return value
    case DerivedKey(argument, make):
      return make(arguments[argument])
    case StateKey("loss_scale", make):
      return make(float(state.loss_scale))
    case StateKey(holds, make, first):
      if isinstance(rule._machine, FixedLossScale):
        return make(0)  # A fixed S has no counts.
      return make(_count(holds, rule._machine, state) + first)
  return key(arguments[name])


def read(key: Any, value: object) -> Any:
  """Returns the value saved under a key as a Python number or bool."""
  match key:
    case ConstantKey(constant):
      scalar = _read_scalar(value)
      if not isinstance(scalar, (bool, int, float)) or scalar != constant:
        raise ValueError(f"must be {constant!r}")
      return constant
    case DerivedKey():
      return _read_number(value)
    case StateKey("loss_scale"):
      return _read_scale(value)
    case StateKey():
      return _read_integer(value)
    case LeafKey(leaf, is_loss_scale):
      if is_loss_scale:
        _read_scale(value)
      return _read_leaf(leaf, value)
  return READERS[key](value)


def _count(holds: str, engine: Engine, state: Any) -> int:
  """Returns the number that a `StateKey` holds; `counters` is the inverse."""
  match holds:
    case "window_steps":  # Clean steps that count towards the next growth.
      return max(int(state.clean_steps), 0) % engine.growth_interval
    case "hysteresis_left":  # Overflows that a shrink still waits for.
      return engine.hysteresis - int(state.overflows)
    case "overflows_to_shrink":  # Those overflows, but at least 1.
      return max(engine.hysteresis - int(state.overflows), 1)
    case "steps":  # The number of the next step.
      return int(state.total_steps)
    case "last_overflow":  # The number of the last step that overflowed.
      clean_steps = int(state.clean_steps) - engine.initial_clean_steps
      return int(state.total_steps) - 1 - clean_steps
  return int(getattr(state, holds))


def counters(engine: Engine, held: Mapping[str, Any]) -> dict[str, int]:
  """Returns the counters of a state from the numbers that `StateKey`s hold."""
  found: dict[str, int] = {}
  for holds, number in held.items():
    match holds:
      case "clean_steps" | "overflows":
        found[holds] = number
      case "window_steps":
        found["clean_steps"] = _unwrap(number, engine.growth_interval)
      case "hysteresis_left":
        found["overflows"] = engine.hysteresis - number
      case "overflows_to_shrink":
        # With a hysteresis of 1, S shrinks on every overflow.
        is_counted = engine.hysteresis > 1
        found["overflows"] = engine.hysteresis - number if is_counted else 0
      case "steps":
        found["total_steps"] = number
        found["clean_steps"] = (
          number - held["last_overflow"] - 1 + engine.initial_clean_steps
        )
  return found


def _unwrap(steps: int, interval: int) -> int:
  """Converts a count that wraps around into the engine's clean steps.

  If the interval was shortened, a saved count may be past it. Such a count
  wraps around on the next step, without growing S.
  """
  if steps < interval:
    return steps
  return (steps + 1) % interval - 1


def one_float32(value: float) -> np.ndarray:
  """Returns float32[1], for systems that keep S in a one-element tensor."""
  return np.array([value], np.float32)


def one_int32(value: int) -> np.ndarray:
  """Returns int32[1]."""
  return np.array([value], np.int32)


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


def _read_leaf(leaf: jax.Array, value: object) -> np.ndarray:
  """Returns a value as an array that can replace a leaf."""
  array = np.asarray(value)
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


def _read_flag(value: object) -> bool:
  flag = _read_scalar(value)
  if not isinstance(flag, bool):
    raise TypeError("must be True or False")
  return flag


READERS: dict[object, Callable[[object], object]] = {
  float: _read_number,
  int_or_float: _read_int_or_float,
  int: _read_integer,
  bool: _read_flag,
}
