"""Finds where an operation overflowed."""

from collections.abc import Callable
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
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._jaxpr.operations import Axes
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Flag
from optax_lossscale._jaxpr.operations import Size
from optax_lossscale._step import checks
from optax_lossscale._step import requirements

# Returns where an operation that is undefined somewhere has no finite value.
_Undefined = Callable[[Sequence[jax.Array], Mapping[str, Any]], jax.Array]

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
  if operations.moves(equation):
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
    undefined = undefined_at(equation, inputs)
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
  row, parameters = operations.of(equation), equation.params
  reached = [_reached_limit(saturating, x) for x in inputs]
  if row.elements is Elements.EACH:
    return functools.reduce(jnp.logical_or, reached)
  if row.elements is Elements.REDUCES:
    return jnp.any(reached[0], axis=parameters["axes"])
  if row.elements is Elements.RUNS:
    return lax.cummax(
      jnp.asarray(reached[0], jnp.int8),
      axis=parameters["axis"],
      reverse=parameters["reverse"],
    ).astype(bool)
  if row.axes is Axes.DOT:
    return _reached_before_dot(parameters["dimension_numbers"], *reached)
  anywhere = is_anywhere(reached)
  if Flag.SUMS not in row.flags:
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


def undefined_at(
  equation: core.JaxprEqn, inputs: Sequence[jax.Array]
) -> jax.Array | np.ndarray:
  """Returns where an operation with a non-finite result has no finite one."""
  size = operations.of(equation).size
  if size is Size.PARTIAL:
    return PARTIAL[equation.primitive.name](inputs, equation.params)
  # These are bounded for real inputs alone.
  is_real = size is Size.REAL and not operations.is_complex(inputs[0])
  return np.array(size is Size.BOUNDED or is_real)


def _is_pole(x: jax.Array) -> jax.Array:
  """Returns where the gamma function is undefined: 0, -1, -2 ..."""
  return (x <= 0) & _is_whole(x)


def _is_whole(x: jax.Array) -> jax.Array:
  return x == jnp.round(x)


def _pow(base: jax.Array, exponent: jax.Array) -> jax.Array:
  if operations.is_complex(base) or operations.is_complex(exponent):
    return (base == 0) & (jnp.real(exponent) <= 0)
  is_root = (base < 0) & ~_is_whole(exponent)
  return ((base == 0) & (exponent < 0)) | is_root


PARTIAL: Mapping[str, _Undefined] = {
  "digamma": lambda inputs, _: _is_pole(inputs[0]),
  "div": lambda inputs, _: inputs[1] == 0,
  "igamma_grad_a": lambda inputs, _: (inputs[0] <= 0) | (inputs[1] < 0),
  "integer_pow": lambda inputs, parameters: (
    (inputs[0] == 0) & (parameters["y"] < 0)
  ),
  "lgamma": lambda inputs, _: _is_pole(inputs[0]),
  "polygamma": lambda inputs, _: (
    (inputs[0] < 0) | ~_is_whole(inputs[0]) | _is_pole(inputs[1])
  ),
  "pow": lambda inputs, _: _pow(*inputs),
  "zeta": lambda x, _: (
    (x[0] <= 1) | ((x[1] <= 0) & (_is_whole(x[1]) | ~_is_whole(x[0])))
  ),
}
