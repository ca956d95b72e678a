"""Which runs the options of `train` ask for."""

import argparse
from typing import NamedTuple

from optax_lossscale.cli import _accelerate
from optax_lossscale.cli import _loss_scale
from optax_lossscale.cli import _parser

# The usual interval is 2000 steps. With these S moves within the few steps of a
# run: on the text it grows, and on the digits it also overflows.
_GROWTH_INTERVALS = {"text": 20, "digits": 50}
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


class RunOptions(NamedTuple):
  """What was asked of one run.

  Attributes:
    precision: the dtype that the model computes in, or that a level lowers to.
    level: of autocast; None is no autocast.
    loss_scale: the rule.
    check: None is the default one; on saturating hardware it is always named.
    accelerate: the precision schedule; None is one precision throughout.
    target_loss: of the schedule, in its mode "loss".
  """

  precision: str
  level: str | None
  loss_scale: _loss_scale.LossScaleOption
  check: str | None
  accelerate: str | None = None
  target_loss: float | None = None


def runs(
  parser: _parser.Parser, arguments: argparse.Namespace
) -> list[RunOptions]:
  """Returns the runs, after checking what argparse cannot."""
  _accelerate.check(parser, arguments)
  if arguments.accelerate is not None:
    return _accelerated(arguments)
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


def _one(parser: _parser.Parser, arguments: argparse.Namespace) -> RunOptions:
  precision = arguments.precision or "float16"
  loss_scale, check = arguments.loss_scale, arguments.check
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
  return RunOptions(precision, arguments.level, loss_scale, check)


def _compared(arguments: argparse.Namespace) -> list[RunOptions]:
  """Returns the runs of a comparison."""
  rules: tuple[str, ...]
  checks: tuple[str | None, ...]
  if arguments.hardware == "saturating":
    rules = _SATURATING_RULES[arguments.task]
    checks = ("nonfinite", "saturated")
  else:
    interval = _GROWTH_INTERVALS[arguments.task]
    rules = ("fixed:1024", f"dynamic:growth_interval={interval}")
    checks = (None,)
  if arguments.check is not None:
    checks = (arguments.check,)
  none = _loss_scale.parse("none")
  return [
    RunOptions("float32", None, none, None),
    RunOptions("float16", arguments.level, none, None),
    *(
      RunOptions("float16", arguments.level, _loss_scale.parse(rule), check)
      for rule in rules
      for check in checks
    ),
  ]


def _accelerated(arguments: argparse.Namespace) -> list[RunOptions]:
  """Returns float32, the low precision, and the one that becomes the other."""
  option = arguments.accelerate
  loss_scale = arguments.loss_scale
  if loss_scale is None:
    interval = _GROWTH_INTERVALS[arguments.task]
    is_float16 = option.precision == "float16"
    loss_scale = _loss_scale.parse(
      f"dynamic:growth_interval={interval}" if is_float16 else "none"
    )
  low = RunOptions(
    option.precision, arguments.level or "O1", loss_scale, arguments.check
  )
  return [
    RunOptions("float32", None, _loss_scale.parse("none"), None),
    low,
    low._replace(accelerate=option.text, target_loss=arguments.target_loss),
  ]
