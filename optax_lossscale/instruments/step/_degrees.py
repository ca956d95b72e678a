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
import typing
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._base import formats
from optax_lossscale._jaxpr import collectives
from optax_lossscale._jaxpr import operation_table

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
  """The degree of a value that is not a power of S, or may not be one.

  It is sure if values of different degrees were put together, so that the
  result does depend on S.
  """

  reason: str = dataclasses.field(compare=False)
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
  """A value as the rules for degrees see it.

  Attributes:
    degree: how a value grows with S.
    constant: the number that all its elements are.
    place: the operation that made it.
  """

  degree: Degree = FREE
  constant: Number | None = None
  place: Place = dataclasses.field(default=(), compare=False)


_names = operation_table.names

# Operations of the degree of their first input; the others are positions, or
# are only compared with each other.
_KEEPS = _names("""
  abs all_gather all_gather_invariant all_to_all broadcast_in_dim conj copy
  copy_p cummax cummin cumsum device_put dynamic_slice expand_dims fft freeze
  gather imag mesh_cast name neg optimization_barrier pbroadcast pmax pmin
  ppermute psum psum2 psum_invariant pvary real reduce_and reduce_max reduce_min
  reduce_or reduce_precision reduce_scatter reduce_sum reduce_window_max
  reduce_window_min reduce_window_sum reshape reshard rev select_and_gather_add
  select_and_scatter_add sharding_constraint slice sort split squeeze
  stop_gradient tile transpose unstack
""")
# Operations whose inputs must have one degree, with what happens to them.
_JOINS = {
  name: reason
  for reason, text in {
    "are added": "add add_any scatter-add scatter_add",
    "are subtracted": "sub",
    "are compared": "max min clamp atan2 eq eq_to ge gt le le_to lt lt_to ne",
    "become one array": """
      complex concatenate dynamic_update_slice pad scatter scatter-max
      scatter-min stack
    """,
    "are divided with a remainder": "rem",
  }.items()
  for name in text.split()
}
# Which inputs are positions.
_POSITIONS = {
  **dict.fromkeys(_names("dynamic_slice gather"), slice(1, None)),
  **dict.fromkeys((x for x in _JOINS if x.startswith("scatter")), slice(1, 2)),
  "dynamic_update_slice": slice(2, None),
}
# Values that are only packed into one array may be unpacked again.
_PACKS = _names("""
  complex concatenate dynamic_update_slice pad scatter scatter-add stack
""")
_PRODUCTS = _names("""
  conv_general_dilated dot_general mul ragged_dot ragged_dot_general
""")
_POWERS = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
_POWERS["cholesky"] = 0.5
# Results that do not depend on S, since S is positive.
_ORDERS = _names("argmax argmin is_finite sign")
# Operations that may give 0, inf or NaN only because they are given them.
_PASS_ANY = (
  _KEEPS
  | _PRODUCTS
  | {"div", "integer_pow", *_POWERS}
  | (_JOINS.keys() - _POSITIONS.keys())
)
# Operations that may undo each other, so that the result need not depend on S.
_UNSURE = _names("bitcast_convert_type log log1p log2 nextafter")

# A number that guards a division, and is lost beside almost any other.
_EPSILON = 1e-6
# An FP8 layer clips to these before it casts, which is part of the cast.
_FLOAT8 = [formats.largest(x) for pair in formats.FLOAT8.items() for x in pair]
# The signs of an operation's operands that may be such limits.
_LIMITS = {"max": (-1, -1), "min": (1, 1), "clamp": (-1, 0, 1)}


def aval(x: core.Var | core.Literal) -> jax.core.ShapedArray:
  """Returns the shape and dtype of an array in a jaxpr."""
  return typing.cast(jax.core.ShapedArray, x.aval)


def is_cast(name: str, operands: Sequence[Operand]) -> bool:
  """Returns whether bounds are the limits of a float8, as before a cast."""
  found = [
    x.constant is not None and x.constant * sign in _FLOAT8
    for x, sign in zip(operands, _LIMITS.get(name, ()), strict=False)
    if sign
  ]
  return all(found) if name == "clamp" else any(found)


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


def joined(
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


def renamed(
  degree: Degree, rename: Callable[[Unit], Unit | None]
) -> Degree | None:
  """Returns a degree with other units, or None if a unit has no other."""
  if not isinstance(degree, tuple):
    return degree
  found: Degree = FREE
  for unit, exponent in degree:
    other = rename(unit)
    if other is None:
      return None
    found = times(found, ((other, exponent),))
  return found


def without_axes(degree: Degree) -> Degree:
  """Returns a degree that says of each unit how many axes it differs along."""
  return renamed(degree, lambda unit: (unit[0], (len(unit[1]),))) or FREE


def result(
  equation: core.JaxprEqn, operands: Sequence[Operand], place: Place
) -> Degree:
  """Returns the degree of an operation's results."""
  name = equation.primitive.name
  if (found := unknown(x.degree for x in operands)) is not None:
    # The order of numbers of several degrees need not depend on S.
    is_order = name in ("argmax", "argmin")
    return dataclasses.replace(found, is_sure=False) if is_order else found
  are_free = all(is_free(x.degree) for x in operands)
  if are_free and (name not in _PASS_ANY or fills(equation)):
    return FREE
  parts: list[Operand] = []
  for i, x in enumerate(operands):
    degree = moved(equation, i, x.degree)
    if degree is None:
      reason = f"`{name}` mixes members that have an S of their own"
      return Unknown(reason, False, place)
    parts.append(dataclasses.replace(x, degree=degree))
  if name in _ORDERS:
    return FREE
  if fills(equation):
    return Unknown(f"`{name}` puts other values in", False, place)
  first, *others = (x.degree for x in parts)
  indices = _POSITIONS.get(name, slice(0))
  if not all(is_free(x.degree) for x in parts[indices]):
    return mismatch(parts, "an index depends on S", place)
  del parts[indices]
  if name in _KEEPS:
    return first
  if name in _JOINS:
    return _joined(name, parts, place)
  if name in _PRODUCTS:
    return times(first, others[0])
  if name == "div":
    return times(first, others[0], -1)
  if name == "triangular_solve" and not equation.params["unit_diagonal"]:
    return times(others[0], first, -1)
  if name == "reduce_prod":
    before, after = map(aval, (equation.invars[0], equation.outvars[0]))
    return power(first, before.size // max(after.size, 1))
  exponent = parts[1].constant if name == "pow" else equation.params.get("y")
  exponent = _POWERS.get(name, exponent)
  if exponent is not None and name in ("pow", "integer_pow", *_POWERS):
    return power(first, exponent)
  grown = next(in_words(x.degree) for x in parts if not is_free(x.degree))
  is_known = (
    name in operation_table.ELEMENTWISE | operation_table.CUMULATIVE
  ) and name not in _UNSURE
  reason = f"`{name}` is given what {grown}"
  return mismatch(parts, reason, place, is_sure=is_known)


def fills(equation: core.JaxprEqn) -> bool:
  """Returns whether a gather or scatter puts in numbers of its own."""
  if equation.primitive.name == "gather":
    # NaN has any degree, and is what fills by default.
    value = equation.params["fill_value"]
    return not (value in (None, 0) or value != value)
  is_scatter = equation.primitive.name == "scatter"
  return is_scatter and not operation_table.moves(equation)


def _joined(name: str, parts: Sequence[Operand], place: Place) -> Degree:
  """Returns the degree of a sum, a choice or a comparison."""
  numbers = [abs(x.constant) for x in parts if isinstance(x.constant, float)]
  if is_cast(name, parts):
    parts = [x for x in parts if not is_free(x.degree)] or parts
  least = min((x for x in numbers if x), default=math.inf)
  is_guard = name in ("add", "max") and least <= _EPSILON
  is_sure = not (is_guard or name in _PACKS)
  degree = joined(parts, _JOINS[name], place, is_sure=is_sure)
  is_test = name in operation_table.COMPARISONS or name == "atan2"
  return FREE if is_test and not isinstance(degree, Unknown) else degree


def moved(equation: core.JaxprEqn, index: int, degree: Degree) -> Degree | None:
  """Returns an input's degree in terms of the output's axes; None if mixed."""

  def rename(unit: Unit) -> Unit | None:
    symbol, axes = unit
    places = _output_axes(equation, index) if axes else {}
    is_whole = places.keys() >= {*axes}
    return (symbol, tuple(places[x] for x in axes)) if is_whole else None

  return renamed(degree, rename)


def _output_axes(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  """Returns where each axis of an input is in the output, if it is whole."""
  name, params = equation.primitive.name, equation.params
  before = aval(equation.invars[index]).shape
  after = aval(equation.outvars[0]).shape
  kept = range(len(before))
  if name == "broadcast_in_dim":
    return dict(enumerate(params["broadcast_dimensions"]))
  if name == "transpose":
    return {x: i for i, x in enumerate(params["permutation"])}
  if name in ("reshape", "squeeze", "expand_dims"):
    # An axis is kept if as many elements come before it, and it has its size.
    places = {(math.prod(after[:j]), n): j for j, n in enumerate(after)}
    found = {i: (math.prod(before[:i]), before[i]) for i in kept}
    return {i: places[x] for i, x in found.items() if x in places and x[1] > 1}
  if name == "dot_general":
    contracted, batch = (x[index] for x in params["dimension_numbers"])
    free = [x for x in kept if x not in (*contracted, *batch)]
    start = len(after) - len(free) if index else len(batch)
    batched = {x: i for i, x in enumerate(batch)}
    return batched | {x: start + i for i, x in enumerate(free)}
  if "axes" in params and name.startswith(("reduce_", "arg")):
    rest = [x for x in kept if x not in params["axes"]]
    return {x: i for i, x in enumerate(rest)}
  if name == "pad":
    padding = params["padding_config"]
    return {x: x for x in kept if not index and not any(padding[x])}
  if name in ("gather", "scatter", "scatter-add"):
    return _indexed_axes(equation, index)
  dropped = params.get("axis", params.get("dimension"))
  # Along an axis that changes its length, members are left out or repeated.
  if len(before) == len(after) and name in _SAME_AXES:
    return {x: x for x in kept if before[x] == after[x] and x != dropped}
  return {}


def _indexed_axes(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  """Returns where each whole axis of a gather's or scatter's input is."""
  numbers = equation.params["dimension_numbers"]
  operand = aval(equation.invars[0]).shape
  if equation.primitive.name == "gather":
    array, sizes = aval(equation.outvars[0]), equation.params["slice_sizes"]
    windows, left_out = numbers.offset_dims, numbers.collapsed_slice_dims
    batches = numbers.start_indices_batching_dims
  elif index == 0:
    return {x: x for x in range(len(operand))}
  else:
    array = aval(equation.invars[2])
    windows, left_out = numbers.update_window_dims, numbers.inserted_window_dims
    batches = numbers.scatter_indices_batching_dims
    sizes = None
  others = [x for x in range(array.ndim) if x not in windows]
  batched = numbers.operand_batching_dims
  inside = [x for x in range(len(operand)) if x not in (*left_out, *batched)]
  pairs = [*zip(batched, (others[x] for x in batches), strict=True)]
  pairs += [
    (x, axis)
    for x, axis in zip(inside, windows, strict=True)
    if (sizes[x] if sizes else array.shape[axis]) == operand[x]
  ]
  if index == 0:
    return dict(pairs)
  return {axis: x for x, axis in pairs} if index == 2 else {}


_SAME_AXES = (
  operation_table.ELEMENTWISE
  | operation_table.COMPARISONS
  | operation_table.CUMULATIVE
  | collectives.SUMS
  | _names("""
    and clamp concatenate conj cummax cummin dynamic_slice dynamic_update_slice
    imag is_finite max min neg not or pmax pmin real select_n sign slice sort
    split
  """)
)
