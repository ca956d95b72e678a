"""docs/guides/determinism.md: which runs have the same bits."""

import os
import pickle
import subprocess
import sys

import jax
import pytest

from tests import documents

pytestmark = pytest.mark.slow

PATH = "docs/guides/determinism.md"
# In a process that resumes, after the first block of the page.
RESUME = """
import pickle, sys
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
half = pickle.load(open(sys.argv[1], "rb"))
pickle.dump(bits(train(half, range(25, 60))), open(sys.argv[1], "wb"))
"""


def test_the_runs_have_the_bits_that_the_page_says(tmp_path):
  with documents.reading(PATH) as page:
    page.run()
  sharded, _ = page["train"](page["start"](), range(1), devices=8, fsdp=True)
  assert sharded["hidden"].sharding.spec == jax.P(None, "data")
  assert page["bits"](page["half"]) != page["bits"](page["whole"])

  path = tmp_path / "half.pickle"
  path.write_bytes(pickle.dumps(page["half"]))
  code = documents.blocks(documents.read(PATH))[0] + RESUME
  environment = os.environ | {"PYTHONPATH": str(documents.ROOT)}
  command = [sys.executable, "-c", code, path]
  subprocess.run(command, env=environment, check=True)
  assert pickle.loads(path.read_bytes()) == page["bits"](page["whole"])
