"""The atomic skip: a step changes everything or not a single bit."""

from collections.abc import Callable
import functools

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_lossscale._base import leaves
from optax_lossscale._base import siblings
from optax_lossscale._base.leaves import Tree
from optax_lossscale._base.siblings import FlagOf
from optax_lossscale._jaxpr import at_definition
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import devices


def update_unless(
  skipped: jax.Array,
  update: Callable[[], tuple[optax.Updates, optax.OptState]],
  old_state: optax.OptState,
  known: devices.Known,
) -> tuple[optax.Updates, optax.OptState]:
  """Returns what `update` returns or, on a skip, -0.0 and the old state."""
  old_state = leaves.as_arrays(old_state)
  flag_of = siblings.flags_by_size(skipped)
  choose = functools.partial(_choose, flag_of)
  # In eager mode selecting at definition would cost time and save no memory.
  # Both ways give the same bits.
  if interpreter.is_staged():
    updates, state = at_definition.select_at_definition(
      update,
      old_state,
      choose,
      functools.partial(devices.check_recorded, known=known),
    )
  else:
    with devices.agreeing_on(known):
      updates, state = update()
    state = jax.tree.map(choose, old_state, state)
  # A constant in the recorded update comes back as a NumPy array.
  return _zero_updates(flag_of, leaves.as_arrays(updates)), state


def select(skipped: jax.Array, old: Tree, new: Tree) -> Tree:
  """Returns `old` if the step is skipped, else `new` in the dtypes of `old`."""
  (skipped,) = siblings.shared(jnp.asarray(skipped))  # It may be NNX's.
  choose = functools.partial(_choose, siblings.flags_by_size(skipped))
  return jax.tree.map(choose, leaves.as_arrays(old), new)


def other_leaves(
  skipped: jax.Array | None,
  is_gradient: object,
  params: optax.Params | None,
  incoming: optax.Updates,
) -> optax.Updates:
  """Returns the next values of the leaves that are not gradients."""
  if skipped is None or all(jax.tree.leaves(is_gradient)):
    return incoming
  if params is None:
    raise ValueError(
      "`params` must be passed to update where leaves go around the optimizer "
      "(_overwrite_with_gradient): a skipped step returns their old values."
    )
  return select(skipped, params, incoming)


def _choose(flag_of: FlagOf, old: jax.Array, new: ArrayLike) -> jax.Array:
  """Selects one of two leaves; a product with a mask would let NaN through."""
  if not isinstance(old, jax.Array):
    return new  # `old` is float0, which has no value.
  return jax.lax.select(flag_of(old), old, jnp.asarray(new, old.dtype))


def _zero_updates(flag_of: FlagOf, updates: Tree) -> Tree:
  """Returns the updates, all replaced by -0.0 if the step is skipped."""

  def choose(update: object) -> object:
    if not isinstance(update, jax.Array) or not jnp.issubdtype(
      update.dtype, jnp.number
    ):
      return update
    # Adding -0.0 changes no number, but adding 0.0 turns -0.0 into 0.0.
    zero = complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
    zeros = jax.lax.full_like(update, zero)
    return jax.lax.select(flag_of(update), zeros, update)

  return jax.tree.map(choose, updates)
