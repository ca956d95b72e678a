"""A rounding that XLA keeps, against NumPy's casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._base import bits as _bits
from tests import excess_precision
from tests import support

SIXTEEN_BITS = ("float16", "bfloat16")
# All that have a sign. The last one has neither inf nor NaN.
NARROWER = (*support.SIGNED_FLOAT8, "float4_e2m1fn")


def around(name, wide):
  """Returns every number of a dtype, every midpoint, and their neighbors."""
  bits = jnp.finfo(name).bits
  every = np.arange(2**bits, dtype=f"uint{max(bits, 8)}").view(jnp.dtype(name))
  with np.errstate(invalid="ignore"):  # Some NaN are signalling ones.
    every = np.unique(every.astype(np.float64))
  every = every[np.isfinite(every)]
  # From the midpoint of this number and the largest one, all are too large.
  beyond = 2 * every[-1] - every[-2]
  every = np.array([-beyond, *every, beyond])
  ends = [np.inf, np.nan, 0.0, 1e-30, 3e38]
  x = np.concatenate(
    [every, (every[1:] + every[:-1]) / 2, ends, np.negative(ends)]
  )
  with np.errstate(over="ignore"):
    x = x.astype(wide)
    return np.concatenate(
      [x, *(np.nextafter(x, wide(y)) for y in (9e99, -9e99))]
    )


def cast(x, name):
  with np.errstate(all="ignore"):
    return x.astype(jnp.dtype(name))


@pytest.mark.parametrize("name", [*SIXTEEN_BITS, *NARROWER])
def test_it_is_the_cast(name):
  x = around(name, np.float32)
  found = np.asarray(jax.jit(lambda x: _bits.rounded(x, name))(x))
  assert found.dtype == np.float32
  expected = np.float32(cast(x, name))
  is_kept = np.isnan(x) | (x == 0)
  np.testing.assert_array_equal(found[~is_kept], expected[~is_kept])
  support.assert_same_bits(np.isnan(found[is_kept]), np.isnan(x[is_kept]))
  np.testing.assert_array_equal(
    np.signbit(found[x == 0]), np.signbit(x[x == 0])
  )
  # Casting what is rounded already gives the same bits, -0.0 included.
  is_nan = np.isnan(expected)
  support.assert_same_bits(cast(found, name)[~is_nan], cast(x, name)[~is_nan])


def test_a_float64_is_rounded_once():
  x = around("float16", np.float64)
  with jax.enable_x64(True):
    found = np.asarray(jax.jit(lambda x: _bits.rounded(x, "float16"))(x))
  assert found.dtype == np.float64
  np.testing.assert_array_equal(found, np.float64(cast(x, "float16")))
  np.testing.assert_array_equal(np.signbit(found), np.signbit(x))


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn"])
def test_numbers_that_fit_need_no_inf_or_nan_on_the_way(name):
  x = jnp.float32([0.0, 1.0, 1e-9, 2.0**-9])
  with jax.debug_nans(True), jax.debug_infs(True):
    found = _bits.rounded(x, name)
  np.testing.assert_array_equal(found, np.float32(cast(np.array(x), name)))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_the_casts_after_it_may_be_removed(name):
  x = around(name, np.float32)[::7]

  def round_and_cast(x):
    # The input may be a narrowing that was removed, too.
    wide = x.astype(name).astype(jnp.float32)
    return _bits.rounded(wide, name).astype(name).astype(jnp.float32)

  found = jax.jit(excess_precision.unrounded(round_and_cast))(x)
  is_number = ~np.isnan(x)
  expected = np.float32(cast(x, name))
  np.testing.assert_array_equal(found[is_number], expected[is_number])


def test_numbers_of_a_dtype_without_a_sign_or_of_a_wider_one_are_kept():
  x = np.arange(256, dtype=np.uint8).view(jnp.float8_e8m0fnu)
  found = jax.jit(_bits.carried)(x)
  np.testing.assert_array_equal(found, np.float32(x))
  with jax.enable_x64(True):
    assert _bits.held(jnp.float64(0.1)) == 0.1


@pytest.mark.parametrize("value", [1e-7, 1e-5, 1.0, 70_000.0])
def test_the_derivative_is_that_of_a_cast(value):
  for derivative in (jax.grad, jax.jacfwd):
    found = derivative(lambda x: _bits.rounded(x, jnp.float16))(value)
    assert found == 1
