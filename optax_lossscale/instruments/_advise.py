"""Advice on tuning a rule: what to change, and why."""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_lossscale._rules import base
from optax_lossscale._rules import loss_scales
from optax_lossscale._step import checks
from optax_lossscale.instruments import _history
from optax_lossscale.instruments import _replay
from optax_lossscale.presets import declaration

_FEWEST_STEPS = 100
_TOLERATED_SHARE = 1 / 1000
_MANY_AT_START = 3
_LONG_SHARE = 1 / 10

# A wide headroom, the headroom to keep, and how far to lower S, in bits.
_WIDE = 6.0
_RESERVE = 2
_LOWER = 4

# The fewest moves of S to judge amax by, and the steps used on each side.
_FEWEST_MOVES = 5
_BESIDE = 16

# Maps the field names of rules to the common names of arguments.
_COLUMNS = {
  "init_scale": "init_scale",
  "growth_interval": "growth_interval",
  "hysteresis": "hysteresis",
  "min_scale": "min_scale",
  "scale_min": "min_scale",
  "max_scale": "max_scale",
  "scale_max": "max_scale",
  "headroom": "headroom",
}

# The names that presets give to a fixed S.
_FIXED_SCALES = frozenset({"loss_scale", "initial_scale", "init_loss_scaling"})

_IsBetter = Callable[[_replay.ReplayedRun, _replay.ReplayedRun], bool]


class Advice(NamedTuple):
  """One recommended change; `str()` returns it as a line of text.

  Attributes:
    argument: the rule's name for the argument; None if no argument helps.
    old: the current value.
    new: the value to try.
    reason: the finding, and a replay's figures before and after the change.
  """

  argument: str | None
  old: float | None
  new: float | None
  reason: str

  def __str__(self) -> str:
    if self.argument is None:
      return self.reason
    change = f"{_text(self.old)} -> {_text(self.new)}"
    return f"{self.argument}: {change}: {self.reason}"


def advise(
  history: _history.History,
  rule: base.LossScale,
  *,
  check: checks.Check = checks.nonfinite(jnp.float16),
) -> list[Advice]:
  """Returns what to change in a rule, given a run that was recorded with it.

  It looks for these problems, in this order, and proposes a remedy for each:

  - gradients that do not follow S, such as those of `jax.grad`; it then reports
    nothing else. The test needs 5 moves of S by half a bit or more at 8 bits of
    headroom. On three quarters of these, amax must be off by more than half;
  - NaN that probably no S prevents, which points to a fault in the model. If S
    may be the cause as well, the advice says how to find out;
  - overflows with amax 1 bit or more below the dtype's limit. The caller or a
    status register reported these, so no argument helps;
  - overflows with S at its floor: a lower `min_scale`. If the rule has no such
    argument, nothing else helps;
  - 3 or more overflows before the first clean step: a smaller `init_scale`, the
    S of that step, or up to 4 bits less if that avoids later overflows;
  - at least 6 bits of headroom on every step of the first tenth of the run: a
    larger `init_scale`, and a larger `max_scale` if that is in the way;
  - S at its ceiling on a tenth of the steps, each with at least 6 bits of
    headroom: a larger `max_scale`;
  - overflows on more than 1 step in 1000 (and more than one) after the first
    clean step: a longer `growth_interval`, doubled until overflows are rarer or
    at least a quarter fewer; then a `hysteresis` of 1, and more `headroom`;
  - a mean headroom of 6 bits or more: a shorter `growth_interval`, halved until
    the mean is less; then a larger `hysteresis`, and less `headroom`;
  - a fixed S that overflows as often, or could be 64 times as large: a new S;
  - overflows that are as frequent, but that no argument avoids.

  It counts overflows, because a record does not show whether an overflow cost a
  step or only a micro-batch. Figures marked "in a replay" are not recorded, but
  come from a replay of the rule. A count is marked "at best" if amax was inf
  on more than a tenth of the steps, since its true size is unknown.

  A history does not hold the share of gradients that underflowed, so the advice
  relies on headroom instead. It proposes a larger S only if the dtype has a
  smaller range than float32, since unused range does no harm in float32 and
  bfloat16. It proposes nothing from fewer than 100 steps.

  An S computed from amax leaves 2 bits of headroom on all but 1 step in 1000.
  A value is proposed only if a replay of the recorded steps confirms it. That
  replay must have fewer overflows, or a mean headroom that is at least 1 bit
  smaller with overflows on at most 1 step in 1000. Each change is tried on top
  of the earlier ones. See `replay` for what a replay cannot show.

  Args:
    history: the recorded steps, ideally some thousands. If the first step is
      above 1, or if S moves but does not begin at the rule's first S, as after
      a checkpoint, the history counts as the middle of a run: the replay begins
      at the recorded S, and nothing is proposed for the start.
    rule: the rule that the run used: this library's, a preset, or any other.
      The advice uses the rule's own argument names. In an unknown rule, only
      arguments with the names of `DynamicLossScale` are tuned.
    check: `nonfinite` or `saturated` of the computation's dtype, as for
      `replay`.

  Returns:
    The recommended changes; an empty list if there are none.

  Raises:
    TypeError: if an argument has the wrong type.

  Examples:
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> steps = 100
    >>> history = ols.instruments.History(
    ...   step=np.arange(1, steps + 1),
    ...   loss_scale=np.full(steps, 1024, np.float32),
    ...   amax=np.full(steps, 64, np.float32),
    ...   overflow=np.full(steps, False),
    ... )
    >>> rule = ols.presets.npu_exponential(
    ...   init_loss_scale=2.0**22,
    ...   incr_every_n_steps=1000,
    ...   decr_every_n_nan_or_inf=1,
    ...   decr_ratio=0.5,
    ... )
    >>> for advice in ols.instruments.advise(history, rule):
    ...   print(advice.argument, advice.old, advice.new)
    ...   print(advice.reason.partition("; ")[2])
    init_loss_scale 4194304.0 524288.0
    overflows 3 -> 0 of 100, mean headroom 1.0 -> 1.0 bits
  """
  _replay.check_history(history)
  tuning = _Tuning(history, rule, check)
  if not _look_for_unscaled(tuning) and tuning.count:
    _look_for_nan(tuning)
    _look_for_callers(tuning)
    if tuning.count < _FEWEST_STEPS:
      tuning.tell(
        f"{tuning.count} steps are too few to propose anything: record "
        f"{_FEWEST_STEPS} at least, best some thousand"
      )
    else:
      _propose(tuning)
  return tuning.advice


class _Knob(NamedTuple):
  """An argument of a rule, with the rule's own name for it."""

  name: str
  value: Any


class _Tuning:
  """The tuning of a rule on a history, with the changes so far."""

  def __init__(
    self, history: _history.History, rule: base.LossScale, check: checks.Check
  ) -> None:
    self.history = history
    self._options: dict[str, Any] = {"check": check}
    self.count = len(history.step)
    self.tolerated = max(1, math.floor(self.count * _TOLERATED_SHARE))
    self.advice: list[Advice] = []
    # The rule with the changes proposed so far, and its replay.
    self.rule = rule
    self.replay = self._replay(rule)
    self.begins = self._begins()
    # A fixed rule keeps its own S, whatever S the history begins with.
    if self.count and not self.begins and self.knob("scale") is None:
      self._options["loss_scale"] = float(history.loss_scale[0])
      self.replay = self._replay(rule)
    limit = _replay.limit_of(self.replay.dtype)
    self.known = _replay.known_steps(history, limit)
    # log2 of the largest S at which each step is clean; NaN if no S works.
    self.stood = _replay.largest_scales(self.known, limit)
    self.lost_anyway = self.replay.lost_steps - int(np.sum(self.lost))
    # A larger S saves nothing if the dtype has the range of float32.
    self.is_wide = int(jnp.finfo(self.replay.dtype).maxexp) >= 128

  @property
  def lost(self) -> npt.NDArray[np.bool_]:
    """bool[n], True for a lost step that another S would have kept."""
    history = self.replay.history
    is_other = np.isnan(history.amax) | np.asarray(self.known.is_callers)
    return history.overflow & ~is_other

  def tolerates(self, replay: _replay.ReplayedRun) -> bool:
    """Returns whether a replay loses no more steps than are tolerated."""
    return replay.lost_steps - self.lost_anyway <= self.tolerated

  @property
  def first_clean(self) -> int:
    """The index of the first step not lost; the number of steps if all were."""
    return int(np.argmin([*self.replay.history.overflow, False]))

  @property
  def spare(self) -> npt.NDArray[np.float64]:
    """float64[n], how many more times S could have doubled on each step."""
    loss_scale = np.asarray(self.replay.history.loss_scale, np.float64)
    return self.stood - np.log2(loss_scale)

  @property
  def source(self) -> str:
    """A note that figures come from a replay; empty if they were recorded."""
    seen, own = self.history, self.replay.history
    is_same = np.array_equal(seen.loss_scale, own.loss_scale)
    is_same &= np.array_equal(seen.overflow, own.overflow)
    return "" if is_same else " (in a replay)"

  def knob(self, column: str) -> _Knob | None:
    """Returns the argument with this common name, if the rule has one."""
    return _knobs(self.rule).get(column)

  def tell(self, reason: str) -> None:
    """Adds advice that does not change an argument."""
    self.advice.append(Advice(None, None, None, reason))

  def attempt(
    self,
    column: str,
    values: Iterable[float],
    seen: str,
    is_better: _IsBetter,
    is_enough: Callable[[_replay.ReplayedRun], bool] = lambda replay: True,
  ) -> bool:
    """Tries values of an argument; keeps the first good one, or the best."""
    knob = self.knob(column)
    if knob is None:
      return False
    best = knob.value, self.rule, self.replay
    for value in values:
      try:
        rule = _turn(self.rule, knob, value)
      except ValueError:
        continue  # The rule rejects this value.
      replay = self._replay(rule)
      if is_better(replay, best[2]):
        best = value, rule, replay
        if is_enough(replay):
          break
    value, rule, replay = best
    if replay is self.replay:
      return False
    is_vague = np.mean(self.known.is_bound) > _LONG_SHARE
    at_best = " at best" if is_vague else ""
    self.advice.append(
      Advice(
        knob.name,
        knob.value,
        value,
        f"{seen}{self.source}; overflows {self.replay.lost_steps} -> "
        f"{replay.lost_steps} of {self.count}{at_best}, mean headroom "
        f"{_bits(self.replay.mean_headroom)} -> {_bits(replay.mean_headroom)} "
        "bits",
      )
    )
    self.rule, self.replay = rule, replay
    return True

  def _begins(self) -> bool:
    """Returns whether the history begins at the start of a run."""
    if not self.count or int(self.history.step[0]) > 1:
      return False
    scales = np.asarray(self.history.loss_scale)
    is_first = scales[0] == self.replay.history.loss_scale[0]
    # S may come from a checkpoint even at step 1. But if S never moves, the run
    # was recorded at a fixed S, in order to replay other rules on it.
    return bool(is_first or np.all(scales == scales[0]))

  def _replay(self, rule: base.LossScale) -> _replay.ReplayedRun:
    return _replay.replay(rule, self.history, **self._options)


def _look_for_unscaled(tuning: _Tuning) -> bool:
  """Returns whether amax fails to follow S, and adds advice if so."""
  headroom = tuning.history.headroom(tuning.replay.dtype)
  is_known = np.isfinite(headroom)
  moves = np.diff(np.log2(np.float64(tuning.history.loss_scale[is_known])))
  (last,) = np.nonzero(moves)
  moves, parts = moves[last], np.split(headroom[is_known], last + 1)
  # Takes medians because steps vary, and only of nearby steps because the
  # gradients change during training, and S with them.
  before = np.array([np.median(part[-_BESIDE:]) for part in parts[:-1]])
  after = np.array([np.median(part[:_BESIDE]) for part in parts[1:]])
  # Near the limit overflows hide a large amax; small moves of S may follow it.
  is_clear = (before >= _WIDE + _RESERVE) & (np.abs(moves) >= 0.5)
  followed = ((before - after) / moves)[is_clear]
  if followed.size < _FEWEST_MOVES:
    return False
  # The median alone says little about gradients that vary wildly.
  low, median, high = np.quantile(followed, [0.25, 0.5, 0.75])
  is_off = bool(high < 0.5 or low > 1.5)
  if is_off:
    tuning.tell(
      f"these gradients do not follow S: over {followed.size} moves of S, amax "
      f"moved {round(median, 1) + 0.0} times as far; make them with "
      "scaled_value_and_grad(fun, opt_state), pass them to update unchanged, "
      "and record again"
    )
  return is_off


def _look_for_nan(tuning: _Tuning) -> None:
  for is_nan, seen in (
    (
      np.isnan(tuning.replay.history.amax),
      "that left the steps around them 6 bits of headroom or more: most "
      "likely no loss scale mends these;",
    ),
    (
      tuning.known.is_doubtful,
      "at which the steps next to them were clean, some with less than 6 bits "
      "of headroom: S or the model may have made these, and they count as "
      "overflows; run such a batch again at S / 64, and if it is NaN again,",
    ),
  ):
    if count := np.sum(is_nan):
      tuning.tell(
        f"{count} of {tuning.count} steps had NaN gradients at an S {seen} "
        "instruments.where_overflow(fun, check=nonfinite()) names the "
        "operation that makes them"
      )


def _look_for_callers(tuning: _Tuning) -> None:
  if count := int(np.sum(tuning.known.is_callers)):
    headroom = tuning.history.headroom(tuning.replay.dtype)
    least = np.nanmin(headroom[tuning.known.is_callers], initial=np.inf)
    seen = (
      f"{least:.1f} bits or more below the limit" if least < np.inf else "0"
    )
    tuning.tell(
      f"{count} of {tuning.count} steps were overflows although amax was "
      f"{seen}: nothing shows "
      "that S was too large, so these are not held against any S; look at what "
      "set overflow=, and if that is a status register, "
      "instruments.where_overflow(fun) names the operation that overflows"
    )


def _propose(tuning: _Tuning) -> None:
  """Adds advice: the changes, then the overflows that no change prevents."""
  _look_at_fixed_scale(tuning)
  if _is_stuck_at_floor(tuning):
    return
  _look_at_start(tuning)
  if not tuning.is_wide:
    _look_at_climb(tuning)
    _look_at_ceiling(tuning)
  _look_at_lost_steps(tuning)
  if not tuning.is_wide:
    _look_at_headroom(tuning)
  _look_at_what_is_left(tuning)


def _look_at_what_is_left(tuning: _Tuning) -> None:
  """Reports lost steps if no change was proposed."""
  lost = int(np.sum(tuning.lost))
  is_silent = all(advice.argument is None for advice in tuning.advice)
  if is_silent and tuning.rule.skip and lost > tuning.tolerated:
    tuning.tell(
      f"{lost} of {tuning.count} steps overflowed{tuning.source}, and no "
      "argument of the rule that was tried avoids that: look at the run "
      "itself, which may diverge; instruments.where_overflow names the "
      "operation that overflows"
    )


def _look_at_fixed_scale(tuning: _Tuning) -> None:
  knob = tuning.knob("scale")
  known = np.sort(tuning.stood[np.isfinite(tuning.stood)])
  if knob is None or not known.size:
    return
  # log2 of the S at which all but 1 step in 1000 would be clean.
  stood = math.floor(known[math.floor(known.size / 1000)])
  lost = int(np.sum(tuning.lost))
  spare = stood - math.log2(knob.value)
  value = _power(stood - _RESERVE)
  is_better: _IsBetter = _loses_fewer
  seen = f"{lost} of {tuning.count} steps overflowed"
  if lost <= tuning.tolerated:
    if spare < _WIDE or tuning.is_wide:
      return
    is_better = _wastes_less(tuning)
    seen = f"S could have been 2**{math.floor(spare)} times as large"
  tuning.attempt("scale", [value], seen, is_better)


def _is_stuck_at_floor(tuning: _Tuning) -> bool:
  """Proposes a lower floor if S is stuck at it; returns True if that fails."""
  # A step that is applied anyway, as by a disabled scaler, is not lost.
  at_floor = tuning.lost & tuning.replay.stalled & tuning.replay.skipped
  if tuning.knob("scale") or not np.any(at_floor):
    return False
  floor = float(np.min(tuning.replay.history.loss_scale[at_floor]))
  value = _power(math.floor(np.min(tuning.stood[at_floor])))
  seen = f"{int(np.sum(at_floor))} steps overflowed with S at its floor"
  # Some rules have `min_scale` and `hold_below`, and may need both lowered.
  proposed = [
    # Some rules let S fall to the floor itself, others only close to it.
    tuning.attempt(column, [value, value / 2], seen, _loses_fewer)
    for column in ("min_scale", "hold_below")
  ]
  if not any(proposed):
    tuning.tell(
      f"{seen}, {floor:g}, and no argument lowers it{tuning.source}; "
      "instruments.where_overflow names the operation that overflows"
    )
  return not any(proposed)


def _look_at_start(tuning: _Tuning) -> None:
  first = tuning.first_clean
  lost = int(np.sum(tuning.lost[:first]))
  if not tuning.begins or lost < _MANY_AT_START:
    return
  if first < tuning.count:
    exponent = math.log2(tuning.replay.history.loss_scale[first])
  else:
    exponent = np.nanmin(tuning.stood)
  before = tuning.replay

  def is_better(replay: _replay.ReplayedRun, than: _replay.ReplayedRun) -> bool:
    # Still smaller values must prevent the losses, not just delay them.
    is_worth_it = than is before or tuning.tolerates(replay)
    return is_worth_it and _loses_fewer(replay, than)

  tuning.attempt(
    "init_scale",
    [_power(math.floor(exponent) - less) for less in range(_LOWER + 1)],
    f"{lost} steps overflowed before the first clean one",
    is_better,
    tuning.tolerates,
  )


def _look_at_ceiling(tuning: _Tuning) -> None:
  knob = tuning.knob("max_scale")
  if knob is None:
    return
  is_at_ceiling = tuning.replay.history.loss_scale >= np.float32(knob.value)
  stays = is_at_ceiling & ~tuning.replay.history.overflow
  spare = np.nanmin(tuning.spare[stays], initial=np.inf)
  if np.sum(stays) < tuning.count * _LONG_SHARE or not _WIDE <= spare < np.inf:
    return
  tuning.attempt(
    "max_scale",
    [knob.value * _power(math.floor(spare) - _RESERVE)],
    f"S was at its ceiling on {int(np.sum(stays))} steps, and could have been "
    f"2**{math.floor(spare)} times as large",
    _wastes_less(tuning),
  )


def _look_at_climb(tuning: _Tuning) -> None:
  # A step that is NaN at every S does not end the climb.
  steps = int(np.argmax([*(tuning.spare < _WIDE), True]))
  least = np.nanmin(tuning.spare[:steps], initial=np.inf)
  if (
    not tuning.begins
    or steps < tuning.count * _LONG_SHARE
    or not np.isfinite(least)
  ):
    return
  seen = (
    f"on the first {steps} steps S could have been 2**{math.floor(least)} "
    "times as large"
  )
  value = _power(math.floor(np.nanmin(tuning.stood[:steps])) - _RESERVE)
  ceiling = tuning.knob("max_scale")
  if ceiling is not None and ceiling.value < value:
    tuning.attempt(
      "max_scale",
      [value],
      seen,
      lambda replay, than: replay.lost_steps <= than.lost_steps,
    )
  tuning.attempt("init_scale", [value], seen, _wastes_less(tuning))


def _look_at_lost_steps(tuning: _Tuning) -> None:
  anyway = tuning.lost_anyway
  others = tuning.replay.lost_steps - np.sum(tuning.lost[tuning.first_clean :])

  def is_better(replay: _replay.ReplayedRun, than: _replay.ReplayedRun) -> bool:
    return replay.lost_steps - anyway <= 0.75 * (than.lost_steps - anyway)

  for column, values in (
    (
      "growth_interval",
      lambda old: [
        x for i in range(1, 31) if (x := int(old) << i) <= tuning.count
      ],
    ),
    ("hysteresis", lambda old: [1]),
    ("headroom", lambda old: [old + more for more in range(1, 7)]),
  ):
    knob = tuning.knob(column)
    lost = tuning.replay.lost_steps - others
    if knob is not None and lost > tuning.tolerated:
      tuning.attempt(
        column,
        values(knob.value),
        f"{lost} of {tuning.count} steps overflowed after the start",
        is_better,
        lambda replay: bool(replay.lost_steps - others <= tuning.tolerated),
      )


def _look_at_headroom(tuning: _Tuning) -> None:
  turned = {advice.argument for advice in tuning.advice}
  for column, values in (
    ("growth_interval", lambda old: [int(old) >> i for i in range(1, 31)]),
    ("hysteresis", lambda old: [old + 1, old + 2]),
    ("headroom", lambda old: [old - less for less in range(1, 7)]),
  ):
    knob = tuning.knob(column)
    mean = tuning.replay.mean_headroom
    if knob is not None and knob.name not in turned and mean >= _WIDE:
      tuning.attempt(
        column,
        values(knob.value),
        f"S could have been 2**{math.floor(mean)} times as large on average",
        _wastes_less(tuning),
        lambda replay: replay.mean_headroom < _WIDE,
      )


def _power(exponent: float) -> float:
  """Returns 2**exponent, limited to the range of S."""
  return math.ldexp(1.0, int(min(max(exponent, -126), 127)))


def _loses_fewer(
  replay: _replay.ReplayedRun, than: _replay.ReplayedRun
) -> bool:
  """Returns whether a replay loses fewer steps than another."""
  return replay.lost_steps < than.lost_steps


def _wastes_less(tuning: _Tuning) -> _IsBetter:
  """Returns a test for replays that save 1 bit of headroom at few overflows."""
  most = max(tuning.replay.lost_steps, tuning.lost_anyway + tuning.tolerated)
  return lambda replay, than: (
    replay.mean_headroom <= than.mean_headroom - 1 and replay.lost_steps <= most
  )


def _text(value: Any) -> str:
  """Returns a number as a person would write it: 2**15, 1000, 0.5."""
  number = float(value)
  mantissa, exponent = math.frexp(number)
  # A small integer is written in full: it may be a number of steps.
  least = 4 if type(value) is float else 16
  if mantissa == 0.5 and abs(exponent - 1) >= least:
    return f"2**{exponent - 1}"
  return f"{number:g}" if not number.is_integer() else str(int(number))


def _bits(headroom: float) -> str:
  return "unknown" if math.isnan(headroom) else f"{headroom:.1f}"


def _knobs(rule: base.LossScale) -> dict[str, _Knob]:
  """Returns the arguments that can be tuned, by their common names."""
  inner = _inner(rule)
  if inner is not None:
    # The wrapping rule sets the first S.
    return {c: k for c, k in _knobs(inner).items() if c != "init_scale"}
  if isinstance(rule, declaration.PresetLossScale):
    found = _of_preset(rule)
  elif isinstance(rule, loss_scales.FixedLossScale):
    found = {"scale": _Knob("scale", rule.scale)}
  elif dataclasses.is_dataclass(rule):
    found = {
      _COLUMNS[field.name]: _Knob(field.name, getattr(rule, field.name))
      for field in dataclasses.fields(rule)
      if field.init and field.name in _COLUMNS
    }
  else:
    found = {}
  # Systems that accept a bound of 0 treat it as no bound.
  return {
    column: knob
    for column, knob in found.items()
    if knob.value or (column == "headroom" and knob.value == 0)
  }


def _turn(rule: base.LossScale, knob: _Knob, value: float) -> base.LossScale:
  """Returns the rule with a new value for one argument."""
  inner = _inner(rule)
  if inner is not None:
    changes: dict[str, Any] = {"rule": _turn(inner, knob, value)}
  elif isinstance(rule, declaration.PresetLossScale):
    arguments = {**dict(rule.arguments), knob.name: value}
    return declaration.PRESETS[rule.system].function(**arguments)
  else:
    changes = {knob.name: value}
  turned: base.LossScale = dataclasses.replace(rule, **changes)
  return turned


def _of_preset(rule: declaration.PresetLossScale) -> dict[str, _Knob]:
  arguments = dict(rule.arguments)
  if isinstance(rule._machine, loss_scales.FixedLossScale):
    # One argument is S, under the name that the system gives it.
    fixed = [
      _Knob(name, value)
      for name, value in arguments.items()
      if name in _FIXED_SCALES
      and type(value) in (int, float)
      and value == rule._machine.scale
    ]
    return {"scale": fixed[0]} if fixed else {}
  columns = declaration.PRESETS[rule.system].columns
  return {
    column: _Knob(cell.name, arguments[cell.name])
    for column, cell in columns.items()
    if isinstance(cell, declaration.Argument)
  }


def _inner(rule: base.LossScale) -> base.LossScale | None:
  """Returns the rule that another rule, such as `WarmStart`, wraps."""
  inner = getattr(rule, "rule", None)
  return inner if isinstance(inner, base.LossScale) else None
