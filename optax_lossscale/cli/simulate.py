"""`optax-lossscale simulate`: replays recorded runs with other rules."""

import argparse
import functools
import math
import pathlib
import sys
from typing import Any
import warnings

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale._base import formats
from optax_lossscale._base import tables
from optax_lossscale._base.arguments import printable
from optax_lossscale.cli import _loss_scale
from optax_lossscale.cli import _parser

_DEFAULT_RULES = ("dynamic", "headroom")
_HEADER = (
  *("lost steps", "stalled steps", "headroom: mean", "least", "most"),
  *("last S", "rule"),
)
_LEGEND = """\
A lost step overflows. On a stalled one S should move but cannot. The headroom
of the other steps is in bits of {dtype}'s range above amax: the least is
closest to overflow, and the most leaves most of the range unused."""


def add_parser(subparsers: Any) -> None:
  """Adds the `simulate` sub-command to the parser."""
  parser = subparsers.add_parser(
    "simulate",
    help="replay a recorded run with other rules",
    description=(
      "Replays the amax of a recorded run through rules, and prints for each "
      "how many steps it loses and how much of the dtype's range it leaves "
      "unused. No replay shows how a lost step changes the training after it. "
      "A history with few overflows, recorded at a small S, is the best one."
    ),
  )
  parser.add_argument(
    "history",
    nargs="+",
    type=_path_option,
    metavar="HISTORY",
    help="a CSV file whose first line names the columns: amax, scaled, and "
    "optionally loss_scale (without it 1), overflow and step",
  )
  parser.add_argument(
    "--rule",
    type=_rule_option,
    action="append",
    metavar="RULE",
    help="a rule to replay: fixed:1024, dynamic, "
    "dynamic:init_scale=2**15,growth_interval=200, one that follows amax "
    "(headroom, log_max), or a preset, megatron:initial_scale=2**20; "
    "warm_start: may go before any of them; quote a rule that contains *; may "
    "be repeated (default: dynamic and headroom)",
  )
  parser.add_argument(
    "--dtype",
    choices=(*formats.NARROW, "float32"),
    default="float16",
    help="of the computation that was recorded (default: float16)",
  )
  parser.add_argument(
    "--hardware",
    choices=("ieee", "saturating"),
    default="ieee",
    help="whether an overflow is inf, or the dtype's largest finite value "
    "(default: ieee)",
  )
  parser.add_argument(
    "--advise",
    action="store_true",
    help="say as well what to change in the arguments of each rule",
  )
  parser.set_defaults(run=functools.partial(_run, parser))


def _run(parser: _parser.Parser, arguments: argparse.Namespace) -> int:
  """Runs the sub-command; reads every history before it replays any."""
  rules = dict(arguments.rule or map(_rule_option, _DEFAULT_RULES))
  histories = {x: _read(parser, x) for x in arguments.history}
  parser.find_devices()
  saturates = arguments.hardware == "saturating"
  check = (ols.saturated if saturates else ols.nonfinite)(arguments.dtype)
  for path, history in histories.items():
    replays = {
      text: instruments.replay(rule, history, check=check)
      for text, rule in rules.items()
    }
    print(f"{printable(path)}, {len(history.step)} steps\n{_table(replays)}\n")
    if arguments.advise:
      for text, rule in rules.items():
        own = _history_of(replays[text], history)
        advice = map(str, instruments.advise(own, rule, check=check))
        print(
          f"{printable(text)}:",
          *(list(advice) or ["nothing to change"]),
          sep="\n  ",
        )
      print()
  print(_LEGEND.format(dtype=arguments.dtype))
  return 0


def _read(parser: _parser.Parser, path: pathlib.Path) -> instruments.History:
  try:
    return instruments.read_history(path)
  except OSError as error:
    parser.error(f"argument HISTORY: {error.strerror}: {printable(path)}")
  except ValueError as error:
    parser.error(f"argument HISTORY: {error}")


def _history_of(
  replay: instruments.ReplayedRun, recorded: instruments.History
) -> instruments.History:
  """Returns the replayed history if the recorded S is that of another rule."""
  scales = recorded.loss_scale
  of_another = scales[:1] != replay.history.loss_scale[:1]
  is_moved = (scales != scales[:1]).any()
  return replay.history if is_moved and of_another.any() else recorded


def _table(replays: dict[str, instruments.ReplayedRun]) -> str:
  """Returns aligned columns of figures; rules may be long, so they are last."""
  rows = [_HEADER]
  for text, replay in replays.items():
    rows.append(
      (
        str(replay.lost_steps),
        str(replay.stalled_steps),
        _bits(replay.mean_headroom),
        _bits(replay.least_headroom),
        _bits(replay.worst_headroom),
        _power_of_two(float(replay.history.loss_scale[-1])),
        printable(text),
      )
    )
  return "\n".join(tables.aligned(rows, ">>>>>><"))


def _bits(headroom: float) -> str:
  return f"{headroom:.1f}" if math.isfinite(headroom) else "-"


def _power_of_two(value: float) -> str:
  """Returns a power of two as 2^n, and another number in digits."""
  mantissa, exponent = math.frexp(value)
  return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"


def _path_option(text: str) -> pathlib.Path:
  if not text:  # Path would make the current folder of it.
    raise argparse.ArgumentTypeError("must name a file, got ''")
  return pathlib.Path(text)


def _rule_option(text: str) -> tuple[str, ols.LossScale]:
  try:
    with warnings.catch_warnings(record=True) as caught:
      rule = _loss_scale.parse(text)
  except (ValueError, ols.WiringWarning) as error:  # An error by `python -W`.
    raise argparse.ArgumentTypeError(str(error)) from error
  for each in caught:  # Not with the line of argparse that made the rule.
    warning = f"warning: argument --rule: {each.message}"
    print(f"optax-lossscale simulate: {warning}", file=sys.stderr)
  return text, rule
