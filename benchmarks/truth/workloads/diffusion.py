"""Diffusion on scikit-learn's digits of 8 x 8: predict the noise."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets

from benchmarks.truth import workload

_BATCH, _PIXELS, _LEVELS = 512, 64, 1000


class Denoiser(nn.Module):
  """A multilayer perceptron of noisy images and the noise's level."""

  @nn.compact
  def __call__(self, images: jax.Array, level: jax.Array) -> jax.Array:
    """Returns the noise, float32[batch, pixels]."""
    angles = level[:, None] * 2.0 ** jnp.arange(8)
    x = jnp.concatenate([images, jnp.sin(angles), jnp.cos(angles)], -1)
    for _ in range(3):
      x = nn.silu(nn.Dense(256)(x))
    return nn.Dense(_PIXELS)(x)


def make() -> workload.Workload:
  """Returns the workload."""
  images = sklearn.datasets.load_digits().data.astype(np.float32) / 8 - 1
  images = jnp.asarray(np.random.default_rng(0).permutation(images))
  training, held_out = images[360:], images[:360]
  model = Denoiser()

  def noisy(key, images):
    for_level, for_noise = jax.random.split(key)
    level = jax.random.randint(for_level, (len(images),), 1, _LEVELS) / _LEVELS
    signal = jnp.cos(level * jnp.pi / 2)[:, None]
    noise = jax.random.normal(for_noise, images.shape)
    return signal * images + jnp.sqrt(1 - signal**2) * noise, level, noise

  def draw(key, params):
    for_image, for_noise = jax.random.split(key)
    chosen = jax.random.randint(for_image, (_BATCH,), 0, len(training))
    return noisy(for_noise, training[chosen])

  def loss(params, batch):
    images, level, noise = batch
    return jnp.mean((model.apply(params, images, level) - noise) ** 2)

  test = noisy(jax.random.key(2**31), jnp.tile(held_out, (8, 1)))
  return workload.Workload(
    description=(
      "Diffusion on scikit-learn's digits of 8 x 8 pixels, "
      f"{_BATCH} images a step: a multilayer perceptron of width 256 predicts "
      "the noise; mean squared error over all pixels"
    ),
    elements=_BATCH * _PIXELS,
    init=lambda key: model.init(key, *(x[:1] for x in test[:2])),
    draw=draw,
    loss=loss,
    score=lambda params: loss(params, test),
    score_name="held-out mean squared error",
    matters=0.005,
    rate=1e-3,
    steps=1500,
    full=False,
    sixteen_bit=True,
  )
