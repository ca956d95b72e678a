"""examples/cluster.py on several processes, also when some of them overflow."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import cluster_worker

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = (sys.executable, "-W", "error")


@contextlib.contextmanager
def coordinator():
  """Yields an address on this machine that nobody else gets meanwhile.

  It is held by a socket that does not listen. gRPC sets the same option, so
  the first process can listen there all the same.
  """
  with socket.socket() as holder:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    yield f"127.0.0.1:{holder.getsockname()[1]}"


def environment():
  """Returns this process's, less what tells JAX of devices and of a cluster."""
  elsewhere = ("JAX_", "XLA_", "TPU_", "SLURM_", "OMPI_", "PMI_")
  return {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(elsewhere) and not name.lower().endswith("_proxy")
  } | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def run(commands):
  """Runs all commands at once, and returns what each of them printed."""
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  processes = [
    subprocess.Popen(command, env=environment(), cwd=ROOT, **pipes)
    for command in commands
  ]
  # Later than a worker that hangs ends itself, since it says where it hung.
  timeout = cluster_worker.TIMEOUT + 60
  try:
    # At once, since a pipe that nobody empties stops who writes to it.
    with concurrent.futures.ThreadPoolExecutor() as pool:
      printed = [*pool.map(lambda x: x.communicate(timeout=timeout), processes)]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  for process, (_, errors) in zip(processes, printed, strict=True):
    assert process.returncode == 0, errors[-4000:]
  return [out for out, _ in printed]


@pytest.mark.slow
def test_guarantee_10_processes_stay_in_step_whichever_overflows(tmp_path):
  outputs = [tmp_path / f"{i}.npz" for i in range(2)]
  module = (*PYTHON, "-m", "tests.cluster_worker")
  with coordinator() as address:
    run(
      [(*module, address, "2", str(i), str(x)) for i, x in enumerate(outputs)]
    )
  first, second = (dict(np.load(output)) for output in outputs)
  is_bad = [bool(np.any(x != 1)) for x in cluster_worker.factors(2)]
  assert first["skipped"].tolist() == is_bad
  # Each overflow halves S, and the clean step after it doubles S.
  start = cluster_worker.RULE.start
  assert first["loss_scale"].tolist() == [
    start / 2 if bad else start for bad in is_bad
  ]
  for name in ("params", "inner_state"):
    moved = first[name][1:] != first[name][:-1]
    assert moved.tolist() == [not bad for bad in is_bad[1:]]
  # As bits, so that NaN equals NaN.
  assert {k: x.tobytes() for k, x in first.items()} == {
    k: x.tobytes() for k, x in second.items()
  }


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ("--steps 0", "--steps must be at least 1, got 0"),
    (
      "--processes 2 --process 2",
      "--process must be from 0 and below 2, got 2",
    ),
    (
      "--processes 2 --process -1",
      "--process must be from 0 and below 2, got -1",
    ),
    ("--processes 0", "--process must be from 0 and below 0, got None"),
  ],
)
def test_a_bad_option_ends_in_one_line(words, message, monkeypatch, capsys):
  monkeypatch.setattr(jax.distributed, "initialize", pytest.fail)
  with pytest.raises(SystemExit) as ended:
    cluster_worker.load_script().main(words.split())
  (line,) = capsys.readouterr().err.splitlines()
  assert ended.value.code == 2 and line.endswith(f": error: {message}")


@pytest.mark.slow
def test_the_script_runs_from_the_command_line():
  script = (*PYTHON, "examples/cluster.py", "--steps", "40", "--processes", "2")
  with coordinator() as address:
    first, second = run(
      [(*script, "--coordinator", address, "--process", i) for i in "01"]
    )
  lines = re.findall(
    r"^step (\d+): loss (\S+), S \S+, applied (\d+), skipped (\d+)$",
    first,
    re.MULTILINE,
  )
  assert [int(step) for step, *_ in lines] == [20, 40]
  for step, _, applied, skipped in lines:
    assert int(applied) + int(skipped) == int(step)
  assert float(lines[1][1]) < float(lines[0][1])
  assert first.endswith("\nNext: docs/guides/devices.md\n")
  assert "step" not in second
