"""Recipes for reinforcement learning, as a reader would run them.

A sample of inf spoils some minibatches. The others must give the same bits as
without those, or the numbers of optax alone.
"""

import functools
import re

import chex
import jax
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
  """Returns the names that the page leaves behind, with the rule above."""
  rule = "ols.DynamicLossScale()"
  assert text.count(rule) == 1
  return documents.run_as_shown(text.replace(rule, f"ols.{RULE}"))


def learn_seeds(names):
  """Returns what two seeds learn, of which one has a spoiled minibatch."""
  params, minibatches = (
    jax.tree.map(lambda *x: jnp.stack(x), *pair)
    for pair in (
      (make_params(0), make_params(1)),
      (make_batches(2), make_batches(2, spoiled=[1])),
    )
  )
  return names["learn_each"](params, names["init_each"](params), minibatches)


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
  logits, values = jax.tree.map(np.float64, page()["agent"](params, batch["x"]))
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


@pytest.mark.parametrize("gradient", [1.0, np.inf, np.nan])
def test_a_skipped_step_keeps_the_target_and_all_the_rest(gradient):
  params = make_params()["policy"]
  batch = {"index": 2 * np.arange(SAMPLES)}
  error = gradient * jnp.arange(SAMPLES)
  others = {
    "target": make_params(7)["policy"],
    "priorities": jnp.ones(2 * SAMPLES),
    "updates": jnp.int32(3),
    "key": jax.random.key(0),
  }
  tx = ols.loss_scaling(optax.sgd(1.0), RULE)
  scaled_grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
  _, state = tx.update(scaled_grads, tx.init(params), params)
  after = page()["move_others"](params, state, others, batch, error)
  if gradient != 1.0:
    assert state.skipped
    assert_same(after, others)
    return
  moved = jax.tree.map(
    lambda new, old: 0.005 * new + 0.995 * old, params, others["target"]
  )
  chex.assert_trees_all_close(after["target"], moved, rtol=1e-6)
  assert (after["priorities"][::2] == error).all()
  assert (after["priorities"][1::2] == 1).all()
  assert after["updates"] == 4
  assert after["key"] != others["key"]


def test_each_seed_has_its_own_s_and_its_own_skips():
  params, states, metrics = learn_seeds(page())
  assert ols.get_loss_scale(states).tolist() == [2.0**10, 2.0**9]
  assert metrics["applied"].tolist() == [2, 1]
  assert states.skipped_steps.tolist() == [0, 1]
  for i, spoiled in enumerate(([], [1])):
    alone, _, _ = learn(make_batches(2, spoiled=spoiled), make_params(i))
    chex.assert_trees_all_close(one(params, i), alone, rtol=1e-6)


def test_seeds_skip_together_over_a_named_axis():
  text = PAGE
  for old, new in (
    ("(inner, rule)", '(inner, rule, axis_name="seeds")'),
    ("jax.vmap(learn)", 'jax.vmap(learn, axis_name="seeds")'),
    ("jax.vmap(tx.init)", 'jax.vmap(tx.init, axis_name="seeds")'),
  ):
    assert text.count(old) == 1
    text = text.replace(old, new)
  _, states, metrics = learn_seeds(page(text=text))
  assert ols.get_loss_scale(states).tolist() == [2.0**9] * 2
  assert metrics["applied"].tolist() == [1, 1]


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
