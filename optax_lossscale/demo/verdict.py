"""Sums a comparison up in a sentence that is made from its numbers."""

from collections.abc import Iterable
from collections.abc import Sequence
import math

from optax_lossscale.demo import run as run_lib

Closed = dict[str, list[float]]  # By label: a number for each seed.

_REFERENCE = "float32"
_AS_WELL = 99.5  # Per cent; the rest is noise.


def closed(
  runs: Sequence[run_lib.Run],
  results: Iterable[run_lib.Result],
  *,
  more_is_better: bool,
) -> Closed | None:
  """Returns how much of float32's progress each run made, in per cent.

  Progress is measured on held-out data, from before training to the end of it.

  Returns:
    None if there are too few runs to compare, and an empty dict if float32
    made no progress.
  """
  plain = [x.label for x in runs if x.lowest_precision == _REFERENCE][:1]
  ended = [
    (x.run, x.seed, x.start, x.held_out)
    for x in results
    if x.start is not None and x.held_out is not None
  ]
  ways = {seed: (a, b - a) for label, seed, a, b in ended if label in plain}
  if all(label in plain or seed not in ways for label, seed, *_ in ended):
    return None
  sign = 1 if more_is_better else -1
  if not all(0 < sign * way < math.inf for _, way in ways.values()):
    return {}
  found: Closed = {}
  for label, seed, _, end in ended:
    if seed in ways:
      start, way = ways[seed]
      found.setdefault(label, []).append(100 * (end - start) / way)
  return found


def sentence(runs: Sequence[run_lib.Run], way: Closed | None) -> str:
  """Returns a sentence about the runs, or "" if they cannot be compared."""
  if way == {}:
    return (
      "float32 itself did not improve on the held-out data, so the other runs "
      "cannot be measured against it."
    )
  way = way or {}
  low_runs = [x for x in runs if x.lowest_precision != _REFERENCE]
  others = [x for x in low_runs if x.label in way]
  checks = {x.check for x in others if x.rule is not None}
  groups: dict[str, list[float]] = {}  # Similar runs share an entry.
  for run in others:
    name = f"{run.lowest_precision} alone"
    if run.accelerate is not None:
      name = f"with {run.accelerate}"
    elif run.rule is not None:
      check = f" and the check {run.check}" if len(checks) > 1 else ""
      name = f"with loss scaling{check}"
    groups.setdefault(name, []).extend(way[run.label])
  if not groups:
    return ""
  low = others[0].lowest_precision
  (first, values), *rest = groups.items()
  first = first if first.startswith(low) else f"{low} {first}"
  said = f"{first} closed {_per_cent(values)} of the gap between the start and "
  said += "; ".join(["float32", *(f"{x} {_per_cent(y)}" for x, y in rest)])
  alone = groups.get(f"{low} alone", [])
  if checks and alone and all(x >= _AS_WELL for x in alone):
    said += f". {low} alone did as well: these steps needed no loss scaling"
  return f"{said}."


def _per_cent(values: Sequence[float]) -> str:
  """Formats one or two numbers, or the range of more."""
  finite = [x for x in values if math.isfinite(x)]
  if not finite:
    return "nothing (its score is not finite)"
  # Adding 0.0 removes the sign of -0.0.
  numbers = [*dict.fromkeys(round(x, 1) + 0.0 for x in finite)]
  if len(numbers) > 2:
    text = f"{min(numbers):.1f} to {max(numbers):.1f} %"
  else:
    text = " and ".join(f"{x:.1f}" for x in numbers) + " %"
  lost = len(values) - len(finite)
  return text + f" ({lost} of {len(values)} not finite)" * (lost > 0)
