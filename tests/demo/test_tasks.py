"""The tasks: real data, held-out apart, and models that compute as told."""

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets

import optax_lossscale as ols
from optax_lossscale.demo import brier
from optax_lossscale.demo import digits
from optax_lossscale.demo import text
from optax_lossscale.demo import training
from tests import support

each_task = pytest.mark.parametrize("name", ["brier", "text", "digits"])


@pytest.fixture(scope="module")
def tasks():
  """The real tasks, made once."""
  return {
    "brier": brier.make_task(quick=True),
    "text": text.make_task(quick=True),
    "digits": digits.make_task(quick=True),
  }


def assert_products_are_in(
  dtype, task, *, model_dtype, transform=lambda fun: fun
):
  """Of the gradient of the loss: forward and backward."""
  model = task.model(jnp.dtype(model_dtype))
  inputs, labels = task.held_out[0]
  batch = inputs[:2], labels[:2]
  params = jax.eval_shape(model.init, jax.random.key(0), batch[0])
  gradient = jax.grad(transform(training.make_loss_fn(model, task.loss)))
  jaxpr = jax.make_jaxpr(gradient)(params, batch)
  operands = [
    (equation.primitive.name, variable.aval.dtype.name)
    for equation in support.equations(jaxpr)
    if equation.primitive.name in ("dot_general", "conv_general_dilated")
    for variable in (*equation.invars, *equation.outvars)
  ]
  # Forward, and backward to the weights and to the activations, of two layers
  # at least.
  assert len(operands) >= 3 * 3 * 2
  assert {dtype for _, dtype in operands} == {dtype}
  kinds = {kind for kind, _ in operands}
  assert ("conv_general_dilated" in kinds) == (task.name == "digits")
  assert {aval.dtype.name for aval in jaxpr.out_avals} == {"float32"}


def test_text_is_the_standard_library():
  sources = text.read_sources()
  assert sources == text.read_sources()
  assert len(sources) == 4_000_000
  assert "class ArgumentParser(" in sources
  assert "import pytest" not in sources


def test_sources_are_read_in_path_order_and_only_the_librarys_own(
  tmp_path, monkeypatch
):
  names = ["b.py", "a/c.py", "a.txt", "a/test/d.py", "site-packages/e.py"]
  for name in names:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f"<{path.stem}>")
  found = sorted(tmp_path.rglob("*.py"), reverse=True)
  monkeypatch.setattr("pathlib.Path.rglob", lambda *_: iter(found))
  monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
  monkeypatch.setattr(text, "_CHARACTERS", 5)
  assert text.read_sources() == "<c><b"


def test_every_character_has_its_symbol():
  encoded = text.encode("\t\n ~aé\x7f\0€😀")
  expected = [0, 1, 2, 96, 67, *[text.UNKNOWN] * 5]
  assert encoded.tolist() == expected
  assert len(text.SYMBOLS) == text.UNKNOWN == 97


def test_held_out_text_is_the_last_tenth():
  data = text.encode(text.read_sources())
  training_part, held_out = text.split(data)
  np.testing.assert_array_equal(np.concatenate([training_part, held_out]), data)
  assert len(held_out) == 400_000


def test_batches_of_text_come_from_the_training_part(tasks):
  parts = text.split(text.encode(text.read_sources()))
  training_part, held_out = map(bytes, parts)
  inputs, labels = next(tasks["text"].batches(0))
  assert inputs.shape == labels.shape == (192, text.CONTEXT)
  np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
  for row, last in zip(inputs, labels[:, -1], strict=True):
    assert bytes([*row.tolist(), last]) in training_part
  for inputs, labels in tasks["text"].held_out:
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    assert bytes(inputs[0].tolist()) in held_out
    assert bytes(inputs[-1].tolist()) in held_out


def test_language_model_predicts_the_character_after_eight(tasks):
  parts = text.split(text.encode(text.read_sources()))
  batches = next(tasks["brier"].batches(0)), *tasks["brier"].held_out
  for part, (inputs, labels) in zip(map(bytes, parts), batches, strict=True):
    assert inputs.shape == (len(labels), 8)
    for row, label in zip(inputs[::500], labels[::500], strict=True):
      assert bytes([*row.tolist(), label]) in part


def test_brier_score_is_the_squared_error_of_each_probability():
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
  errors = brier.brier_score(logits, jnp.array([0]))
  np.testing.assert_allclose(errors, [[0.25, 0.0625, 0.0625]], rtol=1e-6)


@pytest.mark.slow
def test_float16_loses_the_first_gradients_of_the_brier_score(tasks):
  task = tasks["brier"]
  batch = next(task.batches(0))

  def gradients(precision, scale):
    model = task.model(jnp.dtype(precision))
    params = model.init(jax.random.key(0), batch[0][:1])
    loss_fn = training.make_loss_fn(model, task.loss)
    found = jax.jit(jax.grad(lambda x: scale * loss_fn(x, batch)))(params)
    return jax.flatten_util.ravel_pytree(found)[0] / scale

  true = gradients("float32", 1)
  assert support.relative_error(gradients("float16", 1), true) > 0.9
  assert support.relative_error(gradients("float16", 1024), true) < 0.2


def test_digits_are_those_of_scikit_learn(tasks):
  images, labels = digits.load()
  assert images.shape == (1797, 32, 32, 1) and images.dtype == np.float32
  assert images.min() == 0 and images.max() == 1
  original = sklearn.datasets.load_digits()
  np.testing.assert_array_equal(labels, original.target)
  blocks = images.reshape(-1, 8, 4, 8, 4).mean((2, 4))
  correlation = np.corrcoef(blocks.ravel(), original.images.ravel())
  assert correlation[0, 1] > 0.95


def test_held_out_digits_are_not_trained_on():
  images, labels = digits.load()
  numbers = np.arange(len(labels))
  (_, training_part), (_, held_out) = digits.split(images, numbers)
  assert sorted([*training_part, *held_out]) == numbers.tolist()
  assert len(held_out) == 359
  (first, _), _ = digits.split(images, numbers)
  np.testing.assert_array_equal(first, images[training_part])


@each_task
def test_seed_decides_the_batches(name, tasks):
  first, same, other = (next(tasks[name].batches(seed)) for seed in (5, 5, 6))
  chex.assert_trees_all_equal(first, same)
  assert not np.array_equal(first[0], other[0])


@pytest.mark.slow
@each_task
def test_precision_does_not_change_the_first_parameters(name, tasks):
  inputs = tasks[name].held_out[0][0][:1]
  key = jax.random.key(0)
  wide, narrow = (
    jax.jit(tasks[name].model(jnp.dtype(dtype)).init)(key, inputs)
    for dtype in ("float32", "float16")
  )
  chex.assert_trees_all_equal(wide, narrow)
  assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype("float32")}


@pytest.mark.slow
@each_task
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_model_computes_in_its_precision(name, precision, tasks):
  assert_products_are_in(precision, tasks[name], model_dtype=precision)


@pytest.mark.slow
@each_task
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_level_lowers_every_product_of_the_float32_model(name, level, tasks):
  assert_products_are_in(
    "bfloat16",
    tasks[name],
    model_dtype="float32",
    transform=lambda fun: ols.autocast(fun, level, dtype=jnp.bfloat16),
  )


@each_task
def test_activations_are_float16_until_the_softmax(name, tasks):
  model = tasks[name].model(jnp.dtype("float16"))
  inputs = tasks[name].held_out[0][0][:2]
  params = jax.eval_shape(model.init, jax.random.key(0), inputs)
  logits, outputs = jax.eval_shape(
    lambda params: model.apply(
      params, inputs, capture_intermediates=True, mutable=["intermediates"]
    ),
    params,
  )
  assert logits.dtype == jnp.float16
  assert {x.dtype for x in jax.tree.leaves(outputs)} == {jnp.dtype("float16")}


@pytest.mark.long
@pytest.mark.slow
def test_loss_scaling_repairs_float16_where_the_mean_is_over_many_tokens():
  task = text.make_task()
  gradients, params = {}, None
  for precision, scale in (("float32", 1), ("float16", 1), ("float16", 1024)):
    model = task.model(jnp.dtype(precision))
    loss_fn = training.make_loss_fn(model)
    batch = next(task.batches(0))
    # Whatever the precision, they are the same.
    params = params or jax.jit(model.init)(jax.random.key(0), batch[0][:1])
    grads = jax.jit(jax.grad(lambda p: scale * loss_fn(p, batch)))(params)  # noqa: B023
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])
    gradients[precision, scale] = flat / scale
  true = gradients["float32", 1]
  errors = {
    key: np.linalg.norm(value - true) / np.linalg.norm(true)
    for key, value in gradients.items()
  }
  assert errors["float16", 1024] < 0.7 * errors["float16", 1]
