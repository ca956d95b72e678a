"""Findings about gradients, from the check, the caller and other devices."""

from collections.abc import Hashable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import named_calls
from optax_lossscale._base import siblings
from optax_lossscale._base.arguments import shown
from optax_lossscale._step import checks

_LARGEST = float(np.finfo(np.float32).max)
_FLOAT16 = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)


class Finding(NamedTuple):
  """The findings about the scaled gradients of one step."""

  overflow: jax.Array  # bool[], True if the gradients are unusable.
  amax: jax.Array  # float32[], NaN if any gradient was NaN.
  dropped: jax.Array  # bool[], True if micro-batches were left out.
  range_used: jax.Array  # float32[], as in `LastStep`.
  # bool[], True if the caller asks to skip; None if there was no flag.
  skip: jax.Array | None = None

  @property
  def flags(self) -> list[jax.Array]:
    """What devices must agree on."""
    return [self.overflow, *([] if self.skip is None else [self.skip])]


class Outcome(NamedTuple):
  """What becomes of a step, the same on all devices that decide together."""

  overflow: jax.Array  # bool[], True if the gradients are unusable.
  reported: jax.Array  # bool[], also True if micro-batches were left out.
  skipped: jax.Array  # bool[], True if the step changes nothing.
  # bool[], True if only the caller's `skip` skips the step, and True if it is
  # hidden from the rule. None if there was no flag.
  by_request: jax.Array | None = None
  unseen: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowOverflow:
  """The overflows of a window's micro-batches, to be passed to `update`.

  Used as a flag, as in `bool(overflow)` or `jnp.where(overflow, ...)`, it is
  True if any micro-batch overflowed. `update` also reads its attributes: it
  does not skip the step because of a dropped micro-batch, and it takes amax
  from the micro-batches.

  Attributes:
    flags: bool[microbatches], True for a micro-batch that overflowed.
    amax: float32[microbatches], the largest absolute value among each
      micro-batch's scaled gradients; NaN if any of them was NaN.
    drop: whether the gradients leave out the micro-batches that overflowed.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> flags = jnp.array([False, True])
    >>> overflow = ols.WindowOverflow(flags, jnp.array([4, jnp.inf]), drop=True)
    >>> print(bool(overflow), overflow.valid, overflow.is_void)
    True 1 False
  """

  flags: jax.Array
  amax: jax.Array
  drop: bool = dataclasses.field(metadata={"static": True})

  @property
  def valid(self) -> jax.Array:
    """int32[], the number of micro-batches that did not overflow."""
    return jnp.sum(~self.flags, axis=-1, dtype=jnp.int32)

  @property
  def is_void(self) -> jax.Array:
    """bool[], True if the gradients of the window are unusable."""
    every_one = jnp.all(self.flags, axis=-1)
    return every_one if self.drop else jnp.any(self.flags, axis=-1)

  # JAX's protocol for objects that act as arrays, such as NNX's variables.
  def __jax_array__(self) -> jax.Array:
    return jnp.any(self.flags, axis=-1)

  def __array__(
    self, dtype: DTypeLike | None = None, copy: bool | None = None
  ) -> np.ndarray:
    return np.array(self.__jax_array__(), dtype, copy=copy)

  def __bool__(self) -> bool:
    return bool(self.__jax_array__())


class FloatStatus(NamedTuple):
  """How many operations of a function overflowed, as `float_status` counts.

  Each operation counts every time that it runs, on every device. `bool(status)`
  is True if an operation overflowed. As `overflow=` of `update`, a status means
  its `overflow`; pass `tuple(status)` if undefined operations count as well.

  Attributes:
    overflow: int32[], operations whose result was too large for its dtype.
    undefined: int32[], operations without a finite value for their inputs:
      division by zero, log 0, sqrt(-1).

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> square = ols.hardware.float_status(lambda x: x * x)
    >>> _, status = square(jnp.float16(300.0))
    >>> print(bool(status), status.overflow, status.undefined)
    True 1 0
  """

  overflow: jax.Array
  undefined: jax.Array

  def __bool__(self) -> bool:
    if isinstance(self.overflow, jax.core.Tracer):
      raise TypeError(
        "a FloatStatus must be known where its truth is used, got "
        f"{shown(self.overflow)} operations; under jit write "
        "status.overflow > 0, or pass overflow=status to update."
      )
    return bool(np.any(self.overflow))


def examine(
  check: checks.Check,
  scaled_grads: optax.Updates,
  overflow: object = False,
  amax: object = None,
  *,
  loss_scale: jax.Array | None = None,
  in_order: bool = True,
) -> Finding:
  """Examines every element of every gradient, and the caller's own findings.

  Given S, it also checks that S is usable and that the largest gradient stays
  finite when it is divided by S, since division by an S below 1 may overflow.
  A proof takes both outcomes in turn, and that amax grows as S.
  """

  def found(*operands: Any) -> Finding:
    return _examine(check, *operands, in_order=in_order)

  # `accumulate` examines micro-batches, and not in order.
  is_gate = loss_scale is not None and in_order
  return named_calls.named(
    "examine", found, loss_scale, scaled_grads, overflow, amax, is_gate=is_gate
  )


def _examine(
  check: checks.Check,
  loss_scale: jax.Array | None,
  scaled_grads: optax.Updates,
  overflow: object,
  amax: object,
  *,
  in_order: bool,
) -> Finding:
  parts_of: dict[tuple[np.dtype, float], list[jax.Array]] = {}
  for gradient, dtype in checks.with_computation_dtypes(check, scaled_grads):
    # The parts of a complex number overflow separately.
    parts = bits.parts(gradient)
    own = parts[0].dtype
    parts_of.setdefault((own, formats.limit(own, dtype)), []).extend(parts)

  flag, dropped = jnp.full((), False), jnp.full((), False)
  if loss_scale is not None:
    flag |= ~arguments.is_usable_scale(loss_scale)
  amaxes = [jnp.full((), 0, jnp.float32)]
  # The share of its limit that each amax reaches, where the limit is known.
  # float32 gradients may have been computed in any dtype.
  limits: list[float] = []
  shares: list[jax.Array] = []
  for (own, limit), parts in parts_of.items():
    largest = bits.amax(parts, in_order=in_order, scale=loss_scale)
    # Compare in a dtype that holds the limit: bfloat16 would round float16's.
    wide = largest.astype(leaves.at_least_float32(largest.dtype))
    within = wide < limit if check.saturating else wide <= limit
    # Negate this instead of reversing the comparison, so that NaN counts.
    flag |= ~within
    if loss_scale is not None:
      flag |= ~jnp.isfinite(leaves.unscale(largest, loss_scale))
    amaxes.append(to_float32(largest))
    if check.dtype is not None or formats.is_low(own):
      limits.append(limit)
      shares.append(_share(amaxes[-1], limit))

  # Values that were measured elsewhere are compared with the smallest limit.
  least = min(limits, default=None)
  elsewhere: list[jax.Array] = []
  for reason in _listed(overflow):
    if isinstance(reason, WindowOverflow):
      flag |= jnp.any(reason.is_void)
      dropped |= jnp.any(reason.flags)
      elsewhere.append(reason.amax)
    else:
      counted = reason.overflow if isinstance(reason, FloatStatus) else reason
      flag |= _as_flag("overflow", counted)
  for value in _magnitudes(amax):
    flag |= ~jnp.isfinite(value)
    # No float32 value can reach a limit that float32 cannot hold.
    if least is not None and least <= _LARGEST:
      bound = np.float32(least)
      flag |= value >= bound if check.saturating else value > bound
    elsewhere.append(value)
  amaxes += elsewhere
  if least is not None:
    shares += [_share(x, least) for x in elsewhere]
  found = bits.amax(amaxes)
  if not shares:
    # The dtype is unknown: report against float16, without enforcing it.
    shares = [_share(found, _FLOAT16)]
  used = bits.amax([*shares, jnp.full((), _SMALLEST, jnp.float32)])
  used = jnp.where(jnp.isfinite(found), used, found)
  return Finding(flag, found, dropped, used)


def _share(amax: jax.Array, limit: float) -> jax.Array:
  # Every float32 value is a negligible share of a limit beyond float32.
  return amax * 0 if limit > _LARGEST else bits.divide(amax, limit)


def to_float32(value: object) -> jax.Array:
  """Returns numbers as float32[...], without turning finite ones into inf."""
  is_jax = isinstance(value, jax.Array) or hasattr(value, "__jax_array__")
  # Convert on the host first, since jnp warns about numbers beyond float32.
  numpy = jnp if is_jax else np
  array = numpy.asarray(value)
  if array.dtype == np.float64:
    clipped = numpy.clip(array, -_LARGEST, _LARGEST)
    array = numpy.where(numpy.isfinite(array), clipped, array)
  return jnp.asarray(array, jnp.float32)


def agree(finding: Finding, names: tuple[Hashable, ...]) -> Finding:
  """Returns the combined finding of all devices along the named axes."""
  # Take the maximum of integers, since one of floats drops NaN.
  # 2 means an overflow and 1 a dropped micro-batch: the maximum is the worst.
  dropped = finding.dropped.astype(jnp.uint32)
  flag = jnp.where(finding.overflow, jnp.uint32(2), dropped)
  floats = map(bits.magnitude_bits, (finding.amax, finding.range_used))
  asked = [] if finding.skip is None else [finding.skip.astype(jnp.uint32)]
  flag, *patterns = _largest([flag, *floats, *asked], names)
  amax, used = (lax.bitcast_convert_type(x, jnp.float32) for x in patterns[:2])
  skip = patterns[2] > 0 if asked else None
  return Finding(flag == 2, amax, flag > 0, used, skip)


def agree_on_skip(skip: jax.Array, names: tuple[Hashable, ...]) -> jax.Array:
  """Returns whether any device along the named axes asks to skip."""
  return _largest([skip.astype(jnp.uint32)], names)[0] > 0


def _over_devices(x: jax.Array, names: tuple[Hashable, ...]) -> jax.Array:
  """Returns the maximum over the devices along the axes."""
  # JAX reduces over several axes at once only if the array varies along all of
  # them. An axis index does, and adding 0 times it changes nothing.
  for name in names:
    x += 0 * lax.axis_index(name).astype(jnp.uint32)
  return lax.pmax(x, names)


# A proof can follow a maximum, but not values that are stacked.
@named_calls.assumed(lambda xs, names: [_over_devices(x, names) for x in xs])
def _largest(
  values: list[jax.Array], names: tuple[Hashable, ...]
) -> list[jax.Array]:
  """Returns the largest of each integer on all devices along the axes."""
  return list(_over_devices(jnp.stack(values), names))


def decide(finding: Finding, *, rule_skips: bool) -> Outcome:
  """Returns what becomes of a step, given what was found."""
  flags = [finding.overflow, finding.overflow | finding.dropped]
  if finding.skip is None:
    overflow, reported = siblings.shared(*flags)
    return Outcome(overflow, reported, overflow & rule_skips)
  skipped = finding.overflow & rule_skips
  flags += [skipped, finding.skip, skipped | finding.skip]
  overflow, reported, by_rule, requested, skipped = siblings.shared(*flags)
  return Outcome(
    overflow,
    reported,
    skipped=skipped,
    by_request=requested & ~by_rule,
    # The rule does not see a step that is skipped for another reason.
    unseen=requested & ~reported,
  )


def requested(skip: object) -> jax.Array | None:
  """Returns whether the caller asks to skip, or None if no flag was passed."""
  if skip is False:
    return None  # The program has no select that depends on it.
  # A state would pass for a list of flags.
  if hasattr(skip, "_fields") and not isinstance(skip, FloatStatus):
    raise TypeError(
      f"`skip` must be a flag or a list of flags, got a {type(skip).__name__}."
    )

  def is_set(skip: object) -> jax.Array:
    flags = [_as_flag("skip", reason) for reason in _listed(skip)]
    return functools.reduce(jnp.logical_or, flags, jnp.full((), False))

  # A proof takes it that nobody asks, and that the flag does not depend on S.
  return named_calls.named("skip", is_set, skip)


def _listed(reasons: object) -> Sequence[object]:
  is_one = isinstance(reasons, FloatStatus)
  return (
    [reasons] if is_one or not isinstance(reasons, (list, tuple)) else reasons
  )


def _as_flag(name: str, reason: object) -> jax.Array:
  """Returns whether a caller's flag, of any type and shape, is set."""
  if isinstance(reason, (WindowOverflow, FloatStatus)):
    raise TypeError(
      f"`{name}` must be a reason that S has nothing to do with, got a "
      f"{type(reason).__name__}; pass it as overflow=."
    )
  if reason is not None and arguments.is_numeric(reason):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
      # Convert on the host: JAX would keep the low 32 bits, which may be 0.
      if isinstance(reason, (int, np.ndarray, np.generic)):
        reason = np.asarray(reason).astype(bool)
      # NaN is not 0, so a flag of NaN is set.
      return jnp.any(jnp.asarray(reason).astype(bool))
  raise TypeError(
    f"`{name}` must be a bool, a number or an array, or a list of these, got "
    f"{shown(reason)}."
  )


def _magnitudes(amax: object) -> list[jax.Array]:
  """Returns a list with the largest value in the caller's `amax`, if any."""
  if amax is None:
    return []
  values = []
  for value in jax.tree.leaves(amax, is_leaf=leaves.is_none):
    value = arguments.as_finite("amax", value)
    found = None
    # A flag is not a number; nor is an object whose dtype is bool.
    is_flag = np.issubdtype(getattr(value, "dtype", type(value)), np.bool_)
    if not (value is None or is_flag) and arguments.is_numeric(value):
      with contextlib.suppress(TypeError, ValueError):
        found = to_float32(value)
    if found is None:
      raise TypeError(
        "`amax` must be a number, an array, or a tree of these, such as the "
        f"gradient of what an amax_tap was given, got {shown(value)}."
      )
    values.append(found.reshape(-1))
  return [bits.amax(values)] if values else []
