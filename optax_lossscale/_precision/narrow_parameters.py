"""Updates narrow parameters that stand for wider values.

The inner optimizer gets those wide values, and float32 gradients.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._step import states


class Store(NamedTuple):
  """How parameters stand for wide values, by functions of one leaf."""

  # A leaf that stands for itself needs neither; a masked node is kept for it.

  # Returns the wide value from what is kept and the parameter.
  read: Callable[[jax.Array, jax.Array], jax.Array]
  # Returns the update and what is kept next, from what is kept, the next wide
  # value, the parameter, and whether the step is skipped.
  move: Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
  ]


def refuse_stores(inner_state: optax.OptState, name: str, remedy: str) -> None:
  """Raises if what `name` wraps stores parameters in a way of its own."""
  if states.stores_in(inner_state):
    raise ValueError(
      f"`inner` of `{name}` must not contain `master_weights` or "
      f"`stochastic_rounding`, got one of them; {remedy}."
    )


def init(
  inner: optax.GradientTransformationExtraArgs,
  name: str,
  widen: Callable[[jax.Array], jax.Array],
  params: optax.Params,
) -> tuple[optax.Params, optax.OptState]:
  """Returns the parameters as the inner optimizer sees them, and its state."""
  is_gradient = leaves.are_gradients(params)
  wide = jax.tree.map(
    lambda x: widen(x) if leaves.is_real(x) else x, leaves.as_arrays(params)
  )
  kept = leaves.leave_out(is_gradient, wide)
  inner_state = inner.init(kept)
  if kept is not wide and states.find_states(inner_state):
    inner_state = inner.init(wide)  # `loss_scaling` masks these itself.
  refuse_stores(inner_state, name, "one way to store parameters is enough")
  return kept, leaves.as_arrays(inner_state)


def update(
  inner: optax.GradientTransformationExtraArgs,
  store: Store,
  kept: optax.Params,
  updates: optax.Updates,
  inner_state: optax.OptState,
  params: optax.Params | None,
  extra_args: Mapping[str, object],
) -> tuple[optax.Updates, optax.Params, optax.OptState, jax.Array]:
  """Returns updates, what is kept next, the inner state, and if it skipped."""
  if params is None:
    raise ValueError(
      "`params` must be passed to update, which returns the distance from "
      "them to the next ones; tx.update(grads, opt_state, params)."
    )
  gradients = updates = leaves.as_arrays(updates)
  params = leaves.as_arrays(params)
  is_gradient = leaves.are_gradients(updates)
  scales = has_scaling(inner_state)
  if not scales:
    gradients = leaves.widen(leaves.leave_out(is_gradient, updates))
    params = leaves.leave_out(leaves.are_gradients(params), params)

  def read(kept: jax.Array, param: jax.Array) -> jax.Array:
    if not is_absent(kept):
      return store.read(kept, param)
    if not scales and leaves.is_real(param) and formats.is_low(param.dtype):
      raise ValueError(
        "`tx.init` must be given the parameters in the dtypes that `update` "
        f"gets, got one in {param.dtype} that was wider then."
      )
    return param

  wide: optax.Params = over(read, kept, params)
  inner_updates, inner_state = inner.update(
    gradients, inner_state, wide, **extra_args
  )
  skipped = is_skipped(inner_state)

  def move(
    kept: jax.Array, wide: jax.Array, update: jax.Array | None, param: jax.Array
  ) -> _Moved:
    if is_absent(kept) or update is None:
      return _Moved(update, kept)
    target = jnp.asarray(optax.apply_updates(wide, update))
    # Finite numbers may have a sum beyond the largest float32.
    largest = formats.largest(target.dtype)
    target = bits.within(target, largest, wide, update)
    # Select instead of adding -0.0, which may flush a subnormal master to 0.
    target = jnp.where(skipped, wide, target)
    return _Moved(*store.move(kept, target, param, skipped))

  moved = over(move, kept, wide, leaves.as_arrays(inner_updates), params)
  is_moved = lambda x: isinstance(x, _Moved)  # noqa: E731
  new_updates = jax.tree.map(lambda x: x.update, moved, is_leaf=is_moved)
  new_kept = jax.tree.map(lambda x: x.kept, moved, is_leaf=is_moved)
  if not scales:
    new_updates = leaves.merge(is_gradient, new_updates, updates)
  return new_updates, new_kept, leaves.as_arrays(inner_state), skipped


class _Moved(NamedTuple):
  update: object
  kept: object


def over(
  function: Callable[..., object], kept: optax.Params, *trees: object
) -> optax.Params:
  """Maps over leaves, including those that stand for themselves."""
  *_, params = trees
  places = jax.tree.map(lambda _: 0, kept, is_leaf=is_absent)
  structure: jax.tree_util.PyTreeDef = jax.tree.structure(places)
  try:
    structure.flatten_up_to(params)
  except ValueError as error:
    found = leaves.difference(places, params)
    raise ValueError(
      f"`params` must be the parameters that belong to the state, got {found}."
    ) from error
  return jax.tree.map(function, kept, *trees, is_leaf=is_absent)


def is_absent(kept: object) -> bool:
  """Returns whether nothing is kept, since a leaf stands for itself."""
  return kept is None or isinstance(kept, optax.MaskedNode)


def has_scaling(inner_state: optax.OptState) -> bool:
  """Returns whether a loss scaling in `inner` is switched on."""
  # It checks gradients in their own dtype and handles non-gradient leaves: a
  # skipped step returns their old values.
  found = states.find_states(inner_state).values()
  # If it is switched off, its rule's state has no leaves.
  return bool(jax.tree.leaves([x.loss_scale_state for x in found]))


def is_skipped(inner_state: optax.OptState) -> jax.Array:
  """Returns True if the loss scaling in `inner`, if any, skipped the step."""
  skipped = [x.skipped for x in states.find_states(inner_state).values()]
  return functools.reduce(jnp.logical_and, skipped or [jnp.full((), False)])
