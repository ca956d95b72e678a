"""Policies: which dtype parameters, computation and output have."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale import _arguments
from optax_lossscale import _leaves
from optax_lossscale import jaxpr
from optax_lossscale.jaxpr import _dtypes
from optax_lossscale.jaxpr import _record
from optax_lossscale.precision import _levels

_LOW = ("float16", "bfloat16")
FIELDS = ("param_dtype", "compute_dtype", "output_dtype")


@dataclasses.dataclass(frozen=True)
class Policy:
  """Which dtype parameters, computation and output have.

  So one value, which a configuration can hold as a string, says what otherwise
  is casts in many places of a program. `get_policy` makes it from a name.

  Casts are for real floating arrays: those of JAX and NumPy, and
  `jax.ShapeDtypeStruct`. All else comes back as it is: integers, bools, complex
  numbers, random keys, float0, None, Python's numbers, strings, and the leaves
  of Flax's `_overwrite_with_gradient` collection, whose dtypes are a part of
  FP8.

  Attributes:
    param_dtype: of the parameters between the steps; a dtype, or a name of one.
      None, here and below, stands for the dtype that a value has. Float64 needs
      `jax_enable_x64` when something is cast.
    compute_dtype: in which a function computes: all of it, or with a `level`
      what that lowers.
    output_dtype: of what a function returns.
    level: None, or a level of `autocast`: "O0", "O1", "O2", "O3", "auto", "OD".
      At all but "O0" the compute dtype is float16 or bfloat16.

  Raises:
    TypeError: if a dtype is none, or not a floating-point one; from
      `autocast`, if `fun` is no function.
    ValueError: if there is no such level, or the compute dtype is none that a
      level lowers to; from the casts, if float64 is not enabled; when what
      `autocast` returned is called, if `fun` changes an object in place.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.Policy(jnp.float32, jnp.float16, jnp.float32)
    >>> print(policy)
    params=float32,compute=float16,output=float32
    >>> policy.cast_to_compute({"step": 3, "weights": jnp.ones(2)})
    {'step': 3, 'weights': Array([1., 1.], dtype=float16)}
    >>> policy.autocast(jnp.dot)(jnp.ones(2), jnp.full(2, 0.1))
    Array(0.19995117, dtype=float32)

  References:
    jmp's policies, https://github.com/google-deepmind/jmp; the level is new.
  """

  param_dtype: Any
  compute_dtype: Any
  output_dtype: Any
  level: str | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self) -> None:
    for name in FIELDS:
      object.__setattr__(self, name, _check_dtype(name, getattr(self, name)))
    if self.level is None:
      return
    _levels.find_level(self.level)
    if self.level != "O0" and _name(self.compute_dtype) not in _LOW:
      raise ValueError(
        "`compute_dtype` must be float16 or bfloat16 at level "
        f"{self.level!r}, got {_name(self.compute_dtype)}; take one of these, "
        "or no level."
      )

  def cast_to_param(self, tree: Any) -> Any:
    """Returns `tree` in the dtype of the parameters.

    Args:
      tree: any; its real floating arrays are cast, of any shape.
    """
    return _cast("param_dtype", self.param_dtype, tree)

  def cast_to_compute(self, tree: Any) -> Any:
    """Returns `tree` in the dtype of the computation.

    Args:
      tree: any; its real floating arrays are cast, of any shape.
    """
    return _cast("compute_dtype", self.compute_dtype, tree)

  def cast_to_output(self, tree: Any) -> Any:
    """Returns `tree` in the dtype of the output.

    Args:
      tree: any; its real floating arrays are cast, of any shape.
    """
    return _cast("output_dtype", self.output_dtype, tree)

  def with_output_dtype(self, output_dtype: DTypeLike | None) -> "Policy":
    """Returns the policy with another dtype of the output.

    Args:
      output_dtype: a floating-point dtype, or None for the one there is.
    """
    return dataclasses.replace(self, output_dtype=output_dtype)

  def autocast(self, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` as the policy has it.

    With a level, that is `autocast` at this level, with the compute dtype as
    its low precision. Without one, the arguments are cast to the compute dtype,
    and `fun` computes in what comes of that: all of them, statistics of a batch
    norm and float32 labels as well, but not what it closes over. In both cases
    what `fun` returns is cast to the output dtype.

    Args:
      fun: a loss function, `model.apply`; with a level it must be one that JAX
        can trace.
    """
    _dtypes.check_function(fun)

    if self.level in (None, "O0"):
      in_mixed_precision = fun
    else:
      in_mixed_precision = jaxpr.autocast(
        fun, self.level, dtype=self.compute_dtype
      )

    @functools.wraps(fun)
    def fun_in_policy(*args: Any, **kwargs: Any) -> Any:
      if self.level is not None or self.compute_dtype is None:
        return self.cast_to_output(in_mixed_precision(*args, **kwargs))
      # A copy of `fun`'s own: what it changes there, the caller does not see.
      args, kwargs = arguments = self.cast_to_compute((args, kwargs))
      before = jax.tree.leaves(arguments)
      output = fun(*args, **kwargs)
      _record.check_unchanged(before, arguments)
      return self.cast_to_output(output)

    return fun_in_policy

  def __str__(self) -> str:
    text = (
      f"params={_name(self.param_dtype)},compute={_name(self.compute_dtype)},"
      f"output={_name(self.output_dtype)}"
    )
    return text if self.level is None else f"{text},level={self.level}"


def _name(dtype: Any) -> str:
  return "none" if dtype is None else str(dtype.name)


def _check_dtype(name: str, dtype: Any) -> Any:
  """Returns a dtype, or None."""
  if dtype is None:
    return None
  found, shown = _arguments.read_dtype(dtype)
  if found is None:
    shown = repr(dtype) if isinstance(dtype, str) else shown
    raise TypeError(
      f"`{name}` must be a floating-point dtype or its full name, such as "
      f"'float16', or None for the dtype that there is, got {shown}."
    )
  return found


def _cast(name: str, dtype: Any, tree: Any) -> Any:
  """Returns `tree` with its real floating arrays in `dtype`.

  Args:
    name: of the dtype, for the error.
    dtype: None for `tree` itself.
    tree: any.

  Raises:
    ValueError: if the dtype is float64, and JAX has it not enabled.
  """
  if dtype is None:
    return tree
  _arguments.check_enabled(name, dtype)

  def cast_leaf(is_gradient: bool, x: Any) -> Any:
    is_array = isinstance(
      x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    )
    if not (is_gradient and is_array and jnp.issubdtype(x.dtype, jnp.floating)):
      return x
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(dtype=dtype, weak_type=False)
    if isinstance(x, jax.Array):
      return jnp.asarray(x, dtype)
    # What is too large becomes inf, as it does in JAX, which warns nobody.
    with np.errstate(over="ignore"):
      return x.astype(dtype)

  return jax.tree.map(cast_leaf, _leaves.resolve_mask(None, tree), tree)
