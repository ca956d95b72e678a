"""Steps whose loss was not scaled: S is 1, and the rule does not move."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import same_bits

PARAMS = {"w": jnp.array([1.0, -0.0, 3.0]), "b": jnp.array([0.5], jnp.float16)}
GRADIENTS = {
  "w": jnp.array([1e-3, -2.0, 1e5]),
  "b": jnp.array([0.25], jnp.float16),
}
# Every one of them would move on every step.
RULES = {
  "dynamic": ols.DynamicLossScale(8.0, growth_interval=1),
  "hysteresis": ols.presets.megatron(
    initial_scale=8.0,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1,
    hysteresis=2,
  ),
}
CHECKS = {
  "nonfinite": ols.nonfinite(),
  "nonfinite-float16": ols.nonfinite(jnp.float16),
  "saturated-float16": ols.saturated(jnp.float16),
}
OVERFLOWS = {
  "inf": {"w": jnp.array([1.0, jnp.inf, 0.0])},
  "nan": {"w": jnp.array([1.0, jnp.nan, 0.0])},
  "half": {"b": jnp.array([-jnp.inf], jnp.float16)},
}


SCHEDULE = ols.PrecisionSchedule(jnp.float16, until_step=5)


def update(tx, gradients, state, params, *, scaled, **extra_args):
  """Updates in the low part of training, or in the full one."""
  precision = SCHEDULE.init()._replace(low=jnp.asarray(scaled))
  return SCHEDULE.optimizer(tx, precision).update(
    gradients, state, params, **extra_args
  )


def make(rule="dynamic", check="nonfinite", inner=None, **options):
  tx = ols.loss_scaling(
    inner or optax.adam(0.5), RULES[rule], check=CHECKS[check], **options
  )
  return tx, tx.init(PARAMS)


def test_the_first_state_is_that_of_the_optimizer():
  tx, state = make()
  assert same_bits(SCHEDULE.optimizer(tx, SCHEDULE.init()).init(PARAMS), state)


@pytest.mark.parametrize("check", CHECKS)
def test_what_the_check_limits_it_limits_on_unscaled_steps_too(check):
  tx, state = make(check=check)
  _, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
  assert after.amax == 1e5
  assert after.skipped == ("float16" in check)
  assert same_bits(after.loss_scale_state, state.loss_scale_state)


@pytest.mark.parametrize("convert", [bool, jnp.asarray], ids=["bool", "array"])
def test_an_unscaled_step_is_that_of_the_optimizer_alone(convert):
  tx, state = make()
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
  inner, bare = optax.adam(0.5), optax.adam(0.5).init(wide)
  for _ in range(2):
    updates, state = update(tx, GRADIENTS, state, PARAMS, scaled=convert(False))
    expected, bare = inner.update(
      jax.tree.map(lambda x: x.astype(jnp.float32), GRADIENTS), bare, wide
    )
    assert same_bits(state.inner_state, bare)
    expected["b"] = expected["b"].astype(jnp.float16)
    assert same_bits(updates, expected)
  assert (state.applied_steps, state.skipped_steps) == (2, 0)
  assert state.amax == 1e5
  assert not state.overflow
  assert not state.stalled


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rule", "overflow"),
  support.pairs(RULES, [None, *OVERFLOWS]),
  ids=support.name,
)
def test_on_unscaled_steps_the_rules_state_stays_bit_for_bit(rule, overflow):
  tx, state = make(rule)
  # Not the first state, in which counters are 0.
  _, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
  gradients = GRADIENTS | OVERFLOWS.get(overflow, {})
  step = jax.jit(functools.partial(update, tx))
  _, after = step(gradients, state, PARAMS, scaled=False)
  assert same_bits(after.loss_scale_state, state.loss_scale_state)
  _, moved = step(gradients, state, PARAMS, scaled=True)
  assert not same_bits(moved.loss_scale_state, state.loss_scale_state)


def test_a_damaged_scale_waits_for_a_scaled_step():
  tx, state = make()
  state = optax.tree.set(state, loss_scale=jnp.float32(jnp.nan))
  _, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
  assert not after.skipped and jnp.isnan(ols.get_loss_scale(after))
  _, after = update(tx, GRADIENTS, after, PARAMS, scaled=True)
  assert after.skipped and after.stalled
  assert ols.get_loss_scale(after) == ols.get_loss_scale(tx.init(PARAMS))


@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_an_unscaled_step_that_is_not_finite_is_skipped(overflow):
  tx, state = make()
  updates, after = update(
    tx, GRADIENTS | OVERFLOWS[overflow], state, PARAMS, scaled=False
  )
  assert same_bits(
    updates, jax.tree.map(lambda x: jnp.full_like(x, -0.0), PARAMS)
  )
  assert same_bits(after.inner_state, state.inner_state)
  assert after.overflow
  assert after.skipped
  assert after.nan == (overflow == "nan")
  # S cannot help.
  assert after.stalled
  assert (after.applied_steps, after.skipped_steps) == (0, 1)


def test_a_rule_that_does_not_skip_applies_unscaled_overflows_too():
  inner = optax.sgd(1.0)
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0, skip=False))
  updates, state = update(
    tx, GRADIENTS | OVERFLOWS["inf"], tx.init(PARAMS), PARAMS, scaled=False
  )
  np.testing.assert_array_equal(updates["w"], [-1.0, -jnp.inf, -0.0])
  assert state.overflow
  assert not state.skipped


def test_the_callers_flag_skips_an_unscaled_step_and_the_rule_stays():
  tx, state = make()
  _, after = update(
    tx, GRADIENTS, state, PARAMS, overflow=True, scaled=jnp.asarray(False)
  )
  assert after.skipped
  assert same_bits(after.loss_scale_state, state.loss_scale_state)


def test_one_program_serves_scaled_and_unscaled_steps():
  tx, state = make(check="saturated-float16")

  @jax.jit
  @chex.assert_max_traces(n=1)
  def step(*args, **kwargs):
    return update(tx, *args, **kwargs)

  for scaled in (True, False, True):
    expected = update(tx, GRADIENTS, state, PARAMS, scaled=scaled)
    updates, state = step(GRADIENTS, state, PARAMS, scaled=jnp.asarray(scaled))
    assert same_bits(state.loss_scale_state, expected[1].loss_scale_state)
    assert state.skipped == expected[1].skipped
    chex.assert_trees_all_close(updates, expected[0], rtol=1e-3, atol=0)


def test_a_scan_over_both_kinds_of_steps():
  tx, state = make()

  def body(state, scaled):
    _, state = update(tx, GRADIENTS, state, PARAMS, scaled=scaled)
    return state, ols.get_loss_scale(state)

  kinds = jnp.array([True, False, False, True])
  _, scales = jax.lax.scan(body, state, kinds)
  np.testing.assert_array_equal(scales, [16.0, 16.0, 16.0, 32.0])


def test_leaves_that_are_no_gradients_pass_on_unscaled_steps_too():
  overwrite = "_overwrite_with_gradient"
  params = PARAMS | {overwrite: jnp.array([2.0])}
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  updates, _ = update(
    tx,
    GRADIENTS | {overwrite: jnp.array([5.0])},
    tx.init(params),
    params,
    scaled=False,
  )
  assert updates[overwrite] == 5.0


def test_the_scale_is_swapped_wherever_it_is_and_nothing_else_is():
  seen = []

  def inner_update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), inner_update
  )
  rule = ols.rules.WarmStart(ols.DynamicLossScale(8.0, growth_interval=1))
  tx = optax.chain(ols.loss_scaling(inner, rule), optax.trace(0.5))
  state = tx.init(PARAMS)
  updates, after = update(tx, GRADIENTS, state, PARAMS, scaled=False, value=3.0)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), GRADIENTS)
  np.testing.assert_array_equal(updates["w"], wide["w"])
  assert seen == [{"value": 3.0}]
  assert same_bits(after[0].loss_scale_state, state[0].loss_scale_state)
  assert not same_bits(after[1], state[1])


def test_what_is_around_may_change_the_structure_of_its_state():
  def init(params):
    return {}

  def update_fn(updates, state, params=None):
    return updates, {"seen": jnp.ones(())}

  grows = optax.GradientTransformation(init, update_fn)
  for tx in (optax.chain(make()[0], grows), optax.chain(grows, optax.sgd(1.0))):
    state = tx.init(PARAMS)
    _, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
    assert any(part == {"seen": 1.0} for part in after)


def test_a_rule_that_computes_its_scale_cannot_be_swapped():
  class State(NamedTuple):
    exponent: jax.Array

    @property
    def loss_scale(self):
      return jnp.exp2(self.exponent)

  class Exponent(ols.LossScale):
    def init(self):
      return State(jnp.float32(3))

    def update(self, state, overflow, *, amax=None):
      return state

  tx = ols.loss_scaling(optax.sgd(1.0), Exponent())
  with pytest.raises(TypeError, match="S as a leaf.*a State"):
    update(tx, GRADIENTS, tx.init(PARAMS), PARAMS, scaled=False)


def test_a_transformation_around_that_moves_the_state_is_refused():
  inner, _ = make()
  tx = optax.GradientTransformation(
    lambda params: {"before": inner.init(params)},
    lambda updates, state, params: (
      updates,
      {"after": inner.update(updates, state["before"], params)[1]},
    ),
  )
  with pytest.raises(ValueError, match="`tx` must keep .*'after'; make"):
    update(tx, GRADIENTS, tx.init(PARAMS), PARAMS, scaled=True)


def test_devices_must_agree_on_whether_a_step_was_scaled():
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  state = tx.init(jnp.zeros(()))

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  def step(scaled):
    gradient = jnp.ones(())
    return update(tx, gradient, state, None, scaled=scaled[0])[0][None]

  with pytest.raises(
    ValueError, match="`state` must be the same.*pmean\\(loss, 'data'"
  ):
    jax.jit(step)(jnp.array([True, False]))
