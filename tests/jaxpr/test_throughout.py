"""A rule reaches every operation, and a function keeps its results."""

import contextlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import throughout
from tests import support

X = jnp.arange(8.0)
ZERO = np.zeros((), np.int32)


def platform_dependent(x):
  return lax.platform_dependent(x, cuda=jnp.cos, default=jnp.sin)


def on_devices(function, check_vma=True):
  return support.on_each_device(function, support.SPREAD, check_vma)


def on_one_axis_of_two(x):
  return jax.jit(
    jax.shard_map(
      jnp.sin,
      mesh=support.make_mesh(data=4, model=2),
      in_specs=support.SPREAD,
      out_specs=support.SPREAD,
      axis_names={"data"},
    )
  )(x)


def until(limit):
  """Returns a loop that takes the sine while a counter is below a limit."""
  return lambda x: lax.while_loop(
    lambda state: state[0] < limit,
    lambda state: (state[0] + 1, jnp.sin(state[1])),
    (0, x),
  )[1]


def in_some_rounds(x):
  return lax.scan(
    lambda c, i: (lax.cond(i < 2, jnp.sin, jnp.cos, c), None), x, jnp.arange(3)
  )[0]


# A function, and how often it takes a sine, on all devices and in all rounds.
# tests/jaxpr/test_calls.py has one for each primitive that holds a jaxpr.
SINES = {
  "scan": (lambda x: lax.scan(lambda c, y: (jnp.sin(c), y), x, X[:5])[0], 5),
  "scan, reversed and unrolled": (
    lambda x: lax.scan(
      lambda c, y: (c + 1, jnp.sin(c + y)), x[0], x, reverse=True, unroll=2
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
  "while with constants and a sine in its condition": (
    lambda x: lax.while_loop(
      lambda c: jnp.sin(c[0]) > x[1] / 2, lambda c: c - x[1], x + 2
    ),
    3,
  ),
  "cond, not taken": (lambda x: lax.cond(x[1] < 0, jnp.sin, jnp.cos, x), 0),
  "switch": (lambda x: lax.switch(2, [jnp.cos, jnp.tan, until(2)], x), 2),
  "shard_map": (on_devices(jnp.sin), 8),
  "shard_map over one axis of two": (on_one_axis_of_two, 4),
  "shard_map around scan and cond": (on_devices(in_some_rounds), 16),
  "shard_map inside scan": (
    lambda x: lax.scan(lambda c, _: (on_devices(jnp.sin)(c), None), x, X[:2])[
      0
    ],
    16,
  ),
  "platform_dependent on each device": (on_devices(platform_dependent), 8),
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


@pytest.mark.parametrize("name", SINES)
def test_every_operation_that_runs_is_counted(name):
  function, expected = SINES[name]
  result, count = jax.jit(count_sines(function))(X)
  assert count == expected
  np.testing.assert_array_equal(result, jax.jit(function)(X))


@pytest.mark.parametrize("name", ["while", "cond, not taken", "shard_map"])
def test_an_eager_evaluation_counts_the_same(name):
  function, expected = SINES[name]
  assert count_sines(function)(X)[1] == expected
  jaxpr = jax.make_jaxpr(function)(X)
  (result,), nothing = throughout.evaluate(
    jaxpr, [X], throughout.CountingRule()
  )
  np.testing.assert_array_equal(result, function(X))
  assert nothing == ()


def test_under_vmap_each_example_counts_for_itself():
  limits = jnp.array([0, 1, 3])
  function = lambda limit: until(limit)(X)  # noqa: E731
  result, counts = jax.vmap(count_sines(function))(limits)
  np.testing.assert_array_equal(counts, limits)
  np.testing.assert_array_equal(result, jax.vmap(function)(limits))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_branch_for_a_platform_depends_on_the_compilation(platform):
  def function(x):
    return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)

  exported = jax.export.export(
    jax.jit(lambda x: count_sines(function)(x)[0]), platforms=[platform]
  )(X)
  operation = {"cpu": "sine", "cuda": "cosine"}[platform]
  assert f"stablehlo.{operation} " in exported.mlir_module()


@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
def test_a_jitted_function_keeps_its_shardings(where, axis_type):
  mesh = support.make_mesh(axis_type)
  is_explicit = axis_type == "Explicit"
  with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
    # An explicit mesh refuses arguments of another sharding.
    lies = (
      jax.P() if is_explicit and where == "out_shardings" else support.SPREAD
    )
    x = jax.device_put(X, jax.NamedSharding(mesh, lies)) if is_explicit else X
    sharding = jax.NamedSharding(mesh, support.SPREAD)
    function = jax.jit(jnp.sin, **{where: sharding})
    result, _ = jax.jit(count_sines(lambda x: function(x + 0)))(x)
    expected = jax.jit(lambda x: function(x + 0))(x)
    assert result.sharding.is_equivalent_to(expected.sharding, 1)
    if lies == support.SPREAD:
      assert result.sharding.is_equivalent_to(sharding, 1)


def test_the_barrier_before_a_differentiated_remat_is_kept():
  function = jax.grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin)(x)))

  text = jax.jit(count_sines(function)).lower(X).as_text()
  assert "optimization_barrier" in text
