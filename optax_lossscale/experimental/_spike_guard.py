"""Spikes of the loss, of the gradient norm or of any other number of a step."""

import dataclasses
import functools
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale._step import devices
from optax_lossscale._step import reasons
from optax_lossscale._step import skipping
from optax_lossscale._step import states

# The deviation is at least this share of the mean, since both are rounded.
_ROUNDING = 1e-6


class SpikeGuardState(NamedTuple):
  """State of a `SpikeGuard`.

  Attributes:
    values: float32[window], a ring buffer of the last accepted values.
    accepted: int32[], how many values were accepted since the guard began.
    spikes: int32[], how many finite values were spikes, in the whole run.
    consecutive_spikes: int32[], how many of these came last, without an
      accepted value in between.
    restarts: int32[], how often the guard ran out of patience and began anew.
  """

  values: jax.Array
  accepted: jax.Array
  spikes: jax.Array
  consecutive_spikes: jax.Array
  restarts: jax.Array


@dataclasses.dataclass(frozen=True)
class SpikeGuard:
  """Finds steps to skip because a loss or a norm is far above the last ones.

  The guard compares a number of the step (the loss, the gradient norm) with the
  last `window` numbers that it accepted. Pass what `is_spike` returns to
  `tx.update` as `skip=`, and call `update` afterwards. Never pass a spike as
  `overflow=`: S would shrink in vain, and the guard would not count it.

  A spike is a number above mean plus `sigma` standard deviations, or above
  `factor` times the mean, of earlier numbers. NaN and inf are always spikes.
  Steps that overflow, or are skipped for another reason, change nothing.

  Attributes:
    sigma: how many (sample) standard deviations above the mean a spike begins;
      None for no such limit.
    factor: a spike is above this many times the mean magnitude; above 1, or
      None for no such limit.
    window: how many accepted values to compare with.
    warmup: how many values to accept before any finite value is a spike; by
      default half a window, and at least 2.
    patience: after this many finite spikes in a row, as after a lasting change
      of level, the guard accepts the next one and begins anew from it.
    on_spike: what the window does with a spike: "drop" leaves it out; "clip"
      takes the limit in its place, for steps that are clipped instead of
      skipped; "keep" takes the spike, as OLMo-core, levanter and maxtext do.
      In "clip" the limit enters the window, so rounding compounds from one clip
      to the next.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if an argument is out of range, or `sigma` and `factor` are both
      None.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> guard = ols.experimental.SpikeGuard(sigma=None, factor=4.0, warmup=2)
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(8.0))
    >>> opt_state, guard_state = tx.init(jnp.zeros(1)), guard.init()
    >>> for norm in (1.0, 2.0, 7.0, 3.0):
    ...   spike = guard.is_spike(guard_state, norm)
    ...   scaled_grads = jnp.array([8.0 * norm])
    ...   _, opt_state = tx.update(scaled_grads, opt_state, skip=spike)
    ...   guard_state = guard.update(guard_state, norm, opt_state)
    ...   print(spike, guard.limit(guard_state), ols.get_loss_scale(opt_state))
    False inf 8.0
    False 6.0 8.0
    True 6.0 8.0
    False 8.0 8.0

  References:
    Kumar et al., `ZClip: Adaptive Spike Mitigation for LLM Pre-Training
    <https://arxiv.org/abs/2504.02507>`_, 2025, clips instead of skipping.
  """

  _: dataclasses.KW_ONLY
  sigma: float | None = 6.0
  factor: float | None = None
  window: int = 128
  warmup: int | None = None
  patience: int = 10
  on_spike: str = "drop"

  def __post_init__(self) -> None:
    if self.sigma is None and self.factor is None:
      raise ValueError(
        "`sigma` or `factor` must say where a spike begins, got None for both; "
        "to skip above a fixed number pass skip=value > number to update."
      )
    arguments.check_fields(
      self,
      sigma=lambda name, x: x if x is None else _check_above(name, x, 0),
      factor=lambda name, x: x if x is None else _check_above(name, x, 1),
      window=_check_values,
      warmup=lambda name, x: x if x is None else _check_values(name, x),
      patience=arguments.check_count,
      on_spike=functools.partial(
        arguments.check_choice, choices=("drop", "clip", "keep")
      ),
    )

  def init(self) -> SpikeGuardState:
    """Returns the state before the first step. Save it with the optimizer's."""
    return SpikeGuardState(
      values=jnp.full(self.window, 0, jnp.float32),
      accepted=jnp.full((), 0, jnp.int32),
      spikes=jnp.full((), 0, jnp.int32),
      consecutive_spikes=jnp.full((), 0, jnp.int32),
      restarts=jnp.full((), 0, jnp.int32),
    )

  def limit(self, state: SpikeGuardState) -> jax.Array:
    """Returns the largest finite value that is accepted next.

    Use it to clip to instead of skipping.

    Args:
      state: the state after the previous step.

    Returns:
      float32[], inf during the warm-up and once the guard is out of patience.
      Its rounding error is at most 2**-20 of the mean magnitude plus sigma
      deviations (on a CPU, for windows up to 1024 and sigma up to 10). That is
      much of a limit near 0, as negative values may have.
    """
    self._check_state(state)
    threshold = self._threshold(state)
    is_out = state.consecutive_spikes >= self.patience
    is_none = is_out | (threshold == arguments.LARGEST_SCALE)
    return jnp.where(is_none, jnp.inf, threshold)

  def is_spike(self, state: SpikeGuardState, value: ArrayLike) -> jax.Array:
    """Returns whether to skip the step, as bool[], for `tx.update(skip=...)`.

    Args:
      state: the state after the previous step.
      value: a number of this step, such as the true loss, or the norm of the
        unscaled gradients before clipping; the same on all devices.

    Raises:
      TypeError: if `value` is not a real number, or `state` is not a state.
      ValueError: if the state has another window, or `value` differs between
        devices that share the state (where JAX tracks that).
    """
    value = self._read(state, value)
    is_above = value > self._threshold(state)
    is_in = state.consecutive_spikes < self.patience
    return ~jnp.isfinite(value) | (is_above & is_in)

  def update(
    self,
    state: SpikeGuardState,
    value: ArrayLike,
    opt_state: optax.OptState,
    *,
    path: str | None = None,
  ) -> SpikeGuardState:
    """Returns the state after a step. Pure, so it works inside jit.

    Args:
      state: as in `is_spike`.
      value: as in `is_spike`.
      opt_state: the optimizer's state after `tx.update`, which tells whether
        the step overflowed or was skipped.
      path: which state, if `opt_state` holds several. See `get_loss_scale`.

    Raises:
      TypeError: as in `is_spike`.
      ValueError: likewise; also if `opt_state` holds no `LossScalingState`, or
        several without a `path`.
    """
    value = self._read(state, value)
    threshold = self._threshold(state)
    is_above = value > threshold
    begins_anew = is_above & (state.consecutive_spikes >= self.patience)
    is_spike = is_above & ~begins_anew
    last = states.find_state(opt_state, path)
    is_other = last.skipped & ~is_spike  # Skipped for another reason.
    is_unseen = ~jnp.isfinite(value) | last.overflow | is_other
    enters = ~is_spike | (self.on_spike != "drop")
    entering = value
    if self.on_spike == "clip":
      entering = jnp.where(is_spike, threshold, value)
    # Values from before a restart no longer count.
    accepted = jnp.where(begins_anew, 0, state.accepted)
    places = jnp.arange(self.window, dtype=jnp.int32)

    def count_if(condition: jax.Array, count: jax.Array) -> jax.Array:
      return jnp.where(condition, optax.safe_increment(count), count)

    new = SpikeGuardState(
      values=jnp.where(
        (places == accepted % self.window) & enters,
        entering,
        jnp.where(begins_anew, 0, state.values),
      ),
      accepted=count_if(enters, accepted),
      spikes=count_if(is_spike, state.spikes),
      consecutive_spikes=jnp.where(
        is_spike, optax.safe_increment(state.consecutive_spikes), 0
      ),
      restarts=count_if(begins_anew, state.restarts),
    )
    return skipping.select(is_unseen, state, new)

  def _threshold(self, state: SpikeGuardState) -> jax.Array:
    """Returns the largest value that is not a spike; it is finite."""
    # Divide by the largest first, since squares may leave float32's range. The
    # places that are not filled yet are 0, so they add nothing to a sum.
    largest = jnp.max(jnp.abs(state.values))
    # The reciprocal of a larger one is subnormal, which a backend may flush.
    largest = jnp.minimum(jnp.where(largest > 0, largest, 1), 2.0**126)
    values = state.values / largest
    count = jnp.minimum(state.accepted, self.window).astype(jnp.float32)
    share = 1 / jnp.maximum(count, 1)
    # No finite value exceeds it, and jax_debug_infs does not mind it.
    limits = [jnp.float32(arguments.LARGEST_SCALE)]
    if self.sigma is not None:
      mean = jnp.sum(values) * share
      is_filled = jnp.arange(self.window, dtype=jnp.int32) < state.accepted
      # Select instead of multiplying by a mask, since 0 * NaN is NaN.
      square = jnp.sum(jnp.where(is_filled, values - mean, 0) ** 2)
      deviation = jnp.sqrt(square / jnp.maximum(count - 1, 1))
      deviation = jnp.maximum(deviation, _ROUNDING * jnp.abs(mean))
      limits.append(largest * (mean + self.sigma * deviation))
    if self.factor is not None:
      limits.append(largest * (self.factor * jnp.sum(jnp.abs(values)) * share))
    least = max(2, self.window // 2) if self.warmup is None else self.warmup
    limit: jax.Array = jnp.min(jnp.stack(limits))
    return jnp.where(state.accepted < least, limits[0], limit)

  def _read(self, state: SpikeGuardState, value: ArrayLike) -> jax.Array:
    """Returns a checked value as float32[]."""
    self._check_state(state)
    found = reasons.to_float32(arguments.as_real_scalar("value", value))
    if missing := devices.axes_beyond(found, state.accepted):
      axes = devices.listed(missing)
      raise ValueError(
        "`value` must be the same on all devices that share a SpikeGuard, got "
        f"one that varies along {axes}; take jax.lax.pmean(value, {axes})."
      )
    return found

  def _check_state(self, state: object) -> None:
    state = states.check_kind(state, SpikeGuardState, "accepted")
    if state.values.shape != (self.window,):
      raise ValueError(
        f"`window` must stay what it was in the run that is continued, got "
        f"{self.window} for a state of shape {state.values.shape}; take the "
        "old one, or begin anew with init(). The states of several runs need "
        "jax.vmap."
      )


def _check_above(name: str, value: object, least: float) -> float:
  """Returns `value` as a float, which must be above `least`."""
  number = arguments.check_number(name, value)
  if number <= least:
    raise ValueError(f"`{name}` must be above {least}, got {shown(value)}.")
  return number


def _check_values(name: str, value: object) -> int:
  """Returns a number of values, at least the 2 that a deviation takes."""
  count = arguments.check_integer(name, value, unit="values")
  if not 2 <= count <= arguments.LARGEST_COUNT:
    raise ValueError(
      f"`{name}` must be between 2 and 2**31 - 1 values, got {shown(value)}."
    )
  return count
