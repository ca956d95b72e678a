"""Every preset inside the wrapper, as a training step uses it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.presets import test_million_steps
from tests.support import describe

OVERFLOWS = np.random.default_rng(0).random((2, 64)) < 0.3

each_preset = pytest.mark.parametrize(
  ("system", "arguments"),
  test_million_steps.ARGUMENTS.items(),
  ids=test_million_steps.ARGUMENTS,
)


@pytest.mark.slow
@each_preset
def test_a_preset_drives_a_training_step(system, arguments):
  rule = getattr(ols.presets, system)(**arguments)
  tx = ols.loss_scaling(optax.sgd(1.0), rule)

  def step(carry, overflow):
    params, state = carry
    gradient = jnp.where(overflow, jnp.inf, ols.get_loss_scale(state))
    updates, state = tx.update(gradient, state, params)
    carry = optax.apply_updates(params, updates), state
    return carry, (carry[0], ols.get_loss_scale(state))

  def own(state, overflow):
    state = rule.update(state, overflow)
    return state, state.loss_scale

  @jax.jit
  @jax.vmap
  def run(overflows):
    params = jnp.float32(0.0)
    carry, (path, scales) = jax.lax.scan(
      step, (params, tx.init(params)), overflows
    )
    return carry[1], path, scales, jax.lax.scan(own, rule.init(), overflows)[1]

  state, path, scales, expected = run(jnp.asarray(OVERFLOWS))
  np.testing.assert_array_equal(scales, expected)
  np.testing.assert_array_equal(state.skipped_steps, OVERFLOWS.sum(axis=1))
  # Each clean step moves by the true gradient, 1, whatever S is.
  np.testing.assert_array_equal(path, -np.cumsum(~OVERFLOWS, axis=1))


@each_preset
def test_a_preset_keeps_the_structure_of_its_state(system, arguments):
  rule = getattr(ols.presets, system)(**arguments)
  state = rule.init()
  for overflow in (True, False, jnp.array(True)):
    assert describe(jax.eval_shape(rule.update, state, overflow)) == describe(
      jax.eval_shape(rule.init)
    )
  assert all(not x.weak_type for x in jax.tree.leaves(rule.update(state, True)))


@pytest.mark.slow
@each_preset
@pytest.mark.usefixtures("strict_promotion")
def test_a_preset_promotes_no_dtype_implicitly(system, arguments):
  rule = getattr(ols.presets, system)(**arguments)
  state = rule.update(rule.init(), True)
  assert rule.update(state, False).loss_scale.dtype == jnp.float32
