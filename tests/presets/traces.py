"""The traces recorded from the original loss scalers, and their replay.

`follow` runs a preset over the runs of a trace and compares S. It leaves out
the steps after the original's S has left the normal float32 numbers, where the
preset holds S (guarantee 4), and those after the original has ended the run.
"""

import functools
import gzip
import json
import math
import pathlib

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


def assert_follows(rule, is_exact, record, overflows, states):
  """Asserts that a replayed run is the original's; returns its length.

  Args:
    rule: the preset's rule.
    is_exact: whether S must be the same bit for bit.
    record: the original's `scales`, and the error that it `raised`, or None.
    overflows: bool[steps].
    states: the rule's, after each step.
  """
  loss_scale = states.loss_scale
  expected, raised = scales(record["scales"], len(overflows)), record["raised"]
  steps = comparable(expected, raised)
  ours, theirs = loss_scale[:steps].astype(float), expected[:steps]
  if is_exact:
    np.testing.assert_array_equal(ours, theirs)
  else:
    # float32 rounds the factor, each product, and the first S.
    changes = np.cumsum(np.diff(theirs, prepend=theirs[:1]) != 0)
    assert np.all(np.abs(ours - theirs) <= (changes + 1) * 2.0**-23 * theirs)
  assert np.all((loss_scale >= SMALLEST) & (loss_scale <= LARGEST))
  ended = None if raised is None else raised["step"]
  failure = getattr(states, "failure", None)
  has_failed = failure is not None and failure.any()
  failed = int(np.argmax(failure != 0)) if has_failed else None
  if steps == len(overflows) or ended is not None:
    assert failed == ended
  elif steps:  # The original's S has left the normal numbers.
    assert loss_scale[steps] == loss_scale[steps - 1]
    before = jax.tree.map(lambda x: x[steps - 1], states)
    assert rule.stalled(before, overflows[steps])
  return steps


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


def is_importable(run):
  """Returns whether the original's saved S is a normal float32."""
  if "state_dict" not in run:
    return False
  steps = len(run["overflows"]) // 2
  before = scales(run["scales"], len(run["overflows"]))[:steps]
  return comparable(before, None) == steps


def replay(rule, states, overflows):
  """Returns the states after each step of several runs.

  Args:
    rule: the rule.
    states: that of each run before its first step.
    overflows: of each run.
  """
  step = jax.jit(rule.update)  # It works elementwise.
  # The shorter runs go on without overflow, so that one program is enough.
  padded = np.zeros((len(overflows), max(map(len, overflows))), bool)
  for row, overflow in zip(padded, overflows, strict=True):
    row[: len(overflow)] = overflow
  found = [jax.tree.map(lambda *xs: np.stack(xs), *states)]
  for overflow in padded.T:
    found.append(step(found[-1], overflow))
  found = jax.tree.map(lambda *xs: np.stack(xs, 1), *jax.device_get(found[1:]))
  return [
    jax.tree.map(lambda x, i=i: x[i, : len(overflows[i])], found)
    for i in range(len(overflows))
  ]


def follow(system, runs):
  """Replays runs with the same arguments, from their start and resumed.

  Asserts that S and the dictionaries are the original's, and returns how many
  steps of each sequence were compared.
  """
  arguments = runs[0]["arguments"]
  rule = getattr(presets, system)(**arguments)
  records, states = list(runs), [rule.init()] * len(runs)
  overflows = [overflows_of(run) for run in runs]
  middle = len(overflows[0]) // 2
  importable = [i for i, run in enumerate(runs) if is_importable(run)]
  for i in importable:
    saved = saved_dict(system, runs[i])
    same, state = presets.from_state_dict(system, saved, **arguments)
    assert same == rule
    if system == "apex_hysteresis":  # NeMo saves this and does not read it.
      saved["_hysteresis_tracker"][:] = arguments.get("hysteresis", 1)
    assert_saves(system, rule, state, saved)
    records.append(runs[i]["resumed"])
    states.append(state)
    overflows.append(overflows[i][middle:])
  replayed = replay(rule, states, overflows)
  exactly = is_exact(system, arguments)
  if exactly:
    for i in importable:
      state = jax.tree.map(lambda x: x[middle - 1], replayed[i])
      saved = saved_dict(system, runs[i])
      assert_saves(system, rule, state, saved)
  return [
    assert_follows(rule, exactly, *given)
    for given in zip(records, overflows, replayed, strict=True)
  ]


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


def assert_saves(system, rule, state, saved):
  """Asserts that a preset writes what its original saved."""
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
  ours, theirs = (
    {path: described(value) for path, value in values.items()}
    for values in (written, expected)
  )
  assert ours == theirs, f"{ours}, and the original saved {theirs}"
