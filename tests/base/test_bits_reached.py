"""Where an array has reached a limit, against NumPy's comparisons."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
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
  "float32": jnp.float32,
  "float64": jnp.float64,
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


def around(limit, dtype):
  """Returns what is nearest to a limit in a dtype, and the ends of it."""
  nearest = np.asarray(limit, dtype)
  ends = [0, np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max]
  with np.errstate(over="ignore"):
    steps = [np.nextafter(nearest, dtype.type(x)) for x in (0, np.inf)]
  return np.array([nearest, *steps, *ends, np.inf, np.nan], dtype)


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data(), inclusive=st.booleans())
@settings(max_examples=25)
def test_every_number_is_held_against_any_limit(name, data, inclusive):
  dtype = np.dtype(DTYPES[name])
  # Most are numbers that the dtype cannot hold, or the largest of another.
  others = [y for y in map(largest, DTYPES.values()) if y <= largest(dtype)]
  limits = st.sampled_from(others) | st.floats(2.0**-9, largest(dtype))
  limit = data.draw(limits)
  x = every(dtype) if dtype.itemsize < 4 else around(limit, dtype)
  with jax.enable_x64(dtype.itemsize == 8):
    for y in (x, -x):
      found = _bits.reached(y, limit, inclusive=inclusive)
      np.testing.assert_array_equal(found, expected(y, limit, inclusive))


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
