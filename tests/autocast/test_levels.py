"""In which dtype each level runs an operation, seen in the jaxpr."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.autocast.mixed import equations
from tests.autocast.programs import conversions
from tests.autocast.programs import dtypes_of
from tests.autocast.programs import products

X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3

each_mixed_level = pytest.mark.parametrize(
  "level", ["O1", "O2", "O3", "auto", "OD"]
)


def between(operation):
  """Returns a function with an operation between two products."""
  return lambda x: operation(x @ W) @ W


def dtypes_at(level, name, operation, **kwargs):
  """Returns the dtypes that a level gives an operation between two products."""
  return set(
    dtypes_of(name, ols.autocast(between(operation), level, **kwargs), X)
  )


@each_mixed_level
def test_products_are_in_low_precision_forward_and_backward(level):
  loss_fn = ols.autocast(lambda w: jnp.sum(jnp.tanh(X @ w) @ w), level)
  found = products(jax.grad(loss_fn), W)
  # Two forward, and for each of them one or two backward.
  assert len(found) >= 2 * 5
  assert set(found) == {"float16"}


@each_mixed_level
def test_bfloat16_is_a_low_precision_as_well(level):
  mixed = ols.autocast(between(jnp.tanh), level, dtype=jnp.bfloat16)
  assert set(products(mixed, X)) == {"bfloat16"}
  assert mixed(X).dtype == jnp.float32


@pytest.mark.parametrize(
  ("name", "operation"),
  [
    ("exp", jnp.exp),
    ("log", lambda x: jnp.log(jnp.abs(x))),
    ("log1p", lambda x: jnp.log1p(jnp.abs(x))),
    ("rsqrt", lambda x: lax.rsqrt(jnp.abs(x))),
    ("integer_pow", lambda x: x**4),
    ("pow", lambda x: jnp.abs(x) ** 0.3),
    ("tan", jnp.tan),
    ("div", lambda x: 1 / x),
    ("reduce_sum", lambda x: x + jnp.sum(x, axis=0)),
    ("cumsum", lambda x: jnp.cumsum(x, axis=0)),
    ("erf_inv", lambda x: lax.erf_inv(jnp.tanh(x))),
    ("lgamma", lax.lgamma),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_steep_operations_and_sums_are_in_float32_at_o1(name, operation):
  assert dtypes_at("O1", name, operation) == {"float32"}


@pytest.mark.parametrize(
  ("name", "operation"),
  [
    ("tanh", jnp.tanh),
    ("logistic", jax.nn.sigmoid),
    ("max", jax.nn.relu),
    ("mul", lambda x: x * jax.nn.sigmoid(x)),
    ("square", lambda x: jnp.square(jax.nn.relu(x))),
    ("integer_pow", jax.nn.gelu),
    ("select_n", jax.nn.leaky_relu),
    ("reduce_max", lambda x: x - jnp.max(x, axis=0)),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_others_follow_their_inputs_at_o1(name, operation):
  assert dtypes_at("O1", name, operation) == {"float16"}


def test_what_follows_float32_is_in_float32_at_o1():
  assert dtypes_at("O1", "tanh", lambda x: jnp.tanh(jnp.exp(x))) == {"float32"}


def test_computed_values_of_both_precisions_meet_in_float32_at_o1():
  assert dtypes_at("O1", "add", lambda x: x + jnp.exp(x)) == {"float32"}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
  "bias",
  [
    lambda: BIAS,
    lambda: BIAS.reshape(2, 4).T.reshape(8),
    lambda: jnp.concatenate([BIAS[:4], BIAS[4:]]),
  ],
  ids=["given", "moved", "joined"],
)
def test_a_bias_follows(level, bias):
  assert dtypes_at(level, "add", lambda x: x + bias()) == {"float16"}


def test_a_bias_does_not_follow_at_auto():
  assert dtypes_at("auto", "add", lambda x: x + jnp.arange(8.0)) == {"float32"}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_everything_is_in_low_precision_at(level):
  assert dtypes_at(level, "exp", jnp.exp) == {"float16"}
  assert dtypes_at(level, "add", lambda x: x + jnp.exp(x)) == {"float16"}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_special_functions_are_in_float32_at_every_level(level):
  assert dtypes_at(level, "lgamma", lax.lgamma) == {"float32"}


@each_mixed_level
def test_sums_are_accumulated_in_float32_at_every_level(level):
  # In float16 2048 + 1 is 2048.
  ones = jnp.ones((1, 1))

  def count(x):
    return (
      jnp.sum(jnp.broadcast_to(x @ ones, (1, 4096)), axis=1)[:, None] @ ones
    )

  assert float(ols.autocast(count, level)(ones)[0, 0]) == 4096


@each_mixed_level
def test_the_gradient_of_a_bias_is_summed_up_in_float32(level):
  rows, one = jnp.ones((4096, 1)), jnp.ones((1, 1))
  loss_fn = ols.autocast(lambda bias: jnp.sum((rows @ one + bias) @ one), level)
  np.testing.assert_array_equal(jax.grad(loss_fn)(jnp.zeros(1)), [4096.0])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_so_it_is_on_a_mesh_of_devices(kind):
  axis_type = getattr(jax.sharding.AxisType, kind)
  mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
  rows, one = jnp.ones((100_000, 1)), jnp.ones((1, 1))
  loss_fn = ols.autocast(lambda bias: jnp.sum((rows @ one + bias) @ one), "O1")
  with jax.set_mesh(mesh):
    # The largest float16 is below the sum.
    np.testing.assert_array_equal(
      jax.jit(jax.grad(loss_fn))(jnp.zeros(1)), [100_000.0]
    )


def test_so_it_is_inside_of_a_shard_map():
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows, one = jnp.ones((100_000, 1)), jnp.ones((1, 1))

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()
  )
  def sharded_loss(bias):
    return jnp.sum((rows @ one + bias) @ one)

  gradient = jax.jit(jax.grad(ols.autocast(sharded_loss, "O1")))(jnp.zeros(1))
  np.testing.assert_array_equal(gradient, [100_000.0])


@each_mixed_level
def test_a_product_of_vectors_is_a_sum(level):
  def function(x):
    x = 100 * x @ W
    return (x * lax.rsqrt(jnp.vecdot(x, x) / 8 + 1e-6)[:, None]) @ W

  mixed = ols.autocast(function, level)
  np.testing.assert_allclose(mixed(X), function(X), atol=1e-2)


@each_mixed_level
def test_a_loss_may_end_in_a_product_of_vectors(level):
  def loss_fn(w):
    error = (1000 * X @ w).ravel()
    return jnp.vdot(error, error) / error.size

  mixed = ols.autocast(loss_fn, level)
  np.testing.assert_allclose(mixed(W), loss_fn(W), rtol=2e-3)


@pytest.mark.parametrize("level", ["O1", "auto"])
def test_what_is_divided_by_or_counted_does_not_follow(level):
  large, counts = jnp.full(8, 101325.0), jnp.arange(2993, 3001)
  assert dtypes_at(level, "div", lambda x: x / large) == {"float32"}
  assert dtypes_at(level, "add", lambda x: x + counts) == {"float32"}


@pytest.mark.slow
@each_mixed_level
def test_noise_is_that_of_the_function_without_autocast(level):
  def function(x):
    noise = jax.random.truncated_normal(jax.random.key(0), -2.0, 2.0, x.shape)
    return noise, (x @ W + noise) @ W

  noise, _ = ols.autocast(function, level)(X)
  # The compiler rounds otherwise when it fuses; in float16 it would be 5e-4.
  np.testing.assert_allclose(noise, function(X)[0], rtol=2e-6)


def layer_norm(x):
  mean = jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
  return (x - mean) * lax.rsqrt(variance + 1e-6) * SCALE + BIAS


def rms_norm(x):
  return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * SCALE


def batch_norm_with_given_statistics(x):
  return (x - BIAS) * (lax.rsqrt(jnp.abs(SCALE) + 1e-5) * SCALE) + BIAS


SCALE, BIAS = jnp.linspace(0.5, 2, 8), jnp.linspace(-1, 1, 8)
NORMS = [layer_norm, rms_norm, batch_norm_with_given_statistics]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("level", ["O1", "O2", "auto"])
def test_a_norm_without_a_scope_is_known_by_its_operations(level, norm):
  mixed = ols.autocast(between(norm), level)
  low = {
    equation.primitive.name
    for equation in equations(mixed, X)
    if equation.outvars[0].aval.dtype == jnp.float16
  }
  # What is left are the products and what they take.
  assert low == {"convert_element_type", "dot_general"}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_is_in_low_precision_at_o3(norm):
  assert "float16" in dtypes_at("O3", "mul", norm)


@pytest.mark.parametrize("norm", NORMS[:2])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_statistics_of_a_norm_do_not_overflow(level, norm):
  function = between(lambda x: norm(1000 * x))
  mixed = ols.autocast(function, level)
  np.testing.assert_allclose(mixed(X), function(X), atol=3e-2)


def test_a_scope_with_a_product_in_it_is_no_norm_and_no_loss():
  def block(x):
    with jax.named_scope("PreNorm_0"), jax.named_scope("WithLossCell"):
      return jnp.tanh(x @ W) @ W

  assert dtypes_at("O2", "tanh", block) == {"float16"}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_after_a_norm_it_goes_on_in_low_precision(level):
  operation = lambda x: x + jnp.tanh(layer_norm(x))  # noqa: E731
  assert dtypes_at(level, "tanh", operation) == {"float16"}


def test_a_norm_in_a_scope_is_in_float32_at_o2():
  def norm(x):
    with jax.named_scope("BatchNorm_3"):
      return jnp.tanh(x)

  assert dtypes_at("O2", "tanh", norm) == {"float32"}
  assert dtypes_at("O3", "tanh", norm) == {"float16"}


@each_mixed_level
def test_a_loss_in_a_scope_is_in_float32_wherever_it_is(level):
  def with_loss(x):
    with jax.named_scope("auxiliary_loss"):
      return jnp.tanh(x)

  assert dtypes_at(level, "tanh", with_loss) == {"float32"}


@each_mixed_level
def test_what_follows_the_last_product_is_in_float32(level):
  mixed = ols.autocast(lambda x: jnp.tanh(x @ W), level)
  assert dtypes_of("tanh", mixed, X) == ["float32"]


LOSSES = {
  "cross_entropy": lambda logits: (
    optax.losses.softmax_cross_entropy_with_integer_labels(
      logits, jnp.arange(4)
    )
  ),
  "squared": lambda logits: optax.losses.squared_error(logits, 70000 * X),
  "absolute": lambda logits: jnp.abs(logits - 70000 * X),
  "huber": lambda logits: optax.losses.huber_loss(logits, X, delta=0.5),
  "sigmoid": lambda logits: optax.losses.sigmoid_binary_cross_entropy(
    logits, jax.nn.sigmoid(X)
  ),
  "focal": lambda logits: optax.losses.sigmoid_focal_loss(
    logits, (X > 0).astype(jnp.float32), alpha=0.25
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@each_mixed_level
def test_the_loss_is_the_same_around_the_model_and_around_all(level, loss):
  def model(w):
    return jnp.tanh(X @ w) @ w + BIAS

  around_model = ols.autocast(model, level)
  take_loss = LOSSES[loss]
  outside = jax.value_and_grad(lambda w: jnp.mean(take_loss(around_model(w))))
  inside = jax.value_and_grad(
    ols.autocast(lambda w: jnp.mean(take_loss(model(w))), level)
  )
  for a, b in zip(jax.jit(outside)(W), jax.jit(inside)(W), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6)
    assert np.all(np.isfinite(a))


def test_scale_and_mask_before_a_softmax_are_in_float32():
  mask = jnp.tril(jnp.ones((4, 4), bool))

  def attention(x):
    scores = jnp.where(mask, x @ x.T / 3, -1e9)
    return jax.nn.softmax(scores) @ x

  mixed = ols.autocast(attention, "O1")
  assert set(dtypes_of("div", mixed, X)) == {"float32"}
  # The input, the scores up, the probabilities down, the result up.
  assert len(conversions(mixed, X)) == 4


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("number", [1e-7, 1e6])
def test_a_number_that_float16_cannot_hold_keeps_float32(level, number):
  operation = lambda x: x * jnp.tanh(x * number)  # noqa: E731
  mixed = ols.autocast(between(operation), level)
  expected = between(operation)(X)
  assert "float32" in dtypes_of("mul", mixed, X)
  np.testing.assert_allclose(mixed(X), expected, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
  "masked",
  [
    lambda scores, mask: jnp.where(mask, scores, jnp.finfo(scores.dtype).min),
    lambda scores, mask: scores + jnp.where(mask, 0.0, -1e9),
  ],
  ids=["chosen", "added"],
)
@each_mixed_level
def test_a_fully_masked_row_is_no_nan(level, masked):
  mask = jnp.zeros((4, 4), bool)

  def attention(x):
    return jax.nn.softmax(masked(x @ x.T, mask)) @ x

  mixed = ols.autocast(attention, level)
  np.testing.assert_allclose(mixed(X), attention(X), rtol=2e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
  "operation",
  [
    lambda x: x / (jnp.abs(x) + 1e-10),
    lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1)[:, None], 1e-12),
    lambda x: jnp.log(jax.nn.softmax(20 * x) + 1e-12),
    lambda x: x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))[:, None] + 1e-8),
  ],
  ids=["quotient", "norm", "logarithm", "root"],
)
@each_mixed_level
def test_a_small_number_still_keeps_from_dividing_by_zero(level, operation):
  x = jnp.zeros((4, 8)).at[1].set(X[1])
  mixed = ols.autocast(between(operation), level)
  assert np.all(np.isfinite(mixed(x)))
  if level in ("O1", "auto"):
    # At the others 1 / 1e-12 goes back through float16.
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(mixed(x)))(X)))


@each_mixed_level
def test_a_product_of_what_float16_cannot_hold_is_in_float32(level):
  def function(x):
    return (x @ W * 1e6) @ W

  mixed = ols.autocast(function, level)
  assert products(mixed, X) == ["float16"] * 2 + ["float32"] * 2
  np.testing.assert_allclose(mixed(X), function(X), rtol=1e-2, atol=1e4)


@each_mixed_level
def test_a_large_number_is_known_after_a_loop_and_a_rule(level):
  @jax.custom_jvp
  def identity(x):
    return x * 1.0

  identity.defjvps(lambda t, _, x: t)

  def function(x):
    x = lax.scan(lambda c, _: (identity(c) + 1, None), x @ W - 1e6, length=3)[0]
    return x @ W

  mixed = ols.autocast(function, level)
  assert products(mixed, X) == ["float16"] * 2 + ["float32"] * 2


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_small_number_vanishes_beside_what_is_computed(level):
  operation = lambda x: jnp.tanh((x + 1e-7) + x)  # noqa: E731
  assert dtypes_at(level, "tanh", operation) == {"float16"}


@each_mixed_level
def test_the_mean_of_many_values_does_not_overflow(level):
  def function(x):
    x = jnp.broadcast_to(x @ jnp.eye(1), (1, 100_000))
    return jnp.tanh(jnp.mean(x, axis=1)[:, None] - 1) @ jnp.eye(1)

  assert float(ols.autocast(function, level)(jnp.ones((1, 1)))[0, 0]) == 0


@pytest.mark.parametrize(
  "scatter",
  [
    lambda x: x.at[2].max(0.0),
    lambda x: x.at[1].apply(jnp.sin),
    lambda x: x.at[0].add(W[0]),
    lambda x: x.at[0].set(W[0]),
    lambda x: jax.ops.segment_max(x, jnp.array([0, 1, 0, 1]), 2),
  ],
  ids=["max", "apply", "add", "set", "segment_max"],
)
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_scatter_runs_in_the_dtype_that_it_was_recorded_for(level, scatter):
  mixed = ols.autocast(between(scatter), level)
  np.testing.assert_allclose(mixed(X), between(scatter)(X), atol=2e-2)
  low = ols.autocast(lambda x: between(scatter)(x.astype(jnp.float16)), level)
  assert np.all(np.isfinite(low(X)))


def test_an_array_beyond_the_range_warns_nobody():
  mask = np.full(8, -1e9, np.float32)
  mixed = ols.autocast(between(lambda x: jax.nn.softmax(x + mask)), "O2")
  assert mixed(X).shape == X.shape


def test_what_is_written_in_bfloat16_and_then_in_float32_comes_back():
  def function(x):
    return (x.astype(jnp.bfloat16).astype(jnp.float32) @ W) @ W

  mixed = ols.autocast(function, "O1", dtype=jnp.bfloat16)
  assert set(products(mixed, X)) == {"bfloat16"}


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

  def norm(x):
    with jax.named_scope("LayerNorm_0"):
      return jnp.sin(x)

  found = {
    "products": seen("dot_general", between(jnp.tanh)),
    "exp, log, powers": seen("exp", between(jnp.exp)),
    # Of a sum, what is computed from it says what it gives.
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
  # All of these are written in float32.
  assert found == {
    name: cell.replace("as written", "float32")
    for name, cell in row.items()
    if name != "level"
  }


def test_o0_is_the_function_itself():
  def function(x):
    return x @ W

  assert ols.autocast(function, "O0") is function


def test_od_lowers_the_products_and_keeps_all_else_as_written():
  def function(x):
    low = jnp.exp(x.astype(jnp.float16)).astype(jnp.float32)
    return jnp.tanh(low + jnp.sin(x @ W)) @ W

  mixed = ols.autocast(function, "OD")
  assert set(products(mixed, X)) == {"float16"}
  assert dtypes_of("exp", mixed, X) == ["float16"]
  for name in ("add", "sin", "tanh"):
    assert set(dtypes_of(name, mixed, X)) == {"float32"}


def test_od_is_o0_with_a_white_list():
  white = {"white": ["conv_general_dilated", "dot_general"]}
  by_hand = ols.autocast(between(jnp.tanh), "O0", operations=white)
  mixed = ols.autocast(between(jnp.tanh), "OD")
  assert str(jax.make_jaxpr(mixed)(X)) == str(jax.make_jaxpr(by_hand)(X))
