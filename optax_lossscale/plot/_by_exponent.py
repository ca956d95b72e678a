"""Plots of gradients by exponent, with the ranges of formats."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
import numpy as np
import numpy.typing as npt

from optax_lossscale import instruments
from optax_lossscale._base import arguments
from optax_lossscale._step import states
from optax_lossscale.plot import axes as axes_lib

_FORMATS = (
  jnp.float16,
  jnp.bfloat16,
  jnp.float8_e4m3fn,
  jnp.float8_e5m2,
)

# A format's row as a share of the height, and its bar as a share of the row.
_ROW, _BAR = 0.075, 0.55

# The gap beside the columns of zeros, inf and NaN, and the columns' width.
_APART, _BROAD = 3.0, 2.0

# The length of the longest path that is shown in full.
_LONGEST = 40
_GAP = "\u2026"


class _Range(NamedTuple):
  """The range of a format, as exponents of 2."""

  name: str
  subnormal: float  # The smallest number.
  normal: float  # The smallest normal number.
  end: float  # The largest number.


class _Shares(NamedTuple):
  """The counts of a histogram as shares of all elements."""

  by_exponent: npt.NDArray[np.float64]
  zeros: float
  nonfinite: float

  @classmethod
  def of(cls, histogram: instruments.ExponentHistogram) -> "_Shares":
    """Returns the shares, all 0 for a histogram without elements."""
    total = max(histogram.total, 1)
    return cls(
      np.asarray(histogram.counts) / total,
      int(histogram.zeros) / total,
      int(histogram.nonfinite) / total,
    )


def exponent_histogram(
  histogram: instruments.ExponentHistogram,
  *,
  loss_scale: ArrayLike | None = None,
  dtypes: Sequence[DTypeLike] = _FORMATS,
  ax: Axes | None = None,
) -> Axes:
  """Draws the share of gradients by exponent, and the ranges of formats.

  It shows what loss scaling is for: gradients to the left of a format's bar
  become 0 in that format. Scaling by S moves gradients right by log2(S).

  Args:
    histogram: true gradients, counted by `instruments.exponent_histogram`. The
      counts may be sums over steps.
    loss_scale: S, a number or float32[], or the state that holds it. If given,
      the plot shows scaled gradients beside the true ones.
    dtypes: the formats to draw, each as a bar that is filled for normal numbers
      and hatched for subnormal ones.
    ax: matplotlib's Axes to draw into; by default, those of a new figure.

  Returns:
    The Axes. Shares are relative to all elements. Zeros are on the left, inf
    and NaN on the right, if there are any. The legend gives the share that is
    0, and the share that becomes 0 in the first of `dtypes`, without S and with
    S. It adds "about" if the exponents alone do not determine a share.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `loss_scale` is not a usable scale.

  Examples:
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> import optax_lossscale as ols
    >>> gradients = jnp.array([0.0, 2.0**-26, 2.0**-20, 2.0**-20])
    >>> histogram = ols.instruments.exponent_histogram(gradients)
    >>> axes = ols.plot.exponent_histogram(
    ...   histogram, loss_scale=1024, ax=Figure().subplots()
    ... )
    >>> for text in axes.get_legend().get_texts():
    ...   print([text.get_text()])
    ['gradients: 25 % are 0, 25 % become 0 in float16']
    ['times S = $2^{10}$: 0 % become 0']
    ['hatched: subnormal numbers of the format']
    ['zeros']
    >>> by_leaf = ols.instruments.histogram_by_leaf({"a": gradients})
    >>> axes = ols.plot.heat_map(by_leaf, ax=Figure().subplots())
    >>> print([label.get_text() for label in axes.get_yticklabels()])
    ['a']

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, figure 3.
  """
  _check_histogram("`histogram` must be an", histogram)
  ranges = [_range_of("dtypes", dtype) for dtype in dtypes]
  shift = _log2_scale(loss_scale)
  shares = _Shares.of(histogram)
  axes = axes_lib.make_axes(ax, height=4.5)
  low, high = _span([histogram], shift, ranges)
  floor = _floor_of(shares)

  told = ["", ""]
  if ranges:
    told[0] = f", {_lost(histogram, shares, 0.0, ranges[0])}"
    told[0] += f" in {ranges[0].name}"
    told[1] = f": {_lost(histogram, shares, shift, ranges[0])}"
  heights = np.maximum(shares.by_exponent, floor)
  edges = np.append(histogram.exponents, histogram.exponents[-1] + 1)
  axes.stairs(
    heights,
    edges,
    baseline=floor,
    fill=True,
    color=axes_lib.SKY_BLUE,
    label=f"gradients: {100 * shares.zeros:.3g} % are 0{told[0]}",
  )
  # Zeros, inf and NaN have no exponent, so each gets a place at the side.
  for name, place, share, color in (
    ("zeros", low - _APART, shares.zeros, axes_lib.BLUE),
    ("inf and NaN", high + _APART, shares.nonfinite, axes_lib.SKIP.color),
  ):
    if share:
      axes.bar(place, share - floor, _BROAD, floor, color=color, label=name)
  if loss_scale is not None:
    axes.stairs(
      heights,
      edges + shift,
      baseline=floor,
      color="black",
      linewidth=1.4,
      label=f"times S = {_written(shift)}{told[1]}",
    )
  axes.set_yscale("log")
  top = _draw_ranges(axes, ranges, floor)
  axes.set_ylim(floor, top)
  _exponent_axis(axes, low, high, has_end=shares.nonfinite > 0)
  axes.set_xlabel(
    "magnitude |g|" if loss_scale is None else "magnitude, of |g| and of S |g|"
  )
  axes.set_ylabel("share of all elements", loc="bottom")
  axes_lib.legend_beside(axes, "lower left", (0.0, 1.0))
  return axes


def heat_map(
  histograms: Mapping[str, instruments.ExponentHistogram],
  dtype: DTypeLike = jnp.float16,
  *,
  loss_scale: ArrayLike | None = None,
  ax: Axes | None = None,
) -> Axes:
  """Draws the share of each layer's gradients by exponent, one row per layer.

  It shows which layers a format suits. Gradients to the left of the first line
  become 0, those between the first and the second are subnormal, and those to
  the right of the third overflow. See `exponent_histogram` for an example.

  Args:
    histograms: histograms by path, from `instruments.histogram_by_leaf`.
    dtype: the format whose range the lines mark.
    loss_scale: S, a number or float32[], or the state that holds it. If given,
      the plot shows scaled gradients.
    ax: matplotlib's Axes to draw into; by default, those of a new figure.

  Returns:
    The Axes. Shares are relative to all elements of a row. Zeros are on the
    left, inf and NaN on the right, if there are any. Long paths lose their
    common beginning first, then their middle.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `histograms` is empty, or `loss_scale` is not a usable scale.
  """
  if not isinstance(histograms, Mapping):
    raise TypeError(
      "`histograms` must be a mapping by path, got "
      f"{arguments.kind_of(histograms)}; call "
      'instruments.histogram_by_leaf(gradients), or pass {"all": histogram}.'
    )
  if not histograms:
    raise ValueError("`histograms` must have at least one, got none.")
  for histogram in histograms.values():
    _check_histogram("Each of `histograms` must be an", histogram)
  limits = _range_of("dtype", dtype)
  shift = _log2_scale(loss_scale)
  shares = [_Shares.of(histogram) for histogram in histograms.values()]
  axes = axes_lib.make_axes(ax, height=1.6 + 0.22 * len(histograms))
  low, high = _span(list(histograms.values()), shift, [limits])
  exponents = next(iter(histograms.values())).exponents
  rows = np.arange(len(histograms) + 1) - 0.5
  how: dict[str, Any] = {
    "norm": LogNorm(min(map(_floor_of, shares)), 1.0),
    "cmap": "cividis_r",  # Darker means more, even in black and white.
  }
  mesh = axes.pcolormesh(
    np.append(exponents, exponents[-1] + 1) + shift,
    rows,
    _masked([share.by_exponent for share in shares]),
    **how,
  )
  # Zeros, inf and NaN have no exponent, so each gets a column at the side.
  for place, column in (
    (low - _APART, [[share.zeros] for share in shares]),
    (high + _APART, [[share.nonfinite] for share in shares]),
  ):
    edges = place + np.array([-0.5, 0.5]) * _BROAD
    axes.pcolormesh(edges, rows, _masked(column), **how)
  for row in rows[1:-1]:
    axes.axhline(row, color="white", linewidth=2)
  _draw_limits(axes, limits)
  axes.figure.colorbar(
    mesh, ax=axes, label="share of a row's elements", fraction=0.05
  )
  axes.set_yticks(
    range(len(histograms)),
    _shortened([str(path) for path in histograms]),
    fontsize="small",
  )
  axes.set_ylim(len(histograms) - 0.5, -0.5)
  has_end = any(share.nonfinite for share in shares)
  _exponent_axis(axes, low, high, has_end=has_end, most=7)
  axes.set_xlabel(
    "|g|" if loss_scale is None else f"S |g|, S = {_written(shift)}"
  )
  return axes


def _draw_ranges(axes: Axes, ranges: Sequence[_Range], floor: float) -> float:
  """Draws a bar per format above the shares; returns the top of the axis."""
  decades = -round(math.log10(floor))
  # Half a row below the bars stays empty.
  height = decades / (1 - _ROW * (len(ranges) + 0.5))

  def at(fraction: float) -> float:
    return math.pow(10.0, fraction * height - decades)

  middles = [at(1 - _ROW * (i + 0.5)) for i in range(len(ranges))]
  for middle, each in zip(middles, ranges, strict=True):
    half = 10.0 ** (_ROW * _BAR / 2 * height)
    rows_of = (middle / half, middle * half - middle / half)
    axes.broken_barh(
      [(each.subnormal, each.normal - each.subnormal)],
      rows_of,
      facecolor="white",
      edgecolor="black",
      hatch="//////",
      linewidth=0.8,
      label="_" * (each != ranges[0])
      + "hatched: subnormal numbers of the format",
    )
    axes.broken_barh(
      [(each.normal, each.end - each.normal)],
      rows_of,
      facecolor=axes_lib.GREY,
      edgecolor="black",
      linewidth=0.8,
    )
  stride = math.ceil(decades / 6)
  ticks = [10.0**-k for k in range(0, decades + 1, stride)]
  axes.set_yticks(
    [*ticks, *middles],
    [*(f"{100 * tick:g} %" for tick in ticks), *(each.name for each in ranges)],
  )
  axes.minorticks_off()
  return at(1.0)


def _shortened(paths: Sequence[str]) -> list[str]:
  """Returns the paths, shortened if necessary to leave room for the rows.

  If a path is long, all lose their common beginning; long ones are then cut.
  """
  if max(map(len, paths)) <= _LONGEST:
    return list(paths)
  if len(paths) > 1:
    parts = [path.split("/") for path in paths]
    columns = zip(*(names[:-1] for names in parts), strict=False)
    same = len(
      list(itertools.takewhile(lambda names: len(set(names)) == 1, columns))
    )
    begin = f"{_GAP}/" if same else ""
    paths = [begin + "/".join(names[same:]) for names in parts]
  half = (_LONGEST - 1) // 2
  return [
    path if len(path) <= _LONGEST else path[:half] + _GAP + path[-half:]
    for path in paths
  ]


def _draw_limits(axes: Axes, limits: _Range) -> None:
  """Draws lines at the limits of a format's range."""
  places = {
    # Half the smallest number is rounded to 0.
    rf"$\leftarrow$ 0 in {limits.name}": (limits.subnormal - 1, ":"),
    rf"$\leftarrow$ subnormal in {limits.name}": (limits.normal, "--"),
    f"largest {limits.name}": (limits.end, "-"),
  }
  for label, (place, linestyle) in places.items():
    axes.axvline(
      place, color="black", linewidth=1.2, linestyle=linestyle, label=label
    )
  axes_lib.legend_beside(axes, "lower right", (1.0, 1.0))


def _masked(shares: npt.ArrayLike) -> np.ma.MaskedArray:
  """Returns a masked array without zeros, which have no logarithm."""
  return np.ma.masked_equal(np.array(shares), 0)


def _check_histogram(rule: str, histogram: object) -> None:
  """Raises if `histogram` is not a histogram."""
  axes_lib.check_kind(
    rule,
    histogram,
    instruments.ExponentHistogram,
    "call instruments.exponent_histogram(gradients), or histogram_by_leaf",
  )


def _range_of(name: str, dtype: DTypeLike) -> _Range:
  """Returns the range of a dtype."""
  found = arguments.check_dtype(name, dtype)
  info = jnp.finfo(found)
  return _Range(
    found.name,
    math.log2(float(info.smallest_subnormal)),
    math.log2(float(info.smallest_normal)),
    math.log2(float(info.max)),
  )


def _log2_scale(loss_scale: ArrayLike | None) -> float:
  """Returns log2(S), by which S moves exponents; 0 without S."""
  if loss_scale is None:
    return 0.0
  return math.log2(float(states.get_loss_scale(loss_scale)))


def _written(shift: float) -> str:
  """Returns S as text: a power of two if it is one, else a number."""
  if shift.is_integer():
    return axes_lib.power_of_two(int(shift))
  return f"{2**shift:.6g}"


def _span(
  histograms: Sequence[instruments.ExponentHistogram],
  shift: float,
  ranges: Sequence[_Range],
) -> tuple[float, float]:
  """Returns the first and last exponent to show.

  Formats as wide as bfloat16 count only if there is nothing else to show.
  """
  narrow = [each for each in ranges if each.end - each.subnormal < 64]
  ends = [x for each in narrow for x in (each.subnormal, each.end)]
  for histogram in histograms:
    for place in histogram.exponents[np.asarray(histogram.counts) > 0]:
      ends += [place, place + 1, place + shift, place + shift + 1]
  if not ends:
    ends = [x for each in ranges for x in (each.subnormal, each.end)]
  return math.floor(min(ends, default=0)), math.ceil(max(ends, default=0)) + 1


def _lost(
  histogram: instruments.ExponentHistogram,
  shares: _Shares,
  shift: float,
  limits: _Range,
) -> str:
  """Returns a text that says what share of elements becomes 0 in a format.

  A bin holds all numbers with the same exponent. If the limit for becoming 0
  lies inside a nonempty bin, the text says "about".
  """
  # Half the smallest number is a tie, which is rounded to 0. `above` is how far
  # this limit is above the start of each bin.
  above = limits.subnormal - 1 - shift - histogram.exponents
  is_open = (above >= 0) & (above < 1)
  about = "about " if shares.by_exponent[is_open].any() else ""
  share = 100 * float(np.sum(shares.by_exponent * np.clip(above, 0, 1)))
  return f"{about}{share:.3g} % become 0"


def _floor_of(shares: _Shares) -> float:
  """Returns the largest power of ten below all nonzero shares."""
  all_shares = [*shares.by_exponent, shares.zeros, shares.nonfinite]
  least = min((share for share in all_shares if share > 0), default=1.0)
  return 10.0 ** min(math.ceil(math.log10(least)) - 1, -2)


def _exponent_axis(
  axes: Axes, low: float, high: float, *, has_end: bool, most: int = 12
) -> None:
  """Labels the x axis: the exponents, zeros, and inf and NaN if present."""
  stride = max(4, 4 * math.ceil((high - low) / (4 * most)))
  exponents = [
    exponent
    for exponent in range(
      math.ceil(low / stride) * stride, int(high) + 1, stride
    )
    # Its label would touch that of the zeros.
    if exponent - (low - _APART) > 0.7 * stride
  ]
  places = [low - _APART, *exponents]
  labels = ["0", *map(axes_lib.power_of_two, exponents)]
  if has_end:
    places.append(high + _APART)
    labels.append("inf,\nNaN")
  axes.set_xticks(places, labels)
  axes.set_xlim(low - _APART - _BROAD, high + (_APART + _BROAD) * has_end)
