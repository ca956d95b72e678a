"""Describes, for an error, where two pytrees differ."""

from collections.abc import Callable
from collections.abc import Collection
import operator

import jax
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import shown
from optax_lossscale._base.leaves import Tree as Tree

Shape = tuple[int, ...]

# An error names this many leaves and counts the others.
_MOST_NAMED = 4


def difference(
  expected: object,
  got: object,
  fits: Callable[[Shape, Shape], bool] = operator.eq,
) -> str | None:
  """Returns how a tree differs from the expected one; None if it does not.

  It compares the leaves by path, then the containers, and last the shapes.
  """
  structures: list[object] = list(map(jax.tree.structure, (got, expected)))
  if structures[0] == structures[1]:
    return _misfit(expected, got, fits)
  paths, got_paths = (
    [leaves.path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]
    for tree in (expected, got)
  )
  missing = [path for path in paths if path not in got_paths]
  extra = [path for path in got_paths if path not in paths]
  parts = []
  if missing:
    parts.append(f"nothing at {listed(missing, _MOST_NAMED)}")
  if extra:
    parts.append(
      f"something at {listed(extra, _MOST_NAMED)} where nothing belongs"
    )
  return " and ".join(parts) or " and not ".join(
    shown(x, 500) for x in structures
  )


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
  optimizers require. None in place of a leaf fits.
  """
  structures: list[object] = [
    jax.tree.structure(x, is_leaf=leaves.is_none) for x in (expected, got)
  ]
  same = structures[0] == structures[1]
  return _misfit(expected, got, fits) if same else None


def check_structure(rule: str, new: object, old: object) -> None:
  """Raises if two trees differ in structure or in the shapes of leaves."""
  if (found := difference(old, new)) is not None:
    raise ValueError(f"{rule}, got {found}.")


def check_kept(name: str, new: object, old: object) -> None:
  """Raises unless the new state of `name` has the structure of the old one."""
  rule = f"the state of `{name}` must keep the structure that its init made"
  check_structure(rule, new, old)


def _misfit(
  expected: object, got: object, fits: Callable[[Shape, Shape], bool]
) -> str | None:
  """Returns the first leaf whose shape does not fit; None in a tree fits."""
  for leaf, (path, x) in zip(
    jax.tree.leaves(expected, is_leaf=leaves.is_none),
    jax.tree.leaves_with_path(got, is_leaf=leaves.is_none),
    strict=True,
  ):
    is_there = leaf is not None and x is not None
    if is_there and not fits(np.shape(x), np.shape(leaf)):
      place = leaves.path_name(path)
      return f"shape {np.shape(x)} at {place!r} and not {np.shape(leaf)}"
  return None


def listed(names: Collection[object], most: int = 20) -> str:
  """Returns text that lists the first `most` names and counts the others."""
  named = ", ".join(map(repr, list(names)[:most]))
  more = len(names) - most
  return f"{named} and {more} more" if more > 0 else named
