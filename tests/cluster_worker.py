"""One process of examples/cluster.py, whose batches are bad on chosen steps.

  python -m tests.cluster_worker COORDINATOR PROCESSES PROCESS OUTPUT

writes to OUTPUT what this process saw on each step.
"""

import collections
import faulthandler
import importlib.util
import itertools
import pathlib
import sys
import zlib

import jax
import numpy as np

from tests import support

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "cluster.py"
# A process that hangs ends by itself, also when nobody is left to kill it.
TIMEOUT = 240
RULE = support.Stub(2.0**10)


def factors(processes):
  """Returns, for each step, the factor for the targets of each process.

  Some factors make one process's gradients NaN, or overflow in float16. A
  clean step follows each of them.
  """
  steps = []
  for factor, process in itertools.product((1e8, np.nan), range(processes)):
    bad = np.ones(processes)
    bad[process] = factor
    steps += [bad, np.ones(processes)]
  return steps


def load_script():
  spec = importlib.util.spec_from_file_location("cluster", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def main(coordinator, processes, process, output):
  faulthandler.dump_traceback_later(TIMEOUT, exit=True)
  processes, process = int(processes), int(process)
  jax.distributed.initialize(coordinator, processes, process)
  assert jax.device_count() == processes
  cluster = load_script()
  steps = factors(processes)
  history = collections.defaultdict(list)

  def report(step, params, opt_state, metrics):
    del step
    trees = {"params": params, "inner_state": opt_state.inner_state}
    for name, tree in trees.items():
      history[name].append(zlib.crc32(b"".join(support.to_bits(tree))))
    for name, value in metrics.items():
      history[name].append(np.asarray(value))

  batches = cluster.local_batches(len(steps))
  cluster.train(
    (
      {**batch, "y": np.float32(batch["y"] * step[process])}
      for batch, step in zip(batches, steps, strict=True)
    ),
    rule=RULE,
    report=report,
  )
  np.savez(output, **history)


if __name__ == "__main__":
  main(*sys.argv[1:])
