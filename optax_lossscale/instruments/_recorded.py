"""What the steps of a recorded run tell of another S."""

from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_lossscale._base import arguments
from optax_lossscale.instruments import _history


class Recorded(NamedTuple):
  """What is known of each step: amax / S is `mantissa` * 2**`exponent`.

  Apart, since amax / S need not be a normal float32 number.

  Attributes:
    mantissa: float32[n].
    exponent: int32[n].
    is_nan: bool[n], NaN at every S.
    is_callers: bool[n], an overflow at every S, though amax is well below the
      limit.
    is_bound: bool[n], amax / S is all that is known: it was that or more.
    failed_at: float32[n], every S from here on overflows.
    loss_scale: float32[n], the S of the record.
    amax: float32[n], as it was recorded.
  """

  mantissa: Any
  exponent: Any
  is_nan: Any
  is_callers: Any
  is_bound: Any
  failed_at: Any
  loss_scale: Any
  amax: Any


def limit_of(dtype: Any) -> float:
  """Returns the largest amax that is no overflow."""
  # amax is a float32, so what is beyond is inf for any dtype.
  return min(float(jnp.finfo(dtype).max), arguments.LARGEST_SCALE)


def read(trace: _history.History, limit: float) -> Recorded:
  """Returns what is known of each step."""
  scale = np.float64(trace.loss_scale)
  amax = np.float64(trace.amax)
  is_nan = is_lasting_nan(trace)
  failed = (np.asarray(trace.overflow) | ~np.isfinite(amax)) & ~is_nan
  # A bit for the rounding, and for what amax itself does not show.
  is_callers = failed & (amax <= limit / 2)
  failed &= ~is_callers
  is_bound = failed & (~np.isfinite(amax) | (amax == limit))
  unscaled = np.where(is_bound, limit, np.where(is_nan, 0, amax)) / scale
  mantissa, exponent = np.frexp(unscaled)
  return Recorded(
    mantissa=np.float32(mantissa),
    exponent=np.int32(exponent),
    is_nan=is_nan,
    is_callers=is_callers,
    is_bound=is_bound,
    failed_at=np.float32(np.where(failed, scale, np.inf)),
    loss_scale=np.float32(scale),
    amax=np.float32(trace.amax),
  )


def is_lasting_nan(trace: _history.History) -> npt.NDArray[np.bool_]:
  """Returns bool[n]: NaN that no S mends, as far as the trace tells."""
  scale = np.asarray(trace.loss_scale)
  is_nan = np.isnan(trace.amax)
  (clean,) = np.nonzero(~np.asarray(trace.overflow) & ~is_nan)
  if not clean.size:
    # S may still be on its way down to one that stands.
    return np.zeros_like(is_nan)
  (nans,) = np.nonzero(is_nan)
  after = np.searchsorted(clean, nans)
  stood_before = np.where(after > 0, scale[clean[after - 1]], 0)
  last = clean[np.minimum(after, clean.size - 1)]
  stood_after = np.where(after < clean.size, scale[last], 0)
  is_nan[nans] = scale[nans] <= np.maximum(stood_before, stood_after)
  return is_nan


def largest_scales(known: Recorded, limit: float) -> npt.NDArray[np.float64]:
  """Returns log2 of the largest S that each step stands.

  NaN where it stands none, inf where it stands any.
  """
  with np.errstate(divide="ignore"):
    unscaled = np.log2(known.mantissa) + known.exponent
  stood = np.log2(limit) - unscaled
  # A step that failed at an S may stand the next smaller power of two.
  below = np.ceil(np.log2(np.float64(known.failed_at))) - 1
  return np.where(known.is_nan, np.nan, np.minimum(stood, below))
