"""Whether a step or a loss has reached a number, exactly."""

import fractions
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown


def check_step(step: Any) -> Any:
  """Returns `step` as an int or an integer array."""
  if not isinstance(step, jax.Array):
    return arguments.check_steps("step", step)
  if step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
    raise TypeError(
      "`step` must be an integer number of steps, got "
      f"{step.dtype}{list(step.shape)}."
    )
  return step


def check_loss(loss: Any) -> Any:
  """Returns `loss` as a NumPy or JAX array, float32 or float64, exactly."""
  rule = "`loss` must be a real scalar"
  if isinstance(loss, numbers.Real) and not isinstance(loss, bool):
    loss = arguments.as_finite("loss", loss)
    # Not in JAX, which would round it to float32.
    loss = np.asarray(loss if isinstance(loss, np.generic) else float(loss))
  if not isinstance(loss, (jax.Array, np.ndarray, np.generic)):
    raise TypeError(f"{rule}, got {shown(loss)} of type {type(loss).__name__}.")
  is_real = any(
    jnp.issubdtype(loss.dtype, kind) for kind in (jnp.integer, jnp.floating)
  )
  if loss.shape != () or not is_real:
    raise TypeError(f"{rule}, got {loss.dtype}{list(loss.shape)}.")
  is_double = loss.dtype == jnp.float64
  return loss if is_double else loss.astype(jnp.float32)


def is_at_least(steps: Any, least: int) -> Any:
  """Returns bool[], whether that many steps or more are finished."""
  if not isinstance(steps, jax.Array):
    return np.bool_(steps >= least)
  if least > jnp.iinfo(steps.dtype).max:
    return np.bool_(False)
  # In the dtype of the steps, as JAX takes a Python number for an int32.
  return steps >= np.asarray(least, steps.dtype)


def is_at_most(loss: Any, limit: fractions.Fraction) -> Any:
  """Returns bool[], whether a loss is there and not above a limit."""
  return (loss != 0) & (loss <= _round_down(limit, loss.dtype))


def as_count(steps: Any) -> jax.Array:
  """Returns int32[]; what is above its largest value becomes that."""
  largest = arguments.LARGEST_COUNT
  if not isinstance(steps, jax.Array):
    return jnp.full((), min(steps, largest), jnp.int32)
  if jnp.iinfo(steps.dtype).max > largest:
    steps = jnp.minimum(steps, jnp.asarray(largest, steps.dtype))
  return jnp.asarray(steps, jnp.int32)


def _round_down(limit: fractions.Fraction, dtype: Any) -> Any:
  """Returns the largest number of a dtype that is not above a positive limit.

  A number is at most the limit exactly if it is at most this one.
  """
  largest = jnp.finfo(dtype).max
  if limit >= fractions.Fraction(float(largest)):
    return largest
  nearest = np.dtype(dtype).type(float(limit))
  if fractions.Fraction(float(nearest)) > limit:
    return np.nextafter(nearest, nearest.dtype.type(0))
  return nearest
