"""What to try in a rule: each thing that `advise` looks at, in its order."""

import functools
import math

import numpy as np
import numpy.typing as npt

from optax_lossscale.instruments import _replay
from optax_lossscale.instruments import _trial

_MANY_AT_START = 3
_LONG_SHARE = 1 / 10
_WIDE = 6.0
_RESERVE = 2
_LOWER = 4


def propose(trial: _trial.Trial) -> None:
  """Adds to its advice what to change, and what no argument mends."""
  _look_at_fixed_scale(trial)
  if _is_stuck_at_floor(trial):
    return
  _look_at_start(trial)
  if not trial.is_wide:
    _look_at_climb(trial)
    _look_at_ceiling(trial)
  _look_at_lost_steps(trial)
  if not trial.is_wide:
    _look_at_headroom(trial)
  _look_at_what_is_left(trial)


def _look_at_what_is_left(trial: _trial.Trial) -> None:
  """Tells of lost steps that nothing was proposed against."""
  lost = int(np.sum(trial.lost))
  is_silent = all(advice.argument is None for advice in trial.advice)
  if is_silent and trial.rule.skip and lost > trial.tolerated:
    trial.tell(
      f"{lost} of {trial.count} steps were lost, and no argument of the rule "
      "that was tried keeps more of them: look at the run itself, which may "
      "diverge; instruments.where_overflow tells which operation overflows"
    )


def _look_at_fixed_scale(trial: _trial.Trial) -> None:
  knob = trial.knob("scale")
  known = np.sort(trial.stood[np.isfinite(trial.stood)])
  if knob is None or not known.size:
    return
  # All but so many steps stand it.
  stood = math.floor(known[math.floor(known.size / 1000)])
  lost = int(np.sum(trial.lost))
  spare = stood - math.log2(knob.value)
  value = _power(stood - _RESERVE)
  if lost > trial.tolerated:
    trial.attempt(
      "scale",
      lambda old: [value],
      f"{lost} of {trial.count} steps overflowed",
      _trial.loses_fewer,
    )
  elif spare >= _WIDE and not trial.is_wide:
    trial.attempt(
      "scale",
      lambda old: [value],
      f"S could have been 2**{math.floor(spare)} times as large",
      _trial.wastes_less(trial),
    )


def _is_stuck_at_floor(trial: _trial.Trial) -> bool:
  """Returns whether S has to be below a floor that no argument lowers."""
  at_floor = trial.lost & trial.run.stalled
  if trial.knob("scale") or not np.any(at_floor):
    return False
  floor = float(np.min(trial.run.history.loss_scale[at_floor]))
  value = _power(math.floor(np.min(trial.stood[at_floor])))
  seen = f"{int(np.sum(at_floor))} steps overflowed with S at its floor"
  # A rule may have both; then both may have to be lowered.
  proposed = [
    # Some let S come down to it, others only near.
    trial.attempt(
      column, lambda old: [value, value / 2], seen, _trial.loses_fewer
    )
    for column in ("min_scale", "hold_below")
  ]
  if not any(proposed):
    trial.tell(
      f"{seen}, {floor:g}, and no argument lowers it; "
      "instruments.where_overflow tells which operation overflows"
    )
  return not any(proposed)


def _look_at_start(trial: _trial.Trial) -> None:
  first = trial.first_clean
  lost = int(np.sum(trial.lost[:first]))
  if not trial.begins or lost < _MANY_AT_START:
    return
  if first < trial.count:
    exponent = trial.log2_scale[first]
  else:
    exponent = np.nanmin(trial.stood)
  before = trial.run

  def is_better(run: _replay.Replay, than: _replay.Replay) -> bool:
    # What is smaller than the first only delays the losses, unless it ends
    # them.
    is_worth_it = than is before or trial.tolerates(run)
    return is_worth_it and _trial.loses_fewer(run, than)

  trial.attempt(
    "init_scale",
    lambda old: [
      _power(math.floor(exponent) - less) for less in range(_LOWER + 1)
    ],
    f"{lost} steps were lost before the first clean one",
    is_better,
    trial.tolerates,
  )


def _look_at_ceiling(trial: _trial.Trial) -> None:
  knob = trial.knob("max_scale")
  if knob is None:
    return
  is_at_ceiling = trial.run.history.loss_scale >= np.float32(knob.value)
  stays = is_at_ceiling & ~trial.run.history.overflow
  spare = _spare(trial, stays)
  if np.sum(stays) < trial.count * _LONG_SHARE or not _WIDE <= spare < np.inf:
    return
  trial.attempt(
    "max_scale",
    lambda old: [old * _power(math.floor(spare) - _RESERVE)],
    f"S was at its ceiling on {int(np.sum(stays))} steps, and could have been "
    f"2**{math.floor(spare)} times as large",
    _trial.wastes_less(trial),
  )


def _look_at_climb(trial: _trial.Trial) -> None:
  # NaN, where no S helps, does not end the climb.
  spare = trial.stood - trial.log2_scale
  (enough,) = np.nonzero(spare < _WIDE)
  steps = int(enough[0]) if enough.size else trial.count
  least = _spare(trial, np.arange(trial.count) < steps)
  if (
    not trial.begins
    or steps < trial.count * _LONG_SHARE
    or not np.isfinite(least)
  ):
    return
  seen = (
    f"on the first {steps} steps S could have been 2**{math.floor(least)} "
    "times as large"
  )
  value = _power(math.floor(np.nanmin(trial.stood[:steps])) - _RESERVE)
  ceiling = trial.knob("max_scale")
  if ceiling is not None and ceiling.value < value:
    trial.attempt("max_scale", lambda old: [value], seen, _trial.loses_no_more)
  trial.attempt(
    "init_scale", lambda old: [value], seen, _trial.wastes_less(trial)
  )


def _look_at_lost_steps(trial: _trial.Trial) -> None:
  for column, values in (
    ("growth_interval", lambda old: _doubled(int(old), trial.count)),
    ("hysteresis", lambda old: [1]),
    ("headroom", lambda old: [old + more for more in range(1, 7)]),
  ):
    lost = int(np.sum(trial.lost[trial.first_clean :]))
    if lost > trial.tolerated:
      most = trial.run.lost_steps - lost + trial.tolerated
      trial.attempt(
        column,
        values,
        f"{lost} of {trial.count} steps were lost after the start",
        _trial.loses_a_quarter_less(trial),
        functools.partial(_trial.loses_at_most, most),
      )


def _look_at_headroom(trial: _trial.Trial) -> None:
  turned = {advice.argument for advice in trial.advice}
  for column, values in (
    ("growth_interval", lambda old: _halved(int(old))),
    ("hysteresis", lambda old: [old + 1, old + 2]),
    ("headroom", lambda old: [old - less for less in range(1, 7)]),
  ):
    knob = trial.knob(column)
    mean = trial.run.mean_headroom
    if knob is not None and knob.name not in turned and mean >= _WIDE:
      trial.attempt(
        column,
        values,
        f"S could have been 2**{math.floor(mean)} times as large in the mean",
        _trial.wastes_less(trial),
        lambda run: run.mean_headroom < _WIDE,
      )


def _spare(trial: _trial.Trial, where: npt.NDArray[np.bool_]) -> float:
  """Returns how many doublings of S each of some steps would have stood."""
  spare = (trial.stood - trial.log2_scale)[where]
  return float(np.min(spare[~np.isnan(spare)], initial=np.inf))


def _power(exponent: float) -> float:
  """Returns that power of two, within the range of S."""
  return math.ldexp(1.0, int(min(max(exponent, -126), 127)))


def _doubled(steps: int, most: int) -> list[int]:
  return [steps << i for i in range(1, 31) if steps << i <= most]


def _halved(steps: int) -> list[int]:
  return [steps >> i for i in range(1, steps.bit_length())]
