"""One battery for all: every property, for every inner optimizer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import optimizers
from tests.support import describe
from tests.support import slow_but
from tests.support import to_bits

RULE = ols.DynamicLossScale(1024.0, growth_interval=2)

# The others use nothing of JAX that these do not.
MOST_DIFFERENT = {
  "adafactor",
  "adam",
  "apply_if_finite",
  "backtracking",
  "lbfgs",
  "mechanize",
  "multi_steps",
  "noisy_sgd",
}

each_optimizer = pytest.mark.parametrize(
  "name", slow_but(MOST_DIFFERENT, optimizers.OPTIMIZERS)
)


@functools.cache
def wrapped(name):
  return ols.loss_scaling(optimizers.OPTIMIZERS[name](), RULE)


def extra_args(loss, grads):
  """Returns what line searches and schedules on the loss ask for."""
  return {"value": loss, "grad": grads, "value_fn": optimizers.loss_fn}


def scaled_step(tx, params, opt_state, bad):
  """Runs one step; a `bad` one has a NaN and an inf in its gradients."""
  loss, scaled_grads = ols.scaled_value_and_grad(optimizers.loss_fn, opt_state)(
    params
  )
  true_grads = ols.unscale(scaled_grads, opt_state)
  scaled_grads["bias"] = jnp.where(bad, jnp.nan, scaled_grads["bias"])
  scaled_grads["kernel"] = jnp.where(bad, -jnp.inf, scaled_grads["kernel"])
  updates, opt_state = tx.update(
    scaled_grads, opt_state, params, **extra_args(loss, true_grads)
  )
  return updates, opt_state


def bare_step(tx, params, opt_state):
  loss, grads = jax.value_and_grad(optimizers.loss_fn)(params)
  return tx.update(grads, opt_state, params, **extra_args(loss, grads))


@functools.cache
def jitted_scaled_step(name):
  """Returns the compiled step, shared by the tests of one optimizer.

  Its attribute `traces` is a list of the parameters' dtypes, one for each time
  that it was traced.
  """
  traces = []

  def step(params, opt_state, bad):
    traces.append(params["bias"].dtype)
    return scaled_step(wrapped(name), params, opt_state, bad)

  jitted = jax.jit(step)
  jitted.traces = traces
  return jitted


@pytest.mark.parametrize(
  "dtype", slow_but([jnp.float16], [jnp.float32, jnp.float16])
)
@each_optimizer
def test_guarantee_6_a_skipped_step_changes_no_bit(name, dtype):
  step = jitted_scaled_step(name)
  params = optimizers.make_params(dtype)
  opt_state = wrapped(name).init(params)
  for bad in (False, False, True, True, False):
    updates, after = step(params, opt_state, bad)
    assert after.skipped == bad
    if bad:
      for update in jax.tree.leaves(updates):
        assert np.all(np.asarray(update) == 0)
        assert np.all(np.signbit(np.asarray(update, np.float32)))
      assert to_bits(after.inner_state) == to_bits(opt_state.inner_state)
      assert to_bits(optax.apply_updates(params, updates)) == to_bits(params)
    params, opt_state = optax.apply_updates(params, updates), after
  assert opt_state.applied_steps == 3
  assert opt_state.skipped_steps == 2


@pytest.mark.slow
@each_optimizer
def test_an_applied_step_is_that_of_the_bare_optimizer(name):
  # Factors and S are powers of two, so scaling loses nothing. The compiled
  # programs differ, and so may the last bit.
  bare = optimizers.bare(optimizers.OPTIMIZERS[name]())
  step = jax.jit(functools.partial(bare_step, bare))
  params = optimizers.make_params()
  bare_params = params
  opt_state, bare_state = wrapped(name).init(params), bare.init(params)
  for _ in range(3):
    updates, opt_state = jitted_scaled_step(name)(params, opt_state, False)
    params = optax.apply_updates(params, updates)
    updates, bare_state = step(bare_params, bare_state)
    bare_params = optax.apply_updates(bare_params, updates)
  chex.assert_trees_all_close(params, bare_params, rtol=1e-6, atol=1e-6)


@each_optimizer
def test_guarantee_8_narrow_parameters_have_float32_state(name):
  narrow = optimizers.make_params(jnp.float16)
  wide = optimizers.make_params(jnp.float32)
  narrow_state = wrapped(name).init(narrow)
  bare = optimizers.bare(optimizers.OPTIMIZERS[name]())
  wide_state = bare.init(wide)
  assert [x.dtype for x in jax.tree.leaves(narrow_state.inner_state)] == [
    jnp.asarray(x).dtype for x in jax.tree.leaves(wide_state)
  ]
  updates, after = jitted_scaled_step(name)(narrow, narrow_state, False)
  assert describe(after) == describe(narrow_state)
  assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float16")}


@each_optimizer
def test_guarantee_8_float16_gradients_of_float32_parameters(name):
  params = optimizers.make_params()
  opt_state = wrapped(name).init(params)

  def step(params, opt_state):
    loss, scaled_grads = ols.scaled_value_and_grad(
      optimizers.loss_fn, opt_state
    )(params)
    extra = extra_args(loss, ols.unscale(scaled_grads, opt_state))
    halves = jax.tree.map(lambda x: x.astype(jnp.float16), scaled_grads)
    return wrapped(name).update(halves, opt_state, params, **extra)

  updates, after = jax.eval_shape(step, params, opt_state)
  assert describe(after) == describe(opt_state)
  assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


@each_optimizer
def test_guarantee_9_one_compilation_and_scan(name):
  def advance(step, carry, bad):
    params, opt_state = carry
    updates, opt_state = step(params, opt_state, bad)
    return (optax.apply_updates(params, updates), opt_state), opt_state.skipped

  params = optimizers.make_params()
  carry = (params, wrapped(name).init(params))
  bads = [False, True, False]
  jitted = jitted_scaled_step(name)
  for bad in bads:
    carry, _ = advance(jitted, carry, bad)
  # By this test and by all that share the step.
  assert jitted.traces.count(jnp.float32) == 1
  body = functools.partial(
    advance, functools.partial(scaled_step, wrapped(name))
  )
  scan = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.array(bads)))
  assert scan(carry)[1].tolist() == bads


@each_optimizer
def test_init_works_on_shapes_alone(name):
  params = optimizers.make_params(jnp.float16)
  shapes = jax.eval_shape(lambda: params)
  from_values = jax.eval_shape(wrapped(name).init, params)
  from_shapes = jax.eval_shape(wrapped(name).init, shapes)
  assert jax.tree.structure(from_values) == jax.tree.structure(from_shapes)
  real = jax.eval_shape(lambda: wrapped(name).init(params))
  assert describe(real) == describe(from_shapes)


@pytest.mark.parametrize("name", ["adam", "clipped", "schedule_free", "sgd"])
def test_tree_map_params_reaches_the_parameters_in_the_state(name):
  opt_state = wrapped(name).init(optimizers.make_params())
  doubled = optax.tree_map_params(wrapped(name), lambda x: x + 1, opt_state)
  assert describe(doubled) == describe(opt_state)
  assert to_bits(doubled.loss_scale_state) == to_bits(
    opt_state.loss_scale_state
  )
  assert to_bits(doubled.inner_state) != to_bits(opt_state.inner_state)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_seeds_are_trained_side_by_side_under_vmap(name):
  tx = wrapped(name)
  params = jax.tree.map(lambda x: jnp.stack([x, x]), optimizers.make_params())
  opt_state = jax.vmap(tx.init)(params)
  bads = jnp.array([False, True])
  step = jax.jit(jax.vmap(functools.partial(scaled_step, tx)))
  _, opt_state = step(params, opt_state, bads)
  assert opt_state.skipped.tolist() == [False, True]
  assert opt_state.loss_scale_state.loss_scale.tolist() == [1024.0, 512.0]


def test_the_compiled_step_never_calls_the_host():
  params = optimizers.make_params()
  opt_state = wrapped("adam").init(params)
  step = jitted_scaled_step("adam")
  text = step.lower(params, opt_state, False).compile().as_text()
  for word in ("infeed", "outfeed", "callback", "send(", "recv("):
    assert word not in text
