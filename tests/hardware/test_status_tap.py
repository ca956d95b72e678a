"""Taps: how many cotangents that pass a point of a model overflowed."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests import support

HALF = jnp.float16
ZERO = jnp.float32(0)

# Cotangents of these are 1, 65504, inf and NaN; the last three count.
FACTORS = jnp.array([1.0, 65504.0, jnp.inf, jnp.nan], HALF)


def half(*numbers):
  return jnp.array(numbers, HALF)


def tapped_loss(x, status, check=None):
  """Returns a loss whose cotangents at the tap are `FACTORS`."""
  options = {} if check is None else {"check": check}
  return jnp.sum(hardware.status_tap(x, status, **options) * FACTORS)


def count(loss, *args):
  """Returns the gradient with respect to `status`, the last argument."""
  return jax.grad(loss, argnums=len(args))(*args, ZERO)


X = jnp.ones(4, HALF)


def test_a_tap_is_the_identity():
  np.testing.assert_array_equal(hardware.status_tap(FACTORS, ZERO), FACTORS)
  assert hardware.status_tap(FACTORS, ZERO).dtype == HALF


def test_gradients_pass_a_tap_bit_for_bit():
  gradient = jax.grad(tapped_loss)(X, ZERO)
  np.testing.assert_array_equal(gradient, FACTORS)


@pytest.mark.parametrize(
  ("check", "expected"),
  [
    (None, 3),
    (ols.saturated(), 3),
    (ols.saturated(HALF), 3),
    (ols.nonfinite(), 2),
    (ols.nonfinite(HALF), 2),
    (ols.saturated(jnp.float8_e5m2), 3),
    (ols.saturated(jnp.float32), 3),
  ],
)
def test_a_tap_counts_the_cotangents_that_overflowed(check, expected):
  assert count(functools.partial(tapped_loss, check=check), X) == expected


@pytest.mark.parametrize(
  ("check", "expected"),
  [
    (ols.saturated(HALF), 3),
    (ols.nonfinite(HALF), 2),
    (ols.saturated(), 1),
    (ols.nonfinite(), 1),
  ],
)
def test_wider_cotangents_are_held_against_the_computations_dtype(
  check, expected
):
  factors = jnp.float32([1.0, 65503.0, 65504.0, 70000.0, jnp.nan])

  def loss(x, status):
    return jnp.sum(hardware.status_tap(x, status, check=check) * factors)

  assert count(loss, jnp.ones(5)) == expected


def test_a_bfloat16_cotangent_is_held_against_float16():
  def loss(x, status):
    x = hardware.status_tap(x, status, check=ols.nonfinite(HALF))
    return jnp.sum(x * jnp.bfloat16([65280.0, 65536.0]))

  assert count(loss, jnp.ones(2, jnp.bfloat16)) == 1


def test_the_parts_of_a_complex_cotangent_count_as_one():
  def loss(x, status):
    x = hardware.status_tap(x, status)
    return jnp.sum(jnp.real(x) * jnp.inf) + jnp.sum(jnp.imag(x) * jnp.inf)

  assert count(loss, jnp.ones(2, jnp.complex64)) == 2


def test_every_leaf_of_a_tree_is_tapped():
  def loss(x, status):
    tree = hardware.status_tap({"a": x, "b": [2 * x, None]}, status)
    return jnp.sum(tree["a"] * FACTORS + tree["b"][0] * FACTORS)

  assert count(loss, X) == 6


def test_what_is_no_gradient_passes():
  tree = {
    "integer": jnp.arange(3),
    "key": jax.random.key(0),
    "number": 3,
    "text": "relu",
    "flag": np.array(True),
  }
  tapped = hardware.status_tap(tree, ZERO)
  assert all(tapped[name] is tree[name] for name in tree)


def test_all_uses_are_added_up():
  def loss(x, status):
    return tapped_loss(x, status) + tapped_loss(2 * x, status)

  assert count(loss, X) == 6


def test_a_cotangent_that_is_not_needed_does_not_count():
  def loss(x, status):
    hardware.status_tap(x * jnp.inf, status)
    return jnp.sum(x)

  assert count(loss, X) == 0


def scan(x, status):
  def step(carry, y):
    return carry + tapped_loss(y, status), None

  return lax.scan(step, HALF(0), jnp.stack([x] * 5))[0]


def scan_with_remat(x, status):
  return jax.checkpoint(scan)(x, status)


def vmap(x, status):
  return jnp.sum(jax.vmap(tapped_loss, (0, None))(jnp.stack([x] * 5), status))


def cond(x, status):
  return lax.cond(x[0] > 0, scan, lambda x, _: jnp.sum(x), x, status)


MAPPED = {
  "scan": scan,
  "remat": scan_with_remat,
  "vmap": vmap,
  "cond": cond,
  "jit": jax.jit(scan),
}


@pytest.mark.parametrize("name", MAPPED)
def test_the_count_is_added_up_inside_of(name):
  assert jax.jit(functools.partial(count, MAPPED[name]))(X) == 15


def test_each_example_of_a_vmap_has_a_count_of_its_own():
  losses = jax.vmap(jax.grad(tapped_loss, 1), (0, None))
  np.testing.assert_array_equal(losses(jnp.stack([X, X]), ZERO), [3, 3])


# Devices ----------------------------------------------------------------------

each_vma = pytest.mark.parametrize("check_vma", [True, False])


def one_device(x, status, factors):
  """Returns a loss whose cotangents at the tap are `factors`."""
  return jnp.sum(hardware.status_tap(x * factors, status) * factors)


on_each_device = functools.partial(
  support.on_each_device, in_specs=(jax.P(), jax.P(), jax.P("data"))
)


@each_vma
def test_the_gradient_of_a_shard_map_adds_up_the_devices(check_vma):
  def loss(x, status, factors):
    total = one_device(x, status, factors)
    return lax.psum(total.astype(jnp.float32), "data")

  function = on_each_device(loss, jax.P(), check_vma)
  found = jax.jit(jax.grad(function, 1))
  for device in range(8):
    factors = jnp.ones(8, HALF).at[device].set(jnp.inf)
    assert found(HALF(1), ZERO, factors) == 1
  assert found(HALF(1), ZERO, jnp.full(8, jnp.inf, HALF)) == 8


def test_a_gradient_inside_of_a_shard_map_adds_up_the_devices():
  function = on_each_device(jax.grad(one_device, 1), jax.P(), True)
  factors = jnp.array([1, jnp.inf] * 4, HALF)
  assert jax.jit(function)(HALF(1), ZERO, factors) == 4


def test_where_all_devices_share_a_value_its_summed_cotangent_is_seen():
  def loss(x, status, factors):
    return jnp.sum(hardware.status_tap(x, status) * factors)

  function = on_each_device(jax.grad(loss, 1), jax.P(), True)
  assert jax.jit(function)(HALF(1), ZERO, jnp.full(8, 8000, HALF)) == 0
  assert jax.jit(function)(HALF(1), ZERO, jnp.full(8, 9000, HALF)) == 1


def test_a_shared_leaf_counts_once_beside_one_that_varies():
  def loss(x, status, factors):
    shared, varying = hardware.status_tap((x, x * factors), status)
    return jnp.sum(shared * factors) + jnp.sum(varying)

  function = on_each_device(jax.grad(loss, 1), jax.P(), True)
  assert jax.jit(function)(HALF(1), ZERO, jnp.full(8, 9000, HALF)) == 1


@each_vma
def test_a_status_that_varies_is_each_devices_own(check_vma):
  def own(x, status, factors):
    status = ols.make_varying(status, "data")
    return jax.grad(one_device, 1)(x, status, factors)[None]

  function = on_each_device(own, jax.P("data"), check_vma)
  factors = jnp.array([1, jnp.inf] * 4, HALF)
  found = jax.jit(function)(HALF(1), ZERO, factors)
  np.testing.assert_array_equal(found, [0, 1] * 4)


def test_what_all_devices_share_may_pass_with_a_status_that_varies():
  def own(x, status, factors):
    status = ols.make_varying(status, "data")
    loss = lambda s: jnp.sum(hardware.status_tap(x, s) * jnp.inf)  # noqa: E731
    return jax.grad(loss)(status)[None] + 0 * factors.astype(jnp.float32)

  function = on_each_device(own, jax.P("data"), True)
  found = jax.jit(function)(HALF(1), ZERO, jnp.ones(8, HALF))
  np.testing.assert_array_equal(found, 1)


@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_a_sharded_array_is_counted_once(axis_type):
  with jax.set_mesh(support.make_mesh(axis_type)):
    x = jax.device_put(jnp.ones(8, HALF), jax.P("data"))
    factors = jax.device_put(jnp.array([1, jnp.inf] * 4, HALF), jax.P("data"))
    found = jax.jit(jax.grad(one_device, 1))(x, jnp.float32(0), factors)
    assert found == 4


# In training ------------------------------------------------------------------


@pytest.mark.parametrize("emulated", [False, True])
def test_an_overflow_behind_a_layer_scale_skips_the_step(emulated):
  def loss_fn(params, x, status):
    hidden = hardware.status_tap(params * HALF(0.02) * x, status)
    # Its cotangent is cast to float16 here.
    return jnp.sum(hidden.astype(jnp.float32)) * 4

  tx = ols.loss_scaling(
    optax.sgd(0.5),
    ols.DynamicLossScale(2.0**15),
    check=ols.saturated(HALF),
  )
  params = half(1.0, 2.0)
  state = tx.init(params)
  if emulated:
    loss_fn = hardware.emulate_saturation(loss_fn)

  @jax.jit
  def step(params, state):
    value_and_grad = ols.scaled_value_and_grad(loss_fn, state, argnums=(0, 2))
    _, (scaled_grads, overflows) = value_and_grad(params, half(0.5, 0.25), ZERO)
    updates, new = tx.update(scaled_grads, state, params, overflow=overflows)
    _, without = tx.update(scaled_grads, state, params)
    return overflows, updates, new, without

  overflows, updates, new, without = step(params, state)
  assert overflows == 2
  assert new.overflow and new.skipped
  np.testing.assert_array_equal(updates, 0)
  # Ordinary hardware shows an inf, hardware that saturates 655.
  assert without.overflow == (not emulated)
  overflows, _, new, _ = step(params, new)
  assert (overflows, new.overflow) == (2, True)  # 2**14 * 4 is 65536.
  overflows, _, new, _ = step(params, new)
  assert (overflows, new.overflow) == (0, False)


def test_taps_agree_with_the_status_register_of_the_backward_pass():
  rng = np.random.default_rng(0)
  weights = jnp.asarray(rng.normal(size=(3, 6, 6)), HALF)
  x = jnp.asarray(rng.normal(size=(4, 6)), HALF)

  def loss(weights, scale, status):
    hidden = x
    for weight in weights:
      hidden = hardware.status_tap(jnp.tanh(hidden @ weight), status)
    return jnp.sum(hidden.astype(jnp.float32)) * scale

  emulated = hardware.emulate_saturation(loss)

  @jax.jit
  def both(scale):
    gradient = jax.grad(emulated, argnums=2)
    register = hardware.float_status(jax.grad(loss))
    return gradient(weights, scale, ZERO), register(weights, scale, ZERO)[1]

  found = [both(jnp.float32(2.0**k)) for k in range(10, 20)]
  taps = [bool(overflows > 0) for overflows, _ in found]
  assert taps == sorted(taps)
  assert set(taps) == {False, True}
  for tap, (_, register) in zip(taps, found, strict=True):
    assert register or not tap  # It sees the sums in between as well.


# Errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
  "status", [jnp.zeros(2), jnp.zeros((), HALF), jnp.zeros((), int)], ids=str
)
def test_a_status_that_is_no_float32_number_is_refused(status):
  with pytest.raises(TypeError, match="`status` must be float32"):
    hardware.status_tap(X, status)


@pytest.mark.parametrize("check", ["saturated", None, ols.saturated])
def test_a_check_that_is_none_is_refused(check):
  with pytest.raises(TypeError, match="`check` must be made by nonfinite"):
    hardware.status_tap(X, ZERO, check=check)


@pytest.mark.parametrize("dtype", [{"w": HALF}, lambda path: HALF, [HALF]])
def test_a_check_of_several_dtypes_is_refused(dtype):
  with pytest.raises(TypeError, match="`check` must be for one dtype"):
    hardware.status_tap(X, ZERO, check=ols.saturated(dtype))
