"""The dtype of each operation: by level, by scope, and by the caller's lists.

The tables of docs/guides/mixed_precision.md and docs/autocast.md are data here.
"""

import contextlib
import functools
import io
import re

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _value
from optax_lossscale._autocast import levels
from optax_lossscale._jaxpr import scopes
from tests import documents
from tests import support
from tests.autocast.mixed import equations
from tests.autocast.programs import conversions
from tests.autocast.programs import dtypes_of
from tests.autocast.programs import PRODUCTS
from tests.autocast.programs import products

X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3
SCALE, BIAS = jnp.linspace(0.5, 2, 8), jnp.linspace(-1, 1, 8)

E4M3 = jnp.float8_e4m3fn
LEVELS = ("O1", "O2", "O3", "auto", "OD")


def between(operation):
  """Returns a function with an operation between two products."""
  return lambda x: operation(x @ W) @ W


def layer_norm(x):
  mean = jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
  return (x - mean) * lax.rsqrt(variance + 1e-6) * SCALE + BIAS


def rms_norm(x):
  return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * SCALE


def batch_norm_with_given_statistics(x):
  return (x - BIAS) * (lax.rsqrt(jnp.abs(SCALE) + 1e-5) * SCALE) + BIAS


def pre_norm(x):
  with jax.named_scope("PreNorm_0"), jax.named_scope("WithLossCell"):
    return jnp.tanh(x @ W) @ W


# The dtype at O1, O2, O3, auto and OD: first of operations between two
# products, as PyTorch, Apex, MindSpore, TensorFlow and Paddle list them.
STEEP = "32 16 16 32 32"
FOLLOWS = "16 16 16 16 32"
PROMOTES = "16 16 16 32 32"
IN_NORM = "32 32 16 32 32"
FLOAT32 = "32 32 32 32 32"
LOW = "16 16 16 16 16"
OPERATIONS = {
  "exp": (STEEP, "exp", jnp.exp),
  "expm1": (STEEP, "expm1", jnp.expm1),
  "log": (STEEP, "log", lambda x: jnp.log(jnp.abs(x))),
  "rsqrt": (STEEP, "rsqrt", lambda x: lax.rsqrt(jnp.abs(x))),
  "integer_pow": (STEEP, "integer_pow", lambda x: x**4),
  "pow": (STEEP, "pow", lambda x: jnp.abs(x) ** 0.3),
  "reciprocal": (STEEP, "div", lambda x: 1 / x),
  "tan": (STEEP, "tan", jnp.tan),
  "lgamma": (FLOAT32, "lgamma", lax.lgamma),
  "reduce_sum": (FLOAT32, "reduce_sum", lambda x: x + jnp.sum(x, axis=0)),
  "reduce_prod": (FLOAT32, "reduce_prod", lambda x: x + jnp.prod(x, axis=0)),
  "cumsum": (FLOAT32, "cumsum", lambda x: jnp.cumsum(x, axis=0)),
  "tanh": (FOLLOWS, "tanh", jnp.tanh),
  "max": (FOLLOWS, "max", jax.nn.relu),
  "mul": (FOLLOWS, "mul", lambda x: x * jax.nn.sigmoid(x)),
  "square": (FOLLOWS, "square", lambda x: jnp.square(jax.nn.relu(x))),
  "cube": (FOLLOWS, "integer_pow", jax.nn.gelu),
  "select_n": (FOLLOWS, "select_n", jax.nn.leaky_relu),
  "reduce_max": (FOLLOWS, "reduce_max", lambda x: x - jnp.max(x, axis=0)),
}
# Inputs of different origin.
INPUTS = {
  "a result in float32": (STEEP, "tanh", lambda x: jnp.tanh(jnp.exp(x))),
  "both precisions": (STEEP, "add", lambda x: x + jnp.exp(x)),
  "a bias": (PROMOTES, "add", lambda x: x + BIAS),
  "a moved bias": (PROMOTES, "add", lambda x: x + BIAS.reshape(4, 2).T.ravel()),
  "a joined bias": (PROMOTES, "add", lambda x: x + jnp.hstack([BIAS] * 2)[:8]),
  "a scale": (FOLLOWS, "mul", lambda x: x * SCALE),
  "a mean": (IN_NORM, "sub", lambda x: x - BIAS),
  "a divisor": (STEEP, "div", lambda x: x / SCALE),
  "a number as divisor": (FOLLOWS, "div", lambda x: jnp.tanh(x / 3)),
  "a vector": (LOW, "dot_general", lambda x: (x @ SCALE)[:, None] * x),
  "rows of a table": (STEEP, "add", lambda x: x + W[np.arange(4)]),
  "rows to append": (
    PROMOTES,
    "concatenate",
    lambda x: jnp.concatenate([x, jnp.broadcast_to(BIAS, (4, 8))])[:4],
  ),
  "a count": (STEEP, "add", lambda x: x + jnp.arange(2993, 3001)),
  "a number that fits": (FOLLOWS, "mul", lambda x: jnp.tanh(x * 3)),
  "a small number": (FLOAT32, "mul", lambda x: jnp.tanh(x * 1e-7)),
  "the smallest number": (FOLLOWS, "mul", lambda x: jnp.tanh(x * 2.0**-14)),
  "a small number or 1": (
    FLOAT32,
    "mul",
    # A span of two numbers, joined with a third.
    lambda x: jnp.tanh(x * jnp.where(x > 1, jnp.where(x > 0, 1e-7, 1.0), 1.0)),
  ),
  "a large number": (FLOAT32, "mul", lambda x: jnp.tanh(x * 1e6)),
  "a large divisor": (FLOAT32, "div", lambda x: x / jnp.full(8, 101325.0)),
  "a small number beside values": (
    STEEP,
    "tanh",
    lambda x: jnp.tanh((x + 1e-7) + x),
  ),
}
SCOPES = {
  "norm": (IN_NORM, "tanh", jax.named_scope("BatchNorm_3")(jnp.tanh)),
  "loss": (FLOAT32, "tanh", jax.named_scope("auxiliary_loss")(jnp.tanh)),
  "a norm with a product in it": (FOLLOWS, "tanh", pre_norm),
  "after a norm": (STEEP, "tanh", lambda x: x + jnp.tanh(layer_norm(x))),
}
# An operation that keeps nothing for the backward pass is in float32 if all
# operations that use its result are. Others are not.
USES = {
  "add": (STEEP, "add", lambda x: jnp.exp(x + BIAS)),
  "neg": (STEEP, "neg", lambda x: jnp.exp(-x)),
  "pad": (STEEP, "pad", lambda x: jnp.exp(jnp.pad(x, ((1, 0), (0, 0))))[1:]),
  "select_n": (STEEP, "select_n", lambda x: jnp.exp(jnp.where(x > 0, x, 0.5))),
  "times a number": (STEEP, "mul", lambda x: jnp.exp(x * 0.5)),
  "times an array of numbers": (
    STEEP,
    "mul",
    lambda x: jnp.exp(x * -jnp.full(8, 0.5)),
  ),
  "over an array of numbers": (
    STEEP,
    "div",
    lambda x: jnp.exp(x / -jnp.full(8, 3.0)),
  ),
  "times a parameter": (FOLLOWS, "mul", lambda x: jnp.exp(x * SCALE)),
  "maximum with -inf": (
    STEEP,
    "max",
    lambda x: jnp.exp(jnp.maximum(-jnp.inf, x)),
  ),
  "maximum with -3": (FOLLOWS, "max", lambda x: jnp.exp(jnp.maximum(-3.0, x))),
  "sin": (FOLLOWS, "sin", lambda x: jnp.exp(jnp.sin(x))),
  "square before a sum": (
    FLOAT32,
    "square",
    lambda x: x + jnp.sum(jnp.square(jnp.sin(x)), axis=0),
  ),
  "itself times itself before a sum": (
    FLOAT32,
    "mul",
    lambda x: x + jnp.sum((y := jnp.sin(x)) * y, axis=0),
  ),
  "square before a sum and a sine": (
    FOLLOWS,
    "square",
    lambda x: jnp.sin(y := jnp.square(jnp.sin(x))) + jnp.sum(y, axis=0),
  ),
}
ROWS = {
  f"{kind}: {name}": row
  for kind, rows in {
    "operation": OPERATIONS,
    "input": INPUTS,
    "scope": SCOPES,
    "use": USES,
  }.items()
  for name, row in rows.items()
}


@pytest.mark.parametrize("name", ROWS)
def test_an_operation_between_products_has_the_dtype_of_the_table(name):
  expected, primitive, operation = ROWS[name]
  found = {
    level: set(dtypes_of(primitive, ols.autocast(between(operation), level), X))
    for level in LEVELS
  }
  dtypes = expected.split()
  assert found == {
    level: {f"float{bits}"} for level, bits in zip(LEVELS, dtypes, strict=True)
  }


@pytest.mark.parametrize(
  ("level", "dtype"), [*((x, "float16") for x in LEVELS), ("O1", "bfloat16")]
)
def test_products_are_in_low_precision_forward_and_backward(level, dtype):
  loss_fn = ols.autocast(
    lambda w: jnp.sum(jnp.tanh(X @ w) @ w), level, dtype=dtype
  )
  found = products(jax.grad(loss_fn), W)
  # Two products forward, and one or two backward for each of them.
  assert len(found) >= 2 * 5
  assert set(found) == {dtype}
  assert loss_fn(W).dtype == jnp.float32


NORMS = [layer_norm, rms_norm, batch_norm_with_given_statistics]


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_norm_without_a_scope_is_known_by_its_operations(level, norm):
  mixed = ols.autocast(between(norm), level)
  low = {
    equation.primitive.name
    for equation in equations(mixed, X)
    if equation.outvars[0].aval.dtype == jnp.float16
  }
  is_in_float32 = low == {"convert_element_type", "dot_general"}
  assert is_in_float32 == (level != "O3")


def with_large_number(x):
  return (x @ W * 1e6) @ W


def with_large_number_in_a_loop(x):
  @jax.custom_jvp
  def identity(x):
    return x * 1.0

  identity.defjvps(lambda t, _, x: t)
  x = lax.scan(lambda c, _: (identity(c) + 1, None), x @ W - 1e6, length=3)[0]
  return x @ W


@pytest.mark.parametrize("level", ["O1", "OD"])
@pytest.mark.parametrize(
  "function", [with_large_number, with_large_number_in_a_loop]
)
def test_a_product_of_numbers_beyond_float16_is_in_float32(level, function):
  mixed = ols.autocast(function, level)
  assert products(mixed, X) == ["float16"] * 2 + ["float32"] * 2
  np.testing.assert_allclose(mixed(X), function(X), rtol=1e-2, atol=1e4)


def test_o0_is_the_function_itself():
  assert ols.autocast(with_large_number, "O0") is with_large_number


# Values at every level.

ONE = jnp.ones((1, 1))


def count(x):
  return jnp.sum(jnp.broadcast_to(x @ ONE, (1, 4096)), axis=1)[:, None] @ ONE


def mean_of_many(x):
  many = jnp.broadcast_to(x @ ONE, (1, 100_000))
  return (jnp.mean(many, axis=1)[:, None] + 4095) @ ONE


def gradient_of_a_bias(x):
  rows = jnp.ones((4096, 1))
  return jax.grad(lambda bias: jnp.sum((rows @ x + bias) @ x))(jnp.zeros(1))


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("function", [count, mean_of_many, gradient_of_a_bias])
def test_sums_are_accumulated_in_float32(level, function):
  # In float16, 2048 + 1 is 2048, and 100,000 is inf.
  assert float(ols.autocast(function, level)(ONE).ravel()[0]) == 4096


@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_the_gradient_of_a_bias_is_summed_in_float32_on_devices(axis_type):
  rows = jnp.ones((100_000, 1))

  def loss_fn(bias):
    return jnp.sum((rows @ ONE + bias) @ ONE)

  with jax.set_mesh(support.make_mesh(axis_type, data=2)):
    gradient = jax.jit(jax.grad(ols.autocast(loss_fn, "O1")))(jnp.zeros(1))
  # Above the largest float16.
  np.testing.assert_array_equal(gradient, [100_000.0])


def masked(x):
  mask = jnp.zeros((4, 4), bool)
  scores = jnp.where(mask, x @ x.T, jnp.finfo(x.dtype).min)
  return jax.nn.softmax(scores + jnp.where(mask, 0.0, -1e9)) @ x


def scaled_by_a_product_of_vectors(x):
  x = 100 * x @ W
  return (x * lax.rsqrt(jnp.vecdot(x, x) / 8 + 1e-6)[:, None]) @ W


FUNCTIONS = {
  "large layer norm": between(lambda x: layer_norm(1000 * x)),
  "product of vectors": scaled_by_a_product_of_vectors,
  "fully masked rows": masked,
  "scatter-max": between(lambda x: x.at[2].max(0.0)),
  "scatter-add": between(lambda x: x.at[0].add(W[0])),
  # NumPy's array is beyond the range of float16, but nothing warns.
  "a mask of NumPy": between(
    lambda x: jax.nn.softmax(x + np.float32([0, -1e9] * 4))
  ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_level_computes_the_same_up_to_rounding(name):
  want = FUNCTIONS[name](X)
  for level in ("O1", "O2", "O3"):
    got = ols.autocast(FUNCTIONS[name], level)(X)
    np.testing.assert_allclose(got, want, 2e-2, 3e-2, err_msg=level)


@pytest.mark.parametrize("name", [x for x in FUNCTIONS if "scatter" in x])
def test_a_scatter_may_get_values_in_low_precision(name):
  mixed = ols.autocast(FUNCTIONS[name], "O3")
  assert np.all(np.isfinite(mixed(X.astype(jnp.float16))))


# The pages.


def table_of_levels():
  """Returns the table of mixed_precision.md: a dict for each level."""
  text = documents.read("docs/guides/mixed_precision.md")
  table = text[text.index("| level | products |") :].partition("\n\n")[0]
  lines = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in table.splitlines()
    if not line.startswith("|---")
  ]
  return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.mark.parametrize("row", table_of_levels(), ids=lambda row: row["level"])
def test_the_table_of_levels_on_the_page(row):
  assert len(table_of_levels()) == 6

  def seen(name, operation):
    mixed = ols.autocast(operation, row["level"])
    (dtype,) = {
      equation.outvars[0].aval.dtype.name
      for equation in equations(mixed, X)
      if equation.primitive.name == name
    }
    return dtype

  norm = jax.named_scope("LayerNorm_0")(jnp.sin)
  found = {
    "products": seen("dot_general", between(jnp.tanh)),
    "exp, log, powers": seen("exp", between(jnp.exp)),
    # The operation after a sum shows the dtype of its result.
    "sums": seen("sin", between(lambda x: jnp.sin(jnp.sum(x, axis=0)))),
    "norms": seen("sin", between(norm)),
    "losses": seen("sin", lambda x: jnp.sin(x @ W)),
    "the others": {
      ("float16", "float32"): "follow their inputs",
      ("float16", "float16"): "float16",
      ("float32", "float32"): "float32",
    }[
      seen("tanh", between(jnp.tanh)),
      seen("tanh", between(lambda x: jnp.tanh(norm(jnp.exp(x))))),
    ],
  }
  # Everything here is written in float32.
  assert found == {
    name: cell.replace("as written", "float32")
    for name, cell in row.items()
    if name != "level"
  }


def test_the_page_about_the_design_prints_and_names_what_is_there():
  page = documents.read("docs/autocast.md")
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    documents.run(page, {})
  assert printed.getvalue() == "".join(documents.blocks(page, "text"))
  words = set(re.findall(r"`([A-Z_]+)`", page))
  assert words >= {x.name for x in (*levels.Treatment, *_value.Kind)}
  package = documents.ROOT / "optax_lossscale"
  places = (documents.ROOT, package, package / "_autocast", package / "_jaxpr")
  for name in set(re.findall(r"`([\w/]+\.py)`", page)):
    assert any((place / name).exists() for place in places), name


# Overrides.


class LeNet5(nn.Module):
  """Two convolutions and two dense layers, with the published names."""

  @nn.compact
  def __call__(self, x):
    x = nn.max_pool(nn.relu(nn.Conv(2, (3, 3), name="conv1")(x)), (2, 2))
    x = nn.relu(nn.Conv(3, (3, 3), name="conv2")(x))
    x = nn.LayerNorm(name="norm1")(x)
    x = x.reshape(x.shape[0], -1)
    return nn.Dense(4, name="fc2")(nn.relu(nn.Dense(5, name="fc1")(x)))


MODEL = LeNet5()
IMAGES = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))


@functools.cache
def lenet_params():
  return MODEL.init(jax.random.key(1), IMAGES)


def loss_fn(params, x):
  return jnp.mean(jnp.square(MODEL.apply(params, x)))


def products_by_layer(function):
  """Returns the dtypes of the products of LeNet-5, by layer."""
  return {
    scopes.join("", str(equation.source_info.name_stack)).split("/")[
      -1
    ]: equation.invars[0].aval.dtype.name
    for equation in equations(function, lenet_params(), IMAGES)
    if equation.primitive.name in PRODUCTS
  }


LAYERS = {"conv1", "conv2", "fc1", "fc2"}
CONV1 = "LeNet5/conv1"
F16, F32 = "float16", "float32"
# The layers of LeNet-5 whose products are in float16.
OVERRIDES = {
  "one layer": ("O0", {CONV1: F16}, {"conv1"}),
  "everything inside": ("O0", {"LeNet5": F16}, LAYERS),
  "against the level": ("O3", {CONV1: F32}, LAYERS - {"conv1"}),
  "asterisks around": ("O1", {"*fc*": F32}, {"conv1", "conv2"}),
  "an asterisk inside": ("O1", {"LeNet5/c*v*": F32}, {"fc1", "fc2"}),
  "the longest wins": ("O3", {CONV1: F16, "LeNet5": F32}, {"conv1"}),
  "in any order": ("O3", {"LeNet5": F32, CONV1: F16}, {"conv1"}),
  "left to the level": ("O1", {"*": F32, CONV1: None}, {"conv1"}),
  "another low precision": ("O2", {CONV1: "bfloat16"}, LAYERS - {"conv1"}),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_choose_the_layers_in_low_precision(name):
  level, overrides, expected = OVERRIDES[name]
  found = products_by_layer(ols.autocast(loss_fn, level, overrides=overrides))
  assert set(found) == LAYERS
  assert {x for x, dtype in found.items() if dtype == "float16"} == expected
  if name == "another low precision":
    assert found["conv1"] == "bfloat16"


def in_a_loop(x):
  @jax.jit
  def layer(x, _):
    with jax.named_scope("inner"):
      return x @ x, None

  with jax.named_scope("outer"):
    return lax.scan(layer, x, length=2)[0]


def in_scope(scope, function):
  return lambda x: jax.named_scope(scope)(function)(x @ x) @ x


SCOPED = {
  "loops and jit": (in_a_loop, "outer/inner", "dot_general"),
  "inputs only": (
    lambda x: jax.named_scope("first")(jnp.sin)(x) @ x,
    "first",
    "sin",
  ),
  "a loss": (in_scope("loss", jnp.tanh), "loss", "tanh"),
  "a black operation": (in_scope("layer", jnp.exp), "layer", "exp"),
}


@pytest.mark.parametrize("name", SCOPED)
def test_an_override_beats_everything_else(name):
  function, pattern, primitive = SCOPED[name]
  mixed = ols.autocast(
    function,
    "O1",
    overrides={pattern: jnp.float16},
    operations={"black": ["dot_general", "exp", "sin"]},
  )
  assert set(dtypes_of(primitive, mixed, jnp.eye(2))) == {"float16"}


def test_one_layer_alone_converts_only_its_inputs_and_its_output():
  mixed = ols.autocast(MODEL.apply, "O0", overrides={CONV1: jnp.float16})
  assert sorted(conversions(mixed, lenet_params(), IMAGES)) == [
    ("float16", "float32"),  # The result.
    *[("float32", "float16")] * 3,  # The image, the kernel, the bias.
  ]


# Patterns and scopes.


def test_only_the_asterisk_is_special_in_a_pattern():
  assert scopes.matches("layers[0].x?", "l*s[0].x?")
  assert not scopes.ends_in("layers/x", ["layers*"])
  assert not scopes.matches("layers0", "layers[0]")
  assert not scopes.matches("layer", "laye?")
  assert not scopes.matches("layer", "laye.")
  # A regular expression would not finish within a lifetime.
  assert not scopes.matches("a" * 60, "*a" * 30 + "*b")
  assert scopes.matches("a" * 60, "*a" * 30 + "*a")


@pytest.mark.parametrize(
  ("scope", "name_stack", "expected"),
  [
    ("", "LeNet5/conv1", "LeNet5/conv1"),
    ("", "jvp(LeNet5)/conv1", "LeNet5/conv1"),
    ("", "transpose(jvp(LeNet5))/conv1", "LeNet5/conv1"),
    ("LeNet5", "vmap(jit(f))/conv1", "LeNet5/conv1"),
    ("", "transpose(jvp(LeNet5/conv1))/b", "LeNet5/conv1/b"),
    ("", "jvp(jit(f))/jvp(f(x))/jit(g)", "f(x)"),
    # Twice around a remat, in the backward pass.
    ("", "transpose(jvp(a/b))/jvp(a/b)", "a/b"),
    ("", "transpose(jvp(a))/b/jvp(a)/b/c", "a/b/c"),
    ("", "s/transpose(jvp(a))/b/s/jvp(a)/b", "s/a/b"),
    ("a", "rematted_computation/b", "a/b"),
    # Once, and of the same name.
    ("", "transpose(jvp(a))/a", "a/a"),
    ("", "jvp(a)/jvp(jvp(a))", "a/a"),
    ("", "transpose(jvp(a))/b/jvp(a)", "a/b/a"),
  ],
)
def test_a_scope_is_without_the_marks_of_transformations(
  scope, name_stack, expected
):
  assert scopes.join(scope, name_stack) == expected


# Lists.


@pytest.mark.parametrize(
  ("name", "operations", "dtype"),
  [
    ("tanh", {"black": ["tanh"]}, "float32"),
    ("tanh", {"white": ["tanh"]}, "float16"),
    ("tanh", {"gray": ["tanh"]}, "float16"),
    ("exp", {"white": ["exp"]}, "float16"),
    ("add", {"promote": ["add"]}, "float32"),
    ("dot_general", {"black": ["dot_general"]}, "float32"),
  ],
)
def test_an_operation_is_in_the_list_where_the_caller_puts_it(
  name, operations, dtype
):
  mixed = ols.autocast(
    between(lambda x: jnp.exp(jnp.tanh(x + BIAS))), operations=operations
  )
  assert set(dtypes_of(name, mixed, X)) == {dtype}


def test_a_sum_on_the_gray_list_has_the_dtype_of_what_it_sums():
  for summed, dtype in ((jnp.exp, "float32"), (jnp.tanh, "float16")):
    mixed = ols.autocast(
      between(lambda x, f=summed: jnp.sin(jnp.cumsum(f(x), 0))),
      operations={"gray": ["cumsum"]},
    )
    assert set(dtypes_of("sin", mixed, X)) == {dtype}


def test_a_level_can_be_made_of_lists_alone():
  mixed = ols.autocast(loss_fn, "O0", operations={"white": ["dot_general"]})
  found = products_by_layer(mixed)
  assert {x for x, dtype in found.items() if dtype == "float16"} == {
    *("fc1", "fc2")
  }


# Errors.

TWICE = {"gray": ["exp"], "black": ["exp"]}


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    ({"level": "O4"}, ValueError, "`level` must be one of O0, O1, O2, O3"),
    ({"level": "o2"}, ValueError, "got 'o2'; did you mean O2?"),
    ({"level": jnp.float16}, ValueError, "; pass a dtype as `dtype`."),
    ({"dtype": "half precision"}, TypeError, "`dtype` must be a float"),
    ({"dtype": jnp.float64}, ValueError, "one of float16, bfloat16, got"),
    ({"dtype": jnp.float8_e4m3fn}, ValueError, "and dot_dtype=jnp.float8_e4m"),
    ({"dot_dtype": jnp.bfloat16}, ValueError, "`dot_dtype` must be one of"),
    ({"dot_dtype": (E4M3,) * 3}, ValueError, "must be one dtype, or two"),
    ({"dot_dtype": (E4M3, "int8")}, TypeError, "`dot_dtype[1]` must be a f"),
    (
      {"preferred_element_type": jnp.float16},
      ValueError,
      "`preferred_element_type` must be float32, got float16",
    ),
    ({"overrides": ["conv1"]}, TypeError, "`overrides` must be a dict"),
    ({"overrides": {"x": 16}}, TypeError, "`overrides['x']` must be a float"),
    ({"operations": {"grey": ["exp"]}}, ValueError, "got 'grey'"),
    ({"operations": {"gray": "exp"}}, TypeError, "a list of names"),
    ({"operations": {"gray": [1]}}, TypeError, "a list of names"),
    ({"operations": TWICE}, ValueError, "'exp' in 'gray' and 'black'"),
    ({"fun": {}}, TypeError, "`fun` must be a function"),
  ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_traced(
  arguments, error, message
):
  with pytest.raises(error, match=re.escape(message)):
    ols.autocast(**{"fun": jnp.tanh, **arguments})


@pytest.mark.parametrize(
  ("options", "messages"),
  [
    (
      {"overrides": {"conv1": jnp.float16}},
      ["got 'conv1'", "'LeNet5/conv1'", "/norm1'", "'*conv1' would match"],
    ),
    ({"operations": {"black": ["softmax", "tahn"]}}, ["got 'softmax'"]),
    (
      {"operations": {"black": ["matmul"]}},
      ["got 'matmul'; a matrix product is"],
    ),
    ({"operations": {"black": ["tahn"]}}, ["got 'tahn'; did you", "'tanh'"]),
  ],
  ids=["scope", "composite", "torch", "misspelled"],
)
def test_an_unknown_name_is_an_error_that_helps(options, messages):
  mixed = ols.autocast(loss_fn, **options)
  with pytest.raises(ValueError) as caught:
    mixed(lenet_params(), IMAGES)
  for message in messages:
    assert message in str(caught.value)


def test_a_function_without_scopes_is_an_error_that_says_how_to_get_them():
  mixed = ols.autocast(jnp.tanh, "O1", overrides={"conv1": jnp.float16})
  with pytest.raises(ValueError, match="jax.named_scope"):
    mixed(X)
