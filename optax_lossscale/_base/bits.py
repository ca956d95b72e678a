"""The largest magnitude in many arrays, found in one read, with NaN and inf."""

# The maximum is over the bits of |x|, read as integers, which sort like |x|
# does, with NaN above inf. A maximum over floats would drop NaN in XLA's CPU
# kernels and in collectives.

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import formats
from optax_lossscale._base import siblings

# Takes arrays, and returns the largest bits.
_Way = Callable[[Sequence[jax.Array]], jax.Array]

# XLA's CPU backend reduces _FOLD elements in one vectorized loop at the speed
# of memory, and _LANES such reductions side by side fill its vectors. A longer
# reduction over integers would first write all of them to memory.
_FOLD = 32
_LANES = 16

# An array of fewer elements costs less to copy than to read in its own kernel.
_SMALL = 4096

# On a CPU up to _TOGETHER arrays of one size share a kernel, to save compile
# time. A shared kernel is slow for arrays of at least _MEDIUM elements.
_MEDIUM = 65_536
_TOGETHER = 8

# On a GPU XLA puts no more than about 90 arrays into one kernel.
_MANY = 64

# XLA makes two kernels of a reduction of more elements to one number.
_ONE_KERNEL = 2**14
# A GPU reduces at least this many rows at once, none of them longer.
_ROWS = 512
_LONGEST_ROW = 2**13
# Of shorter parts the results would need more than 1/64 of an array's memory.
_SHORTEST_PART = 64


def carried(x: jax.Array) -> jax.Array:
  """Returns a real array in its carrier, rounded to its own dtype."""
  wide = formats.carrier(x.dtype)
  # `rounded` would keep the sign and the 0 that float8_e8m0fnu does not have.
  if wide == x.dtype or x.dtype == jnp.float8_e8m0fnu:
    return x.astype(wide)
  return rounded(x.astype(wide), x.dtype)


def held(x: jax.Array) -> jax.Array:
  """Returns a real array whose rounding to its own dtype XLA keeps."""
  if not formats.is_low(x.dtype):
    return x
  return rounded(x.astype(jnp.float32), x.dtype).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns float32 or float64 numbers, rounded to a narrower dtype."""
  # XLA may remove a cast to `dtype` and back, but it keeps this rounding. A
  # float64 is rounded once, while XLA may cast it via float32. NaN stays NaN
  # and -0.0 stays -0.0, even if `dtype` has neither.
  own, target = jnp.finfo(x.dtype), jnp.finfo(dtype)
  result = x
  if target.nmant < own.nmant:
    # With the exponents of `dtype`, this would round subnormal numbers to 0.
    result = lax.reduce_precision(x, own.nexp, target.nmant)
  smallest, largest = float(target.smallest_normal), float(target.max)
  # Not if the exponents are the same, since a backend may flush a subnormal x.
  if smallest > float(own.smallest_normal):
    # Subnormal numbers are whole multiples of the smallest one.
    step = np.array(target.smallest_subnormal, x.dtype)
    multiple = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN)
    result = jnp.where(jnp.abs(x) < smallest, multiple * step, result)
  if largest < float(own.max):
    # Numbers that are too large become what a cast makes of inf: inf, NaN or
    # the largest value.
    beyond = np.array(np.inf).astype(target.dtype).astype(x.dtype)
    result = jnp.where(result > largest, beyond, result)
    result = jnp.where(result < -largest, -beyond, result)
  return result


@rounded.defjvp
def _rounded_jvp(
  dtype: DTypeLike,
  primals: tuple[jax.Array],
  tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
  # The derivative of a cast.
  return rounded(primals[0], dtype), tangents[0]


def amax(
  arrays: Sequence[jax.Array],
  *,
  in_order: bool = True,
  scale: jax.Array | None = None,
) -> jax.Array:
  """Returns the largest |x| in the dtype of `carrier`; NaN if any x is NaN."""
  # A CPU reads large arrays one after another, and an accelerator some
  # together, which is fastest if all of them exist anyway. Unless `in_order`,
  # each can be read once it is computed, and only about 1/32 of it need be
  # kept. A GPU reads arrays that may be sharded by fewer kernels if there is
  # any `scale`.
  dtype = formats.carrier(arrays[0].dtype)
  arrays = [carried(x) for x in arrays]
  ways = _ways(arrays, in_order, scale)
  if len(ways) == 1:
    largest = ways["default"](arrays)
  else:
    # The platform that JAX compiles for need not be its default one.
    largest = lax.platform_dependent(arrays, **ways)
  return lax.bitcast_convert_type(largest, dtype)


def _ways(
  arrays: Sequence[jax.Array], in_order: bool, scale: jax.Array | None
) -> dict[str, _Way]:
  """Returns the function that reads arrays, for each platform."""
  by_leaf: dict[str, _Way] = {"default": _largest_by_leaf}
  # An exported program may have symbols as sizes. Scalars and arrays without
  # elements are not worth several programs.
  if not all(isinstance(x.size, int) for x in arrays) or not any(
    x.ndim and x.size for x in arrays
  ):
    return by_leaf
  may_move = any(map(_may_move, arrays))
  folding = functools.partial(_largest_by_folding, in_order=in_order)
  ways = by_leaf if may_move else by_leaf | {"cpu": folding}
  if not in_order:
    return ways
  if not may_move and not _may_be_sharded_unseen(arrays):
    on_gpus = dict.fromkeys(siblings.GPUS, _largest_by_row)
    return ways | on_gpus | {"default": _largest_by_group}
  axes: frozenset[Hashable] = frozenset().union(*map(varying_axes, arrays))
  # JAX refuses ways whose results vary along other axes.
  if scale is None or not varying_axes(scale) <= axes:
    return ways
  of_shards = functools.partial(_largest_of_shards, scale=scale)
  return ways | dict.fromkeys(siblings.GPUS, of_shards)


def within(x: jax.Array, largest: float, *terms: jax.Array) -> jax.Array:
  """Returns x, at most `largest` away from 0 unless a term is not finite."""
  # The terms are the operands of x, by default x itself.
  terms = terms or (x,)
  is_finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, terms))
  return jnp.where(is_finite, jnp.clip(x, -largest, largest), x)


def update_to(goal: jax.Array, param: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns the update in a parameter's dtype that comes nearest to a goal."""
  # The goal and the parameter are float32 or float64, within that dtype's
  # range. Within a factor of two of the parameter the sum is the goal. No
  # update is longer than the largest number of the dtype, so the way from one
  # end of the dtype to the other takes two steps. No change is -0.0, since
  # adding 0.0 would turn a -0.0 parameter into 0.0.
  finfo = jnp.finfo(dtype)
  found = within(goal - param, float(finfo.max), goal, param)
  found = rounded(found, dtype)
  arrival = rounded(param + found, dtype)
  # A sum halfway beyond the largest number is inf, so make it one step less.
  step = 2.0 ** (math.frexp(float(finfo.max))[1] - 1 - finfo.nmant)
  too_far = jnp.isfinite(found) & jnp.isfinite(param) & ~jnp.isfinite(arrival)
  found = jnp.where(too_far, found - jnp.sign(found) * step, found)
  return jnp.where((goal == param) | (found == 0), -0.0, found)


def reaching(update: jax.Array, param: jax.Array) -> jax.Array:
  """Narrows a wide update; the new parameter is close to the wide sum."""
  # Near the parameter the new one is the wide sum rounded to the narrow dtype.
  # It is finite if the parameter and the update are.
  wide = rounded(param.astype(update.dtype), param.dtype)
  largest = formats.largest(param.dtype)
  target = within(wide + update, largest, wide, update)
  nearest = rounded(target, param.dtype)
  found = update_to(nearest, wide, param.dtype)
  # Far away no update may lead there. One rounding less then comes nearer.
  arrives = rounded(wide + found, param.dtype) == nearest
  found = jnp.where(arrives, found, update_to(target, wide, param.dtype))
  return jnp.where(update == 0, -0.0, found).astype(param.dtype)


def parts(x: jax.Array) -> list[jax.Array]:
  """Returns [x.real, x.imag] if `x` is complex, else [x]."""
  return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def magnitude_bits(x: jax.Array) -> jax.Array:
  """Returns the bits of |x| as unsigned integers, which sort like |x| does."""
  unsigned = _unsigned(x.dtype)
  all_but_sign = unsigned.type(np.iinfo(unsigned).max >> 1)
  # Tracing `lax` takes a third of the time that `jnp` takes.
  return lax.bitwise_and(lax.bitcast_convert_type(x, unsigned), all_but_sign)


def _unsigned(dtype: DTypeLike) -> np.dtype:
  return np.dtype(f"uint{jnp.finfo(dtype).bits}")


def _may_move(x: jax.Array) -> bool:
  """Returns whether reshaping could move an array between devices."""
  # True on any mesh of several devices, even if this machine lacks them, and on
  # an explicit mesh, whose axis type may forbid reshaping.
  mesh = jax.typeof(x).sharding.mesh
  axis_types = {*mesh.axis_types}
  # Inside `shard_map` an array is one device's.
  if mesh.empty or axis_types == {jax.sharding.AxisType.Manual}:
    return False
  return mesh.size > 1 or jax.sharding.AxisType.Explicit in axis_types


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
  """Returns the mapped axes along which JAX says that an array may vary."""
  # `mat` is not in JAX's API reference yet, but output in its docs shows it.
  axes: frozenset[Hashable] = jax.typeof(x).mat.varying
  return axes


def _may_be_sharded_unseen(arrays: Sequence[jax.Array]) -> bool:
  """Returns whether arrays may be sharded without a sign in their types."""
  # The `in_shardings` of jit are not in the types of its arguments. This counts
  # the devices that JAX sees, not those that a program is exported for.
  meshes = [jax.typeof(x).sharding.mesh for x in arrays]
  return jax.device_count() > 1 and any(mesh.empty for mesh in meshes)


def _largest_by_leaf(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest bits by one reduction per array, without reshaping."""
  return _largest([magnitude_bits(x) for x in arrays])


def _largest_by_group(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest bits by one reduction for all arrays of a shape."""
  # A TPU copies arrays to join or reshape them. So that is done only to small
  # arrays, each the only one of its shape.
  largest: list[jax.Array] = []
  small: list[jax.Array] = []
  for group in _groups(arrays, _MANY):
    if len(group) == 1 and group[0].size < _SMALL:
      small.append(group[0].reshape(-1))
    else:
      largest.append(_max(_together(group)))
  if small:
    largest.append(_max(magnitude_bits(lax.concatenate(small, 0))))
  return lax.optimization_barrier(_max(jnp.stack(largest)))


def _largest_by_row(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest bits by one GPU kernel for the arrays of each size."""
  # It leaves a row of numbers or many. One more kernel reduces the rows of all.
  rows: list[jax.Array] = []
  flat = [x.reshape(-1) for x in arrays]
  for group in _groups(flat, _MANY):
    found = _together(group)
    if found.size >= _SMALL:
      # A power of two, which threads read in vectors.
      length = min(1 << (found.size // _ROWS).bit_length() - 1, _LONGEST_ROW)
      whole = found.size - found.size % length
      full = lax.slice(found, [0], [whole]).reshape(-1, length)
      rows.append(lax.reduce_max(full, [1]))
      found = lax.slice(found, [whole], [found.size])
    rows.append(found)
  while True:
    # Without the barrier XLA reduces each row by a kernel of its own. If it has
    # to join more rows than this, it copies each by a kernel of its own.
    groups = (rows[i : i + _MANY] for i in range(0, len(rows), _MANY))
    rows = [lax.optimization_barrier(lax.concatenate(x, 0)) for x in groups]
    if len(rows) == 1:
      return _max(rows[0])


def _largest_of_shards(
  arrays: Sequence[jax.Array], *, scale: jax.Array
) -> jax.Array:
  """Returns the largest bits by few kernels, moving nothing between devices."""
  # Each array has reductions of its own, which XLA joins for those of one
  # shape.
  # At most 32 bits are set, so this is 0, but XLA does not know it.
  scale = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)
  zero = (lax.population_count(scale) >> 6).astype(_unsigned(arrays[0].dtype))
  (zero,) = siblings.from_one_array(zero)
  meshes = [jax.typeof(x).sharding.mesh for x in arrays]
  devices = math.lcm(jax.device_count(), *(x.size or 1 for x in meshes))
  largest = []
  for x in arrays:
    found = lax.max(magnitude_bits(x), zero)
    # The parts of a sharded dimension are sharded like it, so each device finds
    # the largest in its own. (Not if no type shows a mesh of, say, 3 of 8.)
    for axis in (x.ndim - 1, 0) if x.ndim else ():
      part, rest = divmod(found.shape[axis], devices)
      if found.size > _ONE_KERNEL and part >= _SHORTEST_PART and not rest:
        split = *found.shape[:axis], devices, -1, *found.shape[axis + 1 :]
        found = lax.reduce_max(found.reshape(split), [axis + 1])
        found = lax.max(found, zero)
    largest.append(found)
  return _largest(largest)


def _largest(bits: Sequence[jax.Array]) -> jax.Array:
  """Returns the largest of all bits, by one reduction per array."""
  unsigned = bits[0].dtype
  # XLA combines reductions over devices only within one dtype.
  wide = unsigned if unsigned.itemsize > 4 else jnp.uint32
  # Maxima of two values each, not one of a stack: XLA takes such maxima on each
  # device first, and then one over the devices instead of one for each array.
  # That works best if sharded arrays, which are rarely vectors, come first.
  bits = sorted(bits, key=lambda x: x.ndim, reverse=True)
  maxima = [_max(lax.convert_element_type(x, wide)) for x in bits]
  largest = functools.reduce(lax.max, maxima)
  # Without the barrier XLA repeats the n maxima wherever the result is used.
  return lax.optimization_barrier(largest).astype(unsigned)


def _largest_by_folding(
  arrays: Sequence[jax.Array], *, in_order: bool
) -> jax.Array:
  """Returns the largest bits by reductions that the CPU backend vectorizes."""
  arrays = [x.reshape(-1) for x in arrays]
  small = [x for x in arrays if x.size < _SMALL]
  maxima: list[jax.Array] = []
  # In order, a reduction takes a result of the last one as input, and so waits
  # for it. Otherwise XLA would hold all intermediate results at once.
  so_far = before = jnp.zeros((), _unsigned(arrays[0].dtype))
  others = [x for x in arrays if x.size >= _SMALL]
  for group in _groups(others, _TOGETHER, alone_from=_MEDIUM):
    blocks, rests = zip(*map(_blocks, group), strict=True)
    small += rests
    once = _fold(_together(blocks, *([so_far] if in_order else [])))
    folded, rest = _blocks(once)
    maxima.append(lax.concatenate([_fold(folded), rest], 0))
    # The second fold is too short for several cores, so the next reduction does
    # not wait for it, but for the one before.
    so_far = lax.max(_first(once), before if in_order else so_far)
    before = _first(maxima[-1])
  # A second use of the first folds, which XLA then does not merge with the
  # second ones. jax 0.10.2 needs it, since its XLA drops the barriers first.
  maxima.append(so_far[None])
  folded, rest = _blocks(lax.concatenate(small, 0))
  if folded.size:
    maxima.append(_fold(magnitude_bits(folded)))
  maxima.append(magnitude_bits(rest))
  # Without the barrier XLA merges the second folds with this maximum.
  return _max(lax.optimization_barrier(lax.concatenate(maxima, 0)))


def _groups(
  arrays: Sequence[jax.Array], most: int, *, alone_from: float = math.inf
) -> Iterator[Sequence[jax.Array]]:
  """Yields groups of arrays of one shape, each group for one kernel."""
  alike: dict[tuple[int, ...], list[jax.Array]] = {}
  for x in arrays:
    alike.setdefault(x.shape, []).append(x)
  for members in alike.values():
    step = most if members[0].size < alone_from else 1
    for i in range(0, len(members), step):
      yield members[i : i + step]


def _together(arrays: Sequence[jax.Array], *bits: jax.Array) -> jax.Array:
  """Returns the largest bits of arrays of one shape, element by element."""
  return functools.reduce(lax.max, [*bits, *map(magnitude_bits, arrays)])


def _max(x: jax.Array) -> jax.Array:
  """Returns the largest unsigned integer, 0 if there is none."""
  return lax.reduce_max(x, range(x.ndim))


def _blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Splits `x` into a part that can be folded, and the rest."""
  whole = x.size - x.size % (_FOLD * _LANES)
  return lax.slice(x, [0], [whole]), lax.slice(x, [whole], [x.size])


def _fold(bits: jax.Array) -> jax.Array:
  """Returns the maxima of groups of 32 elements of `bits`."""
  shape = bits.size // (_FOLD * _LANES), _FOLD, _LANES
  largest = lax.reduce_max(lax.reshape(bits, shape), [1])
  # Without the barrier XLA may merge this fold into the next one, or into the
  # loop that concatenates the results. That loop takes up to twice the time.
  separate: jax.Array = lax.optimization_barrier(largest)
  return separate.reshape(-1)


def _first(x: jax.Array) -> jax.Array:
  """Returns the first element, by one equation."""
  return lax.index_in_dim(x, 0, keepdims=False)


def reached(x: ArrayLike, limit: float, *, inclusive: bool) -> jax.Array:
  """Returns bool[...], True where |x| is above `limit`, or NaN."""
  # If `inclusive`, |x| may also be equal to it. Comparing bits makes a compiler
  # that computes in a wider dtype round to the dtype of `x` first.
  x = jnp.asarray(x)
  if jnp.iscomplexobj(x):
    found = (reached(part, limit, inclusive=inclusive) for part in parts(x))
    return jnp.logical_or(*found)
  dtype = np.dtype(formats.carrier(x.dtype))
  first = np.array(limit, dtype)
  bits = first.view(f"uint{8 * dtype.itemsize}")
  # The dtype may round the limit up or down. Compare as Python floats, since
  # NumPy would round the limit again.
  nearest = float(first)
  if nearest < limit or (nearest == limit and not inclusive):
    bits = bits + bits.dtype.type(1)
  above: jax.Array = magnitude_bits(carried(x)) >= bits
  return above


def divide(x: jax.Array, divisor: float) -> jax.Array:
  """Returns x / divisor, rounded once. `x` must not be negative."""
  # XLA turns a division by a constant into a product with its reciprocal. The
  # product rounds differently, and the reciprocal of the largest float32 is
  # subnormal, which a CPU treats as 0. XLA does not do this to a divisor that
  # depends on `x`.
  return x / jnp.where(x > 0, jnp.asarray(divisor, x.dtype), 1)


def log2(x: jax.Array) -> jax.Array:
  """Returns the base-2 logarithm, exact for a power of two."""
  # S usually is a power of two, for which `jnp.log2` may be off by 1e-6.
  mantissa, exponent = jnp.frexp(x)
  # A power of two has the mantissa 0.5; 0 and inf are their own mantissas.
  return exponent.astype(x.dtype) + jnp.log2(mantissa)
