"""docs/guides/fp8.md: float8 in any function, and the FP8 layers of Flax."""

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support
from tests.support import on_each_device

pytestmark = pytest.mark.slow

PATH = "docs/guides/fp8.md"
FP8 = "_overwrite_with_gradient"
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32),
  "y": np.arange(8) % 2,
}
# The first entry of each history of the inputs of a layer's steps.
SEEN = np.abs(BATCH["x"]).max()


def begin():
  names = {"batch": BATCH, "nn": nn, "nnx": nnx}
  any_function = "## One argument.*## FP8 layers"
  page = documents.Page(PATH, documents.training() | names, any_function)
  page.run("Linen")
  return page


def seen(params):
  """Returns the largest input that the layer has seen in its last step."""
  (values,) = params[FP8].values()
  return values["input_amax_history"][0]


def test_any_function_multiplies_in_float8():
  page = documents.Page(PATH, documents.training())
  page.run("One argument")
  grads, true = (
    jax.jit(jax.grad(page[name]))(page["params"], page["x"], page["y"])
    for name in ("low_loss_fn", "loss_fn")
  )
  for found, expected in zip(*map(jax.tree.leaves, (grads, true)), strict=True):
    assert found.dtype == jnp.float32
    assert 1e-3 < support.relative_error(found, expected) < 0.2


def test_a_step_stores_the_amax_of_the_batch_in_linen_and_in_nnx():
  page = begin()
  state = page["state"]
  for name in ("train_step", "watchful_train_step"):
    after, loss = page[name](state, BATCH)
    assert after.step == 1 and np.isfinite(loss)
    np.testing.assert_allclose(seen(after.params), SEEN, rtol=0.01)

  def loss_fn(model, batch):
    logits = jnp.float32(model(batch["x"]))
    labels = jax.nn.one_hot(batch["y"], 16)
    return optax.losses.softmax_cross_entropy(logits, labels).mean()

  page.run("NNX", loss_fn=loss_fn)
  model = page["model"]
  page["train_step"](model, page["optimizer"], BATCH)
  values = nnx.as_pure(nnx.state(model, page["Fp8"]))
  history = optax.tree.get(values, "input_amax_history")
  np.testing.assert_allclose(history[0], SEEN, rtol=0.01)
  page.end()


def test_an_overflow_that_the_layer_clips_is_seen_in_its_history():
  page = begin()
  # The FP8 product leaves a bias out, so its gradient would show the inf.
  layer = page["model"].clone(use_bias=False)
  state = ols.linen.TrainState.create(
    # Together with S, the factor makes the layer's gradients inf.
    apply_fn=lambda *args: 2.0**10 * layer.apply(*args),
    params=layer.init(jax.random.key(0), BATCH["x"]),
    tx=ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(2.0**127)),
  )
  assert not page["train_step"](state, BATCH)[0].skipped
  assert page["watchful_train_step"](state, BATCH)[0].skipped


@pytest.mark.long
def test_an_fp8_history_is_looked_at_in_each_micro_batch():
  page = begin()
  state, _ = page["accumulated_train_step"](page["state"], BATCH)
  assert state.step == 1
  # Of the third of four micro-batches, so the values of the last one stay out.
  bad_batch = BATCH | {"x": BATCH["x"].copy()}
  bad_batch["x"][6, 0] = np.nan
  after, _ = page["accumulated_train_step"](state, bad_batch)
  assert after.skipped
  assert seen(after.params) == seen(state.params)


@pytest.mark.long
def test_devices_have_one_fp8_history_that_of_the_whole_batch():
  page = begin()
  inner = optax.chain(ols.pmean_gradients("data"), optax.sgd(0.5))
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(), axis_name="data")
  state = ols.linen.TrainState.create(
    apply_fn=page["model"].apply, params=page["variables"], tx=tx
  )
  specs = jax.P(), jax.P("data")
  step = on_each_device(page["sharded_train_step"], jax.P(), in_specs=specs)
  after, _ = jax.jit(step)(state, BATCH)
  assert after.step == 1
  for copy in seen(after.params).addressable_shards:
    np.testing.assert_allclose(copy.data, SEEN, rtol=0.01)
