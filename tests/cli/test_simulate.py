"""`simulate`: bad input, the table, advice and the picture."""

import math
import re
import subprocess
import sys

import pytest

from optax_lossscale import cli
from optax_lossscale import instruments
from optax_lossscale.demo import table
from tests.instruments.histories import make_history

# 2**15 is the largest power of two that the first 40 steps stand.
UNLABELLED = '{"history": {"amax": [1]}}'
UNSCALED = [1.5] * 40 + [math.inf] + [1.5] * 80


@pytest.fixture
def history(tmp_path):
  path = tmp_path / "history.csv"
  instruments.write_history(path, make_history(UNSCALED, scale=2.0**10))
  return path


def simulate(*arguments):
  return cli.main(["simulate", *map(str, arguments)])


def rows_of(out):
  """The figures of each rule in the table."""
  words = [line.split() for line in out.splitlines()]
  return {line[0]: line[1:] for line in words if len(line) == 7}


@pytest.mark.parametrize(
  ("option", "arguments"),
  [
    ("--rule", ["--rule", "magic"]),
    ("--rule", ["--rule", "none"]),
    ("--rule", ["--rule", "fixed:0"]),
    ("--dtype", ["--dtype", "int8"]),
    ("--hardware", ["--hardware", "clipping"]),
    ("--seed", ["--seed", "-1"]),
    ("no run 'x'", ["--run", "x"]),
    ("no seed 1", ["--seed", "1"]),
    ("--output", ["--output", "picture.txt"]),
    ("--output", ["--output", "."]),
    ("--ruel", ["--ruel", "dynamic"]),
  ],
)
def test_bad_input_is_answered_with_one_line(
  option, arguments, history, monkeypatch, capsys
):
  monkeypatch.chdir(history.parent)
  assert simulate(history, *arguments) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("optax-lossscale")
  assert err.count("\n") == 1 and option in err


@pytest.mark.parametrize(
  ("name", "text", "words"),
  [
    ("a.csv", None, "No such file"),
    ("a.csv", "amax\nx\n", "line 2, column amax: must be a number, got 'x'"),
    ("a.txt", "", ".csv or .json"),
    (
      "a.json",
      '{"runs": [%s, %s]}' % (2 * (UNLABELLED,)),
      "same for runs[0], r",
    ),
  ],
)
def test_a_history_that_cannot_be_read_is_told_by_name(
  name, text, words, tmp_path, history, capsys
):
  path = tmp_path / name
  if text is not None:
    path.write_text(text)
  assert simulate(history, path) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert "argument HISTORY" in err and str(path) in err and words in err


def test_a_history_is_wanted(capsys):
  assert simulate() == 2
  assert "HISTORY" in capsys.readouterr().err


def test_table_has_the_figures_of_each_rule(history, capsys):
  rules = ("fixed:2**12", "fixed:2**20", "dynamic:2**16")
  arguments = [word for rule in rules for word in ("--rule", rule)]
  assert simulate(history, *arguments) == 0
  out = capsys.readouterr().out
  assert f"{history}, 121 steps" in out.replace("\n", "")
  rows = rows_of(out)
  # The recorded overflow says nothing below its S, and 2 bits above it. A fixed
  # S is stalled by every overflow.
  assert rows["fixed:2**12"] == ["1", "3.4", "3.4", "3.4", "1", "2^12"]
  assert rows["fixed:2**20"] == ["121", "-", "-", "-", "121", "2^20"]
  assert rows[rules[2]] == ["2", "1.1", "0.4", "1.4", "0", "2^14"]


def test_a_terminal_of_80_columns_breaks_no_word(history, monkeypatch, capsys):
  monkeypatch.chdir(history.parent)
  monkeypatch.setenv("COLUMNS", "80")
  monkeypatch.setattr(table.Console, "is_terminal", True)
  rule = "dynamic:init_scale=2**15,growth_interval=200"
  assert simulate("history.csv", "--rule", rule, "--advise") == 0
  out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
  lines = out.splitlines()
  assert max(map(len, lines)) <= 80
  figures = [line.split()[0] for line in lines if line.strip()]
  at = figures.index("dynamic:")
  assert figures[at + 1 : at + 3] == [
    "init_scale=2**15,",
    "growth_interval=200",
  ]


def test_default_rules_are_compared(history, capsys):
  assert simulate(history) == 0
  assert {"dynamic", "headroom"} <= rows_of(capsys.readouterr().out).keys()


def test_dtype_and_hardware_count(tmp_path, capsys):
  path = tmp_path / "history.json"
  path.write_text("[65504]")
  lost = []
  for options in ([], ["--hardware=saturating"], ["--dtype=bfloat16"]):
    assert simulate(path, "--rule=fixed:1", *options) == 0
    lost.append(rows_of(capsys.readouterr().out)["fixed:1"][0])
  assert lost == ["0", "1", "0"]


def test_run_and_seed_are_chosen(tmp_path, capsys):
  path = tmp_path / "history.csv"
  path.write_text("run,seed,amax\na,0,1\nb,0,1\nb,1,inf\nb,1,1\n")
  assert simulate(path, "--run=b", "--seed=1", "--rule=fixed:4") == 0
  out = capsys.readouterr().out
  assert "2 steps" in out and rows_of(out)["fixed:4"][0] == "1"


def test_of_several_runs_the_first_is_taken_and_the_others_are_told(
  tmp_path, capsys
):
  path = tmp_path / "history.csv"
  rows = ["unscaled,0,", "'a, x',0,1", "'a, x',2,inf", "b,0,inf", "b,1,inf"]
  text = "\n".join(["run,seed,amax", *rows, "b,1,1"]).replace("'", '"')
  path.write_text(text)
  runs = "  run 'a, x' is the first; --run takes another: 'b'\n"
  seeds = "  seed 0 is the first; --seed takes another: {}\n"
  for options, steps, told, lost in (
    ([], 1, runs + seeds.format("2, 1"), "0"),
    (["--run=a, x"], 1, seeds.format("2"), "0"),
    (["--run=b"], 1, seeds.format("1"), "1"),
    (["--run=b", "--seed=1"], 2, "", "1"),
    (["--seed=0"], 1, runs, "0"),
  ):
    assert simulate(path, "--rule=fixed:4", *options) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}, {steps} steps\n{told} "), out
    assert ("is the first" in out) == (told != "")
    assert rows_of(out)["fixed:4"][0] == lost


def test_steps_that_begin_at_0_and_semicolons_are_taken(tmp_path, capsys):
  path = tmp_path / "history.csv"
  path.write_text("step;loss_scale;amax\n0;4;1.5\n1;4;inf\n2;2;1.5\n")
  picture = tmp_path / "picture.png"
  assert simulate(path, "--rule=fixed:4", "--output", picture, "--advise") == 0
  out = capsys.readouterr().out
  assert f"{path}, 3 steps" in out and rows_of(out)["fixed:4"][0] == "1"


def test_advice_is_given_on_each_rule(history, capsys):
  rules = ("--rule", "npu_fixed:loss_scale=2**20", "--rule", "fixed:2**13")
  assert simulate(history, *rules, "--advise") == 0
  lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
  first = lines.index("npu_fixed:loss_scale=2**20:")
  # 2**9 is what the recorded overflow leaves, of which 2 bits are kept free.
  assert lines[first + 1].startswith("loss_scale: 2**20 -> 2**7: 121 of 121")
  assert lines[lines.index("fixed:2**13:") + 1] == "nothing to change"


def test_picture_has_a_panel_for_each_history(history, tmp_path, capsys):
  other = tmp_path / "other.json"
  other.write_text("[1, 2]")
  picture = tmp_path / "new" / "picture.png"
  arguments = ["--rule", "fixed:8", "--output", picture]
  assert simulate(history, other, *arguments) == 0
  assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
  out = capsys.readouterr().out.replace("\n", "")
  assert f"{other}, 2 steps" in out and f"wrote {picture}" in out


def test_picture_is_what_its_name_says(history, tmp_path):
  picture = tmp_path / "picture.SVG"
  assert simulate(history, "--rule", "fixed:8", "--output", picture) == 0
  assert b"<svg" in picture.read_bytes()


@pytest.mark.parametrize("end", ["png", "pdf", "svg"])
def test_a_disk_too_full_for_the_picture_is_told(
  end, history, tmp_path, capsys
):
  picture = tmp_path / f"picture.{end}"
  picture.symlink_to("/dev/full")
  assert simulate(history, "--rule", "fixed:8", "--output", picture) == 2
  out, err = capsys.readouterr()
  assert rows_of(out)
  assert err == (
    "optax-lossscale simulate: error: argument --output: cannot write "
    f"{picture}: No space left on device\n"
  )


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_extra_is_told_with_its_remedy(
  package, history, tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, package, None)
  picture = tmp_path / "new" / "picture.png"
  assert simulate(history, "--output", picture) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert package in err and "which is not installed" in err
  assert f'of the repository: {sys.executable} -m pip install ".[demo]"' in err
  assert not picture.parent.exists()


@pytest.mark.slow
def test_bad_input_is_answered_before_anything_heavy_is_imported():
  code = (
    "import sys; from optax_lossscale import cli;"
    "assert cli.main(['simulate', 'nowhere.csv', '--rule', 'dynamic']) == 2;"
    "heavy = {'flax', 'matplotlib', 'rich', 'sklearn'} & set(sys.modules);"
    "assert not heavy, heavy"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_advice_is_for_the_rule_and_not_for_the_one_that_was_recorded(
  tmp_path, capsys
):
  steps = range(1, 201)
  # Recorded from 2**32, of which 15 steps were lost; nothing is at 2**15.
  lines = ["loss_scale,amax,overflow"]
  for i in steps:
    scale = 2.0 ** max(32 - i + 1, 17)
    is_lost = scale > 2.0**17
    lines.append(f"{scale},{'inf' if is_lost else scale / 8},{int(is_lost)}")
  path = tmp_path / "run.csv"
  path.write_text("\n".join(lines))
  arguments = ["simulate", str(path), "--rule", "dynamic", "--advise"]
  assert cli.main(arguments) == 0
  assert "nothing to change" in capsys.readouterr().out
