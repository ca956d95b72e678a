"""Master weights: narrow parameters that follow a wider copy of themselves."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import requirements
from optax_lossscale._step import states as _states


class MasterWeightsState(NamedTuple):
  """State of `master_weights`: the master and the inner optimizer's state.

  Attributes:
    master: the parameters in the wider dtype; a masked node for each leaf that
      has no master.
    inner_state: the wrapped optimizer's state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = optax.chain(ols.master_weights(optax.sgd(0.5)))
    >>> state = tx.init({"w": jnp.ones(1, jnp.float16)})
    >>> print(optax.tree.get(state, "master"))
    {'w': Array([1.], dtype=float32)}
  """

  master: optax.Params
  inner_state: optax.OptState


def master_weights(
  inner: optax.GradientTransformation | optax.MultiSteps,
  dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it updates a float32 copy of the parameters.

  The next float16 after 1.0 is 1.001, and the next bfloat16 is 1.008. Adding
  less than half that gap has no effect, however often. This wrapper adds
  updates to the master, a wider copy in the optimizer's state, and returns the
  difference between the master and the parameter. That difference is rounded,
  so the parameter may be up to 1.5 ulp from the master. The error does not
  accumulate: the next step starts from the rounded value.

  The inner optimizer, including any weight decay, sees the master as its
  parameters. Nothing that changes updates may come after this wrapper in a
  chain, because the parameters would then no longer follow the master. The
  wrapper works inside or outside `loss_scaling`, with the same result.

  If something else changes the parameters, the next step moves them back,
  unless the master is set too: `optax.tree.set(opt_state, master=...)`. A
  parameter beyond the largest value of its dtype becomes inf, then NaN.

  Args:
    inner: the optimizer, any optax transformation or `optax.MultiSteps`. It
      gets gradients in float32 or wider. If it contains `loss_scaling`, it gets
      them unchanged, because `loss_scaling` checks them in their own dtype.
    dtype: the master's dtype, float32 or wider, unless the parameter's is
      wider.

  Returns:
    A transformation whose state is a `MasterWeightsState`. Every real floating
    parameter has a master, which for a float32 parameter is simply a copy. The
    inner optimizer handles all other parameters directly. The leaves of Flax's
    `_overwrite_with_gradient` collection bypass the inner optimizer, as in
    `loss_scaling`. Updates have the parameters' dtypes.

  Raises:
    TypeError: if `inner` is not an optimizer or `dtype` is not a floating-point
      dtype; from `update`, if `state` is not the one that `init` made.
    ValueError: if `dtype` is narrower than float32, or is float64 while JAX has
      float64 disabled; from `update`, if `params` is None.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def train(tx):
    ...   params = jnp.ones(1, jnp.float16)
    ...   state = tx.init(params)
    ...   for _ in range(64):
    ...     grads = jnp.full(1, 2.0**-13, jnp.float16)
    ...     updates, state = tx.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    ...   return params
    >>> print(1 - train(optax.sgd(1.0)))
    [0.]
    >>> print(1 - train(ols.master_weights(optax.sgd(1.0))))
    [0.007812]

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.1.
  """
  inner = requirements.as_optimizer("inner", inner)
  dtype = arguments.check_dtype("dtype", dtype, example="jnp.float32")
  if jnp.finfo(dtype).bits < 32:
    raise ValueError(
      "`dtype` must be at least as wide as float32, since small updates are to "
      f"add up in it, got {dtype}; parameters keep the dtype that they have."
    )
  arguments.check_enabled("dtype", dtype)

  def init(params: optax.Params) -> MasterWeightsState:
    is_gradient = leaves.are_gradients(params)
    wide = jax.tree.map(
      lambda x: (
        # JAX does not promote float8.
        _convert(x, jnp.promote_types(dtype, leaves.at_least_float32(x.dtype)))
        if leaves.is_real(x)
        else x
      ),
      leaves.as_arrays(params),
    )
    kept = leaves.leave_out(is_gradient, wide)
    inner_state = inner.init(kept)
    if kept is not wide and _states.find_states(inner_state):
      inner_state = inner.init(wide)  # `loss_scaling` masks these itself.
    return MasterWeightsState(
      master=jax.tree.map(_first_master, kept),
      inner_state=leaves.as_arrays(inner_state),
    )

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, MasterWeightsState]:
    state = _states.check_kind(state, MasterWeightsState)
    if params is None:
      raise ValueError(
        "`params` must be passed to update, which returns the distance from "
        "them to the master; tx.update(grads, opt_state, params)."
      )
    gradients = updates = leaves.as_arrays(updates)
    params = leaves.as_arrays(params)
    is_gradient = leaves.are_gradients(updates)
    # A `loss_scaling` inside `inner` checks gradients in their own dtype and
    # handles non-gradient leaves: a skipped step returns their old values. If
    # it is switched off, its rule's state has no leaves.
    found = _states.find_states(state.inner_state).values()
    scales = bool(jax.tree.leaves([x.loss_scale_state for x in found]))
    if not scales:
      gradients = leaves.widen(leaves.leave_out(is_gradient, updates))
      params = leaves.leave_out(leaves.are_gradients(params), params)

    inner_updates, inner_state = inner.update(
      gradients,
      state.inner_state,
      _over(lambda x, y: y if _is_absent(x) else x, state.master, params),
      **extra_args,
    )
    inner_updates = leaves.as_arrays(inner_updates)
    skipped = _is_skipped(inner_state)
    move = functools.partial(_move, skipped)
    way = functools.partial(_way, skipped)
    new_master = _over(move, state.master, inner_updates)
    new_updates = _over(way, new_master, inner_updates, params)
    if not scales:
      new_updates = leaves.merge(is_gradient, new_updates, updates)
    return new_updates, MasterWeightsState(
      master=new_master, inner_state=leaves.as_arrays(inner_state)
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _move(
  skipped: jax.Array, master: jax.Array, update: jax.Array | None
) -> jax.Array:
  """Returns the next master of one leaf."""
  if _is_absent(master) or update is None:
    return master
  # Select instead of adding -0.0, which may flush a subnormal master to 0.
  return jnp.where(
    skipped, master, jnp.asarray(optax.apply_updates(master, update))
  )


def _way(
  skipped: jax.Array,
  master: jax.Array,
  update: jax.Array | None,
  param: jax.Array,
) -> jax.Array | None:
  """Returns the difference between a parameter and its next master.

  The result depends only on the next master, not on the old master or the
  update, so XLA can update the master in place.
  """
  if _is_absent(master) or update is None:
    return update
  # A parameter that was cast in this program must be seen as it is stored.
  wide = bits.rounded(_convert(param, master.dtype), param.dtype)
  way = jnp.where(
    # Use -0.0 for no change: adding 0.0 would turn a -0.0 parameter into 0.0.
    skipped | (master == wide),
    jnp.asarray(-0.0, master.dtype),
    master - wide,
  )
  # Round via float32, as `loss_scaling` and the CPU backend also do.
  dtype = leaves.at_least_float32(param.dtype)
  way = _convert(bits.rounded(way, dtype), dtype)
  return _convert(way, param.dtype)


def _is_skipped(inner_state: optax.OptState) -> jax.Array:
  """Returns True if the loss scaling in `inner`, if any, skipped the step."""
  found = _states.find_states(inner_state).values()
  skipped = [x.skipped for x in found] or [jnp.full((), False)]
  return functools.reduce(jnp.logical_and, skipped)


def _over(
  function: Callable[..., object], master: Tree, *trees: object
) -> Tree:
  """Maps over leaves, including the placeholders of leaves without a master."""
  return jax.tree.map(function, master, *trees, is_leaf=_is_absent)


def _convert(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns an array or a `jax.ShapeDtypeStruct`, converted to a dtype."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  return jnp.asarray(x, dtype)


def _first_master(x: object) -> object:
  if not leaves.is_real(x):
    return optax.MaskedNode()
  # Copy even a float32 parameter, because the master may be donated together
  # with it, or with whatever the inner optimizer keeps of it.
  return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, copy=True)


def _is_absent(master: object) -> bool:
  return master is None or isinstance(master, optax.MaskedNode)
