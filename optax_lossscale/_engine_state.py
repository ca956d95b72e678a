"""The engine's state: what it counts, and where a system gives up."""

import enum
from typing import Any
from typing import NamedTuple

import jax

# MindSpore's manager gives up after this many overflows in a row.
MOST_OVERFLOWS_IN_A_ROW = 1000


class Failure(enum.IntEnum):
  """Where a system gives up: the code in the state, 0 for not yet."""

  AT_MINIMUM = 1
  BELOW_MINIMUM = 2
  TOO_MANY_OVERFLOWS = 3


class DynamicLossScaleState(NamedTuple):
  """State of a loss scale that grows on clean steps and shrinks on overflow.

  The first three are in every such state; the others are None, and so no leaf
  of the pytree, unless the rule needs them.

  Attributes:
    loss_scale: float32[], the loss scale S.
    clean_steps: int32[], steps without overflow since S last moved or the last
      overflow, whichever is later.
    overflows: int32[], overflows that count towards the hysteresis.
    total_steps: int32[], steps so far, where a checkpoint has that number.
    growth_interval: float32[], the clean steps that growth waits for, where
      that moves with S.
    steps_since_move: int32[], steps since S last moved, and
    overflows_since_shrink: int32[], overflows since it last shrank, where it
      shrinks on a share of overflows.
    failure: int32[], a `Failure` once the rule's system would have given up.
  """

  loss_scale: jax.Array
  clean_steps: jax.Array
  overflows: jax.Array
  total_steps: Any = None
  growth_interval: Any = None
  steps_since_move: Any = None
  overflows_since_shrink: Any = None
  failure: Any = None

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; above 2**126 subnormal, so 0 on some backends."""
    return 1 / self.loss_scale

  def __repr__(self) -> str:
    fields = ", ".join(
      f"{name}={value!r}"
      for name, value in self._asdict().items()
      if value is not None
    )
    return f"{type(self).__name__}({fields})"
