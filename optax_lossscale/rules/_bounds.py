"""The arguments that these rules have in common: bounds of S, bits, a dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments


def check_bounds(**scales: Any) -> dict[str, float]:
  """Returns loss scales as floats, which must come in increasing order."""
  checked = {
    name: arguments.check_scale(name, value) for name, value in scales.items()
  }
  if sorted(checked.values()) != list(checked.values()):
    names = [f"`{name}`" for name in checked]
    got = ", ".join(f"`{name}`={value!r}" for name, value in checked.items())
    raise ValueError(
      f"{' must not be above '.join(names)}, got {got}."
      if len(names) == 2
      else f"{names[1]} must lie between {names[0]} and {names[2]}, got {got}."
    )
  return checked


def check_bits(name: str, value: Any) -> int:
  """Returns `value` as an int from 0 to 126."""
  bits = arguments.check_integer(name, value, unit="bits")
  if not 0 <= bits <= 126:
    raise ValueError(f"`{name}` must be between 0 and 126 bits, got {value!r}.")
  return bits


def check_dtype(dtype: Any) -> Any:
  """Returns a floating dtype."""
  found, name = arguments.read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"`dtype` must be a floating-point dtype such as jnp.float16, got {name}."
    )
  return found


def largest(dtype: Any) -> float:
  """Returns the largest finite value of a floating dtype."""
  return float(jnp.finfo(dtype).max)


def clip(
  loss_scale: jax.Array, min_scale: float, max_scale: float
) -> jax.Array:
  """Returns S between its bounds, float32[]."""
  return jnp.clip(loss_scale, np.float32(min_scale), np.float32(max_scale))


def at_floor(
  loss_scale: jax.Array, min_scale: float, overflow: jax.Array | bool
) -> jax.Array:
  """Returns bool[]: an overflow with S at its floor, or below it."""
  return jnp.asarray(overflow, bool) & (loss_scale <= np.float32(min_scale))
