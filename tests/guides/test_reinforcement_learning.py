"""docs/guides/reinforcement_learning.md: it prints what it shows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits

pytestmark = pytest.mark.slow

PATH = "docs/guides/reinforcement_learning.md"
PAGE = documents.read(PATH)
page = functools.partial(documents.whole, PATH)


def draw(seed, *shape):
  return np.float32(np.random.default_rng(seed).normal(size=shape))


PARAMS = {
  name: {"hidden": draw(seed, 4, 8), "head": draw(seed + 1, 8, outputs)}
  for name, seed, outputs in (("policy", 0, 3), ("value", 2, 1))
}
# Three minibatches, the second with an inf.
BATCHES = {
  "x": draw(5, 3, 8, 4),
  "action": np.arange(24).reshape(3, 8) % 3,
  "log_prob": np.full((3, 8), -np.log(3), np.float32),
  "advantage": draw(6, 3, 8),
  "return": draw(7, 3, 8),
}
BATCHES["return"][1, 0] = np.inf


def test_the_loss_is_that_of_ppo_and_its_products_are_in_float16():
  batch = {name: x[0] for name, x in BATCHES.items()}
  report = ols.instruments.precision_report(page()["loss_fn"], PARAMS, batch)
  assert report.products == {"float16": 4}
  loss, kl = page()["loss_fn"](PARAMS, batch)
  logits, values = page()["agent"](PARAMS, batch["x"])
  log_probs = jax.nn.log_softmax(logits)[np.arange(8), batch["action"]]
  log_ratio = np.float64(log_probs) + np.log(3)
  ratio, gain = np.exp(log_ratio), batch["advantage"]
  # PPO's objective, case by case.
  bound = np.where(gain > 0, np.minimum(ratio, 1.2), np.maximum(ratio, 0.8))
  expected = np.mean((values - batch["return"]) ** 2 / 2 - bound * gain)
  np.testing.assert_allclose(loss, expected, rtol=0.01)
  np.testing.assert_allclose(kl, np.mean(ratio - 1 - log_ratio), rtol=0.05)


def test_a_skipped_minibatch_is_as_if_it_were_not_there():
  params, state, metrics = page()["learn"](PARAMS, first_state(), BATCHES)
  assert (state.applied_steps, state.skipped_steps) == (2, 1)
  rest = {name: x[::2] for name, x in BATCHES.items()}
  expected, bare, bare_metrics = page()["learn"](PARAMS, first_state(), rest)
  assert_same_bits((params, state.inner_state), (expected, bare.inner_state))
  assert metrics["applied"] == bare_metrics["applied"] == 2
  for name in ("loss", "kl"):
    np.testing.assert_allclose(metrics[name], bare_metrics[name], rtol=1e-6)


def first_state():
  """Returns the optimizer's state with an S that fits."""
  state = page()["tx"].init(PARAMS)
  return optax.tree.set(state, loss_scale=jnp.float32(2.0**10))


@pytest.mark.parametrize("overflow", [False, True])
def test_a_skipped_step_keeps_the_target_and_all_the_rest(overflow):
  params, tx = PARAMS, page()["tx"]
  zeros = jax.tree.map(np.zeros_like, params)
  others = {"target": zeros, "priorities": jnp.ones(16)}
  others |= {"updates": jnp.int32(3), "key": jax.random.key(0)}
  _, state = tx.update(params, tx.init(params), params, overflow=overflow)
  batch, error = {"index": 2 * np.arange(8)}, -jnp.arange(8.0)
  after = page()["move_others"](params, state, others, batch, error)
  if overflow:
    assert_same_bits(after, others)
    return
  np.testing.assert_allclose(
    after["target"]["value"]["head"], 0.005 * params["value"]["head"]
  )
  assert after["priorities"][::2].tolist() == list(range(8))
  assert after["updates"] == 4 and after["key"] != others["key"]


def test_each_seed_has_its_own_s_and_its_own_skips():
  clean = BATCHES | {"return": np.zeros_like(BATCHES["return"])}
  params, batches = (
    jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
    for trees in ((PARAMS, PARAMS), (clean, BATCHES))
  )
  states = page()["init_each"](params)
  states = optax.tree.set(states, loss_scale=jnp.full(2, 2.0**10))
  _, states, _ = page()["learn_each"](params, states, batches)
  assert states.skipped_steps.tolist() == [0, 1]
  assert ols.get_loss_scale(states).tolist() == [2.0**10, 2.0**9]


def test_the_figures_in_the_text_are_those_of_float16():
  below = jnp.float16(11.086)
  above = np.nextafter(below, np.float16(12))
  assert "by more than 11.09." in PAGE and float(below) < 11.09 < float(above)
  assert jnp.isfinite(jnp.exp(below)) and jnp.isinf(jnp.exp(above))

  (code,) = re.findall(r"`(ols\.raise_if_failed\(.*?\))`", PAGE)
  state = page()["tx"].init(PARAMS)
  for skips in (100, 101):
    state = optax.tree.set(state, consecutive_skips=jnp.int32(skips))
    names = {"ols": ols, "opt_state": state}
    if skips == 100:
      eval(code, names)
    else:
      with pytest.raises(FloatingPointError, match="101 steps in a row"):
        eval(code, names)
