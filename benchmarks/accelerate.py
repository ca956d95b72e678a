"""`python -m benchmarks accelerate`: what a precision schedule saves and costs.

The train step of a small transformer, in float32, at O1 in float16 and
bfloat16, and as `PrecisionSchedule` makes it, in both parts. A schedule costs
a second compilation, and saves the time by which its low part is faster. It
pays from some length of training on, or never: on a CPU XLA computes float16 in
float32. float32 is what JAX makes of it, on NVIDIA's GPUs that is TF32 unless
JAX_DEFAULT_MATMUL_PRECISION says otherwise.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import statistics
from typing import Any

import jax

from benchmarks import accelerate_steps as steps_lib
from benchmarks import command
from benchmarks import report
from benchmarks import rounds as rounds_lib
from benchmarks.truth import text
from benchmarks.truth import workload as workload_lib
from benchmarks.truth.workloads import transformer

_RATIO = 0.9  # Of the steps, in the low part: Ascend's default.
_COLUMNS = ("", "trace s", "compile s", "ms", "/ float32", "quartiles")


def main(argv: Sequence[str]) -> int:
  """Measures, prints the tables, and writes the figures as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code, 0.
  """
  parser = command.parser("accelerate", __doc__, rounds=10)
  arguments = parser.parse_args(argv)
  content = command.begin("accelerate", argv)
  workload = make_workload(tiny=arguments.tiny)
  content["contenders"] = rows = steps_lib.measure(
    workload,
    rounds=arguments.rounds,
    steps=1 if jax.default_backend() == "cpu" else 20,
    compilations=1 if arguments.tiny else 3,
  )
  content["schedules"] = schedules = {
    kind: earned_back(
      *(rows[name] for name in (steps_lib.FLOAT32, *steps_lib.parts(kind)))
    )
    for kind in steps_lib.TYPES
  }
  report.show(
    f"Train step, {workload.description}: medians of {arguments.rounds} rounds",
    _COLUMNS,
    [(name, *_cells(row)) for name, row in rows.items()],
  )
  for kind, figures in schedules.items():
    print(f"{kind}|step|{figures['ratio']}: {_verdict(figures)}")
  report.write(path := arguments.out / "accelerate.json", content)
  print(f"wrote {path}")
  return 0


def make_workload(*, tiny: bool) -> workload_lib.Workload:
  """Returns what is trained.

  Args:
    tiny: whether its batch is small.
  """
  sequences, length = 192 if tiny else 768, 64
  return text.make_workload(
    transformer.Transformer(symbols=text.CHARACTERS, width=64),
    text.characters(length),
    sequences=sequences,
    description=(
      "a transformer on the characters of Python's sources, "
      f"{sequences} x {length} a step"
    ),
    score_name="held-out nats per character",
    steps=60,
  )


def earned_back(
  float32: Mapping[str, Any], low: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns from which length on a schedule saves time, for JSON.

  Args:
    float32: the figures of the plain step, as `measure` returns them.
    low: of the schedule's low part.
    full: of its full part.

  Returns:
    `saved` seconds of the average step at `ratio`, as quartiles over the
    rounds; `compilation`, how many seconds longer it takes; and the `steps` and
    `hours` of a run in float32 that takes as long as the accelerated one. These
    are None if nothing is saved in the middle of the rounds.
  """
  saved = rounds_lib.quartiles(
    [
      plain - (_RATIO * fast + (1 - _RATIO) * slow)
      for plain, fast, slow in zip(
        *(row["seconds"] for row in (float32, low, full)), strict=True
      )
    ]
  )
  extra = statistics.median(
    both - one
    for both, one in zip(
      *(map(_compile_seconds, row["compilations"]) for row in (low, float32)),
      strict=True,
    )
  )
  steps = max(extra, 0) / saved.median if saved.median > 0 else None
  step_hours = statistics.median(float32["seconds"]) / 3600
  return {
    "ratio": _RATIO,
    "saved": saved._asdict(),
    "compilation": extra,
    "steps": steps,
    "hours": None if steps is None else steps * step_hours,
  }


def _compile_seconds(cost: Mapping[str, Any]) -> float:
  return float(cost["trace_seconds"] + cost["compile_seconds"])


def _cells(row: Mapping[str, Any]) -> list[str]:
  ratio = row["ratio"]
  return [
    *(
      f"{statistics.median(x[name] for x in row['compilations']):.2f}"
      for name in ("trace_seconds", "compile_seconds")
    ),
    f"{statistics.median(row['seconds']) * 1e3:.3f}",
    f"{ratio['median']:.3f}",
    f"{ratio['low']:.3f} to {ratio['high']:.3f}",
  ]


def _verdict(figures: Mapping[str, Any]) -> str:
  saved = figures["saved"]
  low, median, high = (saved[x] * 1e3 for x in ("low", "median", "high"))
  extra = f"compiling takes {figures['compilation']:.2f} s longer"
  if figures["steps"] is None:
    return (
      f"a step takes {-median:.3f} ms longer ({-high:.3f} to {-low:.3f}) and "
      f"{extra}; earned back never: low precision is not faster here"
    )
  line = (
    f"a step takes {median:.3f} ms less ({low:.3f} to {high:.3f}) and {extra}; "
    f"earned back after {figures['steps']:,.0f} steps, "
    f"{figures['hours']:.2g} hours"
  )
  if low <= 0:
    line += ", if at all: in some rounds nothing was saved"
  return line
