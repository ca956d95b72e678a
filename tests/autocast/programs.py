"""The dtypes of the operations in a jaxpr and in those inside it."""

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from tests.autocast import mixed

PRODUCTS = ("conv_general_dilated", "dot_general", "ragged_dot_general")


def dtypes_of(name, function, *arguments):
  """Returns the names of the float dtypes that an operation takes."""
  return [
    atom.aval.dtype.name
    for equation in mixed.equations(function, *arguments)
    if equation.primitive.name == name
    for atom in equation.invars
    if jnp.issubdtype(atom.aval.dtype, jnp.floating)
  ]


def products(function, *arguments):
  """Returns the names of the dtypes that the products take."""
  return [x for name in PRODUCTS for x in dtypes_of(name, function, *arguments)]


def conversions(function, *arguments):
  """Returns from where to where values are converted, between floats."""
  return [
    (equation.invars[0].aval.dtype.name, equation.outvars[0].aval.dtype.name)
    for equation in mixed.equations(function, *arguments)
    if equation.primitive.name == "convert_element_type"
    and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
    and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    and equation.invars[0].aval.dtype != equation.outvars[0].aval.dtype
  ]


def kernel(x):
  """Doubles an array in a kernel of Pallas, which nothing looks into."""

  def double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(double, out_shape=shape, interpret=True)(x)
