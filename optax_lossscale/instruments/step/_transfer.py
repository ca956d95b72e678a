"""The results of an operation that holds no jaxpr.

Each domain has its own rules; this module knows in which order they speak, and
the few operations that several domains must treat together: a choice, a cast,
and a part of an S that differs between members.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
import dataclasses

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import collectives
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.operations import Axes
from optax_lossscale._jaxpr.operations import Flag
from optax_lossscale._jaxpr.operations import Form
from optax_lossscale.instruments.step import _constants
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _finiteness
from optax_lossscale.instruments.step import _identity
from optax_lossscale.instruments.step import _values
from optax_lossscale.instruments.step._values import DATA
from optax_lossscale.instruments.step._values import Degree
from optax_lossscale.instruments.step._values import FREE
from optax_lossscale.instruments.step._values import Mark
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import Place
from optax_lossscale.instruments.step._values import Source
from optax_lossscale.instruments.step._values import Symbol
from optax_lossscale.instruments.step._values import Unknown
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values


def transfer(operation: Operation) -> Values:
  """Returns the results of an operation."""
  row, count = operation.row, len(operation.equation.outvars)
  # A call of the host, such as a print, may have no results.
  if row.form is Form.COPIES or not count:
    return operation.inputs[:count]
  made = _values.made(operation.inputs, operation.place)
  if not made.lost and _finiteness.may_lose(operation):
    made = made.marked(Mark("taken", False, made.place))
  # The axes of an array are numbers, and those of a mesh have names.
  several = collectives.axes_of(operation.equation)
  axes = frozenset(x for x in several if isinstance(x, str))
  if reason := _unclear(operation, axes):
    return [made.but(degree=Unknown(reason, False, made.place))] * count
  if not operation.inputs:
    # The program does not know the position of a device, which differs.
    positions = [Source("varies", x) for x in axes]
    return [made.sourced(*positions, *[DATA] * len(axes))] * count
  made = _between_devices(row, made, axes)
  known = _constants.transfer(operation)
  if known is not None:
    return [_with_sources(known, made)]
  return _by_domain(operation, made)


def _by_domain(operation: Operation, made: Value) -> Values:
  """Returns results for which the domains speak by themselves, or together."""
  first, outputs = operation.inputs[0], []
  together = _TOGETHER.get(operation.row.form)
  found = together(operation, made) if together else None
  if found is not None:
    return [found]
  for degree in _degrees.transfer(operation):
    alike = [x for x in operation.inputs if x.degree == degree]
    # If no input grows like this, the operation itself made it grow.
    grown = [x.grown for x in alike if x.grown] or [() if alike else made.place]
    outputs.append(made.but(degree=degree, grown=grown[0], key=object()))
  if len(outputs) != 1:
    return outputs
  (result,) = outputs
  identity = _identity.transfer(operation)
  if operation.row.form is Form.RESHAPES:
    kept = first.but(degree=result.degree, identity=identity)
    return [kept.but(place=made.place)]
  return [_finiteness.transfer(operation, result.but(identity=identity))]


def _unclear(operation: Operation, axes: Collection[str]) -> str:
  """Returns why nothing is known of the results, if that is so."""
  if axes and any(differs for x in operation.inputs for _, differs in x.units):
    return "devices mix members that have an S of their own"
  variables = (*operation.equation.invars, *operation.equation.outvars)
  are_arrays = all(isinstance(x.aval, jax.core.ShapedArray) for x in variables)
  # A reference may hold anything by now.
  return "" if are_arrays else "it is read from a reference"


def _between_devices(
  row: operations.Row, made: Value, axes: Collection[str]
) -> Value:
  """Returns what an operation between devices makes of the values of all."""
  if row.flags & collectives.BETWEEN_DEVICES and Flag.DIFFERS not in row.flags:
    # A value that is put together from all devices is the same on all.
    agreed = {Source("varies", x) for x in axes}
    made = made.but(sources=made.sources - agreed)
  mixed = [Source("mixed", x) for x in axes if made.scales]
  return made.sourced(*mixed)


def _with_sources(known: Value, made: Value) -> Value:
  """Returns a known result with what its inputs say of devices and gates."""
  if known.constant is None:
    return known
  kept = (x for x in made.sources if x.origin in ("varies", "gate"))
  return known.unsourced("varies").sourced(*kept)


def _select(operation: Operation, made: Value) -> Value:
  """Returns what a condition chooses, element by element."""
  (condition, *choices), place = operation.inputs, made.place
  (output,) = operation.equation.outvars
  chosen = choose(condition, choices, output, place, is_branch=False)
  scaled = [x.may_be_inf for x in choices]
  is_doubted = condition.mark("doubted") and not chosen.lost
  if is_doubted and any(scaled) and not all(scaled):
    # The loss is inf or NaN if they are, so they are left out as well.
    chosen = chosen.marked(Mark("taken", None, place))
  degree, zero = chosen.degree, condition.zero_of
  # A number may stand in for 0 where nothing will come of it.
  is_guard = any(x.place in zero for x in choices)
  # A mask of positions packs values into one array.
  is_guard |= condition.is_pure and not condition.scales
  if isinstance(degree, Unknown) and is_guard:
    degree = dataclasses.replace(degree, is_sure=False)
  return chosen.but(degree=degree, place=place)


def choose(
  condition: Value,
  choices: Values,
  output: core.Var,
  place: Place,
  *,
  is_branch: bool,
) -> Value:
  """Returns a value that a condition chooses."""
  tested = condition.mark("tested")
  is_told = is_branch and not tested
  chosen = join(choices, place, key=output, is_branch=is_told)
  chosen = chosen.sourced(*condition.sources).marked(*condition.marks)
  told = chosen.mark("tested")
  chosen = chosen.unmarked("tested")
  if told and not leaves.is_gradient(output.aval):
    # Either truth may be chosen.
    chosen = chosen.marked(dataclasses.replace(told, finite=None))
  if isinstance(condition.degree, Unknown):
    chosen = chosen.but(degree=condition.degree, scale=None)
  lost = _finiteness.chosen_by(tested, choices) if tested else None
  if not tested or lost is None:
    return chosen
  chosen = chosen.marked(Mark("taken", lost, place))
  # The old value may have been chosen, which no run could tell from it.
  is_told = is_branch or tested.of is not None
  return _perhaps_old(chosen, choices) if is_told else chosen


def _perhaps_old(chosen: Value, choices: Values) -> Value:
  """Returns a value that is chosen where an overflow was found by a test."""
  scale = chosen.scale
  if scale and len({x.scale.stage for x in choices if x.scale}) > 1:
    scale = scale._replace(stage="untold")
  identity = chosen.identity or _identity.perhaps(choices)
  return chosen.but(identity=identity, scale=scale)


def join(
  values: Values,
  place: Place,
  reason: str = "are chosen between",
  *,
  key: Hashable = None,
  is_branch: bool = True,
) -> Value:
  """Returns what is known of a value that is one of several."""
  scale = _identity.join_scales(values, is_branch=is_branch)
  degree = _degrees.join(values, reason, place)
  is_unknown = _degrees.unknown(x.degree for x in values)
  if scale and isinstance(degree, Unknown) and not is_unknown:
    # One S or another is an S of its own from here on.
    key = (place, scale.path, key)
    axes = next(axes for x in values for _, axes in x.units)
    degree = _degrees.of((Symbol("an S chosen by a condition", key), axes))
  return _values.made(values, place).but(
    degree=degree,
    identity=_identity.join(values),
    constant=_constants.join(values),
    scale=scale,
    place=next((x.place for x in values if x.place), place),
    grown=next((x.grown for x in values if x.grown), ()),
  )


def _convert(operation: Operation, made: Value) -> Value:
  """Returns a value in another dtype."""
  (value,) = operation.inputs
  before, after = operation.before.dtype, operation.after.dtype
  if before == after:
    return value
  identity = _identity.cast(operation)
  if value.constant is not None:
    number = _constants.cast(value.constant, after)
    return (made if number is None else number).but(identity=identity)
  if jnp.issubdtype(after, jnp.inexact):
    scale = value.scale if formats.holds(after, before) else None
    return value.but(identity=identity, scale=scale, place=made.place)
  unknown = _degrees.unknown([value.degree])
  if after.kind == "b":
    zero_of = (value.place, *value.zeros)
    return made.but(degree=unknown or FREE, zero_of=zero_of)
  if _degrees.is_free(value.degree):
    kept = value.but(degree=FREE, identity=identity, scale=None)
    return kept.but(place=made.place)
  reason = f"a value that {_degrees.in_words(value.degree)} becomes an integer"
  unknown = unknown or _degrees.mismatch([value], reason, made.place)
  return made.but(degree=unknown)


def _part(operation: Operation, made: Value) -> Value | None:
  """Returns a part of an S that differs between members."""
  value, row = operation.inputs[0], operation.row
  if not value.scale or _degrees.fills(operation.equation):
    return None
  before, after = operation.before.shape, operation.after.shape
  axes = value.units[0][1] if value.units else ()
  # A gather counts axes otherwise.
  is_ordered = row.axes is Axes.SAME
  if not axes or (is_ordered and all(before[x] == after[x] for x in axes)):
    is_whole = is_ordered and before == after
    return value if is_whole else value.but(identity=None)
  if row.form is Form.SLICES and len(value.units) == 1:
    return made.but(degree=_member(operation), scale=value.scale)
  reason = "a part of S is taken that depends on the data"
  return made.but(degree=Unknown(reason, False, made.place))


def _member(operation: Operation) -> Degree:
  """Returns the degree of the S of one member, or of several."""
  params, value = operation.equation.params, operation.inputs[0]
  ((symbol, axes),) = value.units
  where = [params[x] for x in ("start_indices", "limit_indices", "strides")]
  words = f"{symbol.words}{[*where[0]]}".replace(" ", "")
  member = Symbol(words, (value.degree, *where))
  part = member, tuple(x for x in axes if operation.after.shape[x] > 1)
  return _degrees.rename(value.degree, lambda _: part) or FREE


# Operations that several domains treat together; None leaves them to each.
_TOGETHER: Mapping[Form, Callable[[Operation, Value], Value | None]] = {
  Form.SELECTS: _select,
  Form.CONVERTS: _convert,
  Form.SLICES: _part,
  Form.PARTS: _part,
}
