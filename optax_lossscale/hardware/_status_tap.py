"""A status register for chosen points of a model."""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import bits
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import checks
from optax_lossscale._step import requirements
from optax_lossscale.hardware import _tap


def status_tap(
  x: Tree,
  status: jax.Array,
  *,
  check: checks.Check = checks.saturated(),
) -> Tree:
  """Returns `x` unchanged, and counts the overflows in its cotangents.

  An overflow in the middle of the backward pass may not show in the gradients,
  because a small layer scale or a mean over devices can hide it. A tap counts
  the overflows at its point of the model. The count is the gradient with
  respect to `status`, so JAX adds it up over all taps, the steps of a scan and
  the devices. `float_status` sees every operation, and costs more. A function
  with a tap inside does not support forward mode.

  Under `shard_map` with its defaults, the count is the sum over the devices.
  For a count per device, make `status` vary with `make_varying`. If `x` is the
  same on all devices, JAX sums its cotangents before they reach the tap.

  Args:
    x: an array or a pytree, for example a layer's output. Leaves that are not
      floating or complex pass through.
    status: float32[], an argument of the loss function whose value is 0.
    check: which cotangents count: `saturated(dtype)`, which also catches inf
      and NaN and so works on any hardware, or `nonfinite(dtype)`. Pass the
      computation's dtype, or omit it to use the dtype of each cotangent.

  Returns:
    `x`, unchanged.

  Raises:
    TypeError: if `status` is not float32[], or `check` is not a check for one
      dtype.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss_fn(w, x, status):
    ...   hidden = ols.hardware.status_tap(w * x, status)
    ...   return jnp.sum(hidden.astype(jnp.float32)) * 2.0**16
    >>> w, x = jnp.float16([1.0, 2.0]), jnp.float16(2.0**-8)
    >>> grad = jax.grad(loss_fn, argnums=(0, 2))
    >>> gradient, overflows = grad(w, x, jnp.float32(0))
    >>> print(gradient, overflows)
    [inf inf] 2.0
  """
  requirements.check_check(check)
  if not (check.dtype is None or isinstance(check.dtype, np.dtype)):
    raise TypeError(
      "`check` must be for one dtype, or without one for that of each "
      f"cotangent, got {check!r}; give the taps of other layers another."
    )
  _tap.check_measured("status", status)
  count = functools.partial(_count, check)
  # Each leaf has its own tap. If a leaf that devices share were in one tap with
  # a varying leaf, JAX would sum the shared leaf's cotangent over the devices.
  return jax.tree.map(lambda leaf: _tap.tap(leaf, status, count), x)


def _count(check: checks.Check, cotangents: Sequence[jax.Array]) -> jax.Array:
  """Returns the number of elements that overflowed, as float32[]."""
  (cotangent,) = cotangents
  limit = bits.limit(jnp.finfo(cotangent.dtype).dtype, check.dtype)
  where = bits.reached(cotangent, limit, inclusive=check.saturating)
  return jnp.sum(where, dtype=jnp.float32)
