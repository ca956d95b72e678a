"""Where an array has reached the limit of what its dtype can hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _amax


def limit(own: Any, dtype: Any) -> float:
  """Returns the largest finite value that an array may show.

  Args:
    own: the dtype of the array.
    dtype: the computation's dtype, or None for the array's own.
  """
  # An array narrower than the computation overflows at its own limit.
  dtypes = [own] if dtype is None else [own, dtype]
  return min(float(jnp.finfo(dtype).max) for dtype in dtypes)


def reached(x: Any, limit: float, *, inclusive: bool) -> Any:
  """Returns bool[...], where |x| is above a limit or x is NaN.

  By the bits, so that a compiler that computes in a wider dtype has to round to
  this one first.

  Args:
    x: a floating or complex array; of the latter the parts count.
    limit: the largest value that passes.
    inclusive: whether the limit itself has reached it.
  """
  x = jnp.asarray(x)
  if jnp.iscomplexobj(x):
    parts = (reached(y, limit, inclusive=inclusive) for y in (x.real, x.imag))
    return jnp.logical_or(*parts)
  carrier = np.dtype(_amax.carrier(x.dtype))
  first = np.array(limit, carrier)
  bits = first.view(f"uint{8 * carrier.itemsize}")
  # The dtype may not hold the limit, and rounding may have gone either way.
  # NumPy would round the limit again to compare the two.
  nearest = float(first)
  if nearest < limit or (nearest == limit and not inclusive):
    bits = bits + bits.dtype.type(1)
  above: jax.Array = _amax.magnitude_bits(x.astype(carrier)) >= bits
  return above
