"""Promises about functions of the library, for an analysis of a step.

No general rule could follow decisions that compare numbers or read bits. So
`check_step` takes the functions that are marked here at their word;
docs/architecture.md lists them. While nothing is analysed, they are the plain
functions, and the jaxpr is the same.
"""

from collections.abc import Callable
from collections.abc import Collection
import contextvars
import functools
import inspect
from typing import Any
from typing import ParamSpec
from typing import Protocol
from typing import TypeVar

import jax
from jax.extend import core

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Of the functions that an analysis makes of promised calls.
PREFIX = "optax_lossscale_promised_"


class Analysis(Protocol):
  """A reader of a trace that takes functions at their word."""

  def trust(self, function: Callable[..., object]) -> None:
    """Notes that something is assumed of a function, or the one around it."""

  def call(
    self,
    kind: str,
    function: Callable[..., Any],
    operands: dict[str, Any],
    static: dict[str, Any],
  ) -> Any:
    """Returns what a function returns, by one call that the reader knows."""


# The reader of this thread's trace, or None.
analysis: contextvars.ContextVar[Analysis | None] = contextvars.ContextVar(
  "analysis", default=None
)
# JAX's caches depend on this value, so no trace for a reader is used without.
traced_for = jax.make_user_context(None)


def promise(
  kind: str,  # The table in docs/architecture.md says what each promises.
  *,
  # The names of the arguments that are not trees of arrays.
  static: Collection[str] = (),
  # The function that is read instead. Without it, the reader sees one call of
  # this kind, and knows what that means.
  assume: Callable[..., Any] | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
  """Returns a decorator for a function that is taken at its word."""

  def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
      reader = analysis.get()
      if reader is None:
        return function(*args, **kwargs)
      reader.trust(function)
      result: _R
      if assume is not None:
        result = assume(*args, **kwargs)
        return result
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      fixed = {x: bound.arguments.pop(x) for x in static}
      # A derivative of the call would have more inputs than the call.
      operands = jax.tree.map(
        lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x,
        bound.arguments,
      )
      result = reader.call(kind, function, operands, fixed)
      return result

    return call

  return decorate


def noted(kind: str, tree: _R) -> _R:
  """Returns `tree`; for a reader, one that went through a call of this kind."""
  reader = analysis.get()
  if reader is None:
    return tree
  # Leaves other than arrays, such as functions, go around the call.
  leaves, treedef = jax.tree.flatten(tree)
  arrays = [x if isinstance(x, jax.Array) else None for x in leaves]
  given = jax.tree.unflatten(treedef, arrays)
  passed = iter(
    jax.tree.leaves(reader.call(kind, lambda tree: tree, {"tree": given}, {}))
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
  return int(name[len(PREFIX) :]) if name.startswith(PREFIX) else None
