"""`python -m benchmarks autocast`: that it counts right, and what it writes."""

import json

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import autocast
from benchmarks import autocast_counts as counts
from benchmarks import autocast_models as models
from benchmarks import gpt2

TINY = gpt2.SIZES["tiny"]
WEIGHTS = np.ones((4, 4), np.float32)


def mixed(x, weights):
  """A product in float16 and one in float32."""
  y = x.astype(jnp.float16) @ weights.astype(jnp.float16)
  return jnp.tanh(y).astype(jnp.float32) @ x


def make_loss_fn(dtype):
  """A model with a `dtype=`."""

  def loss_fn(params, batch):
    x = batch.astype(dtype)
    for weights in params:
      x = jnp.tanh(x @ weights.astype(dtype))
    return jnp.mean(x.astype(jnp.float32))

  return loss_fn


def test_conversions_between_floats_are_counted():
  def function(x):
    return x.astype(jnp.int32), x.astype(jnp.float16), x * jnp.float16(2)

  jaxpr = jax.make_jaxpr(function)(WEIGHTS)
  assert counts.float_conversions(jaxpr) == 1


def test_what_stands_in_a_loop_is_counted_once():
  def function(x):
    step = jax.jit(lambda x: mixed(x, x))
    return lax.scan(lambda x, _: (step(x), None), x, length=5)

  jaxpr = jax.make_jaxpr(function)(WEIGHTS)
  assert counts.float_conversions(jaxpr) == 3
  assert counts.products(jaxpr, jnp.float16) == (1, 2)


def test_a_product_of_float16_and_float32_is_not_in_float16():
  jaxpr = jax.make_jaxpr(
    lambda x: lax.dot(
      x.astype(jnp.float16), x, preferred_element_type=jnp.float32
    )
  )(WEIGHTS)
  assert counts.products(jaxpr, jnp.float16) == (0, 1)


def test_products_of_integers_are_none_of_float16():
  integers = np.ones((4, 4), np.int32)
  jaxpr = jax.make_jaxpr(jnp.matmul)(integers, integers)
  assert counts.products(jaxpr, jnp.float16) == (0, 0)


def test_kept_is_what_is_no_argument():
  def function(weights, x):
    y = x.astype(jnp.float16) @ weights.astype(jnp.float16)
    return jnp.sin(y) * y

  kept = counts.kept_for_backward(function, WEIGHTS, WEIGHTS)
  assert {x.dtype for x in kept} == {jnp.dtype(jnp.float16)}
  # Both factors of the product in float16, y, its sine and its cosine.
  assert counts.bytes_kept(function, WEIGHTS, WEIGHTS) == 5 * 16 * 2
  assert counts.bytes_kept(jnp.matmul, WEIGHTS, WEIGHTS) == 0


def test_a_product_costs_its_multiplications_and_additions():
  lowered = jax.jit(jnp.matmul).lower(WEIGHTS, WEIGHTS)
  assert counts.costs(lowered).flops == 2 * 4**3
  assert counts.costs(lowered).bytes_accessed == 3 * 16 * 4
  assert counts.costs(lowered.compile()).temporaries is not None


@pytest.fixture(scope="module")
def content(tmp_path_factory):
  """What the command wrote of a small model."""
  path = tmp_path_factory.mktemp("benchmark") / "new" / "autocast.json"
  patch = pytest.MonkeyPatch()
  two_layers = models.Model(make_loss_fn, [WEIGHTS, WEIGHTS], WEIGHTS)
  patch.setattr(
    models, "makers", lambda **_: {"two layers": lambda: two_layers}
  )
  patch.setattr(autocast, "LEVELS", ("O0", "O1"))
  try:
    assert command.main(["autocast", "--out", str(path.parent)]) == 0
  finally:
    patch.undo()
  return json.loads(path.read_text())


def test_every_model_has_products_in_float16_by_hand_and_a_float32_loss():
  def loss_of(make):
    model = make()
    return model.make_loss_fn(jnp.float16)(model.params, model.batch)

  for make in models.makers(tiny=True).values():
    # Traced with its initialization, of which nothing is compiled so.
    jaxpr = jax.make_jaxpr(lambda make=make: loss_of(make))()
    assert counts.products(jaxpr, jnp.float16).lowered > 0
    (loss,) = jaxpr.out_avals
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_every_level_is_beside_float32_and_by_hand(content):
  rows = content["models"]["two layers"]
  assert list(rows) == [autocast.FLOAT32, autocast.BY_HAND, "O0", "O1"]
  by_hand = rows[autocast.BY_HAND]["over_by_hand"]
  assert by_hand["kept"] == by_hand["compiled"]["flops"] == 1


def test_o0_is_float32_and_o1_has_every_product_in_float16(content):
  rows = content["models"]["two layers"]
  for name, row in rows.items():
    # Two, and the gradients of two weights and of what is between them.
    assert row["all_products"] == 5
    is_low = name not in (autocast.FLOAT32, "O0")
    assert row["products"] == 5 * is_low
    assert (row["conversions"] > 0) == is_low
    assert abs(row["loss_difference"]) < 1e-2
  assert rows["O0"]["loss_difference"] == 0


def test_the_model_that_is_timed_computes_its_products_in_float16():
  model = gpt2.Autocast(gpt2.GPT2(TINY, "float32"), "O1")
  gradient = jax.value_and_grad(gpt2.make_loss_fn(model))
  batch = gpt2.make_batches(TINY, batch=1, length=8, count=1, seed=0)[0]
  params = jax.eval_shape(lambda: gpt2.init(TINY, 0))
  products = counts.products(
    jax.make_jaxpr(gradient)(params, batch), jnp.float16
  )
  assert products.lowered == products.all > 0
