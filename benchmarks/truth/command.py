"""Trains the rows that are missing, and shows the tables of those there are."""

import argparse
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
import platform
import shlex
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from benchmarks import machine
from benchmarks.truth import misses
from benchmarks.truth import page
from benchmarks.truth import results
from benchmarks.truth import settings
from benchmarks.truth import table
from benchmarks.truth import training
from benchmarks.truth import workload as workload_lib
from benchmarks.truth.workloads import WORKLOADS
import optax_lossscale as ols

# A CPU computes in float32 and rounds each result to float16. Unless told
# otherwise, it leaves out roundings to bfloat16 between two operations.
_FLAGS = "--xla_allow_excess_precision=false"


def main(argv: Sequence[str]) -> int:
  """Trains what has no file yet, then prints the tables.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code, 0.
  """
  arguments = _parse(argv)
  # Read when JAX first computes something.
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
  workloads = {name: make() for name, make in WORKLOADS.items()}
  for name, _ in _missing(workloads, arguments):
    _refuse_other_sources(name, workloads[name], arguments.rows)
  for name, setting in _missing(workloads, arguments):
    _train(name, workloads[name], setting, arguments)
  rows = {name: results.load(arguments.rows, name) for name in workloads}
  text = table.text(workloads, rows, arguments.rows)
  print(text)
  if arguments.appendix is not None:
    page.write(arguments.appendix, workloads, rows, arguments.rows, text)
  return 0


def _missing(
  workloads: Mapping[str, workload_lib.Workload], arguments: argparse.Namespace
) -> Iterator[tuple[str, str]]:
  """Yields the rows that were asked for and have no file."""
  for name, workload in workloads.items():
    usual = settings.of(full=workload.full, sixteen_bit=workload.sixteen_bit)
    for setting in settings.ALL:
      is_named = f"{name}/{setting}" in arguments.only
      is_meant = not arguments.only or name in arguments.only
      if not (is_named or (is_meant and setting in usual)):
        continue
      # Looked up late, since another process may have trained it meanwhile.
      if not results.path(arguments.rows, name, setting).exists():
        yield name, setting


def _refuse_other_sources(
  name: str, workload: workload_lib.Workload, folder: pathlib.Path
) -> None:
  """Exits if another Python, whose sources differ, made a workload's rows."""
  own = f"Python {platform.python_version()}"
  for row in results.load(folder, name).values():
    theirs = row.about["versions"].partition(",")[0]
    if workload.on_sources and theirs != own:
      command.Parser("truth").error(
        f"{name} trains on the sources of {own}, but its rows in {folder} were "
        f"made with those of {theirs}; use {theirs}, or --rows with an empty "
        "folder"
      )


def _train(
  name: str,
  workload: workload_lib.Workload,
  setting: str,
  arguments: argparse.Namespace,
) -> None:
  """Trains one row and writes it; with float32's also the screen."""
  print(f"{name}/{setting}:", end=" ", flush=True)
  started = time.monotonic()
  trained = training.train(
    workload, settings.ALL[setting], steps=arguments.steps
  )
  words = ["python", "-m", "benchmarks", "truth", "--only", f"{name}/{setting}"]
  if arguments.steps is not None:
    words.append(f"--steps={arguments.steps}")
  about = {
    "command": shlex.join(words),
    **machine.summary(),
    "seconds": f"{time.monotonic() - started:.0f}",
    "parameters": trained.digest,
  }
  if trained.found is not None:
    about |= results.describe(trained.found)
  if setting == settings.REFERENCE:
    screened, counted = _screen(workload, trained)
    results.write(
      results.path(arguments.rows, name, results.SCREEN), about, screened
    )
    results.write(
      results.path(arguments.rows, name, results.HISTOGRAM), about, counted
    )
  if setting == settings.REMAINDER:
    missed = misses.count(workload, steps=arguments.steps)
    results.write(
      results.path(arguments.rows, name, results.MISSED), about, missed
    )
  results.write(
    results.path(arguments.rows, name, setting), about, trained.points
  )
  print(f"{about['seconds']} s")


def _screen(
  workload: workload_lib.Workload, trained: training.Trained
) -> tuple[list[results.Screened], list[results.Counted]]:
  """Measures the gradient of the first seed's first and last parameters."""
  screened, counted = [], []
  # A batch of the training data that no step has seen.
  key = jax.random.key(2**31 - 1)
  for when, params in (("first", trained.first), ("last", trained.last)):
    batch = jax.jit(workload.draw)(key, params)
    for dtype in (jnp.float16, jnp.bfloat16):
      low_loss = ols.autocast(workload.loss, settings.LEVEL, dtype=dtype)
      found = ols.instruments.gradient_error(
        workload.loss, low_loss, loss_scales=settings.SCREENED
      )(params, batch)
      screened += [
        results.Screened(
          when, jnp.dtype(dtype).name, scale, error, found.zeros[scale]
        )
        for scale, error in found.errors.items()
      ]
    grads = jax.jit(jax.grad(workload.loss))(params, batch)
    stats = ols.instruments.leaf_stats(grads)
    by_exponent = np.sum(np.asarray(stats.counts), axis=0, dtype=np.int64)
    counted += [
      results.Counted(when, exponent, count)
      for exponent, count in [
        (results.ZERO, int(np.sum(stats.zeros))),
        *zip(stats.exponents.tolist(), by_exponent.tolist(), strict=True),
      ]
      if count
    ]
  return screened, counted


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = command.Parser(
    "truth",
    "Trains each workload in each setting that has no file yet, with "
    f"{settings.SEEDS} seeds,\nand prints the tables of all that have one. "
    "Interrupt it at any time: what is\nfinished is kept.\n\n"
    f"Workloads: {', '.join(WORKLOADS)}.\n"
    f"Settings: {', '.join(settings.ALL)}.",
  )
  parser.add_argument(
    "--only",
    nargs="+",
    default=[],
    metavar="NAME",
    choices=[
      *WORKLOADS,
      *(f"{name}/{setting}" for name in WORKLOADS for setting in settings.ALL),
    ],
    help="workloads, or single rows such as lstm/dynamic",
  )
  parser.add_argument(
    "--rows",
    type=command.folder,
    default=results.FOLDER,
    metavar="FOLDER",
    help=(
      "where the rows are, one file each; with an empty folder, all are "
      "trained again (default: those of the repository)"
    ),
  )
  parser.add_argument(
    "--steps",
    type=command.count,
    help="train fewer steps, to see it work; needs --rows",
  )
  parser.add_argument(
    "--appendix",
    type=page.folder,
    metavar="FOLDER",
    help=f"the folder of {page.NAME}, to renew its tables and its pictures",
  )
  arguments = parser.parse_args(argv)
  own = results.FOLDER.resolve()
  if arguments.steps is not None and arguments.rows.resolve() == own:
    parser.error(
      "--steps needs --rows: shorter rows must not pass for whole ones"
    )
  return arguments
