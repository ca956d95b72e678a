"""Writes down what a change that only moves code must leave as it is.

  python -m tools.book FOLDER

The folder gets the surface, the reports of `check_step` on the steps that the
tests, pages, notebooks and examples have, the jaxprs of steps, reports on the
precision of models, and the replay of the traces. Compare two of them by
`diff -r`.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# The tests that check or prove a step.
TESTS = """
  tests/instruments/step/test_laws.py tests/instruments/step/test_proof.py
  tests/instruments/step/test_check_step.py tests/test_silent_mistakes.py
  tests/autocast/test_marks.py tests/autocast/test_products.py
  tests/base/test_other_systems.py tests/examples/test_frameworks.py
  tests/guides tests/test_switches.py::test_a_step_is_proved_under
  tests/test_pages.py tests/test_porting.py tests/test_notebooks.py
  tests/test_package.py
"""


def normal(text):
  """Returns a text without what another place or run changes."""
  text = re.sub(r"0x[0-9a-f]+", "0x", text)
  text = re.sub(r"ipykernel_\d+/\d+", "ipykernel", text)
  text = re.sub(r"pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?", "pytest/", text)
  text = re.sub(r"\.py:\d+", ".py", text)
  text = re.sub(r"(optax_lossscale|tests)/[\w/]*?(\w+\.py)", r"\2", text)
  return "\n".join(
    x
    for x in text.splitlines()
    if "functions of the library do what they promise" not in x
  )


def reports(folder):
  """Runs the tests, and returns the reports that they made."""
  parts = folder / "parts"
  parts.mkdir()
  paths = [ROOT / "tools/book_hook", ROOT, os.environ.get("PYTHONPATH", "")]
  environment = os.environ | {
    "BOOK": str(parts),
    "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
  }
  options = ["-q", "-n", "2", "-m", "not long and not targets", "-p"]
  options += ["no:cacheprovider", "--tb=line"]
  subprocess.run(
    [sys.executable, "-m", "pytest", *options, *TESTS.split()],
    cwd=ROOT,
    env=environment,
    stdout=(folder / "pytest.log").open("w"),
    check=False,
  )
  found = {}
  for path in sorted(parts.iterdir()):
    for line in path.read_text().splitlines():
      entry = json.loads(line)
      key = " / ".join(entry[x] for x in ("test", "step", "kind"))
      found.setdefault(key, []).append(normal(entry["text"]))
    path.unlink()
  parts.rmdir()
  return "\n\n".join(
    f"=== {key}\n" + "\n---\n".join(sorted(found[key])) for key in sorted(found)
  )


def jaxprs():
  """Returns the jaxprs of steps."""
  import jax

  from tools import book_steps

  texts = []
  for name, make in book_steps.STEPS.items():
    step, *args = make()
    jaxpr = jax.make_jaxpr(step)(*args)
    texts.append(f"=== {name}\n{normal(str(jaxpr))}")
  return "\n\n".join(texts)


def precision():
  """Returns the reports on models at all levels."""
  import optax_lossscale as ols
  from optax_lossscale._autocast import levels
  from tools import book_steps

  texts = []
  for name, (loss_fn, *args) in book_steps.models().items():
    for level in levels.LEVELS:
      mixed = ols.autocast(loss_fn, level)
      report = ols.instruments.precision_report(mixed, *args)
      line = f"=== {name} at {level}\n{report.line}\n{report}"
      texts.append(normal(line))
  return "\n\n".join(texts)


def replays():
  """Returns S after each change of each run of the traces."""
  import numpy as np

  from optax_lossscale import presets
  from tests.presets import traces

  texts = []
  for system in traces.SYSTEMS:
    for runs in traces.groups(system):
      rule = getattr(presets, system)(**runs[0]["arguments"])
      overflows = [traces.overflows_of(run) for run in runs]
      states = traces.replay(rule, [rule.init()] * len(runs), overflows)
      for i, state in enumerate(states):
        scales = np.asarray(state.loss_scale, np.float64)
        (at,) = np.nonzero(np.diff(scales, prepend=np.nan))
        changes = [f"{j}:{scales[j].hex()}" for j in at]
        texts.append(
          f"{system} {runs[0]['arguments']} {i}: {' '.join(changes)}"
        )
  return "\n".join(texts)


def main():
  """Writes the book."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--only", nargs="*")
  options = parser.parse_args()
  folder = options.folder
  folder.mkdir(parents=True, exist_ok=True)
  from tests import surface

  pages = {
    "surface": surface.text,
    "jaxprs": jaxprs,
    "precision": precision,
    "replays": replays,
    "reports": lambda: reports(folder),
  }
  for name in options.only or pages:
    (folder / f"{name}.txt").write_text(pages[name]() + "\n")
    print(name, flush=True)


if __name__ == "__main__":
  main()
