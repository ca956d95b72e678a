"""Counts elements of arrays, reading each element once."""

from collections.abc import Callable
from collections.abc import Sequence
import functools

import jax
from jax import lax

# How many elements a CPU processes at a time. Intermediate values of so few fit
# in its cache, so no array as large as the gradients is needed.
_BLOCK = 1024


def count(
  tally: Callable[..., jax.Array],
  arrays: Sequence[jax.Array],
  *,
  on_cpu: Callable[..., jax.Array] | None = None,
) -> jax.Array:
  """Counts the elements of arrays with `tally`, reading each element once."""
  on_cpu = on_cpu or tally
  # An accelerator reads and counts in one kernel, a block of a sharded array
  # could span devices, and the size may be a symbol in an exported program.
  if all(
    jax.typeof(x).sharding.mesh.empty and isinstance(x.size, int)
    for x in arrays
  ):
    on_cpu = functools.partial(_in_blocks, on_cpu)
  counts: jax.Array = lax.platform_dependent(*arrays, cpu=on_cpu, default=tally)
  return counts


def _in_blocks(
  tally: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
  """Returns the sum of the counts of the blocks of arrays."""
  flat = [x.reshape(-1) for x in arrays]
  blocks = flat[0].size // _BLOCK

  def add(i: jax.Array, counts: jax.Array) -> jax.Array:
    block = [lax.dynamic_slice(x, (i * _BLOCK,), (_BLOCK,)) for x in flat]
    return counts + tally(*block)

  rest = tally(*(x[blocks * _BLOCK :] for x in flat))
  return lax.fori_loop(0, blocks, add, rest) if blocks else rest
