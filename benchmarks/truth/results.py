"""The rows of the tables as files: what was measured, and on what."""

from collections.abc import Mapping
from collections.abc import Sequence
import csv
import pathlib
from typing import Any
from typing import NamedTuple

from benchmarks import report
from benchmarks.truth import settings
from benchmarks.truth import training
import optax_lossscale as ols

FOLDER = pathlib.Path(__file__).parent / "rows"

# The files beside those of the settings, made with float32's.
SCREEN, HISTOGRAM = "screen", "histogram"

# The file made with that of remainders.
MISSED = "missed"

# Stands for the exponent of 0.
ZERO = -1000


class Row(NamedTuple):
  """One workload in one setting.

  Attributes:
    about: the command, the date, the machine, the versions, the seconds, and a
      digest of the last parameters.
    points: of all seeds.
  """

  about: Mapping[str, str]
  points: Sequence[training.Point]

  @property
  def digest(self) -> str:
    """A digest of the bits of all last parameters."""
    return self.about["parameters"]

  @property
  def last(self) -> list[training.Point]:
    """The points after the last step, by seed."""
    end = max(point.step for point in self.points)
    return [point for point in self.points if point.step == end]

  @property
  def scores(self) -> list[float]:
    """The last scores, by seed."""
    return [point.score for point in self.last]


class Screened(NamedTuple):
  """The error of one gradient.

  Attributes:
    parameters: "first" or "last".
    dtype: the low precision.
    loss_scale: S.
    error: of the whole gradient; inf if it overflows.
    zeros: the share of the elements that underflow to 0.
  """

  parameters: str
  dtype: str
  loss_scale: float
  error: float
  zeros: float


class Counted(NamedTuple):
  """How many elements of a float32 gradient have an exponent.

  Attributes:
    parameters: "first" or "last".
    exponent: floor(log2 |g|), or `ZERO`.
    count: of the elements.
  """

  parameters: str
  exponent: int
  count: int


def describe(found: ols.instruments.TuningReport) -> dict[str, str]:
  """Returns what a row says of the precision that was found for it."""
  shares = dict.fromkeys(("float32", "bfloat16", "float8_e4m3fn"), 0.0)
  for scope in found.scopes.values():
    shares[scope.dtype] += scope.share
  overrides = ", ".join(
    f"{pattern}: {dtype and dtype.name}"
    for pattern, dtype in found.overrides.items()
  )
  return {
    "overrides": overrides or "none",
    "errors": " ".join(f"{x:.4f}" for x in found.errors),
    "error of all": f"{found.error_of_all:.4f}",
    "between batches": f"{found.between_batches:.4f}",
    **{f"work in {name}": f"{share:.4f}" for name, share in shares.items()},
  }


def path(folder: pathlib.Path, workload: str, row: str) -> pathlib.Path:
  """Returns the file of a setting, of the screen or of the histogram."""
  return folder / workload / f"{row}.csv"


def load(folder: pathlib.Path, workload: str) -> dict[str, Row]:
  """Returns the settings of a workload that have a file."""
  files = {x: path(folder, workload, x) for x in settings.ALL}
  return {
    name: Row(*read(file, training.Point))
    for name, file in files.items()
    if file.exists()
  }


def write(
  file: pathlib.Path, about: Mapping[str, str], rows: Sequence[Any]
) -> None:
  """Writes named tuples of one kind, below what they were measured on."""
  file.parent.mkdir(parents=True, exist_ok=True)
  with (
    report.replacing(file) as temporary,
    temporary.open("w", newline="") as out,
  ):
    out.writelines(f"# {key}: {value}\n" for key, value in about.items())
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0]._fields)
    writer.writerows([_cell(x) for x in row] for row in rows)


def read(file: pathlib.Path, kind: Any) -> tuple[dict[str, str], list[Any]]:
  """Returns what `write` wrote: what is above, and the named tuples."""
  lines = file.read_text(encoding="utf-8").splitlines()
  notes = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
  _, *rows = csv.reader(x for x in lines if not x.startswith("# "))
  types = kind.__annotations__.values()
  return dict(notes), [
    kind(*(as_type(x) for as_type, x in zip(types, row, strict=True)))
    for row in rows
  ]


def _cell(value: Any) -> str:
  # Nine digits tell all float32 numbers apart.
  return f"{value:.9g}" if isinstance(value, float) else str(value)
