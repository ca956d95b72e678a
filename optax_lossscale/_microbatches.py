"""A batch split into micro-batches, and the mean of what they give."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _leaves


def split(batches: dict[int, Any], microbatches: int) -> dict[int, Any]:
  """Returns arguments with a first axis for the micro-batches.

  Args:
    batches: positional arguments by their number.
    microbatches: how many there are to be.

  Raises:
    ValueError: if a leaf has no first axis, or one of another size than the
      others, or one that does not divide.
  """
  sizes: dict[int, str] = {}

  def split_leaf(path: tuple[Any, ...], x: Any) -> Any:
    place = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
    shape = np.shape(x)
    if not shape:
      raise ValueError(
        "the batch must have a first axis to be split along, got a scalar as "
        f"{place}; give `batch_argnums` the arguments that are to be split, or "
        "in place of a random key jax.random.split(key, microbatches)."
      )
    # Of random keys there may be one an example, or one a micro-batch.
    if not _is_key(x):
      sizes.setdefault(shape[0], place)
    if len(sizes) > 1:
      raise ValueError(
        "the batch must have a first axis of one size, got "
        + " and ".join(f"{size} in {place}" for size, place in sizes.items())
        + "; give `batch_argnums` the arguments that are to be split."
      )
    if shape[0] % microbatches:
      raise ValueError(
        f"`microbatches` must divide the batch, got {microbatches} for "
        f"{shape[0]} examples in {place}."
      )
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    _check_share(x, microbatches, place)
    # The first axis stays the first for as long as it can be sharded.
    x = x.reshape(shape[0] // microbatches, microbatches, *shape[1:])
    return x.swapaxes(0, 1)

  arguments: dict[int, Any] = jax.tree.map_with_path(split_leaf, batches)
  return arguments


def zeros(params: Any) -> Any:
  """Returns the sums of no gradients, in float32 at least.

  Args:
    params: a pytree of floating or complex arrays.
  """
  return jax.tree.map(
    lambda x: jnp.zeros_like(x, _leaves.at_least_float32(x.dtype)), params
  )


def add(
  sums: Any,
  gradients: Any,
  is_left_out: jax.Array | None,
  microbatches: int,
) -> Any:
  """Returns the sums with one more micro-batch.

  Args:
    sums: as `zeros` makes them.
    gradients: of one micro-batch.
    is_left_out: bool[], or None for no such choice.
    microbatches: how many there will be.
  """

  def add_leaf(total: jax.Array, x: jax.Array) -> jax.Array:
    # Wide before the product, which float16 might not hold.
    summand = x.astype(total.dtype) / _power_of_two(microbatches)
    if is_left_out is None:
      return total + summand
    # Selected and not multiplied: 0 times inf would be NaN.
    return total + jnp.where(is_left_out, jnp.zeros_like(total), summand)

  return jax.tree.map(add_leaf, sums, gradients)


def means(sums: Any, counted: jax.Array) -> Any:
  """Returns the means of the gradients of which `add` made the sums.

  Args:
    sums: pytree of arrays.
    counted: bool[microbatches], which were not left out; one at least.
  """
  count = jnp.sum(counted)

  def mean_leaf(total: jax.Array) -> jax.Array:
    real = jnp.finfo(total.dtype).dtype
    grow = _power_of_two(len(counted)) / count.astype(real)
    mean = total * grow.astype(total.dtype)
    # The mean of finite numbers is finite, though rounding may say otherwise.
    return jnp.nan_to_num(mean)

  return jax.tree.map(mean_leaf, sums)


def void(gradients: Any, is_void: jax.Array, amaxes: jax.Array) -> Any:
  """Returns gradients of which the wrapper sees that they are not usable.

  Args:
    gradients: means of micro-batches.
    is_void: bool[], whether they are not to be used.
    amaxes: float32[microbatches]; NaN where a gradient was NaN.
  """
  # Told apart, as in one batch.
  fill = jnp.where(jnp.any(jnp.isnan(amaxes)), jnp.nan, jnp.inf)
  return jax.tree.map(
    lambda x: jnp.where(is_void, fill.astype(x.dtype), x), gradients
  )


def mean_loss(losses: jax.Array, counted: jax.Array) -> jax.Array:
  """Returns the mean of those losses that count, in float32 at least.

  Args:
    losses: float[microbatches].
    counted: bool[microbatches].
  """
  losses = losses.astype(_leaves.at_least_float32(losses.dtype))
  total = jnp.sum(jnp.where(counted, losses, jnp.zeros_like(losses)))
  return total / jnp.sum(counted).astype(losses.dtype)


def _power_of_two(microbatches: int) -> float:
  """Returns one that is no smaller than the number of micro-batches.

  To divide by it rounds nothing that stays a normal number, and the sum of so
  many quotients is no larger than the largest dividend: it cannot overflow
  where that does not.
  """
  return 2.0 ** math.ceil(math.log2(microbatches))


def _check_share(x: Any, microbatches: int, place: str) -> None:
  """Raises if devices of an explicit mesh would have to exchange examples."""
  sharding = jax.typeof(x).sharding
  axes = sharding.spec[0] or ()
  names = axes if isinstance(axes, tuple) else (axes,)
  devices = math.prod(sharding.mesh.shape[name] for name in names)
  if x.shape[0] % (microbatches * devices):
    raise ValueError(
      "`microbatches` must divide the share of the batch that each device has, "
      f"got {microbatches} for {x.shape[0]} examples on {devices} devices in "
      f"{place}."
    )


def _is_key(x: Any) -> bool:
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
