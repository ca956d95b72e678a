"""LogMax as OpenSeq2Seq has it, for comparison: its defects are its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Where S is cut off. `log_max` is not used there.
_CUTOFF = 16.0


class LogMaxOriginalState(NamedTuple):
  """State of `LogMaxLossScale(original=True)`, with the names there.

  Attributes:
    loss_scale: float32[], the loss scale S.
    x_hat: float32[], weighted sum of x = log2(unscaled amax), by `beta1`.
    slow_x_hat: float32[], the same by `beta2`.
    xsquared_hat: float32[], that of x**2.
    b1_correction: float32[], `beta1` to the number of steps.
    b2_correction: float32[], `beta2` to the number of steps.
  """

  loss_scale: jax.Array
  x_hat: jax.Array
  slow_x_hat: jax.Array
  xsquared_hat: jax.Array
  b1_correction: jax.Array
  b2_correction: jax.Array

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S."""
    return 1 / self.loss_scale


def init() -> LogMaxOriginalState:
  """Returns the state before the first step."""
  zero, one = (jnp.full((), x, jnp.float32) for x in (0, 1))
  return LogMaxOriginalState(one, zero, zero, zero, one, one)


def update(
  state: LogMaxOriginalState,
  amax: jax.Array,
  *,
  betas: tuple[float, float],
  log_max: float,
  overflow_std_dev: float,
) -> LogMaxOriginalState:
  """Returns the state after a step, with S where its bounds do not hold yet."""
  two = np.float32(2)
  unscaled = amax / state.loss_scale
  x = jnp.where(
    jnp.isfinite(unscaled),
    jnp.log(unscaled) / np.log(two),
    jnp.power(two, np.float32(log_max)),
  )
  beta1, beta2 = map(np.float32, betas)
  rest1, rest2 = (np.float32(1 - beta) for beta in betas)
  state = state._replace(
    x_hat=beta1 * state.x_hat + rest1 * x,
    slow_x_hat=beta2 * state.slow_x_hat + rest2 * x,
    xsquared_hat=beta2 * state.xsquared_hat + rest2 * (x * x),
    b1_correction=state.b1_correction * beta1,
    b2_correction=state.b2_correction * beta2,
  )
  mean = state.x_hat / (1 - state.b1_correction)
  slow_mean = state.slow_x_hat / (1 - state.b2_correction)
  square = state.xsquared_hat / (1 - state.b2_correction)
  deviation = jnp.sqrt(jnp.maximum(square - slow_mean * slow_mean, 0))
  cutoff = deviation * np.float32(overflow_std_dev) + mean
  return state._replace(loss_scale=jnp.power(two, np.float32(_CUTOFF) - cutoff))
