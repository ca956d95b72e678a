"""The parts of a step that a caller may write by hand."""

from chex import ArrayTree
import jax
import optax

from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import backward
from optax_lossscale._step import provenance
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states


def scale_loss(
  loss: jax.Array, opt_state: optax.OptState, *, path: str | None = None
) -> jax.Array:
  """Returns S times the loss, in float32 or wider.

  Use it to write the step by hand where `scaled_value_and_grad` does not fit.
  Differentiate the scaled loss, and pass the gradients to `update`. On hardware
  in saturation mode use a float32 loss, since an S above 65504, as the
  cotangent of a float16 loss, would be clipped.

  Args:
    loss: a floating-point array, usually a scalar.
    opt_state: an optimizer state that holds a loss scale, or the scale itself.
    path: which scale, if `opt_state` holds several. See `get_loss_scale`.

  Returns:
    An array like `loss`, but float32 if `loss` is narrower.

  Raises:
    TypeError: if `loss` is not floating point.
    ValueError: if `opt_state` holds no scale, or several without a `path`, or
      if a function being traced closes over it, so that S would never change.

  Warns:
    WiringWarning: as `scaled_value_and_grad` does.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> print(ols.scale_loss(jnp.float16(2.0), 2.0**16))
    131072.0
  """
  backward.check_float("`loss`", loss)
  loss_scale = states.scale_in_use(opt_state, path)
  requirements.check_surroundings(opt_state)
  scaled_loss = backward.times(loss, loss_scale)
  provenance.note(scaled_loss, "loss", None)
  return scaled_loss


def unscale(
  scaled_grads: Tree,
  opt_state: optax.OptState,
  *,
  path: str | None = None,
) -> Tree:
  """Returns the gradients divided by S, in float32 or wider.

  Use it if you need true gradients outside the wrapper, for example to log
  their norm before `update`, which itself takes scaled gradients.

  Args:
    scaled_grads: a pytree of arrays. Integers, random keys and the leaves
      of Flax's `_overwrite_with_gradient` collection are returned unchanged.
    opt_state: an optimizer state that holds a loss scale, or the scale itself.
    path: which scale, if `opt_state` holds several. See `get_loss_scale`.

  Returns:
    A pytree like `scaled_grads`, with narrower leaves widened to float32.

  Raises:
    ValueError: if `opt_state` holds no scale, or several without a `path`.

  Warns:
    WiringWarning: if the gradients were scaled by a different S. Pass the
      `opt_state` from before `update`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> print(ols.unscale(jnp.array([2.0, 4.0], jnp.float16), 2.0**25))
    [5.9604645e-08 1.1920929e-07]
  """
  loss_scale = states.scale_in_use(opt_state, path)
  provenance.check_unscale(scaled_grads, loss_scale)
  scaled_grads = leaves.as_arrays(scaled_grads)
  is_gradient = leaves.are_gradients(scaled_grads)
  gradients = leaves.unscale(
    leaves.leave_out(is_gradient, scaled_grads), loss_scale
  )
  provenance.note(gradients, "unscaled", None)
  return leaves.merge(is_gradient, gradients, scaled_grads)


def select_on_skip(
  opt_state: optax.OptState,
  new: Tree,
  old: Tree,
  *,
  path: str | None = None,
) -> Tree:
  """Returns `old` if the last step was skipped, else `new`.

  Use it for values that a step changes outside the optimizer, such as batch
  statistics, a moving average of the parameters or a random key.

  Args:
    opt_state: the optimizer's state after `update`.
    new: a pytree of arrays, after the step.
    old: the same pytree, before the step. The result has its dtypes.
    path: which state, if `opt_state` holds several. See `get_loss_scale`.

  Returns:
    A pytree like `old`.

  Raises:
    ValueError: if `opt_state` holds no `LossScalingState`, or several without a
      `path`, or a stack of them outside of `jax.vmap`; or if `new` and `old`
      differ in structure.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale())
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.array([jnp.inf, 0.0]), state)
    >>> print(ols.select_on_skip(state, new=8, old=7))
    7
  """
  leaves.check_structure(
    "`new` and `old` must have the same structure", new, old
  )
  return skipping.select(states.state_in_use(opt_state, path).skipped, old, new)
