"""A table of operations: how to call each, and its true value in float64.

The values come from Python's math, from NumPy and from SciPy. They put every
row of inputs into one of four situations: the result is finite, it overflows
float16, it is undefined, or an input was inf or NaN already.
"""

from collections.abc import Callable
import functools
import itertools
import math
import operator
from typing import NamedTuple

import jax
from jax import lax
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np
import scipy.special

LARGEST = 65504.0

FINITE = "finite"
OVERFLOW = "overflow"
UNDEFINED = "undefined"
INF_IN = "inf in"

# An approximation may be off by a unit in the last place, so a true value this
# close to the limit could be rounded to either side.
_OPEN = 64.0


class Operation(NamedTuple):
  """One elementwise operation."""

  call: Callable[..., jax.Array]
  # Returns the value for Python floats. It raises ValueError or
  # ZeroDivisionError if there is no value, and OverflowError beyond float64.
  truth: Callable[..., float]
  arity: int = 1
  # For which inputs JAX is accurate.
  is_accurate: Callable[..., np.ndarray] | None = None


def _where(is_defined, function):
  """Returns a function that raises ValueError where it is not defined."""

  def truth(*inputs):
    if not is_defined(*inputs):
      raise ValueError
    with np.errstate(all="ignore"):
      return float(function(*inputs))

  return truth


def _is_pole(x):
  return x <= 0 and x == math.floor(x)


def _is_in_gamma(a, x):
  return a > 0 and x >= 0


def _is_in_zeta(x, q):
  return x > 1 and not _is_pole(q) and (q > 0 or x == math.floor(x))


def _is_in_polygamma(n, x):
  return n >= 0 and n == math.floor(n) and not _is_pole(x)


def _is_in_beta(a, b, x):
  return a > 0 and b > 0 and 0 <= x <= 1


def _polygamma(n, x):
  if n == 0:
    return scipy.special.psi(x)
  return scipy.special.gamma(n + 1) * scipy.special.zeta(n + 1, x)


def _by_name(text, module, names):
  """Returns operations of `lax`, each with a module's function for its name."""
  both = zip(text.split(), names.split(), strict=True)
  return {x: Operation(getattr(lax, x), getattr(module, y)) for x, y in both}


_MATH = """
  acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1
  floor lgamma log log1p sin sinh sqrt tan tanh
"""
ELEMENTWISE = {
  **_by_name(_MATH, math, _MATH),
  **_by_name("bessel_i0e bessel_i1e logistic", scipy.special, "i0e i1e expit"),
  "abs": Operation(lax.abs, abs),
  "add": Operation(lax.add, operator.add, 2),
  "add_any": Operation(primitives.add_jaxvals_p.bind, operator.add, 2),
  "atan2": Operation(lax.atan2, math.atan2, 2),
  "digamma": Operation(
    lax.digamma, _where(lambda x: not _is_pole(x), scipy.special.psi)
  ),
  "div": Operation(lax.div, operator.truediv, 2),
  "erf_inv": Operation(
    lax.erf_inv, _where(lambda x: abs(x) < 1, scipy.special.erfinv)
  ),
  "igamma": Operation(
    lax.igamma, _where(_is_in_gamma, scipy.special.gammainc), 2
  ),
  # A derivative whose value is always small.
  "igamma_grad_a": Operation(
    lax.igamma_grad_a, _where(_is_in_gamma, lambda a, x: 0), 2
  ),
  "igammac": Operation(
    lax.igammac, _where(_is_in_gamma, scipy.special.gammaincc), 2
  ),
  "integer_pow": Operation(
    lambda x: lax.integer_pow(x, -3), lambda x: math.pow(x, -3)
  ),
  "mul": Operation(lax.mul, operator.mul, 2),
  "nextafter": Operation(lax.nextafter, lambda x, y: x, 2),
  "polygamma": Operation(
    lax.polygamma,
    _where(_is_in_polygamma, _polygamma),
    2,
    # JAX itself is far off elsewhere.
    lambda n, x: (n <= 11) & ((x > 0) | (x == np.round(x))),
  ),
  "pow": Operation(lax.pow, math.pow, 2),
  # 4 bits of exponent and 3 of mantissa, as IEEE 754 has it: up to 240.
  "reduce_precision": Operation(
    lambda x: lax.reduce_precision(x, 4, 3),
    lambda x: math.inf if abs(x) >= 248 else x,
  ),
  "regularized_incomplete_beta": Operation(
    lax.betainc, _where(_is_in_beta, scipy.special.betainc), 3
  ),
  "rem": Operation(lax.rem, math.fmod, 2),
  "round": Operation(
    lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), round
  ),
  "rsqrt": Operation(lax.rsqrt, lambda x: 1 / math.sqrt(x)),
  "square": Operation(lax.square, lambda x: x * x),
  "sub": Operation(lax.sub, operator.sub, 2),
  "zeta": Operation(
    lax.zeta,
    _where(_is_in_zeta, scipy.special.zeta),
    2,
    # JAX says 0 for zeta(100, -15.5), which is about 2**101.
    lambda x, q: (x <= 200) & ((q > 0) | (q == np.round(q))),
  ),
}
# Newer versions of JAX have these.
if hasattr(lax, "log2"):
  ELEMENTWISE["log2"] = Operation(lax.log2, math.log2)
if hasattr(lax, "one_minus_square"):
  ELEMENTWISE["one_minus_square"] = Operation(
    lax.one_minus_square, lambda x: 1 - x * x
  )


def _grid(arity):
  """Returns columns of float16: every combination of special numbers."""
  if arity == 3:
    numbers = [-1.0, 0.0, 0.5, 1.0, 2.0, np.inf]
  else:
    numbers = [0, 6e-8, 6.1e-5, 1e-3, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 7, 11]
    numbers += [12, 15.5, 100, 255, 256, 257, 1000, 2048, 32768, 65472]
    drawn = np.random.default_rng(0).uniform(-5, 5, 12)
    numbers += [*10.0**drawn, LARGEST, np.inf, np.nan]
    numbers += [-x for x in numbers]
  rows = itertools.product(np.array(numbers, np.float16), repeat=arity)
  return np.array(list(rows)).T


def _situation(truth, inputs, limit):
  """Returns the situation of one row, or None if it is too close to tell."""
  if not all(abs(x) < limit for x in inputs):
    return INF_IN
  try:
    value = abs(truth(*inputs))
  except OverflowError:
    return OVERFLOW
  except (ValueError, ZeroDivisionError):
    return UNDEFINED
  if abs(value - LARGEST) < _OPEN:
    return None
  return FINITE if value < LARGEST else OVERFLOW  # SciPy has NaN for some.


@functools.cache
def situations(name, saturating=False):
  """Returns the inputs of an elementwise operation, by situation."""
  # If `saturating`, an input of the largest finite value counts as inf. Each
  # situation that occurs has a column for each input, float16[512].
  operation = ELEMENTWISE[name]
  columns = _grid(operation.arity)
  if operation.is_accurate is not None:
    columns = columns[:, operation.is_accurate(*columns)]
  limit = LARGEST if saturating else math.inf
  rows = columns.T.astype(float).tolist()
  found = np.array([_situation(operation.truth, x, limit) for x in rows])
  # Some operations return a number such as 1 where none is defined.
  is_finite = np.isfinite(operation.call(*columns))
  found[(found == UNDEFINED) & is_finite] = None
  draw = np.random.default_rng(0).choice
  # JAX compiles an operation for each shape, so all columns have one length.
  return {
    x: [*columns[:, draw(np.flatnonzero(found == x), 512)]]
    for x in (FINITE, OVERFLOW, UNDEFINED, INF_IN)
    if np.any(found == x)
  }


class OfArrays(NamedTuple):
  """An operation whose results depend on several elements of each input."""

  call: Callable[..., jax.Array]
  truth: Callable[..., np.ndarray]
  shapes: tuple[tuple[int, ...], ...]


def _product(text, *shapes):
  return OfArrays(
    functools.partial(jnp.einsum, text),
    functools.partial(np.einsum, text),
    shapes,
  )


def _total(axes):
  return OfArrays(
    lambda x: lax.reduce_prod_p.bind(x, axes=axes, out_sharding=None),
    lambda x: np.prod(x, axis=axes),
    ((2, 3, 4),),
  )


OF_ARRAYS = {
  "dot_general": _product("ij,jkl->ikl", (3, 6), (6, 2, 2)),
  "dot_general, batched": _product("ibj,jbk->bik", (3, 2, 6), (6, 2, 4)),
  "dot_general, two axes": _product("ijc,kjc->ik", (3, 6, 2), (4, 6, 2)),
  "dot_general, to a scalar": _product("jc,jc->", (6, 2), (6, 2)),
  "dot_general, outer": _product("i,j->ij", (3,), (6,)),
  "reduce_prod over two axes": _total((0, 2)),
  "reduce_prod over all": _total((0, 1, 2)),
  "cumsum": OfArrays(
    lambda x: lax.cumsum(x * 200, axis=1),
    lambda x: np.cumsum(x * 200, axis=1),
    ((2, 6),),
  ),
  "cumprod in reverse": OfArrays(
    lambda x: lax.cumprod(x, axis=0, reverse=True),
    lambda x: np.cumprod(x[::-1], axis=0)[::-1],
    ((6, 2),),
  ),
}


def draw(name, count=40):
  """Returns examples for `OF_ARRAYS`: powers of two, and some -inf."""
  rng = np.random.default_rng(0)
  numbers = np.float16([0.5, 1.0, 128.0, 256.0, -np.inf])
  return [
    rng.choice(numbers, (count, *shape), p=(0.3, 0.4, 0.2, 0.06, 0.04))
    for shape in OF_ARRAYS[name].shapes
  ]


def overflows(name, inputs):
  """Returns where an example for `OF_ARRAYS` overflows from finite inputs."""
  truth = OF_ARRAYS[name].truth
  inputs = [x.astype(float) for x in inputs]
  # A NaN in place of inf shows which results depend on it.
  depends = np.isnan(truth(*[np.where(np.isinf(x), np.nan, x) for x in inputs]))
  value = truth(*[np.where(np.isinf(x), 1.0, x) for x in inputs])
  return (np.abs(value) > LARGEST) & ~depends
