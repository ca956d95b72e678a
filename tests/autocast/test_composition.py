"""autocast with other transformations, on several devices, and what it keeps.

The authority is the same function without autocast, in float32.
"""

import functools
import warnings

import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests import support
from tests.autocast import mixed
from tests.autocast.programs import dtypes_of
from tests.autocast.programs import kernel

W = jnp.linspace(-0.6, 0.7, 16).reshape(4, 4)
X = jnp.linspace(-1.0, 0.9, 32).reshape(8, 4)
MESH = support.make_mesh(data=4, model=2)

low = functools.partial(ols.autocast, level="O1")


def network(x, w):
  x = jax.nn.softmax(jax.nn.silu(x @ w + w[0]) @ w)
  return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]


# Order.

by_rows = functools.partial(jax.vmap, in_axes=(0, None))
saturating = hardware.emulate_saturation
ORDERS = {
  "of jit of vmap": lambda f, low: low(jax.jit(by_rows(f))),
  "grad of jit": lambda f, low: mixed.gradient(jax.jit(low(f))),
  "of jit of grad": lambda f, low: low(jax.jit(mixed.gradient(f))),
  "saturation": lambda f, low: mixed.gradient(saturating(low(f))),
  "of saturation": lambda f, low: low(saturating(mixed.gradient(f))),
  "float status": lambda f, low: hardware.float_status(low(f)),
  "of float status": lambda f, low: low(hardware.float_status(f)),
  "autocast of another level": lambda f, low: low(ols.autocast(f, "O0")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_transformations_in_any_order_give_the_same(name):
  got = ORDERS[name](network, low)(X, W)
  mixed.assert_close(got, ORDERS[name](network, lambda f: f)(X, W))


def test_autocast_of_autocast_lowers_once():
  for name in ("dot_general", "convert_element_type"):
    twice = mixed.count(low(low(network)), name, X, W)
    assert twice <= mixed.count(low(network), name, X, W)


# Devices.


def collectives(x, w):
  y = x @ w
  return (
    lax.all_gather(y, "data", tiled=True)[:2],
    lax.psum_scatter(jnp.tile(y, (4, 1)), "data", tiled=True),
    lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)]),
    lax.all_to_all(jnp.tile(y, (2, 1)), "data", 0, 0, tiled=True),
    y * lax.axis_index("data"),
  )


def sharded(function, check_vma):
  return jax.shard_map(
    function,
    mesh=MESH,
    in_specs=(support.SPREAD, jax.P()),
    out_specs=support.SPREAD,
    check_vma=check_vma,
  )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_inside_and_around(check_vma):
  shard = functools.partial(sharded, check_vma=check_vma)
  want = jax.jit(mixed.gradient(shard(collectives)))(X, W)
  for changed in (low(shard(collectives)), shard(low(collectives))):
    got = jax.jit(mixed.gradient(changed))(X, W)
    mixed.assert_close(got, want, 0.03)


def test_sharded_constants_are_taken_apart():
  numbers = np.arange(8, dtype=np.float32)

  def function(x, w):
    scale = jax.shard_map(
      lambda x, numbers: (x @ W) * numbers[:, None],
      mesh=MESH,
      in_specs=(support.SPREAD, support.SPREAD),
      out_specs=support.SPREAD,
    )
    return scale(x @ w, numbers)

  mixed.assert_close(low(function)(X, W), jax.jit(function)(X, W), 0.03)


# Effects.


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_happen_as_often_with_values_as_written(ordered):
  seen = []

  def call(x):
    io_callback(lambda x: seen.append(x.dtype.name), None, x, ordered=ordered)

  def function(x, w):
    y = x @ w
    call(y)
    call(jnp.argmax(y))
    y = lax.scan(lambda y, _: (call(y), (y @ w, None))[1], y, None, length=2)[0]
    return lax.cond(y.sum() < 9, lambda y: (call(y), y)[1], lambda y: -y, y)

  jax.jit(ols.autocast(function, "O3"))(X, W)
  jax.effects_barrier()
  expected = ["float32", "int32", "float32", "float32", "float32"]
  assert sorted(seen) == sorted(expected)
  assert seen == expected or not ordered


def test_references_are_written_and_read():
  def function(passed, x, w):
    passed[...] = passed[...] @ w
    reference = jax.new_ref(x)

    def body(count, _):
      reference[...] = jnp.tanh(reference[...] @ w)
      reference[0, :2] += 1.0
      return count + 1, reference[0, 0]

    count, first = lax.scan(body, 0, None, length=3)
    return count, first, jax.freeze(reference)

  references = jax.new_ref(X), jax.new_ref(X)
  got = ols.autocast(function, "O2")(references[0], X, W)
  mixed.assert_close(got, function(references[1], X, W))
  mixed.assert_close(references[0][...], references[1][...])


# Other dtypes.

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
def test_other_dtypes_are_left_alone(name):
  want = jax.jit(OTHERS[name])(X, W)
  got = jax.jit(ols.autocast(OTHERS[name], "O3"))(X, W)
  support.assert_same_bits(got, jax.tree.map(jnp.asarray, want))


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_float64_keeps_its_precision_next_to_float32(level):
  def function(x, w):
    narrow = x.astype(jnp.float32) @ w.astype(jnp.float32)
    wide = jax.nn.silu(x @ w)
    return wide, wide + narrow, narrow

  with jax.enable_x64(True):
    x, w = np.asarray(X, np.float64) + 1e-9, np.asarray(W, np.float64) / 3
    changed = ols.autocast(function, level)
    got, want = changed(x, w), function(x, w)
    mixed.assert_close(got[0], want[0], 1e-14)
    mixed.assert_close(got[1:], want[1:])
    dtypes = set(dtypes_of("dot_general", changed, x, w))
    assert dtypes == {"float16", "float64"}


# Unknown operations and special rules.


def test_an_unknown_operation_runs_as_written_with_one_warning():
  def twice(x, w):
    y = lax.scan(lambda y, _: (kernel(y @ w), None), x, None, length=2)[0]
    return kernel(x @ w) + kernel(y)

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got = jax.jit(low(twice))(X, W)
  (warning,) = caught
  assert warning.category is UserWarning
  assert "pallas_call" in str(warning.message)
  mixed.assert_close(got, twice(X, W))


def test_a_rule_for_vmap_is_used_where_the_function_maps():
  sine = support.with_vmap(jnp.sin, lambda x: -jnp.sin(x))

  def function(x, w):
    return sine(x @ w)

  want = jnp.sin(X @ W)
  mixed.assert_close(low(by_rows(function))(X, W), -want)
  mixed.assert_close(by_rows(low(function))(X, W), want)
