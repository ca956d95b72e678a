"""`optax-lossscale simulate`: replays recorded runs with other rules."""

import argparse
import functools
import io
import math
import pathlib
import textwrap
from typing import Any

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale.cli import _loss_scale
from optax_lossscale.cli import _parser
from optax_lossscale.instruments import history_files

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")
_PICTURES = (".png", ".pdf", ".svg")
_DEFAULT_RULES = ("dynamic", "headroom")


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
  _add_input(parser)
  parser.add_argument(
    "--rule",
    type=_parser.as_type(_parse_rule),
    action="append",
    metavar="RULE",
    help="a rule to replay, as for train --loss-scale; may be repeated "
    "(default: dynamic and headroom)",
  )
  parser.add_argument(
    "--advise",
    action="store_true",
    help="say as well what to change in the arguments of each rule",
  )
  parser.add_argument(
    "--output",
    type=_picture_option,
    metavar="PICTURE",
    help="draw S over the steps, with lost steps and the largest S that each "
    "step allows, as a .png, .pdf or .svg; a file of this name is replaced",
  )
  parser.set_defaults(run=functools.partial(_run, parser))


def _add_input(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "history",
    nargs="+",
    type=pathlib.Path,
    metavar="HISTORY",
    help="a CSV or JSON file: what train wrote, or one with a column amax, "
    "scaled, and loss_scale (without it 1), overflow and step",
  )
  parser.add_argument(
    "--run",
    dest="label",
    metavar="LABEL",
    help="which run in the file (default: the first that has an amax)",
  )
  parser.add_argument(
    "--seed",
    type=_parser.integer(0),
    metavar="N",
    help="which seed of the run (default: the first)",
  )
  parser.add_argument(
    "--dtype",
    choices=_DTYPES,
    metavar="DTYPE",
    default="float16",
    help=f"of the computation that was recorded: {', '.join(_DTYPES)} "
    "(default: float16)",
  )
  parser.add_argument(
    "--hardware",
    choices=_parser.HARDWARE,
    metavar="|".join(_parser.HARDWARE),
    default="ieee",
    help="whether an overflow is inf, or the dtype's largest finite value "
    "(default: ieee)",
  )


def _run(parser: _parser.Parser, arguments: argparse.Namespace) -> int:
  """Runs the sub-command; reads every history before it replays any."""
  rules = dict(arguments.rule or map(_parse_rule, _DEFAULT_RULES))
  histories = {x: _read(parser, arguments, x) for x in arguments.history}
  parser.require(["rich"] + ["matplotlib"] * (arguments.output is not None))
  if arguments.output is not None:
    with parser.writing(arguments.output):
      _parser.make_writable([arguments.output])
  # Imported only now, so that bad input is reported even if rich is missing.
  from optax_lossscale.demo import table as table_lib

  console = table_lib.Console(highlight=False)
  # A file or a pipe gets one line for each fact.
  tell = functools.partial(
    console.print, soft_wrap=not console.is_terminal, markup=False
  )
  recorded: dict[str, Any] = {
    "dtype": arguments.dtype,
    "saturating": arguments.hardware == "saturating",
  }
  replays = {}
  for path, (history, choices) in histories.items():
    replays[path] = {
      text: instruments.replay(rule, history, **recorded)
      for text, rule in rules.items()
    }
    tell(f"{path}, {len(history.step)} steps")
    for kind, (first, *others) in choices.items():
      listed = ", ".join(others)
      tell(f"  {kind} {first} is the first; --{kind} takes another: {listed}")
    console.print(_make_table(replays[path]))
    if arguments.advise:
      for text, rule in rules.items():
        own = _history_of(replays[path][text], history)
        tell(f"{text}:")
        advice = [*map(str, instruments.advise(own, rule, **recorded))]
        for line in advice or ["nothing to change"]:
          tell(f"  {line}")
      console.print()
  console.print(
    f"Headroom: bits of {arguments.dtype}'s range above amax that clean steps "
    "leave unused; least: on the step closest to overflow; worst: on the step "
    "that leaves most."
  )
  if arguments.output is not None:
    with parser.writing(arguments.output):
      _write_figure(arguments.output, replays)
    tell(f"wrote {arguments.output}")
  return 0


def _read(
  parser: _parser.Parser, arguments: argparse.Namespace, path: pathlib.Path
) -> tuple[instruments.History, dict[str, list[str]]]:
  try:
    return history_files.read_first(path, arguments.label, arguments.seed)
  except OSError as error:
    parser.error(f"argument HISTORY: {error.strerror}: {path}")
  except ValueError as error:
    parser.error(f"argument HISTORY: {error}")


def _history_of(
  replay: instruments.Replay, recorded: instruments.History
) -> instruments.History:
  """Returns the replayed history if the recorded S is that of another rule."""
  scales = recorded.loss_scale
  of_another = scales[:1] != replay.history.loss_scale[:1]
  is_moved = (scales != scales[:1]).any()
  return replay.history if is_moved and of_another.any() else recorded


def _make_table(replays: dict[str, instruments.Replay]) -> Any:
  """Returns a table with a row for each rule."""
  from optax_lossscale.demo import table as table_lib

  table = table_lib.new_table(
    "rule",
    (
      "steps lost",
      "mean headroom",
      "least headroom",
      "worst headroom",
      "steps stalled",
      "last S",
    ),
  )
  for text, replay in replays.items():
    table.add_row(
      table_lib.fold(text, 24),  # Beside the figures in 80 columns.
      str(replay.lost_steps),
      _bits(replay.mean_headroom),
      _bits(replay.least_headroom),
      _bits(replay.worst_headroom),
      str(replay.stalled_steps),
      table_lib.power_of_two(float(replay.history.loss_scale[-1])),
    )
  return table


def _write_figure(
  path: pathlib.Path,
  replays: dict[pathlib.Path, dict[str, instruments.Replay]],
) -> None:
  """Draws one panel for each history."""
  from matplotlib.figure import Figure

  from optax_lossscale import plot
  from optax_lossscale.plot import axes as axes_lib

  height = 3.6 + 0.2 * max(map(len, replays.values()))
  figure = Figure(figsize=(8, height * len(replays)), layout="constrained")
  column = figure.subplots(len(replays), 1, squeeze=False)[:, 0]
  for (name, by_rule), axes in zip(replays.items(), column, strict=True):
    folded = {textwrap.fill(rule, 70): by_rule[rule] for rule in by_rule}
    plot.replays(folded, ax=axes)
    axes.set_title(str(name), fontsize="medium")
    # The legend goes below the axes, since long rules would hide the lines.
    axes_lib.legend_beside(axes, "upper left", (0.0, -0.16))
  picture = io.BytesIO()  # Saved to memory, since the PDF writer hides OSError.
  figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150)
  path.write_bytes(picture.getvalue())


def _picture_option(text: str) -> pathlib.Path:
  path = pathlib.Path(text)
  if path.suffix.lower() not in _PICTURES:
    raise argparse.ArgumentTypeError(
      f"must end in {', '.join(_PICTURES)}, got {text!r}"
    )
  return path


def _parse_rule(text: str) -> tuple[str, ols.LossScale]:
  rule = _loss_scale.parse(text).rule
  if rule is None:
    raise ValueError(
      f"{text!r} means no loss scaling, so there is nothing to replay"
    )
  return text, rule


def _bits(headroom: float) -> str:
  return f"{headroom:.1f}" if math.isfinite(headroom) else "-"
