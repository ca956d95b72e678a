"""Raises an error, outside jit, if loss scaling can no longer help a run."""

from chex import ArrayTree
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._rules.engine import Failure
from optax_lossscale._rules.engine import MOST_OVERFLOWS_IN_A_ROW
from optax_lossscale._step import states as _states

# The place of a run among those that vmap has stacked; () without vmap.
_Place = tuple[np.intp, ...]

_CONDITIONS = {
  Failure.AT_MINIMUM: (
    "a step overflowed with the loss scale at its minimum, where DeepSpeed "
    "ends the run; find out what makes the gradients overflow, or go on with "
    "raise_error_at_min_scale=False"
  ),
  Failure.BELOW_MINIMUM: (
    "an overflow would have taken the loss scale to `min_loss_scale` or below, "
    "where fairseq ends the run; lower the learning rate, clip the gradients, "
    "or take a larger batch"
  ),
  Failure.TOO_MANY_OVERFLOWS: (
    f"more than {MOST_OVERFLOWS_IN_A_ROW} steps in a row overflowed, "
    "where MindSpore ends the run; find out what makes the gradients overflow"
  ),
}


@switches.lifted()
def raise_if_failed(
  opt_state: optax.OptState, max_consecutive_skips: int | None = None
) -> None:
  """Raises if too many steps in a row were skipped, or the rule has given up.

  Nothing raises inside jit, so a run whose data are all NaN skips every step
  and continues. Call this between steps, as often as you log. The call waits
  for the step that made `opt_state`.

  DeepSpeed, fairseq and MindSpore end a run once loss scaling can no longer
  help. Their presets record such a failure permanently in the state (unless
  raise_error_at_min_scale=False), and then this function raises with or without
  a limit. Any other rule needs a limit.

  Args:
    opt_state: an optimizer's state with loss scaling anywhere in it.
    max_consecutive_skips: how many skipped steps in a row to allow; None for
      any number. Every step is skipped while S comes down from an initial value
      that is too large, so be generous: 100, say.

  Raises:
    FloatingPointError: if more steps than the limit were skipped in a row, or
      if the preset's system would have raised.
    TypeError: if the state is traced, or the limit is not an integer.
    ValueError: if `opt_state` holds no loss scale, the limit is below 1, or
      there is none and no rule in `opt_state` ever ends a run.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
    >>> state = tx.init(jnp.zeros(1))
    >>> for _ in range(3):
    ...   ols.raise_if_failed(state, max_consecutive_skips=2)
    ...   _, state = tx.update(jnp.array([jnp.nan]), state)
    >>> try:
    ...   ols.raise_if_failed(state, max_consecutive_skips=2)
    ... except FloatingPointError as error:
    ...   print(str(error).partition(",")[0])
    3 steps in a row were skipped
  """
  if max_consecutive_skips is not None:
    max_consecutive_skips = arguments.check_count(
      "max_consecutive_skips", max_consecutive_skips
    )
  states = _states.require_states(opt_state)
  may_end = any(_failure(state) is not None for state in states.values())
  if max_consecutive_skips is None and not may_end:
    raise ValueError(
      "`max_consecutive_skips` must be a number with a rule that never ends a "
      "run, got None; raise_if_failed(opt_state, 100) allows 100 skipped steps "
      "in a row."
    )
  names = leaves.path_names(states)
  for path, state in states.items():
    # Convert the count to an array, since NNX keeps it in a variable.
    if isinstance(jnp.asarray(state.consecutive_skips), jax.core.Tracer):
      raise TypeError(
        "`opt_state` must have values, got a traced one; call raise_if_failed "
        "between the steps, outside jit."
      )
    place = f"at {names[path]!r}: " if len(states) > 1 else ""
    most = max_consecutive_skips
    found = _end_of_system(state) or (most is not None and _row(state, most))
    if found:
      worst, why = found
      if worst:  # vmap has stacked several runs.
        size = np.size(state.consecutive_skips)
        place += f"member {', '.join(map(str, worst))} of {size}: "
      loss_scale = np.asarray(state.loss_scale_state.loss_scale)[worst]
      raise FloatingPointError(f"{place}{why}; S is {loss_scale}.")


def _failure(state: _states.LossScalingState) -> object:
  """Returns the failure in the rule's state; None if no run ever ends."""
  rule_state = state.loss_scale_state
  # A wrapping rule's state, such as WarmStart's, holds the inner rule's state.
  while hasattr(rule_state, "rule_state"):
    rule_state = rule_state.rule_state
  return getattr(rule_state, "failure", None)


def _end_of_system(
  state: _states.LossScalingState,
) -> tuple[_Place, str] | None:
  """Returns the run (if vmapped) that the rule has given up, and the reason."""
  failure = _failure(state)
  failure = np.asarray(0 if failure is None else failure)
  first = _largest(failure != 0)
  return (first, _CONDITIONS[failure[first]]) if failure[first] else None


def _row(
  state: _states.LossScalingState, most: int
) -> tuple[_Place, str] | None:
  """Returns the run (if vmapped) that skipped too many steps, and a reason."""
  skips = np.asarray(state.consecutive_skips)
  worst = _largest(skips)
  if skips[worst] <= most:
    return None
  overflow, nan, amax, used, stalled = (
    np.asarray(getattr(state, x))[worst]
    for x in ("overflow", "nan", "amax", "range_used", "stalled")
  )
  move = "cannot come down" if stalled else "still coming down"
  remedy = (
    "run its batch again with scaled_value_and_grad(loss_fn, 1.0): a gradient "
    "that overflows even then is the model's or the batch's fault, else S is "
    f"too large and {move}"
  )
  if overflow and not np.isfinite(amax):
    cause = f"{'NaN' if nan else 'inf'} in its gradients"
  elif overflow and used >= 1:
    cause = (
      f"a gradient at the limit of its dtype (amax is {amax}, the dtype "
      "float16 if the check names none)"
    )
  else:
    cause = f"`{'overflow' if overflow else 'skip'}`, which the caller passed"
    remedy = "look at what sets it"
  return worst, (
    f"{skips[worst]} steps in a row were skipped, more than "
    f"`max_consecutive_skips`={most}, the last one because of {cause}; {remedy}"
  )


def _largest(values: np.ndarray) -> _Place:
  """Returns the index of the largest value, () for a scalar."""
  return np.unravel_index(np.argmax(values), values.shape)
