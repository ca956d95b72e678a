"""A value in a mixed-precision program, and its copies in other dtypes."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import enum
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base.formats import largest
from optax_lossscale._jaxpr.interpreter import Array


class Kind(enum.Enum):
  """The origin of a value, which decides when operations follow its dtype."""

  # Each string says why the operation that made the value is in float32.
  # Computed by the network.
  COMPUTED = "follows an input"
  # An argument or closed-over value, even after it is moved or reshaped.
  GIVEN = "inputs only"
  # A number in the program.
  CONSTANT = "constants only"
  # In float32 by default: a sum, or a value computed only from values that are
  # given, such as positions, noise or an embedding. At O2 and O3, an
  # operation with a computed input ignores the dtype of a statistic.
  STATISTIC = "a statistic"
  # The root of a statistic, or the root's reciprocal: the divisor in a norm.
  ROOT = "root of a sum"
  # An intermediate value of a norm: centered, squared or normalized.
  NORMALIZING = "part of a norm"

  @property
  def is_neutral(self) -> bool:
    """True if operations follow other inputs rather than one of this kind."""
    return self in (Kind.GIVEN, Kind.CONSTANT)

  @property
  def stays_float32(self) -> bool:
    """True if operations with only inputs of this kind may stay in float32."""
    return self.is_neutral or self is Kind.STATISTIC


class Operand(NamedTuple):
  """What a product multiplies: numbers in a format, times `unscale`."""

  array: Array
  # float32[], a power of two; None in 16 bits.
  unscale: Array | None


# The smallest and largest magnitude of some numbers, or None if there are none.
Span = tuple[float, float] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
  """A value, with a converted copy for each dtype requested so far."""

  array: Array  # In the dtype in which it was computed or given.
  # The value's dtype in the original program; None if it is no array there.
  written: Any
  kind: Kind = Kind.COMPUTED
  number: float | None = None  # The number that a constant holds, if known.
  # The range of the numbers in the program that were added to the value,
  # multiplied with it or written into it.
  span: Span = None
  # The move that made this value and the move's input, if the input may be
  # converted instead. A converted input can serve several moves, and moves
  # between devices with fewer bytes.
  source: "tuple[core.JaxprEqn, Value] | None" = None
  is_mask: bool = False  # Made from booleans, as a one-hot vector is.
  _versions: dict[np.dtype, Array] = dataclasses.field(
    default_factory=dict, init=False
  )
  # What products multiply instead, by the format.
  operands: dict[np.dtype, Operand] = dataclasses.field(
    default_factory=dict, init=False
  )

  @property
  def dtype(self) -> np.dtype:
    """The dtype of `array`."""
    return self.array.dtype

  @property
  def is_float(self) -> bool:
    """True if the value has a real floating dtype."""
    return leaves.is_real(self.array)

  def in_dtype(self, dtype: np.dtype) -> Array:
    """Returns the array in a dtype, converting it only the first time."""
    if self.dtype == dtype:
      return self.array
    if dtype not in self._versions:
      self._versions[dtype] = self._make_version(dtype)
    return self._versions[dtype]

  def restore(self) -> Array:
    """Returns the array in its dtype in the original program."""
    return self.in_dtype(self.written) if self.is_float else self.array

  def convert(self, dtype: np.dtype) -> "Value":
    """Returns the value after a conversion that the program itself makes."""
    dtype = np.dtype(dtype)
    array = self.in_dtype(dtype)
    result = Value(array, dtype, self.kind, self.number, self.span)
    if dtype.itemsize > self.dtype.itemsize:
      # Widening loses nothing, so converting back gives the same array.
      result._versions[self.dtype] = self.array
    return result

  def with_array(self, array: Array) -> "Value":
    """Returns the value for a loop body or function that gets it as `array`."""
    # A known number is the same everywhere. Any other value may arrive only in
    # part, as one slice of a scan's input or as one shard.
    if self.number is not None and isinstance(self.array, np.ndarray):
      return self
    return Value(array, self.written, self.kind, self.number, self.span)

  @property
  def outline(self) -> "Value":
    """The value with its array's type instead of the array, safe to keep."""
    # JAX keeps a derivative rule as long as the compiled function. The rule
    # must not keep alive the tracers that existed when it was made.
    return self.with_array(jax.typeof(self.array))

  def fits(self, dtype: np.dtype) -> bool:
    """Returns whether `dtype` has room for the program's numbers."""
    # They must neither overflow nor underflow, but may be rounded.
    if self.span is None:
      return True
    tiny = float(jax.numpy.finfo(dtype).tiny)
    return tiny <= self.span[0] and not self.exceeds(dtype)

  def exceeds(self, dtype: np.dtype) -> bool:
    """Returns whether one of the program's numbers would be inf in `dtype`."""
    return self.span is not None and self.span[1] > largest(dtype)

  def _make_version(self, dtype: np.dtype) -> Array:
    if isinstance(self.array, np.ndarray | np.generic):
      with np.errstate(over="ignore"):
        return np.asarray(self.array).astype(dtype)
    # A gradient is summed over devices before it is converted.
    if self.source is None or self.source[0].primitive.name == "reshard":
      return lax.convert_element_type(self.array, dtype)
    move, value = self.source
    parameters = move.primitive.get_bind_params(move.params)
    return move.primitive.bind(value.in_dtype(dtype), **parameters)


def make_given(array: Array, aval: object) -> Value:
  """Returns an argument as a `Value`."""
  dtype = getattr(aval, "dtype", None)
  if isinstance(array, np.ndarray | np.generic):
    array = np.asarray(array, dtype)
  return Value(array, dtype, Kind.GIVEN)


def make_constant(literal: core.Literal) -> Value:
  """Returns a number in the program as a `Value`."""
  number, dtype = literal.val, getattr(literal.aval, "dtype", None)
  if not leaves.is_gradient(literal.aval):
    return Value(number, dtype, Kind.CONSTANT)
  array = np.asarray(number, dtype)
  if array.ndim or np.iscomplexobj(array):
    return Value(array, dtype, Kind.CONSTANT)
  magnitude = abs(float(array))
  span = (magnitude, magnitude) if 0 < magnitude < np.inf else None
  return Value(array, dtype, Kind.CONSTANT, float(array), span)


def make_outputs(
  equation: core.JaxprEqn,
  arrays: Sequence[Array],
  spans: Sequence[Span],
  kind: Kind = Kind.COMPUTED,
) -> list[Value]:
  """Returns the outputs of an equation as `Value`s."""
  return [
    Value(array, getattr(variable.aval, "dtype", None), kind, span=span)
    for variable, array, span in zip(
      equation.outvars, arrays, spans, strict=True
    )
  ]


def join_spans(spans: Iterable[Span]) -> Span:
  """Returns the smallest span that covers all of these spans."""
  found = [span for span in spans if span is not None]
  if not found:
    return None
  return min(x[0] for x in found), max(x[1] for x in found)


def get_arrays(values: Sequence[Value]) -> list[Array]:
  """Returns the arrays of values."""
  return [value.array for value in values]


def with_arrays(
  values: Sequence[Value], arrays: Sequence[Array]
) -> list[Value]:
  """Returns `values` for a function that receives them as `arrays`."""
  return [x.with_array(array) for x, array in zip(values, arrays, strict=True)]
