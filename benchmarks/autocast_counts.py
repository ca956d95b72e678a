"""What a function does in which precision, counted in its jaxpr.

A jaxpr says what was asked for, before a backend chooses how to do it: on a CPU
XLA computes matrix products of float16 in float32, on a GPU in float16.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.typing import DTypeLike

# What matrix units are there for.
_PRODUCTS = frozenset(
  {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
)


class Products(NamedTuple):
  """How many matrix products and convolutions there are.

  Attributes:
    lowered: those that take all their operands in the low precision.
    all: of them.
  """

  lowered: int
  all: int


class Costs(NamedTuple):
  """What XLA says of a program; None is what it does not say.

  Attributes:
    flops: floating-point operations.
    bytes_accessed: that its operations read and write.
    temporaries: bytes that it takes beside its arguments and results.
  """

  flops: float | None
  bytes_accessed: float | None
  temporaries: int | None = None


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
  """Yields the equations of a jaxpr and of all within it.

  Those in the body of a loop come once, as they are written.

  Args:
    jaxpr: what `jax.make_jaxpr` returns, or the jaxpr of an equation.
  """
  for equation in jaxpr.eqns:
    yield equation
    for inner in core.jaxprs_in_params(equation.params):
      yield from equations(inner)


def float_conversions(jaxpr: Any) -> int:
  """Returns how many values are converted from one float dtype to another.

  Args:
    jaxpr: of a function.
  """
  return sum(
    equation.primitive.name == "convert_element_type"
    and _is_float(equation.invars[0].aval.dtype)
    and _is_float(equation.outvars[0].aval.dtype)
    and equation.invars[0].aval.dtype != equation.outvars[0].aval.dtype
    for equation in equations(jaxpr)
  )


def products(jaxpr: Any, dtype: DTypeLike) -> Products:
  """Returns how many matrix products there are, and how many are in `dtype`.

  Args:
    jaxpr: of a function.
    dtype: the low precision.
  """
  found = [
    all(atom.aval.dtype == dtype for atom in equation.invars[:2])
    for equation in equations(jaxpr)
    if equation.primitive.name in _PRODUCTS
    and _is_float(equation.invars[0].aval.dtype)
  ]
  return Products(sum(found), len(found))


def kept_for_backward(
  function: Callable[..., Any], *args: Any
) -> list[jax.ShapeDtypeStruct]:
  """Returns what the forward pass keeps for the backward pass.

  Not the arguments, which are there anyway. A copy of them in another dtype
  is kept.

  Args:
    function: any that can be differentiated.
    *args: its arguments, with which it is differentiated.
  """

  def residuals(*args: Any) -> Any:
    # What the pullback closes over.
    return jax.tree.leaves(jax.vjp(function, *args)[1])

  jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
  there = {*jaxpr.invars, *jaxpr.constvars}
  return [
    jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    for atom in jaxpr.outvars
    if not isinstance(atom, core.Literal) and atom not in there
  ]


def bytes_kept(function: Callable[..., Any], *args: Any) -> int:
  """Returns the bytes of what `kept_for_backward` returns."""
  return sum(
    each.size * each.dtype.itemsize
    for each in kept_for_backward(function, *args)
  )


def costs(compiled: Any) -> Costs:
  """Returns what XLA says of a compiled function, or of a lowered one.

  A lowered one is as it was written: nothing is fused, and nothing is computed
  in another dtype than what was asked for.

  Args:
    compiled: a `jax.stages.Compiled`, or a `jax.stages.Lowered`.
  """
  analysis = compiled.cost_analysis() or {}
  memory = None
  if isinstance(compiled, jax.stages.Compiled):
    memory = compiled.memory_analysis()
  return Costs(
    analysis.get("flops"),
    analysis.get("bytes accessed"),
    None if memory is None else memory.temp_size_in_bytes,
  )


def _is_float(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jnp.floating)
