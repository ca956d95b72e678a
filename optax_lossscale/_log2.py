"""The binary logarithm, exact for powers of two."""

import jax
import jax.numpy as jnp


def log2(x: jax.Array) -> jax.Array:
  """Returns the logarithm; an integer for a power of two, as S mostly is.

  JAX's own is 1e-6 off for some of them.

  Args:
    x: float32[...], not negative, not subnormal; 0, inf and NaN may be there.
  """
  mantissa, exponent = jnp.frexp(x)
  # The mantissa of a power of two is 0.5, of 0 and inf it is these.
  return exponent.astype(x.dtype) + jnp.log2(mantissa)
