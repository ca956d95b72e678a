"""Whether a contender compiles before one's patience ends.

With a thousand leaves some need many minutes and more memory than the machine
has, and XLA cannot be interrupted. So another process tries it first.
"""

import contextlib
import multiprocessing

from benchmarks import cases
from benchmarks.peers import PEERS

# Below that everybody compiles within seconds.
_MANY_LEAVES = 500
# With the start of a process.
SECONDS = 30.0


def is_exhausted(name: str, case: cases.Case) -> bool:
  """Returns whether the compilation takes too long, or too much memory.

  Args:
    name: the contender's.
    case: what it is compiled for; only many leaves are tried at all.
  """
  if case.leaves < _MANY_LEAVES:
    return False
  # Not a fork, which would inherit the locks of JAX's threads.
  process = multiprocessing.get_context("spawn").Process(
    target=_compile, args=(name, case)
  )
  process.start()
  process.join(SECONDS)
  if process.is_alive():
    process.kill()
  process.join()
  # Negative is the number of the signal that ended it: ours, or the system's
  # when memory ran out.
  return (process.exitcode or 0) < 0


def _compile(name: str, case: cases.Case) -> None:
  # What it raises will be raised again, where it is noted.
  with contextlib.suppress(Exception):
    contender = PEERS[name].make()
    contender.start(case.make_params())
    contender.compile(case.make_scaled_grads())
