"""Steps whose loss was not scaled: S is 1, and the rule does not move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import parameters

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


def same_bits(a, b):
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in leaves
  )


def make(rule="dynamic", check="nonfinite", inner=None, **options):
  tx = ols.loss_scaling(
    inner or optax.adam(0.5), RULES[rule], check=CHECKS[check], **options
  )
  return tx, tx.init(PARAMS)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("convert", [bool, jnp.asarray], ids=["bool", "array"])
def test_an_unscaled_step_is_that_of_the_optimizer_alone(convert, check):
  tx, state = make(check=check)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
  update, bare = optax.adam(0.5).update, optax.adam(0.5).init(wide)
  for _ in range(2):
    updates, state = tx.update(GRADIENTS, state, PARAMS, scaled=convert(False))
    expected, bare = update(
      jax.tree.map(lambda x: x.astype(jnp.float32), GRADIENTS), bare, wide
    )
    assert same_bits(state.inner_state, bare)
    expected["b"] = expected["b"].astype(jnp.float16)
    assert same_bits(updates, expected)
  assert (state.applied_steps, state.skipped_steps) == (2, 0)
  assert state.amax == 1e5
  assert not state.overflow


@pytest.mark.parametrize(
  ("rule", "overflow"),
  parameters.pairs(RULES, [None, *OVERFLOWS]),
  ids=parameters.name,
)
def test_on_unscaled_steps_the_rules_state_stays_bit_for_bit(rule, overflow):
  tx, state = make(rule)
  # Not the first state, in which counters are 0.
  _, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
  gradients = GRADIENTS | OVERFLOWS.get(overflow, {})
  update = jax.jit(tx.update)
  _, after = update(gradients, state, PARAMS, scaled=False)
  assert same_bits(after.loss_scale_state, state.loss_scale_state)
  _, moved = update(gradients, state, PARAMS, scaled=True)
  assert not same_bits(moved.loss_scale_state, state.loss_scale_state)


@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_an_unscaled_step_that_is_not_finite_is_skipped(overflow):
  tx, state = make()
  updates, after = tx.update(
    GRADIENTS | OVERFLOWS[overflow], state, PARAMS, scaled=False
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
  updates, state = tx.update(
    GRADIENTS | OVERFLOWS["inf"], tx.init(PARAMS), PARAMS, scaled=False
  )
  np.testing.assert_array_equal(updates["w"], [-1.0, -jnp.inf, -0.0])
  assert state.overflow
  assert not state.skipped


def test_the_callers_flag_skips_an_unscaled_step_and_the_rule_stays():
  tx, state = make()
  _, after = tx.update(
    GRADIENTS, state, PARAMS, overflow=True, scaled=jnp.asarray(False)
  )
  assert after.skipped
  assert same_bits(after.loss_scale_state, state.loss_scale_state)


@pytest.mark.parametrize("check", ["nonfinite-float16", "saturated-float16"])
@pytest.mark.parametrize("convert", [bool, jnp.asarray], ids=["bool", "array"])
def test_the_computations_dtype_counts_on_scaled_steps_only(convert, check):
  tx, state = make(check=check)
  gradients = {"w": jnp.array([7e4, 0.0, 0.0]), "b": GRADIENTS["b"]}
  for scaled in (True, False):
    _, after = tx.update(gradients, state, PARAMS, scaled=convert(scaled))
    assert after.overflow == scaled


@pytest.mark.parametrize(
  ("check", "overflow"), [("nonfinite", False), ("saturated-float16", True)]
)
@pytest.mark.parametrize("convert", [bool, jnp.asarray], ids=["bool", "array"])
def test_on_unscaled_steps_hardware_saturates_at_the_gradients_own_limit(
  convert, check, overflow
):
  tx, state = make(check=check)
  largest = jnp.finfo(jnp.float32).max
  gradients = {"w": jnp.array([largest, 0.0, 0.0]), "b": GRADIENTS["b"]}
  _, after = tx.update(gradients, state, PARAMS, scaled=convert(False))
  assert after.overflow == overflow


def test_one_program_serves_scaled_and_unscaled_steps():
  tx, state = make(check="saturated-float16")
  update = jax.jit(tx.update)
  for scaled in (True, False, True):
    expected = tx.update(GRADIENTS, state, PARAMS, scaled=scaled)
    updates, state = update(
      GRADIENTS, state, PARAMS, scaled=jnp.asarray(scaled)
    )
    assert same_bits(state.loss_scale_state, expected[1].loss_scale_state)
    assert state.skipped == expected[1].skipped
    for x, y in zip(
      jax.tree.leaves(updates), jax.tree.leaves(expected[0]), strict=True
    ):
      np.testing.assert_allclose(x, y, rtol=1e-3)
  assert update._cache_size() == 1


def test_a_scan_over_both_kinds_of_steps():
  tx, state = make()

  def body(state, scaled):
    _, state = tx.update(GRADIENTS, state, PARAMS, scaled=scaled)
    return state, ols.get_loss_scale(state)

  kinds = jnp.array([True, False, False, True])
  _, scales = jax.lax.scan(body, state, kinds)
  np.testing.assert_array_equal(scales, [16.0, 16.0, 16.0, 32.0])


def test_no_word_of_scaled_leaves_the_program_as_it_was():
  tx, state = make()
  programs = [
    str(
      jax.make_jaxpr(functools.partial(tx.update, **options))(
        GRADIENTS, state, PARAMS
      )
    )
    for options in ({}, {"scaled": True})
  ]
  assert programs[0] == programs[1]


def test_scaled_reaches_the_wrapper_through_a_chain_and_no_further():
  seen = []

  def update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )
  tx = optax.chain(
    ols.loss_scaling(inner, ols.FixedLossScale(8.0)), optax.identity()
  )
  updates, _ = tx.update(
    GRADIENTS, tx.init(PARAMS), PARAMS, scaled=False, value=3.0
  )
  assert same_bits(updates, GRADIENTS)
  assert seen == [{"value": 3.0}]


def test_leaves_that_are_no_gradients_pass_on_unscaled_steps_too():
  overwrite = "_overwrite_with_gradient"
  params = PARAMS | {overwrite: jnp.array([2.0])}
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  updates, _ = tx.update(
    GRADIENTS | {overwrite: jnp.array([5.0])},
    tx.init(params),
    params,
    scaled=False,
  )
  assert updates[overwrite] == 5.0


@pytest.mark.parametrize(
  "scaled",
  [None, 1, 0.0, "yes", np.array([True]), jnp.array(1)],
  ids=["None", "int", "float", "str", "vector", "int32"],
)
def test_scaled_must_be_a_bool(scaled):
  tx, state = make()
  with pytest.raises(TypeError, match="`scaled` must be a bool or bool"):
    tx.update(GRADIENTS, state, PARAMS, scaled=scaled)


def test_devices_must_agree_on_whether_a_step_was_scaled():
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  state = tx.init(jnp.zeros(()))

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  def update(scaled):
    gradient = jnp.ones(())
    return tx.update(gradient, state, scaled=scaled[0])[0][None]

  with pytest.raises(
    ValueError, match="`scaled` must be the same.*pmean\\(loss, 'data'"
  ):
    jax.jit(update)(jnp.array([True, False]))
