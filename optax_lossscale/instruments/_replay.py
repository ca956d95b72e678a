"""A recorded run once more, with another rule: what S would have been."""

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
from optax_lossscale.instruments import _recorded

_FLOAT16 = np.dtype(np.float16)
_ROUNDING = 2.0**-12


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
  trace: _history.History,
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
  - NaN: the same as inf where S0 is above the S of the clean steps next to it,
    before and after, since a backward pass makes NaN out of inf; and where no
    step is clean. Otherwise it is NaN at every S.

  So compare rules on a trace that has few of them, recorded with a small fixed
  S, say: a rule that goes by amax chases the bounds.

  Args:
    rule: any rule.
    trace: what was recorded, with any rule.
    dtype: the computation's dtype, here and in the trace.
    saturating: whether it clips: an amax of the dtype's largest finite value is
      then an overflow as well, and there is no inf.
    loss_scale: the first S; the rule's own by default. For a trace that begins
      in the middle of a run.

  Returns:
    The replay.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if the rule starts with an unusable S.

  Examples:
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> trace = ols.instruments.History(
    ...   step=np.arange(1, 5),
    ...   loss_scale=np.float32([1024.0] * 4),
    ...   amax=np.float32([4.0, 8.0, 4.0, 2.0]),
    ...   overflow=np.array([False] * 4),
    ... )
    >>> rule = ols.DynamicLossScale(2.0**24, growth_interval=2)
    >>> replay = ols.instruments.replay(rule, trace)
    >>> print(np.log2(replay.history.loss_scale), replay.lost_steps)
    [24. 23. 22. 22.] 2
  """
  check_trace(trace)
  _check_rule(rule)
  found, name = arguments.read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"`dtype` must be a floating-point dtype such as jnp.float16, got {name}."
    )
  saturating = arguments.check_flag("saturating", saturating)
  state = leaves.as_arrays(rule.init())
  if loss_scale is not None:
    loss_scale = arguments.check_scale("loss_scale", loss_scale)
    state = optax.tree.set(state, loss_scale=jnp.float32(loss_scale))
  limit = _recorded.limit_of(found)
  outcome = _run_of(rule)(
    state, _recorded.read(trace, limit), np.float32(limit), saturating
  )
  outcome = jax.tree.map(np.asarray, outcome)
  return Replay(
    history=_history.History(
      step=np.asarray(trace.step),
      loss_scale=outcome.loss_scale,
      amax=outcome.amax,
      overflow=outcome.overflow,
    ),
    skipped=outcome.overflow & rule.skip,
    stalled=outcome.stalled,
    dtype=found,
  )


def check_trace(trace: Any) -> None:
  """Raises TypeError if it is no History."""
  if not isinstance(trace, _history.History):
    raise TypeError(
      f"a trace must be a History, got {type(trace).__name__}; "
      "instruments.history takes one out of a training state, and "
      "instruments.read_history reads one from a file."
    )


class _Outcome(NamedTuple):
  """What a rule made of each step."""

  loss_scale: Any
  amax: Any
  overflow: Any
  stalled: Any


def _run_of(rule: base.LossScale) -> Any:
  """Returns the compiled loop of a rule: the same for equal rules."""
  try:
    hash(rule)
  except TypeError:  # A user's own, with an array among its fields, say.
    return jax.jit(functools.partial(_run, rule))
  return functools.partial(_run_hashable, rule)


def _run(
  rule: base.LossScale,
  state: Any,
  recorded: _recorded.Recorded,
  limit: jax.Array,
  saturating: jax.Array,
) -> _Outcome:
  def step(state: Any, known: _recorded.Recorded) -> tuple[Any, _Outcome]:
    loss_scale = jnp.asarray(state.loss_scale, jnp.float32)
    mantissa, exponent = jnp.frexp(loss_scale)
    amax = jnp.ldexp(known.mantissa * mantissa, known.exponent + exponent)
    # At the S of the record, as exactly as compiled rules agree on it, nothing
    # is rounded.
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
    return state, _Outcome(loss_scale, amax, overflow, stalled)

  return jax.lax.scan(step, state, recorded)[1]


_run_hashable = jax.jit(_run, static_argnums=0)


def _check_rule(rule: Any) -> None:
  if not isinstance(rule, base.LossScale):
    raise TypeError(
      f"`rule` must be a LossScale, got {rule!r}; for example "
      "DynamicLossScale()."
    )
  requirements.check_rule(rule)
