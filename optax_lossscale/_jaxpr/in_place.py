"""Changes in place of a function's arguments, which a recording would lose."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib

import jax

_FOR_NNX = (
  "optax_lossscale.nnx.autocast and optax_lossscale.nnx.scaled_value_and_grad "
  "keep what a call changes in an NNX model"
)

_CONTAINER_KEYS = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)


def check_unchanged(before: Sequence[object], arguments: object) -> None:
  """Raises if a function has changed an object among its arguments."""
  known = {id(array) for array in before}
  for path, leaf in jax.tree.leaves_with_path(arguments):
    is_new = isinstance(leaf, jax.Array) and id(leaf) not in known
    # It may change a dict or list, since it has been given a copy. Skip the
    # last key, which may only lead from a box to the array in it.
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
      "change to one that it closes over, on the line that the traceback "
      f"shows; pass the object as an argument. {_FOR_NNX}; "
      "optax_lossscale.autocast takes a model that is only read."
    ) from error
