"""A first S for any rule, found from the first step's amax."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike

from optax_lossscale._base import arguments
from optax_lossscale._base import switches
from optax_lossscale._rules import base
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states
from optax_lossscale.rules import _amax_and_scale

_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


class WarmStartState(NamedTuple):
  """State of `WarmStart`.

  Attributes:
    rule_state: the rule's own state, which contains S.
    is_warm: bool[], True once the first S is found and the rule moves it.
  """

  rule_state: Any
  is_warm: jax.Array

  @property
  def loss_scale(self) -> jax.Array:
    """float32[], the loss scale S."""
    return self.rule_state.loss_scale

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / self.loss_scale


@dataclasses.dataclass(frozen=True)
class WarmStart(base.LossScale):
  """Gives any rule a first S that fits the first step's amax.

  The first S of a rule is a guess. If it is too large, a run begins with
  skipped steps. If it is too small, small gradients are 0 until S has grown.
  With this wrapper the first step is a probe at a small S. If its amax is
  neither 0 nor an overflow, the next S is the power of two that leaves this
  amax `headroom` bits. From then on the rule moves S as if it had started
  there. Otherwise the probe continues, 16 bits lower after an overflow and 16
  bits higher if all gradients were 0, up to 2**32.

  It does not help if the gradients then grow by more bits than `headroom`.

  Attributes:
    rule: the rule. Its first S is not used.
    probe_scale: S of the first step.
    headroom: the bits that the first S leaves free, 0 or more.
    dtype: the computation's dtype, whose largest finite value is the limit.

  All but the first are keyword only. `skip` is the rule's. The rule's bounds do
  not limit the probe. If the first S is out of bounds, the rule's own updates
  move it inside.

  Raises:
    TypeError: if an argument has the wrong type, or the state of `rule` does
      not hold S as a leaf.
    ValueError: if an argument is out of range, or `rule` is a `WarmStart`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> rule = ols.rules.WarmStart(ols.DynamicLossScale(), probe_scale=2.0**32)
    >>> state = rule.update(rule.init(), True, amax=jnp.inf)
    >>> print(state.loss_scale)
    65536.0
    >>> state = rule.update(state, False, amax=64.0)
    >>> print(state.loss_scale == 2.0**23)
    True

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2.
  """

  rule: base.LossScale
  _: dataclasses.KW_ONLY
  probe_scale: float = 1.0
  headroom: int = 2
  dtype: DTypeLike = jnp.float16
  # Not an argument: the rule decides whether an overflow skips the step.
  skip: bool = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    requirements.check_rule("rule", self.rule)
    if isinstance(self.rule, WarmStart):
      raise ValueError(
        f"`rule` must not be a WarmStart, got {self.rule!r}: a first S can be "
        "found once."
      )
    object.__setattr__(self, "skip", self.rule.skip)
    arguments.check_fields(
      self,
      probe_scale=arguments.check_first_scale,
      headroom=_amax_and_scale.check_bits,
      dtype=arguments.check_dtype,
    )
    super().__post_init__()
    with jax.ensure_compile_time_eval(), switches.lifted():
      self.init()

  def init(self) -> WarmStartState:
    """Returns the state before the first step.

    Raises:
      TypeError: if S cannot be set in the rule's state.
    """
    return WarmStartState(
      rule_state=self._begin(jnp.full((), self.probe_scale, jnp.float32)),
      is_warm=jnp.full((), False),
    )

  def update(
    self,
    state: WarmStartState,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> WarmStartState:
    """Returns the state after a step. See `LossScale.update`.

    Raises:
      ValueError: if `amax` is None.
    """
    is_over, amax, tells = _amax_and_scale.read_step(state, overflow, amax)
    moved = self.rule.update(state.rule_state, overflow, amax=amax)
    fitting = _amax_and_scale.fitting_exponent(
      amax, state.loss_scale, self.dtype
    )
    exponent = _amax_and_scale.exponent(state.loss_scale)
    probed = jnp.where(
      is_over,
      exponent - _amax_and_scale.LEAP,
      _amax_and_scale.leap_up(exponent),
    )
    found = tells & ~is_over
    next_probe = _amax_and_scale.power_of_two(
      jnp.where(found, fitting - self.headroom, probed)
    )
    begun = self._begin(jnp.clip(next_probe, _SMALLEST, _LARGEST))
    return WarmStartState(
      rule_state=skipping.select(state.is_warm, moved, begun),
      is_warm=state.is_warm | found,
    )

  def stalled(self, state: WarmStartState, overflow: ArrayLike) -> jax.Array:
    """Returns bool[], True if S is stuck. A probe is stuck at 2**-126."""
    probe_is_stuck = _amax_and_scale.at_floor(state, _SMALLEST, overflow)
    rule_is_stuck = self.rule.stalled(state.rule_state, overflow)
    return jnp.where(state.is_warm, rule_is_stuck, probe_is_stuck)

  def _begin(self, loss_scale: jax.Array) -> Any:
    """Returns the rule's first state, with `loss_scale` as its S."""
    return states.replace_scale(self.rule.init(), loss_scale)
