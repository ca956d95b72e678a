"""One picture for each workload: how it trains, and where its gradients lie."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools

import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np

from benchmarks.truth import results
from benchmarks.truth import settings
from benchmarks.truth import workload as workload_lib
import optax_lossscale as ols
from optax_lossscale.plot import axes as axes_lib

# Float32 lies wide and pale below, and float16 alone stands out.
_STYLES = {
  settings.REFERENCE: axes_lib.Style("#CCCCCC", 8.0, 2.1),
  "bfloat16": axes_lib.Style("#009E73", 2.0, 2.4, ":"),
  settings.UNSCALED: axes_lib.Style("#D55E00", 3.0, 2.2),
  "fixed": axes_lib.Style("#E69F00", 2.0, 2.3),
  settings.DEFAULT: axes_lib.ALONE,
  "headroom": axes_lib.Style("#000000", 1.2, 2.5, "--"),
  "saturating": axes_lib.Style("#CC79A7", 1.2, 2.6, "-."),
}
_SIXTEEN_BIT_STYLES = {
  settings.REFERENCE: axes_lib.Style("#CCCCCC", 8.0, 2.1),
  "nearest": axes_lib.Style("#D55E00", 3.0, 2.2),
  "copy": axes_lib.Style("#E69F00", 3.0, 2.3),
  settings.REMAINDER: axes_lib.Style("#000000", 1.2, 2.4, "--"),
  "stochastic": axes_lib.Style("#0072B2", 2.0, 2.5),
  "remainder-low": axes_lib.Style("#CC79A7", 1.2, 2.6, "-."),
  "stochastic-low": axes_lib.Style("#009E73", 2.0, 2.7, ":"),
}

# A setting that would make the others so many times smaller is left out.
_FAR = 20


def draw(
  workload: workload_lib.Workload,
  rows: Mapping[str, results.Row],
  counted: Sequence[results.Counted],
) -> Figure:
  """Draws a workload.

  Args:
    workload: what was trained.
    rows: by setting.
    counted: the exponents of float32's gradients.
  """
  figure = Figure(figsize=(12, 4), layout="constrained")
  left, right = figure.subplots(1, 2, width_ratios=(1, 1))
  _draw_scores(left, workload, rows, _STYLES)
  _draw_histogram(right, counted)
  right.grid(alpha=0.3)
  return figure


def draw_sixteen_bit(
  workloads: Mapping[str, workload_lib.Workload],
  rows: Mapping[str, Mapping[str, results.Row]],
) -> Figure:
  """Draws how workloads train with parameters in bfloat16.

  Args:
    workloads: what was trained.
    rows: by workload and setting.
  """
  figure = Figure(figsize=(4 * len(workloads), 4), layout="constrained")
  every = figure.subplots(1, len(workloads), squeeze=False)[0]
  for axes, (name, workload) in zip(every, workloads.items(), strict=True):
    _draw_scores(axes, workload, rows[name], _SIXTEEN_BIT_STYLES)
    axes.set_title(name)
  return figure


def _draw_scores(
  axes: Axes,
  workload: workload_lib.Workload,
  rows: Mapping[str, results.Row],
  styles: Mapping[str, axes_lib.Style],
) -> None:
  """Draws the settings that have a style."""
  for name, style in styles.items():
    if name in rows:
      _draw_setting(axes, name, rows[name], style)
  _fit(axes)
  axes.set_ylabel(workload.score_name)
  axes.legend(fontsize="small")
  axes_lib.step_axis(axes)
  axes.grid(alpha=0.3)


def _draw_setting(
  axes: Axes, name: str, row: results.Row, style: axes_lib.Style
) -> None:
  """Draws the mean over the seeds, in a band of one standard deviation."""
  by_step = itertools.groupby(
    sorted(row.points, key=lambda x: x.step), key=lambda x: x.step
  )
  scores = {step: [x.score for x in points] for step, points in by_step}
  steps = np.array(list(scores))
  means = np.array([np.mean(x) for x in scores.values()])
  deviations = np.array([np.std(x, ddof=1) for x in scores.values()])
  axes.plot(steps, means, label=name, **style._asdict())
  axes.fill_between(
    steps,
    means - deviations,
    means + deviations,
    color=style.color,
    alpha=0.1,
    linewidth=0,
  )


def _fit(axes: Axes) -> None:
  """Fits the y axis to the bands, without their start and what is far away.

  The first scores are often so far away that the others look alike, and so are
  those of a training that fails.
  """
  shown: list[float] = []
  for line, band in zip(axes.lines, axes.collections, strict=True):
    steps, scores = band.get_paths()[0].vertices.T
    later = scores[steps >= line.get_xdata()[-1] / 5].tolist()
    if shown and np.ptp([*shown, *later]) > _FAR * np.ptp(shown):
      line.set_label(f"{line.get_label()} (outside)")
    else:
      shown += later
  margin = 0.05 * np.ptp(shown)
  axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _draw_histogram(axes: Axes, counted: Sequence[results.Counted]) -> None:
  """Draws the last float32 gradient, unscaled and times the fixed S."""
  stats = ols.instruments.leaf_stats(jnp.zeros(1))
  counts = {x.exponent: x.count for x in counted if x.parameters == "last"}
  stats = dataclasses.replace(
    stats,
    counts=jnp.array(
      [[counts.get(x, 0) for x in stats.exponents.tolist()]], jnp.uint32
    ),
    zeros=jnp.array([counts.get(results.ZERO, 0)], jnp.uint32),
  )
  ols.plot.exponent_histogram(
    stats, loss_scale=2.0**15, dtypes=(jnp.float16, jnp.bfloat16), ax=axes
  )
  axes.set_xlabel(f"float32's last gradient: {axes.get_xlabel()}")
