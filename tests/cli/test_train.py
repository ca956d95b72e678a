"""`train`: bad input, what comes out, and Ctrl-C."""

import csv
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

from optax_lossscale import cli
from optax_lossscale.demo import brier
from optax_lossscale.demo import comparison
from optax_lossscale.demo import digits
from optax_lossscale.demo import figure
from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import text
from tests.demo import tiny

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
LEVELS = ("O0", "O1", "O2", "O3", "auto", "OD")
FAST = ("--accelerate", "fast|step|0.5")
FAST1 = ("--accelerate", "fast1|step|0.5")
BY_LOSS = ("--accelerate", "fast|loss|1.05")
LOSS_SCALES = (
  "none",
  "fixed:1024",
  "dynamic:growth_interval=2",
  "megatron:initial_scale=2**16",
  "mindspore",
)


@pytest.fixture
def tiny_digits(monkeypatch):
  """Puts a linear classifier in the place of LeNet-5."""
  task = tiny.make_task()
  monkeypatch.setattr(digits, "make_task", lambda *, quick: task)
  return task


@pytest.fixture
def planned(tiny_digits, monkeypatch):
  """The comparisons that would be trained; none is."""
  plans = []

  def keep(plan):
    plans.append(plan)
    return comparison.Results()

  monkeypatch.setattr(comparison, "train", keep)
  return plans


def train(*arguments):
  return cli.main(["train", "--task", "digits", *map(str, arguments)])


def labels_of(planned):
  (plan,) = planned
  return [run.label for run in plan.runs]


def read_history(directory, task="digits"):
  with (directory / f"{task}.csv").open(newline="") as file:
    return list(csv.DictReader(file))


@pytest.mark.parametrize(
  ("option", "arguments"),
  [
    ("--task", ["--task", "images"]),
    ("--precision", ["--precision", "float8"]),
    ("--level", ["--level", "O4"]),
    ("--level", ["--level", "o1"]),
    ("--level", ["--level", "O0", "--precision", "float32"]),
    ("--level", ["--level", "O1", "--precision", "float32"]),
    ("--loss-scale", ["--loss-scale", "magic"]),
    ("--loss-scale", ["--loss-scale", "fixed:0"]),
    ("--loss-scale", ["--loss-scale", "dynamic:backoff_factor=2"]),
    ("--steps", ["--steps", "0"]),
    ("--steps", ["--steps", "many"]),
    ("--seed", ["--seed", "-1"]),
    ("--seeds", ["--seeds", "0"]),
    ("--hardware", ["--hardware", "clipping"]),
    ("--check", ["--check", "finite"]),
    ("--check", ["--check", "saturated", "--loss-scale", "none"]),
    ("--check", ["--check", "nonfinite", "--precision", "float32"]),
    ("--check", ["--check", "nonfinite", "--level", "O0"]),
    ("--compare", ["--compare", "--precision", "float16"]),
    ("--compare", ["--compare", "--precision", "float16", "--level", "O1"]),
    ("--compare", ["--compare", "--loss-scale", "none"]),
    ("--accelerate", ["--accelerate", "fast"]),
    ("--accelerate", ["--accelerate", "fast|step|0.95"]),
    ("--accelerate", ["--accelerate", "quick|step"]),
    ("--target-loss", ["--target-loss", "1"]),
    ("--target-loss", [*BY_LOSS]),
    ("--target-loss", [*BY_LOSS, "--target-loss", "0"]),
    ("--target-loss", [*BY_LOSS, "--target-loss", "nan"]),
    ("--target-loss", [*BY_LOSS, "--target-loss", "low"]),
    ("--target-loss", [*FAST, "--target-loss", "1"]),
    ("--compare", [*FAST, "--compare"]),
    ("--precision", [*FAST, "--precision", "float16"]),
    ("--level", [*FAST, "--level", "O0"]),
    ("--hardware", [*FAST, "--hardware", "saturating"]),
    ("--loss-scale", [*FAST, "--loss-scale", "none"]),
    ("--loss-scale", [*FAST1, "--loss-scale", "fixed:8"]),
    ("--check", [*FAST1, "--check", "saturated"]),
    ("--outptu", ["--outptu", "x"]),
    ("--prec", ["--prec", "float16"]),
  ],
)
def test_bad_input_is_answered_with_one_line(
  option, arguments, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert train(*arguments) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("optax-lossscale") and err.count("\n") == 1
  assert option in err
  assert list(tmp_path.iterdir()) == []


def test_rules_own_words_are_passed_on(capsys):
  assert train("--loss-scale", "dynamic:growth_factor=1") == 2
  err = capsys.readouterr().err
  assert "--loss-scale" in err
  assert "`growth_factor` must be above 1 (in float32), got 1;" in err


def test_schedules_own_words_are_passed_on(capsys):
  assert train("--accelerate", "fast|step|0.95") == 2
  err = capsys.readouterr().err
  assert "argument --accelerate: the ratio in `accelerate_train_mode`" in err
  assert "got '0.95' in 'fast|step|0.95'" in err


def test_level_in_float32_is_refused_with_its_remedy(capsys):
  assert train("--level", "O1", "--precision", "float32") == 2
  assert "leave --precision out, or give float16 or" in capsys.readouterr().err


def test_unwritable_output_is_refused_before_training(
  tmp_path, tiny_digits, capsys
):
  (tmp_path / "file").write_text("")
  for output in (tmp_path / "file", tmp_path / "file" / "folder"):
    assert train("--output", output) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "--output" in err and str(output) in err
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_replaced_is_refused_before_training(
  tmp_path, tiny_digits, capsys
):
  (tmp_path / "digits.png").mkdir()
  assert train("--task", "digits", "--output", tmp_path) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert "--output" in err and "digits.png" in err
  assert [path.name for path in tmp_path.iterdir()] == ["digits.png"]


def test_missing_extra_is_told_with_its_remedy(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert train("--output", tmp_path / "out") == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert "matplotlib" in err and "which is not installed" in err
  assert f'of the repository: {sys.executable} -m pip install ".[demo]"' in err
  assert not (tmp_path / "out").exists()


def test_missing_sources_are_told(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
  output = tmp_path / "out"
  assert cli.main(["train", "--task=text", "--output", str(output)]) == 2
  err = capsys.readouterr().err
  assert err.count("\n") == 1 and "--task" in err and "0 characters" in err
  assert not output.exists()


def test_bad_input_is_answered_before_anything_heavy_is_imported():
  code = (
    "import sys; from optax_lossscale import cli;"
    "assert cli.main(['train', '--steps', '0']) == 2;"
    "heavy = {'flax', 'matplotlib', 'rich', 'sklearn'} & set(sys.modules);"
    "assert not heavy, heavy"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_module_is_the_command():
  command = [sys.executable, "-m", "optax_lossscale", "train", "--task", "x"]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.startswith("optax-lossscale train: error: argument --task")


def test_help_is_not_an_error(capsys):
  with pytest.raises(SystemExit) as stop:
    cli.main(["train", "--help"])
  assert stop.value.code == 0
  out = capsys.readouterr().out
  for option in ("--loss-scale RULE", "--level O0|O1|O2|O3|auto|OD"):
    assert option in out


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_help_fits_80_columns_and_breaks_no_word(command, monkeypatch, capsys):
  texts = []
  for columns in ("80", "1000"):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
      cli.main([command, "--help"])
    texts.append(capsys.readouterr().out)
  assert max(map(len, texts[0].splitlines())) <= 80
  assert texts[0].split() == texts[1].split()


def test_commands_that_help_shows_work_as_typed(tmp_path, monkeypatch, capsys):
  task = dataclasses.replace(tiny.make_task(), name="brier", steps=1)
  for module in (brier, text):
    monkeypatch.setattr(module, "make_task", lambda *, quick: task)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit):
    cli.main(["train", "--help"])
  lines = capsys.readouterr().out.splitlines()
  commands = [x for x in lines if x.startswith("  optax-lossscale ")]
  assert len(commands) == 3
  for command in commands:
    assert cli.main(shlex.split(command)[1:]) == 0


def test_help_shows_the_command_as_it_was_typed(monkeypatch, capsys):
  typed = ".venv/bin/optax-lossscale"
  monkeypatch.setattr(sys, "argv", [typed])
  for found in (None, "/usr/bin/optax-lossscale"):
    monkeypatch.setattr("shutil.which", lambda _, found=found: found)
    with pytest.raises(SystemExit):
      cli.main(["train", "--help"])
    assert (f"  {typed} train" in capsys.readouterr().out) == (found is None)


def test_progress_is_told_in_lines_without_a_terminal(
  tmp_path, tiny_digits, monkeypatch, capsys
):
  clock = itertools.count(step=6)
  monkeypatch.setattr("time.monotonic", lambda: next(clock))
  arguments = ("--loss-scale=fixed:8", "--steps=40", "--seeds=2")
  assert train(*arguments, "--output", tmp_path) == 0
  lines = capsys.readouterr().err.splitlines()
  compiling = [f"float16, fixed:8, seed {x}: compiling" for x in (0, 1)]
  assert [x for x in lines if "compiling" in x] == compiling
  told = [x for x in lines if "seed 1: step" in x]
  # Each tenth of both runs is eight steps.
  steps = [int(x.split("step ")[1].split(" of 40, loss ")[0]) for x in told]
  assert steps[-1] == 40 and len(steps) >= 5
  assert all(x.endswith("s left") for x in told)


def test_each_ten_seconds_are_told(tmp_path, tiny_digits, monkeypatch, capsys):
  monkeypatch.setattr(
    "time.monotonic", functools.partial(next, itertools.count(step=9.0))
  )
  arguments = ("--loss-scale=fixed:8", "--steps=40")
  assert train(*arguments, "--output", tmp_path) == 0
  assert capsys.readouterr().err.count(": step ") == 40


def test_comparison_is_printed_and_written(tmp_path, tiny_digits, capsys):
  assert train("--output", tmp_path / "a" / "b") == 0
  runs = [
    "float32, none",
    "float16, none",
    "float16, fixed:1024",
    "float16, dynamic:growth_interval=50",
  ]
  out = capsys.readouterr().out
  heading = ["final", "held-out", "accuracy", "applied", "skipped", "last S"]
  for word in [*heading, "fixed:1024", "growth_interval=50", "2^10", "2^15"]:
    assert word in out
  assert "of the gap between the start and float32" in " ".join(out.split())
  output = tmp_path / "a" / "b"
  names = ["digits.csv", "digits.json", "digits.png"]
  assert sorted(path.name for path in output.iterdir()) == names
  rows = read_history(output)
  assert [(row["run"], int(row["step"])) for row in rows] == list(
    itertools.product(runs, range(1, 5))
  )
  report = json.loads((output / "digits.json").read_text())
  assert [run["run"] for run in report["runs"]] == runs
  assert all(0 < run["start"] < 0.5 for run in report["runs"])
  assert report["steps"] == 4 and report["seeds"] == [0]
  assert report["hardware"] == "ieee"
  assert set(report["versions"]) >= {"jax", "flax", "optax"}


@pytest.mark.long
def test_saturating_hardware_is_trained_with_both_checks(
  tmp_path, tiny_digits, capsys
):
  assert train("--hardware=saturating", "--output", tmp_path) == 0
  out = capsys.readouterr().out
  for words in ("emulated saturation mode", "precision, loss scale, check"):
    assert words in out
  report = json.loads((tmp_path / "digits.json").read_text())
  assert report["hardware"] == "saturating"
  rules = [
    "fixed:1024",
    "dynamic:growth_interval=50",
    "dynamic:2**32,growth_interval=50",
  ]
  labels = [
    f"float16, {rule}, {check}"
    for rule in rules
    for check in ("nonfinite", "saturated")
  ]
  skipped = {run["run"]: run["skipped_steps"] for run in report["runs"]}
  assert list(skipped) == ["float32, none", "float16, none", *labels]
  *others, last = skipped.values()
  assert not any(others) and last > 0


@pytest.mark.parametrize(("task", "interval"), [("brier", 12), ("text", 20)])
def test_sources_are_trained_on_saturating_hardware_with_one_rule(
  task, interval, tmp_path, planned, monkeypatch
):
  module = {"brier": brier, "text": text}[task]
  monkeypatch.setattr(module, "make_task", digits.make_task)
  arguments = [f"--task={task}", "--hardware=saturating"]
  cli.main(["train", *arguments, f"--output={tmp_path}"])
  assert labels_of(planned) == [
    "float32, none",
    "float16, none",
    f"float16, dynamic:2**32,growth_interval={interval}, nonfinite",
    f"float16, dynamic:2**32,growth_interval={interval}, saturated",
  ]


def test_a_comparison_takes_one_check(tmp_path, tiny_digits):
  arguments = ("--check=saturated", "--steps", 1)
  assert train(*arguments, "--output", tmp_path) == 0
  runs = list(dict.fromkeys(row["run"] for row in read_history(tmp_path)))
  assert runs == [
    "float32, none",
    "float16, none",
    "float16, fixed:1024, saturated",
    "float16, dynamic:growth_interval=50, saturated",
  ]


@pytest.mark.parametrize(
  ("arguments", "run"),
  [
    (["--hardware", "saturating"], "float16, dynamic, saturated"),
    (
      ["--hardware", "saturating", "--check", "nonfinite"],
      "float16, dynamic, nonfinite",
    ),
    (["--check", "saturated"], "float16, dynamic, saturated"),
    (["--check", "nonfinite"], "float16, dynamic, nonfinite"),
  ],
)
def test_check_follows_the_hardware_unless_it_is_said(
  arguments, run, tmp_path, planned
):
  train("--precision", "float16", *arguments, "--output", tmp_path)
  assert labels_of(planned) == [run]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_precisions_do_not_mind_saturating_hardware(
  precision, tmp_path, tiny_digits
):
  arguments = ("--hardware=saturating", "--precision", precision, "--steps=1")
  assert train(*arguments, "--output", tmp_path) == 0
  assert {row["run"] for row in read_history(tmp_path)} == {
    f"{precision}, none"
  }


@pytest.mark.parametrize(
  ("arguments", "run"),
  [
    (["--precision", "float16"], "float16, dynamic"),
    (["--precision", "float32"], "float32, none"),
    (["--precision", "bfloat16"], "bfloat16, none"),
    (["--loss-scale", "fixed:8"], "float16, fixed:8"),
    (["--precision", "float32", "--loss-scale", "none"], "float32, none"),
    (["--level", "O2"], "float16, O2, dynamic"),
    (["--level", "O0"], "float32, O0, none"),
    (["--level", "O0", "--precision", "bfloat16"], "float32, O0, none"),
    (["--level", "O3", "--precision", "bfloat16"], "bfloat16, O3, none"),
    (["--level", "auto", "--loss-scale", "none"], "float16, auto, none"),
    (
      ["--level", "O1", "--hardware", "saturating"],
      "float16, O1, dynamic, saturated",
    ),
  ],
)
def test_one_run_fills_in_what_is_not_said(arguments, run, tmp_path, planned):
  train(*arguments, "--output", tmp_path)
  assert labels_of(planned) == [run]


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_goes_with_loss_scales(
  level, tmp_path, tiny_digits, monkeypatch
):
  monkeypatch.setattr(figure, "write_figure", lambda *_, **__: None)
  precision = "float32" if level == "O0" else "float16"
  first_losses = []
  # All of them at one level; what a level does, no rule knows.
  loss_scales = LOSS_SCALES if level == "O1" else LOSS_SCALES[:2]
  for loss_scale in loss_scales:
    arguments = ("--level", level, "--loss-scale", loss_scale, "--steps", 3)
    assert train(*arguments, "--output", tmp_path) == 0
    rows = read_history(tmp_path)
    assert len(rows) == 3
    for row in rows:
      assert row["run"] == f"{precision}, {level}, {loss_scale}"
      assert math.isfinite(float(row["loss"]))
      assert (row["loss_scale"] == "") == (loss_scale == "none")
    first_losses.append(float(rows[0]["loss"]))
  assert first_losses == pytest.approx(
    [first_losses[0]] * len(loss_scales), rel=1e-6
  )


def test_a_comparison_takes_one_level(tmp_path, planned):
  train("--compare", "--level", "O1", "--output", tmp_path)
  assert labels_of(planned) == [
    "float32, none",
    "float16, O1, none",
    "float16, O1, fixed:1024",
    "float16, O1, dynamic:growth_interval=50",
  ]
  assert planned[0].label_name == "precision, level, loss scale"


@pytest.mark.parametrize(
  ("arguments", "low"),
  [
    (FAST, "float16, O1, dynamic:growth_interval=50"),
    (FAST1, "bfloat16, O1, none"),
    ((*FAST, "--level=OD", "--loss-scale=fixed:8"), "float16, OD, fixed:8"),
    (
      (*FAST, "--check", "saturated"),
      "float16, O1, dynamic:growth_interval=50, saturated",
    ),
    ((*FAST1, "--loss-scale", "none"), "bfloat16, O1, none"),
  ],
)
def test_accelerated_run_is_beside_float32_and_its_low_precision(
  arguments, low, tmp_path, planned
):
  train(*arguments, "--output", tmp_path)
  schedule = arguments[1]
  assert labels_of(planned) == ["float32, none", low, f"{low}, {schedule}"]


def test_switch_is_printed_and_written(tmp_path, tiny_digits, capsys):
  assert train(*FAST, "--output", tmp_path) == 0
  out = capsys.readouterr().out
  assert "fast|step|0.5" in out and "switched" in out
  assert "never" not in out
  report = json.loads((tmp_path / "digits.json").read_text())
  assert report["accelerate"] == "fast|step|0.5"
  assert [run["switched_after"] for run in report["runs"]] == [None, None, 2]
  assert all(0 < run["held_out"] < 1 for run in report["runs"])
  precisions = [row["precision"] for row in read_history(tmp_path)]
  low, full = ["float16"] * 4, ["float32"] * 4
  assert precisions == [*full, *low, *low[:2], *full[:2]]
  assert (tmp_path / "digits.png").stat().st_size > 0


def test_loss_that_does_not_come_down_is_told(
  tmp_path, tiny_digits, monkeypatch, capsys
):
  monkeypatch.setattr(figure, "write_figure", lambda *_, **__: None)
  arguments = ("--accelerate", "fast1|loss|1.5", "--target-loss", "0.1")
  assert train(*arguments, "--steps", 2, "--output", tmp_path) == 0
  out = " ".join(capsys.readouterr().out.split())
  assert "2 steps, seed 0, target loss 0.1" in out
  assert (
    "fast1|loss|1.5, seed 0: never switched, the loss stayed above 0.15, 1.5 "
    "times the target loss, until the last step." in out
  )
  assert "switched after" not in out
  report = json.loads((tmp_path / "digits.json").read_text())
  assert report["target_loss"] == 0.1


def test_too_few_steps_for_a_low_part_are_told(
  tmp_path, tiny_digits, monkeypatch, capsys
):
  monkeypatch.setattr(figure, "write_figure", lambda *_, **__: None)
  assert train(*FAST1, "--steps", 1, "--output", tmp_path) == 0
  out = " ".join(capsys.readouterr().out.split())
  assert "never switched, since so few of its steps were applied." in out
  assert read_history(tmp_path)[-1]["precision"] == "float32"


def test_seeds_are_trained_one_after_another(tmp_path, tiny_digits, capsys):
  arguments = ("--precision", "float32", "--seed", 3, "--seeds", 2)
  assert train(*arguments, "--steps", 2, "--output", tmp_path) == 0
  rows = read_history(tmp_path)
  assert [row["seed"] for row in rows] == ["3", "3", "4", "4"]
  first, second = rows[1]["loss"], rows[3]["loss"]
  assert first != second
  out = capsys.readouterr().out
  assert "seeds 3 to 4" in out
  assert "over 2 seeds" in out
  assert f"{(float(first) + float(second)) / 2:.4f}" in out and "±" in out


def test_quick_is_the_tasks_affair(tmp_path, tiny_digits, monkeypatch):
  def make_task(*, quick):
    return dataclasses.replace(tiny_digits, steps=2 if quick else 3)

  monkeypatch.setattr(digits, "make_task", make_task)
  for options, steps in (
    ([], 3),
    (["--quick"], 2),
    (["--quick", "--steps=1"], 1),
  ):
    assert train("--precision=float32", "--output", tmp_path, *options) == 0
    assert len(read_history(tmp_path)) == steps


@pytest.mark.parametrize(
  ("options", "shown"),
  [
    (["--precision=float16", "--loss-scale=none"], True),
    (["--precision=float16"], False),
    (["--precision=bfloat16"], False),
  ],
)
def test_the_tasks_note_is_about_float16_without_loss_scaling(
  options, shown, tmp_path, tiny_digits, monkeypatch, capsys
):
  task = dataclasses.replace(tiny_digits, steps=1, note="Lost in float16.")
  monkeypatch.setattr(digits, "make_task", lambda *, quick: task)
  assert train("--output", tmp_path, *options) == 0
  assert ("Lost in float16." in capsys.readouterr().out) == shown


def test_full_disk_does_not_hide_the_table(
  tmp_path, tiny_digits, monkeypatch, capsys
):
  def refuse(path, results):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(run_lib, "write_csv", refuse)
  assert train("--precision=float32", "--output", tmp_path) == 2
  out, err = capsys.readouterr()
  assert "float32, none" in out
  assert "--output" in err and "No space left on device" in err


@pytest.mark.parametrize("end", ["csv", "json", "png"])
def test_a_disk_that_becomes_full_while_a_file_is_written_is_told(
  end, tmp_path, tiny_digits, capsys
):
  # Written first under this name, and moved when all went well.
  temporary = tmp_path / f".digits.{end}.{os.getpid()}"
  temporary.symlink_to("/dev/full")
  assert train("--precision=float32", "--steps=1", "--output", tmp_path) == 2
  out, err = capsys.readouterr()
  assert "float32, none" in out
  error = f"--output: cannot write {tmp_path}: No space left on device\n"
  assert err.endswith(error) and "Traceback" not in err
  assert not (tmp_path / f"digits.{end}").exists()


def test_interrupt_keeps_what_was_recorded(
  tmp_path, tiny_digits, monkeypatch, capsys
):
  def three_batches(seed):
    yield from itertools.islice(tiny_digits.batches(seed), 3)
    raise KeyboardInterrupt

  interrupted = dataclasses.replace(tiny_digits, batches=three_batches)
  monkeypatch.setattr(digits, "make_task", lambda *, quick: interrupted)
  assert train("--output", tmp_path) == 130
  assert [row["step"] for row in read_history(tmp_path)] == ["1", "2", "3"]
  report = json.loads((tmp_path / "digits.json").read_text())
  assert report["interrupted"] is True
  assert report["runs"][0]["held_out"] is None
  assert (tmp_path / "digits.png").stat().st_size > 0
  assert "Interrupted" in capsys.readouterr().out


def test_interrupt_before_the_first_step_writes_nothing(
  tmp_path, tiny_digits, monkeypatch, capsys
):
  def no_batches(seed):
    raise KeyboardInterrupt
    yield

  interrupted = dataclasses.replace(tiny_digits, batches=no_batches)
  monkeypatch.setattr(digits, "make_task", lambda *, quick: interrupted)
  assert train("--output", tmp_path) == 130
  assert list(tmp_path.iterdir()) == []
  assert "nothing to save" in capsys.readouterr().out


def test_ctrl_c_leaves_the_history_on_disk(tmp_path):
  # A shell may have told its background jobs to ignore Ctrl-C.
  code = (
    "import signal, sys; sys.argv[0] = 'optax-lossscale';"
    "signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from optax_lossscale import cli;"
    "from optax_lossscale.demo import digits; from tests.demo import tiny;"
    "task = tiny.make_task(); digits.make_task = lambda *, quick: task;"
    "sys.exit(cli.main())"
  )
  arguments = ["--task", "digits", "--precision", "float16"]
  arguments += ["--steps", "1000000", "--output", str(tmp_path)]
  with subprocess.Popen(
    [sys.executable, "-c", code, "train", *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    cwd=ROOT,  # To find the small model.
    # The progress bar as on a terminal, to see when the first step is done.
    env={
      **os.environ,
      "FORCE_COLOR": "1",
      "COLUMNS": "120",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    },
  ) as process:
    seen = b""
    while b"loss" not in seen.rpartition(b"compiling")[2]:
      chunk = os.read(process.stderr.fileno(), 4096)
      assert chunk, seen.decode()
      seen += chunk
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
  assert process.returncode == 130
  assert b"Interrupted" in out
  assert read_history(tmp_path)
  names = ["digits.csv", "digits.json", "digits.png"]
  assert sorted(path.name for path in tmp_path.iterdir()) == names
