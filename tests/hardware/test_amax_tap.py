"""Taps: the largest cotangent that passes a point of a model."""

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.hardware import amax_tap
from tests import support

HALF = jnp.float16
ZERO = jnp.float32(0)


def seen(loss, *args):
  """Returns the gradient with respect to a loss's last argument, a tap's."""
  return jax.jit(jax.grad(loss, len(args)))(*args, ZERO)


def weighted(factors):
  """Returns a loss whose cotangents at its tap are `factors`."""

  def loss(x, amax):
    return jnp.sum(amax_tap(x, amax) * factors)

  return loss


def test_the_value_passes_unchanged():
  tree = {"a": jnp.arange(3.0, dtype=HALF), "b": [jnp.ones(2), None], "c": 7}
  tapped = amax_tap(tree, ZERO)
  chex.assert_trees_all_equal(tapped, tree)


def test_what_is_no_gradient_passes():
  tree = {"integer": jnp.arange(3), "key": jax.random.key(0), "text": "relu"}
  tapped = amax_tap(tree, ZERO)
  assert all(tapped[name] is tree[name] for name in tree)


def test_cotangents_pass_unchanged():
  factors = jnp.asarray([1.0, -3.0, jnp.inf, jnp.nan])
  gradient = jax.jit(jax.grad(weighted(factors)))(jnp.ones(4), ZERO)
  np.testing.assert_array_equal(gradient, factors)


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16, jnp.float32])
def test_the_largest_magnitude_is_seen(dtype):
  factors = jnp.asarray([1.0, -3.0, 2.0], dtype)
  assert seen(weighted(factors), jnp.ones(3, dtype)) == 3


@pytest.mark.parametrize("dtype", [HALF, jnp.float32])
def test_inf_and_nan_are_seen(dtype):
  ones = jnp.ones(3, dtype)
  assert seen(weighted(jnp.asarray([1.0, -jnp.inf, 2.0], dtype)), ones) == (
    jnp.inf
  )
  both = jnp.asarray([jnp.nan, jnp.inf, 2.0], dtype)
  assert jnp.isnan(seen(weighted(both), ones))


def test_an_amax_is_float32_whatever_passes():
  for dtype in (HALF, jnp.float32):
    found = seen(weighted(jnp.ones(2, dtype)), jnp.ones(2, dtype))
    assert (found.dtype, found.shape) == (jnp.float32, ())


def test_the_larger_part_of_a_complex_cotangent_counts():
  def loss(x, amax):
    x = amax_tap(x, amax)
    return 3 * jnp.sum(x.real) + 4 * jnp.sum(x.imag)

  assert seen(loss, jnp.ones(2, jnp.complex64)) == 4


def test_a_tree_is_seen_as_one():
  def loss(x, amax):
    tree = amax_tap({"a": x, "b": [2 * x, None], "n": 3}, amax)
    return jnp.sum(tree["a"]) * 5 + jnp.sum(tree["b"][0]) * 7

  assert seen(loss, jnp.ones(2)) == 7


def test_a_tree_of_several_dtypes_is_seen_as_one():
  def loss(x, amax):
    half, single = amax_tap((x.astype(HALF), x), amax)
    return jnp.sum(half.astype(jnp.float32)) * 5 + jnp.sum(single) * 7

  assert seen(loss, jnp.ones(2)) == 7


def deep(weights, x, tap):
  """Returns a loss; `tap(hidden, i)` stands at every layer."""
  hidden = x
  for i, weight in enumerate(weights):
    hidden = tap(jnp.tanh(hidden @ weight), i)
  return jnp.sum(hidden**2)


def test_taps_see_what_differentiation_says_of_the_activations():
  # In float64, by the gradient with respect to a zero added to each activation.
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(4, 6, 6)))
    x = jnp.asarray(rng.normal(size=(3, 6)))

    def tapped(amaxes):
      return deep(weights, x, lambda hidden, i: amax_tap(hidden, amaxes[i]))

    def shifted(zeros):
      return deep(weights, x, lambda hidden, i: hidden + zeros[i])

    found = jax.jit(jax.grad(tapped))(jnp.zeros(4, jnp.float32))
    expected = jax.jit(jax.grad(shifted))(jnp.zeros((4, 3, 6)))
    expected = np.abs(expected).max((1, 2))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_taps_that_share_an_amax_add_up():
  def loss(x, amax):
    return jnp.sum(amax_tap(x, amax) * 3) + jnp.sum(amax_tap(x, amax) * 5)

  assert seen(loss, jnp.ones(2)) == 8


def test_taps_with_an_entry_each_are_apart():
  def loss(x, found):
    return jnp.sum(amax_tap(x, found["a"]) * 3) + jnp.sum(
      amax_tap(x, found["b"]) * 5
    )

  found = jax.grad(loss, 1)(jnp.ones(2), {"a": ZERO, "b": ZERO})
  assert found == {"a": 3, "b": 5}


def test_each_iteration_of_a_scan_may_have_its_own():
  def loss(x, amaxes):
    def step(total, inputs):
      factor, amax = inputs
      return total + jnp.sum(amax_tap(x, amax) * factor), None

    return lax.scan(step, 0.0, (jnp.arange(1.0, 5.0), amaxes))[0]

  gradient = jax.jit(jax.grad(jax.checkpoint(loss), 1))
  found = gradient(jnp.ones(2), jnp.zeros(4, jnp.float32))
  np.testing.assert_array_equal(found, [1, 2, 3, 4])


def test_iterations_of_a_scan_that_share_one_add_up():
  def loss(x, amax):
    def step(total, factor):
      return total + jnp.sum(amax_tap(x, amax) * factor), None

    return lax.scan(step, 0.0, jnp.arange(1.0, 5.0))[0]

  assert seen(loss, jnp.ones(2)) == 10


def test_each_example_of_a_vmap_has_its_own_and_what_is_shared_adds_up():
  def loss(factor, amax):
    return jnp.sum(amax_tap(jnp.ones(2), amax) * factor)

  factors = jnp.asarray([2.0, 3.0])
  own = jax.jit(jax.vmap(jax.grad(loss, 1), (0, None)))(factors, ZERO)
  np.testing.assert_array_equal(own, factors)
  mapped = jax.vmap(loss, (0, None))
  assert seen(lambda x, amax: jnp.sum(mapped(x, amax)), factors) == 5


def test_a_value_without_a_cotangent_is_not_seen():
  def loss(x, amax):
    amax_tap(x * 100, amax)
    return jnp.sum(x)

  assert seen(loss, jnp.ones(2)) == 0


# Devices.

each_vma = pytest.mark.parametrize("check_vma", [True, False])


def on_each_device(function, out_specs, check_vma=True):
  specs = (jax.P(), jax.P(), jax.P("data"))
  return jax.jit(support.on_each_device(function, out_specs, check_vma, specs))


def one_device(x, amax, factors):
  return jnp.sum(amax_tap(x * factors, amax) * factors)


@each_vma
def test_an_amax_that_varies_is_each_devices_own(check_vma):
  def own(x, amax, factors):
    amax = ols.make_varying(amax, "data")
    return jax.grad(one_device, 1)(x, amax, factors)[None]

  factors = jnp.arange(1.0, 9.0, dtype=HALF)
  found = on_each_device(own, jax.P("data"), check_vma)(HALF(1), ZERO, factors)
  np.testing.assert_array_equal(found, factors)


def test_what_all_devices_share_may_pass_with_an_amax_that_varies():
  def own(x, amax, factors):
    amax = ols.make_varying(amax, "data")
    found = jax.grad(lambda amax: amax_tap(x, amax) * 3)(amax)
    return found[None] + 0 * factors.astype(jnp.float32)

  found = on_each_device(own, jax.P("data"))(HALF(1), ZERO, jnp.ones(8, HALF))
  np.testing.assert_array_equal(found, 3)


def test_an_amax_that_devices_share_adds_them_up():
  found = on_each_device(jax.grad(one_device, 1), jax.P())(
    HALF(1), ZERO, jnp.ones(8, HALF)
  )
  assert found == 8


def test_values_that_vary_and_values_that_do_not_are_seen_together():
  def own(x, amax, factors):
    def loss(amax):
      shared, varying = amax_tap((x, x * factors), amax)
      return shared * 3 + jnp.sum(varying * factors)

    return jax.grad(loss)(ols.make_varying(amax, "data"))[None]

  factors = jnp.asarray([1, 9] * 4, HALF)
  # Of what all devices share, JAX sums the cotangents before they pass: 8 * 3.
  found = on_each_device(own, jax.P("data"))(HALF(1), ZERO, factors)
  assert np.all(np.asarray(found) >= np.maximum(3, factors))


@pytest.mark.slow
def test_the_wrapper_takes_the_largest_of_all_devices():
  rule = ols.rules.HeadroomLossScale(window=2)
  tx = ols.loss_scaling(optax.sgd(1.0), rule, axis_name="data")

  def step(x, state, factors):
    amax = ols.make_varying(ZERO, "data")
    found = jax.grad(one_device, 1)(x, amax, factors)
    return tx.update(jnp.zeros(()), state, amax={"layer": found})[1]

  mapped = on_each_device(step, jax.P())
  state = tx.init(jnp.zeros(()))
  state = mapped(HALF(1), state, jnp.arange(1.0, 9.0, dtype=HALF))
  assert (state.amax, state.overflow) == (8, False)
  assert ols.get_loss_scale(state) == 2.0**11
  factors = jnp.ones(8, HALF).at[5].set(jnp.inf)
  state = mapped(HALF(1), state, factors)
  assert state.overflow
  assert ols.get_loss_scale(state) == 2.0**10


# Errors.


@pytest.mark.parametrize(
  "amax", [0.0, jnp.zeros(2), jnp.zeros((), HALF), jnp.zeros((), int)], ids=str
)
def test_an_amax_that_is_no_float32_number_is_refused(amax):
  with pytest.raises(TypeError, match="`amax` must be float32"):
    amax_tap(jnp.ones(2), amax)
