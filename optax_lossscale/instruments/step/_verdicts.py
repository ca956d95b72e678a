"""How the numbers of runs are judged by the laws of a correct step; pure."""

from collections.abc import Mapping
from collections.abc import Sequence
import enum
import math
from typing import NamedTuple

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import scopes
from optax_lossscale.instruments.step import _findings
from optax_lossscale.instruments.step import _next_values
from optax_lossscale.instruments.step._findings import Kind
from optax_lossscale.instruments.step._findings import Law
from optax_lossscale.instruments.step._findings import LawName
from optax_lossscale.instruments.step._findings import Verdict

# How far the updates at two values of S may differ: in float32 and above, where
# powers of two are exact, the largest element; in float16, where a smaller S
# loses low bits and small gradients, the median one. In correct steps of an
# MLP, an LSTM and a transformer at O1, O2 and O3, with SGD and Adam, it was at
# most 1e-4 for S of 2**15 or more, and 7e-3 for S of 2**6 or more.
_ROUNDING = 2.0**-20
_NARROW_ROUNDING = 2.0**-6

# The least cosine of two differences that a mistake makes. In transformers at
# O1 with gradients that are mostly rounding it was at most 0.7.
_ONE_WAY = 0.9

# How closely log2(amax) must follow log2(S).
_SLOPE_ROUNDING = 2.0**-6

# The scale law by the power of S that amax follows.
_SLOPES = {1: Kind.PROPORTIONAL, 0: Kind.UNRELATED, 2: Kind.SQUARED}


class Outcome(enum.Enum):
  """What became of a step of one state, as its counts and amax show."""

  # Its value is what that means if the step's gradients overflow; worst first.

  # With an S of inf: applied with an amax that is not finite, ...
  HIDDEN = Kind.INF_APPLIED
  NOTHING = Kind.TAKEN_BACK  # `update` did not run.
  # ... or skipped, but S is still inf.
  KEPT = Kind.INF_STAYS
  SEVERAL = Kind.SKIPPED_BY_HALF  # Skipped and applied, in several updates.
  OVERFLOW = Kind.NEVER_SKIPS  # An overflow was applied.
  APPLIED = Kind.SET_ASIDE
  REQUESTED = Kind.REQUESTED  # Skipped, as the caller asked.
  SKIPPED = Kind.NOTHING_CHANGED


# The invariance law by what its leaves show, worst first.
_UNEQUAL = Kind.DIFFER, Kind.GUESSED_DIFFER, Kind.MAY_DIFFER, Kind.NEARLY_EQUAL


class _Difference(NamedTuple):
  """How far two updates of a leaf differ."""

  largest: float  # The largest difference over the largest update.
  middle: float  # The median of the elements' relative differences.
  slope: float  # log2 of the ratio of the updates' sums.


def scale_law(amaxes: np.ndarray, halvings: np.ndarray, is_rough: bool) -> Law:
  """Returns the scale law for amax, float[runs, members], as S falls."""
  # From run to run each S is halved as often as `halvings` says, int[members].
  # With float64 gradients, the true amax may be larger than the state can hold.
  most = np.finfo(np.float32).max
  is_usable = np.all((amaxes > 0) & (amaxes < most), axis=0)
  amaxes, halvings = amaxes[:, is_usable], halvings[is_usable]
  slopes = np.log2(amaxes[:-1] / amaxes[1:]) / halvings
  if not slopes.size:
    return _findings.found(Kind.NOTHING_SEEN, LawName.SCALE)
  for slope, kind in _SLOPES.items():
    apart = np.max(np.abs(slopes - slope))
    if apart <= _SLOPE_ROUNDING:
      if slope == 1 and apart:
        kind = Kind.NEARLY if is_rough else _small_part(amaxes, halvings)
      return _findings.found(kind, LawName.SCALE)
  worst = slopes.ravel()[np.argmax(np.abs(slopes - 1))]
  is_unclear = is_rough or abs(worst - 1) < 0.5
  verdict = Verdict.INCONCLUSIVE if is_unclear else Verdict.WRONG
  return _findings.found(Kind.ODD_POWER, LawName.SCALE, verdict, power=worst)


def _small_part(amaxes: np.ndarray, halvings: np.ndarray) -> Kind:
  """Returns what a small part of amax is that does not follow S."""
  # A part that was added is the same at any S; a solver's errors are not.
  apart = amaxes[:-1] - 2.0**halvings * amaxes[1:]
  # Noise in the last bit is at most this large.
  noise = 2.0**-22 * amaxes[0]
  is_seen = np.min(np.abs(apart), axis=0) > noise
  is_same = np.abs(apart[0] - apart[1]) <= np.abs(apart[0]) / 16 + noise / 2
  return Kind.PART_ADDED if np.any(is_seen & is_same) else Kind.NEARLY


def is_same(a: np.ndarray, b: np.ndarray) -> bool:
  """Returns whether two arrays are equal; NaN equals NaN."""
  return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


def _difference(old: np.ndarray, a: np.ndarray, b: np.ndarray) -> _Difference:
  if is_same(a, b):
    return _Difference(0, 0, 0)
  endless = _Difference(math.inf, math.inf, math.nan)
  if not leaves.is_gradient(a):
    return endless
  old, a, b = map(_wide, (old, a, b))
  # Next to a best value of inf, any difference would be small.
  old = np.where(np.isfinite(old), old, 0)
  first, second, apart = np.abs(a - old), np.abs(b - old), np.abs(a - b)
  size = np.maximum(first, second)
  if not np.all(np.isfinite(apart)):
    return endless
  return _Difference(
    np.max(apart) / np.max(size),
    np.median(apart[size > 0] / size[size > 0]),
    np.log2(np.sum(first) / np.sum(second)),
  )


def _wide(x: object) -> np.ndarray:
  """Returns an array in float64, or as wide a complex dtype."""
  return np.asarray(x, np.result_type(x, np.float64))


def _is_one_way(*values: object) -> bool:
  """Returns whether a leaf moves the same way each time that S is halved."""
  # A mistake makes it do so. Rounding errors at three S are independent, so the
  # difference of the first two and that of the last two point apart.
  a, b, c = map(_wide, values)
  first, second = np.ravel(a - b), np.ravel(b - c)
  sizes = np.linalg.norm(first) * np.linalg.norm(second)
  # It is not known if a value is not finite.
  return not np.vdot(first, second).real < _ONE_WAY * sizes


@np.errstate(all="ignore")  # Values may be inf or NaN.
def _compare(values: Sequence[np.ndarray], is_narrow: bool) -> tuple[Kind, str]:
  """Returns whether a leaf depends on S, and how strongly, in words."""
  old, first, again, half, quarter, *low = values
  upper = _difference(old, first, half)
  lower = _difference(old, half, quarter)
  noise = _difference(old, first, again).largest
  most = max(upper.largest, lower.largest)
  if low and most <= _ROUNDING:
    # An addend of scaled gradients matters more as S falls.
    added = _difference(old, first, *low).largest
    if added > 4 * _ROUNDING and added > 64 * noise:
      return Kind.DIFFER, f" ({100 * added:.2g} % at S/4096)"
  if most == 0:
    return Kind.VALUES_ARE_EQUAL, ""
  like = f" like S^{upper.slope:.2g}" if _is_power(upper.slope) else ""
  seen = f" ({100 * most:.2g} %{like})" if most < 2 else ""
  if most <= _ROUNDING:
    return Kind.NEARLY_EQUAL, seen
  # One pair of runs says little about the largest noise in other pairs.
  if 0 < upper.largest <= 64 * noise:
    return Kind.MAY_DIFFER, seen
  if not is_narrow:
    return Kind.DIFFER, seen
  is_random = leaves.is_gradient(first) and not _is_one_way(
    first, half, quarter
  )
  return _compare_narrow(upper, lower, is_random), seen


def _is_power(slope: float) -> bool:
  return 0.5 <= abs(slope) < math.inf


def _compare_narrow(
  upper: _Difference, lower: _Difference, is_random: bool
) -> Kind:
  """Returns whether a leaf depends on S by more than float16 rounds."""
  # Rounding errors grow as S shrinks.
  limit = min(_NARROW_ROUNDING, 2 * lower.middle + _ROUNDING)
  if upper.middle <= limit or is_random:
    return Kind.NEARLY_EQUAL
  # A mistake grows as a power of S, unlike the rounding errors of float16.
  slopes = [upper.slope, lower.slope]
  is_power = _is_power(upper.slope) and np.allclose(
    slopes, round(upper.slope), rtol=0, atol=2.0**-4
  )
  return Kind.DIFFER if is_power else Kind.MAY_DIFFER


@np.errstate(all="ignore")  # Values may be inf or NaN.
def depends(values: Sequence[np.ndarray], is_narrow: bool) -> bool:
  """Returns whether an output differs between values of S, beyond rounding."""
  first, _, half, quarter, *_ = values
  if len({x.shape for x in values}) > 1:
    return True
  if not leaves.is_gradient(first):  # Nothing rounds these.
    same = [is_same(first, x) for x in values]
    return same[1] and not all(same)
  old = np.zeros_like(first)
  kind, _ = _compare([old, *values], is_narrow=False)
  if not is_narrow or kind is not Kind.DIFFER:
    return kind is Kind.DIFFER
  # The limit that the law makes of the smaller S says little of one number.
  pairs = (first, half), (half, quarter)
  largest = max(max(_difference(old, *x)[:2]) for x in pairs)
  is_large = bool(largest > _NARROW_ROUNDING)
  return is_large and _is_one_way(first, half, quarter)


def invariance_law(
  values: Sequence[Mapping[leaves.Path, np.ndarray]],
  doubtful: set[str],
  is_narrow: bool,
) -> Law:
  """Returns the invariance law: whether the next values depend on S."""
  named: dict[Kind, list[str]] = {}
  for path, name in leaves.path_names(values[0]).items():
    # The statistics of FP8 layers follow S, since they see scaled gradients.
    if leaves.overwrites(path):
      continue
    kind, seen = _compare([x[path] for x in values], is_narrow)
    if kind is Kind.DIFFER and _next_values.argument_of(path) in doubtful:
      kind = Kind.GUESSED_DIFFER
    named.setdefault(kind, []).append(name + seen)
  kind = next((x for x in _UNEQUAL if x in named), Kind.VALUES_ARE_EQUAL)
  names = _next_values.listed(named.get(kind, []))
  return _findings.found(kind, LawName.INVARIANCE, names=names)


def skip_law(
  outcomes: set[Outcome],
  changed: Sequence[leaves.Path],
  doubtful: set[str],
  names: Mapping[leaves.Path, str],
) -> Law:
  """Returns the skip law: whether a step that overflowed changed nothing."""
  certain = [x for x in changed if _next_values.argument_of(x) not in doubtful]
  kind = next((x.value for x in Outcome if x in outcomes), Kind.NOTHING_SEEN)
  if kind in (Kind.REQUESTED, Kind.NOTHING_CHANGED):
    kind = Kind.CHANGED if certain else Kind.GUESSED_CHANGED
    kind = kind if changed else Kind.NOTHING_CHANGED
  listed = _next_values.listed([names[x] for x in certain or changed])
  return _findings.found(kind, LawName.SKIP, names=listed)


def precision_law(jaxpr: core.Jaxpr) -> tuple[Law, bool]:
  """Returns the precision law, and whether small numbers may be lost."""
  works: set[np.dtype] = set()
  least = jnp.finfo("float32").minexp
  loses = False
  for _, equation, _ in scopes.operations(jaxpr):
    avals: list[object] = [
      x.aval for x in (*equation.invars, *equation.outvars)
    ]
    floats = {x.dtype for x in avals if leaves.is_gradient(x)}
    narrow = {x for x in floats if leaves.at_least_float32(x) != x}
    if operations.of(equation).form is not operations.Form.CONVERTS:
      works |= narrow
    loses |= equation.params.get("exponent_bits", 8) < 8
    loses |= any(jnp.finfo(x).minexp > least for x in narrow)
  kind = Kind.WORKS_BELOW if works else Kind.ALL_WIDE
  dtypes = ", ".join(sorted(x.name for x in works))
  return _findings.found(kind, LawName.PRECISION, dtypes=dtypes), loses
