"""AdamW's update with selects that read their flag in groups of leaves.

XLA:GPU makes one kernel of leaves of one shape that read one array. The library
has one array for all small leaves, and large ones keep a kernel each. These
programs form other groups, to be timed beside it, and give the same bits.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from benchmarks import phase
import optax_lossscale as ols
from optax_lossscale._base import siblings

# How many leaves of a shape share an array, the most telling first.
COUNTS = (12, math.inf, 4, 2)


def make(
  check: optax.GradientTransformation,
  adamw: optax.GradientTransformation,
  count: float,
  *,
  joins_large: bool,
) -> Callable[[Any, Any], Any]:
  """Returns the update phase: from (parameters, state) to the next ones.

  Args:
    check: `loss_scaling` around `optax.identity()`.
    adamw: whose state is beside the check's, as in a chain.
    count: how many leaves of one shape share an array.
    joins_large: whether large leaves do, or read a scalar.
  """

  def update(state: Any, scaled_grads: Any) -> Any:
    params, (scaling, old) = state
    # Its updates, which are the gradients, are not computed.
    _, new_scaling = check.update(scaled_grads, scaling)
    unscaled = ols.unscale(scaled_grads, scaling)
    updates, new = adamw.update(unscaled, old, params)
    skipped = new_scaling.skipped
    leaves, structure = jax.tree.flatten(params)
    flags = _flags(skipped, leaves, count, joins_large)
    flags = jax.tree.unflatten(structure, flags)

    def select(old: Any, new: Any) -> Any:
      return jax.tree.map(jnp.where, flags, old, new)

    moments, *others = new
    moments = moments._replace(
      count=jnp.where(skipped, old[0].count, moments.count),
      mu=select(old[0].mu, moments.mu),
      nu=select(old[0].nu, moments.nu),
    )
    minus_zero = jax.tree.map(lambda x: jnp.full_like(x, -0.0), updates)
    params = optax.apply_updates(params, select(minus_zero, updates))
    return params, (new_scaling, (moments, *others))

  return update


def has_large(params: Any) -> bool:
  """Returns whether any leaf keeps a kernel to itself in the library."""
  return any(x.size >= siblings._LARGE for x in jax.tree.leaves(params))


def rate_from_array(rate: float) -> Callable[[Any, Any], Any]:
  """Returns the update of `optax.adamw` whose leaves read the rate together.

  Args:
    rate: of learning.
  """

  def update(state: Any, grads: Any) -> Any:
    # XLA would negate the rate as a scalar.
    (factor,) = siblings.from_one_array(jnp.float32(-rate))
    adamw = optax.chain(
      optax.scale_by_adam(),
      optax.add_decayed_weights(1e-4),
      optax.scale(factor),
    )
    return phase.make(adamw)(state, grads)

  return update


def _flags(
  skipped: jax.Array,
  leaves: Sequence[jax.Array],
  count: float,
  joins_large: bool,
) -> Iterator[jax.Array]:
  alone = siblings.flags_by_size(skipped)
  seen: collections.Counter[Any] = collections.Counter()
  keys: list[Any] = []
  for x in leaves:
    seen[x.shape] += 1
    is_alone = not joins_large and x.size >= siblings._LARGE
    keys.append(None if is_alone else (x.shape, (seen[x.shape] - 1) // count))
  groups = {*keys} - {None}
  # One barrier for all. XLA would make one of several that are alike.
  arrays = lax.optimization_barrier([jnp.stack([skipped] * 2)] * len(groups))
  flag_of = dict(zip(groups, arrays, strict=True))
  for x, key in zip(leaves, keys, strict=True):
    yield alone(x) if key is None else flag_of[key][0]
