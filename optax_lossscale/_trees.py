"""Where two pytrees differ, in words for an error."""

from typing import Any

import jax
import numpy as np

# How many leaves an error names before it says how many more there are.
_MOST_NAMED = 4


def difference(expected: Any, got: Any) -> str | None:
  """Returns how a tree differs from the expected one; None if it does not.

  Leaves are compared by path and shape, and then the containers.

  Args:
    expected: a pytree.
    got: a pytree.
  """
  shapes, got_shapes = _shapes(expected), _shapes(got)
  missing = [path for path in shapes if path not in got_shapes]
  extra = [path for path in got_shapes if path not in shapes]
  parts = []
  if missing:
    parts.append(f"nothing at {_listed(missing)}")
  if extra:
    parts.append(f"something at {_listed(extra)} where nothing belongs")
  if parts:
    return " and ".join(parts)
  for path, shape in shapes.items():
    if got_shapes[path] != shape:
      return f"shape {got_shapes[path]} at {_listed([path])} and not {shape}"
  structures: list[Any] = [
    jax.tree.structure(got),
    jax.tree.structure(expected),
  ]
  if structures[0] != structures[1]:
    return f"{structures[0]} and not {structures[1]}"
  return None


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def _listed(paths: list[str]) -> str:
  named = ", ".join(repr(path) for path in paths[:_MOST_NAMED])
  more = len(paths) - _MOST_NAMED
  return f"{named} and {more} more" if more > 0 else named
