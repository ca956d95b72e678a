"""docs/guides/devices.md: its steps, and each row of its table."""

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

PATH = "docs/guides/devices.md"
ROWS = [
  [cell.strip() for cell in line.strip("|").split("|")]
  for line in documents.read(PATH).splitlines()
  if line.startswith("| ")
][1:]
PARAMS = jnp.array([1.0, -2.0, 0.5])
BATCH = np.random.default_rng(0).integers(-2, 3, (8, 2, 3)).astype(np.float32)


def test_the_devices_step_together():
  with documents.reading(PATH) as page:
    start, batch = page["params"], page["batch"]
    expected = page["loss_fn"](start, batch)
    for title in ("Under jit", "Under shard_map"):
      page.run(title, batch=batch)
      state = page["tx"].init(start)
      _, state, loss = page["train_step"](start, state, page["batch"])
      assert state.applied_steps == 1
      np.testing.assert_allclose(loss, expected, rtol=1e-5)


def regression_loss(params, batch):
  return jnp.mean((batch.reshape(-1, 3) @ params - 1.0) ** 2)


def step_of(row):
  """Returns the step that a row describes."""
  situation, varying, mean, average_scaled, axis_name, flag = row
  assert {varying, mean} <= {"", "yes"} and not flag
  kwargs = {"average_scaled": average_scaled, "axis_name": axis_name}
  kwargs = {k: ast.literal_eval(v.strip("`")) for k, v in kwargs.items() if v}
  inner = optax.sgd(0.5)
  if mean:
    inner = optax.chain(ols.pmean_gradients("data"), inner)
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(8.0), **kwargs)

  def step(batch):
    opt_state = tx.init(PARAMS)
    local = ols.make_varying(PARAMS, "data") if varying else PARAMS
    value_and_grad = ols.scaled_value_and_grad(regression_loss, opt_state)
    scaled_grads = value_and_grad(local, batch)[1]
    if "by hand" in situation:
      scaled_grads = lax.pmean(scaled_grads, "data")
    updates, new = tx.update(scaled_grads, opt_state, PARAMS)
    return optax.apply_updates(PARAMS, updates), new.skipped

  return step


def ways_of(situation, step):
  """Yields the step as each kind of program that a row names."""
  sharded = functools.partial(support.on_each_device, step, jax.P())
  kinds = {
    "plain `jit`": lambda: jax.jit(step),
    "`shard_map`": lambda: jax.jit(sharded()),
    "`pmap`": lambda: jax.pmap(step, axis_name="data"),
    "`shard_map(check_vma=False)`": lambda: jax.jit(sharded(check_vma=False)),
  }
  named = [make for kind, make in kinds.items() if kind in situation]
  assert named, situation
  for make in named:
    yield make()


@pytest.mark.parametrize("row", ROWS[:-1], ids=lambda row: row[0])
def test_a_row_of_the_table_is_what_its_situation_needs(row):
  alone = "of its own" in row[0]
  each = [jax.grad(regression_loss)(PARAMS, x) for x in BATCH]
  grads = np.stack(each if alone else [np.mean(each, axis=0)] * 8)
  sharding = jax.NamedSharding(support.make_mesh(), jax.P("data"))
  batch = jax.device_put(BATCH, sharding)
  for step in ways_of(row[0], step_of(row)):
    params, skipped = step(batch)
    expected = np.broadcast_to(PARAMS - 0.5 * grads, (8, 3))
    np.testing.assert_allclose(
      np.broadcast_to(params, (8, 3)), expected, rtol=1e-6
    )
    assert not skipped.any()
    _, skipped = step(batch.at[3].set(jnp.inf))
    skips = np.broadcast_to(skipped, 8).tolist()
    assert skips == [i == 3 or not alone for i in range(8)]


def test_the_last_row_adds_a_reason_to_skip():
  reason = "any of these, and a reason of your own to skip"
  assert ROWS[-1] == [reason, *[""] * 4, "a flag"]
