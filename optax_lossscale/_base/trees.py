"""Describes, for an error, where two pytrees differ."""

from collections.abc import Callable
from collections.abc import Collection
import operator
from typing import TypeVar

import jax
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import shown

Shape = tuple[int, ...]

# The type of a tree, for functions that change only its leaves.
Tree = TypeVar("Tree")

# An error names this many leaves and counts the others.
_MOST_NAMED = 4


def difference(
  expected: object,
  got: object,
  fits: Callable[[Shape, Shape], bool] = operator.eq,
) -> str | None:
  """Returns how a tree differs from the expected one; None if it does not.

  It compares the leaves by path and shape, and after that the containers.
  """
  shapes, got_shapes = _shapes(expected), _shapes(got)
  missing = [path for path in shapes if path not in got_shapes]
  extra = [path for path in got_shapes if path not in shapes]
  parts = []
  if missing:
    parts.append(f"nothing at {listed(missing, _MOST_NAMED)}")
  if extra:
    parts.append(
      f"something at {listed(extra, _MOST_NAMED)} where nothing belongs"
    )
  if parts:
    return " and ".join(parts)
  for path, shape in shapes.items():
    if not fits(got_shapes[path], shape):
      return f"shape {got_shapes[path]} at {path!r} and not {shape}"
  structures: list[object] = [
    jax.tree.structure(got),
    jax.tree.structure(expected),
  ]
  if structures[0] != structures[1]:
    return " and not ".join(shown(x, 500) for x in structures)
  return None


def is_for_each_example(got: Shape, expected: Shape) -> bool:
  """Returns whether shapes match, apart from a possible first axis of examples.

  Some optimizers take one gradient per example, along a first axis.
  """
  return expected in (got, got[1:])


def mismatched_shape(
  expected: object,
  got: object,
  fits: Callable[[Shape, Shape], bool] = operator.eq,
) -> str | None:
  """Returns the first leaf whose shape does not fit, in trees of one structure.

  It returns None if all leaves fit, or if the structures differ, which some
  optimizers require.
  """
  own, structure = jax.tree.flatten(expected, is_leaf=leaves.is_none)
  paths = jax.tree.leaves_with_path(got, is_leaf=leaves.is_none)
  structures: list[object] = [
    structure,
    jax.tree.structure(got, is_leaf=leaves.is_none),
  ]
  if structures[0] != structures[1]:
    return None
  for leaf, (path, x) in zip(own, paths, strict=True):
    if not all(hasattr(y, "shape") for y in (leaf, x)):
      continue
    if not fits(x.shape, leaf.shape):
      return f"{x.shape} at {leaves.path_name(path)!r} for {leaf.shape}"
  return None


def check_structure(rule: str, new: object, old: object) -> None:
  """Raises if two trees differ in structure or in the shapes of leaves."""
  structures: list[object] = [jax.tree.structure(new), jax.tree.structure(old)]
  if structures[0] != structures[1]:
    got = " and ".join(shown(x, 500) for x in structures)
    raise ValueError(f"{rule}, got {got}.")
  for (path, new_leaf), old_leaf in zip(
    jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True
  ):
    if np.shape(new_leaf) != np.shape(old_leaf):
      raise ValueError(
        f"{rule} and shapes, got {np.shape(new_leaf)} and {np.shape(old_leaf)} "
        f"at {jax.tree_util.keystr(path)}."
      )


def check_kept(name: str, new: object, old: object) -> None:
  """Raises unless the new state of `name` has the structure of the old one."""
  rule = f"the state of `{name}` must keep the structure that its init made"
  check_structure(rule, new, old)


def _shapes(tree: object) -> dict[str, Shape]:
  return {
    leaves.path_name(path): np.shape(leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def listed(names: Collection[object], most: int = 20) -> str:
  """Returns text that lists the first `most` names and counts the others."""
  named = ", ".join(map(repr, list(names)[:most]))
  more = len(names) - most
  return f"{named} and {more} more" if more > 0 else named
