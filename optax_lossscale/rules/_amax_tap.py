"""The largest cotangent at chosen points of a model."""

from typing import Any

import jax

from optax_lossscale._step import checks
from optax_lossscale._step import findings
from optax_lossscale._step import tap


def amax_tap(x: Any, amax: jax.Array) -> Any:
  """Returns `x`, and lets `amax` see the cotangents that pass here.

  A rule moves S by the largest gradient of a parameter, but the gradient of an
  activation may be larger, and overflow first: behind a small layer scale, or a
  mean, nothing of it shows. Here its largest magnitude is the gradient with
  respect to `amax`, for the wrapper: `tx.update(..., amax=found)`. It costs one
  look at each cotangent. With a tap inside, a function has no forward mode.

  JAX adds up gradients. Where one `amax` is given to several taps, or stands
  inside of a scan or a vmap, or is shared by the devices of a `shard_map`, what
  comes back is the sum of what each saw: no less than the largest, so S errs to
  the safe side, and a sum beyond the check's limit is an overflow.
  `accumulated_value_and_grad` returns the mean of what each micro-batch saw,
  which may be less. To have each alone give each its own: an entry of a dict
  for each tap, an element of an array in `xs` for each iteration of a scan,
  `make_varying(amax, axis_name)` for each device, where `loss_scaling(...,
  axis_name=)` takes the largest.

  Args:
    x: an array or a pytree, for example a layer's output. Leaves that are not
      floating or complex pass.
    amax: float32[], zero; an argument of the loss function, or an entry of one.

  Returns:
    `x`. The gradient with respect to `amax` is float32[], the largest magnitude
    in all the cotangents of `x`: inf if one is infinite, NaN if one is NaN. Of
    a complex number it is that of the larger part.

  Raises:
    TypeError: if `amax` is not float32[].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def loss_fn(params, amax):
    ...   hidden = ols.rules.amax_tap(params * 2.0**-10, amax)
    ...   return jnp.sum(hidden * 64.0)
    >>> rule = ols.rules.HeadroomLossScale(headroom=2)
    >>> tx = ols.loss_scaling(optax.sgd(1.0), rule)
    >>> params = jnp.ones(2)
    >>> state = tx.init(params)
    >>> value_and_grad = ols.scaled_value_and_grad(loss_fn, state, (0, 1))
    >>> _, (grads, found) = value_and_grad(params, jnp.float32(0))
    >>> print(grads, found)
    [0.0625 0.0625] 64.0
    >>> _, state = tx.update(grads, state, params, amax=found)
    >>> print(ols.get_loss_scale(state))
    128.0
  """
  tap.check_measured("amax", amax)
  check = checks.nonfinite()
  return tap.tap(x, amax, lambda found: findings.examine(check, found).amax)
