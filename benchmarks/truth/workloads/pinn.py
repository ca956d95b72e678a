"""A physics-informed network solves Burgers' equation: a control."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.truth import workload

_INSIDE, _EDGE = 2048, 256
_VISCOSITY = 0.1


class Network(nn.Module):
  """Tanh layers of the place and the time."""

  @nn.compact
  def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
    """Returns the solution at one place and time."""
    y = jnp.stack([x, t])
    for _ in range(3):
      y = nn.tanh(nn.Dense(32)(y))
    return nn.Dense(1)(y)[0]


def solution(x, t):
  """Returns the solution that starts as -sin(pi x), by Cole and Hopf."""
  nodes, weights = np.polynomial.hermite.hermgauss(60)
  y = x[..., None] - np.sqrt(4 * _VISCOSITY * t[..., None]) * nodes
  kernel = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * _VISCOSITY))
  return -np.sum(np.sin(np.pi * y) * kernel, -1) / np.sum(kernel, -1)


def make() -> workload.Workload:
  """Returns the workload."""
  model = Network()

  def draw(key, params):
    keys = jax.random.split(key, 4)
    x = jax.random.uniform(keys[0], (_INSIDE,), minval=-1.0, maxval=1.0)
    t = jax.random.uniform(keys[1], (_INSIDE,))
    first = jax.random.uniform(keys[2], (_EDGE,), minval=-1.0, maxval=1.0)
    return x, t, first, jax.random.uniform(keys[3], (_EDGE,))

  def loss(params, batch):
    x, t, first, at_edge = batch

    def u(x, t):
      return model.apply(params, x, t)

    slope = jax.grad(u, 0)

    def residual(x, t):
      bend = jax.grad(slope, 0)(x, t)
      return jax.grad(u, 1)(x, t) + u(x, t) * slope(x, t) - _VISCOSITY * bend

    inside = jax.vmap(residual)(x, t)
    start = jax.vmap(u)(first, jnp.zeros(_EDGE)) + jnp.sin(jnp.pi * first)
    edges = [jax.vmap(u)(jnp.full(_EDGE, x), at_edge) for x in (-1.0, 1.0)]
    return (
      jnp.mean(inside**2) + jnp.mean(start**2) + jnp.mean(jnp.stack(edges) ** 2)
    )

  x, t = (
    a.ravel()
    for a in np.meshgrid(np.linspace(-1, 1, 65), np.linspace(0, 1, 33))
  )
  true = jnp.asarray(solution(x, t), jnp.float32)
  x, t = jnp.asarray(x, jnp.float32), jnp.asarray(t, jnp.float32)

  def score(params):
    found = jax.vmap(lambda x, t: model.apply(params, x, t))(x, t)
    return jnp.linalg.norm(found - true) / jnp.linalg.norm(true)

  return workload.Workload(
    description=(
      f"A physics-informed network solves Burgers' equation, {_INSIDE:,} points"
      " a step, 3 layers of width 32; mean squared residual"
    ),
    elements=_INSIDE,
    init=lambda key: model.init(key, jnp.float32(0), jnp.float32(0)),
    draw=draw,
    loss=loss,
    score=score,
    score_name="relative error of the solution",
    matters=0.002,
    rate=2e-3,
    steps=1500,
    full=False,
  )
