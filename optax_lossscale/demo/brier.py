"""A neural language model, trained on the Brier score."""

from collections.abc import Iterator

import flax.linen as nn
import jax
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale.demo import task
from optax_lossscale.demo import text

_CONTEXT = 8
_BATCH = 16_384
_SYMBOLS = text.UNKNOWN + 1
_VALUES = _BATCH * _SYMBOLS


def make_task(*, quick: bool = False) -> task.Task:
  """Returns the task: predict each character from the eight before it."""
  training, held_out = text.split(text.encode(text.read_sources()))

  def batches(seed: int) -> Iterator[task.Batch]:
    rng = np.random.default_rng(seed)
    while True:
      yield _examples(
        training, rng.integers(len(training) - _CONTEXT, size=_BATCH)
      )

  starts = np.linspace(0, len(held_out) - _CONTEXT - 1, 20_000, dtype=int)
  return task.Task(
    name="brier",
    description=(
      "Neural language model on Python's own sources, trained with Adam on the "
      f"mean squared error of {_SYMBOLS} probabilities for each of {_BATCH:,} "
      "characters a batch (Brier score)"
    ),
    model=lambda dtype: LanguageModel(dtype=dtype),
    optimizer=optax.adam(5e-3),
    batches=batches,
    held_out=[_examples(held_out, starts)],
    loss=brier_score,
    score=lambda logits, labels: logits.argmax(-1) == labels,
    score_name="held-out accuracy",
    steps=60 if quick else 200,
    note=(
      f"An untrained model gives each symbol a probability near 1/{_SYMBOLS}, "
      f"and the mean is over {_VALUES:,} values. So the first gradients of the "
      f"logits are at most about 2/{_SYMBOLS}/{_VALUES:,} = "
      f"{2 / _SYMBOLS / _VALUES:.1e}. float16 rounds what is below 3e-08 to 0."
    ),
  )


def brier_score(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the squared errors of the probabilities of all symbols."""
  true = jax.nn.one_hot(labels, logits.shape[-1])
  return optax.losses.squared_error(jax.nn.softmax(logits), true)


class LanguageModel(nn.Module):
  """Embeddings, a hidden layer, logits (Bengio et al., 2003)."""

  dtype: DTypeLike  # Of operations and activations; parameters are float32.

  @nn.compact
  def __call__(self, symbols: jax.Array) -> jax.Array:
    """Returns the logits of the next symbol."""
    x = nn.Embed(_SYMBOLS, 24, dtype=self.dtype)(symbols)
    x = nn.Dense(128, dtype=self.dtype)(x.reshape(len(x), -1))
    return nn.Dense(_SYMBOLS, dtype=self.dtype)(nn.tanh(x))


def _examples(data: np.ndarray, starts: np.ndarray) -> task.Batch:
  """Returns the symbols from each start, and the one that follows them."""
  inputs, labels = text.windows(data, starts, _CONTEXT)
  return inputs, labels[:, -1]
