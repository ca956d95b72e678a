"""The figures of the update phase, from what was measured to the tables."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import statistics
from typing import Any

from benchmarks import cases
from benchmarks import checks
from benchmarks import measurement
from benchmarks import rounds
from benchmarks.peers import PEERS

COLUMNS = (
  "",
  "ms",
  "times bare",
  "quartiles",
  "temporaries",
  "trace s",
  "compile s",
  "compile, times bare",
)

Row = dict[str, Any]


def summarize(
  case: cases.Case, results: Mapping[str, measurement.Result]
) -> dict[str, Any]:
  """Returns the case and its contenders, for JSON.

  Args:
    case: what was measured.
    results: of each contender, by name, with the bare ones among them.
  """
  return {
    **dataclasses.asdict(case),
    "title": case.title,
    "parameters": case.parameters,
    "contenders": [
      _row(case, result, results[PEERS[result.name].baseline])
      for result in results.values()
    ],
  }


def cells(row: Row) -> list[str]:
  """Returns a row of the table of a case, under `COLUMNS`.

  Args:
    row: a contender that was measured, as `summarize` returns it.
  """
  failed = row["check"] and not row["check"]["passed"]
  ratio = row["ratio"]
  return [
    f"{row['name']} (its check failed)" if failed else row["name"],
    _cell(row["median_seconds"], ".2f", times=1e3),
    _cell(ratio and ratio["median"], ".3f"),
    f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "-",
    _cell(row["temporaries_percent"], ".2f", unit=" %"),
    _cell(row["trace_seconds"], ".2f"),
    _cell(row["compile_seconds"], ".2f"),
    _cell(row["compilation_ratio"], ".2f"),
  ]


def overview(
  summaries: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]]]:
  """Returns the header and the rows of a table of all cases: the ratios.

  Args:
    summaries: of the cases, with the same contenders in each.
  """
  header = [
    "times bare",
    *(f"{s['name']}, {s['gradients']}" for s in summaries),
  ]
  rows: dict[str, list[str]] = {}
  for summary in summaries:
    for row in summary["contenders"]:
      ratio = row["ratio"]
      rows.setdefault(row["name"], [row["name"]]).append(
        _cell(ratio and ratio["median"], ".3f")
      )
  return header, list(rows.values())


def all_checks_passed(summaries: Sequence[Mapping[str, Any]]) -> bool:
  """Returns whether everybody who was measured does what it is measured doing.

  Args:
    summaries: of the cases.
  """
  return all(
    row["check"]["passed"]
    for summary in summaries
    for row in summary["contenders"]
    if row["check"]
  )


def _row(
  case: cases.Case, result: measurement.Result, baseline: measurement.Result
) -> Row:
  cost = result.cost
  temporary_bytes = cost and cost.temporary_bytes
  both = not result.problem and not baseline.problem
  ratios = rounds.ratios(result.seconds, baseline.seconds) if both else []
  return {
    "name": result.name,
    "baseline": baseline.name,
    "problem": result.problem,
    "check": result.check and _check(result.check),
    "median_seconds": _median(result.seconds),
    "ratio": rounds.quartiles(ratios)._asdict() if ratios else None,
    "temporary_bytes": temporary_bytes,
    "temporaries_percent": (
      None
      if temporary_bytes is None
      else 100 * temporary_bytes / case.parameter_bytes
    ),
    "trace_seconds": cost and cost.trace_seconds,
    "compile_seconds": cost and cost.compile_seconds,
    "compilation_ratio": (
      cost.seconds / baseline.cost.seconds if cost and baseline.cost else None
    ),
    "seconds": result.seconds,
  }


def _check(check: checks.Check) -> Row:
  # JSON has no NaN. Then the check has failed as well, and says so.
  known = math.isfinite(check.difference)
  return {
    "difference": check.difference if known else None,
    "skips": check.skips,
    "passed": check.passed,
  }


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None


def _cell(
  value: float | None, form: str, *, times: float = 1, unit: str = ""
) -> str:
  return "-" if value is None else f"{value * times:{form}}{unit}"
