"""What the metrics say of a step: headroom, skips in a row, the skip rate."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._base import bits
from tests.support import assert_same_bits

F16_MAX = 65504.0

AUTO = (jax.sharding.AxisType.Auto,)


def metrics_after(scaled_grads, check=None, **extra):
  """Returns the metrics after one step with these scaled gradients."""
  check = ols.nonfinite() if check is None else check
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(), check=check)
  params = jax.tree.map(jnp.zeros_like, scaled_grads)
  arguments = (scaled_grads, tx.init(params), params)
  _, eager = tx.update(*arguments, **extra)
  _, state = jax.jit(tx.update)(*arguments, **extra)
  assert_same_bits(state, eager)
  return ols.loss_scale_metrics(state)


@pytest.mark.parametrize("amax", [2.0**-20, 1.0, 3.0, 4096.0, F16_MAX])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_headroom_is_what_is_left_to_the_largest_value(dtype, amax):
  check = ols.saturated(jnp.float16)
  metrics = metrics_after(jnp.array([0.0, -amax], dtype), check)
  assert metrics["headroom"] == pytest.approx(
    math.log2(F16_MAX / amax), abs=1e-5
  )


def test_headroom_is_known_without_a_name_where_gradients_are_narrow():
  metrics = metrics_after(jnp.array([1024.0], jnp.bfloat16))
  largest = float(jnp.finfo(jnp.bfloat16).max)
  assert metrics["headroom"] == pytest.approx(math.log2(largest / 1024))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("amax", [1.0, 1e30, 1e38])
def test_headroom_to_a_limit_whose_reciprocal_is_subnormal(dtype, amax):
  metrics = metrics_after(jnp.array([amax]), ols.nonfinite(dtype))
  expected = math.log2(float(jnp.finfo(dtype).max) / amax)
  assert metrics["headroom"] == pytest.approx(min(expected, 126), abs=1e-5)


@pytest.mark.slow
def test_headroom_is_that_of_float16_where_no_dtype_is_known():
  # As with the check that names it, but nothing else counts as an overflow.
  named = ols.nonfinite(jnp.float16)
  for value in (0.0, 1.0, 12345.0, 1e5, 1e30, math.inf, math.nan):
    gradient = jnp.array([value])
    np.testing.assert_array_equal(
      metrics_after(gradient)["headroom"],
      metrics_after(gradient, named)["headroom"],
    )
  assert not metrics_after(jnp.array([1e30]))["overflow"]
  assert metrics_after(jnp.array([1e5]))["headroom"] < 0


def test_headroom_is_nan_before_the_first_step():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  assert np.isnan(ols.loss_scale_metrics(tx.init(jnp.ones(2)))["headroom"])


def test_amax_from_elsewhere_counts_where_no_dtype_is_known():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  state = tx.init(jnp.ones(2))
  _, state = tx.update(jnp.ones(2), state, jnp.ones(2), amax=F16_MAX / 8)
  assert ols.loss_scale_metrics(state)["headroom"] == 3
  _, state = tx.update(jnp.ones(2), state, jnp.ones(2), amax=8 * F16_MAX)
  assert ols.loss_scale_metrics(state)["headroom"] == -3
  assert not state.overflow


def test_no_nan_is_kept_in_the_state_of_a_clean_step():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  with jax.debug_nans(True):
    _, state = jax.jit(tx.update)(jnp.ones(2), tx.init(jnp.zeros(2)))
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


def test_headroom_is_that_of_the_tightest_layer():
  check = ols.nonfinite({"a": jnp.float16, "b": jnp.bfloat16, "c": None})
  metrics = metrics_after(
    {"a": jnp.array([8.0]), "b": jnp.array([2.0**100]), "c": jnp.array([1.0])},
    check,
  )
  largest = float(jnp.finfo(jnp.bfloat16).max)
  expected = min(math.log2(F16_MAX / 8), math.log2(largest / 2.0**100))
  assert metrics["headroom"] == pytest.approx(expected, abs=1e-5)
  assert metrics["amax"] == 2.0**100


def test_float32_beside_narrow_gradients_is_left_out_of_the_headroom():
  metrics = metrics_after(
    {"a": jnp.array([1.0], jnp.float16), "b": jnp.array([1e30])}
  )
  assert metrics["headroom"] == pytest.approx(math.log2(F16_MAX), abs=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("value", [2.0**-149, 2.0**-126])
def test_headroom_is_126_bits_at_most(dtype, value):
  check = ols.nonfinite(dtype)
  assert metrics_after(jnp.array([value]), check)["headroom"] == 126


@pytest.mark.parametrize(
  ("value", "headroom", "nan", "inf"),
  [
    (0.0, math.nan, False, False),
    (math.inf, -math.inf, False, True),
    (-math.inf, -math.inf, False, True),
    (math.nan, math.nan, True, False),
    (F16_MAX, 0.0, False, False),
  ],
)
def test_nan_and_inf_are_told_apart(value, headroom, nan, inf):
  metrics = metrics_after(jnp.array([value]), ols.saturated(jnp.float16))
  np.testing.assert_equal(float(metrics["headroom"]), headroom)
  assert (bool(metrics["nan"]), bool(metrics["inf"])) == (nan, inf)
  assert metrics["overflow"] == (value != 0)


def test_skips_are_counted_in_a_row_and_as_a_share():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  state = tx.init(jnp.zeros(1))
  seen = [ols.loss_scale_metrics(state)]
  for gradient in (jnp.inf, jnp.inf, 1.0, jnp.nan):
    _, state = tx.update(jnp.array([gradient]), state)
    seen.append(ols.loss_scale_metrics(state))
  assert [int(x["consecutive_skips"]) for x in seen] == [0, 1, 2, 0, 1]
  assert [float(x["skip_rate"]) for x in seen] == pytest.approx(
    [0, 1, 1, 2 / 3, 3 / 4]
  )


def test_powers_of_two_have_an_exact_logarithm():
  exponents = np.arange(-126, 128)
  x = jnp.asarray(2.0 ** exponents.astype(np.float64), jnp.float32)
  np.testing.assert_array_equal(jax.jit(bits.log2)(x), exponents)
  x = jnp.array([0.0, 3.0, jnp.inf, jnp.nan])
  with np.errstate(divide="ignore"):
    np.testing.assert_allclose(bits.log2(x), np.log2(x), rtol=1e-6)


@pytest.mark.parametrize(
  ("check", "limited_by"),
  [
    (ols.nonfinite(), 64.0),
    (ols.saturated({"a": None, "b": "float16"}), 512.0),
  ],
  ids=["gradients below float32", "named dtypes"],
)
def test_devices_agree_on_the_headroom(check, limited_by):
  mesh = jax.make_mesh((4,), ("data",), axis_types=AUTO)
  tx = ols.loss_scaling(
    optax.sgd(0.1), ols.DynamicLossScale(), check=check, average_scaled="data"
  )
  params = {"a": jnp.zeros(1, jnp.float16), "b": jnp.zeros(1)}
  scaled_grads = {
    "a": jnp.array([1.0, 64.0, 2.0, 0.5], jnp.float16),
    "b": jnp.array([1.0, 2.0, 512.0, 0.5]),
  }

  @jax.jit
  @jax.shard_map(
    mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P()
  )
  def update(scaled_grads, state):
    _, state = tx.update(scaled_grads, state)
    return ols.loss_scale_metrics(state)

  metrics = update(scaled_grads, tx.init(params))
  assert metrics["amax"] == 512.0
  expected = math.log2(F16_MAX / limited_by)
  np.testing.assert_allclose(float(metrics["headroom"]), expected, rtol=1e-5)
