"""Comparisons, gradients and counts for the tests of `autocast`."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import support


def assert_close(got, want, tolerance=0.02):
  """Asserts equal structures, dtypes and, up to rounding, values."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    x, y = jnp.asarray(x), jnp.asarray(y)
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    if x.dtype == jax.dtypes.float0:
      continue
    if jnp.issubdtype(x.dtype, jnp.inexact):
      wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
      x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
      np.testing.assert_allclose(x, y, tolerance, tolerance)
    else:
      np.testing.assert_array_equal(x, y)


def gradient(function, argnums=(0, 1)):
  """Returns the gradient of the sum of all floats that a function returns."""

  def total(*args):
    return sum(
      x.astype(jnp.float32).sum()
      for x in jax.tree.leaves(function(*args))
      if jnp.issubdtype(x.dtype, jnp.floating)
    )

  return jax.grad(total, argnums)


def equations(function, *args):
  """Returns all equations of a function's jaxpr, of inner jaxprs too."""
  return list(support.equations(jax.make_jaxpr(function)(*args)))


def count(function, name, *args):
  """Returns how many equations of a function are of a primitive."""
  return sum(x.primitive.name == name for x in equations(function, *args))
