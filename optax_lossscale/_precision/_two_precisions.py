"""Gradients and updates in two precisions, of which a flag chooses one."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale._autocast import full_precision
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import backward
from optax_lossscale._step import devices
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states


def value_and_grad(
  loss_fn: Callable[..., Any],
  opt_state: Any,
  low: Any,
  *,
  dtype: Any,
  keeps_products: bool,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  path: str | None = None,
  options: Mapping[str, Any],
) -> Callable[..., tuple[Any, Any]]:
  """Returns the function of `PrecisionSchedule.value_and_grad`."""
  low_loss_fn = make_low(loss_fn, dtype, options)
  in_full = full_precision.in_full_precision(
    jax.value_and_grad(loss_fn, argnums, has_aux=has_aux),
    keeps_products=keeps_products,
  )
  is_scaled = dtype == jnp.float16
  if is_scaled:
    backward.check_arguments(opt_state, argnums, path)

  @functools.wraps(loss_fn)
  def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    in_low = jax.value_and_grad(low_loss_fn, argnums, has_aux=has_aux)
    if is_scaled:
      in_low = backward.at_scale(
        states.scale_in_use(opt_state, path), low_loss_fn, argnums, has_aux
      )
    _refuse_frozen(low)
    value_and_gradients: tuple[Any, Any] = lax.cond(
      low, lambda: in_low(*args, **kwargs), lambda: in_full(*args, **kwargs)
    )
    return value_and_gradients

  return value_and_grad_fun


def make_low(
  loss_fn: Callable[..., Any], dtype: Any, options: Mapping[str, Any]
) -> Callable[..., Any]:
  """Returns `loss_fn` in low precision, or raises if nothing would be."""
  arguments.check_function(loss_fn)
  # Also here: what jit traces in this part it does not trace in the other one.
  as_written = full_precision.without_autocast(loss_fn)
  low_loss_fn = autocast(as_written, dtype=dtype, **options)
  if low_loss_fn is as_written:
    raise ValueError(
      "`level` must lower something in the first part of training, got 'O0'; "
      "take 'O1', or name in `overrides` what is to be lowered."
    )
  return low_loss_fn


def update_optimizer(
  tx: optax.GradientTransformation,
  gradients: Any,
  opt_state: Any,
  params: Any,
  is_scaled: jax.Array,
  **extra_args: Any,
) -> tuple[Any, Any]:
  """Returns `tx.update` of gradients that are scaled, or of true ones.

  True gradients are scaled by 1: that is the S which the step finds in the
  state. Afterwards the rule's state is put back, bit for bit.
  """
  optimizer = requirements.as_optimizer("tx", tx)
  requirements.check_accumulation(opt_state)

  # Keyed by path, since an optimizer around may add to its own state.
  rule_states: dict[Any, Any] = {}

  def swap(path: Any, state: Any) -> Any:
    if not states.is_state(state):
      return state
    _refuse_different(is_scaled, state)
    rule_states[path] = state.loss_scale_state
    rule_state = state.loss_scale_state
    return state._replace(
      loss_scale_state=states.replace_scale(
        rule_state, jnp.where(is_scaled, rule_state.loss_scale, 1)
      )
    )

  def put_back(path: Any, state: Any) -> Any:
    if not states.is_state(state):
      return state
    if path not in rule_states:
      raise ValueError(
        "`tx` must keep the state of loss_scaling where it is, got it back at "
        f"{leaves.path_name(path)!r}; make loss_scaling outermost."
      )
    return state._replace(
      loss_scale_state=skipping.select(
        ~is_scaled, rule_states[path], state.loss_scale_state
      ),
      # The step was not scaled, so a smaller S would not help.
      stalled=jnp.where(is_scaled, state.stalled, state.overflow),
    )

  visit = functools.partial(jax.tree.map_with_path, is_leaf=states.is_state)
  updates, new_state = optimizer.update(
    gradients, visit(swap, opt_state), params, **extra_args
  )
  return updates, visit(put_back, new_state)


def _refuse_frozen(low: Any) -> None:
  """Raises if a compiled function would hold the schedule's state for ever."""
  # What is recorded is evaluated at once.
  is_compiled = interpreter.is_staged() and not interpreter.is_recording()
  if is_compiled and not isinstance(low, jax.core.Tracer):
    raise ValueError(
      "`state` must be an argument of the function that JAX is tracing (jit, "
      "scan ...), got one that was closed over: what is compiled would never "
      "switch. Pass it in, and return the new one."
    )


def _refuse_different(
  is_scaled: jax.Array, state: states.LossScalingState
) -> None:
  """Raises if devices that share an S could be in different precisions."""
  axes = devices.axes_beyond(is_scaled, states.get_loss_scale(state))
  if axes:
    names = devices.listed(axes)
    raise ValueError(
      "`state` must be the same on all devices that share a loss scale, got "
      f"one that varies along {names}; reduce what it depends on, such as a "
      f"loss: jax.lax.pmean(loss, {names})."
    )
