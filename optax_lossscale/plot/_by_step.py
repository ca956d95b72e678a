"""Plots of S by step, for a history or several replays."""

from collections.abc import Mapping
import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from matplotlib.axes import Axes
import numpy as np
import numpy.typing as npt

from optax_lossscale import instruments
from optax_lossscale._base.arguments import kind_of
from optax_lossscale.plot import axes as axes_lib


def loss_scale(
  history: instruments.History,
  dtype: DTypeLike = jnp.float16,
  *,
  ax: Axes | None = None,
) -> Axes:
  """Draws S over the steps, and the largest S that each step could have used.

  The gap between the two lines is the headroom. A wide gap means that small
  gradients are lost needlessly. A cross marks a step that overflowed. The
  largest S is not drawn for steps whose amax is inf, NaN or 0.

  Args:
    history: the result of `instruments.get_history` or `read_history`.
    dtype: the computation's dtype.
    ax: matplotlib's Axes to draw into; by default, those of a new figure.

  Returns:
    The Axes.

  Raises:
    TypeError: if an argument has the wrong type.

  Examples:
    >>> from matplotlib.figure import Figure
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> history = ols.instruments.History(
    ...   step=np.array([1, 2]),
    ...   loss_scale=np.float32([2048.0, 1024.0]),
    ...   amax=np.float32([np.inf, 16376.0]),
    ...   overflow=np.array([True, False]),
    ... )
    >>> axes = ols.plot.loss_scale(history, ax=Figure().subplots())
    >>> print(axes.get_ylabel())
    loss scale S
  """
  largest = _largest_scale(history, dtype)
  return _draw_scales({"S": history}, largest, dtype, ax, overflow="overflow")


def replays(
  replays: Mapping[str, instruments.ReplayedRun], *, ax: Axes | None = None
) -> Axes:
  """Draws the S of several rules on one history, and the steps that each loses.

  Args:
    replays: the result of `instruments.replay` for each rule, by the name to
      show in the legend, where a "$" does not begin mathematics.
    ax: matplotlib's Axes to draw into; by default, those of a new figure.

  Returns:
    The Axes. The legend gives the number of steps that each rule lost and its
    mean headroom. A cross in the rule's color marks each lost step, and the
    thin line is the largest S that each step could have used. A first S of 1 is
    left out if the rule jumps from 1 to its own S.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `replays` is empty.

  Examples:
    >>> from matplotlib.figure import Figure
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> history = ols.instruments.History(
    ...   step=np.array([1, 2]),
    ...   loss_scale=np.float32([1.0, 1.0]),
    ...   amax=np.float32([4.0, 65504 / 2**14]),
    ...   overflow=np.array([False, False]),
    ... )
    >>> replay = ols.instruments.replay(ols.DynamicLossScale(2.0**15), history)
    >>> axes = ols.plot.replays({"dynamic": replay}, ax=Figure().subplots())
    >>> print(axes.get_legend_handles_labels()[1][-1])
    dynamic: 1 lost, 0.0 bits
  """
  if not isinstance(replays, Mapping):
    raise TypeError(
      f"`replays` must be a mapping by name, got {kind_of(replays)}; "
      'pass {"dynamic": replay}, with a name for each rule.'
    )
  if not replays:
    raise ValueError("`replays` must have at least one replay, got none.")
  for each in replays.values():
    axes_lib.check_kind(
      "Each of `replays` must be a",
      each,
      instruments.ReplayedRun,
      "pass what instruments.replay returned",
    )
  # The largest S of a step that one rule lost may be known from another rule.
  largest = functools.reduce(
    np.fmax,
    (_largest_scale(each.history, each.dtype) for each in replays.values()),
  )
  histories = {}
  for label, each in replays.items():
    told = f"{axes_lib.plain(label)}: {each.lost_steps} lost"
    if not np.isnan(each.mean_headroom):
      told += f", {each.mean_headroom:.1f} bits"
    histories[told] = each.history
  dtype = next(iter(replays.values())).dtype
  return _draw_scales(histories, largest, dtype, ax, overflow="_")


def _largest_scale(
  history: instruments.History, dtype: DTypeLike
) -> npt.NDArray[np.float64]:
  """Returns the largest S that each step could have used; NaN if unknown."""
  axes_lib.check_kind(
    "`history` must be a",
    history,
    instruments.History,
    "pass instruments.get_history(opt_state), or replay.history of a replay",
  )
  headroom = history.headroom(dtype)
  largest = history.loss_scale * np.exp2(headroom)
  # With amax in range, the caller reported the overflow, or amax saturated.
  is_hidden = history.overflow & ~(headroom < 0)
  return np.where(np.isinf(largest) | is_hidden, np.nan, largest)


def _draw_scales(
  histories: Mapping[str, instruments.History],
  largest: npt.NDArray[np.float64],
  dtype: DTypeLike,
  ax: Axes | None,
  *,
  overflow: str,
) -> Axes:
  """Draws the S of labeled histories, their overflows, and the largest S."""
  axes = axes_lib.make_axes(ax)
  if not np.isnan(largest).all():
    axes.plot(
      next(iter(histories.values())).step,
      largest,
      color=axes_lib.GREY,
      linewidth=0.8,
      marker=".",
      markersize=2,
      label=f"largest S without overflow, {jnp.dtype(dtype).name}",
    )
  scales = [_without_jump(history) for history in histories.values()]
  for i, (label, history) in enumerate(histories.items(), start=1):
    scale = scales[i - 1]
    # The first style is too similar to the thin line.
    style = axes_lib.STYLES[i % len(axes_lib.STYLES)]
    if len(histories) == 1:
      style = axes_lib.ALONE
    axes.plot(
      history.step,
      scale,
      drawstyle="steps-mid",
      # A line does not show a single step.
      marker="o" if len(history.step) == 1 else "",
      label=label,
      **style._asdict(),
    )
    lost = history.overflow
    cross = style if overflow == "_" else axes_lib.SKIP
    if lost.any():
      axes.plot(
        history.step[lost],
        scale[lost],
        "x",
        color=cross.color,
        markersize=8,
        markeredgewidth=cross.linewidth,
        label=overflow,
        zorder=3,
      )
  axes_lib.log2_axis(axes, np.concatenate([*scales, largest]))
  axes.set_ylabel("loss scale S")
  axes_lib.step_axis(axes)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    axes_lib.legend_above(axes, "left", ncols=2)
  return axes


def _without_jump(history: instruments.History) -> npt.NDArray[np.float32]:
  """Returns S by step, without a first 1 that would only stretch the axis."""
  first, later = history.loss_scale[:1], history.loss_scale[1:]
  is_jump = (first == 1) & ~history.overflow[:1] & (later.min(initial=4) > 2)
  return np.append(np.where(is_jump, np.nan, first), later)
