"""The default task shows the difference that loss scaling makes."""

import json

import pytest

from optax_lossscale import cli

# Without LLVM's optimizations it would take three times as long. The notebooks
# on the quickstart and on Equinox show the same of smaller tasks.
pytestmark = [pytest.mark.usefixtures("full_compilation"), pytest.mark.long]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_float16_alone_fails_where_float16_with_loss_scaling_is_float32(
  seed, tmp_path
):
  arguments = ["train", f"--seed={seed}", f"--output={tmp_path}"]
  assert cli.main(arguments) == 0
  report = json.loads((tmp_path / "brier.json").read_text())
  float32, *others = report["runs"]
  way = float32["held_out"] - float32["start"]
  assert way > 0.3
  alone, *scaled = (
    (run["held_out"] - float32["start"]) / way for run in others
  )
  assert alone < 0.3
  assert len(scaled) == 2 and min(scaled) > 0.995
  assert 1 <= sum(run["skipped_steps"] for run in others) <= 4
