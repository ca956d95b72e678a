"""What the wrapper requires of its arguments, its rule and its states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale import _arguments
from optax_lossscale import _checks
from optax_lossscale import _leaves
from optax_lossscale import _rules
from optax_lossscale import _select
from optax_lossscale import _state


class ScaledError(TypeError):
  """`scaled` arrived at loss scaling, and is neither a bool nor bool[]."""


def as_optimizer(
  name: str, inner: Any
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer that takes extra arguments.

  Args:
    name: the argument's name, for the error.
    inner: an optax transformation or `optax.MultiSteps`.

  Raises:
    TypeError: if it is none of these.
  """
  if isinstance(inner, optax.MultiSteps):
    # Not its `gradient_transformation()`, which drops extra arguments.
    return optax.GradientTransformationExtraArgs(inner.init, inner.update)
  if isinstance(inner, (type, _rules.LossScale)) or not (
    hasattr(inner, "init") and hasattr(inner, "update")
  ):
    remedy = "; call it: optax.adam(1e-3)" if callable(inner) else ""
    raise TypeError(
      f"`{name}` must be an optax gradient transformation, got "
      f"{getattr(inner, '__name__', repr(inner))}{remedy}."
    )
  return optax.with_extra_args_support(inner)


def check_arguments(inner: Any, rule: Any, check: Any) -> None:
  """Raises if arguments of `loss_scaling` are not of their kinds."""
  if isinstance(inner, _rules.LossScale):
    raise TypeError(
      f"`inner` must be an optax gradient transformation, got {inner!r}; "
      "loss_scaling takes the optimizer first, then the rule."
    )
  if not isinstance(rule, _rules.LossScale):
    remedy = (
      f"call it: {rule.__name__}(...)"
      if callable(rule) and hasattr(rule, "__name__")
      else "for a fixed S pass FixedLossScale(1024.0), for one that adapts "
      "DynamicLossScale()"
    )
    raise TypeError(f"`rule` must be a LossScale, got {rule!r}; {remedy}.")
  if not isinstance(check, _checks.Check):
    raise TypeError(
      f"`check` must be made by nonfinite() or saturated(dtype), got {check!r}."
    )


def check_rule(rule: _rules.LossScale) -> None:
  """Raises if the rule's first state is not one to start with."""
  # Also where `init` is being traced, the first S is a constant to look at.
  with jax.ensure_compile_time_eval():
    state = rule.init()
    loss_scale = getattr(_leaves.as_arrays(state), "loss_scale", None)
    if (
      not isinstance(loss_scale, jax.Array)
      or loss_scale.dtype != jnp.float32
      or loss_scale.shape != ()
    ):
      got = type(state).__name__ if loss_scale is None else loss_scale
      raise TypeError(
        "the state of `rule` must have an attribute `loss_scale`, float32[], "
        f"got {got!r}."
      )
    if not isinstance(loss_scale, jax.core.Tracer):
      _arguments.check_scale("loss_scale of the rule's first state", loss_scale)


def check_inner_state(inner_state: Any) -> None:
  """Raises if the optimizer's state holds a loss scale already."""
  paths = _state.find_states(inner_state)
  if paths:
    place = "/".join(filter(None, ["inner_state", next(iter(paths))]))
    raise ValueError(
      f"`inner` must not contain loss_scaling, got it at {place}: gradients "
      "would be unscaled twice. Wrap the optimizer once, outermost."
    )


def check_state(state: Any, rule: _rules.LossScale) -> None:
  """Raises if `update` is not given the state that `init` made."""
  if not isinstance(state, _state.LossScalingState):
    raise TypeError(
      "`state` must be the LossScalingState that init made, got "
      f"{type(state).__name__}."
    )
  _select.check_structure(
    "`state` must hold the state of this `rule`",
    state.loss_scale_state,
    jax.eval_shape(rule.init),
  )


def check_scaled(scaled: Any) -> None:
  """Raises if `scaled` of `update` is not a bool or bool[]."""
  is_array = isinstance(scaled, (jax.Array, np.ndarray, np.bool_))
  if isinstance(scaled, bool) or (
    is_array and scaled.shape == () and scaled.dtype == bool
  ):
    return
  got = f"{scaled.dtype}{list(scaled.shape)}" if is_array else repr(scaled)
  raise ScaledError(f"`scaled` must be a bool or bool[], got {got}.")
