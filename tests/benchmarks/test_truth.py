"""`python -m benchmarks truth`: its training, its tables and its pages."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.truth import command
from benchmarks.truth import misses
from benchmarks.truth import results
from benchmarks.truth import settings
from benchmarks.truth import table
from benchmarks.truth import training
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


def make_tiny(*, full=True, size=1.0, sixteen_bit=False, on_sources=False):
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
    sixteen_bit=sixteen_bit,
    on_sources=on_sources,
  )


def plainly(workload, setting, seed):
  """Trains in a Python loop, without the library where that is possible."""
  key = jax.random.key(seed)
  params = workload.init(key)
  opt_state = workload.optimizer.init(params)
  low = ols.autocast(workload.loss, "O1", dtype=setting.dtype)
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


@pytest.mark.slow
def test_training_is_that_of_a_plain_loop():
  """With a large loss, the dynamic default skips its first steps."""
  workload, setting = make_tiny(size=16.0), settings.SETTINGS["dynamic"]
  trained = training.train(workload, setting)
  assert {x.step for x in trained.points} == set(range(STEPS + 1))
  for point in trained.points[-settings.SEEDS :]:
    score, skipped, scale = plainly(workload, setting, point.seed)
    assert point.score == pytest.approx(score, rel=1e-4)
    found = point.step, point.skipped, point.loss_scale
    assert found == (STEPS, skipped, scale)
  assert any(x.skipped for x in trained.points)


def test_each_setting_has_the_dtype_and_the_rule_of_its_name():
  low = {"float16", "fixed", "dynamic", "headroom", "saturating"}
  assert all(x.tuned and x.rule for x in settings.TUNED.values())
  for name in settings.ALL.keys() - settings.TUNED.keys():
    setting = settings.ALL[name]
    dtype = jnp.dtype(setting.dtype).name
    assert (dtype == "float16") == (name in low)
    others = {**settings.SIXTEEN_BIT, **settings.PRODUCTS}
    is_narrow = name == "bfloat16" or name in others
    assert (dtype == "bfloat16") == is_narrow
    low_fn = training.lowered(make_tiny(), setting)
    report = ols.instruments.precision_report(
      jax.grad(low_fn), init(jax.random.key(0)), HELD_OUT
    )
    assert [*report.products] == [dtype]
  assert settings.SETTINGS["dynamic"].rule == ols.DynamicLossScale()


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
def test_a_workload_trains(name, monkeypatch):
  monkeypatch.setattr(settings, "SEEDS", 1)
  workload = workloads.WORKLOADS[name]()
  trained = training.train(workload, settings.SETTINGS["dynamic"], steps=2)
  scores = [x.score for x in trained.points]
  assert np.isfinite(scores).all()
  # A skipped step does not change the score.
  for before, after in itertools.pairwise(trained.points):
    was_skipped = after.skipped > before.skipped
    assert (after.score == before.score) == was_skipped
  assert scores[-1] != scores[0]
  assert workload.matters < abs(np.mean(scores))


def test_remainders_miss_masters_where_updates_are_as_large_as_weights():
  """Adam's first update is the rate, whatever the gradient."""
  weights = np.float32(np.random.default_rng(0).normal(size=10_000))
  tiny = dataclasses.replace(
    make_tiny(),
    init=lambda key: {"w": jnp.asarray(weights)},
    loss=lambda params, batch: jnp.sum(params["w"] * jnp.sign(weights)),
  )
  start = np.float32(weights.astype(jnp.bfloat16))
  for rate in (2.0**-10, 0.3):
    (first,) = misses.count(dataclasses.replace(tiny, rate=rate), steps=1)
    nearest = (start - np.float32(rate) * np.sign(start)).astype(jnp.bfloat16)
    way = (np.float32(nearest) - start).astype(jnp.bfloat16)
    reached = (start + np.float32(way)).astype(jnp.bfloat16)
    assert first.share == pytest.approx(np.mean(reached != nearest), abs=2e-4)
    assert first.error < 2**-7
  assert first.share > 0.3


@pytest.fixture
def repository(tmp_path, monkeypatch):
  """One tiny workload, and a function that runs the command on a folder."""
  arguments = {"full": False, "sixteen_bit": True, "on_sources": True}
  made = {"tiny": functools.partial(make_tiny, **arguments)}
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
def test_a_row_is_trained_once_and_the_tables_go_to_the_page(
  repository, capsys, tmp_path
):
  page = tmp_path / "README.md"
  one = repository("--only", "tiny/float32")
  assert [*one] == ["tiny/float32", "tiny/histogram", "tiny/screen"]
  before = {name: x.read_bytes() for name, x in one.items()}

  begin, end = "<!-- python -m benchmarks truth -->", "<!-- end -->"
  page.write_text(f"Before\n{begin}\n{end}\nafter")
  capsys.readouterr()
  every = repository("--appendix", str(tmp_path))
  assert len(every) == len(settings.of(full=False, sixteen_bit=True)) + 3
  _, missed = results.read(every["tiny/missed"], misses.Missed)
  assert [x.step for x in missed] == [*range(1, STEPS + 1)]
  assert {name: every[name].read_bytes() for name in one} == before
  printed = capsys.readouterr().out
  assert "tiny/float32:" not in printed  # It was not trained again.
  assert "bit-equal" in printed and "no difference" in printed
  pictures = sorted(x.name for x in (tmp_path / "images").iterdir())
  assert pictures == ["sixteen_bit.png", "tiny.png"]
  text = page.read_text()
  start = f"Before\n{begin}\n\n- `tiny`: A tiny network; rate 0.1, 6 steps."
  assert text.startswith(start)
  assert text.endswith(f"|\n\n{end}\nafter")
  repository("--appendix", str(tmp_path))
  assert page.read_text() == text


def test_the_sources_of_another_python_make_no_rows_beside_the_recorded_ones(
  repository, capsys, tmp_path
):
  """Rows of one workload are compared, so their data must be the same."""
  about = {"versions": "Python 3.11.99, jax 0.12.0"}
  file = results.path(tmp_path / "rows", "tiny", "float32")
  results.write(file, about, [training.Point(0, STEPS, 1.0, 0, 1.0)])
  with pytest.raises(SystemExit) as exited:
    repository("--only", "tiny/float16")
  assert exited.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "made with those of Python 3.11.99" in line


REFERENCE = [1.0, 1.2, 0.8, 1.1, 0.9]


def row(scores, skipped=0, digest="a"):
  points = [
    training.Point(seed, STEPS, score, skipped, 1.0)
    for seed, score in enumerate(scores)
  ]
  return results.Row({"parameters": digest}, points)


def test_the_table_has_numpys_statistics_and_marks_differences(tmp_path):
  rows = {
    "float32": row(REFERENCE),
    "float16": row([x + 1.0 for x in REFERENCE]),
    "dynamic": row([x + 0.01 for x in REFERENCE], skipped=3),
    "fixed": row([math.nan, 1.0, 1.0, 1.0, 1.0]),
    "null-scaled": row(REFERENCE),
    "null-seeds": row([x + 0.1 for x in REFERENCE], digest="b"),
  }
  tiny = {"tiny": make_tiny()}
  text, *_ = table.text(tiny, {"tiny": rows}, tmp_path).partition("- `tuned`")
  deviation = np.std(REFERENCE, ddof=1)
  cells = [cell.strip() for cell in text.split("|")]
  assert {*cells} >= {
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
  share = f"{0.1 / (2 * deviation):.0%}"
  assert cells[-5:-1] == ["tiny", "bit-equal", "no difference", share]
  rows["null-scaled"] = rows["null-seeds"]
  text, *_ = table.text(tiny, {"tiny": rows}, tmp_path).partition("- `tuned`")
  assert text.split("|")[-4].strip() == "not bit-equal"


def cells_of(text):
  """Returns the cells of the rows of tables, by the first cell."""
  rows = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
  cells = [re.split(r" *\| *", row.strip()) for row in rows]
  return {first: others for first, *others in cells}


@pytest.mark.slow
def test_the_pages_show_the_recorded_rows():
  made = {name: make() for name, make in workloads.WORKLOADS.items()}
  rows = {name: results.load(results.FOLDER, name) for name in made}
  tables = table.text(made, rows, results.FOLDER)
  page = documents.read("docs/does_it_matter.md")
  appendix = documents.read("benchmarks/truth/README.md")
  assert tables in appendix
  # Its last tables name the workloads again.
  found = cells_of(tables.partition("- `tuned`")[0])
  shown = cells_of(page)
  for name, workload in made.items():
    assert f"(images/{name}.png)" in appendix
    on_sources = "Python's sources" in workload.description
    assert workload.on_sources == on_sources
    score = f"{name}: {workload.score_name}"
    cells, error = found[score], found[f"{name}, last step"]
    means = [cells[i].split()[0] for i in (0, 2, 4)]
    assert shown[score] == [error[0], error[2], *means, cells[-1]]
  tuned = tables.partition("- `tuned`")[2].partition("- `nearest`")[0]
  found = cells_of(tuned)
  layers = documents.read("docs/guides/which_layers.md")
  shown = cells_of(layers.partition("## How large")[2])
  for name in shown.keys() & made.keys():
    assert shown[name] == [found[name][x] for x in (0, 1, 2, 5, 7)]
  (critic,) = (x for x in found if x.startswith("critic:"))
  for cell in found[critic]:
    assert f"| {cell} |" in layers
  # The report that the page explains is one of the rows, too.
  file = results.path(results.FOLDER, "transformer", results.SCREEN)
  _, screened = results.read(file, results.Screened)
  last = [x for x in screened if x[:2] == ("last", "float16")]
  columns = ({x.loss_scale: x[i] for x in last} for i in (3, 4))
  report = ols.instruments.GradientErrorReport("float16", *columns, {})
  assert f"```text\n{report}\n```" in page
  assert "loss_scales=(1, 2**5, 2**10, 2**15)\n" in page
