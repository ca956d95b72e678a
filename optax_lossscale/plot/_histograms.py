"""Where gradients live, beside what each format can hold."""

from collections.abc import Sequence
import math
from typing import Any

import jax.numpy as jnp
from matplotlib.axes import Axes
import numpy as np

from optax_lossscale.instruments import _histograms
from optax_lossscale.plot import _axes
from optax_lossscale.plot import _exponents

_FORMATS = (
  jnp.float16,
  jnp.bfloat16,
  jnp.float8_e4m3fn,
  jnp.float8_e5m2,
)

# How much of the height a format's row takes, and its bar of that.
_ROW, _BAR = 0.075, 0.55


def exponent_histogram(
  histogram: _histograms.ExponentHistogram,
  *,
  loss_scale: Any = None,
  dtypes: Sequence[Any] = _FORMATS,
  ax: Any = None,
) -> Axes:
  """Draws the share of the gradients by exponent, over what formats can hold.

  It shows what loss scaling is for: gradients on the left of a format's bar
  become 0 in it. With S all move to the right by log2 S.

  Args:
    histogram: of true gradients, by `instruments.exponent_histogram`; its
      counts may be sums over steps.
    loss_scale: S, a number or float32[], or the state that holds it. With it
      the gradients are drawn as they are and multiplied by S.
    dtypes: the formats; of each a bar, filled for normal numbers and hatched
      for subnormal ones.
    ax: matplotlib's Axes to draw into; without it a figure is made.

  Returns:
    The Axes. Shares are those of all elements; zeros stand on the left, inf and
    NaN on the right, if there are any. The legend tells which share is 0, and
    which becomes 0 in the first of `dtypes`, without S and with it; "about"
    where an exponent alone does not tell.

  Raises:
    TypeError: if an argument is not of its kind.
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

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, figure 3.
  """
  _exponents.check_histogram("`histogram` must be an", histogram)
  ranges = [_exponents.range_of("dtypes", dtype) for dtype in dtypes]
  shift = _exponents.log2_scale(loss_scale)
  shares = _exponents.Shares.of(histogram)
  axes = _axes.make_axes(ax, height=4.5)
  low, high = _exponents.span([histogram], shift, ranges)
  floor = _exponents.floor_of(shares)

  told = ["", ""]
  if ranges:
    told[0] = f", {_exponents.lost(histogram, shares, 0.0, ranges[0])}"
    told[0] += f" in {ranges[0].name}"
    told[1] = f": {_exponents.lost(histogram, shares, shift, ranges[0])}"
  _draw_shares(axes, histogram, shares, (low, high), floor, told[0])
  if loss_scale is not None:
    axes.stairs(
      np.maximum(shares.by_exponent, floor),
      np.append(histogram.exponents, histogram.exponents[-1] + 1) + shift,
      baseline=floor,
      color="black",
      linewidth=1.4,
      label=f"times S = {_exponents.written(shift)}{told[1]}",
    )
  axes.set_yscale("log")
  top = _draw_ranges(axes, ranges, floor)
  axes.set_ylim(floor, top)
  _exponents.exponent_axis(axes, low, high, has_end=shares.nonfinite > 0)
  axes.set_xlabel(
    "magnitude |g|" if loss_scale is None else "magnitude, of |g| and of S |g|"
  )
  axes.set_ylabel("share of all elements", loc="bottom")
  axes.legend(
    fontsize="small",
    frameon=False,
    loc="lower left",
    bbox_to_anchor=(0.0, 1.0),
  )
  return axes


def _draw_shares(
  axes: Axes,
  histogram: _histograms.ExponentHistogram,
  shares: _exponents.Shares,
  span: tuple[float, float],
  floor: float,
  told: str,
) -> None:
  """Draws the gradients as they are, with what has no exponent beside them."""
  axes.stairs(
    np.maximum(shares.by_exponent, floor),
    np.append(histogram.exponents, histogram.exponents[-1] + 1),
    baseline=floor,
    fill=True,
    color=_axes.SKY_BLUE,
    label=f"gradients: {100 * shares.zeros:.3g} % are 0{told}",
  )
  beside = [
    (span[0] - _exponents.APART, shares.zeros),
    (span[1] + _exponents.APART, shares.nonfinite),
  ]
  for place, share in beside:
    if share:
      axes.bar(
        place, share - floor, _exponents.BROAD, bottom=floor, color=_axes.BLUE
      )


def _draw_ranges(
  axes: Axes, ranges: Sequence[_exponents.Range], floor: float
) -> float:
  """Draws a bar for each format above the shares; returns the axis' end."""
  decades = -round(math.log10(floor))
  # Half a row is left free below them.
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
    )
    axes.broken_barh(
      [(each.normal, each.end - each.normal)],
      rows_of,
      facecolor=_axes.GREY,
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
