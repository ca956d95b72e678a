"""The data of the artists in each plot."""

import io
import itertools
import subprocess
import sys

import jax.numpy as jnp
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale import plot


def make_history(loss_scale, amax, overflow=None):
  amax = np.float32(amax)
  return instruments.History(
    step=np.arange(1, len(amax) + 1),
    loss_scale=np.float32(loss_scale),
    amax=amax,
    overflow=~(amax <= 65504) if overflow is None else np.array(overflow),
  )


def new_axes():
  return Figure().subplots()


def stats_of(*gradients):
  return instruments.leaf_stats(jnp.array(gradients))


def lines(axes):
  """Returns the points of each line by its label."""
  return {
    line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
    for line in axes.get_lines()
  }


def texts(labels):
  return [label.get_text() for label in labels]


HISTORY = make_history(
  [4096, 2048, 2048, 4096], [np.inf, 16376.0, 0.0, 65504.0]
)
LOST = make_history([64, 32, 16], [np.inf, np.nan, np.inf])
GRADIENTS = jnp.array([0.0, 0.0, 2.0**-26, 0.5, -0.75, 3.0, jnp.inf, jnp.nan])
# A leaf without elements adds nothing to the shares of all.
STATS = instruments.leaf_stats({"a": GRADIENTS, "b": jnp.zeros(0)})
ONLY_NAN = stats_of(jnp.nan)
REPLAYS = {
  "one": instruments.replay(ols.FixedLossScale(4096.0), HISTORY),
  "other": instruments.replay(ols.FixedLossScale(1024.0), HISTORY),
}
LARGEST = "largest S without overflow, float16"
HATCHED = "hatched: subnormal numbers of the format"
DRAWN = {
  "loss_scale": (plot.loss_scale, HISTORY),
  "exponent_histogram": (plot.exponent_histogram, STATS),
  "heat_map": (plot.heat_map, STATS),
  "replays": (plot.replays, REPLAYS),
}


@pytest.mark.parametrize("name", plot.__all__)
def test_a_plot_is_drawn_into_given_or_new_axes(name, monkeypatch):
  from matplotlib import pyplot

  monkeypatch.setattr(pyplot, "show", lambda *_, **__: pytest.fail("shown"))
  draw, data = DRAWN[name]
  axes = new_axes()
  assert draw(data, ax=axes) is axes
  axes.figure.canvas.draw()
  with mpl.rc_context({"interactive": False}):
    axes = draw(data)
  assert isinstance(axes, Axes)
  assert pyplot.get_fignums() == [axes.figure.number]
  pyplot.close(axes.figure)
  with pytest.raises(TypeError, match="`ax` must be matplotlib's Axes or None"):
    draw(data, ax=Figure())


@pytest.mark.slow
def test_matplotlib_is_imported_as_late_as_possible():
  program = """
import sys, optax_lossscale as ols
from matplotlib.figure import Figure
stats = ols.instruments.leaf_stats(1.0)
ols.plot.heat_map(stats, ax=Figure().subplots())
print("matplotlib.pyplot" in sys.modules)
for name in [x for x in sys.modules if x.startswith("optax_lossscale.plot")]:
  del sys.modules[name]
sys.modules["matplotlib"] = None
try:
  import optax_lossscale.plot
except ImportError as error:
  print(error)
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout == (
    "False\nols.plot needs matplotlib, which is not installed; in a clone of "
    'the repository: pip install -e ".[plot]".\n'
  )


def test_s_is_drawn_with_overflows_and_the_largest_s():
  axes = plot.loss_scale(HISTORY, ax=new_axes())
  found = lines(axes)
  assert found["S"] == ([1, 2, 3, 4], [4096, 2048, 2048, 4096])
  assert found["overflow"] == ([1], [4096])
  steps, largest = found[LARGEST]
  assert steps == [1, 2, 3, 4]
  np.testing.assert_array_equal(largest, [np.nan, 8192, np.nan, 4096])
  assert axes.get_yscale() == "log"
  # Powers of two, evenly spaced, from below the values to above.
  assert axes.get_yticks().tolist() == [2048, 4096, 8192]
  with pytest.raises(TypeError, match="`dtype` must be a floating-point dtype"):
    plot.loss_scale(HISTORY, int, ax=new_axes())


def test_an_overflow_that_amax_does_not_show_hides_the_largest_s():
  # The caller's overflow, a saturated one, and one of a wider dtype.
  history = make_history([2, 2, 2], [1.0, 65504.0, 131008.0], [True] * 3)
  axes = plot.loss_scale(history, ax=new_axes())
  _, largest = lines(axes)[LARGEST]
  np.testing.assert_array_equal(largest, [np.nan, np.nan, 1])


@pytest.mark.parametrize(
  ("history", "labels", "markers"),
  [
    (make_history([], []), ["S"], [""]),
    # A line does not show a single step.
    (make_history([1024], [16376.0]), ["S", LARGEST], [".", "o"]),
    (LOST, ["S", "overflow"], ["", "x"]),
  ],
  ids=["no step", "one step", "all lost"],
)
def test_any_history_is_drawn(history, labels, markers):
  axes = plot.loss_scale(history, ax=new_axes())
  assert sorted(lines(axes)) == labels
  assert [line.get_marker().replace("None", "") for line in axes.lines] == (
    markers
  )
  axes.figure.canvas.draw()


@pytest.mark.parametrize(
  ("scales", "first_amax", "is_left_out"),
  [
    ([1, 8192, 8192], 1.0, True),
    ([1, 2, 4], 1.0, False),
    ([1, 8192, 8192], np.inf, False),
  ],
  ids=["jump", "doubling", "lost"],
)
def test_a_first_s_of_1_does_not_stretch_the_axis(
  scales, first_amax, is_left_out
):
  history = make_history(scales, [first_amax, 8.0, 8.0])
  axes = plot.loss_scale(history, ax=new_axes())
  _, found = lines(axes)["S"]
  assert np.isnan(found[0]) == is_left_out and found[1:] == scales[1:]
  assert (axes.get_ylim()[0] > 1) == is_left_out


def test_replays_are_drawn_with_the_steps_that_each_lost():
  replays = {
    **REPLAYS,
    "last": instruments.replay(ols.FixedLossScale(2.0**20), HISTORY),
  }
  axes = plot.replays(replays, ax=new_axes())
  found = lines(axes)
  scales = {label: set(y) for label, (_, y) in found.items() if ": " in label}
  headroom = [replays[x].mean_headroom for x in ("one", "other")]
  assert scales == {
    f"one: 1 lost, {headroom[0]:.1f} bits": {4096.0},
    f"other: 0 lost, {headroom[1]:.1f} bits": {1024.0},
    # No clean step has a headroom.
    "last: 3 lost": {2.0**20},
  }
  # A replay that did not lose the first step knows its largest S.
  np.testing.assert_allclose(found[LARGEST][1], [4096, 8192, np.nan, 4096])
  # Each cross has its rule's color, which no other line has. Crosses on one
  # place stay visible.
  crosses = [line for line in axes.lines if line.get_marker() == "x"]
  rules = [line for line in axes.lines if ": " in line.get_label()]
  colors = [line.get_color() for line in rules]
  assert [x.get_color() for x in crosses] == [colors[0], colors[2]]
  assert len({axes.lines[0].get_color(), *colors}) == 4
  assert [list(x.get_xdata()) for x in crosses] == [[1], [1, 2, 4]]
  assert crosses[0].get_markeredgewidth() > crosses[1].get_markeredgewidth() > 0
  # A single rule has a cross of its color, too.
  drawn = plot.replays({"one": REPLAYS["one"]}, ax=new_axes()).lines
  assert drawn[1].get_color() == drawn[2].get_color()


def steps_of(axes):
  """Returns the non-empty bins of each histogram: left edge to share."""
  return [
    {
      left: value
      for left, value in zip(data.edges[:-1], data.values, strict=True)
      if value > np.max(data.baseline)
    }
    for data in (x.get_data() for x in axes.patches if isinstance(x, StepPatch))
  ]


@pytest.mark.parametrize(
  ("name", "shown"),
  [
    ("$$.csv", "$$.csv"),
    (r"a\$b$", r"a\$b$"),
    ("_a", " _a"),
    ("\udcff", r"\udcff"),
  ],
)
def test_a_name_is_shown_as_it_is(name, shown):
  stats = instruments.leaf_stats({name: 1.0})
  for axes, end in (
    (plot.replays({name: REPLAYS["one"]}, ax=new_axes()), ": 1 lost, "),
    (plot.heat_map(stats, ax=new_axes()), "</text>"),
  ):
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
      axes.figure.savefig(drawn, format="svg")
    assert f">{shown}{end}" in drawn.getvalue()


def test_shares_are_drawn_by_exponent_and_shifted_by_s():
  axes = plot.exponent_histogram(STATS, loss_scale=2.0**10, ax=new_axes())
  assert steps_of(axes) == [
    {-26: 1 / 8, -1: 2 / 8, 1: 1 / 8},
    {-16: 1 / 8, 9: 2 / 8, 11: 1 / 8},
  ]
  assert axes.get_yscale() == "log"
  assert axes.get_xlabel() == "magnitude, of |g| and of S |g|"
  assert texts(axes.get_legend().get_texts()) == [
    "gradients: 25 % are 0, 12.5 % become 0 in float16",
    "times S = $2^{10}$: 0 % become 0",
    *(HATCHED, "zeros", "inf and NaN"),
  ]
  axes = plot.exponent_histogram(STATS, loss_scale=3000.0, ax=new_axes())
  assert min(steps_of(axes)[1]) == -26 + np.log2(3000.0)
  assert "times S = 3000: 0 % become 0" in texts(axes.get_legend().get_texts())


@pytest.mark.parametrize(
  ("gradients", "loss_scale", "text"),
  [
    # A tie becomes 0, and any larger number does not.
    ([2.0**-25, 1.0], 1.0, "about 0 % become 0"),
    ([2.0**-26, 1.0], 4.0, "0 % become 0"),
    ([2.0**-26, 1.0], 1.25, "about 33.9 % become 0"),
  ],
)
def test_the_legend_has_the_share_that_becomes_0(gradients, loss_scale, text):
  axes = plot.exponent_histogram(
    stats_of(*gradients), loss_scale=loss_scale, ax=new_axes()
  )
  found = axes.get_legend().get_texts()[1].get_text()
  assert found.split(": ")[1] == text


def test_zeros_and_nonfinite_elements_have_bars_beside_the_exponents():
  axes = plot.exponent_histogram(STATS, ax=new_axes())
  zeros, nonfinite = (bars.patches[0] for bars in axes.containers)
  low, high = axes.get_xlim()
  assert low <= zeros.get_x() and nonfinite.get_x() > 16
  assert nonfinite.get_x() + nonfinite.get_width() <= high
  tops = [bar.get_y() + bar.get_height() for bar in (zeros, nonfinite)]
  assert tops == pytest.approx([2 / 8, 2 / 8])
  assert zeros.get_facecolor() != nonfinite.get_facecolor()
  labels = texts(axes.get_xticklabels())
  assert labels[0] == "0" and labels[-1] == "inf,\nNaN"
  handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
  assert handles[HATCHED].get_hatch()
  assert [handles[x] for x in ("zeros", "inf and NaN")] == axes.containers
  # An axis without such elements has no place for them.
  axes = plot.exponent_histogram(stats_of(1.0, jnp.nan), ax=new_axes())
  assert texts(axes.get_legend().get_texts())[1:] == [HATCHED, "inf and NaN"]
  axes = plot.exponent_histogram(stats_of(0.0, 1.0), ax=new_axes())
  assert texts(axes.get_legend().get_texts())[1:] == [HATCHED, "zeros"]
  assert "inf" not in texts(axes.get_xticklabels())[-1]


def test_each_format_has_a_bar_as_wide_as_its_range():
  axes = plot.exponent_histogram(STATS, ax=new_axes())
  found = [bar.get_paths()[0].get_extents() for bar in axes.collections]
  expected = [
    *((-24, -14), (-14, np.log2(65504))),
    *((-133, -126), (-126, np.log2(float(jnp.finfo(jnp.bfloat16).max)))),
    *((-9, -6), (-6, np.log2(448))),
    *((-16, -14), (-14, np.log2(57344))),
  ]
  np.testing.assert_allclose([x.intervalx for x in found], expected, rtol=1e-6)
  # The bars are above all shares, inside the axes, and do not touch.
  assert min(x.y0 for x in found) > 1.0
  assert max(x.y1 for x in found) < axes.get_ylim()[1]
  assert all(a.y0 > b.y1 for a, b in itertools.pairwise(found[::2]))
  names = texts(axes.get_yticklabels())
  assert names[-4:] == ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
  assert "100 %" in names
  axes = plot.exponent_histogram(STATS, dtypes=["float8_e5m2"], ax=new_axes())
  assert len(axes.collections) == 2
  with pytest.raises(TypeError, match="`dtypes` must be a floating-point"):
    plot.exponent_histogram(STATS, dtypes=[int], ax=new_axes())


@pytest.mark.slow
@pytest.mark.parametrize("stats", [stats_of(), ONLY_NAN, stats_of(0.0)])
def test_any_stats_are_drawn(stats):
  axes = plot.exponent_histogram(
    stats, loss_scale=8.0, dtypes=(), ax=new_axes()
  )
  assert steps_of(axes) == [{}, {}]
  axes.figure.canvas.draw()
  plot.heat_map(stats, ax=new_axes()).figure.canvas.draw()


def test_a_heat_map_has_a_row_for_each_leaf():
  axes = plot.heat_map(STATS, loss_scale=2.0, ax=new_axes())
  shares, zeros, nonfinite = (mesh.get_array() for mesh in axes.collections)
  assert texts(axes.get_yticklabels()) == ["a", "b"]
  assert shares.shape == (2, 277)
  assert zeros.shape == nonfinite.shape == (2, 1)
  found = {i - 149: shares[0, i] for i in np.flatnonzero(shares[0])}
  assert found == {-26: 1 / 8, -1: 2 / 8, 1: 1 / 8}
  assert zeros[0, 0] == nonfinite[0, 0] == 2 / 8
  assert shares[1].mask.all() and zeros.mask[1, 0] and nonfinite.mask[1, 0]
  # The first row is above the second one. S moved all columns by one.
  low, high = axes.get_ylim()
  assert low > high
  columns, _, right = (x.get_coordinates() for x in axes.collections)
  assert columns[0, 0].tolist() == [-148, -0.5]
  assert right[..., 0].min() > 16 and right.max() <= axes.get_xlim()[1]
  assert texts(axes.get_xticklabels())[-1] == "inf,\nNaN"
  # It marks the range of a format.
  axes = plot.heat_map(stats_of(1.0), jnp.float8_e5m2, ax=new_axes())
  assert {label: x[0] for label, (x, _) in lines(axes).items()} == {
    r"$\leftarrow$ 0 in float8_e5m2": -17,
    r"$\leftarrow$ subnormal in float8_e5m2": -14,
    "largest float8_e5m2": np.log2(57344),
  }
  assert axes.collections[0].get_array().max() == 1
  assert "inf" not in texts(axes.get_xticklabels())[-1]


def test_a_heat_map_with_long_paths_keeps_room_for_its_rows():
  begin = "params/encoder/" + 8 * "block/"
  paths = [f"{begin}layer_{i:02}/{9 * 'mlp/'}kernel" for i in range(30)]
  axes = plot.heat_map(
    instruments.leaf_stats(dict.fromkeys(paths, GRADIENTS)),
    loss_scale=2.0**12,
    ax=Figure(figsize=(8, 8), layout="constrained").subplots(),
  )
  labels = texts(axes.get_yticklabels())
  assert labels[7] == "…/layer_07/mlp/mlp/…/mlp/mlp/mlp/kernel"
  assert max(map(len, labels)) <= 40 and len(set(labels)) == 30
  axes.figure.canvas.draw()
  boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
  assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
  assert axes.get_position().width > 0.4


@pytest.mark.parametrize("lowest", [-42, -36])
def test_the_label_of_zeros_touches_no_other_in_a_narrow_panel(lowest):
  figure = Figure(figsize=(4.4, 4.0), layout="constrained")
  axes = plot.exponent_histogram(
    stats_of(0.0, 2.0**lowest, 1.0), loss_scale=2.0**15, ax=figure.subplots()
  )
  figure.draw_without_rendering()
  boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
  assert boxes[0].x1 < boxes[1].x0


@pytest.mark.parametrize(
  ("draw", "data", "error", "message"),
  [
    (
      plot.loss_scale,
      REPLAYS["one"],
      TypeError,
      "got ReplayedRun; .*y.history",
    ),
    (plot.heat_map, {"a": 1.0}, TypeError, "a LeafStats, got dict; call"),
    (
      plot.heat_map,
      instruments.leaf_stats({}),
      ValueError,
      "at least one leaf",
    ),
    (plot.replays, REPLAYS["one"], TypeError, "by name, got ReplayedRun; pass"),
    (plot.replays, {"a": HISTORY}, TypeError, "a ReplayedRun, got History"),
    (plot.replays, {}, ValueError, "`replays` must have at least one"),
  ],
)
def test_other_data_is_refused(draw, data, error, message):
  with pytest.raises(error, match=message):
    draw(data, ax=new_axes())
