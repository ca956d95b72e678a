"""Several runs side by side: trained, written, shown."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import importlib.metadata
import pathlib
import platform
import time
from typing import Any

import jax
import rich.console
import rich.progress
import rich.table

import optax_lossscale as ols
from optax_lossscale.demo import figure
from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import table
from optax_lossscale.demo import task as task_lib
from optax_lossscale.demo import training
from optax_lossscale.demo import verdict

_PACKAGES = ("jax", "jaxlib", "flax", "optax")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What to train."""

  task: task_lib.Task
  runs: Sequence[run_lib.Run]
  seeds: range  # Each run is trained with each of them.
  steps: int  # Of each run.
  quick: bool = False  # The task is the quick one.
  saturating: bool = False  # float16 is emulated in saturation mode.

  @property
  def title(self) -> str:
    """The task, and how long it is trained, in two lines."""
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
    """The parts that the labels of the runs have."""
    named = {name for run in self.runs for name in run.parts}
    return ", ".join(name for name in run_lib.PARTS if name in named)

  def paths(self, output: pathlib.Path) -> list[pathlib.Path]:
    """Returns where the history, the summaries and the picture go."""
    return [
      output / f"{self.task.name}.{end}" for end in ("csv", "json", "png")
    ]


@dataclasses.dataclass
class Results:
  """The runs that have made a step so far."""

  runs: list[run_lib.Result] = dataclasses.field(default_factory=list)
  interrupted: bool = False  # By Ctrl-C.


def train(comparison: Comparison) -> Results:
  """Trains each run with each seed, until the end or Ctrl-C.

  Progress goes to standard error: a bar on a terminal, and lines elsewhere.
  """
  results = Results()
  total = len(comparison.seeds) * len(comparison.runs) * comparison.steps
  console = rich.console.Console(stderr=True)
  label = rich.table.Column(ratio=1, no_wrap=True, overflow="ellipsis")
  told = time.monotonic()
  try:
    with rich.progress.Progress(
      rich.progress.TextColumn("{task.description}", table_column=label),
      rich.progress.BarColumn(bar_width=12),
      rich.progress.TaskProgressColumn(),
      rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
      rich.progress.TextColumn("{task.fields[latest]}"),
      console=console,
      expand=True,
      disable=not console.is_terminal,
    ) as progress:
      bar = progress.add_task("", total=total, latest="")

      def tell(latest: str, *, due: bool = True) -> None:
        nonlocal told
        if not console.is_terminal and (due or time.monotonic() - told > 8):
          told = time.monotonic()
          name = progress.tasks[bar].description
          console.print(f"{name}: {latest}", soft_wrap=True)

      def on_step(result: run_lib.Result, step: run_lib.Step) -> None:
        if not result.steps:
          results.runs.append(result)
        result.steps.append(step)
        loss = f"loss {step.loss:.4f}"
        progress.update(bar, advance=1, latest=loss)
        task = progress.tasks[bar]
        tell(
          f"step {step.step} of {comparison.steps}, {loss}, "
          f"{task.time_remaining or 0:.0f} s left",
          due=task.completed * 10 % total < 10,
        )

      for seed in comparison.seeds:
        for run in comparison.runs:
          several = f", seed {seed}" if len(comparison.seeds) > 1 else ""
          name = run.label + several
          progress.update(bar, description=name, latest="compiling")
          tell("compiling")
          result = run_lib.Result(run.label, seed)
          result.start, result.held_out = training.train(
            run,
            comparison.task,
            seed=seed,
            steps=comparison.steps,
            on_step=functools.partial(on_step, result),
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
  run_lib.write_csv(paths[0], results.runs)
  configuration = _configuration(comparison)
  configuration["interrupted"] = results.interrupted
  run_lib.write_json(paths[1], configuration, results.runs)
  figure.write_figure(
    paths[2],
    results.runs,
    title=comparison.title,
    label_name=comparison.label_name,
    score_name=comparison.task.score_name,
    closed=_closed(comparison, results),
  )
  return paths


def show(comparison: Comparison, results: Results) -> None:
  """Prints the table, and notes below it."""
  console = table.Console(highlight=False)
  console.print(comparison.title)
  console.print(
    table.make_table(
      results.runs,
      score_name=comparison.task.score_name,
      label_name=comparison.label_name,
    )
  )
  said = verdict.sentence(comparison.runs, _closed(comparison, results))
  for note in (said, *_notes(comparison, results)):
    if note:
      console.print(note)


def _closed(comparison: Comparison, results: Results) -> verdict.Closed | None:
  return verdict.closed(
    comparison.runs,
    results.runs,
    more_is_better=comparison.task.more_is_better,
  )


def _notes(comparison: Comparison, results: Results) -> Iterator[str]:
  """Yields notes about float16 without loss scaling, and about schedules."""
  unscaled = {
    run.label
    for run in comparison.runs
    if run.rule is None and run.lowest_precision == "float16"
  }
  if any(result.run in unscaled for result in results.runs):
    yield comparison.task.note
  ended = [x for x in results.runs if x.held_out is not None]
  for run in comparison.runs:
    schedule = run.make_schedule(comparison.steps)
    if schedule is None:
      continue
    stayed = [
      x.seed for x in ended if x.run == run.label and x.switched_after is None
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


def _configuration(comparison: Comparison) -> dict[str, Any]:
  schedules = [
    {"accelerate": run.accelerate, "target_loss": run.target_loss}
    for run in comparison.runs
    if run.accelerate is not None
  ]
  return {
    "task": comparison.task.name,
    "description": comparison.task.description,
    "score": comparison.task.score_name,
    "steps": comparison.steps,
    "seeds": list(comparison.seeds),
    **(schedules[0] if schedules else {}),
    "quick": comparison.quick,
    "hardware": "saturating" if comparison.saturating else "ieee",
    "device": jax.devices()[0].device_kind,
    "versions": {
      "python": platform.python_version(),
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
      "optax-lossscale": ols.__version__,
    },
  }
