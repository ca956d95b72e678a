"""The recipe for many devices does what its page says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/devices.md")


def test_devices_step_and_skip_together():
  params = {"w": jnp.full((5, 3), 0.05)}
  batch = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)

  def loss_fn(params, batch):
    product = jnp.float16(batch) @ jnp.float16(params["w"])
    return jnp.mean(jnp.float32(product) ** 2)

  names = {"functools": functools, "jax": jax, "jnp": jnp, "ols": ols}
  names |= {"optax": optax, "loss_fn": loss_fn, "batch": batch}
  names = documents.run(documents.section(PAGE, "Under shard_map"), names)
  opt_state = names["tx"].init(params)
  new, opt_state, loss = names["train_step"](params, opt_state, names["batch"])
  assert opt_state.applied_steps == 1
  np.testing.assert_allclose(loss, loss_fn(params, batch), rtol=1e-2)
  # One device's overflow.
  bad_batch = np.where(np.arange(8)[:, None] == 3, np.float32(1e6), batch)
  bad_batch = jax.device_put(bad_batch, names["batch"].sharding)
  same, opt_state, _ = names["train_step"](new, opt_state, bad_batch)
  assert opt_state.skipped
  np.testing.assert_array_equal(same["w"], new["w"])
