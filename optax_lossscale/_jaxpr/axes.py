"""The place of the axes of an operation's inputs in its result."""

from collections.abc import Callable
from collections.abc import Mapping
import math
import typing

import jax
from jax.extend import core

from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.operations import Axes

_Shape = tuple[int, ...]
# Returns where each axis of the input at a position is in the result.
_Rule = Callable[[core.JaxprEqn, int], Mapping[int, int]]


def aval(x: core.Var | core.Literal) -> jax.core.ShapedArray:
  """Returns the shape and dtype of an array in a jaxpr."""
  return typing.cast(jax.core.ShapedArray, x.aval)


def output_axes(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  """Returns where each axis of an input is in the output, if it is whole."""
  rule = _AXES.get(operations.of(equation).axes)
  return rule(equation, index) if rule else {}


def _shapes(equation: core.JaxprEqn, index: int) -> tuple[_Shape, _Shape]:
  return aval(equation.invars[index]).shape, aval(equation.outvars[0]).shape


def _same(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  before, after = _shapes(equation, index)
  params = equation.params
  dropped = params.get("axis", params.get("dimension"))
  if len(before) != len(after):
    return {}
  # Along an axis that changes its length, members are left out or repeated.
  pairs = enumerate(zip(before, after, strict=True))
  return {x: x for x, (n, m) in pairs if n == m and x != dropped}


def _reshaped(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  before, after = _shapes(equation, index)
  # An axis is kept if as many elements come before it, and it has its size.
  places = {(math.prod(after[:j]), n): j for j, n in enumerate(after)}
  found = {i: (math.prod(before[:i]), n) for i, n in enumerate(before)}
  return {i: places[x] for i, x in found.items() if x in places and x[1] > 1}


def _dot(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  before, after = _shapes(equation, index)
  contracted, batch = (x[index] for x in equation.params["dimension_numbers"])
  free = [x for x in range(len(before)) if x not in (*contracted, *batch)]
  # The result has the batch axes, then the free ones of each input.
  start = len(after) - len(free) if index else len(batch)
  batched = {x: i for i, x in enumerate(batch)}
  return batched | {x: start + i for i, x in enumerate(free)}


def _reduced(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  axes = range(aval(equation.invars[index]).ndim)
  rest = [x for x in axes if x not in equation.params["axes"]]
  return {x: i for i, x in enumerate(rest)}


def _padded(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  padding = enumerate(equation.params["padding_config"])
  # The second input is a number.
  return {x: x for x, of_axis in padding if not (index or any(of_axis))}


def _indexed(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  """Returns where each whole axis of a gather's or scatter's input is."""
  numbers = equation.params["dimension_numbers"]
  operand = aval(equation.invars[0]).shape
  if "slice_sizes" in equation.params:
    array, sizes = aval(equation.outvars[0]), equation.params["slice_sizes"]
    windows, left_out = numbers.offset_dims, numbers.collapsed_slice_dims
    batches = numbers.start_indices_batching_dims
  elif index == 0:
    return {x: x for x in range(len(operand))}
  else:
    array = aval(equation.invars[2])
    windows, left_out = numbers.update_window_dims, numbers.inserted_window_dims
    batches = numbers.scatter_indices_batching_dims
    sizes = None
  others = [x for x in range(array.ndim) if x not in windows]
  batched = numbers.operand_batching_dims
  inside = [x for x in range(len(operand)) if x not in (*left_out, *batched)]
  pairs = [*zip(batched, (others[x] for x in batches), strict=True)]
  pairs += [
    (x, axis)
    for x, axis in zip(inside, windows, strict=True)
    if (sizes[x] if sizes else array.shape[axis]) == operand[x]
  ]
  if index == 0:
    return dict(pairs)
  return {axis: x for x, axis in pairs} if index == 2 else {}


_AXES: Mapping[Axes, _Rule] = {
  Axes.SAME: _same,
  Axes.DOT: _dot,
  Axes.INDEXED: _indexed,
  Axes.PADDED: _padded,
  Axes.PERMUTED: lambda equation, _: {
    x: i for i, x in enumerate(equation.params["permutation"])
  },
  Axes.REDUCED: _reduced,
  Axes.RESHAPED: _reshaped,
  Axes.SPREAD: lambda equation, _: dict(
    enumerate(equation.params["broadcast_dimensions"])
  ),
}
