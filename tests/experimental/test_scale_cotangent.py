"""Cotangents multiplied at chosen points: layer-wise loss scaling."""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import experimental
from optax_lossscale import hardware
from tests.support import on_each_device
from tests.support import relative_error

HALF = jnp.float16
X = jnp.array([1.0, 2.0, 3.0], HALF)
FACTORS = jnp.array([1.0, 3.0, jnp.inf], HALF)


def scaled_loss(x, scale, factors=FACTORS):
  """Returns a loss whose cotangents are `scale` times `factors` at `x`."""
  return jnp.sum(experimental.scale_cotangent(x, scale) * factors)


def gradient(scale, factors, x=X):
  return jax.grad(scaled_loss)(x, scale, factors)


def test_it_is_the_identity():
  tree = {"a": X, "b": [jnp.float32(jnp.nan), None]}
  scaled = experimental.scale_cotangent(tree, 8.0)
  assert jax.tree.structure(scaled) == jax.tree.structure(tree)
  for new, old in zip(
    jax.tree.leaves(scaled), jax.tree.leaves(tree), strict=True
  ):
    np.testing.assert_array_equal(new, old)
    assert new.dtype == old.dtype


@pytest.mark.parametrize("scale", [4, 0.25, jnp.float32(4), np.float32(0.25)])
def test_the_cotangent_is_multiplied(scale):
  found = gradient(scale, FACTORS)
  np.testing.assert_array_equal(found, FACTORS * HALF(scale))
  assert found.dtype == HALF


@pytest.mark.parametrize("scale", [2.0**20, 2.0**-30])
def test_a_scale_that_float16_does_not_hold_is_applied_all_the_same(scale):
  factors = jnp.full(3, 2.0**-8 if scale > 1 else 2.0**15, HALF)
  np.testing.assert_array_equal(
    gradient(scale, factors), HALF(float(factors[0]) * scale)
  )


def test_the_product_is_rounded_once():
  found = gradient(1 / 3, jnp.full(3, 2050, HALF))
  np.testing.assert_array_equal(found, 683.5)  # Of 683.33, by steps of 0.5.
  assert HALF(float(HALF(1 / 3)) * 2050) == 683.0  # By a scale in float16.


def test_float64_keeps_the_bits_of_the_scale():
  with jax.enable_x64(True):
    found = jax.grad(scaled_loss)(jnp.ones(1), 0.1, jnp.ones(1))
    assert found.dtype == jnp.float64
    assert float(found[0]) == 0.1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, jnp.float32])
def test_other_dtypes_keep_theirs(dtype):
  x = jnp.ones(2, dtype)
  _, pullback = jax.vjp(lambda x: experimental.scale_cotangent(x, 4), x)
  (found,) = pullback(x)
  assert found.dtype == dtype
  np.testing.assert_array_equal(found.astype(jnp.float32), 4)


@pytest.mark.parametrize("scale", [0.0, 2.0**-20, 4.0, -1.0])
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


def test_what_has_no_gradient_passes():
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


def test_what_is_undone_cancels_in_first_derivatives_alone():
  """Records why a gradient penalty has to do without it.

  The second backward pass leaves the layer by its first, where nothing
  multiplies, and passes what undoes it once more.
  """

  def cube(x):
    return experimental.scale_cotangent(
      experimental.scale_cotangent(x, 0.25) ** 3, 4.0
    )

  assert jax.grad(cube)(1.0) == 3
  assert jax.jvp(cube, (1.0,), (1.0,))[1] == 3
  assert jax.grad(jax.grad(cube))(1.0) == 6 / 4


def test_it_is_strict_about_dtypes(strict_promotion):
  found = jax.grad(scaled_loss)(X, jnp.float32(2.0))
  np.testing.assert_array_equal(found, 2 * FACTORS)


# In other transformations -----------------------------------------------------


def scan(x, scale):
  def step(carry, y):
    return carry + scaled_loss(y, scale, y.dtype.type(1)), None

  return lax.scan(step, x.dtype.type(0), jnp.stack([x] * 2))[0]


def remat(x, scale):
  return jax.checkpoint(scan)(x, scale)


def cond(x, scale):
  return lax.cond(x[0] > 0, scan, lambda x, _: jnp.sum(x), x, scale)


def vmap(x, scale):
  scaled = jax.vmap(scaled_loss, (0, None, None))
  return jnp.sum(scaled(jnp.stack([x] * 2), scale, HALF(1)))


def autocast(level):
  return ols.autocast(scan, level)


def status(x, scale):
  return hardware.float_status(scan)(x, scale)[0]


INSIDE = {
  "scan": scan,
  "remat": remat,
  "cond": cond,
  "vmap": vmap,
  "jit": jax.jit(scan),
  "O1": autocast("O1"),
  "O2": autocast("O2"),
  "O3": autocast("O3"),
  "emulate_saturation": hardware.emulate_saturation(scan),
  "float_status": status,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("dtype", [HALF, jnp.float32])
def test_it_multiplies_inside_of(name, dtype):
  # In float32 as well, which `autocast` makes float16.
  found = jax.jit(jax.grad(INSIDE[name]))(X.astype(dtype), jnp.float32(4))
  np.testing.assert_array_equal(found, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
  "transform", [hardware.emulate_saturation, hardware.float_status]
)
def test_it_multiplies_in_a_gradient_that_is_transformed(transform):
  found = transform(jax.grad(scan))(X, jnp.float32(4))
  found = found[0] if transform is hardware.float_status else found
  np.testing.assert_array_equal(found, 8)


def test_emulated_saturation_clips_what_it_makes():
  found = hardware.emulate_saturation(jax.grad(scan))(X, jnp.float32(2.0**20))
  np.testing.assert_array_equal(found, 65504)
  _, overflowed = hardware.float_status(jax.grad(scan))(X, jnp.float32(2.0**20))
  assert overflowed


def test_autocast_multiplies_in_float32_what_float16_cannot_hold():
  def loss(w, x):
    w = experimental.scale_cotangent(w, 2.0**-30)
    return experimental.scale_cotangent(w @ x, 2.0**30)

  mixed = ols.autocast(lambda w, x: jnp.sum(loss(w, x)) * 2.0**-20, "O1")
  found = jax.jit(jax.grad(mixed))(jnp.ones((2, 2)), jnp.ones(2))
  np.testing.assert_array_equal(found, 2.0**-20)


def test_each_example_of_a_vmap_may_have_a_scale_of_its_own():
  scales = jnp.array([1.0, 2.0])
  found = jax.vmap(jax.grad(scaled_loss), (None, 0, None))(X, scales, HALF(1))
  np.testing.assert_array_equal(found, [[1, 1, 1], [2, 2, 2]])


# Devices ----------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_multiplies_its_own(check_vma):
  specs = (jax.P("data"), jax.P(), jax.P("data"))
  function = on_each_device(
    jax.grad(scaled_loss), jax.P("data"), check_vma, specs
  )
  factors = jnp.arange(8.0)
  found = jax.jit(function)(jnp.ones(8), jnp.float32(4), factors)
  np.testing.assert_array_equal(found, 4 * factors)


def test_what_all_devices_share_is_multiplied_after_the_sum_of_cotangents():
  specs = (jax.P(), jax.P(), jax.P("data"))
  function = on_each_device(jax.grad(scaled_loss), jax.P(), in_specs=specs)
  found = jax.jit(function)(jnp.ones(()), jnp.float32(4), jnp.arange(8.0))
  assert found == 4 * 28


def test_where_the_scale_varies_each_device_multiplies_before_the_sum():
  def own(x, scales, factors):
    return jax.grad(scaled_loss)(x, scales[0], factors)

  specs = (jax.P(), jax.P("data"), jax.P("data"))
  function = on_each_device(own, jax.P(), in_specs=specs)
  found = jax.jit(function)(jnp.ones(()), jnp.arange(8.0), jnp.arange(8.0))
  assert found == sum(i * i for i in range(8))


# Layers -----------------------------------------------------------------------

LAYERS, WIDTH = 11, 8


def softsign(x):
  # So that nothing cancels in its derivative.
  return jnp.sign(x) * (1 - 1 / (1 + jnp.abs(x)))


def make_network():
  """Returns weights and an input for which backward passes vanish.

  Softsign of about 63 has a slope of about 2**-12, which the next weight
  multiplies by about 2**6: a cotangent loses some 6 binades per layer.
  """
  rng = np.random.default_rng(0)
  signs = rng.choice([-1.0, 1.0], (LAYERS, WIDTH, WIDTH))
  weights = [60.0 * (np.eye(WIDTH) + 0.02 * sign) for sign in signs]
  return weights, rng.choice([-0.9, 0.9], (4, WIDTH))


def network(weights, x, scales):
  """Returns what a deep network gives, each layer by its own scale."""
  below = 1.0
  for weight, scale in zip(weights, scales, strict=True):
    x = experimental.scale_cotangent(x, below / scale)
    weight = experimental.scale_cotangent(weight, 1 / scale)
    x = softsign(x @ weight.astype(x.dtype))
    below = scale
  return experimental.scale_cotangent(x, below)


def network_loss(weights, x, scales):
  return jnp.sum(network(weights, x, scales).astype(weights[0].dtype))


@functools.cache
def true_gradients():
  """Returns the gradients in float64."""
  weights, x = make_network()
  with jax.enable_x64(True):
    weights = [jnp.asarray(w, jnp.float64) for w in weights]
    x = jnp.asarray(x, jnp.float64)
    ones = [1.0] * LAYERS
    found = jax.jit(jax.grad(network_loss))(weights, x, ones)
    return [np.asarray(g) for g in found]


@functools.cache
def compiled_gradients(dtype):
  weights, x = make_network()
  weights = [jnp.float32(weight) for weight in weights]
  x = jnp.asarray(x, dtype)

  @jax.jit
  def gradients(scale, scales):
    loss = lambda weights: scale * network_loss(weights, x, scales)  # noqa: E731
    return [g / scale for g in jax.grad(loss)(weights)]

  return gradients


def layer_scales():
  """Returns a power of two for each layer that brings it close to 1."""
  return [
    jnp.float32(2.0 ** -math.floor(math.log2(np.max(np.abs(g)))))
    for g in true_gradients()
  ]


ONES = [jnp.float32(1)] * LAYERS


def test_powers_of_two_change_no_bit_in_float32():
  gradients = compiled_gradients(jnp.float32)
  plain = gradients(1.0, ONES)
  layer_wise = gradients(1.0, layer_scales())
  for a, b in zip(plain, layer_wise, strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.any(a != 0)


def test_one_scale_for_all_loses_a_layer_whatever_it_is():
  """The network needs more than one scale, so the next test says something."""
  sizes = [np.max(np.abs(g)) for g in true_gradients()]
  assert max(sizes) / min(sizes) > 2.0**40  # Wider than float16.
  gradients = compiled_gradients(HALF)
  for exponent in range(0, 64, 4):
    found = gradients(jnp.float32(2.0**exponent), ONES)
    lost = [not np.any(g != 0) for g in found]
    overflowed = [not np.all(np.isfinite(g)) for g in found]
    assert any(lost) or any(overflowed)
    if exponent == 0:
      assert lost[0] and not any(overflowed)
    if exponent > 40:
      assert overflowed[-1] and not lost[0]


def test_a_scale_for_each_layer_brings_all_gradients_back():
  found = compiled_gradients(HALF)(1.0, layer_scales())
  for layer, true in zip(found, true_gradients(), strict=True):
    assert relative_error(layer, true) < 0.05


def test_one_s_for_the_model_moves_beside_the_scales_of_its_layers():
  weights, x = make_network()
  weights = [jnp.float32(weight) for weight in weights]
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(2.0**10))
  scales = layer_scales()

  @jax.jit
  def step(state):
    _, scaled_grads = ols.scaled_value_and_grad(network_loss, state)(
      weights, HALF(x), scales
    )
    return tx.update(scaled_grads, state, weights)

  state = tx.init(weights)
  skipped = []
  while not skipped or skipped[-1]:
    updates, state = step(state)
    skipped.append(bool(state.skipped))
  assert 1 < len(skipped) < 15
  assert ols.get_loss_scale(state) == 2.0 ** (11 - len(skipped))
  for update, true in zip(updates, true_gradients(), strict=True):
    assert relative_error(-update, true) < 0.05


def test_saturation_is_scaled_away_but_a_tap_sees_it():
  def loss(weight, x, status):
    weight = experimental.scale_cotangent(weight, 2.0**-4)
    y = hardware.status_tap(weight.astype(HALF) * x, status)
    return jnp.float32(experimental.scale_cotangent(y, 2.0**4)) * 2.0**14

  emulated = hardware.emulate_saturation(jax.grad(loss, (0, 2)))
  found, overflows = emulated(jnp.float32(1), HALF(1), jnp.float32(0))
  assert found == 65504 / 16
  assert overflows == 1


# Errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
  "scale",
  [
    None,
    "2",
    True,
    1j,
    jnp.ones(2),
    np.ones(2),
    jnp.array(True),
    jnp.complex64(1),
    ols.DynamicLossScale(),
  ],
  ids=repr,
)
def test_a_scale_that_is_no_real_scalar_is_refused(scale):
  with pytest.raises(TypeError, match="`scale` must be a (number|real scalar)"):
    experimental.scale_cotangent(X, scale)


@pytest.mark.parametrize("scale", [1e-60, -(2.0**-127)])
def test_a_number_that_float32_flushes_to_0_is_refused(scale):
  with pytest.raises(ValueError, match=r"0 or at least 2\*\*-126"):
    experimental.scale_cotangent(X, scale)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 2.0**128])
def test_a_number_that_is_not_finite_in_float32_is_refused(scale):
  with pytest.raises(ValueError, match="`scale` must be finite in float32"):
    experimental.scale_cotangent(X, scale)
