"""The abstract values that a step is interpreted with, and identities.

A value is known by how it grows with S (`_degrees.py`), by the argument that it
is, and by facts about where it comes from.
"""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import operation_table
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step._degrees import ANY
from optax_lossscale.instruments.step._degrees import aval
from optax_lossscale.instruments.step._degrees import Place

_ARITHMETIC = operation_table.names("add div mul sub")


@dataclasses.dataclass(frozen=True)
class Fact:
  """A fact about a value and about everything that is computed from it.

  The kinds, each with its detail:
    scale: it was computed from the S of this state.
    passed: so it was, but is chosen only if `update` of this state sees no
      overflow, so that no inf of its gradients can be in it.
    undefined: so it was, but is NaN if it is not finite, which few operations
      hide.
    gate: it says whether `update` of this state sees an overflow.
    reads: it was computed from this argument, or from the data.
    varies: devices may disagree on it along this axis of a mesh.
    mixed: scaled values were put together in it over this axis.
    tested: it was decided by which scaled values are finite.
    taken: inf and NaN may have been taken out of it.
    dropped: micro-batches with inf and NaN were taken out of it.
    loss: it was computed from the loss that the step differentiates.
    doubted: it was decided by whether that loss is finite.
    unseen: without an `update`, it may hold an inf that none has seen.
  The detail of `tested`, `taken`, `dropped` and `unseen` says whether that is
  certain; None if the loss alone was tested. A test also has
  `of`, the key of the tested value, unless it only compared sizes. Its `finite`
  is the result that means "finite", if there is one.
  """

  kind: str
  detail: Hashable = True
  place: Place = dataclasses.field(default=(), compare=False)
  finite: bool | None = dataclasses.field(default=None, compare=False)
  of: object = dataclasses.field(default=None, compare=False)


class Identity(NamedTuple):
  """An argument that a value is, bit for bit.

  Attributes:
    argument: its position.
    forms: what was done to it, such as a cast that can be undone, each with
      what undoes it.
    is_sure: False if the value may only be the argument.
  """

  argument: int
  forms: tuple[tuple[str, Hashable], ...] = ()
  is_sure: bool = True


class Scale(NamedTuple):
  """Says that a value is the S of a state.

  Attributes:
    path: the state.
    stage: "old"; "new"; "either", by a condition; or "untold", if it is not new
      where an overflow was found by other means.
    moves: the calls of `update` that led to it.
  """

  path: leaves.Path
  stage: str
  moves: frozenset[Place] = frozenset()


@dataclasses.dataclass(frozen=True)
class Value(_degrees.Operand):
  """A value: its degree, and the other facts known of it.

  Attributes:
    identity: the argument that it is, bit for bit.
    scale: the state whose S it is.
    facts: what its results inherit.
    zeros: the operations whose results are 0 where it is.
    zero_of: those of the value that it compares with 0.
    grown: the operation that gave it its degree, if its inputs had others.
    key: an object that only copies of the value share.
    factors: the keys of values that it is a multiple of.
  """

  identity: Identity | None = None
  scale: Scale | None = None
  facts: frozenset[Fact] = frozenset()
  zeros: tuple[Place, ...] = dataclasses.field(default=(), compare=False)
  zero_of: tuple[Place, ...] = dataclasses.field(default=(), compare=False)
  grown: Place = dataclasses.field(default=(), compare=False)
  key: object = dataclasses.field(default_factory=object, compare=False)
  factors: frozenset[object] = dataclasses.field(
    default=frozenset(), compare=False
  )

  def but(self, **changes: Any) -> "Value":
    """Returns the value with changes."""
    return dataclasses.replace(self, **changes)

  def all_of(self, kind: str) -> set[Hashable]:
    """Returns the details of the facts of a kind."""
    return {x.detail for x in self.facts if x.kind == kind}

  def mark(self, *kinds: str) -> Fact | None:
    """Returns the fact of a kind, a certain one if there is one."""
    found = [x for x in self.facts if x.kind in kinds]
    return max(found, key=lambda x: bool(x.detail), default=None)

  def marked(self, *facts: Fact | None) -> "Value":
    """Returns the value with more facts."""
    return self.but(facts=frozenset(filter(None, facts)) | self.facts)

  def without(self, *kinds: str) -> "Value":
    """Returns the value without the facts of some kinds."""
    return self.but(
      facts=frozenset(x for x in self.facts if x.kind not in kinds)
    )

  @property
  def lost(self) -> Fact | None:
    """A fact that inf and NaN are missing in it, a certain one if there is."""
    return self.mark("taken", "dropped")

  @property
  def scales(self) -> set[Hashable]:
    """The states from whose S it was computed."""
    return {
      x.detail for x in self.facts if x.kind in ("scale", "passed", "undefined")
    }

  @property
  def may_be_inf(self) -> bool:
    """True for data of S that no gate has found to be finite."""
    return bool(self.all_of("scale")) and not self.is_pure

  @property
  def is_pure(self) -> bool:
    """True if it was computed from S and numbers alone."""
    return not self.all_of("reads")


Values = Sequence[Value]
# Results inherit this fact from arguments other than S.
DATA = Fact("reads", "data")


def units_of(value: Value) -> list[_degrees.Unit]:
  degree = value.degree
  return [unit for unit, _ in degree] if isinstance(degree, tuple) else []


def is_number(
  constant: _degrees.Number | None, number: _degrees.Number
) -> bool:
  """Returns whether a known number is another; no flag is a number."""
  is_alike = isinstance(constant, bool) == isinstance(number, bool)
  return is_alike and constant == number


def formed(
  identity: Identity | None, kind: str, detail: Hashable = None
) -> Identity | None:
  """Returns the identity of a form of a value."""
  if identity is None:
    return None
  return identity._replace(forms=(*identity.forms, (kind, detail)))


def undone(
  identity: Identity | None, kind: str, detail: Hashable = None
) -> Identity | None:
  """Returns the identity of a value that is no more in a form."""
  if identity is None or identity.forms[-1:] != ((kind, detail),):
    return None
  return identity._replace(forms=identity.forms[:-1])


def perhaps(choices: Iterable[Value]) -> Identity | None:
  """Returns the identity of a value that may be what one choice is."""
  first = next((x.identity for x in choices if x.identity), None)
  return first and first._replace(is_sure=False)


def rewritten(equation: core.JaxprEqn, inputs: Values) -> Identity | None:
  """Returns the identity of what may be an argument, written otherwise."""
  name = equation.primitive.name
  parts = [x for x in inputs if x.identity]
  others = [x for x in inputs if not x.identity]
  identity = perhaps(parts)
  is_own = len({x.identity and x.identity.argument for x in parts}) == 1
  is_own = is_own and not any(x.all_of("reads") or x.scales for x in others)
  if identity is None or not is_own:
    return None
  if name in _ARITHMETIC:
    first = parts[0].identity
    is_changed = first and first.is_sure and not first.forms and others
    return formed(first, name) if is_changed else identity._replace(forms=())
  return identity._replace(forms=()) if name in operation_table.MOVES else None


def projected(inputs: Values) -> Identity | None:
  """Returns the identity of an argument that may be within bounds anyway."""
  bounds = [x for x in inputs if x.identity is None]
  is_bounded = all(x.is_pure and _degrees.is_free(x.degree) for x in bounds)
  is_one = len(bounds) == len(inputs) - 1
  return perhaps(inputs) if is_one and is_bounded else None


def apart(first: Value, second: Value) -> int | None:
  """Returns by how much a known value is larger than another, or None."""
  a, b = first.identity, second.identity
  if not (a and b and a.is_sure and b.is_sure):
    return None
  more, less = formed(b, "plus one"), undone(b, "plus one")
  return {b: 0, more: 1, less: -1}.get(a)


def added(equation: core.JaxprEqn, inputs: Values) -> Identity | None:
  """Returns the identity of a sum in which only one part matters."""
  is_whole = not leaves.is_gradient(equation.invars[0].aval)
  is_sum = equation.primitive.name != "sub"
  for value, other in (inputs, inputs[::-1])[: 1 + is_sum]:
    if is_whole and is_sum and value.identity and other.constant == 1:
      return formed(value.identity, "plus one")
    # 0 times what is unknown is 0, or NaN.
    if other.degree == ANY and value.identity:
      return perhaps([value])
  return None


def reshaped(
  equation: core.JaxprEqn, identity: Identity | None
) -> Identity | None:
  """Returns the identity of a reshaped array, and of one reshaped back."""
  before, after = map(aval, (equation.invars[0], equation.outvars[0]))
  if identity is None or before.size != after.size:
    return None
  if before.shape == after.shape:
    return identity
  is_reshaped = identity.forms and identity.forms[-1][0] == "shape"
  kept = identity if is_reshaped else formed(identity, "shape", before.shape)
  return undone(identity, "shape", after.shape) or kept


def cast(
  identity: Identity | None, before: np.dtype, after: np.dtype
) -> Identity | None:
  """Returns the identity of a number in a dtype that holds it, and back."""
  return undone(identity, "cast", after) or (
    formed(identity, "cast", before) if holds(after, before) else None
  )


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
  """Returns whether a dtype has all numbers of another one of its kind."""
  if narrow.kind == "b":
    return True
  both = wide, narrow
  if all(jnp.issubdtype(x, jnp.floating) for x in both):
    a, b = map(jnp.finfo, both)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp
  if all(jnp.issubdtype(x, jnp.integer) for x in both):
    c, d = map(jnp.iinfo, both)
    return int(c.min) <= int(d.min) and int(c.max) >= int(d.max)
  return False
