"""What the last step was like, for any logger."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _state


def loss_scale_metrics(
  opt_state: Any, *, path: str | None = None
) -> dict[str, jax.Array]:
  """Returns the loss scale and what happened on the last step.

  Usable inside jit: every value is a scalar array, and nothing is printed or
  fetched.

  Args:
    opt_state: an optimizer's state that holds `loss_scaling`, at any depth.
    path: which one, if it holds several. See `get_loss_scale`.

  Returns:
    A dict of `loss_scale` and `inv_scale` (float32[], for the next step), the
    last step's `amax` (float32[]), `overflow`, `nan`, `skipped`, `stalled`
    (bool[]), and the counts `applied_steps`, `skipped_steps` (int32[]). Each is
    explained at `LossScalingState`.

  Raises:
    ValueError: if `opt_state` holds no scale, or several and no path.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(8.0))
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.array([jnp.inf, 0.0]), state)
    >>> for name, value in ols.loss_scale_metrics(state).items():
    ...   print(name, value)
    loss_scale 4.0
    inv_scale 0.25
    amax inf
    overflow True
    nan False
    skipped True
    stalled False
    applied_steps 0
    skipped_steps 1
  """
  state = _state.find_state(opt_state, path)
  return {
    "loss_scale": _state.get_loss_scale(state),
    "inv_scale": state.inv_scale,
    # As arrays, also where a framework keeps its own variables in the state.
    "amax": jnp.asarray(state.amax),
    "overflow": jnp.asarray(state.overflow),
    "nan": jnp.asarray(state.nan),
    "skipped": jnp.asarray(state.skipped),
    "stalled": jnp.asarray(state.stalled),
    "applied_steps": jnp.asarray(state.applied_steps),
    "skipped_steps": jnp.asarray(state.skipped_steps),
  }
