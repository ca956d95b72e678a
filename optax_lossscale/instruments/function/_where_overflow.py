"""Finds the first operation that overflowed."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import inspect
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import switches
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr import source_lines
from optax_lossscale._jaxpr import throughout
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._step import checks
from optax_lossscale._step import states
from optax_lossscale.hardware import operation_overflow
from optax_lossscale.instruments import shared

# JAX writes this around the scope of an operation of the backward pass.
_TRANSPOSE = "transpose("

# The `kind` of a `Place` that is an argument with inf or NaN.
_NONFINITE = "nonfinite"
_ZERO = np.zeros((), np.int32)
_LATEST = np.array(np.iinfo(np.int32).max, np.int32)


class Place(NamedTuple):
  """An operation that overflowed, or an argument that is not finite.

  `str()` describes it in a sentence.

  Attributes:
    operation: JAX's name for the operation, such as "mul" or "dot_general";
      "argument" for an argument.
    kind: "overflow"; "undefined" if the result has no finite value in any
      dtype, such as 1/0 or log 0; "nonfinite" if an argument holds inf or NaN.
    layer: the operation's scope, such as "LeNet5/conv1", as Flax Linen and
      `jax.named_scope` record it; empty if it has no scope. For an argument,
      its path, such as "batch['x']".
    backward: True if the operation is in the backward pass.
    dtype: the dtype of its result.
    shape: the shape of its result; in a `shard_map`, that of one device's part.
    elements: how many elements of the result overflowed, on all devices.
    iterations: the iteration of each enclosing loop, counted from 0, outermost
      first. For a scan, the index into the scanned arrays, even if the backward
      pass scans them in reverse.
    source: the line of code, as "file:line"; None if JAX has not recorded it.
  """

  operation: str
  kind: str
  layer: str
  backward: bool
  dtype: np.dtype
  shape: tuple[int, ...]
  elements: int
  iterations: tuple[int, ...]
  source: str | None

  def __str__(self) -> str:
    count = f"{self.elements} element" + "s" * (self.elements != 1)
    if self.kind == _NONFINITE:
      verb = "is" if self.elements == 1 else "are"
      return f"argument {self.layer} holds {count} that {verb} not finite"
    is_overflow = self.kind == operation_overflow.OVERFLOW
    what = "overflow" if is_overflow else "undefined result"
    parts = [f'{self.dtype.name} {what} in "{self.operation}" {self.shape}']
    if self.layer:
      parts[0] += f" of layer {self.layer}"
    if self.backward:
      parts.append("backward pass")
    if len(self.iterations) == 1:
      parts.append(f"iteration {self.iterations[0]} of its loop")
    elif self.iterations:
      numbers = ", ".join(map(str, self.iterations))
      parts.append(f"iterations ({numbers}) of its loops, the outermost first")
    source = f" at {self.source}" if self.source else ""
    return f"{', '.join(parts)}: {count}{source}"


def where_overflow(
  fun: Callable[..., Any],
  *,
  check: checks.Check = checks.nonfinite(jnp.float16),
  undefined: bool = True,
) -> Callable[..., Place | None]:
  """Returns a function that finds the first operation of `fun` to overflow.

  Gradients show where inf and NaN ended up, not where they began. This runs
  `fun` and names the first operation that overflowed, with its layer and line
  of code. Wrap the function that computes the gradients, and call the result
  with the parameters, the opt_state and the batch of the step that was skipped.

  An operation overflowed if `float_status` would report it. Loops come one
  iteration after another, and the first overflow on any device counts. Later
  ones may follow from it: fix it, then rerun. If no operation overflowed, the
  result is the first argument, such as a batch, that holds inf or NaN. A mask's
  -inf counts, even if it is intended. The states of loss scaling and of
  `record` are not examined.

  Args:
    fun: any function that JAX can trace, as for `float_status`. The result of
      `fun` is not used.
    check: `nonfinite(dtype)` or `saturated(dtype)`, with the dtypes of the
      operations to examine, as for `float_status`.
    undefined: whether an operation whose exact result is not finite (1/0, log
      0) counts as well. Pass False to ignore harmless ones, such as those in
      the branch that a `jnp.where` does not select.

  Returns:
    A function with the arguments of `fun` that returns a `Place`, or None if
    nothing was found. It compiles `fun` on each call, and waits for the result.

  Raises:
    TypeError: if `fun` is not a function, or `check` is not a check for dtypes
      of operations.
    ValueError: if the returned function is traced, as under jit, grad or vmap.

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
  """
  arguments.check_function(fun)
  operation_overflow.check_for_operations(check)
  undefined = arguments.check_flag("undefined", undefined)

  @functools.wraps(fun)
  @switches.lifted()
  def where_overflow_fun(*args: object, **kwargs: object) -> Place | None:
    _check_eager(jax.tree.leaves((args, kwargs)))
    recording = interpreter.record(fun, args, kwargs)
    _check_eager(recording.operands)
    rule = _Looking(recording.jaxpr, check, undefined)

    def run(*operands: jax.Array) -> _First:
      consts, inputs = recording.consts_and_arguments(operands)
      _, first = throughout.evaluate(recording.jaxpr, inputs, rule, consts)
      return first

    first = jax.device_get(jax.jit(run)(*recording.operands))
    # Compared with 0 because a count of 2^31 elements or more is negative.
    if first.elements == 0:
      return _nonfinite_argument(fun, args, kwargs)
    return _describe(rule.results[int(first.place)], first)

  return where_overflow_fun


def _nonfinite_argument(
  fun: Callable[..., object],
  args: tuple[object, ...],
  kwargs: Mapping[str, object],
) -> Place | None:
  """Returns the place of the first argument that holds inf or NaN."""
  try:
    named = inspect.signature(fun).bind(*args, **kwargs).arguments
  except (TypeError, ValueError):  # `fun` has no signature, or a wrong one.
    named = {"args": args, "kwargs": kwargs}
  # Both states hold the amax of past steps, which may be inf.
  kept = states.LossScalingState, shared.RecordState
  for name, tree in named.items():
    for path, leaf in shared.by_path(tree, *kept).items():
      largest = formats.largest(leaf.dtype)
      is_nonfinite = bits.reached(leaf, largest, inclusive=False)
      if elements := int(jnp.sum(is_nonfinite)):
        return Place(
          operation="argument",
          kind=_NONFINITE,
          layer=name + jax.tree_util.keystr(path),
          backward=False,
          dtype=np.dtype(leaf.dtype),
          shape=tuple(leaf.shape),
          elements=elements,
          iterations=(),
          source=None,
        )
  return None


def _check_eager(values: Iterable[object]) -> None:
  # Under jit even a new array is traced, whatever the arguments are.
  if any(isinstance(x, jax.core.Tracer) for x in [*values, jnp.zeros(())]):
    raise ValueError(
      "The function that `where_overflow` returns must be called outside of "
      "jit, grad, vmap and scan, since it returns a Place, not an array, got "
      "traced values. Wrap the whole function, where_overflow(jax.grad(loss)), "
      "and call that with the arguments of the step that overflowed; inside, "
      "`float_status` says whether an operation overflowed."
    )


class _First(NamedTuple):
  """The first failed result in the part of a program that has run."""

  # int32[depth], the iteration of each enclosing loop, outermost first.
  iterations: Array
  # int32[], how many elements of the result failed; 0 if no result did.
  elements: Array = _ZERO
  # int32[], the index of the result in `_Looking.results`.
  place: Array = _ZERO
  # int32[], how many results were examined before this one.
  time: Array = _ZERO
  # int32[], how many results were examined in all.
  ran: Array | np.signedinteger = _ZERO
  # int32[], the number of finished iterations of the current loop.
  rounds: Array = _ZERO


class _Result(NamedTuple):
  """One result of an operation, and one way in which it may fail."""

  around: tuple[core.JaxprEqn, ...]  # Enclosing equations, outermost first.
  equation: core.JaxprEqn
  variable: core.Var
  kind: str  # As in `Place`.


class _Looking(throughout.CountingRule):
  """A rule that runs operations unchanged and notes the first failure."""

  zero: _First

  def __init__(
    self, jaxpr: core.Jaxpr, check: checks.Check, undefined: bool
  ) -> None:
    self.zero = _First(np.zeros(_loop_depth(jaxpr), np.int32))
    self._check = check
    self._undefined = undefined
    # Indexed by `_First.place`.
    self.results: list[_Result] = []

  def apply(
    self,
    around: tuple[core.JaxprEqn, ...],
    equation: core.JaxprEqn,
    inputs: Sequence[Array],
  ) -> tuple[Sequence[Array], _First]:
    """See the base class."""
    outputs = interpreter.bind(equation, inputs)
    counts = []
    found = operation_overflow.find(self._check, equation, inputs, outputs)
    for variable, by_kind in found:
      for kind, mask in by_kind.items():
        if kind == operation_overflow.UNDEFINED and not self._undefined:
          continue
        with interpreter.context(equation):
          count = self.zero._replace(
            elements=jnp.sum(mask, dtype=np.int32),
            place=np.array(len(self.results), np.int32),
            ran=np.ones((), np.int32),
          )
        counts.append(count)
        self.results.append(_Result(around, equation, variable, kind))
    return outputs, self.join(counts)

  def join(self, counts: Sequence[Any]) -> _First:
    """See the base class."""
    # Most operations have nothing to report.
    counts = [x for x in counts if x is not self.zero]
    if len(counts) < 2:
      return counts[0] if counts else self.zero
    stacked: _First = jax.tree.map(_stack, *counts)
    before = stacked.ran.cumsum(dtype=np.int32) - stacked.ran
    stacked = stacked._replace(time=before + stacked.time)
    # The first count with a failure; index 0 if no count has one.
    which = jnp.argmax(stacked.elements != 0)
    first: _First = jax.tree.map(lambda x: jnp.asarray(x)[which], stacked)
    ran = stacked.ran.sum(dtype=np.int32)
    return first._replace(ran=ran, rounds=counts[0].rounds)

  def join_round(self, counts: Any, more: Any, *, is_over: bool) -> _First:
    """See the base class."""
    around = jnp.reshape(counts.rounds, (1,))
    iterations = jnp.concatenate([around, more.iterations[:-1]])
    joined = self.join([counts, more._replace(iterations=iterations)])
    return joined._replace(rounds=counts.rounds + np.int32(is_over))

  def join_devices(self, count: Any, axes: Sequence[str]) -> _First:
    """See the base class."""

    def earliest(x: Array, is_candidate: Array) -> jax.Array:
      return lax.pmin(jnp.where(is_candidate, x, _LATEST), axes)

    is_first = count.elements != 0
    time = earliest(count.time, is_first)
    is_first &= count.time == time
    place = earliest(count.place, is_first)
    is_first &= count.place == place
    return _First(
      iterations=lax.pmax(jnp.where(is_first, count.iterations, 0), axes),
      elements=lax.psum(jnp.where(is_first, count.elements, 0), axes),
      place=place,
      time=time,
      ran=lax.pmax(count.ran, axes),
    )


def _stack(*values: jax.Array) -> Array:
  """Stacks values; the result is a NumPy array if all values are."""
  here = [throughout.on_this_mesh(x) for x in values]
  is_numpy = all(isinstance(x, np.ndarray | np.generic) for x in here)
  return np.stack(here) if is_numpy else jnp.stack(here)


def _loop_depth(jaxpr: core.Jaxpr) -> int:
  """Returns the depth of the deepest nest of loops."""
  return max(
    (
      _loop_depth(body.jaxpr) + calls.is_loop(equation)
      for equation in jaxpr.jaxpr.eqns
      for body in calls.bodies(equation)
    ),
    default=0,
  )


def _describe(result: _Result, first: _First) -> Place:
  """Returns the `Place` of the first result that failed."""
  equations = [*result.around, result.equation]
  stacks = [str(x.source_info.name_stack) for x in equations]
  loops = [x.params for x in result.around if calls.is_loop(x)]
  aval: Any = result.variable.aval
  return Place(
    operation=result.equation.primitive.name,
    kind=result.kind,
    layer=functools.reduce(scopes.join, stacks, ""),
    backward=any(_TRANSPOSE in stack for stack in stacks),
    dtype=np.dtype(aval.dtype),
    shape=tuple(aval.shape),
    elements=int(first.elements),
    # There are more numbers than loops if other loops are nested deeper.
    iterations=tuple(
      loop["length"] - 1 - int(number) if loop.get("reverse") else int(number)
      for loop, number in zip(loops, first.iterations, strict=False)
    ),
    source=source_lines.user_line(equations),
  )
