"""A ranking model of users and items, with 65,536 pairs a step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.truth import workload

_USERS, _ITEMS, _WIDTH = 4096, 4096, 16
_BATCH = 65_536


class Ranking(nn.Module):
  """Embeddings of users and items, and a multilayer perceptron."""

  @nn.compact
  def __call__(self, users: jax.Array, items: jax.Array) -> jax.Array:
    """Returns the logit that a user likes an item."""
    small = nn.initializers.normal(0.01)
    x = jnp.concatenate(
      [
        nn.Embed(_USERS, _WIDTH, embedding_init=small)(users),
        nn.Embed(_ITEMS, _WIDTH, embedding_init=small)(items),
      ],
      -1,
    )
    for _ in range(2):
      x = nn.relu(nn.Dense(64)(x))
    return nn.Dense(1)(x)[..., 0]


def make() -> workload.Workload:
  """Returns the workload."""
  model = Ranking()
  for_users, for_items = jax.random.split(jax.random.key(2**31))
  tastes = jax.random.normal(for_users, (_USERS, 4))
  kinds = jax.random.normal(for_items, (_ITEMS, 4))

  def draw(key, params=None, *, is_test=False):
    keys = jax.random.split(key, 4)
    users = jax.random.randint(keys[0], (_BATCH,), 0, _USERS)
    # An eighth of each user's items is held out: those of residue 0.
    residues = 0
    if not is_test:
      residues = jax.random.randint(keys[1], (_BATCH,), 1, 8)
    eighths = jax.random.randint(keys[2], (_BATCH,), 0, _ITEMS // 8)
    items = 8 * eighths + (residues - users) % 8
    logits = jnp.sum(tastes[users] * kinds[items], -1) - 1
    likes = jax.random.bernoulli(keys[3], jax.nn.sigmoid(2 * logits))
    return users, items, likes.astype(jnp.float32)

  def loss(params, batch):
    users, items, likes = batch
    logits = model.apply(params, users, items)
    return jnp.mean(optax.losses.sigmoid_binary_cross_entropy(logits, likes))

  held_out = draw(jax.random.key(2**31 + 1), is_test=True)
  return workload.Workload(
    description=(
      f"A ranking model: embeddings of {_USERS:,} simulated users and "
      f"{_ITEMS:,} items, and a multilayer perceptron of width 64, {_BATCH:,} "
      "pairs a step; mean binary cross-entropy"
    ),
    elements=_BATCH,
    init=lambda key: model.init(key, *(x[:1] for x in held_out[:2])),
    draw=draw,
    loss=loss,
    score=lambda params: loss(params, held_out),
    score_name="held-out cross-entropy",
    matters=0.003,
    rate=1e-2,
    steps=100,
  )
