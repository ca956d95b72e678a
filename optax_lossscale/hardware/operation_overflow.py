"""Finds where an operation overflowed."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any
from typing import TypeGuard

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import collectives
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._step import checks
from optax_lossscale._step import requirements

# The two kinds of results that `find` reports.
OVERFLOW = "overflow"
UNDEFINED = "undefined"


def check_dtypes(dtypes: object) -> frozenset[np.dtype]:
  """Returns `dtypes`, which may be one or several, as a set."""
  several = (
    dtypes if isinstance(dtypes, (tuple, list, set, frozenset)) else (dtypes,)
  )
  if not several:
    raise TypeError("`dtypes` must hold at least one floating dtype, got none.")
  checked = set()
  for dtype in several:
    found, name = arguments.read_dtype(dtype)
    if not _can_overflow(found):
      raise TypeError(
        "`dtypes` must hold signed floating dtypes of 8 bits at least, such as "
        f"jnp.float16, got {name}."
      )
    checked.add(found)
  return frozenset(checked)


def check_for_operations(check: checks.Check) -> None:
  """Raises unless a check names dtypes of operations, or none for all."""
  requirements.check_check(check)
  dtypes = jax.tree.leaves(check.dtype, is_leaf=leaves.is_none)
  is_right = bool(dtypes) and all(map(_can_overflow, dtypes))
  if check.dtype is not None and not is_right:
    raise TypeError(
      "`check` must name signed floating dtypes of 8 bits at least, such as "
      "nonfinite((jnp.float16, jnp.float32)), or no dtype for all of them, "
      f"since an operation has no path, got {check!r}."
    )


def _can_overflow(dtype: object) -> TypeGuard[np.dtype]:
  # float8_e8m0fnu has only powers of two, with neither a sign nor a 0.
  return (
    isinstance(dtype, np.dtype)
    and int(jnp.finfo(dtype).bits) >= 8
    and float(jnp.finfo(dtype).min) < 0
  )


def _is_examined(check: checks.Check, dtype: np.dtype | None) -> bool:
  if check.dtype is None:
    return _can_overflow(dtype)
  return dtype is not None and dtype in jax.tree.leaves(check.dtype)


def find(
  check: checks.Check,
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  outputs: Sequence[Array],
) -> list[tuple[core.Var, Mapping[str, Array]]]:
  """Returns where each output of an operation overflowed or is undefined."""
  if operation_table.moves(equation):
    return []
  # Outputs on another mesh can only be used in the equation's context.
  with interpreter.context(equation):
    reached = [
      (variable, _reached_limit(check.saturating, output))
      for variable, output in zip(equation.outvars, outputs, strict=True)
      if _is_examined(check, formats.part_dtype(variable.aval))
    ]
    if not reached:
      return []
    before = _reached_before(check.saturating, equation, inputs)
    undefined = operation_table.undefined(equation, inputs)
    return [
      (variable, _by_kind(x & ~before, undefined)) for variable, x in reached
    ]


def is_anywhere(arrays: Iterable[Array]) -> jax.Array:
  """Returns whether any element of any array is True, as bool[]."""
  found = [jnp.any(x) for x in arrays]
  return functools.reduce(jnp.logical_or, found, jnp.full((), False))


def _by_kind(made: Array, undefined: Array) -> dict[str, Array]:
  """Splits the elements marked in `made` into overflowed and undefined ones."""
  if isinstance(undefined, np.ndarray) and undefined.ndim == 0:
    return {UNDEFINED if undefined else OVERFLOW: made}
  return {OVERFLOW: made & ~undefined, UNDEFINED: made & undefined}


def _reached_limit(saturating: bool, x: Array) -> Array:
  """Returns where `x` is non-finite or, if `saturating`, saturated."""
  dtype = formats.part_dtype(x)
  # A `jax.Ref` has a dtype, but no value until it is read.
  if dtype is None or isinstance(x, jax.Ref):
    return np.zeros(np.shape(x), bool)
  limit = formats.largest(dtype)
  return bits.reached(x, limit, inclusive=saturating)


def _reached_before(
  saturating: bool, equation: core.JaxprEqn, inputs: Sequence[Array]
) -> Array:
  """Returns where an output depends on an input that had reached its limit."""
  name, parameters = equation.primitive.name, equation.params
  reached = [_reached_limit(saturating, x) for x in inputs]
  if name in operation_table.ELEMENTWISE:
    return functools.reduce(jnp.logical_or, reached)
  if name in operation_table.REDUCTIONS:
    return jnp.any(reached[0], axis=parameters["axes"])
  if name in operation_table.CUMULATIVE:
    return lax.cummax(
      jnp.asarray(reached[0], jnp.int8),
      axis=parameters["axis"],
      reverse=parameters["reverse"],
    ).astype(bool)
  if name == "dot_general":
    return _reached_before_dot(parameters["dimension_numbers"], *reached)
  anywhere = is_anywhere(reached)
  if name not in collectives.SUMS:
    return anywhere
  axes = parameters["axes" if "axes" in parameters else "axis_name"]
  groups = parameters.get("axis_index_groups")
  count = anywhere.astype(jnp.int32)
  return lax.pmax(count, axes, axis_index_groups=groups).astype(bool)


def _reached_before_dot(
  dimension_numbers: lax.DotDimensionNumbers, left: Array, right: Array
) -> jax.Array:
  """Returns where a row of `left` or a column of `right` contains True."""
  contracting, batch = dimension_numbers
  rows = _without(left, contracting[0], batch[0])
  columns = _without(right, contracting[1], batch[1])
  # The result has the batch axes, then the free axes of `left` and `right`.
  left_end, num_batch = rows.ndim, len(batch[0])
  ndim = left_end + columns.ndim - num_batch
  rows = jnp.expand_dims(rows, range(left_end, ndim))
  return rows | jnp.expand_dims(columns, range(num_batch, left_end))


def _without(
  x: Array, contracted: Sequence[int], batched: Sequence[int]
) -> jax.Array:
  """Reduces the contracted axes with `any`, and moves the batch axes first."""
  free = [i for i in range(x.ndim) if i not in (*contracted, *batched)]
  x = jnp.transpose(x, (*batched, *free, *contracted))
  return jnp.any(x, axis=tuple(range(len(batched) + len(free), x.ndim)))
