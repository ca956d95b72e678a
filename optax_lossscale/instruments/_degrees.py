"""Degrees in S: how the result of an operation grows if S does.

A value has the degree d in S if it is S**d times what does not depend on S. So
products add degrees, quotients subtract them, moves keep them, sums and choices
need equal ones, and everything else needs and gives the degree 0. Kennedy
("Relational Parametricity and Units of Measure", POPL 1997) proves for typed
programs that such rules tell how a program reacts to another unit; S is the
unit here. CamFort (arXiv 2406.02174) infers units in existing programs.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fractions
import math
import typing
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxpr import operation_table

# An operation, after the calls around it, outermost first.
Place = tuple[core.JaxprEqn, ...]


class Symbol(NamedTuple):
  """One S: that of a state, the next one, or that of a round of a loop."""

  words: str
  number: int


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
  **dict.fromkeys(_names("add add_any scatter-add scatter_add"), "are added"),
  "sub": "are subtracted",
  **dict.fromkeys(_names("max min clamp atan2"), "are compared"),
  **dict.fromkeys(operation_table.COMPARISONS, "are compared"),
  "select_n": "are chosen between",
  **dict.fromkeys(
    _names(
      "complex concatenate dynamic_update_slice pad scatter scatter-max "
      "scatter-min stack"
    ),
    "become one array",
  ),
  "rem": "are divided with a remainder",
}
# Values that are only packed into one array may be unpacked again.
_PACKS = _names("complex concatenate dynamic_update_slice scatter stack")
_PRODUCTS = _names("""
  conv_general_dilated dot_general mul ragged_dot ragged_dot_general
""")
_POWERS = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
# Results that do not depend on S, since S is positive.
_ORDERS = _names("argmax argmin is_finite sign")
# Operations that may undo each other, so that the result need not depend on S.
_UNSURE = _names("bitcast_convert_type log log1p log2 nextafter")

# A number that guards a division, and is lost beside almost any other.
_EPSILON = 1e-6
# An FP8 layer clips to these before it casts, which is part of the cast.
_FLOAT8 = frozenset(
  float(jnp.finfo(x).max)
  for x in (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2fnuz,
  )
)


def aval(x: core.Var | core.Literal) -> jax.core.ShapedArray:
  """Returns the shape and dtype of an array in a jaxpr."""
  return typing.cast(jax.core.ShapedArray, x.aval)


def is_cast(name: str, numbers: Sequence[Number | None]) -> bool:
  """Returns whether bounds are the limits of a float8, as before a cast."""
  bounds = {"max": (-1, None), "min": (1, None), "clamp": (-1, 1)}.get(name)
  given = numbers[::2] if name == "clamp" else numbers
  if bounds is None:
    return False
  if name == "clamp":
    return all(
      x is not None and x * sign in _FLOAT8
      for x, sign in zip(given, (-1, 1), strict=True)
    )
  return any(x is not None and x * bounds[0] in _FLOAT8 for x in given)


def times(a: Degree, b: Degree, sign: int = 1) -> Degree:
  """Returns the degree of a product, or of a quotient if `sign` is -1."""
  if isinstance(a, Unknown) or isinstance(b, Unknown):
    return unknown([a, b]) or ANY
  if isinstance(a, str) or isinstance(b, str):
    return ANY
  powers = dict(a)
  for unit, exponent in b:
    powers[unit] = powers.get(unit, fractions.Fraction(0)) + sign * exponent
  return tuple(sorted(((u, p) for u, p in powers.items() if p), key=repr))


def power(degree: Degree, exponent: float) -> Degree:
  """Returns the degree of a power."""
  if isinstance(degree, (str, Unknown)):
    return degree
  factor = fractions.Fraction(1)
  if math.isfinite(exponent):
    factor = fractions.Fraction(exponent).limit_denominator(64)
  if not math.isclose(factor, exponent, rel_tol=1e-7):
    return Unknown("a power of S has an odd exponent", False)
  return tuple((unit, p * factor) for unit, p in degree if factor)


def unknown(degrees: Sequence[Degree]) -> Unknown | None:
  """Returns an unknown degree among others, a sure one if there is one."""
  found = [x for x in degrees if isinstance(x, Unknown)]
  return next((x for x in found if x.is_sure), found[0] if found else None)


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
  if isinstance(degree, (str, Unknown)):
    return degree
  powers: dict[Unit, fractions.Fraction] = {}
  for unit, exponent in degree:
    other = rename(unit)
    if other is None:
      return None
    powers[other] = powers.get(other, fractions.Fraction(0)) + exponent
  return tuple(sorted(((u, p) for u, p in powers.items() if p), key=repr))


def without_axes(degree: Degree) -> Degree:
  """Returns a degree that says of each unit how many axes it differs along."""
  return renamed(degree, lambda unit: (unit[0], (len(unit[1]),))) or FREE


def result(
  equation: core.JaxprEqn,
  degrees: Sequence[Degree],
  numbers: Sequence[Number | None],
  place: tuple[core.JaxprEqn, ...],
  sources: Sequence[tuple[core.JaxprEqn, ...]],
) -> Degree:
  """Returns the degree of an operation's results.

  `numbers` holds what is known of its inputs, and `sources` their operations.
  """
  name = equation.primitive.name
  if (found := unknown(degrees)) is not None:
    # The order of numbers of several degrees need not depend on S.
    is_order = name in ("argmax", "argmin")
    return dataclasses.replace(found, is_sure=False) if is_order else found
  if all(map(is_free, degrees)):
    return _of_free(equation, degrees, numbers)
  mapped = [moved(equation, i, x) for i, x in enumerate(degrees)]
  if None in mapped:
    reason = f"`{name}` mixes members that have an S of their own"
    return Unknown(reason, False, place)
  if name in _ORDERS:
    return FREE
  if _fills(equation):
    return Unknown(f"`{name}` puts other values in", False, place)
  degrees = [x for x in mapped if x is not None]

  def mismatch(reason: str, is_sure: bool = True) -> Unknown:
    grows = {
      in_words(degree): source
      for degree, source in zip(degrees, sources, strict=True)
      if degree != ANY
    }
    return Unknown(reason, is_sure, place, tuple(grows.items()))

  if name in _KEEPS:
    positions = degrees[1:] if name in ("gather", "dynamic_slice") else ()
    if not all(map(is_free, positions)):
      return mismatch("an index depends on S")
    return degrees[0]
  if name in _JOINS:
    return _joined(name, equation, degrees, numbers, mismatch)
  if name in _PRODUCTS:
    return times(degrees[0], degrees[1])
  if name == "div":
    return times(degrees[0], degrees[1], -1)
  if name == "triangular_solve" and not equation.params["unit_diagonal"]:
    return times(degrees[1], degrees[0], -1)
  if name in _POWERS:
    return power(degrees[0], _POWERS[name])
  if name == "integer_pow":
    return power(degrees[0], equation.params["y"])
  if name == "pow" and numbers[1] is not None:
    return power(degrees[0], numbers[1])
  if name == "cholesky":
    return power(degrees[0], 0.5)
  if name == "reduce_prod":
    before, after = map(aval, (equation.invars[0], equation.outvars[0]))
    return power(degrees[0], before.size // max(after.size, 1))
  grown = next(in_words(x) for x in degrees if not is_free(x))
  is_known = (
    name in operation_table.ELEMENTWISE | operation_table.CUMULATIVE
  ) and name not in _UNSURE
  return mismatch(f"`{name}` is given what {grown}", is_known)


def _fills(equation: core.JaxprEqn) -> bool:
  """Returns whether a gather or scatter puts in numbers of its own."""
  if equation.primitive.name == "gather":
    return equation.params["fill_value"] not in (None, 0)
  is_scatter = equation.primitive.name == "scatter"
  return is_scatter and not operation_table.moves(equation)


def _of_free(
  equation: core.JaxprEqn,
  degrees: Sequence[Degree],
  numbers: Sequence[Number | None],
) -> Degree:
  """Returns the degree if no input depends on S: whether the result is 0."""
  name = equation.primitive.name
  zeros = [x == ANY and not _fills(equation) for x in degrees]
  if name in _PRODUCTS or name == "div":
    return ANY if any(zeros) else FREE
  if name in _POWERS or name in _KEEPS:
    return ANY if zeros and zeros[0] else FREE
  if name == "integer_pow":
    return ANY if zeros[0] and equation.params["y"] else FREE
  if name == "select_n":
    return ANY if all(zeros[1:]) else FREE
  if name in _JOINS and name not in operation_table.COMPARISONS:
    return ANY if all(zeros) and name != "atan2" else FREE
  return FREE


def _joined(
  name: str,
  equation: core.JaxprEqn,
  degrees: Sequence[Degree],
  numbers: Sequence[Number | None],
  mismatch: Callable[..., Unknown],
) -> Degree:
  """Returns the degree of a sum, a choice or a comparison."""
  parts = list(degrees)
  if name == "select_n":
    if not is_free(parts[0]):
      return mismatch("a choice depends on S")
    parts = parts[1:]
  if name == "dynamic_update_slice":
    positions, parts = parts[2:], parts[:2]
  elif name.startswith("scatter"):
    positions, parts = [parts[1]], [parts[0], parts[2]]
  else:
    positions = []
  if not all(map(is_free, positions)):
    return mismatch("an index depends on S")
  distinct = {x for x in parts if x != ANY}
  if len(distinct) > 1:
    sizes = [abs(x) for x in numbers if isinstance(x, float)]
    if is_cast(name, numbers):
      return next(x for x in distinct if x != FREE)
    least = min((x for x in sizes if x), default=math.inf)
    is_guard = name in ("add", "max") and least <= _EPSILON
    return mismatch(_JOINS[name], not (is_guard or name in _PACKS))
  is_test = name in operation_table.COMPARISONS or name == "atan2"
  return FREE if is_test else next(iter(distinct), ANY)


def moved(equation: core.JaxprEqn, index: int, degree: Degree) -> Degree | None:
  """Returns an input's degree in terms of the output's axes; None if mixed."""
  if isinstance(degree, (str, Unknown)) or all(not x[1] for x, _ in degree):
    return degree
  axes = _output_axes(equation, index)

  def rename(unit: Unit) -> Unit | None:
    moved = tuple(axes[x] for x in unit[1] if x in axes)
    return (unit[0], moved) if len(moved) == len(unit[1]) else None

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
    contracted, batch = params["dimension_numbers"]
    free = [
      [x for x in range(aval(v).ndim) if x not in (*contracted[i], *batch[i])]
      for i, v in enumerate(equation.invars)
    ]
    start = len(batch[0]) + (len(free[0]) if index else 0)
    batched = {x: i for i, x in enumerate(batch[index])}
    return batched | {x: start + i for i, x in enumerate(free[index])}
  if "axes" in params and name.startswith(("reduce_", "arg")):
    rest = [x for x in kept if x not in params["axes"]]
    return {x: i for i, x in enumerate(rest)}
  dropped = params.get("axis", params.get("dimension"))
  if name in operation_table.DEVICE_SUMS | _names("pmax pmin pvary"):
    return {x: x for x in kept}
  if name == "pad":
    padding = params["padding_config"]
    return {x: x for x in kept if not index and not any(padding[x])}
  if name in ("gather", "scatter", "scatter-add"):
    return _indexed_axes(equation, index)
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


_SAME_AXES = operation_table.ELEMENTWISE | _names("""
  clamp concatenate copy cumlogsumexp cummax cummin cumprod cumsum
  dynamic_slice dynamic_update_slice eq ge gt is_finite le lt max min name ne
  neg optimization_barrier pad select_n sign slice sort split stop_gradient
  conj real imag and or not sharding_constraint device_put
""")
