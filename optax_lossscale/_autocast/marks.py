"""Functions that their author marks as safe in 16 bits, such as kernels.

`autocast` cannot look into a kernel, and some kernels refuse float32. So it
records a marked function with 16-bit inputs and leaves its operations alone.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import inspect
import itertools
from typing import Any
from typing import ParamSpec
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Numbered:
  """The dtypes of marked calls, by their order in a recording."""

  def __init__(
    self, dtype: np.dtype, chosen: Mapping[int, np.dtype] | None = None
  ) -> None:
    self.dtype, self.chosen = dtype, chosen or {}
    self.numbers = itertools.count()


# The dtype of marked calls while `autocast` records a function, or None. JAX's
# caches depend on it. If overrides may choose, no two recordings share a cache.
_around = jax.make_user_context(None)


def cast_inputs(
  fun: Callable[_P, _R], *, argnums: int | Sequence[int] | None = None
) -> Callable[_P, _R]:
  """Returns `fun` with a mark: under `autocast` it runs in 16 bits as a whole.

  `autocast` cannot look into a kernel, such as one of Pallas or cuDNN's
  attention, and some kernels refuse float32. If 16 bits are safe, mark the
  function that calls it. Under `autocast` its float32 inputs are then converted
  to the low precision, and everything inside runs as written, with its own
  derivative rules. Outputs in the low precision stand for float32 again.
  Without `autocast`, at the level O0 and where `overrides` say float32, the
  mark changes nothing.

  Args:
    fun: any function of arrays. Other arguments are passed unchanged.
    argnums: the positions of the arguments to convert, which may also come by
      name; None for all. Integers, booleans and keys are never converted.

  Returns:
    A function with the same arguments. As a decorator, `cast_inputs` needs no
    brackets.

  Raises:
    TypeError: if `fun` is not a function, or `argnums` are not positions of its
      arguments. When called under `autocast`: if an argument to convert is
      wider than float32.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> @ols.cast_inputs
    ... def kernel(x, y):
    ...   return jnp.exp(x) @ y
    >>> def loss_fn(x):
    ...   return jnp.sum(kernel(x, x) ** 2)
    >>> mixed_loss_fn = ols.autocast(loss_fn)
    >>> x = jnp.eye(2)
    >>> ols.instruments.precision_report(mixed_loss_fn, x).line
    '1 of 1 products in float16; float16: 2; float32 no product follows: 2'
    >>> print(kernel(x, x).dtype, jax.grad(mixed_loss_fn)(x).dtype)
    float32 float32

  References:
    `torch.amp.custom_fwd(cast_inputs=...)` in PyTorch 2.13.
  """
  arguments.check_function(fun)
  signature = inspect.signature(fun)
  names = list(signature.parameters)
  if argnums is not None:
    places = arguments.positions("argnums", argnums, len(names))
    names = [names[place] for place in places]
  title = getattr(fun, "__name__", type(fun).__name__)

  @functools.wraps(fun)
  def marked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    around = _around.value
    if around is None:
      return fun(*args, **kwargs)
    number, dtype = 0, around
    if isinstance(around, _Numbered):
      number = next(around.numbers)
      dtype = around.chosen.get(number, around.dtype)
    written: set[np.dtype] = set()

    def lower(name: str, x: Any) -> Any:
      if not _is_float(x):
        return x
      if x.dtype.itemsize > 4:
        raise TypeError(
          f"`cast_inputs` marks `{title}`, so under autocast its floats must "
          f"have at most 32 bits, got {x.dtype.name} in `{name}`; convert it, "
          "or leave it out of `argnums`."
        )
      written.add(x.dtype)
      return lax.convert_element_type(x, dtype)

    bound = signature.bind(*args, **kwargs)
    for name in bound.arguments.keys() & {*names}:
      lowered = functools.partial(lower, name)
      bound.arguments[name] = jax.tree.map(lowered, bound.arguments[name])
    try:
      with scopes.mark(str(number)):
        outputs = fun(*bound.args, **bound.kwargs)
    except Exception as error:
      error.add_note(
        f"`cast_inputs` marks `{title}`, which got {dtype.name} under autocast."
      )
      raise

    def restore(x: Any) -> Any:
      if not _is_float(x) or x.dtype != dtype:
        return x
      widest = max(written, key=lambda dtype: dtype.itemsize, default=dtype)
      return lax.convert_element_type(x, widest)

    with scopes.mark(scopes.RESTORED):
      restored: _R = jax.tree.map(restore, outputs)
    return restored

  return marked


def record(
  recipe: levels.Recipe,
  fun: Callable[..., Any],
  args: Sequence[object],
  kwargs: Mapping[str, object],
) -> interpreter.Recording:
  """Records a function whose marked calls have the dtypes of the recipe."""
  if not recipe.overrides:
    with lowering(recipe), _explained():
      return interpreter.record(fun, args, kwargs)
  chosen: dict[int, np.dtype] = {}
  # The first recording finds the scopes of the calls.
  for _ in range(2):
    with _around(_Numbered(recipe.dtype_of_marked, chosen)), _explained():
      recording = interpreter.record(fun, args, kwargs)
    before, chosen = chosen, {}
    for scope, equation, _ in scopes.operations(recording.jaxpr):
      mark = scopes.mark_on(equation)
      found = levels.find_override(recipe.overrides, scope)
      if mark.isdigit() and found and found[1] is not None:
        is_float8 = levels.is_float8(found[1])
        chosen[int(mark)] = recipe.dtype if is_float8 else found[1]
    if chosen == before:
      break
  return recording


@contextlib.contextmanager
def _explained() -> Iterator[None]:
  """Says what to write if a kernel refuses float32."""
  try:
    yield
  except Exception as error:
    if "got float32" in str(error):
      error.add_note(
        "Under autocast a function is recorded in float32. Mark a kernel that "
        "refuses it, as in ols.cast_inputs(jax.nn.dot_product_attention)(...); "
        "see docs/guides/fused_attention.md."
      )
    raise


def lowering(
  recipe: levels.Recipe,
) -> contextlib.AbstractContextManager[object]:
  """Lowers the marked functions that are called inside."""
  return _around(recipe.dtype_of_marked)


def _is_float(x: Any) -> bool:
  return interpreter.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
