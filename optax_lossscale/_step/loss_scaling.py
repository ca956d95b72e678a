"""The wrapper: check, agree, unscale, update, select, and move S."""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import trees
from optax_lossscale._rules import base
from optax_lossscale._rules import loss_scales
from optax_lossscale._step import backward
from optax_lossscale._step import checks
from optax_lossscale._step import devices
from optax_lossscale._step import findings
from optax_lossscale._step import provenance
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states


def loss_scaling(
  inner: optax.GradientTransformation | optax.MultiSteps,
  rule: base.LossScale | None,
  *,
  check: checks.Check = checks.nonfinite(),
  axis_name: Any = None,
  average_scaled: Any = None,
  mask: Any = None,
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
      float32 from the start. Under jit its update is first recorded and then
      evaluated, so the update must be pure.
    rule: chooses the first S, and moves S in each step. None switches loss
      scaling off, so a program with configurable precision needs no second code
      path. S is then 1, no step is checked, `overflow` and `amax` are ignored,
      and narrow parameters reach `inner` unchanged. XLA compiles only `inner`
      and the count of applied steps. `skip`, `mask` and `average_scaled` still
      apply; `accumulated_value_and_grad` keeps its own check.
    check: what counts as an overflow, `nonfinite()` or `saturated(dtype)`.
    axis_name: a mapped axis, or several in a tuple or list, along which all
      devices decide together under `shard_map` or `pmap`. Plain jit does not
      need one, since its arrays are whole, however they are sharded. Only the
      flag is reduced, not the gradients. Name every axis along which gradients
      or the caller's flag vary, unless each device has its own model and state.
      If an axis is missing, devices may fall out of step. Under `shard_map`
      with `check_vma=True`, JAX tracks what varies, so that is an error. Under
      `pmap` and with `check_vma=False`, None causes a `WiringWarning`; pass ()
      there if gradients are already the same on all devices, or if each device
      has its own model.
    average_scaled: a mapped axis, or several, over which the scaled gradients
      are averaged after the check. They keep their dtype, so float16 gradients
      travel as float16. Devices also decide together along these axes. Each of
      n devices divides by n before the sum, so the sum does not overflow; but
      float16 gradients below 6e-5 n lose low bits, and below 3e-8 n become 0.
      `pmean_gradients` averages in float32. Both ways of averaging require that
      every device has a copy of the parameters.
    mask: True for the leaves that are gradients: a tree of bools whose
      structure is a prefix of the parameters', or a function from the
      parameters to such a tree. The other leaves bypass the wrapper and the
      optimizer: `update` returns the values passed in or, if it skips the step,
      the old ones. By default only the leaves of Flax's
      `_overwrite_with_gradient` collection bypass them.

  Returns:
    A transformation whose state is a `LossScalingState`. Its `update` takes the
    scaled gradients, the inner optimizer's extra arguments, and three of its
    own. `overflow=` is a bool, number or array, where any non-zero entry makes
    the step an overflow; or the status that `float_status` returns, or the
    overflow of `accumulated_value_and_grad`; or a list of these. `skip=` is a
    flag, or a list of flags, of the same kind that skips the step for a reason
    that S has nothing to do with, such as a spike that `SpikeGuard` sees: the
    rule's state stays the same as well, bit for bit, unless the step also
    overflows. It works with every rule, with `skip=False` in the rule, and
    without a rule. `amax=` is a tree of numbers or arrays, such as those that
    `rules.amax_tap` measured in the model. The largest of them is checked like
    a gradient, against the smallest limit that the check knows. If the
    parameters are passed, the updates have their dtypes.

  Raises:
    TypeError: if an argument has the wrong type, also in `init` and `update`;
      from `init`, if the rule's state has no float32[] `loss_scale`; from
      `update`, if `overflow` or `skip` is passed under another name, or if
      `inner` itself takes a `skip`.
    ValueError: from `init`, if `inner` already holds loss scaling, or if the
      rule starts with an unusable S. From `update`, if an argument, or a result
      of `inner` or the rule, does not fit the others, if `axis_name` is not
      mapped, or if leaves bypass the optimizer but `params` is missing. If JAX
      tracks what varies by device, `update` also raises if devices that share
      an S could disagree, or if the gradients to average are already reduced.

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
  if rule is not None:
    requirements.check_rule("rule", rule)
  requirements.check_check(check)
  averaged = devices.axis_names("average_scaled", average_scaled)
  # If gradients are averaged over devices, all devices must skip together.
  agreed = devices.axis_names(
    "axis_name", (*devices.axis_names("axis_name", axis_name), *averaged)
  )

  def agree(
    finding: findings.Finding, own: jax.Array
  ) -> tuple[findings.Finding, Sequence[Hashable]]:
    known: Sequence[Hashable] = agreed
    if agreed:
      devices.check_mapped("axis_name", agreed)
      finding = findings.agree(finding, agreed)
    elif axis_name is None:
      known = devices.check_named()
    # `own` is part of the state, so it varies only if each device has its own.
    flags = [x for x in (finding.overflow, finding.skip) if x is not None]
    devices.refuse_divergence(flags, own, agreed)
    return finding, known

  def init(params: optax.Params) -> states.LossScalingState:
    is_gradient = leaves.resolve_mask(mask, params)
    kept = leaves.leave_out(is_gradient, params)
    if rule is None:
      return _first_state(loss_scales.NoLossScaleState(), inner.init(kept))
    inner_state = inner.init(leaves.widen(kept))
    requirements.check_first_state(rule)
    requirements.check_masters(kept, inner_state)
    return _first_state(rule.init(), inner_state)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    *,
    overflow: Any = False,
    amax: Any = None,
    skip: Any = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, states.LossScalingState]:
    requirements.check_state(state, rule)
    requirements.check_call(inner, updates, params, extra_args)
    incoming = updates if rule is None else leaves.as_arrays(updates)
    is_gradient = leaves.resolve_mask(mask, incoming, params)
    scaled_gradients = leaves.leave_out(is_gradient, incoming)
    inner_params = leaves.leave_out(is_gradient, params)
    requested = findings.requested(skip)
    # The axes that devices agree on, or that a warning has named already.
    known: Sequence[Hashable] = agreed

    if rule is None:
      if requested is not None:
        no, zero = jnp.full((), False), jnp.full((), 0, jnp.float32)
        asked = findings.Finding(no, zero, no, zero, requested)
        finding, known = agree(asked, state.applied_steps)
        requested = finding.skip
      new_updates, new_state = _bare_update(
        inner,
        scaled_gradients,
        state,
        inner_params,
        averaged,
        known,
        requested,
        extra_args,
      )
      next_values = _values_after(requested, is_gradient, params, incoming)
      return leaves.merge(is_gradient, new_updates, next_values), new_state

    loss_scale = states.get_loss_scale(state)
    provenance.check_update(scaled_gradients, loss_scale, rule, overflow)
    finding = findings.examine(
      check, scaled_gradients, overflow, amax, loss_scale=loss_scale
    )
    finding, known = agree(finding._replace(skip=requested), loss_scale)
    reported = finding.overflow | finding.dropped
    # Without the barrier XLA would recompute the flag at every use.
    overflowed = jax.lax.optimization_barrier(finding.overflow)
    skipped = overflowed & rule.skip
    by_request = unseen = None
    if finding.skip is not None:
      requested = jax.lax.optimization_barrier(finding.skip)
      by_request, skipped = requested & ~skipped, requested | skipped
      # The rule does not see a step that is skipped for another reason.
      unseen = requested & ~reported
    if averaged:
      scaled_gradients = devices.average_scaled(
        scaled_gradients, averaged, overflowed
      )

    def inner_update() -> tuple[optax.Updates, optax.OptState]:
      gradients = backward.unscale_tree(scaled_gradients, loss_scale)
      requirements.check_gradients(gradients, inner_params)
      with requirements.explained(
        inner, gradients, state.inner_state, inner_params
      ):
        inner_updates, inner_state = inner.update(
          gradients,
          state.inner_state,
          leaves.widen(inner_params),
          **extra_args,
        )
        inner_updates = requirements.narrow_updates(
          inner_updates, gradients, inner_params
        )
        _check_kept("inner", inner_state, state.inner_state)
      return inner_updates, inner_state

    new_updates, inner_state = skipping.update_unless(
      skipped, inner_update, state.inner_state, known
    )

    loss_scale_state, stalled = move(
      rule, state.loss_scale_state, reported, finding.amax, unseen
    )
    may_skip = rule.skip or requested is not None
    next_values = _values_after(
      skipped if may_skip else None, is_gradient, params, incoming
    )
    return (
      leaves.merge(is_gradient, new_updates, next_values),
      states.LossScalingState(
        loss_scale_state=loss_scale_state,
        inner_state=inner_state,
        overflow=reported,
        nan=jnp.isnan(finding.amax),
        stalled=stalled,
        amax=finding.amax,
        used=finding.used,
        **_counts(state, skipped, by_request),
      ),
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _bare_update(
  inner: optax.GradientTransformationExtraArgs,
  gradients: Any,
  state: states.LossScalingState,
  params: Any,
  averaged: Any,
  known: Sequence[Hashable],
  requested: jax.Array | None,
  extra_args: Any,
) -> tuple[optax.Updates, states.LossScalingState]:
  """Runs the optimizer without loss scaling; returns updates and a state."""
  # S is 1, so unscaling twice or leaving out `overflow` is harmless.
  one = loss_scales.FixedLossScale(1.0)
  provenance.check_update(gradients, one.scale, one, overflow=None)
  if averaged:
    # Pass True, as after an overflow, so that NaN stays NaN.
    gradients = devices.average_scaled(gradients, averaged, jnp.array(True))

  def inner_update() -> tuple[optax.Updates, optax.OptState]:
    updates, inner_state = inner.update(
      gradients, state.inner_state, params, **extra_args
    )
    if requested is not None:
      _check_kept("inner", inner_state, state.inner_state)
    return updates, inner_state

  if requested is None:
    updates, inner_state = inner_update()
    # `skipped` is a constant False, so XLA drops the selects that depend on it.
    return updates, state._replace(
      inner_state=inner_state,
      skipped=jnp.zeros_like(state.skipped),
      consecutive_skips=jnp.zeros_like(state.consecutive_skips),
      applied_steps=optax.safe_increment(state.applied_steps),
    )
  updates, inner_state = skipping.update_unless(
    requested, inner_update, state.inner_state, known
  )
  return updates, state._replace(
    inner_state=inner_state, **_counts(state, requested, requested)
  )


def _values_after(
  skipped: jax.Array | None, is_gradient: Any, params: Any, incoming: Any
) -> Any:
  """Returns the next values of the leaves that are not gradients."""
  if skipped is None or all(jax.tree.leaves(is_gradient)):
    return incoming
  if params is None:
    raise ValueError(
      "`params` must be passed to update where leaves go around the "
      "optimizer (see `mask`): a skipped step returns their old values."
    )
  return skipping.select(skipped, params, incoming)


def _counts(
  state: states.LossScalingState,
  skipped: jax.Array,
  by_request: jax.Array | None,
) -> dict[str, jax.Array]:
  """Returns the fields of the next state that say what became of the step."""
  requested_skips = state.requested_skips
  if by_request is not None:
    requested_skips = _count_if(by_request, requested_skips)
  return {
    "skipped": skipped,
    "applied_steps": _count_if(~skipped, state.applied_steps),
    "skipped_steps": _count_if(skipped, state.skipped_steps),
    "requested_skips": requested_skips,
    "consecutive_skips": jnp.where(
      skipped, optax.safe_increment(state.consecutive_skips), 0
    ),
  }


def _first_state(rule_state: Any, inner_state: Any) -> states.LossScalingState:
  """Returns the state before the first step."""
  requirements.check_inner_state(inner_state)
  return states.LossScalingState(
    loss_scale_state=leaves.as_arrays(rule_state),
    inner_state=leaves.as_arrays(inner_state),
    overflow=jnp.full((), False),
    nan=jnp.full((), False),
    skipped=jnp.full((), False),
    stalled=jnp.full((), False),
    amax=jnp.full((), 0, jnp.float32),
    used=jnp.full((), 0, jnp.float32),
    applied_steps=jnp.full((), 0, jnp.int32),
    skipped_steps=jnp.full((), 0, jnp.int32),
    requested_skips=jnp.full((), 0, jnp.int32),
    consecutive_skips=jnp.full((), 0, jnp.int32),
  )


def move(
  rule: base.LossScale,
  state: Any,
  overflow: Any,
  amax: Any,
  unseen: jax.Array | None = None,
) -> tuple[Any, jax.Array]:
  """Returns the rule's next state, and whether S is stalled.

  If `unseen` is True, the rule keeps its state, and nothing is stalled.
  """
  moved = rule.update(state, overflow, amax=amax)
  _check_kept("rule", moved, state)
  # S is float32, but a rule may compute it in another dtype.
  loss_scale = jnp.asarray(moved.loss_scale, jnp.float32)
  # A user's rule may return an S that is 0, subnormal, inf or NaN. Such an S
  # would silently stop the training, so the previous state is kept instead.
  is_usable = arguments.is_usable_scale(loss_scale)
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


def _count_if(condition: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.where(condition, optax.safe_increment(count), count)


def _check_kept(name: str, new: Any, old: Any) -> None:
  rule = f"the state of `{name}` must keep the structure that its init made"
  trees.check_structure(rule, new, old)
