"""What a caller knows of an overflow: of micro-batches, or by other means."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _amax
from optax_lossscale import _checks
from optax_lossscale import _finding

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
  finding: _finding.Finding,
  overflow: Any,
  amax: Any = None,
  check: _checks.Check = _checks.nonfinite(),  # noqa: B008 - it is frozen.
  scaled: Any = True,
) -> _finding.Finding:
  """Returns what a check found together with what the caller knows.

  Args:
    finding: what the check found.
    overflow: the caller's `overflow=`.
    amax: the caller's `amax=`. It overflows as the gradients do: beyond the
      smallest limit of a dtype that is known, or at it if the check is
      saturating. Where none is known, or nothing was scaled, only what is not
      finite overflows.
    check: by which the gradients were looked at.
    scaled: bool or bool[], whether the loss was scaled.

  Raises:
    TypeError: if one of them is not what may be passed there.
  """
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
  """Returns the largest of magnitudes from elsewhere; None if there is none.

  Args:
    amax: a tree of numbers and arrays.

  Raises:
    TypeError: if a leaf is neither.
  """
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
  return _amax.amax(values) if values else None


def _as_float32(value: Any) -> jax.Array:
  """Returns numbers as float32[...]; inf only where they were inf.

  Raises:
    TypeError: if they are bools.
  """
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
