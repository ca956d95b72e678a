"""The recipes for Flax Linen do what their page says."""

import functools
from typing import Any

import chex
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
from tests.guides import test_fp8

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/linen.md")

BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32),
  "y": np.arange(8) % 2,
}
# Float16 does not hold it.
BAD_BATCH = {**BATCH, "x": 1e6 * BATCH["x"]}
NAN_BATCH = {**BATCH, "x": np.full_like(BATCH["x"], np.nan)}
BATCHES = (BATCH, BAD_BATCH, BATCH, BATCH)


class Model(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(4, use_bias=False, dtype=self.dtype)(x)
    x = nn.BatchNorm(not train, momentum=0.5)(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(2, dtype=self.dtype)(x)


def make_names(**names):
  """Returns what the page takes for granted."""
  rule = ols.DynamicLossScale(2.0**10)
  return {
    "Any": Any,
    "batch": BATCH,
    "functools": functools,
    "jax": jax,
    "jnp": jnp,
    "nn": nn,
    "ols": ols,
    "optax": optax,
    "rule": rule,
    "train_state": train_state,
    "tx": ols.loss_scaling(optax.sgd(0.5), rule),
    **names,
  }


@functools.cache
def recipe(title):
  """Returns the names after a section that builds on "A train state"."""
  if title == "A train state":
    names = make_names(model=Model(jnp.float16))
  else:
    names = dict(recipe("A train state"))
  names = documents.run(documents.section(PAGE, title), names)
  if title == "A model written in float32":
    names["state"] = names["state"].replace(apply_fn=Model().apply)
    code = documents.block(PAGE, "A train state", "def train_step")
    code = code[code.index("@functools") :]
    exec(code.replace("loss_fn, state.opt", "mixed_loss_fn, state.opt"), names)
  return names


def test_the_page_begins_with_an_optimizer():
  text = PAGE.partition("## ")[0]
  names = documents.run(text, {"ols": ols, "optax": optax})
  assert names["tx"].init({"w": jnp.ones(1)}).applied_steps == 0


@functools.cache
def float32_steps():
  """Returns what the steps that do not overflow do, in plain float32."""
  model = Model()
  variables = model.init(jax.random.key(0), BATCH["x"], train=False)
  params, stats = variables["params"], variables["batch_stats"]
  ema, key = params, jax.random.key(1)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def gradients(params, stats, dropout_key):
    logits, new = model.apply(
      {"params": params, "batch_stats": stats},
      BATCH["x"],
      train=True,
      mutable=["batch_stats"],
      rngs={"dropout": dropout_key},
    )
    probabilities = jax.nn.log_softmax(logits)[np.arange(8), BATCH["y"]]
    return -jnp.mean(probabilities), new["batch_stats"]

  for batch in BATCHES:
    if batch is BAD_BATCH:
      continue
    key, dropout_key = jax.random.split(key)
    grads, stats = gradients(params, stats, dropout_key)
    params = jax.tree.map(lambda x, g: x - 0.5 * g, params, grads)
    ema = jax.tree.map(lambda x, mean: 0.01 * x + 0.99 * mean, params, ema)
  return {"params": params, "batch_stats": stats, "ema": ema}, key


@functools.cache
def train(title):
  """Returns the state after each batch, the first one before any."""
  names = recipe(title)
  states = [names["state"]]
  for batch in BATCHES:
    # A copy, since the recipe's step is given its state to overwrite.
    given = jax.tree.map(jnp.copy, states[-1])
    states.append(names["train_step"](given, batch)[0])
  return states


def is_equal(a, b):
  """Returns whether two trees hold the same numbers."""
  return jax.tree.all(jax.tree.map(jnp.array_equal, a, b))


TITLES = ["A train state", "A model written in float32"]


@pytest.mark.parametrize("title", TITLES)
def test_a_train_state_follows_float32_and_leaves_the_bad_batch_out(title):
  states = train(title)
  expected, key = float32_steps()
  found = {name: getattr(states[-1], name) for name in expected}
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=0.01)
  assert jnp.array_equal(states[-1].key, key)
  assert (states[-1].step, states[-1].attempts) == (3, 4)
  scales = [float(state.loss_scale) for state in states]
  assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9]


@pytest.mark.parametrize("title", TITLES)
def test_its_skipped_step_changes_nothing_but_the_scale(title):
  _, before, after, *_ = train(title)
  assert after.skipped
  for name in ("params", "batch_stats", "ema", "key", "step"):
    assert is_equal(getattr(before, name), getattr(after, name))


def test_the_step_is_checked_and_statistics_set_after_it_are_named():
  assert recipe("Is the step right?")["report"].ok
  right = ", batch_stats=batch_stats, key=key\n  )\n"
  wrong = ", key=key\n  )\n  state = state.replace(batch_stats=batch_stats)\n"
  code = documents.block(PAGE, "A train state", "def train_step")
  assert code.count(right) == 1
  names = documents.run(
    f"```python\n{code.replace(right, wrong)}```", recipe("A train state")
  )
  report = ols.instruments.check_step(
    names["train_step"], names["state"], BATCH
  )
  (said,) = documents.quoted(PAGE, "Is the step right?")
  assert said in documents.one_line(report)


# The examples 1 and 5 are the second of four micro-batches.
ONE_BAD = {**BATCH, "x": BATCH["x"].copy()}
ONE_BAD["x"][5] = np.inf


@functools.cache
def accumulation(drop):
  """Returns the recipe's names, with a model in float32."""
  text = documents.section(PAGE, "Accumulation")
  assert text.count("drop=True)") == 1
  text = text.replace("drop=True)", f"drop={drop})")
  names = documents.run(text, recipe("A train state"))
  return names | {"state": names["state"].replace(apply_fn=APPLY)}


APPLY = Model().apply


def accumulated_by_hand(state, valid):
  """Returns the parameters and statistics after a step without the library."""
  _, dropout_key = jax.random.split(state.key)
  keys, ends = jax.random.split(dropout_key, 4), []

  @functools.partial(jax.jit, static_argnums=0)
  @functools.partial(jax.grad, has_aux=True, argnums=1)
  def gradients(apply_fn, params, batch, key):
    logits, new = apply_fn(
      {"params": params, "batch_stats": state.batch_stats},
      batch["x"],
      train=True,
      mutable=["batch_stats"],
      rngs={"dropout": key},
    )
    probabilities = jax.nn.log_softmax(logits)[np.arange(2), batch["y"]]
    return -jnp.mean(probabilities), new["batch_stats"]

  for i in valid:
    batch = {name: x[i::4] for name, x in BATCH.items()}
    grads, stats = gradients(APPLY, state.params, batch, keys[i])
    params = jax.tree.map(lambda x, g: x - 0.5 * g, state.params, grads)
    ends.append((params, stats))
  return jax.tree.map(lambda *xs: np.mean(xs, axis=0), *ends)


def test_accumulation_is_the_mean_over_the_valid_micro_batches():
  names = accumulation(drop=True)
  state = names["state"]
  given = jax.tree.map(jnp.copy, state)
  after, _ = names["train_step"](given, ONE_BAD)
  expected = accumulated_by_hand(state, (0, 2, 3))
  for a, b in zip(
    jax.tree.leaves((after.params, after.batch_stats)),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=1e-5)
  assert (after.step, after.attempts, after.loss_scale) == (1, 1, 2.0**9)
  assert not jnp.array_equal(after.key, state.key)


def test_a_void_window_keeps_every_field():
  names = accumulation(drop=False)
  state = names["state"]
  given = jax.tree.map(jnp.copy, state)
  after, _ = names["train_step"](given, ONE_BAD)
  assert after.skipped
  for name in ("params", "batch_stats", "ema", "key", "step"):
    assert is_equal(getattr(after, name), getattr(state, name))


def test_with_multi_steps_a_field_moves_at_each_micro_batch():
  class Averaged(ols.linen.TrainState):
    ema: jax.Array

  inner = optax.MultiSteps(optax.sgd(1.0), 4)
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0))
  ones = jnp.ones(1)
  state = Averaged.create(apply_fn=None, params=ones, tx=tx, ema=ones)
  averages = []
  for _ in range(8):
    state = state.apply_gradients(grads=8 * ones)
    decay = 0.99 ** (1 / 4)
    ema = optax.incremental_update(state.params, state.ema, 1 - decay)
    state = state.replace_if_applied(ema=ema)
    averages.append(float(state.ema[0]))
  # From the fourth to the seventh it moves towards 0, as once with 0.99.
  np.testing.assert_allclose(averages[2:7:4], [1.0, 0.99], rtol=1e-5)


def test_evaluation_uses_the_moving_average():
  evaluate = recipe("Evaluating with the moving average")["evaluate"]
  state = train("A train state")[-1]
  expected, _ = float32_steps()
  variables = {"params": expected["ema"], "batch_stats": state.batch_stats}
  logits = np.asarray(Model().apply(variables, BATCH["x"], train=False))
  accuracy = np.mean(np.argmax(logits, -1) == BATCH["y"])
  assert evaluate(state, BATCH) == accuracy
  reversed_average = jax.tree.map(jnp.negative, state.ema)
  assert evaluate(state.replace(ema=reversed_average), BATCH) != accuracy


def test_the_logged_learning_rate_is_the_one_that_the_step_takes():
  params = jnp.array([4.0, -2.0])
  names = make_names(params=params)
  names = documents.run(
    documents.section(PAGE, "A learning rate to log"), names
  )
  state, momentum = names["state"], np.zeros(2)
  for gradient in (1.0, np.inf, np.nan, 2.0, -1.0):
    rate = names["metrics"](state)["learning_rate"]
    scaled_grads = jnp.full(2, gradient) * state.loss_scale
    after = state.apply_gradients(grads=scaled_grads)
    if np.isfinite(gradient):
      momentum = 0.9 * momentum + gradient
      moved = np.asarray(state.params) - rate * momentum
      np.testing.assert_allclose(after.params, moved, rtol=1e-6)
      assert names["metrics"](after)["learning_rate"] < rate
    else:
      assert names["metrics"](after)["learning_rate"] == rate
    state = after
  assert names["metrics"](state)["skipped_steps"] == 2


def test_under_pmap_devices_step_and_skip_together():
  rng = np.random.default_rng(1)
  batch = {
    "x": rng.normal(size=(32, 16)).astype(np.float32),
    "y": np.arange(32) % 2,
  }
  names = dict(recipe("A train state"))
  start = names["state"].replace(apply_fn=Model().apply)
  text = documents.section(PAGE, "Under pmap")
  assert text.count("adamw(1e-3)") == 1
  text = text.replace("adamw(1e-3)", "sgd(0.5)")
  names = documents.run(
    text, names | {"batch": batch, "jax_utils": jax_utils, "state": start}
  )

  # By hand, without the library: the means over eight devices.
  shards = names["shards"]
  keys = jax.random.split(start.key)
  losses, statistics, gradients = [], [], []
  for i in range(8):
    (loss, new), grads = jax.value_and_grad(names["loss_fn"], has_aux=True)(
      start.params,
      start,
      {name: x[i] for name, x in shards.items()},
      jax.random.fold_in(keys[1], i),
    )
    losses.append(loss)
    statistics.append(new)
    gradients.append(grads)

  def mean(trees):
    return jax.tree.map(lambda *xs: np.mean(xs, axis=0), *trees)

  params = jax.tree.map(lambda x, g: x - 0.5 * g, start.params, mean(gradients))
  for place in range(8):
    first = jax.tree.map(lambda x, i=place: x[i], names["state"])
    chex.assert_trees_all_close(
      (first.params, first.batch_stats, names["loss"][place]),
      (params, mean(statistics), mean(losses)),
      atol=1e-5,
    )
    assert is_equal(
      jax.random.key_data(first.key), jax.random.key_data(keys[0])
    )

  # One device has it.
  bad = {**shards, "x": shards["x"].copy()}
  bad["x"][5, 1, 3] = np.inf
  before = jax.device_get(names["state"].params)
  after, _ = names["train_step"](names["state"], bad)
  assert after.opt_state.skipped.all()
  assert after.loss_scale.tolist() == [2.0**9] * 8
  assert is_equal(after.params, before)


@functools.cache
def bare_state():
  """Returns Flax's own train state without loss scaling, after two steps."""
  names = test_fp8.fp8_names()

  @jax.jit
  def step(state):
    grads = jax.grad(names["loss_fn"])(state.params, state.apply_fn, BATCH)
    return state.apply_gradients(grads=grads)

  state = train_state.TrainState.create(
    apply_fn=names["model"].apply,
    params=names["variables"],
    tx=names["inner"],
  )
  return step(step(state))


def test_flax_own_train_state_is_as_the_page_says():
  ours = test_fp8.fp8_names()
  names = {**ours, "train_state": train_state}
  exec(documents.block(PAGE, "Flax's own train state", "select_on_skip"), names)
  states = [(names["state"], ours["state"])]
  for batch in (BATCH, NAN_BATCH, BATCH):
    stock, other = (
      x["train_step"](state, batch)[0]
      for x, state in zip((names, ours), states[-1], strict=True)
    )
    assert is_equal(stock.params, other.params)
    assert stock.opt_state.skipped == other.skipped == (batch is NAN_BATCH)
    assert stock.step == other.attempts
    states.append((stock, other))
  metrics = ols.loss_scale_metrics(stock.opt_state)
  assert metrics["applied_steps"] == other.step == 2
  check_step = functools.partial(
    ols.instruments.check_step, names["train_step"], stock, BATCH
  )
  assert not check_step().ok
  report = check_step(may_change=["state/step"])
  assert report.ok, report


def test_a_run_with_flax_own_train_state_goes_on_with_ours():
  old = bare_state()
  names = test_fp8.fp8_names() | {"old": old}
  title = "Flax's own train state"
  exec(documents.block(PAGE, title, "with_loss_scaling"), names)
  state = names["state"]
  assert (state.step, state.attempts, state.loss_scale) == (2, 0, 2.0**10)
  assert is_equal(state.params, old.params)
  assert is_equal(state.opt_state.inner_state, old.opt_state)
  assert names["train_step"](state, BATCH)[0].step == 3


def test_flax_own_train_state_alone_replaces_fp8_values_on_a_skip():
  names = test_fp8.fp8_names()
  state = train_state.TrainState.create(
    apply_fn=names["model"].apply, params=names["variables"], tx=names["tx"]
  )
  after, _ = names["train_step"](state, NAN_BATCH)
  assert after.opt_state.skipped
  assert is_equal(after.params["params"], state.params["params"])
  (values,) = after.params[test_fp8.FP8].values()
  history = values["output_grad_amax_history"]
  assert (len(history), bool(jnp.isnan(history[0]))) == (1024, True)
