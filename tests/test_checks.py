"""NaN, inf and saturation are seen in every leaf, at every place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import _checks

WITH_INF = [
  "float16",
  "bfloat16",
  "float32",
  "float64",
  "complex64",
  "complex128",
  "float8_e5m2",
]
WITH_NAN = [*WITH_INF, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"]
SIZES = (3, 5_000, 200_000)


@functools.cache
def compiled_examine(dtype, size, check):
  """Returns a jitted examination of ones with one other element."""

  @jax.jit
  def examine(index, value):
    leaf = jnp.where(jnp.arange(size) == index, value, jnp.ones((), dtype))
    # The examination is to read the leaf from memory, as it reads a gradient.
    leaf = jax.lax.optimization_barrier(leaf)
    return _checks.examine(check, {"clean": jnp.ones(7), "leaf": leaf})

  return examine


def findings_at_every_place(dtype, size, value, check):
  """Returns what the check finds with `value` first, middle and last."""
  examine = compiled_examine(dtype, size, check)
  value = jnp.asarray(value).astype(dtype)
  return [examine(index, value) for index in (0, size // 2, size - 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", WITH_NAN)
def test_guarantee_5_every_nan_is_seen(dtype, size):
  with jax.enable_x64(True):
    values = [np.nan]
    if dtype.startswith("complex"):
      values = [complex(np.nan, 1.0), complex(1.0, np.nan)]
    for value in values:
      for found in findings_at_every_place(dtype, size, value, ols.nonfinite()):
        assert found.overflow
        assert jnp.isnan(found.amax)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", WITH_INF)
def test_guarantee_5_every_inf_is_seen(dtype, size):
  with jax.enable_x64(True):
    values = [np.inf, -np.inf]
    if dtype.startswith("complex"):
      values = [complex(np.inf, 1.0), complex(1.0, -np.inf)]
    for value in values:
      for found in findings_at_every_place(dtype, size, value, ols.nonfinite()):
        assert found.overflow
        assert found.amax == jnp.inf


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", WITH_NAN)
def test_guarantee_5_every_saturated_value_is_seen(dtype, size):
  with jax.enable_x64(True):
    largest = float(jnp.finfo(dtype).max)
    for value in (largest, -largest):
      for found in findings_at_every_place(dtype, size, value, ols.saturated()):
        assert found.overflow
        assert not jnp.isnan(found.amax)
      for found in findings_at_every_place(dtype, size, value, ols.nonfinite()):
        assert not found.overflow


def test_inf_and_minus_inf_together_are_not_taken_for_nan():
  leaf = jnp.array([jnp.inf, 1.0, -jnp.inf])
  found = _checks.examine(ols.nonfinite(), leaf)
  assert found.overflow
  assert found.amax == jnp.inf


def test_large_finite_values_are_no_overflow():
  leaf = jnp.full(5_000, jnp.finfo(jnp.float32).max)
  found = _checks.examine(ols.nonfinite(), leaf)
  assert not found.overflow
  assert found.amax == jnp.finfo(jnp.float32).max


@pytest.mark.parametrize("dtype", WITH_NAN)
def test_amax_is_the_largest_magnitude(dtype):
  values = np.array([0.25, -3.5, 1.0])
  with jax.enable_x64(True):
    leaf = jnp.asarray(values).astype(dtype)
    assert _checks.examine(ols.nonfinite(), leaf).amax == 3.5


def test_amax_of_a_complex_leaf_is_the_largest_part():
  leaf = jnp.array([3.0 + 4.0j, -1.0 - 4.5j])
  assert _checks.examine(ols.nonfinite(), leaf).amax == 4.5


def test_amax_keeps_a_subnormal():
  leaf = jnp.asarray(2.0**-24, jnp.float16)
  assert _checks.examine(ols.nonfinite(), leaf).amax == 2.0**-24


def test_amax_of_a_float64_leaf_is_inf_only_if_it_was():
  with jax.enable_x64(True):
    found = _checks.examine(ols.nonfinite(), jnp.asarray([1e300]))
    assert not found.overflow
    assert found.amax == jnp.finfo(jnp.float32).max
    assert found.amax.dtype == jnp.float32


def test_amax_is_taken_over_leaves_of_several_dtypes():
  tree = {
    "half": jnp.asarray([60_000.0], jnp.float16),
    "single": jnp.asarray([70_000.0], jnp.float32),
    "integer": jnp.asarray([2**30]),
  }
  found = _checks.examine(ols.nonfinite(), tree)
  assert not found.overflow
  assert found.amax == 70_000.0


@pytest.mark.parametrize(
  ("check", "value", "expected"),
  [
    (ols.nonfinite(jnp.float16), 65504.0, False),
    (ols.nonfinite(jnp.float16), 65505.0, True),
    (ols.saturated(jnp.float16), 65503.0, False),
    (ols.saturated(jnp.float16), 65504.0, True),
    (ols.saturated(jnp.float16), -65504.0, True),
    (ols.saturated("float16"), jnp.nan, True),
    (ols.nonfinite(jnp.float64), jnp.inf, True),
    (ols.saturated(jnp.float8_e4m3fn), 448.0, True),
  ],
)
def test_the_dtype_is_that_of_the_computation(check, value, expected):
  found = _checks.examine(check, jnp.array([1.0, value], jnp.float32))
  assert found.overflow == expected


def test_empty_trees_and_leaves_have_no_overflow():
  for tree in ({}, None, jnp.zeros((0, 3)), {"a": None}):
    found = _checks.examine(ols.saturated(), tree)
    assert not found.overflow
    assert found.amax == 0


@pytest.mark.usefixtures("strict_promotion")
def test_checks_promote_nothing_implicitly():
  tree = [jnp.ones(3, d) for d in ("float16", "bfloat16", "float32", "int8")]
  assert not jax.jit(_checks.examine, static_argnums=0)(
    ols.saturated("float16"), tree
  ).overflow


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 65504.0])
@pytest.mark.parametrize("device", [0, 3, 7])
def test_devices_agree_on_what_one_of_them_found(value, device):
  check = ols.saturated(jnp.float16)

  def examine(leaf):
    return _checks.agree(_checks.examine(check, leaf), "data")

  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  mapped = jax.jit(
    jax.shard_map(
      examine,
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=jax.P(),
    )
  )
  leaf = jnp.ones((8, 5_000), jnp.float16)
  assert not mapped(leaf).overflow
  found = mapped(leaf.at[device, 17].set(value))
  assert found.overflow
  assert np.array_equal(found.amax, jnp.float32(value), equal_nan=True)


@pytest.mark.parametrize(
  ("dtype", "said"),
  [(jnp.int32, "int32"), ("half precision", "half"), ("f16", "float128")],
)
@pytest.mark.parametrize("check", [ols.nonfinite, ols.saturated])
def test_a_check_refuses_what_is_no_floating_dtype(check, dtype, said):
  with pytest.raises(TypeError, match=f"`dtype` must be a floating.*{said}"):
    check(dtype)


def test_checks_are_frozen_equal_and_hashable():
  assert ols.saturated(jnp.float16) == ols.saturated("float16")
  assert hash(ols.saturated(jnp.float16)) == hash(ols.saturated("float16"))
  assert ols.saturated(jnp.float16) != ols.nonfinite(jnp.float16)
  with pytest.raises(AttributeError):
    ols.nonfinite().dtype = jnp.float16
