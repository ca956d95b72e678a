"""A point in a model that measures the cotangents passing through it."""

from collections.abc import Callable
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optax_lossscale._base import leaves as _leaves
from optax_lossscale._base.arguments import shown
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import devices


def check_measured(name: str, value: jax.Array) -> None:
  """Raises unless `value` is float32[], since its gradient is a measurement."""
  dtype = getattr(value, "dtype", None)
  if dtype != jnp.float32 or jnp.shape(value) != ():
    got = shown(value) if dtype is None else f"{dtype}{list(value.shape)}"
    raise TypeError(
      f"`{name}` must be float32[], an argument of the loss function such as "
      f"jnp.float32(0), got {got}."
    )


def tap(
  tree: Tree,
  measured: jax.Array,
  measure: Callable[[Sequence[jax.Array]], jax.Array],
) -> Tree:
  """Returns `tree`; the gradient of `measured` is `measure(cotangents)`."""
  leaves, structure = jax.tree.flatten(tree)
  places = [i for i, leaf in enumerate(leaves) if _leaves.is_gradient(leaf)]
  if not places:
    return tree
  xs = [jnp.asarray(leaves[i]) for i in places]
  # Under `shard_map` a measurement varies along the cotangents' axes. JAX sums
  # measurements over the axes along which `measured` is made to vary here.
  varying = frozenset().union(*map(devices.varying_axes, xs))
  measured = devices.make_varying(measured, tuple(varying))
  axes = tuple(devices.varying_axes(measured))

  @jax.custom_vjp
  def identity(xs: list[jax.Array], measured: jax.Array) -> list[jax.Array]:
    del measured
    return xs

  def forward(
    xs: list[jax.Array], measured: jax.Array
  ) -> tuple[list[jax.Array], None]:
    return identity(xs, measured), None

  def backward(
    _: None, cotangents: list[jax.Array]
  ) -> tuple[list[jax.Array], jax.Array]:
    return cotangents, measure(devices.make_varying(cotangents, axes))

  identity.defvjp(forward, backward)
  for i, leaf in zip(places, identity(xs, measured), strict=True):
    leaves[i] = leaf
  return jax.tree.unflatten(structure, leaves)
