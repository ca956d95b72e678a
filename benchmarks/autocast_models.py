"""The models of `python -m benchmarks autocast`, each with its `dtype=`.

In float32 they are what autocast is given; in float16 they are what one writes
without it: Flax layers that convert parameters and inputs to their `dtype`,
compute the statistics of a norm in float32, and a loss in float32.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from benchmarks import gpt2

Batch = tuple[Any, Any]
LossFn = Callable[[Any, Batch], jax.Array]


class Model(NamedTuple):
  """A model and what it is measured on.

  Attributes:
    make_loss_fn: returns the loss of parameters and a batch, from the dtype of
      the layers.
    params: where it starts, in float32.
    batch: inputs and labels.
  """

  make_loss_fn: Callable[[DTypeLike], LossFn]
  params: Any
  batch: Batch


class LeNet5(nn.Module):
  """LeNet-5 with rectifiers and max pooling.

  Attributes:
    dtype: of the layers.
  """

  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits of float32[batch, 32, 32, 1]."""
    for channels in (6, 16):
      x = nn.Conv(channels, (5, 5), padding="VALID", dtype=self.dtype)(x)
      x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
    x = x.reshape(len(x), -1)
    for width in (120, 84):
      x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
    return nn.Dense(10, dtype=self.dtype)(x)


class ResNet(nn.Module):
  """Two residual blocks of convolutions and batch norms.

  Attributes:
    dtype: of the layers.
    channels: of every convolution.
  """

  dtype: DTypeLike
  channels: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits of float32[batch, height, width, channels]."""
    x = nn.relu(self._convolve(x))
    for _ in range(2):
      y = self._convolve(nn.relu(self._convolve(x)))
      x = nn.relu(x + y)
    return nn.Dense(10, dtype=self.dtype)(jnp.mean(x, (1, 2)))

  def _convolve(self, x: jax.Array) -> jax.Array:
    x = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=self.dtype)(x)
    return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)


class LSTM(nn.Module):
  """An LSTM over a sequence, and a layer after its last state.

  Attributes:
    dtype: of the layers.
    width: of the state.
  """

  dtype: DTypeLike
  width: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits of float32[batch, positions, features]."""
    cell = nn.OptimizedLSTMCell(self.width, dtype=self.dtype)
    return nn.Dense(10, dtype=self.dtype)(nn.RNN(cell)(x)[:, -1])


def makers(*, tiny: bool) -> dict[str, Callable[[], Model]]:
  """Returns how to make each model, by its name.

  Args:
    tiny: small ones, to see it work.
  """
  size = dataclasses.replace(gpt2.SIZES["tiny" if tiny else "small"], layers=2)
  batch = 4 if tiny else 32
  channels, width, length = (4, 16, 8) if tiny else (32, 256, 64)
  partial = functools.partial
  resnet = partial(ResNet, channels=channels)
  lstm = partial(LSTM, width=width)
  return {
    "LeNet-5": partial(_classifier, LeNet5, (batch, 32, 32, 1)),
    "ResNet, two blocks": partial(_classifier, resnet, (batch, 32, 32, 3)),
    "LSTM": partial(_classifier, lstm, (batch, length, width)),
    f"GPT-2, 2 layers of {size.width}": partial(
      _gpt2, size, 16 if tiny else 256
    ),
  }


def _gpt2(size: gpt2.Size, length: int) -> Model:
  """Returns GPT-2 on random tokens, with attention written out."""
  return Model(
    lambda dtype: gpt2.make_loss_fn(gpt2.GPT2(size, dtype)),
    gpt2.init(size, 0),
    gpt2.make_batches(size, batch=2, length=length, count=1)[0],
  )


def _classifier(
  make_module: Callable[[DTypeLike], nn.Module], shape: tuple[int, ...]
) -> Model:
  """Returns a model of ten classes; what else it has stays as it starts."""
  rng = np.random.default_rng(0)
  inputs = rng.standard_normal(shape, np.float32)
  variables = jax.jit(make_module(jnp.float32).init)(jax.random.key(0), inputs)
  params = variables.pop("params")

  def make_loss_fn(dtype: DTypeLike) -> LossFn:
    module = make_module(dtype)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
      inputs, labels = batch
      logits, _ = module.apply(
        {"params": params, **variables}, inputs, mutable=list(variables)
      )
      return jnp.mean(
        optax.losses.softmax_cross_entropy_with_integer_labels(
          logits.astype(jnp.float32), labels
        )
      )

    return loss_fn

  labels = rng.integers(10, size=shape[0], dtype=np.int32)
  return Model(make_loss_fn, params, (inputs, labels))
