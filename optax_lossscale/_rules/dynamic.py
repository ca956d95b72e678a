"""The rule that counts overflows."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_lossscale._base import arguments
from optax_lossscale._rules import base
from optax_lossscale._rules import engine
from optax_lossscale._rules import fields


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(base.LossScale):
  """A loss scale that grows on clean steps and shrinks on overflow.

  It finds S by itself and follows the gradients as they shrink during training,
  at the cost of a skipped step now and then.

  Attributes:
    init_scale: the first S. The default is the largest power of two in float16,
      so a float16 loss works from the first step. An S that is not a power of
      two causes a `WiringWarning`.
    growth_factor: multiplies S on growth; above 1.
    backoff_factor: multiplies S when S shrinks; between 0 and 1.
    growth_interval: S grows after exactly this many clean steps in a row,
      counted from the last overflow or growth.
    hysteresis: S shrinks after this many overflows in a row, and on each
      further overflow until a clean step resets the count.
    min_scale: the floor. The default is the smallest normal float16. In a
      float16 loss, any S below 2**-24 becomes 0.
    max_scale: the ceiling. The default is the largest power of two whose
      inverse is a normal float32.
    skip: whether an overflow skips the step.

  All but the first are keyword only. Factors that are powers of two make
  scaling exact.

  A run can continue with the same state and different arguments (but
  `init_scale`), which apply from the next step on.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if an argument is out of range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.DynamicLossScale(2.0**15, growth_interval=2)
    >>> state = rule.init()
    >>> for overflow in (True, False, False):
    ...   state = rule.update(state, overflow)
    ...   print(state.loss_scale)
    16384.0
    16384.0
    32768.0

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018. `hysteresis` works as
    Megatron-LM documents; Megatron-LM's code resets the count only on growth.
  """

  init_scale: float = 2.0**15
  _: dataclasses.KW_ONLY
  growth_factor: float = 2.0
  backoff_factor: float = 0.5
  growth_interval: int = 2000
  hysteresis: int = 1
  min_scale: float = 2.0**-14
  max_scale: float = 2.0**126

  def __post_init__(self) -> None:
    super().__post_init__()
    bounds = ("min_scale", "init_scale", "max_scale")
    fields.check_bounds(self, *bounds, interval="growth_interval")
    arguments.check_fields(
      self,
      growth_factor=fields.check_growth_factor,
      backoff_factor=fields.check_backoff_factor,
      growth_interval=arguments.check_count,
      hysteresis=arguments.check_count,
    )

  @property
  def _as_engine(self) -> engine.Engine:
    # A subclass may have more fields.
    names = {x.name for x in dataclasses.fields(DynamicLossScale)} - {"skip"}
    return engine.Engine(**{name: getattr(self, name) for name in names})

  def init(self) -> engine.DynamicLossScaleState:
    """Returns the state before the first step."""
    return self._as_engine.init()

  def update(
    self,
    state: engine.DynamicLossScaleState,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> engine.DynamicLossScaleState:
    """Returns the state after a step. See `LossScale.update`."""
    del amax
    state = self._as_engine.update(state, overflow)
    # Needed only if the bounds or S were changed mid-run.
    loss_scale = jnp.minimum(state.loss_scale, jnp.float32(self.max_scale))
    return state._replace(
      loss_scale=jnp.maximum(loss_scale, jnp.float32(self.min_scale))
    )

  def stalled(
    self, state: engine.DynamicLossScaleState, overflow: ArrayLike
  ) -> jax.Array:
    """Returns bool[], True on an overflow with S at or below `min_scale`."""
    overflow = arguments.as_flag(overflow, arguments.scale_of(state))
    is_below = state.loss_scale < jnp.float32(self.min_scale)
    return self._as_engine.stalled(state, overflow) | (is_below & overflow)
