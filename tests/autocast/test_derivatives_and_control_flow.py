"""autocast in loops, branches and remat, and with derivative rules.

The authority is the same function without autocast, in float32.
"""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _plan
from optax_lossscale._autocast import _program
from optax_lossscale._autocast import levels
from optax_lossscale._jaxpr import operations
from tests import support
from tests.autocast import mixed
from tests.autocast import rules
from tests.autocast.programs import dtypes_of

KEY, W, X = rules.KEY, rules.W, rules.X


def layer(x, w):
  return jnp.tanh(x @ w)


# Loops and branches.


def scanned(x, w, **options):
  """Scans over floats, integers and booleans, and carries several dtypes."""

  def body(carry, row):
    y, half, total, key = carry
    bias, number, is_on = row
    y = layer(y, w) * jnp.where(is_on, 1.0, 0.5) + bias
    half = (half @ w.astype(jnp.bfloat16)) / 2
    key, drawn = jax.random.split(key)
    noise = jax.random.normal(drawn, (2,))
    return (y, half, total + number, key), (y.sum(), noise, is_on, number)

  carry = (x @ w, x.astype(jnp.bfloat16), jnp.int32(0), jax.random.key(0))
  rows = (
    jnp.linspace(0, 1, 12).reshape(3, 4),
    jnp.arange(3),
    jnp.array([True, False, True]),
  )
  return lax.scan(body, carry, rows, **options)


def repeated(x, w):
  """Returns a scan of a scan."""

  def twice(x, _):
    return lax.scan(lambda x, _: (layer(x, w), None), x, None, length=2)

  return lax.scan(twice, x, None, length=2)[0]


def until(x, w, length):
  return lax.while_loop(
    lambda state: (state[0] < length) & (abs(state[1]).max() < 100),
    lambda state: (state[0] + 1, layer(state[1], w) + 0.25),
    (0, x @ w),
  )[1]


def switched(x, w, index):
  """Runs one of several branches, each in another precision."""
  branches = [
    lambda x: x @ w,
    lambda x: jnp.exp(x),
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    lambda x: x,
  ]
  return lax.switch(index, branches, x @ w) @ w


def root(x, w):
  """Returns z for which z = tanh(0.1 z @ w + x)."""

  def solve(function, guess):
    return lax.fori_loop(0, 20, lambda _, z: z - function(z), guess)

  return lax.custom_root(
    lambda z: z - jnp.tanh(0.1 * z @ w + x[0]),
    jnp.zeros(4),
    solve,
    lambda function, y: jnp.linalg.solve(jax.jacobian(function)(y), y),
  )


def solved(x, w):
  matrix = w @ w.T + 3 * jnp.eye(4)
  return lax.custom_linear_solve(
    lambda y: matrix @ y,
    x[0],
    lambda _, y: jnp.linalg.solve(matrix, y),
    lambda _, y: jnp.linalg.solve(matrix.T, y),
  )


def literal_carry(x, w):
  """Starts from numbers in the program, and from NumPy's arrays."""
  start = (0.0, np.zeros(4, np.float32), 1.0)
  return lax.fori_loop(
    0, 3, lambda _, y: (y[0] + 1, y[1] + x[0] @ w, y[2] / 2), start
  )


LOOPS = {
  "scan, reversed and unrolled": lambda x, w: scanned(
    x, w, reverse=True, unroll=2
  )[0][:2],
  "vmapped scan": lambda x, w: jax.vmap(repeated, (0, None))(x[:, None], w),
  "literals carried": literal_carry,
  "a branch for each": lambda x, w: jax.vmap(switched, (0, None, 0))(
    x, w, jnp.arange(3)
  ),
  "platform_dependent": lambda x, w: (
    lax.platform_dependent(x @ w, cpu=jnp.tanh, default=jnp.sin) @ w
  ),
  "associative_scan": lambda x, w: lax.associative_scan(
    jnp.matmul, jnp.stack([w] * 3)
  ),
  "custom_root": root,
  "custom_linear_solve": solved,
  # By themselves these two have no derivative in reverse mode.
  "custom_vmap": support.with_vmap(layer, lambda x, w: x),
  "composite": functools.partial(lax.composite, name="my.layer")(layer),
}
WITHOUT_GRADIENTS = ("custom_vmap", "composite")
PROGRAMS = LOOPS | rules.FUNCTIONS


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_the_program(name):
  function = PROGRAMS[name]
  as_written = layer if name in WITHOUT_GRADIENTS else function

  def both(function):
    return jax.jit(
      lambda x, w: (function(x, w), mixed.gradient(function)(x, w))
    )

  got = both(ols.autocast(function, "O2"))(X, W)
  mixed.assert_close(got, both(as_written)(X, W), 0.06)


# Each applies a function of a carried value and of another value in a body.
BODIES = {
  "cond": lambda f, c, x: lax.cond(c[0, 0] > 0, f, jnp.add, c, x),
  "scan": lambda f, c, x: lax.scan(
    lambda c, _: (f(c, x), None), c, None, length=2
  )[0],
  "while": lambda f, c, x: lax.while_loop(
    lambda c: (c < x[0]).all(), lambda c: f(c, x), c
  ),
}
each_loop = pytest.mark.parametrize("name", ["scan", "while"])


@pytest.mark.parametrize("name", BODIES)
def test_a_bias_that_goes_into_a_body_follows(name):
  def function(x, w):
    return BODIES[name](lambda c, b: jnp.cos(c @ w + b) @ w, x @ w, w[0])

  low = ols.autocast(function, "O1")
  assert set(dtypes_of("cos", low, X, W)) == {"float16"}


@each_loop
def test_a_carried_value_does_not_follow_although_its_start_is_given(name):
  def function(x, w):
    return BODIES[name](lambda c, _: jnp.cos(c + c @ w), x, w[0]) @ w

  low = ols.autocast(function, "O1")
  assert set(dtypes_of("cos", low, X, W)) == {"float32"}


@each_loop
@pytest.mark.parametrize("change", [lambda f: f, jax.jit])
def test_the_product_of_the_next_round_follows_in_a_loop(name, change):
  @change
  def product(x, w):
    return x @ w

  def function(x, w):
    return BODIES[name](lambda c, _: jnp.cos(product(c, w)), x, w[0])

  low = ols.autocast(function, "O1")
  assert set(dtypes_of("cos", low, X, W)) == {"float16"}


@pytest.mark.parametrize(
  "function", [scanned, functools.partial(until, length=3)]
)
def test_a_loop_carries_the_dtypes_of_the_program(function):
  def carried(function):
    return [
      atom.aval.dtype.name
      for x in mixed.equations(function, X, W)
      if x.primitive.name in ("scan", "while")
      for atom in x.outvars
      if atom.aval.dtype != bool
    ]

  low = ols.autocast(function, "O2")
  assert carried(low) == carried(function)
  # The program itself has a product in bfloat16.
  dtypes = set(dtypes_of("dot_general", low, X, W))
  assert dtypes in ({"float16"}, {"float16", "bfloat16"})


def test_a_scan_restores_the_dtypes_of_what_it_carries_and_of_nothing_else():
  def function(x, w):
    def body(carry, _):
      count, y = carry
      return (count + 1, y @ w), y @ w

    (count, y), stacked = lax.scan(body, (0.0, x @ w), None, length=2)
    return jnp.tanh(stacked) @ y.T * count

  low = ols.autocast(function, "O1")
  assert set(dtypes_of("tanh", low, X, W)) == {"float16"}


# Remat.


def rematerialized(x, w):
  y = checkpoint_name(x @ w, "product")
  return jnp.sin(jnp.exp(y) @ w)


POLICIES = {
  "all again": None,
  "by name": jax.checkpoint_policies.save_only_these_names("product"),
  "products saved": jax.checkpoint_policies.dots_saveable,
  "all saved": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("name", POLICIES)
def test_remat_computes_again_what_its_policy_says(name):
  function = jax.checkpoint(rematerialized, policy=POLICIES[name])
  plain = mixed.gradient(function)
  low = mixed.gradient(ols.autocast(function, "O1"))
  for operation in ("dot_general", "exp", "sin", "name"):
    want = mixed.count(plain, operation, X, W)
    assert mixed.count(low, operation, X, W) == want, operation
  mixed.assert_close(low(X, W), plain(X, W), 0.05)


# Derivative rules.


@pytest.mark.slow
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


@pytest.mark.parametrize("function", [rules.masked_jvp, rules.masked_vjp])
def test_integers_keys_and_masks_pass_through_a_rule(function):
  def run(x, w, count, key):
    return function(x @ w, count, key)

  args = (X, W, jnp.int32(3), KEY)
  want = run(*args)
  got = jax.jit(ols.autocast(run, "O3"))(*args)
  support.assert_same_bits(got[1:], want[1:])
  mixed.assert_close(got[0], want[0])


@pytest.mark.parametrize("function", [rules.layer_jvp, rules.layer_vjp])
def test_products_of_a_rule_have_float16_operands_at_every_level(function):
  written = mixed.gradient(rules.through_layer(function))
  number = mixed.count(written, "dot_general", X, W)
  for level in ("O1", "O3"):
    grad = mixed.gradient(ols.autocast(rules.through_layer(function), level))
    assert set(dtypes_of("dot_general", grad, X, W)) == {"float16"}, level
    assert mixed.count(grad, "dot_general", X, W) == number, level


def test_a_norm_is_recognized_through_a_rule():
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


def test_a_rule_may_close_over_a_value_that_is_differentiated_outside():
  def run(x, w):
    @jax.custom_vjp
    def times(y):
      return y @ w

    times.defvjp(
      lambda y: (times(y), None), lambda _, cotangent: (3 * (cotangent @ w.T),)
    )
    return mixed.gradient(times, 0)(x)

  mixed.assert_close(ols.autocast(run, "O1")(X, W), run(X, W))


@pytest.mark.usefixtures("without_older_objects")
def test_a_rule_keeps_nothing_of_what_was_traced():
  with jax.checking_leaks():
    mixed.gradient(jax.jit(ols.autocast(rules.nested_vjp)))(X, W)


# The work grows with the depth of a program, not as two to the power of it.


@pytest.mark.parametrize("differentiated", [False, True])
def test_nested_rules_are_evaluated_few_times(monkeypatch, differentiated):
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


def in_a_scan(function):
  return lambda x: lax.scan(lambda x, _: (function(x), x), x, None, 2)[0] + 1


def in_a_rule(function):
  with_rule = jax.custom_jvp(function)
  with_rule.defjvp(functools.partial(jax.jvp, function))
  return lambda x: jnp.exp(with_rule(x))


@pytest.mark.parametrize("nest", [in_a_scan, jax.jit, in_a_rule])
def test_nested_bodies_are_planned_few_times(nest, monkeypatch):
  planned = []
  moves = operations.moves

  def counting(equation):
    planned.append(equation)
    return moves(equation)

  monkeypatch.setattr(operations, "moves", counting)
  recipe = levels.make_recipe("O1", np.float16, None, None)
  numbers = []
  for depth in (3, 6):
    function = lambda x: x @ x  # noqa: E731
    for _ in range(depth):
      function = nest(function)
    jaxpr = jax.make_jaxpr(lambda x, f=function: f(x) @ x)(W)
    planned.clear()
    _plan.make_plan(jaxpr, recipe, "", _plan.Use())
    numbers.append(len(planned))
  # In proportion to the depth, for a loop or a call. A function with a rule is
  # planned again for each function around it.
  assert numbers[1] <= (4 if nest is in_a_rule else 2) * numbers[0]
