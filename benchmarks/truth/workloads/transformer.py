"""A causal transformer on the words of Python's sources."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.truth import text
from benchmarks.truth import workload

_WIDTH, _LAYERS, _HEADS = 32, 2, 4
_SEQUENCES, _LENGTH = 128, 64
_WORDS = 8192


class Transformer(nn.Module):
  """A pre-norm transformer.

  Attributes:
    symbols: how many there are.
    width: of each position.
  """

  symbols: int = _WORDS
  width: int = _WIDTH

  @nn.compact
  def __call__(self, symbols: jax.Array) -> jax.Array:
    """Returns the logits of each position's next symbol."""
    x = nn.Embed(self.symbols, self.width)(symbols)
    x += nn.Embed(_LENGTH, self.width)(jnp.arange(symbols.shape[-1]))
    mask = nn.make_causal_mask(symbols, dtype=bool)
    for _ in range(_LAYERS):
      attention = nn.MultiHeadDotProductAttention(_HEADS)
      x += attention(nn.LayerNorm()(x), mask=mask)
      y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
      x += nn.Dense(self.width)(y)
    return nn.Dense(self.symbols)(nn.LayerNorm()(x))


def make() -> workload.Workload:
  """Returns the workload."""
  return text.make_workload(
    Transformer(),
    text.words(_LENGTH, most=_WORDS),
    sequences=_SEQUENCES,
    description=(
      f"A transformer of {_LAYERS} layers and width {_WIDTH} on the "
      f"{_WORDS:,} most frequent words of Python's sources, {_SEQUENCES} x "
      f"{_LENGTH} words a step; mean cross-entropy"
    ),
    score_name="held-out nats per word",
    steps=100,
    sixteen_bit=True,
  )
