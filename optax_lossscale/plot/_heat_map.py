"""Where the gradients of each layer live, as a heat map."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import Any

import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
import numpy as np

from optax_lossscale.instruments import _histograms
from optax_lossscale.plot import _axes
from optax_lossscale.plot import _exponents

# How many letters of a path are shown.
_LONGEST = 40
_GAP = "\u2026"


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
    The Axes. Shares are those of all elements of a row; zeros stand on the
    left, inf and NaN on the right, if there are any. Of long paths that with
    which all begin is left out, then what is in their middle.

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
  if not isinstance(histograms, Mapping):
    raise TypeError(
      f"`histograms` must be a mapping by path, got {type(histograms).__name__}"
      "; call instruments.histogram_by_leaf(gradients), or pass "
      '{"all": histogram}.'
    )
  if not histograms:
    raise ValueError("`histograms` must have at least one, got none.")
  for histogram in histograms.values():
    _exponents.check_histogram("Each of `histograms` must be an", histogram)
  limits = _exponents.range_of("dtype", dtype)
  shift = _exponents.log2_scale(loss_scale)
  shares = [
    _exponents.Shares.of(histogram) for histogram in histograms.values()
  ]
  axes = _axes.make_axes(ax, height=1.6 + 0.22 * len(histograms))
  low, high = _exponents.span(list(histograms.values()), shift, [limits])
  mesh = _draw_shares(axes, histograms, shares, (low, high), shift)
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
  _exponents.exponent_axis(axes, low, high, has_end=has_end, most=7)
  axes.set_xlabel(
    "|g|" if loss_scale is None else f"S |g|, S = {_exponents.written(shift)}"
  )
  return axes


def _draw_shares(
  axes: Axes,
  histograms: Mapping[str, _histograms.ExponentHistogram],
  shares: Sequence[_exponents.Shares],
  span: tuple[float, float],
  shift: float,
) -> Any:
  """Draws the rows, with what has no exponent beside them; returns a mesh."""
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
  beside = [
    (span[0] - _exponents.APART, [[share.zeros] for share in shares]),
    (span[1] + _exponents.APART, [[share.nonfinite] for share in shares]),
  ]
  for place, column in beside:
    axes.pcolormesh(
      place + np.array([-0.5, 0.5]) * _exponents.BROAD,
      rows,
      _masked(column),
      **how,
    )
  for row in rows[1:-1]:
    axes.axhline(row, color="white", linewidth=2)
  return mesh


def _shortened(paths: Sequence[str]) -> list[str]:
  """Returns the paths, or what of them leaves room for the rows.

  If one is long, that with which all begin is left out, then middles.
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
