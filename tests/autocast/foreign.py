"""Functions that were written elsewhere, and what is asked of them all.

A case is a function of float32 arrays, such as a layer of Flax of its
parameters and its input. It is differentiated along all of them.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import itertools
import math
import re
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from tests import support

LEVELS = ("O1", "O2", "O3", "auto")

# Half a unit in the last place of float16, relative to the value: what one
# rounding costs.
ROUNDING = 2.0**-11


class Case(NamedTuple):
  """A function that was written elsewhere.

  Attributes:
    function: of float32 arrays.
    args: trees of them.
    roundings: the tolerance. How many roundings to float16 lie one after the
      other between a value or a gradient and what it is made of, with what
      makes them larger.
    levels: those at which it is that near. Of the others, which are between
      them, only dtypes are tested.
  """

  function: Callable[..., Any]
  args: tuple[Any, ...]
  roundings: float = 8
  levels: tuple[str, ...] = ("O1", "O3")


def normal(*shape, seed=0, scale=1.0):
  """Returns float32 values, so drawn that float16 has them without rounding."""
  x = np.random.default_rng([seed, *shape]).normal(size=shape) * scale
  return x.astype(np.float16).astype(np.float32)


def filled(shapes, scale=0.4):
  """Returns values for the float arrays of a tree of shapes.

  Layers are not asked to draw their own, which takes a compilation for each
  operation of it. Variances and a normalization's weights are near 1.

  Args:
    shapes: what `jax.eval_shape` returns.
    scale: the standard deviation.
  """
  seeds = itertools.count()

  def fill(path, leaf):
    if leaf.dtype != jnp.float32:
      return np.zeros(leaf.shape, leaf.dtype)
    values = normal(*leaf.shape, seed=next(seeds), scale=scale)
    is_near_one = re.search("var|scale", jax.tree_util.keystr(path))
    return np.float32(1 + values / 4) if is_near_one else values

  return jax.tree_util.tree_map_with_path(fill, shapes)


def weights(shape):
  """Returns what `weighed` multiplies an array by."""
  return np.cos(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


def weighed(outputs):
  """Returns a loss: the sum of all floats in a tree, with different weights.

  It has no matrix product, and it does not average: the cotangents are of the
  size of 1.
  """
  return sum(
    jnp.sum(leaf.astype(jnp.float32) * weights(leaf.shape))
    for leaf in jax.tree.leaves(outputs)
    if jnp.issubdtype(leaf.dtype, jnp.floating)
  )


def differentiated(function, args):
  """Returns a function's outputs and the gradients of a loss of them.

  Args:
    function: of arrays.
    args: along all of which it is differentiated.
  """

  def loss(*args):
    outputs = function(*args)
    return weighed(outputs), outputs

  grad = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)

  def outputs_and_gradients(*args):
    (_, outputs), gradients = grad(*args)
    return outputs, gradients

  return outputs_and_gradients


class Traced(NamedTuple):
  """What a case does at a level, with its gradient.

  Attributes:
    jaxpr: of the outputs and the gradients.
    shapes: their structure.
  """

  jaxpr: Any
  shapes: Any


class Cases:
  """Cases by name, each recorded once at each level.

  Args:
    makers: a function without arguments that returns the case, by name.
  """

  def __init__(self, makers: Mapping[str, Callable[[], Case]]):
    self.names = list(makers)
    self._makers = makers
    self.case = functools.cache(lambda name: makers[name]())
    self.traced = functools.cache(self._traced)
    self.values = functools.cache(self._values)

  def _traced(self, name, level=None) -> Traced:
    case = self.case(name)
    function = case.function
    if level is not None:
      function = ols.autocast(function, level)
    jaxpr, shapes = jax.make_jaxpr(
      differentiated(function, case.args), return_shape=True
    )(*case.args)
    return Traced(jaxpr, shapes)

  def _values(self, name):
    """Returns outputs and gradients at its levels, and as written: "O0"."""
    levels = self.case(name).levels
    traced = {level: self.traced(name, level) for level in levels}
    traced["O0"] = self.traced(name)
    functions = {
      level: core.jaxpr_as_fun(one.jaxpr) for level, one in traced.items()
    }
    arrays = jax.tree.leaves(self.case(name).args)
    flat = jax.jit(
      lambda *arrays: {level: f(*arrays) for level, f in functions.items()}
    )(*arrays)
    return {
      level: jax.tree.unflatten(jax.tree.structure(one.shapes), flat[level])
      for level, one in traced.items()
    }

  def assert_same_shapes(self, name):
    """Asserts that outputs and gradients have the structure as written."""
    for level in LEVELS:
      assert self.traced(name, level).shapes == self.traced(name).shapes

  def assert_same_values(self, name):
    """Asserts that outputs and gradients are those as written."""
    case, values = self.case(name), self.values(name)
    tolerance = case.roundings * ROUNDING
    for level in case.levels:
      for got, want in zip(values[level], values["O0"], strict=True):
        assert_near(got, want, tolerance)

  def assert_low_products(self, name):
    """Asserts that all products are in float16, and none is lost."""
    written = product_dtypes(self.traced(name).jaxpr)
    assert set(written) == {("float32", "float32")}
    for level in LEVELS:
      products = product_dtypes(self.traced(name, level).jaxpr)
      assert products == [("float16", "float16")] * len(written), level


def count(jaxpr, name):
  """Returns how often a primitive occurs."""
  return sum(eqn.primitive.name == name for eqn in support.equations(jaxpr))


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def product_dtypes(jaxpr):
  """Returns the dtypes of the operands of each matrix product."""
  return [
    tuple(operand.aval.dtype.name for operand in equation.invars[:2])
    for equation in support.equations(jaxpr)
    if equation.primitive.name in PRODUCTS
  ]


def errors(got, want):
  """Yields the path and the error of each array of a tree.

  The error is the largest difference relative to the largest value in the
  array. Where all should be 0, such as the gradient of a bias in front of a
  batch normalization, what remains of a sum is relative to its summands: a
  sixteenth of the largest value in the tree stands for those.

  Args:
    got: a tree of arrays.
    want: a tree of arrays.
  """
  assert jax.tree.structure(got) == jax.tree.structure(want)
  paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(got)[0]]
  got, want = (
    [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    for tree in (got, want)
  )
  largest = [np.abs(x).max(initial=0) for x in want]
  floor = max(largest, default=0) / 16
  for path, x, y, size in zip(paths, got, want, largest, strict=True):
    difference = np.abs(x - y).max(initial=0)
    yield jax.tree_util.keystr(path), difference / (max(size, floor) or 1)


def assert_near(got, want, tolerance):
  """Asserts that trees are equal but for an error in each array.

  Args:
    got: a tree of arrays.
    want: a tree of arrays.
    tolerance: see `errors`.
  """
  for path, error in errors(got, want):
    # Also where it is NaN.
    assert error <= tolerance, f"{path}: {error} > {tolerance}"
