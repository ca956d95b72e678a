"""Contenders that take turns, and the ratios between them.

The speed of a machine drifts over minutes by more than the differences that are
looked for. So each round runs every contender once, and a contender's time is
divided by that of the bare optimizer in the same round.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import gc
import math
import random
import statistics
import time
from typing import Any
from typing import NamedTuple


class Quartiles(NamedTuple):
  """The middle of some values, and between what half of them lie."""

  low: float
  median: float
  high: float


class Turn(NamedTuple):
  """What a contender does in each round.

  Attributes:
    run: is timed, and returns when its results are there.
    prepare: runs before it and is not timed.
  """

  run: Callable[[], None]
  prepare: Callable[[], None] = lambda: None


def interleave(
  turns: Mapping[str, Turn], rounds: int, *, until: float = math.inf
) -> dict[str, list[float]]:
  """Returns the seconds that each contender took in each round.

  Each round has an order of its own, so that no contender always follows the
  same one and finds the caches as that one left them. A first round, which
  touches the memory for the first time, is not counted.

  Args:
    turns: the contenders by name.
    rounds: how many.
    until: of `time.monotonic`; no round but the first two starts after it.
  """
  generator = random.Random(0)
  seconds: dict[str, list[float]] = {name: [] for name in turns}
  with _no_garbage_collection():
    for index in range(rounds + 1):
      if index > 1 and time.monotonic() > until:
        break
      for name in generator.sample(list(turns), len(turns)):
        turns[name].prepare()
        start = time.perf_counter()
        turns[name].run()
        duration = time.perf_counter() - start
        if index:
          seconds[name].append(duration)
  return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
  """Returns the ratio to the baseline in the same round, for each round.

  Args:
    seconds: of a contender.
    baseline: of the contender that it is compared with.
  """
  return [a / b for a, b in zip(seconds, baseline, strict=True)]


def quartiles(values: Sequence[float]) -> Quartiles:
  """Returns the median and the quartiles; of one value, that value thrice."""
  if len(values) == 1:
    return Quartiles(values[0], values[0], values[0])
  return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@contextlib.contextmanager
def attempt(rows: dict[str, Any], name: str) -> Iterator[None]:
  """Notes what is raised inside as `left_out` of a row; the others go on.

  Args:
    rows: of figures; the one of `name` is replaced.
    name: of what is tried.
  """
  try:
    yield
  except Exception as error:
    # The error of memory that is out has hundreds of lines.
    line = str(error).partition("\n")[0]
    rows[name] = {"left_out": f"{type(error).__name__}: {line}"}


def check_time(until: float) -> None:
  """Raises a TimeoutError after a time of `time.monotonic`."""
  if time.monotonic() > until:
    raise TimeoutError("no time was left")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
  """Keeps Python from collecting in the middle of somebody's step."""
  was_enabled = gc.isenabled()
  gc.collect()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()
