"""A status register for chosen points of a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._step import checks
from optax_lossscale._step import devices
from optax_lossscale._step import requirements


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
  dtype = getattr(status, "dtype", None)
  if dtype != jnp.float32 or jnp.shape(status) != ():
    got = repr(status) if dtype is None else f"{dtype}{list(status.shape)}"
    raise TypeError(
      "`status` must be float32[], an argument of the loss function such as "
      f"jnp.float32(0), got {got}."
    )

  def tap_leaf(leaf: Any) -> Any:
    return _tap(check, leaf, status) if leaves.is_gradient(leaf) else leaf

  return jax.tree.map(tap_leaf, x)


def _tap(check: checks.Check, x: jax.Array, status: jax.Array) -> jax.Array:
  # Under `shard_map` the count varies as the cotangent does. What `status` is
  # made to vary along here, JAX sums the count over.
  status = devices.make_varying(status, tuple(devices.varying_axes(x)))
  axes_of_status = tuple(devices.varying_axes(status))

  @jax.custom_vjp
  def tap(x: jax.Array, status: jax.Array) -> jax.Array:
    del status
    return x

  def forward(x: jax.Array, status: jax.Array) -> tuple[jax.Array, None]:
    return tap(x, status), None

  def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    own = jnp.finfo(cotangent.dtype).dtype
    where = bits.reached(
      cotangent,
      bits.limit(own, check.dtype),
      inclusive=check.saturating,
    )
    count = jnp.sum(where, dtype=jnp.float32)
    return cotangent, devices.make_varying(count, axes_of_status)

  tap.defvjp(forward, backward)
  tapped: jax.Array = tap(x, status)
  return tapped
