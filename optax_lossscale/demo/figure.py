"""The picture: the progress of each run, and its loss and S at each step."""

from collections.abc import Sequence
import itertools
import math
import pathlib
import statistics
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import verdict
from optax_lossscale.plot import axes as axes_lib

_Results = Sequence[run_lib.Result]
_Styles = dict[str, axes_lib.Style]

# For runs without loss scaling: first float32, wide and pale below the others,
# then float16, which should stand out.
_UNSCALED = (
  axes_lib.Style("#CCCCCC", 8.0, 2.1),
  axes_lib.Style("#D55E00", 3.0, 2.2),
)
# For runs with loss scaling: thin, so that float32 remains visible behind.
_SCALED = (
  axes_lib.ALONE,
  axes_lib.Style("#000000", 1.2, 2.4, "--"),
  *axes_lib.STYLES[5:],
  axes_lib.Style("#E69F00", 1.4, 2.9),
)


def write_figure(
  path: pathlib.Path,
  results: _Results,
  *,
  title: str,
  label_name: str,
  score_name: str,
  closed: verdict.Closed | None = None,
) -> None:
  """Draws the runs as a PNG: their progress, their loss, and S."""
  styles = _make_styles(results)
  bars = 0.5 * len(closed) + 0.7 if closed else 0
  scaled = 1.8 if any(x.loss_scale is not None for x in results) else 0
  heights = [x for x in (bars, 2.8, scaled) if x]
  figure = Figure(figsize=(8, 0.6 + sum(heights)), layout="constrained")
  rows = figure.subplots(
    len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
  )[:, 0]
  if closed:
    _draw_closed(rows[0], closed, styles, score_name)
    rows[0].set_title(label_name, size="small", loc="left")
  losses = rows[1 if closed else 0]
  _draw_losses(losses, results, styles)
  losses.get_legend().set_title(label_name, {"size": "small"})
  if scaled:
    _draw_scales(rows[-1], results, styles)
    rows[-1].tick_params(axis="y", labelsize="small")
    rows[-1].sharex(losses)
    losses.tick_params(labelbottom=False)
  for axes in rows:
    axes.grid(alpha=0.3)
  axes_lib.step_axis(rows[-1])
  lines = [textwrap.fill(line, 95) for line in title.splitlines()]
  figure.suptitle("\n".join(lines), fontsize="medium")
  with run_lib.replacing(path) as temporary:
    figure.savefig(temporary, format="png", dpi=150)


def _make_styles(results: _Results) -> _Styles:
  """Returns the style of each run, which depends on its loss scaling."""
  is_scaled: dict[str, bool] = {}
  for result in results:
    is_scaled.setdefault(result.run, result.loss_scale is not None)
  if len(is_scaled) == 1:
    return dict.fromkeys(is_scaled, axes_lib.ALONE)
  scaled = itertools.cycle(_SCALED)
  unscaled = itertools.chain(_UNSCALED, scaled)
  return {x: next(scaled if is_scaled[x] else unscaled) for x in is_scaled}


def _draw_closed(
  axes: Axes, closed: verdict.Closed, styles: _Styles, score_name: str
) -> None:
  """Draws a bar under each label, with its number, and a dot for each seed."""
  for row, (label, values) in enumerate(closed.items()):
    known = [x for x in values if math.isfinite(x)]
    mean = statistics.mean(known or [0.0])
    text = f"{mean:.1f} %".replace("-0.0", "0.0") if known else "not finite"
    if 0 < len(known) < len(values):
      text += f", {len(values) - len(known)} of {len(values)} not finite"
    axes.barh(row, mean, 0.4, color=styles[label].color, zorder=2)
    axes.text(0.3, row - 0.25, label, size="small")
    at = max(mean, 0) if mean < 88 else min(max(mean, 100), 104)
    axes.text(at + 1, row, text, va="center")
    if len(known) > 1:
      axes.plot(known, [row] * len(known), "k.", zorder=3)
  axes.axvline(100, color="#888888", linestyle=":", zorder=2.5)
  axes.set_yticks([])
  axes.set_ylim(len(closed) - 0.65, -0.65)
  axes.set_xlim(max(axes.dataLim.x0, -30), 115)
  axes.set_xlabel(f"{score_name}: % of the gap between the start and float32")


def _draw_losses(axes: Axes, results: _Results, styles: _Styles) -> None:
  """Draws the loss; where it is not finite, a triangle on the upper edge."""
  lost: dict[str, list[int]] = {}
  for result in results:
    axes.plot(
      [s.step for s in result.steps],
      [_finite(s.loss) for s in result.steps],
      # A label that begins with an underscore is not in the legend.
      label="_" if result.run in lost else result.run,
      marker="" if len(result.steps) > 1 else "o",
      **styles[result.run]._asdict(),
    )
    lost.setdefault(result.run, []).extend(
      s.step for s in result.steps if not math.isfinite(s.loss)
    )
  for label, where in lost.items():
    if where:
      axes.plot(
        where,
        [1.0] * len(where),
        "v",
        color=styles[label].color,
        label=f"{label}: loss not finite",
        transform=axes.get_xaxis_transform(),
        clip_on=False,
      )
  _draw_switches(axes, results, styles)
  losses = [s.loss for result in results for s in result.steps]
  losses = [loss for loss in losses if math.isfinite(loss)]
  if losses and min(losses) > 0 and max(losses) > 10 * min(losses):
    axes.set_yscale("log")
  axes.set_ylabel("training loss")
  axes.legend(fontsize="small")


def _draw_switches(axes: Axes, results: _Results, styles: _Styles) -> None:
  """Draws a vertical line where the precision of a run changed."""
  switched = [x for x in results if x.switched_after is not None]
  for i, result in enumerate(switched):
    axes.axvline(
      # Between the last step before it and the first one after it.
      (result.switched_after or 0) + 0.5,
      color=styles[result.run].color,
      linestyle="--",
      linewidth=1.2,
      label="_" if i else f"switch to {result.steps[-1].precision}",
    )


def _draw_scales(axes: Axes, results: _Results, styles: _Styles) -> None:
  """Draws S of the runs that have one, and a cross on every skipped step."""
  scaled = [x for x in results if x.loss_scale is not None]
  for result in scaled:
    axes.plot(
      [s.step for s in result.steps],
      # A step that was not scaled leaves a gap.
      [
        math.nan if s.loss_scale is None else s.loss_scale for s in result.steps
      ],
      drawstyle="steps-mid",
      **styles[result.run]._asdict(),
    )
  used = [s for x in scaled for s in x.steps if s.loss_scale is not None]
  skips = [s for s in used if s.skipped]
  axes_lib.draw_skips(
    axes,
    [s.step for s in skips],
    [s.loss_scale for s in skips],
    label="skipped step",
  )
  if skips:
    # Above the axes, where it cannot hide a cross.
    axes_lib.legend_beside(axes, "lower right", (1.0, 0.97))
  axes_lib.log2_axis(axes, (s.loss_scale or math.nan for s in used))
  axes.set_ylabel("loss scale S")


def _finite(value: float) -> float:
  """Returns NaN, which leaves a gap in a curve, for what is not finite."""
  return value if math.isfinite(value) else math.nan
