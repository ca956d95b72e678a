"""`autocast` keeps the derivative rules that functions bring along.

The authority is the same function without `autocast`, in float32.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _program
from tests import support
from tests.autocast import mixed
from tests.jaxpr import rules

pytestmark = pytest.mark.slow

KEY, W, X = rules.KEY, rules.W, rules.X


@pytest.mark.parametrize("name", rules.FUNCTIONS)
def test_gradients_are_those_of_the_rule(name):
  function = rules.FUNCTIONS[name]
  got = jax.jit(mixed.gradient(ols.autocast(function, "O2")))(X, W)
  mixed.assert_close(got, jax.jit(mixed.gradient(function))(X, W), 0.06)


@pytest.mark.parametrize("level", mixed.LEVELS)
def test_rules_hold_at_every_level(level):
  def function(x, w):
    return rules.nested_vjp(rules.wrong_jvp(rules.layer_jvp(x, w)), w)

  got = jax.jit(mixed.gradient(ols.autocast(function, level)))(X, W)
  mixed.assert_close(got, mixed.gradient(function)(X, W))


TRANSFORMATIONS = {
  "eager": lambda gradient: gradient,
  "vmap": lambda gradient: jax.vmap(gradient, (0, None)),
  "remat": lambda gradient: (
    lambda x, w: jax.vjp(jax.checkpoint(lambda x, w: gradient(x, w)[0]), x, w)[
      1
    ](x)
  ),
  "scan": lambda gradient: (
    lambda x, w: lax.scan(
      lambda x, _: (gradient(x, w)[0], None), x, None, length=2
    )[0]
  ),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_gradients_can_be_transformed(name):
  def function(x, w):
    return rules.layer_vjp(rules.layer_jvp(x, w), w)

  change = TRANSFORMATIONS[name]
  x = X[:, None] if name == "vmap" else X
  got = change(mixed.gradient(ols.autocast(function, "O1")))(x, W)
  mixed.assert_close(got, change(mixed.gradient(function))(x, W), 0.06)


@pytest.mark.parametrize(
  "function",
  [rules.layer_jvp, rules.through(rules.wrong_jvp), rules.by_symbolic_zeros],
)
def test_forward_mode_uses_the_rule(function):
  def tangents(function):
    one = jax.jvp(lambda x: function(x, W), (X,), (X,))
    return one, jax.jvp(function, (X, W), (X, W))

  got = tangents(ols.autocast(function, "O1"))
  mixed.assert_close(got, tangents(function))


@pytest.mark.parametrize("function", [rules.layer_jvp, rules.layer_vjp])
def test_second_derivatives_are_those_of_the_rule(function):
  def twice(function):
    def total(x, w):
      return (mixed.gradient(function, 0)(x, w) ** 2).sum()

    return jax.jit(jax.grad(total, (0, 1)))

  got = twice(ols.autocast(function, "O2"))(X, W)
  mixed.assert_close(got, twice(function)(X, W), 0.05)


@pytest.mark.parametrize(
  "function", [rules.layer_jvp, rules.layer_vjp, rules.nested_vjp]
)
def test_gradients_taken_inside_are_those_taken_outside(function):
  inside = ols.autocast(mixed.gradient(function), "O1")
  outside = mixed.gradient(ols.autocast(function, "O1"))
  mixed.assert_close(inside(X, W), outside(X, W), 0.005)


@pytest.mark.parametrize("level", mixed.LEVELS)
def test_relu_has_slope_zero_at_zero(level):
  slopes = mixed.gradient(ols.autocast(jax.nn.relu, level), 0)(jnp.zeros(2))
  np.testing.assert_array_equal(slopes, 0)


@pytest.mark.parametrize("function", [rules.wrong_jvp, rules.wrong_vjp])
def test_a_wrong_rule_is_not_corrected(function):
  slopes = mixed.gradient(ols.autocast(rules.through(function), "O1"), 0)
  eye = jnp.eye(4)
  np.testing.assert_array_equal(slopes(eye, eye), 7)


@pytest.mark.parametrize("function", [rules.masked_jvp, rules.masked_vjp])
def test_integers_keys_and_masks_pass_through_a_rule(function):
  def run(x, w, count, key):
    return function(x @ w, count, key)

  args = (X, W, jnp.int32(3), KEY)
  want = run(*args)
  got = jax.jit(ols.autocast(run, "O3"))(*args)
  support.assert_same_bits(got[1:], want[1:])
  mixed.assert_close(got[0], want[0])


def test_integers_have_gradients_of_dtype_float0():
  def run(x, w, count):
    return rules.masked_vjp(x @ w, count, KEY)[0].sum()

  grad = jax.grad(ols.autocast(run, "O1"), 2, allow_int=True)
  assert grad(X, W, jnp.int32(3)).dtype == jax.dtypes.float0


@pytest.mark.parametrize("level", mixed.LOW_LEVELS)
@pytest.mark.parametrize(
  "function", [rules.layer_jvp, rules.layer_vjp, rules.nested_vjp]
)
def test_products_of_a_rule_have_float16_operands(function, level):
  grad = mixed.gradient(ols.autocast(rules.through_layer(function), level))
  assert mixed.dtypes_of(grad, "dot_general", X, W) == {"float16"}
  plain = mixed.count(
    mixed.gradient(rules.through_layer(function)), "dot_general", X, W
  )
  assert mixed.count(grad, "dot_general", X, W) == plain


def test_float32_inside_of_a_norm_goes_through_a_rule():
  @jax.custom_jvp
  def root(x):
    return jnp.sqrt(x)

  root.defjvp(lambda primals, tangents: (root(*primals), tangents[0]))

  def norm(x, w):
    y = x @ w
    y -= y.mean(-1, keepdims=True)
    return (y / root((y * y).mean(-1, keepdims=True) + 1e-6)) @ w

  quotients = [
    x.outvars[0].aval
    for x in mixed.equations(ols.autocast(norm, "O2"), X, W)
    if x.primitive.name == "div"
  ]
  assert {x.dtype.name for x in quotients if x.shape == X.shape} == {"float32"}


def test_a_rule_may_close_over_arrays_and_what_is_differentiated_around():
  def run(x, w):
    @jax.custom_vjp
    def times(y):
      return y @ w

    times.defvjp(
      lambda y: (times(y), None), lambda _, cotangent: (3 * (cotangent @ w.T),)
    )
    return mixed.gradient(times, 0)(x)

  mixed.assert_close(ols.autocast(run, "O1")(X, W), run(X, W))


@pytest.mark.parametrize("differentiated", [False, True])
def test_work_grows_with_the_depth_of_rules_as_their_number(
  monkeypatch, differentiated
):
  """Not as two to the power of it."""
  evaluate = _program.MixedProgram.evaluate
  calls = []

  def counting(*args):
    calls.append(args)
    return evaluate(*args)

  monkeypatch.setattr(_program.MixedProgram, "evaluate", counting)
  numbers = []
  for depth in (4, 8):
    function = jnp.sin
    for _ in range(depth):
      inner, function = function, jax.custom_jvp(function)
      function.defjvp(functools.partial(jax.jvp, inner))
    function = ols.autocast(function)
    calls.clear()
    jax.make_jaxpr(mixed.gradient(function, 0) if differentiated else function)(
      X
    )
    numbers.append(len(calls))
  assert numbers[1] <= 3 * numbers[0]


@pytest.mark.parametrize("function", [rules.layer_jvp, rules.layer_vjp])
def test_a_rule_keeps_nothing_of_what_was_traced(function):
  with jax.checking_leaks():
    jax.jit(ols.autocast(function))(X, W)
    mixed.gradient(ols.autocast(function))(X, W)
