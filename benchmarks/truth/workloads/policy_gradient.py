"""Policy gradient with the loss of PPO, over 102,400 samples a step."""

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from benchmarks.truth import workload

_CARTS, _TIMES, _DT = 2048, 50, 0.1
_DISCOUNT, _TRACE = 0.95, 0.9


class Agent(nn.Module):
  """The mean and the log of the deviation of an action, and the value."""

  @nn.compact
  def __call__(self, states: jax.Array):
    """Returns all three for float32[..., 2], without the last axis."""
    actor = nn.tanh(nn.Dense(32)(nn.tanh(nn.Dense(32)(states))))
    critic = nn.tanh(nn.Dense(32)(nn.tanh(nn.Dense(32)(states))))
    deviation = self.param("deviation", nn.initializers.constant(-0.5), ())
    mean, value = nn.Dense(1)(actor)[..., 0], nn.Dense(1)(critic)[..., 0]
    return mean, deviation, value


def push(states: jax.Array, force: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the next places and velocities of carts, and the rewards."""
  place, velocity = states[..., 0], states[..., 1]
  force = jnp.clip(force, -1.0, 1.0)
  reward = -(place**2 + 0.1 * velocity**2 + 0.01 * force**2)
  velocity = velocity + _DT * (force - 0.1 * velocity)
  return jnp.stack([place + _DT * velocity, velocity], -1), reward


def log_density(action, mean, deviation):
  """Returns the logarithm of a normal density, but for a constant."""
  return -0.5 * ((action - mean) / jnp.exp(deviation)) ** 2 - deviation


def make() -> workload.Workload:
  """Returns the workload."""
  model = Agent()

  def start(key):
    return jax.random.uniform(key, (_CARTS, 2), minval=-1.0, maxval=1.0)

  def draw(key, params):
    for_start, for_actions = jax.random.split(key)

    def step(states, key):
      mean, deviation, value = model.apply(params, states)
      noise = jax.random.normal(key, mean.shape)
      action = mean + jnp.exp(deviation) * noise
      after, reward = push(states, action)
      density = log_density(action, mean, deviation)
      return after, (states, action, density, value, reward)

    last, made = lax.scan(
      step, start(for_start), jax.random.split(for_actions, _TIMES)
    )
    states, actions, densities, values, rewards = made
    after = jnp.append(values[1:], model.apply(params, last)[2][None], 0)
    surprises = rewards + _DISCOUNT * after - values

    def add(advantage, surprise):
      advantage = surprise + _DISCOUNT * _TRACE * advantage
      return advantage, advantage

    _, advantages = lax.scan(add, jnp.zeros(_CARTS), surprises, reverse=True)
    returns = advantages + values
    advantages = (advantages - advantages.mean()) / advantages.std()
    return states, actions, densities, advantages, returns

  def loss(params, batch):
    states, actions, densities, advantages, returns = batch
    mean, deviation, values = model.apply(params, states)
    ratio = jnp.exp(log_density(actions, mean, deviation) - densities)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    return jnp.mean(0.5 * (values - returns) ** 2 - gain)

  def score(params):
    def step(states, _):
      return push(states, model.apply(params, states)[0])

    _, rewards = lax.scan(step, start(jax.random.key(2**31)), length=2 * _TIMES)
    return jnp.mean(jnp.sum(rewards, 0))

  return workload.Workload(
    description=(
      "Policy gradient, PPO's loss with each batch used once: carts learn to "
      f"stop at a place, {_CARTS:,} x {_TIMES} samples a step, a multilayer "
      "perceptron of width 32; mean over all samples"
    ),
    elements=_CARTS * _TIMES,
    init=lambda key: model.init(key, jnp.zeros(2)),
    draw=draw,
    loss=loss,
    score=score,
    score_name=f"return of {2 * _TIMES} steps",
    more_is_better=True,
    matters=0.1,
    rate=5e-3,
    steps=150,
  )
