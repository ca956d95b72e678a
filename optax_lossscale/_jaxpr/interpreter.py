"""Records functions as jaxprs, and evaluates jaxprs equation by equation."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import contextvars
import operator
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
from jax.extend import core
from jax.extend import source_info_util
from jax.extend.core import primitives
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

# `core.Jaxpr` below is what `jax.make_jaxpr` returns. Up to jax 0.10 the class
# was named `ClosedJaxpr`, with the same attributes.

# The value of a variable. That of a literal or a constant may be NumPy's.
Array = jax.Array | np.ndarray
Arrays = Sequence[Array]

# The type of a variable's value: an array, or what stands for one.
Value = TypeVar("Value")

# Takes an equation and its input values, and returns its output values.
EvaluateEquation = Callable[[core.JaxprEqn, Sequence[Value]], Sequence[Value]]

# The remedy in errors about a change in place, which would be lost.
_FOR_NNX = (
  "optax_lossscale.nnx.autocast and optax_lossscale.nnx.scaled_value_and_grad "
  "keep what a call changes in an NNX model"
)
_CONTAINER_KEYS = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)

# JAX's trace state during a recording that is evaluated right away, or None.
_recorded: contextvars.ContextVar[object] = contextvars.ContextVar(
  "_recorded", default=None
)


class Recording(NamedTuple):
  """A function's jaxpr for given arguments, and the jaxpr's input values."""

  jaxpr: core.Jaxpr
  # First the values that the function closed over, then the arrays among its
  # arguments.
  operands: Sequence[jax.Array]
  # The structure of the function's result.
  treedef: jax.tree_util.PyTreeDef

  def without_values(self) -> "Recording":
    """Returns a recording that holds no tracers, so that JAX may keep it."""
    nothing: Any = [None] * len(self.operands)
    consts, _ = self.consts_and_arguments(nothing)
    return self._replace(
      jaxpr=self.jaxpr.replace(consts=consts), operands=nothing
    )

  def consts_and_arguments(
    self, operands: Sequence[Value]
  ) -> tuple[Sequence[Value], Sequence[Value]]:
    """Splits `operands` into the jaxpr's constants and its arguments."""
    split = len(self.jaxpr.consts)
    return operands[:split], operands[split:]

  def evaluate(self, *operands: jax.Array) -> list[jax.Array]:
    """Returns the flat outputs of the function for these operands."""
    consts, arguments = self.consts_and_arguments(operands)
    outputs = evaluate(self.jaxpr, arguments, bind, consts)
    return [jnp.asarray(x) for x in outputs]

  def result(self, outputs: Sequence[ArrayLike]) -> Any:
    """Returns the function's result, made from its flat outputs."""
    # All leaves are arrays, as under jit, even if the function made a number.
    return jax.tree.unflatten(self.treedef, [jnp.asarray(x) for x in outputs])


def record(
  function: Callable[..., Any],
  args: Sequence[object],
  kwargs: Mapping[str, object],
  *,
  may_change: bool = False,
) -> Recording:
  """Records a function; the arrays among its arguments become inputs."""
  # The function gets copies of its arguments, so its in-place changes are lost.
  # They raise an error unless `may_change` is True.
  # Under jit, a recording is evaluated only when the compiled program runs. A
  # recording inside another one is evaluated when the outer one is.
  is_at_once = is_recording() or not is_staged()
  leaves, treedef = jax.tree.flatten((args, kwargs))
  places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

  def flat_function(*arrays: jax.Array) -> object:
    inputs = list(leaves)
    for place, array in zip(places, arrays, strict=True):
      inputs[place] = array
    args, kwargs = jax.tree.unflatten(treedef, inputs)
    with _recording(is_at_once), explain_changes():
      outputs = function(*args, **kwargs)
    if not may_change:
      check_unchanged(arrays, (args, kwargs))
    return outputs

  # The name that JAX reports if the function cannot be traced.
  flat_function.__name__ = getattr(function, "__name__", "flat_function")

  arrays = [leaves[place] for place in places]
  jaxpr, outputs = jax.make_jaxpr(flat_function, return_shape=True)(*arrays)
  return Recording(jaxpr, [*jaxpr.consts, *arrays], jax.tree.structure(outputs))


def is_staged() -> bool:
  """Returns whether JAX is tracing a function in order to compile it."""
  # This is true under jit, scan and the like, but not under an eager grad or
  # vmap, where each operation runs immediately.
  with jax.transfer_guard("allow"):  # Outside jit the new array is a transfer.
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_recording() -> bool:
  """Returns whether the traced function is evaluated now and only once."""
  # This is true while an eager `record` calls the function, but not in what the
  # function calls under jit, since JAX keeps those traces.
  return bool(_recorded.get() == core.get_opaque_trace_state())


@contextlib.contextmanager
def _recording(is_at_once: bool) -> Iterator[None]:
  state = core.get_opaque_trace_state() if is_at_once else None
  token = _recorded.set(state)
  try:
    yield
  finally:
    _recorded.reset(token)


def is_array(x: object) -> bool:
  # A NumPy bool is a flag such as `train`, just like a Python bool.
  kinds = jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct
  if not isinstance(x, kinds) or isinstance(x, np.bool_):
    return False
  # Text, dates and objects are no numbers.
  return (
    isinstance(x, jax.Array) or getattr(x.dtype, "kind", "V") not in "OSTUMm"
  )


def evaluate(
  jaxpr: core.Jaxpr,
  arguments: Sequence[Value],
  rule: EvaluateEquation[Value],
  consts: Sequence[Value] | None = None,
  value_of: Callable[[core.Literal], Value] = operator.attrgetter("val"),
) -> list[Value]:
  """Returns the outputs of a jaxpr, evaluating its equations in order."""
  values: dict[core.Var, Value] = {}
  if consts is None:
    consts = jaxpr.consts

  def read(atom: core.Var | core.Literal) -> Value:
    return value_of(atom) if isinstance(atom, core.Literal) else values[atom]

  values.update(zip(jaxpr.jaxpr.constvars, consts, strict=True))
  values.update(zip(jaxpr.jaxpr.invars, arguments, strict=True))
  for equation in jaxpr.eqns:
    outputs = rule(equation, [read(atom) for atom in equation.invars])
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.jaxpr.outvars]


def bind(
  equation: core.JaxprEqn, inputs: Sequence[ArrayLike]
) -> Sequence[jax.Array]:
  """Evaluates one equation unchanged, and returns its outputs."""
  primitive = equation.primitive
  parameters = primitive.get_bind_params(equation.params)
  with context(equation):
    outputs = primitive.bind(*inputs, **parameters)
  return outputs if primitive.multiple_results else [outputs]


@contextlib.contextmanager
def inside(call: core.JaxprEqn) -> Iterator[None]:
  """Restores the context in which the jaxpr of a call was traced."""
  is_jit = call.primitive is primitives.jit_p
  function = f"jit({call.params['name']})" if is_jit else ""
  with context(call), _scope(function):
    yield


@contextlib.contextmanager
def context(equation: core.JaxprEqn) -> Iterator[None]:
  """Restores the scopes, settings and source lines of an equation."""
  # Profilers and errors then point to the user's lines.
  scope = str(equation.source_info.name_stack)
  with (
    equation.ctx.manager,
    source_info_util.user_context(equation.source_info.traceback),
    _scope(scope),
  ):
    yield


def _scope(name: str) -> contextlib.AbstractContextManager[object]:
  return jax.named_scope(name) if name else contextlib.nullcontext()


def check_unchanged(before: Sequence[object], arguments: object) -> None:
  """Raises if a function has changed an object among its arguments."""
  known = {id(array) for array in before}
  for path, leaf in jax.tree.leaves_with_path(arguments):
    is_new = isinstance(leaf, jax.Array) and id(leaf) not in known
    # It may change a dict or list, since it has been given a copy. Skip the
    # last key, which may only lead from a box to the array in it.
    if is_new and not all(isinstance(x, _CONTAINER_KEYS) for x in path[:-1]):
      raise ValueError(
        "`fun` must not change its arguments in place, since the change would "
        f"be lost, got a new value in {jax.tree_util.keystr(path[1:])}; return "
        f"it. {_FOR_NNX}; elsewhere pass what nnx.split makes of it."
      )


@contextlib.contextmanager
def explain_changes() -> Iterator[None]:
  """Explains Flax's error if `fun` changes an object that it closes over."""
  try:
    yield
  except Exception as error:
    # Compare by name, so that Flax need not be imported.
    if type(error).__name__ != "TraceContextError":
      raise
    raise ValueError(
      "`fun` must not change NNX objects that are not traced with it, got a "
      "change to one that it closes over, on the line that the traceback "
      f"shows; pass the object as an argument. {_FOR_NNX}; "
      "optax_lossscale.autocast takes a model that is only read."
    ) from error
