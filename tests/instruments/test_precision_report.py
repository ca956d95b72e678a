"""The report says what the program is, and why, whoever asks and when."""

import collections
import functools

import chex
from flax import nnx
import flax.linen as nn
import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import levels
from tests import documents
from tests import support

LEVELS = support.slow_but(["O1"], ["O0", "O1", "O2", "O3", "auto", "OD"])
report_of = ols.instruments.precision_report


class LeNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    for features in (6, 16):
      x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
    x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
    return nn.Dense(10)(x)


class Transformer(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Embed(8, 8)(x)
    x += nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
    x += nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
    return nn.Dense(8)(x[:, -1])


class LSTM(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(8)(nn.RNN(nn.LSTMCell(4))(nn.Embed(8, 4)(x))[:, -1])


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(8)(nn.RMSNorm()(nn.Dense(8)(x)))


# By model its input, its products forward, and forward and backward: two more
# for each, but for the first ones, whose input needs no gradient.
IMAGES, WORDS = jnp.ones((2, 8, 8, 1)), jnp.zeros((2, 3), int)
MODELS = {
  "LeNet": (LeNet(), IMAGES, 4, 11),
  # q, k, v, q k, its product with v, what comes out; three layers.
  "Transformer": (Transformer(), WORDS, 9, 27),
  # Four gates of the input and of what is remembered; one layer.
  "LSTM": (LSTM(), WORDS, 9, 27),
  "norm": (Normed(), IMAGES[:, :, 0, 0], 2, 5),
}


@functools.cache
def problem(name):
  """Returns a loss of parameters and a batch, and the two."""
  model, x, *_ = MODELS[name]
  params = jax.jit(model.init)(jax.random.key(0), x)

  def loss_fn(params, x):
    logits = model.apply(params, x)
    labels = jnp.zeros(len(x), int)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()

  return loss_fn, params, x


def reasons(report, dtype="float32"):
  return {why for _, found, why in report.counts if found == dtype}


def make_step(loss_fn):
  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())

  @jax.jit
  def train_step(params, opt_state, x):
    value_and_grad = ols.scaled_value_and_grad(jax.jit(loss_fn), opt_state)
    loss, scaled_grads = value_and_grad(params, x)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, tx


def test_a_step_may_return_what_is_no_array():
  def train_step(model, x):
    return model | {"w": model["w"] @ x}, model["activation"](x)

  model = {"w": jnp.eye(2), "activation": jnp.tanh, "axis_name": "batch"}
  assert report_of(train_step, model, jnp.eye(2)).products == {"float32": 1}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_a_person_counts(name, level):
  loss_fn, params, x = problem(name)
  _, _, forward, both = MODELS[name]
  dtype = "float32" if level == "O0" else "float16"
  mixed = ols.autocast(loss_fn, level)
  assert report_of(mixed, params, x).products == {dtype: forward}
  report = report_of(jax.value_and_grad(mixed), params, x)
  assert report.products == {dtype: both}
  low = both if level != "O0" else 0
  precision = "float16" if low else "low precision"
  assert report.line.startswith(f"{low} of {both} products in {precision}; ")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_the_counts_are_those_of_the_program_without_notes(name, level):
  loss_fn, params, x = problem(name)
  grads = jax.value_and_grad(ols.autocast(loss_fn, level))
  counted = collections.Counter()
  for (_, dtype, _), names in report_of(grads, params, x).counts.items():
    for operation, count in names.items():
      counted[operation, dtype] += count
  there = collections.Counter(
    (equation.primitive.name, equation.outvars[0].aval.dtype.name)
    for equation in support.equations(jax.make_jaxpr(grads)(params, x))
    if equation.outvars
  )
  operations = {"add", "exp", "rsqrt", "sub", "tanh", *levels.PRODUCTS}
  for operation in operations:
    for dtype in ("float16", "float32"):
      key = operation, dtype
      # In a scatter it combines two values.
      inside = there["scatter-add", dtype] if operation == "add" else 0
      assert counted[key] == there[key] - inside, key


def linear(x, w, then=lambda y: y):
  """Returns a product, what is between, and a product."""
  return then(x @ w) @ w


def norm(x):
  x = x - x.mean(-1, keepdims=True)
  return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def in_scope(scope, function):
  return jax.named_scope(scope)(function)


def kernel(x):
  def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(double, out_shape=shape, interpret=True)(x)


# Reason: level, what comes between two products, operations with that reason.
REASONS = {
  "overrides": ("O1", in_scope("mlp", jnp.tanh), {"tanh": 1}),
  "black list": ("O1", jnp.exp, {"exp": 1}),
  "scope of a norm or loss": ("O1", in_scope("norm", jnp.tanh), {"tanh": 1}),
  "only used in float32": ("O1", lambda y: jnp.exp(y + 1), {"add": 1}),
  "follows an input": ("O1", lambda y: jnp.tanh(jnp.exp(y)), {"tanh": 1}),
  "a constant out of range": ("O1", lambda y: y + 1e-9, {"add": 1}),
  "a sum": ("O3", lambda y: y.cumsum(0), {"cumsum": 1}),
  "a statistic": (
    "O3",
    lambda y: y.mean(0, keepdims=True) + y,
    {"div": 1},
  ),
  "root of a sum": ("O2", norm, {"rsqrt": 1}),
  "part of a norm": ("O2", norm, {"sub": 1, "mul": 1}),
  "constants only": ("O1", lambda y: y * lax.sin(jnp.ones(2)), {"sin": 1}),
  "unknown operation": ("O1", kernel, {"pallas_call": 1}),
  "as written": ("OD", jnp.tanh, {"tanh": 1}),
}


@pytest.mark.filterwarnings("ignore:`autocast` cannot look into")
@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_has_its_operations(reason):
  level, then, operations = REASONS[reason]
  overrides = {"mlp": jnp.float32} if reason == "overrides" else None
  mixed = ols.autocast(
    functools.partial(linear, then=then), level, overrides=overrides
  )
  report = report_of(mixed, jnp.ones((2, 2)), jnp.eye(2))
  assert report.products == {"float16": 2}
  found = {why: names for (_, _, why), names in report.counts.items()}
  assert found[reason] == operations


def test_the_loss_is_what_no_product_follows():
  mixed = ols.autocast(lambda x, w: jnp.mean((x @ w) ** 2), "O2")
  report = report_of(mixed, jnp.ones((2, 2)), jnp.eye(2))
  assert report.counts == {
    ("", "float16", ""): {"dot_general": 1},
    ("", "float32", "no product follows"): {
      "square": 1,
      "reduce_sum": 1,
      "div": 1,
    },
  }


def test_an_override_to_float16_is_no_reason_for_float32():
  fun = in_scope("mlp", functools.partial(linear, then=lambda y: y.cumsum(0)))
  mixed = ols.autocast(fun, "O0", overrides={"mlp": jnp.float16})
  report = report_of(mixed, jnp.ones((2, 2)), jnp.eye(2))
  assert report.counts == {
    ("mlp", "float16", ""): {"dot_general": 2},
    ("mlp", "float32", "a sum"): {"cumsum": 1},
  }


def test_an_override_is_the_reason_where_no_product_follows_either():
  fun = in_scope("head", lambda x, w: jnp.tanh(x @ w))
  mixed = ols.autocast(fun, "O1", overrides={"head": jnp.float32})
  report = report_of(mixed, jnp.ones((2, 2)), jnp.eye(2))
  assert report.counts == {
    ("head", "float32", "overrides"): {"dot_general": 1, "tanh": 1}
  }


def test_a_product_of_vectors_is_a_sum():
  mixed = ols.autocast(lambda x, w: (x[0] @ x[0]) * x @ w, "O1")
  report = report_of(mixed, jnp.ones((2, 2)), jnp.eye(2))
  assert report.products == {"float16": 1}
  assert report.counts["", "float32", "black list"] == {"vecdot": 1}


def test_the_page_explains_each_reason():
  page = documents.read("docs/autocast.md")
  others = ["no product follows", "inputs only"]
  for reason in [*REASONS, *others]:
    assert f'| "{reason}" |' in page, reason


def test_the_backward_pass_has_the_reasons_of_the_forward_pass():
  def fun(x, w, b):
    with jax.named_scope("layer"):
      return jnp.sum(jnp.exp(x @ w + b) @ w)

  gradient = jax.grad(ols.autocast(fun, "O1"), (1, 2))
  report = report_of(gradient, jnp.ones((2, 2)), jnp.eye(2), jnp.ones(2))
  # exp, and its derivative is a product with it; the bias is a sum of rows.
  assert report.counts["layer", "float32", "black list"] == {
    "exp": 1,
    "mul": 1,
  }
  assert report.counts["layer", "float32", "follows an input"] == {
    "reduce_sum": 1
  }
  assert report.products == {"float16": 5}


def test_the_gradient_of_joined_biases_is_one_of_given_values():
  def fun(biases, x, w):
    return jnp.sum(linear(x, w, lambda y: y + jnp.maximum(*biases)))

  gradient = jax.grad(ols.autocast(fun, "O1"))
  biases = jnp.ones(2), jnp.zeros(2)
  report = report_of(gradient, biases, jnp.ones((2, 2)), jnp.eye(2))
  assert "mul" in report.counts["", "float32", "inputs only"]


@pytest.mark.slow
def test_a_step_that_ran_before_is_reported_like_a_new_one():
  loss_fn, params, x = problem("LSTM")
  train_step, tx = make_step(ols.autocast(loss_fn, "O2"))
  new_step, _ = make_step(ols.autocast(loss_fn, "O2"))
  opt_state = tx.init(params)
  want = report_of(new_step, params, opt_state, x)
  train_step(params, opt_state, x)
  assert report_of(train_step, params, opt_state, x) == want
  assert "no product follows" in reasons(want)

  def several(params, opt_state, x):
    def body(carry, _):
      *carry, loss = train_step(*carry, x)
      return tuple(carry), loss

    return lax.scan(body, (params, opt_state), None, length=2)

  jax.jit(several).lower(params, opt_state, x)
  within = report_of(several, params, opt_state, x)
  assert within.products == want.products
  assert "no product follows, in a loop" in reasons(within)


def test_a_report_leaves_nothing_behind():
  loss_fn, params, x = problem("norm")

  @chex.assert_max_traces(n=2)  # The report's is one of them.
  def traced(params, x):
    return ols.autocast(loss_fn, "O1")(params, x)

  step = jax.jit(traced)
  want = step.lower(params, x).as_text(debug_info=True)
  report_of(step, params, x)
  report_of(step, params, x)
  assert step.lower(params, x).as_text(debug_info=True) == want
  assert "ols.note" not in want
  step(params, x)


def test_a_rematted_block_has_its_scope_and_its_reasons():
  def fun(x, w):
    @jax.checkpoint
    def block(x):
      with jax.named_scope("block"):
        return jnp.exp(x @ w) @ w

    return jnp.sum(block(x))

  gradient = jax.grad(ols.autocast(fun, "O1"))
  report = report_of(gradient, jnp.ones((2, 2)), jnp.eye(2))
  # The last one is not computed again.
  assert report.products == {"float16": 5}
  assert report.counts["block", "float32", "black list"]["exp"] == 2


def test_notes_of_one_autocast_are_no_scopes_of_another():
  def fun(x, w):
    with jax.named_scope("layer"):
      return linear(x, w, lambda y: y.cumsum(0))

  inner = ols.autocast(fun, "O3")
  nested = ols.autocast(inner, "O1", overrides={"*sum": jnp.float32})
  with pytest.raises(ValueError, match="the scopes are 'layer'"):
    report_of(nested, jnp.ones((2, 2)), jnp.eye(2))
  report = report_of(ols.autocast(inner, "O1"), jnp.ones((2, 2)), jnp.eye(2))
  assert report.products == {"float16": 2}
  assert {scope for scope, *_ in report.counts} == {"layer"}


def test_layers_in_float16_are_reported_without_autocast():
  model = nn.Dense(3, dtype=jnp.float16)
  x = jnp.ones((2, 3))
  params = model.init(jax.random.key(0), x)
  report = report_of(model.apply, params, x)
  assert report.products == {"float16": 1}
  assert reasons(report) == set()


def test_a_product_of_float16_is_low_though_it_is_summed_up_in_float32():
  def product(x, w):
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)

  x = jnp.ones((2, 2), jnp.float16)
  assert report_of(product, x, x).products == {"float16": 1}
  # What is only stored so is not.
  stored = report_of(product, x, x.astype(jnp.float32))
  assert stored.products == {"float32": 1}
  # What is rounded at once is.
  rounded = functools.partial(jnp.matmul, preferred_element_type=jnp.float16)
  x32 = x.astype(jnp.float32)
  assert report_of(rounded, x32, x32).products == {"float16": 1}
  low = report_of(product, x.astype(jnp.float8_e4m3fn), x.astype(jnp.bfloat16))
  assert low.line.startswith("1 of 1 products in bfloat16; ")


def test_where_nothing_is_low_the_report_says_so():
  loss_fn, params, x = problem("norm")
  text = str(report_of(loss_fn, params, x))
  assert text.startswith(
    "0 of 2 products in low precision\nfloat32, as written"
  )
  assert str(report_of(lambda x: x, x)) == "0 of 0 products in low precision"


def test_other_dtypes_are_as_written():
  mixed = ols.autocast(lambda x, w: jnp.exp(x @ w) @ w, "O1")
  x = jnp.ones((2, 2), jnp.complex64)
  report = report_of(mixed, x, x)
  assert report.counts == {
    ("", "complex64", "as written"): {"dot_general": 2, "exp": 1}
  }


def test_a_schedule_is_in_both_precisions_and_its_state_says_which():
  loss_fn, params, x = problem("norm")
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=1)
  tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())
  train_step = jax.jit(schedule.make_train_step(loss_fn, tx))
  opt_state, state = tx.init(params), schedule.init()
  want = report_of(train_step, params, opt_state, state, x)
  assert want.products == {"float16": 5, "float32": 5}
  assert want.in_branches == 10
  assert want.line.startswith(
    "5 of 10 products in float16, 10 are in branches, and only one branch "
    "runs; float16 in a branch: "
  )
  assert "float32, as written, in a branch:" in str(want)
  seen = []
  for _ in range(2):
    seen.append(bool(state.low))
    params, opt_state, state, _ = train_step(params, opt_state, state, x)
    assert report_of(train_step, params, opt_state, state, x) == want
  assert seen == [True, False]


def test_the_table_of_a_large_model_stays_short_and_narrow():
  def fun(x, w):
    for i in range(100):
      with jax.named_scope(f"block_{i}/mlp"):
        x = jnp.exp(x @ w)
    return x

  report = report_of(ols.autocast(fun, "O1"), jnp.ones((2, 2)), jnp.eye(2))
  assert len(report.counts) == 200
  lines = str(report).splitlines()
  assert lines[0] == "100 of 100 products in float16"
  assert lines[2] == "    100 dot_general"
  assert lines[-1] == "Scopes are cut to 0 parts; `counts` has all of them."
  assert len(lines) < 30


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_as_wide_as_a_terminal(name):
  loss_fn, params, x = problem(name)
  train_step, tx = make_step(ols.autocast(loss_fn, "O2"))
  report = report_of(train_step, params, tx.init(params), x)
  lines = str(report).splitlines()
  assert max(map(len, lines)) <= 80
  # What is low comes first, and last what autocast did not decide on.
  assert lines[1] == "float16:"
  last = [line for line in lines if line.endswith(":")][-1]
  assert last.startswith("float32, as written")
  assert "\n" not in report.line
  # All operations are in it.
  total = sum(sum(names.values()) for names in report.counts.values())
  listed = [int(x.split(": ")[1]) for x in report.line.split("; ")[1:]]
  assert sum(listed) == total


def test_it_works_under_jit():
  lines = []

  @jax.jit
  def step(x, w):
    mixed = ols.autocast(linear, "O1")
    lines.append(report_of(mixed, x, w).line)
    return mixed(x, w)

  step(jnp.ones((2, 2)), jnp.eye(2))
  assert lines == ["2 of 2 products in float16; float16: 2"]


def test_what_is_no_function_is_an_error():
  with pytest.raises(TypeError, match="must be a function"):
    report_of(3)


def test_a_step_that_changes_its_model_is_reported_and_the_model_stays():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  step = nnx.jit(ols.nnx.autocast(lambda model, x: jnp.sum(model(x) @ x)))
  for _ in range(2):
    report = report_of(step, model, jnp.ones((2, 2)))
    assert report.products == {"float16": 1}
    assert float(model.mean.get_value()[0]) == 0
  step(model, jnp.ones((2, 2)))
  assert float(model.mean.get_value()[0]) > 0


def test_shapes_are_enough():
  shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)
  fun = ols.autocast(lambda x: jnp.exp(x @ x))
  assert report_of(fun, shape) == report_of(fun, jnp.ones((2, 2)))
