"""The assumptions that a proof of a step makes about the library.

`check_step` proves the laws of a step from its jaxpr. No general rule could
follow the library's decisions that compare numbers or read bits. So a proof
trusts the functions that are decorated here, and each decorator says what the
proof may assume. While no proof traces, they are the plain functions.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import contextvars
import functools
import itertools
from typing import Any
from typing import NamedTuple
from typing import ParamSpec
from typing import TypeVar

import jax
from jax.extend import core

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PREFIX = "optax_lossscale_named_call_"


class Position(int):
  """A leaf of a tree that stands for one among several arrays."""


class NamedCall(NamedTuple):
  """A call that a proof does not look into; its kind says what it means."""

  kind: str
  # Trees like the call's operands and result, with positions for its arrays.
  inputs: Any
  outputs: Any
  facts: dict[str, Any]


class Trace(NamedTuple):
  """The named calls and trusted functions in a proof's trace of a step.

  Attributes:
    calls: the named calls, by their numbers.
    trusted: the library's functions that the proof does not look into.
  """

  calls: list[NamedCall]
  trusted: dict[str, None]

  def trust(self, function: Callable[..., object]) -> None:
    """Notes that something is assumed of a function, or the one around it."""
    module = function.__module__.rpartition(".")[2]
    self.trusted[f"{module}.{function.__qualname__.partition('.<')[0]}"] = None


# The trace for a proof that is made in this thread, or None.
_traced: contextvars.ContextVar[Trace | None] = contextvars.ContextVar(
  "_traced", default=None
)
# JAX's caches depend on this value, so no trace for a proof is used without.
_traced_for = jax.make_user_context(None)


@contextlib.contextmanager
def proving() -> Iterator[Trace]:
  """Traces functions for a proof, and says what it may assume of them."""
  trace = Trace([], {})
  token = _traced.set(trace)
  try:
    # Each named call is one of `jax.jit`.
    with _traced_for(object()), jax.disable_jit(False):
      yield trace
  finally:
    _traced.reset(token)


def assumed(
  stand_in: Callable[..., _R],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
  """Returns a decorator: a proof reads `stand_in` in place of the function."""

  def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
      trace = _traced.get()
      if trace is None:
        return function(*args, **kwargs)
      trace.trust(function)
      return stand_in(*args, **kwargs)

    return call

  return decorate


def named(
  kind: str, function: Callable[..., _R], *operands: object, **facts: object
) -> _R:
  """Returns `function(*operands)`; in a proof, as one call with a name."""
  trace = _traced.get()
  if trace is None:
    return function(*operands)
  values, treedef = jax.tree.flatten(operands)
  places = [i for i, x in enumerate(values) if isinstance(x, jax.Array)]
  positions = {place: Position(i) for i, place in enumerate(places)}

  def call(*arrays: jax.Array) -> _R:
    replaced = dict(enumerate(values)) | dict(zip(places, arrays, strict=True))
    return function(*jax.tree.unflatten(treedef, replaced.values()))

  number = len(trace.calls)
  call.__name__ = f"{_PREFIX}{number}"
  inputs = jax.tree.unflatten(treedef, map(positions.get, range(len(values))))
  trace.calls.append(NamedCall(kind, inputs, None, facts))
  arrays = [values[i] for i in places]
  if function is not _same:
    trace.trust(function)
    # A derivative of the call would have more inputs than the call.
    arrays = [*map(jax.lax.stop_gradient, arrays)]
  result = jax.jit(call)(*arrays)
  count = itertools.count()
  outputs = jax.tree.map(lambda _: Position(next(count)), result)
  trace.calls[number] = NamedCall(kind, inputs, outputs, facts)
  return result


def noted(kind: str, tree: _R) -> _R:
  """Returns `tree`; in a proof, one that went through a call with a name."""
  if _traced.get() is None:
    return tree
  # Leaves other than arrays, such as functions, go around the call.
  leaves, treedef = jax.tree.flatten(tree)
  arrays = [x if isinstance(x, jax.Array) else None for x in leaves]
  given = jax.tree.unflatten(treedef, arrays)
  passed = iter(jax.tree.leaves(named(kind, _same, given)))
  merged = [
    x if y is None else next(passed)
    for x, y in zip(leaves, arrays, strict=True)
  ]
  noted: _R = jax.tree.unflatten(treedef, merged)
  return noted


def _same(tree: _R) -> _R:
  return tree


def number_of(equation: core.JaxprEqn) -> int | None:
  """Returns the number of a named call, or None for another equation."""
  name = str(equation.params.get("name", ""))
  return int(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None
