"""The tuning procedure as code: what to change in a rule, and why."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_lossscale import _rules
from optax_lossscale.instruments import _history
from optax_lossscale.instruments import _replay
from optax_lossscale.instruments import _trial

_MANY_AT_START = 3
_LONG_SHARE = 1 / 10
_WIDE = 6.0
_RESERVE = 2


def advise(
  history: _history.History,
  rule: _rules.LossScale,
  *,
  dtype: Any = jnp.float16,
  saturating: bool = False,
) -> list[_trial.Advice]:
  """Returns what to change in a rule, from a run that was recorded with it.

  It is the procedure of the guides, "print the loss scale, count the overflows,
  adjust the parameters", with numbers. In this order it looks for:

  - NaN that no S mends: a fault to find in the model, and no argument;
  - overflows with S at the floor: a lower `min_scale`; where there is no such
    argument, nothing else helps;
  - 3 or more steps lost before the first clean one: a smaller `init_scale`, the
    first S that stood;
  - 6 bits of headroom at least on each step of the first tenth, or longer: a
    larger `init_scale`, and a larger `max_scale` if that is in the way;
  - S at the ceiling on a tenth of the steps, with 6 bits of headroom at least
    on each of them: a larger `max_scale`;
  - more than 1 step in 1000 lost (and more than one) after the first clean one:
    a longer `growth_interval`, doubled until no more are lost or else until
    most are kept; then a `hysteresis` of 1, and more `headroom`;
  - 6 bits of headroom or more in the mean: a shorter `growth_interval`, halved
    until it is less, then a larger `hysteresis`, and less `headroom`;
  - a fixed scale with as many steps lost, or which could be 64 times as large.

  What is computed from amax leaves 2 bits of headroom on all steps but 1 in
  1000. A value is proposed only if a replay of the recorded steps bears it out:
  fewer steps lost, or a mean headroom that is smaller by 1 bit without more
  than 1 step in 1000 lost. Each is tried on top of those before it. See
  `replay` for what such a trial cannot show.

  Args:
    history: what was recorded, best of some thousand steps. If its steps begin
      in the middle of a run, so does the trial, and nothing is said about the
      start.
    rule: the one that was used: this library's, a preset, or any other; the
      arguments have its own names. Of an unknown rule those with the names of
      `DynamicLossScale` are found.
    dtype: the computation's dtype.
    saturating: whether it clips. See `replay`.

  Returns:
    What to change; empty if there is nothing to be said.

  Raises:
    TypeError: if an argument is not of its kind.

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
    steps lost 3 -> 0 of 100, mean headroom 1.0 -> 1.0 bits
  """
  _replay.check_trace(history)
  trial = _trial.Trial(history, rule, dtype, saturating)
  if trial.count:
    _look_for_nan(trial)
    _look_at_fixed_scale(trial)
    if _is_stuck_at_floor(trial):
      return trial.advice
    _look_at_start(trial)
    _look_at_climb(trial)
    _look_at_ceiling(trial)
    _look_at_lost_steps(trial)
    _look_at_headroom(trial)
  return trial.advice


def _look_for_nan(trial: _trial.Trial) -> None:
  nans = int(np.sum(np.isnan(trial.run.history.amax)))
  if nans:
    trial.tell(
      f"{nans} of {trial.count} steps had NaN gradients at an S that the steps "
      "next to them stood: no loss scale mends these; "
      "instruments.where_overflow tells which operation makes them"
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
  elif spare >= _WIDE:
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
  trial.attempt(
    "init_scale",
    lambda old: [_power(math.floor(exponent))],
    f"{lost} steps were lost before the first clean one",
    _trial.loses_fewer,
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
        _trial.loses_a_quarter_less,
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
