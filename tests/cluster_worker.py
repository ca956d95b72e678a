"""One process of docs/cluster.py, whose gradients go bad on chosen steps.

  python -m tests.cluster_worker COORDINATOR PROCESSES PROCESS OUTPUT

writes to OUTPUT what this process saw on each step, and what it ended with.
"""

import collections
import faulthandler
import functools
import importlib.util
import itertools
import pathlib
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from tests.support import to_bits

SCRIPT = pathlib.Path(__file__).parents[1] / "docs" / "cluster.py"
# A process that hangs ends by itself, also when nobody is left to kill it.
TIMEOUT = 240
RULE = {
  "init_scale": 2.0**10,
  "growth_interval": 3,
  "min_scale": 2.0**6,
  "max_scale": 2.0**12,
}
LEAVES = ("hidden", "out")
# What stands in a local scaled gradient, here of float32 parameters ...
VALUES = {
  "inf": np.inf,
  "-inf": -np.inf,
  "nan": np.nan,
  "max": 65504.0,
  "-max": -65504.0,
}
# ... and targets that are far off, so that float16 itself overflows.
KINDS = (*VALUES, "far off")
RANDOM_STEPS = 200


def injections(processes):
  """Returns, for each step, what goes wrong: {process: (kind, leaf)}.

  Each process and each kind in turn, clean steps in between, and then
  `RANDOM_STEPS` of which a fifth is bad, on one or more of the processes.
  """
  random = np.random.default_rng(0)
  steps = []
  for process, (i, kind) in itertools.product(
    range(processes), enumerate(KINDS)
  ):
    steps += [{process: (kind, LEAVES[(process + i) % len(LEAVES)])}, {}]
  for _ in range(RANDOM_STEPS):
    bad = random.permutation(processes)[: random.integers(1, processes + 1)]
    is_bad = random.random() < 0.2
    steps.append(
      {
        int(process): (str(random.choice(KINDS)), str(random.choice(LEAVES)))
        for process in (bad if is_bad else [])
      }
    )
  return steps


def load_script():
  spec = importlib.util.spec_from_file_location("cluster", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@jax.custom_vjp
def poison(params, bad):
  """Returns `params`; of their gradients, the last elements become `bad`.

  Args:
    params: a dict of matrices.
    bad: for each of them float32[1], or 0 to leave the gradient alone.
  """
  del bad
  return params


def poison_backward(bad, gradients):
  def poison_leaf(gradient, bad):
    last = gradient[-1, -1]
    return gradient.at[-1, -1].set(jnp.where(bad[0] == 0, last, bad[0]))

  poisoned = jax.tree.map(poison_leaf, gradients, bad)
  return poisoned, jax.tree.map(jnp.zeros_like, bad)


poison.defvjp(lambda params, bad: (params, bad), poison_backward)


def poisoned_batches(batches, steps, process):
  """Yields this process's batches, with what goes wrong in it."""
  for batch, bad in zip(batches, steps, strict=True):
    kind, place = bad.get(process, (None, None))
    if kind == "far off":
      batch["y"] = batch["y"] * 1e8
    yield batch | {
      "bad": {
        leaf: np.float32([VALUES.get(kind, 0) if leaf == place else 0])
        for leaf in LEAVES
      }
    }


def checksum(tree):
  """Returns a number that depends on every bit."""
  return functools.reduce(
    lambda sum, bits: zlib.crc32(bits, sum), to_bits(tree), 0
  )


class Recorder:
  """What a process sees: `history`, a column per name, and what it ends with.

  All of it as bits, so that NaN equals NaN, and 0 differs from -0.
  """

  def __init__(self):
    self.history = collections.defaultdict(list)
    self.final = {}

  def report(self, step, params, opt_state, metrics):
    del step
    seen = metrics | {
      "params": checksum(params),
      "inner_state": checksum(opt_state.inner_state),
    }
    for name, value in seen.items():
      self.history[name].append(np.asarray(value))
    # The arrays themselves are given to the next step.
    self.final = jax.tree.map(np.asarray, (params, opt_state))

  def save(self, path):
    leaves = jax.tree.leaves_with_path(self.final)
    final = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    np.savez(path, **self.history, **final)


def main(coordinator, processes, process, output):
  faulthandler.dump_traceback_later(TIMEOUT, exit=True)
  processes, process = int(processes), int(process)
  jax.distributed.initialize(coordinator, processes, process)
  assert jax.device_count() == processes
  cluster = load_script()
  steps = injections(processes)
  recorder = Recorder()
  cluster.train(
    poisoned_batches(cluster.local_batches(len(steps)), steps, process),
    loss_fn=lambda params, batch: cluster.loss_fn(
      poison(params, batch["bad"]), batch
    ),
    rule=ols.DynamicLossScale(**RULE),
    report=recorder.report,
  )
  recorder.save(output)


if __name__ == "__main__":
  main(*sys.argv[1:])
