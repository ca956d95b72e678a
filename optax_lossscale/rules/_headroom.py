"""The rule that keeps some bits free above the largest recent amax."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike

from optax_lossscale._base import arguments
from optax_lossscale._rules import base
from optax_lossscale._rules import fields
from optax_lossscale.rules import _amax_and_scale

# An exponent that allows any S. It is far above all exponents of float32 and
# far below the largest int32.
_ANY = 2**20

# The entries of such a window take 256 KiB.
_LARGEST_WINDOW = 2**16

# A ceiling rises by one bit after this many windows of clean steps.
_WINDOWS_A_BIT = 4


class HeadroomLossScaleState(NamedTuple):
  """State of `HeadroomLossScale`.

  Attributes:
    loss_scale: float32[], the loss scale S.
    fitting_exponents: int32[window], for each of the last steps, the largest e
      such that its amax fits with S = 2**e; 2**20 if amax does not show it.
    next_entry: int32[], the index of the entry that the next step replaces.
    steps_without_amax: int32[], steps since the last clean step with a nonzero
      amax, at most `window`; `window` if there has been no such step.
    ceiling_exponent: int32[], a temporary limit on log2(S), set by an overflow
      that amax does not explain; 2**20 for no limit.
    overflowed_exponent: int32[], least log2(S) of these overflows, or 2**20.
    overflows_in_a_row: int32[], consecutive overflows, up to the last step.
    steps_below_ceiling: int32[], clean steps since the ceiling last moved.
  """

  loss_scale: jax.Array
  fitting_exponents: jax.Array
  next_entry: jax.Array
  steps_without_amax: jax.Array
  ceiling_exponent: jax.Array
  overflowed_exponent: jax.Array
  overflows_in_a_row: jax.Array
  steps_below_ceiling: jax.Array

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / self.loss_scale


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale(base.LossScale):
  """Keeps some bits free above the largest amax of recent steps.

  S is the largest power of two at which each of the last `window` steps would
  have had at least `headroom` bits left: amax * 2**headroom is at most the
  largest finite value of `dtype`. No step is lost to probing for S.

  On an overflow S falls by one bit, then by two, three and so on if overflows
  follow in a row. It stays below the value that overflowed, and rises by one
  bit after every four windows of clean steps, unless their amax shows that S
  was too large.

  Before the first clean step with a nonzero amax, or after `window` steps
  without one, no amax is known. S then leaps 16 bits down on an overflow, and
  16 bits up on a step whose gradients are all 0, up to 2**32.

  A larger `window` or `headroom` saves a step now and then, but costs small
  gradients precision on every step. The rule cannot predict that an
  activation's gradient overflows while the parameters' are small: add an
  `amax_tap`, or use a dynamic rule, which may lose fewer steps.
  In a float16 loss, an S of 2**16 or more becomes inf: set `max_scale`.

  Attributes:
    init_scale: S of the first step.
    headroom: the bits to keep free, 0 or more.
    window: the number of recent steps that count, at most 2**16.
    dtype: the computation's dtype, whose largest finite value is the limit.
    min_scale: the floor. The default is the smallest normal float16.
    max_scale: the ceiling. The default is the largest power of two whose
      inverse is a normal float32.
    skip: whether an overflow skips the step.

  All but the first are keyword only. An S that you set in the state lasts one
  step. A new `window` needs a new state.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if an argument is out of range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.rules.HeadroomLossScale(headroom=2, window=2)
    >>> state = rule.init()
    >>> for true_amax in (2.0, 8.0, 2.0, 2.0):
    ...   state = rule.update(state, False, amax=true_amax * state.loss_scale)
    ...   print(state.loss_scale)
    4096.0
    1024.0
    1024.0
    4096.0

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2; `FP8 Formats for
    Deep Learning <https://arxiv.org/abs/2209.05433>`_, 2022, for the window.
  """

  init_scale: float = 1.0
  _: dataclasses.KW_ONLY
  headroom: int = 1
  window: int = 50
  dtype: DTypeLike = jnp.float16
  min_scale: float = 2.0**-14
  max_scale: float = 2.0**126

  def __post_init__(self) -> None:
    super().__post_init__()
    fields.check_bounds(self, "min_scale", "init_scale", "max_scale")
    arguments.check_fields(
      self,
      headroom=_amax_and_scale.check_bits,
      window=arguments.check_count,
      dtype=arguments.check_dtype,
    )
    if self.window > _LARGEST_WINDOW:
      raise ValueError(
        f"`window` must be at most 2**16 steps, got {self.window}: the state "
        "has an entry for each of them, which every step reads and writes."
      )

  def init(self) -> HeadroomLossScaleState:
    """Returns the state before the first step."""
    return HeadroomLossScaleState(
      loss_scale=jnp.full((), self.init_scale, jnp.float32),
      fitting_exponents=jnp.full((self.window,), _ANY, jnp.int32),
      next_entry=jnp.full((), 0, jnp.int32),
      steps_without_amax=jnp.full((), self.window, jnp.int32),
      ceiling_exponent=jnp.full((), _ANY, jnp.int32),
      overflowed_exponent=jnp.full((), _ANY, jnp.int32),
      overflows_in_a_row=jnp.full((), 0, jnp.int32),
      steps_below_ceiling=jnp.full((), 0, jnp.int32),
    )

  def update(
    self,
    state: HeadroomLossScaleState,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> HeadroomLossScaleState:
    """Returns the state after a step. See `LossScale.update`.

    Raises:
      ValueError: if `amax` is None.
    """
    overflow, amax, tells = _amax_and_scale.read_step(state, overflow, amax)
    fitting = _amax_and_scale.fitting_exponent(
      amax, state.loss_scale, self.dtype
    )
    fitting_exponents = jnp.where(
      jnp.arange(self.window, dtype=jnp.int32) == state.next_entry,
      jnp.where(tells, fitting, _ANY),
      state.fitting_exponents,
    )
    found = tells & ~overflow
    steps_without_amax = jnp.where(
      found, 0, jnp.minimum(state.steps_without_amax + 1, self.window)
    )
    fits = jnp.min(fitting_exponents)
    state = state._replace(
      fitting_exponents=fitting_exponents,
      next_entry=(state.next_entry + 1) % self.window,
      steps_without_amax=steps_without_amax,
      **self._ceiling(state, overflow, found, fits),
    )
    known = jnp.minimum(fits - self.headroom, state.ceiling_exponent)
    exponent = _amax_and_scale.exponent(state.loss_scale)
    leap = jnp.where(
      overflow,
      exponent - _amax_and_scale.LEAP,
      jnp.minimum(_amax_and_scale.leap_up(exponent), known),
    )
    wanted = jnp.where(steps_without_amax < self.window, known, leap)
    loss_scale = _amax_and_scale.power_of_two(wanted)
    return state._replace(
      loss_scale=jnp.clip(loss_scale, self.min_scale, self.max_scale)
    )

  def stalled(
    self, state: HeadroomLossScaleState, overflow: ArrayLike
  ) -> jax.Array:
    """Returns bool[], True on an overflow with S at or below `min_scale`."""
    return _amax_and_scale.at_floor(state, self.min_scale, overflow)

  def _ceiling(
    self,
    state: HeadroomLossScaleState,
    overflow: jax.Array,
    found: jax.Array,
    fits: jax.Array,
  ) -> dict[str, jax.Array]:
    """Returns the next values of the fields that remember overflows."""
    here = _amax_and_scale.exponent(state.loss_scale)
    row = jnp.where(overflow, state.overflows_in_a_row + 1, 0)
    # An S far below what amax allows hardly causes an isolated overflow.
    is_alone = (row == 1) & (state.steps_without_amax < self.window)
    lowest = jnp.where(
      is_alone, fits - self.headroom - _amax_and_scale.LEAP, -_ANY
    )
    below = jnp.minimum(here, jnp.maximum(here - row, lowest))
    steps = jnp.where(overflow, 0, state.steps_below_ceiling + 1)
    rises = steps == _WINDOWS_A_BIT * self.window
    # Forget overflows that amax explains, or that came before any amax.
    is_over = found & (
      (fits < state.overflowed_exponent)
      | (state.steps_without_amax == self.window)
    )
    ceiling = jnp.minimum(
      state.ceiling_exponent + rises.astype(jnp.int32),
      jnp.where(overflow, below, _ANY),
    )
    overflowed = jnp.minimum(
      state.overflowed_exponent, jnp.where(overflow, here, _ANY)
    )
    return {
      "ceiling_exponent": jnp.where(is_over, _ANY, ceiling),
      "overflowed_exponent": jnp.where(is_over, _ANY, overflowed),
      "overflows_in_a_row": row,
      "steps_below_ceiling": jnp.where(rises, 0, steps),
    }
