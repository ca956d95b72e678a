"""`autocast` in loops, branches, remat and jitted functions.

The authority is the same function without `autocast`, in float32.
"""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.autocast import mixed

W = jnp.linspace(-0.6, 0.7, 16).reshape(4, 4)
X = jnp.linspace(-1.0, 0.9, 12).reshape(3, 4)


def layer(x, w):
  return jnp.tanh(x @ w)


def scanned(x, w, **options):
  """Goes over floats, integers and truth values, and carries several dtypes."""

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
  """Returns what one of branches does, each of another precision."""
  branches = [
    lambda x: x @ w,
    lambda x: jnp.exp(x),
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    lambda x: x,
  ]
  return lax.switch(index, branches, x @ w) @ w


def on_platform(x, w):
  return lax.platform_dependent(x @ w, cpu=jnp.tanh, default=jnp.sin) @ w


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
    0,
    3,
    lambda _, state: (state[0] + 1, state[1] + x[0] @ w, state[2] / 2),
    start,
  )


PROGRAMS = {
  "scan": lambda x, w: scanned(x, w)[0][:2],
  "scan, reversed and unrolled": functools.partial(
    lambda x, w, **options: scanned(x, w, **options)[0][:2],
    reverse=True,
    unroll=2,
  ),
  "nested scan": repeated,
  "vmapped scan": lambda x, w: jax.vmap(repeated, (0, None))(x[:, None], w),
  "fori_loop": lambda x, w: lax.fori_loop(0, 3, lambda i, x: layer(x, w), x),
  "literals carried": literal_carry,
  "first branch": lambda x, w: switched(x, w, 0),
  "chosen branch": lambda x, w: switched(x, w, jnp.argmax(x[0]) - 2),
  "a branch for each": lambda x, w: jax.vmap(switched, (0, None, 0))(
    x, w, jnp.arange(3)
  ),
  "platform_dependent": on_platform,
  "associative_scan": lambda x, w: lax.associative_scan(
    jnp.matmul, jnp.stack([w] * 3)
  ),
  "map": lambda x, w: lax.map(lambda row: row @ w, x, batch_size=2),
  "custom_root": root,
  "custom_linear_solve": solved,
  "remat of a scan": jax.checkpoint(repeated),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_the_program(name):
  function = PROGRAMS[name]

  def both(function):
    return jax.jit(
      lambda x, w: (function(x, w), mixed.gradient(function)(x, w))
    )

  got = both(ols.autocast(function, "O2"))(X, W)
  mixed.assert_close(got, both(function)(X, W), 0.06)


@pytest.mark.slow
@pytest.mark.parametrize(
  "hold",
  [
    lambda function: support.with_vmap(function, lambda x, w: x),
    functools.partial(lax.composite, name="my.layer"),
  ],
)
def test_what_may_be_replaced_is_what_it_holds(hold):
  low = ols.autocast(hold(layer), "O1")
  mixed.assert_close(low(X, W), layer(X, W))
  # By itself it has no derivative in reverse mode.
  mixed.assert_close(mixed.gradient(low)(X, W), mixed.gradient(layer)(X, W))


@pytest.mark.slow
@pytest.mark.parametrize("level", mixed.LEVELS)
def test_loops_and_branches_run_at_every_level(level):
  def function(x, w):
    return scanned(until(x, w, 2), w)[0][:2], switched(x, w, 1)

  got = jax.jit(ols.autocast(function, level))(X, W)
  mixed.assert_close(got, jax.jit(function)(X, W), 0.05)


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
  assert mixed.dtypes_of(low, "cos", X, W) == {"float16"}


@each_loop
def test_what_a_loop_carries_does_not_follow_though_its_start_is_given(name):
  def function(x, w):
    return BODIES[name](lambda c, _: jnp.cos(c + c @ w), x, w[0]) @ w

  low = ols.autocast(function, "O1")
  assert mixed.dtypes_of(low, "cos", X, W) == {"float32"}


@each_loop
@pytest.mark.parametrize("change", [lambda f: f, jax.jit])
def test_the_next_round_is_what_follows_in_a_loop(name, change):
  @change
  def product(x, w):
    return x @ w

  def function(x, w):
    return BODIES[name](lambda c, _: jnp.cos(product(c, w)), x, w[0])

  low = ols.autocast(function, "O1")
  assert mixed.dtypes_of(low, "cos", X, W) == {"float16"}


def test_a_scan_draws_the_same_numbers_and_stacks_the_same_dtypes():
  got = jax.jit(ols.autocast(scanned, "O3"))(X, W)
  want = jax.jit(scanned)(X, W)
  support.assert_same_bits(got[1][1:], want[1][1:])
  support.assert_same_bits(got[0][2:], want[0][2:])


@pytest.mark.parametrize("name", ["scan", "fori_loop", "while"])
def test_what_a_loop_carries_keeps_its_dtype(name):
  function = {**PROGRAMS, "while": lambda x, w: until(x, w, 3)}[name]

  def carried(function):
    # A while carries its condition as well.
    return [
      atom.aval.dtype.name
      for x in mixed.equations(function, X, W)
      if x.primitive.name in ("scan", "while")
      for atom in x.outvars
      if atom.aval.dtype != bool
    ]

  low = ols.autocast(function, "O2")
  assert carried(low) == carried(function)
  # Of bfloat16 is what was written so.
  dtypes = mixed.dtypes_of(low, "dot_general", X, W)
  assert dtypes in ({"float16"}, {"float16", "bfloat16"})


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_while_under_vmap_stops_for_each_example_by_itself(where):
  def batched(function):
    return jax.vmap(function, (0, None, 0))

  args = (X[:, None], W, jnp.array([1, 4, 2]))
  if where == "inside":
    got = jax.jit(ols.autocast(batched(until), "O1"))(*args)
  else:
    got = jax.jit(batched(ols.autocast(until, "O1")))(*args)
  mixed.assert_close(got, batched(until)(*args))


def test_a_while_has_forward_derivatives():
  def tangent(function):
    return jax.jvp(lambda x, w: function(x, w, 2), (X, W), (X, W))

  got = tangent(ols.autocast(until, "O1"))
  mixed.assert_close(got, tangent(until))


@pytest.mark.parametrize("index", range(4))
def test_branches_of_different_precision_have_one_dtype(index):
  got = ols.autocast(switched, "O1")(X, W, jnp.int32(index))
  mixed.assert_close(got, switched(X, W, index))


def test_all_branches_stay():
  args = (X, W, jnp.int32(1))
  low = ols.autocast(switched, "O1")
  (equation,) = [
    x for x in mixed.equations(low, *args) if x.primitive.name == "cond"
  ]
  assert len(equation.params["branches"]) == 4


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


def test_remat_around_and_inside_compute_as_much_again():
  inside = mixed.gradient(ols.autocast(jax.checkpoint(rematerialized), "O1"))
  around = mixed.gradient(jax.checkpoint(ols.autocast(rematerialized, "O1")))
  for operation in ("dot_general", "exp"):
    assert mixed.count(inside, operation, X, W) == mixed.count(
      around, operation, X, W
    )


def test_a_gradient_with_remat_taken_inside_computes_as_much_again():
  function = mixed.gradient(jax.checkpoint(rematerialized))
  low = ols.autocast(function, "O1")
  plain_text, low_text = (
    jax.jit(x).lower(X, W).as_text() for x in (function, low)
  )
  assert "optimization_barrier" in low_text
  for operation in ("dot_general", "exponential"):
    assert low_text.count(operation) == plain_text.count(operation)
  mixed.assert_close(low(X, W), function(X, W), 0.05)


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


@pytest.mark.parametrize(
  "axis_types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)]
)
def test_a_jitted_function_inside_keeps_its_shardings(axis_types):
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types)
  by_rows = jax.NamedSharding(mesh, jax.P("data"))
  by_both = jax.NamedSharding(mesh, jax.P("data", "model"))
  jitted = jax.jit(layer, out_shardings=by_both)

  def function(x, w):
    return jitted(x, w) * 2

  x = jax.device_put(jnp.ones((8, 4)), by_rows)
  w = jax.device_put(W, jax.NamedSharding(mesh, jax.P()))
  got = jax.jit(ols.autocast(function, "O1"))(x, w)
  want = jax.jit(function)(x, w)
  assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
  mixed.assert_close(got, want)
