"""`autocast` on the layers of Flax NNX."""

from flax import nnx
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from tests.autocast import foreign

X = foreign.normal(4, 6)
IMAGES = foreign.normal(2, 8, 8, 4)
SEQUENCES = foreign.normal(2, 5, 6)


def nnx_case(make, x, *rest, roundings=8, **options):
  """Returns a layer of NNX as a function of its state and of `x`.

  Args:
    make: takes the source of random keys, returns the layer.
    x: its first input, an array.
    *rest: its other inputs, not differentiated.
    roundings: see `foreign.Case`.
    **options: its keyword arguments.
  """
  abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
  graph, params, _ = nnx.split(abstract, is_differentiable, ...)

  def apply(params, x):
    _, _, others = nnx.split(make(nnx.Rngs(0)), is_differentiable, ...)
    layer = nnx.merge(graph, params, others)
    outputs = layer(x, *rest, **options)
    return outputs, nnx.state(layer, nnx.BatchStat)

  return foreign.Case(apply, (foreign.filled(params), x), roundings)


def is_differentiable(path, leaf):
  return isinstance(leaf, (nnx.Param, nnx.BatchStat))


class Between(nnx.Module):
  """A layer with one before and one behind that multiply matrices."""

  def __init__(self, layer, rngs, width=8):
    self.before = nnx.Linear(6, width, rngs=rngs)
    self.layer = layer
    self.behind = nnx.Linear(width, 5, rngs=rngs)

  def __call__(self, x):
    return self.behind(self.layer(self.before(x)))


class Stack(nnx.Module):
  """Layers with a leading axis, under NNX's scan and remat."""

  def __init__(self, rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
      return nnx.Linear(6, 6, rngs=rngs)

    self.layers = make(rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def body(x, layer):
      return nnx.gelu(layer(x))

    return body(x, self.layers)


NNX = {
  "nnx.Linear": lambda: nnx_case(lambda r: nnx.Linear(6, 5, rngs=r), X),
  "nnx.LoRALinear": lambda: nnx_case(
    lambda r: nnx.LoRALinear(6, 5, lora_rank=2, rngs=r), X
  ),
  "nnx.Conv": lambda: nnx_case(
    lambda r: nnx.Conv(4, 6, (3, 3), rngs=r), IMAGES
  ),
  "nnx.ConvTranspose": lambda: nnx_case(
    lambda r: nnx.ConvTranspose(4, 6, (3, 3), rngs=r), IMAGES
  ),
  "nnx.GroupNorm": lambda: nnx_case(
    lambda r: Between(nnx.GroupNorm(8, 2, rngs=r), r), X, roundings=16
  ),
  "nnx.BatchNorm": lambda: nnx_case(
    lambda r: Between(nnx.BatchNorm(8, rngs=r), r), X, roundings=16
  ),
  "nnx.Dropout": lambda: nnx_case(
    lambda r: Between(nnx.Dropout(0.5, rngs=r), r), X
  ),
  "nnx.MultiHeadAttention": lambda: nnx_case(
    lambda r: nnx.MultiHeadAttention(2, 6, decode=False, rngs=r),
    SEQUENCES,
    roundings=16,
  ),
  "nnx.LSTMCell": lambda: nnx_case(
    lambda r: nnx.RNN(nnx.LSTMCell(6, 4, rngs=r)), SEQUENCES, roundings=16
  ),
  "nnx.GRUCell": lambda: nnx_case(
    lambda r: nnx.RNN(nnx.GRUCell(6, 4, rngs=r)), SEQUENCES, roundings=16
  ),
  "nnx.scan and remat": lambda: nnx_case(Stack, X, roundings=16),
}

CASES = foreign.Cases(NNX)
of_every_layer = pytest.mark.parametrize("name", CASES.names)


@pytest.mark.long
@of_every_layer
def test_layers_return_what_they_return_without_autocast(name):
  CASES.assert_same_shapes(name)


@pytest.mark.slow
@of_every_layer
def test_layers_compute_what_they_compute_without_autocast(name):
  CASES.assert_same_values(name)


@pytest.mark.slow
@of_every_layer
def test_no_product_of_a_layer_or_of_its_gradient_stays_in_float32(name):
  CASES.assert_low_products(name)


@pytest.mark.slow
def test_dropout_drops_the_same_values():
  def drop(x):
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0))(jnp.tanh(x @ X))

  want = drop(X.T)
  assert 0 < (want == 0).mean() < 1
  for level in foreign.LEVELS:
    got = ols.autocast(drop, level)(X.T)
    assert ((got == 0) == (want == 0)).all()
