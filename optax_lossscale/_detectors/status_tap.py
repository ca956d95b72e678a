"""A status register for chosen points of a model."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import bits
from optax_lossscale._step import checks
from optax_lossscale._step import requirements
from optax_lossscale._step import tap


def status_tap(
  x: Any,
  status: jax.Array,
  *,
  check: checks.Check = checks.saturated(),  # noqa: B008 - it is frozen.
) -> Any:
  """Returns `x`, and lets `status` see the cotangents that pass here.

  An overflow in the middle of the backward pass need not show in the gradients:
  behind a small layer scale, or a mean over devices, it is small again. At the
  points of a model where this stands the overflow is counted. The count is the
  gradient with respect to `status`, so JAX adds it up over all the points, the
  steps of a scan and the devices. It costs one look at each cotangent;
  `float_status` sees every operation and the forward pass, and costs more. With
  a tap inside, a function has no forward mode.

  Under `shard_map` as it is by default the count is the sum over the devices;
  for each device's own make `status` vary with `make_varying`. Of a value that
  all devices share, JAX sums the cotangents before they pass here.

  Args:
    x: an array or a pytree, for example a layer's output. Leaves that are not
      floating or complex pass.
    status: float32[], zero; an argument of the loss function.
    check: which cotangents count: `saturated(dtype)`, which sees inf and NaN
      as well and so fits any hardware, or `nonfinite(dtype)`; with the
      computation's dtype, or without for that of each cotangent.

  Returns:
    `x`.

  Raises:
    TypeError: if `status` is not float32[], or `check` is not a check for one
      dtype.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss_fn(w, x, status):
    ...   hidden = ols.status_tap(w * x, status)
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
  tap.check_measured("status", status)
  count = functools.partial(_count, check)
  # Leaf by leaf: with another that varies, JAX would sum one that all devices
  # share over the devices.
  return jax.tree.map(lambda leaf: tap.tap(leaf, status, count), x)


def _count(check: checks.Check, cotangents: Sequence[jax.Array]) -> jax.Array:
  """Returns how many elements overflowed, float32[]."""
  (cotangent,) = cotangents
  limit = bits.limit(jnp.finfo(cotangent.dtype).dtype, check.dtype)
  where = bits.reached(cotangent, limit, inclusive=check.saturating)
  return jnp.sum(where, dtype=jnp.float32)
