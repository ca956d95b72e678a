"""A loss scale for a part of a model: the cotangents that pass, multiplied."""

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
  """Returns `x`, and multiplies by `scale` the cotangent that comes back to it.

  One S for the whole model does not fit where the gradients of its layers are
  further apart than float16 is wide: what saves one layer from underflow is an
  overflow in another. With this a layer has a factor of its own, for example
  `factor`. It multiplies where the layer's backward pass begins, at its output,
  and is undone at its parameters and at its input by `1 / factor`:

    params = scale_cotangent(params, 1 / factor)
    x = scale_cotangent(x, 1 / factor)
    return scale_cotangent(layer(params, x), factor)

  The product is formed in float32 at least and rounded once to the dtype of
  `x`, so the factor itself need not fit float16. What is undone must fit again:
  undo it of float32 parameters before they are cast to float16. Between two
  layers in float16 let one call do both, with the lower layer's factor divided
  by the upper one's.

  A cotangent of inf or NaN stays one. A saturated one, of 65504, does not:
  once it has been multiplied no check of gradients sees it, but a `status_tap`
  in the layer does. With -1 as the scale this reverses gradients.

  Forward mode multiplies the tangents likewise. Each further derivative
  multiplies once more without cancelling: a gradient inside the loss, such as a
  gradient penalty, must do without.

  Args:
    x: an array or a pytree. Leaves that are not floating or complex pass.
    scale: a number, or a real scalar array, which may be traced. It is not
      differentiated: its own gradient is 0. Powers of two make it exact.

  Returns:
    `x`.

  Raises:
    TypeError: if `scale` is not a real scalar.
    ValueError: if it is a number that is infinite or subnormal in float32.

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
    <https://arxiv.org/abs/1409.7495>`_, 2015, reverse gradients.
  """
  factor = _read_scale(scale)

  def scale_leaf(leaf: Any) -> Any:
    if not leaves.is_gradient(leaf):
      return leaf
    # Under `shard_map` a tangent varies as its value does, so the value must
    # vary as the scale does. JAX sums the cotangents of what is made to.
    axes = tuple(devices.varying_axes(factor))
    return _scale_leaf(devices.make_varying(leaf, axes), factor)

  return jax.tree.map(scale_leaf, x)


# By its tangents: they are linear, and transposed they are the cotangents. So
# forward mode comes with it.
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
    # By parts: a product with a complex scale would make NaN of inf * 0.
    wide = jax.lax.complex(wide.real * factor, wide.imag * factor)
  else:
    wide = wide * factor
  return _scale_leaf(x, scale), wide.astype(tangent.dtype)


def _read_scale(scale: Any) -> Any:
  """Returns a scale as a number of Python or a real scalar array."""
  # What an array holds is not looked at: that would wait for the device.
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
