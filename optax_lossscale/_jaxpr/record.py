"""Functions recorded as jaxprs, with all that they close over as inputs."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import contextvars
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import trees
from optax_lossscale._jaxpr import interpreter

# JAX's mark of the function that is being recorded, to be evaluated at once.
_recorded: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "_recorded", default=None
)


class Recording(NamedTuple):
  """A function's jaxpr for given arguments.

  Attributes:
    jaxpr: what the function does.
    operands: the values that it takes: first what the function closed over,
      then the arrays among its arguments.
    treedef: the structure of what it returns.
  """

  jaxpr: core.Jaxpr
  operands: list[Any]
  treedef: Any

  def consts_and_arguments(
    self, operands: Sequence[Any]
  ) -> tuple[Sequence[Any], Sequence[Any]]:
    """Splits `operands` into the jaxpr's constants and its arguments."""
    split = len(self.jaxpr.consts)
    return operands[:split], operands[split:]

  def evaluate(self, *operands: Any) -> list[Any]:
    """Returns the flat outputs of the function for other operands."""
    consts, arguments = self.consts_and_arguments(operands)
    outputs = interpreter.evaluate(
      self.jaxpr, arguments, interpreter.bind, consts
    )
    return [jnp.asarray(x) for x in outputs]

  def result(self, outputs: Sequence[Any]) -> Any:
    """Returns what the function returns, of its flat outputs.

    Arrays all of them, as under jit, also where the function returns a number.
    """
    return jax.tree.unflatten(self.treedef, [jnp.asarray(x) for x in outputs])


def record(
  function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Recording:
  """Records a function."""
  # Under jit what is recorded becomes a part of what JAX compiles; in another
  # recording it becomes a part of that.
  is_at_once = is_recording() or not is_staged()
  leaves, treedef = jax.tree.flatten((args, kwargs))
  places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

  def flat_function(*arrays: Any) -> Any:
    inputs = list(leaves)
    for place, array in zip(places, arrays, strict=True):
      inputs[place] = array
    args, kwargs = jax.tree.unflatten(treedef, inputs)
    with _recording(is_at_once):
      outputs = function(*args, **kwargs)
    trees.check_unchanged(arrays, (args, kwargs))
    return outputs

  # What JAX calls it when the function cannot be traced.
  flat_function.__name__ = getattr(function, "__name__", "flat_function")

  arrays = [leaves[place] for place in places]
  jaxpr, outputs = jax.make_jaxpr(flat_function, return_shape=True)(*arrays)
  return Recording(jaxpr, [*jaxpr.consts, *arrays], jax.tree.structure(outputs))


def is_staged() -> bool:
  """Returns whether JAX is recording a function, to compile it.

  So it does under jit, scan and the like, not under an eager grad or vmap,
  where each operation runs now.
  """
  return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_recording() -> bool:
  """Returns whether the function being traced is evaluated at once, and once.

  So it is while an eager `record` calls it, but not in what that traces in
  turn, such as a jitted function, which JAX keeps.
  """
  return bool(_recorded.get() == core.get_opaque_trace_state())


@contextlib.contextmanager
def _recording(is_at_once: bool) -> Iterator[None]:
  state = core.get_opaque_trace_state() if is_at_once else None
  token = _recorded.set(state)
  try:
    yield
  finally:
    _recorded.reset(token)


def _is_array(x: Any) -> bool:
  # NumPy's bool is a flag, such as `train`, as Python's is.
  return isinstance(x, (jax.Array, np.ndarray, np.generic)) and not isinstance(
    x, np.bool_
  )
