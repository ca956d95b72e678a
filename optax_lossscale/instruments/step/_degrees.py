"""Degrees in S: how the result of an operation grows if S does.

A value has the degree d in S if it is S**d times what does not depend on S. So
products add degrees, quotients subtract them, moves keep them, sums and choices
need equal ones, and everything else needs and gives the degree 0. Kennedy
("Relational Parametricity and Units of Measure", POPL 1997) proves for typed
programs that such rules tell how a program reacts to another unit; S is the
unit here. CamFort (arXiv 2406.02174) infers units in existing programs.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fractions
import math
from typing import NamedTuple

from jax.extend import core

from optax_lossscale._base import formats
from optax_lossscale._jaxpr import axes
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.axes import aval
from optax_lossscale._jaxpr.operations import Growth
from optax_lossscale._jaxpr.operations import Inf

# An operation, after the calls around it, outermost first.
Place = tuple[core.JaxprEqn, ...]


class Symbol(NamedTuple):
  """One S: that of a state, the next one, or that of a round of a loop."""

  words: str
  key: Hashable


# One S, and the axes of a value along which it differs: an ensemble has an S
# for each member.
Unit = tuple[Symbol, tuple[int, ...]]
Powers = tuple[tuple[Unit, fractions.Fraction], ...]


@dataclasses.dataclass(frozen=True)
class Unknown:
  """The degree of a value that is not a power of S, or may not be one."""

  reason: str = dataclasses.field(compare=False)
  # True if values of different degrees were put together, so that the result
  # does depend on S.
  is_sure: bool
  place: Place = dataclasses.field(default=(), compare=False)
  # The place of each operand, with how the operand grows.
  operands: tuple[tuple[str, Place], ...] = dataclasses.field(
    default=(), compare=False
  )


Number = bool | int | float
# Zero, inf and NaN fit every degree.
ANY = "any"
FREE: Powers = ()
Degree = Powers | Unknown | str


@dataclasses.dataclass(frozen=True)
class Operand:
  """A value as the rules for degrees see it."""

  degree: Degree = FREE
  # The number that all its elements are.
  constant: Number | None = None
  # The operation that made it.
  place: Place = dataclasses.field(default=(), compare=False)


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
  Growth.CUBES: 1 / 3,
}
# Operations of several results, with the one that grows as their input does.
_GROWING = {Growth.FIRST: 0, Growth.SECOND: 1}
# Operations that may give 0, inf or NaN only because they are given them.
_PASS_ANY = {
  Growth.KEEPS,
  Growth.MULTIPLIES,
  Growth.DIVIDES,
  Growth.POWERS,
  *_EXPONENTS,
  *_REASONS,
}

# A number that guards a division, and is lost beside almost any other.
_EPSILON = 1e-6
# An FP8 layer clips to these before it casts, which is part of the cast.
_FLOAT8 = [formats.largest(x) for pair in formats.FLOAT8.items() for x in pair]
# The signs of an operation's operands that may be such limits.
_LIMITS = {"max": (-1, -1), "min": (1, 1), "clamp": (-1, 0, 1)}


def is_cast(equation: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
  """Returns whether bounds are the limits of a float8, as before a cast."""
  signs = _LIMITS.get(equation.primitive.name, ())
  found = [
    x.constant is not None and x.constant * sign in _FLOAT8
    for x, sign in zip(operands, signs, strict=False)
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
  values: Sequence[Operand], reason: str, place: Place, *, is_sure: bool = True
) -> Degree:
  """Returns the degree that all values have, if it is one."""
  degrees = {x.degree: None for x in values if x.degree != ANY}
  if len(degrees) > 1:
    return unknown(degrees) or mismatch(values, reason, place, is_sure=is_sure)
  return next(iter(degrees), ANY)


def mismatch(
  values: Sequence[Operand], reason: str, place: Place, *, is_sure: bool = True
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


def transfer(
  equation: core.JaxprEqn, operands: Sequence[Operand], place: Place
) -> Sequence[Degree]:
  """Returns the degree of each result of an operation."""
  rule, count = operations.of(equation).degree, len(equation.outvars)
  degrees = [x.degree for x in operands]
  if (found := unknown(degrees)) is not None:
    # The order of numbers of several degrees need not depend on S.
    is_sure = found.is_sure and rule is not Growth.ORDERS
    return [dataclasses.replace(found, is_sure=is_sure)] * count
  if count > 1 and not _mixes(equation, operands):
    if rule is Growth.KEEPS and len(operands) == count:
      return degrees
    if rule in _GROWING:
      grown = _GROWING[rule]
      return [degrees[0] if i == grown else FREE for i in range(count)]
  return [_result(equation, operands, place)] * count


def _mixes(equation: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
  """Returns whether an operation mixes members that have an S of their own."""
  return any(
    _moved(equation, i, x.degree) is None for i, x in enumerate(operands)
  )


def _result(
  equation: core.JaxprEqn, operands: Sequence[Operand], place: Place
) -> Degree:
  """Returns the degree that all results of an operation have."""
  row = operations.of(equation)
  is_filled = fills(equation)
  if _are_free(operands) and (is_filled or row.degree not in _PASS_ANY):
    return FREE
  if _mixes(equation, operands):
    reason = f"`{row.name}` mixes members that have an S of their own"
    return Unknown(reason, False, place)
  if row.degree in (Growth.IGNORES, Growth.ORDERS):
    return FREE
  if is_filled:
    return Unknown(f"`{row.name}` puts other values in", False, place)
  parts = [
    dataclasses.replace(x, degree=_moved(equation, i, x.degree) or FREE)
    for i, x in enumerate(operands)
  ]
  if not _are_free(parts[row.positions]):
    return mismatch(parts, "an index depends on S", place)
  del parts[row.positions]
  if row.degree in _REASONS:
    return _joined(equation, parts, place)
  rule = _RULES.get(row.degree)
  degree = rule(equation, parts) if rule else None
  return _no_power(equation, parts, place) if degree is None else degree


def _are_free(operands: Sequence[Operand]) -> bool:
  return all(is_free(x.degree) for x in operands)


def _no_power(
  equation: core.JaxprEqn, parts: Sequence[Operand], place: Place
) -> Unknown:
  """Returns the degree of what is no power of S, but computed from one."""
  grown = next(in_words(x.degree) for x in parts if not is_free(x.degree))
  reason = f"`{equation.primitive.name}` is given what {grown}"
  rule = operations.of(equation).degree
  is_sure = rule in (Growth.DEPENDS, Growth.POWER, Growth.POWERS)
  return mismatch(parts, reason, place, is_sure=is_sure)


def _raised(equation: core.JaxprEqn, parts: Sequence[Operand]) -> Degree | None:
  """Returns the degree of a power whose exponent is known."""
  row, first = operations.of(equation), parts[0].degree
  exponent = _EXPONENTS.get(row.degree, equation.params.get("y"))
  if row.degree is Growth.POWER:
    exponent = parts[1].constant
  return None if exponent is None else power(first, exponent)


def _solved(equation: core.JaxprEqn, parts: Sequence[Operand]) -> Degree | None:
  """Returns the degree of the x in a x = b."""
  if equation.params["unit_diagonal"]:
    return None
  return times(parts[1].degree, parts[0].degree, -1)


def _multiplied(equation: core.JaxprEqn, parts: Sequence[Operand]) -> Degree:
  """Returns the degree of a product of an array's elements."""
  before, after = map(aval, (equation.invars[0], equation.outvars[0]))
  return power(parts[0].degree, before.size // max(after.size, 1))


_RULES: Mapping[
  Growth, Callable[[core.JaxprEqn, Sequence[Operand]], Degree | None]
] = {
  Growth.KEEPS: lambda _, parts: parts[0].degree,
  Growth.MULTIPLIES: lambda _, parts: times(parts[0].degree, parts[1].degree),
  Growth.DIVIDES: lambda _, parts: times(parts[0].degree, parts[1].degree, -1),
  Growth.SOLVES: _solved,
  Growth.PRODUCT: _multiplied,
  **dict.fromkeys((Growth.POWER, Growth.POWERS, *_EXPONENTS), _raised),
}


def fills(equation: core.JaxprEqn) -> bool:
  """Returns whether a gather or scatter puts in numbers of its own."""
  if "fill_value" in equation.params:
    # NaN has any degree, and is what fills by default.
    value = equation.params["fill_value"]
    return not (value in (None, 0) or value != value)
  is_packed = operations.of(equation).degree is Growth.PACKS
  return is_packed and not operations.moves(equation)


def _joined(
  equation: core.JaxprEqn, parts: Sequence[Operand], place: Place
) -> Degree:
  """Returns the degree of a sum, a choice or a comparison."""
  row = operations.of(equation)
  rule = row.degree
  if is_cast(equation, parts):
    parts = [x for x in parts if not is_free(x.degree)] or parts
  numbers = (abs(x.constant) for x in parts if isinstance(x.constant, float))
  least = min(filter(None, numbers), default=math.inf)
  is_sum_or_max = rule is Growth.ADDS or row.inf is Inf.LARGEST
  is_guard = is_sum_or_max and least <= _EPSILON
  # What is packed into one array may be unpacked again.
  is_packed = rule in (Growth.PACKS, Growth.SCATTERS)
  is_sure = not (is_guard or is_packed)
  degree = join(parts, _REASONS[rule], place, is_sure=is_sure)
  is_test = rule is Growth.TESTS and not isinstance(degree, Unknown)
  return FREE if is_test else degree


def _moved(
  equation: core.JaxprEqn, index: int, degree: Degree
) -> Degree | None:
  """Returns an input's degree in terms of the output's axes; None if mixed."""

  def unit_after(unit: Unit) -> Unit | None:
    symbol, differs = unit
    places = axes.output_axes(equation, index) if differs else {}
    is_whole = places.keys() >= {*differs}
    return (symbol, tuple(places[x] for x in differs)) if is_whole else None

  return rename(degree, unit_after)
