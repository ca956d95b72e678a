"""The traces recorded from the original loss scalers, and their replay.

`outcomes` runs a preset over a trace and counts the steps on which S differs
from the original's. It leaves out the steps after the original's S has left the
normal float32 numbers, where the preset holds S (guarantee 4), and those after
the original has ended the run.
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
from optax_lossscale.presets import declaration

FOLDER = pathlib.Path(__file__).parents[1] / "traces"
SYSTEMS = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.json.gz"))

# These compute in float32, so S is the same bit for bit with any factors.
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
# These round a double product to float32, so S is the same if float32 holds the
# factors. All other systems keep S in double.
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
  """Returns the number of steps before the original leaves float32 or ends."""
  steps = len(expected) if raised is None else raised["step"]
  is_normal = (expected[:steps] >= SMALLEST) & (expected[:steps] <= LARGEST)
  return steps if is_normal.all() else int(np.argmin(is_normal))


class Outcome(NamedTuple):
  """The result of a comparison.

  Attributes:
    compared: the number of compared steps.
    mismatches: steps on which S is further off than it may be.
    problems: other defects, in words.
  """

  compared: int
  mismatches: int
  problems: list[str]


def compare(system, arguments, expected, raised, replayed):
  """Returns the outcome of one replayed sequence.

  Args:
    system: the preset's name.
    arguments: the preset's arguments.
    expected: the original's S after each step.
    raised: the error that the original raised, or None.
    replayed: S, stalled and failure after each step of the preset.
  """
  loss_scale, stalled, failure = replayed
  steps = comparable(expected, raised)
  ours, theirs = loss_scale[:steps].astype(float), expected[:steps]
  if is_exact(system, arguments):
    mismatches = np.count_nonzero(ours != theirs)
  else:
    # float32 rounds the factor, each product, and the first S.
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


def groups(system):
  """Returns lists of the runs that have the same arguments and length."""
  groups = {}
  for run in load(system)["runs"]:
    key = json.dumps([run["arguments"], len(run["overflows"])])
    groups.setdefault(key, []).append(run)
  return list(groups.values())


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
  """Returns the part of the original's dictionary that the preset reads."""
  saved = state_dict(run["state_dict"])
  if system == "keras":
    # Keras numbers its variables; these are their names.
    return {"step_counter": saved["2"], "dynamic_scale": saved["3"]}
  # The constant scaler's dictionary holds nothing but its arguments.
  return {} if system == "mindspore_fixed" else saved


def is_importable(system, run):
  """Returns whether the original's saved S is a normal float32."""
  if "state_dict" not in run:
    return False
  steps = len(run["overflows"]) // 2
  before = scales(run["scales"], len(run["overflows"]))[:steps]
  return comparable(before, None) == steps


@functools.cache
def replay(rule):
  """Returns a function from states and overflows to all states, and stalled."""

  def step(state, overflow):
    stalled = rule.stalled(state, overflow)
    state = rule.update(state, overflow)
    return state, (state, stalled)

  def replay(state, overflows):
    return jax.lax.scan(step, state, overflows)[1]

  return jax.jit(jax.vmap(replay))


def _compare_all(system, arguments, states, overflows, records, shape):
  """Returns the outcomes of recorded sequences, and all states of the preset.

  Args:
    system: the preset's name.
    arguments: those of the recorded runs.
    states: the first state of each sequence.
    overflows: for each sequence, bool[steps].
    records: for each sequence, a dictionary with `scales` and `raised`.
    shape: a number of sequences and of steps. Shorter input is padded, so that
      one program compares from the first step and from the middle.
  """
  padded = np.zeros(shape, bool)
  for row, sequence in zip(padded, overflows, strict=False):
    row[: len(sequence)] = sequence
  rule = getattr(presets, system)(**arguments)
  states = states + states[:1] * (shape[0] - len(states))
  states = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
  states, stalled = jax.device_get(replay(rule)(states, padded))
  failure = getattr(states, "failure", None)
  failure = np.zeros(shape) if failure is None else failure
  outcomes = [
    compare(
      system,
      arguments,
      scales(record["scales"], len(sequence)),
      record["raised"],
      [x[i, : len(sequence)] for x in (states.loss_scale, stalled, failure)],
    )
    for i, (sequence, record) in enumerate(zip(overflows, records, strict=True))
  ]
  return outcomes, states


@functools.cache
def outcomes(system, group):
  """Returns the outcomes of a group of runs, from their start and resumed."""
  runs = groups(system)[group]
  arguments = runs[0]["arguments"]
  rule = getattr(presets, system)(**arguments)
  overflows = [overflows_of(run) for run in runs]
  shape = len(runs), len(overflows[0])
  first, middle = [rule.init()] * len(runs), shape[1] // 2
  found, states = _compare_all(system, arguments, first, overflows, runs, shape)
  rows = [i for i, run in enumerate(runs) if is_importable(system, run)]
  imported = []
  for i in rows:
    saved = saved_dict(system, runs[i])
    if is_exact(system, arguments):
      state = jax.tree.map(lambda x, i=i: x[i, middle - 1], states)
      found[i].problems.extend(unlike_the_original(system, rule, state, saved))
    same, state = presets.from_state_dict(system, saved, **arguments)
    assert same == rule
    imported.append(state)
  if imported:
    rest = [overflows[i][middle:] for i in rows]
    resumed = [runs[i]["resumed"] for i in rows]
    found += _compare_all(system, arguments, imported, rest, resumed, shape)[0]
  return found


# Dictionaries.


def flat(dictionary, prefix=""):
  """Returns a dictionary's values by their paths."""
  values = {}
  for key, value in dictionary.items():
    if isinstance(value, dict):
      values |= flat(value, f"{prefix}{key}/")
    else:
      values[prefix + key] = value
  return values


def described(value):
  """Returns a value with its type, dtype and shape, so that == compares all."""
  if isinstance(value, (np.ndarray, np.generic)):
    return type(value), value.dtype, value.shape, value.tolist()
  return type(value), value


def unlike_the_original(system, rule, state, saved):
  """Returns the values that a preset writes and its original does not."""
  expected, arguments = flat(saved), dict(rule.arguments)
  for path, key in declaration.PRESETS[system].saves.items():
    if getattr(key, "holds", "") == "S" and isinstance(
      expected.get(path), (int, float)
    ):
      # The original's S is a double, here it is a float32. At its floor of 1
      # MindSpore's S becomes an int.
      expected[path] = float(np.float32(expected[path]))
  if system == "apex" and arguments["loss_scale"] != "dynamic":
    # With a fixed S Apex counts on, and the preset does not.
    expected["loss_scaler0/unskipped"] = 0
  written = flat(presets.to_state_dict(rule, state))
  return [
    f"{path} is {written.get(path)!r}, the original's {expected.get(path)!r}"
    for path in written.keys() | expected.keys()
    if path not in written
    or path not in expected
    or described(written[path]) != described(expected[path])
  ]
