"""Where an array has reached a limit, against NumPy's comparisons."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._base import bits as _bits

DTYPES = {
  "float16": jnp.float16,
  "bfloat16": jnp.bfloat16,
  "float8_e4m3fn": jnp.float8_e4m3fn,
  "float8_e5m2": jnp.float8_e5m2,
  "float8_e4m3fnuz": jnp.float8_e4m3fnuz,
}


def every(dtype):
  """Returns every number of a dtype of 8 or 16 bits."""
  bits = 8 * np.dtype(dtype).itemsize
  return np.arange(2**bits, dtype=f"uint{bits}").view(np.dtype(dtype))


def largest(dtype):
  return float(jnp.finfo(dtype).max)


def expected(x, limit, inclusive):
  with np.errstate(invalid="ignore"):  # Some NaN are signalling ones.
    x = np.abs(np.asarray(x).astype(np.float64))
  return ~(x < limit) if inclusive else ~(x <= limit)


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("name", DTYPES)
def test_every_number_is_held_against_limits_of_any_dtype(name, inclusive):
  x = every(DTYPES[name])
  limits = [largest(dtype) for dtype in DTYPES.values()]
  # A limit that the dtype cannot hold, on either side of what it rounds to.
  limits = [y for y in limits if y <= largest(x.dtype)] + [100.3, 0.3]
  for limit in limits:
    found = _bits.reached(jnp.asarray(x), limit, inclusive=inclusive)
    np.testing.assert_array_equal(found, expected(x, limit, inclusive))


NEAR = [0.0, 1e-45, 65503.0, 65504.0, 65505.0, 3.4e38, 3.4028235e38]


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("limit", [65504.0, largest(jnp.float32)])
def test_a_float32_is_held_against_limits_of_narrower_dtypes(limit, inclusive):
  x = np.float32([*NEAR, np.inf, np.nan])
  x = np.concatenate([x, -x])
  found = _bits.reached(x, limit, inclusive=inclusive)
  np.testing.assert_array_equal(found, expected(x, limit, inclusive))


@pytest.mark.parametrize("inclusive", [True, False])
def test_a_float64_is_held_against_limits_of_narrower_dtypes(inclusive):
  x = np.float64([*NEAR, 1e300, largest(jnp.float64), np.inf, np.nan])
  with jax.enable_x64(True):
    for dtype in (jnp.float16, jnp.float32, jnp.float64):
      found = _bits.reached(x, largest(dtype), inclusive=inclusive)
      np.testing.assert_array_equal(
        found, expected(x, largest(dtype), inclusive)
      )


def test_either_part_of_a_complex_number_reaches_the_limit():
  x = jnp.complex64([1 + 1j, np.inf, complex(0, -np.inf), 65504j])
  found = _bits.reached(x, 65504.0, inclusive=True)
  np.testing.assert_array_equal(found, [False, True, True, True])


def test_a_compiler_has_to_round_before_it_is_looked_at():
  # 65519 is rounded to 65504 and 65520 to inf, whatever holds it in between.
  @jax.jit
  def look(x):
    return _bits.reached(x.astype(jnp.float16), 65504.0, inclusive=False)

  np.testing.assert_array_equal(look(jnp.float32([65519, 65520])), [0, 1])


@pytest.mark.parametrize(
  ("own", "dtype", "expected"),
  [
    (jnp.float32, jnp.float16, 65504.0),
    (jnp.float16, jnp.float32, 65504.0),
    (jnp.float16, None, 65504.0),
    (jnp.float8_e5m2, jnp.float16, 57344.0),
  ],
)
def test_the_narrower_dtype_sets_the_limit(own, dtype, expected):
  assert _bits.limit(own, dtype) == expected
