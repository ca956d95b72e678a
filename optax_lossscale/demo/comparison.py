"""Several runs side by side: trained, written, shown."""

from collections.abc import Iterator
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
from optax_lossscale.demo import run as run_lib
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
  runs: Sequence[run_lib.Run]
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
    targets = {run.target_loss for run in self.runs} - {None}
    target = "".join(f", target loss {loss}" for loss in targets)
    mode = ", float16 in emulated saturation mode" if self.saturating else ""
    return f"{self.task.description}\n{steps}, {seeds}{target}{mode}"

  @property
  def label_name(self) -> str:
    """What the labels of the runs are made of."""
    named = {name for run in self.runs for name in run.parts}
    return ", ".join(name for name in run_lib.PARTS if name in named)

  def paths(self, output: pathlib.Path) -> list[pathlib.Path]:
    """Returns where the history, the summaries and the picture go."""
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
  """Writes the history, the summaries and the picture; returns where."""
  paths = comparison.paths(output)
  history.write_csv(paths[0], results.records)
  history.write_json(
    paths[1],
    {
      **_configuration(comparison),
      "interrupted": results.interrupted,
    },
    results.summaries,
    results.records,
  )
  figure.write_figure(
    paths[2],
    results.records,
    title=comparison.title,
    label_name=comparison.label_name,
  )
  return paths


def show(comparison: Comparison, results: Results) -> None:
  """Prints the table, and what is to be said about it."""
  console = rich.console.Console(highlight=False)
  console.print(comparison.title)
  console.print(
    table.make_table(
      results.summaries,
      score_name=comparison.task.score_name,
      label_name=comparison.label_name,
    )
  )
  for note in (comparison.task.note, *_notes(comparison, results)):
    if note:
      console.print(note)


def _notes(comparison: Comparison, results: Results) -> Iterator[str]:
  """Yields what is to be said about precision schedules."""
  ended = [s for s in results.summaries if s.held_out is not None]
  for run in comparison.runs:
    schedule = run.make_schedule(comparison.steps)
    if schedule is None:
      continue
    stayed = [
      s.seed for s in ended if s.run == run.label and s.switched_after is None
    ]
    if stayed:
      seeds = ", ".join(map(str, stayed))
      reason = "since so few of its steps were applied"
      if schedule.target_loss is not None:
        limit = float(schedule.target_loss * schedule.ratio)
        reason = (
          f"the loss stayed above {limit:g}, {float(schedule.ratio):g} times "
          "the target loss, until the last step"
        )
      yield f"{run.accelerate}, seed {seeds}: never switched, {reason}."
    if jax.default_backend() == "cpu":
      yield (
        "On a CPU low precision is as a rule no faster: this shows the switch, "
        "not the speed."
      )


def _name(comparison: Comparison, run: run_lib.Run, seed: int) -> str:
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
    **_schedule(comparison),
    "quick": comparison.quick,
    "hardware": "saturating" if comparison.saturating else "ieee",
    "device": jax.devices()[0].device_kind,
    "versions": {
      "python": platform.python_version(),
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
    },
  }


def _schedule(comparison: Comparison) -> dict[str, Any]:
  """Returns the options of the precision schedule, if a run has one."""
  for run in comparison.runs:
    if run.accelerate is not None:
      return {"accelerate": run.accelerate, "target_loss": run.target_loss}
  return {}
