"""`emulate_saturation` clamps every operation of any function.

The authority is NumPy, or JAX one operation at a time, with the clamp written
out after each operation.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale.hardware import emulate_saturation
from tests import support

# LLVM decides what kernels do with NaN and inf.
pytestmark = pytest.mark.usefixtures("full_compilation")

HALF = jnp.float16
LARGEST = 65504.0
X = jnp.array([12.0, -1.0, 0.0, 300.0, 2.0, 8.0, -20.0, 65504.0], HALF)


def clamp(x):
  """Returns what saturation mode makes of a result."""
  largest = jnp.finfo(x.dtype).max
  return jnp.clip(jnp.where(jnp.isnan(x), 0, x), -largest, largest)


def is_finite(tree):
  return all(
    np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree)
  )


def test_derivative_rules_are_used_and_clamped():
  # These rules are wrong, which shows that they are used.
  by_jvp = support.with_jvp(jnp.exp, lambda dx: dx * X[3] * X[3])
  by_vjp = support.with_vjp(jnp.exp, lambda dy: dy * X[3] * X[3])
  for fun in (by_jvp, by_vjp, jax.jit(by_jvp), jax.checkpoint(by_vjp)):
    for sign in (1, -1):
      gradient = jax.grad(
        lambda x, f=fun, s=sign: s * emulate_saturation(f)(x)
      )(HALF(2))
      assert gradient == sign * LARGEST


def loss_of_layers(x, w, v):
  """Returns a loss with products, a scan, a branch, a remat and indexing."""
  x = jax.checkpoint(lambda x: jnp.exp(x @ w))(x)
  x = lax.scan(lambda c, y: (jax.nn.gelu(c @ v) + y, c), x[0], x)[1]
  x = lax.cond(x[0, 0] > 1, lambda x: x @ v, lambda x: x * x, x)
  x = x.at[jnp.array([0, 0])].add(x[:2] * x[:2])
  return jnp.sum(jax.nn.log_softmax(x) ** 2) * 100


def test_the_gradient_of_a_saturating_loss_is_the_saturating_gradient():
  rng = np.random.default_rng(0)
  args = [rng.normal(size=shape) for shape in ((5, 3), (3, 3), (3, 3))]
  places = (0, 1, 2)
  outside = jax.jit(
    jax.value_and_grad(emulate_saturation(loss_of_layers), places)
  )
  plain = jax.value_and_grad(loss_of_layers, places)
  inside = jax.jit(emulate_saturation(plain))
  for scale in (1, 30):
    scaled = [jnp.asarray(x * scale, HALF) for x in args]
    got = outside(*scaled)
    support.assert_same_bits(got, inside(*scaled))
    assert is_finite(got)
    assert any(np.any(x) for x in got[1])
  assert not is_finite(jax.jit(plain)(*scaled))


def test_second_derivatives_saturate():
  def second(fun):
    return jax.jacrev(jax.jacrev(fun))

  def cube(x):
    return jnp.sum(jnp.exp(x) * x * x)

  x = jnp.array([1.0, -3.0, 9.0, 11.5], HALF)
  got = jax.jit(second(emulate_saturation(cube)))(x)
  assert not is_finite(second(cube)(x))
  support.assert_same_bits(got, jax.jit(emulate_saturation(second(cube)))(x))
  assert np.count_nonzero(got) == 4


@pytest.mark.parametrize(
  "check_vma", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_gradients_are_summed_over_devices_and_clamped(check_vma):
  def local(weights, x):
    return jnp.sum((weights * x).astype(jnp.float32))

  def run(fun):
    def gradient(weights, x):
      gradient = fun(weights, x)
      return gradient if check_vma else lax.psum(gradient, "data")

    specs = (jax.P(), jax.P("data"))
    return jax.jit(support.on_each_device(gradient, jax.P(), check_vma, specs))

  weights, x = HALF(3), jnp.full(8, 10000.0, HALF)
  assert run(jax.grad(local))(weights, x) == jnp.inf
  assert emulate_saturation(run(jax.grad(local)))(weights, x) == LARGEST
  if check_vma:  # The sum is a part of the derivative.
    inside = run(jax.grad(emulate_saturation(local)))
    assert inside(weights, x) == LARGEST


def test_a_derivative_is_asked_only_of_what_is_differentiated():
  def loss(x, rounds, data):
    data = lax.fori_loop(0, rounds, lambda _, y: y * 2, data)
    return jnp.sum(x * data), data

  x = jnp.array([1.0, 2.0], HALF)
  gradient = jax.grad(emulate_saturation(loss), has_aux=True)
  np.testing.assert_array_equal(gradient(x, 3, x)[0], 8 * x)


def test_a_result_that_is_not_used_does_not_spoil_a_gradient():
  def fun(x):
    return jnp.sum(x * x), jnp.sum(jnp.sqrt(x))

  # In float32, which is not clamped here, 0 times inf is NaN.
  x = jnp.array([0.0, 300.0])
  gradient = jax.grad(lambda x: emulate_saturation(fun)(x)[0])(x)
  np.testing.assert_array_equal(gradient, 2 * x)
  gradient, _ = jax.grad(emulate_saturation(fun), has_aux=True)(x)
  np.testing.assert_array_equal(gradient, 2 * x)


def test_forward_mode_is_an_error_and_its_remedy_works():
  x = jnp.array([2.0, 12.0], HALF)
  with pytest.raises(TypeError, match="custom_vjp"):
    jax.jvp(emulate_saturation(jnp.exp), (x,), (x,))
  result, tangent = emulate_saturation(
    lambda x, dx: jax.jvp(jnp.exp, (x,), (dx,))
  )(x, x)
  support.assert_same_bits(result, clamp(jnp.exp(x)))
  support.assert_same_bits(tangent, clamp(x * clamp(jnp.exp(x))))


def test_closed_over_arrays_are_differentiated():
  x = jnp.array([2.0, 12.0, 1.0], HALF)

  def closed_over(weights):
    return emulate_saturation(lambda x: jnp.exp(x * weights))(x)

  result, vjp = jax.vjp(jax.jit(closed_over), x)
  support.assert_same_bits(result, clamp(jnp.exp(clamp(x * x))))
  support.assert_same_bits(vjp(jnp.ones_like(x))[0], clamp(x * result))
  constant = emulate_saturation(lambda: jnp.exp(jnp.full((), 12, HALF)))
  assert constant() == LARGEST


def test_a_mutable_array_is_clamped_when_it_is_read():
  def fun(x):
    ref = jax.new_ref(x)
    ref[0] = x[3] * x[3]
    return ref[...]

  np.testing.assert_array_equal(emulate_saturation(fun)(X)[0], LARGEST)
  gradient = jax.grad(lambda x: emulate_saturation(fun)(x)[0])(X)
  np.testing.assert_array_equal(gradient, [0, 0, 0, 600, 0, 0, 0, 0])


def test_only_the_results_of_a_program_within_an_operation_are_clamped():
  x = jnp.array([300.0, 2.0], HALF)

  def reduced(x):
    # inf - inf is NaN within the reduction, and so is the result.
    return lax.reduce(x * 200, HALF(0), lambda a, b: a * b - a * b, (0,))

  def solved(x):
    return lax.custom_linear_solve(
      lambda y: y * HALF(0.001), x, lambda _, b: b * HALF(1000), symmetric=True
    )

  assert is_finite(emulate_saturation(reduced)(x))
  np.testing.assert_array_equal(emulate_saturation(solved)(x), [LARGEST, 2000])


def test_an_eager_shard_map_takes_the_derivative():
  gradient = jax.grad(lambda x: jnp.sum(emulate_saturation(jnp.square)(x)))
  fun = support.on_each_device(gradient, support.SPREAD)
  np.testing.assert_array_equal(fun(X / 4), X / 2)


@pytest.mark.parametrize("name", ["bfloat16", "float64", "float8_e5m2"])
def test_each_dtype_saturates_at_its_own_largest_value(name):
  with jax.enable_x64(name == "float64"):
    largest = float(jnp.finfo(name).max)
    x = jnp.array([largest, -largest, -2.0, 0.0, jnp.nan], name)
    product, inverse = jax.jit(
      emulate_saturation(lambda x: (x * jnp.abs(x), 1 / x), dtypes=name)
    )(x)
    np.testing.assert_array_equal(
      np.asarray(product, float), [largest, -largest, -4, 0, 0]
    )
    assert float(inverse[3]) == largest
    cubed = emulate_saturation(lambda x: x * x * x, dtypes=name)
    slope = jax.grad(lambda x: cubed(x).astype("float32"))(x[0])
    assert float(slope) == largest


def test_the_parts_of_complex_numbers_saturate():
  z = jnp.array([1e30 + 1e30j, 1j, 1e30], jnp.complex64)
  got = emulate_saturation(lambda z: z * z, dtypes=jnp.float32)(z)
  largest = np.finfo(np.float32).max
  assert abs(got[0].imag) == largest
  np.testing.assert_array_equal(got[1:], np.array([-1, largest], got.dtype))
  support.assert_same_bits(emulate_saturation(lambda z: z * z)(z), z * z)


def test_several_dtypes_saturate_at_once_and_others_stay_as_they_are():
  def squares(*args):
    return tuple(x * x for x in args)

  x, y, z = HALF(300), jnp.float32(1e30), jnp.bfloat16(1e30)
  got = emulate_saturation(squares, dtypes={"float16", jnp.float32})(x, y, z)
  assert got == (LARGEST, np.finfo(np.float32).max, np.inf)


def test_a_cast_to_a_dtype_without_inf_clips():
  dtype = jnp.float8_e4m3fn
  x = jnp.array([1e6, -470, 460, 448, jnp.nan, jnp.inf, -jnp.inf, 1], "float32")
  expected = [448, -448, 448, 448, 0, 448, -448, 1]
  for of in (jnp.float32, jnp.float8_e5m2):
    fun = emulate_saturation(
      lambda x: jnp.concatenate([x.astype(dtype)[::-1], jnp.ones(1, dtype)]),
      dtypes=dtype,
    )
    # float8_e5m2 has no 460 and no 470, but 448 and 512.
    got = np.asarray(jax.jit(fun)(x.astype(of)), float)
    np.testing.assert_array_equal(got, [*expected[::-1], 1])
  cast = emulate_saturation(lambda x: x.astype(dtype), dtypes=dtype)
  gradient = jax.grad(lambda x: jnp.sum(cast(x).astype("float32")))(x)
  np.testing.assert_array_equal(gradient, 1)


def test_arithmetic_in_a_dtype_without_inf_is_an_error():
  x = jnp.ones(2, jnp.float8_e4m3fn)
  with pytest.raises(TypeError, match="mul in float8_e4m3fn, which has no inf"):
    emulate_saturation(lambda x: x * x, dtypes=x.dtype)(x)
  # The result of this product is in float32.
  got = emulate_saturation(
    lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32), dtypes=x.dtype
  )(x)
  assert got == 2


@pytest.mark.parametrize(
  "dtypes", [jnp.int32, (), None, 3, jnp.complex64, jnp.float8_e8m0fnu]
)
def test_dtypes_that_are_not_signed_floats_are_refused(dtypes):
  with pytest.raises(TypeError, match="`dtypes` must hold"):
    emulate_saturation(jnp.exp, dtypes=dtypes)


def test_anything_but_a_function_is_refused():
  with pytest.raises(TypeError, match="`fun` must be a function, got "):
    emulate_saturation(X)
