"""Which dtypes' operations are looked at."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arguments
from optax_lossscale import _checks


def check_dtypes(dtypes: Any) -> frozenset[Any]:
  """Returns `dtypes` as a set.

  Args:
    dtypes: a floating dtype, or several.

  Raises:
    TypeError: if one of them is none, or there are none at all.
  """
  several = (
    dtypes if isinstance(dtypes, (tuple, list, set, frozenset)) else (dtypes,)
  )
  if not several:
    raise TypeError("`dtypes` must hold at least one floating dtype, got none.")
  return frozenset(_check_dtype(dtype) for dtype in several)


def part_dtype(aval: Any) -> Any:
  """Returns the real dtype of which a value's parts are, None for no float.

  Args:
    aval: the type of any value, or the value.
  """
  dtype = getattr(aval, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
    return None
  return np.dtype(jnp.finfo(dtype).dtype)


def has_inf(dtype: Any) -> bool:
  """Returns whether a floating dtype can hold inf.

  Args:
    dtype: most have inf; float8_e4m3fn and others have NaN only.
  """
  return bool(np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)))


def _check_dtype(dtype: Any) -> Any:
  found, name = _arguments.read_dtype(dtype)
  # float8_e8m0fnu has powers of two, and neither a sign nor 0.
  if (
    found is None
    or jnp.finfo(found).bits < 8
    or float(jnp.finfo(found).min) >= 0
  ):
    remedy = "; pass it as check=" if isinstance(dtype, _checks.Check) else ""
    raise TypeError(
      "`dtypes` must hold signed floating dtypes of 8 bits at least, such as "
      f"jnp.float16, got {name}{remedy}."
    )
  return found


def check_function(fun: Any) -> None:
  """Raises if what was passed as `fun` is no function.

  Args:
    fun: what the caller passed.

  Raises:
    TypeError: if it cannot be called.
  """
  if not callable(fun):
    raise TypeError(
      f"`fun` must be a function, got {type(fun).__name__}; pass the function "
      "itself, and its arguments to what is returned."
    )
