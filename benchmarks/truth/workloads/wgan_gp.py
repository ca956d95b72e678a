"""The critic of a Wasserstein GAN with a gradient penalty."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets

from benchmarks.truth import workload

_BATCH, _PIXELS = 512, 64


class Critic(nn.Module):
  """A multilayer perceptron."""

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Returns one number for each image."""
    x = images
    for _ in range(3):
      x = nn.leaky_relu(nn.Dense(256)(x), 0.2)
    return nn.Dense(1)(x)[..., 0]


def make() -> workload.Workload:
  """Returns the workload."""
  images = sklearn.datasets.load_digits().data.astype(np.float32) / 8 - 1
  images = jnp.asarray(np.random.default_rng(0).permutation(images))
  training, held_out = images[360:], images[:360]
  model = Critic()
  # The generator that the critic sees through: independent pixels.
  mean, deviation = training.mean(0), training.std(0)

  def with_fakes(key, real):
    for_fake, for_mix = jax.random.split(key)
    fake = mean + deviation * jax.random.normal(for_fake, real.shape)
    mix = jax.random.uniform(for_mix, (len(real), 1))
    return real, fake, real + mix * (fake - real)

  def draw(key, params):
    for_real, key = jax.random.split(key)
    chosen = jax.random.randint(for_real, (_BATCH,), 0, len(training))
    return with_fakes(key, training[chosen])

  def loss(params, batch):
    real, fake, between = batch

    def criticize(x):
      return model.apply(params, x)

    slopes = jax.grad(lambda x: jnp.sum(criticize(x)))(between)
    norms = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12)
    penalty = jnp.mean((norms - 1) ** 2)
    return jnp.mean(criticize(fake)) - jnp.mean(criticize(real)) + 10 * penalty

  test = with_fakes(jax.random.key(2**31), jnp.tile(held_out, (4, 1)))
  return workload.Workload(
    description=(
      "The critic of a Wasserstein GAN with gradient penalty (Gulrajani et al.,"
      f" 2017), {_BATCH} digits of 8 x 8 pixels a step against independent "
      "pixels; a multilayer perceptron of width 256; Adam without momentum"
    ),
    elements=_BATCH,
    init=lambda key: model.init(key, held_out[:1]),
    draw=draw,
    loss=loss,
    score=lambda params: loss(params, test),
    score_name="held-out loss of the critic",
    matters=0.02,
    rate=1e-3,
    betas=(0.0, 0.9),
    steps=500,
  )
