"""A character LSTM on Python's sources, with 32,768 characters a step."""

import flax.linen as nn
import jax

from benchmarks.truth import text
from benchmarks.truth import workload

_WIDTH = 64
_SEQUENCES, _LENGTH = 512, 64


class LSTM(nn.Module):
  """Embeddings, an LSTM, logits."""

  @nn.compact
  def __call__(self, symbols: jax.Array) -> jax.Array:
    """Returns the logits of each position's next symbol."""
    x = nn.Embed(text.CHARACTERS, _WIDTH)(symbols)
    x = nn.RNN(nn.OptimizedLSTMCell(_WIDTH))(x)
    return nn.Dense(text.CHARACTERS)(x)


def make() -> workload.Workload:
  """Returns the workload."""
  return text.make_workload(
    LSTM(),
    text.characters(_LENGTH),
    sequences=_SEQUENCES,
    description=(
      f"An LSTM of width {_WIDTH} on the characters of Python's sources, "
      f"{_SEQUENCES} x {_LENGTH} a step; mean cross-entropy"
    ),
    score_name="held-out nats per character",
    steps=150,
  )
