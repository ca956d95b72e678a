"""Tables on the terminal, and the one at the end of a comparison."""

from collections.abc import Sequence
import math
import re
import statistics
import textwrap

import rich.box
import rich.console
import rich.table

from optax_lossscale.demo import run as run_lib


class Console(rich.console.Console):
  """The console of all output; a closed pipe is an error of its caller."""

  def on_broken_pipe(self) -> None:
    """Raises what it is called for, which rich would end without a word."""
    raise


def make_table(
  results: Sequence[run_lib.Result], *, score_name: str, label_name: str
) -> rich.table.Table:
  """Returns a row for each run: the mean and the spread over its seeds."""
  runs: dict[str, list[run_lib.Result]] = {}
  for result in results:
    runs.setdefault(result.run, []).append(result)
  seeds = max(map(len, runs.values()), default=0)
  switches = any(row.switched_after is not None for row in results)
  names = ["final loss", score_name, "steps applied", "skipped", "last S"]
  if switches:
    names.append("switched after")

  table = new_table(label_name, names)
  for label, rows in runs.items():
    cells = [
      _spread([row.loss for row in rows], ".4f"),
      _spread([row.held_out for row in rows], ".4f"),
      _spread([row.applied_steps for row in rows], ".0f"),
      _spread([row.skipped_steps for row in rows], ".0f"),
      _scales([row.loss_scale for row in rows]),
    ]
    if switches:
      cells.append(_spread([row.switched_after for row in rows], ".0f"))
    table.add_row(fold(label, 31), *cells)
  if seeds > 1:
    table.caption = f"mean ± standard deviation over {seeds} seeds"
    table.caption_justify = "left"
  return table


def fold(label: str, width: int) -> str:
  """Returns a label in lines that end at a space, a comma or a colon."""
  # A vertical tab is where textwrap may break and nothing is printed.
  parts = re.sub(r"([,:])(?=\S)", "\\1\v", label)
  return textwrap.fill(parts, width, replace_whitespace=False).replace("\v", "")


def new_table(label_name: str, names: Sequence[str]) -> rich.table.Table:
  """Returns a table without rows: a column of labels, and some of figures."""
  table = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
  )
  table.add_column(label_name, overflow="fold", vertical="top")
  for name in names:
    # Wrapped here, so that a narrow terminal folds the labels, not the numbers.
    header = textwrap.fill(name, 9, break_long_words=False)
    table.add_column(header, justify="right", no_wrap=True)
  return table


def _spread(values: Sequence[float | None], form: str) -> str:
  """Returns the mean, and for several values their standard deviation."""
  known = [value for value in values if value is not None]
  if not known:
    return "-"
  if len(known) == 1:
    return format(known[0], form)
  if not all(map(math.isfinite, known)):
    return "\n".join(format(value, form) for value in known)
  form = ".1f" if form == ".0f" else form
  mean, deviation = statistics.mean(known), statistics.stdev(known)
  return f"{mean:{form}}\n± {deviation:{form}}"


def _scales(values: Sequence[float | None]) -> str:
  """Returns the loss scales, from the smallest to the largest."""
  known = [value for value in values if value is not None]
  if not known:
    return "-"
  low, high = (power_of_two(end) for end in (min(known), max(known)))
  return low if low == high else f"{low}\nto {high}"


def power_of_two(value: float) -> str:
  """Returns a power of two as 2^n, and another number in digits."""
  mantissa, exponent = math.frexp(value)
  return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"
