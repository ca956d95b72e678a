"""The search for the first overflow, in programs built to overflow somewhere.

`float_status` shares the rules that decide whether an operation overflowed, so
its tests cover each operation. These cover the search: which operation is the
first, and how it is described.
"""

import functools
import inspect

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.instruments import Place
from optax_lossscale.instruments import where_overflow
from tests import support

HALF = jnp.float16
X = jnp.array([1.0, 2.0, 40000.0], HALF)


def find(function, *args, **options):
  """Returns operation, layer, iterations and elements of the first overflow."""
  place = where_overflow(function, **options)(*args)
  return place and (
    place.operation,
    place.layer,
    place.iterations,
    place.elements,
  )


def doubled(x):
  return x * 2


@jax.named_scope("double")
def scaled_up(x):
  return x * 2


def loop(length, **options):
  """Returns a scan over layers that each double their input."""

  @jax.named_scope("layers")
  def function(x):
    return lax.scan(
      lambda c, y: (scaled_up(c), y), x, jnp.arange(length), **options
    )

  return function


def nested(x):
  """Doubles three times in each of five rounds."""
  return lax.scan(
    lambda c, _: (lax.fori_loop(0, 3, lambda _, y: scaled_up(y), c), None),
    x,
    None,
    length=5,
  )[0]


def after_a_loop(x):
  """Runs a longer loop, which does nothing, before the loop that overflows."""
  x = lax.fori_loop(0, 7, lambda _, y: y * 1, x)
  return loop(5)(x)[0] * 2


def until(x):
  return lax.while_loop(lambda c: c[2] < 60000, scaled_up, x)


def until_the_condition(x):
  """Its condition overflows before the third round."""
  return lax.while_loop(
    lambda c: jnp.isfinite(c[2] * c[2]), lambda c: c + 50, x / 256
  )


@jax.custom_vjp
def with_vjp(x):
  return scaled_up(x)


with_vjp.defvjp(
  lambda x: (with_vjp(x), x), lambda x, cotangent: (cotangent * x * x,)
)


def loss_of(function):
  return lambda x: jnp.sum(function(x).astype(jnp.float32))


# Each program with the layer, iterations and elements of its first overflow.
PROGRAMS = {
  "no overflow": (lambda x: x + 1, None),
  "two in a row": (lambda x: jax.jit(scaled_up)(x) * 4, ("double", (), 1)),
  "reversed scan": (
    lambda x: loop(20, reverse=True)(x / 1024),
    ("layers/double", (9,), 1),
  ),
  "loop in a scan": (lambda x: nested(x / 32), ("double", (1, 2), 1)),
  "scan after a loop": (
    lambda x: after_a_loop(x / 8),
    ("layers/double", (3,), 1),
  ),
  "after the loops": (lambda x: after_a_loop(x / 32), ("", (), 1)),
  "condition of a while": (until_the_condition, ("", (2,), 1)),
  "branch not taken": (
    lambda x: lax.cond(x[0] < 0, scaled_up, jnp.abs, x) * 2,
    ("", (), 1),
  ),
  "vmap of a while": (
    lambda x: jax.vmap(until)(jnp.stack([x, x / 4])),
    ("double", (0,), 1),
  ),
}
QUICK = ("two in a row", "loop in a scan", "scan after a loop")


@pytest.mark.parametrize("name", support.slow_but(QUICK, PROGRAMS))
def test_the_first_overflow_of_a_program_is_found(name):
  function, expected = PROGRAMS[name]
  assert find(function, X) == (expected and ("mul", *expected))


# Each gradient with an argument, and the layer and iterations of its overflow.
GRADIENTS = {
  # The cotangent doubles in each round, starting with the last one.
  "scan": (
    jax.grad(lambda x: loss_of(lambda x: loop(20)(x)[0])(x) * 2.0**10),
    X / HALF(2.0) ** 24,
    ("layers/double", (19 - 5,)),
  ),
  # The derivative of tan is 1 + tan^2.
  "remat": (
    jax.grad(
      loss_of(
        jax.named_scope("net")(jax.checkpoint(jax.named_scope("tan")(jnp.tan)))
      )
    ),
    jnp.full(3, np.pi / 2, HALF),
    ("net/tan", ()),
  ),
  "custom_vjp": (
    jax.grad(loss_of(jax.named_scope("rule")(with_vjp))),
    X / 4,
    ("rule", ()),
  ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_an_overflow_in_the_backward_pass_has_the_layer_of_the_forward_pass(
  name,
):
  gradient, x, expected = GRADIENTS[name]
  place = where_overflow(gradient)(x)
  assert place.backward
  assert (place.layer, place.iterations) == expected


MESH = support.make_mesh(data=4, model=2)


def on_devices(function):
  return jax.shard_map(
    function,
    mesh=MESH,
    in_specs=jax.P(("data", "model")),
    out_specs=jax.P(("data", "model")),
  )


@pytest.mark.slow
def test_the_earliest_overflow_on_any_device_is_found():
  x = jnp.full(8, 1.0, HALF).at[2].set(2.0**13).at[jnp.array([5, 6])].set(2**14)
  repeat = on_devices(lambda x: loop(8)(x)[0] + 65000)
  assert find(repeat, x) == ("mul", "layers/double", (1,), 2)
  assert find(repeat, x / 2**9) == ("add", "", (), 3)


def test_a_shard_map_in_a_loop_has_the_iteration_of_the_loop():
  def function(x):
    return lax.fori_loop(0, 4, lambda _, y: on_devices(scaled_up)(y), x)

  x = jnp.full(8, 2.0**13, HALF).at[3].set(0)
  assert find(function, x) == ("mul", "double", (2,), 7)


def test_automatic_axes_of_an_explicit_mesh_are_searched():
  square = jax.sharding.auto_axes(jnp.square, out_sharding=jax.P("data"))
  with jax.set_mesh(support.make_mesh("Explicit")):
    x = jax.device_put(jnp.full(8, 300, HALF), jax.P("data"))
    assert find(lambda x: square(x) * 2, x) == ("square", "", (), 8)


@pytest.mark.parametrize(
  ("x", "options", "expected"),
  [
    (jnp.float32(3e38), {}, None),
    (jnp.float32(3e38), {"check": ols.nonfinite((HALF, "float32"))}, "mul"),
    (HALF(32752), {"check": ols.saturated(HALF)}, "mul"),
  ],
  ids=["other dtype", "two dtypes", "saturated"],
)
def test_the_check_says_what_overflows(x, options, expected):
  place = where_overflow(doubled, **options)(x)
  assert (place and place.operation) == expected


def test_undefined_results_can_be_ignored():
  def function(x):
    return jnp.where(x > 1, 1 / (x - 1), 0), x * 2

  place = where_overflow(function)(X)
  assert (place.operation, place.kind) == ("div", "undefined")
  place = where_overflow(function, undefined=False)(X)
  assert (place.operation, place.kind) == ("mul", "overflow")
  assert where_overflow(function, undefined=False)(X / 2) is None


def test_an_operation_that_overflows_in_two_ways_is_called_an_overflow():
  place = where_overflow(lambda x: 1 / x)(jnp.array([0, 2.0**-20, 0], HALF))
  assert (place.kind, place.elements) == ("overflow", 1)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float8_e4m3fn])
def test_a_nonfinite_argument_is_named_if_no_operation_overflowed(dtype):
  def function(params, batch, *, scale):
    return params * scale, batch

  x = jnp.array([1.0, jnp.nan, 2.0, jnp.nan], dtype)
  look = where_overflow(function)
  place = look(X / 4, {"n": 1, "x": x}, scale=HALF(0.5))
  assert (place.operation, place.kind) == ("argument", "nonfinite")
  assert not place.backward
  assert (place.dtype, place.shape) == (np.dtype(dtype), (4,))
  assert str(place) == (
    "argument batch['x'] holds 2 elements that are not finite"
  )
  place = look(X / 4, {"x": x[:1]}, scale=HALF(np.inf))
  assert str(place) == "argument scale holds 1 element that is not finite"
  # The multiplication overflows, so the argument does not matter.
  assert look(X, {"x": x}, scale=HALF(2)).operation == "mul"


def test_an_argument_of_a_function_without_a_signature_has_a_number():
  function = functools.wraps(lambda: 0)(lambda *args: args[0]["x"] * 2)
  found = find(function, {"x": HALF(np.inf)}, 1.0)
  assert found == ("argument", "args[0]['x']", (), 1)


def test_states_and_fp8_statistics_with_inf_are_not_named():
  tx = ols.instruments.record(
    ols.loss_scaling(optax.sgd(1.0), support.Stub()), 4
  )
  params = jnp.ones(3)
  _, state = tx.update(jnp.full(3, jnp.inf), tx.init(params), params)
  assert not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))
  tree = {"tx": state, "_overwrite_with_gradient": {"scale": HALF(np.inf)}}
  assert find(lambda tree, x: x * 2, tree, X / 4) is None


def test_a_place_is_one_sentence():
  place = Place(
    operation="mul",
    kind="overflow",
    layer="Transformer/block_3/mlp",
    backward=True,
    dtype=np.dtype(np.float16),
    shape=(8, 512),
    elements=3,
    iterations=(4, 2),
    source="model.py:42",
  )
  assert str(place) == (
    'float16 overflow in "mul" (8, 512) of layer Transformer/block_3/mlp, '
    "backward pass, iterations (4, 2) of its loops, the outermost first: "
    "3 elements at model.py:42"
  )
  assert "iteration 2 of its loop: 3" in str(place._replace(iterations=(2,)))
  short = place._replace(
    kind="undefined",
    layer="",
    backward=False,
    elements=1,
    iterations=(),
    source=None,
  )
  assert str(short) == 'float16 undefined result in "mul" (8, 512): 1 element'


def line_of(function):
  """Returns the last line of a function's code."""
  lines, first = inspect.getsourcelines(function)
  return f"{__file__}:{first + len(lines) - 1}"


def of_library(x):
  return jnp.linalg.norm(jax.nn.silu(x))


def network(x, w):
  return ((x @ w) * (x @ w)) @ w


# Each function to search, its argument, and the function that holds the line.
LINES = {
  "around JAX's own": (of_library, X, of_library),
  "backward pass": (
    jax.grad(lambda x: jnp.sum(doubled(x)) * HALF(50000)),
    X / 80000,
    doubled,
  ),
  "under autocast": (
    lambda x: ols.autocast(network, "O1", dtype=HALF)(x, jnp.eye(2)),
    jnp.full((2, 2), 300.0),
    network,
  ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_code_is_one_of_the_user(name):
  # JAX caches the trace of its own functions with their first caller.
  jax.nn.silu(X)
  function, x, of = LINES[name]
  assert where_overflow(function)(x).source == line_of(of)


def test_a_conversion_made_by_autocast_has_no_line_of_code():
  place = where_overflow(lambda x: ols.autocast(doubled, "O3", dtype=HALF)(x))(
    X
  )
  assert (place.operation, place.source) == ("convert_element_type", None)


def test_traced_values_are_refused_with_a_remedy():
  message = "outside of jit.*`float_status` says"
  with pytest.raises(ValueError, match=message):
    jax.vmap(lambda x: (where_overflow(doubled)(x), x)[1])(X)
  # Under jit all arrays are traced, even if no argument is.
  with pytest.raises(ValueError, match=message):
    jax.jit(lambda: where_overflow(doubled)(1.0).elements)()


def test_wrong_arguments_are_refused():
  with pytest.raises(TypeError, match="`fun` must be a function"):
    where_overflow(X)
  with pytest.raises(TypeError, match="`check` must be made by"):
    where_overflow(doubled, check=None)
  with pytest.raises(TypeError, match="`check` must name signed floating"):
    where_overflow(doubled, check=ols.saturated(lambda path: HALF))
