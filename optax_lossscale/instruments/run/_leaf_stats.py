"""One table of the leaves of a tree: amax, and elements by exponent."""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
import math

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike
import numpy as np
import numpy.typing as npt
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits as _bits
from optax_lossscale._base import counting
from optax_lossscale._base import formats as _formats
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._base.arguments import shown
from optax_lossscale._step import averages
from optax_lossscale._step import checks
from optax_lossscale._step import devices
from optax_lossscale._step import requirements
from optax_lossscale._step import states
from optax_lossscale.instruments import shared

# The exponents of float32, subnormal numbers included.
_LOWEST, _HIGHEST = -149, 127

# The largest count that a uint32 holds.
_MOST = 2**32 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LeafStats:
  """The largest magnitude and the exponents of each leaf of a tree.

  It is a pytree with one row for each of the n leaves. `a + b` counts two trees
  of the same leaves together, such as the gradients of two steps, also inside
  jit. Each count wraps around at 2**32. Methods that return Python numbers read
  the arrays on the host, and raise a TypeError if these are traced and a
  ValueError if they are a stack of several `LeafStats`.

  Attributes:
    counts: uint32[n, 277], how many non-zero finite elements have each
      exponent, `floor(log2(abs(g)))`, from -149, that of the smallest float32,
      to 127.
    zeros: uint32[n], how many elements are 0.
    subnormals: uint32[n], how many are subnormal in the dtype of their leaf;
      `counts` includes them.
    nonfinite: uint32[n], how many are inf or NaN.
    amax: float32[n], or float64[n] if a leaf is wider than float32; the largest
      absolute value. It is inf or NaN if the leaf holds one, and NaN if it
      holds both. The magnitude of a complex number is that of its larger part.
    paths: the path of each leaf, such as "Dense_0/kernel".
    dtypes: the dtype of each leaf; of a complex one, that of its parts.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> gradients = {"w": jnp.array([0.0, 0.75, -0.5, 1.0]), "b": jnp.ones(4)}
    >>> stats = ols.instruments.leaf_stats(gradients)
    >>> stats.share(-1, 0)
    0.25
    >>> w = stats.leaf("w")
    >>> print(w.exponents[w.counts[0] > 0], w.zeros, w.amax, w.total)
    [-1  0] [1] [1.] 4
  """

  counts: jax.Array
  zeros: jax.Array
  subnormals: jax.Array
  nonfinite: jax.Array
  amax: jax.Array
  paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
  dtypes: tuple[np.dtype, ...] = dataclasses.field(metadata={"static": True})
  # Two paths may have one text where a key holds a slash.
  _keys: tuple[leaves.Path, ...] = dataclasses.field(
    default=(), repr=False, metadata={"static": True}
  )

  def __add__(self, other: object) -> "LeafStats":
    if not isinstance(other, LeafStats):
      return NotImplemented
    if (self.paths, self.dtypes) != (other.paths, other.dtypes):
      raise ValueError(
        "The two sides of + must be of the same leaves, got "
        f"{shown(self.paths)} and {shown(other.paths)}, of dtypes "
        f"{shown(self.dtypes)} and {shown(other.dtypes)}."
      )
    both = map(_bits.magnitude_bits, (self.amax, other.amax))
    amax = lax.bitcast_convert_type(jnp.maximum(*both), self.amax.dtype)
    total: LeafStats = jax.tree.map(jnp.add, self, other)
    return dataclasses.replace(total, amax=amax)

  @property
  def exponents(self) -> npt.NDArray[np.int64]:
    """int64[277], the exponent of each column of `counts`."""
    return np.arange(_LOWEST, _HIGHEST + 1)

  @property
  def total(self) -> int:
    """The number of elements of all leaves, including zeros, inf and NaN."""
    found = self.counts, self.zeros, self.nonfinite
    return sum(int(self._known(x).sum()) for x in found)

  @switches.lifted()
  def leaf(self, path: str) -> "LeafStats":
    """Returns the row of one leaf, on which every method works as on all.

    Args:
      path: one of `paths`.

    Raises:
      ValueError: if there is no such leaf.
    """
    if not isinstance(path, str) or path not in self.paths:
      raise ValueError(
        f"`path` must be that of a leaf, got {shown(path)}; the leaves are "
        f"{shown(self.paths)}."
      )
    i = self.paths.index(path)
    row: LeafStats = jax.tree.map(lambda x: x[i : i + 1], self)
    return dataclasses.replace(
      row, paths=(path,), dtypes=(self.dtypes[i],), _keys=self._keys[i : i + 1]
    )

  def share(self, low: int, high: int) -> float:
    """Returns the share of all elements with `2**low <= abs(g) < 2**high`.

    Args:
      low: the lowest exponent.
      high: the first exponent that is not included.

    Returns:
      A share from 0 to 1; 0 if there are no elements.

    Raises:
      TypeError: if an exponent is not an integer.
    """
    low = arguments.check_integer("low", low, unit="")
    high = arguments.check_integer("high", high, unit="")
    is_between = (self.exponents >= low) & (self.exponents < high)
    counted = self._known(self.counts)[:, is_between].sum()
    return float(counted / max(self.total, 1))

  @switches.lifted()
  def share_lost(
    self,
    dtype: DTypeLike = jnp.float16,
    loss_scale: optax.OptState = 1.0,
  ) -> float:
    """Returns the share of the non-zero elements that become 0 in a dtype.

    Loss scaling exists to reduce this share. The backward pass may lose more on
    the way to these gradients, which only `gradient_error` shows. An element
    counts as lost if S times it is below half the smallest number of `dtype`,
    so below 2**-25 in float16, but not if it is exactly that half. If S is not
    a power of two, the limit is inside the range of one exponent, whose
    elements count in proportion.

    Args:
      dtype: the computation's dtype, such as jnp.float16 or jnp.float8_e5m2.
      loss_scale: S, a number or float32[], or the state that holds it. Leave it
        at 1 for gradients that are already scaled.

    Returns:
      A share from 0 to 1; 0 if all elements are 0. inf and NaN are non-zero.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype.
      ValueError: if `dtype` cannot hold 0, or `loss_scale` is not a usable
        scale.
    """
    target = arguments.check_dtype("dtype", dtype)
    if target == jnp.float8_e8m0fnu:
      raise ValueError(
        "`dtype` must be able to hold 0, or nothing becomes 0 in it, got "
        "float8_e8m0fnu."
      )
    counts, zeros = self._known(self.counts), self._known(self.zeros)
    scale = float(states.read_scale("loss_scale", loss_scale))
    smallest = float(jnp.finfo(target).smallest_subnormal)
    limit = math.log2(smallest) - 1 - math.log2(scale)
    # The part of each exponent's range that is below the limit.
    is_lost = np.clip(limit - self.exponents, 0, 1)
    nonzero = self.total - int(zeros.sum())
    return float(np.sum(counts * is_lost)) / max(nonzero, 1)

  def headroom(
    self, check: checks.Check = checks.nonfinite()
  ) -> dict[str, float]:
    """Returns how many more times S could have doubled, leaf by leaf.

    Args:
      check: the check of `loss_scaling`, which names the computation's dtypes.
        A tree of dtypes is matched with the leaves by path.

    Returns:
      The bits of each leaf by its path: -inf if amax is inf, NaN if amax is NaN
      or 0, since the headroom is then unknown.

    Raises:
      TypeError: if `check` is not a check.
      ValueError: if the check's tree of dtypes does not fit the leaves.
    """
    requirements.check_check(check)
    amaxes = self._known(self.amax).tolist()
    headroom = {}
    rows = zip(self.paths, self._keys, self.dtypes, amaxes, strict=True)
    for path, key, dtype, amax in rows:
      limit = _formats.limit(dtype, _computation_dtype(check, key, path, dtype))
      headroom[path] = _headroom(amax, limit)
    return headroom

  def first_to_overflow(self, check: checks.Check = checks.nonfinite()) -> str:
    """Returns the path of the leaf that overflowed, or will overflow next.

    This leaf keeps S down, so its layer is the one to compute in float32 or to
    check for a fault. An inf takes precedence over a NaN, because a backward
    pass turns inf into NaN in all earlier layers, but never NaN into inf. Of
    several leaves that overflowed, it returns the first in the tree; the
    gradients of a clean step tell which one overflows first.

    Args:
      check: as for `headroom`.

    Returns:
      One of `paths`; the first if all elements are 0.

    Raises:
      TypeError: if `check` is not a check.
      ValueError: if there is no leaf, or if the check's tree of dtypes does not
        fit the leaves.
    """
    headroom = self.headroom(check)
    if not headroom:
      raise ValueError(
        "The tree must have a floating or complex leaf for one to overflow, "
        "got none."
      )
    amax = dict(zip(self.paths, self._known(self.amax), strict=True))
    # An inf comes first, then NaN, then the least headroom, then zeros.
    return min(
      self.paths,
      key=lambda path: (
        not np.isinf(amax[path]),
        not np.isnan(amax[path]),
        amax[path] == 0,
        headroom[path],
      ),
    )

  def _known(self, x: jax.Array) -> np.ndarray:
    """Returns an array on the host, counts as int64, or raises."""
    if isinstance(x, jax.core.Tracer):
      raise TypeError(
        "A LeafStats must be known to be read, got a traced one; return it "
        "from the jitted function, and read it on the host."
      )
    if np.ndim(self.amax) != 1:
      raise ValueError(
        "A LeafStats must be one to be read, got `amax` of shape "
        f"{np.shape(self.amax)}; of several that are stacked take one, "
        "jax.tree.map(lambda x: x[0], stats), or add them up as they come."
      )
    with switches.lifted():
      known = np.asarray(x)
    return known if x is self.amax else known.astype(np.int64)


def leaf_stats(
  tree: ArrayTree,
  *,
  axis_name: Hashable | Sequence[Hashable] | None = None,
) -> LeafStats:
  """Returns the amax of each leaf of a tree, and its elements by exponent.

  It shows which gradients a format can hold, where S would move them, and which
  leaf overflows first. It is usable inside jit. Elements are classified by
  their bits, so subnormal numbers do not count as 0 even on a backend that
  flushes them to 0.

  Args:
    tree: gradients or any other arrays. Leaves that are not floating or complex
      are left out, and so is Flax's `_overwrite_with_gradient`. Each part of a
      complex number is an element. float64 elements below or above the range
      of float32 count at its lowest or highest exponent.
    axis_name: a mapped axis of `shard_map`, `pmap` or `vmap`, or several in a
      tuple or list, over whose devices to take sums and the largest amax. An
      array that all devices hold counts once for each. By default each device
      counts its own elements. Under jit with sharding leave it out: the counts
      are those of whole arrays.

  Returns:
    The stats, for `plot.exponent_histogram` and `plot.heat_map`, or to be read
    on the host.

  Raises:
    TypeError: if `axis_name` is not an axis name.
    ValueError: if there is no such axis, or if a leaf has 2**32 elements or
      more.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> scaled_grads = {
    ...   "bias": jnp.array([2.0**-24, 2.0**-26, 0.0]),
    ...   "kernel": jnp.array([[16376.0, 1.0]]),
    ... }
    >>> stats = ols.instruments.leaf_stats(scaled_grads)
    >>> stats.share_lost(jnp.float16)
    0.25
    >>> stats.leaf("bias").share_lost(jnp.float16, loss_scale=2.0)
    0.0
    >>> check = ols.nonfinite(jnp.float16)
    >>> path = stats.first_to_overflow(check)
    >>> print(path, stats.headroom(check)[path])
    kernel 2.0

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, figure 3.
  """
  names = devices.axis_names("axis_name", axis_name)
  if names:
    tree = averages.make_varying(tree, names)
  named = shared.named(tree)
  copies = math.prod(map(lax.axis_size, names))
  for path, x in named.items():
    size = x.size * len(_bits.parts(x)) * copies
    # The size is a symbol in an exported program.
    if isinstance(size, int) and size > _MOST:
      raise ValueError(
        f"a leaf of `tree` must have fewer than 2**32 elements, got {size} at "
        f"{path!r}."
      )
  dtypes = tuple(np.dtype(jnp.finfo(x.dtype).dtype) for x in named.values())
  wide = np.dtype(np.float64 if np.float64 in dtypes else np.float32)
  # No rows, for a tree without leaves.
  none = jnp.zeros((0, _HIGHEST - _LOWEST + 1), jnp.uint32)
  empty = (none, *3 * [none[:, 0]], none[:, 0].astype(wide))
  rows = (_row(x, wide) for x in named.values())
  *sums, amax = map(jnp.concatenate, zip(empty, *rows, strict=True))
  if names and named:
    sums = lax.psum(sums, names)
    # A maximum over floats would drop NaN.
    largest = lax.pmax(_bits.magnitude_bits(amax), names)
    amax = lax.bitcast_convert_type(largest, amax.dtype)
  counts, zeros, subnormals, nonfinite = sums
  keys = tuple(shared.by_path(tree))
  return LeafStats(
    counts, zeros, subnormals, nonfinite, amax, tuple(named), dtypes, keys
  )


def _headroom(amax: float, limit: float) -> float:
  """Returns log2(limit / amax), exact for powers of two."""
  if amax == 0 or not math.isfinite(amax):
    return -amax if amax else math.nan
  fraction, exponent = math.frexp(amax)
  largest, largest_exponent = math.frexp(limit)
  return largest_exponent - exponent + math.log2(largest / fraction)


def _computation_dtype(
  check: checks.Check, key: leaves.Path, name: str, own: np.dtype
) -> np.dtype | None:
  """Returns the dtype that a check names for a leaf; None for its own."""
  if checks.is_function(check.dtype):
    leaf = jax.ShapeDtypeStruct((), own)
    [(_, dtype)] = checks.with_computation_dtypes(check, {name: leaf})
    return dtype
  given = dict(jax.tree.leaves_with_path(check.dtype, is_leaf=leaves.is_none))
  found = [given[key[:i]] for i in range(len(key) + 1) if key[:i] in given]
  if not found:
    raise ValueError(
      "`dtype` must be a tree of dtypes whose structure is a prefix of the "
      f"gradients', got none for the one at {name!r}."
    )
  return found[0]


# Jitted even if the caller is not, since each operation would otherwise write
# arrays as large as the gradients.
@functools.partial(jax.jit, static_argnums=1)
def _row(x: jax.Array, wide: DTypeLike) -> tuple[jax.Array, ...]:
  """Returns the row of one leaf: counts, and its amax in a wide dtype."""
  dtype = _formats.carrier(jnp.finfo(x.dtype).dtype)
  info = jnp.finfo(dtype)
  # The exponents of the smallest subnormal number and of the largest number.
  lowest, highest = int(info.minexp) - int(info.nmant), int(info.maxexp) - 1
  # One place for zeros, one for each exponent, one for non-finite elements.
  length = highest - lowest + 3
  by_place = jnp.zeros(length, jnp.uint32)
  for part in _bits.parts(x):
    by_place += counting.count(
      lambda y: _by_comparison(_bits.carried(y), length),
      [part],
      # To compare each element with every exponent is fifty times slower there.
      on_cpu=lambda y: _by_scatter(_bits.carried(y), length),
    )
  finite = by_place[1:-1]
  exponents = np.clip(np.arange(lowest, highest + 1), _LOWEST, _HIGHEST)
  # The exponent of the smallest normal number in the array's own dtype.
  normal = math.frexp(float(jnp.finfo(x.dtype).smallest_normal))[1] - 1
  subnormals = jnp.sum(finite[: normal - lowest], dtype=jnp.uint32)
  counts = jnp.zeros(_HIGHEST - _LOWEST + 1, jnp.uint32)
  counts = counts.at[exponents - _LOWEST].add(finite)
  # In one loop with the counts it would take longer than in two reads.
  amax = _bits.amax(_bits.parts(x)).astype(wide)
  row = counts, by_place[0], subnormals, by_place[-1], amax
  return jax.tree.map(lambda x: x[None], row)


def _by_scatter(x: jax.Array, length: int) -> jax.Array:
  """Returns the counts, uint32[length], by one addition per element."""

  def scatter(x: jax.Array) -> jax.Array:
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

  mesh = jax.typeof(x).sharding.mesh
  if AxisType.Explicit not in mesh.axis_types:
    return scatter(x)
  # JAX cannot shard a scatter in explicit mode, but the compiler can: each
  # device counts its part, and the counts are added.
  replicated = jax.NamedSharding(mesh, jax.P())
  sharded = jax.sharding.auto_axes(scatter, out_sharding=replicated)
  counts: jax.Array = sharded(x)
  return counts


def _by_comparison(x: jax.Array, length: int) -> jax.Array:
  """Returns the counts, uint32[length], in one pass on an accelerator."""
  bits = _bits.magnitude_bits(x)
  fraction_bits = int(jnp.finfo(x.dtype).nmant)
  # The bits of 0, of every power of two and of inf. Larger values have larger
  # bits.
  limits = [0, *(1 << place for place in range(fraction_bits))]
  limits += [x << fraction_bits for x in range(1, length - fraction_bits)]
  at_least = jnp.sum(
    bits[..., None] >= np.array(limits, bits.dtype, ndmin=x.ndim + 1),
    axis=tuple(range(x.ndim)),
    dtype=jnp.uint32,
  )
  return at_least - jnp.append(at_least[1:], np.zeros(1, np.uint32))
