"""Rows of texts as lines with aligned columns."""

from collections.abc import Iterable
from collections.abc import Sequence


def aligned(rows: Iterable[Sequence[str]], sides: str) -> list[str]:
  """Returns a line for each row; "<" aligns a column left, and ">" right."""
  rows = list(rows)
  widths = [0] * len(sides)
  for row in rows:
    # A row with fewer cells than columns ends with a text of any length, which
    # must not widen its column.
    cells = row if len(row) == len(sides) else row[:-1]
    for i, cell in enumerate(cells):
      widths[i] = max(widths[i], len(cell))
  forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
  return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
