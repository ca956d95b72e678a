"""Where an inf or NaN of scaled gradients may get lost on its way to `update`.

The rules are about data of S that no gate has found to be finite, whatever its
degree: true gradients hold the same inf. Three rules are guesses about what
programs do: a quotient of such data is one of a value and its norm, a product
shows what one of its factors shows, and a complex number's real part shows what
the number does.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Flag
from optax_lossscale._jaxpr.operations import Form
from optax_lossscale._jaxpr.operations import Growth
from optax_lossscale._jaxpr.operations import Inf
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step._values import ANY
from optax_lossscale.instruments.step._values import Mark
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import Source
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

# The truth of a test of all, or of any, from which that of each follows.
_LOGIC = {Form.ALL: True, Form.ANY: False}
# The truth of a comparison of a value with itself: NaN alone is not equal.
_NOT_NAN = {"eq": True, "ne": False}
# The numbers beyond all finite ones, in a comparison with them.
_BEYOND = {"lt": math.inf, "gt": -math.inf}


def transfer(operation: Operation, result: Value) -> Value:
  """Returns an operation's result with the fate of an inf in it."""
  # The result comes with the marks of all inputs, and with its degree.
  row = operation.row
  tested = result.mark("tested")
  if tested and row.elements is not Elements.PERMUTES:
    combined = _combined(row.form, tested, operation.inputs)
    result = result.unmarked("tested").marked(combined)
  # A truth shows nothing of an inf, but which test it is may be known.
  if row.inf is Inf.TESTS:
    return _test(operation, result)
  if rule := _RULES.get(row.growth):
    result = rule(operation, result)
  # The operations that are 0 where a value is, and those compared with 0.
  if Flag.ZERO in operations.meant(operation.equation).flags:
    first = operation.inputs[0]
    result = result.but(zeros=(first.place, *first.zeros))
  if row.form in (Form.ALL, Form.ANY, Form.FLIPS):
    zeros = (x.zero_of for x in operation.inputs if x.zero_of)
    result = result.but(zero_of=next(zeros, ()))
  return result


def _sum(operation: Operation, result: Value) -> Value:
  """Returns a sum, in which the other part may show an inf that is taken."""
  is_shown = any(x.may_be_inf and not x.lost for x in operation.inputs)
  if not (is_shown and result.mark("taken")):
    return result
  return result.unmarked("taken").marked(Mark("taken", False, result.place))


def _same(operation: Operation, result: Value) -> Value:
  """Returns a value that may be another with its sign changed."""
  # Of what keeps a degree, abs and neg alone fold numbers.
  multiplied = operation.inputs if operation.row.form is Form.FOLDS else []
  return result.but(factors=_factors(multiplied))


def _product(operation: Operation, result: Value) -> Value:
  """Returns a product or quotient with the fate of an inf in it."""
  row, parts = operation.row, operation.inputs
  if row.growth is Growth.DIVIDES:
    first, second = parts
    parts = [first]
    # inf / inf is NaN.
    if (
      _degrees.is_free(result.degree) and first.may_be_inf and second.may_be_inf
    ):
      paths = first.all_of("scale") & second.all_of("scale")
      undefined = {Source("scale", x): Source("undefined", x) for x in paths}
      sources = frozenset(undefined.get(x, x) for x in result.sources)
      result = result.but(sources=sources)
  if row.elements is Elements.EACH:
    result = result.but(factors=_factors(parts))
  # An inf or NaN stays one if it is multiplied by anything.
  scaled, _ = _data_of(parts)
  is_lost = row.inf is Inf.HIDES or all(x.lost for x in scaled)
  return result if is_lost else result.unmarked("taken", "dropped")


def _factors(inputs: Values) -> frozenset[object]:
  """Returns the keys of the values whose multiple a product is."""
  scaled = [x for x in inputs if x.scales and not x.is_pure]
  return frozenset(y for x in scaled for y in (x.key, *x.factors))


def _data_of(inputs: Values) -> tuple[list[Value], bool]:
  """Returns the values of S and data, and whether one does depend on S."""
  scaled = [x for x in inputs if x.may_be_inf]
  return scaled, any(not _degrees.is_free(x.degree) for x in scaled)


# ---- Tests of finiteness.


def _test(operation: Operation, result: Value) -> Value:
  """Returns the truth of a test with its meaning for an inf."""
  inputs = operation.inputs
  truth = None if result.mark("tested") else _tested_by(operation)
  is_doubt = any(x.mark("loss") for x in inputs)
  is_doubt = is_doubt and _tests_finiteness(operation)
  doubted = Mark("doubted", True, operation.place) if is_doubt else None
  zero_of = (
    (x.place, *x.zeros)
    for x, y in zip(inputs, inputs[::-1], strict=True)
    if y.is_number(0)
  )
  found = result.unmarked("taken", "dropped").marked(truth, doubted)
  return found.but(zero_of=next(zero_of, ()))


def _tested_by(operation: Operation) -> Mark | None:
  """Returns a mark if a test may find out which scaled values are finite."""
  inputs, place = operation.inputs, operation.place
  scaled, is_sure = _data_of(inputs)
  if not _tests_finiteness(operation):
    # An inf is also larger than other numbers, and differs from them.
    return Mark("tested", False, place) if scaled else None
  # NaN is left of an inf that few operations hide.
  scaled = [
    x for x in inputs if x.all_of("scale", "undefined") and not x.is_pure
  ]
  if not scaled:
    return None
  name, first = operation.name, scaled[0]
  # x < inf is such a test, but x >= -inf is true of inf, and false of NaN.
  beyond = [x.constant for x in inputs[1:]]
  is_below = inputs[0] is first and beyond in ([], [_BEYOND.get(name)])
  finite: bool | None = is_below or None
  if name in _NOT_NAN:
    finite = _NOT_NAN[name] is _is_of_nan(operation)
  # A test says nothing of an inf that was lost before.
  known = None if first.lost else finite
  return Mark("tested", is_sure, place, known, first.key)


def _tests_finiteness(operation: Operation) -> bool:
  """Returns whether an operation tells finite numbers from others."""
  constants = (x.constant for x in operation.inputs)
  has_inf = any(isinstance(x, float) and math.isinf(x) for x in constants)
  return has_inf or len(operation.inputs) == 1 or _is_of_nan(operation)


def _is_of_nan(operation: Operation) -> bool:
  """Returns whether an operation compares a value with itself."""
  first, last = operation.equation.invars[0], operation.equation.invars[-1]
  return operation.name in _NOT_NAN and first is last


def _combined(form: Form, tested: Mark, inputs: Values) -> Mark:
  """Returns a mark for what is made of tests: what its truth still says."""
  if form is Form.FLIPS and tested.finite is not None:
    return dataclasses.replace(tested, finite=not tested.finite)
  marks = [mark for x in inputs if (mark := x.mark("tested"))]
  known = [x for x in marks if x.finite is _LOGIC.get(form)]
  if len({id(x.of) for x in known}) > 1:
    # No truth tells one of several values from the others.
    return dataclasses.replace(known[0], of=object())
  return next(iter(known), dataclasses.replace(tested, finite=None))


def chosen_by(tested: Mark, choices: Values) -> bool | None:
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
  is_other = chosen.may_be_inf and not chosen.lost
  return bool(tested.is_sure) and not is_other


# ---- Operations that hide an inf.


def may_lose(operation: Operation) -> bool:
  """Returns whether an operation may leave an inf out."""
  inf = operation.row.inf
  scaled = any(x.may_be_inf for x in operation.inputs)
  if not scaled or _degrees.is_cast(operation):
    return False
  if inf in _HIDING:
    return _HIDING[inf](operation)
  # A number of another kind shows nothing.
  outputs = operation.equation.outvars
  is_float = all(leaves.is_gradient(x.aval) for x in outputs)
  return inf is Inf.HIDES or not is_float


def _hides_exponent(operation: Operation) -> bool:
  inputs, params = operation.inputs, operation.equation.params
  # inf**-1 is 0, and inf**0 is 1.
  exponent = params.get("y", inputs[-1].constant)
  return exponent is None or bool(exponent <= 0)


_HIDING: Mapping[Inf, Callable[[Operation], bool]] = {
  # The largest of absolute values is inf if one of them is.
  Inf.LARGEST: lambda x: not all(map(_is_positive, _data_of(x.inputs)[0])),
  Inf.ORDERED: lambda _: True,
  # 1 / inf is 0.
  Inf.DIVIDES: lambda x: not x.inputs[0].may_be_inf,
  Inf.POWERS: _hides_exponent,
  Inf.PICKS: lambda x: any(y.may_be_inf for y in x.inputs[1:]),
  Inf.TESTS: lambda _: False,
}


def _limited(operation: Operation, result: Value) -> Value:
  """Returns what bounds leave of a value; one may take the place of inf."""
  inputs = operation.inputs
  has_bounds = any(x.is_pure and x.degree != ANY for x in inputs)
  if result.lost or not has_bounds or _degrees.is_cast(operation):
    return result
  # The second of three is between bounds.
  scaled, is_sure = _data_of(inputs[1:2] if len(inputs) > 2 else inputs)
  is_max = operation.row.inf is Inf.LARGEST
  # A lower bound takes nothing from an absolute value.
  if not scaled or (is_max and all(map(_is_positive, scaled))):
    return result
  return result.marked(Mark("taken", is_sure and not is_max, result.place))


def _is_positive(value: Value) -> bool:
  """Returns whether an operation made a value that is seldom negative."""
  made_by = map(operations.of, value.place[-1:])
  return any(Flag.POSITIVE in x.flags for x in made_by)


def _is_nonfinite(value: Value) -> bool:
  """Returns whether a value is a number that is inf or NaN."""
  return value.is_pure and value.degree == ANY and not value.is_number(0)


# The growth of a result also tells the kind of arithmetic.
_RULES: Mapping[Growth, Callable[[Operation, Value], Value]] = {
  Growth.ADDS: _sum,
  Growth.SUBTRACTS: _sum,
  Growth.COMPARES: _limited,
  Growth.KEEPS: _same,
  Growth.MULTIPLIES: _product,
  Growth.DIVIDES: _product,
}
