"""The status register, against NumPy, numbers counted by hand, and `fun`."""

import functools

import chex
import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests.support import assert_same_bits
from tests.support import AXIS_TYPES
from tests.support import make_mesh
from tests.support import on_each_device

pytestmark = pytest.mark.slow

HALF = jnp.float16
INF = np.float16(np.inf)


@functools.cache
def counting(function, **options):
  """Returns `float_status` of the function, compiled once."""
  return jax.jit(hardware.float_status(function, **options))


def count(function, *args, **options):
  """Returns how many operations overflowed and were undefined, under jit."""
  _, counts = counting(function, **options)(*args)
  return int(counts.overflow), int(counts.undefined)


def half(*numbers):
  return jnp.array(numbers, HALF)


def hide(x):
  """Squares x, and makes inf 0, so that no result shows an overflow."""
  return jnp.sum(1 / (1 + x * x))


# Contraction ------------------------------------------------------------------

PRODUCTS = (
  "ij,jk->ik",
  "ij,kj->ik",
  "bij,bjk->bik",
  "ibj,jbk->bik",
  "ic,ic->",
  "ijc,jkc->ik",
  "i,j->ij",
  "bhqd,bhkd->bhqk",
)


def draw(shape):
  """Returns powers of two, of which two large ones are too much, and masks."""
  numbers = [0.5, 1.0, 128.0, 256.0, -np.inf]
  drawn = np.random.default_rng(0).choice(
    numbers, shape, p=(0.3, 0.4, 0.2, 0.06, 0.04)
  )
  return drawn.astype(np.float16)


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_element_of_a_product_overflows_unless_its_row_or_column_is_masked(
  product,
):
  size = {"i": 3, "j": 6, "k": 4, "b": 2, "c": 2, "h": 2, "q": 3, "d": 6}
  left, right = product.split("->")[0].split(",")
  x = draw((40, *(size[i] for i in left)))
  y = draw((40, *(size[i] for i in right)))[::-1]
  status = hardware.float_status(functools.partial(jnp.einsum, product))
  _, status = jax.jit(jax.vmap(status))(x, y)
  expected = []
  for a, b in zip(x, y, strict=True):
    masked = np.einsum(product, np.isinf(a), np.ones_like(b)) + np.einsum(
      product, np.ones_like(a), np.isinf(b)
    )
    a, b = (np.where(np.isinf(z), 0.0, z.astype(float)) for z in (a, b))
    too_large = np.abs(np.einsum(product, a, b)) >= 65520
    expected.append(np.any(too_large & (masked == 0)))
  np.testing.assert_array_equal(status.overflow, expected)
  assert 0 < np.sum(expected) < 40


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 2), ()])
def test_an_element_of_a_sum_overflows_unless_one_of_its_terms_is_masked(axis):
  x = draw((40, 2, 3, 4)) * 200
  summed = hardware.float_status(lambda x: jnp.sum(x, axis))
  _, status = jax.jit(jax.vmap(summed))(x)
  expected = [
    np.any(
      (np.where(np.isinf(a), 0.0, a.astype(float)).sum(axis) >= 65520)
      & ~np.isinf(a).any(axis)
    )
    for a in x
  ]
  # jnp.sum of float16 adds up in float32 and casts the sum.
  np.testing.assert_array_equal(status.overflow, expected)
  assert 0 < np.sum(expected) < 40 or axis == ()


@pytest.mark.parametrize(
  "axes", [(0,), (1,), (0, 2), (0, 1, 2)], ids=lambda axes: str(len(axes))
)
def test_a_reduction_in_float16_overflows_unless_one_of_its_terms_is_masked(
  axes,
):
  x = draw((40, 2, 3, 4))

  def reduce(x):
    return lax.reduce_prod_p.bind(x, axes=axes, out_sharding=None)

  _, status = jax.jit(jax.vmap(hardware.float_status(reduce)))(x)
  expected = [
    np.any(
      (np.where(np.isinf(a), 0.0, a.astype(float)).prod(axes) >= 65520)
      & ~np.isinf(a).any(axes)
    )
    for a in x
  ]
  np.testing.assert_array_equal(status.overflow, expected)
  assert 0 < np.sum(expected) < 40


CUMULATIVE = {
  "cumsum": (lax.cumsum, np.cumsum, 200),
  "cumprod": (lax.cumprod, np.cumprod, 1),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CUMULATIVE)
def test_a_running_total_overflows_unless_a_term_before_is_masked(
  name, reverse
):
  function, by_numpy, scale = CUMULATIVE[name]
  x = draw((40, 2, 6)) * np.float16(scale)

  def run(x):
    return function(x, axis=1, reverse=reverse)

  _, status = jax.jit(jax.vmap(hardware.float_status(run)))(x)
  expected = []
  for a in x[..., ::-1] if reverse else x:
    total = by_numpy(np.where(np.isinf(a), 0.0, a.astype(float)), axis=1)
    masked = np.cumsum(np.isinf(a), axis=1) > 0
    expected.append(np.any((np.abs(total) >= 65520) & ~masked))
  np.testing.assert_array_equal(status.overflow, expected)
  assert 0 < np.sum(expected) < 40


def test_a_running_logsumexp_of_masked_logits_is_no_overflow():
  x = half(-np.inf, -np.inf, 3.0, 60000.0)
  assert count(lax.cumlogsumexp, x) == (0, 0)


# Masks ------------------------------------------------------------------------

KEEP = np.array([[True, True, False], [True, False, True]])
DROP_ROW = np.array([[True, True, False], [False, False, False]])
LOGITS = half([1.0, 2.0, 3.0], [-40.0, 5.0, 30.0])


def masked(function):
  """Returns `function` of masked logits, and its gradient."""

  def value_and_grad(logits, keep):
    def total(logits):
      return jnp.sum(function(jnp.where(keep, logits, -jnp.inf)))

    return jax.value_and_grad(total)(logits)

  return value_and_grad


def attention(logits, keep):
  key = jnp.ones((1, 3, 1, 2), logits.dtype)

  def total(query):
    attended = jax.nn.dot_product_attention(
      query, key, 2 * key, mask=keep[None, None]
    )
    return jnp.sum(attended)

  return jax.value_and_grad(total)(logits[:, :2].reshape(1, 2, 1, 2))


def attention_with_bias(logits, keep):
  key = jnp.ones((1, 3, 1, 2), logits.dtype)

  def total(query):
    bias = jnp.where(keep, 0, -jnp.inf).astype(query.dtype)[None, None]
    attended = jax.nn.dot_product_attention(query, key, key, bias=bias)
    return jnp.sum(attended)

  return jax.value_and_grad(total)(logits[:, :2].reshape(1, 2, 1, 2))


def flax_attention(logits, keep):
  layer = nn.MultiHeadDotProductAttention(
    2, qkv_features=4, dtype=HALF, param_dtype=HALF
  )
  # Small logits, since its masks are finfo.min.
  x = (logits / 64)[None]
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x, x)
  params = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, p.dtype), shapes)

  def total(params):
    inputs = jnp.concatenate([x, x[:, :1]], axis=1)
    return jnp.sum(layer.apply(params, x, inputs, mask=keep[None, None]))

  return jax.value_and_grad(total)(params)


MASKED = {
  "softmax": masked(jax.nn.softmax),
  "log_softmax": masked(
    lambda x: jnp.where(jnp.isinf(x), 0, jax.nn.log_softmax(x))
  ),
  "logsumexp": masked(lambda x: jax.nn.logsumexp(x, axis=-1)),
  "exp": masked(lambda x: jnp.exp(x - lax.stop_gradient(jnp.max(x)))),
  "attention": attention,
  "attention with bias": attention_with_bias,
  "flax attention": flax_attention,
}

each_masked = pytest.mark.parametrize("name", MASKED)


def count_masked(name, keep):
  # On a CPU JAX has no attention in float16.
  dtype = jnp.bfloat16 if name.startswith("attention") else HALF
  return count(
    MASKED[name], LOGITS.astype(dtype), keep, check=ols.nonfinite(dtype)
  )


@each_masked
def test_a_mask_is_no_overflow(name):
  assert count_masked(name, KEEP) == (0, 0)


@each_masked
def test_a_row_that_is_masked_altogether_is_no_overflow(name):
  overflow, _ = count_masked(name, DROP_ROW)
  assert overflow == 0


def test_a_logsumexp_that_is_masked_altogether_is_undefined_once():
  logits = jnp.full((2, 3), -jnp.inf, HALF)
  function = functools.partial(jax.nn.logsumexp, axis=-1)
  assert count(function, logits) == (0, 1)


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "exp"])
def test_an_overflow_beside_a_mask_is_seen(name):
  def squared(x, keep):
    return MASKED[name](jnp.minimum(x * x, 1), keep)

  assert count(squared, LOGITS, KEEP) == (0, 0)
  assert count(squared, LOGITS * half([300.0], [1.0]), KEEP) == (1, 0)


def test_where_a_masked_element_is_does_not_matter_to_its_neighbours():
  x = half(-np.inf, 300.0, 1.0)
  assert count(lambda x: x * x, x) == (1, 0)
  assert count(lambda x: x * x, half(-np.inf, 3.0, 1.0)) == (0, 0)


def test_the_lowest_number_as_a_mask_overflows_below_a_large_maximum():
  def attend(x):
    return jax.nn.softmax(jnp.where(np.arange(2) == 0, x, jnp.finfo(HALF).min))

  assert count(attend, half(15.0, 1.0)) == (0, 0)
  assert count(attend, half(17.0, 1.0)) == (1, 0)


# What is no overflow ----------------------------------------------------------

DEAD = {
  "log": lambda x: jnp.where(x > 0, jnp.log(x), 0),
  "sqrt": lambda x: jnp.where(x > 0, jnp.sqrt(x - 1), 0),
  "rsqrt": lambda x: jnp.where(x > 0, lax.rsqrt(x), 0),
  "division": lambda x: jnp.where(x > 0, 1 / x, 0),
  "remainder": lambda x: jnp.where(x > 0, jnp.mod(1, x), 0),
  "power": lambda x: jnp.where(x > 0, x**-1.5, 0),
}


@pytest.mark.parametrize("name", DEAD)
def test_a_branch_of_where_that_is_not_taken_is_no_overflow(name):
  overflow, undefined = count(DEAD[name], half(0.0, 1.0))
  assert overflow == 0
  assert undefined == 1


@pytest.mark.parametrize("name", DEAD)
def test_nor_is_what_its_gradient_makes_of_it(name):
  overflow, undefined = count(
    jax.grad(lambda x: jnp.sum(DEAD[name](x))), half(0.0, 1.0)
  )
  assert overflow == 0
  assert undefined >= 1


def test_an_exponential_of_1000_is_an_overflow_taken_or_not():
  function = lambda x: jnp.where(x < 10, jnp.exp(x), 0)  # noqa: E731
  assert count(function, half(1.0, 1000.0)) == (1, 0)


def test_a_cast_of_minus_a_billion_is_an_overflow():
  assert count(lambda x: x.astype(HALF), jnp.float32([-1e9])) == (1, 0)


def test_what_an_inf_turns_into_is_no_overflow():
  x = half(np.inf, -np.inf, np.nan)
  function = lambda x: (x * 2, x - x, x * 0, jnp.sum(x), x @ x)  # noqa: E731
  assert count(function, x) == (0, 0)


# Dtypes -----------------------------------------------------------------------

CASTS_AND_PRODUCTS = {
  "float16 to float16": (HALF, HALF, 300.0, (1, 0)),
  "float16, none": (HALF, HALF, 255.0, (0, 0)),
  "bfloat16": (jnp.bfloat16, jnp.bfloat16, 1e20, (1, 0)),
  "bfloat16, none": (jnp.bfloat16, jnp.bfloat16, 1e15, (0, 0)),
  "float32": (jnp.float32, jnp.float32, 1e20, (1, 0)),
  "float32 to float16": (jnp.float32, HALF, 300.0, (1, 0)),
  "int32 to float16": (jnp.int32, HALF, 320, (1, 0)),
  "float16 to float8_e4m3fn": (HALF, jnp.float8_e4m3fn, 25.0, (1, 0)),
  "float16 to float8_e4m3fn, none": (HALF, jnp.float8_e4m3fn, 20.0, (0, 0)),
  "float16 to float8_e5m2": (HALF, jnp.float8_e5m2, 250.0, (1, 0)),
  "complex64": (jnp.complex64, jnp.float32, 1e20j, (1, 0)),
}


@pytest.mark.parametrize("name", CASTS_AND_PRODUCTS)
def test_an_operation_is_held_against_its_own_dtype(name):
  before, after, x, expected = CASTS_AND_PRODUCTS[name]
  x = jnp.asarray(x, before)
  is_cast = before is not after and before is not jnp.complex64
  function = lambda x: (x * x).astype(after) if is_cast else x * x  # noqa: E731
  assert count(function, x, check=ols.nonfinite(after)) == expected


def test_float64_has_a_limit_of_its_own():
  with jax.enable_x64(True):
    square = lambda x: x * x  # noqa: E731
    assert count(
      square, jnp.float64(1e200), check=ols.nonfinite(jnp.float64)
    ) == (1, 0)
    assert count(
      square, jnp.float64(1e100), check=ols.nonfinite(jnp.float64)
    ) == (0, 0)


def test_an_inf_cast_to_a_dtype_without_inf_is_no_overflow():
  function = lambda x: x.astype(jnp.float8_e4m3fn)  # noqa: E731
  assert count(
    function, half(np.inf), check=ols.nonfinite(jnp.float8_e4m3fn)
  ) == (0, 0)


def test_only_the_dtypes_asked_for_are_looked_at():
  def function(x):
    return (x * x, x.astype(HALF), x.astype(HALF) * 1000)

  x = jnp.float32(1e20)
  assert count(function, x) == (2, 0)
  assert count(function, x, check=ols.nonfinite(jnp.float32)) == (1, 0)
  assert count(function, x, check=ols.nonfinite((HALF, jnp.float32))) == (3, 0)
  assert count(function, x, check=ols.nonfinite(jnp.bfloat16)) == (0, 0)


# Control flow -----------------------------------------------------------------


@jax.custom_jvp
def eleven(x):
  """Looks at x, with a derivative that nobody could guess."""
  return hide(x) + jnp.sum(x)


eleven.defjvp(lambda primals, tangents: (eleven(*primals), 11 * tangents[0][0]))


@jax.custom_vjp
def seven(x):
  return hide(x) + jnp.sum(x)


seven.defvjp(lambda x: (seven(x), x), lambda x, t: (7 * t * jnp.ones_like(x),))


def scan(x, **options):
  _, y = lax.scan(
    lambda c, y: (c + 1, hide(y * c)), HALF(1), jnp.stack([x] * 3), **options
  )
  return jnp.sum(y)


# For each: how often it squares a 300, of three numbers.
PROGRAMS = {
  "jit": (jax.jit(hide), 1),
  "nested jit": (jax.jit(lambda x: jax.jit(hide)(x) + hide(x)), 2),
  "cond": (lambda x: lax.cond(x[0] > 0, hide, jnp.sum, x), 1),
  "cond, not taken": (lambda x: lax.cond(x[0] < 0, hide, jnp.sum, x), 0),
  "switch": (
    lambda x: lax.switch(x[0].astype(int), [jnp.sum, hide, jnp.max], x),
    1,
  ),
  "scan": (scan, 3),
  "scan in reverse": (functools.partial(scan, reverse=True), 3),
  "scan, unrolled": (functools.partial(scan, unroll=2), 3),
  "scan without inputs": (
    lambda x: lax.scan(lambda c, _: (c + hide(x), None), x, None, length=4)[0],
    4,
  ),
  "body of a while": (
    lambda x: lax.while_loop(
      lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + hide(x)), (0, x)
    )[1],
    3,
  ),
  "condition of a while": (
    lambda x: lax.while_loop(
      lambda c: (hide(x) < 9) & (c < 3), lambda c: c + 1, 0
    ),
    4,
  ),
  "fori_loop": (lambda x: lax.fori_loop(0, x[2].astype(int), add_hidden, x), 2),
  "remat": (jax.checkpoint(hide), 1),
  "custom_jvp": (eleven, 1),
  "custom_vjp": (seven, 1),
  "map": (lambda x: lax.map(hide, jnp.stack([x, x])), 2),
  "vmap": (lambda x: jax.vmap(hide)(jnp.stack([x, x])), 1),
  "vmap of a while": (
    lambda x: jax.vmap(
      lambda n: lax.while_loop(
        lambda c: c[0] < n,
        lambda c: (c[0] + 1, c[1] + hide(x)),
        (0, jnp.sum(x)),
      )
    )(jnp.array([1, 3])),
    3,
  ),
}


def add_hidden(i, x):
  del i
  return x + hide(x[:2])


each_program = pytest.mark.parametrize("name", PROGRAMS)

SMALL, LARGE = half(1.0, 2.0, 2.0), half(1.0, 300.0, 2.0)


@each_program
def test_an_overflow_inside_of_control_flow_is_counted_each_time(name):
  function, times = PROGRAMS[name]
  status = jax.jit(hardware.float_status(function))
  for x, expected in ((SMALL, 0), (LARGE, times)):
    result, counts = status(x)
    assert counts == (expected, 0)
    chex.assert_trees_all_equal(result, jax.jit(function)(x))


@each_program
def test_under_vmap_each_example_has_its_own_count(name):
  function, times = PROGRAMS[name]
  status = jax.jit(jax.vmap(hardware.float_status(function)))
  _, counts = status(jnp.stack([SMALL, LARGE, SMALL]))
  np.testing.assert_array_equal(counts.overflow, [0, times, 0])


@each_program
def test_an_overflow_is_seen_in_a_function_of_many_examples(name):
  function, times = PROGRAMS[name]
  status = jax.jit(hardware.float_status(jax.vmap(function)))
  assert not status(jnp.stack([SMALL, SMALL]))[1]
  # Both branches of a batched cond are run.
  is_seen = times > 0 or name == "cond, not taken"
  assert bool(status(jnp.stack([SMALL, LARGE]))[1]) == is_seen


def test_a_scan_counts_the_steps_that_overflow():
  x = half(1.0, 300.0, 2.0, 1000.0, 3.0)
  assert count(lambda x: lax.map(hide, x), x) == (2, 0)


def test_a_derivative_is_looked_at_with_its_own_rule():
  loss = lambda x: jnp.sum(seven(x) * HALF(10_000))  # noqa: E731
  assert count(loss, SMALL) == (0, 0)
  assert count(jax.grad(loss), SMALL) == (1, 0)  # 7 * 10,000


@pytest.mark.parametrize("policy", [None, "everything"])
def test_what_remat_computes_again_is_counted_again(policy):
  if policy:
    policy = jax.checkpoint_policies.everything_saveable
  loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(hide(x))), policy=policy)
  overflow, _ = count(jax.grad(loss), LARGE)
  assert overflow == (1 if policy else 2)


# Devices ----------------------------------------------------------------------


def ones_but(place, value):
  return jnp.ones(8, HALF).at[place].set(value)


each_vma = pytest.mark.parametrize("check_vma", [True, False])


@each_vma
def test_an_overflow_on_any_device_of_a_shard_map_is_seen(check_vma):
  function = on_each_device(
    lambda x: lax.psum(hide(x), "data"), jax.P(), check_vma
  )
  status = jax.jit(hardware.float_status(function))
  assert status(ones_but(0, 1))[1] == (0, 0)
  for device in range(8):
    assert status(ones_but(device, 300))[1] == (1, 0)
  assert status(jnp.full(8, 300, HALF))[1] == (8, 0)


@each_vma
def test_inside_of_a_shard_map_each_device_has_its_own_status(check_vma):
  def body(x):
    _, status = hardware.float_status(hide)(x)
    return status.overflow[None]

  overflows = jax.jit(on_each_device(body, jax.P("data"), check_vma))
  for device in range(8):
    found = overflows(ones_but(device, 300))
    np.testing.assert_array_equal(found, np.arange(8) == device)


def test_inside_of_a_pmap_each_device_has_its_own_status():
  status = jax.pmap(hardware.float_status(hide), axis_name="data")
  found = status(ones_but(3, 300))[1]
  np.testing.assert_array_equal(found.overflow, np.arange(8) == 3)


SUMS = {
  "psum": (lambda x: lax.psum(x, "data"), jax.P()),
  "psum_scatter": (
    lambda x: lax.psum_scatter(jnp.tile(x, 8), "data", tiled=True),
    jax.P("data"),
  ),
}


@each_vma
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_devices_overflows_on_all_of_them(name, check_vma):
  function, out_specs = SUMS[name]
  function = on_each_device(function, out_specs, check_vma)
  status = jax.jit(hardware.float_status(function))
  assert status(jnp.full(8, 8000, HALF))[1] == (0, 0)
  assert status(jnp.full(8, 9000, HALF))[1] == (8, 0)


@each_vma
@pytest.mark.parametrize("name", SUMS)
def test_the_inf_of_one_device_in_a_sum_is_no_overflow_on_another(
  name, check_vma
):
  function, out_specs = SUMS[name]
  function = on_each_device(function, out_specs, check_vma)
  status = jax.jit(hardware.float_status(function))
  assert status(ones_but(5, -np.inf))[1] == (0, 0)


def test_the_sum_that_jax_puts_into_a_gradient_is_looked_at():
  def gradient(w, x):
    loss = lambda w: jnp.sum(w * x) * HALF(9000)  # noqa: E731
    return jax.grad(loss)(w)

  mesh = make_mesh()
  function = jax.shard_map(
    gradient, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
  )
  result, counts = jax.jit(hardware.float_status(function))(
    HALF(1), jnp.ones(8, HALF)
  )
  assert np.isinf(result)
  assert counts == (8, 0)


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_a_sharded_array_is_looked_at_where_it_lies(axis_type):
  mesh = make_mesh(axis_type)

  def function(x, w):
    hidden = jnp.tanh(x @ w)
    return jnp.sum(hidden, axis=1), jnp.cumsum(hidden, axis=1), hidden / 0

  with jax.set_mesh(mesh):
    x = np.ones((8, 4), np.float16)
    w = jax.device_put(jnp.ones((4, 8), HALF), jax.P())
    status = jax.jit(hardware.float_status(function))
    for device in (None, 0, 7):
      if device is not None:
        x[device] = 30000
      sharded = jax.device_put(x, jax.P("data"))
      result, counts = status(sharded, w)
      chex.assert_trees_all_equal(result, jax.jit(function)(sharded, w))
      assert counts == (int(device is not None), 1)


def test_an_operation_on_automatic_axes_of_an_explicit_mesh_is_seen():
  mesh = make_mesh("Explicit")

  @functools.partial(jax.sharding.auto_axes, out_sharding=jax.P("data"))
  def square(x):
    return x * x

  with jax.set_mesh(mesh):
    x = jax.device_put(half(*[1.0] * 7, 300.0), jax.P("data"))
    assert count(lambda x: square(x) * 2, x) == (1, 0)


# The result, and its derivative -----------------------------------------------


def network(params, x):
  """Returns a loss in float16 with a scan, a normalization and a softmax."""

  def layer(hidden, weight):
    hidden = jnp.tanh(hidden @ weight)
    mean = jnp.mean(hidden, axis=-1, keepdims=True)
    return (hidden - mean) * lax.rsqrt(jnp.var(hidden) + HALF(1e-3)), None

  hidden, _ = lax.scan(layer, x, params["layers"])
  logits = jax.nn.log_softmax(hidden @ params["head"])
  return -jnp.mean(logits[:, 0]) * params["scale"]


def draw_network(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), HALF)  # noqa: E731
  params = {"layers": draw(3, 6, 6), "head": draw(6, 4), "scale": HALF(scale)}
  return params, draw(5, 6)


GRADIENT = jax.value_and_grad(network)


def test_one_operation_at_a_time_the_result_is_that_of_the_function():
  args = draw_network(0)
  with jax.disable_jit():
    expected = GRADIENT(*args)
    result, overflowed = hardware.float_status(GRADIENT)(*args)
  assert_same_bits(result, expected)
  assert not overflowed


def test_compiled_the_result_is_that_of_the_function():
  args = draw_network(0)
  result, overflowed = jax.jit(hardware.float_status(GRADIENT))(*args)
  assert_same_bits(result, jax.jit(GRADIENT)(*args))
  assert not overflowed


def test_its_gradient_is_that_of_the_function_bit_for_bit():
  args = draw_network(0)
  status = hardware.float_status(network)
  (loss, (overflow, _)), gradient = jax.jit(
    jax.value_and_grad(status, has_aux=True)
  )(*args)
  expected = jax.jit(jax.value_and_grad(network))(*args)
  assert_same_bits((loss, gradient), expected)
  assert overflow.dtype == jnp.int32


# JAX has no forward mode for custom_vjp.
@pytest.mark.parametrize("name", [x for x in PROGRAMS if x != "custom_vjp"])
def test_in_forward_mode_its_derivative_is_that_of_the_function(name):
  function, _ = PROGRAMS[name]
  tangent = half(1.0, -2.0, 0.5)
  status = hardware.float_status(function)
  found = jax.jit(lambda x: jax.jvp(status, (x,), (tangent,)))(SMALL)
  expected = jax.jit(lambda x: jax.jvp(function, (x,), (tangent,)))(SMALL)
  assert_same_bits((found[0][0], found[1][0]), expected)


@pytest.mark.parametrize(
  ("function", "factor"), [(eleven, 11), (seven, 7)], ids=["jvp", "vjp"]
)
def test_derivative_rules_are_kept(function, factor):
  gradient, _ = jax.grad(hardware.float_status(function), has_aux=True)(SMALL)
  assert gradient[0] == factor


def test_a_gradient_may_be_taken_twice():
  def slope(x):
    status = hardware.float_status(lambda x: x**3)
    return jax.grad(status, has_aux=True)(x)[0]

  assert jax.grad(slope)(HALF(2)) == 12


def test_it_takes_what_the_function_takes():
  @hardware.float_status
  def function(tree, activation, *, train, key):
    x = activation(tree["x"] * tree["n"])
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return {"y": jnp.where(keep, x, 0) if train else x, "key": key, "three": 3}

  key = jax.random.key(0)
  tree = {"x": np.float16([300.0]), "n": jnp.int32(300), "none": None}
  result, counts = function(tree, jnp.tanh, train=False, key=key)
  assert result["y"] == 1
  assert result["three"] == 3
  assert result["key"] == key
  assert counts == (1, 0)
  assert function.__wrapped__.__name__ == "function"


def test_what_the_function_closes_over_is_looked_at_and_differentiated():
  def loss(x):
    status = hardware.float_status(lambda y: x * x * y)
    return status(HALF(1))

  gradient, status = jax.grad(loss, has_aux=True)(HALF(3))
  assert (gradient, status) == (6, (0, 0))
  assert jax.grad(loss, has_aux=True)(HALF(300))[1] == (1, 0)


def test_a_number_made_of_nothing_may_overflow():
  assert count(lambda: lax.iota(HALF, 65520)[:3]) == (0, 0)
  assert count(lambda: lax.iota(HALF, 65521)[:3]) == (1, 0)


def test_a_function_applied_at_some_places_is_looked_at():
  apply = lambda x: x.at[1].apply(lambda y: y * y)  # noqa: E731
  assert count(apply, SMALL) == (0, 0)
  assert count(apply, LARGE) == (1, 0)


def test_a_mutable_array_is_looked_at_where_it_is_computed():
  def function(x):
    total = jax.new_ref(x)
    total[...] *= 300
    return total[...]

  assert not hardware.float_status(function)(SMALL)[1]
  assert hardware.float_status(function)(LARGE)[1]


# What gradients do not show ---------------------------------------------------


def hidden_by_a_layer_scale(w, x):
  return jnp.sum((w * HALF(0.02) * x).astype(jnp.float32)) * 2**17


def hidden_in_the_forward_pass(w, x):
  large = w + x + x
  return jnp.sum(
    jnp.where(jnp.abs(large) < 60000, large, w).astype(jnp.float32)
  )


# Whether gradients show it on ordinary hardware, and on one that saturates.
HIDDEN = {
  "layer scale": (hidden_by_a_layer_scale, HALF(1), True, False),
  "forward pass": (hidden_in_the_forward_pass, HALF(60000), False, False),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_gradients_do_not_show_is_seen(name):
  loss, x, shown, shown_when_saturated = HIDDEN[name]
  tx = ols.loss_scaling(
    optax.sgd(1.0), ols.FixedLossScale(1.0), check=ols.saturated(HALF)
  )
  params = half(1.0, 2.0)
  state = tx.init(params)

  def overflows(loss, check):
    def gradient_of(state, params, x):
      return ols.scaled_value_and_grad(loss, state)(params, x)[1]

    status = hardware.float_status(gradient_of, check=check)
    gradient, found = jax.jit(status)(state, params, x)
    _, without = tx.update(gradient, state, params)
    _, with_status = tx.update(gradient, state, params, overflow=found)
    return bool(without.overflow), bool(with_status.skipped)

  assert overflows(loss, ols.nonfinite(HALF)) == (shown, True)
  emulated = hardware.emulate_saturation(loss)
  found = overflows(emulated, ols.saturated(HALF))
  assert found == (shown_when_saturated, True)


def test_a_status_is_its_overflows_and_as_a_tuple_what_is_undefined_as_well():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(1.0))
  state = tx.init(HALF(0))
  _, undefined = hardware.float_status(lambda x: 1 / x)(HALF(0))
  _, overflowed = hardware.float_status(lambda x: x * x)(HALF(300))

  def is_skipped(overflow):
    _, after = tx.update(HALF(0), state, HALF(0), overflow=overflow)
    return bool(after.skipped)

  assert not is_skipped(undefined)
  assert not is_skipped([undefined, False])
  assert is_skipped(tuple(undefined))
  assert is_skipped(overflowed)
  assert is_skipped([False, overflowed])


def test_a_status_is_true_if_an_operation_overflowed():
  for function, expected in ((lambda x: x * x, True), (lambda x: 1 / x, False)):
    _, status = hardware.float_status(function)(half(300.0, 0.0))
    assert bool(status) is expected
  _, status = jax.vmap(hardware.float_status(lambda x: x * x))(half(1.0, 300.0))
  assert status
  _, status = jax.vmap(hardware.float_status(lambda x: x * x))(half(1.0, 3.0))
  assert not status


def test_the_truth_of_a_status_under_jit_says_what_to_write():
  def function(x):
    _, status = hardware.float_status(lambda x: x * x)(x)
    return 1 if status else 0

  with pytest.raises(TypeError, match=r"status\.overflow > 0, or .*overflow="):
    jax.jit(function)(HALF(300))


def test_a_status_as_skip_is_refused_since_s_has_to_move():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(1.0))
  _, status = hardware.float_status(lambda x: x * x)(HALF(300))
  for skip in (status, [status]):
    with pytest.raises(TypeError, match="got a FloatStatus; pass it as overf"):
      tx.update(HALF(0), tx.init(HALF(0)), HALF(0), skip=skip)


# Hardware that saturates ------------------------------------------------------


@pytest.mark.slow
def test_the_register_of_saturating_hardware_agrees_with_that_of_this_one():
  gradient = jax.grad(
    lambda params, x, scale: network(params, x).astype(jnp.float32) * scale
  )
  seeds = [draw_network(seed) for seed in range(20)]
  params, x = jax.tree.map(lambda *xs: jnp.stack(xs), *seeds)

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(0, 0, None))
  def registers(params, x, scale):
    _, ordinary = hardware.float_status(gradient)(params, x, scale)
    emulated = hardware.emulate_saturation(gradient)
    status = hardware.float_status(emulated, check=ols.saturated(HALF))
    return ordinary.overflow > 0, status(params, x, scale)[1].overflow > 0

  number = []
  for exponent in range(8, 22, 2):
    ordinary, saturated = registers(params, x, jnp.float32(2.0**exponent))
    np.testing.assert_array_equal(ordinary, saturated)
    number.append(int(ordinary.sum()))
  assert (number[0], number[-1]) == (0, 20)
  assert number == sorted(number)


# Where it must not agree: with `nonfinite`, and with `saturated`.
DIFFERENT = {
  # What is exactly the largest value cannot be told from what is clipped.
  "the largest value": (lambda x: x + 504, half(65000.0), (0, 0), (1, 0)),
  # A clipped value is a number like any other, and may overflow again.
  "after an undefined one": (
    lambda x: jnp.log(x) * 0.5 * 4,
    half(0.0),
    (0, 1),
    (1, 1),
  ),
  # NaN becomes 0, which no register shows.
  "the root of a negative number": (jnp.sqrt, half(-1.0), (0, 1), (0, 0)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_saturating_hardware_cannot_tell(name):
  function, x, ordinary, saturated = DIFFERENT[name]
  assert count(function, x) == ordinary

  def emulated(x):
    return hardware.emulate_saturation(function)(x)

  # The operations before the clamp are IEEE's here: only what it left counts.
  found = count(emulated, x, check=ols.saturated(HALF))
  assert found[0] == saturated[0]


def test_with_the_saturated_check_the_largest_value_is_what_counts():
  clipped = half(65504.0, 3.0)
  check = ols.saturated(HALF)
  assert count(lambda x: x * 2, clipped, check=check) == (0, 0)
  assert count(lambda x: x + 504, half(65000.0), check=check) == (1, 0)
  assert count(lambda x: x / 0, half(1.0), check=check) == (0, 1)
  assert count(lambda x: x + 400, half(65000.0), check=check) == (0, 0)


# Errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
  "factory", [hardware.float_status, hardware.emulate_saturation]
)
def test_what_a_function_returned_is_no_function(factory):
  with pytest.raises(
    TypeError, match="`fun` must be a function, got jax.Array"
  ):
    factory(hide(half(1.0)))


def test_an_eager_look_at_a_sharded_array():
  # Without a mesh that is set: it comes with the array, or with the function.
  mesh = make_mesh("Explicit")
  x = jax.device_put(
    half(*[1.0] * 7, 300.0), jax.NamedSharding(mesh, jax.P("data"))
  )
  status = hardware.float_status(lambda x: x * x)
  assert status(x)[1].overflow == 1


@pytest.mark.parametrize("check", [None, "saturated", ols.saturated, True])
def test_a_check_that_is_none_is_refused(check):
  with pytest.raises(TypeError, match="`check` must be made by nonfinite"):
    hardware.float_status(hide, check=check)


@pytest.mark.parametrize(
  "dtype",
  [(), lambda path: HALF, jnp.float8_e8m0fnu, jnp.float4_e2m1fn, (HALF, None)],
  ids=["nothing", "function", "unsigned", "4 bits", "none among them"],
)
def test_a_check_that_names_no_dtypes_of_operations_is_refused(dtype):
  with pytest.raises(TypeError, match="`check` must name signed floating dty"):
    hardware.float_status(hide, check=ols.saturated(dtype))


def test_what_has_no_sign_or_too_few_bits_is_left_out_of_all_dtypes():
  for dtype in (jnp.float8_e8m0fnu, jnp.float4_e2m1fn):
    cast = lambda x, dtype=dtype: x.astype(dtype)  # noqa: E731
    assert count(cast, jnp.float32(-1e30), check=ols.saturated()) == (0, 0)
