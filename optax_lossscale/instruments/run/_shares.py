"""The share of updates that rounding loses."""

import functools

from chex import ArrayTree
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import bits as _bits
from optax_lossscale._base import counting
from optax_lossscale._base import leaves
from optax_lossscale.instruments import shared


def swallowed_share(params: optax.Params, updates: optax.Updates) -> jax.Array:
  """Returns the share of the non-zero updates that change nothing.

  An update below half the distance to the next parameter value is rounded away
  in `optax.apply_updates`. bfloat16 parameters lose updates below 1/512 of the
  parameter, float16 parameters below 1/4096; `master_weights` prevents that.
  Usable inside jit.

  Args:
    params: the parameters, of any dtype.
    updates: the optimizer's updates, as for `optax.apply_updates`. Leaves that
      are not floating or complex are left out, and so is Flax's
      `_overwrite_with_gradient`.

  Returns:
    float32[], from 0 to 1; 0 if all updates are 0. Under `shard_map` each
    device gets the share of its own updates. A complex number is one element.

  Raises:
    ValueError: if an update has no parameter, or differs from it in shape.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> params = jnp.bfloat16([1.0, 1.0, 1.0])
    >>> updates = jnp.bfloat16([2.0**-9, 2.0**-7, 0.0])
    >>> print(ols.instruments.swallowed_share(params, updates))
    0.5
  """
  old, new = map(shared.by_path, (params, updates))
  names = leaves.path_names({**old, **new})
  if not new.keys() <= old.keys():
    raise ValueError(
      "`updates` must be for the parameters, got one for "
      f"{min(names[x] for x in new.keys() - old.keys())!r}, and `params` with "
      f"arrays at {sorted(names[x] for x in old)}."
    )
  counts = jnp.zeros(2, jnp.float32)
  for path, update in new.items():
    if update.shape != old[path].shape:
      raise ValueError(
        f"`updates` must have the shapes of the parameters, got {update.shape} "
        f"for a parameter of shape {old[path].shape} at {names[path]!r}."
      )
    # Adds in float32, since a uint32 sum over many leaves could wrap around.
    counts += _count_swallowed(old[path], update).astype(jnp.float32)
  return counts[0] / jnp.maximum(counts[1], 1)


@jax.jit
def _count_swallowed(param: jax.Array, update: jax.Array) -> jax.Array:
  """Returns uint32[2]: how many updates change nothing, how many are not 0."""

  def tally(param: jax.Array, update: jax.Array) -> jax.Array:
    # The sum must start from the numbers that the dtypes hold.
    param, update = (
      _bits.held(x) if leaves.is_real(x) else x for x in (param, update)
    )
    new = jnp.asarray(optax.apply_updates(param, update))
    pairs = zip(_bits.parts(new), _bits.parts(param), strict=True)
    is_same = functools.reduce(
      jnp.logical_and, (_is_same(a, b) for a, b in pairs)
    )
    is_nonzero = functools.reduce(
      jnp.logical_or, (_magnitude(x) > 0 for x in _bits.parts(update))
    )
    masks = is_same & is_nonzero, is_nonzero
    return jnp.stack([jnp.sum(mask, dtype=jnp.uint32) for mask in masks])

  return counting.count(tally, [param, update])


def _is_same(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns where two real arrays are equal; NaN equals NaN, 0 equals -0."""
  # Compares bits, since a compiler may compare floats before rounding them.
  a, b = _bits.carried(a), _bits.carried(b)
  magnitude = _magnitude(a)
  is_equal = magnitude == _magnitude(b)
  is_equal &= (magnitude == 0) | (jnp.signbit(a) == jnp.signbit(b))
  # NaN has many bits, and a device may return other ones than it was given.
  is_nan = [_bits.reached(x, np.inf, inclusive=False) for x in (a, b)]
  return is_equal | (is_nan[0] & is_nan[1])


def _magnitude(x: jax.Array) -> jax.Array:
  return _bits.magnitude_bits(_bits.carried(x))
