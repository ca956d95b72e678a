"""Products whose operands and gradients have formats of their own.

JAX's derivative of a product rounds each gradient to the dtype of the operand:
to 16 bits, or to float8 without a scale. So these products have a rule of their
own. It repeats the equations of JAX's derivative with operands in the formats,
and results in float32. So it knows each product, batch and sharding that JAX
does.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import _value
from optax_lossscale._autocast import levels
from optax_lossscale._base import bits
from optax_lossscale._base import promises
from optax_lossscale._base.formats import FLOAT32
from optax_lossscale._base.formats import is_float8
from optax_lossscale._base.formats import largest
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._jaxpr.interpreter import Arrays

Operand = _value.Operand
_Operands = Sequence[Operand]

# A Hopper GPU multiplies 32 terms of float8 at once, and fewer rows or columns
# do not fill it either. cuBLAS needs multiples of 16.
_FEWEST, _MULTIPLE = 32, 16

# The name of float8 operands for the policies of `jax.checkpoint`.
_NAME = "float8"
# Why an operation is in float32.
_SCALING = "scaling of float8"


class _Kept(NamedTuple):
  """What the backward pass of a product needs; the factors only for dtypes."""

  factors: Arrays
  operands: _Operands
  others: Arrays


def multiply(
  equation: core.JaxprEqn,
  inputs: Sequence[_value.Value],
  formats: levels.Formats,
) -> jax.Array:
  """Returns the result of a product, whose derivative has formats, too."""
  factors = inputs[:2]
  operands = [_version(x, formats.operands) for x in factors]
  # What else an operation takes, such as the sizes of a `ragged_dot`.
  others = _value.get_arrays(inputs[2:])
  product = _make_product(equation, formats)
  return product(_value.get_arrays(factors), operands, others)


def _make_product(
  equation: core.JaxprEqn, formats: levels.Formats
) -> Callable[..., jax.Array]:
  """Returns a function of factors, of what they are in a format, and others."""
  # Its results depend only on the latter, and its gradients are those of the
  # factors, in their own dtypes. So one rounding serves all uses of a factor.
  in_float8 = formats.in_float8
  forward_precision = backward_precision = equation.params["precision"]
  if in_float8:
    # XLA adds up float8 products in few bits on a GPU if both are DEFAULT. So
    # other systems do in the forward pass alone.
    if not isinstance(forward_precision, tuple):
      forward_precision = (lax.Precision.DEFAULT,) * 2
    backward_precision = (lax.Precision.HIGHEST,) * 2
  wide = _in_float32(equation, forward_precision)

  def run(factors: Arrays, operands: _Operands, others: Arrays) -> jax.Array:
    del factors
    arrays = [_read(x, formats.operands) for x in operands]
    result = _bind(wide, [*arrays, *others])
    return _unscaled(result, operands, FLOAT32)

  def forward(
    factors: Arrays, operands: _Operands, others: Arrays
  ) -> tuple[jax.Array, _Kept]:
    result = run(factors, operands, others)
    if in_float8:
      result = _differentiated_once(result, factors)
    empty = [np.zeros(0, x.dtype) for x in factors]
    return result, _Kept(empty, operands, others)

  def backward(
    kept: _Kept, gradient: jax.Array
  ) -> tuple[list[jax.Array], None, None]:
    of_result = _operand(gradient, formats.gradients)
    gradients = []
    for place, factor in enumerate(kept.factors):
      other = kept.operands[1 - place]
      jaxpr = _transposed(wide, kept, place, gradient)
      arrays = [_read(other, formats.operands), of_result.array, *kept.others]
      found = _replay(jaxpr, arrays, backward_precision)
      gradients.append(_unscaled(found, [other, of_result], factor.dtype))
    return gradients, None, None

  product = jax.custom_vjp(run)
  product.defvjp(forward, backward)
  return product


def _transposed(
  equation: core.JaxprEqn, kept: _Kept, place: int, gradient: jax.Array
) -> core.Jaxpr:
  """Returns JAX's gradient of a product by the factor in a place."""
  # Its inputs are the other factor, the gradient of the result, and `others`.
  factors = [jax.eval_shape(_widened, x.array) for x in kept.operands]

  def gradient_of_factor(
    other: jax.Array, gradient: jax.Array, *others: jax.Array
  ) -> jax.Array:
    def of_factor(x: jax.Array) -> jax.Array:
      pair = [x, other] if place == 0 else [other, x]
      return _bind_here(equation, [*pair, *others])

    return jax.linear_transpose(of_factor, factors[place])(gradient)[0]

  return jax.make_jaxpr(gradient_of_factor)(
    factors[1 - place], gradient, *kept.others
  )


def _replay(jaxpr: core.Jaxpr, arrays: Arrays, precision: object) -> jax.Array:
  """Returns what a jaxpr of products and moves gives for narrow arrays."""

  def rule(equation: core.JaxprEqn, inputs: Arrays) -> Sequence[jax.Array]:
    if equation.primitive.name in levels.PRODUCTS:
      return [_bind(_in_float32(equation, precision), inputs)]
    return [_bind_here(equation, inputs)]

  (result,) = interpreter.evaluate(jaxpr, arrays, rule)
  return jnp.asarray(result)


def _in_float32(equation: core.JaxprEqn, precision: object) -> core.JaxprEqn:
  """Returns a product with a float32 result."""
  parameters = {**equation.params, "preferred_element_type": FLOAT32}
  return equation.replace(params={**parameters, "precision": precision})


def _bind(equation: core.JaxprEqn, arrays: Arrays) -> jax.Array:
  """Returns the float32 result of a product of narrow arrays."""

  def bind(*arrays: Array) -> jax.Array:
    return _bind_here(equation, arrays)

  # Up to jax 0.12, XLA has no kernel for some bfloat16 products on a CPU if the
  # result is in float32, such as those of two axes whose result is transposed.
  def bind_on_cpu(*arrays: jax.Array) -> jax.Array:
    # They may have been cast in this program, and XLA might use what was cast.
    wide = [lax.reduce_precision(_widened(x), 8, 7) for x in arrays[:2]]
    return bind(*wide, *arrays[2:])

  if arrays[0].dtype != jnp.bfloat16:
    return bind(*arrays)
  result: jax.Array = lax.platform_dependent(
    *arrays, cpu=bind_on_cpu, default=bind
  )
  return result


def _bind_here(equation: core.JaxprEqn, arrays: Arrays) -> jax.Array:
  """Returns the result of an operation, in the product's scope alone."""
  parameters = equation.primitive.get_bind_params(equation.params)
  result: jax.Array = equation.primitive.bind(*arrays, **parameters)
  return result


@jax.custom_jvp
def _differentiated_once(result: jax.Array, factors: Arrays) -> jax.Array:
  """Returns a result whose derivative by the factors is an error."""
  del factors
  return result


@_differentiated_once.defjvp
def _refuse(primals: object, tangents: object) -> tuple[jax.Array, jax.Array]:
  del primals, tangents
  raise TypeError(
    "A product in float8 can be differentiated once, got a second derivative. "
    "Take the first one inside of `autocast`, or keep this product in 16 bits: "
    "by `overrides`, or without `dot_dtype`."
  )


def _version(value: _value.Value, dtype: np.dtype) -> Operand:
  """Returns what a product multiplies for a value, made only once."""
  if dtype not in value.operands:
    value.operands[dtype] = _make_version(value, dtype)
  return value.operands[dtype]


def _make_version(value: _value.Value, dtype: np.dtype) -> Operand:
  if value.source is not None:
    move, source = value.source
    operand = _version(source, dtype)
    moved = _bind_here(move, [operand.array])
    return _named(operand._replace(array=moved))
  if not is_float8(dtype):
    return _operand(value.array, dtype)
  operand = _operand(lax.stop_gradient(value.array), dtype)
  # `jax.checkpoint` rounds floats that it keeps, and makes NaN of the largest
  # numbers of this format. It leaves integers alone.
  bytes_of = lax.bitcast_convert_type(operand.array, jnp.uint8)
  return _named(operand._replace(array=bytes_of))


def _read(operand: Operand, dtype: np.dtype) -> Array:
  """Returns the numbers of an operand that `_version` has made."""
  if operand.unscale is None:
    return operand.array
  return lax.bitcast_convert_type(operand.array, dtype)


def _operand(x: Array, dtype: np.dtype) -> Operand:
  """Returns the numbers of an array in a format, float8 with a scale."""
  if not is_float8(dtype):
    return Operand(lax.convert_element_type(x, dtype), None)
  with scopes.note(_SCALING):
    x = _widened(jnp.asarray(x))
    scale, unscale = _powers(x, largest(dtype))
    # The cast rounds no more, so no compiler can leave the rounding out. It
    # makes NaN of what is not finite, where the format has no inf.
    narrow = bits.rounded(x * scale, dtype).astype(dtype)
  return Operand(narrow, unscale)


def _named(operand: Operand) -> Operand:
  """Returns an operand; one in float8 has a name for `jax.checkpoint`."""
  if operand.unscale is None:
    return operand
  return Operand(*(checkpoint_name(x, _NAME) for x in operand))


def _quotients(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
  """Returns the quotients themselves, as `_powers` promises."""
  amax = jnp.max(jnp.abs(x))
  return largest / amax, amax / largest


@promises.promise("powers", assume=_quotients)
def _powers(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
  """Returns the largest power of two that keeps x in range, and 1 / it."""
  # The other numbers keep their scale if one is not finite.
  amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
  # From the bits, since `exp2` is not exact. An exponent counts 2**23 of them.
  room = np.float32(largest).view(np.int32) - lax.bitcast_convert_type(
    amax, jnp.int32
  )
  exponent = jnp.clip(room >> 23, -126, 126)
  scale, unscale = (
    lax.bitcast_convert_type((127 + x) << 23, jnp.float32)
    for x in (exponent, -exponent)
  )
  return scale, unscale


def _unscaled(x: jax.Array, operands: _Operands, dtype: np.dtype) -> jax.Array:
  """Returns the result of a product of operands, in a dtype."""
  with scopes.note(_SCALING):
    for operand in operands:
      if operand.unscale is not None:
        x = x * operand.unscale
  return x.astype(dtype)


def _widened(x: jax.Array) -> jax.Array:
  return x.astype(FLOAT32)


def reason_against_float8(
  equation: core.JaxprEqn, inputs: Sequence[_value.Value]
) -> str:
  """Returns why a product stays in 16 bits, or an empty string."""
  if equation.primitive.name != "dot_general":
    return "not a matrix product"
  if not any(x.kind is _value.Kind.GIVEN and not x.is_mask for x in inputs):
    return "no argument"
  (contracted, _), (batch, _) = equation.params["dimension_numbers"]
  left, right = (x.array.shape for x in inputs)
  if not all(isinstance(x, int) for x in (*left, *right)):
    return "unknown size"  # That of an exported program.
  terms, batches = (math.prod(left[i] for i in x) for x in (contracted, batch))
  together = max(terms * batches, 1)
  sizes = [terms, *(math.prod(x) // together for x in (left, right))]
  if min(sizes) < _FEWEST:
    return "too small"
  if any(x % _MULTIPLE for x in sizes):
    return "no multiple of 16"
  return ""
