"""Findings about gradients, from the check, the caller and other devices."""

from collections.abc import Hashable
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._base import siblings
from optax_lossscale._step import checks
from optax_lossscale._step import reasons

_FLOAT16 = formats.largest(jnp.float16)
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


class _Measured(NamedTuple):
  """The check's findings about gradients alone."""

  flag: jax.Array  # bool[], True for an overflow.
  amaxes: list[jax.Array]
  # The share of its limit that each amax reaches, where the limit is known.
  # float32 gradients may have been computed in any dtype.
  shares: list[jax.Array]
  least: float | None  # The smallest of these limits.


@promises.promise("examine", static=("check", "in_order"))
def examine(
  check: checks.Check,
  scaled_grads: optax.Updates,
  overflow: object = False,
  amax: object = None,
  *,
  loss_scale: jax.Array | None = None,
  in_order: bool = True,
) -> Finding:
  """Examines every element of every gradient, and the caller's own findings."""
  measured = _measure(check, scaled_grads, loss_scale, in_order=in_order)
  flag, dropped, elsewhere = _add_reasons(check, measured, overflow, amax)
  shares = measured.shares
  if measured.least is not None:
    shares = [*shares, *(_share(x, measured.least) for x in elsewhere)]
  found = bits.amax([*measured.amaxes, *elsewhere])
  if not shares:
    # The dtype is unknown: report against float16, without enforcing it.
    shares = [_share(found, _FLOAT16)]
  used = bits.amax([*shares, jnp.full((), _SMALLEST, jnp.float32)])
  used = jnp.where(jnp.isfinite(found), used, found)
  return Finding(flag, found, dropped, used)


def _measure(
  check: checks.Check,
  scaled_grads: optax.Updates,
  loss_scale: jax.Array | None,
  *,
  in_order: bool,
) -> _Measured:
  parts_of: dict[tuple[np.dtype, float], list[jax.Array]] = {}
  for gradient, dtype in checks.with_computation_dtypes(check, scaled_grads):
    # The parts of a complex number overflow separately.
    parts = bits.parts(gradient)
    own = parts[0].dtype
    parts_of.setdefault((own, formats.limit(own, dtype)), []).extend(parts)

  flag = jnp.full((), False)
  if loss_scale is not None:
    flag |= ~arguments.is_usable_scale(loss_scale)
  amaxes = [jnp.full((), 0, jnp.float32)]
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
      # Division by an S below 1 may overflow.
      flag |= ~jnp.isfinite(leaves.unscale(largest, loss_scale))
    amaxes.append(reasons.to_float32(largest))
    if check.dtype is not None or formats.is_low(own):
      limits.append(limit)
      shares.append(_share(amaxes[-1], limit))
  return _Measured(flag, amaxes, shares, min(limits, default=None))


def _add_reasons(
  check: checks.Check, measured: _Measured, overflow: object, amax: object
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
  """Returns the flag with the caller's, what was dropped, and other amaxes."""
  flag, dropped = measured.flag, jnp.full((), False)
  elsewhere: list[jax.Array] = []
  for reason in reasons.listed(overflow):
    if isinstance(reason, reasons.WindowOverflow):
      flag |= jnp.any(reason.is_void)
      dropped |= jnp.any(reason.flags)
      elsewhere.append(reason.amax)
    else:
      if isinstance(reason, reasons.FloatStatus):
        reason = reason.overflow
      flag |= reasons.as_flag("overflow", reason)
  for value in reasons.magnitudes(amax):
    flag |= ~jnp.isfinite(value)
    # No float32 value can reach a limit that float32 cannot hold.
    if measured.least is not None and measured.least <= reasons.LARGEST:
      bound = np.float32(measured.least)
      flag |= value >= bound if check.saturating else value > bound
    elsewhere.append(value)
  return flag, dropped, elsewhere


def _share(amax: jax.Array, limit: float) -> jax.Array:
  # Every float32 value is a negligible share of a limit beyond float32.
  return amax * 0 if limit > reasons.LARGEST else bits.divide(amax, limit)


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


@promises.promise(
  "largest", assume=lambda xs, names: [_over_devices(x, names) for x in xs]
)
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
