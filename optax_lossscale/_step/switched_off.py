"""The wrapper without a rule: no S and no check, only a count of the steps."""

from collections.abc import Hashable
from typing import Any

from chex import ArrayTree
import jax.numpy as jnp
import optax

from optax_lossscale._base import leaves
from optax_lossscale._base import trees
from optax_lossscale._rules import loss_scales
from optax_lossscale._step import devices
from optax_lossscale._step import findings
from optax_lossscale._step import provenance
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states


def without_rule(
  inner: optax.GradientTransformationExtraArgs,
  axes: tuple[Hashable, ...],
  averaged: tuple[Hashable, ...],
  *,
  is_told: bool,
) -> optax.GradientTransformationExtraArgs:
  """Returns what `loss_scaling` returns if its `rule` is None.

  Args:
    inner: the optimizer.
    axes: the axes along which devices decide together about `skip`.
    averaged: the axes over which gradients are averaged.
    is_told: as in `devices.check_agreed`.
  """

  def init(params: optax.Params) -> states.LossScalingState:
    is_gradient = leaves.are_gradients(params)
    inner_state = inner.init(leaves.leave_out(is_gradient, params))
    requirements.check_inner_state(inner_state)
    return states.first_state(loss_scales.NoLossScaleState(), inner_state)

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
    del overflow, amax
    requirements.check_state(state, None)
    requirements.check_call(inner, updates, params, extra_args)
    is_gradient = leaves.are_gradients(updates)
    gradients = leaves.leave_out(is_gradient, updates)
    inner_params = leaves.leave_out(is_gradient, params)
    # S is 1, so unscaling twice or leaving out `overflow` is harmless.
    one = loss_scales.FixedLossScale(1.0)
    provenance.check_update(gradients, one.scale, one, overflow=None)
    if averaged:
      # Pass True, as after an overflow, so that NaN stays NaN.
      gradients = devices.average_scaled(gradients, averaged, jnp.array(True))

    def update_inner() -> tuple[optax.Updates, optax.OptState]:
      return inner.update(
        gradients, state.inner_state, inner_params, **extra_args
      )

    skipped = findings.requested(skip)
    if skipped is None:
      new_updates, inner_state = update_inner()
      others = updates
    else:
      if axes:
        devices.check_mapped("axis_name", axes)
        skipped = findings.agree_on_skip(skipped, axes)
      known = devices.check_agreed(
        [skipped], state.applied_steps, axes, is_told=is_told
      )

      def update_kept() -> tuple[optax.Updates, optax.OptState]:
        new_updates, inner_state = update_inner()
        trees.check_kept("inner", inner_state, state.inner_state)
        return new_updates, inner_state

      new_updates, inner_state = skipping.update_unless(
        skipped, update_kept, state.inner_state, known
      )
      others = skipping.other_leaves(skipped, is_gradient, params, updates)
    return leaves.merge(is_gradient, new_updates, others), state._replace(
      inner_state=inner_state,
      last_step=state.last_step._replace(
        skipped=jnp.zeros_like(state.skipped) if skipped is None else skipped
      ),
      counts=states.counts_after(state.counts, skipped, by_request=skipped),
    )

  return optax.GradientTransformationExtraArgs(init, update)
