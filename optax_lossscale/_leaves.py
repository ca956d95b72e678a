"""Which leaves of a tree are gradients, and in which precision they travel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _engine

# Flax keeps the scales and amax histories of FP8 layers in this collection.
# What differentiation returns for them is their next value, not a gradient.
OVERWRITE_WITH_GRADIENT = "overwrite_with_gradient"

Mask = Any | Callable[[Any], Any]


def is_gradient(x: Any) -> bool:
  """Returns whether a leaf is a floating or complex array."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def as_arrays(tree: Any) -> Any:
  """Returns `tree` with Python floats as arrays, so that none is overlooked.

  Args:
    tree: gradients.
  """
  return jax.tree.map(
    lambda x: jnp.asarray(x) if isinstance(x, (float, complex)) else x, tree
  )


def resolve_mask(mask: Mask | None, tree: Any) -> Any:
  """Returns a tree of bools like `tree`: True where a leaf is a gradient.

  Args:
    mask: what the caller passed: None, a tree of bools of which `tree` may be
      an extension, or a function that makes one.
    tree: parameters or gradients.
  """
  if mask is None:
    return jax.tree.map_with_path(lambda path, _: not _overwrites(path), tree)
  return jax.tree.broadcast(mask(tree) if callable(mask) else mask, tree)


def leave_out(mask: Any, tree: Any) -> Any:
  """Returns `tree` with masked nodes for what the mask leaves out.

  Args:
    mask: a tree of bools.
    tree: a tree like it, or None for no tree.
  """
  if tree is None:
    return None
  return jax.tree.map(
    lambda is_kept, leaf: leaf if is_kept else optax.MaskedNode(), mask, tree
  )


def merge(mask: Any, kept: Any, left_out: Any) -> Any:
  """Returns one tree: `kept` where the mask is True, `left_out` elsewhere.

  Args:
    mask: a tree of bools.
    kept: a tree with masked nodes where the mask is False.
    left_out: a tree like the mask.
  """
  return jax.tree.map(
    lambda is_kept, a, b: a if is_kept else b, mask, kept, left_out
  )


def at_least_float32(dtype: Any) -> Any:
  """Returns float32 for a narrower real dtype, and any other as it is.

  Args:
    dtype: a floating or complex dtype.
  """
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return dtype
  return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def widen(tree: Any) -> Any:
  """Returns a tree whose real leaves below float32 are float32.

  An optimizer that computes in float16 squares its gradients to 0 or inf.

  Args:
    tree: a pytree of arrays or of `jax.ShapeDtypeStruct`.
  """

  def widen_leaf(x: Any) -> Any:
    if not is_gradient(x) or x.dtype == at_least_float32(x.dtype):
      return x
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(dtype=at_least_float32(x.dtype))
    return jnp.asarray(x, at_least_float32(x.dtype))

  return jax.tree.map(widen_leaf, tree)


def narrow_like(updates: Any, params: Any) -> Any:
  """Returns `updates` in the dtypes of `params`, where both are real.

  Args:
    updates: what the inner transformation returned.
    params: the parameters, or None for nothing to compare with.
  """
  if params is None:
    return updates

  def narrow_leaf(update: Any, param: Any) -> Any:
    is_real = all(
      hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
      for x in (update, param)
    )
    return jnp.asarray(update, param.dtype) if is_real else update

  return jax.tree.map(narrow_leaf, updates, params)


def unscale_tree(tree: Any, loss_scale: jax.Array) -> Any:
  """Returns the gradients in `tree` divided by S, in float32 at least.

  Args:
    tree: scaled gradients; leaves that are none are returned as they are.
    loss_scale: float32[].
  """

  def unscale_leaf(x: Any) -> Any:
    if not is_gradient(x):
      return x
    # Before the product: 1/S may be 0 in float16, and the product may be.
    x = jnp.asarray(x, at_least_float32(x.dtype))
    # The inverse in the leaf's own precision, so float64 loses nothing.
    inverse = _engine.reciprocal(loss_scale.astype(jnp.finfo(x.dtype).dtype))
    if jnp.iscomplexobj(x):
      # By parts: a product with a complex 1/S would make NaN of inf * 0.
      return jax.lax.complex(x.real * inverse, x.imag * inverse)
    return x * inverse

  return jax.tree.map(unscale_leaf, tree)


def _overwrites(path: tuple[Any, ...]) -> bool:
  """Returns whether a path leads through the collection of that name."""
  names = (getattr(key, "key", getattr(key, "name", None)) for key in path)
  return OVERWRITE_WITH_GRADIENT in names
