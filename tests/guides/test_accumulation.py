"""docs/guides/accumulation.md against means in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import to_bits

PAGE = documents.read("docs/guides/accumulation.md")
BATCH = np.linspace(-1, 1, 96, dtype=np.float32).reshape(32, 3)
NAMES = {
  "functools": functools,
  "jax": jax,
  "jnp": jnp,
  "ols": ols,
  "optax": optax,
  "params": jnp.ones(3),
  "batch": BATCH,
  "loss_fn": lambda params, batch: jnp.mean(batch @ params),
  "inner": optax.sgd(1.0),
  "rule": ols.DynamicLossScale(8.0),
}


@functools.cache
def window():
  return documents.run(
    documents.section(PAGE, "A window of micro-batches"), NAMES
  )


def bad_batch(*rows):
  batch = BATCH.copy()
  batch[list(rows)] = np.inf
  return batch


def mean(rows):
  return BATCH[list(rows)].astype(np.float64).mean(0)


def test_a_window_of_micro_batches():
  names = window()
  assert names["overflow"].valid == 8
  np.testing.assert_allclose(names["params"], 1 - mean(range(32)), atol=1e-6)
  _, state, _, overflow = names["train_step"](
    names["params"], names["opt_state"], bad_batch(11)
  )
  assert overflow.flags.tolist() == [i == 3 for i in range(8)]
  assert (state.skipped_steps, ols.get_loss_scale(state)) == (1, 4.0)
  _, state, _, overflow = names["train_step"](names["params"], state, BATCH)
  assert (bool(state.skipped), bool(overflow)) == (False, False)


def test_dropping_a_bad_micro_batch():
  new = documents.block(PAGE, "Dropping a bad micro-batch", "drop=True")
  text = documents.section(PAGE, "A window of micro-batches")
  text = text.replace(new.replace(", drop=True", ""), new)
  names = documents.run(text, NAMES)
  start = NAMES["params"], names["tx"].init(NAMES["params"])
  params, state, loss, _ = names["train_step"](*start, bad_batch(11))
  kept = [i for i in range(32) if i % 8 != 3]
  np.testing.assert_allclose(params, 1 - mean(kept), atol=1e-6)
  np.testing.assert_allclose(loss, BATCH[kept].sum(1).mean(), atol=1e-6)
  assert (state.skipped, ols.get_loss_scale(state)) == (False, 4.0)


def test_noise_batch_statistics_auxiliary_data():
  names = documents.run(
    documents.section(PAGE, "Noise, batch statistics, auxiliary data"), window()
  )
  step, statistics = names["train_step"], jnp.float32(1.0)
  _, state, statistics, _ = step(
    NAMES["params"], names["opt_state"], statistics, BATCH, jax.random.key(0)
  )
  noise = [
    jax.random.normal(key, (4, 3))
    for key in jax.random.split(jax.random.key(0), 8)
  ]
  expected = 0.9 + 0.1 * (BATCH.mean() + 0.1 * np.mean(noise))
  np.testing.assert_allclose(statistics, expected, rtol=1e-6)
  _, state, after, _ = step(
    NAMES["params"], state, statistics, bad_batch(0), jax.random.key(1)
  )
  assert state.skipped
  assert to_bits(after) == to_bits(statistics)


@pytest.mark.slow
def test_on_many_devices():
  names = documents.run(documents.section(PAGE, "On many devices"), NAMES)
  state = names["tx"].init(NAMES["params"])
  params, state, _ = names["train_step"](
    NAMES["params"], state, names["sharded"]
  )
  np.testing.assert_allclose(params, 1 - mean(range(32)), atol=1e-6)
  # Of the second device, which has rows 4 to 7, one of four micro-batches.
  bad = jax.device_put(bad_batch(5), names["sharded"].sharding)
  params, state, _ = names["train_step"](NAMES["params"], state, bad)
  others = [mean(range(4 * i, 4 * i + 4)) for i in range(8) if i != 1]
  expected = np.mean([*others, mean([4, 6, 7])], axis=0)
  np.testing.assert_allclose(params, 1 - expected, atol=1e-6)
  assert (state.skipped, ols.get_loss_scale(state)) == (False, 4.0)


def test_multi_steps():
  inner = optax.sgd(lambda count: jnp.where(count < 1, 1.0, 0.5))
  names = documents.run(
    documents.section(PAGE, "optax.MultiSteps"), NAMES | {"inner": inner}
  )
  tx, params = names["tx"], NAMES["params"]

  @jax.jit
  def step(params, state, batch):
    _, grads = ols.scaled_value_and_grad(NAMES["loss_fn"], state)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  # The third one is bad; S is halved and the window takes one more.
  for rows in (range(4 * i, 4 * i + 4) for i in (0, 1, 9, 2, 3, 4, 5, 6)):
    batch = BATCH[:4] * np.inf if max(rows) > 31 else BATCH[list(rows)]
    params, state = step(params, state, batch)
    np.testing.assert_array_equal(params, NAMES["params"])
  params, state = step(params, state, BATCH[28:])
  np.testing.assert_allclose(params, 1 - mean(range(32)), atol=1e-6)
  assert (state.applied_steps, state.skipped_steps) == (8, 1)
  assert state.inner_state.gradient_step == 1
