"""Writes the tables and pictures of the appendix from the rows."""

import argparse
from collections.abc import Mapping
import pathlib
import re

from matplotlib.figure import Figure

from benchmarks import report
from benchmarks.truth import figure
from benchmarks.truth import results
from benchmarks.truth import settings
from benchmarks.truth import table
from benchmarks.truth import workload as workload_lib

NAME = "README.md"

# The tables go between these lines.
_BEGIN, _END = "<!-- python -m benchmarks truth -->", "<!-- end -->"


def folder(text: str) -> pathlib.Path:
  """Returns the folder of an appendix that says where its tables go."""
  path = pathlib.Path(text, NAME)
  try:
    content = path.read_text(encoding="utf-8")
  except OSError as error:
    raise argparse.ArgumentTypeError(f"cannot be read: {error}") from error
  if _BEGIN not in content or _END not in content:
    raise argparse.ArgumentTypeError(
      f"{path} must have the lines {_BEGIN} and {_END}"
    )
  return path.parent


def write(
  appendix: pathlib.Path,
  workloads: Mapping[str, workload_lib.Workload],
  rows: table.Rows,
  folder: pathlib.Path,
  text: str,
) -> None:
  """Renews the tables of the appendix, and draws a picture for each workload.

  Args:
    appendix: its folder, where the pictures go to `images`.
    workloads: by name.
    rows: by workload and setting.
    folder: where the rows are.
    text: the tables.
  """
  for name, found in rows.items():
    file = results.path(folder, name, results.HISTOGRAM)
    if file.exists():
      _, counted = results.read(file, results.Counted)
      _save(figure.draw(workloads[name], found, counted), appendix, name)
  narrow = {
    name: x
    for name, x in workloads.items()
    if x.sixteen_bit and settings.REFERENCE in rows[name]
  }
  if narrow:
    _save(figure.draw_sixteen_bit(narrow, rows), appendix, "sixteen_bit")
  path = appendix / NAME
  content = path.read_text(encoding="utf-8")
  pattern = f"{re.escape(_BEGIN)}.*{re.escape(_END)}"
  made = f"{_BEGIN}\n\n{text}\n\n{_END}"
  renewed = re.sub(pattern, lambda _: made, content, flags=re.DOTALL)
  path.write_text(renewed, encoding="utf-8")


def _save(drawn: Figure, appendix: pathlib.Path, name: str) -> None:
  picture = appendix / "images" / f"{name}.png"
  picture.parent.mkdir(exist_ok=True)
  with report.replacing(picture) as temporary:
    drawn.savefig(temporary, format="png", dpi=110)
