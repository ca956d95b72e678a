"""flax, jmp, mixed_precision_for_JAX and optax, each as it says to be used."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers import contender
from benchmarks.peers import settings


def flax_dynamic_scale() -> contender.JaxContender:
  """Returns flax's `DynamicScale`.

  Its `value_and_grad` unscales, checks and moves S; it is the installed one
  that runs. The select is that of `examples/imagenet/train.py` in the
  repository google/flax, to which the documentation of `DynamicScale` leads.
  """
  from flax.training import dynamic_scale

  tx = settings.adamw()

  def init(params: list[jax.Array]) -> contender.State:
    scaler = dynamic_scale.DynamicScale(scale=settings.LOSS_SCALE)
    return contender.State(params, tx.init(params), scaler)

  def update(
    state: contender.State, scaled_grads: list[jax.Array]
  ) -> contender.State:
    value_and_grad = state.loss_scale.value_and_grad(_loss_with(scaled_grads))
    scaler, is_finite, _, unscaled = value_and_grad(scaled_grads)
    updates, opt_state = tx.update(unscaled, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    select = functools.partial(jnp.where, is_finite)
    return contender.State(
      jax.tree.map(select, params, state.params),
      jax.tree.map(select, opt_state, state.opt_state),
      scaler,
    )

  return contender.JaxContender(init, update)


def jmp_loss_scale() -> contender.JaxContender:
  """Returns jmp's `DynamicLossScale`, as in the README of jmp 0.0.4.

  S is float32, as in the class's docstring, so `unscale` divides in float32.
  """
  import jmp

  tx = settings.adamw()
  # `jax.jit(...).lower` fails on an argument that holds a DynamicLossScale,
  # whose constructor looks at the dtype of whatever it is given. So the state
  # holds its leaves.
  leaves, structure = jax.tree.flatten(
    jmp.DynamicLossScale(jnp.float32(settings.LOSS_SCALE))
  )

  def init(params: list[jax.Array]) -> contender.State:
    return contender.State(
      params, tx.init(params), list(map(jnp.array, leaves))
    )

  def update(
    state: contender.State, scaled_grads: list[jax.Array]
  ) -> contender.State:
    loss_scale = jax.tree.unflatten(structure, state.loss_scale)
    unscaled = loss_scale.unscale(scaled_grads)
    is_finite = jmp.all_finite(unscaled)
    loss_scale = loss_scale.adjust(is_finite)
    updates, opt_state = tx.update(unscaled, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jmp.select_tree(
      is_finite, (params, opt_state), (state.params, state.opt_state)
    )
    return contender.State(params, opt_state, jax.tree.leaves(loss_scale))

  return contender.JaxContender(init, update)


def mpx_loss_scaling() -> contender.JaxContender:
  """Returns mixed_precision_for_JAX's `optimizer_update`.

  Before it comes what `filter_value_and_grad` in `mpx/_grad_tools.py` of
  version 0.1.8 does to the gradients, by the same functions, which are public.
  """
  import equinox as eqx
  import mpx

  tx = settings.adamw()
  scaler = mpx.DynamicLossScaling(
    loss_scaling=jnp.float32(settings.LOSS_SCALE),
    min_loss_scaling=jnp.float32(1),
  )
  # `eqx.filter_jit`, with which it is to be used, takes what is no array, here
  # two integers, as constants.
  _, constants = eqx.partition(scaler, eqx.is_array)

  def init(params: list[jax.Array]) -> contender.State:
    arrays = jax.tree.map(jnp.copy, eqx.filter(scaler, eqx.is_array))
    return contender.State(params, tx.init(params), arrays)

  def update(
    state: contender.State, scaled_grads: list[jax.Array]
  ) -> contender.State:
    before = eqx.combine(state.loss_scale, constants)
    is_finite = mpx.all_finite(scaled_grads)
    after = before.adjust(is_finite)
    params, opt_state = mpx.optimizer_update(
      state.params, tx, state.opt_state, after.unscale(scaled_grads), is_finite
    )
    return contender.State(params, opt_state, eqx.filter(after, eqx.is_array))

  return contender.JaxContender(init, update)


def optax_apply_if_finite() -> contender.JaxContender:
  """Returns `optax.apply_if_finite`.

  It takes gradients as they are and has no S, so they are unscaled before it,
  in float32, by an S that never moves.
  """
  tx = optax.apply_if_finite(settings.adamw(), max_consecutive_errors=2000)

  def init(params: list[jax.Array]) -> contender.State:
    scale = jnp.float32(settings.LOSS_SCALE)
    return contender.State(params, tx.init(params), scale)

  def update(
    state: contender.State, scaled_grads: list[jax.Array]
  ) -> contender.State:
    inverse = 1 / state.loss_scale
    unscaled = [leaf.astype(jnp.float32) * inverse for leaf in scaled_grads]
    updates, opt_state = tx.update(unscaled, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return contender.State(params, opt_state, state.loss_scale)

  return contender.JaxContender(init, update)


def _loss_with(scaled_grads: list[jax.Array]) -> Any:
  """Returns a loss that has these gradients, whatever it is scaled by.

  So the code of a peer that wraps the backward pass runs without one.
  """

  @jax.custom_vjp
  def loss(params: list[jax.Array]) -> jax.Array:
    del params
    return jnp.float32(0)

  loss.defvjp(
    lambda params: (loss(params), None), lambda _, cotangent: (scaled_grads,)
  )
  return loss
