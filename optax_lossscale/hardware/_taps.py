"""Points in a model that measure the cotangents passing through them."""

from collections.abc import Callable
from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base.arguments import shown
from optax_lossscale._base.leaves import is_gradient
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import averages
from optax_lossscale._step import checks
from optax_lossscale._step import findings
from optax_lossscale._step import requirements


def amax_tap(x: Tree, amax: jax.Array) -> Tree:
  """Returns `x` unchanged and measures the cotangents that pass this point.

  A rule bases S on the largest gradient of a parameter. The gradient of an
  activation may be larger and overflow first, unseen by the rule if a small
  layer scale or a mean lies between. Pass what is measured to the wrapper:
  `tx.update(..., amax=found)`. The tap reads each cotangent once more, and does
  not support forward-mode differentiation.

  JAX adds up gradients. If taps, iterations of a scan, elements of a vmap or
  devices of a `shard_map` share one `amax`, the result is the sum of their
  values (of `accumulate`, the mean over micro-batches). For separate values,
  pass separate zeros: a dict entry for each tap, an element of `xs` for each
  scan iteration, or `make_varying(amax, axis_name)` for each device.

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
    >>> import optax_lossscale as ols
    >>> def loss_fn(params, amax):
    ...   hidden = ols.hardware.amax_tap(params * 2.0**-10, amax)
    ...   return jnp.sum(hidden * 64.0)
    >>> grad = jax.grad(loss_fn, argnums=(0, 1))
    >>> gradient, found = grad(jnp.ones(2), jnp.float32(0))
    >>> print(gradient, found)
    [0.0625 0.0625] 64.0
  """
  _check_measured("amax", amax)
  check = checks.nonfinite()
  return _tap(x, amax, lambda found: findings.examine(check, found).amax)


def status_tap(
  x: Tree,
  status: jax.Array,
  *,
  check: checks.Check = checks.saturated(),
) -> Tree:
  """Returns `x` unchanged, and counts the overflows in its cotangents.

  An overflow in the middle of the backward pass may not show in the gradients,
  because a small layer scale or a mean over devices can hide it. The count is
  the gradient with respect to `status`, added up over all that share it, as for
  `amax_tap`. `float_status` sees every operation, and costs more.

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
  _check_measured("status", status)
  count = functools.partial(_count, check)
  # Each leaf has its own tap. If a leaf that devices share were in one tap with
  # a varying leaf, JAX would sum the shared leaf's cotangent over the devices.
  return jax.tree.map(lambda leaf: _tap(leaf, status, count), x)


def _count(check: checks.Check, cotangents: Sequence[jax.Array]) -> jax.Array:
  """Returns the number of elements that overflowed, as float32[]."""
  (cotangent,) = cotangents
  limit = formats.limit(jnp.finfo(cotangent.dtype).dtype, check.dtype)
  where = bits.reached(cotangent, limit, inclusive=check.saturating)
  return jnp.sum(where, dtype=jnp.float32)


def _check_measured(name: str, value: jax.Array) -> None:
  """Raises unless `value` is float32[], since its gradient is a measurement."""
  dtype = getattr(value, "dtype", None)
  if dtype != jnp.float32 or jnp.shape(value) != ():
    got = shown(value) if dtype is None else f"{dtype}{list(value.shape)}"
    raise TypeError(
      f"`{name}` must be float32[], an argument of the loss function such as "
      f"jnp.float32(0), got {got}."
    )


def _tap(
  tree: Tree,
  measured: jax.Array,
  measure: Callable[[Sequence[jax.Array]], jax.Array],
) -> Tree:
  """Returns `tree`; the gradient of `measured` is `measure(cotangents)`."""
  xs = [jnp.asarray(x) for x in filter(is_gradient, jax.tree.leaves(tree))]
  if not xs:
    return tree
  # Under `shard_map` a measurement varies along the cotangents' axes. JAX sums
  # measurements over the axes along which `measured` is made to vary here.
  varying = frozenset().union(*map(bits.varying_axes, xs))
  measured = averages.make_varying(measured, tuple(varying))
  axes = tuple(bits.varying_axes(measured))

  @jax.custom_vjp
  def identity(xs: list[jax.Array], measured: jax.Array) -> list[jax.Array]:
    del measured
    return xs

  def backward(
    _: None, cotangents: list[jax.Array]
  ) -> tuple[list[jax.Array], jax.Array]:
    return cotangents, measure(averages.make_varying(cotangents, axes))

  identity.defvjp(lambda *inputs: (identity(*inputs), None), backward)
  tapped = iter(identity(xs, measured))
  return jax.tree.map(lambda x: next(tapped) if is_gradient(x) else x, tree)
