"""Roundings of float32 to 16 bits that keep what would be lost, or its mean.

Everything is computed in float32 and in integers, on numbers that are those of
the narrow dtype. So no compiler can leave a rounding out.
"""

from typing import NamedTuple
from typing import TypeGuard

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves

_HALF = 1 << 15
# The bits of float32.
_LARGEST_BFLOAT16 = 0x7F7F_0000


class _Split(NamedTuple):
  """The bits of float32 numbers: those of |x|, and whether x is negative."""

  magnitude: jax.Array
  is_negative: jax.Array


def _split(x: jax.Array) -> _Split:
  whole = lax.bitcast_convert_type(x, jnp.int32)
  return _Split(whole & 0x7FFFFFFF, whole < 0)


def _join(magnitude: jax.Array, is_negative: jax.Array) -> jax.Array:
  sign = jnp.where(is_negative, jnp.int32(-(2**31)), 0)
  return lax.bitcast_convert_type(magnitude | sign, jnp.float32)


def _ulp(x: jax.Array) -> jax.Array:
  """Returns the distance from a float16, held in float32, to the next one."""
  exponent = jnp.maximum(_split(x).magnitude >> 23, 127 - 14)
  return lax.bitcast_convert_type((exponent - 10) << 23, jnp.float32)


def is_narrow(x: object, name: str) -> TypeGuard[jax.Array]:
  """Returns whether a parameter is in 16 bits; raises if it is in 8."""
  if not leaves.is_real(x):
    return False
  if x.dtype.itemsize < 2:
    raise ValueError(
      f"the parameters of `{name}` must be in float16, bfloat16 or wider, got "
      f"{x.dtype}: such numbers are too far apart to be trained. Keep the "
      "parameters in 16 bits, and cast them to 8 in the products."
    )
  return x.dtype.itemsize == 2


def seen(param: jax.Array) -> jax.Array:
  """Returns a parameter in float32, as it is stored."""
  # It may have been cast in this program, and XLA might use what was cast.
  return bits.rounded(param.astype(jnp.float32), param.dtype)


def largest_master(dtype: DTypeLike) -> float:
  """Returns the largest float32 that a parameter and a remainder can hold."""
  if dtype == jnp.bfloat16:
    return float(np.uint32(0x7F7F7FFF).view(np.float32))
  return float(np.nextafter(np.float32(65520), np.float32(0)))


def nearest(master: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns the parameter nearest to a master, in float32."""
  # Halves are rounded away from zero. If they were rounded to even, a parameter
  # would have 2**16 + 1 masters, one more than a remainder can count.
  if dtype == jnp.bfloat16:
    magnitude, is_negative = _split(master)
    rounded = (magnitude + _HALF) & ~0xFFFF
    # Adding to the bits of a NaN may overflow.
    return jnp.where(jnp.isnan(master), jnp.nan, _join(rounded, is_negative))
  found = bits.rounded(master, dtype)
  step = jnp.where(jnp.signbit(master), -_ulp(found), _ulp(found))
  return jnp.where(master - found == step / 2, found + step, found)


def remainder(
  master: jax.Array, param: jax.Array, dtype: DTypeLike
) -> jax.Array:
  """Returns int16, the part of a master that its parameter does not hold."""
  # It counts units of 2**-16 of the distance to the next parameter. The master
  # and the parameter are in float32; `dtype` is the parameter's own.
  at, is_negative = _split(param)
  if dtype == jnp.bfloat16:
    magnitude, sign = _split(master)
    # Only small ones are within reach across zero; no difference may wrap.
    across = -jnp.minimum(magnitude, 2 * _HALF)
    count = jnp.where(sign == is_negative, magnitude, across) - at
  else:
    # float32 has fewer bits than a remainder, and must not round up to a tie.
    # Below a power of two the ties are half as far away.
    size, step = jnp.abs(param), _ulp(param)
    tie = _split(size + step / 2).magnitude
    most = _join(tie - 1, jnp.full((), False))
    is_power = (_split(param).magnitude & 0x7FFFFF == 0) & (size > 2.0**-14)
    least = size - step / jnp.where(is_power, 4, 2)
    away = jnp.where(is_negative, -master, master)
    away = jnp.clip(away, least, most) - size
    units = jnp.where(jnp.isfinite(away), away / step * 2**16, 0)
    count = jnp.clip(jnp.round(units), -_HALF, _HALF).astype(jnp.int32)
  # 16 bits may not reach the master.
  return jnp.clip(count, -_HALF, _HALF - 1).astype(jnp.int16)


def master(
  param: jax.Array, remainder: jax.Array, dtype: DTypeLike
) -> jax.Array:
  """Returns float32, what a parameter (in float32) and its remainder hold."""
  at, is_negative = _split(param)
  if dtype == jnp.bfloat16:
    count = at + remainder.astype(jnp.int32)
    return _join(jnp.abs(count), is_negative ^ (count < 0))
  units = remainder.astype(jnp.float32)
  magnitude = jnp.abs(param) + units * _ulp(param) / 2**16
  return jnp.where(is_negative, -magnitude, magnitude)


def neighbors(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Returns the largest number of a dtype that is at most x, and the next."""
  # x is in float32, within the range of the dtype, which is float16 or
  # bfloat16. Both results are x itself if that is a number of the dtype, or is
  # not finite.
  magnitude, is_negative = _split(x)
  if dtype == jnp.bfloat16:
    inner = _join(magnitude & ~0xFFFF, is_negative)
    outer = _join((magnitude + 0xFFFF) & ~0xFFFF, is_negative)
  else:
    step = jnp.where(is_negative, -_ulp(x), _ulp(x))
    inner, outer = jnp.floor(x / step) * step, jnp.ceil(x / step) * step
  low, high = jnp.minimum(inner, outer), jnp.maximum(inner, outer)
  is_usual = jnp.isfinite(x)
  return jnp.where(is_usual, low, x), jnp.where(is_usual, high, x)


def stochastic(x: jax.Array, chance: jax.Array) -> jax.Array:
  """Returns one of the neighbors of x in bfloat16, so that their mean is x."""
  # x and `chance` are in float32 and of one shape, and the chances are spread
  # evenly over [0, 1).
  #
  # In integers, since a CPU makes 0 of the smallest numbers.
  magnitude, is_negative = _split(x)
  added = (chance * 2.0**16).astype(jnp.int32)
  # A finite x beyond the largest bfloat16 becomes that.
  rounded = jnp.minimum((magnitude + added) & ~0xFFFF, _LARGEST_BFLOAT16)
  return jnp.where(jnp.isfinite(x), _join(rounded, is_negative), x)


def stochastic_update(
  target: jax.Array, param: jax.Array, dtype: DTypeLike, chance: jax.Array
) -> jax.Array:
  """Returns an update to a number near a target, and in the mean to it."""
  # The arrays are in float32 and of one shape, and the chances are spread
  # evenly over [0, 1). `dtype` is the parameter's own, float16 or bfloat16.
  #
  # A sum is rounded to the nearest number, so the update must be such that
  # rounding changes nothing. There is one for both neighbors of a target within
  # a factor of two of the parameter. Farther away the sum may reach only each
  # second number or fewer; of these it takes two with the target in between.
  largest = formats.largest(dtype)
  goal = bits.within(target, largest)
  low, high = neighbors(goal, dtype)
  # The sum is at most `low`, as each is rounded down that is not exact.
  ways = (bits.within(x - param, largest, x, param) for x in (low, high))
  (down, _), (_, up) = (neighbors(x, dtype) for x in ways)
  lower, upper = (bits.rounded(param + x, dtype) for x in (down, up))
  is_up = chance * (upper - lower) < goal - lower
  # At the largest value one of the sums may be inf.
  is_up = (is_up | jnp.isinf(lower)) & ~jnp.isinf(upper)
  update = jnp.where(is_up, up, down)
  # An infinite parameter that stays where it is must not become NaN.
  beyond = jnp.where(target == param, 0, target - param)
  return jnp.where(jnp.isfinite(target), update, beyond)


def chances(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
  """Returns evenly spread float32 in [0, 1), multiples of 2**-24."""
  # They are a hash of the key and of each element's place. So they are computed
  # where they are used, and are the same however an array is sharded.
  place = jnp.zeros(shape, jnp.uint32)
  for axis, size in enumerate(shape):
    place = place * jnp.uint32(size) + lax.broadcasted_iota(
      jnp.uint32, shape, axis
    )
  return (_mixed(_mixed(place) ^ key) >> 8).astype(jnp.float32) * 2.0**-24


def key(*numbers: jax.typing.ArrayLike) -> jax.Array:
  """Returns uint32[], a hash of integers in their order."""
  found = jnp.uint32(0)
  for x in numbers:
    found = _mixed(found + jnp.asarray(x).astype(jnp.uint32))
  return found


def _mixed(x: jax.Array) -> jax.Array:
  """Returns a bijection of uint32 in which every bit depends on all bits."""
  # The constants are those of "lowbias32": Wellons, "Prospecting for hash
  # functions", 2018.
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
