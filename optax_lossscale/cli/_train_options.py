"""The options of `train`."""

import argparse
import pathlib

from optax_lossscale.cli import _accelerate
from optax_lossscale.cli import _loss_scale
from optax_lossscale.cli import _parser

_TASKS = ("text", "digits")
_PRECISIONS = ("float32", "float16", "bfloat16")
_LEVELS = ("O0", "O1", "O2", "O3", "auto", "OD")
_HARDWARE = ("ieee", "saturating")
_CHECKS = ("nonfinite", "saturated")


def add(parser: argparse.ArgumentParser) -> None:
  """Adds all of them."""
  _add_what(parser)
  _add_compare(parser)
  _add_accelerate(parser)
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
    help="train once, with the model computing in this dtype, or with this one "
    "as the low dtype of a --level (default: float16 if there is a --level or "
    "a --loss-scale)",
  )
  parser.add_argument(
    "--level",
    type=_parser.one_of(_LEVELS, "level"),
    metavar="|".join(_LEVELS),
    help="train once, with a model written in float32 that autocast puts into "
    "float16, or into bfloat16 if that is the --precision: nothing of it (O0, "
    "float32 in any case), matrix products, convolutions and what follows them "
    "(O1), all but norms and the loss (O2), all but the loss (O3), what "
    "MindSpore's lists tell (auto), or products alone (OD) (default: no "
    "autocast; the model itself computes in the --precision)",
  )
  parser.add_argument(
    "--loss-scale",
    type=_loss_scale_option,
    metavar="RULE",
    help="train once, with this rule: none, fixed:1024, dynamic, "
    "dynamic:init_scale=2**15,growth_interval=200, one that goes by amax, "
    "headroom, log_max, histogram, or a preset, megatron:initial_scale=2**20, "
    "also behind warm_start: (default: dynamic if something is float16, "
    "none with --precision float32 or bfloat16 and with --level O0)",
  )


def _add_compare(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--compare",
    action="store_true",
    help="train in float32, and in float16 without loss scaling, with a fixed "
    "and with a dynamic loss scale (default if there is neither a --precision, "
    "nor a --level, nor a --loss-scale, nor an --accelerate); with --level the "
    "runs in float16 are at this level; with --hardware saturating they have "
    "other rules, each with both checks",
  )


def _add_accelerate(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--accelerate",
    type=_accelerate_option,
    metavar="TYPE|MODE|RATIO",
    help="train in float32, in low precision, and in low precision that "
    "becomes float32 on the way: float16 (fast) or bfloat16 (fast1), for a "
    "part of the steps, as in 'fast|step|0.9', or until the loss is so many "
    "times the --target-loss, as in 'fast1|loss|1.05'; in quotes, for the "
    "shell; --level is that of the low precision (default: O1), --loss-scale "
    "the rule of float16; experimental",
  )
  parser.add_argument(
    "--target-loss",
    type=_parser.positive,
    metavar="LOSS",
    help="what --accelerate in mode loss goes by: the loss that training "
    "without it ends at",
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


def _accelerate_option(text: str) -> _accelerate.AccelerateOption:
  try:
    return _accelerate.parse(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def _loss_scale_option(text: str) -> _loss_scale.LossScaleOption:
  try:
    return _loss_scale.parse(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error
