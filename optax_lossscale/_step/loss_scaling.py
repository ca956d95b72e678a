"""The wrapper: check, agree, unscale, update, select, and move S."""

from collections.abc import Hashable
from collections.abc import Mapping
from typing import Any

from chex import ArrayTree
import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._base import siblings
from optax_lossscale._rules import base
from optax_lossscale._rules import fixed
from optax_lossscale._step import checks
from optax_lossscale._step import devices
from optax_lossscale._step import findings
from optax_lossscale._step import provenance
from optax_lossscale._step import reasons
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states


@arguments.explained
def loss_scaling(
  inner: optax.GradientTransformation | optax.MultiSteps,
  rule: base.LossScale | None,
  *,
  check: checks.Check = checks.nonfinite(),
  axis_name: devices.AxisNames | None = None,
  average_scaled: devices.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it takes scaled gradients.

  `update` checks the scaled gradients for an overflow, divides them by S in
  float32 and runs the inner optimizer. If there was an overflow, the step is
  skipped: the updates are -0.0 and the inner state stays the same, bit for bit.
  Then the rule moves S. A gradient also counts as an overflow if division by an
  S below 1 takes it out of its dtype's range. So does an S that is not a
  positive normal number, for example from a damaged checkpoint; the rule then
  starts over.

  Put anything that needs true gradients inside `inner`: clipping, noise, weight
  decay, accumulation. Schedules belong there as well, and count applied steps.

  Args:
    inner: the optimizer: any optax transformation or `optax.MultiSteps`. It
      gets float32 copies of narrower parameters and gradients, so its state is
      float32 from the start. Its update must be pure.
    rule: chooses the first S, and moves S in each step. None switches loss
      scaling off, so a program with configurable precision needs no second code
      path. S is then 1, no step is checked, `overflow` and `amax` are ignored,
      and narrow parameters reach `inner` unchanged. `skip` and `average_scaled`
      still apply; `accumulate` keeps its own check.
    check: what counts as an overflow. The default finds every inf and NaN;
      hardware that clips instead needs `saturated(dtype)`.
    axis_name: a mapped axis, or several in a tuple or list, along which all
      devices decide together under `shard_map` or `pmap`; plain jit needs none.
      Only the flag is reduced, not the gradients. Name every axis along which
      gradients or the caller's flag vary, or devices may fall out of step. Pass
      () if gradients are already the same on all devices, or if each device has
      its own model and state (see docs/guides/devices.md).
    average_scaled: a mapped axis, or several, over which the scaled gradients
      are averaged after the check. They keep their dtype, so float16 gradients
      travel as float16, where those below 6e-5 n lose low bits on n devices.
      Devices also decide together along these axes, and each needs a copy of
      the parameters. `pmean_gradients` averages in float32.

  Returns:
    A transformation whose state is a `LossScalingState`. Its `update` takes the
    scaled gradients, the inner optimizer's extra arguments, and three of its
    own. `overflow=` is a bool, number or array, where any non-zero entry makes
    the step an overflow; or the status that `hardware.float_status` returns, or
    the overflow of `accumulate`; or a list of these. `skip=` is a flag, or a
    list of flags, that skips the step for a reason that S has nothing to do
    with, such as a spike of the loss: the rule's state stays the same as well,
    unless the step also overflows. `amax=` is a tree of numbers or arrays, such
    as those that `hardware.amax_tap` measured in the model. The largest of them
    is checked like a gradient, against the smallest limit that the check knows.
    If the parameters are passed, the updates have their dtypes.

  Raises:
    TypeError: if an argument has the wrong type, also in `init` and `update`;
      from `init`, if the rule's state has no float32[] `loss_scale`; from
      `update`, if `overflow` or `skip` is passed under another name, or if
      `inner` itself takes a `skip`.
    ValueError: from `init`, if `inner` already holds loss scaling, or if the
      rule starts with an unusable S. From `update`, if an argument, or a result
      of `inner` or the rule, does not fit the others, if `axis_name` is not
      mapped, or, where JAX tracks what varies by device, if devices that share
      an S could disagree or gradients to average are already reduced.

  Warns:
    WiringWarning: from `init`, if float16 parameters have no master weights;
      from `update`, unless compiled, if the gradients come from `unscale`, were
      scaled by a different S, or leave out micro-batches but `overflow` is not
      passed, or if no axis is named where devices may fall out of step or where
      `inner` averages over it.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(8.0))
    >>> params = jnp.array([1.0, 2.0])
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.array([8.0, 16.0]), state, params)
    >>> print(updates, ols.get_loss_scale(state))
    [-0.5 -1. ] 8.0
    >>> updates, state = tx.update(jnp.array([8.0, jnp.inf]), state, params)
    >>> print(updates, ols.get_loss_scale(state))
    [-0. -0.] 4.0

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  inner = requirements.as_optimizer("inner", inner)
  requirements.check_check(check)
  averaged = devices.axis_names("average_scaled", average_scaled)
  # If gradients are averaged over devices, all devices must skip together.
  axes = devices.axis_names(
    "axis_name", (*devices.axis_names("axis_name", axis_name), *averaged)
  )
  is_told = axis_name is not None
  if rule is not None:
    requirements.check_rule("rule", rule)

  def init(params: optax.Params) -> states.LossScalingState:
    requirements.check_params(params)
    kept = leaves.leave_out(leaves.are_gradients(params), params)
    inner_state = inner.init(kept) if rule is None else _init_inner(inner, kept)
    requirements.check_inner_state(inner_state)
    if rule is None:
      return states.first_state(fixed.NoLossScaleState(), inner_state)
    requirements.check_first_state(rule)
    requirements.check_masters(kept, inner_state)
    return states.first_state(rule.init(), inner_state)

  def update(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    overflow: object = False,
    amax: object = None,
    skip: object = False,
    **extra_args: object,
  ) -> tuple[optax.Updates, states.LossScalingState]:
    requirements.check_state(state, rule)
    requirements.check_call(inner, updates, params, extra_args)
    if rule is None:
      return _update_unscaled(
        inner,
        updates,
        state,
        params,
        extra_args,
        skip=skip,
        axes=axes,
        averaged=averaged,
        is_told=is_told,
      )
    extra_args = promises.noted("arguments", extra_args)
    loss_scale = states.get_loss_scale(state)

    incoming = leaves.as_arrays(updates)
    is_gradient = leaves.are_gradients(incoming)
    scaled_grads = leaves.leave_out(is_gradient, incoming)
    inner_params = leaves.leave_out(is_gradient, params)

    provenance.check_update(scaled_grads, loss_scale, rule, overflow)
    finding = findings.examine(
      check, scaled_grads, overflow, amax, loss_scale=loss_scale
    )
    if skip is not False:  # Else the program has no select for it.
      finding = finding._replace(skip=reasons.requested(skip))
    if axes:
      devices.check_mapped("average_scaled", averaged)
      devices.check_mapped("axis_name", axes)
      finding = findings.agree(finding, axes)
    known = devices.check_agreed(
      finding.flags, loss_scale, axes, is_told=is_told
    )
    outcome = findings.decide(finding, rule_skips=rule.skip)
    if averaged:
      scaled_grads = devices.average_scaled(
        scaled_grads, averaged, outcome.overflow
      )

    # Not in `update_inner`, of which JAX traces each equation twice. The list
    # lets go of them before anything is selected outside jit.
    gradients = [leaves.unscale(scaled_grads, loss_scale)]

    def update_inner() -> tuple[optax.Updates, optax.OptState]:
      return _update_inner(
        inner, gradients.pop(), state.inner_state, inner_params, extra_args
      )

    may_skip = rule.skip or finding.skip is not None
    inner_updates, inner_state = skipping.update_unless(
      outcome.skipped,
      update_inner,
      state.inner_state,
      known if may_skip else None,
    )
    rule_state, stalled = move(
      rule,
      state.loss_scale_state,
      outcome.reported,
      finding.amax,
      outcome.unseen,
    )
    others = skipping.other_leaves(
      outcome.skipped if may_skip else None, is_gradient, params, incoming
    )
    return leaves.merge(is_gradient, inner_updates, others), states.after(
      state, rule_state, inner_state, finding, outcome, stalled
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _init_inner(
  inner: optax.GradientTransformationExtraArgs, params: optax.Params
) -> optax.OptState:
  """Returns the optimizer's state, in float32 unless it says otherwise."""
  inner_state = inner.init(leaves.widen(params))
  if not states.keeps_narrow(inner_state):  # Only a state says so.
    return inner_state
  widened = jax.eval_shape(lambda x: x, inner_state)
  del inner_state  # There may not be memory for both.
  narrow = inner.init(params)
  requirements.check_beside(widened, narrow)
  return narrow


def _update_inner(
  inner: optax.GradientTransformationExtraArgs,
  gradients: optax.Updates,
  inner_state: optax.OptState,
  params: optax.Params | None,
  extra_args: Mapping[str, object],
) -> tuple[optax.Updates, optax.OptState]:
  """Runs the optimizer in float32; its updates have the parameters' dtypes."""
  requirements.check_gradients(gradients, params)
  seen = params if states.keeps_narrow(inner_state) else leaves.widen(params)
  with requirements.explained(inner, gradients, inner_state, params):
    updates, new_state = inner.update(
      gradients, inner_state, seen, **extra_args
    )
    updates = requirements.narrow_updates(
      updates, gradients, params, to_sums=states.has_copies(inner_state)
    )
    leaves.check_kept("inner", new_state, inner_state)
  return updates, new_state


def _update_unscaled(
  inner: optax.GradientTransformationExtraArgs,
  updates: optax.Updates,
  state: states.LossScalingState,
  params: optax.Params | None,
  extra_args: Mapping[str, object],
  *,
  skip: object,
  axes: tuple[Hashable, ...],
  averaged: tuple[Hashable, ...],
  is_told: bool,
) -> tuple[optax.Updates, states.LossScalingState]:
  """Updates without a rule: counts the steps, and checks none."""
  is_gradient = leaves.are_gradients(updates)
  gradients = leaves.leave_out(is_gradient, updates)
  inner_params = leaves.leave_out(is_gradient, params)
  # S is 1, so unscaling twice or leaving out `overflow` is harmless.
  one = fixed.FixedLossScale(1.0)
  provenance.check_update(gradients, one.scale, one, overflow=None)
  if averaged:
    devices.check_mapped("average_scaled", averaged)
    # Pass True, as after an overflow, so that NaN stays NaN.
    gradients = devices.average_scaled(gradients, averaged, jnp.array(True))

  def update() -> tuple[optax.Updates, optax.OptState]:
    new_updates, inner_state = inner.update(
      gradients, state.inner_state, inner_params, **extra_args
    )
    if skip is not False:
      leaves.check_kept("inner", inner_state, state.inner_state)
    return new_updates, inner_state

  skipped = None
  if skip is False:
    new_updates, inner_state = update()
  else:
    skipped = reasons.requested(skip)
    if axes:
      devices.check_mapped("axis_name", axes)
      skipped = findings.agree_on_skip(skipped, axes)
    known = devices.check_agreed(
      [skipped], state.counts.applied_steps, axes, is_told=is_told
    )
    (skipped,) = siblings.shared(skipped)
    new_updates, inner_state = skipping.update_unless(
      skipped, update, state.inner_state, known
    )
  others = skipping.other_leaves(skipped, is_gradient, params, updates)
  return leaves.merge(is_gradient, new_updates, others), states.after_unscaled(
    state, inner_state, skipped
  )


@promises.promise("move", static=("rule",))
def move(
  rule: base.LossScale,
  state: Any,
  overflow: jax.Array,
  amax: jax.Array,
  unseen: jax.Array | None = None,
) -> tuple[Any, jax.Array]:
  """Returns the rule's next state, and whether S is stalled."""
  moved = rule.update(state, overflow, amax=amax)
  leaves.check_kept("rule", moved, state)
  # S is float32, but a rule may compute it in another dtype.
  loss_scale = jnp.asarray(moved.loss_scale, jnp.float32)
  # An S of a user's rule that is 0, subnormal, inf or NaN would silently stop
  # the training, so the previous state is kept instead.
  is_usable = arguments.is_usable_scale(loss_scale)
  # After a step that the rule must not see, its state also stays, and nothing
  # is stalled.
  is_held = ~is_usable if unseen is None else ~is_usable | unseen
  held = skipping.select(is_held, state, moved)
  # A damaged checkpoint may also hold an unusable S. The rest of the rule's
  # state is then suspect as well, so the rule starts over.
  before = jnp.asarray(state.loss_scale, jnp.float32)
  was_usable = arguments.is_usable_scale(before)
  next_state = skipping.select(~was_usable, rule.init(), held)
  if moved.loss_scale is not state.loss_scale:
    provenance.note(next_state.loss_scale, "next", before)
  stalled = rule.stalled(state, overflow) | ~is_usable | ~was_usable
  return next_state, stalled if unseen is None else stalled & ~unseen
