"""`python -m benchmarks train-step`: loss scaling on one device, to be a GPU.

Three parts, of which `--parts` selects: whether every NaN and inf is seen on
this device; the update phase against the bandwidth of its memory; and the whole
train step of GPT-2 in float32, bfloat16 and float16, in JAX and in torch.

It runs wherever JAX does, but it is there for the figures of a GPU. Until it
has run on one, these are open: the time of the update phase over what its
traffic alone would take (the aim is at most 1.10); the time of the step with
loss scaling over that of float16 without it (at most 1.01); how both compare
with torch; and whether every NaN is seen there.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
import shlex
import sys
from typing import Any

import jax

from benchmarks import contest as contest_lib
from benchmarks import gpt2
from benchmarks import machine
from benchmarks import nonfinite
from benchmarks import report
from benchmarks import traffic
from benchmarks import train_step_options as options

_MEBIBYTE = 2**20
# What changes the speed and is not among the arguments.
_ENVIRONMENT = ("JAX_", "XLA_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "OMP_NUM")


def main(argv: Sequence[str]) -> int:
  """Runs the parts, prints them, and writes them as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code: 1 if a NaN or inf was missed or a contender failed.
  """
  arguments = options.parse(argv)
  if arguments.torch and "step" in arguments.parts:
    # JAX would take three quarters of a GPU's memory, and torch needs its own.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  results: dict[str, Any] = {
    "command": shlex.join(["python", "-m", "benchmarks", "train-step", *argv]),
    "machine": machine.describe(),
    "environment": {
      name: value
      for name, value in os.environ.items()
      if name.startswith(_ENVIRONMENT)
    },
    "backend": jax.default_backend(),
    "arguments": {
      name: str(value) if isinstance(value, pathlib.Path) else value
      for name, value in vars(arguments).items()
    },
  }
  print(machine.headline(results["machine"]))
  if jax.default_backend() != "gpu":
    print("This is no GPU: the figures for one are open.")

  parts = {"nonfinite": _nonfinite, "traffic": _traffic, "step": _step}
  succeeded = True
  for name in options.PARTS:
    if name in arguments.parts:
      results[name], part_succeeded = parts[name](arguments)
      succeeded &= part_succeeded
      # After each part, so that what was measured outlives what may fail.
      if arguments.output is not None:
        report.write(arguments.output, results)
  results["peak_memory"] = _peak_memory()
  if arguments.output is not None:
    report.write(arguments.output, results)
    print(f"wrote {arguments.output}")
  return 0 if succeeded else 1


def _nonfinite(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
  outcome = nonfinite.run(
    seed=arguments.seed,
    largest=arguments.largest_leaf,
    random_places=arguments.random_places,
    on_leaf=_progress,
  )
  print(
    f"NaN and inf: {outcome.tried:,} cases, "
    f"{len(outcome.failures):,} answered wrongly"
  )
  for line in outcome.failures:
    print(f"  {line}")
  figures = {"tried": outcome.tried, "failures": list(outcome.failures)}
  return figures, not outcome.failures


def _traffic(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
  size = gpt2.SIZES[arguments.model]
  params = jax.eval_shape(lambda: gpt2.init(size, 0))
  _progress("compiling the update phase")
  figures = traffic.measure(
    params,
    rounds=arguments.rounds,
    calls=arguments.calls,
    copy_bytes=arguments.copy_size * _MEBIBYTE,
    seed=arguments.seed,
  )
  report.show(
    f"Update phase, {sum(x.size for x in jax.tree.leaves(params)):,} "
    "parameters: medians, in brackets the quartiles",
    ("", "MB moved", "ms", "GB/s", "time / limit", "MB temporaries"),
    [
      (
        name,
        _scaled(row["traffic"], 1e6),
        _scaled(row["seconds"].median, 1e-3),
        _scaled(row["bandwidth"].median, 1e9),
        _quartiles(row["time_over_limit"]),
        _scaled(row["temporaries"], 1e6),
      )
      for name, row in figures.items()
    ],
  )
  return figures, True


def _step(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
  size = gpt2.SIZES[arguments.model]
  contest = contest_lib.Contest(
    size=size,
    batch=arguments.batch,
    length=arguments.length,
    rounds=arguments.rounds,
    steps=arguments.steps,
    seed=arguments.seed,
    attention=arguments.attention,
    float32_matmul=arguments.float32_matmul,
    torch_compile=arguments.torch_compile,
  )
  results = contest_lib.run(
    contest, with_torch=arguments.torch, on_contender=_progress
  )
  report.show(
    f"Train step of GPT-2 {arguments.model}, {arguments.batch} sequences of "
    f"{arguments.length} tokens: medians, in brackets the quartiles",
    (
      "",
      "ms",
      "/ float16 in JAX",
      "/ its own float16",
      "MB at the peak",
      "last loss",
      "last S",
      "skipped",
    ),
    [(name, *_cells(row)) for name, row in results["contenders"].items()],
  )
  for line in (results["settings"], results["not_run"]):
    for name, value in line.items():
      print(f"{name}: {value}")
  failed = set(results["not_run"]) - {"torch"}
  return results, not failed


def _cells(row: Mapping[str, Any]) -> list[str]:
  return [
    _scaled(row["seconds"].median, 1e-3),
    _quartiles(row["over_jax_float16"]),
    _quartiles(row["over_own_float16"]),
    _scaled(row.get("peak"), 1e6),
    _scaled(row["last_loss"], 1),
    _scaled(row.get("loss_scale"), 1),
    str(row.get("skipped_steps", "-")),
  ]


def _quartiles(values: Any) -> str:
  if values is None:
    return "-"
  low, median, high = values
  return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def _scaled(value: float | None, unit: float) -> str:
  """Returns a quantity in a unit, with four digits or those of its integer."""
  if value is None:
    return "-"
  value /= unit
  places = 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
  return f"{value:,.{places}f}"


def _peak_memory() -> int | None:
  """Returns the most bytes that JAX held on the device in this process."""
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _progress(line: str) -> None:
  print(f"... {line}", file=sys.stderr, flush=True)
