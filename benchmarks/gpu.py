"""`python -m benchmarks gpu`: loss scaling on one device, meant for a GPU.

It tests the guarantees there, times the update and its check against the
bandwidth of the memory, and the update with leaves that share their flag in
other groups, and times whole train steps of GPT-2 small in every precision, in
JAX and in torch. The page and the figures are written after each
part, so that they outlive a crash in the next one.
"""

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command
from benchmarks import contest as contest_lib
from benchmarks import gpt2
from benchmarks import guarantees
from benchmarks import kernels
from benchmarks import machine
from benchmarks import phase
from benchmarks import report
from benchmarks import rounds as rounds_lib
from benchmarks import traffic
import optax_lossscale as ols

# Variables that change the speed.
_ENVIRONMENT = ("JAX_", "XLA_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "OMP_NUM")
_ABOUT = """\
Times are medians of {rounds} rounds in which the programs of a table take
turns, with the quartiles in brackets. Before them every program ran three times
or more. No profiler runs, since one would switch command buffers off; they are
on unless a row says otherwise. The state (parameters, moments, S) is donated in
every update and train step, gradients and batches are not. "/ limit" is the
time over that of moving as many bytes in the first program. Kernels,
temporaries and peak are of the compiled program; a loop's body and each branch
count once.
"""
# Every column by its key in a row, and the unit. An empty one is not shown.
_COLUMNS = {
  "seen": ("seen", 1),
  "left_out": ("**failed, or left out**", 1),
  "kernels": ("kernels", 1),
  "seconds": ("ms", 1e-3),
  "bandwidth": ("GB/s", 1e9),
  "over_limit": ("/ limit", 1),
  "over_float16": (f"/ {contest_lib.FLOAT16}", 1),
  "temporaries": ("MB temp.", 1e6),
  "peak": ("MB peak", 1e6),
  "attention": ("attention", 1),
  "last_loss": ("last loss", 1),
  "loss_scale": ("S", 1),
  "skipped_steps": ("skipped", 1),
}
_LEAF = jax.ShapeDtypeStruct((1000, 500), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Plan:
  """How much of everything.

  Attributes:
    size: of GPT-2.
    batch: sequences in a batch.
    length: tokens in a sequence.
    rounds: turns of each program.
    calls: of an update or a check in a turn.
    steps: of training in a turn.
    waves: contenders that are compiled together and then timed with all before
      them, each with the share of the time by which it must be done.
    leaf_counts: of the trees whose check is compiled.
  """

  size: gpt2.Size = gpt2.SIZES["small"]
  batch: int = 8
  length: int = 1024
  rounds: int = 15
  calls: int = 20
  steps: int = 5
  waves: tuple[tuple[Sequence[str], float], ...] = (
    (tuple(contest_lib.VARIANTS)[:6], 0.4),
    (tuple(contest_lib.TORCH), 0.6),
    (tuple(contest_lib.VARIANTS)[6:], 1.0),
  )
  leaf_counts: tuple[int, ...] = (10, 100, 1000)


_TINY = Plan(
  size=gpt2.SIZES["tiny"],
  batch=2,
  length=16,
  rounds=2,
  calls=3,
  steps=1,
  waves=((tuple(contest_lib.VARIANTS)[:2], 1.0),),
  leaf_counts=(3, 10),
)

# Rows for JSON and for the page, as far as there are any.
_Part = Iterator[dict[str, Any]]


def main(argv: Sequence[str]) -> int:
  """Runs the parts, and writes `gpu.json` and `gpu.md` after each.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code: 1 if a program failed or a guarantee does not hold.
  """
  arguments = _parse(argv)
  # JAX would take three quarters of a GPU's memory, and torch needs its own.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  start = time.monotonic()
  plan = _TINY if arguments.tiny else Plan()
  content = command.begin("gpu", argv) | {
    "platform": jax.devices()[0].client.platform_version,
    "environment": {
      name: value
      for name, value in os.environ.items()
      if name.startswith(_ENVIRONMENT)
    },
    "update": phase.digest(),
    "hardware": "",
    "plan": dataclasses.asdict(plan),
    "parts": {},
    "problems": {},
  }
  with rounds_lib.attempt(content["problems"], "Hardware"):
    content["hardware"] = repr(ols.hardware.probe())
  for name, (part, share) in _PARTS.items():
    print(f"... {name}", flush=True)
    until = start + 60 * arguments.minutes * share
    with rounds_lib.attempt(content["problems"], name):
      rounds_lib.check_time(until)
      for rows in part(plan, until):
        content["parts"][name] = rows
        _write(arguments.out, content)
    _write(arguments.out, content)
  print(_page(content))
  parts = (*content["parts"].values(), content["problems"])
  rows = [row for part in parts for row in part.values()]
  reasons = [x["left_out"] for x in rows if "left_out" in x]
  # torch may be missing, and time may run out.
  excused = "ModuleNotFoundError", "TimeoutError"
  return int(not all(x.startswith(excused) for x in reasons))


def _guarantees(plan: Plan, until: float) -> _Part:
  yield guarantees.run(tiny=plan is _TINY, until=until)


def _updates(plan: Plan, until: float) -> _Part:
  makers = traffic.updates(_params(plan))
  yield traffic.measure(
    makers, rounds=plan.rounds, calls=plan.calls, until=until
  )


def _steps(plan: Plan, until: float) -> _Part:
  contest = contest_lib.Contest(plan.size, batch=plan.batch, length=plan.length)
  start = time.monotonic()
  for names, share in plan.waves:
    end = start + share * (until - start)
    # A quarter of the time is for the timing.
    contest.add(names, end - (end - time.monotonic()) / 4)
    yield contest.rows
    contest.time(rounds=plan.rounds, steps=plan.steps, until=end)
    yield contest.rows


def _kernels(plan: Plan, until: float) -> _Part:
  rows: dict[str, Any] = {}
  for count in plan.leaf_counts:
    name = f"check of {count:,} leaves of {_LEAF.shape}"
    with rounds_lib.attempt(rows, name):
      rounds_lib.check_time(until)
      compiled = jax.jit(phase.check).lower([_LEAF] * count).compile()
      rows[name] = kernels.figures(compiled)
    yield rows


# Each with the share of the time by which it must be done.
_PARTS: dict[str, tuple[Callable[..., _Part], float]] = {
  "Guarantees": (_guarantees, 0.2),
  "Update phase": (_updates, 0.5),
  "Train step": (_steps, 0.93),
  "Check, kernels": (_kernels, 1.0),
}


def _params(plan: Plan) -> Any:
  return jax.eval_shape(lambda: gpt2.init(plan.size, 0))


def _write(out: pathlib.Path, content: dict[str, Any]) -> None:
  stats = jax.devices()[0].memory_stats() or {}
  content["peak_memory"] = stats.get("peak_bytes_in_use")
  with rounds_lib.attempt(content["problems"], "gpu.json"):
    report.write(out / "gpu.json", content)
  (out / "gpu.md").write_text(_page(content), encoding="utf-8")


def _page(content: Mapping[str, Any]) -> str:
  plan = content["plan"]
  lines = [
    f"# {content['command']}\n\n{machine.headline(content['machine'])}",
    f"{content['platform']}\n",
    "" if jax.default_backend() == "gpu" else "**This is no GPU.**\n",
    f"{_ABOUT.format(**plan)}\n```\n{content['hardware']}\n```",
  ]
  for name, rows in content["parts"].items():
    keys = [k for k in _COLUMNS if any(k in row for row in rows.values())]
    table = report.markdown(
      ["", *(_COLUMNS[key][0] for key in keys)],
      [
        [name, *(_cell(row.get(key), _COLUMNS[key][1]) for key in keys)]
        for name, row in rows.items()
      ],
    )
    lines.append(f"\n## {name}\n\n{table}")
  for name, row in content["problems"].items():
    lines.append(f"\n## {name}\n\nLeft out: {row['left_out']}")
  lines.append(
    f"\nA batch is {plan['batch']} sequences of {plan['length']} tokens. JAX "
    f"held at most {_cell(content['peak_memory'], 1e6)} MB.\n"
  )
  return "\n".join(lines)


def _cell(value: Any, unit: float) -> str:
  if value is None:
    return "-"
  if isinstance(value, str):
    return value
  if isinstance(value, rounds_lib.Quartiles):
    low, median, high = (_cell(float(each), unit) for each in value)
    return f"{median} [{low}, {high}]"
  value = value if unit == 1 else value / unit
  # Four digits, or those of its integer.
  small, large = abs(value) < 10, abs(value) >= 1000
  exact = isinstance(value, int) or large
  return f"{value:,.{0 if exact else 3 if small else 1}f}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = command.parser("gpu", __doc__)
  parser.add_argument(
    "--minutes",
    type=command.minutes,
    default=8.0,
    help="after which what remains is left out (default: 8)",
  )
  return parser.parse_args(argv)
