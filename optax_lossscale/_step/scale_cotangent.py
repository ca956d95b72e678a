"""A loss scale for part of a model, by which its cotangents are multiplied."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import trees
from optax_lossscale._step import devices


def scale_cotangent(x: trees.Tree, scale: ArrayLike) -> trees.Tree:
  """Returns `x`, and multiplies its cotangent by `scale` in the backward pass.

  No single S fits a model whose layers have gradients further apart than the
  range of float16: what saves one layer from underflow makes another overflow.
  With this function a layer gets its own factor. It is applied where the
  layer's backward pass begins, at its output, and undone by `1 / factor` at its
  parameters and its input:

    params = scale_cotangent(params, 1 / factor)
    x = scale_cotangent(x, 1 / factor)
    return scale_cotangent(layer(params, x), factor)

  The product is formed in float32 at least and rounded once to the dtype of
  `x`, so the factor itself need not fit float16. The result of undoing it must
  fit as well, so undo it on float32 parameters, before they are cast to
  float16. Between two float16 layers use one call for both, with the lower
  layer's factor divided by the upper one's.

  A cotangent of inf or NaN stays inf or NaN. A saturated one, of 65504,
  changes: once it has been multiplied, no check of gradients sees it, but a
  `status_tap` in the layer does. A scale of -1 reverses gradients.

  Forward mode multiplies the tangents likewise. Each further derivative
  multiplies once more without cancelling, so do not use this with a gradient
  inside the loss, such as a gradient penalty.

  Args:
    x: an array or a pytree. Leaves that are not floating or complex are kept.
    scale: a number, or a real scalar array, which may be traced. It is not
      differentiated, so its own gradient is 0. Powers of two are exact.

  Returns:
    `x`.

  Raises:
    TypeError: if `scale` is not a real scalar.
    ValueError: if `scale` is a number that is infinite or subnormal in float32.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def layer(w, x):
    ...   return w.astype(jnp.float16) * x * jnp.float16(2.0**-20)
    >>> def loss_fn(w, x, factor):
    ...   w = ols.scale_cotangent(w, 1 / factor)
    ...   y = ols.scale_cotangent(layer(w, x), factor)
    ...   return y.astype(jnp.float32) * 2.0**-6
    >>> w, x = jnp.float32(1.0), jnp.float16(1.0)
    >>> for factor in (1.0, 2.0**12):
    ...   print(jax.grad(loss_fn)(w, x, factor))
    0.0
    1.4901161e-08

  References:
    Zhao et al., `Adaptive Loss Scaling for Mixed Precision Training
    <https://arxiv.org/abs/1910.12385>`_, 2019. Ganin and Lempitsky,
    `Unsupervised Domain Adaptation by Backpropagation
    <https://arxiv.org/abs/1409.7495>`_, 2015, for reversed gradients.
  """
  factor = _read_scale(scale)

  def scale_leaf(leaf: Any) -> Any:
    if not leaves.is_gradient(leaf):
      return leaf
    # Under `shard_map` a tangent varies like its value, so the value must vary
    # like the scale. JAX sums the cotangents of a value that is made to vary.
    axes = tuple(devices.varying_axes(factor))
    return _scale_leaf(devices.make_varying(leaf, axes), factor)

  return jax.tree.map(scale_leaf, x)


# Defined by its tangents, which are linear. JAX transposes them into
# cotangents, so forward mode works as well.
@jax.custom_jvp
def _scale_leaf(x: jax.Array, scale: Any) -> jax.Array:
  del scale
  return x


@_scale_leaf.defjvp
def _scale_tangent(
  primals: tuple[jax.Array, Any], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
  x, scale = primals
  tangent, _ = tangents
  # In float32 at least: the scale may be inf or 0 in float16.
  wide = tangent.astype(leaves.at_least_float32(tangent.dtype))
  factor = jnp.asarray(scale, jnp.finfo(wide.dtype).dtype)
  if jnp.iscomplexobj(wide):
    # By parts, since multiplying by a complex scale would make inf * 0 = NaN.
    wide = jax.lax.complex(wide.real * factor, wide.imag * factor)
  else:
    wide = wide * factor
  return _scale_leaf(x, scale), wide.astype(tangent.dtype)


def _read_scale(scale: Any) -> Any:
  """Returns a scale as a Python number or a real scalar array."""
  # The value in an array is not checked: that would wait for the device.
  if not isinstance(scale, jax.Array):
    number = arguments.check_number("scale", scale)
    if 0 < abs(number) < arguments.SMALLEST_SCALE:
      raise ValueError(
        "`scale` must be 0 or at least 2**-126 in magnitude, the smallest "
        f"normal float32 number, got {scale!r}."
      )
    return np.float64(number)
  is_real = jnp.issubdtype(scale.dtype, jnp.integer) or jnp.issubdtype(
    scale.dtype, jnp.floating
  )
  if scale.ndim != 0 or not is_real:
    raise TypeError(
      "`scale` must be a number or a real scalar array, one for all leaves, "
      f"got {scale.dtype}{list(scale.shape)}."
    )
  return scale
