"""Findings about gradients: from the check, the caller and other devices."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import shown
from optax_lossscale._step import backward
from optax_lossscale._step import checks

_LARGEST = float(np.finfo(np.float32).max)
_FLOAT16 = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)


class Finding(NamedTuple):
  """The findings about the scaled gradients of one step."""

  overflow: jax.Array  # bool[], the gradients are not usable.
  amax: jax.Array  # float32[], NaN if a gradient was NaN.
  dropped: jax.Array  # bool[], some micro-batches overflowed and were left out.
  used: jax.Array  # float32[], as in `LossScalingState`.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowOverflow:
  """The overflows of a window's micro-batches, to be passed to `update`.

  As a flag in Python, NumPy or JAX it is True if any micro-batch overflowed:
  `bool(overflow)`, `jnp.where(overflow, ...)`. `update` reads more from it: a
  dropped micro-batch is not a reason to skip, and the largest gradient is that
  of a micro-batch, not of their mean.

  Attributes:
    flags: bool[microbatches], True for a micro-batch that overflowed.
    amax: float32[microbatches], the largest absolute value among the scaled
      gradients of each; NaN if a gradient was NaN.
    drop: whether the gradients leave out the micro-batches that overflowed.
  """

  flags: jax.Array
  amax: jax.Array
  drop: bool = dataclasses.field(metadata={"static": True})

  @property
  def valid(self) -> jax.Array:
    """int32[], how many micro-batches did not overflow."""
    return jnp.sum(~self.flags, axis=-1, dtype=jnp.int32)

  @property
  def is_void(self) -> jax.Array:
    """bool[], True if the gradients of the window are not usable."""
    every_one = jnp.all(self.flags, axis=-1)
    return every_one if self.drop else jnp.any(self.flags, axis=-1)

  # The protocol that also makes NNX's variables usable as arrays.
  def __jax_array__(self) -> jax.Array:
    return jnp.any(self.flags, axis=-1)

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return np.array(self.__jax_array__(), dtype, copy=copy)

  def __bool__(self) -> bool:
    return bool(self.__jax_array__())


def examine(
  check: checks.Check,
  gradients: Any,
  overflow: Any = False,
  amax: Any = None,
  *,
  loss_scale: jax.Array | None = None,
) -> Finding:
  """Examines every element of every gradient, and what the caller reports.

  Given S, it also checks S itself, and that the largest gradient stays finite
  when it is unscaled, since dividing by an S below 1 may overflow.

  The magnitude of a complex number is that of its larger part, since the two
  parts overflow separately.
  """
  parts_of: dict[Any, list[jax.Array]] = {}
  for gradient, dtype in checks.with_computation_dtypes(check, gradients):
    parts = bits.parts(gradient)
    own = parts[0].dtype
    parts_of.setdefault((own, bits.limit(own, dtype)), []).extend(parts)

  flag, dropped = jnp.full((), False), jnp.full((), False)
  if loss_scale is not None:
    flag |= ~arguments.is_usable_scale(loss_scale)
  amaxes = [jnp.full((), 0, jnp.float32)]
  # Shares of the known limits. Gradients in float32 may have been computed in
  # any dtype.
  limits: list[float] = []
  shares: list[jax.Array] = []
  for (own, limit), parts in parts_of.items():
    largest = bits.amax(parts)
    # Wide enough for the limit: bfloat16 would round float16's.
    wide = largest.astype(leaves.at_least_float32(largest.dtype))
    within = wide < limit if check.saturating else wide <= limit
    # Negated rather than compared the other way, so that NaN counts.
    flag |= ~within
    if loss_scale is not None:
      flag |= ~jnp.isfinite(backward.unscale_tree(largest, loss_scale))
    amaxes.append(to_float32(largest))
    if check.dtype is not None or own.itemsize < 4:
      limits.append(limit)
      shares.append(_share(amaxes[-1], limit))

  # Values measured elsewhere count against the smallest limit.
  least = min(limits, default=None)
  elsewhere: list[jax.Array] = []
  for reason in overflow if isinstance(overflow, (list, tuple)) else [overflow]:
    if isinstance(reason, WindowOverflow):
      flag |= jnp.any(reason.is_void)
      dropped |= jnp.any(reason.flags)
      elsewhere.append(reason.amax)
    else:
      flag |= _as_flag(reason)
  for value in _magnitudes(amax):
    flag |= ~jnp.isfinite(value)
    # Every float32 value is below a limit that float32 cannot hold.
    if least is not None and least <= _LARGEST:
      limit = np.float32(least)
      flag |= value >= limit if check.saturating else value > limit
    elsewhere.append(value)
  amaxes += elsewhere
  if least is not None:
    shares += [_share(x, least) for x in elsewhere]
  found = bits.amax(amaxes)
  if not shares:
    # The dtype is unknown: measure against float16, which is not a limit here.
    shares = [_share(found, _FLOAT16)]
  used = bits.amax([*shares, jnp.full((), _SMALLEST, jnp.float32)])
  used = jnp.where(jnp.isfinite(found), used, found)
  return Finding(flag, found, dropped, used)


def _share(amax: jax.Array, limit: float) -> jax.Array:
  # A limit that float32 cannot hold is far above every float32 value.
  return amax * 0 if limit > _LARGEST else bits.divide(amax, limit)


def to_float32(value: Any) -> jax.Array:
  """Returns numbers as float32[...]; inf only where they were inf."""
  is_jax = isinstance(value, jax.Array) or hasattr(value, "__jax_array__")
  # On the host first, since jnp would warn about a number that is too large.
  numpy = jnp if is_jax else np
  value = numpy.asarray(value)
  if np.issubdtype(value.dtype, np.bool_):
    raise TypeError
  if value.dtype == np.float64:
    clipped = numpy.clip(value, -_LARGEST, _LARGEST)
    value = numpy.where(numpy.isfinite(value), clipped, value)
  return jnp.asarray(value, jnp.float32)


def agree(finding: Finding, names: tuple[Any, ...]) -> Finding:
  """Returns the combined finding of all devices along the named axes.

  It takes one maximum over integers, since a maximum over floats drops NaN.
  """
  # 2 for an overflow, 1 for a dropped one, so that the maximum is the worst.
  dropped = finding.dropped.astype(jnp.uint32)
  flag = jnp.where(finding.overflow, jnp.uint32(2), dropped)
  floats = map(bits.magnitude_bits, (finding.amax, finding.used))
  stacked = jnp.stack([flag, *floats])
  flag, *patterns = lax.pmax(_varying(stacked, names), names)
  amax, used = (lax.bitcast_convert_type(x, jnp.float32) for x in patterns)
  return Finding(flag == 2, amax, flag > 0, used)


def total(measured: Any, names: tuple[Any, ...]) -> Any:
  """Returns a rule's measurements, summed along the named axes."""
  return jax.tree.map(
    lambda x: lax.psum(_varying(jnp.asarray(x), names), names), measured
  )


def _varying(x: jax.Array, names: tuple[Any, ...]) -> jax.Array:
  """Returns `x`, marked as varying along all the axes.

  JAX reduces over several axes at once only if a value varies along all.
  """
  # The index along an axis varies, and adding 0 times it changes nothing.
  for name in names:
    x = x + 0 * lax.axis_index(name).astype(x.dtype)
  return x


def _as_flag(reason: Any) -> jax.Array:
  """Returns whether a caller's flag, of any type and shape, is set."""
  rule = "`overflow` must be a bool, a number or an array, or a list of these"
  try:
    if reason is None or not arguments.is_numeric(reason):
      raise TypeError
    # On the host: JAX keeps only 32 bits of an integer, which may all be 0.
    if isinstance(reason, (int, np.ndarray, np.generic)):
      reason = np.asarray(reason).astype(bool)
    flags = jnp.asarray(reason)
  except (TypeError, ValueError, OverflowError) as error:
    raise TypeError(f"{rule}, got {shown(reason)}.") from error
  # NaN is not 0, so a flag of NaN counts as an overflow.
  return jnp.any(flags.astype(bool))


def _magnitudes(amax: Any) -> list[jax.Array]:
  """Returns a list of the largest magnitude from elsewhere, if any."""
  if amax is None:
    return []
  values = []
  for value in jax.tree.leaves(amax, is_leaf=leaves.is_none):
    value = arguments.as_finite("amax", value)
    try:
      if value is None or not arguments.is_numeric(value):
        raise TypeError
      values.append(to_float32(value).reshape(-1))
    except (TypeError, ValueError) as error:
      raise TypeError(
        "`amax` must be a number, an array, or a tree of these, such as the "
        f"gradient of what an amax_tap was given, got {shown(value)}."
      ) from error
  return [bits.amax(values)] if values else []
