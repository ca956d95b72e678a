"""The picture: loss and S over the steps, skips and switches marked."""

from collections.abc import Sequence
import math
import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optax_lossscale.demo import run as run_lib
from optax_lossscale.plot import axes as axes_lib

_Results = Sequence[run_lib.Result]
_Styles = dict[str, axes_lib.Style]


def write_figure(
  path: pathlib.Path,
  results: _Results,
  *,
  title: str,
  label_name: str,
) -> None:
  """Draws the runs as a PNG: their loss, how it differs, and S."""
  labels = list(dict.fromkeys(result.run for result in results))
  styles = {
    label: axes_lib.style_of(i, len(labels)) for i, label in enumerate(labels)
  }
  panels = [_draw_losses]
  if len(labels) > 1:
    panels.append(_draw_differences)
  if any(result.loss_scale is not None for result in results):
    panels.append(_draw_scales)

  figure = Figure(figsize=(8, 1 + 2.7 * len(panels)), layout="constrained")
  column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
  for axes, draw in zip(column, panels, strict=True):
    draw(axes, results, styles)
    axes.grid(alpha=0.3)
  axes_lib.step_axis(column[-1])
  column[0].get_legend().set_title(label_name, {"size": "small"})
  figure.suptitle(title, fontsize="medium")
  with run_lib.replacing(path) as temporary:
    figure.savefig(temporary, format="png", dpi=150)


def _draw_losses(axes: Axes, results: _Results, styles: _Styles) -> None:
  """Draws the loss; where it is not finite, a triangle on the upper edge."""
  lost: dict[str, list[int]] = {}
  for result in results:
    axes.plot(
      [s.step for s in result.steps],
      [_finite(s.loss) for s in result.steps],
      # A label that begins with an underscore is not in the legend.
      label="_" if result.run in lost else result.run,
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


def _draw_differences(axes: Axes, results: _Results, styles: _Styles) -> None:
  """Draws how far each loss is above that of the first run, seed by seed."""
  first = results[0].run
  reference = {
    (x.seed, s.step): s.loss for x in results if x.run == first for s in x.steps
  }
  for result in results:
    axes.plot(
      [s.step for s in result.steps],
      [
        _finite(s.loss - reference.get((result.seed, s.step), math.nan))
        for s in result.steps
      ],
      **styles[result.run]._asdict(),
    )
  axes.set_ylabel(f"loss minus that of\n{first}")


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
