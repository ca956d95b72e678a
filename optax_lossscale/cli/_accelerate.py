"""The option `--accelerate`: `fast|step|0.9`, and what goes with it."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from optax_lossscale._precision import accelerate_train_mode
from optax_lossscale.cli import _parser


class AccelerateOption(NamedTuple):
  """A precision schedule as the user wrote it, and what that says.

  Attributes:
    text: as `precision_schedule` takes it.
    precision: the low precision, "float16" or "bfloat16".
    mode: "step" or "loss".
  """

  text: str
  precision: str
  mode: str


def parse(text: str) -> AccelerateOption:
  """Returns what a text says."""
  dtype, mode, _ = accelerate_train_mode.parse(text)
  return AccelerateOption(text, dtype.name, mode)


def check(parser: _parser.Parser, arguments: argparse.Namespace) -> None:
  """Checks that `--accelerate` goes with the other options."""
  if arguments.accelerate is not None:
    for problems in (_problems, _scaling_problems):
      for option, problem in problems(arguments, arguments.accelerate):
        parser.error(f"argument {option}: {problem}")
  elif arguments.target_loss is not None:
    parser.error(
      "argument --target-loss: it belongs to --accelerate in mode 'loss'; add "
      "that, as in --accelerate 'fast|loss|1.05', or leave it out"
    )


def _problems(
  arguments: argparse.Namespace, option: AccelerateOption
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


def _scaling_problems(
  arguments: argparse.Namespace, option: AccelerateOption
) -> Iterator[tuple[str, str]]:
  """Yields what does not go with it because it is scaled, or is not."""
  rule = arguments.loss_scale
  if option.precision == "float16":
    if rule is not None and rule.rule is None:
      yield (
        "--loss-scale",
        "with --accelerate float16 is scaled; give fixed:1 if it is not to be",
      )
    return
  not_scaled = f"{option.text!r} is {option.precision}, which is not scaled"
  if rule is not None and rule.rule is not None:
    yield "--loss-scale", f"{not_scaled}; leave it out"
  if arguments.check is not None:
    yield (
      "--check",
      f"{not_scaled}, and then there is no check; leave it out",
    )
