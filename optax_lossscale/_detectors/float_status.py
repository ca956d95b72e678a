"""A status register: did an operation overflow?"""

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
  """How many operations did what, each time they ran, on every device.

  Attributes:
    overflow: int32[], operations whose result was too large for its dtype.
    undefined: int32[], operations that had no finite value for their inputs:
      division by zero, log 0, sqrt(-1).
  """

  overflow: jax.Array
  undefined: jax.Array


def float_status(
  fun: Callable[..., Any],
  dtypes: Any = (jnp.float16,),
  *,
  check: checks.Check = checks.nonfinite(),  # noqa: B008 - it is frozen.
  counts: bool = False,
) -> Callable[..., tuple[Any, Any]]:
  """Returns a function for the result of `fun` and whether it overflowed.

  It is the status register of an accelerator as a function: set by any
  operation that overflows and not cleared by those after it. So it sees what
  gradients cannot show, an overflow behind a small layer scale, in the forward
  pass only, or averaged away. Put it around the function that makes the
  gradients, and hand the flag to `update(..., overflow=flag)`.

  An operation overflowed when it made inf or NaN out of finite inputs. What an
  inf that was there before turns into, such as the -inf of an attention mask,
  does not count, and neither does what has no finite value in any dtype:
  division by zero, log 0, sqrt(-1), also in the branch of a `jnp.where` that is
  not taken. These are counted apart. But exp(1000) is an overflow, taken or
  not, and so is casting -1e9 to float16, or subtracting a row's maximum of 17
  from finfo.min: mask with -inf.

  Operations are looked at wherever they are, in loops, branches, calls, and in
  the parts of a `shard_map`, also if nothing comes of their result. What is not
  known element by element (convolution, linear algebra, FFT, scatter-add, sums
  over devices), or holds a program of its own (a kernel, a reduction by a
  function of yours), overflowed when all its inputs were finite, on all those
  devices, and some result was not. Of a `custom_vmap` the rule is used where
  `fun` itself maps it.

  Args:
    fun: any function that JAX can trace. Arguments that are no arrays, such as
      `train=True`, it gets as they are.
    dtypes: the floating dtypes whose operations are looked at, one or several.
      Of a complex dtype the parts count.
    check: `nonfinite()`; or `saturated()`, for hardware that saturates: an
      operation then overflowed when it reached the largest finite value of its
      dtype out of inputs below theirs.
    counts: whether to return, in place of the flag, a tuple of two numbers:
      how many operations overflowed, and how many were undefined. As
      `overflow=` that tuple counts both; `counts.overflow` is the flag.

  Returns:
    A function with the arguments of `fun` that returns its result and a bool[],
    the flag. Inside `shard_map` and `pmap` it is each device's own. It traces
    `fun` on each call, so jit it, or what is around it.

  Raises:
    TypeError: if `fun` is no function, `dtypes` holds anything but floating
      dtypes, or `check` is no check, or one for another dtype.

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
  """Returns the recorded function and its counts, with its own derivative."""

  @jax.custom_jvp
  def run(*operands: Any) -> tuple[list[Any], StatusCounts]:
    consts, arguments = recording.consts_and_arguments(operands)
    nothing = jnp.zeros((), jnp.int32)
    rule = _Counting(dtypes, saturating, StatusCounts(nothing, nothing))
    return throughout.evaluate(recording.jaxpr, arguments, rule, consts)

  @run.defjvp
  def derivative(primals: Any, tangents: Any) -> Any:
    # Of the function as it was recorded, so that rules of its own are kept and
    # what only the derivative computes is not counted.
    _, of_outputs = jax.jvp(recording.evaluate, primals, tangents)
    of_count: Any = np.zeros((), jax.dtypes.float0)
    return run(*primals), (of_outputs, StatusCounts(of_count, of_count))

  return run


@dataclasses.dataclass(frozen=True)
class _Counting(throughout.Sum):
  """The rule: an operation as it is, and whether it overflowed."""

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
  """Returns 1 if any element of any output is of a kind, else 0, as int32[]."""
  elements = [by_kind[kind] for by_kind in found if kind in by_kind]
  return functools.reduce(
    jnp.logical_or, [jnp.any(x) for x in elements], jnp.full((), False)
  ).astype(jnp.int32)
