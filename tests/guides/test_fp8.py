"""The page on FP8 does what it says, for Linen and for NNX."""

import functools

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import to_numpy

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/fp8.md")
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32),
  "y": np.arange(8) % 2,
}
NAN_BATCH = {**BATCH, "x": np.full_like(BATCH["x"], np.nan)}
FP8 = "_overwrite_with_gradient"


def make_names(**names):
  """Returns what the page takes for granted."""
  inner = optax.sgd(0.5, momentum=0.5)
  return {
    "batch": BATCH,
    "inner": inner,
    "jax": jax,
    "jnp": jnp,
    "nn": nn,
    "nnx": nnx,
    "ols": ols,
    "optax": optax,
    "tx": ols.loss_scaling(inner, ols.DynamicLossScale(2.0**10)),
    **names,
  }


@functools.cache
def fp8_names():
  """Returns the names after the section on Linen."""
  return documents.run(documents.section(PAGE, "Linen"), make_names())


def nnx_names(section=None, **names):
  """Returns the names after the section on NNX, with the loss of its page."""

  def loss_fn(model, batch):
    logits = jnp.float32(model(batch["x"]))
    labels = batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)

  section = section or documents.section(PAGE, "NNX")
  return documents.run(section, make_names(loss_fn=loss_fn, **names))


def is_equal(a, b):
  """Returns whether two trees hold the same numbers."""
  return jax.tree.all(jax.tree.map(jnp.array_equal, a, b))


def values(node):
  """Returns copies of all values of an NNX node, by their paths."""
  state = nnx.to_flat_state(nnx.as_pure(nnx.state(node)))
  return {path: to_numpy(value) for path, value in state}


def test_fp8_values_are_stored_and_stay_on_a_skip():
  names = fp8_names()
  state = names["state"]
  first, loss = names["train_step"](state, BATCH)
  assert first.step == 1
  reference = nn.Dense(16).apply({"params": state.params["params"]}, BATCH["x"])
  expected = -jax.nn.log_softmax(reference)[np.arange(8), BATCH["y"]].mean()
  np.testing.assert_allclose(loss, expected, rtol=0.1)
  (old,), (new,) = state.params[FP8].values(), first.params[FP8].values()
  # The largest input that the layer has seen.
  seen = new["input_amax_history"][0]
  assert old["input_amax_history"][0] == 0
  np.testing.assert_allclose(seen, np.abs(BATCH["x"]).max(), rtol=0.01)

  skipped, _ = names["train_step"](first, NAN_BATCH)
  assert skipped.skipped
  assert is_equal(skipped.params, first.params)


def test_an_overflow_that_the_layer_clips_is_seen_in_its_history():
  names = fp8_names()
  # A bias is no part of the FP8 product, so its gradient would show the inf.
  layer = names["model"].clone(use_bias=False)
  variables = layer.init(jax.random.key(0), BATCH["x"])
  state = ols.linen.TrainState.create(
    # Together with S, the factor makes the layer's gradients inf.
    apply_fn=lambda *args: 2.0**10 * layer.apply(*args),
    params=variables,
    tx=ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(2.0**127)),
  )
  assert not names["train_step"](state, BATCH)[0].skipped
  assert names["watchful_train_step"](state, BATCH)[0].skipped
  assert names["watchful_train_step"](names["state"], BATCH)[0].step == 1


FP8_S = 2.0**126


@functools.cache
def fp8_accumulation(drop):
  """Returns a layer whose gradients a column of its input may make inf."""
  text = documents.section(PAGE, "Linen")
  assert text.count("microbatches=4,") == 1
  text = text.replace("microbatches=4,", f"microbatches=4, drop={drop},")
  names = documents.run(text, fp8_names())
  # A bias is no part of the FP8 product, so its gradient would show the inf.
  layer = names["model"].clone(use_bias=False)
  state = ols.linen.TrainState.create(
    apply_fn=lambda params, x: layer.apply(params, x[:, 1:]) * x[:, :1],
    params=layer.init(jax.random.key(0), BATCH["x"][:, 1:]),
    tx=ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(FP8_S)),
  )
  return names, state


def with_factors(*factors):
  """Returns a batch whose first column is what each output is multiplied by."""
  x = BATCH["x"].copy()
  x[:, 0] = factors
  return {**BATCH, "x": x}


@pytest.mark.long
@pytest.mark.parametrize("drop", [False, True])
def test_an_fp8_history_is_looked_at_in_each_micro_batch(drop):
  names, state = fp8_accumulation(drop)
  batch = with_factors(1, 1, 1, 1, 1, 2.0**10, 1, 1)
  after, _ = names["accumulated_train_step"](state, batch)
  assert after.skipped == (not drop)
  assert after.loss_scale == FP8_S / 2
  if not drop:
    assert is_equal(after.params, state.params)
    return
  params = state.params
  for i in (0, 2, 3):
    micro = {name: x[i::4] for name, x in batch.items()}
    grads = jax.grad(
      lambda params, micro=micro: (
        names["loss_fn"](params, state.apply_fn, micro) * FP8_S
      )
    )(params)
    params = {**params, FP8: grads[FP8]}
  for a, b in zip(
    jax.tree.leaves(after.params[FP8]),
    jax.tree.leaves(params[FP8]),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=0.02)
    assert np.isfinite(a).all()


def sharded_step(names, check_vma=True):
  auto = (jax.sharding.AxisType.Auto,)
  return jax.jit(
    jax.shard_map(
      names["sharded_train_step"],
      mesh=jax.make_mesh((8,), ("data",), axis_types=auto),
      in_specs=(jax.P(), jax.P("data")),
      out_specs=jax.P(),
      check_vma=check_vma,
    )
  )


def sharded_state():
  inner = optax.chain(ols.pmean_gradients("data"), optax.sgd(0.5))
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(2.0**10), axis_name="data")
  names = fp8_names()
  return ols.linen.TrainState.create(
    apply_fn=names["model"].apply, params=names["variables"], tx=tx
  )


@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_have_one_fp8_history_that_of_the_whole_batch(check_vma):
  names, state = fp8_names(), sharded_state()
  step = sharded_step(names, check_vma)
  after, _ = step(state, BATCH)
  assert after.step == 1
  gradients = [
    jax.grad(names["loss_fn"])(
      state.params, state.apply_fn, {name: x[[i]] for name, x in BATCH.items()}
    )
    for i in range(8)
  ]
  expected = jax.tree.map(
    lambda param, *grads: param - 0.5 * np.mean(grads, axis=0),
    state.params["params"],
    *(x["params"] for x in gradients),
  )
  for a, b in zip(
    jax.tree.leaves(after.params["params"]),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=0.05)
  (values,) = after.params[FP8].values()
  for copy in values["input_amax_history"].addressable_shards:
    seen = np.asarray(copy.data)[0]
    np.testing.assert_allclose(seen, np.abs(BATCH["x"]).max(), rtol=0.01)

  # One device has it.
  x = BATCH["x"].copy()
  x[5, 3] = np.nan
  skipped, _ = step(after, {**BATCH, "x": x})
  assert skipped.skipped
  assert is_equal(skipped.params, after.params)


def test_fp8_histories_that_differ_by_device_are_refused_by_jax():
  text = documents.section(PAGE, "Linen")
  line = 'jax.lax.pmax(scaled_grads["_overwrite_with_gradient"], "data")'
  assert text.count(line) == 1
  text = text.replace(line, 'scaled_grads["_overwrite_with_gradient"]')
  names = documents.run(text, fp8_names())
  with pytest.raises(ValueError, match="out_specs which require replication"):
    sharded_step(names)(sharded_state(), BATCH)


def test_with_an_s_of_1_a_step_with_nan_is_skipped_as_well():
  names = fp8_names()
  state = names["state"]
  tx = ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(1.0))
  state = ols.linen.TrainState.create(
    apply_fn=state.apply_fn, params=state.params, tx=tx
  )
  first, _ = names["train_step"](state, BATCH)
  after, _ = names["train_step"](first, NAN_BATCH)
  assert (first.step, after.step, bool(after.skipped)) == (1, 1, True)
  assert is_equal(after.params, first.params)


def test_nnx_values_are_those_of_a_linen_train_state_and_stay_on_a_skip():
  names, theirs = nnx_names(), fp8_names()
  model, optimizer = names["model"], names["optimizer"]
  state = theirs["state"]
  start = {**nnx.as_pure(nnx.state(model, nnx.Param))}
  state = state.replace(params={**state.params, "params": start})
  for x in (BATCH, NAN_BATCH, BATCH):
    names["train_step"](model, optimizer, x)
    state, _ = theirs["watchful_train_step"](state, x)
    assert optimizer.opt_state.skipped[...] == state.skipped
    layer = values(model)
    for name, value in state.params["params"].items():
      np.testing.assert_array_equal(layer[(name,)], value)
    ((layer_name, fp8),) = state.params[FP8].items()
    for name, value in fp8.items():
      np.testing.assert_array_equal(layer[(layer_name, name)], value)
  assert state.step == 2
  assert fp8["input_amax_history"][0] > 0


def test_nnx_sees_an_overflow_that_the_layer_clips_in_its_history():
  text = documents.section(PAGE, "NNX")
  for told in (True, False):
    flag = ", overflow=overflow_in_fp8(values)"
    assert text.count(flag) == 1
    # A bias is no part of the FP8 product, so its gradient would show the inf.
    code = text.replace("  16, dtype", "  16, use_bias=False, dtype")
    tx = ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(2.0**127))
    names = nnx_names(code if told else code.replace(flag, ""), tx=tx)

    # Together with S, the factor makes the layer's gradients inf.
    names["loss_fn"] = lambda model, batch, loss_fn=names["loss_fn"]: loss_fn(
      lambda x: 2.0**10 * model(x), batch
    )
    names["train_step"](names["model"], names["optimizer"], BATCH)
    assert names["optimizer"].opt_state.skipped[...] == told
