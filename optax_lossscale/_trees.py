"""Where two pytrees differ, in words for an error."""

from collections.abc import Callable
import operator
from typing import Any

import jax
import numpy as np

Shape = tuple[int, ...]

# How many leaves an error names before it says how many more there are.
_MOST_NAMED = 4


def difference(
  expected: Any, got: Any, fits: Callable[[Shape, Shape], bool] = operator.eq
) -> str | None:
  """Returns how a tree differs from the expected one; None if it does not.

  Leaves are compared by path and shape, and then the containers.

  Args:
    expected: a pytree.
    got: a pytree.
    fits: whether a shape will do where another one is expected.
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
    if not fits(got_shapes[path], shape):
      return f"shape {got_shapes[path]} at {_listed([path])} and not {shape}"
  structures: list[Any] = [
    jax.tree.structure(got),
    jax.tree.structure(expected),
  ]
  if structures[0] != structures[1]:
    return f"{structures[0]} and not {structures[1]}"
  return None


def is_for_each_example(got: Shape, expected: Shape) -> bool:
  """Returns whether a shape is the expected one, or that of many examples.

  Some optimizers take a gradient for each example, with a first axis for them.

  Args:
    got: a shape.
    expected: that of the parameter.
  """
  return expected in (got, got[1:])


def mismatched_shape(
  expected: Any, got: Any, fits: Callable[[Shape, Shape], bool] = operator.eq
) -> str | None:
  """Returns where a leaf has a shape that does not fit, in trees alike.

  None if there is no such leaf, or if the trees are not alike, which some
  optimizers want.

  Args:
    expected: parameters.
    got: their gradients or updates; None stands for no gradient.
    fits: whether a shape will do where another one is expected.
  """
  leaves, structure = jax.tree.flatten(expected, is_leaf=_is_none)
  paths = jax.tree.leaves_with_path(got, is_leaf=_is_none)
  structures: list[Any] = [structure, jax.tree.structure(got, is_leaf=_is_none)]
  if structures[0] != structures[1]:
    return None
  for leaf, (path, x) in zip(leaves, paths, strict=True):
    if not all(hasattr(y, "shape") for y in (leaf, x)):
      continue
    if not fits(x.shape, leaf.shape):
      return f"{x.shape} at {_listed([_name(path)])} for {leaf.shape}"
  return None


def _shapes(tree: Any) -> dict[str, Shape]:
  leaves = jax.tree.leaves_with_path(tree)
  return {_name(path): np.shape(leaf) for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_none(x: Any) -> bool:
  return x is None


def _listed(paths: list[str]) -> str:
  named = ", ".join(repr(path) for path in paths[:_MOST_NAMED])
  more = len(paths) - _MOST_NAMED
  return f"{named} and {more} more" if more > 0 else named
