"""Scopes: the names that JAX records with operations, and patterns for them."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import re
from typing import Any

import jax
from jax.extend import core

from optax_lossscale._jaxpr import calls

# What JAX writes around scopes when it transforms a function, or in their place
# when it calls one: those are not scopes of the model.
_INSIDE = r"([^()]*(?:\([^()]*\)[^()]*)*)"
_TRANSFORM = re.compile(rf"(?:^|(?<=[/(]))(?:jvp|transpose|vmap)\({_INSIDE}\)")
_FUNCTION = re.compile(rf"(?:^|(?<=[/(]))jit\({_INSIDE}\)")


# JAX's name for what a remat computes again in the backward pass.
_RECOMPUTED = "rematted_computation"

# Whether operations get notes. JAX's caches know of it: what was traced without
# notes is traced again.
noting = jax.make_user_context(False)
_NOTE = re.compile(r"ols\.note: ([^/()]+)")


def operations(
  jaxpr: Any, scope: str = "", around: tuple[core.JaxprEqn, ...] = ()
) -> Iterator[tuple[str, core.JaxprEqn, tuple[core.JaxprEqn, ...]]]:
  """Yields scope, equation and enclosing equations of each operation."""
  for equation in calls.close(jaxpr).jaxpr.eqns:
    where = join(scope, str(equation.source_info.name_stack))
    bodies = calls.castable_bodies(equation)
    if not bodies:
      yield where, equation, around
    for body in bodies:
      yield from operations(body.jaxpr, where, (*around, equation))


def note(text: str) -> contextlib.AbstractContextManager[Any]:
  """Writes a note beside the scopes of the operations inside, if asked for."""
  if not (text and noting.value):
    return contextlib.nullcontext()
  return jax.named_scope(f"ols.note: {text}")


def note_on(equation: core.JaxprEqn) -> str:
  """Returns the outermost note, also on what the backward pass makes of it."""
  found = _NOTE.search(str(equation.source_info.name_stack))
  return found[1] if found else ""


def join(scope: str, name_stack: str) -> str:
  """Returns the scope of an equation."""
  return "/".join([*_parts(scope), *_parts(_without_repetition(name_stack))])


def _parts(name_stack: str) -> list[str]:
  """Returns the scopes in a name stack, the outermost first."""
  count = 1
  while count:
    name_stack, count = _TRANSFORM.subn(r"\1", name_stack)
  parts = _FUNCTION.sub("", _NOTE.sub("", name_stack)).split("/")
  return [part for part in parts if part not in ("", _RECOMPUTED)]


def _without_repetition(name_stack: str) -> str:
  """Returns a name stack with the scopes around a remat written once.

  Where the backward pass computes it again, JAX writes them twice:
  "transpose(jvp(block))/mlp/jvp(block)/mlp".
  """
  for slash in re.finditer("/", name_stack):
    head, tail = name_stack[: slash.start()], name_stack[slash.end() :]
    if (
      "transpose(" in head
      and "jvp(" in tail
      and head.count("(") == head.count(")")
    ):
      around = _parts(head)
      if _parts(tail)[: len(around)] == around:
        return tail
  return name_stack


def ancestors(scope: str) -> list[str]:
  """Returns a scope and all that it lies in, the outermost first."""
  parts = scope.split("/") if scope else []
  return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]


def matches(scope: str, pattern: str) -> bool:
  """Returns whether a pattern covers a scope."""
  return any(_is_like(x, pattern) for x in ancestors(scope))


def ends_in(scope: str, patterns: Iterable[str]) -> bool:
  """Returns whether the last part of a scope is like one of the patterns."""
  part = scope.rsplit("/", 1)[-1]
  return any(_is_like(part, pattern) for pattern in patterns)


def _is_like(text: str, pattern: str) -> bool:
  # Not by fnmatch, in which the brackets of "layers[0]" have a meaning. Nor by
  # a regular expression, which tries all ways to part a text among the "*".
  first, *parts = pattern.split("*")
  if not parts or not text.startswith(first):
    return text == pattern
  place, last = len(first), parts.pop()
  for part in parts:
    found = text.find(part, place)
    if found < 0:
      return False
    place = found + len(part)
  return text.endswith(last, place)
