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

from optax_lossscale import _devices
from optax_lossscale import _gradients
from optax_lossscale import _leaves
from optax_lossscale import _requirements
from optax_lossscale import _state
from optax_lossscale import jaxpr
from optax_lossscale.jaxpr import _dtypes

if typing.TYPE_CHECKING:
  from optax_lossscale.precision import _precision_schedule


def value_and_grad(
  schedule: "_precision_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  opt_state: Any,
  state: Any,
  *,
  argnums: int | Sequence[int] = 0,
  has_aux: bool,
  path: str | None = None,
  autocast: Mapping[str, Any],
) -> Callable[..., tuple[Any, Any]]:
  """Returns the function of `PrecisionSchedule.value_and_grad`.

  Args:
    schedule: of `state`.
    loss_fn: the loss in full precision.
    opt_state: holds the loss scale, where the low precision is float16.
    state: says which part it is.
    argnums: as in JAX.
    has_aux: whether `loss_fn` returns `(loss, aux)`.
    path: which scale.
    autocast: what `autocast` gets beside the function and the dtype.
  """
  low_loss_fn = make_low(schedule, loss_fn, autocast)
  full = jaxpr.in_full_precision(
    jax.value_and_grad(loss_fn, argnums, has_aux=has_aux),
    keeps_products=schedule.keeps_origin_dtype,
  )
  low = jax.value_and_grad(low_loss_fn, argnums, has_aux=has_aux)
  if schedule.dtype == jnp.float16:
    loss_scale = _state.get_loss_scale(opt_state, path=path)
    low = _gradients.scaled_value_and_grad(
      low_loss_fn, loss_scale, argnums, has_aux
    )

  @functools.wraps(loss_fn)
  def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    if schedule.dtype == jnp.float16:
      _state.refuse_frozen(opt_state, path)
    _refuse_frozen(state)
    value_and_gradients: tuple[Any, Any] = lax.cond(
      state.low,
      lambda: low(*args, **kwargs),
      lambda: full(*args, **kwargs),
    )
    return value_and_gradients

  return value_and_grad_fun


def make_low(
  schedule: "_precision_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  autocast: Mapping[str, Any],
) -> Callable[..., Any]:
  """Returns `loss_fn` in the schedule's low precision.

  Raises:
    ValueError: if `autocast` does nothing with these arguments.
  """
  _dtypes.check_function(loss_fn)
  # Also here: what jit traces in this part it does not trace in the other one.
  as_written = jaxpr.without_autocast(loss_fn)
  low_loss_fn = jaxpr.autocast(as_written, dtype=schedule.dtype, **autocast)
  if low_loss_fn is as_written:
    raise ValueError(
      "`level` must lower something in the first part of training, got 'O0'; "
      "take 'O1', or name in `overrides` what is to be lowered."
    )
  return low_loss_fn


def make_train_step(
  schedule: "_precision_schedule.PrecisionSchedule",
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  autocast: Mapping[str, Any],
  has_aux: bool,
  axis_name: Any,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
  """Returns the train step of `PrecisionSchedule.make_train_step`.

  Args:
    schedule: whose `update` moves the state.
    loss_fn: the loss in full precision.
    tx: the optimizer.
    autocast: what `autocast` gets beside the function and the dtype.
    has_aux: whether `loss_fn` returns `(loss, aux)`.
    axis_name: the mapped axes, in any form, or None.
  """
  make_low(schedule, loss_fn, autocast)  # What is wrong shows here.
  optimizer = _requirements.as_optimizer("tx", tx)
  names = _devices.axis_names("axis_name", axis_name)

  def train_step(
    params: Any, opt_state: Any, state: Any, /, *args: Any, **kwargs: Any
  ) -> tuple[Any, Any, Any, Any]:
    value_and_gradients = schedule.value_and_grad(
      loss_fn, opt_state, state, has_aux=has_aux, **autocast
    )
    local = _devices.make_varying(params, names) if names else params
    value, gradients = value_and_gradients(local, *args, **kwargs)
    loss = value[0] if has_aux else value
    if names:
      loss = lax.pmean(loss, names)

    applied = jnp.full((), True)
    if _state.find_states(opt_state):
      _check_order(optimizer, gradients, opt_state, params)
      before = _state.find_state(opt_state).applied_steps
      updates, opt_state = optimizer.update(
        gradients, opt_state, params, scaled=schedule.is_scaled(state)
      )
      # By the count: what is around it may have rejected the step as a whole.
      applied = _state.find_state(opt_state).applied_steps != before
    else:
      _check_gradients_alone(params)
      updates, opt_state = optimizer.update(gradients, opt_state, params)
    params = _leaves.apply_updates(params, updates)

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
  if jaxpr.is_recording():
    return  # What is recorded is evaluated at once.
  if _state.is_staged() and not isinstance(state.low, jax.core.Tracer):
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
  """Raises if something is around loss scaling that has to be inside.

  Raises:
    ValueError: if it would not hear that a step is not scaled, or would add up
      gradients that are scaled and such that are not.
  """
  _requirements.check_accumulation(opt_state)
  try:
    jax.eval_shape(lambda: tx.update(gradients, opt_state, params, scaled=None))
  except _requirements.ScaledError:
    return  # It arrives.
  raise ValueError(
    "`tx` must hand the extra argument `scaled` on to loss_scaling, got "
    "something around it that does not, so that unscaled gradients would be "
    "divided by S; put it inside: loss_scaling(inner, rule)."
  )


def _check_gradients_alone(params: Any) -> None:
  """Raises if a bare optimizer would take for gradients what is none."""
  if not all(jax.tree.leaves(_leaves.resolve_mask(None, params))):
    raise ValueError(
      "`tx` must hold loss_scaling where parameters are in Flax's "
      "_overwrite_with_gradient collection, which then goes around the "
      "optimizer; wrap it: loss_scaling(inner, FixedLossScale(1.0))."
    )
