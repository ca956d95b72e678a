"""What is known of each operation, against Python's math and SciPy."""

import functools
import itertools
import math

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import optax_lossscale as ols
from optax_lossscale import hardware
from optax_lossscale._jaxpr import operation_table

pytestmark = pytest.mark.slow

LARGEST = 65504.0

# True values from here on are rounded to inf in float16. An approximation may
# be off by a unit in the last place, so what is nearer than that is left open.
ROUNDS_TO_INF = 65520.0
OPEN = 64.0

# The operation had no finite value.
UNDEFINED = "undefined"

# Of all float16 numbers. Five is odd, so that every exponent and every mantissa
# comes up.
EVERY_FIFTH = np.arange(0, 2**16, 5, dtype=np.uint16).view(np.float16)


def grid():
  """Returns float16 numbers at which operations are special, and others."""
  special = [0, 6e-8, 6.1e-5, 1e-3, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 7, 10, 11]
  special += [12, 15.5, 100, 255, 256, 257, 1000, 2048, 32768, 65472, LARGEST]
  drawn = np.random.default_rng(0).uniform(-5, 5, 12)
  special += [*10.0**drawn, np.inf, np.nan]
  return np.array([*special, *(-x for x in special)], np.float16)


EVERY_FIFTH_AND_SPECIAL = np.concatenate([EVERY_FIFTH, grid()])


def ratio(x, y):
  return x / y  # Raises where y is 0.


def power(x, y):
  # It raises OverflowError and ValueError, but is 1 for NaN ** 0.
  return math.pow(x, y)


def from_scipy(function, is_defined):
  """Returns SciPy's function, which has a finite value where it is defined."""

  def truth(*inputs):
    if not is_defined(*inputs):
      raise ValueError
    with np.errstate(all="ignore"):
      return float(function(*inputs))

  return truth


def is_pole(x):
  return x <= 0 and x == math.floor(x)


def round_to_even(x):
  return float(round(x))


def has_zeta(x, q):
  if x <= 1 or is_pole(q):
    return False
  return q > 0 or x == math.floor(x)


def has_polygamma(n, x):
  return n >= 0 and n == math.floor(n) and not is_pole(x)


def polygamma(n, x):
  if n == 0:
    return scipy.special.psi(x)
  return scipy.special.gamma(n + 1) * scipy.special.zeta(n + 1, x)


def always(*inputs):
  del inputs
  return True


def positive(*inputs):
  return min(inputs) > 0


# Each operation of one input, and its true value: ValueError where it has none,
# OverflowError where it is too large even for float64.
UNARY = {
  "acos": (lax.acos, math.acos),
  "acosh": (lax.acosh, math.acosh),
  "asin": (lax.asin, math.asin),
  "asinh": (lax.asinh, math.asinh),
  "atan": (lax.atan, math.atan),
  "atanh": (lax.atanh, math.atanh),
  "bessel_i0e": (
    lax.bessel_i0e,
    from_scipy(scipy.special.i0e, always),
  ),
  "bessel_i1e": (
    lax.bessel_i1e,
    from_scipy(scipy.special.i1e, always),
  ),
  "abs": (lax.abs, abs),
  "cbrt": (lax.cbrt, math.cbrt),
  "ceil": (lax.ceil, lambda x: float(math.ceil(x))),
  "cos": (lax.cos, math.cos),
  "cosh": (lax.cosh, math.cosh),
  "digamma": (
    lax.digamma,
    from_scipy(scipy.special.psi, lambda x: not is_pole(x)),
  ),
  "erf": (lax.erf, math.erf),
  "erf_inv": (
    lax.erf_inv,
    from_scipy(scipy.special.erfinv, lambda x: abs(x) < 1),
  ),
  "erfc": (lax.erfc, math.erfc),
  "exp": (lax.exp, math.exp),
  "exp2": (lax.exp2, math.exp2),
  "expm1": (lax.expm1, math.expm1),
  "floor": (lax.floor, lambda x: float(math.floor(x))),
  "integer_pow": (lambda x: lax.integer_pow(x, -3), lambda x: power(x, -3)),
  "lgamma": (lax.lgamma, math.lgamma),
  "log": (lax.log, math.log),
  "log1p": (lax.log1p, math.log1p),
  "logistic": (lax.logistic, from_scipy(scipy.special.expit, always)),
  "round": (
    lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    round_to_even,
  ),
  "rsqrt": (lax.rsqrt, lambda x: ratio(1, math.sqrt(x))),
  "sin": (lax.sin, math.sin),
  "sinh": (lax.sinh, math.sinh),
  "sqrt": (lax.sqrt, math.sqrt),
  "square": (lax.square, lambda x: x * x),
  "tan": (lax.tan, math.tan),
  "tanh": (lax.tanh, math.tanh),
}
if hasattr(lax, "log2"):
  UNARY["log2"] = (lax.log2, math.log2)

BINARY = {
  "add": (lax.add, lambda x, y: x + y),
  "add_any": (primitives.add_jaxvals_p.bind, lambda x, y: x + y),
  "atan2": (lax.atan2, math.atan2),
  "div": (lax.div, ratio),
  "igamma": (
    lax.igamma,
    from_scipy(scipy.special.gammainc, lambda a, x: a > 0 and x >= 0),
  ),
  "igammac": (
    lax.igammac,
    from_scipy(scipy.special.gammaincc, lambda a, x: a > 0 and x >= 0),
  ),
  "mul": (lax.mul, lambda x, y: x * y),
  "nextafter": (lax.nextafter, lambda x, y: x),
  "polygamma": (lax.polygamma, from_scipy(polygamma, has_polygamma)),
  "pow": (lax.pow, power),
  "rem": (lax.rem, math.fmod),
  "sub": (lax.sub, lambda x, y: x - y),
  "zeta": (lax.zeta, from_scipy(scipy.special.zeta, has_zeta)),
}

# Looked at in tests of their own.
OTHERS = {
  "complex",
  "convert_element_type",
  "igamma_grad_a",
  "one_minus_square",
  "reduce_precision",
  "regularized_incomplete_beta",
}


# JAX itself is far off elsewhere: it says 0 for zeta(100, -15.5), about 2**101.
ACCURATE = {
  "polygamma": lambda n, x: (n <= 11) & ((x > 0) | (x == np.round(x))),
  "zeta": lambda x, q: (x <= 200) & ((q > 0) | (q == np.round(q))),
}


def true_value(truth, inputs):
  """Returns a float, inf for one beyond float64, or `UNDEFINED`."""
  try:
    value = truth(*inputs)
  except OverflowError:
    return math.inf
  except (ValueError, ZeroDivisionError):
    return UNDEFINED
  return math.inf if math.isnan(value) else abs(value)


def assert_told_apart(function, truth, columns):
  """Asserts each element's counts by its true value.

  Args:
    function: one operation.
    truth: of its value, in Python's floats.
    columns: for each input an array of float16.
  """
  status = hardware.float_status(function)
  results, counts = jax.vmap(status)(*columns)
  results = np.asarray(results)
  overflow, undefined = (
    np.asarray(counts.overflow),
    np.asarray(counts.undefined),
  )
  rows = zip(*(x.astype(float).tolist() for x in columns), strict=True)
  for i, inputs in enumerate(rows):
    found = (int(overflow[i]), int(undefined[i]))
    value = UNDEFINED
    expected = (0, 0)
    if all(map(math.isfinite, inputs)):
      value = true_value(truth, inputs)
      if value == UNDEFINED:
        # Some have a convention there, such as 1 for igammac.
        expected = (0, int(not np.isfinite(results[i])))
      elif abs(value - ROUNDS_TO_INF) < OPEN:
        expected = (int(not np.isfinite(results[i])), 0)
      else:
        expected = (int(value > ROUNDS_TO_INF), 0)
    assert found == expected, (inputs, results[i], value)


def pairs(name=None):
  """Returns two columns: every pair of numbers for which JAX is accurate."""
  columns = list(np.array(list(itertools.product(grid(), grid()))).T)
  if name in ACCURATE:
    rows = ACCURATE[name](*columns)
    columns = [x[rows] for x in columns]
  return columns


@pytest.mark.parametrize("name", UNARY)
def test_a_result_too_large_for_float16_is_told_from_none_at_all(name):
  function, truth = UNARY[name]
  assert_told_apart(function, truth, [EVERY_FIFTH_AND_SPECIAL])


@pytest.mark.parametrize("name", BINARY)
def test_two_inputs_that_give_too_much_are_told_from_those_without_value(name):
  function, truth = BINARY[name]
  assert_told_apart(function, truth, pairs(name))


def test_a_zeta_of_a_negative_number_has_a_value_for_whole_exponents():
  # Where JAX's own is far off, so by the rule alone.
  x, q = jnp.float32([2.0, 1.5, 2.0]), jnp.float32([-0.5, -0.5, -1.0])
  (equation,) = jax.make_jaxpr(lax.zeta)(x, q).eqns
  found = operation_table.undefined(equation, [x, q])
  assert found.tolist() == [False, True, True]


@pytest.mark.parametrize("exponent", [-4, -1, 0, 2, 5])
def test_an_integer_power_overflows_unless_it_is_of_zero(exponent):
  assert_told_apart(
    lambda x: lax.integer_pow(x, exponent),
    lambda x: power(x, exponent),
    [grid()],
  )


@pytest.mark.parametrize("exponent", [-3, -1, 2, 9])
def test_a_power_with_an_integer_array_is_as_one_with_floats(exponent):
  x = grid()
  status = hardware.float_status(lax.pow)
  whole = jax.vmap(status, (0, None))(x, jnp.int32(exponent))
  floats = jax.vmap(status, (0, None))(x, jnp.float16(exponent))
  np.testing.assert_array_equal(whole[1].overflow, floats[1].overflow)
  np.testing.assert_array_equal(whole[1].undefined, floats[1].undefined)


def test_every_elementwise_operation_has_a_true_value_here():
  new = {"log2"} - set(UNARY)
  assert set(UNARY) | set(BINARY) | OTHERS | new == operation_table.ELEMENTWISE


def test_a_number_below_the_limits_of_a_beta_distribution_is_no_overflow():
  x = [-1.0, 0.0, 0.5, 1.0, 2.0]
  columns = list(np.array(list(itertools.product(x, x, x)), np.float16).T)
  status = jax.vmap(hardware.float_status(lax.betainc))
  results, counts = status(*columns)
  np.testing.assert_array_equal(counts.overflow, 0)
  np.testing.assert_array_equal(counts.undefined, ~np.isfinite(results))
  assert np.any(counts.undefined)


def test_the_derivative_of_the_incomplete_gamma_function_is_no_overflow():
  columns = pairs()
  finite = np.isfinite(np.stack(columns)).all(axis=0)
  a, x = (x[finite] for x in columns)
  status = jax.vmap(hardware.float_status(lax.igamma_grad_a))
  results, counts = status(a, x)
  defined = (a > 0) & (x >= 0)
  assert np.all(np.isfinite(results[defined]))
  np.testing.assert_array_equal(counts.overflow, 0)
  np.testing.assert_array_equal(counts.undefined, ~np.isfinite(results))


@pytest.mark.skipif(
  not hasattr(lax, "one_minus_square"),
  reason="lax.one_minus_square is new in jax 0.11.2",
)
def test_one_minus_a_square_overflows_where_the_square_does():
  assert_told_apart(
    lax.one_minus_square, lambda x: 1 - x * x, [EVERY_FIFTH_AND_SPECIAL]
  )


def test_a_rounding_to_fewer_bits_overflows_beyond_their_largest():
  # 4 bits of exponent and 3 of mantissa, as IEEE 754 has it: up to 240.
  assert_told_apart(
    lambda x: lax.reduce_precision(x, 4, 3),
    lambda x: math.inf if abs(x) >= 248 else x,
    [EVERY_FIFTH_AND_SPECIAL],
  )


def reached_saturated(x):
  return ~(np.abs(np.asarray(x, np.float32)) < LARGEST)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_with_the_saturated_check_the_largest_value_counts_as_inf_does(name):
  function, truth = (UNARY | BINARY)[name]
  columns = pairs(name) if name in BINARY else [grid()]
  status = hardware.float_status(function, check=ols.saturated(jnp.float16))
  results, counts = jax.vmap(status)(*columns)
  before = functools.reduce(np.logical_or, map(reached_saturated, columns))
  reached = reached_saturated(results) & ~before
  has_value = np.array(
    [
      all(map(math.isfinite, row)) and true_value(truth, row) != UNDEFINED
      for row in zip(*(x.astype(float).tolist() for x in columns), strict=True)
    ]
  )
  np.testing.assert_array_equal(counts.overflow, reached & has_value)
  np.testing.assert_array_equal(counts.undefined, reached & ~has_value)


# Operations that only move values: no result is larger than every input.
MOVES = {
  "abs": lax.abs,
  "clamp": lambda x: lax.clamp(jnp.float16(-3), x, jnp.float16(5)),
  "concatenate": lambda x: jnp.concatenate([x, -x]),
  "cummax": lax.cummax,
  "cummin": lax.cummin,
  "dynamic_slice": lambda x: lax.dynamic_slice(x, (2,), (3,)),
  "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (3,)),
  "gather": lambda x: x[jnp.array([3, 1])],
  "max": lambda x: lax.max(x, x[::-1]),
  "min": lambda x: lax.min(x, x[::-1]),
  "neg": lax.neg,
  "pad": lambda x: jnp.pad(x, 2),
  "reduce_max": jnp.max,
  "reduce_min": jnp.min,
  "reduce_window_max": lambda x: lax.reduce_window(
    x, -jnp.inf, lax.max, (3,), (1,), "VALID"
  ),
  "rev": lambda x: x[::-1],
  "scatter": lambda x: x.at[jnp.array([1])].set(x[0]),
  "scatter-max": lambda x: x.at[jnp.array([1])].max(x[0]),
  "scatter-min": lambda x: x.at[jnp.array([1])].min(x[0]),
  "select_n": lambda x: jnp.where(x > 0, x, x[::-1]),
  "sign": lax.sign,
  "sort": jnp.sort,
  "top_k": lambda x: lax.top_k(x, 3)[0],
  "tile": lambda x: jnp.tile(x, 2),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_values_makes_none_larger(name):
  assert name in operation_table.MOVES
  x = jnp.asarray(np.random.default_rng(0).normal(size=9), jnp.float16)
  result = MOVES[name](x)
  allowed = max(float(jnp.max(jnp.abs(x))), 5.0 * (name == "clamp"))
  assert float(jnp.max(jnp.abs(result))) <= max(allowed, float(name == "sign"))
  recorded = jax.make_jaxpr(hardware.float_status(MOVES[name]))(x)
  operations = [equation.primitive.name for equation in recorded.eqns]
  assert "reduce_or" not in operations  # Nothing is looked at.


COMPLEX = {
  # |x| of two parts below float32's largest.
  "abs": (jnp.abs, 3e38 + 3e38j, (1, 0)),
  "a small abs": (jnp.abs, 3 + 4j, (0, 0)),
  "sin": (jnp.sin, 1 + 200j, (1, 0)),
  "cos": (jnp.cos, 1 + 200j, (1, 0)),
  "exp": (jnp.exp, 100 + 1j, (1, 0)),
  "mul": (lambda x: x * x, 1e30j, (1, 0)),
  "log of zero": (jnp.log, 0j, (0, 1)),
  "division by zero": (lambda x: 1 / x, 0j, (0, 1)),
  "a negative power of zero": (lambda x: x ** jnp.complex64(-1), 0j, (0, 1)),
  "a large power": (lambda x: x ** jnp.complex64(3), 1e20 + 0j, (1, 0)),
  "the root of a negative number": (jnp.sqrt, -1 + 0j, (0, 0)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_the_parts_of_a_complex_number_overflow_on_their_own(name):
  function, x, expected = COMPLEX[name]
  status = hardware.float_status(function, check=ols.nonfinite(jnp.float32))
  _, counts = status(jnp.complex64(x))
  assert counts == expected


def test_a_complex_number_made_of_an_inf_is_no_overflow():
  parts = jnp.float32(jnp.inf), jnp.float32(1)
  check = ols.nonfinite(jnp.float32)
  assert not hardware.float_status(lax.complex, check=check)(*parts)[1]


# Primitives that jax.extend.core.primitives and jax.lax do not list, and what
# is recorded as one, in a `shard_map` over an axis named "x".
WITHOUT_A_HANDLE = {
  "all_gather_invariant": lambda x: lax.all_gather(x, "x", to="invarying"),
  "all_gather_reduced": None,
  "freeze": None,
  "pbroadcast": lambda x: lax.pbroadcast(x, "x", 0),
  "psum_invariant": lambda x: lax.psum(x, "x"),
  "pvary": lambda x: lax.pcast(lax.psum(x, "x"), "x", to="varying"),
  "reduce_scatter": lambda x: lax.psum_scatter(x, "x", tiled=True),
  "reshard": None,
}

# Those that only newer versions of JAX have.
NEWER = {"log2", "one_minus_square"}


def test_every_name_is_that_of_an_operation_of_jax():
  listed = {
    value.name
    for module in (primitives, lax)
    for value in vars(module).values()
    if isinstance(value, core.Primitive)
  }
  named = (
    operation_table.MOVES
    | operation_table.ELEMENTWISE
    | operation_table.REDUCTIONS
    | operation_table.CUMULATIVE
    | operation_table.DEVICE_SUMS
    | operation_table.BOUNDED
    | set(operation_table.UNDEFINED)
  )
  assert named - listed - NEWER == set(WITHOUT_A_HANDLE)
  assert named >= NEWER


@pytest.mark.parametrize(
  "name", [*filter(WITHOUT_A_HANDLE.get, WITHOUT_A_HANDLE)]
)
def test_the_name_of_an_operation_without_a_handle_is_as_jax_records_it(name):
  out_specs = jax.P() if "invariant" in name else jax.P("x")
  mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
  function = jax.shard_map(
    WITHOUT_A_HANDLE[name], mesh=mesh, in_specs=jax.P("x"), out_specs=out_specs
  )
  assert f" {name}[" in str(jax.make_jaxpr(function)(jnp.ones(64)))


def test_bounded_and_undefined_operations_are_elementwise():
  assert not operation_table.BOUNDED & set(operation_table.UNDEFINED)
  known = operation_table.BOUNDED | set(operation_table.UNDEFINED)
  assert known <= operation_table.ELEMENTWISE
