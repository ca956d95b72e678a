"""The notebooks run from top to bottom, and what they store is what comes out.

After a change, `python -m tests.test_notebooks` runs them and stores the
outputs anew.
"""

import ast
import importlib.util
import pathlib
import re
import shutil
import sys
import tempfile
import tomllib
import types

from IPython.core import interactiveshell
import jax
import jax.numpy as jnp
import jupyter_client
from jupyter_client import kernelspec
import nbclient
import nbformat
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import proofs

ROOT = pathlib.Path(__file__).parent.parent
PATHS = sorted(ROOT.glob("notebooks/*.ipynb"))

each_notebook = pytest.mark.parametrize(
  "path", PATHS, ids=lambda path: path.stem
)


def run(notebook, folder):
  """Runs the cells in an empty folder, with the interpreter that runs this."""

  class Manager(jupyter_client.AsyncKernelManager):
    @property
    def kernel_spec(self):
      # A kernel that is installed may belong to another environment.
      return kernelspec.KernelSpec(
        argv=[
          *(sys.executable, "-m", "ipykernel_launcher"),
          *("-f", "{connection_file}"),
          # No settings and start-up files of whoever runs this.
          *("--ipython-dir", str(folder / "ipython")),
        ],
        # It trains more than it compiles: see .ci/run.
        env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        language="python",
      )

  work = folder / "work"
  work.mkdir()
  (folder / "ipython").mkdir()
  nbclient.NotebookClient(
    notebook,
    kernel_manager_class=Manager,
    timeout=600,
    record_timing=False,
    # Else they are cut where the kernel happens to send them.
    coalesce_streams=True,
    resources={"metadata": {"path": str(work)}},
  ).execute()


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def without_numbers(output):
  """Returns the kind of an output and its words, which no machine changes.

  The numbers in it depend on the release of JAX and on the processor. Those
  that matter are asserted in the notebook itself.
  """
  data = output.get("data", {})
  texts = (
    data.get("text/markdown"),
    data.get("text/plain"),
    output.get("text"),
  )
  text = "\n".join(filter(None, texts))
  words = re.sub(r"(?<![A-Za-z_])[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", text)
  return output.output_type, sorted(data), words.split()


def store_outputs(path):
  """Runs a notebook and writes it with its outputs."""
  notebook = nbformat.read(path, as_version=4)
  with tempfile.TemporaryDirectory() as folder:
    run(notebook, pathlib.Path(folder))
  # The other entries depend on the environment.
  notebook.metadata = {
    "kernelspec": {
      "display_name": "Python 3",
      "language": "python",
      "name": "python3",
    },
    "language_info": {"name": "python"},
  }
  nbformat.write(notebook, path)


@each_notebook
def test_a_notebook_is_short_begins_with_prose_and_ends_with_an_assertion(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  assert len(notebook.cells) <= 25
  assert notebook.cells[0].cell_type == "markdown"
  last = notebook.cells[-1]
  assert last.cell_type == "code"
  assert re.search(r"^assert\b", last.source, flags=re.MULTILINE)


@each_notebook
def test_what_is_stored_was_run_in_order_without_errors_and_warnings(path):
  cells = code_cells(nbformat.read(path, as_version=4))
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  for output in (x for cell in cells for x in cell.outputs):
    assert output.output_type != "error"
    assert output.get("name") != "stderr"


@each_notebook
def test_a_notebook_reads_neither_the_interpreter_nor_files(path):
  """Otherwise its numbers hold for one release of Python, or one machine."""
  code = "\n".join(x.source for x in code_cells(nbformat.read(path, 4)))
  modules = "inspect|os|pathlib|platform|sys|sysconfig"
  assert not re.findall(rf"^ *(?:import|from) +(?:{modules})\b", code, re.M)


@each_notebook
def test_a_notebook_opens_in_colab_and_installs_the_library_there(
  path, monkeypatch, tmp_path
):
  """A GPU gets JAX for CUDA. Where the library is, nothing is installed."""
  url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
  home = url["Source"].removeprefix("https://github.com/")
  notebook = nbformat.read(path, as_version=4)
  colab = f"https://colab.research.google.com/github/{home}/blob/main/notebooks"
  assert f"\n[Open in Colab]({colab}/{path.name})\n" in notebook.cells[0].source

  monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
  shell = interactiveshell.InteractiveShell()
  installed = []
  shell.register_magic_function(installed.append, magic_name="pip")
  find_spec, first = importlib.util.find_spec, code_cells(notebook)[0].source
  assert shell.run_cell(first).success and not installed
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name, *rest: (
      None if name == ols.__name__ else find_spec(name, *rest)
    ),
  )
  for found in (None, "/usr/bin/nvidia-smi"):
    monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
    assert shell.run_cell(first).success
  assert installed == [
    f'install -q "optax-lossscale[{extras}] @ git+{url["Source"]}"'
    for extras in ("plot", "cuda,plot")
  ]


# MindSpore's classes, to be copied from the notebook.


def of_mindspores_notebook(*classes):
  """Returns the names of these classes, and of what they import."""
  path = ROOT / "notebooks/mindspore_mixed_precision.ipynb"
  names = {"jax": jax, "jnp": jnp, "np": np, "ols": ols, "optax": optax}
  for cell in code_cells(nbformat.read(path, as_version=4)):
    tree = ast.parse(re.sub(r"^( *)%.*", r"\1pass", cell.source, flags=re.M))
    chosen = [x for x in tree.body if getattr(x, "name", None) in classes]
    exec(ast.unparse(ast.Module(chosen, [])), names)
  return names


def line_model(x=1.0, **arguments):
  """Returns the notebook's model of a line, and a batch whose inputs are x."""
  names = of_mindspores_notebook("Model")
  network = types.SimpleNamespace(
    apply=lambda variables, x, mutable: (variables["params"] @ x, {})
  )
  model = names["Model"](
    network,
    lambda outputs, targets: jnp.mean((outputs - targets) ** 2),
    optax.sgd(0.125),
    params={"params": jnp.ones((2, 2))},
    **arguments,
  )
  return model, (jnp.full((2, 3), x), jnp.zeros((2, 3)))


@pytest.mark.parametrize(
  ("level", "scale", "skips"),
  [("O0", 1, False), ("O2", 2**23, True), ("O3", 1, False), ("auto", 1, False)],
)
def test_the_level_decides_about_s_as_in_mindspore(level, scale, skips):
  # On an overflow, with the managers of mindspore 2.10.0, train/amp.py.
  model, batch = line_model(jnp.inf, amp_level=level)
  report = model.train(1, [batch])
  assert (report["loss_scale"], report["skipped"]) == (scale, skips)


def run_and_prove(notebook, folder):
  """Runs the cells, and returns what is not proved of their train steps."""
  before = f"""import sys
sys.path.append({str(ROOT)!r})
from tests import proofs
proving = proofs.proving()
not_proved = proving.__enter__()"""
  after = "proving.__exit__(None, None, None); print(repr(not_proved))"
  new_cell = nbformat.v4.new_code_cell
  notebook.cells = [new_cell(before), *notebook.cells, new_cell(after)]
  run(notebook, folder)
  _, *notebook.cells, last = notebook.cells
  return ast.literal_eval(last.outputs[0].text)


@pytest.mark.slow
@each_notebook
def test_a_run_shows_what_is_stored_and_its_steps_are_proved(path, tmp_path):
  notebook = nbformat.read(path, as_version=4)
  stored = [
    [without_numbers(output) for output in cell.outputs]
    for cell in code_cells(notebook)
  ]
  found = run_and_prove(notebook, tmp_path)
  assert found
  wrong = {name for name, problems in found.items() if problems}
  assert wrong <= proofs.IN_NOTEBOOKS.keys(), found
  for cell, outputs in zip(code_cells(notebook), stored, strict=True):
    fresh = [without_numbers(output) for output in cell.outputs]
    assert fresh == outputs, (
      f"The outputs of {path.name} are stale: run "
      f"`python -m tests.test_notebooks`. The cell is\n{cell.source}"
    )


if __name__ == "__main__":
  for path in PATHS:
    store_outputs(path)
