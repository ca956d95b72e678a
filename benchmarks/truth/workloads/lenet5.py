"""LeNet-5 on scikit-learn's digits: a control."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

from benchmarks.truth import workload

_BATCH = 64


class LeNet5(nn.Module):
  """LeNet-5, with tanh and average pooling (LeCun et al., 1998)."""

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Returns the logits of the ten digits."""
    x = images
    # The parameters that a seed begins with depend on the names.
    for name, channels in (("conv1", 6), ("conv2", 16), ("conv3", 120)):
      x = nn.tanh(nn.Conv(channels, (5, 5), padding="VALID", name=name)(x))
      if name != "conv3":
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
    x = nn.tanh(nn.Dense(84, name="fc1")(x.squeeze((1, 2))))
    return nn.Dense(10, name="fc2")(x)


def make() -> workload.Workload:
  """Returns the workload."""
  digits = sklearn.datasets.load_digits()
  # LeNet-5 takes 32 x 32 pixels.
  images = digits.images.astype(np.float32)[..., None] / 16
  images = jax.image.resize(images, (len(images), 32, 32, 1), "linear")
  labels = jnp.asarray(digits.target, jnp.int32)
  order = np.random.default_rng(0).permutation(len(labels))
  test, training = np.split(order, [len(labels) // 5])
  held_out = images[test], labels[test]
  images, labels = images[training], labels[training]
  model = LeNet5()

  def draw(key, params):
    chosen = jax.random.randint(key, (_BATCH,), 0, len(labels))
    return images[chosen], labels[chosen]

  def losses(params, batch):
    images, labels = batch
    logits = model.apply(params, images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(
      logits, labels
    )

  return workload.Workload(
    description=(
      f"LeNet-5 on scikit-learn's digits, {_BATCH} a step; mean cross-entropy"
    ),
    elements=_BATCH,
    init=lambda key: model.init(key, images[:1]),
    draw=draw,
    loss=lambda params, batch: jnp.mean(losses(params, batch)),
    score=lambda params: jnp.mean(losses(params, held_out)),
    score_name="held-out cross-entropy",
    matters=0.02,
    rate=1e-3,
    steps=400,
    full=False,
  )
