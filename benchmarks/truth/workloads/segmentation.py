"""A small U-Net finds bright discs in noisy images, pixel by pixel."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.truth import workload

_BATCH, _SIZE, _DISCS = 16, 64, 6


class UNet(nn.Module):
  """Two levels of convolutions, with skip connections."""

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Returns the logits of float32[batch, size, size, 1]."""
    first = nn.silu(nn.Conv(8, (3, 3))(images))
    second = nn.silu(nn.Conv(16, (3, 3), strides=(2, 2))(first))
    third = nn.silu(nn.Conv(32, (3, 3), strides=(2, 2))(second))
    x = nn.silu(nn.ConvTranspose(16, (2, 2), strides=(2, 2))(third)) + second
    x = nn.silu(nn.ConvTranspose(8, (2, 2), strides=(2, 2))(x)) + first
    return nn.Conv(1, (3, 3))(x)


def draw(key: jax.Array, params=None, count: int = _BATCH):
  """Returns images of discs under noise, and where the discs are."""
  for_center, for_radius, for_noise = jax.random.split(key, 3)
  center = jax.random.uniform(for_center, (count, _DISCS, 2, 1, 1)) * _SIZE
  radius = jax.random.uniform(
    for_radius, (count, _DISCS, 1, 1), minval=2.0, maxval=6.0
  )
  grid = jnp.stack(jnp.meshgrid(*[jnp.arange(_SIZE) + 0.5] * 2, indexing="ij"))
  distance = jnp.sqrt(jnp.sum((grid - center) ** 2, 2))
  labels = jnp.any(distance < radius, 1).astype(jnp.float32)
  noise = jax.random.normal(for_noise, labels.shape)
  return (labels + 0.5 * noise)[..., None], labels[..., None]


def make() -> workload.Workload:
  """Returns the workload."""
  model = UNet()
  images, labels = draw(jax.random.key(2**31), count=128)

  def loss(params, batch):
    images, labels = batch
    logits = model.apply(params, images)
    return jnp.mean(optax.losses.sigmoid_binary_cross_entropy(logits, labels))

  def score(params):
    found, true = model.apply(params, images) > 0, labels > 0
    return jnp.sum(found & true) / jnp.sum(found | true)

  return workload.Workload(
    description=(
      f"A U-Net finds discs in simulated noisy images, {_BATCH} x {_SIZE} x "
      f"{_SIZE} pixels a step; mean binary cross-entropy over all pixels"
    ),
    elements=_BATCH * _SIZE**2,
    init=lambda key: model.init(key, images[:1]),
    draw=draw,
    loss=loss,
    score=score,
    score_name="held-out intersection over union",
    more_is_better=True,
    matters=0.01,
    rate=1e-2,
    steps=150,
  )
