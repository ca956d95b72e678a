"""The tuning procedure as code: what to change in a rule, and why."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._rules import base
from optax_lossscale.instruments import _history
from optax_lossscale.instruments import _proposals
from optax_lossscale.instruments import _replay
from optax_lossscale.instruments import _trial

_FEWEST_STEPS = 100


def advise(
  history: _history.History,
  rule: base.LossScale,
  *,
  dtype: Any = jnp.float16,
  saturating: bool = False,
) -> list[_trial.Advice]:
  """Returns what to change in a rule, from a run that was recorded with it.

  It is the procedure of the guides, "print the loss scale, count the overflows,
  adjust the parameters", with numbers. In this order it looks for:

  - NaN that no S mends: a fault to find in the model, and no argument;
  - overflows with amax 1 bit or more below the dtype's limit: the caller's own,
    or a status register's, and no argument;
  - overflows with S at the floor: a lower `min_scale`; where there is no such
    argument, nothing else helps;
  - 3 or more steps lost before the first clean one: a smaller `init_scale`, the
    first S that stood, or up to 4 bits less if that keeps the steps after it;
  - 6 bits of headroom at least on each step of the first tenth, or longer: a
    larger `init_scale`, and a larger `max_scale` if that is in the way;
  - S at the ceiling on a tenth of the steps, with 6 bits of headroom at least
    on each of them: a larger `max_scale`;
  - more than 1 step in 1000 lost (and more than one) after the first clean one:
    a longer `growth_interval`, doubled until no more are lost or else until
    most are kept; then a `hysteresis` of 1, and more `headroom`;
  - 6 bits of headroom or more in the mean: a shorter `growth_interval`, halved
    until it is less, then a larger `hysteresis`, and less `headroom`;
  - a fixed scale with as many steps lost, or which could be 64 times as large;
  - as many steps lost, and nothing that helps: it says so.

  A history does not hold which share of the gradients underflowed: headroom
  stands in for it. So a larger S is proposed only where the dtype has a smaller
  range than float32: in float32 and bfloat16 unused range is no harm. With
  fewer than 100 steps nothing is proposed.

  What is computed from amax leaves 2 bits of headroom on all steps but 1 in
  1000. A value is proposed only if a replay of the recorded steps bears it out:
  fewer steps lost, or a mean headroom that is smaller by 1 bit without more
  than 1 step in 1000 lost. Each is tried on top of those before it. See
  `replay` for what such a trial cannot show.

  Args:
    history: what was recorded, best of some thousand steps. If it begins in
      the middle of a run, so does the trial, and nothing is said about the
      start: its first step is not 1, or S moves but does not begin with the
      rule's first one, as after a checkpoint.
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
    _look_for_callers(trial)
    if trial.count < _FEWEST_STEPS:
      trial.tell(
        f"{trial.count} steps are too few to propose anything: record "
        f"{_FEWEST_STEPS} at least, best some thousand"
      )
    else:
      _proposals.propose(trial)
  return trial.advice


def _look_for_nan(trial: _trial.Trial) -> None:
  nans = int(np.sum(np.isnan(trial.run.history.amax)))
  if nans:
    trial.tell(
      f"{nans} of {trial.count} steps had NaN gradients at an S that the steps "
      "next to them stood: no loss scale mends these; "
      "instruments.where_overflow(fun, dtypes=(jnp.float16, jnp.float32)) "
      "tells which operation makes them"
    )


def _look_for_callers(trial: _trial.Trial) -> None:
  count = int(np.sum(trial.is_callers))
  if count:
    headroom = trial.recorded_headroom[trial.is_callers]
    trial.tell(
      f"{count} of {trial.count} steps were overflows although amax was "
      f"{np.min(headroom):.1f} bits or more below the limit: nothing shows "
      "that S was too large, so these count against no S; look at what set "
      "overflow=, and if that is a status register, "
      "instruments.where_overflow(fun) tells which operation overflows"
    )
