"""Gradients and train steps in two precisions; a schedule's state chooses."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import typing
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale._autocast import autocast as _autocast
from optax_lossscale._autocast import full_precision
from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import backward
from optax_lossscale._step import devices
from optax_lossscale._step import requirements
from optax_lossscale._step import states

if typing.TYPE_CHECKING:
  from optax_lossscale._precision import _schedule


def value_and_grad(
  schedule: "_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  opt_state: Any,
  state: Any,
  *,
  argnums: int | Sequence[int] = 0,
  has_aux: bool,
  path: str | None = None,
  autocast: Mapping[str, Any],
) -> Callable[..., tuple[Any, Any]]:
  """Returns the function of `PrecisionSchedule.value_and_grad`."""
  low_loss_fn = make_low(schedule, loss_fn, autocast)
  full = full_precision.in_full_precision(
    jax.value_and_grad(loss_fn, argnums, has_aux=has_aux),
    keeps_products=schedule.keeps_origin_dtype,
  )
  low = jax.value_and_grad(low_loss_fn, argnums, has_aux=has_aux)
  if schedule.dtype == jnp.float16:
    loss_scale = states.get_loss_scale(opt_state, path=path)
    low = backward.scaled_value_and_grad(
      low_loss_fn, loss_scale, argnums, has_aux
    )

  @functools.wraps(loss_fn)
  def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    if schedule.dtype == jnp.float16:
      states.refuse_frozen(opt_state, path)
    _refuse_frozen(state)
    value_and_gradients: tuple[Any, Any] = lax.cond(
      state.low,
      lambda: low(*args, **kwargs),
      lambda: full(*args, **kwargs),
    )
    return value_and_gradients

  return value_and_grad_fun


def make_low(
  schedule: "_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  autocast: Mapping[str, Any],
) -> Callable[..., Any]:
  """Returns `loss_fn` in the schedule's low precision."""
  arguments.check_function(loss_fn)
  # Also here: what jit traces in this part it does not trace in the other one.
  as_written = full_precision.without_autocast(loss_fn)
  low_loss_fn = _autocast.autocast(as_written, dtype=schedule.dtype, **autocast)
  if low_loss_fn is as_written:
    raise ValueError(
      "`level` must lower something in the first part of training, got 'O0'; "
      "take 'O1', or name in `overrides` what is to be lowered."
    )
  return low_loss_fn


def make_train_step(
  schedule: "_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  autocast: Mapping[str, Any],
  has_aux: bool,
  axis_name: Any,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
  """Returns the train step of `PrecisionSchedule.make_train_step`."""
  make_low(schedule, loss_fn, autocast)  # What is wrong shows here.
  optimizer = requirements.as_optimizer("tx", tx)
  names = devices.axis_names("axis_name", axis_name)

  def train_step(
    params: Any, opt_state: Any, state: Any, /, *args: Any, **kwargs: Any
  ) -> tuple[Any, Any, Any, Any]:
    value_and_gradients = schedule.value_and_grad(
      loss_fn, opt_state, state, has_aux=has_aux, **autocast
    )
    local = devices.make_varying(params, names) if names else params
    value, gradients = value_and_gradients(local, *args, **kwargs)
    loss = value[0] if has_aux else value
    if names:
      loss = lax.pmean(loss, names)

    applied = jnp.full((), True)
    if states.find_states(opt_state):
      _check_order(optimizer, gradients, opt_state, params)
      before = states.find_state(opt_state).applied_steps
      updates, opt_state = optimizer.update(
        gradients, opt_state, params, scaled=schedule.is_scaled(state)
      )
      # By the count: what is around it may have rejected the step as a whole.
      applied = states.find_state(opt_state).applied_steps != before
    else:
      _check_gradients_alone(params)
      updates, opt_state = optimizer.update(gradients, opt_state, params)
    params = leaves.apply_updates(params, updates)

    if schedule.mode == "step":
      steps = optax.safe_increment(state.steps)
      steps = jnp.where(applied, steps, state.steps)
      state = schedule.update(state, step=steps)
    else:
      # 0 stands for no loss.
      state = schedule.update(state, loss=jnp.where(applied, loss, 0))
    return params, opt_state, state, (loss, value[1]) if has_aux else loss

  return train_step


def _refuse_frozen(state: Any) -> None:
  """Raises if a compiled function would hold the schedule's state for ever."""
  if interpreter.is_recording():
    return  # What is recorded is evaluated at once.
  if states.is_staged() and not isinstance(state.low, jax.core.Tracer):
    raise ValueError(
      "`state` must be an argument of the function that JAX is tracing (jit, "
      "scan ...), got one that was closed over: what is compiled would never "
      "switch. Pass it in, and return the new one."
    )


def _check_order(
  tx: optax.GradientTransformationExtraArgs,
  gradients: Any,
  opt_state: Any,
  params: Any,
) -> None:
  """Raises if something is around loss scaling that has to be inside."""
  requirements.check_accumulation(opt_state)
  try:
    jax.eval_shape(lambda: tx.update(gradients, opt_state, params, scaled=None))
  except requirements.ScaledError:
    return  # It arrives.
  raise ValueError(
    "`tx` must hand the extra argument `scaled` on to loss_scaling, got "
    "something around it that does not, so that unscaled gradients would be "
    "divided by S; put it inside: loss_scaling(inner, rule)."
  )


def _check_gradients_alone(params: Any) -> None:
  """Raises if a bare optimizer would take for gradients what is none."""
  if not all(jax.tree.leaves(leaves.resolve_mask(None, params))):
    raise ValueError(
      "`tx` must hold loss_scaling where parameters are in Flax's "
      "_overwrite_with_gradient collection, which then goes around the "
      "optimizer; wrap it: loss_scaling(inner, FixedLossScale(1.0))."
    )
