"""`optax-lossscale doctor`: versions, devices, and what to use here."""

import argparse
import collections
import functools
from importlib import metadata
import platform
import shlex
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale._base import formats
from optax_lossscale._base import tables
from optax_lossscale._base.arguments import printable
from optax_lossscale.cli import _parser
from optax_lossscale.compiled import compiling

_LEGEND = """\
largest*2, too large: the results of a product and of a cast that overflow; a
number means that the device clips. 0/0: nan, or 0 if the device clips.
subnormals: kept, or flushed to 0. cast back: whether a cast to the dtype and
back is rounded, or both casts are elided. wider sums: yes if a sum had more
digits than the dtype."""
_WAYS = """\
Whether a cast of a float32 to the dtype and back is rounded. cast back: as it
is. barrier: with lax.optimization_barrier between both casts. bits: with the
bits read as integers in between, and back."""
_FATES = {True: "kept", False: "dropped", None: "unknown"}
_SIZE = "XLA's compilers take about 1.9 GB on disk. They are installed into"
_ADVICE = {
  "float32": "Train in float32, without loss scaling.",
  "bfloat16": "Train in bfloat16, without loss scaling.",
  "float16": "Train in float16 with ols.DynamicLossScale().",
  "unknown": "Measure which is faster here, bfloat16 or float16.",
}


def add_parser(subparsers: Any) -> None:
  """Adds the `doctor` sub-command to the parser."""
  parser = subparsers.add_parser(
    "doctor",
    help="say which check and dtype to use on this device",
    description="Prints versions, devices, what the default device does with "
    "numbers that do not fit, and which check and dtype to use.",
  )
  parser.add_argument(
    "--on",
    metavar="TARGETS",
    help="say which casts survive on devices that are not here, such as "
    "h200,v5e; nothing is run",
  )
  parser.add_argument(
    "--make-compilers",
    metavar="FOLDER",
    help="install XLA's compilers for GPUs and TPUs, for --on and for "
    "ols.instruments.compile_report",
  )
  parser.set_defaults(run=functools.partial(_run, parser))


def _run(parser: _parser.Parser, options: argparse.Namespace) -> int:
  """Does what is asked for, or else describes what is here."""
  try:
    if options.make_compilers is not None:
      made = compiling.make(
        options.make_compilers,
        lambda x: print(f"{_SIZE} {printable(x)}", flush=True),
      )
      print(f"Now set {compiling.VARIABLE}={printable(shlex.quote(made))}")
    if options.on is not None:
      _print_narrowings(options.on)
  except (RuntimeError, ValueError) as error:
    parser.error(str(error))
  is_done = (options.make_compilers, options.on) != (None, None)
  return 0 if is_done else _describe(parser)


def _print_narrowings(targets: str) -> None:
  """Prints which casts the compilers keep for some targets."""
  ways = {
    "cast back": lambda x: x,
    "barrier": lax.optimization_barrier,
    "bits": lambda x: lax.bitcast_convert_type(
      lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), x.dtype
    ),
  }

  def casts(*arrays: jax.Array) -> list[jax.Array]:
    results = []
    for (name, way), x in zip(ways.items(), arrays, strict=True):
      with jax.named_scope(name):
        results += [way(x.astype(y)).astype(x.dtype) for y in formats.NARROW]
    return results

  # Equal casts of one array would become one.
  arrays = [jax.ShapeDtypeStruct((1024,), jnp.float32)] * len(ways)
  try:
    report = ols.instruments.compile_report(casts, *arrays, targets=targets)
  except OSError as error:  # The temporary folder is full, for example.
    raise RuntimeError(f"The compilers must start, got: {error}") from error
  versions = ", ".join(f"{name} {y}" for name, y in report.versions.items())
  print(f"Compiled, not timed: {versions}")
  for target, step in report.steps.items():
    rows = [(target, *ways)]
    if step.error:
      rows.append((f"it does not compile: {step.error}",))
    kept = {(x.narrow, x.scope): x.kept for x in step.narrowings}
    for dtype in formats.NARROW if kept else ():
      rows.append((dtype, *(_FATES[kept[dtype, way]] for way in ways)))
    print("", *tables.aligned(rows, "<" + "<" * len(ways)), sep="\n")
  print(f"\n{_WAYS}")


def _describe(parser: _parser.Parser) -> int:
  """Prints what to use here, then what was measured."""
  names = ("jax", "jaxlib", "optax", "flax", "chex")
  versions = "\n".join(
    [
      f"python {platform.python_version()}",
      f"optax_lossscale {ols.__version__}",
      *(f"{name} {metadata.version(name)}" for name in names),
    ]
  )
  try:
    kinds = collections.Counter(x.device_kind for x in parser.find_devices())
  except _parser.BadInputError:
    print(versions)  # They may be the reason.
    raise
  seen = ols.hardware.probe()
  print(_ADVICE[getattr(seen.preferred_dtype, "name", "unknown")])
  if seen.check(jnp.float16).saturating:
    print("For float16 use check=ols.saturated(jnp.float16) here.")
  else:
    print("For float16 the default check is the right one here.")
  counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
  print(f"\n{versions}\ndevices: {counts}\n\n{seen}\n\n{_LEGEND}")
  return 0
