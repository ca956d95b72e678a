"""autocast beside a transformer with each conversion written by hand."""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import autocast_counts as counts
import optax_lossscale as ols

pytestmark = pytest.mark.slow

FLOAT32, FLOAT16 = jnp.float32, jnp.float16
BATCH, LENGTH, WIDTH, HEADS, VOCABULARY, BLOCKS = 2, 16, 32, 4, 48, 2


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The dtype of each part of a model; norms and the loss are in float32.

  Attributes:
    dtype: of matrix products and what follows them.
    stream: of the residual stream, to which blocks add.
    softmax: of the scale, the mask and the softmax of attention.
  """

  dtype: Any = FLOAT32
  stream: Any = FLOAT32
  softmax: Any = FLOAT32


WRITTEN = Recipe()
BY_HAND = {
  "O1": Recipe(FLOAT16),
  "O2": Recipe(FLOAT16, stream=FLOAT16, softmax=FLOAT16),
}


def dense(layer, x, dtype):
  return biased(layer, x.astype(dtype) @ layer["kernel"].astype(dtype))


def biased(layer, x):
  """Adds a bias so that its gradient is summed up in float32.

  As `bias.astype(float16)` is broadcast, it is summed up in float16 instead.
  """
  return x + jnp.broadcast_to(layer["bias"], x.shape).astype(x.dtype)


def norm(layer, x, axis):
  x = x.astype(FLOAT32)
  mean = jnp.mean(x, axis, keepdims=True)
  variance = jnp.mean(jnp.square(x - mean), axis, keepdims=True)
  x = (x - mean) * lax.rsqrt(variance + 1e-5)
  return x * layer["scale"] + layer["bias"]


def mean_cross_entropy(logits, labels):
  losses = optax.losses.softmax_cross_entropy_with_integer_labels(
    logits.astype(FLOAT32), labels
  )
  return jnp.mean(losses)


def attend(query, key, value, recipe):
  scores = jnp.einsum("bqhw,bkhw->bhqk", query, key).astype(recipe.softmax)
  scores = scores / query.shape[-1] ** 0.5
  seen = jnp.tri(query.shape[1], dtype=bool)
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  return jnp.einsum("bhqk,bkhw->bqhw", weights.astype(recipe.dtype), value)


def block(params, x, recipe):
  heads = (*x.shape[:2], HEADS, -1)
  y = norm(params["norm_1"], x, -1)
  y = dense(params["query_key_value"], y, recipe.dtype)
  y = attend(*(z.reshape(heads) for z in jnp.split(y, 3, axis=-1)), recipe)
  y = dense(params["attended"], y.reshape(x.shape), recipe.dtype)
  x = x + y.astype(recipe.stream)
  y = dense(params["up"], norm(params["norm_2"], x, -1), recipe.dtype)
  y = dense(params["down"], jax.nn.gelu(y), recipe.dtype)
  return x + y.astype(recipe.stream)


def transformer(params, batch, recipe=WRITTEN):
  tokens, labels = batch
  x = params["tokens"].astype(recipe.stream)[tokens]
  x = x + params["positions"].astype(recipe.stream)
  for each in params["blocks"]:
    x = block(each, x, recipe)
  x = norm(params["norm"], x, -1)
  return mean_cross_entropy(dense(params["head"], x, recipe.dtype), labels)


def normals(*shape):
  return jnp.asarray(np.random.default_rng(0).normal(0, 0.1, shape), FLOAT32)


def layer_params(*shape):
  return {"kernel": normals(*shape), "bias": normals(shape[-1])}


def norm_params(width):
  return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def make_arguments():
  text = np.random.default_rng(0).integers(VOCABULARY, size=(BATCH, LENGTH + 1))
  block_params = {
    "norm_1": norm_params(WIDTH),
    "query_key_value": layer_params(WIDTH, 3 * WIDTH),
    "attended": layer_params(WIDTH, WIDTH),
    "norm_2": norm_params(WIDTH),
    "up": layer_params(WIDTH, 4 * WIDTH),
    "down": layer_params(4 * WIDTH, WIDTH),
  }
  params = {
    "tokens": normals(VOCABULARY, WIDTH),
    "positions": normals(LENGTH, WIDTH),
    "blocks": [block_params] * BLOCKS,
    "norm": norm_params(WIDTH),
    "head": layer_params(WIDTH, VOCABULARY),
  }
  return params, (text[:, :-1], text[:, 1:])


each_level = pytest.mark.parametrize("level", BY_HAND)


class Contenders(NamedTuple):
  """The same for autocast and by hand."""

  autocast: Any
  by_hand: Any


def contenders(level):
  """Returns the two loss functions, and their arguments."""
  by_hand = functools.partial(transformer, recipe=BY_HAND[level])
  return Contenders(ols.autocast(transformer, level), by_hand), make_arguments()


@functools.cache
def jaxprs(level):
  """Returns what the gradients are made of."""
  functions, arguments = contenders(level)
  return Contenders(
    *(jax.make_jaxpr(jax.value_and_grad(f))(*arguments) for f in functions)
  )


@each_level
def test_all_products_forward_and_backward_are_in_float16(level):
  ours, by_hand = (counts.products(x, FLOAT16) for x in jaxprs(level))
  assert ours.lowered == ours.all == by_hand.all


@each_level
def test_no_more_is_converted_than_by_hand(level):
  ours, by_hand = map(counts.float_conversions, jaxprs(level))
  assert ours <= by_hand


def test_every_conversion_of_a_transformer_is_one_that_is_needed():
  kernels_and_biases = 4 + 4
  around_attention = 3  # Norm's result, scores up, weights down.
  around_network = 1  # Norm's result.
  to_the_stream = 2
  a_block = (
    kernels_and_biases + around_attention + around_network + to_the_stream
  )
  # Norm's result, the kernel, its product up; the last bias is in float32.
  the_end = 3
  forward = BLOCKS * a_block + the_end
  ours = jaxprs("O1").autocast
  assert counts.float_conversions(ours) == 2 * forward


@each_level
def test_no_more_is_kept_for_the_backward_pass_than_by_hand(level):
  functions, (params, batch) = contenders(level)
  ours, by_hand = (
    counts.bytes_kept(lambda params, f=f: f(params, batch), params)
    for f in functions
  )
  assert ours <= by_hand


def test_a_weight_that_is_used_ten_times_is_converted_once():
  def network(x, weight):
    for _ in range(10):
      x = jnp.tanh(x @ weight)
    return x

  cast = ols.autocast(network, "O1")
  x = normals(8, 8)
  # The input, the weight, and the last product, whose tanh is in float32.
  assert counts.float_conversions(jax.make_jaxpr(cast)(x, x)) == 3
  gradients = jax.make_jaxpr(lambda *args: jax.vjp(cast, *args)[1](args[0]))
  assert counts.float_conversions(gradients(x, x)) == 6


def test_a_chain_in_low_precision_converts_nothing_in_between():
  def network(x, weights):
    first, second, third = weights
    x = jax.nn.relu(x @ first).reshape(4, 16)[:, ::2].T
    x = jnp.concatenate([jnp.sin(x), -x]).T @ second
    return jnp.where(x > 0, jnp.tanh(x), 0.5 * x) @ third

  cast = ols.autocast(network, "O1")
  arguments = normals(8, 8), (normals(8, 8), normals(16, 8), normals(8, 8))
  # The input, three weights, and the result.
  assert counts.float_conversions(jax.make_jaxpr(cast)(*arguments)) == 5
  gradients = jax.make_jaxpr(lambda x, *args: jax.vjp(cast, x, *args)[1](x[:4]))
  assert counts.float_conversions(gradients(*arguments)) == 10
