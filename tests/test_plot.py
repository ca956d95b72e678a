"""What the pictures show, by the data of their artists."""

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
  if overflow is None:
    overflow = ~(amax <= 65504)
  return instruments.History(
    step=np.arange(1, len(amax) + 1),
    loss_scale=np.float32(loss_scale),
    amax=amax,
    overflow=np.array(overflow, bool),
  )


NONE = make_history([], [])
ONE = make_history([1024], [16376.0])
LOST = make_history([64, 32, 16], [np.inf, np.nan, np.inf])
SOME = make_history([4096, 2048, 2048, 4096], [np.inf, 16376.0, 0.0, 65504.0])


def lines(axes):
  """Returns the points of each line by its label."""
  return {
    line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
    for line in axes.get_lines()
  }


def new_axes():
  return Figure().subplots()


GRADIENTS = jnp.array([0.0, 0.0, 2.0**-26, 0.5, -0.75, 3.0, jnp.inf, jnp.nan])
# A leaf without elements adds nothing to the shares of all.
STATS = instruments.leaf_stats({"a": GRADIENTS, "b": jnp.zeros(0)})
REPLAYS = {
  "one": instruments.replay(ols.FixedLossScale(4096.0), SOME),
  "other": instruments.replay(ols.FixedLossScale(1024.0), SOME),
}

DRAWN = {
  "loss_scale": (plot.loss_scale, SOME),
  "exponent_histogram": (plot.exponent_histogram, STATS),
  "heat_map": (plot.heat_map, STATS),
  "replays": (plot.replays, REPLAYS),
}


@pytest.fixture(params=DRAWN)
def drawn(request):
  """A picture, and what it is drawn of."""
  return DRAWN[request.param]


def test_every_picture_is_tried():
  assert sorted(DRAWN) == plot.__all__


def test_a_picture_is_drawn_into_the_axes_of_the_caller(drawn):
  draw, data = drawn
  axes = new_axes()
  assert draw(data, ax=axes) is axes
  axes.figure.canvas.draw()


def test_a_picture_makes_axes_of_its_own_and_is_not_shown(drawn, monkeypatch):
  from matplotlib import pyplot

  monkeypatch.setattr(pyplot, "show", lambda *_, **__: pytest.fail("shown"))
  draw, data = drawn
  with mpl.rc_context({"interactive": False}):
    axes = draw(data)
  assert isinstance(axes, Axes)
  assert pyplot.get_fignums() == [axes.figure.number]
  pyplot.close(axes.figure)


def test_what_is_no_axes_is_refused(drawn):
  draw, data = drawn
  with pytest.raises(TypeError, match="`ax` must be matplotlib's Axes or None"):
    draw(data, ax=Figure())


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named():
  program = """
import sys
sys.modules["matplotlib"] = None
import optax_lossscale as ols
try:
  ols.plot
except ImportError as error:
  print(error)
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout == (
    "ols.plot needs matplotlib, which is not installed; in a clone of the "
    'repository: pip install -e ".[plot]".\n'
  )


@pytest.mark.slow
def test_pyplot_is_not_loaded_for_the_axes_of_the_caller():
  program = """
import sys
from matplotlib.figure import Figure
import numpy as np
import optax_lossscale as ols
history = ols.instruments.History(*np.ones((4, 1)))
history = history._replace(overflow=np.array([False]))
ols.plot.loss_scale(history, ax=Figure().subplots())
stats = ols.instruments.leaf_stats(np.float32([1]))
ols.plot.exponent_histogram(stats, ax=Figure().subplots())
ols.plot.heat_map(stats, ax=Figure().subplots())
print("matplotlib.pyplot" in sys.modules)
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == "False"


def test_the_scale_is_drawn_with_its_overflows_and_the_largest_one():
  axes = plot.loss_scale(SOME, ax=new_axes())
  found = lines(axes)
  assert found["S"] == ([1, 2, 3, 4], [4096, 2048, 2048, 4096])
  assert found["overflow"] == ([1], [4096])
  steps, largest = found["largest S without overflow, float16"]
  assert steps == [1, 2, 3, 4]
  np.testing.assert_array_equal(largest, [np.nan, 8192, np.nan, 4096])
  assert axes.get_yscale() == "log"
  assert all(np.log2(axes.get_yticks()) % 1 == 0)


def test_an_overflow_that_amax_does_not_show_hides_the_largest_scale():
  # By the caller's flag, saturated, and above the limit in a wider dtype.
  history = make_history([2, 2, 2], [1.0, 65504.0, 131008.0], [True] * 3)
  axes = plot.loss_scale(history, ax=new_axes())
  _, largest = lines(axes)["largest S without overflow, float16"]
  np.testing.assert_array_equal(largest, [np.nan, np.nan, 1])


@pytest.mark.parametrize(
  ("history", "labels"),
  [
    (NONE, ["S"]),
    (ONE, ["S", "largest S without overflow, float16"]),
    (LOST, ["S", "overflow"]),
  ],
  ids=["none", "one", "all lost"],
)
def test_any_history_is_drawn(history, labels):
  axes = plot.loss_scale(history, ax=new_axes())
  assert sorted(lines(axes)) == labels
  axes.figure.canvas.draw()


def test_one_step_alone_is_a_point():
  drawn = plot.loss_scale(ONE, ax=new_axes()).lines
  assert "o" in [line.get_marker() for line in drawn]


def test_a_dtype_that_is_none_is_refused():
  with pytest.raises(TypeError, match="`dtype` must be a floating-point dtype"):
    plot.loss_scale(SOME, int, ax=new_axes())


def test_replays_are_drawn_with_what_each_rule_lost():
  axes = plot.replays(REPLAYS, ax=new_axes())
  found = lines(axes)
  scales = {label: set(y) for label, (_, y) in found.items() if ": " in label}
  lost = REPLAYS["one"].lost_steps
  assert lost > 0 and REPLAYS["other"].lost_steps == 0
  mean = REPLAYS["one"].mean_headroom
  other = REPLAYS["other"].mean_headroom
  assert scales == {
    f"one: {lost} lost, {mean:.1f} bits": {4096.0},
    f"other: 0 lost, {other:.1f} bits": {1024.0},
  }
  crosses = [line for line in axes.lines if line.get_marker() == "x"]
  steps = REPLAYS["one"].history.step[REPLAYS["one"].history.overflow]
  assert [line.get_xdata().tolist() for line in crosses] == [steps.tolist()]


def test_a_step_that_one_rule_did_not_lose_tells_the_largest_scale():
  axes = plot.replays(REPLAYS, ax=new_axes())
  _, largest = lines(axes)["largest S without overflow, float16"]
  np.testing.assert_allclose(largest, [4096, 8192, np.nan, 4096])


def test_a_rule_that_lost_all_steps_has_no_headroom_to_tell():
  replay = instruments.replay(ols.FixedLossScale(2.0**20), LOST)
  axes = plot.replays({"fixed": replay}, ax=new_axes())
  assert "fixed: 3 lost" in lines(axes)


def test_no_rule_has_the_colour_of_the_largest_scale():
  colours = [x.get_color() for x in plot.replays(REPLAYS, ax=new_axes()).lines]
  largest, *others = colours
  assert largest not in others


def test_a_lost_step_is_a_cross_in_the_colour_of_its_rule():
  rules = {"a": ols.FixedLossScale(4096.0), "b": ols.FixedLossScale(2.0**20)}
  replays = {name: instruments.replay(rules[name], SOME) for name in rules}
  drawn = plot.replays(replays, ax=new_axes()).lines
  crosses = [x.get_color() for x in drawn if x.get_marker() == "x"]
  assert crosses == [x.get_color() for x in drawn if ": " in x.get_label()]
  assert len({*crosses}) == 2
  # Those of both rules on one place stay visible, as lines do.
  widths = [x.get_markeredgewidth() for x in drawn if x.get_marker() == "x"]
  assert widths[0] > widths[1] > 0
  del replays["b"]
  line, cross = plot.replays(replays, ax=new_axes()).lines[1:]
  assert cross.get_color() == line.get_color() and cross.get_marker() == "x"


def test_a_first_scale_of_1_does_not_stretch_the_axis():
  scales = [1.0] + [8192.0] * 3
  (low, _), found = scale_axis(scales, [1.0, 8000.0, 8000.0, 8000.0])
  assert low > 64 and found[1:] == scales[1:]
  # It is all there is, is left by one doubling, or was lost.
  for kept in ([1.0] * 4, [1.0, 2.0, 4.0, 8.0]):
    (low, _), found = scale_axis(kept, [8.0] * 4)
    assert low < 1 and found == kept
  (low, _), found = scale_axis(scales, [np.inf, 8000.0, 8000.0, 8000.0])
  assert low < 1 and found == scales


def scale_axis(scales, amax):
  """Returns the limits of S in a picture, and the S that it shows."""
  history = make_history(scales, amax)
  axes = plot.loss_scale(history, ax=new_axes())
  return axes.get_ylim(), lines(axes)["S"][1]


def test_no_replays_are_refused():
  with pytest.raises(ValueError, match="`replays` must have at least one"):
    plot.replays({}, ax=new_axes())


def steps_of(axes):
  """Returns the non-empty bins of each histogram: left edge to share."""
  found = []
  for patch in axes.patches:
    if isinstance(patch, StepPatch):
      values, edges, baseline = patch.get_data()
      floor = np.max(baseline)
      found.append(
        {
          left: value
          for left, value in zip(edges[:-1], values, strict=True)
          if value > floor
        }
      )
  return found


def test_shares_are_drawn_by_exponent_and_shifted_by_the_scale():
  axes = plot.exponent_histogram(STATS, loss_scale=2.0**10, ax=new_axes())
  as_is, scaled = steps_of(axes)
  assert as_is == {-26: 1 / 8, -1: 2 / 8, 1: 1 / 8}
  assert scaled == {-16: 1 / 8, 9: 2 / 8, 11: 1 / 8}
  assert axes.get_yscale() == "log"
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == [
    "gradients: 25 % are 0, 12.5 % become 0 in float16",
    "times S = $2^{10}$: 0 % become 0",
    "hatched: subnormal numbers of the format",
    "zeros",
    "inf and NaN",
  ]
  assert axes.get_xlabel() == "magnitude, of |g| and of S |g|"


@pytest.mark.parametrize(
  ("gradients", "loss_scale", "told"),
  [
    # A tie becomes 0, and what is just above it does not.
    ([2.0**-25, 1.0], 1.0, "about 0 % become 0"),
    ([2.0**-26, 1.0], 1.0, "50 % become 0"),
    ([2.0**-26, 1.0], 2.0**-3, "50 % become 0"),
    ([2.0**-26, 1.0], 2.0, "about 0 % become 0"),
    ([2.0**-26, 1.0], 4.0, "0 % become 0"),
    ([2.0**-26, 1.0], 1.25, "about 33.9 % become 0"),
  ],
)
def test_the_share_that_becomes_0_is_that_of_the_bins(
  gradients, loss_scale, told
):
  stats = instruments.leaf_stats(jnp.array(gradients))
  axes = plot.exponent_histogram(stats, loss_scale=loss_scale, ax=new_axes())
  text = axes.get_legend().get_texts()[1].get_text()
  assert text.split(": ")[1] == told


def test_a_scale_that_is_no_power_of_two_shifts_by_its_logarithm():
  axes = plot.exponent_histogram(STATS, loss_scale=3000.0, ax=new_axes())
  assert min(steps_of(axes)[1]) == -26 + np.log2(3000.0)
  assert axes.get_legend().get_texts()[1].get_text() == (
    "times S = 3000: 0 % become 0"
  )


def test_zeros_and_what_is_not_finite_stand_beside_the_exponents():
  axes = plot.exponent_histogram(STATS, ax=new_axes())
  zeros, nonfinite = (bars.patches[0] for bars in axes.containers)
  low, high = axes.get_xlim()
  assert low <= zeros.get_x() and nonfinite.get_x() > 16
  assert nonfinite.get_x() + nonfinite.get_width() <= high
  tops = [bar.get_y() + bar.get_height() for bar in (zeros, nonfinite)]
  assert tops == pytest.approx([2 / 8, 2 / 8])
  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels[0] == "0" and labels[-1] == "inf,\nNaN"


def labels_of(*gradients):
  """Returns what the legend of a picture of gradients says, but the first."""
  stats = instruments.leaf_stats(jnp.array(gradients))
  axes = plot.exponent_histogram(stats, ax=new_axes())
  return [text.get_text() for text in axes.get_legend().get_texts()][1:]


def test_the_legend_names_the_bars_beside_the_exponents_and_the_hatching():
  hatched = "hatched: subnormal numbers of the format"
  assert labels_of(0.0, 1.0) == [hatched, "zeros"]
  assert labels_of(0.0, 1.0, jnp.inf) == [hatched, "zeros", "inf and NaN"]
  assert labels_of(1.0, jnp.nan) == [hatched, "inf and NaN"]
  assert labels_of(1.0) == [hatched]
  axes = plot.exponent_histogram(STATS, ax=new_axes())
  handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
  assert handles[hatched].get_hatch()
  zeros, nonfinite = axes.containers
  assert handles["zeros"] is zeros and handles["inf and NaN"] is nonfinite
  colours = [bars.patches[0].get_facecolor() for bars in (zeros, nonfinite)]
  assert colours[0] != colours[1]


def extents(axes):
  """Returns from where to where each format's bars go, and their heights."""
  found = []
  for bar in axes.collections:
    (path,) = bar.get_paths()
    (x, y), (end, top) = path.get_extents().get_points()
    found.append(((x, end), (y, top)))
  return found


def test_each_format_has_a_bar_over_the_shares_as_wide_as_its_range():
  axes = plot.exponent_histogram(STATS, ax=new_axes())
  ranges = [x for x, _ in extents(axes)]
  expected = [
    *((-24, -14), (-14, np.log2(65504))),
    *((-133, -126), (-126, np.log2(float(jnp.finfo(jnp.bfloat16).max)))),
    *((-9, -6), (-6, np.log2(448))),
    *((-16, -14), (-14, np.log2(57344))),
  ]
  np.testing.assert_allclose(ranges, expected, rtol=1e-6)
  assert all(low > 1.0 for _, (low, _) in extents(axes))
  names = [label.get_text() for label in axes.get_yticklabels()]
  assert names[-4:] == ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
  assert "100 %" in names


def test_formats_can_be_chosen():
  axes = plot.exponent_histogram(STATS, dtypes=[jnp.float8_e5m2], ax=new_axes())
  assert extents(axes)[0][0] == (-16, -14)
  assert len(axes.collections) == 2
  plot.exponent_histogram(STATS, dtypes=[], ax=new_axes())
  with pytest.raises(TypeError, match="`dtypes` must be a floating-point"):
    plot.exponent_histogram(STATS, dtypes=[int], ax=new_axes())


EMPTY = instruments.leaf_stats(jnp.zeros(0))
ONLY_NAN = instruments.leaf_stats(jnp.array([jnp.nan]))
ALL_ZERO = instruments.leaf_stats(jnp.zeros(5))


@pytest.mark.slow
@pytest.mark.parametrize("stats", [EMPTY, ONLY_NAN, ALL_ZERO])
@pytest.mark.parametrize("dtypes", [(), (jnp.bfloat16,), (jnp.float16,)])
def test_any_stats_are_drawn(stats, dtypes):
  axes = plot.exponent_histogram(
    stats, loss_scale=8.0, dtypes=dtypes, ax=new_axes()
  )
  assert steps_of(axes) == [{}, {}]
  axes.figure.canvas.draw()
  plot.heat_map(stats, ax=new_axes()).figure.canvas.draw()


def test_a_heat_map_has_a_row_for_each_layer():
  axes = plot.heat_map(STATS, loss_scale=2.0, ax=new_axes())
  shares, zeros, _ = (mesh.get_array() for mesh in axes.collections)
  assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
  assert shares.shape == (2, 277) and zeros.shape == (2, 1)
  assert {i - 149: shares[0, i] for i in np.flatnonzero(shares[0])} == {
    -26: 1 / 8,
    -1: 2 / 8,
    1: 1 / 8,
  }
  assert shares[1].mask.all() and zeros[1, 0] is np.ma.masked
  assert zeros[0, 0] == 2 / 8
  # The first row is above the second one, and S has moved all by one.
  low, high = axes.get_ylim()
  assert low > high
  corners = axes.collections[0].get_coordinates()
  assert corners[0, 0].tolist() == [-148, -0.5]


def test_a_heat_map_shows_inf_and_nan_on_the_right():
  axes = plot.heat_map(STATS, ax=new_axes())
  nonfinite = axes.collections[2]
  assert nonfinite.get_array()[0, 0] == 2 / 8
  assert nonfinite.get_array()[1, 0] is np.ma.masked
  _, zeros, only_nan = plot.heat_map(ONLY_NAN, ax=new_axes()).collections
  assert only_nan.get_array()[0, 0] == 1 and zeros.get_array().mask.all()
  right = nonfinite.get_coordinates()[..., 0]
  assert right.min() > 16 and right.max() <= axes.get_xlim()[1]
  assert axes.get_xticklabels()[-1].get_text() == "inf,\nNaN"
  finite = instruments.leaf_stats({"a": jnp.ones(3)})
  axes = plot.heat_map(finite, ax=new_axes())
  assert "inf" not in axes.get_xticklabels()[-1].get_text()


def test_a_heat_map_of_long_paths_keeps_room_for_its_rows():
  begin = "params/encoder/" + 8 * "block/"
  paths = [f"{begin}layer_{i:02}/{9 * 'mlp/'}kernel" for i in range(60)]
  axes = plot.heat_map(
    instruments.leaf_stats(dict.fromkeys(paths, GRADIENTS)),
    loss_scale=2.0**12,
    ax=Figure(figsize=(8, 15), layout="constrained").subplots(),
  )
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels[7] == "…/layer_07/mlp/mlp/…/mlp/mlp/mlp/kernel"
  assert max(map(len, labels)) <= 40 and len(set(labels)) == 60
  axes.figure.canvas.draw()
  boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
  assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
  assert axes.get_position().width > 0.4


def test_a_heat_map_has_lines_where_the_format_ends():
  axes = plot.heat_map(STATS, jnp.float8_e5m2, ax=new_axes())
  marks = {
    label: points[0][0]
    for label, points in lines(axes).items()
    if "float8" in label
  }
  assert marks == {
    r"$\leftarrow$ 0 in float8_e5m2": -17,
    r"$\leftarrow$ subnormal in float8_e5m2": -14,
    "largest float8_e5m2": np.log2(57344),
  }


@pytest.mark.parametrize("lowest", range(-42, -34))
def test_the_label_of_zeros_touches_no_other(lowest):
  """Also in a panel that is half as wide as the figure that is made alone."""
  gradients = jnp.float32([0.0, 2.0**lowest, 1.0])
  figure = Figure(figsize=(4.4, 4.0), layout="constrained")
  axes = plot.exponent_histogram(
    instruments.leaf_stats(gradients),
    loss_scale=2.0**15,
    ax=figure.subplots(),
  )
  figure.draw_without_rendering()
  boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
  assert boxes[0].x1 < boxes[1].x0


def test_a_heat_map_of_nothing_is_refused():
  with pytest.raises(ValueError, match="`stats` must have at least one leaf"):
    plot.heat_map(instruments.leaf_stats({}), ax=new_axes())


@pytest.mark.parametrize(
  ("draw", "data", "message"),
  [
    (
      plot.loss_scale,
      REPLAYS["one"],
      "a History, got ReplayedRun; .*replay.history",
    ),
    (plot.exponent_histogram, {"a": 1.0}, "a LeafStats, got dict; call"),
    (plot.heat_map, {"a": 1.0}, "a LeafStats, got dict; call"),
    (plot.replays, REPLAYS["one"], "by name, got ReplayedRun; pass"),
    (plot.replays, {"a": SOME}, "a ReplayedRun, got History; pass"),
  ],
)
def test_what_is_not_to_be_drawn_is_refused(draw, data, message):
  with pytest.raises(TypeError, match=message):
    draw(data, ax=new_axes())
