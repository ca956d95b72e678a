"""Functions that their author marks as safe in 16 bits, such as kernels.

`autocast` cannot look into a kernel, and some kernels refuse float32. So it
records a marked function with 16-bit inputs and leaves its operations alone.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import inspect
from typing import ParamSpec
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._base.formats import FLOAT32
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

# While `autocast` records a function: the dtypes that its marked calls may
# have. Their scopes choose later. JAX's caches depend on this value.
_around = jax.make_user_context(None)


def cast_inputs(
  fun: Callable[_P, _R], *, argnums: int | Sequence[int] | None = None
) -> Callable[_P, _R]:
  """Returns `fun` with a mark: under `autocast` it runs in 16 bits as a whole.

  `autocast` cannot look into a kernel, such as one of Pallas or cuDNN's
  attention. If 16 bits are safe, mark the function that calls it. Then
  `autocast` converts its float32 arguments, and everything inside runs as
  written, with its own derivative rules. An output in that dtype is float32 to
  the caller. Without `autocast`, at O0 and where `overrides` say float32, the
  mark changes nothing.

  Arrays that `fun` closes over, and objects of Flax NNX, keep their dtypes. An
  argument above 65504 becomes inf in float16. With `overrides`, `fun` is traced
  for each dtype in them.

  Args:
    fun: any function of arrays. Other arguments are passed unchanged.
    argnums: the positions of the arguments to convert, which may also come by
      name; None for all. Only float32 is converted.

  Returns:
    A function with the same arguments. With `argnums`, the decorator is
    `functools.partial(cast_inputs, argnums=...)`.

  Raises:
    TypeError: if `fun` is not a function that says its arguments, or `argnums`
      are no integers. When called under `autocast`: if an argument to convert
      is float64.
    ValueError: if `argnums` are not positions of its arguments. When called: if
      `overrides` choose a dtype that `fun` refuses.

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
  named = getattr(fun, "func", fun)  # That of a functools.partial.
  title = getattr(named, "__name__", type(fun).__name__)
  try:
    signature = inspect.signature(fun)
  except ValueError as error:
    raise TypeError(
      f"`fun` must say its arguments, got {title!r}, which does not; wrap it "
      "in a lambda."
    ) from error
  names = list(signature.parameters)
  if argnums is not None:
    places = arguments.positions("argnums", argnums, len(names))
    names = [names[place] for place in places]

  @functools.wraps(fun)
  def marked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    dtypes = _around.value
    if dtypes in (None, (FLOAT32,)):
      return fun(*args, **kwargs)
    bound = signature.bind(*args, **kwargs).arguments
    given = {x: bound[x] for x in names if x in bound}
    found = {*map(_dtype_of, jax.tree.leaves(given, is_leaf=_is_nnx))}

    def run(dtype: np.dtype) -> _R:
      if np.dtype("float64") in found and dtype != FLOAT32:
        raise TypeError(
          f"`cast_inputs` marks `{title}`, so under autocast its arguments "
          "must be float32, got float64; convert them, or leave them out of "
          "`argnums`."
        )
      converted = _convert(given, FLOAT32, dtype)
      changed = inspect.BoundArguments(signature, {**bound, **converted})
      try:
        with scopes.mark(scopes.KERNEL):
          outputs = fun(*changed.args, **changed.kwargs)
      except Exception as error:
        error.add_note(
          f"`cast_inputs` marks `{title}`, which got {dtype.name} under "
          "autocast."
        )
        raise
      if FLOAT32 not in found:
        return outputs
      with scopes.mark(scopes.RESTORED):
        return _convert(outputs, dtype, FLOAT32)

    if len(dtypes) == 1:
      return run(dtypes[0])
    # All that the scope may choose, since it is known only later.
    branches = {x.name: functools.partial(run, x) for x in dtypes}
    usable = [x for x in branches if _can_trace(branches[x])]
    if not usable:
      return run(dtypes[0])  # Raises what `fun` raises.
    usable *= 2 if len(usable) == 1 else 1  # Of one branch JAX makes no choice.
    with scopes.mark(f"{scopes.CHOICE} {' '.join(usable)}"):
      chosen: _R = lax.switch(0, [branches[x] for x in usable])
    return chosen

  return marked


def record(
  recipe: levels.Recipe,
  fun: Callable[..., object],
  args: Sequence[object],
  kwargs: Mapping[str, object],
) -> interpreter.Recording:
  """Records a function whose marked calls have the dtypes of the recipe."""
  try:
    with lowering(recipe):
      return interpreter.record(fun, args, kwargs)
  except NotImplementedError as error:
    if "float32" in str(error):
      error.add_note(
        "autocast records a function in float32. Mark a kernel that refuses "
        "it: ols.cast_inputs(jax.nn.dot_product_attention)(...); see "
        "docs/guides/fused_attention.md."
      )
    raise


def lowering(
  recipe: levels.Recipe,
) -> contextlib.AbstractContextManager[object]:
  """Lowers the marked functions that are called inside."""
  return _around(recipe.dtypes_of_marked)


def _convert(tree: _T, dtype: np.dtype, to: np.dtype) -> _T:
  """Returns a tree whose arrays of one dtype are in another."""
  converted: _T = jax.tree.map(
    lambda x: lax.convert_element_type(x, to) if _dtype_of(x) == dtype else x,
    tree,
    is_leaf=_is_nnx,
  )
  return converted


def _dtype_of(x: object) -> np.dtype | None:
  """Returns the dtype that JAX gives an array, or None for anything else."""
  if not isinstance(x, jax.Array | np.ndarray):
    return None
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return jax.dtypes.canonicalize_dtype(x.dtype) if is_float else None


def _is_nnx(x: object) -> bool:
  """Returns whether this is an object of NNX; a copy would lose its changes."""
  return any(kind.__module__.startswith("flax.nnx") for kind in type(x).__mro__)


def _can_trace(function: Callable[[], object]) -> bool:
  """Returns whether a function can be traced, in the dtype that it gets."""
  try:
    jax.eval_shape(function)
  except Exception:  # A kernel may refuse a dtype in any way.
    return False
  return True
