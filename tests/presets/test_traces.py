"""Every preset against what was recorded from the original itself."""

import pytest

from optax_lossscale import presets
from tests import documents
from tests import support
from tests.presets import traces

OTHERS = {
  "PresetLossScale",
  "accelerate_train_mode",
  "from_state_dict",
  "npu_loss_scale_optimizer",
  "raise_if_failed",
  "to_state_dict",
}
PRESETS = sorted(set(presets.__all__) - OTHERS)
COMPARISON = documents.section(
  documents.read("docs/porting/README.md"), "How this was compared"
)


each_system = pytest.mark.parametrize(
  "system", support.slow_but(["megatron"], traces.SYSTEMS)
)


def test_every_preset_has_a_trace_of_its_original():
  assert traces.SYSTEMS == PRESETS


@each_system
def test_a_preset_moves_s_as_the_original_did(system):
  outcomes = traces.outcomes(system)
  assert sum(outcome.mismatches for outcome in outcomes) == 0
  assert [x.problems for x in outcomes if x.problems] == []


@each_system
def test_the_porting_guide_has_the_numbers_of_the_replay(system):
  outcomes = traces.outcomes(system)
  row = (
    f"`{system}`",
    traces.load(system)["version"],
    str(len(outcomes)),
    str(sum(outcome.compared for outcome in outcomes)),
    str(sum(outcome.mismatches for outcome in outcomes)),
  )
  assert f"| {' | '.join(row)} |" in COMPARISON.splitlines()


@each_system
def test_a_trace_shows_what_it_is_to_show(system):
  runs = traces.load(system)["runs"]
  assert any("state_dict" in run for run in runs)
  # Most of the steps, resumed ones included, are comparable.
  compared = sum(outcome.compared for outcome in traces.outcomes(system))
  assert compared > 0.8 * sum(len(run["overflows"]) for run in runs)
  if system not in ("megatron_constant", "mindspore_fixed", "npu_fixed"):
    moves = [len(run["scales"]) for run in runs]
    assert max(moves) > 20


@pytest.mark.parametrize("system", ["deepspeed", "fairseq", "mindspore"])
def test_a_trace_of_a_system_that_ends_runs_shows_such_an_end(system):
  assert any(run["raised"] for run in traces.load(system)["runs"])
