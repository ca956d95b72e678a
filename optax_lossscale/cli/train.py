"""`optax-lossscale train`: train a model with and without loss scaling."""

import argparse
import functools
import importlib
from typing import Any
from typing import NoReturn

from optax_lossscale.cli import _parser
from optax_lossscale.cli import _train_options
from optax_lossscale.cli import _train_runs

_DEMO_PACKAGES = ("rich", "matplotlib", "sklearn")


def add_parser(subparsers: Any) -> None:
  """Adds the sub-command."""
  parser = subparsers.add_parser(
    "train",
    help="train a model with and without loss scaling",
    description=(
      "Trains a Flax model on real data, prints a comparison, and saves it as "
      "a picture and as data."
    ),
  )
  _train_options.add(parser)
  parser.set_defaults(run=functools.partial(_run, parser))


def _run(parser: _parser.Parser, arguments: argparse.Namespace) -> int:
  """Checks what argparse cannot, cheap things first, then trains."""
  options = _train_runs.runs(parser, arguments)
  parser.require(_DEMO_PACKAGES)
  # Only now, so that bad input is answered at once and without the extra.
  from optax_lossscale.demo import comparison
  from optax_lossscale.demo import run as run_lib

  module = importlib.import_module(f"optax_lossscale.demo.{arguments.task}")
  try:
    task = module.make_task(quick=arguments.quick)
  except FileNotFoundError as error:
    parser.error(f"argument --task: {error}")
  plan = comparison.Comparison(
    task=task,
    runs=[
      run_lib.Run(precision, *loss_scale, check, level, accelerate, target)
      for precision, level, loss_scale, check, accelerate, target in options
    ],
    seeds=range(arguments.seed, arguments.seed + arguments.seeds),
    steps=arguments.steps or task.steps,
    quick=arguments.quick,
    saturating=arguments.hardware == "saturating",
  )
  try:
    _parser.make_writable(plan.paths(arguments.output))
  except OSError as error:
    _refuse_output(parser, arguments, error)
  results = comparison.train(plan)
  if not results.records:
    print("Interrupted before the first step: there is nothing to save.")
    return 130
  # The files first: after Ctrl-C nobody may be reading what is printed.
  try:
    paths = comparison.write(plan, results, arguments.output)
  except OSError as error:
    comparison.show(plan, results)
    _refuse_output(parser, arguments, error)
  comparison.show(plan, results)
  for path in paths:
    print(f"wrote {path}")
  if results.interrupted:
    print("Interrupted: this is what was recorded until then.")
    return 130
  return 0


def _refuse_output(
  parser: _parser.Parser, arguments: argparse.Namespace, error: OSError
) -> NoReturn:
  parser.error(
    f"argument --output: cannot write {error.filename or arguments.output}: "
    f"{error.strerror or error}"
  )
