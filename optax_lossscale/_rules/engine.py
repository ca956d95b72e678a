"""The state machine behind all rules that count overflows.

Loss scalers differ in a handful of choices, such as what growth waits for, what
resets the count of overflows, and the bounds of S. Here these choices are the
fields of an `Engine`, so each system's rule is an `Engine` with its own values.
"""

import dataclasses
import enum
import math
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits

# MindSpore's manager ends the run after more overflows in a row than this.
MOST_OVERFLOWS_IN_A_ROW = 1000


# The events that may reset the count of overflows.
_Event = Literal["clean", "growth", "backoff"]


class Failure(enum.IntEnum):
  """The reason why a system ends the run; the state holds 0 until it does."""

  AT_MINIMUM = 1
  BELOW_MINIMUM = 2
  TOO_MANY_OVERFLOWS = 3


class DynamicLossScaleState(NamedTuple):
  """State of a loss scale that grows on clean steps and shrinks on overflow.

  Every such state has the first three fields. The others are None, and so not
  leaves of the pytree, unless the rule needs them.

  Attributes:
    loss_scale: float32[], the loss scale S.
    clean_steps: int32[], steps without overflow since S last moved or since the
      last overflow, whichever was later.
    overflows: int32[], overflows that count towards the hysteresis.
    total_steps: int32[], steps so far, if the system's checkpoints count them.
    growth_interval: float32[], the clean steps that growth waits for, if their
      number moves with S.
    steps_since_move: int32[], steps since S last moved, if a shrink depends on
      the share of overflows.
    overflows_since_shrink: int32[], overflows since S last shrank, if so.
    failure: int32[], a `Failure` once the system would have ended the run.

  Examples:
    >>> import optax_lossscale as ols
    >>> state: ols.DynamicLossScaleState = ols.DynamicLossScale(8.0).init()
    >>> print(state.loss_scale, state.clean_steps, state.total_steps)
    8.0 0 None
  """

  loss_scale: jax.Array
  clean_steps: jax.Array
  overflows: jax.Array
  total_steps: jax.Array | None = None
  growth_interval: jax.Array | None = None
  steps_since_move: jax.Array | None = None
  overflows_since_shrink: jax.Array | None = None
  failure: jax.Array | None = None

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / self.loss_scale


class _Step(NamedTuple):
  """A state that has counted one more step, and the S that the rule wants."""

  counted: DynamicLossScaleState
  shrinks: jax.Array
  wanted: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """The choices that make up a rule: the first S, when S moves, and how far."""

  init_scale: float  # The first S, unless it is above `max_scale`.
  growth_factor: float  # Growth multiplies S by this.
  # A shrink multiplies S by this, or if None, divides S by `growth_factor`.
  backoff_factor: float | None = None
  growth_interval: int  # Clean steps that growth waits for.
  hysteresis: int = 1  # Overflows that a shrink waits for.
  # How the count of overflows is compared with the hysteresis. With "equal", a
  # larger count never shrinks S.
  shrink_test: Literal["at_least", "equal"] = "at_least"
  min_scale: float = 0.0  # S shrinks no further than this; 0 for no floor.
  max_scale: float = math.inf  # S grows no further than this.
  # How the count of clean steps is compared with the interval. With "equal", a
  # larger count never grows S; with "multiple", growth does not reset it.
  growth_test: Literal["at_least", "equal", "multiple"] = "at_least"
  # These events reset the count of overflows.
  refill: frozenset[_Event] = frozenset({"clean"})
  # The count of clean steps at the start and after an overflow. With -1, the
  # next growth waits for one more step.
  initial_clean_steps: int = 0
  growth_below: float = math.inf  # S grows only while it is below this.
  hold_below: float = 0.0  # S stays unchanged if it would shrink below this.
  # The share that a shrink waits for: the overflows since S last shrank,
  # divided by the steps since S last moved. None for no such condition.
  tolerance: float | None = None
  # Growth multiplies the growth interval by this; a shrink divides the interval
  # by this, rounding down.
  interval_factor: float = 1.0
  failure: Failure | None = None  # The event on which the system ends the run.
  notes_failure: bool = True  # Whether the state records that failure.
  counts_steps: bool = False  # Whether the state has `total_steps`.

  def init(self) -> DynamicLossScaleState:
    """Returns the state before the first step."""

    def count(is_needed: bool) -> jax.Array | None:
      return jnp.full((), 0, jnp.int32) if is_needed else None

    first = min(self.init_scale, self.max_scale)
    # A float32, because a factor such as 1.5 gives fractions.
    interval = jnp.full((), self.growth_interval, jnp.float32)
    return DynamicLossScaleState(
      loss_scale=jnp.full((), first, jnp.float32),
      clean_steps=jnp.full((), self.initial_clean_steps, jnp.int32),
      overflows=jnp.full((), 0, jnp.int32),
      total_steps=count(self.counts_steps),
      growth_interval=None if self.interval_factor == 1 else interval,
      steps_since_move=count(self.tolerance is not None),
      overflows_since_shrink=count(self.tolerance is not None),
      failure=count(self.failure is not None),
    )

  def update(
    self, state: DynamicLossScaleState, overflow: ArrayLike
  ) -> DynamicLossScaleState:
    """Returns the state after one more step."""
    overflow = arguments.as_flag(overflow, arguments.scale_of(state))
    step = self._step(state, overflow)
    return step.counted._replace(
      loss_scale=jnp.where(self._can_move(step), step.wanted, state.loss_scale),
      failure=self._next_failure(step),
    )

  def stalled(
    self, state: DynamicLossScaleState, overflow: ArrayLike
  ) -> jax.Array:
    """Returns bool[], True if S should move but cannot."""
    overflow = arguments.as_flag(overflow, arguments.scale_of(state))
    step = self._step(state, overflow)
    at_floor = state.loss_scale == jnp.float32(self.min_scale)
    return overflow & at_floor | ~self._can_move(step)

  def _step(self, state: DynamicLossScaleState, overflow: jax.Array) -> _Step:
    first = jnp.int32(self.initial_clean_steps)
    clean_steps = jnp.where(overflow, first, _increment(state.clean_steps))
    kept = 0 if "clean" in self.refill else state.overflows
    overflows = jnp.where(overflow, _increment(state.overflows), kept)
    interval = self._interval(state)
    grows = ~overflow & self._is_time_to_grow(clean_steps, interval)
    shrinks = overflow & (
      overflows == self.hysteresis
      if self.shrink_test == "equal"
      else overflows >= self.hysteresis
    )
    since_move = state.steps_since_move
    since_shrink = state.overflows_since_shrink
    if since_move is not None and since_shrink is not None:
      since_move = _increment(since_move)
      since_shrink = jnp.where(overflow, _increment(since_shrink), since_shrink)
      shrinks &= since_shrink / since_move >= jnp.float32(self.tolerance)
      since_move = jnp.where(grows | shrinks, 0, since_move)
      since_shrink = jnp.where(shrinks, 0, since_shrink)
    next_interval = state.growth_interval
    if next_interval is not None:
      shorter = jnp.floor(bits.divide(interval, self.interval_factor))
      longer = interval * jnp.float32(self.interval_factor)
      next_interval = jnp.where(grows, longer, interval)
      next_interval = jnp.where(shrinks, jnp.maximum(shorter, 1), next_interval)
    if self.growth_test != "multiple":
      clean_steps = jnp.where(grows, 0, clean_steps)
    if "growth" in self.refill:
      overflows = jnp.where(grows, 0, overflows)
    if "backoff" in self.refill:
      overflows = jnp.where(shrinks, 0, overflows)
    total = state.total_steps
    grown = jnp.where(grows, self._grown(state.loss_scale), state.loss_scale)
    return _Step(
      counted=state._replace(
        clean_steps=clean_steps,
        overflows=overflows,
        total_steps=None if total is None else _increment(total),
        growth_interval=next_interval,
        steps_since_move=since_move,
        overflows_since_shrink=since_shrink,
      ),
      shrinks=shrinks,
      wanted=jnp.where(shrinks, self._shrunk(state.loss_scale), grown),
    )

  def _shrunk(self, loss_scale: jax.Array) -> jax.Array:
    if self.backoff_factor is None:
      smaller = bits.divide(loss_scale, self.growth_factor)
    else:
      smaller = loss_scale * jnp.float32(self.backoff_factor)
    return jnp.maximum(smaller, jnp.float32(self.min_scale))

  def _grown(self, loss_scale: jax.Array) -> jax.Array:
    larger = jnp.minimum(
      loss_scale * jnp.float32(self.growth_factor), np.float32(self.max_scale)
    )
    is_below = loss_scale < np.float32(self.growth_below)
    return jnp.where(is_below, larger, loss_scale)

  def _is_time_to_grow(
    self, clean_steps: jax.Array, interval: jax.Array
  ) -> jax.Array:
    clean_steps = clean_steps.astype(interval.dtype)
    match self.growth_test:
      case "at_least":
        return clean_steps >= interval
      case "equal":
        return clean_steps == interval
      case "multiple":
        return (clean_steps > 0) & (clean_steps % interval == 0)

  def _can_move(self, step: _Step) -> jax.Array:
    """Returns bool[], True if S may move to the value that the rule wants."""
    # S always stays a normal float32: a move out of that range leaves S
    # unchanged.
    return arguments.is_usable_scale(step.wanted) & ~self._is_held(step)

  def _is_held(self, step: _Step) -> jax.Array:
    return step.shrinks & (step.wanted < jnp.float32(self.hold_below))

  def _interval(self, state: DynamicLossScaleState) -> jax.Array:
    """Returns the state's interval, or the rule's if it lacks a sound one."""
    interval = state.growth_interval
    if interval is None:
      return jnp.int32(self.growth_interval)
    is_sound = (interval >= 1) & jnp.isfinite(interval)
    return jnp.where(is_sound, interval, jnp.float32(self.growth_interval))

  def _next_failure(self, step: _Step) -> jax.Array | None:
    """Returns the first failure of the run, even if later steps fail again."""
    counted, noted = step.counted, step.counted.failure
    if noted is None:
      return None
    if not self.notes_failure:
      return jnp.zeros_like(noted)
    match self.failure:
      case Failure.AT_MINIMUM:
        at_minimum = counted.loss_scale == jnp.float32(self.min_scale)
        fails = step.shrinks & at_minimum
      case Failure.BELOW_MINIMUM:
        fails = self._is_held(step)
      case _:
        fails = counted.overflows > MOST_OVERFLOWS_IN_A_ROW
    failure = jnp.where(fails, jnp.int32(self.failure), 0)
    return jnp.where(noted == 0, failure, noted)


def _increment(count: jax.Array) -> jax.Array:
  # The count stops at the largest int32 instead of wrapping around.
  return jnp.asarray(optax.safe_increment(count))
