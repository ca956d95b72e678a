"""Whether an operation overflowed."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks
from optax_lossscale import _reached
from optax_lossscale.jaxpr import _dtypes
from optax_lossscale.jaxpr import _evaluate
from optax_lossscale.jaxpr import _operations

# What there is to say of an operation's result.
OVERFLOW = "overflow"
UNDEFINED = "undefined"


def check_check(check: Any, dtypes: frozenset[Any]) -> bool:
  """Returns whether the check is that for hardware that saturates.

  Args:
    check: what the caller passed.
    dtypes: whose operations are looked at.

  Raises:
    TypeError: if `check` is no check, or one for another dtype.
  """
  if not isinstance(check, _checks.Check):
    raise TypeError(
      f"`check` must be made by nonfinite() or saturated(), got {check!r}."
    )
  is_one = isinstance(check.dtype, np.dtype) and check.dtype in dtypes
  if check.dtype is not None and not is_one:
    raise TypeError(
      "`check` must be without a dtype, or with one of `dtypes`, since each "
      f"operation is held against its own, got {check!r}."
    )
  return bool(check.saturating)


def find(
  dtypes: frozenset[Any],
  saturating: bool,
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  outputs: Sequence[Any],
) -> list[tuple[core.Var, Mapping[str, Any]]]:
  """Returns where each result of an operation overflowed or is undefined.

  Args:
    dtypes: results in others are left out.
    saturating: whether the largest finite value is an overflow already.
    equation: the operation.
    inputs: the values of its inputs.
    outputs: the values of its outputs.

  Returns:
    For each result the variable that it is, and by `OVERFLOW` and `UNDEFINED`
    bool[...] of its shape, without what cannot happen in this operation.
  """
  if _operations.moves(equation):
    return []
  # Of a function that has another mesh the values do not fit outside.
  with _evaluate.context(equation):
    reached = [
      (variable, _reached_limit(saturating, output))
      for variable, output in zip(equation.outvars, outputs, strict=True)
      if _dtypes.part_dtype(variable.aval) in dtypes
    ]
    if not reached:
      return []
    before = _reached_before(saturating, equation, inputs)
    undefined = _operations.undefined(equation, inputs)
    return [
      (variable, _by_kind(x & ~before, undefined)) for variable, x in reached
    ]


def _by_kind(made: Any, undefined: Any) -> dict[str, Any]:
  """Returns what an operation made out of finite inputs, by its kind."""
  if isinstance(undefined, np.ndarray) and undefined.ndim == 0:
    return {UNDEFINED if undefined else OVERFLOW: made}
  return {OVERFLOW: made & ~undefined, UNDEFINED: made & undefined}


def _reached_limit(saturating: bool, x: Any) -> Any:
  """Returns where `x` is not finite, or, saturating, at the largest value."""
  dtype = _dtypes.part_dtype(x)
  # A mutable array has a dtype, but only what is read from it has a value.
  if dtype is None or isinstance(x, jax.Ref):
    return np.zeros(np.shape(x), bool)
  limit = float(jnp.finfo(dtype).max)
  return _reached.reached(x, limit, inclusive=saturating)


def _reached_before(
  saturating: bool, equation: core.JaxprEqn, inputs: Sequence[Any]
) -> Any:
  """Returns where an output is made of inputs that had reached it already."""
  name, parameters = equation.primitive.name, equation.params
  reached = [_reached_limit(saturating, x) for x in inputs]
  if name in _operations.ELEMENTWISE:
    return functools.reduce(jnp.logical_or, reached)
  if name in _operations.REDUCTIONS:
    return jnp.any(reached[0], axis=parameters["axes"])
  if name in _operations.CUMULATIVE:
    return lax.cummax(
      jnp.asarray(reached[0], jnp.int8),
      axis=parameters["axis"],
      reverse=parameters["reverse"],
    ).astype(bool)
  if name == "dot_general":
    return _reached_before_dot(parameters["dimension_numbers"], *reached)
  anywhere = functools.reduce(
    jnp.logical_or, [jnp.any(x) for x in reached], jnp.full((), False)
  )
  if name in _operations.DEVICE_SUMS:
    return _on_any_device(anywhere, parameters)
  return anywhere


def _on_any_device(flag: Any, parameters: Any) -> Any:
  """Returns whether a flag is set on any device of those that are summed."""
  axes = parameters["axes" if "axes" in parameters else "axis_name"]
  return lax.pmax(
    flag.astype(jnp.int32),
    axes,
    axis_index_groups=parameters.get("axis_index_groups"),
  ).astype(bool)


def _reached_before_dot(dimension_numbers: Any, left: Any, right: Any) -> Any:
  """Returns where a row of `left` or a column of `right` holds a True."""
  contracting, batch = dimension_numbers
  # The result has the batch axes, then the free ones of the left and the right.
  sides = [
    _without(x, contracted, batched)
    for x, contracted, batched in zip(
      (left, right), contracting, batch, strict=True
    )
  ]
  num_batch = len(batch[0])
  free = [x.ndim - num_batch for x in sides]
  rows = jnp.expand_dims(
    sides[0], range(sides[0].ndim, sides[0].ndim + free[1])
  )
  columns = jnp.expand_dims(sides[1], range(num_batch, num_batch + free[0]))
  return rows | columns


def _without(x: Any, contracted: Any, batched: Any) -> Any:
  """Returns whether any is True along the contracted axes, batch axes first."""
  free = [i for i in range(x.ndim) if i not in (*contracted, *batched)]
  x = jnp.transpose(x, (*batched, *free, *contracted))
  return jnp.any(x, axis=tuple(range(len(batched) + len(free), x.ndim)))
