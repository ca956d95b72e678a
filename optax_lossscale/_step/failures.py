"""Where another system would have given up: raised on the host, not in jit."""

from typing import Any

import jax
import numpy as np

from optax_lossscale._rules.engine import Failure
from optax_lossscale._rules.engine import MOST_OVERFLOWS_IN_A_ROW
from optax_lossscale._step import states as _states

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


def raise_if_failed(opt_state: Any) -> None:
  """Raises if the rule's system would have raised by now.

  DeepSpeed, fairseq and MindSpore end a run whose loss scale cannot help any
  more. Nothing raises inside jit, so their presets note it in the state, where
  it stays, and go on skipping; call this between steps, as often as you log.
  It waits for the step that made `opt_state`. With other rules it never raises,
  nor after a step of a rule that was made with raise_error_at_min_scale=False,
  nor because of steps that were not scaled, which the rule does not see.

  Args:
    opt_state: an optimizer's state with loss scaling anywhere in it.

  Raises:
    FloatingPointError: if the rule's system would have raised.
    TypeError: if the state is traced.
    ValueError: if `opt_state` holds no loss scale.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.deepspeed(init_scale=2.0, delayed_shift=1)
    >>> tx = ols.loss_scaling(optax.sgd(0.1), rule)
    >>> state = tx.init(jnp.zeros(1))
    >>> for _ in range(2):
    ...   ols.raise_if_failed(state)
    ...   _, state = tx.update(jnp.array([jnp.inf]), state)
    >>> ols.raise_if_failed(state)
    Traceback (most recent call last):
      ...
    FloatingPointError: a step overflowed with the loss scale at its minimum, \
where DeepSpeed ends the run; find out what makes the gradients overflow, or \
go on with raise_error_at_min_scale=False; S is 1.0.
  """
  states = _states.find_states(opt_state)
  if not states:
    _states.find_state(opt_state)  # Raises, and says what to pass.
  for state in states.values():
    loss_scale_state = state.loss_scale_state
    # A rule around another, such as WarmStart, holds its state.
    while hasattr(loss_scale_state, "rule_state"):
      loss_scale_state = loss_scale_state.rule_state
    failure = getattr(loss_scale_state, "failure", None)
    if failure is None:
      continue
    if isinstance(failure, jax.core.Tracer):
      raise TypeError(
        "`opt_state` must have values, got a traced one; call raise_if_failed "
        "between the steps, outside jit."
      )
    # Several, if the runs were stacked by vmap.
    failures = np.ravel(failure)
    if failures.any():
      first = int(np.argmax(failures != 0))
      loss_scale = np.ravel(loss_scale_state.loss_scale)[first]
      raise FloatingPointError(
        f"{_CONDITIONS[Failure(failures[first])]}; S is {loss_scale}."
      )
