"""Precision by scope, and lists that the caller edits."""

import collections
import fnmatch
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr import scopes
from tests.autocast.mixed import equations
from tests.autocast.programs import conversions
from tests.autocast.programs import dtypes_of


class LeNet5(nn.Module):
  """Two convolutions and two dense layers, the published names."""

  @nn.compact
  def __call__(self, x):
    x = nn.max_pool(nn.relu(nn.Conv(2, (3, 3), name="conv1")(x)), (2, 2))
    x = nn.relu(nn.Conv(3, (3, 3), name="conv2")(x))
    x = nn.LayerNorm(name="norm1")(x)
    x = x.reshape(x.shape[0], -1)
    return nn.Dense(4, name="fc2")(nn.relu(nn.Dense(5, name="fc1")(x)))


MODEL = LeNet5()
X = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
PARAMS = MODEL.init(jax.random.key(1), X)


def loss_fn(params, x):
  return jnp.mean(jnp.square(MODEL.apply(params, x)))


def products_by_scope(function, *arguments):
  """Returns the dtypes of the products, by the last part of their scope."""
  return {
    scopes.join("", str(equation.source_info.name_stack)).split("/")[
      -1
    ]: equation.invars[0].aval.dtype.name
    for equation in equations(function, *arguments)
    if equation.primitive.name in ("dot_general", "conv_general_dilated")
  }


def low_layers(level, overrides, **kwargs):
  """Returns the layers of LeNet-5 whose products are in float16."""
  mixed = ols.autocast(loss_fn, level, overrides=overrides, **kwargs)
  found = products_by_scope(mixed, PARAMS, X)
  assert set(found) == {"conv1", "conv2", "fc1", "fc2"}
  return {name for name, dtype in found.items() if dtype == "float16"}


def test_one_layer_alone_is_in_float16():
  assert low_layers("O0", {"LeNet5/conv1": jnp.float16}) == {"conv1"}


def test_between_two_layers_in_float16_it_is_as_written():
  overrides = {"LeNet5/conv1": jnp.float16, "LeNet5/fc1": jnp.float16}
  assert low_layers("O0", overrides) == {"conv1", "fc1"}


def test_an_override_beats_the_level():
  overrides = {"LeNet5/conv1": jnp.float32}
  assert low_layers("O3", overrides) == {"conv2", "fc1", "fc2"}


def test_an_override_beats_the_lists():
  @jax.named_scope("layer")
  def layer(x):
    return jnp.exp(x @ x)

  mixed = ols.autocast(
    lambda x: layer(x) @ x,
    "O1",
    overrides={"layer": jnp.float16},
    operations={"black": ["exp"]},
  )
  assert dtypes_of("exp", mixed, jnp.eye(2)) == ["float16"]


def test_an_override_covers_everything_inside_of_the_scope():
  overrides = {"LeNet5": jnp.float16}
  assert low_layers("O0", overrides) == {"conv1", "conv2", "fc1", "fc2"}


def test_an_asterisk_stands_for_anything():
  assert low_layers("O1", {"*fc*": jnp.float32}) == {"conv1", "conv2"}
  assert low_layers("O1", {"LeNet5/c*v*": jnp.float32}) == {"fc1", "fc2"}


def test_an_asterisk_matches_as_that_of_a_shell():
  rng = random.Random(0)
  answers = collections.Counter()
  for _ in range(20_000):
    pattern = "".join(rng.choices("ab*", k=rng.randint(0, 6)))
    text = "".join(rng.choices("ab", k=rng.randint(1, 6)))
    expected = fnmatch.fnmatchcase(text, pattern)
    assert scopes.ends_in(text, [pattern]) == expected, (text, pattern)
    answers[expected] += 1
  assert min(answers.values()) > 1000


def test_what_else_means_something_to_a_shell_stands_for_itself():
  assert scopes.matches("layers[0].x?", "l*s[0].x?")
  assert not scopes.matches("layers0", "layers[0]")
  assert not scopes.matches("layer", "laye?")
  assert not scopes.matches("layer", "laye.")


def test_a_pattern_of_many_asterisks_comes_to_an_end():
  # By a regular expression not within a lifetime.
  assert not scopes.matches("a" * 60, "*a" * 30 + "*b")
  assert scopes.matches("a" * 60, "*a" * 30 + "*a")


def test_the_longest_pattern_wins_whatever_the_order():
  overrides = {"LeNet5/conv1": jnp.float16, "LeNet5": jnp.float32}
  assert low_layers("O3", overrides) == {"conv1"}
  assert low_layers("O3", dict(reversed(overrides.items()))) == {"conv1"}


def test_a_layer_in_bfloat16_beside_layers_in_float16():
  mixed = ols.autocast(loss_fn, "O2", overrides={"LeNet5/conv2": jnp.bfloat16})
  found = products_by_scope(mixed, PARAMS, X)
  assert found.pop("conv2") == "bfloat16"
  assert set(found.values()) == {"float16"}


def test_overrides_hold_in_the_backward_pass():
  mixed = ols.autocast(loss_fn, "O0", overrides={"LeNet5/conv1": jnp.float16})
  low = [
    scopes.join("", str(equation.source_info.name_stack))
    for equation in equations(jax.grad(mixed), PARAMS, X)
    if equation.primitive.name in ("dot_general", "conv_general_dilated")
    and all(atom.aval.dtype == jnp.float16 for atom in equation.invars)
  ]
  # Forward, and the gradient of the kernel: the image has none.
  assert low == ["LeNet5/conv1"] * 2


def test_overrides_hold_inside_of_a_gradient():
  mixed = ols.autocast(
    jax.grad(loss_fn), "O0", overrides={"LeNet5/conv1": jnp.float16}
  )
  assert products_by_scope(mixed, PARAMS, X)["conv1"] == "float16"


@pytest.mark.parametrize("transform", [jax.grad, jax.hessian])
def test_overrides_hold_inside_of_what_a_gradient_computes_again(transform):
  @jax.checkpoint
  @jax.named_scope("mlp")
  def mlp(x):
    return jnp.sin(jnp.sin(x @ x) @ x)

  @jax.named_scope("block")
  def loss(x):
    return jnp.sum(mlp(mlp(x)))

  mixed = ols.autocast(
    transform(loss), "O0", overrides={"block/mlp": jnp.float16}
  )
  assert set(dtypes_of("dot_general", mixed, jnp.eye(2))) == {"float16"}


def test_overrides_hold_in_loops_and_jitted_functions():
  w = jnp.eye(2)

  @jax.jit
  def layer(x, _):
    with jax.named_scope("inner"):
      return x @ w, None

  def function(x):
    with jax.named_scope("outer"):
      return jax.lax.scan(layer, x, length=2)[0]

  overrides = {"outer/inner": jnp.float16}
  mixed = ols.autocast(function, "O0", overrides=overrides)
  assert set(dtypes_of("dot_general", mixed, w)) == {"float16"}


def test_a_named_scope_serves_where_no_library_writes_scopes():
  @jax.named_scope("first")
  def first(x):
    return x @ x

  mixed = ols.autocast(
    lambda x: first(x) @ x, "O0", overrides={"first": jnp.float16}
  )
  w = jnp.eye(2)
  assert dtypes_of("dot_general", mixed, w) == ["float16"] * 2 + ["float32"] * 2


def test_an_override_of_the_loss_holds():
  @jax.named_scope("loss")
  def loss(x):
    return jnp.tanh(x)

  mixed = ols.autocast(
    lambda x: loss(x @ x), "O1", overrides={"loss": jnp.float16}
  )
  assert dtypes_of("tanh", mixed, jnp.eye(2)) == ["float16"]


def test_one_layer_alone_converts_what_goes_in_and_what_comes_out():
  mixed = ols.autocast(
    MODEL.apply, "O0", overrides={"LeNet5/conv1": jnp.float16}
  )
  assert sorted(conversions(mixed, PARAMS, X)) == [
    ("float16", "float32"),  # The result.
    *[("float32", "float16")] * 3,  # The image, the kernel, the bias.
  ]


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_the_scopes():
  mixed = ols.autocast(loss_fn, "O1", overrides={"conv1": jnp.float16})
  with pytest.raises(ValueError) as caught:
    mixed(PARAMS, X)
  message = str(caught.value)
  assert "got 'conv1'" in message
  assert "'LeNet5/conv1'" in message
  assert "'LeNet5/norm1'" in message
  assert "'*conv1' would match" in message


def test_brackets_in_a_scope_are_brackets():
  @jax.named_scope("layers[0]")
  def layer(x):
    return x @ x

  mixed = ols.autocast(layer, "O0", overrides={"layers[0]": jnp.float16})
  assert dtypes_of("dot_general", mixed, jnp.eye(2)) == ["float16"] * 2


def test_a_function_without_scopes_says_how_to_get_them():
  mixed = ols.autocast(jnp.tanh, "O1", overrides={"conv1": jnp.float16})
  with pytest.raises(ValueError, match="jax.named_scope"):
    mixed(X)


@pytest.mark.parametrize(
  ("operations", "dtype"),
  [
    (None, "float16"),
    ({"black": ["tanh"]}, "float32"),
    ({"white": ["tanh"]}, "float16"),
    ({"gray": ["tanh"]}, "float16"),
  ],
)
def test_an_operation_is_in_the_list_that_the_caller_puts_it_in(
  operations, dtype
):
  mixed = ols.autocast(
    lambda x: jnp.tanh(x @ x) @ x, "O1", operations=operations
  )
  assert dtypes_of("tanh", mixed, jnp.eye(2)) == [dtype]


def test_an_operation_leaves_the_list_that_it_was_in():
  mixed = ols.autocast(
    lambda x: jnp.exp(x @ x) @ x, "O1", operations={"gray": ["exp"]}
  )
  assert dtypes_of("exp", mixed, jnp.eye(2)) == ["float16"]


def test_products_can_be_kept_in_float32():
  mixed = ols.autocast(
    loss_fn, "O1", operations={"black": ["conv_general_dilated"]}
  )
  found = products_by_scope(mixed, PARAMS, X)
  assert found["conv1"] == found["conv2"] == "float32"
  assert found["fc1"] == "float16"


def test_a_level_can_be_made_of_lists_alone():
  mixed = ols.autocast(loss_fn, "O0", operations={"white": ["dot_general"]})
  found = products_by_scope(mixed, PARAMS, X)
  assert found["conv1"] == found["conv2"] == "float32"
  assert found["fc1"] == found["fc2"] == "float16"


def test_an_operation_that_jax_does_not_have_is_an_error_with_the_nearest():
  mixed = ols.autocast(jnp.tanh, operations={"black": ["softmax", "tahn"]})
  with pytest.raises(ValueError, match="got 'softmax'"):
    mixed(X)
  mixed = ols.autocast(jnp.tanh, operations={"black": ["matmul"]})
  with pytest.raises(ValueError, match="got 'matmul'; a matrix product is"):
    mixed(X)
  mixed = ols.autocast(jnp.tanh, operations={"black": ["tahn"]})
  with pytest.raises(ValueError, match="got 'tahn'; did you mean .*'tanh'"):
    mixed(X)


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    (
      {"level": "O4"},
      ValueError,
      "`level` must be one of O0, O1, O2, O3, auto",
    ),
    ({"level": 1}, ValueError, "got 1"),
    (
      {"dtype": "half precision"},
      TypeError,
      "`dtype` must be a floating-point dtype",
    ),
    ({"dtype": jnp.int8}, TypeError, "got int8"),
    ({"dtype": jnp.float64}, ValueError, "one of float16, bfloat16, got"),
    ({"dtype": jnp.float8_e4m3fn}, ValueError, "a scale for each tensor"),
    ({"overrides": ["conv1"]}, TypeError, "`overrides` must be a dict"),
    (
      {"overrides": {"conv1": 16}},
      TypeError,
      "`overrides['conv1']` must be a floating-point dtype",
    ),
    ({"operations": {"grey": ["exp"]}}, ValueError, "got 'grey'"),
    ({"operations": {"gray": "exp"}}, TypeError, "a list of names"),
    ({"operations": {"gray": None}}, TypeError, "a list of names"),
    (
      {"operations": {"gray": ["exp"], "black": ["exp"]}},
      ValueError,
      "'exp' in 'gray' and 'black'",
    ),
  ],
  ids=str,
)
def test_a_wrong_argument_is_an_error_before_anything_is_traced(
  arguments, error, message
):
  with pytest.raises(error) as caught:
    ols.autocast(jnp.tanh, **arguments)
  assert message in str(caught.value)


def test_something_that_is_no_function_is_an_error():
  with pytest.raises(TypeError, match="`fun` must be a function"):
    ols.autocast(PARAMS, "O1")


@pytest.mark.parametrize(
  ("scope", "name_stack", "expected"),
  [
    ("", "LeNet5/conv1", "LeNet5/conv1"),
    ("", "jvp(LeNet5)/conv1", "LeNet5/conv1"),
    ("", "transpose(jvp(LeNet5))/conv1", "LeNet5/conv1"),
    ("LeNet5", "jit(relu)", "LeNet5"),
    ("LeNet5", "vmap(jit(f))/conv1", "LeNet5/conv1"),
    ("", "jvp()", ""),
    ("", "transpose(jvp(LeNet5/conv1))/b", "LeNet5/conv1/b"),
    ("", "jvp(jit(f))/jvp(f(x))/jit(g)", "f(x)"),
    ("a", "f(x)", "a/f(x)"),
    # Twice around a remat, in the backward pass.
    ("", "transpose(jvp(a/b))/jvp(a/b)", "a/b"),
    ("", "transpose(jvp(a))/b/jvp(a)/b/c", "a/b/c"),
    ("", "s/transpose(jvp(a))/b/s/jvp(a)/b", "s/a/b"),
    ("", "vmap(transpose(jvp(a)))/vmap(jvp(a))", "a"),
    ("a", "rematted_computation/b", "a/b"),
    # Once, and of the same name.
    ("", "transpose(jvp(a))/a", "a/a"),
    ("", "jvp(a)/jvp(jvp(a))", "a/a"),
    ("", "transpose(jvp(a))/b/jvp(a)", "a/b/a"),
  ],
)
def test_a_scope_is_without_what_jax_writes_around_it(
  scope, name_stack, expected
):
  assert scopes.join(scope, name_stack) == expected


@pytest.mark.slow
def test_gradients_of_one_low_layer_are_those_of_float32_up_to_rounding():
  mixed = ols.autocast(loss_fn, "O0", overrides={"LeNet5/conv1": jnp.float16})
  expected = jax.grad(loss_fn)(PARAMS, X)
  for a, b in zip(
    jax.tree.leaves(jax.grad(mixed)(PARAMS, X)),
    jax.tree.leaves(expected),
    strict=True,
  ):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, atol=4e-3 * float(jnp.max(jnp.abs(b))))
