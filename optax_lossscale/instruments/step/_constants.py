"""Known numbers: which operations have a number, or an input, as their result.

A flag or a count of steps decides which branch a step takes, so the proof
computes with numbers that are the same in all elements of an array.
"""

from collections.abc import Callable
from collections.abc import Mapping
import math
import operator

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.axes import aval
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Form
from optax_lossscale.instruments.step import _identity
from optax_lossscale.instruments.step._degrees import ANY
from optax_lossscale.instruments.step._degrees import FREE
from optax_lossscale.instruments.step._degrees import Number
from optax_lossscale.instruments.step._values import DATA
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
NEUTRAL: Mapping[Form, Number] = {
  Form.PLUS: 0,
  Form.MINUS: 0,
  Form.TIMES: 1,
  Form.OVER: 1,
  Form.ALL: True,
  Form.ANY: False,
}
# Numbers that decide the result as either input, unless the other may be NaN.
_ABSORBING = {Form.TIMES: 0, Form.ALL: False, Form.ANY: True}


def is_number(constant: Number | None, number: Number) -> bool:
  """Returns whether a known number is another; no flag is a number."""
  is_alike = isinstance(constant, bool) == isinstance(number, bool)
  return is_alike and constant == number


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
  is_any = is_float and bool(np.all((array == 0) | ~np.isfinite(array)))
  is_real = array.size > 0 and array.dtype.kind != "c"
  is_one = is_real and bool(np.all(array == array.flat[0]))
  constant = array.flat[0].item() if is_one else None
  return Value(ANY if is_any else FREE, constant)


def transfer(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns a result that is an input or a number, or else None."""
  rule = _RULES.get(operations.of(equation).form)
  return rule(equation, inputs) if rule else None


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


def _selected(_: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns the choice of a known condition."""
  condition, *choices = inputs
  if condition.constant is None:
    return None
  return passed(choices[int(condition.constant)], condition)


def _whole(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns an array that is taken whole, in the order of its axes."""
  after = aval(equation.outvars[0])
  order = equation.params.get("permutation", range(after.ndim))
  is_whole = aval(equation.invars[0]).shape == after.shape
  return inputs[0] if is_whole and [*order] == [*range(after.ndim)] else None


def _extreme(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns the number that all elements are, and so is the largest."""
  is_empty = 0 in aval(equation.invars[0]).shape
  if len(inputs) > 1 or inputs[0].constant is None or is_empty:
    return None
  return inputs[0].but(identity=None)


def _flipped(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns the opposite of a known flag."""
  constant = inputs[0].constant
  return number(not constant) if isinstance(constant, bool) else None


def _folded(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns the number that an operation makes of numbers."""
  name, constants = equation.primitive.name, [x.constant for x in inputs]
  if name in _FOLDED and None not in constants:
    with np.errstate(all="ignore"):
      found = np.asarray(_FOLDED[name](*constants))
    return number(found.astype(aval(equation.outvars[0]).dtype))
  is_test = operations.of(equation).elements is Elements.TESTS
  if not is_test or name not in _FOLDED or _has_floats(equation):
    return None
  # A count and the next one differ, whatever they are.
  apart = _identity.apart(*inputs)
  return None if apart is None else number(_FOLDED[name](apart, 0))


def _arithmetic(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns a result of two inputs of which one may decide it alone."""
  form, after = operations.of(equation).form, aval(equation.outvars[0])
  constants = [x.constant for x in inputs]
  if len(inputs) == 1:
    return _extreme(equation, inputs)
  absorbing = None if _has_floats(equation) else _ABSORBING.get(form)
  if absorbing is not None and any(is_number(x, absorbing) for x in constants):
    return number(np.full((), absorbing, after.dtype))
  if (found := _folded(equation, inputs)) is not None:
    return found
  if is_number(constants[1], NEUTRAL[form]):
    return inputs[0]
  # 0 - x and 1 / x are not x.
  is_symmetric = form not in (Form.MINUS, Form.OVER)
  is_neutral = is_symmetric and is_number(constants[0], NEUTRAL[form])
  return inputs[1] if is_neutral else None


def _total(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns the sum of equal numbers; only of 0 if they may round."""
  constant, after = inputs[0].constant, aval(equation.outvars[0])
  if constant is None or (_has_floats(equation) and constant != 0):
    return None
  count = aval(equation.invars[0]).size // max(after.size, 1)
  return number(np.asarray(constant * count).astype(after.dtype))


def _has_floats(equation: core.JaxprEqn) -> bool:
  return any(leaves.is_gradient(x.aval) for x in equation.invars)


_RULES: Mapping[Form, Callable[[core.JaxprEqn, Values], Value | None]] = {
  Form.SELECTS: _selected,
  Form.SLICES: _whole,
  Form.TURNS: _whole,
  Form.EXTREME: _extreme,
  Form.FLIPS: _flipped,
  Form.FOLDS: _folded,
  Form.TOTALS: _total,
  **dict.fromkeys(NEUTRAL, _arithmetic),
}
