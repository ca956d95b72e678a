"""Degrees in S: how the result of an operation grows if S does.

A value has the degree d in S if it is S**d times what does not depend on S. So
products add degrees, quotients subtract them, moves keep them, sums and choices
need equal ones, and everything else needs and gives the degree 0. Kennedy
("Relational Parametricity and Units of Measure", POPL 1997) proves for typed
programs that such rules tell how a program reacts to another unit; S is the
unit here. CamFort (arXiv 2406.02174) infers units in existing programs.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fractions
import math

from jax.extend import core

from optax_lossscale._base import formats
from optax_lossscale._jaxpr import axes
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.operations import Growth
from optax_lossscale._jaxpr.operations import Inf
from optax_lossscale.instruments.step._values import ANY
from optax_lossscale.instruments.step._values import Degree
from optax_lossscale.instruments.step._values import FREE
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import Place
from optax_lossscale.instruments.step._values import Powers
from optax_lossscale.instruments.step._values import Unit
from optax_lossscale.instruments.step._values import Unknown
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

# Why inputs must grow alike.
_REASONS = {
  Growth.ADDS: "are added",
  Growth.SCATTERS: "are added",
  Growth.SUBTRACTS: "are subtracted",
  Growth.COMPARES: "are compared",
  Growth.TESTS: "are compared",
  Growth.PACKS: "become one array",
  Growth.MERGES: "become one array",
  Growth.REMAINDER: "are divided with a remainder",
}
_EXPONENTS = {
  Growth.SQUARES: 2,
  Growth.ROOTS: 0.5,
  Growth.INVERTS: -0.5,
  Growth.CUBE_ROOTS: 1 / 3,
}
# Operations of several results, with the one that grows as their input does.
_GROWING = {Growth.FIRST: 0, Growth.SECOND: 1}

# A number that guards a division, and is lost beside almost any other.
_EPSILON = 1e-6
# An FP8 layer clips to these before it casts, which is part of the cast.
_FLOAT8 = [formats.largest(x) for pair in formats.FLOAT8.items() for x in pair]
# The signs of an operation's operands that may be such limits.
_LIMITS = {"max": (-1, -1), "min": (1, 1), "clamp": (-1, 0, 1)}


def is_cast(operation: Operation) -> bool:
  """Returns whether bounds are the limits of a float8, as before a cast."""
  signs = _LIMITS.get(operation.name, ())
  found = [
    x.constant is not None and x.constant * sign in _FLOAT8
    for x, sign in zip(operation.inputs, signs, strict=False)
    if sign
  ]
  # A value between bounds has two.
  return all(found) if 0 in signs else any(found)


def times(a: Degree, b: Degree, sign: int = 1) -> Degree:
  """Returns the degree of a product, or of a quotient if `sign` is -1."""
  if not (isinstance(a, tuple) and isinstance(b, tuple)):
    return unknown([a, b]) or ANY
  powers = dict(a)
  for unit, exponent in b:
    powers[unit] = powers.get(unit, fractions.Fraction(0)) + sign * exponent
  # The order of factors must not matter for equality.
  kept = ((unit, p) for unit, p in powers.items() if p)
  return tuple(sorted(kept, key=lambda x: (x[0][0].words, hash(x))))


def power(degree: Degree, exponent: float) -> Degree:
  """Returns the degree of a power."""
  if not (degree and exponent):
    return FREE
  if not isinstance(degree, tuple):
    return degree
  if math.isfinite(exponent):
    factor = fractions.Fraction(exponent).limit_denominator(64)
    if math.isclose(factor, exponent, rel_tol=1e-7):
      return tuple((unit, p * factor) for unit, p in degree)
  return Unknown("a power of S has an odd exponent", False)


def of(unit: Unit) -> Powers:
  """Returns the degree of an S itself."""
  return ((unit, fractions.Fraction(1)),)


def unknown(degrees: Iterable[Degree]) -> Unknown | None:
  """Returns an unknown degree among others, a sure one if there is one."""
  found = [x for x in degrees if isinstance(x, Unknown)]
  return next((x for x in found if x.is_sure), found[0] if found else None)


def join(
  values: Values, reason: str, place: Place, *, is_sure: bool = True
) -> Degree:
  """Returns the degree that all values have, if it is one."""
  degrees = {x.degree: None for x in values if x.degree != ANY}
  if len(degrees) > 1:
    return unknown(degrees) or mismatch(values, reason, place, is_sure=is_sure)
  return next(iter(degrees), ANY)


def mismatch(
  values: Values, reason: str, place: Place, *, is_sure: bool = True
) -> Unknown:
  """Returns the degree of what is made of values that grow in other ways."""
  grows = {in_words(x.degree): x.place for x in values if x.degree != ANY}
  return Unknown(reason, is_sure, place, tuple(grows.items()))


def is_free(degree: Degree) -> bool:
  """Returns whether a value does not depend on S, or is zero or inf."""
  return degree in (FREE, ANY)


def in_words(degree: Degree) -> str:
  """Returns how a value grows, such as "grows as S"."""
  if isinstance(degree, (str, Unknown)) or not degree:
    return "does not grow with S"
  return "grows as " + " ".join(
    symbol.words if p == 1 else f"{symbol.words}^{p}"
    for (symbol, _), p in degree
  )


def rename(
  degree: Degree, change: Callable[[Unit], Unit | None]
) -> Degree | None:
  """Returns a degree with other units, or None if a unit has no other."""
  if not isinstance(degree, tuple):
    return degree
  found: Degree = FREE
  for unit, exponent in degree:
    other = change(unit)
    if other is None:
      return None
    found = times(found, ((other, exponent),))
  return found


def without_axes(degree: Degree) -> Degree:
  """Returns a degree that says of each unit how many axes it differs along."""
  return rename(degree, lambda unit: (unit[0], (len(unit[1]),))) or FREE


def transfer(operation: Operation) -> Sequence[Degree]:
  """Returns the degree of each result of an operation."""
  rule, count = operation.row.growth, len(operation.equation.outvars)
  degrees = [x.degree for x in operation.inputs]
  if (found := unknown(degrees)) is not None:
    # The order of numbers of several degrees need not depend on S.
    is_sure = found.is_sure and rule is not Growth.ORDERS
    return [dataclasses.replace(found, is_sure=is_sure)] * count
  if count > 1 and _in_result(operation):
    if rule is Growth.KEEPS and len(degrees) == count:
      return degrees
    if rule in _GROWING:
      grown = _GROWING[rule]
      return [degrees[0] if i == grown else FREE for i in range(count)]
  return [_result(operation)] * count


def _result(operation: Operation) -> Degree:
  """Returns the degree that all results of an operation have."""
  row, place = operation.row, operation.place
  is_filled = fills(operation.equation)
  if _are_free(operation.inputs) and (is_filled or row.growth not in _PASS_ANY):
    return FREE
  parts = _in_result(operation)
  if not parts:
    reason = f"`{operation.name}` mixes members that have an S of their own"
    return Unknown(reason, False, place)
  if row.growth in (Growth.IGNORES, Growth.ORDERS):
    return FREE
  # A number beside values that grow with S grows with no S.
  if is_filled:
    return Unknown(f"`{operation.name}` puts other values in", False, place)
  if not _are_free(parts[row.positions]):
    return mismatch(parts, "an index depends on S", place)
  del parts[row.positions]
  moved = operation._replace(inputs=parts)
  if row.growth in _REASONS:
    return _joined(moved)
  rule = _RULES.get(row.growth)
  degree = rule(moved) if rule else None
  return _no_power(moved) if degree is None else degree


def _are_free(values: Values) -> bool:
  return all(is_free(x.degree) for x in values)


def _in_result(operation: Operation) -> list[Value]:
  """Returns inputs in terms of the result's axes; none if members are mixed."""
  found: list[Value] = []
  for i, x in enumerate(operation.inputs):

    def unit_after(unit: Unit, index: int = i) -> Unit | None:
      symbol, differs = unit
      places = axes.output_axes(operation.equation, index) if differs else {}
      is_whole = places.keys() >= {*differs}
      return (symbol, tuple(places[x] for x in differs)) if is_whole else None

    degree = rename(x.degree, unit_after)
    if degree is None:
      return []
    found.append(x.but(degree=degree))
  return found


def _joined(operation: Operation) -> Degree:
  """Returns the degree of a sum, a choice or a comparison."""
  rule, parts = operation.row.growth, operation.inputs
  numbers = (abs(x.constant) for x in parts if isinstance(x.constant, float))
  least = min(filter(None, numbers), default=math.inf)
  is_sum_or_max = rule is Growth.ADDS or operation.row.inf is Inf.LARGEST
  is_guard = is_sum_or_max and least <= _EPSILON
  if is_cast(operation):
    parts = [x for x in parts if not is_free(x.degree)] or parts
  # Parts of one array may be unpacked again.
  is_packed = rule in (Growth.PACKS, Growth.SCATTERS)
  is_sure = not (is_guard or is_packed)
  degree = join(parts, _REASONS[rule], operation.place, is_sure=is_sure)
  is_test = rule is Growth.TESTS and not isinstance(degree, Unknown)
  return FREE if is_test else degree


def _no_power(operation: Operation) -> Unknown:
  """Returns the degree of a result that a power of S made, but is none."""
  rule, parts = operation.row.growth, operation.inputs
  grown = next(in_words(x.degree) for x in parts if not is_free(x.degree))
  reason = f"`{operation.name}` is given what {grown}"
  is_sure = rule in (Growth.DEPENDS, Growth.POWER, Growth.POWERS)
  return mismatch(parts, reason, operation.place, is_sure=is_sure)


def _raised(operation: Operation) -> Degree | None:
  """Returns the degree of a power whose exponent is known."""
  rule, parts = operation.row.growth, operation.inputs
  exponent = _EXPONENTS.get(rule, operation.equation.params.get("y"))
  if rule is Growth.POWER:
    exponent = parts[1].constant
  return None if exponent is None else power(parts[0].degree, exponent)


def _solved(operation: Operation) -> Degree | None:
  """Returns the degree of the x in a x = b."""
  # Then the diagonal is 1, which does not grow with S.
  is_unit = operation.equation.params["unit_diagonal"]
  return None if is_unit else _product(operation.inputs[::-1], -1)


def _multiplied(operation: Operation) -> Degree:
  """Returns the degree of a product of an array's elements."""
  count = operation.before.size // max(operation.after.size, 1)
  return power(operation.inputs[0].degree, count)


def _product(parts: Values, sign: int = 1) -> Degree:
  """Returns the degree of a product or quotient of two values."""
  first, second, *_ = parts
  return times(first.degree, second.degree, sign)


_RULES: Mapping[Growth, Callable[[Operation], Degree | None]] = {
  Growth.KEEPS: lambda x: x.inputs[0].degree,
  Growth.MULTIPLIES: lambda x: _product(x.inputs),
  Growth.DIVIDES: lambda x: _product(x.inputs, -1),
  Growth.SOLVES: _solved,
  Growth.PRODUCT: _multiplied,
  **dict.fromkeys((Growth.POWER, Growth.POWERS, *_EXPONENTS), _raised),
}
# Operations that may give 0, inf or NaN only because they are given them; 2**0
# is 1, though 0 has any degree.
_PASS_ANY = {*_RULES, *_REASONS} - {Growth.POWER, Growth.SOLVES}


def fills(equation: core.JaxprEqn) -> bool:
  """Returns whether a gather or scatter puts in numbers of its own."""
  if "fill_value" in equation.params:
    # NaN has any degree, and is what fills by default.
    value = equation.params["fill_value"]
    return not (value in (None, 0) or value != value)
  is_packed = operations.of(equation).growth is Growth.PACKS
  # The `function` of `x.at[...].apply(function)`.
  return is_packed and equation.params.get("update_jaxpr") is not None
