"""What both pictures of histograms draw: shares, formats, exponents."""

from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
from matplotlib.axes import Axes
import numpy as np
import numpy.typing as npt

from optax_lossscale._base import arguments
from optax_lossscale._step import states
from optax_lossscale.instruments import _histograms
from optax_lossscale.plot import _axes

# How far beside the exponents that which has none is drawn, and how broad.
APART, BROAD = 3.0, 2.0


class Range(NamedTuple):
  """What a format can hold, as exponents of 2: from which to which.

  Attributes:
    name: of the format.
    subnormal: its smallest subnormal number.
    normal: its smallest normal number.
    end: its largest number.
  """

  name: str
  subnormal: float
  normal: float
  end: float


class Shares(NamedTuple):
  """The counts of a histogram as shares of all elements."""

  by_exponent: npt.NDArray[np.float64]
  zeros: float
  nonfinite: float

  @classmethod
  def of(cls, histogram: _histograms.ExponentHistogram) -> "Shares":
    """Returns the shares; 0 where there is no element."""
    total = max(histogram.total, 1)
    return cls(
      np.asarray(histogram.counts) / total,
      int(histogram.zeros) / total,
      int(histogram.nonfinite) / total,
    )


def check_histogram(rule: str, histogram: Any) -> None:
  """Raises if what is to be drawn is no histogram."""
  _axes.check_kind(
    rule,
    histogram,
    _histograms.ExponentHistogram,
    "call instruments.exponent_histogram(gradients), or histogram_by_leaf",
  )


def range_of(name: str, dtype: Any) -> Range:
  """Returns the range of a dtype."""
  found, got = arguments.read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"`{name}` must be a floating-point dtype such as jnp.float16, got {got}."
    )
  info = jnp.finfo(found)
  return Range(
    got,
    math.log2(float(info.smallest_subnormal)),
    math.log2(float(info.smallest_normal)),
    math.log2(float(info.max)),
  )


def log2_scale(loss_scale: Any) -> float:
  """Returns by how much S moves exponents; 0 without one."""
  if loss_scale is None:
    return 0.0
  return math.log2(float(states.get_loss_scale(loss_scale)))


def written(shift: float) -> str:
  """Returns S as a power of two, or as a number."""
  if shift.is_integer():
    return _axes.power_of_two(int(shift))
  return f"{2**shift:.6g}"


def span(
  histograms: Sequence[_histograms.ExponentHistogram],
  shift: float,
  ranges: Sequence[Range],
) -> tuple[float, float]:
  """Returns from which exponent to which there is something to show.

  A format as wide as bfloat16 is shown as far as there is something else.
  """
  narrow = [each for each in ranges if each.end - each.subnormal < 64]
  ends = [x for each in narrow for x in (each.subnormal, each.end)]
  for histogram in histograms:
    for place in histogram.exponents[np.asarray(histogram.counts) > 0]:
      ends += [place, place + 1, place + shift, place + shift + 1]
  if not ends:
    ends = [x for each in ranges for x in (each.subnormal, each.end)]
  return math.floor(min(ends, default=0)), math.ceil(max(ends, default=0)) + 1


def lost(
  histogram: _histograms.ExponentHistogram,
  shares: Shares,
  shift: float,
  limits: Range,
) -> str:
  """Returns which share of all elements becomes 0 in a format, in words.

  Bins do not tell a number from another one with its exponent: where the limit
  is within one that is not empty, the share is "about" so much.
  """
  # Half of the smallest number is a tie, and rounded to 0. How far it is above
  # the begin of each bin:
  above = limits.subnormal - 1 - shift - histogram.exponents
  is_open = (above >= 0) & (above < 1)
  about = "about " if shares.by_exponent[is_open].any() else ""
  share = 100 * float(np.sum(shares.by_exponent * np.clip(above, 0, 1)))
  return f"{about}{share:.3g} % become 0"


def floor_of(shares: Shares) -> float:
  """Returns the power of ten below all shares that are not 0."""
  all_shares = [*shares.by_exponent, shares.zeros, shares.nonfinite]
  least = min((share for share in all_shares if share > 0), default=1.0)
  return 10.0 ** min(math.ceil(math.log10(least)) - 1, -2)


def exponent_axis(
  axes: Axes, low: float, high: float, *, has_end: bool, most: int = 12
) -> None:
  """Makes the x axis one of exponents, with a place for what has none."""
  stride = max(4, 4 * math.ceil((high - low) / (4 * most)))
  exponents = list(
    range(math.ceil(low / stride) * stride, int(high) + 1, stride)
  )
  places = [low - APART, *exponents]
  labels = ["0", *map(_axes.power_of_two, exponents)]
  if has_end:
    places.append(high + APART)
    labels.append("inf,\nNaN")
  axes.set_xticks(places, labels)
  axes.set_xlim(low - APART - BROAD, high + (APART + BROAD) * has_end)
