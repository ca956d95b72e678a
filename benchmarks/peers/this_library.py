"""This library."""

import jax
import optax

from benchmarks.peers import contender
from benchmarks.peers import settings
import optax_lossscale as ols


def loss_scaling() -> contender.JaxContender:
  """Returns `loss_scaling` around the optimizer, as in the README."""
  tx = ols.loss_scaling(
    settings.adamw(), ols.DynamicLossScale(settings.LOSS_SCALE)
  )

  def init(params: list[jax.Array]) -> contender.State:
    return contender.State(params, tx.init(params))

  def update(
    state: contender.State, gradients: list[jax.Array]
  ) -> contender.State:
    updates, opt_state = tx.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return contender.State(params, opt_state)

  return contender.JaxContender(init, update)
