"""A value of a program in mixed precision, and its versions by dtype."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import enum
from typing import Any

import jax
from jax import lax
from jax.extend import core
import numpy as np

from optax_lossscale._base import bits


class Kind(enum.Enum):
  """Where a value comes from, which says how much its dtype counts."""

  # The texts say why what made it is in float32.
  # What the network computes.
  COMPUTED = "follows an input"
  # An argument, or what the function closed over; also moved or reshaped.
  GIVEN = "inputs only"
  # A number in the program.
  CONSTANT = "constants only"
  # Float32, though nobody asked for it: a sum, or what is derived from given
  # values alone, such as positions, noise and an embedding. At the levels that
  # lower everything it has no say beside what is computed.
  STATISTIC = "a statistic"
  # The root of a statistic, or its reciprocal, as norms divide by.
  ROOT = "root of a sum"
  # Centered or squared or normalized: what a norm is in the middle of.
  NORMALIZING = "part of a norm"

  @property
  def is_neutral(self) -> bool:
    """Whether it does not say in which precision to compute."""
    return self in (Kind.GIVEN, Kind.CONSTANT)

  @property
  def stays_float32(self) -> bool:
    """Whether it may be left in float32 beside others of that sort."""
    return self.is_neutral or self is Kind.STATISTIC


# The smallest and the largest magnitude of some numbers, None of none.
Span = tuple[float, float] | None


@dataclasses.dataclass(eq=False)
class Value:
  """A value as it is held, and in what other dtypes it was wanted."""

  array: Any  # In the dtype that it was computed or given in.
  written: Any  # The dtype that it has in the original program.
  kind: Kind = Kind.COMPUTED
  number: float | None = None  # Of a constant, if it is known.
  # Of the program's numbers that were added to it, multiplied with it or put
  # into it.
  span: Span = None
  # The move that made it of another value, where moving and converting may
  # change places: the other one is then converted, once for all made of it.
  source: "tuple[core.JaxprEqn, Value] | None" = None
  _versions: dict[Any, Any] = dataclasses.field(default_factory=dict)

  @property
  def dtype(self) -> Any:
    """The dtype in which the value is held."""
    return self.array.dtype

  @property
  def is_float(self) -> bool:
    """Whether it has a real floating dtype."""
    dtype = bits.part_dtype(self.array)
    return dtype is not None and dtype == self.array.dtype

  def in_dtype(self, dtype: Any) -> Any:
    """Returns the array in a dtype, converted once whoever asks for it."""
    if self.dtype == dtype:
      return self.array
    if dtype not in self._versions:
      self._versions[dtype] = self._convert(dtype)
    return self._versions[dtype]

  def converted(self, dtype: Any) -> "Value":
    """Returns the value that the program itself converts it to."""
    result = Value(
      self.in_dtype(dtype), np.dtype(dtype), self.kind, self.number, self.span
    )
    if np.dtype(dtype).itemsize > self.dtype.itemsize:
      # Nothing was lost, so back it is what it was.
      result._versions[self.dtype] = self.array
    return result

  def received(self, array: Any) -> "Value":
    """Returns the value as the body of a loop or another function gets it.

    A known number is the same everywhere. Of any other array there may be only
    a part: what a scan goes over, or what is sharded.
    """
    if self.number is not None and isinstance(self.array, np.ndarray):
      return self
    return Value(array, self.written, self.kind, self.number, self.span)

  @property
  def outline(self) -> "Value":
    """The value with its type in place of its array, for what stays around.

    JAX keeps a derivative rule as long as a compiled function, and what was
    being traced when it was made is not to be kept with it.
    """
    return self.received(jax.typeof(self.array))

  def fits(self, dtype: Any) -> bool:
    """Returns whether `dtype` has room for the numbers of the program in it.

    Neither overflow nor underflow; rounding does not count.
    """
    if self.span is None:
      return True
    tiny = float(jax.numpy.finfo(dtype).tiny)
    return tiny <= self.span[0] and not self.exceeds(dtype)

  def exceeds(self, dtype: Any) -> bool:
    """Returns whether one of these numbers would be inf in `dtype`."""
    largest = float(jax.numpy.finfo(dtype).max)
    return self.span is not None and self.span[1] > largest

  def _convert(self, dtype: Any) -> Any:
    if isinstance(self.array, np.ndarray | np.generic):
      with np.errstate(over="ignore"):
        return np.asarray(self.array).astype(dtype)
    if self.source is None:
      return lax.convert_element_type(self.array, dtype)
    move, value = self.source
    parameters = move.primitive.get_bind_params(move.params)
    return move.primitive.bind(value.in_dtype(dtype), **parameters)


def given(array: Any, aval: Any) -> Value:
  """Returns the value of an argument."""
  dtype = getattr(aval, "dtype", None)
  if isinstance(array, np.ndarray | np.generic):
    array = np.asarray(array, dtype)
  return Value(array, dtype, Kind.GIVEN)


def constant(number: Any, aval: Any) -> Value:
  """Returns the value of a literal."""
  if not hasattr(aval, "dtype") or not bits.part_dtype(aval):
    return Value(number, getattr(aval, "dtype", None), Kind.CONSTANT)
  array = np.asarray(number, aval.dtype)
  if array.ndim or np.iscomplexobj(array):
    return Value(array, aval.dtype, Kind.CONSTANT)
  known = float(array)
  magnitude = abs(known)
  span = (magnitude, magnitude) if 0 < magnitude < np.inf else None
  return Value(array, aval.dtype, Kind.CONSTANT, known, span)


def union(spans: Iterable[Span]) -> Span:
  """Returns the span of all numbers in several."""
  found = [span for span in spans if span is not None]
  if not found:
    return None
  return min(x[0] for x in found), max(x[1] for x in found)


def arrays(values: Sequence[Value]) -> list[Any]:
  """Returns the arrays of values, as they are held."""
  return [value.array for value in values]


def received(values: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
  """Returns values as the body of another function gets them."""
  return [x.received(array) for x, array in zip(values, arrays, strict=True)]
