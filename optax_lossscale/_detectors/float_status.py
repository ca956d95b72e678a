"""A status register that any overflow in a function sets."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._detectors import operation_overflow
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import throughout
from optax_lossscale._step import checks


class StatusCounts(NamedTuple):
  """Counts of operations, each counted every time it runs, on every device.

  Attributes:
    overflow: int32[], operations whose result was too large for its dtype.
    undefined: int32[], operations without a finite value for their inputs:
      division by zero, log 0, sqrt(-1).
  """

  overflow: jax.Array
  undefined: jax.Array


def float_status(
  fun: Callable[..., Any],
  dtypes: Any = (jnp.float16,),
  *,
  check: checks.Check = checks.nonfinite(),
  counts: bool = False,
) -> Callable[..., tuple[Any, Any]]:
  """Wraps `fun` so that it also returns whether an operation overflowed.

  The flag acts like the status register of an accelerator: any operation that
  overflows sets it, and later operations do not clear it. It therefore catches
  overflows that do not show in the gradients: those in the forward pass only,
  and those hidden by a small layer scale or a mean. Wrap the function that
  computes the gradients, and pass the flag to `update(..., overflow=flag)`.

  An operation overflows if it produces inf or NaN from finite inputs. Results
  of an earlier inf, such as the -inf of an attention mask, do not count.
  Operations with no finite result in any dtype, such as division by zero, log 0
  or sqrt(-1), are counted separately. An operation counts even in a branch that
  `jnp.where` does not take, so exp(1000) there is an overflow. Casting -1e9 to
  float16 is an overflow too, and so is subtracting a row's maximum of 17 from
  finfo.min; mask with -inf instead.

  All operations are checked, including those in loops, branches, calls and
  `shard_map`, and those whose results are never used. Some operations cannot be
  checked element by element (convolution, linear algebra, FFT, scatter-add,
  sums over devices) or contain a program (a kernel, a reduction with your own
  function). Such an operation overflows if all its inputs are finite on all
  devices involved, and one of its results is not. A `custom_vmap` rule applies
  only to a `vmap` inside `fun`.

  Args:
    fun: any function that JAX can trace. Arguments other than arrays, such as
      `train=True`, are passed unchanged.
    dtypes: one or more floating dtypes whose operations are checked. A complex
      dtype counts as that of its parts: complex64 as float32.
    check: `nonfinite()`, or `saturated()` for hardware that saturates. With
      `saturated()`, an operation overflows if its result reaches the largest
      finite value of its dtype and no input has reached that of its own dtype.
    counts: if True, a tuple of two counts is returned instead of the flag: the
      operations that overflowed, and those that were undefined. As `overflow=`,
      pass `counts.overflow`, or the tuple if undefined ones should count too.

  Returns:
    A function with the same arguments as `fun` that returns the result of `fun`
    and the flag, a bool[]. It traces `fun` on each call, so jit it or its
    caller. Inside `shard_map` and `pmap`, each device has its own flag.

  Raises:
    TypeError: if `fun` is not a function, `dtypes` holds anything but floating
      dtypes, or `check` is not a check or is for a dtype not in `dtypes`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> x = jnp.array([0.0, 300.0], jnp.float16)
    >>> fun = lambda x: jnp.sum(1 / (1 + x * x))
    >>> result, overflowed = ols.float_status(fun)(x)
    >>> print(result, overflowed)
    1.0 True
    >>> _, counts = ols.float_status(lambda x: 1 / x, counts=True)(x)
    >>> print(counts.overflow, counts.undefined)
    0 1

  References:
    Ascend's NPUAllocFloatStatus, NPUGetFloatStatus and NPUClearFloatStatus.
  """
  arguments.check_function(fun)
  dtypes = operation_overflow.check_dtypes(dtypes)
  saturating = operation_overflow.saturates(check, dtypes)

  @functools.wraps(fun)
  def float_status_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    recording = interpreter.record(fun, args, kwargs)
    run = _differentiable(recording.without_values(), dtypes, saturating)
    outputs, counted = run(*recording.operands)
    status = counted if counts else counted.overflow > 0
    return recording.result(outputs), status

  return float_status_fun


def _differentiable(
  recording: interpreter.Recording, dtypes: frozenset[Any], saturating: bool
) -> Callable[..., tuple[list[Any], StatusCounts]]:
  """Returns a differentiable function that also returns the counts."""

  @jax.custom_jvp
  def run(*operands: Any) -> tuple[list[Any], StatusCounts]:
    consts, arguments = recording.consts_and_arguments(operands)
    nothing = jnp.zeros((), jnp.int32)
    rule = _Counting(dtypes, saturating, StatusCounts(nothing, nothing))
    return throughout.evaluate(recording.jaxpr, arguments, rule, consts)

  @run.defjvp
  def derivative(primals: Any, tangents: Any) -> Any:
    # Differentiating the recorded function itself keeps its custom rules, and
    # does not count operations that only the derivative needs.
    _, of_outputs = jax.jvp(recording.evaluate, primals, tangents)
    of_count: Any = np.zeros((), jax.dtypes.float0)
    return run(*primals), (of_outputs, StatusCounts(of_count, of_count))

  return run


@dataclasses.dataclass(frozen=True)
class _Counting(throughout.Sum):
  """Evaluates operations unchanged; counts overflowed and undefined ones."""

  dtypes: frozenset[Any]
  saturating: bool
  zero: StatusCounts

  def apply(
    self,
    around: tuple[core.JaxprEqn, ...],
    equation: core.JaxprEqn,
    inputs: Sequence[Any],
  ) -> tuple[Sequence[Any], StatusCounts]:
    """See the base class."""
    del around
    outputs = interpreter.bind(equation, inputs)
    found = [
      by_kind
      for _, by_kind in operation_overflow.find(
        self.dtypes, self.saturating, equation, inputs, outputs
      )
    ]
    if not found:
      return outputs, self.zero
    with interpreter.context(equation):
      return outputs, StatusCounts(
        _count_operation(found, operation_overflow.OVERFLOW),
        _count_operation(found, operation_overflow.UNDEFINED),
      )


def _count_operation(
  found: Sequence[Mapping[str, Any]], kind: str
) -> jax.Array:
  """Returns int32[], 1 if any element of any output is of this kind, else 0."""
  elements = [by_kind[kind] for by_kind in found if kind in by_kind]
  return functools.reduce(
    jnp.logical_or, [jnp.any(x) for x in elements], jnp.full((), False)
  ).astype(jnp.int32)
