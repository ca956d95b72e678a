"""Functions that are recorded and evaluated, against `jax.jit` of the same."""

import functools
import pathlib
import re

from flax import nnx
import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from tests import support

X = jnp.array([0.5, -1.25, 2.0])
SQUARE = jnp.outer(X, X) + 3 * jnp.eye(3)


def inline(equation, inputs):
  """A rule that evaluates jitted functions one equation at a time."""
  inner = calls.transparent_body(equation)
  if inner is None:
    return interpreter.bind(equation, inputs)
  with interpreter.inside(equation):
    return interpreter.evaluate(inner, inputs, inline)


def evaluated(function, rule=inline):
  """Returns `function` as the interpreter evaluates it."""

  @functools.wraps(function)
  def wrapper(*arguments):
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    outputs = interpreter.evaluate(jaxpr, jax.tree.leaves(arguments), rule)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

  return wrapper


def recorded(function):
  """Returns `function` as a recording evaluates it at once."""

  def wrapper(*args, **kwargs):
    recording = interpreter.record(function, args, kwargs)
    return recording.result(recording.evaluate(*recording.operands))

  return wrapper


# Evaluation -------------------------------------------------------------------

eleven = support.with_jvp(lambda x: x * 1.0, lambda dx: 11 * dx)
seven = support.with_vjp(lambda x: x * 1.0, lambda dy: 7 * dy)


def loops_and_branches(x):
  x, y = lax.scan(lambda c, y: (c * y + 1, c - y), x, jnp.arange(4.0))
  x = lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c * c + 1.5, x)
  x = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
  return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x), y


def nested_jit(x):
  inner = jax.jit(lambda x: jnp.sin(x) * X)
  array = np.arange(3, dtype=np.float16)
  return jax.jit(lambda x: (inner(x) + inner(x + 1), 2.5, array, X, x))(x)


def outputs_of_every_kind(x):
  y = jnp.sin(x)
  constants = 1.5, 3, True, np.arange(3, dtype=np.int8), jnp.ones(2, "bfloat16")
  return (
    x,
    {"again": x, "twice": (y, y)},
    jax.jit(lambda z: (z,) * 2)(y),
    constants,
  )


def random_numbers(x):
  key, other = jax.random.split(jax.random.key(3))
  with jax.threefry_partitionable(False):
    bits = jax.random.bits(jax.random.PRNGKey(0), (5,))
  return key, x + jax.random.normal(other, (3,)), bits


def reference(x):
  ref = jax.new_ref(x)
  ref[...] = ref[...] * 2 + 1
  return jax.freeze(ref)


def wide_inside(x):
  with jax.enable_x64(True):
    wide = x.astype("float64") / 3 + np.float64(1e-12)
    wide, _ = lax.scan(lambda c, y: (c * y, None), wide, np.ones(2) / 3)
    return (wide * 2.0**30).astype("float32")


FUNCTIONS = {
  "dropped outputs": lambda x: (jnp.linalg.qr(SQUARE), lax.top_k(x, 2))[1][1],
  "loops and branches": loops_and_branches,
  "nested jit": nested_jit,
  "outputs of every kind": outputs_of_every_kind,
  "random numbers": random_numbers,
  "reference": reference,
  "wide inside": wide_inside,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_evaluated_function_has_the_same_values_and_types(name):
  function = FUNCTIONS[name]
  expected = jax.jit(function)(X)
  got = jax.jit(evaluated(function))(X)
  support.assert_same_bits(got, expected)
  shapes = jax.eval_shape(evaluated(function), X)
  expected_shapes = jax.eval_shape(function, X)
  assert support.describe(shapes) == support.describe(expected_shapes)


@pytest.mark.parametrize("rule", [interpreter.bind, inline])
def test_custom_derivative_rules_are_still_used(rule):
  for function, slope in (eleven, 11), (seven, 7):
    inner = evaluated(lambda x, f=function: jnp.sum(jax.jit(f)(x)), rule)
    assert jax.jit(jax.grad(inner))(X).tolist() == [slope] * 3


# Contexts of operations -------------------------------------------------------


def op_names(function):
  """Returns the scopes of the operations of trigonometry."""
  text = jax.jit(function).lower(X).as_text(debug_info=True)
  names = re.findall(r'"jit\([^)]*\)/([^"]*(?:sin|cos|tan))"', text)
  return sorted(set(names))


def test_scopes_are_those_of_the_recording_and_of_calls_around():
  @jax.jit
  def inner(x):
    with jax.named_scope("inside"):
      return jnp.sin(x)

  def function(x):
    with jax.named_scope("first"):
      x = inner(x)
      with jax.named_scope("sec ond(x)"):
        x = jnp.cos(x)
    return jnp.tan(x)

  def outer(x):
    with jax.named_scope("outer"):
      return evaluated(function)(x)

  names = ["first/jit(inner)/inside/sin", "first/sec ond(x)/cos", "tan"]
  assert op_names(evaluated(function)) == names
  assert op_names(outer) == [f"outer/{name}" for name in names]


def test_metadata_and_precision_of_an_operation_are_kept():
  def function(x):
    with set_xla_metadata(sentinel="seen"):
      x = jnp.sin(x)
    with jax.default_matmul_precision("highest"):
      y = SQUARE @ x
    return y @ jnp.cos(x)

  text = jax.jit(evaluated(function)).lower(X).as_text()
  (line,) = [line for line in text.splitlines() if "seen" in line]
  assert "sine" in line
  expected = jax.jit(function).lower(X).as_text()
  assert text.count("HIGHEST") == expected.count("HIGHEST") > 0


# Recordings -------------------------------------------------------------------


def test_what_a_function_closes_over_comes_before_its_arguments():
  weights = jnp.array([3.0, 4.0, 5.0])

  def fun(x, power, train=False):
    return (x * weights) ** power if train else x

  recording = interpreter.record(fun, (X, 2), {"train": np.True_})
  consts, arguments = recording.consts_and_arguments(recording.operands)
  assert len(consts) == 1
  assert arguments[0] is X
  empty = recording.without_values()
  assert empty.operands == [None, None]
  np.testing.assert_array_equal(
    empty.evaluate(weights + 1, X)[0], (X * (weights + 1)) ** 2
  )


def test_arguments_and_results_may_be_anything():
  def fun(x, key, nothing, act, *, train, counts, name="layer"):
    assert (train, nothing, name) == (True, None, "layer")
    assert isinstance(counts["n"], jax.core.Tracer)
    numbers = {"noise": jax.random.normal(key, (2,)), "n": counts["n"] + 1}
    return act(x), x, numbers, key, nothing, 1.0, True, x[:0]

  args = X, jax.random.key(1), None, jnp.exp
  kwargs = {"train": True, "counts": {"n": np.arange(3)}}
  got = recorded(fun)(*args, **kwargs)
  want = jax.jit(functools.partial(fun, act=jnp.exp, train=True))(
    *args[:3], counts=kwargs["counts"]
  )
  support.assert_same_bits(got, want)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))


def test_a_failed_recording_names_the_function_and_ends():
  def unusual(x):
    return x if x[0] > 0 else -x

  with pytest.raises(jax.errors.TracerBoolConversionError, match="unusual"):
    recorded(unusual)(X)
  assert not interpreter.is_recording()


def test_only_what_is_evaluated_at_once_is_recording():
  seen = []

  def fun(x):
    seen.append(interpreter.is_recording())
    return jax.jit(lambda x: seen.append(interpreter.is_recording()) or x)(x)

  recorded(fun)(X)
  recorded(recorded(fun))(X)
  assert seen == [True, False] * 2
  seen.clear()
  jax.jit(recorded(fun))(X)
  jax.checkpoint(recorded(fun))(X)
  recorded(lambda x: lax.map(fun, x[None]))(X)
  assert not any(seen)


# Changes in place -------------------------------------------------------------


def test_unchanged_objects_and_changed_dicts_are_fine():
  module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  call = lambda module, x: module(x)  # noqa: E731
  assert recorded(call)(module, jnp.ones((3, 2))).shape == (3, 2)

  def fun(batch):
    batch["x"] = batch["x"] * 2
    return batch["x"]

  batch = {"x": X}
  np.testing.assert_array_equal(recorded(fun)(batch), X * 2)
  assert batch["x"] is X


# JAX's names ------------------------------------------------------------------


# Of modules and attributes that begin with an underscore, and all of jaxlib.
PRIVATE = re.compile(
  r"import jaxlib|from jaxlib|\bjax(\.\w+)*\._|jax.* import _"
  r"|(optax|flax)\._src"
)


def test_the_library_uses_only_public_names_of_jax():
  for path in pathlib.Path(ols.__file__).parent.rglob("*.py"):
    assert not PRIVATE.search(path.read_text()), path
  assert PRIVATE.search("import jax._src.core")
  assert PRIVATE.search("from jax._src import core")
  assert PRIVATE.search("from jax import _src")
