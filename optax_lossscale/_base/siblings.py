"""Operands that siblings share, so that XLA makes few kernels for a GPU."""

# XLA:GPU makes one kernel of several sibling operations, such as the updates of
# leaves of one shape, only if they share an operand. A scalar does not count.
# So what many operations read goes through one small array that all of them
# share.

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale._base import promises

# The platforms whose compiler does so.
GPUS = "cuda", "rocm"

# Leaves of fewer elements are worth less time than the launch of a kernel. The
# larger ones keep a kernel each: XLA would run a dozen of them as one, and hold
# a dozen results at once where an optimizer needs all before it goes on.
_LARGE = 65_536

# Gives each leaf the flag to read.
FlagOf = Callable[[jax.Array], jax.Array]


def from_one_array(*scalars: jax.Array) -> list[jax.Array]:
  """Returns scalars of one dtype, as the elements of one array."""
  # An array of one element counts as a scalar.
  array = lax.optimization_barrier(jnp.stack([*scalars, scalars[-1]]))
  return [array[i] for i in range(len(scalars))]


@promises.promise("shared", assume=lambda *scalars: list(scalars))
def shared(*scalars: jax.Array) -> list[jax.Array]:
  """Returns the same scalars, on a GPU from one array for all readers."""

  # The barrier keeps XLA from computing them again for each reader.
  def elsewhere(*scalars: jax.Array) -> list[jax.Array]:
    return [*lax.optimization_barrier(scalars)]

  # An array would vary over devices if only one of the scalars does.
  if len({jax.typeof(x) for x in scalars}) > 1:
    return elsewhere(*scalars)
  found: list[jax.Array] = lax.platform_dependent(
    *scalars, **dict.fromkeys(GPUS, from_one_array), default=elsewhere
  )
  return found


def flags_by_size(flag: jax.Array) -> FlagOf:
  """Returns a function from leaves to flags: the given one for small leaves."""
  alone = lax.optimization_barrier(flag)

  def flag_of(leaf: jax.Array) -> jax.Array:
    # A size is a symbol in an exported program.
    is_small = isinstance(leaf.size, int) and leaf.size < _LARGE
    return flag if is_small else alone

  return flag_of
