"""`optax-lossscale train`: train a model with and without loss scaling."""

import argparse
import functools
import importlib
import importlib.util
import pathlib
from typing import Any
from typing import NoReturn

from optax_lossscale.cli import _loss_scale
from optax_lossscale.cli import _parser

_PRECISIONS = ("float32", "float16", "bfloat16")
# The usual interval is 2000 steps. With these S moves within the few steps of a
# run: on the text it grows, and on the digits it also overflows.
_GROWTH_INTERVALS = {"text": 20, "digits": 50}
_TASKS = tuple(_GROWTH_INTERVALS)
_HARDWARE = ("ieee", "saturating")
_CHECKS = ("nonfinite", "saturated")
# On saturating hardware the rules of a comparison are trained with both checks.
# 2**32 is where S starts in scripts for such hardware, and too large here. The
# emulation doubles the time of the text, so only that rule is left there: with
# the others nothing overflows.
_SATURATING_RULES = {
  "text": ("dynamic:2**32,growth_interval=20",),
  "digits": (
    "fixed:1024",
    "dynamic:growth_interval=50",
    "dynamic:2**32,growth_interval=50",
  ),
}
_DEMO_PACKAGES = ("rich", "matplotlib", "sklearn")


def add_parser(subparsers: Any) -> None:
  """Adds the sub-command.

  Args:
    subparsers: what `add_subparsers` returned.
  """
  parser = subparsers.add_parser(
    "train",
    help="train a model with and without loss scaling",
    description=(
      "Trains a Flax model on real data, prints a comparison, and saves it as "
      "a picture and as data."
    ),
  )
  _add_what(parser)
  _add_hardware(parser)
  _add_how_long(parser)
  parser.add_argument(
    "--output",
    type=pathlib.Path,
    default=pathlib.Path("optax-lossscale-output"),
    metavar="DIR",
    help="where TASK.png, TASK.csv and TASK.json go; files of these names are "
    "replaced (default: optax-lossscale-output)",
  )
  parser.set_defaults(run=functools.partial(_run, parser))


def _add_what(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--task",
    type=_parser.one_of(_TASKS, "task"),
    default="text",
    metavar="|".join(_TASKS),
    help="a transformer on Python's own sources, or LeNet-5 on handwritten "
    "digits (default: text)",
  )
  parser.add_argument(
    "--precision",
    type=_parser.one_of(_PRECISIONS, "precision"),
    metavar="|".join(_PRECISIONS),
    help="train once, with the model computing in this dtype (default: float16 "
    "if there is a --loss-scale)",
  )
  parser.add_argument(
    "--loss-scale",
    type=_loss_scale_option,
    metavar="RULE",
    help="train once, with this rule: none, fixed:1024, dynamic, "
    "dynamic:init_scale=2**15,growth_interval=200, or a preset, "
    "megatron:initial_scale=2**20 (default: dynamic with "
    "--precision float16, none with the others)",
  )
  parser.add_argument(
    "--compare",
    action="store_true",
    help="train in float32, and in float16 without loss scaling, with a fixed "
    "and with a dynamic loss scale (default if there is neither a --precision "
    "nor a --loss-scale); with --hardware saturating with other rules, each "
    "with both checks",
  )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--hardware",
    type=_parser.one_of(_HARDWARE, "hardware"),
    default="ieee",
    metavar="|".join(_HARDWARE),
    help="how float16 is computed: as this machine does it, or emulated as by "
    "hardware in saturation mode, which makes 65504 of inf and 0 of NaN; "
    "float32 and bfloat16 stay as they are (default: ieee)",
  )
  parser.add_argument(
    "--check",
    type=_parser.one_of(_CHECKS, "check"),
    metavar="|".join(_CHECKS),
    help="what counts as an overflow: inf and NaN only, or the largest finite "
    "value as well (default: nonfinite; with --hardware saturating, saturated, "
    "and both in a comparison)",
  )


def _add_how_long(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--steps",
    type=_parser.integer(1),
    metavar="N",
    help="steps of each run (default: the task's)",
  )
  parser.add_argument(
    "--seed",
    type=_parser.integer(0),
    default=0,
    metavar="N",
    help="of the first parameters and of the batches (default: 0)",
  )
  parser.add_argument(
    "--seeds",
    type=_parser.integer(1),
    default=1,
    metavar="N",
    help="train with this many seeds, from --seed on (default: 1)",
  )
  parser.add_argument(
    "--quick",
    action="store_true",
    help="fewer steps, and on the text a smaller batch, to see it work",
  )


def _loss_scale_option(text: str) -> _loss_scale.LossScaleOption:
  try:
    return _loss_scale.parse(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def _run(parser: _parser.Parser, arguments: argparse.Namespace) -> int:
  """Checks what argparse cannot, cheap things first, then trains."""
  options = _options(parser, arguments)
  _check_demo_extra(parser)
  # Only now, so that bad input is answered at once and without the extra.
  from optax_lossscale.demo import comparison
  from optax_lossscale.demo import training

  module = importlib.import_module(f"optax_lossscale.demo.{arguments.task}")
  try:
    task = module.make_task(quick=arguments.quick)
  except FileNotFoundError as error:
    parser.error(f"argument --task: {error}")
  plan = comparison.Comparison(
    task=task,
    runs=[
      training.Run(precision, option.text, option.rule, check)
      for precision, option, check in options
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


def _options(
  parser: _parser.Parser, arguments: argparse.Namespace
) -> list[tuple[str, _loss_scale.LossScaleOption, str | None]]:
  """Returns the precision, the rule and the check of each run.

  No check is the default one. On saturating hardware it is always named.
  """
  precision, loss_scale = arguments.precision, arguments.loss_scale
  if precision is None and loss_scale is None:
    return _compared(arguments)
  if arguments.compare:
    parser.error(
      "argument --compare: it trains in several precisions, so it does not go "
      "with --precision or --loss-scale"
    )
  if precision is None:
    precision = "float16"
  if loss_scale is None:
    loss_scale = _loss_scale.parse(
      "dynamic" if precision == "float16" else "none"
    )
  check = arguments.check
  if loss_scale.rule is None:
    if check is not None:
      parser.error(
        "argument --check: without loss scaling there is no check; give a "
        "--loss-scale, such as dynamic"
      )
  elif check is None and arguments.hardware == "saturating":
    check = "saturated"
  return [(precision, loss_scale, check)]


def _compared(
  arguments: argparse.Namespace,
) -> list[tuple[str, _loss_scale.LossScaleOption, str | None]]:
  """Returns the same for the runs of a comparison."""
  rules: tuple[str, ...]
  checks: tuple[str | None, ...]
  if arguments.hardware == "saturating":
    rules, checks = _SATURATING_RULES[arguments.task], _CHECKS
  else:
    interval = _GROWTH_INTERVALS[arguments.task]
    rules = ("fixed:1024", f"dynamic:growth_interval={interval}")
    checks = (None,)
  if arguments.check is not None:
    checks = (arguments.check,)
  return [
    ("float32", _loss_scale.parse("none"), None),
    ("float16", _loss_scale.parse("none"), None),
    *(
      ("float16", _loss_scale.parse(rule), check)
      for rule in rules
      for check in checks
    ),
  ]


def _check_demo_extra(parser: _parser.Parser) -> None:
  for package in _DEMO_PACKAGES:
    if importlib.util.find_spec(package) is None:
      parser.error(
        f"it needs {package}, which is not installed: "
        'pip install "optax-lossscale[demo]"'
      )


def _refuse_output(
  parser: _parser.Parser, arguments: argparse.Namespace, error: OSError
) -> NoReturn:
  parser.error(
    f"argument --output: cannot write {error.filename or arguments.output}: "
    f"{error.strerror or error}"
  )
