"""The interpreter against jax.jit of the same function."""

import ast
import functools
import pathlib
import re

import chex
import jax
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from tests.support import describe
from tests.support import make_mesh
from tests.support import to_bits
from tests.support import with_vmap

X = jnp.array([0.5, -1.25, 2.0])


def inline(equation, inputs):
  """A rule that evaluates jitted functions one equation at a time."""
  inner = calls.transparent_body(equation)
  if inner is None:
    return interpreter.bind(equation, inputs)
  with interpreter.inside(equation):
    return interpreter.evaluate(inner, inputs, inline)


each_rule = pytest.mark.parametrize("rule", [interpreter.bind, inline])


def evaluated(function, rule=interpreter.bind):
  """Returns `function` as the interpreter evaluates it."""

  @functools.wraps(function)
  def wrapper(*arguments):
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    outputs = interpreter.evaluate(jaxpr, jax.tree.leaves(arguments), rule)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

  return wrapper


def equation_of(function, *arguments):
  """Returns the one equation that a function is recorded as."""
  (equation,) = jax.make_jaxpr(function)(*arguments).eqns
  return equation


@jax.custom_jvp
def eleven(x):
  """The identity, with a derivative that nobody could guess."""
  return x * 1.0


eleven.defjvp(lambda primals, tangents: (primals[0], 11 * tangents[0]))


@jax.custom_vjp
def seven(x):
  """The identity, with another such derivative."""
  return x * 1.0


seven.defvjp(lambda x: (x, None), lambda _, tangent: (7 * tangent,))


def scan(x):
  return jax.lax.scan(lambda c, y: (c * y + 1, c - y), x, jnp.arange(4.0))


def while_loop(x):
  return jax.lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c * c + 1.5, x)


def cond(x):
  return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), jax.lax.cond(
    x[1] > 0, jnp.sin, jnp.cos, x
  )


def switch(x):
  branches = [jnp.sin, jnp.cos, jnp.tanh]
  return [jax.lax.switch(i, branches, x) for i in jnp.arange(4)]


def remat(x):
  return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x)


def nested_jit(x):
  inner = jax.jit(lambda x: jnp.sin(x) * X)
  return jax.jit(lambda x: inner(x) + inner(x + 1))(x)


def constants(x):
  del x
  return 1.5, 3, True, np.arange(3, dtype=np.int8), jnp.ones(2, jnp.bfloat16)


def constants_of_a_jitted_function(x):
  array = np.arange(3, dtype=np.float16)
  return jax.jit(lambda x: (2.5, array, X, x, x + 1))(x)


def inputs_as_outputs(x):
  return x, {"again": x, "other": x + 1}


def outputs_twice(x):
  y = jnp.sin(x)
  return y, x, y, jax.jit(lambda z: (z + 1,) * 2)(y)


def dropped(x):
  jnp.linalg.qr(jnp.outer(x, x))
  _, index = jax.lax.top_k(x, 2)
  return index


def zero_size(x):
  return x[:0], jnp.sum(x[:0]), jnp.zeros((0, 3)) @ x


def random_key(x):
  key, other = jax.random.split(jax.random.key(3))
  return key, x + jax.random.normal(other, (3,))


def old_random_key(x):
  return jax.random.PRNGKey(1), jax.random.bits(jax.random.PRNGKey(2), (3,)), x


def complex_numbers(x):
  return jax.lax.complex(x, -x) * (1 + 2j)


def integers(x):
  return jnp.argsort(x), x.astype(jnp.int8) + 1, x > 0


def derivatives_inside(x):
  return jax.grad(lambda x: jnp.sum(eleven(x) + seven(x) * x))(x)


def linear_solve(x):
  matrix = jnp.outer(x, x) + 3 * jnp.eye(3)
  return jnp.linalg.solve(matrix, x), jax.scipy.linalg.cho_factor(matrix)[0]


def reference(x):
  ref = jax.new_ref(x)
  ref[...] = ref[...] * 2 + 1
  return jax.freeze(ref)


def other_random_bits(x):
  with jax.threefry_partitionable(False):
    return x, jax.random.bits(jax.random.key(0), (5,))


def wide_inside(x):
  with jax.enable_x64(True):
    wide = x.astype("float64") / 3 + np.float64(1e-12)
    wide, _ = jax.lax.scan(lambda c, y: (c * y, None), wide, np.ones(2) / 3)
    return (wide * 2.0**30).astype("float32")


FUNCTIONS = [
  complex_numbers,
  cond,
  constants,
  constants_of_a_jitted_function,
  derivatives_inside,
  dropped,
  eleven,
  inputs_as_outputs,
  integers,
  linear_solve,
  nested_jit,
  old_random_key,
  other_random_bits,
  outputs_twice,
  random_key,
  reference,
  remat,
  scan,
  seven,
  switch,
  while_loop,
  wide_inside,
  zero_size,
]


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_has_the_values_that_it_has_without(function):
  expected = jax.jit(function)(X)
  got = jax.jit(evaluated(function, inline))(X)
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  assert [x.dtype for x in jax.tree.leaves(got)] == [
    x.dtype for x in jax.tree.leaves(expected)
  ]
  assert to_bits(got) == to_bits(expected)


@pytest.mark.parametrize("function", [nested_jit, scan, cond, zero_size])
@each_rule
def test_a_function_evaluated_eagerly_has_the_same_values(function, rule):
  got, expected = evaluated(function, rule)(X), function(X)
  chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("function", "slope"), [(eleven, 11), (seven, 7)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@each_rule
def test_a_custom_derivative_rule_is_still_used(function, slope, wrap, rule):
  inner = evaluated(lambda x: jnp.sum(wrap(function)(x)), rule)
  assert jax.grad(inner)(X).tolist() == [slope] * 3
  assert jax.jit(jax.grad(inner))(X).tolist() == [slope] * 3


def test_a_custom_jvp_rule_is_still_used_forwards():
  for transform in (lambda f: f, jax.jit):
    jvp = transform(
      lambda x, t: jax.jvp(evaluated(eleven, inline), (x,), (t,))[1]
    )
    assert jvp(X, jnp.ones(3)).tolist() == [11.0] * 3


def test_a_custom_vmap_rule_is_still_used():
  function = with_vmap(jnp.sin, lambda x: x * 5)
  batched = jax.jit(jax.vmap(evaluated(function, inline)))(jnp.stack([X, X]))
  assert batched.tolist() == jnp.stack([X * 5] * 2).tolist()


@pytest.mark.parametrize("function", [scan, cond, nested_jit, remat])
def test_derivatives_go_through_control_flow(function):
  def total(function):
    return lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(function(x)))

  got = jax.jit(jax.grad(total(evaluated(function, inline))))(X)
  expected = jax.jit(jax.grad(total(function)))(X)
  np.testing.assert_allclose(got, expected, rtol=1e-6)


@each_rule
def test_float0_passes_through(rule):
  def function(x, zero):
    return x * 2, zero

  zero = np.zeros(3, jax.dtypes.float0)
  y, after = evaluated(function, rule)(X, zero)
  assert y.tolist() == (X * 2).tolist()
  assert after.dtype == jax.dtypes.float0


def op_names(function):
  """Returns the names of the sines and cosines, without the function's own."""
  text = jax.jit(function).lower(X).compile().as_text()
  names = re.findall(r'op_name="jit\([^)]*\)/([^"]*(?:sin|cos|tan))"', text)
  return sorted(set(names))


def test_scopes_are_those_of_the_recording():
  def function(x):
    with jax.named_scope("first"):
      x = jnp.sin(x)
      with jax.named_scope("sec ond(x)"):
        x = jnp.cos(x)
    return jnp.tan(x)

  names = op_names(evaluated(function))
  assert names == ["first/sec ond(x)/cos", "first/sin", "tan"]
  assert names == op_names(function)


def test_scopes_around_and_in_an_inlined_function_are_kept():
  @jax.jit
  def inner(x):
    with jax.named_scope("inside"):
      return jnp.sin(x)

  def function(x):
    with jax.named_scope("around"):
      return inner(x)

  def outer(x):
    with jax.named_scope("outer"):
      return evaluated(function, inline)(x)

  assert op_names(outer) == ["outer/around/jit(inner)/inside/sin"]


def test_metadata_of_an_operation_is_kept():
  def function(x):
    with set_xla_metadata(sentinel="seen"):
      x = jnp.sin(x)
    return jnp.cos(x)

  text = jax.jit(evaluated(function)).lower(X).as_text()
  lines = [line for line in text.splitlines() if "seen" in line]
  assert len(lines) == 1
  assert "sine" in lines[0]


def test_the_precision_of_a_product_is_kept():
  def function(x):
    with jax.default_matmul_precision("highest"):
      y = jnp.outer(x, x) @ x
    return y @ x

  text = jax.jit(evaluated(function, inline)).lower(X).as_text()
  expected = jax.jit(function).lower(X).as_text()
  assert text.count("HIGHEST") == expected.count("HIGHEST") > 0


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@each_rule
def test_an_effect_happens_once_per_call(transform, rule, ordered):
  seen = []

  def function(x):
    jax.debug.callback(seen.append, x[0], ordered=ordered)
    return x + 1

  called = transform(evaluated(jax.jit(function), rule))
  for value in (1.0, 2.0):
    called(jnp.full(2, value))
    jax.effects_barrier()
  assert [float(value) for value in seen] == [1.0, 2.0]


@each_rule
def test_a_print_is_printed_once(rule, capfd):
  def function(x):
    jax.debug.print("here {x}", x=x[0])
    return x

  jax.jit(evaluated(function, rule))(X)
  jax.effects_barrier()
  assert capfd.readouterr().out.count("here 0.5") == 1


@each_rule
def test_ordered_effects_keep_their_order(rule):
  seen = []

  def log(word, x):
    seen.append(word)
    return np.asarray(x)

  def function(x):
    x = io_callback(functools.partial(log, "a"), x, x, ordered=True)
    x = jax.jit(
      lambda x: io_callback(functools.partial(log, "b"), x, x, ordered=True)
    )(x)
    io_callback(functools.partial(log, "c"), X, X, ordered=True)
    return x

  jax.jit(evaluated(function, rule))(X)
  jax.effects_barrier()
  assert seen == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@each_rule
def test_a_shard_map_is_evaluated_from_outside(check_vma, transform, rule):
  @jax.shard_map(
    mesh=make_mesh("Auto"),
    in_specs=jax.P("data"),
    out_specs=(jax.P(), jax.P("data")),
    check_vma=check_vma,
  )
  def function(x):
    total = jax.lax.psum(x, "data")
    return total, x - total + jax.lax.axis_index("data")

  x = jnp.arange(8.0)
  got = transform(evaluated(function, rule))(x)
  assert to_bits(got) == to_bits(jax.jit(function)(x))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@each_rule
def test_collectives_are_evaluated_inside_a_shard_map(
  check_vma, transform, rule
):
  def function(x):
    mean = jax.jit(lambda x: jax.lax.pmean(x, "data"))(x)
    return mean, x * mean

  shard = functools.partial(
    jax.shard_map,
    mesh=make_mesh("Auto"),
    in_specs=jax.P("data"),
    out_specs=(jax.P(), jax.P("data")),
    check_vma=check_vma,
  )
  x = jnp.arange(8.0)
  got = transform(shard(evaluated(function, rule)))(x)
  assert to_bits(got) == to_bits(jax.jit(shard(function))(x))


@each_rule
def test_collectives_are_evaluated_inside_a_pmap(rule):
  def function(x):
    return x - jax.lax.pmean(x, "data")

  x = jnp.arange(8.0)
  got = jax.pmap(evaluated(function, rule), axis_name="data")(x)
  np.testing.assert_array_equal(got, x - 3.5)


@each_rule
def test_collectives_are_evaluated_inside_a_vmap(rule):
  def function(x):
    return x - jax.lax.pmean(x, "data") + jax.lax.axis_index("data")

  got = jax.jit(jax.vmap(evaluated(function, rule), axis_name="data"))(
    jnp.arange(3.0)
  )
  assert got.tolist() == [-1.0, 1.0, 3.0]


@each_rule
def test_an_explicit_sharding_is_kept(rule):
  with jax.set_mesh(make_mesh("Explicit")):
    x = jax.device_put(jnp.ones((8, 3)), jax.P("data", None))

    def function(x):
      return jax.jit(jnp.sin)(x), jax.reshard(x, jax.P(None, None)) * 2

    got = jax.jit(evaluated(function, rule))(x)
    expected = jax.jit(function)(x)
  assert [y.sharding for y in got] == [y.sharding for y in expected]
  assert to_bits(got) == to_bits(expected)


@each_rule
def test_an_axis_made_automatic_inside_stays_so(rule):
  with jax.set_mesh(make_mesh("Explicit")):
    x = jax.device_put(jnp.ones((8, 3)), jax.P("data", None))
    function = jax.sharding.auto_axes(jnp.sin, out_sharding=jax.P("data", None))
    got = jax.jit(evaluated(function, rule))(x)
  assert got.sharding.spec == jax.P("data", None)
  np.testing.assert_allclose(got, np.sin(np.ones((8, 3))), rtol=1e-6)


def test_the_jaxpr_of_a_jitted_function_is_that_of_the_equation():
  equation = equation_of(jax.jit(lambda x: jnp.sin(x) + 1), X)
  inner = calls.transparent_body(equation)
  assert [eqn.primitive.name for eqn in inner.eqns] == ["sin", "add"]


@pytest.mark.parametrize("function", [jnp.sin, scan, remat, eleven, seven])
def test_what_is_no_jitted_function_has_no_inner_jaxpr(function):
  for equation in jax.make_jaxpr(function)(X).eqns:
    assert calls.transparent_body(equation) is None


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_function_that_says_where_its_values_lie_is_not_inlined(
  side, axis_type
):
  with jax.set_mesh(make_mesh(axis_type)):
    # Replicated, or an Explicit mesh would refuse the argument as it is.
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    function = jax.jit(jnp.sin, **{side: sharding})
    assert calls.transparent_body(equation_of(function, X)) is None


def test_one_sharding_among_many_values_is_enough():
  sharding = jax.NamedSharding(make_mesh("Auto"), jax.P())
  function = jax.jit(
    lambda x: (x, x + 1), out_shardings=(None, sharding), in_shardings=None
  )
  assert calls.transparent_body(equation_of(function, X)) is None


@each_rule
def test_a_sharding_said_by_a_jitted_function_survives(rule):
  sharding = jax.NamedSharding(make_mesh("Auto"), jax.P("data"))
  inner = jax.jit(lambda x: x + 1, out_shardings=sharding)
  got = jax.jit(evaluated(inner, rule))(jnp.arange(8.0))
  assert got.sharding.is_equivalent_to(sharding, 1)


def test_a_rule_is_asked_once_per_equation_in_order():
  asked = []

  def rule(equation, inputs):
    asked.append(equation.primitive.name)
    return interpreter.bind(equation, inputs)

  evaluated(lambda x: jnp.cos(jnp.sin(x)) * jnp.tan(x), rule)(X)
  assert asked == ["sin", "cos", "tan", "mul"]


def test_what_a_rule_returns_is_what_later_equations_read():
  def rule(equation, inputs):
    if equation.primitive is primitives.sin_p:
      return [inputs[0] * 10]
    return interpreter.bind(equation, inputs)

  got = evaluated(lambda x: jnp.sin(x) + 1, rule)(X)
  assert got.tolist() == (X * 10 + 1).tolist()


def test_types_are_those_of_the_recording():
  def function(x):
    return x * 2, jnp.where(x[0] > 0, 1.0, 2.0), jnp.arange(3)

  got = jax.eval_shape(evaluated(function, inline), X)
  assert describe(got) == describe(jax.eval_shape(function, X))


def test_wide_numbers_stay_wide():
  with jax.enable_x64(True):
    x = jnp.arange(3.0) / 3
    got = jax.jit(evaluated(lambda x: (jnp.sin(x) + 1 / 3, 2), inline))(x)
    expected = jax.jit(lambda x: (jnp.sin(x) + 1 / 3, 2))(x)
    assert [str(y.dtype) for y in got] == ["float64", "int64"]
    assert to_bits(got) == to_bits(expected)


def test_no_tracer_is_kept():
  with jax.checking_leaks():
    jax.jit(evaluated(nested_jit, inline))(X)


def test_what_it_relies_on_in_jax_exists():
  equation = equation_of(jax.jit(jnp.sin), X)
  assert equation.primitive is primitives.jit_p
  assert {
    "in_shardings",
    "jaxpr",
    "name",
    "out_shardings",
  } <= set(equation.params)
  with equation.ctx.manager:
    pass
  assert str(equation.source_info.name_stack) == ""
  assert equation.primitive.multiple_results
  assert equation.primitive.get_bind_params({}) == {}
  assert not primitives.sin_p.multiple_results
  inner = equation.params["jaxpr"]
  for jaxpr in (inner, jax.make_jaxpr(jnp.sin)(X)):
    assert isinstance(jaxpr.eqns[0], core.JaxprEqn)
    assert len(jaxpr.jaxpr.constvars) == len(jaxpr.consts) == 0
    assert len(jaxpr.jaxpr.invars) == len(jaxpr.jaxpr.outvars) == 1
    assert isinstance(jaxpr.jaxpr.outvars[0], core.Var)
    assert isinstance(jaxpr, core.ClosedJaxpr)
  (literal,) = jax.make_jaxpr(lambda: 1.5)().jaxpr.outvars
  assert isinstance(literal, core.Literal)
  assert literal.val == 1.5


def test_what_jit_leaves_open_is_no_sharding():
  equation = equation_of(jax.jit(jnp.sin), X)
  for side in ("in_shardings", "out_shardings"):
    (sharding,) = equation.params[side]
    assert not isinstance(sharding, jax.sharding.Sharding)


def private_names_of_jax(tree):
  """Yields the private names of jax in a module, and what is no public part."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
      names = [ast.unparse(node)]
    else:
      continue
    for name in names:
      root, *parts = name.split(".")
      if root in ("jax", "jaxlib") and (
        root == "jaxlib" or any(part.startswith("_") for part in parts)
      ):
        yield name


def test_only_public_names_of_jax_are_used():
  folder = pathlib.Path(optax_lossscale.__file__).parent
  paths = sorted(folder.rglob("*.py"))
  assert len(paths) >= 3
  for path in paths:
    assert list(private_names_of_jax(ast.parse(path.read_text()))) == []


def test_private_names_of_jax_would_be_found():
  for text in (
    "import jax._src.core",
    "from jax._src import core",
    "from jax import _src",
    "import jax\njax._src.core.Jaxpr",
    "import jaxlib",
  ):
    assert list(private_names_of_jax(ast.parse(text)))
