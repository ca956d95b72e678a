"""The tables: the screen, the scores in each setting, and the null rows."""

from collections.abc import Iterator
from collections.abc import Mapping
import math
import pathlib
import textwrap

import numpy as np

from benchmarks import report
from benchmarks.truth import misses
from benchmarks.truth import results
from benchmarks.truth import settings
from benchmarks.truth import verdict
from benchmarks.truth import workload as workload_lib

Workloads = Mapping[str, workload_lib.Workload]
Rows = Mapping[str, Mapping[str, results.Row]]
Compared = Mapping[str, Mapping[str, verdict.Comparison]]


def text(workloads: Workloads, rows: Rows, folder: pathlib.Path) -> str:
  """Returns the rule, and the tables of all rows that have a file.

  Args:
    workloads: by name, in the order of the tables.
    rows: by workload and setting.
    folder: where the files are, those of the screen among them.

  Returns:
    Markdown: what was trained, how, the rule, and four tables; then three of
    the workloads with parameters in 16 bits, if there are any.
  """
  scored = [x for x in settings.SETTINGS if x not in settings.NULLS]
  compared = {
    name: compare(workload, rows[name]) for name, workload in workloads.items()
  }
  tables = (
    (
      (
        "error of the gradient",
        *(f"float16, S = {x}" for x in settings.SCREENED),
        *("bfloat16", "elements"),
      ),
      _screen(workloads, folder),
    ),
    (
      ("mean and deviation of the score", *scored, "reading"),
      (
        (*row, _reading(compared[name]))
        for name, row in zip(
          workloads, _scores(workloads, rows, scored), strict=True
        )
      ),
    ),
    (
      ("difference from float32", *scored[1:], "visible"),
      _differences(workloads, compared, scored[1:]),
    ),
    (
      (
        "null rows",
        "float32, S = 2^10",
        "five other seeds",
        "of what is visible",
      ),
      _nulls(rows, compared),
    ),
  )
  return "\n\n".join(
    [
      _list(
        {
          name: f"{x.description}; rate {x.rate:g}, {x.steps:,} steps"
          for name, x in workloads.items()
        }
      ),
      _list({name: x.description for name, x in settings.SETTINGS.items()}),
      textwrap.fill(verdict.RULE, 92),
      *(report.markdown(header, body) for header, body in tables),
      *_group("precision found", settings.TUNED, workloads, rows, compared),
      report.markdown(
        (
          *("in late parameters", "two batches differ by"),
          *("error in bfloat16", "float8", "as found", "with float8"),
          *("work below float32", "with float8", "in float8"),
        ),
        _found(rows),
      ),
      *_others(workloads, rows, compared, folder),
    ]
  )


def _others(
  workloads: Workloads, rows: Rows, compared: Compared, folder: pathlib.Path
) -> Iterator[str]:
  """Yields what `text` says of parameters in 16 bits and of other products."""
  workloads = {name: x for name, x in workloads.items() if x.sixteen_bit}
  if not workloads:
    return
  for title, group in (
    ("parameters in bfloat16", settings.SIXTEEN_BIT),
    ("products in other formats", settings.PRODUCTS),
  ):
    yield from _group(title, group, workloads, rows, compared)
  yield report.markdown(
    (
      *("masters missed", "in the first step", "mean of all steps"),
      *("the largest miss, relative to its update",),
    ),
    _missed(workloads, folder),
  )


def _group(
  title: str,
  group: Mapping[str, settings.Setting],
  workloads: Workloads,
  rows: Rows,
  compared: Compared,
) -> Iterator[str]:
  """Yields what settings are, their scores, and how those differ."""
  yield _list({name: x.description for name, x in group.items()})
  names = [settings.REFERENCE, "bfloat16", *group]
  yield report.markdown((title, *names), _scores(workloads, rows, names))
  yield report.markdown(
    ("difference from float32", *names[1:], "visible"),
    _differences(workloads, compared, names[1:]),
  )


def _found(rows: Rows) -> Iterator[tuple[str, ...]]:
  """Yields what `tune_precision` measured, and how much it lowered."""
  for name, found in rows.items():
    if not settings.TUNED.keys() <= found.keys():
      continue
    tuned = [found[x].about for x in settings.TUNED]
    yield (
      name,
      _percent(float(tuned[0]["between batches"])),
      *(_percent(float(x["error of all"])) for x in tuned),
      *(_percent(max(map(float, x["errors"].split()))) for x in tuned),
      *(f"{1 - float(x['work in float32']):.1%}" for x in tuned),
      f"{float(tuned[1]['work in float8_e4m3fn']):.1%}",
    )


def compare(
  workload: workload_lib.Workload, rows: Mapping[str, results.Row]
) -> dict[str, verdict.Comparison]:
  """Returns how each setting differs from float32, if float32 is there."""
  if settings.REFERENCE not in rows:
    return {}
  return {
    name: verdict.compare(
      row.scores,
      rows[settings.REFERENCE].scores,
      matters=workload.matters,
      more_is_better=workload.more_is_better,
    )
    for name, row in rows.items()
  }


def _list(entries: Mapping[str, str]) -> str:
  return "\n".join(
    textwrap.fill(f"- `{name}`: {text}.", 92, subsequent_indent="  ")
    for name, text in entries.items()
  )


def _screen(
  workloads: Workloads, folder: pathlib.Path
) -> Iterator[tuple[str, ...]]:
  """Yields the error at each S, with the first and the last parameters."""
  for name, workload in workloads.items():
    file = results.path(folder, name, results.SCREEN)
    if not file.exists():
      continue
    errors = {
      (x.parameters, x.dtype, x.loss_scale): x.error
      for x in results.read(file, results.Screened)[1]
    }
    for when in ("first", "last"):
      yield (
        f"{name}, {when} step",
        *(
          _percent(errors[when, "float16", scale])
          for scale in settings.SCREENED
        ),
        _percent(errors[when, "bfloat16", 1]),
        f"{workload.elements:,}",
      )


def _scores(
  workloads: Workloads, rows: Rows, names: list[str]
) -> Iterator[tuple[str, ...]]:
  """Yields the mean and deviation in each setting, and the skips."""
  for name, workload in workloads.items():
    cells = (
      _score(rows[name][x], workload.matters) if x in rows[name] else ""
      for x in names
    )
    yield f"{name}: {workload.score_name}", *cells


def _reading(found: Mapping[str, verdict.Comparison]) -> str:
  """Returns what a workload says of loss scaling, if it was trained so."""
  verdicts = {x: each.verdict for x, each in found.items()}
  is_complete = {settings.UNSCALED, settings.DEFAULT} <= {*verdicts}
  return verdict.reading(verdicts) if is_complete else ""


def _missed(
  workloads: Workloads, folder: pathlib.Path
) -> Iterator[tuple[str, ...]]:
  """Yields how often, and by how much, remainders cannot hold the masters."""
  for name in workloads:
    file = results.path(folder, name, results.MISSED)
    if file.exists():
      _, missed = results.read(file, misses.Missed)
      shares = [x.share for x in missed]
      most = max(x.error for x in missed)
      yield name, f"{shares[0]:.2%}", f"{np.mean(shares):.3%}", f"{most:.2%}"


def _differences(
  workloads: Workloads, compared: Compared, names: list[str]
) -> Iterator[tuple[str, ...]]:
  """Yields the paired differences, and what of them the rule can see."""
  for name, workload in workloads.items():
    found = compared[name]
    places = _places(workload.matters) + 1
    cells = []
    for x in names:
      cell = ""
      if x in found:
        cell = f"{found[x].mean:+.{places}f} ± {found[x].deviation:.{places}f}"
        cell += (
          "" if found[x].verdict == verdict.SAME else f", {found[x].verdict}"
        )
      cells.append(cell)
    visible = [f"{x.visible:.{places - 1}f}" for x in found.values()][:1]
    yield name, *cells, *(visible or [""])


def _nulls(rows: Rows, compared: Compared) -> Iterator[tuple[str, ...]]:
  """Yields what the verdict says where there is nothing to find."""
  scaled, seeds = settings.NULLS
  for name, found in compared.items():
    cells = ["", "", ""]
    if scaled in found:
      digests = {rows[name][x].digest for x in (settings.REFERENCE, scaled)}
      cells[0] = "bit-equal" if len(digests) == 1 else "not bit-equal"
    if seeds in found:
      cells[1] = found[seeds].verdict
      cells[2] = f"{abs(found[seeds].mean) / found[seeds].visible:.0%}"
    yield name, *cells


def _score(row: results.Row, matters: float) -> str:
  """Returns "mean ± deviation", and the skipped steps of a seed if any."""
  scores = np.array(row.scores)
  if not np.all(np.isfinite(scores)):
    text = f"not finite for {np.sum(~np.isfinite(scores))} of {len(scores)}"
  else:
    places = _places(matters)
    text = f"{scores.mean():.{places}f} ± {scores.std(ddof=1):.{places}f}"
  skipped = np.mean([point.skipped for point in row.last])
  return f"{text} ({skipped:g} skipped)" if skipped else text


def _percent(error: float) -> str:
  return f"{error:.2%}" if math.isfinite(error) else "overflow"


def _places(matters: float) -> int:
  """Returns how many digits after the point show what matters."""
  return max(0, 1 - math.floor(math.log10(matters)))
