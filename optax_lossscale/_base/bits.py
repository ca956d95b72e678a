"""The largest magnitude in many arrays: one read of them, NaN and inf included.

It is taken over the bits of |x|, read as integers. Bit patterns of one sign
order as the values do, inf above every finite number and NaN above inf, so one
maximum carries the largest value, inf and NaN alike. A maximum over floats
would not: XLA's CPU kernels and the collectives drop NaN.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# How many elements XLA's CPU backend reduces in one vectorized loop, at the
# speed of memory, and how many such reductions side by side fill its vectors. A
# longer reduction over integers first writes all of them to memory.
_FOLD = 32
_LANES = 16

# Below this many elements a copy costs less than another kernel.
_SMALL = 4096

# Below this many elements, arrays of one size share a kernel, up to so many: it
# compiles in the time of one. Longer arrays it would read more slowly.
_MEDIUM = 65_536
_TOGETHER = 8


def carrier(dtype: Any) -> Any:
  """Returns the dtype whose bits stand for a real dtype."""
  # The 8-bit formats differ in where they keep NaN; float32 holds them all.
  return jnp.float32 if jnp.finfo(dtype).bits < 16 else dtype


def amax(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest |x|, a scalar of the carrier; NaN if any x is NaN."""
  dtype = carrier(arrays[0].dtype)
  arrays = [x.astype(dtype) for x in arrays]
  # What is fastest on a CPU, on arrays that may be reshaped.
  can_fold = jax.default_backend() == "cpu" and not any(map(_may_move, arrays))
  largest = (
    _largest_by_folding(arrays) if can_fold else _largest_by_leaf(arrays)
  )
  return lax.bitcast_convert_type(largest, dtype)


def parts(x: jax.Array) -> list[jax.Array]:
  """Returns a real array as it is, the two parts of a complex one."""
  return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def magnitude_bits(x: jax.Array) -> jax.Array:
  """Returns |x| as unsigned integers that order as the values do."""
  unsigned = _unsigned(x.dtype)
  all_but_sign = jnp.array(jnp.iinfo(unsigned).max >> 1, unsigned)
  return lax.bitcast_convert_type(x, unsigned) & all_but_sign


def _unsigned(dtype: Any) -> np.dtype[Any]:
  return np.dtype(f"uint{jnp.finfo(dtype).bits}")


def _may_move(x: jax.Array) -> bool:
  """Returns whether another shape could move an array between devices.

  So it is on a mesh, also one of devices that this machine does not have. Where
  a mesh has one device, only its type may forbid another shape.
  """
  mesh = jax.typeof(x).sharding.mesh
  is_typed = jax.sharding.AxisType.Explicit in mesh.axis_types
  return not mesh.empty and (mesh.size > 1 or is_typed)


def _largest_by_leaf(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest bits by one reduction an array, in the shape it has.

  Another shape could move a sharded array between devices. Where arrays are
  sharded, XLA joins the reductions over devices of one dtype into one, so all
  that fit into 32 bits are reduced in 32.
  """
  bits = [magnitude_bits(x) for x in arrays]
  unsigned = bits[0].dtype
  wide = unsigned if unsigned.itemsize > 4 else jnp.uint32
  largest = [jnp.max(x.astype(wide), initial=0) for x in bits]
  # Without the barrier XLA makes n maxima of the one over all of them, and
  # repeats these wherever the result is used: n squared instructions.
  return jnp.max(lax.optimization_barrier(jnp.stack(largest))).astype(unsigned)


def _largest_by_folding(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest bits by reductions that the CPU backend vectorizes."""
  small: list[jax.Array] = []
  maxima: list[jax.Array] = []
  # One of the maxima so far. It is let into the next array, so that this waits
  # for the one before it: XLA would keep the first maxima of all at once.
  so_far = jnp.zeros((), _unsigned(arrays[0].dtype))
  for together in _groups([x.reshape(-1) for x in arrays]):
    if together[0].size < _SMALL:
      small += together
      continue
    blocks, rests = zip(*map(_blocks, together), strict=True)
    small += rests
    largest = functools.reduce(jnp.maximum, map(magnitude_bits, blocks), so_far)
    folded, rest = _blocks(_fold(largest))
    maxima.append(jnp.concatenate([_fold(folded), rest]))
    so_far = lax.index_in_dim(maxima[-1], 0, keepdims=False)
  # Behind a barrier, or XLA would read each of them by a kernel of its own.
  folded, rest = _blocks(lax.optimization_barrier(jnp.concatenate(small)))
  if folded.size:
    maxima.append(_fold(magnitude_bits(folded)))
  maxima.append(magnitude_bits(rest))
  return jnp.max(lax.optimization_barrier(jnp.concatenate(maxima)), initial=0)


def _groups(arrays: Sequence[jax.Array]) -> Iterator[Sequence[jax.Array]]:
  """Yields the arrays that share a kernel; they have one size."""
  by_size: dict[int, list[jax.Array]] = {}
  for x in arrays:
    by_size.setdefault(x.size, []).append(x)
  for size, alike in by_size.items():
    count = _TOGETHER if size < _MEDIUM else 1
    for i in range(0, len(alike), count):
      yield alike[i : i + count]


def _blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the part of `x` that can be folded, and the rest."""
  whole = x.size - x.size % (_FOLD * _LANES)
  return x[:whole], x[whole:]


def _fold(bits: jax.Array) -> jax.Array:
  """Returns maxima over all of `bits`, 1/32 as many."""
  largest = jnp.max(bits.reshape(-1, _FOLD, _LANES), axis=1)
  # Without a barrier XLA takes the flat shape into the loop, which is then not
  # vectorized and four times slower.
  separate: jax.Array = lax.optimization_barrier(largest)
  return separate.reshape(-1)


def limit(own: Any, dtype: Any) -> float:
  """Returns the largest finite value that an array may show."""
  # An array narrower than the computation overflows at its own limit.
  dtypes = [own] if dtype is None else [own, dtype]
  return min(float(jnp.finfo(dtype).max) for dtype in dtypes)


def reached(x: Any, limit: float, *, inclusive: bool) -> Any:
  """Returns bool[...], where |x| is above a limit or x is NaN.

  By the bits, so that a compiler that computes in a wider dtype has to round to
  this one first.
  """
  x = jnp.asarray(x)
  if jnp.iscomplexobj(x):
    parts = (reached(y, limit, inclusive=inclusive) for y in (x.real, x.imag))
    return jnp.logical_or(*parts)
  dtype = np.dtype(carrier(x.dtype))
  first = np.array(limit, dtype)
  bits = first.view(f"uint{8 * dtype.itemsize}")
  # The dtype may not hold the limit, and rounding may have gone either way.
  # NumPy would round the limit again to compare the two.
  nearest = float(first)
  if nearest < limit or (nearest == limit and not inclusive):
    bits = bits + bits.dtype.type(1)
  above: jax.Array = magnitude_bits(x.astype(dtype)) >= bits
  return above


def divide(x: jax.Array, divisor: float) -> jax.Array:
  """Returns x / divisor, rounded once. `x` must not be negative."""
  # XLA turns a division by a constant into a product with its reciprocal. The
  # product rounds differently, and the reciprocal of the largest float32 is
  # subnormal, which a CPU takes for 0. XLA leaves a divisor alone that depends
  # on `x`.
  return x / jnp.where(x > 0, jnp.asarray(divisor, x.dtype), 1)


def log2(x: jax.Array) -> jax.Array:
  """Returns the logarithm; an integer for a power of two, as S mostly is.

  JAX's own is 1e-6 off for some of them.
  """
  mantissa, exponent = jnp.frexp(x)
  # The mantissa of a power of two is 0.5, of 0 and inf it is these.
  return exponent.astype(x.dtype) + jnp.log2(mantissa)


def part_dtype(aval: Any) -> Any:
  """Returns the real dtype of which a value's parts are, None for no float."""
  dtype = getattr(aval, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
    return None
  return np.dtype(jnp.finfo(dtype).dtype)


def has_inf(dtype: Any) -> bool:
  """Returns whether a floating dtype can hold inf."""
  return bool(np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)))
