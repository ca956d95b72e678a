"""`autocast` on the layers of Flax Linen."""

import functools

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests.autocast import foreign

pytestmark = pytest.mark.slow

X = foreign.normal(4, 6)
IMAGES = foreign.normal(2, 8, 8, 4)
SEQUENCES = foreign.normal(2, 5, 6)
IDS = np.array([[0, 3, 1], [2, 2, 6]])
KEYS = {"params": 0, "dropout": 1}


def keys():
  return {name: jax.random.key(seed) for name, seed in KEYS.items()}


def linen(module, x, *rest, roundings=8, mutable=(), **options):
  """Returns a layer as a function of its variables and of `x`.

  Args:
    module: of Linen.
    x: its first input, arrays.
    *rest: its other inputs, not differentiated.
    roundings: see `foreign.Case`.
    mutable: the collections that it returns as well.
    **options: its keyword arguments.
  """
  shapes = jax.eval_shape(lambda: module.init(keys(), x, *rest, **options))

  def apply(variables, x):
    return module.apply(
      variables, x, *rest, rngs=keys(), mutable=list(mutable), **options
    )

  return foreign.Case(apply, (foreign.filled(shapes), x), roundings)


def between(layer, width=8):
  """Returns a layer with one before and one behind that multiply matrices."""
  return nn.Sequential([nn.Dense(width), layer, nn.Dense(5)])


def scanned(cell, size=6):
  layer = nn.scan(
    cell,
    variable_broadcast="params",
    split_rngs={"params": False},
    in_axes=1,
    out_axes=1,
  )(size)
  shape = (2, size)
  carry = jax.eval_shape(
    lambda: cell(size, parent=None).initialize_carry(jax.random.key(0), shape)
  )
  carry = foreign.filled(carry)

  class Scanned(nn.Module):
    @nn.compact
    def __call__(self, xs):
      return layer.clone(parent=self)(carry, xs)

  return Scanned()


class Layers(nn.Module):
  """The same layer several times, with parameters of their own."""

  @nn.compact
  def __call__(self, x):
    body = nn.scan(
      lambda layer, x, _: (nn.tanh(layer(x)), None),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=3,
    )
    return body(nn.Dense(6), x, None)[0]


class Block(nn.Module):
  """A transformer's block out of Flax's layers."""

  @nn.compact
  def __call__(self, x):
    mask = nn.make_causal_mask(x[..., 0])
    y = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(2)(y, y, mask=mask)
    y = nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))
    return x + nn.Dense(6)(y)


class Attend(nn.Module):
  """An embedding, and the logits that it gives for its own output."""

  @nn.compact
  def __call__(self, x):
    embed = nn.Embed(7, 6)
    return embed.attend(embed(IDS)[:, 0] + x[:2])


def vmapped():
  return nn.vmap(
    nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}
  )(5)


LINEN = (
  {
    "Dense": lambda: linen(nn.Dense(5), X),
    "DenseGeneral": lambda: linen(
      nn.DenseGeneral((2, 3), axis=(1, 2)), SEQUENCES
    ),
    "Einsum": lambda: linen(nn.Einsum((6, 3, 2), "...a,abc->...bc"), SEQUENCES),
    "Embed": lambda: linen(Attend(), X),
    "PReLU": lambda: linen(between(nn.PReLU()), X),
    "Conv": lambda: linen(nn.Conv(6, (3, 3)), IMAGES),
    "Conv, strided": lambda: linen(
      nn.Conv(6, (3, 3), strides=2, padding="VALID"), IMAGES
    ),
    "Conv, in groups": lambda: linen(
      nn.Conv(6, (3, 3), feature_group_count=2), IMAGES
    ),
    "Conv, dilated": lambda: linen(
      nn.Conv(6, (3, 3), kernel_dilation=2, padding="CIRCULAR"), IMAGES
    ),
    "ConvLocal": lambda: linen(nn.ConvLocal(3, (3, 3)), IMAGES[:, :5, :5]),
    "ConvTranspose": lambda: linen(
      nn.ConvTranspose(6, (3, 3), strides=(2, 2)), IMAGES
    ),
    "pooling": lambda: linen(
      nn.Sequential(
        [
          nn.Conv(6, (3, 3)),
          functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2)),
          nn.Conv(6, (3, 3)),
          functools.partial(nn.avg_pool, window_shape=(2, 2)),
          nn.Conv(6, (3, 3)),
        ]
      ),
      IMAGES,
      roundings=16,
    ),
    "LayerNorm": lambda: linen(between(nn.LayerNorm()), X, roundings=16),
    "RMSNorm": lambda: linen(between(nn.RMSNorm()), X, roundings=16),
    "GroupNorm": lambda: linen(between(nn.GroupNorm(2)), X, roundings=48),
    "InstanceNorm": lambda: linen(
      between(nn.InstanceNorm()), SEQUENCES, roundings=16
    ),
    "WeightNorm": lambda: linen(nn.WeightNorm(nn.Dense(5)), X, roundings=16),
    "SpectralNorm": lambda: linen(
      nn.SpectralNorm(nn.Dense(5)),
      X,
      update_stats=True,
      mutable=["batch_stats"],
      roundings=16,
    ),
    "BatchNorm, training": lambda: linen(
      between(nn.BatchNorm(use_running_average=False)),
      X,
      mutable=["batch_stats"],
      # The first bias does nothing: its gradient is 0 but for rounding.
      roundings=32,
    ),
    "BatchNorm, evaluation": lambda: linen(
      between(nn.BatchNorm(use_running_average=True)), X, roundings=16
    ),
    "attention": lambda: linen(
      nn.MultiHeadDotProductAttention(2), SEQUENCES, roundings=16
    ),
    "attention, normalized": lambda: linen(
      nn.MultiHeadDotProductAttention(2, normalize_qk=True),
      SEQUENCES,
      roundings=16,
    ),
    "transformer": lambda: linen(Block(), SEQUENCES, roundings=16),
    "remat": lambda: linen(nn.remat(Block)(), SEQUENCES, roundings=16),
    "vmap": lambda: linen(vmapped(), SEQUENCES[:, 0]),
    "scan over layers": lambda: linen(Layers(), X, roundings=16),
    "dropout": lambda: linen(
      between(nn.Dropout(0.5, deterministic=False)), SEQUENCES
    ),
  }
  | {
    cell.__name__: functools.partial(
      lambda cell: linen(nn.RNN(cell(4)), SEQUENCES, roundings=24), cell
    )
    for cell in (
      nn.LSTMCell,
      nn.OptimizedLSTMCell,
      nn.GRUCell,
    )
  }
  | {
    "LSTMCell, scanned": lambda: linen(
      scanned(nn.LSTMCell), SEQUENCES, roundings=16
    ),
    "ConvLSTMCell": lambda: linen(
      nn.RNN(nn.ConvLSTMCell(3, (3, 3))),
      foreign.normal(2, 3, 4, 4, 2),
      roundings=16,
    ),
    "bidirectional": lambda: linen(
      nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))),
      SEQUENCES,
      # Which values are rounded up decides: of 400 inputs within 0.1 % of
      # these, half exceed 16 roundings and none 64, on AVX2 and AVX-512.
      roundings=64,
    ),
  }
)


CASES = foreign.Cases(LINEN)
of_every_layer = pytest.mark.parametrize("name", CASES.names)


@pytest.mark.long
@of_every_layer
def test_layers_return_what_they_return_without_autocast(name):
  CASES.assert_same_shapes(name)


@of_every_layer
def test_layers_compute_what_they_compute_without_autocast(name):
  CASES.assert_same_values(name)


@of_every_layer
def test_no_product_of_a_layer_or_of_its_gradient_stays_in_float32(name):
  CASES.assert_low_products(name)


@pytest.mark.parametrize("name", ["remat", "scan over layers", "bidirectional"])
def test_control_flow_stays(name):
  kinds = ("checkpoint", "remat2", "scan", "while", "cond", "custom_jvp_call")
  written = CASES.traced(name).jaxpr
  for level in foreign.LEVELS:
    lowered = CASES.traced(name, level).jaxpr
    for kind in kinds:
      assert foreign.count(lowered, kind) == foreign.count(written, kind), kind


def test_dropout_drops_the_same_values():
  layer = nn.Dropout(0.5, deterministic=False)

  def drop(x):
    return layer.apply({}, jnp.tanh(x @ X), rngs=keys())

  want = drop(X.T)
  assert 0 < (want == 0).mean() < 1
  for level in foreign.LEVELS:
    got = ols.autocast(drop, level)(X.T)
    assert ((got == 0) == (want == 0)).all()


# Each takes a function of parameters and `x`, and calls it with `x`.
AROUND = {
  "jit": lambda f, params, x: jax.jit(f)(params, x),
  "vmap": lambda f, params, x: first(
    jax.vmap(f, (None, 0))(params, jnp.stack([x, 2 * x]))
  ),
  "scan": lambda f, params, x: first(
    lax.scan(lambda _, x: (None, f(params, x)), None, jnp.stack([x, 2 * x]))[1]
  ),
  "grad": lambda f, params, x: jax.grad(
    lambda x: (foreign.weighed(f(params, x)), f(params, x)), has_aux=True
  )(x)[1],
  "remat": lambda f, params, x: jax.checkpoint(f)(params, x),
  "autocast": lambda f, params, x: ols.autocast(f, "O0")(params, x),
}


def first(tree):
  return jax.tree.map(lambda leaf: leaf[0], tree)


@pytest.mark.parametrize("around", AROUND)
def test_transformations_of_autocast_compute_the_same(around):
  for name in ("transformer", "LSTMCell", "BatchNorm, training"):
    case = CASES.case(name)
    lowered = ols.autocast(case.function, "O1")
    want = CASES.values(name)["O1"][0]
    run = functools.partial(AROUND[around], lowered)
    got = jax.jit(run)(*case.args)
    # The compiler may keep more than float16 between two operations.
    foreign.assert_near(got, want, 4 * foreign.ROUNDING)
