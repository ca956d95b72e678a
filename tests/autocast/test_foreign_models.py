"""`autocast` on models that other packages define, in small."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.autocast import foreign

pytestmark = pytest.mark.long

X = foreign.normal(4, 6)
IMAGES = foreign.normal(2, 16, 16, 3)
SEQUENCE = foreign.normal(5, 6)

# At O3 a batch normalization is in float16: where a channel hardly varies, its
# derivative is beyond what float16 has.
NOT_O3 = ("O1", "O2")


def package(name):
  """Returns a package, or skips the test that needs it."""
  return pytest.importorskip(name, reason=f"{name} is not installed")


# --- Equinox: a model is a tree, and its call takes one example.


def equinox_case(make, x=SEQUENCE, call=None, roundings=8):
  """Returns a model of Equinox as a function of its arrays and of `x`.

  Args:
    make: takes `equinox.nn` and a random key, returns the model.
    x: the input, with a leading axis of examples.
    call: takes the model and `x`; else the model is called with each example.
    roundings: see `foreign.Case`.
  """
  eqx = package("equinox")
  shapes = eqx.filter_eval_shape(make, eqx.nn, jax.random.key(0))
  params, static = eqx.partition(shapes, lambda leaf: hasattr(leaf, "dtype"))

  def apply(params, x):
    model = eqx.combine(params, static)
    return call(model, x) if call else jax.vmap(model)(x)

  return foreign.Case(apply, (foreign.filled(params), x), roundings)


def unroll(cell, xs):
  """Returns the last state of an LSTM cell of Equinox."""
  zeros = jnp.zeros(cell.hidden_size)
  return lax.scan(lambda carry, x: (cell(x, carry), None), (zeros, zeros), xs)[
    0
  ]


def attend(model, x):
  return model(x, x, x, mask=np.tri(len(x), dtype=bool))


PICTURES = np.moveaxis(IMAGES[:2, :6, :6], -1, 1)
EQUINOX = {
  "equinox, MLP": lambda: equinox_case(
    lambda nn, key: nn.MLP(6, 3, 8, 2, jax.nn.gelu, key=key)
  ),
  "equinox, convolutions": lambda: equinox_case(
    lambda nn, key: nn.Sequential(
      [
        nn.Conv2d(3, 4, 3, key=key),
        nn.GroupNorm(2, 4),
        nn.Lambda(jax.nn.relu),
        nn.ConvTranspose2d(4, 2, 3, key=key),
        nn.AvgPool2d(2),
      ]
    ),
    PICTURES,
    roundings=16,
  ),
  "equinox, attention": lambda: equinox_case(
    lambda nn, key: nn.MultiheadAttention(
      2, 6, use_key_bias=True, use_output_bias=True, key=key
    ),
    call=attend,
    roundings=16,
  ),
  "equinox, LSTM": lambda: equinox_case(
    lambda nn, key: nn.LSTMCell(6, 4, key=key), call=unroll, roundings=16
  ),
  "equinox, norms": lambda: equinox_case(
    lambda nn, key: nn.Sequential(
      [
        nn.Linear(6, 8, key=key),
        nn.LayerNorm(8),
        nn.WeightNorm(nn.Linear(8, 8, key=key)),
        nn.RMSNorm(8),
        nn.Linear(8, 3, key=key),
      ]
    ),
    roundings=16,
  ),
}

# --- Haiku: a function, transformed to take its parameters and its state.


def haiku_case(forward, x, **options):
  """Returns a function of Haiku as one of its parameters, state and `x`.

  Args:
    forward: takes the package and `x`.
    x: the input.
    **options: see `foreign.Case`.
  """
  haiku = package("haiku")
  init, apply = haiku.transform_with_state(functools.partial(forward, haiku))
  key = jax.random.key(2)
  params, state = jax.eval_shape(init, key, x)
  counters = foreign.filled(state)

  def run(params, x):
    return apply(params, counters, key, x)

  return foreign.Case(run, (foreign.filled(params), x), **options)


def haiku_resnet(haiku, x):
  model = haiku.nets.ResNet((1, 1, 1, 1), 5, channels_per_group=(4, 4, 8, 8))
  return model(x, is_training=True)


def haiku_transformer(haiku, x):
  attention = haiku.MultiHeadAttention(
    2, 3, w_init=haiku.initializers.VarianceScaling(), model_size=6
  )
  norm = functools.partial(
    haiku.LayerNorm, axis=-1, create_scale=True, create_offset=True
  )
  y = norm()(x)
  x = x + attention(y, y, y, mask=np.tri(5, dtype=bool)[None])
  return x + haiku.nets.MLP([8, 6], activation=jax.nn.silu)(norm()(x))


def haiku_unroll(core, haiku, x):
  core = getattr(haiku, core)(4)
  return haiku.dynamic_unroll(core, x, core.initial_state(None))[0]


HAIKU = {
  "haiku, MLP": lambda: haiku_case(
    lambda haiku, x: haiku.nets.MLP([8, 8, 3])(x, 0.5, haiku.next_rng_key()), X
  ),
  "haiku, ResNet": lambda: haiku_case(
    haiku_resnet, IMAGES, roundings=32, levels=NOT_O3
  ),
  "haiku, transformer": lambda: haiku_case(
    haiku_transformer, SEQUENCE, roundings=16
  ),
  "haiku, LSTM": lambda: haiku_case(
    functools.partial(haiku_unroll, "LSTM"), SEQUENCE, roundings=16
  ),
  "haiku, GRU": lambda: haiku_case(
    functools.partial(haiku_unroll, "GRU"), SEQUENCE, roundings=16
  ),
}

# --- jax-resnet: image models in Flax Linen.


def resnet_case():
  """Returns a model as a function of its variables and of the images."""
  models = package("jax_resnet")
  nn = package("flax.linen")
  model = models.ResNet(
    models.ResNetBlock,
    stage_sizes=(1, 1),
    n_classes=5,
    hidden_sizes=(4, 8),
    stem_cls=models.ResNetStem,
    # The largest of a window may be another one in float16.
    pool_fn=functools.partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2)),
  )
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)

  def apply(variables, x):
    return model.apply(variables, x, mutable=["batch_stats"])

  return foreign.Case(
    # Where a ReLU flips, a gradient jumps.
    apply,
    (foreign.filled(shapes), IMAGES),
    96,
    levels=NOT_O3,
  )


RESNETS = {"jax-resnet": resnet_case}

# --- Jraph: networks on graphs.


def graph_case(make):
  """Returns a network on a graph of four nodes and six edges.

  Args:
    make: takes the package and a dict of weights, returns the network.
  """
  jraph = package("jraph")
  weights = {
    "nodes": foreign.normal(6, 8),
    "edges": foreign.normal(3, 8, seed=1),
    "attention": foreign.normal(16, 1, seed=2),
    "out": foreign.normal(8, 5, seed=3),
  }

  def apply(weights, nodes, edges):
    graph = jraph.GraphsTuple(
      nodes=nodes,
      edges=edges,
      senders=np.array([0, 1, 2, 3, 0, 2]),
      receivers=np.array([1, 2, 0, 3, 3, 1]),
      n_node=np.array([4]),
      n_edge=np.array([6]),
      globals=np.ones((1, 2), np.float32),
    )
    return make(jraph, weights)(graph).nodes @ weights["out"]

  return foreign.Case(apply, (weights, X, foreign.normal(6, 3)), 16)


def graph_attention(jraph, weights):
  def logits(sent, received, edges):
    pair = jnp.concatenate([sent, received], axis=-1)
    return jax.nn.leaky_relu(pair @ weights["attention"])

  return jraph.GAT(lambda nodes: nodes @ weights["nodes"], logits)


def graph_convolution(jraph, weights):
  return jraph.GraphConvolution(
    lambda nodes: nodes @ weights["nodes"], add_self_edges=True
  )


def graph_network(jraph, weights):
  return jraph.InteractionNetwork(
    lambda edges, sent, received: jnp.tanh(
      edges @ weights["edges"] + (sent - received) @ weights["nodes"]
    ),
    lambda nodes, messages: jax.nn.relu(nodes @ weights["nodes"] + messages),
  )


GRAPHS = {
  f"jraph, {make.__name__}": functools.partial(graph_case, make)
  for make in (graph_attention, graph_convolution, graph_network)
}

CASES = foreign.Cases(EQUINOX | HAIKU | RESNETS | GRAPHS)
of_every_model = pytest.mark.parametrize("name", CASES.names)


@of_every_model
def test_models_return_what_they_return_without_autocast(name):
  CASES.assert_same_shapes(name)


@of_every_model
def test_models_compute_what_they_compute_without_autocast(name):
  CASES.assert_same_values(name)


@of_every_model
def test_no_product_of_a_model_or_of_its_gradient_stays_in_float32(name):
  CASES.assert_low_products(name)
