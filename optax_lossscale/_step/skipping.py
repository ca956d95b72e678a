"""The atomic skip: all of it moves, or all of it stays bit for bit."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import leaves
from optax_lossscale._base import trees
from optax_lossscale._jaxpr import at_definition
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import states


def update_unless(
  skipped: jax.Array, update: Callable[[], tuple[Any, Any]], old_state: Any
) -> tuple[Any, Any]:
  """Returns the updates and state that `update` makes, or those of a skip."""
  old_state = leaves.as_arrays(old_state)
  choose = functools.partial(_choose, skipped)
  # The one place that decides how the inner optimizer runs. Under jit, scan and
  # the like each value of the new state is selected where it is defined, so
  # that the state is not kept twice. Eagerly that would free nothing sooner and
  # cost time, so there the select comes after the update. Both give the same
  # bits. Under jit the inner optimizer must be pure, as jit asks anyway.
  if interpreter.is_staged():
    updates, state = at_definition.select_at_definition(
      update, old_state, choose
    )
  else:
    updates, state = update()
    state = jax.tree.map(choose, old_state, state)
  # What was recorded as a constant comes back as a NumPy array.
  return _zero_updates(skipped, leaves.as_arrays(updates)), state


def select(skipped: jax.Array, old: trees.Tree, new: trees.Tree) -> trees.Tree:
  """Returns `old` where the step is skipped and `new` elsewhere.

  The dtypes are those of `old`: what init made is what every step returns, and
  nothing recompiles.
  """
  choose = functools.partial(_choose, skipped)
  return jax.tree.map(choose, leaves.as_arrays(old), new)


def select_on_skip(
  opt_state: optax.OptState,
  new: trees.Tree,
  old: trees.Tree,
  *,
  path: str | None = None,
) -> trees.Tree:
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
  trees.check_structure(
    "`new` and `old` must have the same structure", new, old
  )
  return select(states.state_in_use(opt_state, path).skipped, old, new)


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
