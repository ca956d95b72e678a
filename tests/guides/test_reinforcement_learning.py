"""Recipes for reinforcement learning, as a reader would run them.

A sample of inf spoils some minibatches. The others must give the same bits as
without those, or the numbers of optax alone.
"""

import functools
import re

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/reinforcement_learning.md")
RULE = ols.DynamicLossScale(2.0**10, growth_interval=1000)
ACTIONS, SAMPLES = 3, 8


def agent(params, x):
  """Returns logits and values."""
  hidden = jnp.tanh(x @ params["policy"]["hidden"])
  values = jnp.tanh(x @ params["value"]["hidden"]) @ params["value"]["head"]
  return hidden @ params["policy"]["head"], values[:, 0]


def q_values(params, x):
  return jnp.tanh(x @ params["hidden"]) @ params["head"]


def draw(seed, *shape):
  return np.float32(np.random.default_rng(seed).normal(size=shape))


def make_params(seed=0):
  return jax.tree.map(
    jnp.asarray,
    {
      name: {"hidden": draw(seed, 4, 8), "head": draw(seed + 1, 8, outputs)}
      for name, outputs in (("policy", ACTIONS), ("value", 1))
    },
  )


def make_batches(count, spoiled=(), key="return", seed=5):
  """Returns minibatches; those that are spoiled have an inf in one array."""
  batches = {
    "x": draw(seed, count, SAMPLES, 4),
    "action": np.random.default_rng(seed).integers(
      ACTIONS, size=(count, SAMPLES)
    ),
    "log_prob": np.full((count, SAMPLES), -np.log(ACTIONS), np.float32),
    "advantage": draw(seed + 1, count, SAMPLES),
    "return": draw(seed + 2, count, SAMPLES),
  }
  for i in spoiled:
    batches[key][i, 0] = np.inf
  return jax.tree.map(jnp.asarray, batches)


def one(batches, i):
  return jax.tree.map(lambda x: x[i], batches)


@functools.cache
def page(text=PAGE):
  """Returns the names that the page leaves behind."""
  stacked = jax.tree.map(
    lambda *x: jnp.stack(x), make_batches(2), make_batches(2, spoiled=[1])
  )
  names = {"jax": jax, "jnp": jnp, "lax": lax, "optax": optax, "ols": ols}
  names["functools"] = functools
  names |= {"agent": agent, "q_values": q_values, "rule": RULE}
  names["seeds_params"] = jax.tree.map(
    lambda *x: jnp.stack(x), make_params(0), make_params(1)
  )
  return documents.run(text, names | {"seeds_minibatches": stacked})


def learn(minibatches, params=None, scale=2.0**10):
  """Returns the parameters, the optimizer's state and the metrics."""
  params = make_params() if params is None else params
  state = page()["tx"].init(params)
  state = optax.tree.set(state, loss_scale=jnp.float32(scale))
  return page()["learn"](params, state, minibatches)


@functools.cache
def gradients():
  """Returns a function that returns the true gradients of the page's loss."""
  return jax.jit(jax.grad(lambda *args: page()["loss_fn"](*args)[0]))


def assert_same(found, expected):
  """Asserts that two trees are the same bit for bit."""
  chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def differ(found, expected):
  """Returns whether any leaf of two trees differs."""
  return any(
    np.any(np.asarray(a) != np.asarray(b))
    for a, b in zip(
      jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    )
  )


def test_the_loss_is_that_of_ppo_and_its_products_are_in_float16():
  batch = one(make_batches(1), 0)
  loss_fn, params = page()["loss_fn"], make_params()
  report = ols.instruments.precision_report(loss_fn, params, batch)
  assert report.products == {"float16": 4}
  loss, kl = jax.jit(loss_fn)(params, batch)
  assert loss.dtype == kl.dtype == jnp.float32
  logits, values = jax.tree.map(np.float64, agent(params, batch["x"]))
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  log_ratio = log_probs[np.arange(SAMPLES), batch["action"]] + np.log(ACTIONS)
  ratio, gain = np.exp(log_ratio), np.float64(batch["advantage"])
  # PPO's objective, case by case.
  bound = np.where(gain > 0, np.minimum(ratio, 1.2), np.maximum(ratio, 0.8))
  expected = np.mean((values - batch["return"]) ** 2) / 2 - np.mean(
    bound * gain
  )
  np.testing.assert_allclose(loss, expected, rtol=2e-3)
  np.testing.assert_allclose(kl, np.mean(ratio - 1 - log_ratio), rtol=5e-3)


def test_a_ratio_in_float16_overflows_where_the_page_says():
  below, above = jnp.float16(11.086), jnp.float16(11.094)
  assert np.nextafter(below, np.float16(12)) == above
  assert "by more than 11.09." in PAGE and float(below) < 11.09 < float(above)
  assert jnp.isfinite(jnp.exp(below)) and jnp.isinf(jnp.exp(above))


def test_equal_rewards_of_a_group_have_no_advantage():
  rewards = jnp.float16([[1, 1, 1], [0, 1, 0.5]])
  found = page()["group_advantages"](rewards)
  assert found[0].tolist() == [0, 0, 0]
  np.testing.assert_allclose(found[1], [-1.2247, 1.2247, 0], atol=1e-4)
  # The mean of eight times 0.7 is off by a rounding.
  equal = jnp.tile(jnp.array([[0.1], [0.7], [-0.3]]), 8)
  assert (equal.mean(axis=1) != equal[:, 0]).any()
  assert (page()["group_advantages"](equal) == 0).all()
  assert "1e-8, a usual guard" in PAGE and jnp.float16(1e-8) == 0


def test_clipping_sees_true_gradients_whatever_s_is():
  batches = make_batches(1)
  batches["return"] += 20.0
  params = make_params()
  grads = gradients()(params, one(batches, 0))
  assert optax.tree.norm(grads) > 2  # So the clip to 0.5 acts.
  inner = page()["inner"]
  updates, _ = jax.jit(inner.update)(grads, inner.init(params), params)
  expected = optax.apply_updates(params, updates)
  for scale in (1.0, 2.0**10):
    found, state, _ = learn(batches, scale=scale)
    assert state.applied_steps == 1
    groups = state.inner_state[1].inner_states.values()
    moments = [group.inner_state[0].mu for group in groups]
    # Adam's first moment is a tenth of the clipped gradient.
    np.testing.assert_allclose(10 * optax.tree.norm(moments), 0.5, rtol=1e-3)
    chex.assert_trees_all_close(found, expected, rtol=1e-3)


def test_an_overflow_of_the_value_skips_the_policy_too():
  batches = make_batches(2, spoiled=[1])
  first, state, _ = learn(one(batches, slice(0, 1)))
  after, then, _ = page()["learn"](first, state, one(batches, slice(1, 2)))
  assert then.skipped
  assert_same(after, first)
  assert_same(then.inner_state, state.inner_state)
  # The gradient of the policy alone was finite.
  grads = gradients()(first, one(batches, 1))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads["policy"]))
  assert not np.isfinite(grads["value"]["head"]).all()


@pytest.mark.parametrize("key", ["return", "x", "advantage"])
def test_a_skipped_minibatch_is_as_if_it_were_not_there(key):
  batches = make_batches(5, spoiled=[2], key=key)
  rest = jax.tree.map(lambda x: jnp.delete(x, 2, axis=0), batches)
  params, state, metrics = learn(batches)
  expected, bare, bare_metrics = learn(rest)
  assert_same(params, expected)
  assert_same(state.inner_state, bare.inner_state)
  assert (state.applied_steps, state.skipped_steps) == (4, 1)
  assert ols.get_loss_scale(state) == ols.get_loss_scale(bare) / 2
  assert metrics["applied"] == bare_metrics["applied"] == 4
  for name in ("loss", "kl"):
    np.testing.assert_allclose(metrics[name], bare_metrics[name], rtol=1e-6)


def test_the_first_overflows_neither_end_the_run_nor_spoil_its_metrics():
  params, state, metrics = learn(make_batches(5), scale=2.0**40)
  assert (metrics["applied"], metrics["loss"], metrics["kl"]) == (0, 0, 0)
  assert_same(params, make_params())
  rounds = 0
  while metrics["applied"] < 5:
    ols.raise_if_failed(state, 100)
    params, state, metrics = page()["learn"](params, state, make_batches(5))
    assert all(np.isfinite(x) for x in metrics.values())
    rounds += 1
    assert rounds < 10
  assert state.skipped_steps == 40 - np.log2(ols.get_loss_scale(state))
  assert differ(params, make_params())


@functools.cache
def guarded_step():
  return jax.jit(page()["step_unless_stopped"])


def kl_run(shifts, spoiled=()):
  """Yields the carry after each step, the old log-probs moved by a shift."""
  batches = make_batches(len(shifts), spoiled=spoiled)
  params = make_params()
  kernels = jax.tree.map(np.asarray, params["policy"])
  logits = np.tanh(batches["x"] @ kernels["hidden"]) @ kernels["head"]
  log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  chosen = np.asarray(batches["action"])[..., None]
  batches["log_prob"] = jnp.float32(
    np.take_along_axis(log_probs, chosen, axis=-1)[..., 0]
    + np.float32(shifts)[:, None]
  )
  carry = (params, page()["tx"].init(params))
  carry = carry, jnp.bool_(False)
  for i in range(len(shifts)):
    carry, _ = guarded_step()(carry, one(batches, i))
    yield carry


def test_a_divergence_stops_the_rest_of_the_epoch_and_s_with_it():
  stopped, *later = kl_run([-1.0, 0.0, 0.0], spoiled=[2])
  (_, state), stop = stopped
  assert stop and state.applied_steps == 1
  for carry in later:
    assert_same(carry, stopped)


def test_the_divergence_of_a_skipped_step_does_not_stop():
  # e^s - 1 - s is 0.37 for a log-ratio s of 1, and 0.01 for 0.15.
  ((_, state), stop), after = kl_run([-1.0, -0.15], spoiled=[0])
  assert (state.skipped, stop) == (True, False)
  (_, state), stop = after
  assert (state.applied_steps, stop) == (1, False)


def q_run(spoiled):
  """Returns the names before and after a step of Q-learning."""
  params = make_params()["policy"]
  batch = {
    "x": draw(1, SAMPLES, 4),
    "next": draw(2, SAMPLES, 4),
    "reward": np.where(np.arange(SAMPLES) == 3, spoiled, 1.0),
    "action": np.arange(SAMPLES) % ACTIONS,
    "index": 2 * np.arange(SAMPLES),
    "done": np.arange(SAMPLES) % 2 == 0,
  }
  others = {
    "target": make_params(7)["policy"],
    "priorities": jnp.ones(2 * SAMPLES),
    "updates": jnp.int32(3),
    "key": jax.random.key(0),
  }
  before = params, page()["q_tx"].init(params), others
  batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch) | {
    name: jnp.asarray(batch[name]) for name in ("action", "index", "done")
  }
  return before, page()["q_step"](*before, batch), batch


@pytest.mark.parametrize("reward", [np.inf, -np.inf, np.nan])
def test_a_skipped_step_keeps_the_target_and_all_the_rest(reward):
  before, after, _ = q_run(reward)
  assert after[1].skipped
  assert_same(after[0], before[0])
  assert_same(after[2], before[2])


def test_an_applied_step_moves_the_target_and_all_the_rest():
  (_, _, before), (params, state, after), batch = q_run(1.0)
  assert not state.skipped
  moved = jax.tree.map(
    lambda new, old: 0.005 * new + 0.995 * old, params, before["target"]
  )
  chex.assert_trees_all_close(after["target"], moved, rtol=1e-6)
  later = q_values(before["target"], batch["next"]).max(axis=1)
  goal = 1 + 0.99 * np.where(batch["done"], 0, later)
  found = q_values(make_params()["policy"], batch["x"])
  error = jnp.abs(found[jnp.arange(SAMPLES), batch["action"]] - goal)
  # The products in float16 have an error of 2^-11 of values around 1.
  np.testing.assert_allclose(after["priorities"][::2], error, rtol=0, atol=0.01)
  assert (after["priorities"][1::2] == 1).all()
  assert after["updates"] == 4
  assert after["key"] != before["key"]


def test_each_seed_has_its_own_s_and_its_own_skips():
  names = page()
  assert names["scales"].tolist() == [2.0**10, 2.0**9]
  assert names["metrics"]["applied"].tolist() == [2, 1]
  assert names["opt_states"].skipped_steps.tolist() == [0, 1]
  for i, spoiled in enumerate(([], [1])):
    alone, _, _ = learn(make_batches(2, spoiled=spoiled), make_params(i))
    chex.assert_trees_all_close(one(names["params"], i), alone, rtol=1e-6)


def test_seeds_skip_together_over_a_named_axis():
  text = PAGE
  for old, new in (
    ("(inner, rule)", '(inner, rule, axis_name="seeds")'),
    ("jax.vmap(learn)", 'jax.vmap(learn, axis_name="seeds")'),
  ):
    assert text.count(old) == 1
    text = text.replace(old, new)
  names = page(text=text)
  assert names["scales"].tolist() == [2.0**9] * 2
  assert names["metrics"]["applied"].tolist() == [1, 1]


def test_a_run_that_cannot_recover_ends_as_the_page_says():
  (code,) = re.findall(r"`(ols\.raise_if_failed\(.*?\))`", PAGE)
  batches = make_batches(5, spoiled=range(5))
  params, state, _ = learn(batches)
  for _ in range(19):
    params, state, _ = page()["learn"](params, state, batches)
  eval(code, {"ols": ols, "opt_state": state})
  _, state, _ = page()["learn"](params, state, batches)
  with pytest.raises(FloatingPointError, match="105 steps in a row"):
    eval(code, {"ols": ols, "opt_state": state})
