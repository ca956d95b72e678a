"""`simulate`: bad input, the table and advice."""

import io
import math
import os
import re
import subprocess
import sys
import warnings

import jax
import pytest

from optax_lossscale import cli
from optax_lossscale import instruments
from tests import documents
from tests.instruments.run.histories import make_history

# The first 40 steps overflow above 2**15.
UNSCALED = [1.5] * 40 + [math.inf] + [1.5] * 80


@pytest.fixture
def history(tmp_path):
  path = tmp_path / "history.csv"
  instruments.write_history(path, make_history(UNSCALED, scale=2.0**10))
  return path


def simulate(*arguments):
  return cli.main(["simulate", *map(str, arguments)])


def rows_of(out):
  """The figures of each rule in the table: lost, stalled, and so on."""
  words = [line.split() for line in out.splitlines()]
  return {line[6]: line[:6] for line in words if len(line) == 7}


@pytest.mark.parametrize(
  ("option", "arguments"),
  [
    ("--rule", ["--rule", "fixed:0"]),
    ("--dtype", ["--dtype", "int8"]),
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
  ("text", "words"),
  [
    (None, "No such file or directory: "),
    ("amax\nx\n", "line 2, column amax: must be a number from 0"),
  ],
)
def test_a_history_that_cannot_be_read_is_refused_by_name(
  text, words, tmp_path, history, capsys
):
  path = tmp_path / "a.csv"
  if text is not None:
    path.write_text(text)
  assert simulate(history, path) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert "argument HISTORY" in err and str(path) in err and words in err


@pytest.mark.parametrize(
  ("name", "shown"),
  [
    ("\x1b[2Ja\n\x9b.csv", r"\x1b[2Ja\n\x9b.csv"),
    ("a\u202evsc.exe", r"a\u202evsc.exe"),
    (os.fsdecode(b"\xff  b"), r"\udcff  b"),
    ("\u00e9", r"\xe9"),
  ],
)
def test_a_name_does_nothing_to_a_terminal(name, shown, history, monkeypatch):
  monkeypatch.chdir(history.parent)
  history.rename(name)
  terminal = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
  monkeypatch.setattr(sys, "stdout", terminal)
  monkeypatch.setattr(sys, "stderr", terminal)
  rule = "dynamic:8,\n\x1fgrowth_interval=3"
  assert simulate(name, "--rule", rule, "--advise") == 0
  (history.parent / name).write_text("amax\nx")
  assert simulate(name) == simulate(f"{name}!") == 2
  seen = terminal.buffer.getvalue().decode()
  for words in (
    f"{shown}, 121 steps\n",
    r"dynamic:8,\n\x1fgrowth_interval=3:",
    f"HISTORY: {shown}: line 2, column amax",
    f"No such file or directory: {shown}!\n",
  ):
    assert words in seen
  assert seen.replace("\n", "").isprintable()


@pytest.mark.parametrize(
  ("words", "answer"),
  [
    (["-x.csv"], "error: .* HISTORY; for the file write ./-x.csv"),
    ([""], "error: argument HISTORY: must name a file, got ''"),
    (["./-x.csv", "--rule=fixed:9"], "error: argument --rule: .*: take 8.0."),
    (["./-x.csv", "--rule=fixed:9"], "warning: argument --rule: .*take 8.0."),
  ],
)
def test_a_name_or_rule_that_may_be_a_mistake_gets_one_line(
  words, answer, history, monkeypatch, capsys
):
  monkeypatch.chdir(history.parent)
  history.rename("-x.csv")
  is_error = answer.startswith("error")
  with warnings.catch_warnings(action="error" if is_error else "always"):
    assert simulate(*words) == 2 * is_error
  found = capsys.readouterr().err
  assert re.fullmatch(f"optax-lossscale simulate: {answer}\n", found)


def test_table_has_the_figures_of_each_rule(history, capsys):
  rules = ("fixed:2**12", "fixed:2**20", "dynamic:2**16")
  arguments = [word for rule in rules for word in ("--rule", rule)]
  assert simulate(history, *arguments) == 0
  out = capsys.readouterr().out
  assert out.startswith(f"{history}, 121 steps\n")
  rows = rows_of(out)
  # The recorded overflow says nothing below its S, and 2 bits above it. A fixed
  # S is stalled by every overflow.
  assert rows["fixed:2**12"] == ["1", "1", "3.4", "3.4", "3.4", "2^12"]
  assert rows["fixed:2**20"] == ["121", "121", "-", "-", "-", "2^20"]
  assert rows[rules[2]] == ["2", "0", "1.1", "0.4", "1.4", "2^14"]


def test_the_page_shows_what_its_command_prints(monkeypatch, capsys):
  monkeypatch.chdir(documents.ROOT)
  page = documents.read("docs/command_line.md")
  section = documents.section(page, "simulate")
  (command,) = documents.blocks(section, "sh")
  (shown,) = documents.blocks(section, "text")
  program, *words = command.split()
  assert program == ".venv/bin/optax-lossscale"
  assert cli.main(words) == 0
  assert capsys.readouterr().out == shown
  assert max(map(len, shown.splitlines())) <= 80


def test_default_rules_are_compared(history, capsys):
  assert simulate(history) == 0
  assert {"dynamic", "headroom"} <= rows_of(capsys.readouterr().out).keys()


def test_dtype_and_hardware_count(tmp_path, capsys):
  path = tmp_path / "history.csv"
  path.write_text("amax\n65504\n")
  lost = []
  for options in ([], ["--hardware=saturating"], ["--dtype=bfloat16"]):
    assert simulate(path, "--rule=fixed:1", *options) == 0
    lost.append(rows_of(capsys.readouterr().out)["fixed:1"][0])
  assert lost == ["0", "1", "0"]


def test_advice_is_given_on_each_rule(history, capsys):
  rules = ("--rule", "npu_fixed:loss_scale=2**20", "--rule", "fixed:2**13")
  # A program may forbid these in its steps.
  with jax.transfer_guard("disallow"), jax.debug_infs(True):
    assert simulate(history, *rules, "--advise") == 0
  lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
  first = lines.index("npu_fixed:loss_scale=2**20:")
  # The recorded overflow leaves 2**9; 2 bits of headroom are kept free.
  assert lines[first + 1].startswith("loss_scale: 2**20 -> 2**7: 121 of 121")
  assert lines[lines.index("fixed:2**13:") + 1] == "nothing to change"


@pytest.mark.slow
def test_bad_input_is_answered_before_anything_heavy_is_imported():
  code = (
    "import sys; from optax_lossscale import cli;"
    "assert cli.main(['simulate', 'nowhere.csv', '--rule', 'dynamic']) == 2;"
    "heavy = {'flax', 'matplotlib'} & set(sys.modules);"
    "assert not heavy, heavy"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
