"""Master weights: narrow parameters that follow a wide copy of themselves."""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._step import requirements
from optax_lossscale._step import states as _states


class MasterWeightsState(NamedTuple):
  """State of `master_weights`: the master and the optimizer that moves it.

  Attributes:
    master: the parameters in the wider dtype; masked nodes where a leaf has no
      master.
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

  master: Any
  inner_state: Any


def master_weights(
  inner: optax.GradientTransformation | optax.MultiSteps,
  dtype: Any = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it moves a float32 copy of the parameters.

  The next float16 after 1.0 is 1.001, the next bfloat16 1.008. An update of
  less than half of that is lost when it is added, however often. Here it is
  added to the master, a wider copy in the optimizer's state, and the update
  that comes out leads from the parameter to the master. It is rounded to the
  parameter's dtype as well, so the parameter may end up to one and a half last
  bits beside the master, bits of its larger value before and after the step.
  The error does not accumulate, because the next step starts from the rounded
  value.

  The inner optimizer sees the master as its parameters: so does weight decay.
  Nothing that changes updates may come after this wrapper in a chain, as the
  parameters would no longer arrive at the master.

  It goes inside of `loss_scaling` or outside: masters and parameters are the
  same, and a skipped step leaves both as they were, bit for bit. But a `mask`
  of `loss_scaling` needs this wrapper inside: outside, the next values of what
  goes around the optimizer would be added to a master.

  A float16 parameter with its master takes 6 bytes in place of the 4 of a
  float32 one. That spares the cast of the parameters in each forward pass, and
  half of what travels where parameters are gathered from other devices.

  Parameters follow the master. If something else changes them, they jump back
  at the next step: call `init` on the new ones, which starts the inner
  optimizer anew, or set the master as well, in its own dtypes, with
  `optax.tree.set(opt_state, master=...)`. A parameter or a step beyond the
  largest value of the parameter's dtype becomes inf, then NaN, for good.

  Args:
    inner: the optimizer, any optax transformation or `optax.MultiSteps`. It
      gets gradients of float32 at least; where it holds `loss_scaling`, they
      come as they are, since they are checked in their own dtype.
    dtype: of the master, float32 or wider. A wider parameter keeps its own.

  Returns:
    A transformation whose state is a `MasterWeightsState`. Every real floating
    parameter has a master, also one in float32, which is then a copy. The
    others are the inner optimizer's as they are. The leaves of Flax's
    `_overwrite_with_gradient` collection go around it as in `loss_scaling`.
    Updates have the dtypes of the parameters.

  Raises:
    TypeError: if `inner` is no optimizer or `dtype` no floating-point dtype;
      from `update`, if it is given another state than `init` made.
    ValueError: if `dtype` is narrower than float32, or float64 where JAX has it
      not enabled; from `update`, without `params`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def train(tx, steps=64):
    ...   params = jnp.ones(1, jnp.float16)
    ...   state = tx.init(params)
    ...   for _ in range(steps):
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
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.1. Apex has it as
    `master_weights` of its level O2.
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
    is_gradient = leaves.resolve_mask(None, params)
    wide = jax.tree.map(
      lambda x: _convert(x, _wider(dtype, x.dtype)) if leaves.is_real(x) else x,
      leaves.as_arrays(params),
    )
    kept = leaves.leave_out(is_gradient, wide)
    inner_state = inner.init(kept)
    if kept is not wide and _states.find_states(inner_state):
      inner_state = inner.init(wide)  # It leaves them out itself.
    return MasterWeightsState(
      # A copy even of float32: the parameters, or what the inner optimizer
      # keeps of them, and the master may be donated together.
      master=jax.tree.map(
        lambda x: _copy(x) if leaves.is_real(x) else optax.MaskedNode(), kept
      ),
      inner_state=leaves.as_arrays(inner_state),
    )

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, MasterWeightsState]:
    if not isinstance(state, MasterWeightsState):
      raise TypeError(
        "`state` must be the MasterWeightsState that init made, got "
        f"{arguments.kind_of(state)}."
      )
    if params is None:
      raise ValueError(
        "`params` must be passed to update: what it returns is the way from "
        "them to the master; tx.update(grads, opt_state, params)."
      )
    gradients = updates = leaves.as_arrays(updates)
    params = leaves.as_arrays(params)
    is_gradient = leaves.resolve_mask(None, updates)
    # Loss scaling in there checks gradients in their own dtype, and knows about
    # leaves that are none: a skip returns their old values. Switched off, it
    # has a state without leaves.
    scales = any(
      jax.tree.leaves(x.loss_scale_state)
      for x in _states.find_states(state.inner_state).values()
    )
    if not scales:
      gradients = leaves.widen(leaves.leave_out(is_gradient, updates))
      params = leaves.leave_out(leaves.resolve_mask(None, params), params)

    inner_updates, inner_state = inner.update(
      gradients,
      state.inner_state,
      _over(lambda x, y: y if _is_absent(x) else x, state.master, params),
      **extra_args,
    )
    inner_updates = leaves.as_arrays(inner_updates)
    skipped = _is_skipped(inner_state)
    new_master = _over(
      functools.partial(_move, skipped), state.master, inner_updates
    )
    new_updates = _over(
      functools.partial(_way, skipped), new_master, inner_updates, params
    )
    if not scales:
      new_updates = leaves.merge(is_gradient, new_updates, updates)
    return new_updates, MasterWeightsState(
      master=new_master, inner_state=leaves.as_arrays(inner_state)
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _move(skipped: jax.Array, master: Any, update: Any) -> Any:
  """Returns a leaf's next master."""
  if _is_absent(master) or update is None:
    return master
  # Selected, since a sum with -0.0 may flush a subnormal master to 0.
  return jnp.where(skipped, master, optax.apply_updates(master, update))


def _way(skipped: jax.Array, master: Any, update: Any, param: Any) -> Any:
  """Returns the way from a parameter to its next master.

  It depends on that one alone, and not on the one before it or on the update,
  so that the master moves in its place.
  """
  if _is_absent(master) or update is None:
    return update
  wide = _convert(param, master.dtype)
  way = jnp.where(
    # -0.0 where it has arrived: adding 0.0 would turn -0.0 into 0.0.
    skipped | (master == wide),
    jnp.asarray(-0.0, master.dtype),
    master - wide,
  )
  # By way of float32, as it goes inside of `loss_scaling`, and on CPU anyway.
  way = _convert(way, leaves.at_least_float32(param.dtype))
  return _convert(way, param.dtype)


def _is_skipped(inner_state: Any) -> jax.Array:
  """Returns whether the loss scaling in `inner`, if any, skipped the step."""
  states = _states.find_states(inner_state).values()
  if not states:
    return jnp.full((), False)
  return functools.reduce(jnp.logical_and, [x.skipped for x in states])


def _over(function: Callable[..., Any], master: Any, *trees: Any) -> Any:
  """Maps over leaves that have a master, and over what stands for none."""
  return jax.tree.map(function, master, *trees, is_leaf=_is_absent)


def _wider(dtype: Any, other: Any) -> Any:
  """Returns the wider of two dtypes; float8 has no promotion in JAX."""
  return other if jnp.finfo(other).bits > jnp.finfo(dtype).bits else dtype


def _convert(x: Any, dtype: Any) -> Any:
  """Returns an array, or a `jax.ShapeDtypeStruct`, in another dtype."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  return jnp.asarray(x, dtype)


def _copy(x: Any) -> Any:
  return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, copy=True)


def _is_absent(master: Any) -> bool:
  return master is None or isinstance(master, optax.MaskedNode)
