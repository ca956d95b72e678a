"""The colors, lines and axes that all plots share."""

from collections.abc import Iterable
import math
from typing import Any
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from optax_lossscale._base.arguments import kind_of

# From Okabe and Ito's palette, made for color-blind readers too.
GREY = "#999999"
BLUE = "#0072B2"
SKY_BLUE = "#56B4E9"


class Style(NamedTuple):
  """The style of a line."""

  color: str
  linewidth: float
  zorder: float
  linestyle: str = "-"


# Later lines are drawn over earlier ones and are thinner, so that lines which
# coincide are all visible.
STYLES = (
  Style(GREY, 6.0, 2.1),
  Style("#E69F00", 3.5, 2.2),
  Style(BLUE, 2.0, 2.3),
  Style("#000000", 0.8, 2.4),
  Style("#D55E00", 3.5, 2.5, "--"),
  Style(SKY_BLUE, 2.0, 2.6, "--"),
  Style("#009E73", 2.0, 2.7, ":"),
  Style("#CC79A7", 1.6, 2.8, "-."),
)

# A darker red than the palette's, so that a thin cross stands out.
SKIP = Style("#CC0000", 2.0, 3.0)

# The style of a line that is the only one in its plot.
ALONE = STYLES[2]


def make_axes(ax: Axes | None, height: float = 4.0) -> Axes:
  """Returns the axes to draw into: the caller's, or new ones."""
  if ax is None:
    # Imported only here, since pyplot chooses a backend for the whole program.
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, height), layout="constrained")[1]
  if not isinstance(ax, Axes):
    raise TypeError(
      f"`ax` must be matplotlib's Axes or None, got {kind_of(ax)}; a "
      "figure's are figure.axes."
    )
  return ax


def check_kind(rule: str, value: object, kind: type, remedy: str) -> None:
  """Raises TypeError if `value` is not a `kind`."""
  if not isinstance(value, kind):
    raise TypeError(f"{rule} {kind.__name__}, got {kind_of(value)}; {remedy}.")


def step_axis(axes: Axes) -> None:
  """Labels the x axis with whole steps."""
  axes.set_xlabel("step")
  axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def log2_axis(axes: Axes, values: Iterable[float]) -> None:
  """Makes the y axis logarithmic, with powers of two that span the values."""
  axes.set_yscale("log", base=2)
  axes.margins(y=0.15)
  known = [math.log2(x) for x in values if 0 < x < math.inf]
  low = math.floor(min(known, default=0))
  high = math.ceil(max(known, default=0))
  # At most nine ticks, evenly spaced.
  stride = math.ceil(max(high - low, 1) / 7)
  exponents = range(low // stride * stride, high + stride, stride)
  axes.set_yticks(
    [2.0**exponent for exponent in exponents], map(power_of_two, exponents)
  )
  axes.minorticks_off()


def legend_above(axes: Axes, side: str, ncols: int = 1) -> None:
  """Puts the legend above the plot, where it hides no lines."""
  where: Any = {"loc": f"lower {side}", "bbox_to_anchor": (side == "right", 1)}
  axes.legend(fontsize="small", frameon=False, ncols=ncols, **where)


def plain(name: object) -> str:
  r"""Returns a user's name as text that matplotlib shows literally."""
  # No font draws the surrogates of a file's name that is not UTF-8.
  text = str(name).encode(errors="backslashreplace").decode()
  # matplotlib would read text between two "$" as mathematics, and leave a line
  # whose name begins with "_" out of the legend.
  return " " * text.startswith("_") + text.replace("$", r"\$")


def power_of_two(exponent: int) -> str:
  """Returns a power of two in matplotlib's notation."""
  return f"$2^{{{exponent}}}$"
