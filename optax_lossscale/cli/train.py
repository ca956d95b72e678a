"""`optax-lossscale train`: train a model with and without loss scaling."""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import importlib
import pathlib
import signal
from typing import Any
from typing import NamedTuple

from optax_lossscale._base import ctrl_c
from optax_lossscale._precision import ascend_grammar
from optax_lossscale.cli import _loss_scale
from optax_lossscale.cli import _parser
from optax_lossscale.demo import run as run_lib

_DEMO_PACKAGES = ("rich", "matplotlib", "sklearn")
_TASKS = ("brier", "text", "digits")
_PRECISIONS = ("float32", "float16", "bfloat16")
_LEVELS = ("O0", "O1", "O2", "O3", "auto", "OD")
_CHECKS = ("nonfinite", "saturated")
_FLOAT32 = run_lib.Run("float32", "none", None)

# The usual interval is 2000 steps. With these S moves within the few steps of a
# run: on the text it grows, and in the other tasks it also overflows.
_GROWTH_INTERVALS = {"brier": 12, "text": 20, "digits": 50}
# On saturating hardware the rules of a comparison are trained with both checks.
# 2**32 is where S starts in scripts for such hardware, and too large here. On
# Python's sources nothing overflows with the other rules, so they are left out.
_SATURATING_RULES = {
  "brier": ("dynamic:2**32,growth_interval=12",),
  "text": ("dynamic:2**32,growth_interval=20",),
  "digits": (
    "fixed:1024",
    "dynamic:growth_interval=50",
    "dynamic:2**32,growth_interval=50",
  ),
}

# Below the options of `--help`.
_NEXT = """\
Commands to try next:
  {command} train --task text
      trains a transformer on the cross-entropy; takes a few minutes
  {command} train --loss-scale headroom --output my-run
      trains once, with a rule of your choice
  {command} simulate optax-lossscale-output/brier.csv --advise
      replays the recorded run with other rules, without training
"""


class _Accelerate(NamedTuple):
  """A precision schedule as the user wrote it, and what that says."""

  text: str
  precision: str  # The low one, "float16" or "bfloat16".
  mode: str  # "step" or "loss".

  @classmethod
  def parse(cls, text: str) -> "_Accelerate":
    """Returns what a text says."""
    dtype, mode, _ = ascend_grammar.parse(text)
    return cls(text, dtype.name, mode)


def add_parser(subparsers: Any) -> None:
  """Adds the sub-command."""
  parser = subparsers.add_parser(
    "train",
    help="train a model with and without loss scaling",
    description=(
      "Trains a Flax model on real data, prints a comparison, and saves it as "
      "a picture and as data."
    ),
    epilog=_NEXT.format(command=_parser.command()),
  )
  _add_what(parser)
  _add_accelerate(parser)
  _add_how(parser)
  parser.add_argument(
    "--output",
    type=pathlib.Path,
    default=pathlib.Path("optax-lossscale-output"),
    metavar="DIR",
    help="where TASK.png, TASK.csv and TASK.json go; files of these names are "
    "replaced (default: optax-lossscale-output)",
  )
  parser.set_defaults(run=functools.partial(_train, parser))


def _train(parser: _parser.Parser, arguments: argparse.Namespace) -> int:
  """Checks what argparse cannot, cheap things first, then trains."""
  runs = _runs(parser, arguments)
  parser.require(_DEMO_PACKAGES)
  # Only now, so that bad input is answered at once and without the extra.
  from optax_lossscale.demo import comparison

  module = importlib.import_module(f"optax_lossscale.demo.{arguments.task}")
  try:
    task = module.make_task(quick=arguments.quick)
  except FileNotFoundError as error:
    parser.error(f"argument --task: {error}")
  plan = comparison.Comparison(
    task=task,
    runs=runs,
    seeds=range(arguments.seed, arguments.seed + arguments.seeds),
    steps=arguments.steps or task.steps,
    quick=arguments.quick,
    saturating=arguments.hardware == "saturating",
  )
  with parser.writing(arguments.output):
    _parser.make_writable(plan.paths(arguments.output))
  if signal.getsignal(signal.SIGINT) is ctrl_c.end:  # From now on it saves.
    signal.signal(signal.SIGINT, signal.default_int_handler)
  results = comparison.train(plan)
  if not results.runs:
    print("Interrupted before the first step: there is nothing to save.")
    return 130
  try:
    # The files first: after Ctrl-C nobody may be reading what is printed.
    with parser.writing(arguments.output):
      paths = comparison.write(plan, results, arguments.output)
  finally:
    comparison.show(plan, results)
  for path in paths:
    print(f"wrote {path}")
  if results.interrupted:
    print("Interrupted: these are the results up to then.")
    return 130
  return 0


def _add_what(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--task",
    choices=_TASKS,
    metavar="|".join(_TASKS),
    default=_TASKS[0],
    help="a small language model trained on the Brier score, a transformer "
    "trained on the cross-entropy, both on Python's own sources, or LeNet-5 on "
    "handwritten digits (default: brier)",
  )
  parser.add_argument(
    "--precision",
    choices=_PRECISIONS,
    metavar="|".join(_PRECISIONS),
    help="train once, with the model computing in this dtype; with --level, "
    "with this as its low dtype (default: float16 with --level or "
    "--loss-scale)",
  )
  parser.add_argument(
    "--level",
    choices=_LEVELS,
    metavar="|".join(_LEVELS),
    help="train once, with a float32 model under autocast, which lowers to "
    "float16, or to bfloat16 with --precision bfloat16: nothing (O0), matrix "
    "products, convolutions and the operations that follow them (O1), all but "
    "norms, sums and the loss (O2), all but sums and the loss (O3), the "
    "operations in MindSpore's lists (auto), or only products (OD) (default: "
    "no autocast; the model itself computes in the --precision)",
  )
  parser.add_argument(
    "--loss-scale",
    type=_parser.as_type(_loss_scale.parse),
    metavar="RULE",
    help="train once, with this rule: none, fixed:1024, dynamic, "
    "dynamic:init_scale=2**15,growth_interval=200, a rule that follows amax "
    "(headroom, log_max, histogram), or a preset, "
    "megatron:initial_scale=2**20; warm_start: may go before any of them; "
    "quote a rule that contains * (default: dynamic in float16, none with "
    "--precision float32 or bfloat16 and with --level O0)",
  )
  parser.add_argument(
    "--compare",
    action="store_true",
    help="train in float32, and in float16 without loss scaling, with a fixed "
    "and with a dynamic loss scale (default without --precision, --level, "
    "--loss-scale and --accelerate); with --level, the float16 runs use that "
    "level; with --hardware saturating, they use other rules, each with both "
    "checks",
  )


def _add_accelerate(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--accelerate",
    type=_parser.as_type(_Accelerate.parse),
    metavar="TYPE|MODE|RATIO",
    help="train in float32, in low precision, and in low precision that "
    "becomes float32 on the way: float16 (fast) or bfloat16 (fast1), for a "
    "part of the steps, as in 'fast|step|0.9', or until the loss is at most "
    "RATIO times the --target-loss, as in 'fast1|loss|1.05'; quote it for the "
    "shell; --level is the level of the low precision (default: O1), "
    "--loss-scale the rule of float16; experimental",
  )
  parser.add_argument(
    "--target-loss",
    type=_parser.positive,
    metavar="LOSS",
    help="for --accelerate in mode loss: the loss at which training without "
    "it ends",
  )


def _add_how(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--hardware",
    choices=_parser.HARDWARE,
    metavar="|".join(_parser.HARDWARE),
    default="ieee",
    help="how float16 is computed: as on this machine, or emulated as on "
    "hardware in saturation mode, with 65504 instead of inf and 0 instead of "
    "NaN; float32 and bfloat16 do not change (default: ieee)",
  )
  parser.add_argument(
    "--check",
    choices=_CHECKS,
    metavar="|".join(_CHECKS),
    help="the values that count as an overflow: inf and NaN, or the largest "
    "finite value too (default: nonfinite; with --hardware saturating, "
    "saturated, and both in a comparison)",
  )
  parser.add_argument(
    "--steps",
    type=_parser.integer(1),
    metavar="N",
    help="steps of each run (default: depends on the task)",
  )
  parser.add_argument(
    "--seed",
    type=_parser.integer(0),
    default=0,
    metavar="N",
    help="seed of the first parameters and of the batches (default: 0)",
  )
  parser.add_argument(
    "--seeds",
    type=_parser.integer(1),
    default=1,
    metavar="N",
    help="number of seeds to train with, from --seed on (default: 1)",
  )
  parser.add_argument(
    "--quick",
    action="store_true",
    help="train for fewer steps, and with a smaller batch in the text task",
  )


def _runs(
  parser: _parser.Parser, arguments: argparse.Namespace
) -> list[run_lib.Run]:
  """Returns the runs, after checking what argparse cannot."""
  if arguments.accelerate is not None:
    for option, problem in _problems(arguments, arguments.accelerate):
      parser.error(f"argument {option}: {problem}")
    return _accelerated(arguments)
  if arguments.target_loss is not None:
    parser.error(
      "argument --target-loss: it belongs to --accelerate in mode 'loss'; add "
      "that, as in --accelerate 'fast|loss|1.05', or leave it out"
    )
  precision, level = arguments.precision, arguments.level
  if arguments.compare and (precision or arguments.loss_scale):
    parser.error(
      "argument --compare: it trains in several precisions, so it does not go "
      "with --precision or --loss-scale"
    )
  if level is not None and precision == "float32":
    parser.error(
      "argument --level: it lowers a model that is written in float32, so it "
      "does not go with --precision float32; leave --precision out, or give "
      "float16 or bfloat16"
    )
  single = precision or level or arguments.loss_scale
  if arguments.compare or not single:
    return _compared(arguments)
  return [_one(parser, arguments)]


def _one(parser: _parser.Parser, arguments: argparse.Namespace) -> run_lib.Run:
  precision = arguments.precision or "float16"
  loss_scale: _loss_scale.LossScaleOption = arguments.loss_scale
  check = arguments.check
  if loss_scale is None:
    # O0 lowers nothing.
    is_float16 = precision == "float16" and arguments.level != "O0"
    loss_scale = _loss_scale.parse("dynamic" if is_float16 else "none")
  if loss_scale.rule is None:
    if check is not None:
      parser.error(
        "argument --check: without loss scaling there is no check; give a "
        "--loss-scale, such as dynamic"
      )
  elif check is None and arguments.hardware == "saturating":
    check = "saturated"
  return run_lib.Run(precision, *loss_scale, check=check, level=arguments.level)


def _compared(arguments: argparse.Namespace) -> list[run_lib.Run]:
  """Returns the runs of a comparison."""
  rules: tuple[str, ...]
  checks: tuple[str | None, ...]
  if arguments.hardware == "saturating":
    rules = _SATURATING_RULES[arguments.task]
    checks = _CHECKS
  else:
    interval = _GROWTH_INTERVALS[arguments.task]
    rules = ("fixed:1024", f"dynamic:growth_interval={interval}")
    checks = (None,)
  if arguments.check is not None:
    checks = (arguments.check,)
  unscaled = run_lib.Run("float16", "none", None, level=arguments.level)
  return [
    _FLOAT32,
    unscaled,
    *(
      run_lib.Run("float16", *_loss_scale.parse(rule), check, arguments.level)
      for rule in rules
      for check in checks
    ),
  ]


def _accelerated(arguments: argparse.Namespace) -> list[run_lib.Run]:
  """Returns float32, the low precision, and the one that becomes the other."""
  option = arguments.accelerate
  loss_scale: _loss_scale.LossScaleOption = arguments.loss_scale
  if loss_scale is None:
    interval = _GROWTH_INTERVALS[arguments.task]
    is_float16 = option.precision == "float16"
    loss_scale = _loss_scale.parse(
      f"dynamic:growth_interval={interval}" if is_float16 else "none"
    )
  low = run_lib.Run(
    option.precision,
    *loss_scale,
    check=arguments.check,
    level=arguments.level or "O1",
  )
  accelerated = dataclasses.replace(
    low, accelerate=option.text, target_loss=arguments.target_loss
  )
  return [_FLOAT32, low, accelerated]


def _problems(
  arguments: argparse.Namespace, option: _Accelerate
) -> Iterator[tuple[str, str]]:
  """Yields the options that do not go with it, and why."""
  if arguments.compare:
    yield (
      "--compare",
      "--accelerate compares three runs of its own; leave one of them out",
    )
  if arguments.precision is not None:
    yield (
      "--precision",
      f"--accelerate tells it, {option.text!r} is {option.precision}; leave it "
      "out",
    )
  if arguments.level == "O0":
    yield (
      "--level",
      "O0 lowers nothing, so --accelerate would have nothing to switch; leave "
      "it out for O1, or give another one",
    )
  if arguments.hardware == "saturating":
    yield (
      "--hardware",
      "saturation mode is emulated for a whole run, so it does not go with "
      "--accelerate; leave one of them out",
    )
  if option.mode == "loss" and arguments.target_loss is None:
    yield (
      "--target-loss",
      "--accelerate needs it in mode 'loss'; give the loss that training "
      "without --accelerate ends at",
    )
  if option.mode == "step" and arguments.target_loss is not None:
    yield (
      "--target-loss",
      "--accelerate in mode 'step' goes by the steps; leave it out, or give "
      "mode 'loss'",
    )
  given = arguments.loss_scale
  is_scaled = option.precision == "float16"
  not_scaled = f"{option.text!r} is {option.precision}, which is not scaled"
  if is_scaled and given is not None and given.rule is None:
    yield (
      "--loss-scale",
      "with --accelerate float16 is scaled; give fixed:1 if it is not to be",
    )
  if not is_scaled and given is not None and given.rule is not None:
    yield "--loss-scale", f"{not_scaled}; leave it out"
  if not is_scaled and arguments.check is not None:
    yield (
      "--check",
      f"{not_scaled}, and then there is no check; leave it out",
    )
