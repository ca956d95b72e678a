"""What is counted at every operation, and how counts are put together."""

import abc
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax


class Tally(abc.ABC):
  """How counts are put together: in order, in loops, over devices.

  A count is a pytree of arrays, of the same structure, shapes and dtypes
  wherever it comes from.
  """

  @property
  @abc.abstractmethod
  def zero(self) -> Any:
    """The count of nothing."""

  @abc.abstractmethod
  def join(self, counts: Sequence[Any]) -> Any:
    """Returns one count for what was counted one after the other."""

  def join_round(self, counts: Any, more: Any, *, is_over: bool) -> Any:
    """Returns the count of a loop so far."""
    del is_over
    return self.join([counts, more])

  @abc.abstractmethod
  def join_devices(self, count: Any, axes: Sequence[str]) -> Any:
    """Returns one count for several devices, the same on all of them."""


@dataclasses.dataclass(frozen=True)
class Sum(Tally):
  """Counts are added up.

  Attributes:
    zero: the count of nothing, a pytree of int32[].
  """

  zero: Any = ()

  def join(self, counts: Sequence[Any]) -> Any:
    """See the base class."""
    return functools.reduce(_add, counts, self.zero)

  def join_devices(self, count: Any, axes: Sequence[str]) -> Any:
    """See the base class."""
    return jax.tree.map(lambda x: lax.psum(x, axes), count)


def _add(counts: Any, more: Any) -> Any:
  return jax.tree.map(
    lambda x, y: on_this_mesh(x) + on_this_mesh(y), counts, more
  )


def on_this_mesh(count: Any) -> Any:
  """Returns an array of a count made in `jax.sharding.auto_axes` or the like.

  The mesh there has axes of another kind, which is in the type of the array.
  """
  mesh = jax.sharding.get_abstract_mesh()
  mesh_there = jax.typeof(count).sharding.mesh
  if mesh.empty or mesh_there.empty or mesh_there == mesh:
    return count
  here: jax.Array = jax.sharding.reshard(
    count, jax.NamedSharding(mesh, jax.P())
  )
  return here
