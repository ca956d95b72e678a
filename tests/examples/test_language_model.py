"""The program shows what the README says of it."""

import importlib.util
import itertools
import re
import sys
import types

import pytest

from tests import documents

PATH = documents.ROOT / "examples" / "language_model.py"
README = documents.section(documents.read("README.md"), "See it work")


@pytest.fixture
def example():
  """The program as a module, which a test may change."""
  spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def run(example, capsys):
  """Runs the program, and returns the lines before and below the table."""

  def run_with(*arguments):
    example.main(arguments)
    above, table, *below = capsys.readouterr().out.split("\n\n")
    rows = [re.split(r" {2,}", row) for row in table.splitlines()[1:]]
    return above.splitlines(), {name: cells for name, *cells in rows}, below

  return run_with


@pytest.fixture
def small(example, monkeypatch):
  """Makes the data and the batches small."""
  monkeypatch.setattr(example, "CHARACTERS", 20_000)
  monkeypatch.setattr(example, "BATCH", 16)


def _sees_the_old(train, picture):
  """Lets a run fail if the old picture has gone before the new one is there."""

  def train_with_the_old_one(*arguments):
    assert picture.read_text() == "old"
    return train(*arguments)

  return train_with_the_old_one


@pytest.mark.slow
def test_a_small_run_tells_where_it_is_and_draws(
  example, run, small, tmp_path, monkeypatch
):
  # Six seconds pass from one step to the next.
  clock = types.SimpleNamespace(monotonic=itertools.count(step=6).__next__)
  monkeypatch.setattr(example, "time", clock)
  picture = tmp_path / "runs.png"
  picture.write_text("old")
  monkeypatch.setattr(example, "train", _sees_the_old(example.train, picture))
  told, rows, below = run("--steps=3", f"--figure={picture}")
  assert told == [
    f"Run {i + 1} of 4, {name}: step {step} of 3"
    for i, name in enumerate(example.RUNS)
    for step in (1, 2, 3)
  ]
  assert [x[2:] for x in rows.values()] == [["0"], ["0"], ["0", "2^15"], ["0"]]
  assert below[0] == f"Picture: {picture}" and below[1].startswith("Next: ")
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert [x.name for x in tmp_path.iterdir()] == ["runs.png"]


@pytest.mark.parametrize(
  ("figure", "reason"),
  [
    ("none/runs.png", "No such file or directory"),
    ("runs.mp3", "Format 'mp3' is not supported"),
    ("runs", "Format '' is not supported"),  # matplotlib would add a suffix.
    ("folder.png", "Is a directory"),
    ("", "Is a directory"),
    ("runs.png", "matplotlib"),  # It is not installed.
  ],
)
def test_a_figure_that_cannot_be_drawn_is_refused_before_any_work(
  example, figure, reason, tmp_path, monkeypatch, capsys
):
  (tmp_path / "folder.png").mkdir()
  monkeypatch.chdir(tmp_path)
  if reason == "matplotlib":
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  monkeypatch.setattr(example, "make_text", lambda: pytest.fail("It works."))
  with pytest.raises(SystemExit) as ended:
    example.main(["--figure", figure])
  out, err = capsys.readouterr()
  assert (ended.value.code, out) == (2, "")
  (line,) = err.splitlines()
  assert ": error: --figure cannot be drawn: " in line and reason in line
  assert [x.name for x in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.long
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("seed", range(5))
def test_float16_alone_learns_nothing_and_with_loss_scaling_as_float32(
  run, seed
):
  _, rows, _ = run(f"--seed={seed}")
  shown = {
    name: [cell.strip() for cell in cells]
    for line in re.findall(r"^\| (b?float.*)\|$", README, re.M)
    for name, *cells in [line.split(" |")]
  }
  assert rows.keys() == shown.keys()
  float32, alone, scaled, bfloat16 = (x[:2] for x in rows.values())
  for other in (scaled, bfloat16):
    assert float(other[0]) == pytest.approx(float(float32[0]), abs=1.5e-4)
    assert float(other[1]) == pytest.approx(float(float32[1]), abs=0.02)
    assert float(other[1]) > 0.45
  assert float(alone[1]) < 0.05
  assert rows["float16 with loss scaling"][3].startswith("2^")
  if seed == 0:
    # The digits that the page shows are the same on both ends of CI.
    assert {x: [y for y in z if y] for x, z in shown.items()} == rows
