"""The traces that were recorded from the original loss scalers, and replayed.

`replay` runs a preset over a trace and counts where S is another than the
original's. Two kinds of steps are not compared: those after the original's S
has left the normal float32 numbers, where S is held here (guarantee 4), and
those after the original has ended the run.
"""

import functools
import gzip
import json
import math
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from optax_lossscale import presets

FOLDER = pathlib.Path(__file__).parents[1] / "traces"
SYSTEMS = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.json.gz"))

# These compute in float32: S is the same bit for bit, whatever the factors.
FLOAT32 = {
  "torch_sharded",
  "megatron",
  "megatron_constant",
  "colossalai",
  "tf_exponential",
  "npu_exponential",
  "npu_fixed",
  "tensorflow",
  "keras",
  "mindspore_amp",
  "mindspore_cell",
  "paddle",
  "paddle_op",
  "flax",
  "jmp",
}
# These round a product in double to float32: the same, if float32 holds the
# factors. All others hold S in double.
DOUBLE_PRODUCT = {"torch", "apex_hysteresis"}

SMALLEST, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)


@functools.cache
def load(system):
  """Returns a trace."""
  return json.loads(
    gzip.decompress((FOLDER / f"{system}.json.gz").read_bytes())
  )


def is_exact(system, arguments):
  """Returns whether S must be the original's bit for bit."""
  floats = [x for x in arguments.values() if isinstance(x, float)]
  if system in FLOAT32:
    return True
  if system in DOUBLE_PRODUCT:
    return all(x == float(np.float32(x)) for x in floats)
  return all(math.frexp(x)[0] == 0.5 for x in floats if x)


def scales(changes, steps):
  """Returns S after each step, from a trace's list of changes."""
  values = np.empty(steps)
  for step, scale in changes:
    values[step:] = scale
  return values


def comparable(expected, raised):
  """Returns how many steps there are before the original leaves float32."""
  steps = len(expected) if raised is None else raised["step"]
  is_normal = (expected[:steps] >= SMALLEST) & (expected[:steps] <= LARGEST)
  return steps if is_normal.all() else int(np.argmin(is_normal))


@functools.cache
def trajectories(rule):
  """Returns a function from states and overflows to S, stalled, failure."""

  def step(state, overflow):
    stalled = rule.stalled(state, overflow)
    state = rule.update(state, overflow)
    failure = getattr(state, "failure", None)
    return state, (state.loss_scale, stalled, 0 if failure is None else failure)

  def trajectory(state, overflows):
    return jax.lax.scan(step, state, overflows)

  return jax.jit(jax.vmap(trajectory))


class Outcome(NamedTuple):
  """What a comparison saw.

  Attributes:
    compared: steps.
    mismatches: steps on which S is further off than it may be.
    problems: what else is wrong, in words.
  """

  compared: int
  mismatches: int
  problems: list[str]


def compare(system, run, expected, raised, outcome):
  """Returns the outcome of one replayed sequence.

  Args:
    system: the preset's name.
    run: the run of the trace.
    expected: the original's S after each step.
    raised: what the original raised, or None.
    outcome: S, stalled, failure after each step, here.
  """
  loss_scale, stalled, failure = (np.asarray(x) for x in outcome)
  steps = comparable(expected, raised)
  ours, theirs = loss_scale[:steps].astype(float), expected[:steps]
  if is_exact(system, run["arguments"]):
    mismatches = np.count_nonzero(ours != theirs)
  else:
    # The factor is rounded to float32, and so is the product; and the first S.
    changes = np.cumsum(np.diff(theirs, prepend=theirs[:1]) != 0)
    mismatches = np.count_nonzero(
      np.abs(ours - theirs) > (changes + 1) * 2.0**-23 * theirs
    )
  problems = []
  ended = None if raised is None else raised["step"]
  failed = int(np.argmax(failure != 0)) if failure.any() else None
  if failed != ended and (steps == len(expected) or ended is not None):
    problems.append(f"failure at {failed}, the original's at {ended}")
  if ended is None and steps < len(expected):
    held = loss_scale[steps] == loss_scale[steps - 1] if steps else True
    if not (held and stalled[steps]):
      problems.append(f"S not held at step {steps}")
  if not ((loss_scale >= SMALLEST) & (loss_scale <= LARGEST)).all():
    problems.append("S is no normal float32")
  return Outcome(steps, int(mismatches), problems)


def groups(trace):
  """Yields the runs of a trace that have the same arguments and length."""
  groups = {}
  for run in trace["runs"]:
    key = json.dumps([run["arguments"], len(run["overflows"])])
    groups.setdefault(key, []).append(run)
  yield from groups.values()


def overflows_of(run):
  """Returns bool[steps]."""
  return np.array([character == "1" for character in run["overflows"]])


def state_dict(description):
  """Returns the dictionary that the original saved, as Python and NumPy."""

  def value(item):
    if "type" not in item:
      return {key: value(inner) for key, inner in item.items()}
    if "[" in item["type"]:
      return np.array(item["value"], item["type"].partition("[")[0])[()]
    return item["value"]

  return {key: value(item) for key, item in description.items()}


def saved_dict(system, run):
  """Returns what the preset reads of the original's dictionary."""
  saved = state_dict(run["state_dict"])
  if system == "keras":
    # Keras numbers its variables; these are their names.
    return {"step_counter": saved["2"], "dynamic_scale": saved["3"]}
  # The constant scaler's dictionary holds nothing but its arguments.
  return {} if system == "mindspore_fixed" else saved


def replay(system):
  """Returns the outcomes of all runs of a trace, from their first steps."""
  outcomes = []
  for runs in groups(load(system)):
    rule = getattr(presets, system)(**runs[0]["arguments"])
    overflows = np.stack([overflows_of(run) for run in runs])
    results = run_together(rule, [rule.init()] * len(runs), overflows)
    for i, run in enumerate(runs):
      expected = scales(run["scales"], len(run["overflows"]))
      outcome = jax.tree.map(lambda x, i=i: x[i], results)
      outcomes.append(compare(system, run, expected, run["raised"], outcome))
  return outcomes


def replay_resumed(system):
  """Returns the outcomes of all runs of a trace, from the saved dictionary."""
  outcomes = []
  for runs in groups(load(system)):
    shape = len(runs), len(runs[0]["overflows"])
    runs = [run for run in runs if is_importable(system, run)]
    if not runs:
      continue
    imported = [
      presets.from_state_dict(
        system, saved_dict(system, run), **run["arguments"]
      )
      for run in runs
    ]
    (rule,) = {rule for rule, _ in imported}
    overflows = np.stack([overflows_of(run) for run in runs])
    overflows = overflows[:, overflows.shape[1] // 2 :]
    # As many runs and steps as from the first step, so that one program does
    # for both. What is added comes after all that is compared.
    padded = np.zeros(shape, bool)
    padded[: overflows.shape[0], : overflows.shape[1]] = overflows
    states = [state for _, state in imported]
    states += states[:1] * (shape[0] - len(states))
    results = jax.tree.map(
      lambda x, steps=overflows.shape[1]: x[:, :steps],
      run_together(rule, states, padded),
    )
    for i, run in enumerate(runs):
      resumed = run["resumed"]
      expected = scales(resumed["scales"], overflows.shape[1])
      outcome = jax.tree.map(lambda x, i=i: x[i], results)
      outcomes.append(
        compare(system, run, expected, resumed["raised"], outcome)
      )
  return outcomes


def is_importable(system, run):
  """Returns whether the original's saved S is a normal float32."""
  if "state_dict" not in run:
    return False
  steps = len(run["overflows"]) // 2
  before = scales(run["scales"], len(run["overflows"]))[:steps]
  return comparable(before, None) == steps


def run_together(rule, states, overflows):
  """Returns S, stalled and failure: [runs, steps], from one state for each."""
  states = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
  _, results = trajectories(rule)(states, overflows)
  return jax.tree.map(np.asarray, results)


@functools.cache
def outcomes(system):
  """Returns the outcomes of a trace, from its first steps and resumed."""
  return replay(system) + replay_resumed(system)
