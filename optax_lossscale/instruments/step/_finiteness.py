"""Where an inf or NaN of scaled gradients may get lost on its way to `update`.

The rules are about data of S that no gate has found to be finite, whatever its
degree: true gradients hold the same inf. Two rules are guesses about what
programs do: a quotient of such data is one of a value and its norm, and a
product shows what one of its factors shows.
"""

import dataclasses
import math

from jax.extend import core

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import collectives
from optax_lossscale._jaxpr import operation_table
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _values
from optax_lossscale.instruments.step._degrees import ANY
from optax_lossscale.instruments.step._degrees import Place
from optax_lossscale.instruments.step._values import Fact
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

_names = operation_table.names
# The result of each operation from which all of its inputs follow.
LOGIC = {"and": True, "reduce_and": True, "or": False, "reduce_or": False}
# Operations that choose by size, and those that choose the largest.
_LARGEST = _names("cummax max reduce_max")
_ORDERED = _LARGEST | _names("cummin min reduce_min sort top_k")
# Operations whose result is not finite if an input is not.
_SHOWING = (
  operation_table.MOVES
  | operation_table.REARRANGES
  | operation_table.REDUCTIONS
  | collectives.BETWEEN_DEVICES
) - _names("clamp sign") | _names("""
  add add_any and cbrt cholesky complex convert_element_type
  conv_general_dilated cos cosh cumprod cumsum dot_general eig eigh fft log
  log1p log2 lu mul not or qr ragged_dot_general reduce_and reduce_or
  reduce_precision reduce_window_sum scatter-add scatter-mul scatter_add
  scatter_mul select_and_scatter_add sin sinh sqrt square sub svd tan
  triangular_solve tridiagonal_solve
""")
# Operations whose results are seldom negative.
_POSITIVE = _names("abs reduce_max sqrt square")


def data_of(inputs: Values) -> tuple[list[Value], bool]:
  """Returns the values of S and data, and whether one does depend on S."""
  scaled = [x for x in inputs if x.may_be_inf]
  return scaled, any(not _degrees.is_free(x.degree) for x in scaled)


def tested_by(
  equation: core.JaxprEqn, inputs: Values, place: Place
) -> Fact | None:
  """Returns a mark if a test may find out which scaled values are finite."""
  name, variables = equation.primitive.name, equation.invars
  is_nan = name in ("ne", "eq") and variables[0] is variables[-1]
  scaled, is_sure = data_of(inputs)
  if _tests_finiteness(equation, inputs):
    scaled = [x for x in inputs if x.scales and not x.is_pure]
    scaled = [x for x in scaled if x.may_be_inf or x.all_of("undefined")]
    if not scaled:
      return None
    finite = name in ("is_finite", "lt") or (name == "eq") is is_nan
    is_known = inputs[0] is scaled[0] or name in ("eq", "ne")
    # It says nothing of an inf that was lost before.
    known = finite if is_known and not scaled[0].lost else None
    return Fact("tested", is_sure, place, known, scaled[0].key)
  # An inf is also larger than other numbers, and differs from them.
  return Fact("tested", False, place) if scaled else None


def doubted_by(
  equation: core.JaxprEqn, inputs: Values, place: Place
) -> Fact | None:
  """Returns a mark if a test finds out whether the loss is finite."""
  is_doubt = any(x.mark("loss") for x in inputs)
  is_test = _tests_finiteness(equation, inputs)
  return Fact("doubted", True, place) if is_doubt and is_test else None


def _tests_finiteness(equation: core.JaxprEqn, inputs: Values) -> bool:
  """Returns whether an operation tells finite numbers from others."""
  name, variables = equation.primitive.name, equation.invars
  is_nan = name in ("ne", "eq") and variables[0] is variables[-1]
  return (
    name == "is_finite"
    or is_nan
    or any(
      isinstance(x.constant, float) and math.isinf(x.constant) for x in inputs
    )
  )


def combined(name: str, tested: Fact, inputs: Values) -> Fact:
  """Returns a mark for what is made of tests: what its truth still says."""
  if name == "not" and tested.finite is not None:
    return dataclasses.replace(tested, finite=not tested.finite)
  marks = [mark for x in inputs if (mark := x.mark("tested"))]
  known = [x for x in marks if x.finite is LOGIC.get(name)]
  if len({id(x.of) for x in known}) > 1:
    # Which of several values is not finite, no truth says.
    return dataclasses.replace(known[0], of=object())
  return next(iter(known), dataclasses.replace(tested, finite=None))


def loss_by(tested: Fact, choices: Values) -> bool | None:
  """Returns whether a choice surely leaves an inf out; None if it does not."""
  if any(map(_is_nonfinite, choices)):
    return None
  # A multiple of what is not finite is not finite.
  if any(all(x.key in {y.key, *y.factors} for y in choices) for x in choices):
    return None
  if tested.finite is None or len(choices) != 2:
    return False
  chosen = choices[0 if tested.finite else 1]
  if chosen.key is tested.of:
    return None
  is_other = data_of([chosen])[0] and not chosen.lost
  return bool(tested.detail) and not is_other


def may_lose(equation: core.JaxprEqn, inputs: Values) -> bool:
  """Returns whether an operation may leave an inf out."""
  name = equation.primitive.name
  scaled = [x.may_be_inf for x in inputs]
  if not any(scaled) or _degrees.is_cast(name, inputs):
    return False
  if name in _ORDERED:
    # The largest of absolute values is inf if one of them is.
    around = inputs[0].place[-1:]
    is_positive = bool(around) and around[0].primitive.name in _POSITIVE
    return not (name in _LARGEST and is_positive)
  # 1 / inf is 0.
  if name in ("div", "rem"):
    return not scaled[0]
  if name == "integer_pow":
    return bool(equation.params["y"] <= 0)
  if name == "pow":
    exponent = inputs[1].constant
    return exponent is None or exponent <= 0
  if name in ("gather", "dynamic_slice"):
    return any(scaled[1:])
  is_float = all(leaves.is_gradient(x.aval) for x in equation.outvars)
  is_test = name == "is_finite" or name in operation_table.COMPARISONS
  return not is_test and (name not in _SHOWING or not is_float)


def bounded(name: str, inputs: Values, place: Place) -> Fact | None:
  """Returns a mark if a bound takes the place of inf."""
  bounds = [x for x in inputs if x.is_pure and x.degree != ANY]
  scaled, is_sure = data_of(inputs[1:2] if name == "clamp" else inputs)
  # A lower bound takes nothing from an absolute value.
  sources = {x.place[-1].primitive.name for x in scaled if x.place}
  is_lower = name == "max" and sources <= _POSITIVE
  if not bounds or not scaled or is_lower or _degrees.is_cast(name, inputs):
    return None
  return Fact("taken", is_sure and name != "max", place)


def _is_nonfinite(value: Value) -> bool:
  """Returns whether a value is a number that is inf or NaN."""
  return (
    value.is_pure
    and value.degree == ANY
    and not _values.is_number(value.constant, 0)
  )
