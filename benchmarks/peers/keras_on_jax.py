"""Keras on JAX: its optimizer, and the same in its `LossScaleOptimizer`.

`stateless_apply` is what Keras's own JAX trainer calls under jit
(`keras/src/backend/jax/trainer.py`, Keras 3).
"""

from collections.abc import Callable
import os
from typing import Any

import jax

from benchmarks.peers import contender
from benchmarks.peers import settings


def bare() -> contender.JaxContender:
  """Returns Keras's AdamW."""
  return _make(lambda keras: _adamw(keras), unscales=False)


def loss_scale_optimizer() -> contender.JaxContender:
  """Returns Keras's AdamW in its `LossScaleOptimizer`."""
  return _make(
    lambda keras: keras.optimizers.LossScaleOptimizer(
      _adamw(keras), initial_scale=settings.LOSS_SCALE
    ),
    unscales=True,
  )


def _make(
  make_optimizer: Callable[[Any], Any], *, unscales: bool
) -> contender.JaxContender:
  # Keras chooses its backend on import.
  os.environ["KERAS_BACKEND"] = "jax"
  import keras

  optimizer: Any = None

  def init(params: list[jax.Array]) -> contender.State:
    # A new one each time: its variables start with the arrays of which the
    # state is made, and lose them to the first step.
    nonlocal optimizer
    optimizer = make_optimizer(keras)
    optimizer.build([keras.Variable(leaf) for leaf in params])
    variables = [variable.value for variable in optimizer.variables]
    return contender.State(params, variables)

  def update(
    state: contender.State, scaled_grads: list[jax.Array]
  ) -> contender.State:
    params, variables = optimizer.stateless_apply(
      state.opt_state, scaled_grads, state.params
    )
    return contender.State(params, variables)

  return contender.JaxContender(init, update, unscales=unscales)


def _adamw(keras: Any) -> Any:
  return keras.optimizers.AdamW(
    learning_rate=settings.LEARNING_RATE,
    weight_decay=settings.WEIGHT_DECAY,
    beta_1=settings.B1,
    beta_2=settings.B2,
    epsilon=settings.EPS,
  )
