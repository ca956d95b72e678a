"""The picture: loss and S over the steps, skips and switches marked."""

from collections.abc import Sequence
import math
import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optax_lossscale.demo import history
from optax_lossscale.plot import axes as axes_lib

_Runs = dict[tuple[str, int], list[history.Record]]


def write_figure(
  path: pathlib.Path,
  records: Sequence[history.Record],
  *,
  title: str,
  label_name: str,
) -> None:
  """Draws the runs as a PNG: their loss, how it differs, and S."""
  runs = history.by_run(records)
  labels = list(dict.fromkeys(label for label, _ in runs))
  styles = {
    label: axes_lib.style_of(i, len(labels)) for i, label in enumerate(labels)
  }
  panels = [_draw_losses]
  if len(labels) > 1:
    panels.append(_draw_differences)
  if any(record.loss_scale is not None for record in records):
    panels.append(_draw_scales)

  figure = Figure(figsize=(8, 1 + 2.7 * len(panels)), layout="constrained")
  column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
  for axes, draw in zip(column, panels, strict=True):
    draw(axes, runs, styles)
    axes.grid(alpha=0.3)
  axes_lib.step_axis(column[-1])
  column[0].get_legend().set_title(label_name, {"size": "small"})
  figure.suptitle(title, fontsize="medium")
  with history.replacing(path) as temporary:
    figure.savefig(temporary, format="png", dpi=150)


def _draw_losses(
  axes: Axes, runs: _Runs, styles: dict[str, axes_lib.Style]
) -> None:
  """Draws the loss; where it is not finite, a triangle on the upper edge."""
  lost: dict[str, list[int]] = {}
  for (label, seed), steps in runs.items():
    is_first = (label, seed) == next(key for key in runs if key[0] == label)
    axes.plot(
      [s.step for s in steps],
      [_finite(s.loss) for s in steps],
      # A label that begins with an underscore is not in the legend.
      label=label if is_first else "_",
      **styles[label]._asdict(),
    )
    lost.setdefault(label, []).extend(
      s.step for s in steps if not math.isfinite(s.loss)
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
  _draw_switches(axes, runs, styles)
  losses = [s.loss for steps in runs.values() for s in steps]
  losses = [loss for loss in losses if math.isfinite(loss)]
  if losses and min(losses) > 0 and max(losses) > 10 * min(losses):
    axes.set_yscale("log")
  axes.set_ylabel("training loss")
  axes.legend(fontsize="small")


def _draw_switches(
  axes: Axes, runs: _Runs, styles: dict[str, axes_lib.Style]
) -> None:
  """Draws a vertical line where the precision of a run changed."""
  named: set[str] = set()
  for (label, _), steps in runs.items():
    after = history.switched_after(steps)
    if after is None:
      continue
    axes.axvline(
      # Between the last step before it and the first one after it.
      after + 0.5,
      color=styles[label].color,
      linestyle="--",
      linewidth=1.2,
      label="_" if named else f"switch to {steps[-1].precision}",
    )
    named.add(label)


def _draw_differences(
  axes: Axes, runs: _Runs, styles: dict[str, axes_lib.Style]
) -> None:
  """Draws how far each loss is above that of the first run, seed by seed."""
  first = next(iter(runs))[0]
  for (label, seed), steps in runs.items():
    reference = {s.step: s.loss for s in runs.get((first, seed), ())}
    axes.plot(
      [s.step for s in steps],
      [_finite(s.loss - reference.get(s.step, math.nan)) for s in steps],
      **styles[label]._asdict(),
    )
  axes.set_ylabel(f"loss minus that of\n{first}")


def _draw_scales(
  axes: Axes, runs: _Runs, styles: dict[str, axes_lib.Style]
) -> None:
  """Draws S of the runs that have one, and a cross on every skipped step."""
  skips: list[history.Record] = []
  for (label, _), steps in runs.items():
    if all(s.loss_scale is None for s in steps):
      continue
    axes.plot(
      [s.step for s in steps],
      # What is not scaled leaves a gap.
      [math.nan if s.loss_scale is None else s.loss_scale for s in steps],
      drawstyle="steps-mid",
      **styles[label]._asdict(),
    )
    skips += [s for s in steps if s.skipped and s.loss_scale is not None]
  axes_lib.draw_skips(
    axes,
    [s.step for s in skips],
    [s.loss_scale for s in skips],
    label="skipped step",
  )
  if skips:
    # Above the axes, where it cannot hide a cross.
    axes.legend(
      fontsize="small",
      frameon=False,
      loc="lower right",
      bbox_to_anchor=(1.0, 0.97),
    )
  scales = (s.loss_scale for steps in runs.values() for s in steps)
  axes_lib.log2_axis(axes, (scale for scale in scales if scale is not None))
  axes.set_ylabel("loss scale S")


def _finite(value: float) -> float:
  """Returns NaN, which leaves a gap in a curve, for what is not finite."""
  return value if math.isfinite(value) else math.nan
