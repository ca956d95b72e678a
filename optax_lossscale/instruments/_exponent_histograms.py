"""Where gradients live: how many there are by the exponent of each."""

import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import numpy.typing as npt

from optax_lossscale._base import bits as _bits
from optax_lossscale.instruments import _elements

# Those of float32, subnormal numbers included.
_LOWEST, _HIGHEST = -149, 127

# What a uint32 can count.
_MOST = 2**32 - 1


class ExponentHistogram(NamedTuple):
  """How many elements there are by floor(log2 |g|).

  A pytree of counts, which add up: over steps by `jax.tree.map(jnp.add, a, b)`,
  over the devices of a `shard_map` by `jax.lax.psum(histogram, "data")`.

  Attributes:
    counts: uint32[277], the non-zero finite elements by their exponents, from
      -149, that of the smallest float32, to 127.
    zeros: uint32[], how many are 0.
    subnormals: uint32[], how many are subnormal in the dtype of their array;
      they are counted in `counts` as well.
    nonfinite: uint32[], how many are inf or NaN.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> gradients = {"w": jnp.array([0.0, 0.75, -0.5, 1.0])}
    >>> histogram = ols.instruments.exponent_histogram(gradients)
    >>> print(histogram.exponents[histogram.counts > 0], histogram.zeros)
    [-1  0] 1
    >>> histogram.share(-1, 0)
    0.5
  """

  counts: jax.Array
  zeros: jax.Array
  subnormals: jax.Array
  nonfinite: jax.Array

  @property
  def exponents(self) -> npt.NDArray[np.int64]:
    """int64[277], the exponent of each of `counts`."""
    return np.arange(_LOWEST, _HIGHEST + 1)

  @property
  def total(self) -> int:
    """How many elements there are: zeros, inf and NaN count.

    Raises:
      TypeError: if the histogram is traced.
      ValueError: if it is several, stacked.
    """
    _check_one(self)
    counted = np.asarray(self.counts).sum(dtype=np.int64)
    return int(counted) + int(self.zeros) + int(self.nonfinite)

  def share(self, low: int, high: int) -> float:
    """Returns the share of all elements with 2**low <= |g| < 2**high.

    Args:
      low: an exponent.
      high: an exponent, not included.

    Returns:
      From 0 to 1; 0 where there is no element.

    Raises:
      TypeError: if the histogram is traced.
      ValueError: if it is several, stacked.
    """
    _check_one(self)
    is_between = (self.exponents >= low) & (self.exponents < high)
    counted = np.asarray(self.counts)[is_between].sum(dtype=np.int64)
    return float(counted / max(self.total, 1))


def exponent_histogram(tree: Any) -> ExponentHistogram:
  """Returns how many elements of a tree there are by their exponents.

  It shows what a format can hold of the gradients and where S would move them.
  Usable inside jit. Each element is read once and classified by its bits, so
  subnormal numbers are told from 0 also where a backend computes with neither.

  Args:
    tree: gradients or any arrays; leaves that are not floating or complex are
      left out, and what Flax keeps in `_overwrite_with_gradient`. Of complex
      numbers each part is an element. float64 elements beyond the exponents of
      float32 are counted at its ends. Under `shard_map` each device counts its
      own.

  Returns:
    The counts, to be read on the host: `counts`, `zeros`, `subnormals`,
    `nonfinite`.

  Raises:
    ValueError: if there are 2**32 elements or more, too many for a uint32.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> gradients = {"w": jnp.float16([2.0**-24, 2.0**-14, 0, jnp.inf])}
    >>> histogram = ols.instruments.exponent_histogram(gradients)
    >>> print(histogram.zeros, histogram.subnormals, histogram.nonfinite)
    1 1 1
    >>> by_leaf = ols.instruments.histogram_by_leaf(gradients)
    >>> print(by_leaf["w"].share(-14, -13))
    0.25

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, figure 3.
  """
  gradients = list(_elements.named(tree).values())
  size = sum(x.size * len(_bits.parts(x)) for x in gradients)
  if size > _MOST:
    raise ValueError(
      f"`tree` must have fewer than 2**32 elements, got {size}; call "
      "histogram_by_leaf, or this for parts of it."
    )
  total = _empty()
  for x in gradients:
    total = jax.tree.map(jnp.add, total, _histogram(x))
  return total


def histogram_by_leaf(tree: Any) -> dict[str, ExponentHistogram]:
  """Returns the histogram of each leaf: which layers are out of range.

  Usable inside jit. The example is at `exponent_histogram`.

  Args:
    tree: as for `exponent_histogram`.

  Returns:
    A histogram by the leaf's path, such as "Dense_0/kernel".

  Raises:
    ValueError: if a leaf has 2**32 elements or more.
  """
  return {
    path: exponent_histogram(x) for path, x in _elements.named(tree).items()
  }


def _check_one(histogram: ExponentHistogram) -> None:
  """Raises if a histogram cannot be read as numbers: traced, or stacked."""
  if any(isinstance(x, jax.core.Tracer) for x in histogram):
    raise TypeError(
      "A histogram must be known to be read, got a traced one; return it from "
      "the jitted function, and read `total` and `share` on the host."
    )
  shape = np.shape(histogram.counts)
  if len(shape) != 1:
    raise ValueError(
      f"A histogram must be one to be read, got `counts` of shape {shape}; of "
      "several that are stacked take one, jax.tree.map(lambda x: x[0], "
      "histogram), or their sum, jax.tree.map(lambda x: x.sum(0), histogram)."
    )


def _empty() -> ExponentHistogram:
  none = jnp.zeros((), jnp.uint32)
  return ExponentHistogram(
    counts=jnp.zeros(_HIGHEST - _LOWEST + 1, jnp.uint32),
    zeros=none,
    subnormals=none,
    nonfinite=none,
  )


# Compiled also where the caller compiles nothing, or each look would write
# arrays as large as the gradients.
@jax.jit
def _histogram(x: jax.Array) -> ExponentHistogram:
  """Returns the histogram of one array."""
  dtype = _bits.carrier(jnp.finfo(x.dtype).dtype)
  info = jnp.finfo(dtype)
  # The exponents of the smallest subnormal number and of the largest one.
  lowest, highest = int(info.minexp) - int(info.nmant), int(info.maxexp) - 1
  # Those that are 0, those of each exponent, those that are not finite.
  length = highest - lowest + 3
  way = _by_scatter if jax.default_backend() == "cpu" else _by_comparison
  by_place = jnp.zeros(length, jnp.uint32)
  for part in _bits.parts(x):
    by_place += _elements.count(
      lambda y: way(y.astype(dtype), length), length, [part]
    )
  finite = by_place[1:-1]
  exponents = np.clip(np.arange(lowest, highest + 1), _LOWEST, _HIGHEST)
  # The power of two with which the array's own normal numbers begin.
  normal = math.frexp(float(jnp.finfo(x.dtype).smallest_normal))[1] - 1
  return ExponentHistogram(
    counts=_empty().counts.at[exponents - _LOWEST].add(finite),
    zeros=by_place[0],
    subnormals=jnp.sum(finite[: normal - lowest], dtype=jnp.uint32),
    nonfinite=by_place[-1],
  )


def _by_scatter(x: jax.Array, length: int) -> jax.Array:
  """Returns uint32[length]: one addition an element, which a CPU does best.

  Comparing each element with every exponent takes it fifty times as long.
  """
  axis_types = jax.typeof(x).sharding.mesh.axis_types
  if AxisType.Explicit not in axis_types:
    return _scatter(x, length)
  # In the explicit mode JAX has no rule for it. The compiler has: each device
  # counts its part, and the counts are added.
  replicated = jax.NamedSharding(jax.typeof(x).sharding.mesh, jax.P())
  counts: jax.Array = jax.sharding.auto_axes(
    functools.partial(_scatter, length=length), out_sharding=replicated
  )(x)
  return counts


def _scatter(x: jax.Array, length: int) -> jax.Array:
  bits = _bits.magnitude_bits(x)
  fraction_bits = int(jnp.finfo(x.dtype).nmant)
  exponent = bits >> np.array(fraction_bits, bits.dtype)
  # Of a subnormal number the highest bit that is set is its exponent.
  width = np.array(8 * bits.dtype.itemsize, bits.dtype)
  place = jnp.where(
    exponent > 0,
    exponent + np.array(fraction_bits, bits.dtype),
    width - lax.clz(bits),
  )
  counts = jnp.zeros(length, jnp.uint32)
  return counts.at[place.astype(jnp.int32)].add(np.uint32(1))


def _by_comparison(x: jax.Array, length: int) -> jax.Array:
  """Returns uint32[length]: sums, which every accelerator does in one pass."""
  bits = _bits.magnitude_bits(x)
  fraction_bits = int(jnp.finfo(x.dtype).nmant)
  # The bits of every power of two, and of inf: bits order as values do.
  powers = [1 << place for place in range(fraction_bits)]
  powers += [
    exponent << fraction_bits for exponent in range(1, length - fraction_bits)
  ]
  at_least = jnp.sum(
    bits[..., None] >= np.array(powers, bits.dtype),
    axis=tuple(range(x.ndim)),
    dtype=jnp.uint32,
  )
  all_and_none = np.array([x.size, 0], np.uint32)
  at_least = jnp.concatenate([all_and_none[:1], at_least, all_and_none[1:]])
  return at_least[:-1] - at_least[1:]
