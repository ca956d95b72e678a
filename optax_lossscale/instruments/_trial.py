"""A rule on a recorded run, and what becomes of it with other arguments."""

from collections.abc import Callable
from collections.abc import Iterable
import math
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_lossscale._rules import base
from optax_lossscale.instruments import _history
from optax_lossscale.instruments import _knobs
from optax_lossscale.instruments import _recorded
from optax_lossscale.instruments import _replay

_TOLERATED_SHARE = 1 / 1000

IsBetter = Callable[[_replay.Replay, _replay.Replay], bool]


class Advice(NamedTuple):
  """One thing to change; its text is a line for a person.

  Attributes:
    argument: what the rule calls it; None where no argument helps.
    old: its value.
    new: what to try.
    reason: what was seen, and the figures of a replay without and with it.
  """

  argument: str | None
  old: Any
  new: Any
  reason: str

  def __str__(self) -> str:
    if self.argument is None:
      return self.reason
    return f"{self.argument}: {_text(self.old)} -> {_text(self.new)}: " + (
      self.reason
    )


class Trial:
  """A rule on a trace, as far as it has been improved.

  Attributes:
    begins: whether the trace begins where the run did.
    rule: with what was proposed.
    run: the replay of that rule.
    stood: float64[n], log2 of the largest S that each step stands; NaN where it
      stands none.
    is_callers: bool[n], the overflows of which amax shows nothing.
    is_wide: whether the dtype's range is float32's, so that nothing is gained
      by a larger S.
    advice: what was proposed.
  """

  def __init__(
    self,
    trace: _history.History,
    rule: base.LossScale,
    dtype: Any,
    saturating: bool,
  ) -> None:
    self._trace = trace
    self._options: dict[str, Any] = {"dtype": dtype, "saturating": saturating}
    self.rule = rule
    # As it is; with the checks of the arguments.
    self.run = self._replay(rule)
    self.begins = self._begins()
    # A fixed S is the rule's own, whoever recorded.
    if len(trace.step) and not self.begins and self.knob("scale") is None:
      self._options["loss_scale"] = float(trace.loss_scale[0])
      self.run = self._replay(rule)
    self.advice: list[Advice] = []
    limit = _recorded.limit_of(self.run.dtype)
    known = _recorded.read(trace, limit)
    self.stood = _recorded.largest_scales(known, limit)
    self.is_callers: npt.NDArray[np.bool_] = known.is_callers
    # Nothing underflows there that float32 would keep.
    self.is_wide = int(jnp.finfo(self.run.dtype).maxexp) >= 128

  @property
  def count(self) -> int:
    """The number of steps."""
    return len(self._trace.step)

  @property
  def tolerated(self) -> int:
    """Steps that may be lost."""
    return max(1, math.floor(self.count * _TOLERATED_SHARE))

  @property
  def lost(self) -> npt.NDArray[np.bool_]:
    """bool[n], the lost steps that another S would have kept."""
    is_nan = np.isnan(self.run.history.amax)
    return self.run.history.overflow & ~is_nan & ~self.is_callers

  @property
  def lost_anyway(self) -> int:
    """Steps that are lost at every S."""
    return self.run.lost_steps - int(np.sum(self.lost))

  def tolerates(self, run: _replay.Replay) -> bool:
    """Returns whether a replay loses no more steps than may be."""
    return run.lost_steps - self.lost_anyway <= self.tolerated

  @property
  def first_clean(self) -> int:
    """The first step that was not lost; the number of steps if all were."""
    (clean,) = np.nonzero(~self.run.history.overflow)
    return int(clean[0]) if clean.size else self.count

  @property
  def recorded_headroom(self) -> npt.NDArray[np.float64]:
    """float64[n], bits below the limit, as recorded."""
    return self._trace.headroom(self.run.dtype)

  @property
  def log2_scale(self) -> npt.NDArray[np.float64]:
    """float64[n], the exponent of S."""
    return np.log2(np.asarray(self.run.history.loss_scale, np.float64))

  def knob(self, column: str) -> _knobs.Knob | None:
    """Returns the argument that does this, if the rule has one."""
    return _knobs.knobs(self.rule).get(column)

  def tell(self, reason: str) -> None:
    """Adds advice that is about no argument."""
    self.advice.append(Advice(None, None, None, reason))

  def attempt(
    self,
    column: str,
    values: Callable[[Any], Iterable[Any]],
    seen: str,
    is_better: IsBetter,
    is_enough: Callable[[_replay.Replay], bool] = lambda run: True,
  ) -> bool:
    """Tries values of an argument; keeps the first that is enough, or best."""
    knob = self.knob(column)
    if knob is None:
      return False
    best: tuple[Any, base.LossScale, _replay.Replay] | None = None
    for value in values(knob.value):
      try:
        rule = _knobs.turn(self.rule, knob, value)
      except ValueError:
        continue  # The rule does not go there.
      run = self._replay(rule)
      if is_better(run, self.run if best is None else best[2]):
        best = value, rule, run
        if is_enough(run):
          break
    if best is None:
      return False
    value, rule, run = best
    self.advice.append(
      Advice(
        knob.name,
        knob.value,
        value,
        f"{seen}; steps lost {self.run.lost_steps} -> {run.lost_steps} of "
        f"{self.count}, mean headroom {_bits(self.run.mean_headroom)} -> "
        f"{_bits(run.mean_headroom)} bits",
      )
    )
    self.rule, self.run = rule, run
    return True

  def _begins(self) -> bool:
    """Returns whether the rule's own first S is the one to begin with."""
    if not len(self._trace.step) or int(self._trace.step[0]) != 1:
      return False
    scales = np.asarray(self._trace.loss_scale)
    is_first = scales[0] == self.run.history.loss_scale[0]
    # Counted from 1, S may still come from a checkpoint. But one that never
    # moved is another rule's, recorded to be replayed.
    return bool(is_first or np.all(scales == scales[0]))

  def _replay(self, rule: base.LossScale) -> _replay.Replay:
    return _replay.replay(rule, self._trace, **self._options)


def loses_fewer(run: _replay.Replay, than: _replay.Replay) -> bool:
  """Returns whether it loses fewer steps."""
  return run.lost_steps < than.lost_steps


def loses_no_more(run: _replay.Replay, than: _replay.Replay) -> bool:
  """Returns whether it loses no more steps."""
  return run.lost_steps <= than.lost_steps


def loses_at_most(most: int, run: _replay.Replay) -> bool:
  """Returns whether it loses so many steps, or fewer."""
  return run.lost_steps <= most


def loses_a_quarter_less(trial: Trial) -> IsBetter:
  """Returns a test for three of four lost steps, or fewer.

  Of those that another S would have kept.
  """
  anyway = trial.lost_anyway

  def is_better(run: _replay.Replay, than: _replay.Replay) -> bool:
    return run.lost_steps - anyway <= 0.75 * (than.lost_steps - anyway)

  return is_better


def wastes_less(trial: Trial) -> IsBetter:
  """Returns a test for a mean headroom that is smaller by a bit at least.

  Without more steps lost than may be, or than the trial's own run loses.
  """
  before = trial.run.lost_steps
  most = max(before, trial.lost_anyway + trial.tolerated)

  def is_better(run: _replay.Replay, than: _replay.Replay) -> bool:
    wastes_less = run.mean_headroom <= than.mean_headroom - 1
    return wastes_less and run.lost_steps <= most

  return is_better


def _text(value: Any) -> str:
  """Returns a number as a person writes it: 2**15, 1000, 0.5."""
  number = float(value)
  mantissa, exponent = math.frexp(number)
  # A power of two among integers may well be a number of steps.
  least = 4 if type(value) is float else 16
  if mantissa == 0.5 and abs(exponent - 1) >= least:
    return f"2**{exponent - 1}"
  return f"{number:g}" if not number.is_integer() else str(int(number))


def _bits(headroom: float) -> str:
  return "unknown" if math.isnan(headroom) else f"{headroom:.1f}"
