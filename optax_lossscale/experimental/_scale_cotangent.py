"""A loss scale for part of a model, which multiplies the cotangents there."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._step import averages


def scale_cotangent(x: leaves.Tree, scale: ArrayLike) -> leaves.Tree:
  """Returns `x`, and multiplies its cotangent by `scale` in the backward pass.

  No single S fits a model if the gradients of its layers span more than the
  range of float16: an S that saves one layer from underflow makes another
  overflow. This function gives a layer its own factor: apply it at the layer's
  output, where its backward pass begins, and undo it by `1 / factor` at its
  parameters and its input.

  The product is computed in float32 or wider and rounded once to the dtype of
  `x`. The gradient must fit once the factor is undone, so undo it on float32
  parameters, before they are cast to float16. A cotangent of inf or NaN stays
  so, but a saturated one, 65504, does not. Do not use this with a gradient
  inside the loss, since each derivative multiplies once more.

  Args:
    x: an array or a pytree. Only floating and complex leaves are scaled.
    scale: a number, or a real scalar array, which may be traced. Its own
      gradient is 0. Powers of two are exact; -1 reverses gradients.

  Returns:
    `x`, unchanged.

  Raises:
    TypeError: if `scale` is not a real scalar.
    ValueError: if `scale` is a number that is infinite or subnormal in float32.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> scale_cotangent = ols.experimental.scale_cotangent
    >>> def layer(w, x):
    ...   return w.astype(jnp.float16) * x * jnp.float16(2.0**-20)
    >>> def loss_fn(w, x, factor):
    ...   w, x = scale_cotangent((w, x), 1 / factor)
    ...   y = scale_cotangent(layer(w, x), factor)
    ...   return y.astype(jnp.float32) * 2.0**-6
    >>> w, x = jnp.float32(1.0), jnp.float16(1.0)
    >>> for factor in (1.0, 2.0**12):
    ...   print(jax.grad(loss_fn)(w, x, factor))
    0.0
    1.4901161e-08

  References:
    Zhao et al., `Adaptive Loss Scaling for Mixed Precision Training
    <https://arxiv.org/abs/1910.12385>`_, 2019.
  """
  factor: Any
  # An array's value is not checked, since that would wait for the device.
  if isinstance(scale, jax.Array):
    factor = arguments.as_real_scalar("scale", scale)
  else:
    factor = np.float64(arguments.check_number("scale", scale))
    if factor and not arguments.is_usable_scale(abs(factor)):
      raise ValueError(
        "`scale` must be 0 or at least 2**-126 in magnitude, the smallest "
        f"normal float32 number, got {scale!r}."
      )

  def scale_leaf(leaf: object) -> object:
    if not leaves.is_gradient(leaf):
      return leaf
    # Under `shard_map` a value must vary along its tangent's axes, including
    # the scale's. JAX sums the cotangents of a value that is made to vary.
    axes = tuple(bits.varying_axes(factor))
    return _scale_leaf(averages.make_varying(leaf, axes), factor)

  return jax.tree.map(scale_leaf, x)


# The scaling is defined by its tangents, which are linear. JAX transposes them
# for the backward pass, so forward mode works as well.
@jax.custom_jvp
def _scale_leaf(x: jax.Array, scale: ArrayLike) -> jax.Array:
  del scale
  return x


@_scale_leaf.defjvp
def _scale_tangent(
  primals: tuple[jax.Array, ArrayLike], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
  x, scale = primals
  tangent, _ = tangents
  # Multiply in float32 or wider, since in float16 the scale may be inf or 0.
  wide = tangent.astype(leaves.at_least_float32(tangent.dtype))
  factor = jnp.asarray(scale, jnp.finfo(wide.dtype).dtype)
  if jnp.iscomplexobj(wide):
    # Multiply each part, since a complex scale would make inf * 0 = NaN.
    wide = jax.lax.complex(wide.real * factor, wide.imag * factor)
  else:
    wide = wide * factor
  return _scale_leaf(x, scale), wide.astype(tangent.dtype)
