"""Where the wrapper may stand in an optax program, and where it may not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

BAD = jnp.array([jnp.inf, 1.0])
GOOD = jnp.array([8.0, 16.0])
PARAMS = jnp.array([1.0, 2.0])

CONSTRUCTORS = {
  "loss_scaling": ols.loss_scaling,
  # True, which under plain jit needs no axis, so that its own update runs.
  "npu_loss_scale_optimizer": functools.partial(
    ols.presets.npu_loss_scale_optimizer, is_distributed=True
  ),
}


@pytest.fixture(params=CONSTRUCTORS)
def scaling(request):
  """Returns what wraps an optimizer, by each of the constructors."""
  construct = CONSTRUCTORS[request.param]

  def wrap(inner=None):
    rule = ols.DynamicLossScale(8.0, growth_interval=100)
    return construct(inner or optax.sgd(1.0), rule)

  return wrap


def run(tx, scaled_grads, params=PARAMS):
  """Returns the updates of each step and the last state."""
  state = tx.init(params)
  update = jax.jit(tx.update)
  every = []
  for gradient in scaled_grads:
    updates, state = update(gradient, state, params)
    every.append(np.asarray(updates).tolist())
  return every, state


def test_inside_chain_what_follows_sees_minus_zero_on_a_skip(scaling):
  tx = optax.chain(scaling(), optax.scale(10.0))
  every, _ = run(tx, [GOOD, BAD])
  assert every == [[-10.0, -20.0], [0.0, 0.0]]
  assert np.all(np.signbit(every[1]))


def test_outside_chain_everything_inside_sees_true_gradients(scaling):
  tx = scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
  every, state = run(tx, [jnp.array([24.0, 32.0]), BAD])
  np.testing.assert_allclose(every[0], [-0.6, -0.8], rtol=1e-6)
  assert every[1] == [0.0, 0.0]
  assert state.skipped_steps == 1


def test_around_multi_steps_a_bad_micro_batch_is_dropped(scaling):
  tx = scaling(optax.MultiSteps(optax.sgd(1.0), 2))
  # The overflow halves S, and the second half is scaled by the new one.
  every, state = run(tx, [GOOD, BAD, GOOD / 2])
  assert every == [[0.0, 0.0], [0.0, 0.0], [-1.0, -2.0]]
  assert state.inner_state.gradient_step == 1


def test_guarantee_13_extra_arguments_reach_what_multi_steps_wraps(scaling):
  inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
  tx = scaling(optax.MultiSteps(inner, 2))
  state = tx.init(PARAMS)
  for _ in range(2):
    updates, state = tx.update(GOOD, state, PARAMS, value=1.0)
  np.testing.assert_array_equal(updates, [-1.0, -2.0])


def test_lookahead_whose_parameters_are_two_trees(scaling):
  tx = scaling(
    optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5)
  )
  params = optax.LookaheadParams.init_synced(PARAMS)
  state = tx.init(params)
  updates, state = tx.update(GOOD, state, params)
  np.testing.assert_array_equal(updates.fast, [-1.0, -2.0])
  updates, state = tx.update(BAD, state, params)
  np.testing.assert_array_equal(updates.fast, [0.0, 0.0])


def test_parameters_without_a_gradient_need_not_be_arrays(scaling):
  params = {"w": PARAMS, "activation": jax.nn.relu}
  tx = scaling(optax.sgd(1.0))
  state = tx.init({"w": PARAMS, "activation": None})
  updates, state = tx.update({"w": GOOD, "activation": None}, state, params)
  np.testing.assert_array_equal(updates["w"], [-1.0, -2.0])


def test_multi_steps_outside_keeps_an_inf_for_ever(scaling):
  """Records why accumulation belongs inside the wrapper.

  The accumulator sums scaled gradients before anybody has looked at them. A
  new window starts from 0 times the old sum, and 0 times inf is NaN: no later
  window is ever clean, and S falls for ever.
  """
  tx = optax.MultiSteps(scaling(), 2).gradient_transformation()
  every, state = run(tx, [BAD, GOOD] + [GOOD] * 6)
  assert every == [[0.0, 0.0]] * 8
  assert jnp.isnan(state.acc_grads[0])
  metrics = ols.loss_scale_metrics(state)
  assert (metrics["applied_steps"], metrics["skipped_steps"]) == (0, 4)
  assert metrics["loss_scale"] == 8.0 / 2**4


def test_a_wrapper_inside_a_wrapper_is_refused(scaling):
  twice = scaling(optax.chain(optax.identity(), scaling()))
  with pytest.raises(ValueError, match=r"must not contain loss_scaling.*/1:"):
    twice.init(PARAMS)


def test_one_wrapper_per_group_leaves_several_scales_and_is_refused(scaling):
  """Records why the groups belong inside one wrapper.

  Each group would decide for itself: one steps where the other skips, and the
  gradients of both were scaled by one S.
  """
  params = {"a": PARAMS, "b": PARAMS}
  tx = optax.multi_transform(
    {"fast": scaling(), "slow": scaling()}, {"a": "fast", "b": "slow"}
  )
  state = tx.init(params)
  with pytest.raises(ValueError, match="one loss scale at `path`, got 2"):
    ols.scaled_value_and_grad(lambda p: jnp.sum(p["a"]), state)(params)
  _, state = tx.update({"a": BAD, "b": GOOD}, state, params)
  states = [
    ols.loss_scale_metrics(state, path=f"inner_states/{name}")
    for name in ("fast", "slow")
  ]
  assert [bool(s["skipped"]) for s in states] == [True, False]


def test_a_shared_flag_keeps_one_wrapper_per_group_in_step(scaling):
  params = {"a": PARAMS, "b": PARAMS}
  tx = optax.multi_transform(
    {"fast": scaling(), "slow": scaling()}, {"a": "fast", "b": "slow"}
  )
  scaled_grads = {"a": BAD, "b": GOOD}
  flag = ~jnp.isfinite(optax.tree.norm(scaled_grads))
  updates, state = tx.update(
    scaled_grads, tx.init(params), params, overflow=flag
  )
  for name in ("fast", "slow"):
    metrics = ols.loss_scale_metrics(state, path=f"inner_states/{name}")
    assert metrics["skipped"]
    assert metrics["loss_scale"] == 4.0
  for update in updates.values():
    np.testing.assert_array_equal(update, [0.0, 0.0])


def test_groups_inside_one_wrapper_skip_together(scaling):
  params = {"a": PARAMS, "b": PARAMS}
  tx = scaling(
    optax.multi_transform(
      {"fast": optax.sgd(1.0), "slow": optax.adam(0.1)},
      {"a": "fast", "b": "slow"},
    )
  )
  updates, state = tx.update({"a": BAD, "b": GOOD}, tx.init(params), params)
  assert state.skipped
  np.testing.assert_array_equal(updates["b"], [0.0, 0.0])


def test_masked_around_the_wrapper_leaves_the_rest_scaled(scaling):
  """Records why `optax.masked` belongs inside: what it masks stays scaled."""
  params = {"a": PARAMS, "b": PARAMS}
  tx = optax.masked(scaling(optax.identity()), {"a": True, "b": False})
  scaled_grads = {"a": GOOD, "b": GOOD}
  updates, _ = tx.update(scaled_grads, tx.init(params), params)
  np.testing.assert_array_equal(updates["a"], GOOD / 8)
  np.testing.assert_array_equal(updates["b"], GOOD)
  inside = scaling(optax.masked(optax.identity(), {"a": True, "b": False}))
  updates, _ = inside.update(scaled_grads, inside.init(params), params)
  np.testing.assert_array_equal(updates["b"], GOOD / 8)


def test_inject_hyperparams_inside_and_outside(scaling):
  inside = scaling(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
  state = inside.init(PARAMS)
  state = optax.tree.set(state, learning_rate=jnp.float32(0.5))
  updates, _ = inside.update(GOOD, state, PARAMS)
  np.testing.assert_array_equal(updates, [-0.5, -1.0])

  outside = optax.inject_hyperparams(lambda rate: scaling(optax.sgd(rate)))(
    rate=1.0
  )
  every, state = run(outside, [GOOD, BAD])
  assert every == [[-1.0, -2.0], [0.0, 0.0]]
  assert ols.get_loss_scale(state) == 4.0


@pytest.mark.slow
@pytest.mark.parametrize(
  "search",
  [
    lambda: optax.lbfgs(),
    lambda: optax.chain(
      optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20)
    ),
  ],
  ids=["lbfgs", "backtracking"],
)
def test_a_line_search_takes_the_true_loss_and_unscaled_gradients(
  scaling, search
):
  def loss_fn(params):
    return jnp.sum((params - 3.0) ** 2 * jnp.array([1.0, 10.0]))

  tx = scaling(search())

  @jax.jit
  def step(params, state):
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
    updates, state = tx.update(
      scaled_grads,
      state,
      params,
      value=loss,
      grad=ols.unscale(scaled_grads, state),
      value_fn=loss_fn,
    )
    return optax.apply_updates(params, updates), state

  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(25):
    params, state = step(params, state)
  np.testing.assert_allclose(params, [3.0, 3.0], rtol=1e-2)


def test_schedule_free_gives_its_evaluation_parameters(scaling):
  tx = scaling(optax.contrib.schedule_free_sgd(0.1))
  state = tx.init(PARAMS)
  updates, state = tx.update(GOOD, state, PARAMS)
  params = optax.apply_updates(PARAMS, updates)
  bare = optax.contrib.schedule_free_sgd(0.1)
  bare_updates, bare_state = bare.update(GOOD / 8, bare.init(PARAMS), PARAMS)
  bare_params = optax.apply_updates(PARAMS, bare_updates)
  evaluation = optax.contrib.schedule_free_eval_params
  np.testing.assert_array_equal(
    evaluation(state.inner_state, params), evaluation(bare_state, bare_params)
  )
