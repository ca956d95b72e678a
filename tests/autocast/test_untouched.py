"""What `autocast` leaves as it is: effects, keys, other dtypes, references.

The authority is the same function without `autocast`.
"""

import warnings

import jax
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.autocast import mixed

W = jnp.linspace(-0.6, 0.7, 16).reshape(4, 4)
X = jnp.linspace(-1.0, 0.9, 12).reshape(3, 4)
KEY = jax.random.key(1)


def network(x, w):
  return jnp.tanh(x @ w + w[0]) @ w


# --- Effects.


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_callbacks_happen_as_often_with_values_as_written(level, ordered):
  seen = []

  def call(x):
    io_callback(lambda x: seen.append(x.dtype.name), None, x, ordered=ordered)

  def function(x, w):
    y = x @ w
    call(y)
    call(jnp.argmax(y))
    y = lax.scan(lambda y, _: (call(y), (y @ w, None))[1], y, None, length=2)[0]
    return lax.cond(y.sum() < 9, lambda y: (call(y), y)[1], lambda y: -y, y)

  jax.jit(ols.autocast(function, level))(X, W)
  jax.effects_barrier()
  expected = ["float32", "int32", "float32", "float32", "float32"]
  assert sorted(seen) == sorted(expected)
  assert seen == expected or not ordered


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, mixed.gradient])
def test_debug_prints_happen_as_often(capsys, transform):
  def function(x, w):
    y = x @ w
    jax.debug.print("outside {}", y[0, 0])

    @jax.checkpoint
    def inside(y):
      jax.debug.print("inside {}", y.sum())
      return jnp.tanh(y)

    return inside(y) @ w

  printed = []
  for each in (function, ols.autocast(function, "O1")):
    transform(each)(X, W)
    jax.effects_barrier()
    text = capsys.readouterr().out
    printed.append((text.count("outside"), text.count("inside")))
  assert printed[0] == printed[1] != (0, 0)


def test_references_are_written_and_read():
  def function(x, w):
    reference = jax.new_ref(x)

    def body(count, _):
      reference[...] = jnp.tanh(reference[...] @ w)
      reference[0, :2] += 1.0
      return count + 1, reference[0, 0]

    count, first = lax.scan(body, 0, None, length=3)
    return count, first, jax.freeze(reference)

  got = jax.jit(ols.autocast(function, "O2"))(X, W)
  mixed.assert_close(got, function(X, W))


def test_a_reference_passed_in_is_written():
  def write(reference, w):
    reference[...] = reference[...] @ w
    return reference[...].sum()

  reference = jax.new_ref(X)
  ols.autocast(write, "O1")(reference, W)
  mixed.assert_close(reference[...], X @ W)


# --- Keys and noise.


def drawn(x, w, key):
  """Returns a network with noise in it, and all that was drawn for it."""
  first, second = jax.random.split(key)
  y = x @ w
  keep = jax.random.bernoulli(first, 0.5, y.shape)
  noise = jax.random.normal(second, y.shape)
  others = (
    jax.random.uniform(first, (5,)),
    jax.random.gumbel(first, (5,)),
    jax.random.truncated_normal(second, -2.0, 2.0, (5,)),
    jax.random.categorical(second, jnp.ones(5), shape=(5,)),
    jax.random.permutation(first, 7),
    jax.random.bits(second, (5,)),
  )
  y = jnp.where(keep, y / 0.5, 0) + noise
  return y @ w, (keep, noise, second, *others)


@pytest.mark.slow
@pytest.mark.parametrize("level", mixed.LEVELS)
def test_what_is_drawn_is_the_same_bit_for_bit(level):
  want = jax.jit(drawn)(X, W, KEY)
  got = jax.jit(ols.autocast(drawn, level))(X, W, KEY)
  support.assert_same_bits(got[1], want[1])
  mixed.assert_close(got[0], want[0])


# --- Other dtypes.

OTHERS = {
  "integers": lambda x, w: (
    jnp.arange(4) @ jnp.arange(4),
    jnp.cumsum(jnp.arange(5)),
    (3 * x).astype(jnp.int8) @ w.astype(jnp.int8),
    x > 0,
    2,
  ),
  "complex": lambda x, w: jnp.exp((x + 1j * x) @ (w - 1j)),
  "float8": lambda x, w: (
    x.astype(jnp.float8_e4m3fn) @ w.astype(jnp.float8_e4m3fn)
  ),
  "bfloat16": lambda x, w: jnp.exp(
    x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
  ).sum(),
  "bits": lambda x, w: lax.bitcast_convert_type(
    jnp.nextafter(x, 2 * x), "int32"
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_other_dtypes_are_left_alone(level, name):
  want = jax.jit(OTHERS[name])(X, W)
  got = jax.jit(ols.autocast(OTHERS[name], level))(X, W)
  support.assert_same_bits(got, jax.tree.map(jnp.asarray, want))


@pytest.mark.parametrize("level", mixed.LOW_LEVELS)
def test_float64_is_never_lowered(level):
  with jax.enable_x64(True):
    x, w = np.asarray(X, np.float64) + 1e-9, np.asarray(W, np.float64) / 3
    low = ols.autocast(network, level)
    mixed.assert_close(low(x, w), network(x, w), 1e-14)
    got = mixed.gradient(low)(x, w)
    mixed.assert_close(got, mixed.gradient(network)(x, w), 1e-12)


@pytest.mark.parametrize("level", mixed.LOW_LEVELS)
def test_float64_next_to_float32_keeps_its_precision(level):
  def function(x, w):
    narrow = x.astype(jnp.float32) @ w.astype(jnp.float32)
    wide = jax.nn.silu(x @ w)
    return wide, wide + narrow, narrow

  with jax.enable_x64(True):
    x, w = np.asarray(X, np.float64) + 1e-9, np.asarray(W, np.float64) / 3
    got, want = ols.autocast(function, level)(x, w), function(x, w)
    mixed.assert_close(got[0], want[0], 1e-14)
    mixed.assert_close(got[1:], want[1:])
    products = mixed.equations(ols.autocast(function, level), x, w)
    dtypes = [
      e.outvars[0].aval.dtype.name
      for e in products
      if e.primitive.name == "dot_general"
    ]
    assert sorted(dtypes) == ["float16", "float64"]


# --- What is not known.


def kernel(x):
  def double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(double, out_shape=shape, interpret=True)(x)


def test_what_cannot_be_looked_into_runs_as_written_with_one_warning():
  def twice(x, w):
    y = lax.scan(lambda y, _: (kernel(y @ w), None), x, None, length=2)[0]
    return kernel(x @ w) + kernel(y)

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got = jax.jit(ols.autocast(twice, "O1"))(X, W)
  (warning,) = caught
  assert warning.category is UserWarning
  assert "pallas_call" in str(warning.message)
  mixed.assert_close(got, twice(X, W))


def test_a_rule_for_vmap_is_used_where_the_function_maps():
  sine = support.with_vmap(jnp.sin, lambda x: -jnp.sin(x))

  def function(x, w):
    return sine(x @ w)

  inside = ols.autocast(jax.vmap(function, (0, None)), "O1")
  around = jax.vmap(ols.autocast(function, "O1"), (0, None))
  want = jnp.sin(X @ W)
  mixed.assert_close(inside(X, W), -want)
  mixed.assert_close(around(X, W), want)


@pytest.mark.slow
def test_no_warning_is_given_of_what_is_known():
  def function(x, w):
    y = (x @ w).at[0].add(w[0])
    y = lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME")
    return jnp.linalg.solve(w @ w.T + 3 * jnp.eye(4), jnp.sort(y).T)

  mixed.assert_close(ols.autocast(function)(X, W), function(X, W), 0.05)
