"""Records how the original loss scalers move S, one file a system.

The tests compare the presets with the traces in `tests/traces`, since the
originals are big and cannot all share one environment. To record again, install
an original as its module in this folder says, and run from the repository's
root:

  python -m tools.originals.record keras tensorflow

Only the standard library and the original are needed; this file also runs on
Python 3.7, for TensorFlow 1. A trace holds the original's version, and for each
run the arguments, the overflows, S after every step, the state dictionary in
the middle, and S of a second original that continues from that dictionary.
"""

import argparse
import gzip
import importlib
import io
import json
import pathlib
import random

# The module in this folder that drives each system.
MODULES = {
  "pytorch": "torch torch_sharded megatron megatron_constant deepspeed "
  "deepspeed_legacy apex apex_hysteresis fairseq metaseq colossalai",
  "tensorflow": "tensorflow keras tf_exponential npu_exponential npu_fixed",
  "mindspore": "mindspore mindspore_fixed mindspore_amp mindspore_cell",
  "paddle": "paddle paddle_op",
  "jax": "flax jmp",
}
FOLDER = pathlib.Path(__file__).parents[2] / "tests" / "traces"
STEPS = 160


def sequences(seed):
  """Yields overflow sequences of all kinds: rare, frequent, in bursts, all."""
  generator = random.Random(seed)
  for rate in (0.0, 0.02, 0.15, 0.5, 0.9, 1.0):
    yield [generator.random() < rate for _ in range(STEPS)]
  # Both ways far enough to meet each bound: down, up, and down again.
  yield [
    generator.random() < (0.8, 0.05, 0.7)[3 * i // STEPS] for i in range(STEPS)
  ]
  # Bursts, as a real run has them.
  burst = []
  while len(burst) < STEPS:
    burst += [True] * generator.randint(1, 5) + [False] * generator.randint(
      1, 30
    )
  yield burst[:STEPS]


def changes(scales):
  """Returns [step, S] for each step on which S is another than before."""
  return [
    [step, scale]
    for step, scale in enumerate(scales)
    if step == 0 or scale != scales[step - 1]
  ]


def drive(original, scaler, overflows, start=0):
  """Returns S after each step, and the error that ended the run, if any."""
  scales = []
  for step, overflow in enumerate(overflows, start):
    try:
      scaler.update(overflow)
    except original.FAILURES as error:
      return scales, {
        "step": step,
        "error": type(error).__name__,
        "message": str(error),
      }
    scales.append(scaler.scale())
  return scales, None


def run(original, arguments, overflows):
  """Returns the record of one original on one sequence of overflows."""
  scaler = original(**arguments)
  half = len(overflows) // 2
  scales, raised = drive(original, scaler, overflows[:half])
  record = {
    "arguments": arguments,
    "overflows": "".join("01"[overflow] for overflow in overflows),
  }
  if raised is not None:
    return dict(record, scales=changes(scales), raised=raised)
  saved = scaler.state_dict()
  described = describe(saved)  # Before the first original goes on.
  more, raised = drive(original, scaler, overflows[half:], half)
  # A second original continues from what the first one has saved.
  second = original(**arguments)
  second.load_state_dict(saved)
  rest, raised_again = drive(original, second, overflows[half:])
  return dict(
    record,
    scales=changes(scales + more),
    raised=raised,
    state_dict=described,
    resumed={"scales": changes(rest), "raised": raised_again},
  )


def describe(value):
  """Returns a state dictionary with the type of each value beside it."""
  if isinstance(value, dict):
    return {key: describe(item) for key, item in value.items()}
  kind = type(value).__name__
  if hasattr(value, "tolist"):  # A NumPy value, or an array of a framework.
    kind = f"{str(value.dtype).rpartition('.')[2]}{list(value.shape)}"
    value = value.tolist()
  if not isinstance(value, (bool, int, float, list)):
    value = str(value)
  return {"type": kind, "value": value}


def record(name):
  """Returns the trace of a system."""
  (module,) = (key for key, names in MODULES.items() if name in names.split())
  original = importlib.import_module(f"{__package__}.{module}")
  original = original.SYSTEMS[name]
  runs = [
    run(original, arguments, overflows)
    for seed, arguments in enumerate(original.ARGUMENTS)
    for overflows in sequences(seed)
  ]
  # Rules that need longer sequences bring them, as (arguments, overflows).
  for arguments, overflows in getattr(original, "EXTRA_SEQUENCES", ()):
    runs.append(run(original, arguments, overflows))
  return {
    "system": name,
    "original": original.ORIGINAL,
    "version": original.version(),
    "runs": runs,
  }


def write(trace):
  """Writes a trace to its file; the same trace gives the same bytes."""
  path = FOLDER / f"{trace['system']}.json.gz"
  text = json.dumps(trace, separators=(",", ":"))
  path.write_bytes(_compress(text.encode()))
  steps = sum(len(run["overflows"]) for run in trace["runs"])
  runs = len(trace["runs"])
  print(f"{path.name}: {trace['version']}, {runs} runs, {steps} steps")


def _compress(data):
  # gzip.compress has no `mtime` on Python 3.7.
  buffer = io.BytesIO()
  with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as file:
    file.write(data)
  return buffer.getvalue()


def main(argv=None):
  """Records the systems that are named."""
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    usage=argparse.SUPPRESS,  # An error is one line.
  )
  names = " ".join(MODULES.values()).split()
  parser.add_argument("systems", nargs="+", choices=names, metavar="SYSTEM")
  for name in parser.parse_args(argv).systems:
    write(record(name))


if __name__ == "__main__":
  main()
