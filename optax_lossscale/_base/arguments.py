"""Checks of arguments. Errors and warnings name the argument and the remedy."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import difflib
import fractions
import functools
import inspect
import math
import numbers
import operator
import os
import pathlib
import re
import sys
from typing import Any
from typing import NamedTuple
from typing import overload
from typing import ParamSpec
from typing import TypeVar
import warnings

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike
import numpy as np

# S is a normal float32 number, since a backend may flush subnormals to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = float(np.finfo(np.float32).max)

# Counters are int32 and stop at this value instead of wrapping around.
LARGEST_COUNT = 2**31 - 1

# Arguments of other systems, each with the one to use here.
_OF_OTHERS = {
  "enabled": "loss_scaling(inner, None) switches loss scaling off, and the "
  "level O0 switches autocast off",
  "fin_steps": "the count is in the state",
  "backoff": "the argument is `backoff_factor`",
  "period": "the argument is `growth_interval`",
  "factor": "the arguments are `growth_factor` and `backoff_factor`",
  "scale_factor": "the arguments are `growth_factor` and `backoff_factor`",
  "scale_window": "the argument is `growth_interval`",
  "device": "a rule has no device",
  "loss_scale": "the argument is `rule`",
  "compute_dtype": "the argument is `dtype`",
}

# Libraries whose frames are not the user's code.
_LIBRARIES = {
  *("contextlib", "dataclasses", "flax", "functools", "jax", "optax"),
  __name__.partition(".")[0],
}

# The type of an argument that a function may return unchanged.
Value = TypeVar("Value")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class WiringWarning(UserWarning):
  """Loss scaling is set up so that a run would go wrong without an error.

  Constructors, `init`, and traced or eager steps emit it; a compiled step never
  does. It points to a mistake or, rarely, to something intended. To silence
  it::

    warnings.filterwarnings("ignore", category=ols.WiringWarning)

  Examples:
    >>> import warnings
    >>> import optax_lossscale as ols
    >>> with warnings.catch_warnings(record=True) as caught:
    ...   warnings.simplefilter("always")
    ...   rule = ols.FixedLossScale(1000.0)
    >>> print(caught[0].message)
    `scale` should be a power of two, so that scaling rounds nothing, got \
1000.0: take 1024.0.
  """


def warn(message: str) -> None:
  """Warns at the user's line: the first frame outside the libraries."""
  level, frame = 1, sys._getframe()
  while frame.f_back is not None and (
    frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES
  ):
    level, frame = level + 1, frame.f_back
  warnings.warn(message, WiringWarning, stacklevel=level)


@overload
def is_usable_scale(loss_scale: float) -> bool: ...
@overload
def is_usable_scale(loss_scale: jax.Array) -> jax.Array: ...
def is_usable_scale(loss_scale: float | jax.Array) -> bool | jax.Array:
  """Returns whether S is a positive normal float32, as a bool or bool[]."""
  if isinstance(loss_scale, float):
    # A printed float32 may be out of bounds until it is rounded to float32.
    with np.errstate(over="ignore"):
      loss_scale = float(np.float32(loss_scale))
  return (loss_scale >= SMALLEST_SCALE) & (loss_scale <= LARGEST_SCALE)


def shown(value: object, most: int = 100) -> str:
  """Returns a user's value as text for an error, truncated if it is long."""
  if isinstance(value, jax.core.Tracer):
    return f"a traced {jax.typeof(value)}"
  try:
    text = re.sub(r"\b\w+Tracer\(", "Traced(", repr(value))
  except ValueError:  # Python prints at most 4300 digits.
    return "an integer of more than 4300 digits"
  size = f"{len(text)} characters"
  if hasattr(value, "shape"):
    size = f"shape {value.shape}"
  return text if len(text) <= most else f"{text[:most]}... ({size})"


def printable(text: object) -> str:
  """Returns text, such as a file's name, with escapes that do no harm."""
  # A terminal would obey control codes and the marks that reverse a name, and
  # no encoding has the surrogates of a name that is not UTF-8.
  return "".join(x if x.isprintable() else repr(x)[1:-1] for x in str(text))


def kind_of(value: object) -> str:
  """Returns the name of a value's type for an error; "jax.Array" for arrays."""
  return "jax.Array" if isinstance(value, jax.Array) else type(value).__name__


def is_numeric(value: object) -> bool:
  """Returns False for values that NumPy would misread as numbers."""
  # NumPy reads bytes as character codes, and dates and time spans as integers.
  if isinstance(value, (jax.Array, np.ndarray, np.generic)):
    dtype = value.dtype
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
    return bool(is_number) and dtype.kind != "m"
  return not isinstance(value, (str, bytes, bytearray, memoryview))


def is_value(value: object) -> bool:
  """Returns whether a value is a real number, a flag, or an array of them."""
  kinds = (numbers.Real, jax.Array, np.ndarray, np.generic)
  is_array = isinstance(value, kinds) or hasattr(value, "__jax_array__")
  return is_array and is_numeric(value) and not np.iscomplexobj(value)


def read_dtype(dtype: object) -> tuple[np.dtype | None, str]:
  """Returns a floating dtype, or None for anything else, and its name."""
  if not isinstance(dtype, (str, type, np.dtype)):
    return None, shown(dtype)
  try:
    found = jnp.dtype(dtype)
  except (TypeError, ValueError):  # NumPy reads "p:f16,c" as a record.
    return None, shown(dtype)
  # NumPy reads "f16" as 16 bytes, a float128 that JAX does not have.
  is_float = jnp.issubdtype(found, jnp.floating) and found.itemsize <= 8
  return found if is_float else None, found.name


def check_dtype(
  name: str, dtype: object, *, example: str = "jnp.float16", place: str = ""
) -> np.dtype:
  """Returns `dtype` as a floating dtype; an error ends with `place`."""
  found, got = read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"`{name}` must be a floating-point dtype such as {example}, got {got}"
      f"{place}."
    )
  return found


def check_function(fun: object, name: str = "fun") -> None:
  """Raises if the argument `name` is not a function."""
  dtype, got = read_dtype(fun)
  # jnp.float16 can be called, but was meant for another argument.
  if dtype is not None or not callable(fun):
    got = kind_of(fun) if dtype is None else f"the dtype {got}"
    raise TypeError(
      f"`{name}` must be a function, got {got}; pass the "
      "function itself, and its arguments to what is returned."
    )
  # Outside of `apply` such a module has no parameters.
  if any(
    str(x) == "<class 'flax.linen.module.Module'>" for x in type(fun).__mro__
  ):
    raise TypeError(
      f"`{name}` must be a function of arrays, got the Flax module "
      f"{kind_of(fun)}; pass model.apply, which takes the variables first."
    )


def check_by_position(fun: Callable[..., object], name: str) -> None:
  """Raises if the function `name` needs an argument by keyword."""
  for x in inspect.signature(fun).parameters.values():
    if x.kind == x.KEYWORD_ONLY and x.default is x.empty:
      raise TypeError(
        f"`{name}` must take its arguments by position, got one by keyword, "
        f"{x.name!r}; pass functools.partial({name}, {x.name}=...)."
      )


def did_you_mean(
  name: object,
  names: Iterable[str],
  quote: str = "'",
  most: int = 1,
  cutoff: float = 0.6,
) -> str:
  """Returns the end of an error: the names that may have been meant, if any."""
  # Ignore case, since upper and lower case are easily confused.
  known = {x.lower(): x for x in names}
  close = difflib.get_close_matches(str(name).lower(), known, most, cutoff)
  listed = " or ".join(f"{quote}{known[x]}{quote}" for x in close)
  return f"; did you mean {listed}?" if close else ""


def check_known(
  function: str,
  names: Iterable[str],
  given: Iterable[str],
  *,
  of_others: bool = False,
) -> None:
  """Raises for an unknown argument, first for one that other systems have."""
  if unknown := [x for x in given if x not in names]:
    theirs = [x for x in unknown if of_others and x in _OF_OTHERS]
    name = (theirs or unknown)[0]
    remedy = did_you_mean(name, names, quote="`") or "."
    if theirs:
      remedy = f"; {_OF_OTHERS[name]}."
    raise TypeError(
      f"`{function}` takes the arguments {', '.join(names)}, got "
      f"{name!r}{remedy}"
    )


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
  """Returns a function that explains arguments that it does not have."""
  names = list(inspect.signature(function).parameters)

  @functools.wraps(function)
  def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    check_known(function.__name__, names, kwargs, of_others=True)
    return function(*args, **kwargs)

  return call


def check_enabled(name: str, dtype: DTypeLike | None) -> None:
  """Raises if `dtype` is float64 while JAX has float64 disabled."""
  if dtype == np.float64 and not jax.config.jax_enable_x64:
    raise ValueError(
      f"`{name}` must be a dtype that JAX has enabled, got float64; call "
      'jax.config.update("jax_enable_x64", True) first, or take float32.'
    )


def check_number(name: str, value: Any) -> float:
  """Returns `value` as a Python float, which must be finite in float32."""
  if isinstance(value, jax.core.Tracer):
    raise TypeError(
      f"`{name}` must be a number that is known, got "
      f"{shown(value)}; the state holds values that change during training."
    )
  if not _is_real_scalar(value):
    raise TypeError(
      f"`{name}` must be a number, got {shown(value)} of type {kind_of(value)}."
    )
  if hasattr(value, "dtype"):
    value = value.item()  # NumPy would compare in the dtype of `value`.
  # S is a float32, and all from here on is rounded to inf. The comparison is
  # exact, also for an int that no float can hold.
  if not abs(value) < 2**128 - 2**103:
    raise ValueError(f"`{name}` must be finite in float32, got {shown(value)}.")
  return float(value)


def _is_real_scalar(value: object) -> bool:
  if isinstance(value, (jax.Array, np.ndarray, np.generic)):
    is_number = is_numeric(value) and value.dtype != bool
    return is_number and value.ndim == 0 and not jnp.iscomplexobj(value)
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_finite(name: str, value: Value) -> Value | float:
  """Returns an int or Fraction as a float, and other values unchanged."""
  # NumPy and JAX raise OverflowError for a number that no float can hold.
  is_exact = type(value) in (int, fractions.Fraction)
  return check_number(name, value) if is_exact else value


def as_real_scalar(name: str, value: object) -> jax.Array | np.ndarray:
  """Returns `value` as a NumPy or JAX array, in float32 or float64."""
  if not _is_real_scalar(value):
    raise TypeError(
      f"`{name}` must be a real scalar, got {shown(value)} of type "
      f"{kind_of(value)}."
    )
  if not isinstance(value, (jax.Array, np.ndarray)):
    # Use a NumPy array, because JAX would round a float to float32.
    value = np.asarray(as_finite(name, value))
  is_double = value.dtype == jnp.float64
  return value if is_double else value.astype(jnp.float32)


def check_scale(name: str, value: object) -> float:
  """Returns `value` as a float, which must be a usable loss scale."""
  number = check_number(name, value)
  if number <= 0:
    raise ValueError(f"`{name}` must be positive, got {shown(value)}.")
  if not is_usable_scale(number):
    raise ValueError(
      f"`{name}` must be at least 2**-126, the smallest normal float32 number, "
      f"got {shown(value)}."
    )
  return number


def check_first_scale(name: str, value: object, interval: str = "") -> float:
  """Checks like `check_scale`, and warns if scaling would round gradients."""
  number = check_scale(name, value)
  if math.frexp(np.float32(number))[0] != 0.5:
    nearest = 2.0 ** min(round(math.log2(number)), 127)
    remedy = f"take {nearest!r}"
    if interval and number.is_integer():
      remedy += f"; if the interval was meant: {interval}={number:.0f}"
    warn(
      f"`{name}` should be a power of two, so that scaling rounds nothing, got "
      f"{shown(value)}: {remedy}."
    )
  return number


def check_not_negative(name: str, value: object) -> float:
  """Returns `value` as a float, which must be at least 0."""
  number = check_number(name, value)
  if number < 0:
    raise ValueError(f"`{name}` must not be negative, got {shown(value)}.")
  return number


def check_integer(name: str, value: Any, *, unit: str = "steps") -> int:
  """Returns `value` as an int."""
  if not isinstance(value, (bool, jax.core.Tracer)):
    with contextlib.suppress(TypeError):
      return operator.index(value)
  number = f"an integer number of {unit}" if unit else "an integer"
  raise TypeError(
    f"`{name}` must be {number}, got {shown(value)} of type {kind_of(value)}."
  )


def check_steps(name: str, value: object) -> int:
  """Returns `value` as an int, which must be at least 0."""
  steps = check_integer(name, value)
  check_not_negative(name, steps)
  return steps


def check_count(name: str, value: object, *, unit: str = "steps") -> int:
  """Returns `value` as an int, which must be from 1 to the largest int32."""
  count = check_integer(name, value, unit=unit)
  if not 1 <= count <= LARGEST_COUNT:
    raise ValueError(
      f"`{name}` must be between 1 and 2**31 - 1 {unit}, got {shown(value)}."
    )
  return count


def check_flag(name: str, value: object) -> bool:
  """Returns `value` as a bool; it must be True or False."""
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError(f"`{name}` must be True or False, got {shown(value)}.")
  return bool(value)


def check_choice(name: str, value: Value, choices: Sequence[object]) -> Value:
  """Returns `value`, which must be one of a few texts."""
  if not isinstance(value, str) or value not in choices:
    *others, last = map(repr, choices)
    raise ValueError(
      f"`{name}` must be {', '.join(others)} or {last}, got {shown(value)}."
    )
  return value


def check_file(name: str, value: object) -> pathlib.Path:
  """Returns the name of a file or a folder as a path."""
  if not isinstance(value, (str, os.PathLike)):
    raise TypeError(
      f"`{name}` must be a text or a pathlib.Path, got {shown(value)}."
    )
  return pathlib.Path(value)


def scale_of(state: object) -> jax.Array:
  """Returns the S in a rule's state."""
  loss_scale: jax.Array | None = getattr(state, "loss_scale", None)
  if loss_scale is None:
    raise TypeError(
      f"`state` must be what the rule's init makes, got {kind_of(state)}."
    )
  return loss_scale


def as_flag(overflow: ArrayLike, loss_scale: jax.Array) -> jax.Array:
  """Returns a rule's `overflow` as bool[]; in Megatron it has shape [1]."""
  if not is_value(overflow):
    raise TypeError(
      f"`overflow` must be one flag, true or false, got {shown(overflow)}."
    )
  flag = jnp.asarray(overflow, bool)
  if flag.size == 1:
    return flag.reshape(())
  if flag.shape != jnp.shape(loss_scale):  # Equal for a batch of states.
    raise ValueError(
      "`overflow` must be one flag, true or false, got an array of shape "
      f"{flag.shape}; to skip when any of them is set, pass jnp.any(overflow)."
    )
  return flag


def check_fields(owner: object, **checks: Callable[[str, Any], object]) -> None:
  """Replaces fields of a frozen dataclass with the results of their checks."""
  for name, check in checks.items():
    object.__setattr__(owner, name, check(name, getattr(owner, name)))


class Places(NamedTuple):
  """Positions of the arguments to differentiate, and of those to split."""

  differentiated: tuple[int, ...]
  batched: tuple[int, ...]


def find_places(argnums: object, batch_argnums: object, count: int) -> Places:
  """Resolves `argnums` and `batch_argnums`, negative ones too, to positions."""
  differentiated = positions("argnums", argnums, count)
  if batch_argnums is None:
    batched = tuple(i for i in range(count) if i not in differentiated)
  else:
    batched = positions("batch_argnums", batch_argnums, count)
  both = sorted({*differentiated} & {*batched})
  if both:
    raise ValueError(
      "`batch_argnums` must name other arguments than `argnums`, got "
      f"{', '.join(map(str, both))} in both."
    )
  if not batched:
    raise ValueError(
      "`fun` must be given a batch beside what it is differentiated by, got "
      f"{count} positional arguments with `argnums`={shown(argnums)} and "
      f"`batch_argnums`={shown(batch_argnums)}; pass the batch by position."
    )
  return Places(differentiated, batched)


def argnums_as_tuple(argnums: Any) -> tuple[Any, ...]:
  """Returns a caller's `argnums` as a tuple."""
  return tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)


def like_argnums(argnums: object, values: tuple[Any, ...]) -> Any:
  """Returns `values`, or the only one of them if `argnums` is a number."""
  return values if isinstance(argnums, (tuple, list)) else values[0]


def positions(name: str, argnums: object, count: int) -> tuple[int, ...]:
  """Resolves `argnums`, negative ones too, to some of `count` positions."""
  numbers = tuple(
    check_integer(name, number, unit="") for number in argnums_as_tuple(argnums)
  )
  for number in numbers:
    if not -count <= number < count:
      raise ValueError(
        f"`{name}` must name positional arguments of the call, got "
        f"{shown(number)} for {count} of them."
      )
  numbers = tuple(number % count for number in numbers)
  if len({*numbers}) < len(numbers):
    raise ValueError(
      f"`{name}` must name each argument once, got {shown(argnums)}."
    )
  return numbers
