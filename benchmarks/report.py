"""A table on the terminal, and the same figures as JSON."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
from typing import Any


def show(
  title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
  """Prints a table.

  Args:
    title: above the table.
    columns: their headers.
    rows: the cells, as many as there are columns.
  """
  print(f"{title}\n\n{markdown(columns, rows)}\n")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table in Markdown, to be read as it is and quoted as it is.

  Args:
    columns: their headers. The first column holds names and is aligned left,
      the others hold figures.
    rows: the cells, as many as there are columns.
  """
  lines = [list(columns), *map(list, rows)]
  widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
  first, *others = widths
  rule = ["-" * first, *(f"{'-' * (width - 1)}:" for width in others)]
  return "\n".join(
    f"| {line[0]:<{first}} | "
    + " | ".join(
      f"{cell:>{width}}" for cell, width in zip(line[1:], others, strict=True)
    )
    + " |"
    for line in (lines[0], rule, *lines[1:])
  )


def write(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Writes what was measured as JSON, and makes the folder where it goes.

  Args:
    path: is replaced as a whole.
    content: with finite numbers only; None is what was not measured.

  Raises:
    OSError: if the file cannot be written.
    ValueError: if a number is inf or NaN, which JSON does not have.
  """
  text = json.dumps(content, indent=2, allow_nan=False)
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as temporary:
    temporary.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a temporary path that becomes `path` when all went well."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    yield temporary
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)
