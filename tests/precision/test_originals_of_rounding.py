"""Roundings beside those of optimi, flashoptim and a rule that people copy."""

import functools
import json

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._precision import rounding
from tests import documents
from tests import excess_precision
from tests import support

ADAM = optax.adam(1e-3, 0.9, 0.99, 1e-6)
remainders = functools.partial(ols.master_weights, store="remainder")


def narrow(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def wide(tree):
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def loss_fn(params, x, y):
  """Returns the loss of the network in optimi's tests."""
  scale, bias, first, second = params
  hidden = jax.nn.mish((jax.nn.standardize(x) * scale + bias) @ first)
  return jnp.mean((hidden @ second - y) ** 2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(tx, width):
  """Trains as tools/originals/optimi.py does, from the same numbers."""
  rng = np.random.default_rng(0)
  weights = [
    rng.uniform(-1, 1, shape) / np.sqrt(shape[0])
    for shape in ((64, width), (width, 1))
  ]
  params = narrow([np.ones(64), np.zeros(64), *weights])
  data = narrow([rng.normal(size=(20, 1, size)) for size in (64, 1)])

  def step(carry, batch):
    true, true_state, params, state = carry
    grads = narrow(jax.grad(loss_fn)(true, *wide(batch)))
    updates, true_state = ADAM.update(wide(grads), true_state)
    true = optax.apply_updates(true, updates)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    near = jnp.isclose(true[2], wide(params[2]), rtol=1e-2, atol=1e-3)
    return (true, true_state, params, state), jnp.mean(~near)

  first = wide(params)
  carry = first, ADAM.init(first), params, tx.init(params)
  (true, _, params, _), outside = lax.scan(step, carry, data)
  return {
    "outside": jnp.max(outside),
    "nearest": jnp.mean(narrow(true[2]) == params[2]),
    "moved": jnp.mean(jnp.abs(true[2] - first[2])),
  }


@pytest.mark.parametrize("width", support.slow_but([64], [64, 128]))
def test_remainders_stay_as_near_to_float32_as_optimis_kahan_sum(width):
  trace = json.loads(documents.read("tests/traces/optimi_kahan.json"))
  kahan, rounded = trace["widths"][str(width)].values()
  plain = train(ADAM, width)
  # It is the same problem, and a hard one.
  assert abs(plain["moved"] / rounded["moved"] - 1) < 1e-3
  assert max(plain["nearest"], rounded["nearest"][0]) < 0.3
  for tx, least in {
    remainders(ADAM): 0.99,
    # As many bytes as optimi keeps, 8 for a parameter.
    remainders(ols.low_precision_state(ADAM)): kahan["nearest"][0] - 0.02,
  }.items():
    found = train(tx, width)
    assert found["outside"] == kahan["outside"][0] == 0
    assert found["nearest"] > least
  # Each is right only in the mean, so optimi's 1 % is not for these.
  assert train(ols.stochastic_rounding(ADAM), width)["outside"] < 0.025


def by_bits(x, noise):
  """Adds 16 random bits and cuts: martin-marek/picodo-bs, utils.py, affc198."""
  whole = lax.bitcast_convert_type(x, jnp.uint32) + noise
  found = whole & jnp.uint32(0xFFFF0000)
  return lax.bitcast_convert_type(found, jnp.float32).astype(jnp.bfloat16)


@pytest.mark.parametrize("noise", [0, 1, 0x8000, 0xFFFF])
def test_stochastic_rounding_adds_bits_except_at_nan_and_the_largest(noise):
  highs = np.arange(2**16, dtype=np.uint32) << 16
  lows = np.uint32([0, 1, 0x7FFF, 0x8000, 0xFFFF])
  x = (highs[:, None] | lows).ravel().view(np.float32)
  theirs = np.asarray(jax.jit(by_bits)(x, jnp.uint32(noise)))
  found = jax.jit(rounding.stochastic)(x, np.full_like(x, noise / 2**16))
  ours = np.asarray(narrow(found))
  beyond = np.isfinite(x) & np.isinf(theirs)
  usual = ~np.isnan(x) & ~beyond
  bits = [y[usual].view(np.uint16) for y in (ours, theirs)]
  assert np.array_equal(*bits)
  # They make inf of what is beyond the largest, and a number of some NaN.
  largest = jnp.finfo(jnp.bfloat16).max
  assert np.array_equal(ours[beyond], np.copysign(largest, x[beyond]))
  is_nan = np.isnan(x)
  assert np.isnan(ours[is_nan]).all() and not np.isnan(theirs[is_nan]).all()


def split(x):
  """Returns a bfloat16 and its error: flashoptim_jax 0.1.0, unfused."""
  low = narrow(x)
  return low, x - wide(low)


WAYS = {
  "stochastic": ols.stochastic_rounding,
  "remainder and state": lambda x: remainders(ols.low_precision_state(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_updates_keep_their_bits_where_flashoptims_split_loses_its_error(way):
  # Powers of two, so that no product is rounded in one program alone.
  tx = WAYS[way](optax.sgd(2.0**-10, momentum=0.5))
  first, *grads = np.random.default_rng(0).normal(size=(4, 4096))

  def step(params, grads):
    state = tx.init(params)
    for g in grads:
      updates, state = tx.update(g, state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  x, args = jnp.float32(first), (narrow(first), jnp.float32(grads))
  without = excess_precision.unrounded
  assert jnp.any(split(x)[1]) and not jnp.any(without(split)(x)[1])
  expected = jax.jit(step)(*args)
  for computes in (False, True):
    found = jax.jit(without(step, computes=computes))(*args)
    support.assert_same_bits(found, expected)
