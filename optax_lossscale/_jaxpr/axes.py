"""Where the axes of an operation's inputs are in its result."""

from collections.abc import Callable
from collections.abc import Mapping
import math
import typing

import jax
from jax.extend import core

from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.operations import Axes

_Shape = tuple[int, ...]
# Returns where each axis of an input is in the result, given the operation, the
# input's position, its shape and that of the result.
_Rule = Callable[[core.JaxprEqn, int, _Shape, _Shape], Mapping[int, int]]


def aval(x: core.Var | core.Literal) -> jax.core.ShapedArray:
  """Returns the shape and dtype of an array in a jaxpr."""
  return typing.cast(jax.core.ShapedArray, x.aval)


def output_axes(equation: core.JaxprEqn, index: int) -> Mapping[int, int]:
  """Returns where each axis of an input is in the output, if it is whole."""
  rule = _AXES.get(operations.of(equation).axes)
  before = aval(equation.invars[index]).shape
  after = aval(equation.outvars[0]).shape
  return rule(equation, index, before, after) if rule else {}


def _same_axes(
  equation: core.JaxprEqn, _: int, before: _Shape, after: _Shape
) -> Mapping[int, int]:
  params = equation.params
  dropped = params.get("axis", params.get("dimension"))
  if len(before) != len(after):
    return {}
  # Along an axis that changes its length, members are left out or repeated.
  pairs = enumerate(zip(before, after, strict=True))
  return {x: x for x, (n, m) in pairs if n == m and x != dropped}


def _reshaped_axes(
  _: core.JaxprEqn, __: int, before: _Shape, after: _Shape
) -> Mapping[int, int]:
  # An axis is kept if as many elements come before it, and it has its size.
  places = {(math.prod(after[:j]), n): j for j, n in enumerate(after)}
  found = {i: (math.prod(before[:i]), n) for i, n in enumerate(before)}
  return {i: places[x] for i, x in found.items() if x in places and x[1] > 1}


def _dot_axes(
  equation: core.JaxprEqn, index: int, before: _Shape, after: _Shape
) -> Mapping[int, int]:
  contracted, batch = (x[index] for x in equation.params["dimension_numbers"])
  free = [x for x in range(len(before)) if x not in (*contracted, *batch)]
  # The result has the batch axes, then the free ones of each input.
  start = len(after) - len(free) if index else len(batch)
  batched = {x: i for i, x in enumerate(batch)}
  return batched | {x: start + i for i, x in enumerate(free)}


def _reduced_axes(
  equation: core.JaxprEqn, _: int, before: _Shape, __: _Shape
) -> Mapping[int, int]:
  rest = [x for x in range(len(before)) if x not in equation.params["axes"]]
  return {x: i for i, x in enumerate(rest)}


def _padded_axes(
  equation: core.JaxprEqn, index: int, before: _Shape, _: _Shape
) -> Mapping[int, int]:
  padding = equation.params["padding_config"]
  return {x: x for x in range(len(before)) if not (index or any(padding[x]))}


def _indexed_axes(
  equation: core.JaxprEqn, index: int, operand: _Shape, _: _Shape
) -> Mapping[int, int]:
  """Returns where each whole axis of a gather's or scatter's input is."""
  numbers = equation.params["dimension_numbers"]
  operand = aval(equation.invars[0]).shape
  is_gather = "slice_sizes" in equation.params
  if is_gather:
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
  Axes.SAME: _same_axes,
  Axes.DOT: _dot_axes,
  Axes.INDEXED: _indexed_axes,
  Axes.PADDED: _padded_axes,
  Axes.PERMUTED: lambda equation, *_: {
    x: i for i, x in enumerate(equation.params["permutation"])
  },
  Axes.REDUCED: _reduced_axes,
  Axes.RESHAPED: _reshaped_axes,
  Axes.SPREAD: lambda equation, *_: dict(
    enumerate(equation.params["broadcast_dimensions"])
  ),
}
