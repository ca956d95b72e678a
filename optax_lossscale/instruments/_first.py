"""Which of the operations that were looked at was found first."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import throughout

_LATEST = np.array(np.iinfo(np.int32).max, np.int32)


class First(NamedTuple):
  """The first result that was found, in a part of a program that ran."""

  # int32[], how many elements of it were; 0 if none was found.
  elements: Any
  # int32[], the number that the result has.
  place: Any
  # int32[], how many results were looked at before it.
  time: Any
  # int32[depth], in which rounds of the loops around it, the outermost first.
  iterations: Any
  # int32[], how many results were looked at in all.
  ran: Any
  # int32[], how many rounds of a loop are over.
  rounds: Any


class FirstRule(throughout.CountingRule):
  """A rule that finds something in operations, and counts the first to run."""

  zero: First

  def __init__(self, jaxpr: core.Jaxpr) -> None:
    zero, depth = np.zeros((), np.int32), _loop_depth(jaxpr)
    self.zero = First(
      elements=zero,
      place=zero,
      time=zero,
      iterations=np.zeros(depth, np.int32),
      ran=zero,
      rounds=zero,
    )

  def found(self, place: int, mask: Any) -> First:
    """Returns the count of one result."""
    return self.zero._replace(
      elements=jnp.sum(mask, dtype=np.int32),
      place=np.array(place, np.int32),
      ran=np.ones((), np.int32),
    )

  def join(self, counts: Sequence[First]) -> First:
    """See the base class."""
    # Of most operations there is nothing to say.
    counts = [x for x in counts if x is not self.zero]
    if len(counts) < 2:
      return counts[0] if counts else self.zero
    counts = [jax.tree.map(throughout.on_this_mesh, x) for x in counts]
    stacked = First(*(_stack(x) for x in zip(*counts, strict=True)))
    before = stacked.ran.cumsum(dtype=np.int32) - stacked.ran
    # The first True among them; the very first if there is none.
    which = jnp.argmax(stacked.elements != 0)
    return First(
      elements=_at(which, stacked.elements),
      place=_at(which, stacked.place),
      time=_at(which, before + stacked.time),
      iterations=_at(which, stacked.iterations),
      ran=stacked.ran.sum(dtype=np.int32),
      rounds=counts[0].rounds,
    )

  def join_round(self, counts: First, more: First, *, is_over: bool) -> First:
    """See the base class."""
    around = jnp.reshape(counts.rounds, (1,))
    more = more._replace(
      iterations=jnp.concatenate([around, more.iterations[:-1]])
    )
    return self.join([counts, more])._replace(
      rounds=counts.rounds + np.int32(is_over)
    )

  def join_devices(self, count: First, axes: Sequence[str]) -> First:
    """See the base class."""

    def earliest(x: Any, is_candidate: Any) -> Any:
      return lax.pmin(jnp.where(is_candidate, x, _LATEST), axes)

    is_first = count.elements != 0
    time = earliest(count.time, is_first)
    is_first &= count.time == time
    place = earliest(count.place, is_first)
    is_first &= count.place == place
    return First(
      elements=lax.psum(jnp.where(is_first, count.elements, 0), axes),
      place=place,
      time=time,
      iterations=lax.pmax(jnp.where(is_first, count.iterations, 0), axes),
      ran=lax.pmax(count.ran, axes),
      rounds=self.zero.rounds,
    )


def _stack(values: Sequence[Any]) -> Any:
  """Returns values along a new axis; numbers of the program stay so."""
  if all(isinstance(x, np.ndarray | np.generic) for x in values):
    return np.stack(values)
  return jnp.stack(values)


def _at(index: Any, stacked: Any) -> Any:
  return lax.dynamic_index_in_dim(jnp.asarray(stacked), index, keepdims=False)


def _loop_depth(jaxpr: Any) -> int:
  """Returns how many loops there are around one another."""
  return max(
    (
      _loop_depth(body.jaxpr) + calls.is_loop(equation)
      for equation in jaxpr.jaxpr.eqns
      for body in calls.bodies(equation)
    ),
    default=0,
  )
