"""Scopes: the names that JAX records with operations, and patterns for them."""

from collections.abc import Collection
from collections.abc import Iterable
import re

# What JAX writes around scopes when it transforms a function, or in their place
# when it calls one: those are not scopes of the model.
_INSIDE = r"([^()]*(?:\([^()]*\)[^()]*)*)"
_TRANSFORM = re.compile(rf"(?:^|(?<=[/(]))(?:jvp|transpose|vmap)\({_INSIDE}\)")
_FUNCTION = re.compile(rf"(?:^|(?<=[/(]))jit\({_INSIDE}\)")


def join(scope: str, name_stack: str) -> str:
  """Returns the scope of an equation."""
  count = 1
  while count:
    name_stack, count = _TRANSFORM.subn(r"\1", name_stack)
  parts = [scope, *_FUNCTION.sub("", name_stack).split("/")]
  return "/".join(part for part in parts if part)


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


def check_patterns(
  patterns: Iterable[str], found_scopes: Collection[str]
) -> None:
  """Raises if a pattern matches nothing."""
  for pattern in patterns:
    if any(matches(scope, pattern) for scope in found_scopes):
      continue
    known = sorted({x for scope in found_scopes for x in ancestors(scope)})
    there_are = (
      f"the scopes are {', '.join(map(repr, known))}"
      if known
      else "it has none: Flax Linen writes them, elsewhere jax.named_scope does"
    )
    anywhere = f"*{pattern}"
    hint = (
      f" It begins at the first part of a scope: {anywhere!r} would match."
      if any(matches(scope, anywhere) for scope in found_scopes)
      else ""
    )
    raise ValueError(
      "Each pattern of `overrides` must match a scope of the function, got "
      f"{pattern!r}; {there_are}.{hint}"
    )


def _is_like(text: str, pattern: str) -> bool:
  # Not by fnmatch, in which the brackets of "layers[0]" have a meaning.
  parts = map(re.escape, pattern.split("*"))
  return re.fullmatch(".*".join(parts), text) is not None
