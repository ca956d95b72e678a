"""A history once more, with another rule: what S would have been."""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._rules import base
from optax_lossscale._step import loss_scaling
from optax_lossscale._step import requirements
from optax_lossscale.instruments import _history

_FLOAT16 = np.dtype(np.float16)

# How far an S may be from the recorded one, and still be the same but for what
# compilers make of it.
_ROUNDING = 2.0**-12

# Steps, bits. None of 3000 NaN that S had made, in small runs, was so clear.
_NEAR = 16
_CLEAR = 6.0


class Replay(NamedTuple):
  """What a rule would have done on a recorded run.

  Attributes:
    history: the same steps with the S of this rule.
    skipped: bool[n], whether the optimizer would not have run.
    stalled: bool[n], whether S could not follow.
    dtype: the computation's.
  """

  history: _history.History
  skipped: npt.NDArray[np.bool_]
  stalled: npt.NDArray[np.bool_]
  dtype: Any = _FLOAT16

  @property
  def lost_steps(self) -> int:
    """Steps whose gradients were not usable."""
    return int(np.sum(self.history.overflow))

  @property
  def stalled_steps(self) -> int:
    """Steps that S could not follow, such as an overflow at the floor."""
    return int(np.sum(self.stalled))

  @property
  def clean_headroom(self) -> npt.NDArray[np.float64]:
    """float64[m], bits, of the clean steps; not of those whose amax is 0."""
    headroom = self.history.headroom(self.dtype)
    is_known = np.isfinite(headroom) & ~self.history.overflow
    return np.asarray(headroom[is_known])

  @property
  def mean_headroom(self) -> float:
    """Bits of range that a clean step left unused; NaN if there is none."""
    headroom = self.clean_headroom
    return float(np.mean(headroom)) if headroom.size else float("nan")

  @property
  def least_headroom(self) -> float:
    """Bits that were left on the clean step which came closest to overflow."""
    return float(np.min(self.clean_headroom, initial=np.inf))

  @property
  def worst_headroom(self) -> float:
    """Bits that were left on the clean step which left most of them unused."""
    return float(np.max(self.clean_headroom, initial=-np.inf))


def replay(
  rule: base.LossScale,
  history: _history.History,
  *,
  dtype: Any = jnp.float16,
  saturating: bool = False,
  loss_scale: float | None = None,
) -> Replay:
  """Returns what a rule would have done on the steps of a recorded run.

  It tells rules apart in a second, without training: each step has the amax
  that was recorded, scaled by the S of this rule, and moves S as the wrapper
  would. What it cannot show is that a step which is lost, or not lost, changes
  the training after it; and rules that measure more than amax go by amax alone.

  A recorded overflow says little, and is read like this:

  - amax inf, at an S of S0: every S of S0 or more overflows. Below S0 the step
    is clean with the largest amax it can have had, max / S0 times S, though the
    true one may have been larger.
  - amax finite, and less than 1 bit below the dtype's limit, as in saturation:
    the same, with the amax that was recorded.
  - amax finite, and 1 bit or more below it: S is not the reason, but the
    caller's `overflow=`, such as a limit on the norm, or a status register. It
    is an overflow at every S.
  - NaN: the same as inf, since a backward pass makes NaN out of inf. It is NaN
    at every S only where the clean step before or after it had an S of S0 or
    more, and the 16 before and after would all have left 6 bits at S0.

  So compare rules on a history that has few of them.

  Args:
    rule: any rule.
    history: what was recorded, with any rule.
    dtype: the computation's dtype, here and in the history.
    saturating: whether it clips: an amax of the dtype's largest finite value is
      then an overflow as well, and there is no inf.
    loss_scale: the first S; the rule's own by default. For a history that
      begins in the middle of a run.

  Returns:
    The replay.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if the rule starts with an unusable S.

  Examples:
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> history = ols.instruments.History(
    ...   step=np.arange(1, 5),
    ...   loss_scale=np.float32([1024.0] * 4),
    ...   amax=np.float32([4.0, 8.0, 4.0, 2.0]),
    ...   overflow=np.array([False] * 4),
    ... )
    >>> rule = ols.DynamicLossScale(2.0**24, growth_interval=2)
    >>> replay = ols.instruments.replay(rule, history)
    >>> print(np.log2(replay.history.loss_scale), replay.lost_steps)
    [24. 23. 22. 22.] 2
  """
  check_history(history)
  requirements.check_rule("rule", rule)
  requirements.check_first_state(rule)
  dtype = arguments.check_dtype("dtype", dtype)
  saturating = arguments.check_flag("saturating", saturating)
  state = leaves.as_arrays(rule.init())
  if loss_scale is not None:
    loss_scale = arguments.check_scale("loss_scale", loss_scale)
    state = optax.tree.set(state, loss_scale=jnp.float32(loss_scale))
  limit = limit_of(dtype)
  outcome = _steps_of(rule)(
    state, known_steps(history, limit), np.float32(limit), saturating
  )
  scales, amax, overflow, stalled = map(np.asarray, outcome)
  return Replay(
    history=_history.History(np.asarray(history.step), scales, amax, overflow),
    skipped=overflow & rule.skip,
    stalled=stalled,
    dtype=dtype,
  )


def check_history(history: Any) -> None:
  """Raises TypeError if it is no History."""
  if not isinstance(history, _history.History):
    raise TypeError(
      f"`history` must be a History, got {arguments.kind_of(history)}; "
      "instruments.history takes one out of a training state, and "
      "instruments.read_history reads one from a file."
    )


class Known(NamedTuple):
  """What each step of a history tells of another S; each is an array of [n]."""

  # amax / S is mantissa * 2**exponent: apart, it need not be a normal float32.
  mantissa: Any
  exponent: Any
  is_nan: Any  # At every S.
  is_doubtful: Any  # NaN, perhaps at every S.
  is_callers: Any  # An overflow at every S, with amax well below the limit.
  is_bound: Any  # amax / S was that or more.
  failed_at: Any  # Every S from here on overflows.
  loss_scale: Any  # As it was recorded, and so is amax.
  amax: Any


def limit_of(dtype: Any) -> float:
  """Returns the largest amax that is no overflow."""
  # amax is a float32, so what is beyond is inf for any dtype.
  return min(float(jnp.finfo(dtype).max), arguments.LARGEST_SCALE)


def known_steps(history: _history.History, limit: float) -> Known:
  """Returns what is known of each step."""
  scale = np.float64(history.loss_scale)
  amax = np.float64(history.amax)
  is_nan, is_doubtful = _lasting_nans(history, limit)
  failed = (np.asarray(history.overflow) | ~np.isfinite(amax)) & ~is_nan
  # A bit for the rounding, and for what amax itself does not show.
  is_callers = failed & (amax <= limit / 2)
  failed &= ~is_callers
  is_bound = failed & (~np.isfinite(amax) | (amax == limit))
  unscaled = np.where(is_bound, limit, np.where(is_nan, 0, amax)) / scale
  mantissa, exponent = np.frexp(unscaled)
  return Known(
    mantissa=np.float32(mantissa),
    exponent=np.int32(exponent),
    is_nan=is_nan,
    is_doubtful=is_doubtful,
    is_callers=is_callers,
    is_bound=is_bound,
    failed_at=np.float32(np.where(failed, scale, np.inf)),
    loss_scale=np.float32(scale),
    amax=np.float32(history.amax),
  )


def largest_scales(known: Known, limit: float) -> npt.NDArray[np.float64]:
  """Returns log2 of the largest S that each step stands.

  NaN where it stands none, inf where it stands any.
  """
  with np.errstate(divide="ignore"):
    unscaled = np.log2(known.mantissa) + known.exponent
  stood = np.log2(limit) - unscaled
  # A step that failed at an S may stand the next smaller power of two.
  below = np.ceil(np.log2(np.float64(known.failed_at))) - 1
  return np.where(known.is_nan, np.nan, np.minimum(stood, below))


def _lasting_nans(
  history: _history.History, limit: float
) -> npt.NDArray[np.bool_]:
  """Returns bool[2, n]: NaN that hardly any S mends; NaN that S may mend."""
  is_nan = np.isnan(history.amax)
  found = np.zeros((2, is_nan.size), bool)
  (clean,) = np.nonzero(~np.asarray(history.overflow) & ~is_nan)
  if not clean.size:
    # S may still be on its way down to one that stands.
    return found
  (nans,) = np.nonzero(is_nan)
  near = np.searchsorted(clean, nans) + np.arange(-_NEAR, _NEAR)[:, None]
  near = clean[np.clip(near, 0, clean.size - 1)]
  scale = np.asarray(history.loss_scale, np.float64)
  has_stood = np.any(scale[near[_NEAR - 1 : _NEAR + 1]] >= scale[nans], axis=0)
  # That says little of a step that needs more, if they came near the limit.
  largest = np.max(history.unscaled_amax[near], axis=0)
  is_clear = largest * scale[nans] <= limit * 2.0**-_CLEAR
  found[:, nans] = has_stood & is_clear, has_stood & ~is_clear
  return found


def _steps_of(rule: base.LossScale) -> Any:
  """Returns the compiled loop of a rule: the same for equal rules."""
  try:
    hash(rule)
  except TypeError:  # A user's own, with an array among its fields, say.
    return jax.jit(functools.partial(_steps, rule))
  return functools.partial(_steps_of_hashable, rule)


def _steps(
  rule: base.LossScale,
  state: Any,
  known: Known,
  limit: jax.Array,
  saturating: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns S, amax, whether it overflowed and stalled, for each step."""

  def step(state: Any, known: Known) -> tuple[Any, tuple[jax.Array, ...]]:
    loss_scale = jnp.asarray(state.loss_scale, jnp.float32)
    mantissa, exponent = jnp.frexp(loss_scale)
    amax = jnp.ldexp(known.mantissa * mantissa, known.exponent + exponent)
    # At the S of the record nothing is rounded.
    error = jnp.abs(loss_scale - known.loss_scale)
    is_same = error <= known.loss_scale * _ROUNDING
    amax = jnp.where(is_same, known.amax, amax)
    fails = loss_scale >= known.failed_at * (1 - _ROUNDING)
    within = jnp.where(saturating, amax < limit, amax <= limit)
    is_too_large = ~within | (fails & known.is_bound)
    largest = jnp.where(saturating, limit, jnp.float32(jnp.inf))
    amax = jnp.where(is_too_large, largest, amax)
    amax = jnp.where(known.is_nan, jnp.float32(jnp.nan), amax)
    overflow = is_too_large | fails | known.is_nan | known.is_callers
    state, stalled = loss_scaling.move(rule, state, overflow, amax, None)
    return state, (loss_scale, amax, overflow, stalled)

  return jax.lax.scan(step, state, known)[1]


_steps_of_hashable = jax.jit(_steps, static_argnums=0)
