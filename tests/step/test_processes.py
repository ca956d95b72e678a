"""docs/cluster.py on several processes, also when some of them overflow."""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import cluster_worker
from tests import reference

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = (sys.executable, "-W", "error")
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
FAIL = (sys.executable, "-c", "raise SystemExit('out of luck')")


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


@contextlib.contextmanager
def running(commands, folder):
  """Yields running processes, none of which outlives the block.

  Args:
    commands: one for each process.
    folder: where what they print goes, by their number.
  """
  processes = []
  try:
    for i, command in enumerate(commands):
      # Files, since a pipe that nobody empties stops who writes to it.
      with (
        open(folder / f"{i}.out", "w") as out,
        open(folder / f"{i}.err", "w") as err,
      ):
        processes.append(
          subprocess.Popen(
            command, stdout=out, stderr=err, env=environment(), cwd=ROOT
          )
        )
    yield processes
  finally:
    for process in processes:
      process.kill()
    for process in processes:
      process.wait()


def wait(processes, folder, timeout):
  """Waits until all have ended well; raises as soon as one has not."""
  deadline = time.monotonic() + timeout
  codes = [None]
  while None in codes and not any(codes) and time.monotonic() < deadline:
    time.sleep(0.05)
    codes = [process.poll() for process in processes]
  if codes != [0] * len(processes):
    errors = [
      f"--- process {i}, exit code {code} (None: still running):\n"
      + (folder / f"{i}.err").read_text()[-4000:]
      for i, code in enumerate(codes)
    ]
    raise RuntimeError("\n".join(errors))


def run(commands, folder):
  """Runs all commands at once, and returns what each of them printed."""
  with running(commands, folder) as processes:
    # Later than a worker that hangs ends itself, since it says where it hung.
    wait(processes, folder, timeout=cluster_worker.TIMEOUT + 60)
  return [(folder / f"{i}.out").read_text() for i in range(len(commands))]


def train_with_injections(processes, folder):
  """Returns, for each process, what it saw and ended with, by name."""
  outputs = [folder / f"{i}.npz" for i in range(processes)]
  module = (*PYTHON, "-m", "tests.cluster_worker")
  with coordinator() as address:
    run(
      [
        (*module, address, str(processes), str(i), str(output))
        for i, output in enumerate(outputs)
      ],
      folder,
    )
  return [dict(np.load(output)) for output in outputs]


def expected_history(steps):
  """Returns S after each step, and whether it was skipped, by the model."""
  rule = reference.Dynamic(**cluster_worker.RULE)
  loss_scales = []
  for bad in steps:
    rule.update(bool(bad))
    loss_scales.append(rule.scale)
  return loss_scales, [bool(bad) for bad in steps]


def has_moved(checksums):
  """Returns for each step but the first whether anything moved on it."""
  return [bool(x) for x in checksums[1:] != checksums[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_stay_in_step_whichever_of_them_overflows(
  processes, tmp_path
):
  first, *others = train_with_injections(processes, tmp_path)

  steps = cluster_worker.injections(processes)
  loss_scales, skipped = expected_history(steps)
  assert first["skipped"].tolist() == skipped
  assert first["loss_scale"].tolist() == loss_scales
  applied = [not x for x in skipped[1:]]
  assert has_moved(first["params"]) == applied
  assert has_moved(first["inner_state"]) == applied

  for other in others:
    assert other.keys() == first.keys()
    different = [k for k in first if first[k].tobytes() != other[k].tobytes()]
    assert different == []


@pytest.mark.slow
def test_the_script_runs_from_the_command_line(tmp_path):
  script = (*PYTHON, "docs/cluster.py", "--steps", "60", "--processes", "2")
  with coordinator() as address:
    first, second = run(
      [(*script, "--coordinator", address, "--process", i) for i in "01"],
      tmp_path,
    )
  lines = re.findall(
    r"^step (\d+): loss (\S+), S (\S+), applied (\d+), skipped (\d+)$",
    first,
    re.MULTILINE,
  )
  assert [int(step) for step, *_ in lines] == [20, 40, 60]
  for step, _, _, applied, skipped in lines:
    assert int(applied) + int(skipped) == int(step)
  losses = [float(loss) for _, loss, *_ in lines]
  assert losses[-1] < losses[0]
  assert "step" not in second


def test_a_process_that_fails_ends_the_others_and_says_why(tmp_path):
  with (
    pytest.raises(RuntimeError, match="process 1, exit code 1.*\nout of luck"),
    running([SLEEP, FAIL], tmp_path) as processes,
  ):
    wait(processes, tmp_path, timeout=60)
  assert [process.returncode for process in processes] == [-9, 1]


def test_a_process_that_fails_after_all_others_have_ended_is_noticed(tmp_path):
  with pytest.raises(RuntimeError, match="out of luck"):
    run([FAIL], tmp_path)


def test_processes_that_hang_are_ended(tmp_path):
  with (
    pytest.raises(RuntimeError, match="exit code None"),
    running([SLEEP, SLEEP], tmp_path) as processes,
  ):
    wait(processes, tmp_path, timeout=0.1)
  assert [process.returncode for process in processes] == [-9, -9]


def test_an_interrupted_test_leaves_no_process(tmp_path):
  with (
    pytest.raises(KeyboardInterrupt),
    running([SLEEP, SLEEP], tmp_path) as processes,
  ):
    raise KeyboardInterrupt
  assert [process.returncode for process in processes] == [-9, -9]
