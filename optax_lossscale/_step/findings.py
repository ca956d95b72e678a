"""What is known of gradients: by the check, the caller, other devices."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import bits
from optax_lossscale._base import bits as _bits
from optax_lossscale._base import leaves
from optax_lossscale._step import checks
from optax_lossscale._step import devices


class Finding(NamedTuple):
  """What a check found in the scaled gradients of one step.

  Attributes:
    overflow: bool[], the gradients are not usable.
    amax: float32[], their largest absolute value; NaN if one of them was NaN.
    dropped: bool[], those of some micro-batches were not, and have been left
      out of these.
    limit: the smallest largest finite value of a dtype in which some of them
      are known to have been computed; None if nothing is known.
    known_amax: float32[], the largest absolute value among those, each in
      proportion to its own limit as the smallest limit is to that; None if
      there is no limit.
  """

  overflow: jax.Array
  amax: jax.Array
  dropped: Any = False
  limit: float | None = None
  known_amax: jax.Array | None = None

  def with_amax(self, amax: jax.Array) -> "Finding":
    """Returns the same with what was measured elsewhere in the step."""
    known_amax = self.known_amax
    if known_amax is not None:
      known_amax = _bits.amax([known_amax, amax])
    return self._replace(
      amax=_bits.amax([self.amax, amax]), known_amax=known_amax
    )


def examine(check: checks.Check, gradients: Any, scaled: Any = True) -> Finding:
  """Looks at every element of every gradient."""
  parts_of: dict[Any, list[jax.Array]] = {}
  for gradient, dtype in checks.with_computation_dtypes(check, gradients):
    is_complex = jnp.iscomplexobj(gradient)
    parts = [gradient.real, gradient.imag] if is_complex else [gradient]
    own = parts[0].dtype
    largest = bits.limit(own, dtype)
    parts_of.setdefault((own, largest), []).extend(parts)

  overflow = jnp.full((), False)
  amaxes = [jnp.full((), 0, jnp.float32)]
  # Gradients in float32 may have been computed in anything.
  is_known = {
    own: check.dtype is not None or own.itemsize < 4 for own, _ in parts_of
  }
  limits = [largest for own, largest in parts_of if is_known[own]]
  known_amaxes = []
  for (own, largest), parts in parts_of.items():
    limit: Any = largest
    if scaled is not True:
      limit = jnp.where(scaled, largest, bits.limit(own, None))
    amax = bits.amax(parts)
    # Wide enough for the limit: bfloat16 would round that of float16.
    wide = amax.astype(leaves.at_least_float32(amax.dtype))
    within = wide < limit if check.saturating else wide <= limit
    # `not within` and not the opposite comparison: NaN is within no limit.
    overflow |= ~within
    amaxes.append(to_float32(amax))
    if is_known[own]:
      known_amaxes.append(amaxes[-1] * (min(limits) / largest))
  return Finding(
    overflow=overflow,
    amax=bits.amax(amaxes),
    limit=min(limits, default=None),
    known_amax=bits.amax(known_amaxes) if known_amaxes else None,
  )


def to_float32(amax: jax.Array) -> jax.Array:
  """Returns `amax` as float32[]; inf only if it was inf."""
  if amax.dtype == jnp.float64:
    # A finite float64 beyond float32's range must not be reported as inf.
    largest = float(jnp.finfo(jnp.float32).max)
    amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, largest), amax)
  return amax.astype(jnp.float32)


def agree(finding: Finding, axis_name: Any) -> Finding:
  """Returns what all devices along the named axes found together.

  One maximum over integers: it carries NaN, which a maximum over floats drops.
  """
  # 2 for an overflow, 1 for one that was dropped: the worst of them counts.
  dropped = jnp.asarray(finding.dropped).astype(jnp.uint32)
  flag = jnp.where(finding.overflow, jnp.uint32(2), dropped)
  amaxes = [finding.amax]
  if finding.known_amax is not None:
    amaxes.append(finding.known_amax)
  flag_and_bits = jnp.stack([flag, *map(_bits.magnitude_bits, amaxes)])
  names = devices.axis_names("axis_name", axis_name)
  flag_and_bits = lax.pmax(_varying(flag_and_bits, names), names)
  flag, *bits = flag_and_bits
  amax, *known_amax = map(_bits_to_float32, bits)
  return finding._replace(
    overflow=flag == 2,
    amax=amax,
    dropped=flag > 0,
    known_amax=known_amax[0] if known_amax else None,
  )


def limits(finding: Finding, scaled: Any) -> dict[str, jax.Array]:
  """Returns what the state keeps of the limits of dtypes that are known."""
  # Made of the amax, so that they vary over the devices as all of a state does,
  # and two arrays, since one could not be donated twice.
  zero = jnp.zeros_like(finding.amax)
  if finding.limit is None or finding.known_amax is None:
    return {"amax_limit": zero, "limited_amax": jnp.zeros_like(finding.amax)}
  limit = min(finding.limit, float(jnp.finfo(jnp.float32).max))
  return {
    # What was not scaled tells nothing of S.
    "amax_limit": jnp.where(scaled, zero + jnp.float32(limit), 0),
    "limited_amax": finding.known_amax + zero,
  }


def total(measured: Any, axis_name: Any) -> Any:
  """Returns what a rule has measured, added up along the named axes."""
  names = devices.axis_names("axis_name", axis_name)
  return jax.tree.map(
    lambda x: lax.psum(_varying(jnp.asarray(x), names), names), measured
  )


def _varying(x: jax.Array, names: tuple[Any, ...]) -> jax.Array:
  """Returns `x` as one that may differ along all the axes.

  JAX reduces over all of them at once only what may.
  """
  # The position on an axis differs, and 0 times it is nothing to add.
  for name in names:
    x = x + 0 * lax.axis_index(name).astype(x.dtype)
  return x


def _bits_to_float32(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


_LARGEST = float(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowOverflow:
  """Which micro-batches overflowed. `update` of `loss_scaling` takes it whole.

  As a flag it is whether any of them did, for Python, NumPy and JAX:
  `bool(overflow)`, `jnp.where(overflow, ...)`. To `update` it tells more: what
  was dropped is no reason to skip, and the largest gradient is that of a
  micro-batch, and not of their mean.

  Attributes:
    flags: bool[microbatches], which of them overflowed.
    amax: float32[microbatches], the largest absolute value among the scaled
      gradients of each; NaN if one of them was NaN.
    drop: whether those that overflowed have been left out of the gradients.
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
    """bool[], the gradients of the window are not usable."""
    every_one = jnp.all(self.flags, axis=-1)
    return every_one if self.drop else jnp.any(self.flags, axis=-1)

  # The protocol by which NNX's variables stand for arrays, too.
  def __jax_array__(self) -> jax.Array:
    return jnp.any(self.flags, axis=-1)

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return np.array(self.__jax_array__(), dtype, copy=copy)

  def __bool__(self) -> bool:
    return bool(self.__jax_array__())


def report(
  finding: Finding,
  overflow: Any,
  amax: Any = None,
  check: checks.Check = checks.nonfinite(),  # noqa: B008 - it is frozen.
  scaled: Any = True,
) -> Finding:
  """Returns what a check found together with what the caller knows."""
  rule = "`overflow` must be a bool, a number or an array, or a list of these"
  are_several = isinstance(overflow, (list, tuple))
  for reason in overflow if are_several else [overflow]:
    if isinstance(reason, WindowOverflow):
      finding = finding.with_amax(reason.amax)._replace(
        overflow=finding.overflow | jnp.any(reason.is_void),
        dropped=finding.dropped | jnp.any(reason.flags),
      )
      continue
    if reason is None or isinstance(reason, str):
      raise TypeError(f"{rule}, got {reason!r}.")
    try:
      flags = jnp.asarray(reason)
    except (TypeError, ValueError) as error:
      raise TypeError(f"{rule}, got {reason!r}.") from error
    # NaN is not 0, so a flag that went wrong counts as an overflow.
    flag = jnp.any(flags.astype(bool))
    finding = finding._replace(overflow=finding.overflow | flag)
  if amax is None:
    return finding
  largest = _largest(amax)
  if largest is None:
    return finding
  overflows = ~jnp.isfinite(largest)
  # All that float32 holds is below a limit that it does not hold.
  if finding.limit is not None and finding.limit <= _LARGEST:
    limit = np.float32(finding.limit)
    beyond = largest >= limit if check.saturating else largest > limit
    overflows |= beyond & scaled
  finding = finding.with_amax(largest)
  return finding._replace(overflow=finding.overflow | overflows)


def _largest(amax: Any) -> jax.Array | None:
  """Returns the largest of magnitudes from elsewhere; None if there is none."""
  values = []
  for value in jax.tree.leaves(amax, is_leaf=lambda x: x is None):
    try:
      if value is None or isinstance(value, str):
        raise TypeError
      values.append(_as_float32(value).reshape(-1))
    except (TypeError, ValueError) as error:
      raise TypeError(
        "`amax` must be a number, an array, or a tree of these, such as the "
        f"gradient of what an amax_tap was given, got {value!r}."
      ) from error
  return bits.amax(values) if values else None


def _as_float32(value: Any) -> jax.Array:
  """Returns numbers as float32[...]; inf only where they were inf."""
  is_jax = isinstance(value, jax.Array) or hasattr(value, "__jax_array__")
  # On the host first, where jnp would warn of a number that is too large.
  numpy = jnp if is_jax else np
  value = numpy.asarray(value)
  if np.issubdtype(value.dtype, np.bool_):
    raise TypeError
  if value.dtype == np.float64:
    clipped = numpy.clip(value, -_LARGEST, _LARGEST)
    value = numpy.where(numpy.isfinite(value), clipped, value)
  return jnp.asarray(value, jnp.float32)
