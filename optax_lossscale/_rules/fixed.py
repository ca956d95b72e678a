"""The rule that keeps S fixed, and the state without loss scaling."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._rules import base


class NoLossScaleState(NamedTuple):
  """The empty state of loss scaling that is switched off; S is 1."""

  @property
  def loss_scale(self) -> np.float32:
    """float32[], the loss scale S."""
    return np.float32(1)


class FixedLossScaleState(NamedTuple):
  """State of a loss scale that never moves.

  Attributes:
    loss_scale: float32[], the loss scale S.

  Examples:
    >>> import optax_lossscale as ols
    >>> state: ols.FixedLossScaleState = ols.FixedLossScale(8.0).init()
    >>> print(state.loss_scale, state.inv_scale)
    8.0 0.125
  """

  loss_scale: jax.Array

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / self.loss_scale


@dataclasses.dataclass(frozen=True)
class FixedLossScale(base.LossScale):
  """A loss scale that never moves.

  Use it when a good S is known, so that no step is lost to finding it. S lives
  in the state, so a new `scale` has no effect on a run in progress. To change
  S, use `optax.tree.set(opt_state, loss_scale_state=rule.init())`. Every
  overflow is reported as `stalled`, because the next step uses the same S.

  Attributes:
    scale: S, a normal float32. A power of two makes scaling exact; any other S
      causes a `WiringWarning`.
    skip: whether an overflow skips the step (keyword only).

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `scale` is not a usable loss scale.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.FixedLossScale(1024.0)
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale, state.inv_scale)
    1024.0 0.0009765625

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2.
  """

  scale: float = 2.0**10

  def __post_init__(self) -> None:
    super().__post_init__()
    arguments.check_fields(self, scale=arguments.check_first_scale)

  def init(self) -> FixedLossScaleState:
    """Returns the state, which is the same at every step."""
    return FixedLossScaleState(jnp.full((), self.scale, jnp.float32))

  def update(
    self,
    state: FixedLossScaleState,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> FixedLossScaleState:
    """Returns `state` unchanged. See `LossScale.update`."""
    del amax
    arguments.as_flag(overflow, arguments.scale_of(state))  # Only checks them.
    return state

  def stalled(
    self, state: FixedLossScaleState, overflow: ArrayLike
  ) -> jax.Array:
    """Returns bool[], True on any overflow, because S cannot move."""
    return arguments.as_flag(overflow, arguments.scale_of(state))
