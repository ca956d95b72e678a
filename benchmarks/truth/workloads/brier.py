"""A language model that is trained on the Brier score, as in the demo."""

import jax.numpy as jnp

from benchmarks.truth import text
from benchmarks.truth import workload
from optax_lossscale.demo import brier

_BATCH, _CONTEXT = 16_384, 8


def make() -> workload.Workload:
  """Returns the workload."""
  data = text.characters(_CONTEXT)
  model = brier.LanguageModel(jnp.float32)

  def loss(params, batch):
    inputs, labels = batch
    return jnp.mean(brier.brier_score(model.apply(params, inputs), labels))

  def draw(key, params):
    inputs, labels = data.draw(key, _BATCH)
    return inputs, labels[:, -1]

  held_out = data.test(_BATCH)

  def score(params):
    logits = model.apply(params, held_out[0])
    return jnp.mean(logits.argmax(-1) == held_out[1][:, -1])

  return workload.Workload(
    description=(
      f"The demo's language model: {_CONTEXT} characters of Python's sources "
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
  )
