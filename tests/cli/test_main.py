"""The parts that all commands share: the version, and errors of the output."""

import pathlib
import subprocess
import sys

import pytest

import optax_lossscale as ols
from optax_lossscale import cli

ROOT = pathlib.Path(__file__).parents[2]

HISTORY = "step,loss_scale,amax\n" + "".join(
  f"{i},1024,{i}\n" for i in range(1, 200)
)


COMMAND = [sys.executable, "-m", "optax_lossscale"]


def simulate(tmp_path):
  """Returns a command that prints more than one line."""
  path = tmp_path / "history.csv"
  path.write_text(HISTORY)
  return [*COMMAND, "simulate", str(path)]


def test_the_version_is_printed(capsys):
  with pytest.raises(SystemExit) as stop:
    cli.main(["--version"])
  assert not stop.value.code
  assert capsys.readouterr().out == f"optax-lossscale {ols.__version__}\n"


def test_the_program_alone_prints_its_help_as_an_error(capsys):
  assert cli.main([]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("usage: optax-lossscale") and "doctor" in err


@pytest.mark.parametrize(
  ("words", "meant"),
  [
    (["docter"], "doctor"),
    (["simulate", "a.csv", "--ruel=dynamic"], "--rule"),
    (["simulate", "a.csv", "--dtype", "flot16"], "float16"),
  ],
)
def test_a_misspelt_word_gets_the_one_that_is_meant(words, meant, capsys):
  assert cli.main(words) == 2
  assert capsys.readouterr().err.endswith(f"; did you mean '{meant}'?\n")


def test_a_command_is_not_mistaken_for_a_value_of_an_option(capsys):
  assert cli.main(["train"]) == 2
  err = capsys.readouterr().err
  assert "simulate" in err and "did you mean" not in err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "version"])
def test_a_full_disk_ends_with_a_sentence(command, tmp_path):
  words = {
    "simulate": simulate(tmp_path),
    "version": [*COMMAND, "--version"],
  }
  with open("/dev/full", "w") as full:
    done = subprocess.run(
      words[command],
      stdout=full,
      stderr=subprocess.PIPE,
      text=True,
      cwd=ROOT,
    )
  assert done.stderr == (
    "optax-lossscale: error: cannot print the output: No space left on device\n"
  )
  assert done.returncode == 1


def test_a_stream_that_is_closed_loses_no_error(monkeypatch, capsys):
  with monkeypatch.context() as closed:
    closed.setattr(sys, "stderr", None)
    assert cli.main(["simulate", "nowhere.csv"]) == cli.main([]) == 2
  assert capsys.readouterr().out == ""
  with monkeypatch.context() as closed:
    closed.setattr(sys, "stdout", None)
    assert cli.main(["--help"]) == 1
  assert capsys.readouterr().err == (
    "optax-lossscale: error: cannot print the output: it is closed\n"
  )


@pytest.mark.slow
def test_a_closed_pipe_ends_with_a_sentence(tmp_path):
  with subprocess.Popen(
    simulate(tmp_path),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  ) as process:
    process.stdout.close()
    error = process.stderr.read()
  assert error == (
    "optax-lossscale: error: cannot print the output: Broken pipe\n"
  )
  assert process.returncode == 1
