"""The notebooks run from top to bottom, and what they store is what comes out.

After a change, `python -m tests.test_notebooks` runs them and stores the
outputs anew.
"""

import pathlib
import re
import sys
import tempfile

import jupyter_client
from jupyter_client import kernelspec
import nbclient
import nbformat
import pytest

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
  # What is left out depends on the environment.
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
def test_a_notebook_is_valid_and_short_and_begins_with_prose(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  assert len(notebook.cells) <= 25
  assert notebook.cells[0].cell_type == "markdown"


@each_notebook
def test_the_last_cell_asserts(path):
  last = nbformat.read(path, as_version=4).cells[-1]
  assert last.cell_type == "code"
  assert re.search(r"^assert\b", last.source, flags=re.MULTILINE)


@each_notebook
def test_what_is_stored_was_run_in_order(path):
  cells = code_cells(nbformat.read(path, as_version=4))
  assert [cell.execution_count for cell in cells] == [
    1 + i for i in range(len(cells))
  ]


@each_notebook
def test_neither_errors_nor_warnings_are_stored(path):
  for cell in code_cells(nbformat.read(path, as_version=4)):
    for output in cell.outputs:
      assert output.output_type != "error"
      assert output.get("name") != "stderr"


@pytest.mark.slow
@pytest.mark.parametrize(
  "path",
  [
    pytest.param(
      path,
      id=path.stem,
      # It trains for longest, and tests/precision trains in both modes as well.
      marks=[pytest.mark.long] * (path.stem == "accelerate_train_mode"),
    )
    for path in PATHS
  ],
)
def test_a_run_shows_what_is_stored(path, tmp_path):
  notebook = nbformat.read(path, as_version=4)
  stored = [
    [without_numbers(output) for output in cell.outputs]
    for cell in code_cells(notebook)
  ]
  run(notebook, tmp_path)
  for cell, outputs in zip(code_cells(notebook), stored, strict=True):
    fresh = [without_numbers(output) for output in cell.outputs]
    assert fresh == outputs, (
      f"The outputs of {path.name} are stale: run "
      f"`python -m tests.test_notebooks`. The cell is\n{cell.source}"
    )


if __name__ == "__main__":
  for path in PATHS:
    store_outputs(path)
