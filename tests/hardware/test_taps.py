"""Taps measure the cotangents that pass a point of a model."""

import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.hardware import amax_tap
from optax_lossscale.hardware import status_tap
from tests import support

HALF = jnp.float16
ZERO = jnp.float32(0)
X = jnp.ones(4, HALF)

# Of the last three a saturating check counts all, and the default amax is NaN.
BAD = jnp.array([1.0, 65504.0, jnp.inf, jnp.nan], HALF)
# The amax of these is 65504, and one of them has overflowed.
FACTORS = jnp.array([1.0, -3.0, -65504.0, 2.0], HALF)

# For each tap, what it measures of `FACTORS`.
TAPS = {"amax_tap": (amax_tap, 65504), "status_tap": (status_tap, 1)}

each_tap = pytest.mark.parametrize("name", TAPS)


def tapped_loss(tap, x, measured, factors=FACTORS):
  """Returns a loss whose cotangents at its tap are `factors`."""
  return jnp.sum((tap(x, measured) * factors).astype(jnp.float32))


def measure(loss, x=X, zero=ZERO):
  """Returns the gradient with respect to a loss's second argument."""
  return jax.jit(jax.grad(loss, 1))(x, zero)


@each_tap
def test_values_and_their_gradients_pass_unchanged(name):
  tap, _ = TAPS[name]
  tree = {"a": BAD, "b": [jnp.ones(2), None]}
  chex.assert_trees_all_equal(tap(tree, ZERO), tree)
  others = {"integer": jnp.arange(3), "key": jax.random.key(0), "text": "relu"}
  tapped = tap(others, ZERO)
  assert all(tapped[key] is others[key] for key in others)
  loss = functools.partial(tapped_loss, tap, factors=BAD)
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X, ZERO), BAD)


def test_the_amax_is_the_largest_magnitude_or_inf_or_nan():
  for factors, expected in (
    ([1.0, -3.0, 2.0], 3),
    ([1.0, -np.inf, 2.0], np.inf),
    ([np.nan, np.inf, 2.0], np.nan),
  ):
    factors = jnp.asarray(factors, jnp.bfloat16)
    loss = functools.partial(tapped_loss, amax_tap, factors=factors)
    found = measure(loss, jnp.ones(3, jnp.bfloat16))
    chex.assert_type(found, jnp.float32)
    np.testing.assert_array_equal(found, expected)


# For each check, the dtype of the cotangents and how many of these it counts:
# 1, 65503, 65504, 70000, NaN.
CHECKS = {
  "saturated()": (ols.saturated(), HALF, 4),
  "nonfinite()": (ols.nonfinite(), HALF, 2),
  "saturated(float16) of float32": (ols.saturated(HALF), jnp.float32, 3),
  "nonfinite(float16) of bfloat16": (ols.nonfinite(HALF), jnp.bfloat16, 4),
  "saturated() of float32": (ols.saturated(), jnp.float32, 1),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_status_counts_the_cotangents_that_its_check_finds(name):
  check, dtype, expected = CHECKS[name]
  factors = jnp.float32([1, 65503, 65504, 70000, np.nan]).astype(dtype)
  tap = functools.partial(status_tap, check=check)
  loss = functools.partial(tapped_loss, tap, factors=factors)
  assert measure(loss, jnp.ones(5, dtype)) == expected


def test_the_parts_of_a_complex_cotangent_count_as_one():
  def loss(tap, x, measured):
    x = tap(x, measured)
    return 3 * jnp.sum(x.real) + jnp.sum(x.imag * jnp.array([4, np.inf]))

  x = jnp.ones(2, jnp.complex64)
  assert measure(functools.partial(loss, amax_tap), x) == np.inf
  assert measure(functools.partial(loss, amax_tap), x[:1]) == np.inf
  assert measure(functools.partial(loss, status_tap), x) == 1


def test_every_leaf_of_a_tree_is_measured():
  def loss(tap, x, measured):
    half, (single, _) = tap((x, [2 * x.astype(jnp.float32), None]), measured)
    total = jnp.sum((half * FACTORS).astype(jnp.float32))
    return total + jnp.sum(single * jnp.float32([7e4, np.inf, 0, 0]))

  assert measure(functools.partial(loss, amax_tap)) == np.inf
  assert measure(functools.partial(loss, status_tap)) == 2


# Each takes a loss, and measures five times what it does.
SHARING = {
  "uses": lambda f: lambda x, zero: sum(f(k * x, zero) for k in range(5)),
  "scan": lambda f: (
    lambda x, zero: lax.scan(
      lambda total, y: (total + f(y, zero), None), 0.0, jnp.stack([x] * 5)
    )[0]
  ),
  "vmap": lambda f: (
    lambda x, zero: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([x] * 5), zero))
  ),
}


@each_tap
@pytest.mark.parametrize("sharing", SHARING)
def test_taps_that_share_a_measurement_add_up(sharing, name):
  tap, once = TAPS[name]
  loss = SHARING[sharing](functools.partial(tapped_loss, tap))
  assert measure(jax.checkpoint(loss)) == 5 * once


@each_tap
def test_taps_with_their_own_zeros_are_apart(name):
  tap, once = TAPS[name]
  loss = functools.partial(tapped_loss, tap)

  def scanned(x, zeros):
    def step(total, inputs):
      factor, zero = inputs
      return total + tapped_loss(tap, x, zero, FACTORS * factor), None

    return lax.scan(step, 0.0, (jnp.array([0, 1], HALF), zeros))[0]

  np.testing.assert_array_equal(measure(scanned, zero=jnp.zeros(2)), [0, once])
  found = measure(
    lambda x, zeros: loss(x, zeros["a"]) + tap(x, zeros["b"])[0],
    zero={"a": ZERO, "b": ZERO},
  )
  assert found["a"] == once
  assert found["b"] == (1 if name == "amax_tap" else 0)
  own = jax.vmap(jax.grad(loss, 1), (0, None))(jnp.stack([X, X]), ZERO)
  np.testing.assert_array_equal(own, [once] * 2)


each_vma = pytest.mark.parametrize("check_vma", [True, False])

# One factor for each device.
SPREAD = jnp.array([1, 65504] * 4, HALF)


def on_each_device(function, out_specs, check_vma=True):
  specs = (jax.P(), jax.P(), support.SPREAD)
  mapped = support.on_each_device(function, out_specs, check_vma, specs)
  return jax.jit(mapped)(HALF(1), ZERO, SPREAD)


def one_device(tap, x, zero, factors):
  return tapped_loss(tap, x * (factors / factors), zero, factors)


@each_tap
@each_vma
def test_a_measurement_that_varies_is_each_devices_own(check_vma, name):
  tap, once = TAPS[name]

  def own(x, zero, factors):
    zero = ols.make_varying(zero, "data")
    found = jax.grad(functools.partial(one_device, tap), 1)(x, zero, factors)
    # A value that all devices share may pass as well.
    shared = jax.grad(lambda zero: tap(x, zero) * 65504)(zero)
    return found[None], shared[None]

  found, shared = on_each_device(own, support.SPREAD, check_vma)
  least = 1 if name == "amax_tap" else 0
  np.testing.assert_array_equal(found, [least, once] * 4)
  np.testing.assert_array_equal(shared, once)


@each_tap
def test_a_measurement_that_devices_share_adds_them_up(name):
  tap, once = TAPS[name]
  gradient = jax.grad(functools.partial(one_device, tap), 1)
  least = 1 if name == "amax_tap" else 0
  assert on_each_device(gradient, jax.P()) == 4 * (once + least)


def test_a_shared_leaf_counts_once_beside_one_that_varies():
  def loss(x, status, factors):
    shared, varying = status_tap((x, x * factors), status)
    return jnp.sum(shared * 9000) + jnp.sum(varying)

  # JAX sums the cotangents of a shared value before they pass: 8 * 9000.
  assert on_each_device(jax.grad(loss, 1), jax.P()) == 1


def test_values_that_vary_and_values_that_do_not_share_an_amax():
  def own(x, amax, factors):
    def loss(amax):
      shared, varying = amax_tap((x, x * factors), amax)
      return shared * 3 + jnp.sum(varying * factors)

    return jax.grad(loss)(ols.make_varying(amax, "data"))[None]

  found = on_each_device(own, support.SPREAD)
  assert np.all(np.asarray(found) >= np.maximum(3, SPREAD))


@each_tap
@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_a_sharded_array_is_measured_once(axis_type, name):
  tap, once = TAPS[name]
  with jax.set_mesh(support.make_mesh(axis_type)):
    x = jax.device_put(jnp.ones(8, HALF), support.SPREAD)
    factors = jax.device_put(SPREAD, support.SPREAD)
    loss = functools.partial(tapped_loss, tap, factors=factors)
    assert measure(loss, x) == (4 if name == "status_tap" else once)


@each_tap
def test_a_measurement_that_is_no_float32_number_is_refused(name):
  argument = {"amax_tap": "amax", "status_tap": "status"}[name]
  for zero in (0.0, jnp.zeros(2), jnp.zeros((), HALF)):
    with pytest.raises(TypeError, match=f"`{argument}` must be float32"):
      TAPS[name][0](X, zero)


def test_anything_but_a_check_for_one_dtype_is_refused():
  for check in ("saturated", None, ols.saturated):
    with pytest.raises(TypeError, match="`check` must be made by nonfinite"):
      status_tap(X, ZERO, check=check)
  for dtype in ({"w": HALF}, lambda path: HALF, [HALF]):
    with pytest.raises(TypeError, match="`check` must be for one dtype"):
      status_tap(X, ZERO, check=ols.saturated(dtype))
