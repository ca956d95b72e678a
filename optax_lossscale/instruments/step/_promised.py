"""The trace of a step in which promised calls can be recognized."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
from typing import Any
from typing import NamedTuple

import jax

from optax_lossscale._base import promises


class Position(int):
  """A leaf of a tree that stands for one among several arrays."""


class Promised(NamedTuple):
  """A call that a proof does not look into; its kind says what it means."""

  kind: str
  # Trees like the call's operands, by name, and its result, with positions for
  # the arrays.
  inputs: dict[str, Any]
  outputs: Any
  static: dict[str, Any]  # The other arguments.


class Trace(NamedTuple):
  """The calls and functions that are taken at their word in a proof's trace."""

  calls: list[Promised]  # By their numbers.
  # The library's functions that the proof does not look into.
  trusted: dict[str, None]

  def trust(self, function: Callable[..., object]) -> None:
    """See `promises.Analysis`."""
    module = function.__module__.rpartition(".")[2]
    self.trusted[f"{module}.{function.__qualname__.partition('.<')[0]}"] = None

  def call(
    self,
    kind: str,
    function: Callable[..., Any],
    operands: dict[str, Any],
    static: dict[str, Any],
  ) -> Any:
    """See `promises.Analysis`; the call is one of `jax.jit`, with a number."""
    values, treedef = jax.tree.flatten(operands)
    places = [i for i, x in enumerate(values) if isinstance(x, jax.Array)]
    positions = {place: Position(i) for i, place in enumerate(places)}

    def call(*arrays: jax.Array) -> Any:
      replaced = dict(enumerate(values)) | dict(
        zip(places, arrays, strict=True)
      )
      return function(
        **jax.tree.unflatten(treedef, replaced.values()), **static
      )

    number = len(self.calls)
    call.__name__ = f"{promises.PREFIX}{number}"
    inputs = jax.tree.unflatten(treedef, map(positions.get, range(len(values))))
    self.calls.append(Promised(kind, inputs, None, static))
    result = jax.jit(call)(*(values[i] for i in places))
    count = itertools.count()
    outputs = jax.tree.map(lambda _: Position(next(count)), result)
    self.calls[number] = Promised(kind, inputs, outputs, static)
    return result


@contextlib.contextmanager
def proving() -> Iterator[Trace]:
  """Traces functions for a proof, and says what it may assume of them."""
  trace = Trace([], {})
  token = promises.analysis.set(trace)
  try:
    with promises.traced_for(object()), jax.disable_jit(False):
      yield trace
  finally:
    promises.analysis.reset(token)
