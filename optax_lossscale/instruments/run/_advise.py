"""Advice on tuning a rule: what to change, and why."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_lossscale._base import formats
from optax_lossscale._rules import base
from optax_lossscale._rules import fixed
from optax_lossscale._step import checks
from optax_lossscale.instruments.run import _history
from optax_lossscale.instruments.run import _replay
from optax_lossscale.presets import declaration

_FEWEST_STEPS = 100
_TOLERATED_SHARE = 1 / 1000
_MANY_AT_START = 3
_LONG_SHARE = 1 / 10

# A wide headroom, and the headroom to keep, in bits.
_WIDE = 6.0
_RESERVE = 2

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

# The names that rules and presets give to a fixed S.
_FIXED_SCALES = {"scale", "loss_scale", "initial_scale", "init_loss_scaling"}


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

  It looks for overflows and unused range and proposes values that mend them, if
  a replay of the recorded steps confirms it. docs/guides/instruments.md lists
  what it looks for and what it proposes, in order. Faults that no argument
  mends come first, such as NaN that probably no S prevents. If the gradients do
  not follow S, like those of `jax.grad`, it reports nothing else.

  Nothing is proposed from fewer than 100 steps, nor a larger S for a dtype with
  the range of float32, where unused range does no harm. Figures marked "in a
  replay" were not recorded. A count is "at best" if amax was inf on more than a
  tenth of the steps.

  Args:
    history: the recorded steps, ideally some thousands. If the first step is
      above 1, or if S moves but does not begin at the rule's first S, as after
      a checkpoint, the history counts as the middle of a run: the replay begins
      at the recorded S, and nothing is proposed for the start.
    rule: the rule that the run used. The advice uses its own argument names. In
      an unknown rule only those of `DynamicLossScale` are tuned.
    check: `nonfinite` or `saturated` of the computation's dtype, as for
      `replay`.

  Returns:
    The recommended changes; an empty list if there are none.

  Raises:
    TypeError: if an argument has the wrong type.

  Examples:
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> history = ols.instruments.History(
    ...   step=np.arange(1, 101),
    ...   loss_scale=np.full(100, 1024, np.float32),
    ...   amax=np.full(100, 64, np.float32),
    ...   overflow=np.full(100, False),
    ... )
    >>> rule = ols.presets.torch(init_scale=2.0**22)
    >>> [advice] = ols.instruments.advise(history, rule)
    >>> print(advice.argument, advice.old, advice.new)
    init_scale 4194304.0 524288.0
    >>> print(advice.reason.partition("; ")[2])
    overflows 3 -> 0 of 100, mean headroom 1.0 -> 1.0 bits
  """
  _history.check_history(history)
  if not len(history.step):
    return []
  tuning = _Tuning(history, rule, check)
  notes = [Advice(None, None, None, note) for note in _notes(tuning)]
  return [*notes, *tuning.changes]


class _Knob(NamedTuple):
  """An argument of a rule, with the rule's own name for it."""

  name: str
  value: Any


class _Problem(NamedTuple):
  """What a change of an argument must mend."""

  seen: str
  value: float  # The S that should mend it, or the longest interval to try.
  lost: int = 0  # How many overflows it is; 0 if it is unused range.
  gain: int = 1  # How many bits of unused range a change must save.


class _Tuning:
  """The tuning of a rule on a history, with the changes so far."""

  def __init__(
    self, history: _history.History, rule: base.LossScale, check: checks.Check
  ) -> None:
    self.history = history
    self.count = len(history.step)
    self.tolerated = max(1, math.floor(self.count * _TOLERATED_SHARE))
    self.run = functools.partial(_replay.replay, history=history, check=check)
    # The rule with the changes so far, and its replay.
    self.rule, self.replay = rule, self.run(rule)
    self.changes: list[Advice] = []
    self.is_fixed = "scale" in _knobs(rule)
    # S may come from a checkpoint even at step 1. But if S never moves, the run
    # was recorded at a fixed S, in order to replay other rules on it.
    scales = np.asarray(history.loss_scale)
    is_first = scales[0] == self.replay.history.loss_scale[0]
    is_constant = np.all(scales == scales[0])
    self.begins = history.step[0] <= 1 and (is_first or is_constant)
    # A fixed rule keeps its own S, whatever S the history begins with.
    if not self.begins and not self.is_fixed:
      self.run = functools.partial(self.run, loss_scale=float(scales[0]))
      self.replay = self.run(rule)
    limit = formats.limit(formats.FLOAT32, self.replay.dtype)
    self.known = _replay.known_steps(history, limit)
    # log2 of the largest S at which each step is clean; NaN if no S works.
    self.stood = _replay.largest_scales(self.known, limit)
    # Steps that are lost at every S.
    self.is_other = self.known.is_nan | self.known.is_callers
    # A larger S saves nothing if the dtype has the range of float32.
    is_wide = int(jnp.finfo(self.replay.dtype).maxexp) >= 128
    self.wide = math.inf if is_wide else _WIDE

  @property
  def lost(self) -> npt.NDArray[np.bool_]:
    """bool[n], True for a lost step that another S would have kept."""
    return self.replay.history.overflow & ~self.is_other

  @property
  def start(self) -> int:
    """The number of steps before the first clean one; 0 for a fixed S."""
    overflow = self.replay.history.overflow
    return 0 if self.is_fixed else int(np.argmin([*overflow, False]))

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

  @property
  def steady(self) -> float:
    """The S that leaves 2 bits on all but 1 step in 1000."""
    known = np.sort(self.stood[np.isfinite(self.stood)])
    return _power(math.floor(known[known.size // 1000]) - _RESERVE)

  def attempt(
    self, column: str, find: Callable[["_Tuning"], _Problem | None]
  ) -> None:
    """Tries to mend a problem; keeps the first good value, or the best."""
    knob = _knobs(self.rule).get(column)
    if knob is None or any(x.argument == knob.name for x in self.changes):
      return
    problem = find(self)
    if problem is None:
      return
    others = self.replay.lost_steps - problem.lost
    most = max(self.replay.lost_steps, np.sum(self.is_other) + self.tolerated)
    best = knob.value, self.rule, self.replay
    for value in _values(column, knob.value, problem):
      try:
        rule = _turn(self.rule, knob, value)
      except ValueError:
        continue  # The rule rejects this value.
      replay, than = self.run(rule), best[2]
      if problem.lost:
        saved = than.lost_steps - replay.lost_steps
        is_better = saved >= max(1, (than.lost_steps - others) / 4)
        is_enough = replay.lost_steps - others <= self.tolerated
      else:
        bits = than.mean_headroom - replay.mean_headroom
        is_better = bits >= problem.gain and replay.lost_steps <= most
        is_enough = replay.mean_headroom < _WIDE
      if is_better:
        best = value, rule, replay
        if is_enough:
          break
    value, rule, replay = best
    if rule is self.rule:
      return
    is_vague = np.mean(self.known.is_bound) > _LONG_SHARE
    reason = (
      f"{problem.seen}{self.source}; overflows {self.replay.lost_steps} -> "
      f"{replay.lost_steps} of {self.count}{' at best' if is_vague else ''}, "
      f"mean headroom {_bits(self.replay.mean_headroom)} -> "
      f"{_bits(replay.mean_headroom)} bits"
    )
    self.changes.append(Advice(knob.name, knob.value, value, reason))
    self.rule, self.replay = rule, replay


def _notes(tuning: _Tuning) -> Iterator[str]:
  """Makes the changes; yields what no argument mends."""
  if unscaled := _unscaled(tuning):
    yield unscaled
    return
  yield from _faults(tuning)
  if tuning.count < _FEWEST_STEPS:
    yield (
      f"{tuning.count} steps are too few to propose anything: record "
      f"{_FEWEST_STEPS} at least, best some thousand"
    )
    return
  # Some rules have both, and may need both lowered.
  for column in ("min_scale", "hold_below"):
    tuning.attempt(column, _stuck_at_floor)
  stuck = _stuck_at_floor(tuning)
  if stuck and not tuning.changes:
    yield (
      f"{stuck.seen}, and no argument lowers it{tuning.source}; "
      "instruments.where_overflow names the operation that overflows"
    )
    return
  for find, columns in _PROBLEMS:
    for column in columns:
      tuning.attempt(column, find)
  lost = int(np.sum(tuning.lost))
  if not tuning.changes and tuning.rule.skip and lost > tuning.tolerated:
    yield (
      f"{lost} of {tuning.count} steps overflowed{tuning.source}, and no "
      "argument of the rule that was tried avoids that: look at the run "
      "itself, which may diverge; instruments.where_overflow names the "
      "operation that overflows"
    )


def _unscaled(tuning: _Tuning) -> str | None:
  """Returns what is seen if amax fails to follow S."""
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
    return None
  # The median alone says little about gradients that vary wildly.
  low, median, high = np.quantile(followed, [0.25, 0.5, 0.75])
  if low <= 1.5 and high >= 0.5:
    return None
  return (
    f"these gradients do not follow S: over {followed.size} moves of S, amax "
    f"moved {round(median, 1) + 0.0} times as far; make them with "
    "scaled_value_and_grad(fun, opt_state), pass them to update unchanged, "
    "and record again"
  )


def _faults(tuning: _Tuning) -> Iterator[str]:
  """Yields what no argument of a rule mends."""
  known = tuning.known
  largest = np.max(tuning.history.amax[known.is_callers], initial=0)
  names = (
    "instruments.where_overflow(fun, check=nonfinite()) names the operation "
    "that makes them"
  )
  for is_seen, seen in (
    (
      known.is_nan,
      "had NaN gradients at an S that left the steps around them 6 bits of "
      f"headroom or more: most likely no loss scale mends these; {names}",
    ),
    (
      known.is_doubtful,
      "had NaN gradients at an S at which the steps next to them were clean, "
      "some with less than 6 bits of headroom: S or the model may have made "
      "these, and they count as overflows; run such a batch again at S / 64, "
      f"and if it is NaN again, {names}",
    ),
    (
      known.is_callers,
      f"were overflows although amax was at most {largest:g}: nothing shows "
      "that S was too large, so these are not held against any S; look at what "
      "set overflow=, and if that is a status register, "
      "instruments.where_overflow(fun) names the operation that overflows",
    ),
  ):
    if count := np.sum(is_seen):
      yield f"{count} of {tuning.count} steps {seen}"


def _lost_steps(tuning: _Tuning) -> _Problem | None:
  lost = int(np.sum(tuning.lost[tuning.start :]))
  if lost <= tuning.tolerated:
    return None
  seen = f"{lost} of {tuning.count} steps overflowed"
  if tuning.is_fixed:
    return _Problem(seen, tuning.steady, lost)
  return _Problem(f"{seen} after the start", tuning.count, lost)


def _unused_range(tuning: _Tuning) -> _Problem | None:
  mean = tuning.replay.mean_headroom
  if not mean >= tuning.wide:
    return None
  seen = f"S could have been 2**{math.floor(mean)} times as large on average"
  return _Problem(seen, tuning.steady)


def _stuck_at_floor(tuning: _Tuning) -> _Problem | None:
  # A step that is applied anyway, as by a disabled scaler, is not lost.
  at_floor = tuning.lost & tuning.replay.stalled & tuning.replay.skipped
  lost = int(np.sum(at_floor))
  if tuning.is_fixed or not lost:
    return None
  floor = float(np.min(tuning.replay.history.loss_scale[at_floor]))
  seen = f"{lost} steps overflowed with S at its floor, {floor:g}"
  return _Problem(seen, _power(np.min(tuning.stood[at_floor])), lost)


def _lost_at_start(tuning: _Tuning) -> _Problem | None:
  start = tuning.start
  lost = int(np.sum(tuning.lost[:start]))
  if not tuning.begins or lost < _MANY_AT_START:
    return None
  stood = np.nanmin(tuning.stood)
  if start < tuning.count:
    stood = np.log2(tuning.replay.history.loss_scale[start])
  seen = f"{lost} steps overflowed before the first clean one"
  return _Problem(seen, _power(stood), lost)


def _low_start(tuning: _Tuning) -> _Problem | None:
  # A step that is NaN at every S does not end the climb.
  steps = int(np.argmax([*(tuning.spare < tuning.wide), True]))
  least = np.nanmin(tuning.spare[:steps], initial=np.inf)
  is_long = steps >= tuning.count * _LONG_SHARE
  if not (tuning.begins and is_long and np.isfinite(least)):
    return None
  seen = (
    f"on the first {steps} steps S could have been 2**{math.floor(least)} "
    "times as large"
  )
  value = _power(np.nanmin(tuning.stood[:steps]) - _RESERVE)
  ceiling = _knobs(tuning.rule).get("max_scale", _Knob("", math.inf))
  return _Problem(seen, min(value, ceiling.value))


def _at_ceiling(tuning: _Tuning) -> _Problem | None:
  own = tuning.replay.history
  ceiling = _knobs(tuning.rule)["max_scale"].value
  stays = (own.loss_scale >= np.float32(ceiling)) & ~own.overflow
  spare = np.nanmin(tuning.spare[stays], initial=np.inf)
  steps = int(np.sum(stays))
  if steps < tuning.count * _LONG_SHARE or not tuning.wide <= spare < np.inf:
    return None
  seen = (
    f"S was at its ceiling on {steps} steps, and could have been "
    f"2**{math.floor(spare)} times as large"
  )
  # Reaching a higher ceiling may take longer than the record.
  return _Problem(seen, ceiling * _power(spare - _RESERVE), gain=0)


def _values(column: str, old: Any, problem: _Problem) -> list[float]:
  """Returns the values to try for an argument."""
  is_lost = problem.lost > 0
  match column:
    case "growth_interval" if is_lost:
      longer = (int(old) << i for i in range(1, 31))
      return [x for x in longer if x <= problem.value]
    case "growth_interval":
      return [int(old) >> i for i in range(1, 31)]
    case "hysteresis":
      return [1] if is_lost else [old + 1, old + 2]
    case "headroom":
      return [old + i if is_lost else old - i for i in range(1, 7)]
  # Some rules let S fall to the floor itself, others only close to it.
  return [problem.value, problem.value / 2] if is_lost else [problem.value]


# What to change for which problem, each on top of the changes before it.
_PROBLEMS = (
  (_lost_at_start, ("init_scale",)),
  (_at_ceiling, ("max_scale",)),
  (_low_start, ("init_scale",)),
  (_lost_steps, ("scale", "growth_interval", "hysteresis", "headroom")),
  (_unused_range, ("scale", "growth_interval", "hysteresis", "headroom")),
)


def _power(exponent: float) -> float:
  """Returns the power of two at or below 2**exponent, in the range of S."""
  return math.ldexp(1.0, math.floor(min(max(exponent, -126), 127)))


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
  if inner := _inner(rule):
    # The wrapping rule sets the first S.
    return {c: k for c, k in _knobs(inner).items() if c != "init_scale"}
  if isinstance(rule, declaration.PresetLossScale):
    machine: object = rule._machine
    arguments = dict(rule.arguments)
    cells = declaration.PRESETS[rule.system].columns.items()
    columns = {
      cell.name: column
      for column, cell in cells
      if isinstance(cell, declaration.Argument)
    }
  else:
    machine, columns = rule, _COLUMNS
    fields = [field.name for field in dataclasses.fields(rule) if field.init]
    arguments = {name: getattr(rule, name) for name in fields}
  if isinstance(machine, fixed.FixedLossScale):
    columns = dict.fromkeys(_FIXED_SCALES, "scale")
    # The S of a preset that is switched off is not an argument.
    arguments = {x: y for x, y in arguments.items() if y == machine.scale}
  return {
    columns[name]: _Knob(name, value)
    for name, value in arguments.items()
    # Systems that accept a bound of 0 treat it as no bound.
    if name in columns and (value or columns[name] == "headroom")
  }


def _turn(rule: base.LossScale, knob: _Knob, value: float) -> base.LossScale:
  """Returns the rule with a new value for one argument."""
  if isinstance(rule, declaration.PresetLossScale):
    arguments = {**dict(rule.arguments), knob.name: value}
    return declaration.PRESETS[rule.system].function(**arguments)
  changes: dict[str, Any] = {knob.name: value}
  if inner := _inner(rule):
    changes = {"rule": _turn(inner, knob, value)}
  turned: base.LossScale = dataclasses.replace(rule, **changes)
  return turned


def _inner(rule: base.LossScale) -> base.LossScale | None:
  """Returns the rule that another rule, such as `WarmStart`, wraps."""
  inner = getattr(rule, "rule", None)
  return inner if isinstance(inner, base.LossScale) else None
