"""Evaluates a function as XLA may on a GPU: with narrowings left out.

XLA may remove a cast to a narrower dtype and back, and compute in a wider dtype
(`xla_allow_excess_precision`). The backend and the program decide which ones it
removes. Here every such rounding is removed, so that a test on a CPU fails
where a result depends on one.
"""

import functools
from typing import Any
from typing import NamedTuple

from jax import lax
import jax.numpy as jnp

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import throughout
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Flag
from optax_lossscale._jaxpr.operations import Size

# These pass on what they are given, rounded or not.
_MOVES = operations.names(Elements.PERMUTES) | {
  *("broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad"),
  *("select_n", "slice", "split"),
}
# In the stronger sense, these compute in float32 for narrower dtypes.
_KINDS = Size.MOVES, Elements.EACH, Elements.TESTS, Elements.REDUCES
_COMPUTES = operations.names(*_KINDS) - operations.names(Flag.BITS)
_COMPUTES -= {"convert_element_type", "optimization_barrier"}
# XLA does not look through the buffers of these.
_BUFFERED = (
  calls.Form.COND,
  calls.Form.SCAN,
  calls.Form.WHILE,
  calls.Form.SHARD_MAP,
  calls.Form.SOLVE,
)


class _Narrowed(NamedTuple):
  """A rounded array, and the wider array that it was rounded from."""

  array: Any
  wide: Any


def unrounded(function, *, computes=False, platform="cpu"):
  """Returns a function without the roundings that XLA may leave out.

  A cast to a wider dtype sees the numbers from before the last narrowing. Bits,
  loops, branches and results see the rounded numbers.

  Args:
    function: the function, which is traced on each call.
    computes: whether operations in a dtype below float32 are also computed in
      float32, each with the unrounded results of those before it.
    platform: whose branches of `lax.platform_dependent` are taken.
  """
  options = computes, platform

  @functools.wraps(function)
  def unrounded_function(*args):
    recording = interpreter.record(function, args, {})
    consts, arguments = recording.consts_and_arguments(recording.operands)
    outputs = _evaluate(options, recording.jaxpr, arguments, consts)
    return recording.result([_array(x) for x in outputs])

  return unrounded_function


def _evaluate(options, jaxpr, inputs, consts=None):
  rule = functools.partial(_apply, options)
  return interpreter.evaluate(jaxpr, inputs, rule, consts)


def _apply(options, equation, inputs):
  """Returns an equation's outputs; some of them may be `_Narrowed`."""
  computes, platform = options
  name, arrays = equation.primitive.name, [_array(x) for x in inputs]
  bodies = calls.bodies(equation)
  if platforms := equation.params.get("branches_platforms"):
    # Only one of these branches is in the program, and in no `cond`.
    bodies = [
      body
      for body, names in zip(bodies, platforms, strict=True)
      if names is None or platform in names
    ][:1]
  elif calls.form(equation) in _BUFFERED:

    def interpret(place, inputs):
      outputs = _evaluate(options, bodies[place].jaxpr, inputs)
      return [_array(x) for x in outputs]

    return throughout.rebuild(equation, arrays, interpret)
  if bodies:
    (body,) = bodies
    return _evaluate(options, body.jaxpr, [inputs[i] for i in body.inputs])
  if name == "convert_element_type" and _is_float(equation.outvars[0].aval):
    return [_convert(arrays[0], _wide(inputs[0]), equation)]
  outputs = interpreter.bind(equation, arrays)
  is_narrowed = any(isinstance(x, _Narrowed) for x in inputs)
  has_narrow = any(_is_low(x) for x in arrays)
  if (is_narrowed and name in _MOVES) or (
    computes and has_narrow and name in _COMPUTES
  ):
    wide = interpreter.bind(equation, [_widened(x) for x in inputs])
    return [
      # A computed result is itself rounded once, from the wide one.
      _Narrowed(x if name in _MOVES else y.astype(x.dtype), y)
      if _is_low(x)
      else y
      for x, y in zip(outputs, wide, strict=True)
    ]
  return outputs


def _convert(array, wide, equation):
  """Returns a cast of an array whose unrounded numbers are in `wide`."""
  dtype = equation.outvars[0].aval.dtype
  if not _is_float(wide):
    return lax.convert_element_type(array, dtype)
  narrowed = lax.convert_element_type(wide, dtype)
  if dtype.itemsize < wide.dtype.itemsize:
    return _Narrowed(narrowed, wide)
  return narrowed


def _widened(x: Any) -> Any:
  """Returns an input as float32 if it is narrower, without its rounding."""
  wide = _wide(x)
  is_low = _is_low(wide)
  return lax.convert_element_type(wide, jnp.float32) if is_low else wide


def _array(x):
  return x.array if isinstance(x, _Narrowed) else x


def _wide(x):
  return x.wide if isinstance(x, _Narrowed) else x


def _is_float(x):
  return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _is_low(x):
  dtype = jnp.result_type(x)
  return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
