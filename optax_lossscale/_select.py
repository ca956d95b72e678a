"""The atomic skip: all of it moves, or all of it stays bit for bit."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _leaves
from optax_lossscale import _state
from optax_lossscale import jaxpr


def update_unless(
  skipped: jax.Array, update: Callable[[], tuple[Any, Any]], old_state: Any
) -> tuple[Any, Any]:
  """Returns the updates and state that `update` makes, or those of a skip.

  Args:
    skipped: bool[].
    update: returns updates and a new state.
    old_state: the state before; its dtypes are kept.
  """
  old_state = _leaves.as_arrays(old_state)
  choose = functools.partial(_choose, skipped)
  if _state.is_staged():
    updates, state = jaxpr.select_at_definition(update, old_state, choose)
  else:
    updates, state = update()
    state = jax.tree.map(choose, old_state, state)
  # What was recorded as a constant comes back as a NumPy array.
  return _zero_updates(skipped, _leaves.as_arrays(updates)), state


def select(skipped: jax.Array, old: Any, new: Any) -> Any:
  """Returns `old` where the step is skipped and `new` elsewhere.

  The dtypes are those of `old`: what init made is what every step returns, and
  nothing recompiles.

  Args:
    skipped: bool[].
    old: a pytree of arrays.
    new: a pytree of the same structure.
  """
  choose = functools.partial(_choose, skipped)
  return jax.tree.map(choose, _leaves.as_arrays(old), new)


def select_on_skip(
  opt_state: Any, new: Any, old: Any, *, path: str | None = None
) -> Any:
  """Returns `old` if the last step was skipped, else `new`.

  For what a step changes outside the optimizer: batch statistics, a moving
  average of the parameters, a random key, a step counter. They move with the
  parameters or not at all.

  Args:
    opt_state: the optimizer's state after `update`.
    new: a pytree of arrays as the step made it.
    old: the same pytree before the step; its dtypes are kept.
    path: which state, if `opt_state` holds several. See `get_loss_scale`.

  Returns:
    A pytree like `old`.

  Raises:
    ValueError: if `opt_state` holds no `LossScalingState`, or several and no
      path, or if `new` and `old` differ in structure.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale())
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.array([jnp.inf, 0.0]), state)
    >>> print(ols.select_on_skip(state, new=8, old=7))
    7
  """
  check_structure("`new` and `old` must have the same structure", new, old)
  _state.refuse_frozen(opt_state, path)
  skipped = _state.find_state(opt_state, path).skipped
  return select(skipped, old, new)


def check_structure(rule: str, new: Any, old: Any) -> None:
  """Raises if two trees differ in structure.

  Args:
    rule: what must be the same, for the error.
    new: a pytree.
    old: a pytree.

  Raises:
    ValueError: if they differ.
  """
  structures: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
  if structures[0] != structures[1]:
    raise ValueError(f"{rule}, got {structures[0]} and {structures[1]}.")
  for (path, new_leaf), old_leaf in zip(
    jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True
  ):
    if np.shape(new_leaf) != np.shape(old_leaf):
      raise ValueError(
        f"{rule} and shapes, got {np.shape(new_leaf)} and {np.shape(old_leaf)} "
        f"at {jax.tree_util.keystr(path)}."
      )


def _choose(skipped: jax.Array, old: Any, new: Any) -> Any:
  """Returns one of two leaves. Nothing is multiplied, so NaN stays out."""
  if not isinstance(old, jax.Array):
    return new  # float0, which has no value.
  return jnp.where(skipped, old, jnp.asarray(new, old.dtype))


def _zero_updates(skipped: jax.Array, updates: Any) -> Any:
  """Returns -0.0 for every update where the step is skipped.

  Adding -0.0 changes no number; adding 0.0 would turn -0.0 into 0.0.
  """

  def choose(update: Any) -> Any:
    if not isinstance(update, jax.Array) or not jnp.issubdtype(
      update.dtype, jnp.number
    ):
      return update
    zero = complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
    return jnp.where(skipped, jnp.asarray(zero, update.dtype), update)

  return jax.tree.map(choose, updates)
