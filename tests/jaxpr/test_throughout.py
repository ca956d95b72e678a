"""The interpreter inside of calls and control flow, and what it reads there."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import throughout
from tests import support

X = jnp.arange(8.0)
MESH = support.make_mesh(data=4, model=2)
ZERO = np.zeros((), np.int32)


def platform_dependent(x):
  return lax.platform_dependent(x, cuda=jnp.cos, default=jnp.sin)


def sharded(check_vma, axis_names=frozenset()):
  """Returns sin over the devices of an axis of four."""
  return jax.jit(
    jax.shard_map(
      jnp.sin,
      mesh=MESH,
      in_specs=jax.P("data"),
      out_specs=jax.P("data"),
      check_vma=check_vma,
      axis_names=axis_names,
    )
  )


def until(limit):
  """Returns a loop that takes the sine while a counter is below a limit."""
  return lambda x: lax.while_loop(
    lambda state: state[0] < limit,
    lambda state: (state[0] + 1, jnp.sin(state[1])),
    (0, x),
  )[1]


# A function, and how often it takes a sine: on every device, in every round.
SINES = {
  "as it is": (jnp.sin, 1),
  "jit": (jax.jit(lambda x: jnp.sin(jax.jit(jnp.sin)(x))), 2),
  "scan": (
    lambda x: lax.scan(lambda c, y: (jnp.sin(c), y), x, X[:5])[0],
    5,
  ),
  "scan, reversed and unrolled": (
    lambda x: lax.scan(
      lambda c, y: (c, jnp.sin(c + y)), x[0], x, reverse=True, unroll=2
    )[1],
    8,
  ),
  "scan of nothing": (
    lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=0)[0],
    0,
  ),
  "while": (until(3), 3),
  "while with constants": (lambda x: until(jnp.int32(x[2]))(x * x[1]), 2),
  "while that does not run": (until(0), 0),
  "while whose condition counts": (
    lambda x: lax.while_loop(
      lambda c: jnp.sin(c[0]) > 0.5, lambda c: c - 1, x + 2
    ),
    3,
  ),
  "fori_loop of unknown length": (
    lambda x: lax.fori_loop(0, x[4].astype(int), lambda _, y: jnp.sin(y), x),
    4,
  ),
  "cond, taken": (lambda x: lax.cond(x[1] > 0, jnp.sin, jnp.cos, x), 1),
  "cond, not taken": (lambda x: lax.cond(x[1] < 0, jnp.sin, jnp.cos, x), 0),
  "switch": (
    lambda x: lax.switch(2, [jnp.cos, jnp.tan, lambda x: until(2)(x)], x),
    2,
  ),
  "remat": (jax.checkpoint(jnp.sin), 1),
  "custom_jvp": (support.with_jvp(jnp.sin), 1),
  "custom_vjp": (support.with_vjp(jnp.sin), 1),
  "custom_vmap": (support.with_vmap(jnp.sin, jnp.sin), 1),
  "composite": (lax.composite(jnp.sin, name="my.sin"), 1),
  "named_call": (jax.named_call(jnp.sin, name="mine"), 1),
  "shard_map": (sharded(True), 8),
  "shard_map unchecked": (sharded(False), 8),
  "shard_map over one axis": (sharded(True, {"data"}), 4),
  "shard_map around scan and cond": (
    jax.shard_map(
      lambda x: lax.scan(
        lambda c, i: (lax.cond(i < 1, jnp.sin, jnp.cos, c), None),
        x,
        jnp.arange(3),
      )[0],
      mesh=MESH,
      in_specs=jax.P(("data", "model")),
      out_specs=jax.P(("data", "model")),
    ),
    8,
  ),
  "shard_map inside of scan": (
    lambda x: lax.scan(lambda c, _: (sharded(True)(c), None), x, X[:2])[0],
    16,
  ),
  "custom_linear_solve": (
    lambda x: lax.custom_linear_solve(
      lambda y: y * x[3],
      x,
      lambda _, b: jnp.sin(b) * x[2],
      lambda _, b: b * x[1],
    ),
    1,
  ),
  "platform_dependent": (platform_dependent, 1),
  "platform_dependent on each device": (
    jax.shard_map(
      platform_dependent,
      mesh=MESH,
      in_specs=jax.P("data"),
      out_specs=jax.P("data"),
    ),
    8,
  ),
}


class CountSines(throughout.Sum):
  zero = ZERO

  def apply(self, around, equation, inputs):
    outputs = interpreter.bind(equation, inputs)
    if equation.primitive.name != "sin":
      return outputs, ZERO
    # Always 1, but for JAX it varies wherever the sine does.
    return outputs, jnp.all(outputs[0] <= 1).astype(np.int32)


def count_sines(function):
  """Returns a function for the result and how often it takes a sine."""

  def counting(*args):
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    outputs, count = throughout.evaluate(
      jaxpr, jax.tree.leaves(args), CountSines()
    )
    return jax.tree.unflatten(jax.tree.structure(shape), outputs), count

  return counting


def params_of(function, *args):
  """Returns the name and the parameters of a function's only call."""
  (equation,) = [
    equation
    for equation in jax.make_jaxpr(function)(*args).eqns
    if calls.form(equation) is not None
  ]
  return equation.primitive.name, equation.params


@pytest.mark.slow
@pytest.mark.parametrize("name", SINES)
def test_every_operation_that_runs_is_counted(name):
  function, expected = SINES[name]
  result, count = jax.jit(count_sines(function))(X)
  assert count == expected
  np.testing.assert_array_equal(result, jax.jit(function)(X))


@pytest.mark.slow
def test_an_eager_evaluation_counts_the_same():
  for name in ("while", "cond, taken", "shard_map", "platform_dependent"):
    function, expected = SINES[name]
    assert count_sines(function)(X)[1] == expected, name


@pytest.mark.parametrize("name", ["while", "cond, taken", "shard_map"])
def test_the_rule_that_counts_nothing_leaves_every_operation_as_it_is(name):
  function, _ = SINES[name]
  jaxpr = jax.make_jaxpr(function)(X)
  rule = throughout.CountingRule()
  (result,), count = throughout.evaluate(jaxpr, [X], rule)
  np.testing.assert_array_equal(result, function(X))
  assert count == ()


def test_under_vmap_each_example_counts_for_itself():
  limits = jnp.array([0, 1, 3])
  function = jax.vmap(lambda limit, x: until(limit)(x), in_axes=(0, None))
  result, counts = jax.vmap(
    lambda limit: count_sines(lambda limit, x: until(limit)(x))(limit, X)
  )(limits)
  np.testing.assert_array_equal(counts, limits)
  np.testing.assert_array_equal(result, function(limits, X))


def test_a_loop_over_a_batch_keeps_the_examples_that_are_through():
  keys = jax.random.split(jax.random.key(0), 3)

  def loop(limit, key):
    return lax.while_loop(
      lambda state: state[0] < limit,
      lambda state: (state[0] + 1, jax.random.split(state[1])[0]),
      (0, key),
    )

  batched = jax.vmap(loop)
  result, _ = count_sines(batched)(jnp.array([0, 1, 3]), keys)
  expected = batched(jnp.array([0, 1, 3]), keys)
  np.testing.assert_array_equal(result[0], expected[0])
  np.testing.assert_array_equal(
    jax.random.key_data(result[1]), jax.random.key_data(expected[1])
  )


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_branch_for_a_platform_is_that_of_what_is_compiled(platform):
  def function(x):
    return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)

  exported = jax.export.export(
    jax.jit(lambda x: count_sines(function)(x)[0]), platforms=[platform]
  )(X)
  operation = {"cpu": "sine", "cuda": "cosine"}[platform]
  assert f"stablehlo.{operation} " in exported.mlir_module()


def test_a_jitted_function_keeps_its_shardings():
  sharding = jax.NamedSharding(MESH, jax.P("data"))
  for where in ("in_shardings", "out_shardings"):
    function = jax.jit(jnp.sin, **{where: sharding})
    result, _ = count_sines(lambda x, f=function: f(x))(X)
    assert result.sharding.is_equivalent_to(sharding, 1), where


# What is read of an equation, by the name of its primitive.
READ = {
  "jit": (jax.jit(jnp.sin), ("jaxpr", "in_shardings", "out_shardings", "name")),
  "checkpoint": (
    jax.checkpoint(jnp.sin),
    ("jaxpr", "differentiated", "prevent_cse"),
  ),
  "cond": (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), ("branches",)),
  "scan": (
    lambda x: lax.scan(lambda c, y: (c + x[0], y), 0.0, x),
    ("jaxpr", "length", "reverse", "unroll"),
  ),
  "while": (
    until(3),
    ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"),
  ),
  "shard_map": (
    lambda x: sharded(True).__wrapped__(x),
    (
      "jaxpr",
      "mesh",
      "in_specs",
      "out_specs",
      "check_vma",
      "newly_manual_axes",
    ),
  ),
}


@pytest.mark.parametrize("name", READ)
def test_jax_still_calls_the_parameters_so(name):
  function, names = READ[name]
  primitive, parameters = params_of(function, X)
  # jax has called remat both.
  assert primitive.replace("remat", "checkpoint").rstrip("0123456789") == name
  assert set(names) <= set(parameters)


def test_a_platform_dependent_cond_says_so():
  name, parameters = params_of(platform_dependent, X)
  assert name == "cond"
  assert parameters["branches_platforms"] == (("cuda",), None)
  _, parameters = params_of(READ["cond"][0], X)
  assert parameters.get("branches_platforms") is None


def test_the_lengths_of_a_scan_are_found():
  def function(x, y, xs):
    return lax.scan(lambda c, z: ((c[0] + x, c[1] * y), z + x), (x, y), xs)

  jaxpr = jax.make_jaxpr(function)(1.0, 2.0, X)
  (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  carried = calls.carried(scan)
  assert (carried.start, len(carried)) == (2, 2)


def test_a_differentiated_remat_says_so():
  function = jax.grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin)(x)))
  name, parameters = params_of(function, X)
  assert name in ("checkpoint", "remat2", "remat")
  assert parameters["differentiated"]
  assert parameters["prevent_cse"]
  text = jax.jit(lambda x: count_sines(function)(x)[0]).lower(X).as_text()
  assert "optimization_barrier" in text
