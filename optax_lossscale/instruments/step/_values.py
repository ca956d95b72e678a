"""The abstract values that a step is interpreted with.

A value is known by how it grows with S (`_degrees.py`), by the number or the
argument that it is (`_constants.py`, `_identity.py`), by where it comes from,
and by what became of an inf in it (`_finiteness.py`).
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import fractions
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import axes
from optax_lossscale._jaxpr import folding
from optax_lossscale._jaxpr import operations

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


# Zero, inf and NaN fit every degree.
ANY = "any"
FREE: Powers = ()
Degree = Powers | Unknown | str


# The sources of a value, each with a detail.
#   scale: from the S of this state.
#   passed: so too, but it is chosen only if `update` of this state sees no
#     overflow, so that no inf of its gradients can be in it.
#   undefined: so too, but it is NaN if it is not finite, which few operations
#     hide.
#   gate: it says whether `update` of this state sees an overflow.
#   reads: from this argument, or from the data.
#   varies: devices may disagree on it along this axis of a mesh.
#   mixed: scaled values were put together in it over this axis.
Origin = Literal[
  "scale", "passed", "undefined", "gate", "reads", "varies", "mixed"
]
# The fate of an inf or NaN of scaled gradients on the way to a value.
#   tested: the value was decided by which scaled values are finite.
#   taken: inf and NaN may have been taken out of it.
#   dropped: micro-batches with inf and NaN were taken out of it.
#   unseen: without an `update`, it may hold an inf that none has seen.
#   loss: it was computed from the loss that the step differentiates.
#   doubted: it was decided by whether that loss is finite.
Fate = Literal["tested", "taken", "dropped", "unseen", "loss", "doubted"]


class Source(NamedTuple):
  """A source of a value, and of everything that is computed from it."""

  origin: Origin
  detail: Hashable


@dataclasses.dataclass(frozen=True)
class Mark:
  """The fate of an inf in a value, and so in all that is computed from it."""

  fate: Fate
  # None if the loss alone was tested.
  is_sure: bool | None = True
  place: Place = dataclasses.field(default=(), compare=False)
  # The result of a test that means "finite", if there is one.
  finite: bool | None = dataclasses.field(default=None, compare=False)
  # The key of the value that was tested, unless the test compared sizes alone.
  of: object = dataclasses.field(default=None, compare=False)


class Identity(NamedTuple):
  """An argument that a value is, bit for bit."""

  argument: int  # Its position.
  # What was done to it, such as a cast that can be undone, with what undoes it.
  forms: tuple[tuple[str, Hashable], ...] = ()
  # False if the value may be the argument, or not.
  is_sure: bool = True


class Scale(NamedTuple):
  """Says that a value is the S of a state."""

  path: leaves.Path
  # "either" if a condition chooses the old one or the new one; "untold" if it
  # is not new where an overflow was found by other means.
  stage: Literal["old", "new", "either", "untold"]
  # The calls of `update` that led to it.
  moves: frozenset[Place] = frozenset()


@dataclasses.dataclass(frozen=True)
class Value:
  """The facts known of a value."""

  degree: Degree = FREE
  # The number that all its elements are.
  constant: folding.Number | None = None
  # The operation that made it.
  place: Place = dataclasses.field(default=(), compare=False)
  identity: Identity | None = None
  # The state whose S it is.
  scale: Scale | None = None
  # Where it comes from, and what became of an inf in it: its results inherit
  # both.
  sources: frozenset[Source] = frozenset()
  marks: frozenset[Mark] = frozenset()
  # The operations whose results are 0 where it is, and those of the value that
  # it compares with 0.
  zeros: tuple[Place, ...] = dataclasses.field(default=(), compare=False)
  zero_of: tuple[Place, ...] = dataclasses.field(default=(), compare=False)
  # The operation that gave it its degree, if its inputs had others.
  grown: Place = dataclasses.field(default=(), compare=False)
  # An object that only copies of the value share, and those of the values that
  # it is a multiple of.
  key: object = dataclasses.field(default_factory=object, compare=False)
  factors: frozenset[object] = dataclasses.field(
    default=frozenset(), compare=False
  )

  def but(self, **changes: Any) -> "Value":
    """Returns the value with changes."""
    return dataclasses.replace(self, **changes)

  def all_of(self, *origins: Origin) -> set[Hashable]:
    """Returns the details of the sources of some origins."""
    return {x.detail for x in self.sources if x.origin in origins}

  def sourced(self, *sources: Source) -> "Value":
    """Returns the value with more sources."""
    return self.but(sources=self.sources.union(sources))

  def unsourced(self, *origins: Origin) -> "Value":
    """Returns the value without the sources of some origins."""
    kept = (x for x in self.sources if x.origin not in origins)
    return self.but(sources=frozenset(kept))

  def mark(self, *fates: Fate) -> Mark | None:
    """Returns the mark of a fate, a certain one if there is one."""
    found = [x for x in self.marks if x.fate in fates]
    return max(found, key=lambda x: bool(x.is_sure), default=None)

  def marked(self, *marks: Mark | None) -> "Value":
    """Returns the value with more marks, which replace equal ones."""
    return self.but(marks=frozenset(filter(None, marks)) | self.marks)

  def unmarked(self, *fates: Fate) -> "Value":
    """Returns the value without the marks of some fates."""
    kept = (x for x in self.marks if x.fate not in fates)
    return self.but(marks=frozenset(kept))

  @property
  def lost(self) -> Mark | None:
    """A mark that inf and NaN are missing in it, a certain one if there is."""
    return self.mark("taken", "dropped")

  @property
  def scales(self) -> set[Hashable]:
    """The states from whose S it was computed."""
    return self.all_of("scale", "passed", "undefined")

  @property
  def may_be_inf(self) -> bool:
    """True for data of S that no gate has found to be finite."""
    return bool(self.all_of("scale")) and not self.is_pure

  @property
  def is_pure(self) -> bool:
    """True if it was computed from S and numbers alone."""
    return not self.all_of("reads")

  def is_number(self, number: folding.Number) -> bool:
    """Returns whether it is a known number."""
    return folding.is_number(self.constant, number)

  @property
  def units(self) -> list[Unit]:
    """The S that it grows with."""
    degree = self.degree
    return [x for x, _ in degree] if isinstance(degree, tuple) else []


Values = Sequence[Value]


class Operation(NamedTuple):
  """An operation, and the facts known of its inputs."""

  equation: core.JaxprEqn
  inputs: Values
  place: Place

  @property
  def row(self) -> operations.Row:
    """Its line in the table of operations."""
    return operations.of(self.equation)

  @property
  def name(self) -> str:
    """The name of its primitive."""
    return self.equation.primitive.name

  @property
  def before(self) -> jax.core.ShapedArray:
    """The shape and dtype of its first input."""
    return axes.aval(self.equation.invars[0])

  @property
  def after(self) -> jax.core.ShapedArray:
    """The shape and dtype of its first result."""
    return axes.aval(self.equation.outvars[0])


# Results inherit this from arguments other than S.
DATA = Source("reads", "data")


def made(inputs: Values, place: Place) -> Value:
  """Returns what the inputs alone say of a result."""
  return Value(
    sources=frozenset[Source]().union(*(x.sources for x in inputs)),
    marks=frozenset[Mark]().union(*(x.marks for x in inputs)),
    place=place,
  )


def passed(value: Value, condition: Value) -> Value:
  """Returns a value that is chosen where gates found gradients to be finite."""
  gates = condition.all_of("gate")
  finite = {
    Source(x, y): Source("passed", y)
    for y in gates
    for x in ("scale", "undefined")
  }
  sources = frozenset(finite.get(x, x) for x in value.sources)
  found = value.but(sources=sources)
  # Without an overflow nothing was lost.
  is_whole = gates and not found.may_be_inf
  return found.unmarked("tested", "taken", "dropped") if is_whole else found
