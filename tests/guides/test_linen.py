"""docs/guides/linen.md: its train states make the steps of float32."""

from typing import Any

from flax import jax_utils
import flax.linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.autocast.programs import products

pytestmark = pytest.mark.slow

PATH = "docs/guides/linen.md"
BATCH = {
  "x": np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32),
  "y": np.arange(32) % 2,
}


class Model(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(4, use_bias=False, dtype=self.dtype)(x)
    x = nn.BatchNorm(not train, momentum=0.5)(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(2, dtype=self.dtype)(x)


def begin():
  """Returns the page after its train state."""
  names = {"Any": Any, "batch": BATCH, "jax_utils": jax_utils, "nn": nn}
  names |= {"model": Model(jnp.float16), "train_state": train_state}
  page = documents.Page(PATH, documents.training() | names)
  page.run(count=1)
  page.run("A train state")
  return page


def test_each_train_state_makes_the_step_of_float32():
  page = begin()
  start = page["state"]
  in_float32 = start.replace(apply_fn=Model().apply)

  def step(state, batch=BATCH):
    # A copy, since the page's step is given its state to overwrite.
    return page["train_step"](jax.tree.map(jnp.copy, state), batch)

  _, dropout_key = jax.random.split(start.key)
  given = start.params, in_float32, BATCH, dropout_key
  expected, _ = page["loss_fn"](*given)
  state, loss = step(start)
  np.testing.assert_allclose(loss, expected, rtol=1e-2)
  assert (state.step, state.attempts) == (1, 1)

  page.run("Is the step right?")
  assert page["report"].ok

  page.run("A model written in float32")
  loss, _ = page["mixed_loss_fn"](*given)
  np.testing.assert_allclose(loss, expected, rtol=1e-2)
  assert set(products(page["mixed_loss_fn"], *given)) == {"float16"}

  page.run("Under pmap", state=in_float32)
  assert page["state"].step.tolist() == [1] * 8
  assert np.isfinite(page["loss"]).all()

  page.run("Accumulation", state=start)
  # Of the second of four micro-batches.
  bad_batch = BATCH | {"x": BATCH["x"].copy()}
  bad_batch["x"][5] = np.inf
  state, _ = step(in_float32, bad_batch)
  assert (state.step, state.loss_scale) == (1, start.loss_scale / 2)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.batch_stats))

  page.run("Evaluating with the moving average")
  variables = {"params": state.ema, "batch_stats": state.batch_stats}
  logits = Model().apply(variables, BATCH["x"], train=False)
  accuracy = np.mean(np.argmax(logits, -1) == BATCH["y"])
  assert page["evaluate"](state, BATCH) == accuracy

  page.run("A learning rate to log", params=jnp.ones(2))
  state = page["state"]
  assert page["metrics"](state)["learning_rate"] == np.float32(1e-2)
  state = state.apply_gradients(grads=jnp.ones(2))
  assert page["metrics"](state)["learning_rate"] < np.float32(1e-2)

  page_of_flax(page)
  page.end()


def page_of_flax(page):
  """Runs the section on Flax's own train state, for a model without state."""

  def loss_fn(params, apply_fn, batch):
    logits = jnp.float32(apply_fn(params, batch["x"]))
    labels = jax.nn.one_hot(batch["y"], 2)
    return optax.losses.softmax_cross_entropy(logits, labels).mean()

  title, model = "Flax's own train state", nn.Dense(2, dtype=jnp.float16)
  variables = model.init(jax.random.key(0), BATCH["x"])
  names = {"loss_fn": loss_fn, "model": model, "variables": variables}
  page.run(title, 1, **names, tx=ols.loss_scaling(optax.sgd(0.5), page["rule"]))
  report = ols.instruments.check_step(
    page["train_step"], page["state"], BATCH, may_change=["state/step"]
  )
  assert report.ok, report

  inner = optax.sgd(0.5)
  old = train_state.TrainState.create(
    apply_fn=model.apply, params=variables, tx=inner
  )
  page.run(title, old=old.replace(step=2))
  state = page["state"]
  assert (state.step, state.attempts, state.loss_scale) == (2, 0, 2.0**15)


def test_the_step_is_checked_and_statistics_set_after_it_are_named():
  page = begin()
  right = ", batch_stats=batch_stats, key=key\n  )\n"
  wrong = ", key=key\n  )\n  state = state.replace(batch_stats=batch_stats)\n"
  code = documents.block(documents.read(PATH), "A train state", "train_step")
  assert code.count(right) == 1
  exec(code.replace(right, wrong), page.names)
  report = ols.instruments.check_step(page["train_step"], page["state"], BATCH)
  (said,) = documents.quoted(documents.read(PATH), "Is the step right?")
  assert said in documents.one_line(report)
