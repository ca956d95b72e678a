"""A status register that any overflow in a function sets."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import ParamSpec
from typing import TypeVar

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import throughout
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._step import checks
from optax_lossscale._step import reasons
from optax_lossscale.hardware import operation_overflow

_P = ParamSpec("_P")
_R = TypeVar("_R")
# The outputs of a function, and what was counted in it.
_Result = tuple[Sequence[Array], reasons.FloatStatus]


def float_status(
  fun: Callable[_P, _R],
  *,
  check: checks.Check = checks.nonfinite(jnp.float16),
) -> Callable[_P, tuple[_R, reasons.FloatStatus]]:
  """Wraps `fun` so that it also returns how many operations overflowed.

  Like the status register of an accelerator, it catches overflows that do not
  show in the gradients. Wrap the function that computes the gradients, and pass
  the status to `update(..., overflow=status)`.

  An operation overflows if it produces inf or NaN from finite inputs, even in a
  branch that `jnp.where` does not take. Operations with no finite result in any
  dtype, such as division by zero, log 0 or sqrt(-1), are counted separately.

  All operations are checked, including those in loops, branches, calls and
  `shard_map`. Some cannot be checked element by element (convolution, linear
  algebra, FFT, scatter-add, sums over devices, kernels). Such an operation
  overflows if all its inputs are finite on all devices involved, and one of its
  results is not. A `custom_vmap` rule applies only to a `vmap` inside `fun`.

  Args:
    fun: any function that JAX can trace. Arguments other than arrays, such as
      `train=True`, are passed unchanged.
    check: `nonfinite(dtype)`, or `saturated(dtype)` for hardware that
      saturates, where the largest finite value counts like inf. `dtype` is that
      of the operations to check: one floating dtype, a tuple of dtypes, or None
      for all that have a sign and 8 bits or more. A complex dtype counts as
      that of its parts: complex64 as float32. With `saturated`, an operation
      overflows only if no input has reached the limit of its own dtype.

  Returns:
    A function with the same arguments as `fun` that returns the result of `fun`
    and a `FloatStatus`. It traces `fun` on each call, so jit it or its caller.
    Inside `shard_map` and `pmap`, each device has its own status.

  Raises:
    TypeError: if `fun` is not a function, or `check` is not a check for dtypes
      of operations.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> x = jnp.array([0.0, 300.0], jnp.float16)
    >>> fun = lambda x: jnp.sum(1 / (1 + x * x))
    >>> result, status = ols.hardware.float_status(fun)(x)
    >>> print(result, bool(status))
    1.0 True
    >>> _, status = ols.hardware.float_status(lambda x: 1 / x)(x)
    >>> print(status.overflow, status.undefined)
    0 1

  References:
    Ascend's NPUAllocFloatStatus, NPUGetFloatStatus and NPUClearFloatStatus.
  """
  arguments.check_function(fun)
  operation_overflow.check_for_operations(check)

  @functools.wraps(fun)
  def float_status_fun(
    *args: _P.args, **kwargs: _P.kwargs
  ) -> tuple[_R, reasons.FloatStatus]:
    recording = interpreter.record(fun, args, kwargs)
    run = _differentiable(recording.without_values(), check)
    outputs, status = run(*recording.operands)
    return recording.result(outputs), status

  return float_status_fun


def _differentiable(
  recording: interpreter.Recording, check: checks.Check
) -> Callable[..., _Result]:
  """Returns a differentiable function that also returns the counts."""

  @jax.custom_jvp
  def run(*operands: jax.Array) -> _Result:
    consts, arguments = recording.consts_and_arguments(operands)
    nothing = jnp.zeros((), jnp.int32)
    rule = _Counting(check, reasons.FloatStatus(nothing, nothing))
    return throughout.evaluate(recording.jaxpr, arguments, rule, consts)

  @run.defjvp
  def derivative(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
  ) -> tuple[_Result, _Result]:
    # Differentiating the recorded function itself keeps its custom rules, and
    # does not count operations that only the derivative needs.
    _, of_outputs = jax.jvp(recording.evaluate, primals, tangents)
    of_count: Any = np.zeros((), jax.dtypes.float0)
    of_status = reasons.FloatStatus(of_count, of_count)
    return run(*primals), (of_outputs, of_status)

  return run


@dataclasses.dataclass(frozen=True)
class _Counting(throughout.Sum):
  """Evaluates operations unchanged; counts overflowed and undefined ones."""

  check: checks.Check
  zero: reasons.FloatStatus

  def apply(
    self,
    around: tuple[core.JaxprEqn, ...],
    equation: core.JaxprEqn,
    inputs: Sequence[Array],
  ) -> _Result:
    """See the base class."""
    del around
    outputs = interpreter.bind(equation, inputs)
    found = operation_overflow.find(self.check, equation, inputs, outputs)
    if not found:
      return outputs, self.zero
    with interpreter.context(equation):
      return outputs, reasons.FloatStatus(
        _count_operation(found, operation_overflow.OVERFLOW),
        _count_operation(found, operation_overflow.UNDEFINED),
      )


def _count_operation(
  found: Sequence[tuple[core.Var, Mapping[str, Array]]], kind: str
) -> jax.Array:
  """Returns int32[], 1 if any element of any output is of this kind, else 0."""
  elements = (by_kind[kind] for _, by_kind in found if kind in by_kind)
  return operation_overflow.is_anywhere(elements).astype(jnp.int32)
