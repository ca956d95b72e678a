"""A language model that is trained on the Brier score."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.truth import text
from benchmarks.truth import workload

_BATCH, _CONTEXT = 16_384, 8


class LanguageModel(nn.Module):
  """Embeddings, a hidden layer, logits (Bengio et al., 2003)."""

  @nn.compact
  def __call__(self, symbols: jax.Array) -> jax.Array:
    """Returns the logits of the next symbol."""
    x = nn.Embed(text.CHARACTERS, 24)(symbols)
    x = nn.tanh(nn.Dense(128)(x.reshape(len(x), -1)))
    return nn.Dense(text.CHARACTERS)(x)


def make() -> workload.Workload:
  """Returns the workload."""
  data = text.characters(_CONTEXT)
  model = LanguageModel()

  def loss(params, batch):
    inputs, labels = batch
    probabilities = jax.nn.softmax(model.apply(params, inputs))
    true = jax.nn.one_hot(labels, text.CHARACTERS)
    return jnp.mean((probabilities - true) ** 2)

  def draw(key, params):
    inputs, labels = data.draw(key, _BATCH)
    return inputs, labels[:, -1]

  held_out = data.test(_BATCH)

  def score(params):
    logits = model.apply(params, held_out[0])
    return jnp.mean(logits.argmax(-1) == held_out[1][:, -1])

  return workload.Workload(
    description=(
      f"A language model: {_CONTEXT} characters of Python's sources "
      f"predict the next one, {_BATCH:,} a step; mean squared error of all "
      "probabilities (Brier score)"
    ),
    elements=_BATCH * text.CHARACTERS,
    init=lambda key: model.init(key, held_out[0][:1]),
    draw=draw,
    loss=loss,
    score=score,
    score_name="held-out accuracy",
    more_is_better=True,
    matters=0.01,
    rate=5e-3,
    steps=200,
    on_sources=True,
  )
