"""Metrics of the last step, for any logger."""

from chex import ArrayTree
import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import bits
from optax_lossscale._step import states


def loss_scale_metrics(
  opt_state: optax.OptState, *, path: str | None = None
) -> dict[str, jax.Array]:
  """Returns the loss scale and the metrics of the last step.

  It works inside jit: every value is a scalar array, and nothing is printed or
  copied to the host.

  Args:
    opt_state: an optimizer state that holds a loss scale at any depth.
    path: which scale, if `opt_state` holds several. See `get_loss_scale`.

  Returns:
    A dict of `loss_scale`, `log2_scale`, `inv_scale` (float32[], for the next
    step); the last step's `overflow`, `nan`, `inf`, `skipped`, `stalled`
    (bool[]), `amax` and `headroom` (float32[]); the counts `applied_steps`,
    `skipped_steps`, `requested_skips`, `consecutive_skips` (int32[]); and
    `skip_rate` (float32[]), the share of all steps that were skipped. A step
    that is `skipped` without `overflow` was skipped by `skip=`. `inf` is True
    if a gradient was infinite and none was NaN. See `LastStep`, `StepCounts`
    and the `headroom` of `LossScalingState` for the rest.

  Raises:
    ValueError: if `opt_state` holds no scale, or several without a `path`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(8.0))
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.array([4.0, 0.0]), state)
    >>> _, state = tx.update(jnp.array([jnp.inf, 0.0]), state)
    >>> metrics = ols.loss_scale_metrics(state)
    >>> print(*(metrics[x] for x in ("loss_scale", "skipped", "amax")))
    4.0 True inf
  """
  state = states.find_state(opt_state, path)
  loss_scale = states.get_loss_scale(state)
  # Convert to arrays, since the state may hold variables of a framework.
  last, counts = (
    {name: jnp.asarray(value) for name, value in fields._asdict().items()}
    for fields in (state.last_step, state.counts)
  )
  skipped = counts["skipped_steps"].astype(jnp.float32)
  steps = counts["applied_steps"].astype(jnp.float32) + skipped
  return {
    "loss_scale": loss_scale,
    "log2_scale": bits.log2(loss_scale),
    "inv_scale": state.inv_scale,
    "overflow": last["overflow"],
    "nan": last["nan"],
    "inf": jnp.isinf(last["amax"]),
    "skipped": last["skipped"],
    "stalled": last["stalled"],
    "amax": last["amax"],
    "headroom": state.headroom,
    **counts,
    "skip_rate": skipped / jnp.maximum(steps, 1),
  }
