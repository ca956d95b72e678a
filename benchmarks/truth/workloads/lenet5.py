"""LeNet-5 on scikit-learn's digits, as in the demo: a control."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.truth import workload
from optax_lossscale.demo import digits

_BATCH = 64


def make() -> workload.Workload:
  """Returns the workload."""
  (images, labels), held_out = digits.split(*digits.load())
  images, labels = jnp.asarray(images), jnp.asarray(labels)
  model = digits.LeNet5(jnp.float32)

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
