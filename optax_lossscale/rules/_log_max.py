"""OpenSeq2Seq's LogMax rule: log2(amax) modeled as normally distributed."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._rules import base
from optax_lossscale._rules import fields
from optax_lossscale._step import skipping
from optax_lossscale.rules import _amax_and_scale

# Above every log2(S). It is not inf, because jax_debug_infs would raise.
_NO_CEILING = 2.0**20


class LogMaxLossScaleState(NamedTuple):
  """State of `LogMaxLossScale`.

  Attributes:
    loss_scale: float32[], the loss scale S.
    mean: float32[], running mean of log2(unscaled amax), decayed by `beta1`.
    slow_mean: float32[], the same mean, decayed by `beta2`.
    variance: float32[], running variance about `slow_mean`, decayed by `beta2`.
    weight: float32[], the sum of the weights in `mean`; it approaches 1.
    slow_weight: float32[], the same for `slow_mean`.
    log2_ceiling: float32[], a temporary limit on log2(S), set by an overflow;
      2**20 before the first overflow.
  """

  loss_scale: jax.Array
  mean: jax.Array
  slow_mean: jax.Array
  variance: jax.Array
  weight: jax.Array
  slow_weight: jax.Array
  log2_ceiling: jax.Array

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / self.loss_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMaxLossScale(base.LossScale):
  """Keeps overflows rare by modeling log2(amax) as normally distributed.

  Let m be the running mean of x = log2(unscaled amax) and s its standard
  deviation. S is the largest power of two below 2**(log_max - m -
  overflow_std_dev * s). S follows the gradients without probing how large it
  may be, and the more amax varies, the more bits stay free. With the defaults,
  an overflow has a probability of 0.1 % in this model.

  Unlike in the published rule, an overflow enters the means as an amax for
  which S was too large by a factor of two. S is halved on every overflow, and
  each doubling after that takes at least 1 / (1 - beta1) clean steps.

  The rule loses steps if amax grows by more bits than it varied before. While
  all gradients are 0, S does not move: to find a first S, use `WarmStart`. In a
  float16 loss, an S of 2**16 or more becomes inf: pass `scale_max=2.0**15`.

  Attributes:
    scale_min: the floor. The default is the smallest normal float16.
    scale_max: the ceiling. The default is the largest power of two whose
      inverse is a normal float32.
    log_max: log2 of the value at which the computation's dtype overflows: 16
      for float16, 128 for bfloat16.
    beta1: the weight of the past in the mean; at least 0, below 1.
    beta2: the same for the standard deviation; at least 0, below 1.
    overflow_std_dev: the number of standard deviations to keep free, 0 or more.
    skip: whether an overflow skips the step.

  All are keyword only. The first S is 1, or the bound nearest to 1.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if an argument is out of range.

  Examples:
    >>> import jax
    >>> import optax_lossscale as ols
    >>> rule = ols.rules.LogMaxLossScale()
    >>> update, state = jax.jit(rule.update), rule.init()
    >>> for _ in range(200):
    ...   state = update(state, False, amax=state.loss_scale / 4)
    >>> print(state.loss_scale)
    131072.0

  References:
    Kuchaiev et al., `Mixed-Precision Training for NLP and Speech Recognition
    with OpenSeq2Seq <https://arxiv.org/abs/1805.10387>`_, 2018.
  """

  scale_min: float = 2.0**-14
  scale_max: float = 2.0**126
  log_max: float = 16.0
  beta1: float = 0.99
  beta2: float = 0.999
  overflow_std_dev: float = 3.09

  def __post_init__(self) -> None:
    super().__post_init__()
    fields.check_bounds(self, "scale_min", "scale_max")
    arguments.check_fields(
      self,
      log_max=arguments.check_number,
      overflow_std_dev=arguments.check_not_negative,
      beta1=_check_beta,
      beta2=_check_beta,
    )

  def init(self) -> LogMaxLossScaleState:
    """Returns the state before the first step."""
    # Each number has its own buffer, so that the state can be donated.
    number = functools.partial(jnp.full, (), dtype=jnp.float32)
    return LogMaxLossScaleState(
      loss_scale=number(min(max(1.0, self.scale_min), self.scale_max)),
      mean=number(0),
      slow_mean=number(0),
      variance=number(0),
      weight=number(0),
      slow_weight=number(0),
      log2_ceiling=number(_NO_CEILING),
    )

  def update(
    self,
    state: LogMaxLossScaleState,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> LogMaxLossScaleState:
    """Returns the state after a step. See `LossScale.update`.

    Raises:
      ValueError: if `amax` is None.
    """
    overflow, amax, tells = _amax_and_scale.read_step(state, overflow, amax)
    # Damaged statistics are reset, because they and S would never recover.
    fresh = self.init()._replace(loss_scale=state.loss_scale)
    least = jnp.stack([state.variance, state.weight, state.slow_weight])
    is_sound = jnp.all(jnp.isfinite(jnp.stack(state))) & jnp.all(least >= 0)
    state = skipping.select(is_sound, state, fresh)
    log2_scale = bits.log2(state.loss_scale)
    # An unusable amax is replaced by 1, and the resulting x is not used.
    x = bits.log2(jnp.where(tells, amax, np.float32(1))) - log2_scale
    # On an overflow, assume that S was one bit too large, or more by amax.
    beyond = np.float32(self.log_max) + 1 - log2_scale
    beyond = jnp.where(tells, jnp.maximum(x, beyond), beyond)
    entered = self._enter(state, jnp.where(overflow, beyond, x))
    rest = 1 - np.float32(self.beta1)
    ceiling = jnp.where(overflow, log2_scale - 1, state.log2_ceiling + rest)

    free = np.float32(self.overflow_std_dev) * jnp.sqrt(entered.variance)
    wanted = np.float32(self.log_max) - (entered.mean + free)
    # Take the next lower integer, because an amax of 2**log_max overflows.
    wanted = jnp.minimum(jnp.ceil(wanted) - 1, jnp.floor(ceiling))
    exponent = jnp.clip(wanted, -126, 127).astype(jnp.int32)
    moved = entered._replace(
      loss_scale=_amax_and_scale.power_of_two(exponent), log2_ceiling=ceiling
    )
    used: LogMaxLossScaleState = skipping.select(tells | overflow, moved, state)
    return used._replace(
      loss_scale=jnp.clip(used.loss_scale, self.scale_min, self.scale_max)
    )

  def stalled(
    self, state: LogMaxLossScaleState, overflow: ArrayLike
  ) -> jax.Array:
    """Returns bool[], True on an overflow with S at or below `scale_min`."""
    return _amax_and_scale.at_floor(state, self.scale_min, overflow)

  def _enter(
    self, state: LogMaxLossScaleState, x: jax.Array
  ) -> LogMaxLossScaleState:
    """Returns the state with one more x in its statistics."""
    # The variance is a mean of squared differences, since the difference of two
    # means of squares would lose most of its precision if x is far from 0.
    beta1, beta2 = np.float32(self.beta1), np.float32(self.beta2)
    weight = beta1 * state.weight + (1 - beta1)
    slow_weight = beta2 * state.slow_weight + (1 - beta2)
    share, slow_share = (1 - beta1) / weight, (1 - beta2) / slow_weight
    difference = x - state.slow_mean
    square = state.variance + slow_share * difference * difference
    variance = (1 - slow_share) * square
    return state._replace(
      mean=state.mean + share * (x - state.mean),
      slow_mean=state.slow_mean + slow_share * difference,
      # A single step has no variance, so the first step sets it to one bit.
      variance=jnp.where(state.slow_weight > 0, variance, np.float32(1)),
      weight=weight,
      slow_weight=slow_weight,
    )


def _check_beta(name: str, value: object) -> float:
  beta = arguments.check_not_negative(name, value)
  # Check the value in float32: if it rounds to 1, all weights become 0.
  if np.float32(beta) >= 1:
    raise ValueError(
      f"`{name}` must be at least 0 and below 1 (in float32), got {value!r}."
    )
  return beta
