"""The recipes for Flax NNX do what their page says."""

import difflib
import functools
import textwrap

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits
from tests.support import equations
from tests.support import to_numpy

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/nnx.md")
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
  "y": np.arange(8) % 2,
}
# Float16 does not hold it.
BAD_BATCH = {**BATCH, "x": 1e6 * BATCH["x"]}
BATCHES = (BATCH, BAD_BATCH, BATCH, BATCH)
# S is a power of two and float32 has range, so there it changes no bit.
INFINITE_BATCH = {**BATCH, "x": np.full((8, 4), np.inf, np.float32)}


class Model(nnx.Module):
  def __init__(self, dtype=None):
    rngs = nnx.Rngs(0)
    options = {"dtype": dtype, "rngs": rngs}
    self.dense = nnx.Linear(4, 4, use_bias=False, **options)
    self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(4, 2, **options)

  def __call__(self, x):
    return self.head(self.dropout(self.norm(self.dense(x))))


def make_names(**names):
  """Returns what the page takes for granted, and its first recipe's loss."""
  rule = ols.DynamicLossScale(2.0**10)
  names = {
    "batch": BATCH,
    "jax": jax,
    "jnp": jnp,
    "model": Model(jnp.float16),
    "nnx": nnx,
    "ocp": ocp,
    "ols": ols,
    "optax": optax,
    "rule": rule,
    "tx": ols.loss_scaling(optax.sgd(0.5), rule),
    **names,
  }
  return documents.run(documents.section(PAGE, "A train step"), names)


def recipe(title, **names):
  return documents.run(documents.section(PAGE, title), make_names(**names))


def values(node):
  """Returns copies of all values of a node, by their paths."""
  state = nnx.to_flat_state(nnx.as_pure(nnx.state(node)))
  return {path: to_numpy(value) for path, value in state}


def assert_close(left, right, atol):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=atol), left, right
  )


@functools.cache
def bare_training(steps):
  """Returns the values of a model trained without this library, in float32."""
  model = Model()
  optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
  loss_fn = make_names()["loss_fn"]

  @nnx.jit
  def step(model, optimizer, batch):
    _, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)

  for _ in range(steps):
    step(model, optimizer, BATCH)
  return values(model)


def test_the_page_begins_with_an_optimizer():
  text = PAGE.partition("## ")[0]
  names = documents.run(text, {"ols": ols, "optax": optax})
  assert names["tx"].init({"w": jnp.ones(1)}).applied_steps == 0


def test_a_train_step_is_the_bare_one_bit_for_bit_and_skips_as_a_whole():
  names = make_names(model=Model())
  model, optimizer = names["model"], names["optimizer"]
  for i, batch in enumerate((BATCH, INFINITE_BATCH, BATCH)):
    before = values(model)
    names["train_step"](model, optimizer, batch)
    if i == 1:
      assert_same_bits(values(model), before)
  assert_same_bits(values(model), bare_training(2))
  assert ols.get_loss_scale(optimizer.opt_state) == 2.0**9


def test_a_train_step_in_float16_follows_float32():
  names = make_names()
  model, optimizer = names["model"], names["optimizer"]
  for batch in BATCHES:
    loss = names["train_step"](model, optimizer, batch)
    assert loss.dtype == jnp.float32
  assert optimizer.opt_state.skipped_steps[...] == 1
  assert_close(values(model), bare_training(3), atol=3e-3)


def test_the_step_is_checked_and_what_is_forgotten_is_named():
  title = "Is the step right?"
  names = recipe(title)
  assert names["report"].ok
  code = documents.block(PAGE, "A train step", "def train_step")
  scaled = "ols.nnx.scaled_value_and_grad(loss_fn, optimizer)"
  block = "with ols.nnx.undo_on_skip(optimizer, model):"
  mistakes = [(scaled, "nnx.value_and_grad(loss_fn)"), (block, "if True:")]
  for (right, wrong), said in zip(
    mistakes, documents.quoted(PAGE, title), strict=True
  ):
    assert code.count(right) == 1
    step = f"```python\n{code.replace(right, wrong)}```"
    step = documents.run(step, names)["train_step"]
    report = ols.instruments.check_step(
      step, names["model"], names["optimizer"], BATCH
    )
    assert said in documents.one_line(report)


def test_the_learning_rate_is_read_where_the_schedule_stands():
  names = recipe("What the optimizer counts")
  model, optimizer = names["model"], names["optimizer"]
  for batch in BATCHES:
    names["train_step"](model, optimizer, batch)
  metrics = names["metrics"](optimizer)
  assert optimizer.step[...] == 4
  assert metrics["applied_steps"] == 3
  counts = optax.tree.get_all_with_path(
    nnx.as_pure(optimizer.opt_state.inner_state), "count"
  )
  assert [int(count) for _, count in counts] == [3]
  expected = 0.5 * 1e-2 * (1 + np.cos(np.pi * 3 / 1000))
  np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-6)
  assert not isinstance(metrics["skipped"], nnx.Variable)
  assert not optimizer.opt_state.skipped[...]


def test_an_average_and_random_keys_move_with_the_model():
  names = recipe("Other objects that the step changes")
  model, optimizer, ema, rngs = (
    names[name] for name in ("model", "optimizer", "ema", "rngs")
  )
  average = values(nnx.state(model, nnx.Param))
  for batch in BATCHES:
    before = values((model, ema, rngs))
    names["train_step"](model, optimizer, ema, rngs, batch)
    if batch is BAD_BATCH:
      assert_same_bits(values((model, ema, rngs)), before)
      continue
    params = values(nnx.state(model, nnx.Param))
    average = jax.tree.map(
      lambda old, new: 0.99 * old + 0.01 * new, average, params
    )
  assert_close(values(nnx.state(ema, nnx.Param)), average, atol=1e-6)
  assert rngs.noise.count[...] == 3


def test_only_the_adapters_are_trained():
  class Adapted(nnx.Module):
    def __init__(self):
      self.dense = nnx.LoRALinear(
        4, 2, lora_rank=2, dtype=jnp.float16, rngs=nnx.Rngs(0)
      )

    def __call__(self, x):
      return self.dense(x)

  model = Adapted()
  before = values(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  recipe("A part of the parameters", model=model)
  assert_same_bits(values(nnx.state(model, nnx.Not(nnx.LoRAParam))), before)
  # The adapter's second factor starts as zeros; this is softmax regression.
  reference = Adapted()
  inputs = np.float64(BATCH["x"] @ reference.dense.lora.lora_a[...])
  logits = np.float64(
    BATCH["x"] @ reference.dense.kernel[...] + reference.dense.bias[...]
  )
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  gradient = inputs.T @ (probabilities - np.eye(2)[BATCH["y"]]) / 8
  np.testing.assert_allclose(
    model.dense.lora.lora_b[...], -0.5 * gradient, atol=2e-3
  )


def test_the_norm_is_that_of_unscaled_gradients():
  step = documents.block(PAGE, "A train step", "def train_step")
  step = step[step.index("@nnx.jit") :]
  code = documents.block(PAGE, "The true gradient norm", "norm = ")
  update = "    optimizer.update(model, scaled_grads)\n"
  assert update in step
  step = step.replace(update, textwrap.indent(code, "    ")).replace(
    "return loss", "return loss, norm"
  )
  names = make_names(model=Model())
  exec(step, names)
  expected = nnx.jit(nnx.grad(names["loss_fn"]))(Model(), BATCH)
  _, norm = names["train_step"](names["model"], names["optimizer"], BATCH)
  np.testing.assert_allclose(
    norm, optax.tree.norm(nnx.as_pure(expected)), rtol=1e-5
  )
  _, norm = names["train_step"](
    names["model"], names["optimizer"], INFINITE_BATCH
  )
  assert not np.isfinite(norm)


def accumulated_by_hand(valid):
  """Returns the values after a step over micro-batches, without the library.

  Args:
    valid: the micro-batches of which the mean is taken, out of four.
  """
  loss_fn, model = make_names()["loss_fn"], Model()
  before = values(nnx.state(model, nnx.Param))
  grads = []
  for i in valid:  # Each changes the statistics and the count of the model.
    batch = {name: x[i::4] for name, x in BATCH.items()}
    grads.append(values(nnx.grad(loss_fn)(model, batch)))
  grads = jax.tree.map(lambda *xs: np.mean(xs, axis=0), *grads)
  return values(model) | jax.tree.map(lambda x, g: x - 0.5 * g, before, grads)


def dropping():
  """Returns the names of the recipe that drops a bad micro-batch."""
  text = documents.section(PAGE, "Accumulation")
  line = "ols.accumulate(value_and_grad, microbatches=4, drop=True)"
  assert line in text
  step = documents.blocks(text)[0].replace(
    line.replace(", drop=True", ""), line
  )
  assert line in step
  return documents.run(f"```python\n{step}```", make_names(model=Model()))


def test_accumulation_is_one_new_line_and_three_that_differ():
  text = documents.section(PAGE, "Accumulation")
  assert "One new line" in text and "Three lines differ" in text
  first = documents.block(PAGE, "A train step", "def train_step")
  first = first[first.index("@nnx.jit") :]
  (step,) = documents.blocks(text)
  assert changed_lines(first, step) == 4
  assert len(step.splitlines()) == len(first.splitlines()) + 1


def test_micro_batches_change_the_model_in_turn_and_a_bad_one_does_not():
  names = dropping()
  model, optimizer = names["model"], names["optimizer"]
  # The examples 1 and 5 are the second of four micro-batches.
  bad = {**BATCH, "x": BATCH["x"].copy()}
  bad["x"][5] = np.inf
  _, overflow = names["train_step"](model, optimizer, bad)
  assert overflow.flags.tolist() == [False, True, False, False]
  expected = accumulated_by_hand((0, 2, 3))
  assert expected["dropout", "rngs", "count"] == 3
  counts = {x for x in expected if "rngs" in x}
  trained = values(model)
  assert_close(
    {x: y for x, y in trained.items() if x not in counts},
    {x: y for x, y in expected.items() if x not in counts},
    atol=1e-5,
  )
  for x in counts:
    assert_same_bits(trained[x], expected[x])
  assert ols.get_loss_scale(optimizer.opt_state) == 2.0**9
  assert optimizer.opt_state.applied_steps[...] == 1


@pytest.mark.parametrize("drop", [False, True])
def test_a_discarded_window_is_skipped_as_a_whole(drop):
  names = dropping() if drop else recipe("Accumulation", model=Model())
  model, optimizer = names["model"], names["optimizer"]
  before = values(model)
  bad = {**BATCH, "x": BATCH["x"].copy()}
  bad["x"][5] = np.inf
  names["train_step"](model, optimizer, INFINITE_BATCH if drop else bad)
  assert_same_bits(values(model), before)
  assert optimizer.opt_state.skipped[...]


def test_without_the_function_for_nnx_an_object_is_refused():
  model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(make_names(model=model)["loss_fn"], 1024.0),
    microbatches=4,
  )
  with pytest.raises(ValueError, match="in place"):
    value_and_grad(model, BATCH)


def test_pure_functions_are_the_bare_step_bit_for_bit_and_skip_as_a_whole():
  names = recipe("Pure functions under jax.jit", model=Model())
  state = tuple(names[name] for name in ("params", "rest", "opt_state"))
  for batch in (BATCH, INFINITE_BATCH, BATCH):
    *state, _ = names["train_step"](*state, batch)
  params, rest, opt_state = state
  assert opt_state.skipped_steps == 1
  assert_same_bits(
    values(nnx.merge(names["graphdef"], params, rest)), bare_training(2)
  )


def changed_lines(old, new):
  """Returns how many lines of one block of code are new in another."""
  lines = difflib.ndiff(old.splitlines(), new.splitlines())
  return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in lines)


def test_a_model_in_float32_is_autocast():
  title = "A model written in float32"
  names = recipe(title, model=Model())
  step = documents.block(PAGE, "A train step", "def train_step")
  step = step[step.index("@nnx.jit") :]
  exec(step.replace("grad(loss_fn", "grad(mixed_loss_fn"), names)
  both = names["model"], names["optimizer"]
  graphdef, state = nnx.split(both)
  jaxpr = jax.make_jaxpr(
    lambda state: names["train_step"](*nnx.merge(graphdef, state), BATCH)
  )(state)
  products = [
    {x.aval.dtype for x in equation.invars}
    for equation in equations(jaxpr)
    if equation.primitive.name == "dot_general"
  ]
  assert products == [{jnp.dtype(jnp.float16)}] * len(products) != []
  for batch in BATCHES:
    before = values(both[0])
    names["train_step"](*both, batch)
    if batch is BAD_BATCH:
      assert_same_bits(values(both[0]), before)
  assert both[1].opt_state.skipped_steps[...] == 1
  assert_close(values(both[0]), bare_training(3), atol=3e-3)


def test_autocast_around_the_model_in_a_loss_is_that_around_the_loss():
  names = recipe("A model written in float32", model=Model())
  ends = []
  for loss_fn in (names["outer_loss_fn"], names["mixed_loss_fn"]):
    model = Model()
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, BATCH)
    ends.append((loss, values(grads), values(model)))
  assert_same_bits(*ends)


def test_plain_autocast_takes_a_model_or_a_loss_that_changes_nothing():
  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  names = make_names(model=model)
  loss_fn = names["loss_fn"]

  def outer_loss_fn(model, batch):
    return loss_fn(ols.autocast(model, "O1"), batch)

  @nnx.jit
  def differentiate(model, optimizer):
    return [
      ols.nnx.scaled_value_and_grad(fun, optimizer)(model, BATCH)
      for fun in (ols.autocast(loss_fn, "O1"), outer_loss_fn, loss_fn)
    ]

  *mixed, (expected, wide_grads) = differentiate(model, names["optimizer"])
  for loss, scaled_grads in mixed:
    assert loss != expected
    np.testing.assert_allclose(loss, expected, atol=1e-3)
    np.testing.assert_allclose(
      scaled_grads["kernel"][...], wide_grads["kernel"][...], atol=5
    )


def test_plain_autocast_refuses_statistics_and_keys_by_name():
  loss_fn = make_names()["loss_fn"]
  changing = {
    r"\[0\]\.norm\.mean": nnx.Dict(norm=nnx.BatchNorm(4, rngs=nnx.Rngs(0))),
    r"\[0\]\.norm\.rngs\.count": nnx.Dict(
      norm=nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    ),
  }
  for place, holder in changing.items():
    mixed = ols.autocast(lambda model, batch: loss_fn(model.norm, batch), "O1")
    with pytest.raises(ValueError, match=f"{place}.*nnx.autocast"):
      mixed(holder, BATCH)


def test_a_pure_function_of_a_model_in_float32_is_autocast():
  names = recipe("Pure functions under jax.jit", model=Model())
  line = 'ols.autocast(pure_loss_fn, "O1")'
  text = documents.section(PAGE, "Pure functions under jax.jit")
  assert line in text
  step = documents.blocks(text)[0].partition("@jax.jit")[2]
  step = step.replace("pure_loss_fn", line)
  names = documents.run(f"```python\n@jax.jit{step}```", names)
  state = tuple(names[name] for name in ("params", "rest", "opt_state"))
  assert "f16" in str(jax.make_jaxpr(names["train_step"])(*state, BATCH))
  for batch in BATCHES:
    *state, _ = names["train_step"](*state, batch)
  params, rest, opt_state = state
  assert opt_state.skipped_steps == 1
  assert_close(
    values(nnx.merge(names["graphdef"], params, rest)),
    bare_training(3),
    atol=3e-3,
  )


def test_a_training_resumed_reaches_the_same_bits(tmp_path):
  names = recipe("Saving and resuming")
  both = names["model"], names["optimizer"]
  for batch in BATCHES[:2]:
    names["train_step"](*both, batch)
  names["save"](tmp_path / "checkpoint", *both)
  model = Model(jnp.float16)
  resumed = model, nnx.Optimizer(model, names["tx"], wrt=nnx.Param)
  names["restore"](tmp_path / "checkpoint", *resumed)
  assert_same_bits(values(resumed), values(both))
  for batch in BATCHES[1:]:
    for each in (both, resumed):
      names["train_step"](*each, batch)
  assert_same_bits(values(resumed), values(both))
  assert ols.get_loss_scale(both[1].opt_state) == 2.0**8


@pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="The error is that of a CPU."
)
def test_attention_in_float16_on_a_cpu_fails_and_works_as_the_page_says():
  title = "Attention in float16 on a CPU"
  names = documents.run(
    documents.section(PAGE, title), {"jnp": jnp, "nnx": nnx}
  )
  (said,) = documents.quoted(PAGE, title)
  x = jnp.ones((2, 5, 8))

  def loss_fn(model, x):
    return jnp.mean(jnp.float32(model(x)) ** 2)

  def loss(fun=loss_fn, **kwargs):
    model = nnx.MultiHeadAttention(
      2, in_features=8, decode=False, rngs=nnx.Rngs(0), **kwargs
    )
    return nnx.jit(nnx.value_and_grad(fun))(model, x)[0]

  with pytest.raises(ValueError, match=said):
    loss(dtype=jnp.float16)
  expected = loss()
  mixed = ols.nnx.autocast(loss_fn, dtype=jnp.float16)
  for found in (
    loss(dtype=jnp.bfloat16),
    loss(mixed),
    loss(dtype=jnp.float16, attention_fn=names["in_float32"]),
    loss(dtype=jnp.float16, dropout_rate=0.5, deterministic=True),
  ):
    np.testing.assert_allclose(found, expected, rtol=2e-2)
