"""autocast on functions and layers that others wrote.

The authority is the same function without autocast, in float32. Each case is a
function of float32 arrays, and is differentiated with respect to all of them.
"""

from collections.abc import Callable
import functools
import itertools
import math
import re
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.autocast import programs

pytestmark = pytest.mark.slow

LEVELS = ("O1", "O2", "O3", "auto")
# Values are compared at these levels; the others are between them.
ENDS = ("O1", "O3")
# Half a unit in the last place of float16, relative to the value: the error of
# one rounding.
ROUNDING = 2.0**-11


class Case(NamedTuple):
  """A function that someone else wrote.

  Attributes:
    function: a function of float32 arrays.
    args: its arguments, trees of arrays.
    roundings: the tolerance, as the number of roundings to float16 on the way
      to a value or a gradient.
  """

  function: Callable[..., Any]
  args: tuple[Any, ...]
  roundings: float = 8


def normal(*shape, seed=0, scale=1.0):
  """Returns normal float32 values that float16 can hold."""
  x = np.random.default_rng([seed, *shape]).normal(size=shape) * scale
  return x.astype(np.float16).astype(np.float32)


def filled(shapes):
  """Returns values for a tree of shapes; variances and scales are near 1.

  Layers do not draw their own parameters here, because that would compile
  every operation of an initializer.
  """
  seeds = itertools.count()

  def fill(path, leaf):
    if leaf.dtype != jnp.float32:
      return np.zeros(leaf.shape, leaf.dtype)
    values = normal(*leaf.shape, seed=next(seeds), scale=0.4)
    is_near_one = re.search("var|scale", jax.tree_util.keystr(path))
    return np.float32(1 + values / 4) if is_near_one else values

  return jax.tree_util.tree_map_with_path(fill, shapes)


def total(outputs):
  """Returns a loss: the sum of all floats in a tree, with different weights."""

  def weighted(x):
    weights = np.cos(np.arange(math.prod(x.shape), dtype=np.float32))
    return jnp.sum(x.astype(jnp.float32) * weights.reshape(x.shape))

  floats = [
    x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)
  ]
  return sum(map(weighted, floats))


def with_gradients(function, args):
  """Returns a function that returns outputs and the gradients of `total`."""

  def loss(*args):
    outputs = function(*args)
    return total(outputs), outputs

  gradient = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)

  def outputs_and_gradients(*args):
    (_, outputs), gradients = gradient(*args)
    return outputs, gradients

  return outputs_and_gradients


def assert_near(got, want, tolerance):
  """Asserts that arrays are equal up to an error relative to their largest.

  Some arrays should be 0, such as the gradient of a bias before a batch
  normalization, and hold only the rounding of their summands. So the error is
  relative to at least a sixteenth of the largest value in the tree.
  """
  assert jax.tree.structure(got) == jax.tree.structure(want)
  sizes = [np.abs(x).max(initial=0) for x in jax.tree.leaves(want)]
  floor = max(sizes, default=0) / 16
  paths = jax.tree_util.tree_flatten_with_path(got)[0]
  for (path, x), y in zip(paths, jax.tree.leaves(want), strict=True):
    y = np.asarray(y, np.float64)
    difference = np.abs(np.asarray(x, np.float64) - y).max(initial=0)
    error = difference / (max(np.abs(y).max(initial=0), floor) or 1)
    # Also where it is NaN.
    assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error}"


# Attention.


def attention(**options):
  arrays = tuple(normal(2, 5, 2, 4, seed=seed) for seed in range(3))
  return Case(
    functools.partial(jax.nn.dot_product_attention, **options), arrays
  )


CASES = {
  "attention, causal": functools.partial(attention, is_causal=True),
  "attention, padded": functools.partial(
    attention, key_value_seq_lengths=np.array([3, 5], np.int32)
  ),
}

# Layers of Flax Linen.

X = normal(4, 6)
IMAGES = normal(2, 8, 8, 4)
SEQUENCES = normal(2, 5, 6)


def keys():
  return {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def linen(module, x, roundings=16, mutable=(), **options):
  """Returns a layer as a function of its variables and of `x`."""
  shapes = jax.eval_shape(lambda: module.init(keys(), x, **options))

  def apply(variables, x):
    mutables = list(mutable)
    return module.apply(variables, x, rngs=keys(), mutable=mutables, **options)

  return Case(apply, (filled(shapes), x), roundings)


def in_network(layer, width=8):
  return nn.Sequential([nn.Dense(width), layer, nn.Dense(5)])


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


def pooling():
  return nn.Sequential(
    [
      nn.Conv(6, (3, 3)),
      functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2)),
      nn.Conv(6, (3, 3)),
      functools.partial(nn.avg_pool, window_shape=(2, 2)),
      nn.Conv(6, (3, 3)),
    ]
  )


def two_directions():
  return nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.LSTMCell(4)))


CASES |= {
  "Embed": lambda: linen(Attend(), X),
  "Conv": lambda: linen(
    nn.Conv(6, (3, 3), strides=2, feature_group_count=2), IMAGES
  ),
  "pooling": lambda: linen(pooling(), IMAGES),
  "GroupNorm": lambda: linen(in_network(nn.GroupNorm(2)), X, 48),
  "BatchNorm, training": lambda: linen(
    in_network(nn.BatchNorm(use_running_average=False)),
    X,
    # The first bias has no effect: its gradient is 0 up to rounding.
    roundings=32,
    mutable=["batch_stats"],
  ),
  "remat of a transformer": lambda: linen(nn.remat(Block)(), SEQUENCES),
  "dropout": lambda: linen(
    in_network(nn.Dropout(0.5, deterministic=False)), SEQUENCES
  ),
  # The directions in which values are rounded change the error much: of 400
  # inputs within 0.1 % of these, half exceed 16 roundings and none 64.
  "two directions": lambda: linen(two_directions(), SEQUENCES, 64),
}

of_every_case = pytest.mark.parametrize("name", CASES)
case_of = functools.cache(lambda name: CASES[name]())


@functools.cache
def traced(name, level="O0"):
  """Returns the jaxpr of outputs and gradients, and their shapes."""
  case = case_of(name)
  function = ols.autocast(case.function, level)
  return jax.make_jaxpr(with_gradients(function, case.args), return_shape=True)(
    *case.args
  )


def counted(jaxpr):
  """Returns how many loops, branches and products a program has."""
  kinds = ("checkpoint", "remat2", "scan", "while", "cond", *programs.PRODUCTS)
  names = [x.primitive.name for x in support.equations(jaxpr)]
  return {kind: names.count(kind) for kind in kinds}


@of_every_case
def test_foreign_code_keeps_its_types_and_every_product_is_lowered(name):
  jaxpr, shapes = traced(name)
  for level in LEVELS:
    lowered, lowered_shapes = traced(name, level)
    assert lowered_shapes == shapes, level
    assert counted(lowered) == counted(jaxpr), level
    dtypes = {
      operand.aval.dtype.name
      for equation in support.equations(lowered)
      if equation.primitive.name in programs.PRODUCTS
      for operand in equation.invars[:2]
    }
    assert dtypes == {"float16"}, level


@of_every_case
def test_foreign_code_computes_the_same(name):
  case = case_of(name)
  levels = ("O0", *ENDS)
  functions = {
    level: core.jaxpr_as_fun(traced(name, level)[0]) for level in levels
  }
  run = jax.jit(lambda *xs: {level: f(*xs) for level, f in functions.items()})
  found = run(*jax.tree.leaves(case.args))
  structure = jax.tree.structure(traced(name)[1])
  trees = {x: jax.tree.unflatten(structure, found[x]) for x in levels}
  for level in ENDS:
    for got, want in zip(trees[level], trees["O0"], strict=True):
      assert_near(got, want, case.roundings * ROUNDING)
