"""Describes, for an error, where two pytrees differ."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import operator
import traceback
from typing import Any
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

_FOR_NNX = (
  "optax_lossscale.nnx.autocast and optax_lossscale.nnx.scaled_value_and_grad "
  "keep what a call changes in an NNX model"
)

_CONTAINER_KEYS = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)


def difference(
  expected: Any, got: Any, fits: Callable[[Shape, Shape], bool] = operator.eq
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
  structures: list[Any] = [
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
  expected: Any, got: Any, fits: Callable[[Shape, Shape], bool] = operator.eq
) -> str | None:
  """Returns the first leaf whose shape does not fit, in trees of one structure.

  It returns None if all leaves fit, or if the structures differ, which some
  optimizers require.
  """
  own, structure = jax.tree.flatten(expected, is_leaf=leaves.is_none)
  paths = jax.tree.leaves_with_path(got, is_leaf=leaves.is_none)
  structures: list[Any] = [
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


def check_structure(rule: str, new: Any, old: Any) -> None:
  """Raises if two trees differ in structure or in the shapes of leaves."""
  structures: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
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


def check_unchanged(before: Sequence[Any], arguments: Any) -> None:
  """Raises if a function has changed an object among its arguments.

  The function may change a dict or list, since it has been given a copy.
  """
  known = {id(array) for array in before}
  for path, leaf in jax.tree.leaves_with_path(arguments):
    is_new = isinstance(leaf, jax.Array) and id(leaf) not in known
    # Skip the last key, which may only lead from a box to the array in it.
    if is_new and not all(isinstance(x, _CONTAINER_KEYS) for x in path[:-1]):
      raise ValueError(
        "`fun` must not change its arguments in place, since the change would "
        f"be lost, got a new value in {jax.tree_util.keystr(path[1:])}; return "
        f"it. {_FOR_NNX}; elsewhere pass what nnx.split makes of it."
      )


@contextlib.contextmanager
def explain_changes() -> Iterator[None]:
  """Explains Flax's error if `fun` changes an object that it closes over."""
  try:
    yield
  except Exception as error:
    # Compare by name, so that Flax need not be imported.
    if type(error).__name__ != "TraceContextError":
      raise
    raise ValueError(
      "`fun` must not change NNX objects that are not traced with it, got a "
      f"new value in {_changed(error)}; pass them as arguments. {_FOR_NNX}; "
      "optax_lossscale.autocast takes a model that is only read."
    ) from error


def _changed(error: Exception) -> str:
  """Returns the path of the object that Flax refused to change."""
  from flax import nnx  # Flax raised the error, so Flax is loaded.

  frames = traceback.walk_tb(error.__traceback__)
  # A method's first local is its object; the last frame's was changed.
  objects = [next(iter(x.f_locals.values()), None) for x, _ in frames]
  for model in (x for x in objects if isinstance(x, nnx.Pytree)):
    for path, node in nnx.iter_graph(model, graph=True):
      if node is objects[-1]:
        keys = (f".{x}" if isinstance(x, str) else f"[{x}]" for x in path)
        return f"{type(model).__name__}{''.join(keys)}"
  return type(objects[-1]).__name__


def _shapes(tree: Any) -> dict[str, Shape]:
  return {
    leaves.path_name(path): np.shape(leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def listed(names: Collection[Any], most: int = 20) -> str:
  """Returns text that lists the first `most` names and counts the others."""
  named = ", ".join(map(repr, list(names)[:most]))
  more = len(names) - most
  return f"{named} and {more} more" if more > 0 else named
