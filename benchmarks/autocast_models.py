"""The models of `python -m benchmarks autocast`, each with its `dtype=`.

In float32 they are what autocast is given; in float16 they are what one writes
without it: Flax layers that convert parameters and inputs to their `dtype`,
compute the statistics of a norm in float32, and a loss in float32.
"""

from collections.abc import Callable
import dataclasses
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


def makers(
  *, quick: bool, layers: int, seed: int
) -> dict[str, Callable[[], Model]]:
  """Returns how to make each model, by its name.

  Args:
    quick: small ones, to see it work.
    layers: of the GPT-2.
    seed: of parameters and data.
  """
  size = dataclasses.replace(
    gpt2.SIZES["tiny" if quick else "small"], layers=layers
  )
  batch = 4 if quick else 32
  channels, width, length = (4, 16, 8) if quick else (32, 256, 64)
  return {
    "LeNet-5": lambda: make_lenet(batch=batch, seed=seed),
    "ResNet, two blocks": lambda: make_resnet(
      batch=batch, channels=channels, seed=seed
    ),
    "LSTM": lambda: make_lstm(
      batch=batch, length=length, width=width, seed=seed
    ),
    f"GPT-2, {layers} layers of {size.width}": lambda: make_gpt2(
      size, batch=2, length=16 if quick else 256, seed=seed
    ),
  }


def make_lenet(*, batch: int, seed: int) -> Model:
  """Returns LeNet-5 on random images of 32 x 32.

  Args:
    batch: how many images.
    seed: of parameters and images.
  """
  return _classifier(LeNet5, (batch, 32, 32, 1), seed)


def make_resnet(*, batch: int, channels: int, seed: int) -> Model:
  """Returns a residual net on random images of 32 x 32.

  Args:
    batch: how many images.
    channels: of every convolution.
    seed: of parameters and images.
  """
  return _classifier(
    lambda dtype: ResNet(dtype, channels), (batch, 32, 32, 3), seed
  )


def make_lstm(*, batch: int, length: int, width: int, seed: int) -> Model:
  """Returns an LSTM on random sequences.

  Args:
    batch: how many sequences.
    length: positions of each sequence.
    width: of the inputs and the state.
    seed: of parameters and sequences.
  """
  return _classifier(
    lambda dtype: LSTM(dtype, width), (batch, length, width), seed
  )


def make_gpt2(size: gpt2.Size, *, batch: int, length: int, seed: int) -> Model:
  """Returns GPT-2 on random tokens, with attention written out.

  Args:
    size: of the model.
    batch: how many sequences.
    length: tokens of each sequence.
    seed: of parameters and tokens.
  """
  return Model(
    lambda dtype: gpt2.make_loss_fn(gpt2.GPT2(size, dtype)),
    gpt2.init(size, seed),
    gpt2.make_batches(size, batch=batch, length=length, count=1, seed=seed)[0],
  )


def _classifier(
  make_module: Callable[[DTypeLike], nn.Module],
  shape: tuple[int, ...],
  seed: int,
) -> Model:
  """Returns a model of ten classes; what else it has stays as it starts."""
  rng = np.random.default_rng(seed)
  inputs = rng.standard_normal(shape, np.float32)
  variables = jax.jit(make_module(jnp.float32).init)(
    jax.random.key(seed), inputs
  )
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
