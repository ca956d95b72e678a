"""Functions with derivative rules of their own, of every sort that JAX has."""

import functools

import jax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
import numpy as np

W = jnp.linspace(-0.6, 0.7, 16).reshape(4, 4)
X = jnp.linspace(-1.0, 0.9, 12).reshape(3, 4)
KEY = jax.random.key(3)
FLOAT0 = jax.dtypes.float0


@jax.custom_jvp
def layer_jvp(x, w):
  return jnp.tanh(x @ w)


@layer_jvp.defjvp
def _(primals, tangents):
  (x, w), (dx, dw) = primals, tangents
  y = layer_jvp(x, w)
  return y, (1 - y * y) * (dx @ w + x @ dw)


@jax.custom_vjp
def layer_vjp(x, w):
  return jnp.tanh(x @ w)


def _backward(kept, cotangent):
  x, w, y = kept
  before = cotangent * (1 - y * y)
  return before @ w.T, x.T @ before


layer_vjp.defvjp(
  lambda x, w: ((y := layer_vjp(x, w)), (x, w, y)),
  _backward,
)


@jax.custom_vjp
def nested_vjp(x, w):
  return layer_vjp(layer_jvp(x, w), w)


nested_vjp.defvjp(
  lambda x, w: jax.vjp(lambda x, w: layer_vjp(layer_jvp(x, w), w), x, w),
  lambda vjp, cotangent: vjp(cotangent),
)


@jax.custom_vjp
def wrong_vjp(x):
  return 2 * x


wrong_vjp.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (7 * cotangent,))


@jax.custom_jvp
def wrong_jvp(x):
  return 2 * x


wrong_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 7 * tangents[0]))


@jax.custom_jvp
def by_symbolic_zeros(x, w):
  return x @ w


@functools.partial(by_symbolic_zeros.defjvp, symbolic_zeros=True)
def _(primals, tangents):
  (x, w), (dx, dw) = primals, tangents
  tangent = jnp.zeros(x.shape)
  if not isinstance(dx, SymbolicZero):
    tangent += 3 * (dx @ w)
  if not isinstance(dw, SymbolicZero):
    tangent += 5 * (x @ dw)
  return x @ w, tangent


@jax.custom_vjp
def masked_vjp(x, count, key):
  mask = jax.random.bernoulli(key, 0.5, x.shape)
  return jnp.where(mask, x * count, 0), count + 1, jax.random.split(key), mask


masked_vjp.defvjp(
  lambda x, count, key: ((y := masked_vjp(x, count, key)), (count, y[3])),
  lambda kept, cotangents: (
    jnp.where(kept[1], 2 * kept[0] * cotangents[0], 0),
    np.zeros((), FLOAT0),
    None,
  ),
)


@jax.custom_jvp
def masked_jvp(x, count, key):
  mask = jax.random.bernoulli(key, 0.5, x.shape)
  return jnp.where(mask, x * count, 0), count + 1, jax.random.split(key), mask


@masked_jvp.defjvp
def _(primals, tangents):
  _, count, _ = primals
  outputs = masked_jvp(*primals)
  tangent = jnp.where(outputs[3], 2 * count * tangents[0], 0)
  none = [np.zeros(jnp.shape(x), FLOAT0) for x in outputs[1:3]]
  return outputs, (tangent, *none, np.zeros(outputs[3].shape, FLOAT0))


@jax.custom_vjp
def with_many_residuals(x, w):
  return x @ w


def _backward_of_many(kept, cotangent):
  x, three, mask, tree = kept
  dx = jnp.where(mask, (cotangent @ W.T) * three, tree["sum"])
  return dx, x.astype(jnp.float32).T @ cotangent


with_many_residuals.defvjp(
  lambda x, w: (
    x @ w,
    (x.astype(jnp.bfloat16), jnp.int8(3), x > 0, {"sum": x.sum()}),
  ),
  _backward_of_many,
)


def through_layer(function):
  """Returns a function with a product after another one, which has weights."""
  return lambda x, w: function(x, w) @ w


def through(function):
  """Returns a function with products before and after another one."""
  return lambda x, w: function(x @ w) @ w


FUNCTIONS = {
  "nested": lambda x, w: nested_vjp(jax.nn.relu(nested_vjp(x, w)), w),
  "wrong vjp": through(wrong_vjp),
  "symbolic zeros, jvp": by_symbolic_zeros,
  "symbolic zeros, jvp, one": lambda x, w: by_symbolic_zeros(x, W) + w[0],
  "integers and keys, vjp": through(lambda x: masked_vjp(x, 3, KEY)[0]),
  "residuals of many dtypes": with_many_residuals,
  "jit": jax.jit(lambda x, w: layer_vjp(jax.jit(layer_jvp)(x, w), w)),
  "vmap": lambda x, w: jax.vmap(layer_vjp, (0, None))(x[:, None], w),
}
