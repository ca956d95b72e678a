"""Plots of gradients by exponent, with the ranges of formats."""

from collections.abc import Sequence
import math
import os
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
from optax_lossscale._base import switches
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


@switches.lifted()
def exponent_histogram(
  stats: instruments.LeafStats,
  *,
  loss_scale: ArrayLike | None = None,
  dtypes: Sequence[DTypeLike] = _FORMATS,
  ax: Axes | None = None,
) -> Axes:
  """Draws the share of gradients by exponent, and the ranges of formats.

  Gradients to the left of a format's bar become 0 in it. Scaling by S moves
  gradients right by log2(S).

  Args:
    stats: true gradients, counted by `instruments.leaf_stats`. The counts may
      be sums over steps.
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
    ValueError: if `loss_scale` is not a usable scale, or the first of `dtypes`
      cannot hold 0.

  Examples:
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> import optax_lossscale as ols
    >>> gradients = jnp.array([0.0, 2.0**-26, 2.0**-20, 2.0**-20])
    >>> stats = ols.instruments.leaf_stats({"a": gradients})
    >>> axes = ols.plot.exponent_histogram(stats, ax=Figure().subplots())
    >>> print(axes.get_legend().get_texts()[0].get_text())
    gradients: 25 % are 0, 25 % become 0 in float16
    >>> axes = ols.plot.heat_map(stats, ax=Figure().subplots())
    >>> print([label.get_text() for label in axes.get_yticklabels()])
    ['a']

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, figure 3.
  """
  shares = _shares_of(stats, together=True)
  if not isinstance(dtypes, Sequence) or isinstance(dtypes, str):
    raise TypeError(
      f"`dtypes` must be a list of dtypes, got {arguments.shown(dtypes)}."
    )
  ranges = [_range_of("dtypes", dtype) for dtype in dtypes]
  scale = _scale_of(loss_scale)
  shift = math.log2(scale)
  axes = axes_lib.make_axes(ax, height=4.5)
  low, high = _span(stats, shift, ranges)
  floor = _floor_of(shares)
  *by_exponent, zeros, nonfinite = shares[0]
  told = ["", ""]
  if ranges:
    texts = [_lost(stats, ranges[0], x) for x in (1.0, scale)]
    told = [f", {texts[0]} in {ranges[0].name}", f": {texts[1]}"]
  heights = np.maximum(by_exponent, floor)
  edges = np.append(stats.exponents, stats.exponents[-1] + 1)
  axes.stairs(
    heights,
    edges,
    baseline=floor,
    fill=True,
    color=axes_lib.SKY_BLUE,
    label=f"gradients: {100 * zeros:.3g} % are 0{told[0]}",
  )
  # Zeros, inf and NaN have no exponent, so each gets a place at the side.
  for name, place, share, color in (
    ("zeros", low - _APART, zeros, axes_lib.BLUE),
    ("inf and NaN", high + _APART, nonfinite, axes_lib.SKIP.color),
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
      label=f"times S = {_written(scale)}{told[1]}",
    )
  axes.set_yscale("log")
  top = _draw_ranges(axes, ranges, floor)
  axes.set_ylim(floor, top)
  _exponent_axis(axes, low, high, has_end=nonfinite > 0)
  axes.set_xlabel(
    "magnitude |g|" if loss_scale is None else "magnitude, of |g| and of S |g|"
  )
  axes.set_ylabel("share of all elements", loc="bottom")
  axes_lib.legend_above(axes, "left")
  return axes


@switches.lifted()
def heat_map(
  stats: instruments.LeafStats,
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
    stats: as for `exponent_histogram`.
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
    ValueError: if `stats` has no leaf, or `loss_scale` is not a usable scale.
  """
  shares = _shares_of(stats, together=False)
  count = len(stats.paths)
  if not count:
    raise ValueError("`stats` must have at least one leaf, got none.")
  limits = _range_of("dtype", dtype)
  scale = _scale_of(loss_scale)
  shift = math.log2(scale)
  axes = axes_lib.make_axes(ax, height=1.6 + 0.22 * count)
  low, high = _span(stats, shift, [limits])
  rows = np.arange(count + 1) - 0.5
  how: dict[str, Any] = {
    "norm": LogNorm(_floor_of(shares), 1.0),
    "cmap": "cividis_r",  # Darker means more, even in black and white.
  }
  # Zeros, inf and NaN have no exponent, so each gets a column at the side.
  side = np.array([-0.5, 0.5]) * _BROAD
  edges = np.append(stats.exponents, stats.exponents[-1] + 1) + shift
  mesh, _, _ = (
    # 0 has no logarithm.
    axes.pcolormesh(columns, rows, np.ma.masked_equal(cells, 0), **how)
    for columns, cells in (
      (edges, shares[:, :-2]),
      (low - _APART + side, shares[:, -2:-1]),
      (high + _APART + side, shares[:, -1:]),
    )
  )
  for row in rows[1:-1]:
    axes.axhline(row, color="white", linewidth=2)
  for label, place, linestyle in (
    # Half the smallest number is rounded to 0.
    (rf"$\leftarrow$ 0 in {limits.name}", limits.subnormal - 1, ":"),
    (rf"$\leftarrow$ subnormal in {limits.name}", limits.normal, "--"),
    (f"largest {limits.name}", limits.end, "-"),
  ):
    axes.axvline(
      place, color="black", linewidth=1.2, linestyle=linestyle, label=label
    )
  axes_lib.legend_above(axes, "right")
  axes.figure.colorbar(
    mesh, ax=axes, label="share of a row's elements", fraction=0.05
  )
  names = map(axes_lib.plain, _shortened(stats.paths))
  axes.set_yticks(range(count), [*names], fontsize="small")
  axes.set_ylim(count - 0.5, -0.5)
  has_end = bool(np.any(shares[:, -1]))
  _exponent_axis(axes, low, high, has_end=has_end, most=7)
  axes.set_xlabel(
    "|g|" if loss_scale is None else f"S |g|, S = {_written(scale)}"
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
  """Returns the paths, shortened if necessary to leave room for the rows."""
  if max(map(len, paths)) <= _LONGEST:
    return list(paths)
  # All lose their common beginning, and those that are still long are cut.
  # Characters may be compared, since only whole names are removed.
  prefix = os.path.commonprefix(paths)  # noqa: RUF071
  same, _, _ = prefix.rpartition("/")
  if same and len(paths) > 1:
    paths = [_GAP + path.removeprefix(same) for path in paths]
  half = (_LONGEST - 1) // 2
  return [
    path if len(path) <= _LONGEST else path[:half] + _GAP + path[-half:]
    for path in paths
  ]


def _shares_of(
  stats: instruments.LeafStats, *, together: bool
) -> npt.NDArray[np.float64]:
  """Returns the shares of each leaf in a row, or of all together in one row."""
  axes_lib.check_kind(
    "`stats` must be a",
    stats,
    instruments.LeafStats,
    "call instruments.leaf_stats(gradients)",
  )
  _ = stats.total  # Raises unless it can be read.
  # A column for each exponent, then zeros, then inf and NaN.
  counts = np.column_stack([stats.counts, stats.zeros, stats.nonfinite])
  counts = counts.astype(np.int64)
  if together:
    counts = counts.sum(axis=0, keepdims=True)
  shares: npt.NDArray[np.float64] = counts / np.maximum(
    counts.sum(axis=1, keepdims=True), 1
  )
  return shares


def _range_of(name: str, dtype: DTypeLike) -> _Range:
  found = arguments.check_dtype(name, dtype)
  info = jnp.finfo(found)
  return _Range(
    found.name,
    math.log2(float(info.smallest_subnormal)),
    math.log2(float(info.smallest_normal)),
    math.log2(float(info.max)),
  )


def _scale_of(loss_scale: ArrayLike | None) -> float:
  """Returns S as a number; 1 without S."""
  if loss_scale is None:
    return 1.0
  return float(states.read_scale("loss_scale", loss_scale))


def _written(loss_scale: float) -> str:
  """Returns S as text: a power of two if it is one, else a number."""
  exponent = math.log2(loss_scale)
  if exponent.is_integer():
    return axes_lib.power_of_two(int(exponent))
  return f"{loss_scale:.6g}"


def _span(
  stats: instruments.LeafStats, shift: float, ranges: Sequence[_Range]
) -> tuple[float, float]:
  """Returns the first and last exponent to show."""
  # Formats as wide as bfloat16 count only if there is nothing else to show.
  narrow = [each for each in ranges if each.end - each.subnormal < 64]
  ends = [x for each in narrow for x in (each.subnormal, each.end)]
  found = stats.exponents[np.any(np.asarray(stats.counts), axis=0)]
  for place in found.tolist():
    ends += [place, place + 1, place + shift, place + shift + 1]
  if not ends:
    ends = [x for each in ranges for x in (each.subnormal, each.end)]
  return math.floor(min(ends, default=0)), math.ceil(max(ends, default=0)) + 1


def _lost(
  stats: instruments.LeafStats, limits: _Range, loss_scale: float
) -> str:
  """Returns a text with the share of all elements that a format makes 0."""
  of_nonzero = stats.share_lost(limits.name, loss_scale)
  zeros = int(np.sum(stats.zeros)) / max(stats.total, 1)
  # Half the smallest number, the limit for becoming 0.
  exponent = math.floor(limits.subnormal - 1 - math.log2(loss_scale))
  # Elements with that exponent are counted in proportion, not exactly.
  about = "about " if stats.share(exponent, exponent + 1) else ""
  return f"{about}{100 * (1 - zeros) * of_nonzero:.3g} % become 0"


def _floor_of(shares: npt.NDArray[np.float64]) -> float:
  """Returns the largest power of ten below all nonzero shares."""
  least = np.min(shares[shares > 0], initial=1.0)
  return float(10.0 ** min(math.ceil(math.log10(least)) - 1, -2))


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
