"""A neural ODE that learns how damped pendulums swing."""

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from benchmarks.truth import workload

_TRAJECTORIES, _TIMES, _DT = 4096, 20, 0.15


class VectorField(nn.Module):
  """The derivatives of angle and velocity."""

  @nn.compact
  def __call__(self, state: jax.Array) -> jax.Array:
    """Returns float32[..., 2] for states of that shape."""
    x = nn.tanh(nn.Dense(32)(state))
    return nn.Dense(2)(nn.tanh(nn.Dense(32)(x)))


def pendulum(state: jax.Array) -> jax.Array:
  """Returns the derivatives of a damped pendulum."""
  angle, velocity = state[..., 0], state[..., 1]
  return jnp.stack([velocity, -0.2 * velocity - 2.0 * jnp.sin(angle)], -1)


def trajectory(field, start: jax.Array) -> jax.Array:
  """Returns the states after each step of the classical Runge-Kutta method."""

  def step(x, _):
    a = field(x)
    b = field(x + _DT / 2 * a)
    c = field(x + _DT / 2 * b)
    d = field(x + _DT * c)
    x = x + _DT / 6 * (a + 2 * b + 2 * c + d)
    return x, x

  return lax.scan(step, start, length=_TIMES)[1]


def make() -> workload.Workload:
  """Returns the workload."""
  model = VectorField()

  def draw(key, params=None):
    low, high = jnp.array([-1.5, -1.0]), jnp.array([1.5, 1.0])
    start = jax.random.uniform(key, (_TRAJECTORIES, 2), minval=low, maxval=high)
    return start, trajectory(pendulum, start)

  def loss(params, batch):
    start, states = batch
    found = trajectory(lambda x: model.apply(params, x), start)
    return jnp.mean((found - states) ** 2)

  held_out = jax.jit(draw)(jax.random.key(2**31))
  return workload.Workload(
    description=(
      f"A neural ODE, {_TRAJECTORIES:,} trajectories of {_TIMES} Runge-Kutta "
      "steps, learns a damped pendulum with a multilayer perceptron of width "
      "32; mean squared error over all states"
    ),
    elements=2 * _TRAJECTORIES * _TIMES,
    init=lambda key: model.init(key, jnp.zeros(2)),
    draw=draw,
    loss=loss,
    score=lambda params: jnp.sqrt(loss(params, held_out)),
    score_name="held-out error (root mean square)",
    matters=0.005,
    rate=5e-3,
    steps=300,
  )
