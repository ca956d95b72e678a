"""Graphcore's rule, driven by the share of gradients above an edge."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._rules import base
from optax_lossscale.rules import _amax_and_scale


class HistogramCounts(NamedTuple):
  """A histogram of the scaled gradients with two bins.

  Attributes:
    below: float32[], the number of elements with a magnitude below the edge.
    at_or_above: float32[], the number of all others, including inf and NaN.
  """

  below: jax.Array
  at_or_above: jax.Array


class HistogramLossScaleState(NamedTuple):
  """State of `HistogramLossScale`.

  Attributes:
    loss_scale: float32[], the loss scale S.
    steps_since_update: int32[], steps since the last decision about S.
  """

  loss_scale: jax.Array
  steps_since_update: jax.Array

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / self.loss_scale


@dataclasses.dataclass(frozen=True)
class HistogramLossScale(base.LossScale):
  """Halves S if too many gradients are large, and doubles it otherwise.

  Every `update_period` steps it counts the gradients at or above an edge. If
  their share is above the threshold, S is halved; if not, S is doubled. There
  is no middle case, so S goes up and down by design. With the defaults, the
  edge is three bits below the largest float16. In models with fewer than ten
  million parameters, a single gradient above the edge then halves S, so only
  the largest gradient matters. In larger models a few outliers do not matter.

  Graphcore's rule has no bounds and skips no steps, because the hardware clips
  overflows. Here S has bounds, and an overflow skips the step and halves S
  immediately, whatever the period.

  The rule loses a step if amax leaps by more bits than there are above the
  edge, or one bit fewer if S has just doubled. If S is far too large, the rule
  loses a step for each bit on the way down: see `WarmStart`. In a float16 loss,
  an S of 2**16 or more becomes inf: pass `max_scale=2.0**15`.

  Inside `loss_scaling`, the count reads all gradients once more. Without
  counts, as in a replay of recorded amax, a single element at or above the edge
  halves S. An `amax_tap` affects the rule only if it measures an overflow.

  Attributes:
    init_scale: S of the first step. From the default, S doubles its way up
      without losing a step.
    bin_edge_location: the edge, as a share of the largest finite value of
      `dtype`; above 0, at most 1.
    threshold_upper_count_proportion: S is halved if a larger share of the
      elements is at or above the edge; at least 0, below 1.
    update_period: the number of steps between decisions.
    dtype: the dtype of the computation.
    min_scale: the floor. The default is the smallest normal float16.
    max_scale: the ceiling. The default is the largest power of two whose
      inverse is a normal float32.
    skip: whether an overflow skips the step.

  All but the first are keyword only.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if an argument is out of range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.rules.HistogramLossScale(1024.0)
    >>> state = rule.init()
    >>> for amax in (4096.0, 8192.0, 4096.0):
    ...   state = rule.update(state, False, amax=amax)
    ...   print(state.loss_scale)
    2048.0
    1024.0
    2048.0

  References:
    Automatic loss scaling in Graphcore's `PopART
    <https://github.com/graphcore/popart>`_, `AutomaticLossScalingSettings`,
    whose arguments have the same names in camel case.
  """

  init_scale: float = 1.0
  _: dataclasses.KW_ONLY
  bin_edge_location: float = 0.125
  threshold_upper_count_proportion: float = 1e-7
  update_period: int = 1
  dtype: Any = jnp.float16
  min_scale: float = 2.0**-14
  max_scale: float = 2.0**126

  def __post_init__(self) -> None:
    super().__post_init__()
    arguments.check_fields(
      self,
      bin_edge_location=arguments.check_number,
      threshold_upper_count_proportion=arguments.check_not_negative,
    )
    if not 0 < self.bin_edge_location <= 1:
      raise ValueError(
        "`bin_edge_location` must be above 0 and at most 1, a share of the "
        f"largest finite value of `dtype`, got {self.bin_edge_location}."
      )
    if self.threshold_upper_count_proportion >= 1:
      raise ValueError(
        "`threshold_upper_count_proportion` must be below 1, got "
        f"{self.threshold_upper_count_proportion!r}: no share is above it."
      )
    arguments.check_bounds(self, "min_scale", "init_scale", "max_scale")
    arguments.check_fields(
      self,
      update_period=arguments.check_count,
      dtype=arguments.check_dtype,
    )

  def init(self) -> HistogramLossScaleState:
    """Returns the state before the first step."""
    return HistogramLossScaleState(
      loss_scale=jnp.full((), self.init_scale, jnp.float32),
      steps_since_update=jnp.full((), 0, jnp.int32),
    )

  def measure(self, gradients: Any) -> HistogramCounts:
    """Returns the number of elements below the edge, and of all others.

    Args:
      gradients: the scaled gradients. For a complex element, the larger part
        counts.
    """
    below = above = jnp.full((), 0, jnp.float32)
    for gradient in filter(leaves.is_gradient, jax.tree.leaves(gradients)):
      where = bits.reached(gradient, self._edge, inclusive=True)
      # Count in integers, because a float32 stops counting at 2**24.
      count = jnp.sum(where, dtype=jnp.uint32).astype(jnp.float32)
      above = above + count
      below = below + (np.float32(gradient.size) - count)
    return HistogramCounts(below=below, at_or_above=above)

  def update(
    self,
    state: HistogramLossScaleState,
    overflow: jax.Array | bool,
    *,
    amax: jax.Array | None = None,
    measured: HistogramCounts | None = None,
  ) -> HistogramLossScaleState:
    """Returns the state after a step. See `LossScale.update`.

    `measured` is the result of `measure`; without it `amax` decides.

    Raises:
      ValueError: if `amax` and `measured` are both None.
    """
    overflow = arguments.as_flag(overflow, state.loss_scale)
    if amax is not None or measured is None:
      amax = _amax_and_scale.require_amax(amax)
      overflow |= ~jnp.isfinite(amax)
    if measured is None:
      too_large = ~(jnp.asarray(amax) < np.float32(self._edge))
    else:
      share = self.threshold_upper_count_proportion
      odds = np.float32(share / (1 - share))
      too_large = measured.at_or_above > odds * measured.below
    steps = state.steps_since_update + 1
    decides = overflow | (steps >= self.update_period)
    # S is limited before it is doubled, which could otherwise give inf.
    largest_half = np.float32(arguments.LARGEST_SCALE / 2)
    moved = jnp.where(
      overflow | too_large,
      state.loss_scale / 2,
      jnp.minimum(state.loss_scale, largest_half) * 2,
    )
    loss_scale = jnp.where(decides, moved, state.loss_scale)
    return HistogramLossScaleState(
      loss_scale=_amax_and_scale.clip(
        loss_scale, self.min_scale, self.max_scale
      ),
      steps_since_update=jnp.where(decides, 0, steps),
    )

  def stalled(
    self, state: HistogramLossScaleState, overflow: jax.Array | bool
  ) -> jax.Array:
    """Returns bool[], True on an overflow with S at or below `min_scale`."""
    return _amax_and_scale.at_floor(state.loss_scale, self.min_scale, overflow)

  @property
  def _edge(self) -> float:
    return bits.limit(self.dtype, None) * self.bin_edge_location
