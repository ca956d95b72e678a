"""GPT-2 in Flax, with the dtypes that `torch.autocast` would give it.

Parameters, the residual stream, the statistics of the layer norms and the loss
are float32; matrix products and activations are in the dtype of one's choice.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

import optax_lossscale as ols

Batch = tuple[Any, Any]
LossFn = Callable[[Any, Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Size:
  """How large a GPT-2 is.

  Attributes:
    layers: how many blocks.
    heads: of attention, each `width / heads` wide.
    width: of each position.
    tokens: how many different ones the data has.
    vocabulary: how many the model has; `tokens` padded to a multiple of 64, as
      is usual, for the matrix units' sake.
    context: the most positions.
  """

  layers: int
  heads: int
  width: int
  tokens: int
  vocabulary: int
  context: int


SIZES = {
  "small": Size(12, 12, 768, tokens=50257, vocabulary=50304, context=1024),
  "tiny": Size(1, 2, 32, tokens=250, vocabulary=256, context=64),
}


class Block(nn.Module):
  """Attention and a two-layer network, each after a layer norm.

  Attributes:
    size: of the model.
    dtype: of matrix products and activations.
    attention: "cudnn" or "xla", as `jax.nn.dot_product_attention` takes it, or
      "plain".
  """

  size: Size
  dtype: DTypeLike
  attention: str = "plain"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the residual stream after this block.

    Args:
      x: float32[batch, positions, width], the residual stream before it.
    """
    size = self.size
    y = _layer_norm(self.dtype, "norm_1")(x)
    y = _dense(3 * size.width, self.dtype, "query_key_value")(y)
    y = y.reshape(*y.shape[:2], 3 * size.heads, size.width // size.heads)
    query, key, value = jnp.split(y, 3, axis=2)
    y = _attend(query, key, value, self.attention)
    # float32 + float16 is float32, so the stream stays so.
    x += _dense(size.width, self.dtype, "attended", size.layers)(
      y.reshape(x.shape)
    )
    y = _layer_norm(self.dtype, "norm_2")(x)
    y = nn.gelu(_dense(4 * size.width, self.dtype, "up")(y))
    return x + _dense(size.width, self.dtype, "down", size.layers)(y)


class GPT2(nn.Module):
  """The model, with its embedding as its output layer, without dropout.

  Attributes:
    size: how large.
    dtype: of matrix products and activations.
    attention: "cudnn" or "xla", as `jax.nn.dot_product_attention` takes it, or
      "plain".
  """

  size: Size
  dtype: DTypeLike
  attention: str = "plain"

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Returns the logits of each position's next token, in `dtype`.

    Args:
      tokens: int[batch, positions].
    """
    size = self.size
    embed = _embed(size.vocabulary, size.width, "tokens")
    positions = _embed(size.context, size.width, "positions")
    x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
    for layer in range(size.layers):
      x = Block(size, self.dtype, self.attention, name=f"block_{layer}")(x)
    x = _layer_norm(self.dtype, "norm")(x)
    return x @ embed.embedding.astype(self.dtype).T


@dataclasses.dataclass(frozen=True)
class Autocast:
  """A model with the dtypes that `autocast` gives it.

  Attributes:
    model: in float32.
    level: of autocast.
  """

  model: GPT2
  level: str

  def apply(self, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the logits of each position's next token, float32.

    Args:
      params: of the model.
      tokens: int[batch, positions].
    """
    return ols.autocast(self.model.apply, self.level)(params, tokens)


def make_loss_fn(model: GPT2 | Autocast) -> LossFn:
  """Returns the mean cross-entropy over all positions of a batch."""

  def loss_fn(params: Any, batch: Batch) -> jax.Array:
    inputs, labels = batch
    # The softmax over the vocabulary needs more than 11 bits.
    logits = model.apply(params, inputs).astype(jnp.float32)
    return jnp.mean(
      optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    )

  return loss_fn


def init(size: Size, seed: int) -> Any:
  """Returns float32 parameters, from which every dtype and framework starts."""
  model = GPT2(size, jnp.float32)
  # Compiled as one, which takes less time than operation by operation.
  return jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))


def make_batches(
  size: Size, *, batch: int, length: int, count: int, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns batches of random tokens, and for each position the next one.

  Args:
    size: of the model.
    batch: sequences in each.
    length: positions of each sequence.
    count: how many batches.
    seed: of the tokens.
  """
  rng = np.random.default_rng(seed)
  text = rng.integers(
    size.tokens, size=(count, batch, length + 1), dtype=np.int32
  )
  return [(some[:, :-1], some[:, 1:]) for some in text]


def fastest_attention(
  size: Size, dtype: DTypeLike, *, batch: int, length: int
) -> str:
  """Returns the fastest attention that compiles for this device and dtype.

  Args:
    size: of the model.
    dtype: of the computation.
    batch: sequences in a batch.
    length: positions of each sequence.
  """
  if jax.default_backend() != "gpu":
    return "plain"
  shape = (batch, length, size.heads, size.width // size.heads)

  def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.sum(_attend(query, key, value, "cudnn").astype(jnp.float32))

  gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
  try:
    gradients.lower(*[jax.ShapeDtypeStruct(shape, dtype)] * 3).compile()
  except Exception:  # It may fail anywhere, from JAX's checks down to cuDNN.
    return "xla"
  return "cudnn"


def _attend(
  query: jax.Array, key: jax.Array, value: jax.Array, attention: str
) -> jax.Array:
  """Returns causal attention; all are [batch, positions, heads, width]."""
  if attention != "plain":
    # The mark is for autocast, which cannot look into cuDNN's attention.
    attend = ols.cast_inputs(jax.nn.dot_product_attention)
    return attend(query, key, value, is_causal=True, implementation=attention)
  # JAX's own function does not compute in float16 on a CPU.
  scores = jnp.einsum("bqhw,bkhw->bhqk", query, key).astype(jnp.float32)
  scores /= query.shape[-1] ** 0.5
  seen = jnp.tri(query.shape[1], dtype=bool)
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  return jnp.einsum("bhqk,bkhw->bqhw", weights.astype(value.dtype), value)


def _embed(count: int, width: int, name: str) -> nn.Embed:
  return nn.Embed(
    count, width, embedding_init=nn.initializers.normal(0.02), name=name
  )


def _layer_norm(dtype: DTypeLike, name: str) -> nn.LayerNorm:
  return nn.LayerNorm(epsilon=1e-5, dtype=dtype, name=name)


def _dense(
  width: int, dtype: DTypeLike, name: str, layers: int | None = None
) -> nn.Dense:
  """Returns a layer; one that ends in the residual stream says of how many."""
  deviation = 0.02 if layers is None else 0.02 / (2 * layers) ** 0.5
  return nn.Dense(
    width,
    dtype=dtype,
    kernel_init=nn.initializers.normal(deviation),
    name=name,
  )
