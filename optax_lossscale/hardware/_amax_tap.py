"""The largest cotangent at chosen points of a model."""

import jax

from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import checks
from optax_lossscale._step import findings
from optax_lossscale.hardware import _tap


def amax_tap(x: Tree, amax: jax.Array) -> Tree:
  """Returns `x` unchanged and measures the cotangents that pass this point.

  A rule bases S on the largest gradient of a parameter. The gradient of an
  activation may be larger and overflow first, unseen by the rule if a small
  layer scale or a mean lies between. With a tap, the gradient with respect to
  `amax` is the largest magnitude of a cotangent at this point. Pass it to the
  wrapper: `tx.update(..., amax=found)`. The tap reads each cotangent once more.
  A function with a tap inside does not support forward-mode differentiation.

  JAX adds up gradients. If taps, iterations of a scan, elements of a vmap or
  devices of a `shard_map` share one `amax`, the result is the sum of their
  values, so S errs on the safe side; `accumulate` returns the mean over
  micro-batches, which may be less than the largest. For separate values, pass
  separate zeros: a dict entry for each tap, an element of an array in `xs` for
  each scan iteration, or `make_varying(amax, axis_name)` for each device (of
  these, `loss_scaling(..., axis_name=)` takes the largest).

  Args:
    x: an array or a pytree, for example a layer's output. Leaves that are not
      floating or complex are not measured.
    amax: float32[], a zero in an argument of the loss function.

  Returns:
    `x`. The gradient with respect to `amax` is float32[], the largest magnitude
    in all the cotangents of `x`: inf if one is infinite, NaN if one is NaN. For
    a complex cotangent, the larger of its parts counts.

  Raises:
    TypeError: if `amax` is not float32[].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def loss_fn(params, amax):
    ...   hidden = ols.hardware.amax_tap(params * 2.0**-10, amax)
    ...   return jnp.sum(hidden * 64.0)
    >>> rule = ols.rules.HeadroomLossScale(headroom=2)
    >>> tx = ols.loss_scaling(optax.sgd(1.0), rule)
    >>> params = jnp.ones(2)
    >>> state = tx.init(params)
    >>> value_and_grad = ols.scaled_value_and_grad(loss_fn, state, (0, 1))
    >>> _, (scaled_grads, found) = value_and_grad(params, jnp.float32(0))
    >>> print(scaled_grads, found)
    [0.0625 0.0625] 64.0
    >>> _, state = tx.update(scaled_grads, state, params, amax=found)
    >>> print(ols.get_loss_scale(state))
    128.0
  """
  _tap.check_measured("amax", amax)
  check = checks.nonfinite()
  return _tap.tap(x, amax, lambda found: findings.examine(check, found).amax)
