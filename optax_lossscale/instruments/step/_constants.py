"""Known numbers: which operations have a number, or an input, as their result.

A flag or a count of steps decides which branch a step takes, so the proof
computes with numbers that are the same in all elements of an array.
"""

from collections.abc import Callable
from collections.abc import Mapping
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Form
from optax_lossscale.instruments.step import _identity
from optax_lossscale.instruments.step._values import ANY
from optax_lossscale.instruments.step._values import DATA
from optax_lossscale.instruments.step._values import FREE
from optax_lossscale.instruments.step._values import Number
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import passed
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

# Arrays with more elements are not looked at.
_MOST_ELEMENTS = 1 << 16

_FOLDED: Mapping[str, Callable[..., jax.typing.ArrayLike]] = {
  **{x: getattr(np, x) for x in ("abs", "sqrt", "square")},
  **{
    x: getattr(operator, x)
    for x in ("add", "eq", "ge", "gt", "le", "lt", "mul", "ne", "neg", "sub")
  },
  **{"add_any": operator.add, "max": max, "min": min},
}
# Numbers that change nothing as the second input, or as one of the two.
_NEUTRAL: Mapping[Form, Number] = {
  Form.PLUS: 0,
  Form.MINUS: 0,
  Form.TIMES: 1,
  Form.OVER: 1,
  Form.ALL: True,
  Form.ANY: False,
}
# Numbers that decide the result as either input, unless the other may be NaN.
_ABSORBING = {Form.TIMES: 0, Form.ALL: False, Form.ANY: True}


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


def join(values: Values) -> Number | None:
  """Returns the number that all values are."""
  # 1 equals True, and is another number.
  found = {(type(x.constant), x.constant) for x in values}
  return found.pop()[1] if len(found) == 1 else None


def cast(constant: Number, dtype: np.dtype) -> Value | None:
  """Returns a number in a dtype, or None if each device rounds as it does."""
  with np.errstate(all="ignore"):
    found = np.asarray(constant).astype(dtype)
  is_exact = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.inexact)
  return number(found) if is_exact or found == constant else None


def transfer(operation: Operation) -> Value | None:
  """Returns a result that is an input or a number, or else None."""
  rule = _RULES.get(operation.row.form)
  return rule(operation) if rule else None


def _selected(operation: Operation) -> Value | None:
  """Returns the choice of a known condition."""
  condition, *choices = operation.inputs
  if condition.constant is None:
    return None
  return passed(choices[int(condition.constant)], condition)


def _whole(operation: Operation) -> Value | None:
  """Returns an array that is taken whole, in the order of its axes."""
  order = [*range(operation.after.ndim)]
  is_whole = operation.before.shape == operation.after.shape
  is_ordered = [*operation.equation.params.get("permutation", order)] == order
  return operation.inputs[0] if is_whole and is_ordered else None


def _extreme(operation: Operation) -> Value | None:
  """Returns the number that all elements are, and so is the largest."""
  first, *others = operation.inputs
  if others or first.constant is None or 0 in operation.before.shape:
    return None
  # It has another shape than the argument that it may be.
  return first.but(identity=None)


def _flipped(operation: Operation) -> Value | None:
  """Returns the opposite of a known flag."""
  constant = operation.inputs[0].constant
  return number(not constant) if isinstance(constant, bool) else None


def _folded(operation: Operation) -> Value | None:
  """Returns the number that an operation makes of numbers."""
  constants = [x.constant for x in operation.inputs]
  fold = _FOLDED.get(operation.name)
  if fold is None:
    return None
  if None not in constants:
    with np.errstate(all="ignore"):
      return number(np.asarray(fold(*constants)).astype(operation.after.dtype))
  is_test = operation.row.elements is Elements.TESTS
  if not is_test or _has_floats(operation):
    return None
  # A count and the next one differ, whatever they are.
  apart = _identity.apart(*operation.inputs)
  return None if apart is None else number(fold(apart, 0))


def _arithmetic(operation: Operation) -> Value | None:
  """Returns a result of two inputs of which one may decide it alone."""
  form, inputs = operation.row.form, operation.inputs
  if len(inputs) == 1:
    return _extreme(operation)
  # 0 times inf is NaN, so a float that is 0 decides nothing.
  absorbing = None if _has_floats(operation) else _ABSORBING.get(form)
  if absorbing is not None and any(x.is_number(absorbing) for x in inputs):
    return number(np.full((), absorbing, operation.after.dtype))
  if (found := _folded(operation)) is not None:
    return found
  first, second = inputs
  if second.is_number(_NEUTRAL[form]):
    return first
  # 0 - x and 1 / x are not x.
  is_symmetric = form not in (Form.MINUS, Form.OVER)
  is_neutral = is_symmetric and first.is_number(_NEUTRAL[form])
  return second if is_neutral else None


def _total(operation: Operation) -> Value | None:
  """Returns the sum of equal numbers; only of 0 if they may round."""
  constant, after = operation.inputs[0].constant, operation.after
  if constant is None or (_has_floats(operation) and constant != 0):
    return None
  count = operation.before.size // max(after.size, 1)
  return number(np.asarray(constant * count).astype(after.dtype))


def _has_floats(operation: Operation) -> bool:
  return any(leaves.is_gradient(x.aval) for x in operation.equation.invars)


_RULES: Mapping[Form, Callable[[Operation], Value | None]] = {
  Form.SELECTS: _selected,
  Form.SLICES: _whole,
  Form.TURNS: _whole,
  Form.EXTREME: _extreme,
  Form.FLIPS: _flipped,
  Form.FOLDS: _folded,
  Form.TOTALS: _total,
  **dict.fromkeys(_NEUTRAL, _arithmetic),
}
