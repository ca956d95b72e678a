"""A critic that is trained until little error is left: a control."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.truth import workload

_BATCH, _STATE, _ACTION = 1024, 4, 2


class Critic(nn.Module):
  """A multilayer perceptron of states and actions."""

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns one value for each row."""
    x = nn.tanh(nn.Dense(64)(inputs))
    return nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))[..., 0]


def make() -> workload.Workload:
  """Returns the workload."""
  model = Critic()
  factor = jax.random.normal(jax.random.key(2**31), (_STATE + _ACTION,) * 2)
  form = factor @ factor.T / (_STATE + _ACTION)

  def draw(key, params=None, count=_BATCH):
    inputs = jax.random.uniform(
      key, (count, _STATE + _ACTION), minval=-1.0, maxval=1.0
    )
    return inputs, -jnp.sum((inputs @ form) * inputs, -1)

  def loss(params, batch):
    inputs, values = batch
    return jnp.mean((model.apply(params, inputs) - values) ** 2)

  held_out = draw(jax.random.key(2**31 + 1), count=8192)
  return workload.Workload(
    description=(
      "A critic, a multilayer perceptron of width 64, learns a quadratic form, "
      "as the values of a linear-quadratic problem are, until little error is "
      f"left, {_BATCH:,} states and actions a step; mean squared error"
    ),
    elements=_BATCH,
    init=lambda key: model.init(key, held_out[0][:1]),
    draw=draw,
    loss=loss,
    score=lambda params: jnp.sqrt(loss(params, held_out)),
    score_name="held-out error (root mean square)",
    matters=0.002,
    rate=5e-3,
    steps=3000,
    full=False,
    sixteen_bit=True,
  )
