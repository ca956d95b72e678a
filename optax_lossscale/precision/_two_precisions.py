"""A train step in two precisions, of which a schedule's state chooses one."""

from collections.abc import Callable
import typing
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale import _devices
from optax_lossscale import _gradients
from optax_lossscale import _state
from optax_lossscale import jaxpr

if typing.TYPE_CHECKING:
  from optax_lossscale.precision import _precision_schedule


def make_train_step(
  schedule: "_precision_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  autocast: dict[str, Any],
  has_aux: bool,
  axis_name: Any,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
  """Returns the train step of `PrecisionSchedule.make_train_step`.

  Args:
    schedule: whose `update` moves the state.
    loss_fn: the loss in full precision.
    tx: the optimizer.
    autocast: what `autocast` gets beside the function.
    has_aux: whether `loss_fn` returns `(loss, aux)`.
    axis_name: the mapped axes, in any form, or None.
  """
  low_loss_fn = jaxpr.autocast(loss_fn, **autocast)
  full_loss_fn = jaxpr.in_full_precision(loss_fn)
  names = _devices.axis_names("axis_name", axis_name)
  is_float16 = schedule.dtype == jnp.float16

  def train_step(
    params: Any, opt_state: Any, state: Any, /, *args: Any, **kwargs: Any
  ) -> tuple[Any, Any, Any, Any]:
    holds_scale = bool(_state.find_states(opt_state))
    if is_float16 and not holds_scale:
      raise ValueError(
        "`tx` must hold loss_scaling where the low precision is float16, got "
        f"an optimizer with the state {type(opt_state).__name__}; wrap it: "
        "loss_scaling(inner, DynamicLossScale()), or with FixedLossScale(1.0) "
        "if no scaling is meant."
      )
    loss_scale = _state.get_loss_scale(opt_state if is_float16 else 1.0)

    def low(params: Any, loss_scale: jax.Array) -> tuple[Any, Any]:
      value_and_grad = _gradients.scaled_value_and_grad(
        low_loss_fn, loss_scale, has_aux=has_aux
      )
      return value_and_grad(params, *args, **kwargs)

    def full(params: Any, loss_scale: jax.Array) -> tuple[Any, Any]:
      del loss_scale
      value_and_grad = jax.value_and_grad(full_loss_fn, has_aux=has_aux)
      return value_and_grad(params, *args, **kwargs)

    local = _devices.make_varying(params, names) if names else params
    value, gradients = lax.cond(state.low, low, full, local, loss_scale)
    loss = value[0] if has_aux else value
    if names:
      loss = lax.pmean(loss, names)

    options = {"scaled": state.low & is_float16} if holds_scale else {}
    updates, opt_state = tx.update(gradients, opt_state, params, **options)
    params = optax.apply_updates(params, updates)

    applied = jnp.full((), True)
    if holds_scale:
      applied = ~_state.find_state(opt_state).skipped
    if schedule.mode == "step":
      steps = optax.safe_increment(state.steps)
      state = schedule.update(
        state, step=jnp.where(applied, steps, state.steps)
      )
    else:
      # 0 stands for no loss.
      state = schedule.update(state, loss=jnp.where(applied, loss, 0))
    return params, opt_state, state, (loss, value[1]) if has_aux else loss

  return train_step
