"""Several runs side by side: trained, written, shown."""

from collections.abc import Sequence
import dataclasses
import importlib.metadata
import pathlib
import platform
from typing import Any

import jax
import rich.console
import rich.progress

from optax_lossscale.demo import figure
from optax_lossscale.demo import history
from optax_lossscale.demo import table
from optax_lossscale.demo import task as task_lib
from optax_lossscale.demo import training

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "optax-lossscale")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What to train.

  Attributes:
    task: the model and the data.
    runs: the precisions, levels and rules to compare.
    seeds: each run is trained with each of them.
    steps: of each run.
    quick: whether the task is the quick one.
    saturating: whether float16 is computed in emulated saturation mode.
  """

  task: task_lib.Task
  runs: Sequence[training.Run]
  seeds: range
  steps: int
  quick: bool = False
  saturating: bool = False

  @property
  def title(self) -> str:
    """What is trained, and for how long, in two lines."""
    seeds = f"seed {self.seeds[0]}"
    if len(self.seeds) > 1:
      seeds = f"seeds {self.seeds[0]} to {self.seeds[-1]}"
    steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
    mode = ", float16 in emulated saturation mode" if self.saturating else ""
    return f"{self.task.description}\n{steps}, {seeds}{mode}"

  @property
  def label_name(self) -> str:
    """What the labels of the runs are made of."""
    named = {name for run in self.runs for name in run.parts}
    return ", ".join(name for name in training.PARTS if name in named)

  def paths(self, output: pathlib.Path) -> list[pathlib.Path]:
    """Returns where the history, the summaries and the picture go.

    Args:
      output: the folder.
    """
    return [
      output / f"{self.task.name}.{end}" for end in ("csv", "json", "png")
    ]


@dataclasses.dataclass
class Results:
  """What has been recorded so far.

  Attributes:
    records: every step of every run.
    held_out: the score of each run and seed that was trained to its end.
    interrupted: whether Ctrl-C ended it.
  """

  records: list[history.Record] = dataclasses.field(default_factory=list)
  held_out: dict[tuple[str, int], float] = dataclasses.field(
    default_factory=dict
  )
  interrupted: bool = False

  @property
  def summaries(self) -> list[history.Summary]:
    """A summary of each run and seed."""
    return history.summarize(self.records, self.held_out)


def train(comparison: Comparison) -> Results:
  """Trains each run with each seed, until the end or Ctrl-C.

  A progress bar goes to standard error.

  Args:
    comparison: what to train.
  """
  results = Results()
  total = len(comparison.seeds) * len(comparison.runs) * comparison.steps
  try:
    with _progress() as progress:
      bar = progress.add_task("", total=total, latest="compiling")

      def on_step(record: history.Record) -> None:
        results.records.append(record)
        progress.update(bar, advance=1, latest=f"loss {record.loss:.4f}")

      for seed in comparison.seeds:
        for run in comparison.runs:
          progress.update(bar, description=_name(comparison, run, seed))
          results.held_out[run.label, seed] = training.train(
            run,
            comparison.task,
            seed=seed,
            steps=comparison.steps,
            on_step=on_step,
            saturating=comparison.saturating,
          )
  except KeyboardInterrupt:
    results.interrupted = True
  return results


def write(
  comparison: Comparison, results: Results, output: pathlib.Path
) -> list[pathlib.Path]:
  """Writes the history, the summaries and the picture; returns where.

  Args:
    comparison: what was trained.
    results: with at least one record.
    output: the folder; it exists.

  Raises:
    OSError: if a file cannot be written.
  """
  paths = comparison.paths(output)
  history.write_csv(paths[0], results.records)
  history.write_json(
    paths[1],
    {
      **_configuration(comparison),
      "interrupted": results.interrupted,
    },
    results.summaries,
  )
  figure.write_figure(
    paths[2],
    results.records,
    title=comparison.title,
    label_name=comparison.label_name,
  )
  return paths


def show(comparison: Comparison, results: Results) -> None:
  """Prints the table, and what is to be said about it.

  Args:
    comparison: what was trained.
    results: with at least one record.
  """
  console = rich.console.Console(highlight=False)
  console.print(comparison.title)
  console.print(
    table.make_table(
      results.summaries,
      score_name=comparison.task.score_name,
      label_name=comparison.label_name,
    )
  )
  if comparison.task.note:
    console.print(comparison.task.note)


def _name(comparison: Comparison, run: training.Run, seed: int) -> str:
  return run.label if len(comparison.seeds) == 1 else f"{run.label}, {seed}"


def _progress() -> rich.progress.Progress:
  return rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.BarColumn(bar_width=None),
    rich.progress.TaskProgressColumn(),
    rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
    rich.progress.TextColumn("{task.fields[latest]}"),
    console=rich.console.Console(stderr=True),
  )


def _configuration(comparison: Comparison) -> dict[str, Any]:
  return {
    "task": comparison.task.name,
    "description": comparison.task.description,
    "score": comparison.task.score_name,
    "steps": comparison.steps,
    "seeds": list(comparison.seeds),
    "quick": comparison.quick,
    "hardware": "saturating" if comparison.saturating else "ieee",
    "device": jax.devices()[0].device_kind,
    "versions": {
      "python": platform.python_version(),
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
    },
  }
