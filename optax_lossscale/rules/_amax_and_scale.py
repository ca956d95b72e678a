"""The largest S that fits an amax, and other helpers for rules that use amax.

Exponents are read from the bits of a float32. XLA's log2 and exp2 are off by an
ulp for some powers of two, and S would then be wrong by a factor of two.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import formats

# float32 has this many bits after the binary point.
_FRACTION_BITS = 23

# S moves by this many bits at a time until an amax shows where S belongs. 16
# bits are at most about half of the exponent range of float16 and wider dtypes:
# if all gradients are 0, a leap up does not make them overflow, and if they
# overflow, a leap down does not make them all 0.
LEAP = 16

# No leap goes above 2**32. If all gradients are 0, the cause may be unrelated
# to S, and every unnecessary leap costs a step later.
_HIGHEST_LEAP = 32


def exponent(x: jax.Array) -> jax.Array:
  """Returns floor(log2(x)), int32[...]."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return (bits >> _FRACTION_BITS) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
  """Returns 2**exponent, float32[...], limited to normal numbers."""
  biased = jnp.clip(exponent, -126, 127) + 127
  return lax.bitcast_convert_type(biased << _FRACTION_BITS, jnp.float32)


def leap_up(exponent: jax.Array) -> jax.Array:
  """Returns the exponent of the next S after all gradients were 0, int32[]."""
  return jnp.maximum(exponent, jnp.minimum(exponent + LEAP, _HIGHEST_LEAP))


def read_step(
  state: object, overflow: ArrayLike, amax: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the overflow, the amax, and whether amax shows where S belongs."""
  loss_scale = arguments.scale_of(state)
  if amax is None:
    raise ValueError(
      "`amax` must be passed to update, got None: this rule moves S by it. "
      "`loss_scaling` passes it."
    )
  overflow = arguments.as_flag(overflow, loss_scale)
  if not (arguments.is_value(amax) and np.shape(amax) == np.shape(loss_scale)):
    raise TypeError(
      f"`amax` must be a real scalar, got {arguments.shown(amax)}."
    )
  amax = jnp.asarray(arguments.as_finite("amax", amax), jnp.float32)
  # 0, inf and NaN do not show it, nor do subnormals, which a backend may flush
  # to 0.
  is_finite = jnp.isfinite(amax)
  tells = is_finite & (amax >= arguments.SMALLEST_SCALE)
  return overflow | ~is_finite, amax, tells


def fitting_exponent(
  amax: jax.Array, loss_scale: jax.Array, dtype: DTypeLike
) -> jax.Array:
  """Returns the largest e such that amax fits into `dtype` with S = 2**e."""
  # S is rounded down to a power of two, so the result may be 1 too small.
  mantissa, limit_exponent = math.frexp(formats.largest(dtype))
  limit_fraction = int((2 * mantissa - 1) * 2**_FRACTION_BITS)
  bits = lax.bitcast_convert_type(amax, jnp.int32)
  fraction = bits & (2**_FRACTION_BITS - 1)
  doublings = limit_exponent - 1 - exponent(amax)
  # The last doubling fits unless amax's fraction is above the limit's.
  is_above = (fraction > limit_fraction).astype(jnp.int32)
  return exponent(loss_scale) + doublings - is_above


def check_bits(name: str, value: object) -> int:
  """Returns `value` as an int from 0 to 126."""
  bits = arguments.check_integer(name, value, unit="bits")
  if not 0 <= bits <= 126:
    raise ValueError(
      f"`{name}` must be between 0 and 126 bits, got {arguments.shown(value)}."
    )
  return bits


def at_floor(state: object, min_scale: float, overflow: ArrayLike) -> jax.Array:
  """Returns bool[], True on an overflow with S at or below its floor."""
  loss_scale = arguments.scale_of(state)
  return arguments.as_flag(overflow, loss_scale) & (
    loss_scale <= np.float32(min_scale)
  )
