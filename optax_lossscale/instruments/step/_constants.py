"""Known numbers: which operations have a number, or an input, as their result.

A flag or a count of steps decides which branch a step takes, so the proof
computes with numbers that are the same in all elements of an array.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxpr import folding
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Form
from optax_lossscale.instruments.step import _identity
from optax_lossscale.instruments.step._values import ANY
from optax_lossscale.instruments.step._values import DATA
from optax_lossscale.instruments.step._values import FREE
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import passed
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

# Arrays with more elements are not looked at.
_MOST_ELEMENTS = 1 << 16


def number(x: jax.typing.ArrayLike) -> Value:
  """Returns what is known of an array of the program."""
  dtype = jnp.result_type(x)
  is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
  is_large = math.prod(np.shape(x)) > _MOST_ELEMENTS
  if is_large or is_key or isinstance(x, jax.ShapeDtypeStruct):
    return Value(sources=frozenset([DATA]))
  array = np.asarray(x)
  is_float = jnp.issubdtype(dtype, jnp.inexact)
  if is_float:
    array = array.astype(np.complex128 if array.dtype.kind == "c" else float)
  # These fit every degree: S times 0 is 0.
  is_any = is_float and bool(np.all((array == 0) | ~np.isfinite(array)))
  is_real = array.size > 0 and array.dtype.kind != "c"
  is_one = is_real and bool(np.all(array == array.flat[0]))
  constant = array.flat[0].item() if is_one else None
  return Value(ANY if is_any else FREE, constant)


def join(values: Values) -> folding.Number | None:
  """Returns the number that all values are."""
  # 1 equals True, and is another number.
  found = {(type(x.constant), x.constant) for x in values}
  return found.pop()[1] if len(found) == 1 else None


def cast(constant: folding.Number, dtype: np.dtype) -> Value | None:
  """Returns a number in a dtype, or None if each device rounds as it does."""
  with np.errstate(all="ignore"):
    found = np.asarray(constant).astype(dtype)
  is_exact = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.inexact)
  return number(found) if is_exact or found == constant else None


def transfer(operation: Operation) -> Value | None:
  """Returns a result that is an input or a number, or else None."""
  equation, inputs = operation.equation, operation.inputs
  constants = [x.constant for x in inputs]
  if operation.row.form is Form.SELECTS:
    if constants[0] is None:
      return None
    return passed(inputs[1 + int(constants[0])], inputs[0])
  if (found := folding.folded(equation, constants)) is not None:
    return number(found)
  if (index := folding.kept(equation, constants)) is not None:
    return inputs[index]
  fold = folding.FOLDED.get(operation.name)
  is_test = operation.row.elements is Elements.TESTS
  if not (fold and is_test) or folding.has_floats(equation):
    return None
  # A count and the next one differ, whatever they are.
  apart = _identity.apart(*inputs)
  return None if apart is None else number(fold(apart, 0))
