"""Prints the loss scale from inside jit."""

import functools
import math

from chex import ArrayTree
import jax
from jax import lax
import optax

from optax_lossscale._base import arguments
from optax_lossscale._step import metrics as _metrics


def print_loss_scale(
  opt_state: optax.OptState, every: int = 100, *, path: str | None = None
) -> None:
  """Prints one line about the loss scale at regular intervals.

  It works inside jit and does not block: the line appears once the device has
  finished the step. With several devices or processes, only one prints.

  Args:
    opt_state: the state that `update` returned.
    every: prints a line every so many steps, counting skipped steps.
    path: which scale, if `opt_state` holds several. See `get_loss_scale`.

  Raises:
    TypeError: if `every` is not an integer.
    ValueError: if `every` is below 1; if `opt_state` holds no scale, or several
      and no path is given.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(8.0))
    >>> _, state = tx.update(jnp.array([jnp.inf]), tx.init(jnp.zeros(1)))
    >>> ols.instruments.print_loss_scale(state, every=1); jax.effects_barrier()
    step 1: overflow, loss scale now 4, 0 applied, 1 skipped (100.0 %)

  References:
    "Printing the loss scale" in Ascend's guide to its NPULossScaleOptimizer.
  """
  every = arguments.check_count("every", every)
  metrics = _metrics.loss_scale_metrics(opt_state, path=path)
  step = metrics["applied_steps"] + metrics["skipped_steps"]
  is_due = (step > 0) & (step % every == 0)
  for axis in sorted(jax.sharding.get_abstract_mesh().manual_axes):
    is_due &= lax.axis_index(axis) == 0
  # `is_due` is passed on as well, since under vmap both branches run.
  show = functools.partial(jax.debug.callback, _print, is_due, **metrics)
  lax.cond(is_due, show, lambda: None)


def _print(is_due: jax.Array, **metrics: jax.Array) -> None:
  if jax.process_index() != 0 or not is_due:
    return
  applied = int(metrics["applied_steps"])
  skipped = int(metrics["skipped_steps"])
  outcome = "skipped by `skip`" if metrics["skipped"] else "clean"
  if metrics["overflow"]:
    outcome = "overflow with NaN" if metrics["nan"] else "overflow"
  headroom = ""
  if math.isfinite(metrics["headroom"]):
    headroom = f", headroom {float(metrics['headroom']):.1f} bits"
  print(
    f"step {applied + skipped}: {outcome}, loss scale now "
    f"{float(metrics['loss_scale']):.9g}{headroom}, {applied} applied, "
    f"{skipped} skipped ({100 * skipped / (applied + skipped):.1f} %)",
    flush=True,
  )
