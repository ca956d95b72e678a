"""docs/guides/nnx.md: its steps make the step of float32."""

import difflib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from tests import documents
from tests.autocast.programs import products
from tests.support import to_bits

pytestmark = pytest.mark.slow

PATH = "docs/guides/nnx.md"
PAGE = documents.read(PATH)
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
  "y": np.arange(8) % 2,
}


class Model(nnx.Module):
  def __init__(self, dtype=None, linear=nnx.Linear, **kwargs):
    rngs = nnx.Rngs(0)
    options = {"dtype": dtype, "rngs": rngs}
    self.dense = linear(4, 4, use_bias=False, **options, **kwargs)
    self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(4, 2, **options)

  def __call__(self, x):
    return self.head(self.dropout(self.norm(self.dense(x))))


def begin():
  """Returns the page after its first train step."""
  names = {"batch": BATCH, "model": Model(jnp.float16), "nnx": nnx, "ocp": ocp}
  page = documents.Page(PATH, documents.training() | names)
  page.run(count=1)
  page.run("A train step")
  return page


def bits(*nodes):
  return to_bits(nnx.as_pure(nnx.state(nodes)))


def train_step_of(text):
  """Returns the lines of the train step in some code."""
  code = next(x for x in documents.blocks(text) if "def train_step" in x)
  return code[code.index("@nnx.jit") :].splitlines()


def test_each_step_has_the_loss_of_float32(tmp_path):
  page = begin()
  expected = page["loss_fn"](Model(), BATCH)

  def optimizer(model=None):
    model = model or Model(jnp.float16)
    return model, nnx.Optimizer(model, page["tx"], wrt=nnx.Param)

  def assert_trains(*given):
    loss = page["train_step"](*given)
    loss = loss[0] if isinstance(loss, tuple) else loss
    np.testing.assert_allclose(loss, expected, rtol=0.03)

  assert_trains(*optimizer(), BATCH)
  page.run("Is the step right?")
  assert page["report"].ok

  page.run("A model written in float32")
  for name in ("mixed_loss_fn", "outer_loss_fn"):
    model = Model()
    found = products(nnx.jit(page[name]), model, BATCH)
    assert set(found) == {"float16"}, name
    np.testing.assert_allclose(page[name](Model(), BATCH), expected, rtol=0.03)

  page.run("Attention in float16 on a CPU")
  assert_attention_works(page["in_float32"])

  page.run("What the optimizer counts")
  metrics = page["metrics"](page["optimizer"])
  assert metrics["learning_rate"] == np.float32(1e-2)

  page.run("Other objects that the step changes")
  others = page["ema"], page["rngs"]
  assert_trains(*optimizer(), *others, BATCH)
  assert page["rngs"].noise.count[...] == 1

  assert_parts_of_the_parameters_train(page)

  model, nnx_optimizer = optimizer()
  given = {"model": model, "optimizer": nnx_optimizer}
  _, scaled_grads = ols.nnx.scaled_value_and_grad(
    page["loss_fn"], nnx_optimizer
  )(model, BATCH)
  page.run("The true gradient norm", scaled_grads=scaled_grads, **given)
  assert 0.1 < page["norm"] < 10

  page.run("Accumulation")
  model, nnx_optimizer = optimizer()
  _, overflow = page["train_step"](model, nnx_optimizer, BATCH)
  assert overflow.valid == 4 and model.dropout.rngs.count[...] == 4

  page.run("Pure functions under jax.jit", model=Model(jnp.float16))
  state = page["params"], page["rest"], page["opt_state"]
  *_, loss = page["train_step"](*state, BATCH)
  np.testing.assert_allclose(loss, expected, rtol=0.03)

  assert_a_checkpoint_is_restored(page, tmp_path, optimizer(), optimizer())
  page.end()


def assert_parts_of_the_parameters_train(page):
  """Asserts that the page's optimizer of LoRA moves nothing else."""
  adapted = Model(jnp.float16, nnx.LoRALinear, lora_rank=2)
  kernel = adapted.dense.kernel[...]
  page.run("A part of the parameters", model=adapted, **step_of(begin()))
  assert to_bits(adapted.dense.kernel[...]) == to_bits(kernel)
  assert adapted.dense.lora.lora_b[...].any()


def assert_a_checkpoint_is_restored(page, folder, trained, other):
  """Asserts that saved objects come back bit for bit."""
  page.run("Saving and resuming")
  step_of(begin())["train_step"](*trained, BATCH)
  assert bits(*trained) != bits(*other)
  page["save"](folder / "checkpoint", *trained)
  page["restore"](folder / "checkpoint", *other)
  assert bits(*trained) == bits(*other)


def step_of(page):
  return {"train_step": page["train_step"], "tx": page["tx"]}


def assert_attention_works(in_float32):
  """Asserts what the page says of attention in float16 on a CPU."""
  x = jnp.ones((2, 5, 8))

  def attention(**kwargs):
    model = nnx.MultiHeadAttention(
      2, in_features=8, decode=False, rngs=nnx.Rngs(0), **kwargs
    )
    return nnx.jit(lambda model: model(x))(model)

  if jax.default_backend() == "cpu":
    (said,) = documents.quoted(PAGE, "Attention in float16 on a CPU")
    with pytest.raises(ValueError, match=said):
      attention(dtype=jnp.float16)
  found = attention(dtype=jnp.float16, attention_fn=in_float32)
  np.testing.assert_allclose(found, attention(), rtol=0.02, atol=0.01)


def test_accumulation_is_one_new_line_and_three_that_differ():
  text = documents.section(PAGE, "Accumulation")
  assert "One new line" in text and "Three lines differ" in text
  old, new = train_step_of(PAGE), train_step_of(text)
  changed = [x for x in difflib.ndiff(old, new) if x.startswith("+ ")]
  assert (len(changed), len(new)) == (4, len(old) + 1)


def test_the_step_is_checked_and_what_is_forgotten_is_named():
  page = begin()
  code = "\n".join(train_step_of(PAGE))
  scaled = "ols.nnx.scaled_value_and_grad(loss_fn, optimizer)"
  block = "with ols.nnx.undo_on_skip(optimizer, model):"
  mistakes = [(scaled, "nnx.value_and_grad(loss_fn)"), (block, "if True:")]
  for (right, wrong), said in zip(
    mistakes, documents.quoted(PAGE, "Is the step right?"), strict=True
  ):
    assert code.count(right) == 1
    exec(code.replace(right, wrong), page.names)
    report = ols.instruments.check_step(
      page["train_step"], page["model"], page["optimizer"], BATCH
    )
    assert said in documents.one_line(report)
