"""The optimizer without loss scaling: what the others are compared with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers import contender
from benchmarks.peers import settings


def bare(
  inner: optax.GradientTransformation | None = None,
) -> contender.JaxContender:
  """Returns an optimizer and `optax.apply_updates`, nothing else.

  Args:
    inner: the optimizer; by default `optax.adamw`.
  """
  return _make(lambda gradients: (), inner)


def one_more_read() -> contender.JaxContender:
  """Returns the same, and the largest gradient.

  Whoever looks for an overflow before the step reads the gradients once more:
  about the least that it can cost. A maximum alone misses NaN.
  """
  return _make(_largest)


def _make(
  look: Callable[[list[jax.Array]], Any],
  inner: optax.GradientTransformation | None = None,
) -> contender.JaxContender:
  tx = inner or settings.adamw()

  def init(params: list[jax.Array]) -> contender.State:
    return contender.State(params, tx.init(params), look(params))

  def update(
    state: contender.State, gradients: list[jax.Array]
  ) -> contender.State:
    updates, opt_state = tx.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return contender.State(params, opt_state, look(gradients))

  return contender.JaxContender(init, update, unscales=False)


def _largest(leaves: list[jax.Array]) -> jax.Array:
  # Not of |x|, for which XLA's CPU backend writes a copy of float16 leaves.
  largest = jnp.max(jnp.stack([jnp.max(leaf) for leaf in leaves]))
  # One number, of one dtype whatever that of the gradients.
  return largest.astype(jnp.float32)
