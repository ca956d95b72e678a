"""Functions that their author marks as safe in 16 bits, such as kernels.

`autocast` cannot look into a kernel, and some kernels refuse float32. So it
records a marked function with 16-bit inputs and leaves its operations alone.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import inspect
import itertools
from typing import ParamSpec
from typing import TypeVar

import jax
from jax import lax
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


# While `autocast` records a function: the dtype of its marked calls, or if
# overrides may choose, a function that numbers the calls and says each one's.
# JAX's caches depend on it.
_around = jax.make_user_context(None)


def cast_inputs(
  fun: Callable[_P, _R], *, argnums: int | Sequence[int] | None = None
) -> Callable[_P, _R]:
  """Returns `fun` with a mark: under `autocast` it runs in 16 bits as a whole.

  `autocast` cannot look into a kernel, such as one of Pallas or cuDNN's
  attention. If 16 bits are safe, mark the function that calls it. Then
  `autocast` converts its float32 inputs, and everything inside runs as written,
  with its own derivative rules. Outputs in 16 bits stand for float32 again.
  Without `autocast`, at O0 and where `overrides` say float32, the mark changes
  nothing.

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
    number, dtype = around() if callable(around) else (0, around)
    bound = signature.bind(*args, **kwargs)
    given = {x: bound.arguments[x] for x in names if x in bound.arguments}
    dtypes = {x.dtype for x in filter(_is_float, jax.tree.leaves(given))}
    if wide := [x.name for x in dtypes if x.itemsize > 4]:
      raise TypeError(
        f"`cast_inputs` marks `{title}`, so under autocast its floats must "
        f"have at most 32 bits, got {wide[0]}; convert them, or leave the "
        "argument out of `argnums`."
      )
    bound.arguments |= _convert(given, dtypes, dtype)
    try:
      with scopes.mark(str(number)):
        outputs = fun(*bound.args, **bound.kwargs)
    except Exception as error:
      error.add_note(
        f"`cast_inputs` marks `{title}`, which got {dtype.name} under autocast."
      )
      raise
    # The program around the call sees the dtype that it has without autocast.
    written = max(dtypes, key=lambda x: x.itemsize, default=dtype)
    with scopes.mark(scopes.RESTORED):
      restored: _R = _convert(outputs, {dtype}, written)
    return restored

  return marked


def record(
  recipe: levels.Recipe,
  fun: Callable[..., object],
  args: Sequence[object],
  kwargs: Mapping[str, object],
) -> interpreter.Recording:
  """Records a function whose marked calls have the dtypes of the recipe."""
  dtype, chosen = recipe.dtype_of_marked, dict[int, np.dtype]()
  # Only a recording says in which scopes its calls are.
  for _ in range(2 if recipe.overrides else 1):
    numbers = itertools.count()

    def of_next() -> tuple[int, np.dtype]:
      number = next(numbers)  # noqa: B023
      return number, chosen.get(number, dtype)  # noqa: B023

    try:
      with _around(of_next if recipe.overrides else dtype):
        recording = interpreter.record(fun, args, kwargs)
    except Exception as error:
      if "got float32" in str(error):
        error.add_note(
          "autocast records a function in float32. Mark a kernel that refuses "
          "it: ols.cast_inputs(jax.nn.dot_product_attention)(...); see "
          "docs/guides/fused_attention.md."
        )
      raise
    before, chosen = chosen, {}
    for scope, equation, _ in scopes.operations(recording.jaxpr):
      found = levels.find_override(recipe.overrides, scope)
      mark = scopes.mark_on(equation)
      if mark.isdigit() and found and found[1] is not None:
        is_float8 = levels.is_float8(found[1])
        chosen[int(mark)] = recipe.dtype if is_float8 else found[1]
    if chosen == before:
      break
  return recording


def lowering(
  recipe: levels.Recipe,
) -> contextlib.AbstractContextManager[object]:
  """Lowers the marked functions that are called inside."""
  return _around(recipe.dtype_of_marked)


def _convert(tree: _T, dtypes: Collection[np.dtype], to: np.dtype) -> _T:
  """Returns a tree whose arrays of some dtypes are in another one."""
  converted: _T = jax.tree.map(
    lambda x: (
      lax.convert_element_type(x, to)
      if _is_float(x) and x.dtype in dtypes
      else x
    ),
    tree,
  )
  return converted


def _is_float(x: object) -> bool:
  return interpreter.is_array(x) and bits.part_dtype(x) == getattr(
    x, "dtype", ""
  )
