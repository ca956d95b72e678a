"""The recipe for many devices does what its page says."""

import ast
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/devices.md")


@pytest.mark.parametrize("title", ["Under jit", "Under shard_map"])
def test_devices_step_and_skip_together(title):
  params = {"w": jnp.full((5, 3), 0.05)}
  batch = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)

  def loss_fn(params, batch):
    product = jnp.float16(batch) @ jnp.float16(params["w"])
    return jnp.mean(jnp.float32(product) ** 2)

  names = {"functools": functools, "jax": jax, "jnp": jnp, "ols": ols}
  names |= {"optax": optax, "loss_fn": loss_fn, "batch": batch}
  names = documents.run(documents.section(PAGE, title), names)
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


ROWS = [
  [cell.strip() for cell in line.strip("|").split("|")]
  for line in documents.section(
    PAGE, "Which of the five do I need?"
  ).splitlines()
  if line.startswith("|")
][2:]
PARAMS = jnp.array([1.0, -2.0, 0.5])
BATCH = np.random.default_rng(0).integers(-2, 3, (8, 2, 3)).astype(np.float32)


def regression_loss(params, batch):
  return jnp.mean((batch.reshape(-1, 3) @ params - 1.0) ** 2)


def steps_of(row):
  """Returns for each way in a row a step: each device's params, and skips."""
  situation, varying, mean, average_scaled, axis_name, flag = row
  assert {varying, mean} <= {"", "yes"} and not flag
  kwargs = {"average_scaled": average_scaled, "axis_name": axis_name}
  kwargs = {k: ast.literal_eval(v.strip("`")) for k, v in kwargs.items() if v}
  inner = optax.sgd(0.5)
  if mean:
    inner = optax.chain(ols.pmean_gradients("data"), inner)
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(8.0), **kwargs)

  def step(batch, **kwargs):
    opt_state = tx.init(PARAMS)
    local = ols.make_varying(PARAMS, "data") if varying else PARAMS
    value_and_grad = ols.scaled_value_and_grad(regression_loss, opt_state)
    scaled_grads = value_and_grad(local, batch)[1]
    if "by hand" in situation:
      scaled_grads = lax.pmean(scaled_grads, "data")
    updates, new = tx.update(scaled_grads, opt_state, PARAMS, **kwargs)
    return optax.apply_updates(PARAMS, updates), new.skipped

  def everywhere(step):
    return lambda x: jax.tree.map(lambda y: jnp.stack([y] * 8), step(x))

  def ways(step):
    mapped = functools.partial(
      jax.shard_map,
      step,
      mesh=support.make_mesh(),
      in_specs=jax.P("data"),
      out_specs=jax.P(),
    )
    kinds = {
      "plain `jit`": lambda: everywhere(jax.jit(step)),
      "`shard_map`": lambda: everywhere(jax.jit(mapped())),
      "`pmap`": lambda: jax.pmap(step, axis_name="data"),
      "`shard_map(check_vma=False)`": lambda: everywhere(
        jax.jit(mapped(check_vma=False))
      ),
    }
    found = [make() for kind, make in kinds.items() if kind in situation]
    assert found, situation
    return found

  return ways(step), ways(functools.partial(step, skip=jnp.bool_(True)))


@pytest.mark.parametrize("row", ROWS[:-1], ids=lambda row: row[0])
def test_a_row_of_the_table_is_what_its_situation_needs(row):
  batch = jax.device_put(
    BATCH, jax.NamedSharding(support.make_mesh(), jax.P("data"))
  )
  bad_batch = batch.at[3].set(jnp.inf)
  alone = "of its own" in row[0]
  each = [jax.grad(regression_loss)(PARAMS, x) for x in BATCH]
  grads = jnp.stack(each if alone else [jnp.mean(jnp.stack(each), 0)] * 8)
  steps, skipping_steps = steps_of(row)
  for step, skipping_step in zip(steps, skipping_steps, strict=True):
    params, skipped = step(batch)
    np.testing.assert_allclose(params, PARAMS - 0.5 * grads, rtol=1e-6)
    assert not skipped.any()
    params, skipped = step(bad_batch)
    assert skipped.tolist() == [i == 3 or not alone for i in range(8)]
    assert (params[skipped] == PARAMS).all()
    assert skipping_step(batch)[1].all()


def test_the_last_row_adds_a_reason_to_skip():
  assert ROWS[-1] == [
    "any of these, and a reason of your own to skip",
    *[""] * 4,
    "a flag",
  ]
