"""The one state machine behind every rule that counts overflows.

Loss scalers differ in a handful of choices: what growth waits for, what
forgives an earlier overflow, between which bounds S stays. Here those choices
are data and the machine is one, so another system's rule is another `Engine`.
"""

import dataclasses
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class DynamicLossScaleState(NamedTuple):
  """State of a loss scale that grows on clean steps and shrinks on overflow.

  Attributes:
    loss_scale: float32[], the loss scale S.
    clean_steps: int32[], steps without overflow since S last moved or the last
      overflow, whichever is later.
    overflows: int32[], overflows that count towards the hysteresis.
  """

  loss_scale: jax.Array
  clean_steps: jax.Array
  overflows: jax.Array

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S, by which float32 gradients are multiplied."""
    return 1 / self.loss_scale


@dataclasses.dataclass(frozen=True)
class Engine:
  """When S moves, and how far.

  Attributes:
    growth_factor: S is multiplied by it on growth.
    backoff_factor: S is multiplied by it when it shrinks.
    growth_interval: clean steps that growth waits for.
    hysteresis: overflows that a shrink waits for.
    min_scale: S stays at or above it.
    max_scale: S stays at or below it.
    growth_test: how the count of clean steps meets the interval: "at_least" it;
      "equal" to it, so that a count which is past the interval never grows; or
      a "multiple" of it, where the count runs on after growth.
    refill: what forgives the overflows counted so far: a "clean" step, a
      "growth", a "backoff".
    initial_clean_steps: where the count of clean steps starts, at first and
      after an overflow; -1 makes the growth after it wait one step more.
  """

  growth_factor: float
  backoff_factor: float
  growth_interval: int
  hysteresis: int
  min_scale: float
  max_scale: float
  growth_test: Literal["at_least", "equal", "multiple"] = "at_least"
  refill: frozenset[str] = frozenset({"clean"})
  initial_clean_steps: int = 0

  def __post_init__(self) -> None:
    if self.growth_test not in ("at_least", "equal", "multiple"):
      raise ValueError(
        "`growth_test` must be 'at_least', 'equal' or 'multiple', got "
        f"{self.growth_test!r}."
      )
    if not self.refill <= {"clean", "growth", "backoff"}:
      raise ValueError(
        "`refill` must be made of 'clean', 'growth' and 'backoff', got "
        f"{set(self.refill)}."
      )

  def init(self, init_scale: float) -> DynamicLossScaleState:
    """Returns the state of a machine that has seen no step.

    Args:
      init_scale: the first S.
    """
    return DynamicLossScaleState(
      loss_scale=jnp.full((), init_scale, jnp.float32),
      clean_steps=jnp.full((), self.initial_clean_steps, jnp.int32),
      overflows=jnp.full((), 0, jnp.int32),
    )

  def update(
    self, state: DynamicLossScaleState, overflow: jax.Array | bool
  ) -> DynamicLossScaleState:
    """Returns the state after one more step.

    Args:
      state: the state that the step used.
      overflow: bool[], whether the step's gradients were unusable.
    """
    overflow = jnp.asarray(overflow, bool)
    clean_steps = jnp.where(
      overflow,
      jnp.int32(self.initial_clean_steps),
      optax.safe_increment(state.clean_steps),
    )
    kept_overflows = (
      jnp.zeros_like(state.overflows)
      if "clean" in self.refill
      else state.overflows
    )
    overflows = jnp.where(
      overflow, optax.safe_increment(state.overflows), kept_overflows
    )

    shrinks = overflow & (overflows >= self.hysteresis)
    grows = ~overflow & self._is_time_to_grow(clean_steps)

    # A product that leaves float32 is inf or 0, and the bound catches it.
    shrunk = jnp.maximum(
      state.loss_scale * jnp.float32(self.backoff_factor),
      jnp.float32(self.min_scale),
    )
    grown = jnp.minimum(
      state.loss_scale * jnp.float32(self.growth_factor),
      jnp.float32(self.max_scale),
    )
    loss_scale = jnp.where(
      shrinks, shrunk, jnp.where(grows, grown, state.loss_scale)
    )

    if self.growth_test != "multiple":
      clean_steps = jnp.where(grows, 0, clean_steps)
    if "growth" in self.refill:
      overflows = jnp.where(grows, 0, overflows)
    if "backoff" in self.refill:
      overflows = jnp.where(shrinks, 0, overflows)
    return state._replace(
      loss_scale=loss_scale,
      clean_steps=clean_steps,
      overflows=overflows,
    )

  def at_floor(self, state: DynamicLossScaleState) -> jax.Array:
    """Returns bool[]: S cannot shrink any further."""
    return state.loss_scale <= jnp.float32(self.min_scale)

  def _is_time_to_grow(self, clean_steps: jax.Array) -> jax.Array:
    match self.growth_test:
      case "at_least":
        return clean_steps >= self.growth_interval
      case "equal":
        return clean_steps == self.growth_interval
      case "multiple":
        return (clean_steps > 0) & (clean_steps % self.growth_interval == 0)
