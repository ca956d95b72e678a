"""The picture: loss and S over the steps, skips and switches marked."""

from collections.abc import Sequence
import math
import pathlib
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from optax_lossscale.demo import history

_Runs = dict[tuple[str, int], list[history.Record]]


class _Style(NamedTuple):
  """How a run is drawn."""

  color: str
  linewidth: float
  zorder: float
  linestyle: str = "-"


# Okabe and Ito's colours, which colour-blind people can tell apart. Later runs
# are drawn over earlier ones and thinner, so curves that agree stay visible.
_STYLES = (
  _Style("#999999", 6.0, 2.1),
  _Style("#E69F00", 3.5, 2.2),
  _Style("#0072B2", 2.0, 2.3),
  _Style("#000000", 0.8, 2.4),
  _Style("#D55E00", 3.5, 2.5, "--"),
  _Style("#56B4E9", 2.0, 2.6, "--"),
  _Style("#009E73", 2.0, 2.7, ":"),
  _Style("#CC79A7", 1.6, 2.8, "-."),
)


def write_figure(
  path: pathlib.Path,
  records: Sequence[history.Record],
  *,
  title: str,
  label_name: str,
) -> None:
  """Draws the runs as a PNG: their loss, how it differs, and S.

  Args:
    path: is replaced as a whole.
    records: of all runs. The others are compared with the first one.
    title: above the picture.
    label_name: what the labels of the runs are made of.
  """
  runs = history.by_run(records)
  labels = list(dict.fromkeys(label for label, _ in runs))
  # A run on its own has nothing drawn over it, and needs no broad line.
  choice = _STYLES if len(labels) > 1 else _STYLES[2:3]
  styles = {label: choice[i % len(choice)] for i, label in enumerate(labels)}
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
  column[-1].set_xlabel("step")
  column[-1].xaxis.set_major_locator(
    MaxNLocator(integer=True, steps=[1, 2, 5, 10])
  )
  column[0].get_legend().set_title(label_name, {"size": "small"})
  figure.suptitle(title, fontsize="medium")
  with history.replacing(path) as temporary:
    figure.savefig(temporary, format="png", dpi=150)


def _draw_losses(axes: Axes, runs: _Runs, styles: dict[str, _Style]) -> None:
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


def _draw_switches(axes: Axes, runs: _Runs, styles: dict[str, _Style]) -> None:
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
  axes: Axes, runs: _Runs, styles: dict[str, _Style]
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


def _draw_scales(axes: Axes, runs: _Runs, styles: dict[str, _Style]) -> None:
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
  if skips:
    axes.plot(
      [s.step for s in skips],
      [s.loss_scale for s in skips],
      "x",
      color="#CC0000",
      markersize=8,
      markeredgewidth=2,
      label="skipped step",
      zorder=3,
    )
    # Above the axes, where it cannot hide a cross.
    axes.legend(
      fontsize="small",
      frameon=False,
      loc="lower right",
      bbox_to_anchor=(1.0, 0.97),
    )
  axes.set_yscale("log", base=2)
  axes.margins(y=0.15)
  exponents = _exponents(
    [s.loss_scale for steps in runs.values() for s in steps]
  )
  axes.set_yticks(
    [2.0**exponent for exponent in exponents],
    [f"$2^{{{exponent}}}$" for exponent in exponents],
  )
  axes.minorticks_off()
  axes.set_ylabel("loss scale S")


def _finite(value: float) -> float:
  """Returns NaN, which leaves a gap in a curve, for what is not finite."""
  return value if math.isfinite(value) else math.nan


def _exponents(scales: Sequence[float | None]) -> range:
  """Returns at most nine powers of two, evenly spaced, that span the scales."""
  known = [math.log2(scale) for scale in scales if scale is not None]
  low, high = math.floor(min(known)), math.ceil(max(known))
  stride = math.ceil(max(high - low, 1) / 7)
  return range(low // stride * stride, high + stride, stride)
