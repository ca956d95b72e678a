"""Which operation overflowed first?"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
import inspect
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import leaves as _leaves
from optax_lossscale._detectors import operation_overflow
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import throughout
from optax_lossscale._step import checks
from optax_lossscale._step import states
from optax_lossscale.instruments import _first
from optax_lossscale.instruments import _history
from optax_lossscale.instruments import _place


def where_overflow(
  fun: Callable[..., Any],
  dtypes: Any = (jnp.float16,),
  *,
  check: checks.Check = checks.nonfinite(),  # noqa: B008 - it is frozen.
  undefined: bool = True,
) -> Callable[..., _place.Place | None]:
  """Returns a function for the first operation of `fun` that overflowed.

  Gradients show where inf and NaN ended up, not where they began. This runs
  `fun` and names the operation that made the first one, its layer and its line
  of code. Put it around the function that makes the gradients, and call it with
  the parameters, the opt_state and the batch of the step that was skipped.

  An operation overflowed if `float_status` says so, and the order is that in
  which `fun` is written: forward pass before backward pass, iteration after
  iteration, on several devices the earliest on any of them. What is behind the
  first may be its consequence, or not; mend it and look again.

  If no operation overflowed, inf or NaN may have come in with an argument: a
  batch, parameters. Then the first argument that holds one is named, of any
  floating dtype. The states of loss scaling and what `record` keeps do not
  count; the -inf of a mask does, and may be meant.

  Args:
    fun: any function that JAX can trace, as for `float_status`. What it returns
      is not used.
    dtypes: the floating dtypes whose operations are looked at, one or several.
    check: `nonfinite()`; or `saturated()`, for hardware that saturates.
    undefined: whether an operation without a finite value (1/0, log 0) counts
      as well, if it comes first. Pass False to look past one that does no harm,
      such as in the branch of a `jnp.where` that is not taken.

  Returns:
    A function with the arguments of `fun` that returns a `Place`, or None if
    nothing was found. It compiles `fun` on each call, and waits for the result.

  Raises:
    TypeError: if `fun` is no function, `dtypes` holds anything but floating
      dtypes, or `check` is no check, or one for another dtype.
    ValueError: by what is returned, under jit, grad, vmap and the like.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss(x):
    ...   with jax.named_scope("mlp/square"):
    ...     y = x * x
    ...   return jnp.sum(1 / y)
    >>> x = jnp.array([1.0, 300.0, 400.0], jnp.float16)
    >>> place = ols.instruments.where_overflow(loss)(x)
    >>> print(place.operation, place.layer, place.elements)
    mul mlp/square 2
    >>> print(ols.instruments.where_overflow(loss)(x / 100))
    None
  """
  arguments.check_function(fun)
  dtypes = operation_overflow.check_dtypes(dtypes)
  saturating = operation_overflow.saturates(check, dtypes)

  @functools.wraps(fun)
  def where_overflow_fun(*args: Any, **kwargs: Any) -> _place.Place | None:
    _check_eager(jax.tree.leaves((args, kwargs)))
    recording = interpreter.record(fun, args, kwargs)
    _check_eager(recording.operands)
    rule = _Looking(recording.jaxpr, dtypes, saturating, undefined)

    def run(*operands: Any) -> _first.First:
      consts, inputs = recording.consts_and_arguments(operands)
      result: tuple[list[Any], _first.First] = throughout.evaluate(
        recording.jaxpr, inputs, rule, consts
      )
      return result[1]

    first = jax.device_get(jax.jit(run)(*recording.operands))
    # Two's complement: 2^31 elements of one result and more are negative.
    if first.elements == 0:
      return _nonfinite_argument(fun, args, kwargs)
    return _place.describe(rule.results[int(first.place)], first)

  return where_overflow_fun


def _nonfinite_argument(
  fun: Callable[..., Any], args: Any, kwargs: Any
) -> _place.Place | None:
  """Returns the first argument that holds inf or NaN, by its name."""
  try:
    named = inspect.signature(fun).bind(*args, **kwargs).arguments
  except (TypeError, ValueError):  # It has none, or that of what it wraps.
    named = {"args": args, "kwargs": kwargs}
  for name, tree in named.items():
    leaves = jax.tree.leaves_with_path(
      _leaves.as_arrays(tree), is_leaf=_remembers_overflows
    )
    for path, leaf in leaves:
      if not _leaves.is_gradient(leaf) or _leaves.overwrites(path):
        continue
      largest = float(jnp.finfo(leaf.dtype).max)
      is_nonfinite = bits.reached(leaf, largest, inclusive=False)
      elements = int(jnp.sum(is_nonfinite))
      if elements:
        return _place.Place(
          operation="argument",
          kind=_place.NONFINITE,
          layer=name + jax.tree_util.keystr(path),
          backward=False,
          dtype=np.dtype(leaf.dtype),
          shape=tuple(leaf.shape),
          elements=elements,
          iterations=(),
          source=None,
        )
  return None


def _remembers_overflows(x: Any) -> bool:
  """Returns whether it is a state that keeps the amax of a step, maybe inf."""
  return isinstance(x, (states.LossScalingState, _history.RecordState))


def _check_eager(values: Iterable[Any]) -> None:
  # Under jit a new array is traced as well, whatever the arguments are.
  if any(isinstance(x, jax.core.Tracer) for x in [*values, jnp.zeros(())]):
    raise ValueError(
      "What `where_overflow` returns must be called outside of jit, grad, vmap "
      "and scan, since it returns a text and not an array, got traced values. "
      "Put it around the whole function, where_overflow(jax.grad(loss)), and "
      "call that with the arguments of the step that overflowed; inside, "
      "`float_status` tells whether one did."
    )


class _Looking(_first.FirstRule):
  """The rule: an operation as it is, and the first of its kinds of failure."""

  def __init__(
    self,
    jaxpr: core.Jaxpr,
    dtypes: frozenset[Any],
    saturating: bool,
    undefined: bool,
  ) -> None:
    super().__init__(jaxpr)
    self._look = functools.partial(operation_overflow.find, dtypes, saturating)
    self._undefined = undefined
    # By the number that each has in a count.
    self.results: list[_place.Result] = []

  def apply(
    self,
    around: tuple[core.JaxprEqn, ...],
    equation: core.JaxprEqn,
    inputs: Sequence[Any],
  ) -> tuple[Sequence[Any], _first.First]:
    """See the base class."""
    outputs = interpreter.bind(equation, inputs)
    counts = []
    for variable, by_kind in self._look(equation, inputs, outputs):
      for kind, mask in by_kind.items():
        if kind == operation_overflow.UNDEFINED and not self._undefined:
          continue
        with interpreter.context(equation):
          counts.append(self.found(len(self.results), mask))
        self.results.append(_place.Result(around, equation, variable, kind))
    return outputs, self.join(counts)
