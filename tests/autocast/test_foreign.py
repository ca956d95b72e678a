"""autocast on layers that others wrote.

The authority is the same layer without autocast, in float32.
"""

import functools

import flax.linen as nn
import jax
from jax.flatten_util import ravel_pytree
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.autocast import mixed
from tests.autocast import programs

pytestmark = pytest.mark.slow


def normal(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


X = normal(4, 6)
IMAGES = normal(2, 8, 8, 4)
SEQUENCES = normal(2, 5, 6)


def in_network(layer):
  return nn.Sequential([nn.Dense(8), layer, nn.Dense(5)])


class Block(nn.Module):
  """A transformer's block out of Flax's layers."""

  @nn.compact
  def __call__(self, x):
    mask = nn.make_causal_mask(x[..., 0])
    y = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(2)(y, y, mask=mask)
    y = nn.gelu(nn.Dense(12)(nn.RMSNorm()(x)))
    return x + nn.Dense(6)(y)


class Attend(nn.Module):
  """An embedding, and the logits that it gives for its own output."""

  @nn.compact
  def __call__(self, x):
    embed = nn.Embed(7, 6)
    ids = np.array([[0, 3, 1], [2, 2, 6]])
    return embed.attend(embed(ids)[:, 0] + x[:2])


POOLING = nn.Sequential(
  [
    nn.Conv(6, (3, 3), strides=2, feature_group_count=2),
    functools.partial(nn.max_pool, window_shape=(2, 2)),
    nn.Conv(6, (3, 3)),
    functools.partial(nn.avg_pool, window_shape=(2, 2)),
    nn.Conv(6, (3, 3)),
  ]
)
LAYERS = {
  "embedding": (Attend(), X),
  "convolutions": (POOLING, IMAGES),
  "group norm": (in_network(nn.GroupNorm(2)), X),
  "batch norm": (in_network(nn.BatchNorm(use_running_average=False)), X),
  "dropout": (in_network(nn.Dropout(0.5, deterministic=False)), X),
  "transformer": (nn.remat(Block)(), SEQUENCES),
  "recurrent": (nn.RNN(nn.LSTMCell(4)), SEQUENCES),
}
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def counted(jaxpr):
  """Returns how many loops, branches and products a program has."""
  kinds = ("checkpoint", "remat2", "scan", "while", "cond", *programs.PRODUCTS)
  names = [x.primitive.name for x in support.equations(jaxpr)]
  return {kind: names.count(kind) for kind in kinds}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_with_all_its_products_in_float16(name):
  layer, x = LAYERS[name]
  variables = jax.jit(layer.init)(KEYS, x)

  def at(level):
    def apply(variables, x):
      return layer.apply(variables, x, rngs=KEYS, mutable=["batch_stats"])

    function = ols.autocast(apply, level)
    return lambda *args: (function(*args), mixed.gradient(function)(*args))

  written = jax.make_jaxpr(at("O0"))(variables, x)
  expected = jax.jit(at("O0"))(variables, x)
  for level in ("O1", "O3"):
    jaxpr = jax.make_jaxpr(at(level))(variables, x)
    assert jaxpr.out_avals == written.out_avals, level
    assert counted(jaxpr) == counted(written), level
    products = set(programs.products(at(level), variables, x))
    assert products == {"float16"}, level
    found, true = (
      ravel_pytree(tree)[0]
      for tree in (jax.jit(at(level))(variables, x), expected)
    )
    assert support.relative_error(found, true) < 0.01, level
