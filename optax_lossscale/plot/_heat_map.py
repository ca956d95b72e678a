"""Where the gradients of each layer live, as a heat map."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
import numpy as np

from optax_lossscale.instruments import _histograms
from optax_lossscale.plot import _axes
from optax_lossscale.plot import _exponents


def heat_map(
  histograms: Mapping[str, _histograms.ExponentHistogram],
  dtype: Any = jnp.float16,
  *,
  loss_scale: Any = None,
  ax: Any = None,
) -> Axes:
  """Draws the share of each layer's gradients by exponent, a row a layer.

  It shows which layers a format suits: those on the left of the first line
  become 0 in it, between the first and the second they are subnormal, and on
  the right of the third they overflow.

  Args:
    histograms: by path, by `instruments.histogram_by_leaf`.
    dtype: the format whose range the lines mark.
    loss_scale: S, a number or float32[], or the state that holds it. With it
      the gradients are drawn multiplied by S.
    ax: matplotlib's Axes to draw into; without it a figure is made.

  Returns:
    The Axes. Shares are those of all elements of a row, inf and NaN included,
    which are not drawn; zeros stand on the left.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if there is no histogram, or `loss_scale` is not a usable scale.

  Examples:
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> import optax_lossscale as ols
    >>> gradients = {"a": jnp.array([0.0, 2.0**-26]), "b": jnp.ones(3)}
    >>> axes = ols.plot.heat_map(
    ...   ols.instruments.histogram_by_leaf(gradients), ax=Figure().subplots()
    ... )
    >>> print([label.get_text() for label in axes.get_yticklabels()])
    ['a', 'b']
  """
  if not histograms:
    raise ValueError("`histograms` must have at least one, got none.")
  limits = _exponents.range_of("dtype", dtype)
  shift = _exponents.log2_scale(loss_scale)
  axes = _axes.make_axes(ax, height=1.6 + 0.22 * len(histograms))
  low, high = _exponents.span(list(histograms.values()), shift, [limits])
  shares = [
    _exponents.Shares.of(histogram) for histogram in histograms.values()
  ]
  floor = min(map(_exponents.floor_of, shares))
  exponents = next(iter(histograms.values())).exponents
  rows = np.arange(len(histograms) + 1) - 0.5
  how: Any = {
    "norm": LogNorm(floor, 1.0),
    "cmap": "cividis_r",  # In black and white, dark for many.
  }
  mesh = axes.pcolormesh(
    np.append(exponents, exponents[-1] + 1) + shift,
    rows,
    _masked([share.by_exponent for share in shares]),
    **how,
  )
  axes.pcolormesh(
    low - _exponents.APART + np.array([-0.5, 0.5]) * _exponents.BROAD,
    rows,
    _masked([[share.zeros] for share in shares]),
    **how,
  )
  for row in rows[1:-1]:
    axes.axhline(row, color="white", linewidth=2)
  _draw_limits(axes, limits)
  axes.figure.colorbar(mesh, ax=axes, label="share of a row's elements")
  axes.set_yticks(range(len(histograms)), list(histograms), fontsize="small")
  axes.set_ylim(rows[-1], rows[0])
  _exponents.exponent_axis(axes, low, high, has_end=False)
  axes.set_xlabel(
    "|g|" if loss_scale is None else f"S |g|, S = {_exponents.written(shift)}"
  )
  return axes


def _draw_limits(axes: Axes, limits: _exponents.Range) -> None:
  """Draws a line at each end of what a format can hold."""
  places = {
    # Half of the smallest number is rounded to 0.
    rf"$\leftarrow$ 0 in {limits.name}": (limits.subnormal - 1, ":"),
    rf"$\leftarrow$ subnormal in {limits.name}": (limits.normal, "--"),
    f"largest {limits.name}": (limits.end, "-"),
  }
  for label, (place, linestyle) in places.items():
    axes.axvline(
      place, color="black", linewidth=1.2, linestyle=linestyle, label=label
    )
  axes.legend(
    fontsize="small",
    frameon=False,
    loc="lower right",
    bbox_to_anchor=(1.0, 1.0),
  )


def _masked(shares: Any) -> Any:
  """Returns a masked array, without what is 0 and has no logarithm."""
  return np.ma.masked_equal(np.array(shares), 0)
