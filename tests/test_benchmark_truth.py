"""`python -m benchmarks truth`: its training, its verdict and its tables."""

import functools
import itertools
import math
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.truth import command
from benchmarks.truth import figure
from benchmarks.truth import results
from benchmarks.truth import settings
from benchmarks.truth import table
from benchmarks.truth import training
from benchmarks.truth import verdict
from benchmarks.truth import workload as workload_lib
from benchmarks.truth import workloads
import optax_lossscale as ols
from tests import documents

STEPS = 6


def loss(params, batch):
  x, y = batch
  return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def draw(key, params):
  for_x, for_y = jax.random.split(key)
  return jax.random.normal(for_x, (8, 3)), jax.random.normal(for_y, (8, 1))


def init(key):
  for_a, for_b = jax.random.split(key)
  shapes = {"a": (3, 4), "b": (4, 1)}
  keys = {"a": for_a, "b": for_b}
  return {x: jax.random.normal(keys[x], shapes[x]) for x in shapes}


HELD_OUT = draw(jax.random.key(9), None)


def make_tiny(*, full=True, size=1.0):
  return workload_lib.Workload(
    description="A tiny network",
    elements=8,
    init=init,
    draw=draw,
    loss=lambda params, batch: size * loss(params, batch),
    score=lambda params: loss(params, HELD_OUT),
    score_name="held-out error",
    matters=1e-3,
    rate=0.1,
    steps=STEPS,
    full=full,
  )


def plainly(workload, setting, seed):
  """Trains in a Python loop, without the library where that is possible."""
  key = jax.random.key(seed)
  params = workload.init(key)
  opt_state = workload.optimizer.init(params)
  low = workload.loss
  if setting.dtype != jnp.float32:
    low = ols.autocast(low, "O1", dtype=setting.dtype)
  tx = ols.loss_scaling(workload.optimizer, setting.rule)
  scale, skipped = float(ols.get_loss_scale(tx.init(params))), 0

  @jax.jit
  def gradient(scale, params, batch):
    scaled = jax.grad(lambda params: low(params, batch) * scale)(params)
    return jax.tree.map(lambda x: x / scale, scaled)

  @jax.jit
  def step(params, opt_state, grads):
    updates, opt_state = workload.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for number in range(workload.steps):
    batch = workload.draw(jax.random.fold_in(key, number), params)
    grads = gradient(scale, params, batch)
    if all(np.isfinite(x).all() for x in jax.tree.leaves(grads)):
      params, opt_state = step(params, opt_state, grads)
    else:
      scale, skipped = scale / 2, skipped + 1
  return float(workload.score(params)), skipped, scale


@pytest.mark.parametrize(
  ("name", "size"),
  [
    pytest.param(name, size, marks=mark)
    for name, size, mark in [
      ("dynamic", 16.0, pytest.mark.slow),
      ("float16", 0.01, pytest.mark.slow),
      ("float32", 0.01, pytest.mark.long),
      ("float32", 16.0, pytest.mark.long),
      ("bfloat16", 0.01, pytest.mark.long),
      ("bfloat16", 16.0, pytest.mark.long),
      ("float16", 16.0, pytest.mark.long),
      ("dynamic", 0.01, pytest.mark.long),
    ]
  ],
)
def test_training_is_that_of_a_plain_loop(name, size):
  """With a large loss, the dynamic default skips its first steps."""
  workload, setting = make_tiny(size=size), settings.SETTINGS[name]
  trained = training.train(workload, setting)
  for point in trained.points[-settings.SEEDS :]:
    score, skipped, scale = plainly(workload, setting, point.seed)
    assert point.score == pytest.approx(score, rel=1e-4)
    found = point.step, point.skipped, point.loss_scale
    assert found == (STEPS, skipped, scale)
  if name == "dynamic":
    assert any(x.skipped for x in trained.points) == (size > 1)


@pytest.mark.slow
def test_every_seed_is_scored_from_before_the_first_step():
  trained = training.train(make_tiny(), settings.SETTINGS["null-seeds"])
  assert {x.seed for x in trained.points} == {5, 6, 7, 8, 9}
  assert {x.step for x in trained.points} == set(range(STEPS + 1))
  first = next(x for x in trained.points if x.step == 0)
  at_start = jax.jit(init)(jax.random.key(5))
  assert first.score == pytest.approx(float(loss(at_start, HELD_OUT)), rel=1e-6)
  np.testing.assert_array_equal(trained.first["a"], at_start["a"])
  last = next(x for x in trained.points if x.step == STEPS)
  final = float(loss(trained.last, HELD_OUT))
  assert final == pytest.approx(last.score, rel=1e-6)


@pytest.mark.slow
def test_float32_with_a_loss_scale_has_the_same_bits():
  made = {
    name: training.train(make_tiny(), settings.SETTINGS[name])
    for name in ("float32", "null-scaled", "null-seeds", "fixed")
  }
  assert made["float32"].digest == made["null-scaled"].digest
  assert (
    made["float32"].points[-1].score == made["null-scaled"].points[-1].score
  )
  assert len({x.digest for x in made.values()}) == 3


@pytest.mark.slow
def test_seeds_may_run_in_one_program(monkeypatch):
  one_by_one = training.train(make_tiny(), settings.SETTINGS["dynamic"])
  with monkeypatch.context() as patch:
    patch.setattr(jax, "default_backend", lambda: "gpu")
    together = training.train(make_tiny(), settings.SETTINGS["dynamic"])
  for a, b in zip(one_by_one.points, together.points, strict=True):
    assert a._replace(score=0.0) == b._replace(score=0.0)
    assert a.score == pytest.approx(b.score, rel=1e-4)


@pytest.mark.slow
def test_saturating_hardware_is_checked_for_saturation():
  setting = settings.SETTINGS["saturating"]
  trained = training.train(make_tiny(size=16.0), setting)
  assert any(x.skipped for x in trained.points)
  overflow = training.lowered(make_tiny(size=1e9), setting)
  grads = jax.grad(overflow)(init(jax.random.key(0)), HELD_OUT)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


REFERENCE = [1.0, 1.2, 0.8, 1.1, 0.9]


def compare(scores, **options):
  options = {
    "reference": REFERENCE,
    "matters": 0.1,
    "more_is_better": False,
  } | options
  return verdict.compare(scores, **options).verdict


def shifted(by):
  return [x + by for x in REFERENCE]


def test_verdict_comes_out_each_way():
  assert compare(REFERENCE) == "no difference"
  assert compare(shifted(1.0)) == "worse"
  assert compare(shifted(-1.0)) == "better"
  assert compare(shifted(1.0), more_is_better=True) == "better"
  assert compare(shifted(-1.0), more_is_better=True) == "worse"


def test_verdict_needs_all_three_conditions():
  deviation = statistics.stdev(REFERENCE)
  assert compare(shifted(2.01 * deviation)) == "worse"
  # Within two deviations, though every seed is worse.
  assert compare(shifted(1.99 * deviation)) == "no difference"
  # One seed is better.
  assert compare([9.0, 9.0, 9.0, 9.0, 0.85]) == "no difference"
  # Too little to matter.
  assert compare(shifted(0.4), matters=0.41) == "no difference"
  assert compare(shifted(0.4), matters=0.39) == "worse"


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("more_is_better", [True, False])
def test_score_that_is_not_finite_is_worse(lost, more_is_better):
  scores = [*REFERENCE[:-1], lost]
  assert compare(scores, more_is_better=more_is_better) == "worse"


def test_verdict_against_numpy_on_random_scores():
  rng = np.random.default_rng(0)
  seen = set()
  for _ in range(500):
    theirs = rng.normal(size=5)
    ours = theirs + rng.normal(size=5) * rng.choice([0.1, 1]) + rng.normal() * 3
    matters = rng.choice([0.01, 1.0, 4.0])
    gap = np.mean(ours - theirs)
    differs = (
      abs(gap) > 2 * np.std(theirs, ddof=1)
      and abs(np.sum(np.sign(ours - theirs))) == 5
      and abs(gap) >= matters
    )
    expected = "no difference"
    if differs:
      expected = "worse" if gap > 0 else "better"
    seen.add(expected)
    found = verdict.compare(ours, theirs, matters=matters, more_is_better=False)
    assert found.verdict == expected
    assert found.mean == pytest.approx(gap)
    assert found.deviation == pytest.approx(np.std(ours - theirs, ddof=1))
    assert found.visible == max(matters, 2 * np.std(theirs, ddof=1))
  assert len(seen) == 3


def test_reference_must_be_finite():
  with pytest.raises(ValueError, match="float32's scores must be finite"):
    compare(REFERENCE, reference=[math.nan, *REFERENCE[1:]])


@pytest.mark.parametrize(
  ("alone", "scaled", "reading"),
  [
    ("no difference", "no difference", "no need seen"),
    ("better", "no difference", "no need seen"),
    ("worse", "no difference", "needs loss scaling"),
    ("worse", "better", "needs loss scaling"),
    ("worse", "worse", "not cured by loss scaling"),
    ("no difference", "worse", "worse with loss scaling"),
  ],
)
def test_reading(alone, scaled, reading):
  found = {"float16": alone, "dynamic": scaled, "headroom": "worse"}
  assert verdict.reading(found) == reading


@pytest.fixture
def repository(tmp_path, monkeypatch):
  """Two tiny workloads, and a function that runs the command on a folder."""
  made = {"tiny": make_tiny, "dull": functools.partial(make_tiny, full=False)}
  monkeypatch.setattr(command, "WORKLOADS", made)
  monkeypatch.setattr(results, "FOLDER", tmp_path / "rows")

  def run(*options):
    argv = ["truth", "--rows", str(tmp_path / "rows"), *options]
    assert benchmarks.main(argv) == 0
    return {
      str(x.relative_to(tmp_path / "rows").with_suffix("")): x
      for x in sorted((tmp_path / "rows").rglob("*.csv"))
    }

  return run


@pytest.mark.slow
def test_rows_are_made_once_and_table_shows_those_there_are(
  repository, capsys, tmp_path
):
  one = repository("--only", "tiny/float32")
  assert [*one] == ["tiny/float32", "tiny/histogram", "tiny/screen"]
  first = capsys.readouterr().out
  assert "held-out error" in first
  before = {name: x.read_bytes() for name, x in one.items()}

  begin, end = "<!-- python -m benchmarks truth -->", "<!-- end -->"
  (tmp_path / "README.md").write_text(f"Before\n{begin}\n{end}\nafter")
  every = repository("--appendix", str(tmp_path))
  assert len(every) == len(settings.SETTINGS) + 5 + 4
  assert {name: every[name].read_bytes() for name in one} == before
  printed = capsys.readouterr().out
  assert "tiny/float32" not in printed  # It was not trained again.
  assert printed.count(" s\n") == len(settings.SETTINGS) - 1 + 5
  assert "bit-equal" in printed and "no difference" in printed
  pictures = sorted(x.name for x in (tmp_path / "images").iterdir())
  assert pictures == ["dull.png", "tiny.png"]
  # The tables are between these lines, and only once.
  page = (tmp_path / "README.md").read_text()
  assert page.startswith(
    f"Before\n{begin}\n\n- `tiny`: A tiny network; rate 0.1, 6 steps."
  )
  assert page.endswith(f"|\n\n{end}\nafter")
  assert page.split("\n\n", 1)[1].removesuffix(f"\n\n{end}\nafter") in printed
  repository("--appendix", str(tmp_path))
  assert (tmp_path / "README.md").read_text() == page


@pytest.mark.slow
def test_row_says_what_made_it_and_is_made_again_alike(repository, tmp_path):
  file = repository("--only", "tiny/dynamic")["tiny/dynamic"]
  about, points = results.read(file, training.Point)
  assert about["command"] == "python -m benchmarks truth --only tiny/dynamic"
  assert f"jax {jax.__version__}" in about["versions"]
  assert len(points) == settings.SEEDS * (STEPS + 1)
  file.unlink()
  again = repository("--only", "tiny/dynamic")["tiny/dynamic"]
  assert results.read(again, training.Point)[1] == points
  assert results.Row(about, points).scores == [x.score for x in points[-5:]]
  made = training.train(make_tiny(), settings.SETTINGS["dynamic"]).points
  scores = [[x.score for x in y] for y in (points, made)]
  np.testing.assert_array_equal(*np.float32(scores))


@pytest.mark.slow
def test_screen_is_that_of_the_library(repository):
  file = repository("--only", "dull/float32")["dull/screen"]
  _, screened = results.read(file, results.Screened)
  kinds = itertools.product(("first", "last"), ("float16", "bfloat16"))
  assert [*dict.fromkeys(x[:2] for x in screened)] == [*kinds]
  key = jax.random.key(2**31 - 1)
  params = init(jax.random.key(0))
  found = ols.instruments.gradient_error(loss, loss_scales=(1, 2**10))(
    params, draw(key, params)
  )
  errors = {x.loss_scale: x.error for x in screened[:4]}
  assert errors.keys() == {1.0, 2.0**5, 2.0**10, 2.0**15}
  for scale, error in found.errors.items():
    assert errors[scale] == pytest.approx(error, rel=1e-3)


@pytest.mark.slow
def test_row_that_is_not_usual_is_trained_if_it_is_named(repository):
  assert "dull/headroom" in repository("--only", "dull/headroom")


def test_short_rows_do_not_pass_for_whole_ones(capsys):
  with pytest.raises(SystemExit):
    benchmarks.main(["truth", "--only", "lstm", "--steps", "1"])
  assert "--steps needs --rows" in capsys.readouterr().err


@pytest.mark.slow
def test_page_without_a_place_for_the_tables_is_refused(repository, tmp_path):
  (tmp_path / "README.md").write_text("nothing")
  with pytest.raises(ValueError, match="must have the lines"):
    repository("--only", "tiny/float32", "--appendix", str(tmp_path))


def test_unknown_row_is_refused(repository, capsys):
  with pytest.raises(SystemExit):
    repository("--only", "tiny/dynamics")
  assert "tiny/dynamic" in capsys.readouterr().err


def points(scores, skipped=0):
  return [
    training.Point(seed, STEPS, score, skipped, 1.0)
    for seed, score in enumerate(scores)
  ]


def test_table_has_numpys_statistics_and_marks_what_differs(tmp_path):
  about = {"parameters": "a"}
  scores = {
    "float32": REFERENCE,
    "float16": shifted(1.0),
    "dynamic": shifted(0.01),
    "fixed": [math.nan, 1.0, 1.0, 1.0, 1.0],
  }
  rows = {name: results.Row(about, points(x)) for name, x in scores.items()}
  rows["dynamic"] = results.Row(about, points(scores["dynamic"], skipped=3))
  text = table.text({"tiny": make_tiny()}, {"tiny": rows}, tmp_path)
  deviation = np.std(REFERENCE, ddof=1)
  cells = {cell.strip() for cell in text.split("|")}
  assert cells >= {
    f"1.0000 ± {deviation:.4f}",
    f"2.0000 ± {deviation:.4f}",
    f"1.0100 ± {deviation:.4f} (3 skipped)",
    "not finite for 1 of 5",
    "needs loss scaling",
    "+1.00000 ± 0.00000, worse",
    "+0.01000 ± 0.00000",
    "+nan ± nan, worse",
    f"{2 * deviation:.4f}",
  }


def test_null_rows_say_how_close_they_come(tmp_path):
  scores = {
    "float32": ("a", REFERENCE),
    "null-scaled": ("a", REFERENCE),
    "null-seeds": ("b", shifted(0.1)),
  }
  rows = {
    x: results.Row({"parameters": d}, points(y)) for x, (d, y) in scores.items()
  }
  text = table.text({"tiny": make_tiny()}, {"tiny": rows}, tmp_path)
  share = 0.1 / (2 * np.std(REFERENCE, ddof=1))
  cells = [cell.strip() for cell in text.split("|")]
  assert cells[-5:-1] == ["tiny", "bit-equal", "no difference", f"{share:.0%}"]
  rows["null-scaled"] = rows["null-seeds"]
  text = table.text({"tiny": make_tiny()}, {"tiny": rows}, tmp_path)
  assert text.split("|")[-4].strip() == "not bit-equal"


def cells_of(text):
  """Returns the cells of the rows of tables, by the first cell."""
  rows = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
  cells = [re.split(r" *\| *", row.strip()) for row in rows]
  return {first: others for first, *others in cells}


def test_table_shows_the_screen(tmp_path):
  numbers = itertools.count(1)
  screened = [
    results.Screened(when, dtype, scale, next(numbers) / 100, 0.0)
    for when in ("first", "last")
    for dtype in ("float16", "bfloat16")
    for scale in settings.SCREENED
  ]
  screened[3] = screened[3]._replace(error=math.inf)
  file = results.path(tmp_path, "tiny", results.SCREEN)
  results.write(file, {}, screened)
  text = table.text({"tiny": make_tiny()}, {"tiny": {}}, tmp_path)
  first, last = (cells_of(text)[f"tiny, {x} step"] for x in ("first", "last"))
  assert first == ["1.00%", "2.00%", "3.00%", "overflow", "5.00%", "8"]
  assert last == ["9.00%", "10.00%", "11.00%", "12.00%", "13.00%", "8"]


def test_picture_shows_mean_and_deviation_and_the_gradient():
  rows = {"float32": results.Row({}, points(REFERENCE))}
  counted = [
    results.Counted("first", -3, 100),
    results.Counted("last", -5, 7),
    results.Counted("last", results.ZERO, 2),
  ]
  left, right = figure.draw(make_tiny(), rows, counted).axes[:2]
  assert left.lines[0].get_ydata() == [pytest.approx(np.mean(REFERENCE))]
  band = left.collections[0].get_paths()[0].vertices[:, 1]
  deviation = np.std(REFERENCE, ddof=1)
  assert band.min() == pytest.approx(np.mean(REFERENCE) - deviation)
  assert band.max() == pytest.approx(np.mean(REFERENCE) + deviation)
  low, high = left.get_ylim()
  assert low < band.min() and band.max() < high
  # Seven of nine elements, unscaled and times 2^15; the others are 0.
  unscaled, _, scaled = right.patches
  for bars, exponent in (unscaled, -5), (scaled, 10):
    shares, edges, _ = bars.get_data()
    assert edges[shares.argmax()] == exponent
    assert shares.max() == pytest.approx(7 / 9)


def test_picture_leaves_out_the_start_and_what_fails():
  scores = {
    "float32": (100.0, 1.0, 1.1),
    "float16": (100.0, 1.2, 2.0),
    "fixed": (100.0, 90.0, 90.0),
    "dynamic": (100.0, math.nan, math.nan),
  }
  rows = {
    name: results.Row(
      {},
      [
        training.Point(seed, step, score + 0.01 * seed, 0, 1.0)
        for step, score in enumerate(found)
        for seed in range(5)
      ],
    )
    for name, found in scores.items()
  }
  axes = figure.draw(make_tiny(), rows, [results.Counted("last", 0, 1)]).axes[0]
  assert 0.9 < axes.get_ylim()[0] < 1 and 2 < axes.get_ylim()[1] < 2.2
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == ["float32", "float16", "fixed (outside)", "dynamic"]


def test_settings_are_what_their_names_say():
  dtypes = {
    name: jnp.dtype(x.dtype).name for name, x in settings.SETTINGS.items()
  }
  low = ("float16", "fixed", "dynamic", "headroom", "saturating")
  assert {x for x, dtype in dtypes.items() if dtype == "float16"} == {*low}
  assert settings.SETTINGS["dynamic"].rule == ols.DynamicLossScale()
  for name in settings.SETTINGS:
    setting = settings.SETTINGS[name]
    low_fn = training.lowered(make_tiny(), setting)
    report = ols.instruments.precision_report(
      jax.grad(low_fn), init(jax.random.key(0)), HELD_OUT
    )
    assert [*report.products] == [dtypes[name]]


# These take as long to compile as all others together.
LONG = dict.fromkeys(
  ("neural_ode", "policy_gradient", "segmentation", "transformer"),
  pytest.mark.long,
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=LONG.get(x, ())) for x in workloads.WORKLOADS],
)
def test_workload_trains(name, monkeypatch):
  monkeypatch.setattr(settings, "SEEDS", 1)
  workload = workloads.WORKLOADS[name]()
  trained = training.train(workload, settings.SETTINGS["dynamic"], steps=2)
  scores = [x.score for x in trained.points]
  assert np.isfinite(scores).all()
  # A step that is skipped leaves the score as it was.
  for before, after in itertools.pairwise(trained.points):
    was_skipped = after.skipped > before.skipped
    assert (after.score == before.score) == was_skipped
  assert scores[-1] != scores[0]
  assert workload.matters < abs(np.mean(scores))


@pytest.mark.slow
def test_pages_are_made_from_the_rows():
  made = {name: make() for name, make in workloads.WORKLOADS.items()}
  rows = {name: results.load(results.FOLDER, name) for name in made}
  tables = table.text(made, rows, results.FOLDER)
  page = documents.read("docs/does_it_matter.md")
  appendix = documents.read("benchmarks/truth/README.md")
  assert tables in appendix
  found, shown = cells_of(tables), cells_of(page)
  for name, workload in made.items():
    assert f"(images/{name}.png)" in appendix
    score = f"{name}: {workload.score_name}"
    cells, error = found[score], found[f"{name}, last step"]
    means = [cells[i].split()[0] for i in (0, 2, 4)]
    assert shown[score] == [error[0], error[2], *means, cells[-1]]
  # The report that the page explains is one of the rows, too.
  file = results.path(results.FOLDER, "transformer", results.SCREEN)
  _, screened = results.read(file, results.Screened)
  last = [x for x in screened if x[:2] == ("last", "float16")]
  columns = ({x.loss_scale: x[i] for x in last} for i in (3, 4))
  report = ols.instruments.GradientErrorReport("float16", *columns, {})
  assert f"```text\n{report}\n```" in page
  assert "loss_scales=(1, 2**5, 2**10, 2**15)\n" in page
