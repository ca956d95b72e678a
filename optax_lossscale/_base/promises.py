"""What the library promises of its functions, for an analysis of a step.

No general rule could follow decisions that compare numbers or read bits. So
`check_step` takes the functions that are marked here at their word;
docs/architecture.md lists them. While nothing is analysed, they are the plain
functions, and the jaxpr is the same.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
import contextlib
import contextvars
import functools
import inspect
import itertools
from typing import Any
from typing import NamedTuple
from typing import ParamSpec
from typing import TypeVar

import jax
from jax.extend import core

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PREFIX = "optax_lossscale_promised_"


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
  """The calls and functions that are taken at their word in a proof's trace.

  Attributes:
    calls: the promised calls, by their numbers.
    trusted: the library's functions that the proof does not look into.
  """

  calls: list[Promised]
  trusted: dict[str, None]

  def trust(self, function: Callable[..., object]) -> None:
    """Notes that something is assumed of a function, or the one around it."""
    module = function.__module__.rpartition(".")[2]
    self.trusted[f"{module}.{function.__qualname__.partition('.<')[0]}"] = None

  def call(
    self,
    kind: str,
    function: Callable[..., _R],
    operands: dict[str, Any],
    static: dict[str, Any],
  ) -> _R:
    """Returns what a function returns, by one call with a number."""
    values, treedef = jax.tree.flatten(operands)
    places = [i for i, x in enumerate(values) if isinstance(x, jax.Array)]
    positions = {place: Position(i) for i, place in enumerate(places)}

    def call(*arrays: jax.Array) -> _R:
      replaced = dict(enumerate(values)) | dict(
        zip(places, arrays, strict=True)
      )
      return function(
        **jax.tree.unflatten(treedef, replaced.values()), **static
      )

    number = len(self.calls)
    call.__name__ = f"{_PREFIX}{number}"
    inputs = jax.tree.unflatten(treedef, map(positions.get, range(len(values))))
    self.calls.append(Promised(kind, inputs, None, static))
    result = jax.jit(call)(*(values[i] for i in places))
    count = itertools.count()
    outputs = jax.tree.map(lambda _: Position(next(count)), result)
    self.calls[number] = Promised(kind, inputs, outputs, static)
    return result


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
    # Each promised call is one of `jax.jit`.
    with _traced_for(object()), jax.disable_jit(False):
      yield trace
  finally:
    _traced.reset(token)


def promise(
  kind: str,
  *,
  static: Collection[str] = (),
  assume: Callable[..., Any] | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
  """Returns a decorator for a function that a proof takes at its word.

  Args:
    kind: what is promised; the table in docs/architecture.md says it in words.
    static: the names of arguments that are no trees of arrays.
    assume: the function that a proof reads instead. Without it, the proof sees
      one call of this kind, and knows what that means.
  """

  def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
      trace = _traced.get()
      if trace is None:
        return function(*args, **kwargs)
      trace.trust(function)
      if assume is not None:
        assumed: _R = assume(*args, **kwargs)
        return assumed
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      fixed = {x: bound.arguments.pop(x) for x in static}
      # A derivative of the call would have more inputs than the call.
      operands = jax.tree.map(
        lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x,
        bound.arguments,
      )
      return trace.call(kind, function, operands, fixed)

    return call

  return decorate


def noted(kind: str, tree: _R) -> _R:
  """Returns `tree`; in a proof, one that went through a call of this kind."""
  trace = _traced.get()
  if trace is None:
    return tree
  # Leaves other than arrays, such as functions, go around the call.
  leaves, treedef = jax.tree.flatten(tree)
  arrays = [x if isinstance(x, jax.Array) else None for x in leaves]
  given = jax.tree.unflatten(treedef, arrays)
  passed = iter(
    jax.tree.leaves(trace.call(kind, lambda tree: tree, {"tree": given}, {}))
  )
  merged = [
    x if y is None else next(passed)
    for x, y in zip(leaves, arrays, strict=True)
  ]
  noted: _R = jax.tree.unflatten(treedef, merged)
  return noted


def number_of(equation: core.JaxprEqn) -> int | None:
  """Returns the number of a promised call, or None for another equation."""
  name = str(equation.params.get("name", ""))
  return int(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None
