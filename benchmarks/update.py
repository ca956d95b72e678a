"""`python -m benchmarks update`: the step after the backward pass, timed.

Every contender runs the same AdamW on the same scaled gradients, from them to
the next parameters: check, unscale, optimizer, skip, and the rule that moves S.
What it is compared with is the optimizer alone on the same gradients.
"""

import argparse
from collections.abc import Iterator
from collections.abc import Sequence
import shlex
from typing import Any

from benchmarks import cases
from benchmarks import command
from benchmarks import compilation
from benchmarks import measurement
from benchmarks import report
from benchmarks import summary
from benchmarks.peers import PEERS

_GRADIENTS = ("float16", "float32")


def main(argv: Sequence[str]) -> int:
  """Measures, prints the tables, and writes them as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code: 1 if somebody's check failed.
  """
  arguments = _parse(argv)
  names = _with_baselines(arguments.peers)
  path = arguments.out / "update.json"
  content = command.begin("update", argv)
  content |= {"rounds": arguments.rounds, "cases": []}
  for case in _cases(arguments):
    print(f"measuring {case.title}", flush=True)
    with compilation.without_persistent_cache():
      results = measurement.measure(case, names, arguments.rounds)
    content["cases"].append(summary.summarize(case, results))
    # After each case, since all of them may take half an hour.
    report.write(path, content)
  _show(content)
  print(f"wrote {path}")
  return 0 if summary.all_checks_passed(content["cases"]) else 1


def _cases(arguments: argparse.Namespace) -> Iterator[cases.Case]:
  for name in arguments.cases:
    for gradients in arguments.gradients:
      yield cases.make_case(name, gradients, tiny=arguments.tiny)


def _show(content: dict[str, Any]) -> None:
  print(f"\nmedians of {content['rounds']} rounds\n")
  for case in content["cases"]:
    measured = [row for row in case["contenders"] if not row["problem"]]
    report.show(
      case["title"], summary.COLUMNS, list(map(summary.cells, measured))
    )
    for row in case["contenders"]:
      if row["problem"]:
        print(f"not measured: {row['name']}: {row['problem']}")
    print()
  if len(content["cases"]) > 1:
    report.show("All cases", *summary.overview(content["cases"]))


def _with_baselines(peers: Sequence[str]) -> list[str]:
  """Returns these peers and those they are compared with, in one order."""
  wanted = {*peers, *(PEERS[name].baseline for name in peers)}
  return [name for name in PEERS if name in wanted]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = command.parser("update", __doc__, rounds=21)
  parser.add_argument(
    "--cases",
    nargs="+",
    choices=cases.NAMES,
    default=list(cases.NAMES),
    metavar="CASE",
    help=f"numbers of leaves, among {', '.join(cases.NAMES)}; each but "
    "the small ones holds 50 million parameters (default: all)",
  )
  parser.add_argument(
    "--gradients",
    nargs="+",
    choices=_GRADIENTS,
    default=list(_GRADIENTS),
    metavar="DTYPE",
    help="float16, float32 (default: both)",
  )
  parser.add_argument(
    "--peers",
    nargs="+",
    choices=tuple(PEERS),
    default=list(PEERS),
    metavar="NAME",
    help=f"among {shlex.join(PEERS)} (default: all that are installed)",
  )
  return parser.parse_args(argv)
