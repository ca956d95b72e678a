"""Histograms of exponents, which show where gradients lie."""

import functools
import math
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import numpy.typing as npt

from optax_lossscale._base import bits as _bits
from optax_lossscale.instruments import _elements

# The exponents of float32, subnormal numbers included.
_LOWEST, _HIGHEST = -149, 127

# The largest count that a uint32 holds.
_MOST = 2**32 - 1


class ExponentHistogram(NamedTuple):
  """The number of elements at each exponent, `floor(log2(abs(g)))`.

  It is a pytree of counts. `jax.tree.map(jnp.add, a, b)` adds two histograms,
  and `jax.lax.psum(histogram, "data")` adds those of a `shard_map`'s devices.

  Attributes:
    counts: uint32[277], how many non-zero finite elements have each exponent,
      from -149, that of the smallest float32, to 127.
    zeros: uint32[], how many elements are 0.
    subnormals: uint32[], how many are subnormal in the dtype of their array;
      `counts` includes them.
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
    """int64[277], the exponent of each entry of `counts`."""
    return np.arange(_LOWEST, _HIGHEST + 1)

  @property
  def total(self) -> int:
    """The number of elements, including zeros, inf and NaN.

    Raises:
      TypeError: if the histogram is traced.
      ValueError: if it is a stack of several histograms.
    """
    _check_one(self)
    counted = np.asarray(self.counts).sum(dtype=np.int64)
    return int(counted) + int(self.zeros) + int(self.nonfinite)

  def share(self, low: int, high: int) -> float:
    """Returns the share of all elements with `2**low <= abs(g) < 2**high`.

    Args:
      low: the lowest exponent.
      high: the first exponent that is not included.

    Returns:
      A share from 0 to 1; 0 if the histogram is empty.

    Raises:
      TypeError: if the histogram is traced.
      ValueError: if it is a stack of several histograms.
    """
    _check_one(self)
    is_between = (self.exponents >= low) & (self.exponents < high)
    counted = np.asarray(self.counts)[is_between].sum(dtype=np.int64)
    return float(counted / max(self.total, 1))


def exponent_histogram(tree: ArrayTree) -> ExponentHistogram:
  """Returns the number of elements of a tree at each exponent.

  It shows which gradients a format can hold and where S would move them. It is
  usable inside jit. Each element is read once and classified by its bits, so
  subnormal numbers do not count as 0 even on a backend that flushes them to 0.

  Args:
    tree: gradients or any other arrays. Leaves that are not floating or complex
      are left out, and so is Flax's `_overwrite_with_gradient`. Each part of a
      complex number is an element. float64 elements below or above the range
      of float32 count at its lowest or highest exponent. Under `shard_map` each
      device counts its own elements.

  Returns:
    The histogram; read its `counts`, `zeros`, `subnormals` and `nonfinite` on
    the host.

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


def histogram_by_leaf(tree: ArrayTree) -> dict[str, ExponentHistogram]:
  """Returns a histogram of each leaf, to show which layers are out of range.

  Usable inside jit. See `exponent_histogram` for an example.

  Args:
    tree: as for `exponent_histogram`.

  Returns:
    A histogram for each leaf, by its path, such as "Dense_0/kernel".

  Raises:
    ValueError: if a leaf has 2**32 elements or more.
  """
  return {
    path: exponent_histogram(x) for path, x in _elements.named(tree).items()
  }


def _check_one(histogram: ExponentHistogram) -> None:
  """Raises if a histogram is traced or stacked and so cannot be read."""
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


# Jitted even if the caller is not, since each operation would otherwise write
# arrays as large as the gradients.
@jax.jit
def _histogram(x: jax.Array) -> ExponentHistogram:
  """Returns the histogram of one array."""
  dtype = _bits.carrier(jnp.finfo(x.dtype).dtype)
  info = jnp.finfo(dtype)
  # The exponents of the smallest subnormal number and of the largest number.
  lowest, highest = int(info.minexp) - int(info.nmant), int(info.maxexp) - 1
  # One place for zeros, one for each exponent, one for non-finite elements.
  length = highest - lowest + 3
  by_place = jnp.zeros(length, jnp.uint32)
  for part in _bits.parts(x):
    by_place += _elements.count(
      lambda y: _by_comparison(_bits.carried(y), length),
      length,
      [part],
      on_cpu=lambda y: _by_scatter(_bits.carried(y), length),
    )
  finite = by_place[1:-1]
  exponents = np.clip(np.arange(lowest, highest + 1), _LOWEST, _HIGHEST)
  # The exponent of the smallest normal number in the array's own dtype.
  normal = math.frexp(float(jnp.finfo(x.dtype).smallest_normal))[1] - 1
  return ExponentHistogram(
    counts=_empty().counts.at[exponents - _LOWEST].add(finite),
    zeros=by_place[0],
    subnormals=jnp.sum(finite[: normal - lowest], dtype=jnp.uint32),
    nonfinite=by_place[-1],
  )


def _by_scatter(x: jax.Array, length: int) -> jax.Array:
  """Returns the counts, uint32[length], by one addition per element.

  On a CPU, comparing each element with every exponent is fifty times slower.
  """
  axis_types = jax.typeof(x).sharding.mesh.axis_types
  if AxisType.Explicit not in axis_types:
    return _scatter(x, length)
  # JAX cannot shard a scatter in explicit mode, but the compiler can: each
  # device counts its part, and the counts are added.
  replicated = jax.NamedSharding(jax.typeof(x).sharding.mesh, jax.P())
  counts: jax.Array = jax.sharding.auto_axes(
    functools.partial(_scatter, length=length), out_sharding=replicated
  )(x)
  return counts


def _scatter(x: jax.Array, length: int) -> jax.Array:
  bits = _bits.magnitude_bits(x)
  fraction_bits = int(jnp.finfo(x.dtype).nmant)
  exponent = bits >> np.array(fraction_bits, bits.dtype)
  # The highest set bit of a subnormal number gives its exponent.
  width = np.array(8 * bits.dtype.itemsize, bits.dtype)
  place = jnp.where(
    exponent > 0,
    exponent + np.array(fraction_bits, bits.dtype),
    width - lax.clz(bits),
  )
  counts = jnp.zeros(length, jnp.uint32)
  return counts.at[place.astype(jnp.int32)].add(np.uint32(1))


def _by_comparison(x: jax.Array, length: int) -> jax.Array:
  """Returns the counts, uint32[length], in one pass on an accelerator."""
  bits = _bits.magnitude_bits(x)
  fraction_bits = int(jnp.finfo(x.dtype).nmant)
  # The bits of every power of two and of inf. Larger values have larger bits.
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
