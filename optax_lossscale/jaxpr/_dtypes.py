"""Which dtypes' operations are looked at."""

from typing import Any

import jax.numpy as jnp
import numpy as np


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
  rule = "`dtypes` must hold signed floating dtypes of 8 bits at least"
  try:
    checked = jnp.dtype(dtype)
  except TypeError as error:
    raise TypeError(f"{rule}, such as jnp.float16, got {dtype!r}.") from error
  if (
    dtype is None
    or not jnp.issubdtype(checked, jnp.floating)
    or not 8 <= jnp.finfo(checked).bits <= 64
    # float8_e8m0fnu: powers of two, no zero.
    or float(jnp.finfo(checked).min) >= 0
  ):
    raise TypeError(f"{rule}, such as jnp.float16, got {dtype!r}.")
  return checked
