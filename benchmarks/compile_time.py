"""`python -m benchmarks compile`: the seconds to trace and compile an update.

Adam alone, in `loss_scaling` and in `optax.apply_if_finite`, on plain arrays
and on arrays of a mesh, which GPUs and TPUs treat alike.
"""

import argparse
from collections.abc import Sequence
import pathlib
import shlex
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import compilation
from benchmarks import machine
from benchmarks import report
import optax_lossscale as ols

_OUTPUT = pathlib.Path("benchmarks/results/compile.json")
_BARE = optax.adam(1e-3)
_CONTENDERS = {
  "bare": _BARE,
  "optax_lossscale": ols.loss_scaling(_BARE, ols.DynamicLossScale()),
  "optax.apply_if_finite": optax.apply_if_finite(_BARE, 100),
}
_LAYOUTS = ("plain", "mesh")
_COLUMNS = ("", "trace s", "compile s", "both, times bare", "instructions")


def main(argv: Sequence[str]) -> int:
  """Measures, prints a table for each case, and writes them as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code.
  """
  arguments = _parse(argv)
  content: dict[str, Any] = {
    "command": shlex.join(["python", "-m", "benchmarks", "compile", *argv]),
    "machine": machine.describe(),
    "compilations": arguments.compilations,
    "shape": arguments.shape,
    "cases": [],
  }
  print(f"{content['command']}\n{machine.headline(content['machine'])}\n")
  for layout in _LAYOUTS:
    for leaves in arguments.leaves:
      with compilation.without_persistent_cache():
        rows = _measure(leaves, arguments.shape, layout, arguments.compilations)
      content["cases"].append(
        {"layout": layout, "leaves": leaves, "rows": rows}
      )
      report.show(
        f"{leaves} leaves of {_shape(arguments.shape)}, {layout} arrays",
        _COLUMNS,
        [_cells(row, rows[0]) for row in rows],
      )
      report.write(arguments.output, content)
  print(f"wrote {arguments.output}")
  return 0


def _measure(
  leaves: int, shape: Sequence[int], layout: str, count: int
) -> list[dict[str, Any]]:
  """Returns the medians of interleaved compilations of each contender."""
  params = {f"leaf_{i}": jnp.zeros(shape) for i in range(leaves)}
  if layout == "mesh":
    # One over all devices; their number is the machine's.
    axis_type = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axis_type)
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
  costs: dict[str, list[compilation.Compilation]] = {}
  instructions: dict[str, int] = {}
  # The first compilation of a process starts XLA as well.
  compilation.compile_ahead(lambda x: x, params)
  for _ in range(count):
    for name, tx in _CONTENDERS.items():
      state = jax.jit(tx.init)(params)
      compiled, cost = compilation.compile_ahead(
        lambda state, grads, params, tx=tx: tx.update(grads, state, params),
        state,
        params,
        params,
      )
      costs.setdefault(name, []).append(cost)
      instructions[name] = compiled.as_text().count(" = ")
  return [
    {
      "name": name,
      "trace_seconds": statistics.median(x.trace_seconds for x in all_),
      "compile_seconds": statistics.median(x.compile_seconds for x in all_),
      "seconds": statistics.median(x.seconds for x in all_),
      "instructions": instructions[name],
    }
    for name, all_ in costs.items()
  ]


def _shape(shape: Sequence[int]) -> str:
  return " x ".join(map(str, shape))


def _cells(row: dict[str, Any], bare: dict[str, Any]) -> list[str]:
  return [
    row["name"],
    f"{row['trace_seconds']:.2f}",
    f"{row['compile_seconds']:.2f}",
    f"{row['seconds'] / bare['seconds']:.2f}",
    f"{row['instructions']:,}",
  ]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks compile",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "--leaves",
    nargs="+",
    type=int,
    default=[100, 400, 1000],
    metavar="N",
    help="numbers of leaves (default: 100 400 1000)",
  )
  parser.add_argument(
    "--shape",
    nargs="+",
    type=int,
    default=[64, 128],
    metavar="N",
    help="of each leaf (default: 64 128)",
  )
  parser.add_argument(
    "--compilations",
    type=int,
    default=3,
    metavar="N",
    help="of each contender, in turn (default: 3)",
  )
  parser.add_argument(
    "--output",
    type=pathlib.Path,
    default=_OUTPUT,
    metavar="PATH",
    help=f"where the JSON goes; it is replaced (default: {_OUTPUT})",
  )
  return parser.parse_args(argv)
