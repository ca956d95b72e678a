"""Cotangents multiplied at chosen points: layer-wise loss scaling."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import experimental
from tests.support import on_each_device

HALF = jnp.float16
X = jnp.array([1.0, 2.0, 3.0], HALF)
FACTORS = jnp.array([1.0, 3.0, jnp.inf], HALF)


def scaled_loss(x, scale, factors=FACTORS):
  """Returns a loss whose cotangents are `scale` times `factors` at `x`."""
  return jnp.sum(experimental.scale_cotangent(x, scale) * factors)


def gradient(scale, factors, x=X):
  return jax.grad(scaled_loss)(x, scale, factors)


def test_the_value_comes_back_unchanged():
  tree = {"a": X, "b": [jnp.float32(jnp.nan), None]}
  scaled = experimental.scale_cotangent(tree, 8.0)
  assert jax.tree.structure(scaled) == jax.tree.structure(tree)
  for new, old in zip(
    jax.tree.leaves(scaled), jax.tree.leaves(tree), strict=True
  ):
    np.testing.assert_array_equal(new, old)
    assert new.dtype == old.dtype


@pytest.mark.parametrize("scale", [0.25, jnp.float32(4)])
def test_the_cotangent_is_multiplied(scale):
  found = gradient(scale, FACTORS)
  np.testing.assert_array_equal(found, FACTORS * HALF(scale))
  assert found.dtype == HALF


def test_the_product_is_rounded_once():
  found = gradient(1 / 3, jnp.full(3, 2050, HALF))
  np.testing.assert_array_equal(found, 683.5)  # Of 683.33, by steps of 0.5.
  assert HALF(float(HALF(1 / 3)) * 2050) == 683.0  # By a scale in float16.


def test_float64_keeps_the_bits_of_the_scale():
  with jax.enable_x64(True):
    found = jax.grad(scaled_loss)(jnp.ones(1), 0.1, jnp.ones(1))
    assert found.dtype == jnp.float64
    assert float(found[0]) == 0.1


@pytest.mark.parametrize("scale", [0.0, 2.0**-20])
def test_inf_and_nan_stay_visible(scale):
  found = gradient(scale, jnp.array([jnp.inf, -jnp.inf, jnp.nan], HALF))
  assert not np.any(np.isfinite(found))


def test_a_complex_cotangent_is_multiplied_by_parts():
  _, pullback = jax.vjp(
    lambda x: experimental.scale_cotangent(x, 2.0),
    jnp.zeros((), jnp.complex64),
  )
  for parts, expected in (
    ((5, 3), (10, 6)),
    ((jnp.inf, 3), (jnp.inf, 6)),
    ((5, jnp.inf), (10, jnp.inf)),
  ):
    (found,) = pullback(lax.complex(*map(jnp.float32, parts)))
    assert (found.real, found.imag) == expected


def test_leaves_without_a_gradient_pass():
  tree = {
    "integer": jnp.arange(3),
    "key": jax.random.key(0),
    "number": 3,
    "text": "relu",
    "flag": np.array(True),
  }
  scaled = experimental.scale_cotangent(tree, 2.0)
  assert all(scaled[name] is tree[name] for name in tree)


def test_the_scale_has_no_gradient():
  found = jax.grad(scaled_loss, 1)(X, jnp.float32(2))
  assert (found, found.dtype) == (0, jnp.float32)


def test_forward_mode_multiplies_the_tangents():
  values, tangents = jax.jvp(
    lambda x: experimental.scale_cotangent(x, 4.0), (X,), (X,)
  )
  np.testing.assert_array_equal(values, X)
  np.testing.assert_array_equal(tangents, 4 * X)


def test_each_further_derivative_multiplies_once_more():
  def cube(x):
    return experimental.scale_cotangent(x, 4.0) ** 3

  assert jax.grad(cube)(1.0) == 4 * 3
  assert jax.grad(jax.grad(cube))(1.0) == 4**2 * 6


def test_autocast_multiplies_in_float32_what_float16_cannot_hold():
  def loss(w, x):
    w = experimental.scale_cotangent(w, 2.0**-30)
    return experimental.scale_cotangent(w @ x, 2.0**30)

  mixed = ols.autocast(lambda w, x: jnp.sum(loss(w, x)) * 2.0**-20, "O1")
  found = jax.jit(jax.grad(mixed))(jnp.ones((2, 2)), jnp.ones(2))
  np.testing.assert_array_equal(found, 2.0**-20)


def test_a_replicated_value_is_multiplied_after_the_sum_of_cotangents():
  specs = (jax.P(), jax.P(), jax.P("data"))
  function = on_each_device(jax.grad(scaled_loss), jax.P(), in_specs=specs)
  found = jax.jit(function)(jnp.ones(()), jnp.float32(4), jnp.arange(8.0))
  assert found == 4 * 28


def test_a_varying_scale_multiplies_before_the_sum():
  def own(x, scales, factors):
    return jax.grad(scaled_loss)(x, scales[0], factors)

  specs = (jax.P(), jax.P("data"), jax.P("data"))
  function = on_each_device(own, jax.P(), in_specs=specs)
  found = jax.jit(function)(jnp.ones(()), jnp.arange(8.0), jnp.arange(8.0))
  assert found == sum(i * i for i in range(8))


@pytest.mark.parametrize(
  "scale", [None, True, 1j, jnp.ones(2), jnp.array(True)]
)
def test_a_scale_that_is_no_real_scalar_is_refused(scale):
  with pytest.raises(TypeError, match="`scale` must be a (number|real scalar)"):
    experimental.scale_cotangent(X, scale)


@pytest.mark.parametrize(
  ("scale", "message"),
  [
    (-(2.0**-127), r"0 or at least 2\*\*-126"),
    (2.0**128, "`scale` must be finite in float32"),
  ],
)
def test_a_number_that_float32_cannot_hold_is_refused(scale, message):
  with pytest.raises(ValueError, match=message):
    experimental.scale_cotangent(X, scale)
