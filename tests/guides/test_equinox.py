"""The recipes for Equinox and plain JAX do what their page says."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits
from tests.support import to_numpy

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/equinox.md")
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
  "y": np.arange(8) % 2,
}
# Float16 does not hold it.
BAD_BATCH = {**BATCH, "x": 1e6 * BATCH["x"]}
BATCHES = (BATCH, BAD_BATCH, BATCH, BATCH)


class Model(eqx.Module):
  """Computes in float16, but for the norm."""

  hidden: eqx.nn.Linear
  norm: eqx.nn.BatchNorm
  dropout: eqx.nn.Dropout
  output: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key)
    self.hidden = eqx.nn.Linear(4, 4, use_bias=False, key=keys[0])
    self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch", momentum=0.5)
    self.dropout = eqx.nn.Dropout(0.5)
    self.output = eqx.nn.Linear(4, 2, key=keys[1])

  def __call__(self, x, state, key):
    x = jnp.float32(self.hidden.weight.astype(jnp.float16) @ jnp.float16(x))
    x, state = self.norm(x, state)
    return self.output(self.dropout(x, key=key)), state


@functools.cache
def recipe(*titles):
  """Returns the names after some sections of the page."""
  *before, title = titles
  names = recipe(*before) if before else make_names()
  return documents.run(documents.section(PAGE, title), names)


def make_names():
  """Returns what the page takes for granted."""
  rule = ols.DynamicLossScale(2.0**10)
  return {
    "Model": Model,
    "batch": BATCH,
    "eqx": eqx,
    "jax": jax,
    "jnp": jnp,
    "ols": ols,
    "optax": optax,
    "rule": rule,
    "tx": ols.loss_scaling(optax.sgd(0.5), rule),
  }


def arrays(tree):
  """Returns the arrays in a tree, random keys as their data."""
  return [to_numpy(x) for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def two_layers(weights, x, y):
  """Returns the loss and its gradients, in float64, written out.

  Args:
    weights: two matrices, from inputs to outputs, and their biases.
    x: the inputs.
    y: the classes.
  """
  (first, second), (first_bias, second_bias) = weights
  before = x @ first + first_bias
  hidden = np.maximum(before, 0)
  logits = hidden @ second + second_bias
  log_sum = np.log(np.exp(logits).sum(-1))
  loss = np.mean(log_sum - logits[np.arange(len(y)), y])
  outer = (np.exp(logits - log_sum[:, None]) - np.eye(2)[y]) / len(y)
  inner = (outer @ second.T) * (before > 0)
  matrices = x.T @ inner, hidden.T @ outer
  return loss, (matrices, (inner.sum(0), outer.sum(0)))


def descent(weights, steps):
  """Returns the losses and weights of plain gradient descent in float64."""
  weights = jax.tree.map(np.float64, weights)
  losses = []
  for _ in range(steps):
    loss, gradients = two_layers(weights, np.float64(BATCH["x"]), BATCH["y"])
    losses.append(loss)
    weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients)
  return losses, weights


def weights_of_mlp(model):
  layers = model.layers
  matrices = tuple(layer.weight.T for layer in layers)
  return matrices, tuple(layer.bias for layer in layers)


def weights_of_dict(params):
  return (params["hidden"], params["output"]), (np.zeros(8), np.zeros(2))


def run(train_step, *state):
  """Returns the state after all batches, and the losses of the applied steps.

  A step that is skipped is checked to leave the parameters.
  """
  losses = []
  for batch in BATCHES:
    params = state[0]
    *state, loss = train_step(*state, batch)
    if batch is BAD_BATCH:
      assert_same_bits(arrays(state[0]), arrays(params))
    else:
      losses.append(float(loss))
  return state, losses


def assert_descends(params, losses, start):
  expected, weights = descent(start, 3)
  np.testing.assert_allclose(losses, expected, atol=2e-3)
  for ours, theirs in zip(params[0], weights[0], strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_the_page_begins_with_an_optimizer():
  text = PAGE.partition("## ")[0]
  names = documents.run(text, {"ols": ols, "optax": optax})
  assert names["tx"].init({"w": jnp.ones(1)}).applied_steps == 0


def test_equinox_descends_as_float64_does():
  names = recipe("Equinox")
  model, opt_state = names["model"], names["opt_state"]
  start = weights_of_mlp(model)
  (model, opt_state), losses = run(names["train_step"], model, opt_state)
  assert_descends(weights_of_mlp(model), losses, start)
  assert opt_state.skipped_steps == 1
  assert ols.get_loss_scale(opt_state) == 2.0**9


def test_a_model_that_jax_differentiates_is_refused_by_its_leaf():
  names = recipe("Equinox")
  code = documents.block(PAGE, "Equinox", "def train_step")
  (line,) = [x for x in code.splitlines() if "filter_value_and_grad" in x]
  code = code.replace(line.partition("opt_state, ")[2], "")
  plain = documents.run(f"```python\n{code}```", names)
  with pytest.raises(
    TypeError, match=r"at 'args\[0\]/activation'.*eqx\.filter_"
  ):
    plain["train_step"](plain["model"], plain["opt_state"], BATCH)


def test_the_step_is_checked_and_gradients_that_are_not_scaled_are_named():
  names = recipe("Equinox", "Is the step right?")
  assert names["report"].ok

  @eqx.filter_jit
  def wrong_step(model, opt_state, batch):
    value_and_grad = eqx.filter_value_and_grad(names["loss_fn"])
    loss, scaled_grads = value_and_grad(model, batch)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = names["tx"].update(scaled_grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss

  report = ols.instruments.check_step(
    wrong_step, names["model"], names["opt_state"], BATCH
  )
  (said,) = documents.quoted(PAGE, "Is the step right?")
  assert said in documents.one_line(report)


def test_partitioned_it_is_the_same_bit_for_bit():
  names = recipe("Equinox")
  (whole, _), losses = run(
    names["train_step"], names["model"], names["opt_state"]
  )
  names = recipe("Equinox", "Equinox, partitioned")
  (params, _), ours = run(
    names["train_step"], names["params"], names["opt_state"]
  )
  assert ours == losses
  assert_same_bits(arrays(params), arrays(whole))


def test_a_whole_model_is_accumulated():
  names = recipe("Equinox")
  model, opt_state = names["model"], names["opt_state"]
  _, after, loss = names["accumulated_step"](model, opt_state, BATCH)
  expected, (matrices, _) = two_layers(
    jax.tree.map(np.float64, weights_of_mlp(model)),
    np.float64(BATCH["x"]),
    BATCH["y"],
  )
  np.testing.assert_allclose(loss, expected, atol=1e-3)
  assert not after.overflow
  value_and_grad = ols.scaled_value_and_grad(
    names["loss_fn"], 1024.0, value_and_grad=eqx.filter_value_and_grad
  )
  value_and_grad = ols.accumulate(value_and_grad, microbatches=4)
  _, scaled_grads, _ = value_and_grad(model, BATCH)
  ours = weights_of_mlp(scaled_grads)[0]
  for x, y in zip(ours, matrices, strict=True):
    np.testing.assert_allclose(x, 1024 * y, atol=2)
  one_bad = {
    **BATCH,
    "x": BATCH["x"] * np.where(np.arange(8) == 5, 1e6, 1)[:, None],
  }
  skipped, after, _ = names["accumulated_step"](model, opt_state, one_bad)
  assert_same_bits(arrays(skipped), arrays(model))
  assert after.skipped


def test_a_partitioned_model_in_float32_is_autocast():
  names = recipe("Equinox", "Equinox, partitioned")

  def loss_fn(params, batch):
    logits = jax.vmap(eqx.combine(params, names["static"]))(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.mean(losses)

  line = 'ols.autocast(partitioned_loss_fn, "O1", dtype=jnp.float16)'
  assert line in PAGE
  mixed = eval(line, names | {"partitioned_loss_fn": loss_fn})
  loss, scaled_grads = ols.scaled_value_and_grad(mixed, 1024.0)(
    names["params"], BATCH
  )
  expected, (matrices, _) = two_layers(
    jax.tree.map(np.float64, weights_of_mlp(names["params"])),
    np.float64(BATCH["x"]),
    BATCH["y"],
  )
  np.testing.assert_allclose(loss, expected, atol=1e-3)
  assert loss != loss_fn(names["params"], BATCH)
  for ours, theirs in zip(
    weights_of_mlp(scaled_grads)[0], matrices, strict=True
  ):
    np.testing.assert_allclose(ours, 1024 * theirs, atol=2)


def test_on_a_skip_statistics_and_key_stay():
  names = recipe("Equinox with batch norm")
  before = [names[name] for name in ("params", "state", "key", "opt_state")]
  *after, _ = names["train_step"](*before, BAD_BATCH)
  for old, new in zip(before[:3], after[:3], strict=True):
    assert_same_bits(arrays(new), arrays(old))
  assert after[3].skipped
  *after, _ = names["train_step"](*before, BATCH)
  for old, new in zip(before[:3], after[:3], strict=True):
    changed = [
      (ours != theirs).any()
      for ours, theirs in zip(arrays(new), arrays(old), strict=True)
    ]
    assert any(changed)


def test_autocast_keeps_the_sums_of_a_batch_norm_in_float32():
  line = 'ols.autocast(stateful_loss_fn, "O1", dtype=jnp.float16)'
  assert line in PAGE
  model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
    3, "batch", mode="batch", momentum=0.5
  )
  params, static = eqx.partition(model, eqx.is_inexact_array)
  x = 100 * np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

  def stateful_loss_fn(params, x):
    norm = jax.vmap(
      eqx.combine(params, static),
      axis_name="batch",
      in_axes=(0, None),
      out_axes=(0, None),
    )
    # All that follows the last product is in float32 anyway.
    eye = jnp.eye(3, dtype=x.dtype)
    outputs, new = norm(x @ eye, state)
    loss = jnp.mean((outputs @ eye) ** 2)
    return loss, new.get(model.batch_state_index)[1]

  def cast_loss_fn(params, x):
    return stateful_loss_fn(*jax.tree.map(jnp.float16, (params, x)))

  mixed = eval(line, {"stateful_loss_fn": stateful_loss_fn, **make_names()})
  _, variance = jax.jit(mixed)(params, x)
  # The variance in a new state is 1.
  expected = (1 + np.var(np.float64(x), axis=0)) / 2
  np.testing.assert_allclose(variance, expected, rtol=1e-3)
  _, variance = jax.jit(cast_loss_fn)(params, x)
  assert np.isinf(variance).all()


def test_batch_norm_trains_as_with_the_bare_optimizer():
  names = recipe("Equinox with batch norm")
  bare = optax.sgd(0.5)
  params, state, key, opt_state = (
    names[name] for name in ("params", "state", "key", "opt_state")
  )
  value_and_grad = eqx.filter_jit(
    jax.value_and_grad(names["stateful_loss_fn"], has_aux=True)
  )
  expected = params, state, key, bare.init(params)
  ours = params, state, key, opt_state
  for batch in BATCHES[:3]:
    *ours, _ = names["train_step"](*ours, batch)
    if batch is BAD_BATCH:
      continue
    params, state, key, bare_state = expected
    key, dropout_key = jax.random.split(key)
    keys = jax.random.split(dropout_key, 8)
    (_, state), grads = value_and_grad(params, state, batch, keys)
    updates, bare_state = bare.update(grads, bare_state, params)
    expected = optax.apply_updates(params, updates), state, key, bare_state
  for mine, theirs in zip(ours[:3], expected[:3], strict=True):
    for left, right in zip(arrays(mine), arrays(theirs), strict=True):
      np.testing.assert_allclose(left, right, atol=2e-3)


def test_plain_jax_descends_as_float64_does():
  names = recipe("Plain JAX")
  params, opt_state = names["params"], names["opt_state"]
  start = weights_of_dict(params)
  # It has no biases, so in the reference they stay 0 for one step.
  loss, (gradients, _) = two_layers(
    jax.tree.map(np.float64, start), np.float64(BATCH["x"]), BATCH["y"]
  )
  params, opt_state, ours = names["train_step"](params, opt_state, BATCH)
  np.testing.assert_allclose(ours, loss, atol=2e-3)
  for new, old, gradient in zip(
    weights_of_dict(params)[0], start[0], gradients, strict=True
  ):
    np.testing.assert_allclose(new, old - 0.5 * gradient, atol=2e-3)
  skipped, opt_state, _ = names["train_step"](params, opt_state, BAD_BATCH)
  assert_same_bits(skipped, params)
  assert ols.get_loss_scale(opt_state) == 2.0**9


def test_a_state_that_is_closed_over_is_an_error():
  names = recipe("Plain JAX")
  with pytest.raises(ValueError, match="closed over"):
    jax.jit(
      lambda params: ols.scaled_value_and_grad(
        names["loss_fn"], names["opt_state"]
      )(params, BATCH)
    )(names["params"])


def test_without_optax_it_is_the_step_with_optax_bit_for_bit():
  names = recipe("Plain JAX", "Without optax")
  by_optax = recipe("Plain JAX")
  ours = names["params"], names["state"]
  theirs = by_optax["params"], by_optax["opt_state"]
  for batch in BATCHES:
    *ours, loss = names["train_step"](*ours, batch)
    *theirs, expected = by_optax["train_step"](*theirs, batch)
    np.testing.assert_array_equal(loss, expected)
    assert_same_bits(ours[0], theirs[0])
    assert ours[1].loss_scale == ols.get_loss_scale(theirs[1])
  assert ours[1].loss_scale == 2.0**9
