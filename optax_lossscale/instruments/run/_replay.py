"""Replays a history with another rule, to see what S would have been."""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._rules import base
from optax_lossscale._step import checks
from optax_lossscale._step import loss_scaling
from optax_lossscale._step import requirements
from optax_lossscale.instruments.run import _history

_FLOAT16 = np.dtype(np.float16)

# An S this close to the recorded S differs from it only by rounding.
_ROUNDING = 2.0**-12

# S is not the cause of a NaN if so many clean steps on each side have this much
# headroom, in bits. None of 3000 NaN that S caused in small runs met this.
_NEAR = 16
_CLEAR = 6.0


class ReplayedRun(NamedTuple):
  """The outcome of a rule on a recorded run.

  Attributes:
    history: the same steps with the S of this rule.
    skipped: bool[n], True if the step would have been skipped.
    stalled: bool[n], True if S had to move but could not, as at its floor.
    dtype: the computation's dtype.
  """

  history: _history.History
  skipped: npt.NDArray[np.bool_]
  stalled: npt.NDArray[np.bool_]
  dtype: np.dtype = _FLOAT16

  @property
  def lost_steps(self) -> int:
    """The number of steps whose gradients were unusable."""
    return int(np.sum(self.history.overflow))

  @property
  def stalled_steps(self) -> int:
    """The number of steps on which S had to move but could not."""
    return int(np.sum(self.stalled))

  @property
  def clean_headroom(self) -> npt.NDArray[np.float64]:
    """float64[m], the bits of headroom of clean steps with a non-zero amax."""
    headroom = self.history.headroom(self.dtype)
    is_known = np.isfinite(headroom) & ~self.history.overflow
    return np.asarray(headroom[is_known])

  @property
  def mean_headroom(self) -> float:
    """The mean headroom of clean steps in bits; NaN if no step is clean."""
    headroom = self.clean_headroom
    return float(np.mean(headroom)) if headroom.size else float("nan")

  @property
  def least_headroom(self) -> float:
    """The headroom of the clean step closest to overflow, in bits."""
    return float(np.min(self.clean_headroom, initial=np.inf))

  @property
  def worst_headroom(self) -> float:
    """The headroom of the clean step farthest from overflow, in bits."""
    return float(np.max(self.clean_headroom, initial=-np.inf))


def replay(
  rule: base.LossScale,
  history: _history.History,
  *,
  check: checks.Check = checks.nonfinite(jnp.float16),
  loss_scale: float | None = None,
) -> ReplayedRun:
  """Returns what a rule would have done on the steps of a recorded run.

  It compares rules in a second, without training: each step has the recorded
  amax, rescaled to the S of this rule, and moves S as the wrapper would. It
  cannot show how losing or keeping a step changes the training after it, so
  compare rules on a history with few overflows.

  A recorded overflow carries little information: the largest S at which the
  step would be clean is not known. docs/guides/instruments.md says how a replay
  reads it.

  Args:
    rule: any rule.
    history: the recorded steps of a run with any rule.
    check: `nonfinite(dtype)`, or `saturated(dtype)` if overflows become the
      dtype's largest finite value. `dtype` is that of the computation, in the
      recorded run and in the replay.
    loss_scale: the first S, for a history that begins in the middle of a run;
      by default the rule's own.

  Returns:
    The replay.

  Raises:
    TypeError: if an argument has the wrong type.
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
  _history.check_history(history)
  requirements.check_rule("rule", rule)
  requirements.check_first_state(rule)
  requirements.check_check(check)
  if not isinstance(check.dtype, np.dtype):
    raise TypeError(
      "`check` must name the one dtype of the computation, which a history "
      f"does not hold, such as nonfinite(jnp.float16), got {check!r}."
    )
  if loss_scale is not None:
    loss_scale = arguments.check_scale("loss_scale", loss_scale)
  # amax is a float32, so larger values are inf for any dtype.
  limit = formats.limit(formats.FLOAT32, check.dtype)
  known = known_steps(history, limit)
  with switches.lifted():
    state = leaves.as_arrays(rule.init())
    if loss_scale is not None:
      state = optax.tree.set(state, loss_scale=jnp.float32(loss_scale))
    outcome = _steps_of(rule)(state, known, np.float32(limit), check.saturating)
    scales, amax, overflow, stalled = map(np.asarray, outcome)
  return ReplayedRun(
    history=_history.History(np.asarray(history.step), scales, amax, overflow),
    skipped=overflow & rule.skip,
    stalled=stalled,
    dtype=check.dtype,
  )


class Known(NamedTuple):
  """The facts about each step that hold at any S, in arrays of shape [n]."""

  # amax / S as mantissa * 2**exponent, since it may not be a normal float32.
  mantissa: np.ndarray
  exponent: np.ndarray
  is_nan: np.ndarray  # NaN at every S.
  is_doubtful: np.ndarray  # NaN, perhaps at every S.
  is_callers: np.ndarray  # An overflow at every S, as amax does not show it.
  is_bound: np.ndarray  # The true amax / S may be larger.
  failed_at: np.ndarray  # This S and all larger ones overflow.
  loss_scale: np.ndarray  # As recorded.
  amax: np.ndarray  # As recorded.


def known_steps(history: _history.History, limit: float) -> Known:
  """Returns what is known about each step."""
  scale = np.float64(history.loss_scale)
  amax = np.float64(history.amax)
  is_nan, is_doubtful = _lasting_nans(history, limit)
  failed = (np.asarray(history.overflow) | ~np.isfinite(amax)) & ~is_nan
  # One bit allows for rounding and for overflows that amax does not show.
  is_callers = failed & (amax <= limit / 2)
  failed &= ~is_callers
  is_bound = failed & (~np.isfinite(amax) | (amax == limit))
  unscaled = np.where(is_bound, limit, np.where(is_nan, 0, amax)) / scale
  mantissa, exponent = np.frexp(unscaled)
  return Known(
    mantissa=np.asarray(mantissa, np.float32),
    exponent=np.asarray(exponent, np.int32),
    is_nan=is_nan,
    is_doubtful=is_doubtful,
    is_callers=is_callers,
    is_bound=is_bound,
    failed_at=np.asarray(np.where(failed, scale, np.inf), np.float32),
    loss_scale=np.asarray(scale, np.float32),
    amax=np.asarray(history.amax, np.float32),
  )


def largest_scales(known: Known, limit: float) -> npt.NDArray[np.float64]:
  """Returns log2 of the largest S at which each step is clean."""
  with np.errstate(divide="ignore"):
    unscaled = np.log2(known.mantissa) + known.exponent
  stood = np.log2(limit) - unscaled
  # A step that failed at an S may be clean at the next smaller power of two.
  below = np.ceil(np.log2(np.float64(known.failed_at))) - 1
  # NaN if no S is clean, inf if every S is clean.
  return np.where(known.is_nan, np.nan, np.minimum(stood, below))


def _lasting_nans(
  history: _history.History, limit: float
) -> npt.NDArray[np.bool_]:
  """Returns bool[2, n]: steps probably NaN at every S, and doubtful ones."""
  is_nan = np.isnan(history.amax)
  found = np.zeros((2, is_nan.size), bool)
  (clean,) = np.nonzero(~np.asarray(history.overflow) & ~is_nan)
  if not clean.size:
    # S may still be falling to a value at which steps are clean.
    return found
  (nans,) = np.nonzero(is_nan)
  near = np.searchsorted(clean, nans) + np.arange(-_NEAR, _NEAR)[:, None]
  near = clean[np.clip(near, 0, clean.size - 1)]
  scale = np.asarray(history.loss_scale, np.float64)
  has_stood = np.any(scale[near[_NEAR - 1 : _NEAR + 1]] >= scale[nans], axis=0)
  # Clean steps prove little if the NaN's S would bring them near the limit.
  largest = np.max(history.unscaled_amax[near], axis=0)
  is_clear = largest * scale[nans] <= limit * 2.0**-_CLEAR
  found[:, nans] = has_stood & is_clear, has_stood & ~is_clear
  return found


def _steps_of(rule: base.LossScale) -> Callable[..., tuple[jax.Array, ...]]:
  """Returns a rule's jitted loop over steps, which equal rules share."""
  try:
    hash(rule)
  except TypeError:  # A user's rule may hold an array.
    return jax.jit(functools.partial(_steps, rule))
  return functools.partial(_steps_of_hashable, rule)


def _steps(
  rule: base.LossScale,
  state: Any,
  known: Known,
  limit: jax.Array,
  saturating: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns S, amax, overflow and stalled for each step."""

  def step(state: Any, known: Known) -> tuple[Any, tuple[jax.Array, ...]]:
    loss_scale = jnp.asarray(state.loss_scale, jnp.float32)
    mantissa, exponent = jnp.frexp(loss_scale)
    amax = jnp.ldexp(known.mantissa * mantissa, known.exponent + exponent)
    # At the recorded S the recorded amax is used, to avoid rounding.
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
    state, stalled = loss_scaling.move(rule, state, overflow, amax)
    return state, (loss_scale, amax, overflow, stalled)

  return jax.lax.scan(step, state, known)[1]


_steps_of_hashable = jax.jit(_steps, static_argnums=0)
