"""`python -m benchmarks`: what each command runs, and what it writes."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import accelerate
from benchmarks import autocast
from benchmarks import autocast_models as models
from benchmarks import contest
from benchmarks import gpt2
from benchmarks import gpu
from benchmarks import guarantees
from benchmarks import jax_training
from benchmarks import machine
from benchmarks import nonfinite
from benchmarks import parts
from benchmarks import phase
from benchmarks import products
from benchmarks import rounds
from benchmarks import summary
from benchmarks import targets
from benchmarks.truth import results
from benchmarks.truth import workload as workload_lib
import optax_lossscale as ols
from tests import documents

TINY = gpt2.SIZES["tiny"]
ROWS = results.FOLDER


def test_commands_are_listed(capsys):
  assert command.main(["--help"]) == 0
  listed = capsys.readouterr().out
  assert all(f"\n{name} " in listed for name in command._COMMANDS)


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["nonsense"], "'nonsense' (choose from 'update', "),
    (["update", "--peers", "nobody"], "--peers: invalid choice: 'nobody'"),
    (["update", "--out", __file__], "--out: must be a folder to write to: "),
    (["update", "--out", "/proc"], "--out: must be a folder to write to: "),
    (["parts", "--rounds", "0"], "--rounds: must be 1 or more, got '0'"),
    (["gpu", "--minutes", "-1"], "--minutes: must be finite and above 0"),
    (["gpu", "--minutes", "nan"], "got 'nan'"),
    (["gpu", "--minutes", "inf"], "got 'inf'"),
    (["targets", "--on", "v5e,h300"], "'h300' (choose from 'v100', "),
    (["targets", "--on", ""], "'' (choose from 'v100', "),
    (["targets"], "XLA's compilers must be installed, got 'none'"),
    (["truth", "--only", "lstm/dynamics"], "lstm/dynamic"),
    (["truth", "--steps", "-1"], "--steps: must be 1 or more, got '-1'"),
    (["truth", "--only", "lstm", "--steps", "1"], "--steps needs --rows"),
    (["truth", "--steps=1", f"--rows={ROWS}/../rows"], "needs --rows"),
    (["truth", "--rows", __file__], "--rows: must be a folder to write to: "),
    (["truth", "--appendix", "."], "README.md must have the lines"),
    (["truth", "--appendix", "none"], "No such file or directory"),
    (["absent"], "No module named 'nowhere'; install \".[benchmark]\""),
  ],
  ids=" ".join,
)
def test_a_bad_option_ends_in_one_line(
  words, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "README.md").write_text("nothing")
  monkeypatch.setenv("OPTAX_LOSSSCALE_COMPILERS", "none")
  monkeypatch.setitem(command._COMMANDS, "absent", "nowhere")
  with pytest.raises(SystemExit) as ended:
    command.main(words)
  out, err = capsys.readouterr()
  (line,) = err.splitlines()
  assert (ended.value.code, out) == (2, "")
  assert line.startswith("python -m benchmarks") and message in line


def test_targets_keep_figures_of_the_same_update_only(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(targets.compiling, "find_python", lambda folder: None)
  numbers = iter(range(9))

  def figures(part, target):
    return {"bare": {"kernels": next(numbers), "temporaries": 0}}

  monkeypatch.setattr(targets, "figures", figures)

  def run(*words, update="a"):
    monkeypatch.setattr(phase, "digest", lambda: update)
    words = ["targets", f"--out={tmp_path}", "--only", "train step", *words]
    assert command.main(words) == 0
    made = json.loads((tmp_path / "targets.json").read_text())["parts"]
    found = made["train step"].items()
    return {target: rows["bare"]["kernels"] for target, rows in found}

  assert run("--on=h100,h200") == {"h100": 0, "h200": 1}
  assert run("--on=v5e,h100", "--keep") == {"h100": 2, "h200": 1, "v5e": 3}
  with pytest.raises(SystemExit):
    run("--on=h200", "--keep", update="b")
  assert "must have figures of this update" in capsys.readouterr().err
  assert run("--on=h200") == {"h200": 4}


@pytest.mark.parametrize(
  ("measured", "page"),
  [(targets, "docs/costs.md"), (products, "docs/does_it_matter.md")],
)
def test_a_page_has_the_stored_figures(measured, page):
  name = measured.__name__.rpartition(".")[2]
  stored = json.loads(documents.read(f"benchmarks/measured/{name}.json"))
  assert measured.page(stored) in documents.read(page)


def test_each_file_of_figures_names_its_commit():
  folder = documents.ROOT / "benchmarks" / "measured"
  for path in folder.glob("*.json"):
    about = json.loads(path.read_text())["machine"]
    assert about["commit"]
    page = path.with_suffix(".md")
    assert not page.exists() or machine.headline(about) in page.read_text()


@pytest.mark.parametrize(
  ("name", "pages"),
  [
    ("h100", ["README.md", "CHANGELOG.md", "docs/costs.md", "paper/paper.typ"]),
    ("targets", ["docs/costs.md"]),
  ],
)
def test_pages_say_where_the_update_has_changed_since(name, pages, monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  stored = json.loads(documents.read(f"benchmarks/measured/{name}.json"))
  about = stored["machine"]
  if "update" in stored:
    now = machine.describe()["versions"]
    if any(now[x] != about["versions"][x] for x in ("jax", "optax")):
      pytest.skip("Another version makes another program.")
  has_changed = stored.get("update") != phase.digest()
  when, _, commit = about["commit"].rpartition(" ")
  claim = f"{when or 'at'} commit {commit}, and the update has changed since"
  for page in pages:
    text = documents.one_line(documents.read(page))
    assert (claim in text) == has_changed, f"{page}: {claim}"


# These need nothing beyond the library and its tests.
PEERS = (
  *("bare", "one more read", "optax_lossscale", "lax.cond"),
  *("flax", "apply_if_finite"),
)


@pytest.mark.long
def test_update_writes_every_figure_of_every_contender(tmp_path):
  options = ["--tiny", "--cases", "10", "--rounds", "3"]
  words = ["update", *options, "--out", str(tmp_path / "new")]
  assert command.main([*words, "--peers", *PEERS]) == 0
  content = json.loads((tmp_path / "new" / "update.json").read_text())
  rows = {(x["name"], x["gradients"]): x for x in content["cases"]}
  assert [*rows] == [("10", "float16"), ("10", "float32")]
  assert summary.all_checks_passed(content["cases"])
  for case in rows.values():
    assert case["parameters"] == 2 * 16 * 8
    assert [x["name"] for x in case["contenders"]] == list(PEERS)
    for row in case["contenders"]:
      assert row["problem"] == ""
      is_bare = row["name"] in ("bare", "one more read")
      assert row["check"] is None if is_bare else row["check"]["passed"]
      assert row["median_seconds"] == sorted(row["seconds"])[1]
      share = row["temporary_bytes"] / (4 * case["parameters"])
      assert row["temporaries_percent"] == pytest.approx(100 * share)
  about = content["machine"]
  assert content["command"].startswith("python -m benchmarks update --tiny")
  headline = machine.headline({**about, "versions": {"a": "1", "b": None}})
  for part in (about["cpu"], "a 1", "not installed: b", "20"):
    assert part in headline
  assert about["versions"]["optax-lossscale"]


LINEAR = workload_lib.Workload(
  description="A linear model",
  elements=64,
  init=lambda key: jnp.zeros((8, 1)),
  draw=lambda key, params: jax.random.normal(key, (64, 8)),
  loss=lambda params, x: jnp.mean((x @ params - 1) ** 2),
  score=lambda params: params,
  score_name="",
  matters=1.0,
  rate=0.1,
  steps=4,
)


@pytest.mark.slow
def test_products_measures_each_format(tmp_path, capsys):
  words = ["products", "--tiny", f"--out={tmp_path}"]
  assert command.main(words) == 0
  (found,) = json.loads((tmp_path / "products.json").read_text())[
    "workloads"
  ].values()
  narrow, *_ = found["bfloat16"]["errors"]
  assert 0 < narrow < found["float8"]["errors"][0] < 0.2
  assert (found["bfloat16"]["float8"], found["float8"]["float8"]) == (0, 3)
  assert "| brier " in capsys.readouterr().out


@pytest.mark.long
def test_accelerate_times_each_part_of_each_schedule(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(accelerate, "make_workload", lambda *, tiny: LINEAR)
  words = ["accelerate", "--tiny", "--rounds=2", f"--out={tmp_path}"]
  assert command.main(words) == 0
  content = json.loads((tmp_path / "accelerate.json").read_text())
  rows = content["contenders"]
  assert {name: x["low"] for name, x in rows.items()} == {
    "float32": None,
    "float16, O1": None,
    "fast, low part": True,
    "fast, full part": False,
    "bfloat16, O1": None,
    "fast1, low part": True,
    "fast1, full part": False,
  }
  for figures in rows.values():
    assert len(figures["seconds"]) == 2 and len(figures["compilations"]) == 1
  losses = [x["last_loss"] for x in rows.values()]
  assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)
  printed = capsys.readouterr().out
  for kind in content["schedules"]:
    assert f"{kind}|step|0.9: a step takes" in printed


def make_loss_fn(dtype):
  """A model with a `dtype=`."""

  def loss_fn(params, batch):
    x = batch.astype(dtype)
    for weights in params:
      x = jnp.tanh(x @ weights.astype(dtype))
    return jnp.mean(x.astype(jnp.float32))

  return loss_fn


@pytest.mark.slow
def test_autocast_compares_every_level_with_float32_and_by_hand(
  tmp_path, monkeypatch
):
  weights = np.ones((4, 4), np.float32)
  two_layers = models.Model(make_loss_fn, [weights, weights], weights)
  monkeypatch.setattr(
    models, "makers", lambda **_: {"two layers": lambda: two_layers}
  )
  monkeypatch.setattr(autocast, "LEVELS", ("O0", "O1"))
  assert command.main(["autocast", "--out", str(tmp_path)]) == 0
  content = json.loads((tmp_path / "autocast.json").read_text())
  rows = content["models"]["two layers"]
  assert list(rows) == [autocast.FLOAT32, autocast.BY_HAND, "O0", "O1"]
  by_hand = rows[autocast.BY_HAND]["over_by_hand"]
  assert by_hand["kept"] == by_hand["compiled"]["flops"] == 1
  for name, row in rows.items():
    # Two products, and the gradients of two weights and of one activation.
    assert row["all_products"] == 5
    is_low = name not in (autocast.FLOAT32, "O0")
    assert row["products"] == 5 * is_low
    assert (row["conversions"] > 0) == is_low
    assert abs(row["loss_difference"]) < 1e-2
  assert rows["O0"]["loss_difference"] == 0


# It compiles every program of the benchmark.
@pytest.mark.long
def test_parts_writes_a_ratio_for_every_contender(tmp_path, capsys):
  words = ["parts", "--tiny", "--rounds", "2", "--out", str(tmp_path)]
  assert command.main(words) == 0
  content = json.loads((tmp_path / "parts.json").read_text())
  names = {name.partition(",")[0] for name in content["parts"]}
  assert names == {*parts._PARTS}
  for rows in content["parts"].values():
    for name, row in rows.items():
      assert row["over"] in rows
      assert (row["ratio"] == [1, 1, 1]) == (row["over"] == name)
      assert len(row["seconds"]) == 3
  assert "compile, 2 leaves, mesh\n" in capsys.readouterr().out


@pytest.mark.slow
def test_gpu_writes_every_part_with_its_machine(tmp_path, monkeypatch):
  """The train step is left out; another test covers it."""
  monkeypatch.delitem(gpu._PARTS, "Train step")
  # One leaf is so small that it cannot be folded.
  leaf, small = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (1024, 3))
  monkeypatch.setattr(gpu, "_params", lambda plan: [leaf] * 2 + [small])
  assert command.main(["gpu", "--tiny", "--out", str(tmp_path)]) == 0
  figures = json.loads((tmp_path / "gpu.json").read_text())
  page = (tmp_path / "gpu.md").read_text()
  assert figures["problems"] == {}
  assert figures["machine"]["device"] in page
  assert figures["hardware"] == repr(ols.hardware.probe())
  assert figures["parts"].keys() == gpu._PARTS.keys()
  for name in figures["parts"]:
    assert f"## {name}" in page
  rows = figures["parts"]["Guarantees"]
  assert len(rows) == 1 + len(guarantees.CHECKS)
  assert all(row.keys() == {"seen"} for row in rows.values())
  cases = int(rows["every NaN and inf is seen"]["seen"].split()[0])
  assert cases >= 3 * len(nonfinite.values("float16"))
  count = 2 * leaf.size + small.size
  rows = figures["parts"]["Update phase"]
  without = ", no command buffers"
  assert {name: row["traffic"] / count for name, row in rows.items()} == {
    "copy of one array": 8,
    "sum of one array": 4,
    "adamw, float16": 26,
    "loss_scaling(adamw), float16": 28,
    "the check, float16": 2,
    "adamw, one rate for all leaves": 26,
    **{
      f"a flag for {leaves} leaves of a shape, large ones together": 28
      for leaves in (12, "all", 4, 2)
    },
    "adamw, float32": 28,
    "loss_scaling(adamw), float32": 32,
    "the check, float32": 4,
    "adamw under lax.cond, float16": 28,
    f"adamw, float16{without}": 26,
    f"loss_scaling(adamw), float16{without}": 28,
    f"adamw under lax.cond, float16{without}": 28,
  }


def part(*rows, reason=None):
  """A part of `gpu` that measures some rows, and may fail then."""

  def measure(plan, until):
    yield from rows
    if reason:
      raise RuntimeError(reason)

  return measure, 1.0


def test_only_a_defect_of_a_part_fails_the_command_gpu(monkeypatch, tmp_path):
  monkeypatch.setattr(phase, "digest", lambda: "")  # It takes long.
  no_time = part({"a": {"left_out": "TimeoutError: no time was left"}})
  monkeypatch.setattr(gpu, "_PARTS", {"One": no_time})
  assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 0
  one = part(
    {"measured before": {"kernels": 7}}, reason="out of memory\nand so on"
  )
  two = part({"another": {"kernels": 1234}})
  monkeypatch.setattr(gpu, "_PARTS", {"One": one, "Two": two})
  assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 1
  figures = json.loads((tmp_path / "gpu.json").read_text())
  assert figures["parts"] == {
    "One": {"measured before": {"kernels": 7}},
    "Two": {"another": {"kernels": 1234}},
  }
  assert figures["problems"] == {
    "One": {"left_out": "RuntimeError: out of memory"}
  }
  assert "| another |   1,234 |" in (tmp_path / "gpu.md").read_text()


def test_a_contender_that_fails_or_has_no_time_is_left_out(monkeypatch):
  monkeypatch.setattr(rounds.gc, "collect", lambda: 0)  # It takes long.

  def fail(*_, **__):
    raise RuntimeError("out of memory\nand so on")

  find_spec = contest.importlib.util.find_spec
  monkeypatch.setattr(jax_training, "Training", fail)
  monkeypatch.setattr(gpt2, "init", lambda *_: {})
  monkeypatch.setattr(
    contest.importlib.util,
    "find_spec",
    lambda name: None if name == "torch" else find_spec(name),
  )
  made = contest.Contest(TINY, batch=1, length=8)
  made.add(["jax float16", "torch float16"], math.inf)
  made.time(rounds=1, steps=1, until=math.inf)
  reasons = [x["left_out"] for x in made.rows.values()]
  assert reasons == [
    "RuntimeError: out of memory",
    "ModuleNotFoundError: torch is not installed",
  ]
  made.add(["jax bfloat16"], until=0.0)
  (reason,) = made.rows["jax bfloat16"].values()
  assert reason == "TimeoutError: no time was left"


@pytest.mark.long
def test_each_precision_of_the_contest_trains_the_same_model():
  made = contest.Contest(TINY, batch=2, length=16)
  made.add(list(contest.VARIANTS), math.inf)
  made.time(rounds=2, steps=1, until=math.inf)
  assert made.rows.keys() == contest.VARIANTS.keys()
  for name, row in made.rows.items():
    low, median, high = row["seconds"]
    assert 0 < low <= median <= high
    # A model that has learned nothing finds all tokens equally likely.
    first = math.log(TINY.vocabulary)
    assert row["losses"][0] == pytest.approx(first, rel=0.02)
    if "," in name:
      bare = "jax float32" if "float32" in name else contest.FLOAT16
      expected = made.rows[bare]["losses"]
      assert row["losses"] == pytest.approx(expected, rel=1e-3)
      assert row.get("skipped_steps", 0) == 0


@pytest.mark.slow
def test_small_has_the_parameters_of_gpt2_small_and_padding():
  small = gpt2.SIZES["small"]
  params = jax.eval_shape(lambda: gpt2.init(small, 0))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  padding = (small.vocabulary - small.tokens) * small.width
  assert count - padding == 124_439_808
