"""The files, the table and the picture."""

import csv
import io
import json
import math

import pytest
import rich.console

from optax_lossscale.demo import figure
from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import table

LABEL_NAME = "precision, loss scale, check"
NAMES = {"title": "Title", "label_name": LABEL_NAME, "score_name": "accuracy"}


def make_step(step=1, loss=1.0, scale=None, skipped=None, precision="float16"):
  amax = None if scale is None else math.inf if skipped else 8.0
  return run_lib.Step(step, precision, loss, scale, skipped, skipped, amax)


def make_result(run="a", seed=0, *steps, held_out=None):
  return run_lib.Result(run, seed, list(steps or [make_step()]), held_out)


def switching(switch=3, *, run="a", seed=0, scale=8.0):
  """Four steps, those from `switch` on in float32, where S is not used."""
  steps = [
    make_step(step, scale=scale, skipped=False)
    if step < switch
    else make_step(step, precision="float32")
    for step in (1, 2, 3, 4)
  ]
  return make_result(run, seed, *steps)


def test_a_result_counts_its_steps():
  result = make_result(
    "a",
    0,
    make_step(1, scale=16.0, skipped=True),
    make_step(2, loss=3.0, scale=8.0, skipped=False),
    make_step(3, loss=2.0, scale=8.0, skipped=False),
  )
  assert (result.applied_steps, result.skipped_steps) == (2, 1)
  assert (result.loss, result.loss_scale) == (2.0, 8.0)
  unscaled = make_result()
  assert (unscaled.applied_steps, unscaled.skipped_steps) == (1, 0)
  assert unscaled.loss_scale is None and unscaled.held_out is None


@pytest.mark.parametrize(("switch", "after"), [(1, None), (3, 2), (5, None)])
def test_a_result_tells_after_which_step_the_precision_changed(switch, after):
  assert switching(switch).switched_after == after


def test_a_result_tells_the_last_scale_that_was_used():
  assert switching().loss_scale == 8.0


def test_csv_holds_every_step(tmp_path):
  path = tmp_path / "history.csv"
  results = [
    make_result("float16, none", 0, make_step(loss=math.nan)),
    make_result("float16, fixed:8", 1, make_step(2, 0.1, 8.0, True)),
  ]
  run_lib.write_csv(path, results)
  with path.open(newline="") as file:
    rows = list(csv.reader(file))
  assert rows == [
    [
      "run",
      "seed",
      "step",
      "precision",
      "loss",
      "loss_scale",
      "overflow",
      "skipped",
      "amax",
    ],
    ["float16, none", "0", "1", "float16", "nan", "", "", "", ""],
    [*("float16, fixed:8", "1", "2", "float16", "0.1"), "8.0", "1", "1", "inf"],
  ]


def test_json_is_json_whatever_the_loss(tmp_path):
  def refuse(constant):
    raise AssertionError(constant)

  path = tmp_path / "summary.json"
  result = make_result("a", 0, make_step(loss=math.inf))
  run_lib.write_json(path, {"steps": 1}, [result])
  report = json.loads(path.read_text(), parse_constant=refuse)
  assert report["steps"] == 1
  assert report["runs"] == [
    {
      "run": "a",
      "seed": 0,
      "loss": "inf",
      "start": None,
      "held_out": None,
      "applied_steps": 1,
      "skipped_steps": 0,
      "loss_scale": None,
      "switched_after": None,
      "history": None,
    }
  ]


def test_json_has_the_history_of_what_was_scaled(tmp_path):
  path = tmp_path / "summary.json"
  label = "[\n  two  spaces"
  steps = [
    make_step(1, scale=16.0, skipped=True),
    make_step(2, scale=8.0, skipped=False),
    make_step(3),
  ]
  results = [make_result(label, 0, *steps), make_result("b")]
  run_lib.write_json(path, {"seeds": [0, 1], "none": []}, results)
  report = json.loads(path.read_text())
  assert report["seeds"] == [0, 1] and report["none"] == []
  first, second = report["runs"]
  assert first["run"] == label
  assert first["history"] == {
    "step": [1, 2],
    "loss_scale": [16.0, 8.0],
    "overflow": [1, 0],
    "amax": ["inf", 8.0],
  }
  assert second["history"] is None
  # A list is one line, however long.
  assert '"loss_scale": [16.0, 8.0],\n' in path.read_text()


def test_file_is_replaced_whole_or_not_at_all(tmp_path):
  path = tmp_path / "file"
  path.write_text("old")
  with (
    pytest.raises(KeyboardInterrupt),
    run_lib.replacing(path) as temporary,
  ):
    temporary.write_text("half")
    raise KeyboardInterrupt
  assert path.read_text() == "old"
  assert list(tmp_path.iterdir()) == [path]
  with run_lib.replacing(path) as temporary:
    temporary.write_text("new")
    assert path.read_text() == "old"
  assert path.read_text() == "new"
  assert list(tmp_path.iterdir()) == [path]


def printed(*results, width=80):
  console = rich.console.Console(file=io.StringIO(), width=width)
  console.print(
    table.make_table(
      results, score_name="held-out accuracy", label_name=LABEL_NAME
    )
  )
  return console.file.getvalue()


def summed(run, seed, loss, held_out, applied, skipped, scale=None):
  """A result with these figures."""
  steps = [make_step(loss=loss, scale=scale, skipped=True)] * skipped
  steps += [make_step(loss=loss, scale=scale, skipped=False)] * applied
  return make_result(run, seed, *steps, held_out=held_out)


def test_table_tells_every_figure():
  lines = printed(
    summed("float32, none", 0, 2.44597, 0.97214, 60, 0),
    summed("float16, dynamic", 0, math.nan, None, 56, 4, 2.0**21),
  ).splitlines()
  assert any(line.strip().startswith(LABEL_NAME) for line in lines)
  rows = [line.split() for line in lines]
  assert ["float32,", "none", "2.4460", "0.9721", "60", "0", "-"] in rows
  assert ["float16,", "dynamic", "nan", "-", "56", "4", "2^21"] in rows


def test_table_keeps_its_figures_on_a_narrow_terminal():
  label = "float16, dynamic:init_scale=2**15,growth_interval=200"
  result = summed(label, 0, 2.4459, 0.9721, 1234, 56, 2.0**-10)
  words = printed(result, width=46).split()
  for figure_ in ("2.4459", "0.9721", "1234", "56", "2^-10"):
    assert figure_ in words


def test_table_breaks_a_long_label_between_its_parts():
  label = "float16, dynamic:2**32,growth_interval=20, saturated"
  lines = printed(summed(label, 0, 2.4459, 0.9721, 60, 2, 8.0)).splitlines()
  assert max(map(len, lines)) <= 80
  words = {word for line in lines for word in line.split()}
  parts = {"float16,", "growth_interval=20,", "saturated"}
  assert parts <= words
  assert {"dynamic:2**32,", "dynamic:"} & words
  assert table.fold(label, 30).replace("\n", " ") == label.replace(
    ",growth", ", growth"
  )


def test_table_gives_mean_and_spread_of_several_seeds():
  out = printed(
    summed("a", 0, 1.0, 0.5, 9, 1, 8.0),
    summed("a", 1, 2.0, 0.5, 10, 0, 12.0),
    summed("b", 0, math.nan, 0.5, 10, 0),
    summed("b", 1, 2.0, 0.5, 10, 0),
  )
  for part in ("1.5000", "± 0.7071", "9.5", "2^3", "to 12", "nan", "2 seeds"):
    assert part in out


def test_table_tells_after_which_step_if_one_switched():
  stays, goes = switching(5, run="stays"), switching(run="goes")
  rows = [line.split() for line in printed(stays, goes).splitlines()]
  assert ["stays", "1.0000", "-", "4", "0", "2^3", "-"] in rows
  assert ["goes", "1.0000", "-", "4", "0", "2^3", "2"] in rows
  assert "switched" not in printed(stays)


@pytest.mark.slow
@pytest.mark.parametrize(
  "results",
  [
    [make_result()],
    [make_result("a"), make_result("b", 0, make_step(1, 1.0, 8.0, False))],
    [make_result("a", 0, make_step(1, math.inf, 8.0, True))],
    [make_result("a", 0, *(make_step(step, math.nan) for step in (1, 2)))],
    [
      make_result(
        run,
        seed,
        *(
          make_step(step, 10.0**-step, 2.0**step, step == 2)
          for step in (1, 2, 3)
        ),
      )
      for run in "abcdef"
      for seed in (0, 1)
    ],
    [make_result("a", 0), make_result("b", 1)],
    [switching(2), switching(4, seed=1)],
    [switching(scale=None)],
  ],
  ids=["one", "two", "inf", "nan", "many", "apart", "switching", "unscaled"],
)
def test_figure_draws_any_results(results, tmp_path):
  path = tmp_path / "figure.png"
  figure.write_figure(path, results, **NAMES)
  assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
  assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def drawn(monkeypatch):
  """The figures that are saved."""
  figures = []
  monkeypatch.setattr(
    figure.Figure,
    "savefig",
    lambda self, path, **_: figures.append(self) or path.write_bytes(b""),
  )
  return figures


def test_figure_marks_skipped_and_lost_steps(tmp_path, drawn):
  results = [
    make_result("a", 0, make_step(1), make_step(2, loss=math.nan)),
    make_result(
      "b", 0, make_step(1, 1.5, 16.0, True), make_step(2, 1.5, 8.0, False)
    ),
  ]
  figure.write_figure(tmp_path / "figure.png", results, **NAMES)
  losses, scales = drawn[0].axes
  lines = {
    line.get_label(): [list(xy) for xy in line.get_data()]
    for axes in (losses, scales)
    for line in axes.get_lines()
  }
  assert lines["a: loss not finite"] == [[2], [1.0]]
  assert lines["skipped step"] == [[1], [16.0]]
  assert lines["b"] == [[1, 2], [1.5, 1.5]]
  assert [axes.get_ylabel() for axes in drawn[0].axes] == [
    "training loss",
    "loss scale S",
  ]
  assert losses.get_shared_x_axes().joined(losses, scales)
  assert losses.get_legend().get_title().get_text() == LABEL_NAME


def test_figure_marks_the_switch_and_ends_the_scale_there(tmp_path, drawn):
  results = [switching(5, run="stays"), switching(run="goes")]
  figure.write_figure(tmp_path / "figure.png", results, **NAMES)
  losses, scales = drawn[0].axes
  (mark,) = (x for x in losses.get_lines() if "switch" in x.get_label())
  assert mark.get_label() == "switch to float32"
  assert set(mark.get_xdata()) == {2.5}
  assert [line.get_ydata().tolist() for line in scales.get_lines()] == [
    [8.0] * 4,
    pytest.approx([8.0, 8.0, math.nan, math.nan], nan_ok=True),
  ]


def test_figure_draws_each_of_eight_runs_in_a_way_of_its_own(tmp_path, drawn):
  results = [make_result(run) for run in "abcdefgh"]
  figure.write_figure(tmp_path / "figure.png", results, **NAMES)
  lines = drawn[0].axes[0].get_lines()
  assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 8


def test_figure_leads_with_the_way_that_each_run_closed(tmp_path, drawn):
  results = [make_result(run) for run in "abcd"]
  closed = {"a": [100.0], "b": [-8.0, 4.0], "c": [math.nan]}
  closed["d"] = [math.nan, 8.0]
  path = tmp_path / "figure.png"
  figure.write_figure(path, results, closed=closed, **NAMES)
  bars, losses = drawn[0].axes
  assert [bar.get_width() for bar in bars.patches] == [100.0, -2.0, 0.0, 8.0]
  words = [text.get_text() for text in bars.texts]
  assert words[:6] == ["a", "100.0 %", "b", "-2.0 %", "c", "not finite"]
  assert words[6:] == ["d", "8.0 %, 1 of 2 not finite"]
  assert [*bars.get_lines()[0].get_xdata()] == [-8.0, 4.0]
  left, right = bars.get_xlim()
  assert left == -8.0
  assert all(left <= text.get_position()[0] < right for text in bars.texts)
  assert bars.get_xlabel().startswith("accuracy: % of the gap")
  assert bars.get_title(loc="left") == LABEL_NAME
  assert not bars.get_shared_x_axes().joined(bars, losses)


def test_figure_cuts_a_bar_that_is_far_below_the_start(tmp_path, drawn):
  closed = {"a": [100.0], "b": [-900.0]}
  results = [make_result("a"), make_result("b")]
  path = tmp_path / "figure.png"
  figure.write_figure(path, results, closed=closed, **NAMES)
  assert drawn[0].axes[0].get_xlim() == (-30.0, 115.0)


def test_figure_draws_what_is_scaled_over_a_wide_float32(tmp_path, drawn):
  scaled = make_step(1, 1.0, 8.0, False)
  results = [make_result("float32"), make_result("alone")]
  results += [make_result(run, 0, scaled) for run in ("fixed", "dynamic")]
  figure.write_figure(tmp_path / "figure.png", results, **NAMES)
  lines = drawn[0].axes[0].get_lines()
  wide, alone, *thin = (line.get_linewidth() for line in lines)
  assert wide > 2 * alone > 2 * max(thin)
  orders = [line.get_zorder() for line in lines]
  assert orders == sorted(orders) and len(set(orders)) == 4
