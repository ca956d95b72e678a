"""The update phase as pure functions, and its check alone."""

from collections.abc import Callable
import hashlib
from typing import Any
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp
import optax

from benchmarks import gpt2
import optax_lossscale as ols

# The check of `loss_scaling`, and nothing to update.
CHECK = ols.loss_scaling(optax.identity(), ols.DynamicLossScale())


def check(scaled_grads: Any) -> tuple[jax.Array, jax.Array]:
  """Returns what the check finds; XLA drops everything else."""
  _, state = CHECK.update(scaled_grads, CHECK.init(()))
  return state.overflow, state.nan


def make(
  tx: optax.GradientTransformation,
) -> Callable[[Any, Any], Any]:
  """Returns the update phase: from (parameters, state) to the next ones."""

  def update(state: Any, scaled_grads: Any) -> Any:
    params, opt_state = state
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return update


def digest() -> str:
  """Returns a digest of GPT-2's update with loss scaling, lowered for CUDA.

  It depends on the versions of JAX and optax. With the same ones, figures of
  equal digests are of the same program.
  """
  tx = ols.loss_scaling(optax.adamw(1e-3), ols.DynamicLossScale())
  params = jax.eval_shape(lambda: gpt2.init(gpt2.SIZES["small"], 0))
  state = params, jax.eval_shape(tx.init, params)
  grads = jax.tree.map(lambda x: x.update(dtype=jnp.float16), params)
  with mock.patch.object(jax, "device_count", lambda: 1):
    traced = jax.jit(make(tx), donate_argnums=0).trace(state, grads)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_conditional(
  check: optax.GradientTransformation, tx: optax.GradientTransformation
) -> Callable[[Any, Any], Any]:
  """Returns the same for both in a chain, with `tx` under `lax.cond`.

  The library selects each new value instead.

  Args:
    check: `loss_scaling` around `optax.identity()`.
    tx: any.
  """

  def update(state: Any, scaled_grads: Any) -> Any:
    params, (scaling, inner) = state
    # Its updates, which are the gradients, are not computed.
    _, new_scaling = check.update(scaled_grads, scaling)

    def apply() -> Any:
      unscaled = ols.unscale(scaled_grads, scaling)
      return make(tx)((params, inner), unscaled)

    params, inner = lax.cond(
      new_scaling.overflow, lambda: (params, inner), apply
    )
    return params, (new_scaling, inner)

  return update
