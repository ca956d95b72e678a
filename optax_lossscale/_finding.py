"""What was found in the scaled gradients, and how devices agree on it."""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _amax
from optax_lossscale import _devices


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
    """Returns the same with what was measured elsewhere in the step.

    Args:
      amax: float32[...], of the dtype that has the least headroom.
    """
    known_amax = self.known_amax
    if known_amax is not None:
      known_amax = _amax.amax([known_amax, amax])
    return self._replace(
      amax=_amax.amax([self.amax, amax]), known_amax=known_amax
    )


def agree(finding: Finding, axis_name: Any) -> Finding:
  """Returns what all devices along the named axes found together.

  One maximum over integers: it carries NaN, which a maximum over floats drops.

  Args:
    finding: what this device found.
    axis_name: one mapped axis, or a tuple or list of them.
  """
  # 2 for an overflow, 1 for one that was dropped: the worst of them counts.
  dropped = jnp.asarray(finding.dropped).astype(jnp.uint32)
  flag = jnp.where(finding.overflow, jnp.uint32(2), dropped)
  amaxes = [finding.amax]
  if finding.known_amax is not None:
    amaxes.append(finding.known_amax)
  flag_and_bits = jnp.stack([flag, *map(_amax.magnitude_bits, amaxes)])
  names = _devices.axis_names("axis_name", axis_name)
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
  """Returns what the state keeps of the limits of dtypes that are known.

  Args:
    finding: of the step.
    scaled: bool or bool[], whether its loss was scaled.
  """
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
  """Returns what a rule has measured, added up along the named axes.

  Args:
    measured: a pytree of numbers, this device's own.
    axis_name: one mapped axis, or a tuple or list of them.
  """
  names = _devices.axis_names("axis_name", axis_name)
  return jax.tree.map(
    lambda x: lax.psum(_varying(jnp.asarray(x), names), names), measured
  )


def _varying(x: jax.Array, names: tuple[Any, ...]) -> jax.Array:
  """Returns `x` as one that may differ along all the axes.

  JAX reduces over all of them at once only what may.

  Args:
    x: numbers.
    names: of the axes.
  """
  # The position on an axis differs, and 0 times it is nothing to add.
  for name in names:
    x = x + 0 * lax.axis_index(name).astype(x.dtype)
  return x


def _bits_to_float32(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)
