"""Scopes: the names that JAX records with operations, and patterns for them."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import fnmatch
import re

import jax
from jax.extend import core

from optax_lossscale._jaxpr import calls

# JAX wraps scopes in these names for a transformation, and adds them as scopes
# for a call. These names are not scopes of the model.
_INSIDE = r"([^()]*(?:\([^()]*\)[^()]*)*)"
_TRANSFORM = re.compile(rf"(?:^|(?<=[/(]))(?:jvp|transpose|vmap)\({_INSIDE}\)")
_FUNCTION = re.compile(rf"(?:^|(?<=[/(]))jit\({_INSIDE}\)")

# JAX's scope for operations that a remat recomputes in the backward pass.
_RECOMPUTED = "rematted_computation"

# True while `note` has an effect. JAX's caches depend on this value, so a
# function that was traced without notes is traced again.
noting = jax.make_user_context(False)
_NOTE = re.compile(r"ols\.note: ([^/()]+)")

# The marks, see `mark`: of a marked call, of a conversion of its results back,
# and of a choice among calls in the dtypes that follow.
KERNEL, RESTORED, CHOICE = "kernel", "restored", "one of"
_MARK = re.compile(r"ols\.cast_inputs: ([^/()]+)")


def operations(
  jaxpr: core.Jaxpr, scope: str = "", around: tuple[core.JaxprEqn, ...] = ()
) -> Iterator[tuple[str, core.JaxprEqn, tuple[core.JaxprEqn, ...]]]:
  """Yields the scope, equation and enclosing equations of each operation."""
  for equation in calls.close(jaxpr).jaxpr.eqns:
    where = join(scope, str(equation.source_info.name_stack))
    bodies = calls.castable_bodies(equation)
    inside = (*around, equation)
    if calls.is_by_platform(equation):
      # The last branch is that of all platforms without one of their own.
      bodies, inside = bodies[-1:], around
    if not bodies:
      yield where, equation, around
    for body in bodies:
      yield from operations(body.jaxpr, where, inside)


def note(text: str) -> contextlib.AbstractContextManager[object]:
  """Adds a note to the scopes of the operations inside, if `noting` is True."""
  if not (text and noting.value):
    return contextlib.nullcontext()
  return jax.named_scope(f"ols.note: {text}")


def note_on(equation: core.JaxprEqn) -> str:
  """Returns the outermost note on an equation, or an empty string."""
  found = _NOTE.search(str(equation.source_info.name_stack))
  return found[1] if found else ""


def mark(text: str) -> contextlib.AbstractContextManager[object]:
  """Marks the operations inside, which `autocast` then leaves as written."""
  return jax.named_scope(f"ols.cast_inputs: {text}")


def mark_on(equation: core.JaxprEqn) -> str:
  """Returns the mark that counts on an equation, or an empty string."""
  found = _MARK.findall(str(equation.source_info.name_stack))
  return KERNEL if KERNEL in found else found[-1] if found else ""


def join(scope: str, name_stack: str) -> str:
  """Returns the full scope of an equation that is inside `scope`."""
  return "/".join([*_parts(scope), *_parts(_without_repetition(name_stack))])


def _parts(name_stack: str) -> list[str]:
  """Returns the scopes in a name stack, outermost first."""
  count = 1
  while count:
    name_stack, count = _TRANSFORM.subn(r"\1", name_stack)
  name_stack = _MARK.sub("", _NOTE.sub("", name_stack))
  parts = _FUNCTION.sub("", name_stack).split("/")
  return [part for part in parts if part not in ("", _RECOMPUTED)]


def _without_repetition(name_stack: str) -> str:
  """Returns a name stack with the scopes around a remat written only once."""
  # Of one that is recomputed: "transpose(jvp(block))/mlp/jvp(block)/mlp".
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
  """Returns a scope and all scopes that contain it, outermost first."""
  parts = scope.split("/") if scope else []
  return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]


def matches(scope: str, pattern: str) -> bool:
  """Returns whether a pattern matches a scope or a scope around it."""
  # "*" also matches operations in no scope.
  return any(_is_like(x, pattern) for x in ancestors(scope) or [""])


def ends_in(scope: str, patterns: Iterable[str]) -> bool:
  """Returns whether the last part of a scope matches one of the patterns."""
  part = scope.rsplit("/", 1)[-1]
  return any(_is_like(part, pattern) for pattern in patterns)


def _is_like(text: str, pattern: str) -> bool:
  # Only "*" is special, so that "layers[0]" is an ordinary name.
  return fnmatch.fnmatchcase(text, re.sub(r"[?[]", r"[\g<0>]", pattern))
