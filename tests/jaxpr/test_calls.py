"""Every reader of programs looks into every primitive that holds a jaxpr."""

import functools

import jax
from jax import lax
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr import calls
from tests import support
from tests.autocast.programs import dtypes_of

MESH = support.make_mesh()
X = np.linspace(1, 300, 32, dtype=np.float16).reshape(8, 4)


def called(primitive):
  def call(f, x):
    jaxpr = jax.make_jaxpr(f)(x)
    if primitive is primitives.call_p:
      jaxpr = jaxpr.jaxpr
    parameters = primitive.get_bind_params({"call_jaxpr": jaxpr})
    return primitive.bind(x, **parameters)[0]

  return lambda f: functools.partial(call, f)


# For each primitive, a program around a function that does the same.
PROGRAMS = {
  primitives.call_p.name: called(primitives.call_p),
  primitives.closed_call_p.name: called(primitives.closed_call_p),
  "jit": jax.jit,
  "composite": lambda f: lax.composite(f, name="my.layer"),
  "custom_vmap_call": lambda f: support.with_vmap(f, lambda x: -f(x)),
  primitives.remat_p.name: jax.checkpoint,
  "custom_jvp_call": support.with_jvp,
  "custom_vjp_call": support.with_vjp,
  "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, jnp.negative, x),
  "scan": lambda f: lambda x: lax.scan(lambda c, y: (f(c), y), x, X[:1])[0],
  "while": lambda f: (
    lambda x: lax.while_loop(
      lambda state: state[0] < x[0, 0],
      lambda state: (state[0] + x[0, 0], f(state[1])),
      (jnp.zeros_like(x[0, 0]), x),
    )[1]
  ),
  "shard_map": lambda f: jax.shard_map(
    f, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P("data")
  ),
  "custom_linear_solve": lambda f: (
    lambda x: lax.custom_linear_solve(lambda y: y * x, x, lambda _, y: f(y))
  ),
}

# These do nothing but call the function.
TRANSPARENT = ("jit", primitives.call_p.name, primitives.closed_call_p.name)

each_primitive = pytest.mark.parametrize("name", PROGRAMS)


@jax.named_scope("hidden")
def hidden(x):
  """Overflows, although its result is finite."""
  return 1 / (x * x + 1)


def test_every_primitive_of_the_table_has_a_program():
  assert PROGRAMS.keys() == calls.TABLE.keys()


@each_primitive
def test_only_plain_calls_are_transparent(name):
  (call,) = [
    equation
    for equation in jax.make_jaxpr(PROGRAMS[name](jnp.sin))(X).eqns
    if equation.primitive.name in PROGRAMS
  ]
  assert call.primitive.name == name
  body = calls.transparent_body(call)
  assert (body is not None) == (name in TRANSPARENT)
  if body is not None:
    assert [equation.primitive.name for equation in body.eqns] == ["sin"]


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
def test_a_jitted_function_that_places_any_of_its_values_stays_a_call(side):
  sharding = jax.NamedSharding(MESH, jax.P())
  function = jax.jit(lambda *xs: xs, **{side: (None, sharding)})
  assert calls.transparent_body(support.equation_of(function, X, X)) is None


@each_primitive
def test_every_reader_of_programs_sees_the_operation_inside(name):
  function = PROGRAMS[name](hidden)
  result, counts = jax.jit(ols.hardware.float_status(function))(X)
  assert np.all(np.isfinite(result))
  devices = np.sum(np.max(X, axis=1) > 255)  # Each has a row.
  assert counts.overflow == (devices if name == "shard_map" else 1)
  place = ols.instruments.where_overflow(function)(X)
  assert (place.operation, place.layer) == ("mul", "hidden")
  assert place.elements == np.sum(X > 255)
  assert place.iterations == ((0,) if name in ("scan", "while") else ())
  result = jax.jit(ols.hardware.emulate_saturation(function))(X)
  square = np.minimum(X.astype(np.float32) ** 2, 65504).astype(np.float16)
  np.testing.assert_array_equal(result, 1 / (square + np.float16(1)))
  assert np.all(result > 0)


@each_primitive
def test_autocast_lowers_the_product_inside(name):
  low = ols.autocast(PROGRAMS[name](lambda x: x @ jnp.eye(4)))
  # The precision of a solver is a part of it.
  dtype = "float32" if name == "custom_linear_solve" else "float16"
  assert set(dtypes_of("dot_general", low, np.float32(X))) == {dtype}
