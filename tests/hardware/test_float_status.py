"""The status register, against NumPy, counts by hand, and its function."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests import support
from tests.jaxpr import operations

HALF = jnp.float16


def count(function, *args, **options):
  """Returns how many operations overflowed and were undefined, under jit."""
  _, counts = jax.jit(hardware.float_status(function, **options))(*args)
  return int(counts.overflow), int(counts.undefined)


def half(*numbers):
  return jnp.array(numbers, HALF)


def hide(x):
  """Squares x, but returns no inf that would show an overflow."""
  return jnp.sum(1 / (1 + x * x))


SMALL, LARGE = half(1.0, 2.0, 2.0), half(1.0, 300.0, 2.0)


COUNTS = {
  operations.FINITE: (0, 0),
  operations.OVERFLOW: (1, 0),
  operations.UNDEFINED: (0, 1),
  operations.INF_IN: (0, 0),
}


# tests/jaxpr/test_operations.py tries where each operation is undefined.
@pytest.mark.parametrize("name", ["abs", "div", "exp", "log", "pow", "sub"])
def test_an_operation_is_counted_once_by_its_true_values(name):
  call = operations.ELEMENTWISE[name].call
  for check in (ols.nonfinite(HALF), ols.saturated(HALF)):
    status = hardware.float_status(call, check=check)
    found = operations.situations(name, check.saturating)
    for situation, columns in found.items():
      assert status(*columns)[1] == COUNTS[situation], (check, situation)
    # Elements in other situations change nothing.
    every = map(np.concatenate, zip(*found.values(), strict=True))
    expected = np.sum([COUNTS[situation] for situation in found], axis=0)
    assert status(*every)[1] == tuple(expected), check


@pytest.mark.parametrize("name", operations.OF_ARRAYS)
def test_an_inf_excuses_the_results_that_depend_on_it_and_no_others(name):
  columns = operations.draw(name)
  status = hardware.float_status(operations.OF_ARRAYS[name].call)
  _, counts = jax.jit(jax.vmap(status))(*columns)
  expected = [
    np.any(operations.overflows(name, example))
    for example in zip(*columns, strict=True)
  ]
  np.testing.assert_array_equal(counts.overflow, expected)
  assert 0 < np.sum(expected) < len(expected)


def convolve(x):
  return lax.conv_general_dilated(
    x[None, None], x[None, None, :1], (1,), "VALID"
  )


# Operations that cannot be checked element by element: any inf is an excuse.
WHOLE = {
  "conv_general_dilated": convolve,
  "scatter-add": lambda x: (x * 100).at[0].add(x[1] * 200),
  "fft": lambda x: jnp.fft.fft(x.astype(jnp.float32) * 1e36),
}


@pytest.mark.parametrize("name", WHOLE)
def test_any_inf_excuses_an_operation_that_is_checked_as_a_whole(name):
  options = {"check": ols.nonfinite((HALF, jnp.float32))}
  assert count(WHOLE[name], half(300.0, 200.0, 200.0), **options) == (1, 0)
  assert count(WHOLE[name], half(3.0, 2.0, 2.0), **options) == (0, 0)
  assert count(WHOLE[name], half(300.0, 200.0, np.inf), **options) == (0, 0)


# For each: the dtype of the input and of the result, the input, and the counts.
DTYPES = {
  "bfloat16": (jnp.bfloat16, jnp.bfloat16, 1e20, (1, 0)),
  "float32 to float16": (jnp.float32, HALF, 300.0, (1, 0)),
  "int32 to float16": (jnp.int32, HALF, 320, (1, 0)),
  "float16 to float8_e4m3fn": (HALF, jnp.float8_e4m3fn, 25.0, (1, 0)),
  "float16 to float8_e4m3fn, finite": (HALF, jnp.float8_e4m3fn, 20.0, (0, 0)),
  "inf to float8_e4m3fn": (HALF, jnp.float8_e4m3fn, np.inf, (0, 0)),
  "float64": (jnp.float64, jnp.float64, 1e200, (1, 0)),
}


@pytest.mark.parametrize("name", DTYPES)
def test_a_result_is_compared_with_the_limit_of_its_own_dtype(name):
  before, after, x, expected = DTYPES[name]
  squared = lambda x: (x * x).astype(after)  # noqa: E731
  with jax.enable_x64(before is jnp.float64):
    check, x = ols.nonfinite(after), jnp.asarray(x, before)
    assert count(squared, x, check=check) == expected


def test_only_operations_in_the_dtypes_of_the_check_are_counted():
  def function(x):
    return (x * x, x.astype(HALF), x.astype(HALF) * 1000)

  x = jnp.float32(1e20)
  assert count(function, x) == (2, 0)
  assert count(function, x, check=ols.nonfinite(jnp.float32)) == (1, 0)
  assert count(function, x, check=ols.nonfinite()) == (3, 0)
  assert count(function, x, check=ols.nonfinite(jnp.bfloat16)) == (0, 0)


def test_dtypes_without_a_sign_or_with_4_bits_are_never_counted():
  for dtype in (jnp.float8_e8m0fnu, jnp.float4_e2m1fn):
    cast = lambda x, dtype=dtype: x.astype(dtype)  # noqa: E731
    assert count(cast, jnp.float32(-1e30), check=ols.saturated()) == (0, 0)


COMPLEX = {
  # |x| of two parts below float32's largest.
  "abs": (jnp.abs, 3e38 + 3e38j, (1, 0)),
  "mul": (lambda x: x * x, 1e30j, (1, 0)),
  "division by zero": (lambda x: 1 / x, 0j, (0, 1)),
  "pow of zero": (lambda x: x ** jnp.complex64(-1), 0j, (0, 1)),
  "sqrt of a negative number": (jnp.sqrt, -1 + 0j, (0, 0)),
  "complex of an inf": (lambda x: lax.complex(x.real, x.imag), np.inf, (0, 0)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_a_complex_result_overflows_if_one_of_its_parts_does(name):
  function, x, expected = COMPLEX[name]
  check = ols.nonfinite(jnp.float32)
  assert count(function, jnp.complex64(x), check=check) == expected


def ones_but(place, value):
  return jnp.ones(8, HALF).at[place].set(value)


@pytest.mark.parametrize("check_vma", [True, False])
def test_counts_are_added_up_over_the_devices_of_a_shard_map(check_vma):
  function = support.on_each_device(
    lambda x: lax.psum(hide(x), "data"), jax.P(), check_vma
  )
  status = jax.jit(hardware.float_status(function))
  assert status(ones_but(0, 1))[1] == (0, 0)
  assert status(ones_but(7, 300))[1] == (1, 0)
  assert status(jnp.full(8, 300, HALF))[1] == (8, 0)

  def body(x):
    return hardware.float_status(hide)(x)[1].overflow[None]

  own = jax.jit(support.on_each_device(body, jax.P("data"), check_vma))
  np.testing.assert_array_equal(own(ones_but(3, 300)), np.arange(8) == 3)


SUMS = {
  "psum": (lambda x: lax.psum(x, "data"), jax.P()),
  "psum_scatter": (
    lambda x: lax.psum_scatter(jnp.tile(x, 8), "data", tiled=True),
    jax.P("data"),
  ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_devices_overflows_unless_one_of_them_had_an_inf(name):
  function, out_specs = SUMS[name]
  mapped = support.on_each_device(function, out_specs)
  assert count(mapped, jnp.full(8, 8000, HALF)) == (0, 0)
  assert count(mapped, jnp.full(8, 9000, HALF)) == (8, 0)
  assert count(mapped, ones_but(5, -np.inf)) == (0, 0)


@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_a_sharded_array_is_examined_where_it_lies(axis_type):
  mesh = support.make_mesh(axis_type)

  @functools.partial(jax.sharding.auto_axes, out_sharding=jax.P("data"))
  def on_automatic_axes(x):
    return x * 2

  def function(x, w):
    hidden = on_automatic_axes(jnp.tanh(x @ w))
    return jnp.sum(hidden, axis=1), jnp.cumsum(hidden, axis=1), hidden / 0

  with jax.set_mesh(mesh):
    w = jax.device_put(jnp.ones((4, 8), HALF), jax.P())
    for last, overflows in ((1, 0), (30000, 1)):
      x = np.ones((8, 4), np.float16)
      x[7] = last
      x = jax.device_put(x, jax.P("data"))
      assert count(function, x, w) == (overflows, 1)


def network(x, w):
  """Returns a loss in float16 with a scan and a softmax."""
  x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
  return -jnp.mean(jax.nn.log_softmax(x)[:, 0])


def test_results_and_derivatives_are_those_of_the_function_bit_for_bit():
  rng = np.random.default_rng(0)
  args = [rng.normal(size=x).astype(np.float16) for x in ((5, 6), (3, 6, 6))]
  status = hardware.float_status(network)
  expected = jax.jit(jax.value_and_grad(network))(*args)
  (loss, counts), gradient = jax.jit(jax.value_and_grad(status, has_aux=True))(
    *args
  )
  support.assert_same_bits((loss, gradient), expected)
  assert counts == (0, 0)
  assert counts.overflow.dtype == jnp.int32
  of_gradient = jax.jit(hardware.float_status(jax.value_and_grad(network)))
  support.assert_same_bits(of_gradient(*args)[0], expected)

  def jvp(function):
    return jax.jit(lambda *x: jax.jvp(function, x, x))(*args)

  (loss, _), (tangent, _) = jvp(status)
  support.assert_same_bits((loss, tangent), jvp(network))


def test_derivative_rules_are_kept_and_derivatives_may_be_taken_twice():
  for with_rule in (support.with_jvp, support.with_vjp):
    sine = with_rule(jnp.sin, lambda tangent: 11 * tangent)
    status = hardware.float_status(sine)
    assert jax.grad(status, has_aux=True)(HALF(2))[0] == 11

  def slope(x):
    status = hardware.float_status(lambda x: x**3)
    return jax.grad(status, has_aux=True)(x)[0]

  assert jax.grad(slope)(HALF(2)) == 12


def with_a_reference(x):
  total = jax.new_ref(x)
  total[...] *= 300
  return total[...]


def test_numbers_from_nothing_applied_functions_and_references_are_examined():
  assert count(lambda: lax.iota(HALF, 65520)[:3]) == (0, 0)
  assert count(lambda: lax.iota(HALF, 65521)[:3]) == (1, 0)
  apply = lambda x: x.at[1].apply(lambda y: y * y)  # noqa: E731
  assert count(apply, SMALL) == (0, 0)
  assert count(apply, LARGE) == (1, 0)
  # JAX compiles no reference in a function with a derivative rule.
  status = hardware.float_status(with_a_reference)
  assert not status(SMALL)[1]
  assert status(LARGE)[1]


def test_misused_statuses_are_explained():
  def function(x):
    _, status = hardware.float_status(lambda x: x * x)(x)
    return 1 if status else 0

  with pytest.raises(TypeError, match=r"status\.overflow > 0, or .*overflow="):
    jax.jit(function)(HALF(300))
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(1.0))
  _, status = hardware.float_status(lambda x: x * x)(HALF(300))
  with pytest.raises(TypeError, match="got a FloatStatus; pass it as overflow"):
    tx.update(HALF(0), tx.init(HALF(0)), skip=[status])


def test_a_check_without_dtypes_of_operations_is_refused():
  for dtype in ((), lambda path: HALF, jnp.float8_e8m0fnu, (HALF, None)):
    with pytest.raises(TypeError, match="`check` must name signed floating"):
      hardware.float_status(hide, check=ols.saturated(dtype))


def test_the_result_of_a_function_is_refused_in_its_place():
  with pytest.raises(TypeError, match="`fun` must be a function, got jax.Arr"):
    hardware.float_status(hide(half(1.0)))
