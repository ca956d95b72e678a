"""The first overflow, where the program or NumPy says that it is."""

import functools
import inspect

from flax import nnx
import flax.linen as nn
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


def doubled(x):
  return x * 2


def find(function, *args, **options):
  """Returns operation, layer, iterations and elements of the first overflow."""
  place = where_overflow(function, **options)(*args)
  return place and (
    place.operation,
    place.layer,
    place.iterations,
    place.elements,
  )


# Against NumPy ----------------------------------------------------------------

OPERATIONS = {
  "add": (lax.add, np.add),
  "sub": (lax.sub, np.subtract),
  "mul": (lax.mul, np.multiply),
  "div": (lax.div, np.divide),
  "sqrt": (lax.sqrt, np.sqrt),
  "neg": (lax.neg, np.negative),
  "max": (lax.max, np.maximum),
}


def draw_program(seed):
  """Returns steps, each an operation and the values that it takes, and inputs.

  About a third of them is harmless.
  """
  rng = np.random.default_rng(seed)
  inputs = [np.exp2(rng.uniform(-4, 9, 4)).astype(np.float16) for _ in range(2)]
  inputs[0][0] = rng.choice([0, np.inf, 1, 1])
  steps = []
  for number in range(2, 12):
    name = rng.choice([*OPERATIONS, *["mul"] * 5])
    arity = 1 if name in ("sqrt", "neg") else 2
    places = rng.integers(0, number, arity)
    if name == "div":
      # XLA computes a / (b / c) as a * c / b, which overflows elsewhere.
      places[1] %= 2
    steps.append((str(name), places))
  return steps, inputs


def run(steps, inputs):
  values = [*inputs]
  for name, places in steps:
    values.append(OPERATIONS[name][0](*(values[i] for i in places)))
  return values[-1]


def run_in_numpy(steps, inputs, undefined):
  """Returns the first operation, its kind and elements, one after the other."""
  values = [*inputs]
  for name, places in steps:
    taken = [values[i] for i in places]
    with np.errstate(all="ignore"):
      values.append(OPERATIONS[name][1](*taken))
    made = ~np.isfinite(values[-1])
    for x in taken:
      made &= np.isfinite(x)
    has_none = np.zeros(4, bool)
    if name == "div":
      has_none = taken[1] == 0
    if name == "sqrt":
      has_none = taken[0] < 0
    for kind, found in (
      ("overflow", made & ~has_none),
      ("undefined", made & has_none & undefined),
    ):
      if found.any():
        return name, kind, found.sum()
  return None


@pytest.mark.slow
@pytest.mark.parametrize("undefined", [True, False])
def test_the_first_of_a_random_program_is_that_of_numpy(undefined):
  expected = []
  for seed in range(12 if undefined else 4):
    steps, inputs = draw_program(seed)
    place = where_overflow(functools.partial(run, steps), undefined=undefined)(
      inputs
    )
    if place and place.operation == "argument":
      place = None
    found = place and (place.operation, place.kind, place.elements)
    expected.append(run_in_numpy(steps, inputs, undefined))
    assert found == expected[-1], seed
  kinds = {x and x[1] for x in expected}
  assert "overflow" in kinds
  assert ("undefined" in kinds) == undefined


# Where it is known ------------------------------------------------------------


def scaled_up(x):
  """Doubles x in a layer."""
  with jax.named_scope("double"):
    return x * 2


def loop(length, **options):
  """Returns a scan over layers that doubles in each."""

  def function(x):
    with jax.named_scope("layers"):
      return lax.scan(
        lambda c, y: (scaled_up(c), y), x, jnp.arange(length), **options
      )

  return function


def nested(x):
  """Doubles three times in each round."""
  return lax.scan(
    lambda c, _: (lax.fori_loop(0, 3, lambda _, y: scaled_up(y), c), None),
    x,
    None,
    length=5,
  )[0]


def after_a_loop(x):
  """A loop that does nothing, with more rounds than that of the overflow."""
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


PROGRAMS = {
  "nothing": (lambda x: x + 1, None),
  "no operation": (lambda x: x, None),
  "jit": (jax.jit(lambda x: jax.jit(scaled_up)(x) * 4), ("double", (), 1)),
  "scan": (lambda x: loop(20)(x / 1024), ("layers/double", (10,), 1)),
  "scan, reversed": (
    lambda x: loop(20, reverse=True)(x / 1024),
    ("layers/double", (9,), 1),
  ),
  "scan, unrolled": (
    lambda x: loop(20, unroll=3)(x / 1024),
    ("layers/double", (10,), 1),
  ),
  "scan that ends before": (lambda x: loop(10)(x / 1024), None),
  "scan of nothing": (loop(0), None),
  "scan in scan": (lambda x: nested(x / 32), ("double", (1, 2), 1)),
  "scan after scan": (
    lambda x: after_a_loop(x / 8),
    ("layers/double", (3,), 1),
  ),
  "after the loops": (lambda x: after_a_loop(x / 32), ("", (), 1)),
  "while": (lambda x: until(x / 4), ("double", (2,), 1)),
  "while, the condition": (until_the_condition, ("", (2,), 1)),
  "cond, taken": (
    lambda x: lax.cond(x[0] > 0, scaled_up, doubled, x),
    ("double", (), 1),
  ),
  "cond, not taken": (
    lambda x: lax.cond(x[0] < 0, scaled_up, jnp.abs, x) * 2,
    ("", (), 1),
  ),
  "cond in scan": (
    lambda x: lax.scan(
      lambda c, i: (lax.cond(i == 3, scaled_up, jnp.abs, c), None),
      x,
      jnp.arange(5),
    ),
    ("double", (3,), 1),
  ),
  "remat": (jax.checkpoint(scaled_up), ("double", (), 1)),
  "custom_jvp": (support.with_jvp(scaled_up), ("double", (), 1)),
  "custom_vjp": (with_vjp, ("double", (), 1)),
  "vmap": (
    lambda x: jax.vmap(scaled_up)(jnp.stack([x / 4, x, -x])),
    ("double", (), 2),
  ),
  "vmap of while": (
    lambda x: jax.vmap(until)(jnp.stack([x, x / 4])),
    ("double", (0,), 1),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_place_is_that_by_construction(name):
  function, expected = PROGRAMS[name]
  assert find(function, X) == (expected and ("mul", *expected))


def test_the_backward_pass_of_a_scan_tells_the_forward_iteration():
  # The cotangent doubles in each round, from the last one on.
  gradient = jax.grad(lambda x: loss_of(lambda x: loop(20)(x)[0])(x) * 2.0**10)
  place = where_overflow(gradient)(X / HALF(2.0) ** 24)
  assert place.backward
  assert place.layer == "layers/double"
  assert place.iterations == (19 - 5,)
  assert place.elements == 3


@pytest.mark.slow
@pytest.mark.parametrize(
  "change", [lambda x: x, jax.checkpoint, jax.jit], ids=["", "remat", "jit"]
)
def test_forward_and_backward_pass_are_told_apart(change):
  @jax.named_scope("net")
  def function(x):
    with jax.named_scope("block"):
      return change(lambda x: jnp.sin(scaled_up(x) * x * x))(x)

  gradient = jax.grad(lambda x, s: loss_of(function)(x) * s)
  forward = where_overflow(gradient)(X, 1.0)
  backward = where_overflow(gradient)(X / 40000, 60000.0)
  assert (forward.backward, backward.backward) == (False, True)
  assert forward.layer == "net/block/double"
  assert backward.layer in ("net/block", "net/block/double")


def test_what_a_remat_computes_for_the_backward_pass_is_in_its_layer():
  @jax.checkpoint
  @jax.named_scope("tangent")
  def function(x):
    return jnp.tan(x)

  # The derivative of tan is 1 + tan^2.
  gradient = jax.grad(loss_of(jax.named_scope("net")(function)))
  place = where_overflow(gradient)(jnp.full(3, np.pi / 2, HALF))
  assert (place.layer, place.backward) == ("net/tangent", True)


def test_a_derivative_rule_is_in_the_layer_of_its_function():
  def function(x):
    with jax.named_scope("rule"):
      return with_vjp(x)

  place = where_overflow(jax.grad(loss_of(function)))(X / 4)
  assert (place.operation, place.layer) == ("mul", "rule")
  assert place.backward


# Several devices --------------------------------------------------------------

MESH = support.make_mesh(data=4, model=2)


def on_devices(function, check_vma=True):
  return jax.shard_map(
    function,
    mesh=MESH,
    in_specs=jax.P(("data", "model")),
    out_specs=jax.P(("data", "model")),
    check_vma=check_vma,
  )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_several_devices_it_is_the_earliest_on_any(check_vma):
  x = jnp.full(8, 1.0, HALF).at[2].set(2.0**13).at[jnp.array([5, 6])].set(2**14)
  repeat = on_devices(lambda x: loop(8)(x)[0] + 65000, check_vma)
  assert find(repeat, x) == ("mul", "layers/double", (1,), 2)
  assert find(repeat, x / 2**9) == ("add", "", (), 3)


@pytest.mark.slow
def test_devices_that_run_differently_are_compared_by_what_ran_before():
  def function(x):
    long = functools.partial(loop(8), x / 1024)
    return lax.cond(x[0] > 3, lambda: long()[0] * 512, lambda: scaled_up(x))

  # In the order of the program the branch of the others comes first.
  x = jnp.full(8, 1.0, HALF).at[3].set(40000)
  assert find(on_devices(function), x) == ("mul", "", (), 1)
  x = x.at[5].set(3).at[6].set(-40000)
  assert find(on_devices(function), x) == ("mul", "double", (), 1)


def test_of_two_operations_at_once_on_different_devices_one_is_told():
  def function(x):
    return lax.cond(x[0] > 0, scaled_up, lambda x: x - 65000, x)

  x = jnp.full(8, -40000, HALF).at[3].set(40000)
  assert find(on_devices(function), x) == ("sub", "", (), 7)


def test_a_function_on_devices_inside_of_a_loop():
  def function(x):
    return lax.fori_loop(0, 4, lambda _, y: on_devices(scaled_up)(y), x)

  x = jnp.full(8, 2.0**13, HALF).at[3].set(0)
  assert find(function, x) == ("mul", "double", (2,), 7)


def test_an_array_on_several_devices_counts_as_a_whole():
  mesh = jax.make_mesh((8,), ("data",))
  x = jax.device_put(
    jnp.full((8, 3), 40000, HALF), jax.NamedSharding(mesh, jax.P("data"))
  )
  place = where_overflow(scaled_up)(x)
  assert (place.elements, place.shape) == (24, (8, 3))


def test_an_operation_on_automatic_axes_of_an_explicit_mesh_is_seen():
  square = jax.sharding.auto_axes(jnp.square, out_sharding=jax.P("data"))
  with jax.set_mesh(support.make_mesh("Explicit")):
    x = jax.device_put(jnp.full(8, 300, HALF), jax.P("data"))
    assert find(lambda x: square(x) * 2, x) == ("square", "", (), 8)


# Models -----------------------------------------------------------------------


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    y = nn.Dense(4, name="mlp")(x)
    return x + y * self.param("gain", nn.initializers.ones, ())


class Net(nn.Module):
  block: type = Block

  @nn.compact
  def __call__(self, x):
    for i in range(2):
      x = self.block(name=f"block_{i}")(x)
    return jnp.mean(x.astype(jnp.float32))


@functools.cache
def make_net(block=Block):
  net = Net(block)
  x = jnp.ones((2, 4), jnp.float32)
  params = net.init(jax.random.key(0), x)
  params = jax.tree.map(lambda x: jnp.full(x.shape, 0.125), params)
  loss = ols.autocast(net.apply, "O2", dtype=HALF)
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(2.0**15))

  def gradients(params, opt_state, x):
    return ols.scaled_value_and_grad(loss, opt_state)(params, x)

  return gradients, params, tx.init(params), x


def with_gain(params, block, gain):
  """Returns the parameters with another gain in a block."""
  params = jax.tree.map(lambda x: x, params)
  params["params"][block]["gain"] = jnp.float32(gain)
  return params


@pytest.mark.slow
@pytest.mark.parametrize("is_remat", [False, True], ids=["", "remat"])
def test_the_layer_of_a_linen_module_in_mixed_precision_is_named(is_remat):
  gradients, params, state, x = make_net(nn.remat(Block) if is_remat else Block)
  look = where_overflow(gradients)
  assert look(params, state, x) is None
  forward = look(with_gain(params, "block_0", 60000.0), state, x * 10)
  assert (forward.layer, forward.backward) == ("Net/block_0", False)
  backward = look(with_gain(params, "block_1", 100.0), state, x)
  assert backward.layer == "Net/block_1/mlp"
  assert backward.backward
  assert backward.dtype == HALF
  assert f"backward pass: {backward.elements} elements" in str(backward)


@pytest.mark.slow
def test_on_saturating_hardware_it_is_the_first_clipped_result():
  gradients, params, state, x = make_net()
  emulated = ols.hardware.emulate_saturation(gradients)
  look = where_overflow(emulated, check=ols.saturated(HALF))
  assert look(params, state, x) is None
  params = with_gain(params, "block_1", 100.0)
  ordinary = where_overflow(gradients)(params, state, x)
  # Emulated, the lines of code may differ.
  assert look(params, state, x)[:-1] == ordinary[:-1]


def test_a_saturated_check_finds_what_reaches_the_largest_value():
  assert find(lambda x: x + 25504, X) is None
  found = find(lambda x: x + 25504, X, check=ols.saturated(HALF))
  assert found == ("add", "", (), 1)


def test_an_nnx_module_is_looked_at_split():
  class Model(nnx.Module):
    def __init__(self):
      self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
      with jax.named_scope("head"):
        return self.linear(x) * 60000

  graph, state = nnx.split(Model())
  state = jax.tree.map(lambda x: jnp.ones(x.shape, HALF), state)

  def function(state, x):
    return nnx.merge(graph, state)(x)

  assert find(function, state, X / 400000) is None
  assert find(function, state, X / 400) == ("mul", "head", (), 2)


def test_it_takes_what_the_function_takes_and_closes_over():
  @functools.partial(where_overflow, check=ols.nonfinite((HALF, "bfloat16")))
  def function(tree, activation, *, train):
    return activation(tree["x"] * X) if train else tree

  assert function({"x": HALF(2), "none": None}, jnp.tanh, train=False) is None
  place = function({"x": HALF(2), "none": None}, jnp.tanh, train=True)
  assert place.operation == "mul"


# What is looked at ------------------------------------------------------------


def test_operations_in_other_dtypes_are_not_looked_at():
  large = jnp.float32(3e38)
  assert find(doubled, large) is None
  for dtype in (jnp.float32, None):
    found = find(doubled, large, check=ols.nonfinite(dtype))
    assert found == ("mul", "", (), 1)
  assert find(lambda x: (x * 1).astype(HALF), large) == (
    "convert_element_type",
    "",
    (),
    1,
  )


def test_one_can_look_past_an_operation_that_is_undefined():
  def function(x):
    return jnp.where(x > 1, 1 / (x - 1), 0), x * 2

  place = where_overflow(function)(X)
  assert (place.operation, place.kind) == ("div", "undefined")
  place = where_overflow(function, undefined=False)(X)
  assert (place.operation, place.kind) == ("mul", "overflow")
  assert where_overflow(function, undefined=False)(X / 2) is None
  place = where_overflow(lambda x: jnp.log(x - 1))(X)
  assert (place.operation, place.kind) == ("log", "undefined")


def test_what_comes_of_an_inf_that_was_there_is_no_overflow():
  x = jnp.array([-jnp.inf, 1.0, jnp.nan], HALF)
  found = find(lambda x: jnp.exp(x * 2) - x, x)
  assert found == ("argument", "x", (), 2)


@pytest.mark.parametrize(
  "dtype", [HALF, jnp.float32, jnp.complex64, jnp.float8_e4m3fn]
)
def test_an_argument_that_was_not_finite_is_named(dtype):
  def function(params, batch, *, scale):
    return params * scale, batch

  x = jnp.array([1.0, jnp.nan, 2.0, jnp.nan], dtype)
  place = where_overflow(function)(X / 4, {"n": 1, "x": x}, scale=HALF(0.5))
  assert (place.operation, place.kind) == ("argument", "nonfinite")
  assert (place.dtype, place.shape) == (np.dtype(dtype), (4,))
  assert str(place) == (
    "argument batch['x'] holds 2 elements that are not finite"
  )
  scale = HALF(np.inf)
  place = where_overflow(function)(X / 4, {"x": x[:1]}, scale=scale)
  assert str(place) == "argument scale holds 1 element that is not finite"


def test_an_operation_that_overflowed_comes_before_an_argument():
  found = find(lambda x, y: (x * 2, y), X, HALF(np.nan))
  assert found == ("mul", "", (), 1)


def test_an_argument_of_a_function_without_a_signature_has_a_number():
  function = functools.wraps(lambda: 0)(lambda *args: args[0]["x"] * 2)
  found = find(function, {"x": HALF(np.inf)}, 1.0)
  assert found == ("argument", "args[0]['x']", (), 1)


def test_a_state_that_remembers_an_overflow_is_no_argument_to_name():
  tx = ols.instruments.record(
    ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale()), 4
  )
  params = jnp.ones(3)
  _, state = tx.update(jnp.full(3, jnp.inf), tx.init(params), params)
  assert not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))
  assert find(lambda state, x: x * 2, {"tx": state}, X / 4) is None


# Text -------------------------------------------------------------------------

PLACE = Place(
  operation="mul",
  kind="overflow",
  layer="Transformer/block_3/mlp",
  backward=True,
  dtype=np.dtype(np.float16),
  shape=(8, 512),
  elements=3,
  iterations=(2,),
  source="model.py:42",
)


def test_a_place_is_one_sentence():
  assert str(PLACE) == (
    'float16 overflow in "mul" (8, 512) of layer Transformer/block_3/mlp, '
    "backward pass, iteration 2 of its loop: 3 elements at model.py:42"
  )
  short = PLACE._replace(
    kind="undefined",
    layer="",
    backward=False,
    elements=1,
    iterations=(),
    source=None,
  )
  assert str(short) == ('float16 undefined result in "mul" (8, 512): 1 element')
  assert "iterations (4, 2) of its loops, the outermost first" in str(
    PLACE._replace(iterations=(4, 2))
  )


def line_of(function):
  """Returns the last line of a function's code."""
  lines, first = inspect.getsourcelines(function)
  return f"{__file__}:{first + len(lines) - 1}"


def test_the_line_of_code_is_the_users():
  def of_library(x):
    return jnp.linalg.norm(jax.nn.silu(x))

  class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(2, param_dtype=HALF)(x)

  # JAX keeps the trace of its own jitted functions, with who made it.
  jax.nn.silu(X)
  params = {"params": {"Dense_0": {"kernel": jnp.full((3, 2), HALF(2))}}}
  params["params"]["Dense_0"]["bias"] = jnp.zeros(2, HALF)
  assert where_overflow(doubled)(X).source == line_of(doubled)
  assert where_overflow(of_library)(X).source == line_of(of_library)
  place = where_overflow(Dense().apply)(params, X)
  assert place.source == line_of(Dense.__call__)


def test_the_line_of_code_is_that_of_the_backward_passs_forward_pass():
  place = where_overflow(jax.grad(loss_of(lambda x: doubled(x * 1))))(X)
  assert place.source == line_of(doubled)
  gradient = jax.grad(lambda x: jnp.sum(doubled(x)) * HALF(50000))
  place = where_overflow(gradient)(X / 80000)
  assert place.source == line_of(doubled)
  assert place.backward


def test_a_conversion_that_autocast_makes_has_no_line_of_code():
  def function(x):
    return ols.autocast(doubled, "O3", dtype=HALF)(x)

  place = where_overflow(function)(X)
  assert (place.operation, place.source) == ("convert_element_type", None)


def test_an_operation_under_autocast_has_the_line_of_the_user():
  def network(x, w):
    return ((x @ w) * (x @ w)) @ w

  mixed = ols.autocast(network, "O1", dtype=HALF)
  place = where_overflow(mixed)(jnp.full((2, 2), 300.0), jnp.eye(2))
  assert (place.operation, place.source) == ("mul", line_of(network))


# Errors -----------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_inside_of_a_transformation_it_says_what_to_do(transform):
  def function(x):
    where_overflow(doubled)(x)
    return x

  with pytest.raises(ValueError, match="outside of jit.*`float_status` says"):
    transform(function)(X if transform is jax.vmap else X[0])


def test_inside_of_jit_it_says_so_whatever_the_arguments_are():
  for function in (lambda y: y + X, lambda y: y):
    looking = jax.jit(lambda f=function: where_overflow(f)(1.0).elements)
    with pytest.raises(ValueError, match="`where_overflow` returns must be"):
      looking()


def test_a_traced_value_that_the_function_closes_over_is_seen():
  def function(x):
    where_overflow(lambda: x * 2)()
    return x

  with pytest.raises(ValueError, match="outside of jit"):
    jax.grad(function)(X[0])


def test_what_is_no_function_dtype_or_check_is_refused():
  with pytest.raises(TypeError, match="`fun` must be a function"):
    where_overflow(X)
  with pytest.raises(TypeError, match="`check` must be made by"):
    where_overflow(doubled, check=None)
  with pytest.raises(TypeError, match="`check` must name signed floating"):
    where_overflow(doubled, check=ols.saturated(lambda path: HALF))
