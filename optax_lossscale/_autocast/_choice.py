"""In which dtype an operation runs that could run in several."""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._autocast import _levels
from optax_lossscale._autocast import _lists
from optax_lossscale._autocast import _recipe
from optax_lossscale._autocast import _value
from optax_lossscale._jaxpr import operation_table

_Kind = _value.Kind
_Treatment = _levels.Treatment

_OF_PARAMETERS = operation_table.JOINS | {"add", "add_any", "mul", "square"}
_ARITHMETIC = ("add", "div", "mul", "neg", "sub")
# After these a large number is still large. Others are bounded, or make it so
# much larger or smaller that nothing is known.
_KEEP_SPAN = (
  operation_table.JOINS
  | _lists.PRODUCTS
  | _lists.SUMS
  | {"abs", "add", "add_any", "mul", "neg", "sqrt", "sub"}
)


def choose(
  equation: core.JaxprEqn,
  inputs: Sequence[_value.Value],
  decision: _recipe.Decision,
) -> tuple[Any, _value.Kind]:
  """Returns the dtype that an operation runs in, and what its result is."""
  floats = [x for x in inputs if x.is_float]
  treatment = decision.treatment
  kinds = {x.kind for x in floats}
  if kinds == {_Kind.CONSTANT}:
    return _recipe.FLOAT32, _Kind.CONSTANT
  if equation.primitive.name in operation_table.JOINS and all(
    x.kind.is_neutral for x in floats
  ):
    # Such as the biases of several gates in one array.
    return widest(floats), _Kind.GIVEN
  is_given = all(x.kind.stays_float32 for x in floats)
  name = operation_table.listed_name(equation)
  if treatment is _Treatment.BLACK:
    return _recipe.FLOAT32, _Kind.STATISTIC if is_given else _Kind.COMPUTED
  if decision.is_override:
    # Between a sum and its mean there may be no room.
    is_given &= _Kind.STATISTIC in kinds and name in ("div", "mul")
  if is_given and treatment is not _Treatment.WHITE:
    return widest(floats), _kind_in_norm(name, floats)
  if treatment in (_Treatment.GRAY, _Treatment.PROMOTE):
    # A bias is added, and a scale multiplied with. What is subtracted is a mean
    # or a target, and what is divided by may be of any size.
    promotes = treatment is _Treatment.PROMOTE or name not in _OF_PARAMETERS
    return widest(floats, promotes=promotes), _Kind.COMPUTED
  kind = _Kind.COMPUTED
  if treatment is _Treatment.LOW_BUT_NORMS:
    kind = _kind_in_norm(name, floats)
  if kind is not _Kind.COMPUTED:
    return _recipe.FLOAT32, kind
  # Of a choice the numbers beyond the range are there to be beyond it: they are
  # clipped. Anything else is computed with them, where there is room.
  is_choice = equation.primitive.name in operation_table.JOINS
  has_room = all(
    x.fits(decision.dtype)
    or (is_choice and x.number is not None and x.exceeds(decision.dtype))
    for x in floats
  )
  return (decision.dtype if has_room else _recipe.FLOAT32), kind


def span(
  equation: core.JaxprEqn, inputs: Sequence[_value.Value]
) -> _value.Span:
  """Returns the span of what an operation computes in float32."""
  name = equation.primitive.name
  floats = [x for x in inputs if x.is_float]
  if name == "div":
    floats = floats[:1]
  elif name not in _KEEP_SPAN:
    return None
  found = _value.union(x.span for x in floats)
  are_computed = sum(x.kind is _Kind.COMPUTED for x in floats) > 1
  if found is not None and (name == "div" or are_computed):
    # What is small vanishes beside what is not, or is divided by no more.
    return (found[1], found[1]) if found[1] > 1 else None
  return found


def _kind_in_norm(name: str, floats: Sequence[_value.Value]) -> _value.Kind:
  """Returns which part of a norm an operation is, COMPUTED if of none.

  A norm subtracts a mean, squares and sums (these two are in float32 anyway),
  takes a root and divides by it. What it gives goes on in low precision.
  """
  kinds = {x.kind for x in floats if not x.kind.is_neutral}
  if kinds <= {_Kind.STATISTIC, _Kind.ROOT}:
    is_root = name in ("sqrt", "rsqrt") or _Kind.ROOT in kinds
    return _Kind.ROOT if is_root else _Kind.STATISTIC
  if name == "sub" and (
    _Kind.STATISTIC in kinds or any(x.kind is _Kind.GIVEN for x in floats)
  ):
    return _Kind.NORMALIZING
  if name in ("mul", "div") and _Kind.ROOT in kinds:
    return _Kind.NORMALIZING
  if name in _ARITHMETIC and _Kind.COMPUTED not in kinds:
    return _Kind.NORMALIZING
  return _Kind.COMPUTED


def widest(inputs: Iterable[_value.Value], *, promotes: bool = True) -> Any:
  """Returns the widest dtype of those inputs that have a say.

  Constants follow the others where there is room for them, and given values do
  so unless it `promotes`.
  """
  floats = [x for x in inputs if x.is_float]
  computed = [x for x in floats if not x.kind.is_neutral]
  if promotes or not computed:
    computed += [x for x in floats if x.kind is _Kind.GIVEN]
  dtypes = [x.dtype for x in computed]
  dtypes += [
    x.written
    for x in floats
    if x.kind is _Kind.CONSTANT and not all(map(x.fits, dtypes))
  ]
  if not dtypes:
    dtypes = [x.dtype for x in floats]
  return functools.reduce(jnp.promote_types, dtypes)
