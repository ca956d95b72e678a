"""LeNet-5 on the handwritten digits that scikit-learn ships."""

from collections.abc import Iterator

import flax.linen as nn
import jax
from jax.typing import DTypeLike
import numpy as np
import optax
import sklearn.datasets

from optax_lossscale.demo import task

SIZE = 32

_BATCH = 64


def make_task(*, quick: bool = False) -> task.Task:
  """Returns the task: recognize the digit in an image."""
  training, held_out = split(*load())

  def batches(seed: int) -> Iterator[task.Batch]:
    rng = np.random.default_rng(seed)
    while True:
      chosen = rng.choice(len(training[1]), _BATCH, replace=False)
      yield training[0][chosen], training[1][chosen]

  return task.Task(
    name="digits",
    description=(
      f"LeNet-5 on scikit-learn's handwritten digits, {_BATCH} images a batch"
    ),
    model=lambda dtype: LeNet5(dtype=dtype),
    optimizer=optax.adam(1e-3),
    batches=batches,
    held_out=[held_out],
    score=lambda logits, labels: logits.argmax(-1) == labels,
    score_name="held-out accuracy",
    steps=100 if quick else 400,
  )


def load() -> task.Batch:
  """Returns the images, enlarged to LeNet-5's 32 x 32, and their labels."""
  digits = sklearn.datasets.load_digits()
  images = digits.images.astype(np.float32)[..., None] / 16
  shape = (len(images), SIZE, SIZE, 1)
  images = np.asarray(jax.image.resize(images, shape, "linear"))
  return images, digits.target.astype(np.int32)


def split(
  images: np.ndarray, labels: np.ndarray
) -> tuple[task.Batch, task.Batch]:
  """Returns four fifths to train on, and a fifth, at random but always same."""
  order = np.random.default_rng(0).permutation(len(labels))
  held_out, training = np.split(order, [len(labels) // 5])
  return (
    (images[training], labels[training]),
    (images[held_out], labels[held_out]),
  )


class LeNet5(nn.Module):
  """LeNet-5, with tanh and average pooling (LeCun et al., 1998)."""

  dtype: DTypeLike  # Of operations and activations; parameters are float32.

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Returns the logits of the ten digits."""
    x = images.astype(self.dtype)
    for name, channels in (("conv1", 6), ("conv2", 16)):
      x = nn.tanh(self._convolution(channels, name)(x))
      x = nn.avg_pool(x, (2, 2), strides=(2, 2))
    x = nn.tanh(self._convolution(120, "conv3")(x)).squeeze((1, 2))
    x = nn.tanh(nn.Dense(84, dtype=self.dtype, name="fc1")(x))
    return nn.Dense(10, dtype=self.dtype, name="fc2")(x)

  def _convolution(self, channels: int, name: str) -> nn.Conv:
    return nn.Conv(
      channels, (5, 5), padding="VALID", dtype=self.dtype, name=name
    )
