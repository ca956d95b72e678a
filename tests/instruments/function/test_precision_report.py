"""The report on the dtypes of a program, and on the reasons for float32."""

import collections
import functools

import chex
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support
from tests.autocast.programs import kernel

report_of = ols.instruments.precision_report
ONES, EYE = jnp.ones((2, 2)), jnp.eye(2)


def reasons(report):
  return {why for _, dtype, why in report.counts if dtype == "float32"}


def linear(x, w, then=lambda y: y):
  """Returns a product, what is between, and a product."""
  return then(x @ w) @ w


def norm(x):
  x = x - x.mean(-1, keepdims=True)
  return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def in_scope(scope, function):
  return jax.named_scope(scope)(function)


# Each reason with a level, the operations between two products, and those that
# have the reason.
REASONS = {
  "overrides": ("O1", in_scope("mlp", jnp.tanh), {"tanh": 1}),
  "black list": ("O1", jnp.exp, {"exp": 1}),
  "scope of a norm or loss": ("O1", in_scope("norm", jnp.tanh), {"tanh": 1}),
  "only used in float32": ("O1", lambda y: jnp.exp(y + 1), {"add": 1}),
  "follows an input": ("O1", lambda y: jnp.tanh(jnp.exp(y)), {"tanh": 1}),
  "a constant out of range": ("O1", lambda y: y + 1e-9, {"add": 1}),
  "a sum": ("O3", lambda y: y.cumsum(0), {"cumsum": 1}),
  "a statistic": ("O3", lambda y: y.mean(0, keepdims=True) + y, {"div": 1}),
  "root of a sum": ("O2", norm, {"rsqrt": 1}),
  "part of a norm": ("O2", norm, {"sub": 1, "mul": 1}),
  "constants only": ("O1", lambda y: y * lax.sin(jnp.ones(2)), {"sin": 1}),
  "opaque, see ols.cast_inputs": ("O1", kernel, {"pallas_call(float32)": 1}),
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
  report = report_of(mixed, ONES, EYE)
  assert report.products == {"float16": 2}
  found = {why: names for (_, _, why), names in report.counts.items()}
  assert found[reason] == operations


def summed(x, w):
  return linear(x, w, lambda y: y.cumsum(0))


# Each program with its input, and all its counts.
COUNTS = {
  "loss": (
    ols.autocast(lambda x, w: jnp.mean((x @ w) ** 2), "O2"),
    ONES,
    {
      ("", "float16", ""): {"dot_general": 1},
      ("", "float32", "no product follows"): {
        **{"square": 1, "reduce_sum": 1, "div": 1}
      },
    },
  ),
  "override to float16": (
    ols.autocast(in_scope("mlp", summed), "O0", overrides={"mlp": jnp.float16}),
    ONES,
    {
      ("mlp", "float16", ""): {"dot_general": 2},
      ("mlp", "float32", "a sum"): {"cumsum": 1},
    },
  ),
  # A product of vectors is a sum.
  "vectors": (
    ols.autocast(lambda x, w: (x[0] @ x[0]) * x @ w, "O1"),
    ONES,
    {
      ("", "float32", "black list"): {"vecdot": 1},
      ("", "float32", "a statistic"): {"mul": 1},
      ("", "float16", ""): {"dot_general": 1},
    },
  ),
  "loop": (
    lambda x, w: lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x),
    ONES,
    {("", "float32", "as written, in a loop"): {"dot_general": 1, "tanh": 1}},
  ),
  "complex": (
    ols.autocast(lambda x, w: jnp.exp(x @ w), "O1"),
    ONES.astype(jnp.complex64),
    {("", "complex64", "as written"): {"dot_general": 1, "exp": 1}},
  ),
  # The outer autocast gives the reason, and sees no notes in the scope.
  "autocast in autocast": (
    ols.autocast(ols.autocast(in_scope("layer", summed), "O3"), "O1"),
    ONES,
    {
      ("layer", "float16", ""): {"dot_general": 2},
      ("layer", "float32", "black list"): {"cumsum": 1},
    },
  ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_products_of_a_program_are_counted(name):
  fun, x, counts = COUNTS[name]
  assert report_of(fun, x, EYE.astype(x.dtype)).counts == counts


def test_each_product_has_two_more_in_the_backward_pass():
  mixed = ols.autocast(lambda x, w: jnp.mean(linear(x, w)), "O1")
  report = report_of(jax.value_and_grad(mixed, argnums=(0, 1)), ONES, EYE)
  assert report.products == {"float16": 6}
  assert report.line.startswith("6 of 6 products in float16; ")


def test_the_page_explains_each_reason():
  page = documents.read("docs/autocast.md")
  others = ["no product follows", "inputs only"]
  for reason in [*REASONS, *others]:
    assert f'| "{reason}" |' in page, reason


def test_the_backward_pass_has_the_reasons_of_the_forward_pass():
  @jax.named_scope("layer")
  def layer(x, w, b):
    return jnp.exp(x @ w + b) @ w

  gradient = jax.grad(
    ols.autocast(lambda *args: jnp.sum(layer(*args)), "O1"), (1, 2)
  )
  report = report_of(gradient, ONES, EYE, jnp.ones(2))
  assert report.products["float16"] == 5
  # The derivative of exp is a product with it; the bias is a sum of rows.
  names = report.counts["layer", "float32", "black list"]
  assert (names["exp"], names["mul"]) == (1, 1)
  name = report.counts["layer", "float32", "follows an input"]
  assert name == {"reduce_sum": 1}


def test_a_gradient_of_inputs_only_has_that_reason():
  def fun(biases, x, w):
    return jnp.sum(linear(x, w, lambda y: y + jnp.maximum(*biases)))

  gradient = jax.grad(ols.autocast(fun, "O1"))
  report = report_of(gradient, (jnp.ones(2), jnp.zeros(2)), ONES, EYE)
  assert "mul" in report.counts["", "float32", "inputs only"]


def test_a_report_leaves_nothing_behind():
  @chex.assert_max_traces(n=2)  # One of them is the report's.
  def traced(x, w):
    return ols.autocast(functools.partial(linear, then=jnp.exp), "O1")(x, w)

  step = jax.jit(traced)
  expected = step.lower(ONES, EYE).as_text(debug_info=True)
  report_of(step, ONES, EYE)
  assert step.lower(ONES, EYE).as_text(debug_info=True) == expected
  assert "ols.note" not in expected
  step(ONES, EYE)
  assert "black list" in reasons(report_of(step, ONES, EYE))


@pytest.mark.parametrize(
  ("left", "right", "result", "precision"),
  [
    ("float8_e4m3fn", "bfloat16", "float32", "bfloat16"),
    # One argument is only stored in float16.
    ("float16", "float32", "float32", "float32"),
    ("float32", "float32", "float16", "float16"),
  ],
)
def test_a_product_is_low_if_its_result_or_both_arguments_are(
  left, right, result, precision
):
  product = functools.partial(jnp.matmul, preferred_element_type=result)
  report = report_of(product, ONES.astype(left), ONES.astype(right))
  assert report.products == {precision: 1}
  assert reasons(report) == (
    {"as written"} if precision == "float32" else set()
  )


def test_a_schedule_is_reported_in_both_precisions():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=1)
  tx = ols.loss_scaling(optax.sgd(0.5), support.Stub())
  train_step = schedule.make_train_step(lambda w, x: jnp.mean(linear(x, w)), tx)
  args = EYE, tx.init(EYE), schedule.init(), ONES
  report = report_of(train_step, *args)
  assert report.products == {"float16": 5, "float32": 5}
  assert report.in_branches == 10
  assert report.line.startswith(
    "5 of 10 products in float16, 10 are in branches, and only one branch "
    "runs; float16 in a branch: "
  )
  assert "float32, as written, in a branch:" in str(report)
  text = str(report_of(linear, ONES, EYE))
  assert text.startswith("0 of 2 products in low precision\nfloat32, as writt")


def test_the_table_of_a_large_model_is_cut_to_24_rows():
  counts = {
    (f"net/block_{i:02}/mlp", dtype, why): collections.Counter(tanh=i + 1)
    for i in range(12)
    for dtype, why in (("float16", "in a loop"), ("float32", "a sum"))
  }
  report = ols.instruments.PrecisionReport({"float16": 12}, 0, counts)
  lines = str(report).splitlines()
  # A row for each scope, below a title for each dtype, most operations first.
  assert lines[:2] == ["12 of 12 products in float16", "float16, in a loop:"]
  assert lines[2] == "  net/block_11/mlp  12 tanh"
  assert lines[14] == "float32, a sum:" and len(lines) == 27
  # The name that would make a line of 81 columns is left out.
  report.counts["", "float32", "as written"] = {"x" * 34: 1, "y" * 34: 1}
  assert str(report).splitlines() == [
    "12 of 12 products in float16",
    "float16, in a loop:",
    "  net  78 tanh",
    "float32, a sum:",
    "  net  78 tanh",
    "float32, as written:",
    f"       1 {'x' * 34}, 1 ...",
    "Scopes are cut to 1 parts; `counts` has all of them.",
  ]
  assert report.line == (
    "12 of 12 products in float16; float16 in a loop: 78; float32 a sum: 78; "
    "float32 as written: 2"
  )


def test_arguments_and_results_may_be_of_any_kind():
  shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)
  assert report_of(linear, shape, shape) == report_of(linear, ONES, EYE)

  def train_step(model, x):
    return model | {"w": model["w"] @ x}, model["activation"](x)

  model = {"w": EYE, "activation": jnp.tanh, "axis_name": "batch"}
  assert report_of(train_step, model, EYE).products == {"float32": 1}
  with pytest.raises(TypeError, match="must be a function"):
    report_of(3)
  with pytest.raises(TypeError, match=r"functools\.partial\(\w+, train="):
    report_of(lambda x, *, train: x, ONES)


def test_an_nnx_model_stays_as_it_was():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  step = nnx.jit(ols.nnx.autocast(lambda model, x: jnp.sum(model(x) @ x)))
  report = report_of(step, model, ONES)
  assert report.products == {"float16": 1}
  assert float(model.mean.get_value()[0]) == 0
  step(model, ONES)
  assert float(model.mean.get_value()[0]) > 0
