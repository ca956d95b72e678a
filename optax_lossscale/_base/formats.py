"""Floating dtypes: which are narrow, and the limits of each."""

from collections.abc import Mapping
import re

import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

FLOAT32 = np.dtype(np.float32)

# The low precisions of `autocast` and the policies.
LOW = ("float16", "bfloat16")
# The formats of a product's operands in float8, each with the format
# of its gradients, which has more range.
FLOAT8: Mapping[str, np.dtype] = {
  "float8_e4m3fn": np.dtype(jnp.float8_e5m2),
  "float8_e4m3fnuz": np.dtype(jnp.float8_e5m2fnuz),
}
# All that JAX has, except for float8_e8m0fnu, which has no sign.
SIGNED_FLOAT8 = tuple(x for x in dir(jnp) if re.match(r"float8_(?!e8m0)", x))
# The choices of the command line.
NARROW = (*LOW, "float8_e4m3fn", "float8_e5m2")


def is_low(dtype: DTypeLike | None) -> bool:
  """Returns whether a floating dtype is below float32; False for None."""
  return dtype is not None and np.dtype(dtype).itemsize < 4


def is_float8(dtype: DTypeLike) -> bool:
  """Returns whether a floating dtype has 8 bits."""
  return int(jnp.finfo(dtype).bits) == 8


def carrier(dtype: DTypeLike) -> DTypeLike:
  """Returns the dtype in which to read a real dtype's bits."""
  # The 8-bit formats differ in how they encode NaN; float32 can hold them all.
  return jnp.float32 if jnp.finfo(dtype).bits < 16 else dtype


def part_dtype(aval: object) -> np.dtype | None:
  """Returns the dtype of a floating value or its complex parts; else None."""
  dtype = getattr(aval, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
    return None
  return np.dtype(jnp.finfo(dtype).dtype)


def has_inf(dtype: DTypeLike) -> bool:
  """Returns whether a floating dtype can hold inf."""
  return bool(np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)))


def largest(dtype: DTypeLike) -> float:
  """Returns the largest finite number of a dtype."""
  return float(jnp.finfo(dtype).max)


def limit(own: DTypeLike, dtype: DTypeLike | None) -> float:
  """Returns the largest value that is finite in `own` and, if set, `dtype`."""
  # An array narrower than the computation overflows at its own limit.
  return min(largest(x) for x in (own, dtype) if x is not None)


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
  """Returns whether a dtype has all numbers of another one of its kind."""
  if narrow.kind == "b":
    return True
  both = wide, narrow
  if all(jnp.issubdtype(x, jnp.floating) for x in both):
    a, b = map(jnp.finfo, both)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp
  if all(jnp.issubdtype(x, jnp.integer) for x in both):
    c, d = map(jnp.iinfo, both)
    return int(c.min) <= int(d.min) and int(c.max) >= int(d.max)
  return False
