"""`emulate_saturation` clamps every operation of any function.

The authorities are NumPy, one operation at a time with the clamp written out
after it, and JAX itself without compilation, with the clamp written out.
"""

import contextlib
import functools

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale.hardware import emulate_saturation
from tests import support
from tests.support import assert_same_bits

# Of what compiled kernels do with NaN and inf.
pytestmark = [pytest.mark.usefixtures("full_compilation"), pytest.mark.slow]

HALF = jnp.float16
MESH = support.make_mesh(data=4, model=2)
EXPLICIT_MESH = support.make_mesh("Explicit", data=4, model=2)
X = jnp.array([12.0, -1.0, 0.0, 300.0, 2.0, 8.0, -20.0, 65504.0], HALF)


def clamp(x):
  """Returns what saturation mode makes of a result."""
  largest = jnp.finfo(x.dtype).max
  return jnp.clip(jnp.where(jnp.isnan(x), 0, x), -largest, largest)


def is_finite(tree):
  return all(
    np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree)
  )


# --- Straight-line programs, against NumPy.

EXACT = {
  "add": np.add,
  "subtract": np.subtract,
  "multiply": np.multiply,
  "divide": np.divide,
  "maximum": np.maximum,
  "minimum": np.minimum,
}
EXACT_UNARY = {"negative": np.negative, "absolute": np.abs, "sqrt": np.sqrt}


def clamp_numpy(x):
  largest = np.finfo(x.dtype).max
  return np.clip(np.where(np.isnan(x), x.dtype.type(0), x), -largest, largest)


def draw_program(rng, length=14):
  """Returns operations, each on two of the values made so far."""
  names = [*EXACT, *EXACT_UNARY]
  return [
    (str(rng.choice(names)), *map(int, rng.integers(0, 3 + i, 2)))
    for i in range(length)
  ]


def run_program(program, values, module, after):
  values = list(values)
  for name, i, j in program:
    operation = getattr(module, name)
    operands = (
      values[i : i + 1] if name in EXACT_UNARY else (values[i], values[j])
    )
    values.append(after(operation(*operands)))
  return values[3:]


@pytest.mark.parametrize("seed", range(6))
def test_programs_compute_what_numpy_computes_with_a_clamp(seed):
  rng = np.random.default_rng(seed)
  program = draw_program(rng)
  values = rng.integers(0, 2**16, (3, 500)).astype(np.uint16).view(np.float16)
  values = np.where(np.isfinite(values), values, np.float16(1))
  with np.errstate(all="ignore"):
    expected = run_program(program, values, np, clamp_numpy)
    plain = run_program(program, values, np, lambda x: x)
  assert not is_finite(plain)
  got = jax.jit(
    emulate_saturation(lambda x: run_program(program, x, jnp, lambda x: x))
  )(values)
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_array_equal(x, y)  # The sign of max(0, -0) is free.


# Every value that float16 has, with every NaN.
EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)


def test_exact_operations_on_every_float16_value_are_numpys():
  functions = [
    lambda module, x: x + x,
    lambda module, x: x * x,
    lambda module, x: module.reciprocal(x),
    lambda module, x: module.sqrt(x),
    lambda module, x: x * np.float16(0.5),
    lambda module, x: -x,
    lambda module, x: abs(x),
  ]
  with np.errstate(all="ignore"):
    expected = [clamp_numpy(f(np, EVERY)) for f in functions]
  got = jax.jit(emulate_saturation(lambda x: [f(jnp, x) for f in functions]))(
    EVERY
  )
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_array_equal(x, y)


def test_other_operations_on_every_float16_value_are_jaxs_clamped():
  functions = [
    lax.exp,
    lax.exp2,
    lax.expm1,
    lax.log,
    lax.log1p,
    lax.tan,
    lax.sinh,
    lax.rsqrt,
    lax.lgamma,
    lax.erf_inv,
    lambda x: lax.pow(x, HALF(2.5)),
    lambda x: lax.integer_pow(x, -3),
  ]
  expected = [clamp_numpy(np.asarray(f(jnp.asarray(EVERY)))) for f in functions]
  got = emulate_saturation(lambda x: [f(x) for f in functions])(EVERY)
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_array_equal(x, y)


# --- Control flow and calls, against the clamp written out.


def layer(x):
  return jnp.exp(x) * 2 - x * x


def hand_clamped_layer(x):
  return clamp(clamp(clamp(jnp.exp(x)) * HALF(2)) - clamp(x * x))


def of_parts(fun, check_vma, axes=("data", "model")):
  return jax.shard_map(
    fun,
    mesh=MESH,
    in_specs=jax.P(axes),
    out_specs=jax.P(axes),
    check_vma=check_vma,
    axis_names=set(axes),
  )


# Each takes a function of an array, and returns one.
CONSTRUCTS = {
  "jit": jax.jit,
  "scan": lambda f: (
    lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]
  ),
  "cond": lambda f: lambda x: lax.cond(x.ravel()[0] > 1, f, jnp.negative, x),
  "vmap": lambda f: (
    lambda x: jax.vmap(f)(x.reshape(len(x), -1)).reshape(x.shape)
  ),
  "while": lambda f: (
    lambda x: lax.while_loop(
      lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x)
    )[1]
  ),
  "remat": jax.checkpoint,
  "switch": lambda f: lambda x: lax.switch(1, [jnp.negative, f], x),
  "custom_jvp": support.with_jvp,
  "custom_vjp": support.with_vjp,
  "fori_loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, y: f(y), x),
  "named_call": lambda f: jax.named_call(f, name="mine"),
  "while over a batch": lambda f: (
    lambda x: jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda _, y: f(y), x))(
      x.reshape(len(x), -1), jnp.arange(len(x)) % 3
    ).reshape(x.shape)
  ),
  "cond over a batch": lambda f: (
    lambda x: jax.vmap(lambda x: lax.cond(x[0] > 1, f, jnp.negative, x))(
      x.reshape(len(x), -1)
    ).reshape(x.shape)
  ),
  "composite": lambda f: lax.composite(f, name="my.layer"),
  "custom_vmap": lambda f: support.with_vmap(f, jax.vmap(f)),
  "platform_dependent": lambda f: (
    lambda x: lax.platform_dependent(x, cuda=jnp.negative, default=f)
  ),
}
# Not in a vmap, and no custom_vmap in them.
SHARDED = {
  "shard_map": lambda f: of_parts(f, True),
  "shard_map unchecked": lambda f: of_parts(f, False),
  "shard_map over one axis": lambda f: jax.jit(of_parts(f, True, ("data",))),
  "pmap": lambda f: lambda x: jax.pmap(f)(x.reshape(8, 1)).reshape(x.shape),
}
ALL_CONSTRUCTS = CONSTRUCTS | SHARDED


@pytest.mark.parametrize("name", ALL_CONSTRUCTS)
def test_an_operation_is_clamped_inside_and_around(name):
  construct = ALL_CONSTRUCTS[name]
  # A function without any of it, op by op.
  with jax.disable_jit(name in CONSTRUCTS):
    expected = construct(hand_clamped_layer)(X)
  assert not is_finite(construct(layer)(X))
  assert_same_bits(jax.jit(emulate_saturation(construct(layer)))(X), expected)
  assert_same_bits(construct(emulate_saturation(layer))(X), expected)


@pytest.mark.parametrize("place", range(len(CONSTRUCTS)))
def test_an_operation_is_clamped_in_a_nest(place):
  names = [*CONSTRUCTS, *CONSTRUCTS]
  nest = [CONSTRUCTS[name] for name in names[place : place + 3]]

  def build(f):
    return functools.reduce(lambda f, construct: construct(f), nest, f)

  with jax.disable_jit():
    expected = build(hand_clamped_layer)(X)
  assert_same_bits(jax.jit(emulate_saturation(build(layer)))(X), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_operation_is_clamped_in_loops_on_each_device(check_vma):
  def build(f):
    for name in ("scan", "cond", "while", "remat", "switch", "custom_vjp"):
      f = CONSTRUCTS[name](f)
    return f

  with jax.disable_jit():
    expected = jnp.concatenate(
      [build(hand_clamped_layer)(x) for x in X.reshape(8, 1)]
    )
  for fun in (
    emulate_saturation(of_parts(build(layer), check_vma)),
    of_parts(emulate_saturation(build(layer)), check_vma),
  ):
    assert_same_bits(jax.jit(fun)(X), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_over_devices_are_clamped(check_vma):
  summed = jax.shard_map(
    lambda x: lax.psum(x, "data"),
    mesh=MESH,
    in_specs=jax.P("data"),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  x = jnp.full(4, 40000.0, HALF)
  np.testing.assert_array_equal(emulate_saturation(summed)(x), 65504)


# --- Derivatives.


def test_the_rules_that_a_function_has_are_used_and_clamped():
  @jax.custom_jvp
  def tenfold(x):
    return jnp.exp(x)

  # Both are wrong, which shows that they are used.
  tenfold.defjvp(lambda x, dx: (tenfold(*x), dx[0] * HALF(1e4) * x[0]))

  @jax.custom_vjp
  def thousandfold(x, not_differentiated):
    return jnp.exp(x) * not_differentiated

  thousandfold.defvjp(
    lambda x, y: (thousandfold(x, y), x),
    lambda x, cotangent: (cotangent * HALF(1e4) * x, None),
  )
  x = jnp.array([2.0, 12.0, -8.0], HALF)
  for fun in (tenfold, lambda x: thousandfold(x, HALF(1))):
    for around in (lambda f: f, jax.jit, jax.checkpoint):
      gradient = jax.grad(
        lambda x, f=fun, a=around: jnp.sum(
          emulate_saturation(a(f))(x).astype(jnp.float32)
        )
      )(x)
      np.testing.assert_array_equal(
        gradient, np.array([2e4, 65504, -65504], np.float16)
      )


KEYS = jax.random.split(jax.random.key(0), 4)


def normal(key, *shape):
  return jax.random.normal(KEYS[key], shape, HALF)


def perceptron(x, w, v):
  logits = jax.nn.gelu(x @ w) @ v
  return -jnp.sum(jax.nn.log_softmax(logits)[:, 0]) * 30000


def attention(x, w, v):
  query, key = x @ w, x @ v
  mask = jnp.tril(jnp.ones((x.shape[0],) * 2, bool))
  weights = jax.nn.softmax(jnp.where(mask, query @ key.T, -jnp.inf))
  return jnp.sum((weights @ x) ** 2)


def layer_norm(x, w, v):
  x = x @ w
  x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True))
  return jnp.sum((x @ v) ** 2)


def recurrent(x, w, v):
  def step(carry, x):
    carry = jax.nn.leaky_relu(carry @ w + x @ v)
    return carry, jnp.sum(carry)

  return jnp.sum(lax.scan(step, x[0], x)[1])


def convolution(x, w, v):
  x = lax.conv_general_dilated(
    x[None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
  )
  return jnp.sum((x @ v) ** 2)


def indexing(x, w, v):
  segments = jnp.array([0, 1, 1, 0, 2])
  x = jax.ops.segment_sum(x @ w, segments, 3)
  x = (x @ v).at[jnp.array([0, 0])].add(x[:2] * x[:2])
  return jnp.sum(jnp.take(x, jnp.array([2, 0, 0]), axis=0) ** 2)


def ordering(x, w, v):
  x = jnp.cumsum(jnp.sort(x @ w, axis=0), axis=0) @ v
  return jax.nn.logsumexp(x) + jnp.sum(jnp.maximum(x, 0) ** 3)


def dead_branches(x, w, v):
  x = x @ w
  x = jnp.where(x > 0, jnp.sqrt(x), jnp.exp(-x)) @ v
  return jnp.sum(jnp.where(x > 0, jnp.log(x), 1 / x))


def mixed(x, w, v):
  x = jax.checkpoint(lambda x: jnp.exp(x @ w))(x)
  x = lax.cond(x[0, 0] > 1, lambda x: x @ v, lambda x: x * x, x)
  return jnp.sum(x.astype(jnp.float32) ** 2)


LOSSES = {
  f.__name__: f
  for f in (
    perceptron,
    attention,
    layer_norm,
    recurrent,
    convolution,
    indexing,
    ordering,
    dead_branches,
    mixed,
  )
}


@pytest.mark.parametrize(
  "name", support.slow_but(["mixed"], LOSSES, pytest.mark.long)
)
def test_the_gradient_of_a_saturating_loss_is_the_saturating_gradient(name):
  loss = LOSSES[name]
  places = (0, 1, 2)
  outside = jax.jit(jax.value_and_grad(emulate_saturation(loss), places))
  inside = jax.jit(emulate_saturation(jax.value_and_grad(loss, places)))
  plain = jax.jit(jax.value_and_grad(loss, places))
  overflowed = moved = False
  for scale in (1, 30, 300, 3000):
    args = (normal(0, 5, 3) * scale, normal(1, 3, 3) * scale, normal(2, 3, 3))
    got = outside(*args)
    assert_same_bits(got, inside(*args))
    assert is_finite(got)
    if not is_finite(plain(*args)):
      overflowed = True
      moved |= any(np.any(x) for x in got[1])
  assert overflowed
  assert moved


def test_the_second_derivative_is_that_of_what_saturates():
  def second(fun):
    return jax.jacrev(jax.jacrev(fun))

  def cube(x):
    return jnp.sum(jnp.exp(x) * x * x)

  x = jnp.array([1.0, -3.0, 9.0, 11.5], HALF)
  got = jax.jit(second(emulate_saturation(cube)))(x)
  assert not is_finite(second(cube)(x))
  assert_same_bits(got, jax.jit(emulate_saturation(second(cube)))(x))
  assert np.count_nonzero(got) == 4


@pytest.mark.parametrize(
  "name", ["jit", "scan", "vmap", "remat", "shard_map", "shard_map unchecked"]
)
def test_a_layer_that_saturates_is_differentiated_anywhere(name):
  construct = ALL_CONSTRUCTS[name]

  def gradient(fun):
    return jax.jit(lambda x: jax.vjp(fun, x)[1](jnp.ones_like(x))[0])(X)

  got = gradient(construct(emulate_saturation(layer)))
  whole = gradient(emulate_saturation(construct(layer)))
  assert_same_bits(got, whole)
  assert is_finite(got)
  assert np.any(got)
  if name != "scan":
    assert_same_bits(
      got,
      emulate_saturation(jax.grad(lambda x: jnp.sum(layer(x))))(X),
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_summed_over_devices_and_clamped(check_vma):
  weights = jnp.float16(3.0)

  def local(weights, x):
    return jnp.sum((weights * x).astype(jnp.float32))

  def run(fun):
    def gradient(weights, x):
      gradient = fun(weights, x)
      return gradient if check_vma else lax.psum(gradient, "data")

    return jax.jit(
      jax.shard_map(
        gradient,
        mesh=MESH,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
        check_vma=check_vma,
      )
    )

  x = jnp.full(8, 10000.0, HALF)
  inside = run(jax.grad(emulate_saturation(local)))
  whole = jax.jit(emulate_saturation(run(jax.grad(local))))
  assert run(jax.grad(local))(weights, x) == jnp.inf
  assert whole(weights, x) == 65504
  if check_vma:  # The sum is a part of the derivative.
    assert inside(weights, x) == 65504


def test_what_is_not_differentiated_need_have_no_derivative():
  def loss(x, rounds, data):
    data = lax.fori_loop(0, rounds, lambda _, y: y * 2, data)
    return jnp.sum(x * data), data

  x = jnp.array([1.0, 2.0], HALF)
  for around in (lambda f: f, jax.jit):
    gradient, _ = jax.grad(around(emulate_saturation(loss)), has_aux=True)(
      x, 3, x
    )
    np.testing.assert_array_equal(gradient, 8 * x)


def test_a_result_that_is_not_used_does_not_spoil_a_gradient():
  def fun(x):
    return jnp.sum(x * x), jnp.sum(jnp.sqrt(x))

  # In float32, which is not clamped here, 0 times inf is NaN.
  x = jnp.array([0.0, 300.0])
  gradient = jax.grad(lambda x: emulate_saturation(fun)(x)[0])(x)
  np.testing.assert_array_equal(gradient, 2 * x)
  gradient, _ = jax.grad(emulate_saturation(fun), has_aux=True)(x)
  np.testing.assert_array_equal(gradient, 2 * x)


def test_there_is_no_forward_mode_and_the_remedy_works():
  x = jnp.array([2.0, 12.0], HALF)
  with pytest.raises(TypeError, match="custom_vjp"):
    jax.jvp(emulate_saturation(jnp.exp), (x,), (x,))
  result, tangent = emulate_saturation(
    lambda x, dx: jax.jvp(jnp.exp, (x,), (dx,))
  )(x, x)
  assert_same_bits(result, clamp(jnp.exp(x)))
  assert_same_bits(tangent, clamp(x * clamp(jnp.exp(x))))


# --- Arguments, results and what is closed over.


def test_arguments_and_results_may_be_anything():
  def fun(x, key, nothing, act, *, train, counts, name="layer"):
    assert train is True
    assert nothing is None
    assert name == "layer"
    return {
      "x": act(x),
      "same": x,
      "noise": jax.random.normal(key, (2,), HALF),
      "key": jax.random.split(key)[0],
      "counts": counts + 1,
      "is_large": x > 100,
      "nothing": nothing,
      "constant": 1.0,
      "flag": True,
      "empty": x[:0] * 2,
    }

  key = jax.random.key(1)
  args = (X, key, None, jnp.exp)
  kwargs = {"train": True, "counts": np.arange(3)}
  got = emulate_saturation(fun)(*args, **kwargs)
  want = fun(*args, **kwargs) | {"x": clamp(jnp.exp(X))}
  for tree in (got, want):
    tree["key"] = jax.random.key_data(tree["key"])
  assert_same_bits(got, jax.tree.map(jnp.asarray, want))
  gradient = jax.grad(
    lambda x: jnp.sum(
      emulate_saturation(fun)(x, *args[1:], **kwargs)["x"] * 0 + x
    )
  )(X)
  np.testing.assert_array_equal(gradient, 1)


def test_a_function_without_arguments_saturates():
  assert emulate_saturation(lambda: jnp.exp(jnp.full((), 12, HALF)))() == 65504
  assert emulate_saturation(lambda: 3.0)() == 3


def test_what_is_closed_over_is_differentiated_mapped_and_compiled():
  x = jnp.array([2.0, 12.0, 1.0], HALF)

  def closed_over(weights):
    return emulate_saturation(lambda x: jnp.exp(x * weights))(x)

  expected = clamp(jnp.exp(clamp(x * x)))
  assert_same_bits(jax.jit(closed_over)(x), expected)
  assert_same_bits(jax.vmap(closed_over)(x[None])[0], expected)
  _, vjp = jax.vjp(jax.jit(closed_over), x)
  assert_same_bits(vjp(jnp.ones_like(x))[0], clamp(x * expected))
  weights = np.asarray(x)
  assert_same_bits(
    emulate_saturation(lambda x: jnp.exp(x * weights))(x), expected
  )


def test_a_mutable_array_is_clamped_when_it_is_read():
  def fun(x):
    ref = jax.new_ref(x)
    ref[0] = x[3] * x[3]
    return ref[...]

  np.testing.assert_array_equal(emulate_saturation(fun)(X)[0], 65504)
  gradient = jax.grad(lambda x: emulate_saturation(fun)(x)[0])(X)
  np.testing.assert_array_equal(gradient, [0, 0, 0, 600, 0, 0, 0, 0])


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize(
  "mesh", [MESH, EXPLICIT_MESH], ids=["auto", "explicit"]
)
def test_a_function_with_shardings_keeps_them(mesh, where):
  is_explicit = mesh is EXPLICIT_MESH
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  inner = jax.jit(layer, **{where: sharding})
  context = jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext()
  with context:
    x = jax.device_put(X, sharding) if is_explicit else X
    fun = jax.jit(emulate_saturation(lambda x: inner(x + 0)))
    result = fun(x)
    assert result.sharding.is_equivalent_to(sharding, 1)
    assert_same_bits(result, hand_clamped_layer(X))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(fun(x))))(x)
    assert gradient.sharding.is_equivalent_to(sharding, 1)
    assert is_finite(gradient)


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
def test_a_function_that_asks_for_another_sharding_gets_what_jit_gives(where):
  # A constraint to another sharding than an explicit one is an error.
  sharding = jax.NamedSharding(EXPLICIT_MESH, jax.P("data"))
  inner = jax.jit(layer, **{where: sharding})
  with jax.set_mesh(EXPLICIT_MESH):
    x = jax.device_put(X, jax.NamedSharding(EXPLICIT_MESH, jax.P()))
    result = jax.jit(emulate_saturation(lambda x: inner(x + 0)))(x)
    assert result.sharding == jax.jit(lambda x: inner(x + 0))(x).sharding
  assert_same_bits(result, hand_clamped_layer(X))


def test_a_part_on_automatic_axes_of_an_explicit_mesh_saturates():
  def fun(x):
    automatic = jax.sharding.auto_axes(layer, out_sharding=jax.P("data"))
    return automatic(x) * 2

  with jax.set_mesh(EXPLICIT_MESH):
    x = jax.device_put(X, jax.NamedSharding(EXPLICIT_MESH, jax.P("data")))
    got = jax.jit(emulate_saturation(fun))(x)
    assert jax.typeof(got) == jax.typeof(jax.jit(fun)(x))
  assert_same_bits(got, clamp(hand_clamped_layer(X) * 2))


def test_donation_inside_does_not_take_an_argument():
  x = jnp.array([12.0], HALF)
  donating = jax.jit(jnp.exp, donate_argnums=0)
  assert emulate_saturation(lambda x: donating(x) + donating(x + 0))(x) == 65504
  assert not x.is_deleted()


def test_callbacks_and_prints_run_once(capfd):
  seen = []

  def fun(x):
    jax.debug.print("x is {}", x[0])
    jax.debug.callback(lambda x: seen.append(float(x)), x[0] * x[0] * x[0])
    return jax.pure_callback(
      lambda x: np.full_like(x, np.inf), jax.typeof(x), x * x
    )

  x = jnp.array([300.0], HALF)
  for around in (lambda f: f, jax.jit):
    result = jax.block_until_ready(around(emulate_saturation(fun))(x))
    jax.effects_barrier()
    assert result == 65504
    assert seen == [65504.0]
    assert capfd.readouterr().out.count("x is 300") == 1
    seen.clear()


def test_what_a_library_computes_is_one_operation():
  x = jnp.array([300.0, 2.0], HALF)

  def reduced(x):
    # inf - inf inside of it is NaN, and so is the result.
    return lax.reduce(x * 200, HALF(0), lambda a, b: a * b - a * b, (0,))

  def solved(x):
    return lax.custom_linear_solve(
      lambda y: y * HALF(0.001), x, lambda _, b: b * HALF(1000), symmetric=True
    )

  assert is_finite(emulate_saturation(reduced)(x))
  np.testing.assert_array_equal(emulate_saturation(solved)(x), [65504, 2000])
  np.testing.assert_array_equal(
    emulate_saturation(lambda x: lax.associative_scan(jnp.add, x * 200))(x),
    [60000, 60416],
  )


# --- Dtypes.

DTYPES = {
  "bfloat16": jnp.bfloat16,
  "float32": jnp.float32,
  "float8_e5m2": jnp.float8_e5m2,
  "float8_e4m3": jnp.float8_e4m3,
}


@pytest.mark.parametrize("name", DTYPES)
def test_other_dtypes_saturate_at_their_own_largest_value(name):
  dtype = DTYPES[name]
  largest = float(jnp.finfo(dtype).max)
  x = jnp.array([largest, -largest, -2.0, 0.0, jnp.nan], dtype)
  got = jax.jit(
    emulate_saturation(lambda x: (x * jnp.abs(x), 1 / x), dtypes=dtype)
  )(x)
  assert got[0].dtype == dtype
  np.testing.assert_array_equal(
    np.asarray(got[0], float), [largest, -largest, -4, 0, 0]
  )
  assert float(got[1][3]) == largest
  gradient = jax.grad(
    lambda x: emulate_saturation(lambda x: x * x * x, dtypes=dtype)(x)[
      0
    ].astype("float32")
  )(x)
  assert float(gradient[0]) == largest


def test_float64_saturates_as_well():
  with jax.enable_x64(True):
    x = jnp.array([1e200, -1.0])
    got = emulate_saturation(lambda x: x * x, dtypes="float64")(x)
    np.testing.assert_array_equal(got, [np.finfo(float).max, 1])


def test_the_parts_of_complex_numbers_saturate():
  z = jnp.array([1e30 + 1e30j, 1j, 1e30], jnp.complex64)
  got = emulate_saturation(lambda z: z * z, dtypes=jnp.float32)(z)
  largest = np.finfo(np.float32).max
  assert abs(got[0].imag) == largest
  np.testing.assert_array_equal(got[1:], np.array([-1, largest], got.dtype))
  assert not is_finite(jnp.abs(z * z))
  assert_same_bits(emulate_saturation(lambda z: z * z)(z), z * z)


def test_several_dtypes_saturate_at_once():
  got = emulate_saturation(
    lambda x, y: (x * x, y * y), dtypes=(HALF, jnp.float32)
  )(HALF(300), jnp.float32(1e30))
  assert got == (65504, np.finfo(np.float32).max)


def test_a_function_without_the_dtypes_is_as_it_was():
  def fun(x, key):
    noise = jax.random.normal(key, x.shape)
    return jnp.exp(x) / (x - x), jnp.sum(noise @ noise.T), jnp.argsort(x[0])

  x = jnp.arange(16.0).reshape(4, 4) * 30
  key = jax.random.key(0)
  expected = jax.jit(fun)(x, key)
  assert_same_bits(jax.jit(emulate_saturation(fun))(x, key), expected)

  def gradient(fun):
    return jax.jit(jax.grad(lambda x: fun(x, key)[1] + jnp.sum(x**3)))

  assert_same_bits(gradient(emulate_saturation(fun))(x), gradient(fun)(x))


def test_a_cast_to_a_dtype_without_inf_clips():
  dtype = jnp.float8_e4m3fn
  x = jnp.array([1e6, -470, 460, 448, jnp.nan, jnp.inf, -jnp.inf, 1], "float32")
  expected = [448, -448, 448, 448, 0, 448, -448, 1]
  for of in (jnp.float32, jnp.bfloat16, jnp.float8_e5m2):
    fun = emulate_saturation(
      lambda x: jnp.concatenate([x.astype(dtype)[::-1], jnp.ones(1, dtype)]),
      dtypes=dtype,
    )
    # float8_e5m2 has no 460 and no 470, but 448 and 512.
    got = np.asarray(jax.jit(fun)(x.astype(of)), float)
    np.testing.assert_array_equal(got, [*expected[::-1], 1])
  gradient = jax.grad(
    lambda x: jnp.sum(
      emulate_saturation(lambda x: x.astype(dtype), dtypes=dtype)(x).astype(
        "float32"
      )
    )
  )(x)
  np.testing.assert_array_equal(gradient, 1)


def test_arithmetic_in_a_dtype_without_inf_is_an_error():
  x = jnp.ones(2, jnp.float8_e4m3fn)
  with pytest.raises(TypeError, match="mul in float8_e4m3fn, which has no inf"):
    emulate_saturation(lambda x: x * x, dtypes=x.dtype)(x)
  # A product in float32 of such values is none.
  got = emulate_saturation(
    lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32), dtypes=x.dtype
  )(x)
  assert got == 2


@pytest.mark.parametrize(
  "dtypes",
  [jnp.int32, "int8", (), None, (None,), 3, "nonsense", jnp.complex64, bool,
   (jnp.float16, "int8"), jnp.float4_e2m1fn, jnp.float8_e8m0fnu],
  ids=str,
)  # fmt: skip
def test_other_dtypes_are_an_error_at_once(dtypes):
  with pytest.raises(TypeError, match="`dtypes` must hold"):
    emulate_saturation(jnp.exp, dtypes=dtypes)


def test_a_dtype_is_no_function():
  for dtype in (jnp.float16, np.float16, jnp.bfloat16):
    with pytest.raises(TypeError, match="`fun` must be a function, got the dt"):
      emulate_saturation(dtype)


@pytest.mark.parametrize(
  "dtypes", ["float16", [jnp.float16], {"float16"}, np.dtype("float16")],
  ids=str,
)  # fmt: skip
def test_a_dtype_may_be_spelled_as_one_likes(dtypes):
  np.testing.assert_array_equal(
    emulate_saturation(jnp.exp, dtypes=dtypes)(X), clamp(jnp.exp(X))
  )


# --- Models.


class Model(nn.Module):
  """A transformer's layer, scanned and rematerialised."""

  @nn.compact
  def __call__(self, x, train):
    kwargs = {"dtype": HALF, "param_dtype": HALF}
    x = nn.Dense(4, **kwargs)(x)
    x = nn.MultiHeadDotProductAttention(num_heads=2, **kwargs)(x)
    x = nn.remat(nn.LayerNorm)(**kwargs)(x)
    scanned = nn.scan(
      nn.remat(Cell),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=2,
    )
    x, _ = scanned()(x, None)
    return nn.Dropout(0.5, deterministic=not train)(x)


class Cell(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return nn.gelu(nn.Dense(4, dtype=HALF, param_dtype=HALF)(x)), None


@pytest.mark.slow
def test_a_flax_model_saturates_forward_and_backward():
  model = Model()
  x = normal(0, 2, 3, 4) * 20000
  params = jax.jit(model.init, static_argnames="train")(KEYS[1], x, train=False)

  def loss(params, x, train):
    rngs = {"dropout": KEYS[2]}
    return jnp.sum(model.apply(params, x, train=train, rngs=rngs) ** 2) * 4000

  static = {"static_argnames": "train"}
  got = jax.jit(jax.value_and_grad(emulate_saturation(loss)), **static)(
    params, x, train=True
  )
  want = jax.jit(emulate_saturation(jax.value_and_grad(loss)), **static)(
    params, x, train=True
  )
  assert_same_bits(got, want)
  assert is_finite(got)
  assert any(np.any(x) for x in jax.tree.leaves(got[1]))
  plain = jax.jit(jax.value_and_grad(loss), **static)
  assert not is_finite(plain(params, x, train=True))


def test_a_rule_for_vmap_is_used_where_the_function_maps():
  # It is wrong, which shows that it is used.
  square = support.with_vmap(lambda x: x * x, lambda x: x * x * x)
  np.testing.assert_array_equal(emulate_saturation(square)(X[3]), 65504)
  np.testing.assert_array_equal(
    emulate_saturation(jax.vmap(square))(X[3:5]), [65504, 8]
  )


def test_an_eager_shard_map_takes_the_derivative():
  fun = of_parts(
    jax.grad(lambda x: jnp.sum(emulate_saturation(jnp.square)(x))),
    True,
  )
  np.testing.assert_array_equal(fun(X / 4), X / 2)
