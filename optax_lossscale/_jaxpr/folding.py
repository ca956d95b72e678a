"""The results of operations on known numbers, without running them.

A number is known of an array if it is that of all its elements.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import operator

from jax.extend import core
from jax.typing import ArrayLike
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.axes import aval
from optax_lossscale._jaxpr.operations import Form

Number = bool | int | float

# The functions of the operations that fold numbers.
FOLDED: Mapping[str, Callable[..., ArrayLike]] = {
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


def is_number(constant: Number | None, number: Number) -> bool:
  """Returns whether a known number is another; no flag is a number."""
  is_alike = isinstance(constant, bool) == isinstance(number, bool)
  return is_alike and constant == number


def has_floats(equation: core.JaxprEqn) -> bool:
  """Returns whether an operation is given numbers that may be rounded."""
  return any(leaves.is_gradient(x.aval) for x in equation.invars)


def folded(
  equation: core.JaxprEqn, constants: Sequence[Number | None]
) -> np.ndarray | None:
  """Returns the number that an operation makes of numbers, if it is known."""
  form, after = operations.of(equation).form, aval(equation.outvars[0])
  fold = FOLDED.get(equation.primitive.name)
  found: ArrayLike | None = None
  # 0 times inf is NaN, so a float that is 0 decides nothing.
  absorbing = None if has_floats(equation) else _ABSORBING.get(form)
  if absorbing is not None and any(is_number(x, absorbing) for x in constants):
    found = absorbing
  elif None in constants:
    return None
  elif len(constants) > 1 or form is Form.FOLDS:
    with np.errstate(all="ignore"):
      found = fold(*constants) if fold else None
  elif form is Form.TOTALS and constants[0] is not None:
    found = _total(equation, constants[0])
  elif form is Form.FLIPS and isinstance(constants[0], bool):
    found = not constants[0]
  elif form in (Form.EXTREME, Form.ALL, Form.ANY):
    is_empty = 0 in aval(equation.invars[0]).shape
    found = None if is_empty else constants[0]
  return None if found is None else np.asarray(found).astype(after.dtype)


def _total(equation: core.JaxprEqn, number: Number) -> Number | None:
  """Returns the sum of equal numbers; only of 0 if they may round."""
  if has_floats(equation) and number != 0:
    return None
  before, after = aval(equation.invars[0]), aval(equation.outvars[0])
  return number * (before.size // max(after.size, 1))


def kept(
  equation: core.JaxprEqn, constants: Sequence[Number | None]
) -> int | None:
  """Returns the position of the input that the result is, if it is one."""
  form = operations.of(equation).form
  before, after = aval(equation.invars[0]), aval(equation.outvars[0])
  if form in (Form.SLICES, Form.TURNS):
    order = [*range(after.ndim)]
    is_whole = before.shape == after.shape
    is_ordered = [*equation.params.get("permutation", order)] == order
    return 0 if is_whole and is_ordered else None
  if form not in _NEUTRAL or len(constants) == 1:
    return None
  if is_number(constants[1], _NEUTRAL[form]):
    return 0
  # 0 - x and 1 / x are not x.
  is_symmetric = form not in (Form.MINUS, Form.OVER)
  return 1 if is_symmetric and is_number(constants[0], _NEUTRAL[form]) else None
