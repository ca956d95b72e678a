"""Every preset compared with the recording of its original."""

import pytest

from tests import documents
from tests import support
from tests.presets import systems
from tests.presets import traces

each_system = pytest.mark.parametrize("system", traces.SYSTEMS)


def test_every_preset_has_a_trace_of_its_original():
  assert sorted(systems.SYSTEMS) == traces.SYSTEMS


@each_system
def test_a_preset_moves_s_saves_and_resumes_as_the_original_did(system):
  # Of the runs with exact numbers, those with the most arguments.
  found = [runs[0]["arguments"] for runs in traces.groups(system)]
  found = [x if traces.is_exact(system, x) else {} for x in found]
  assert traces.follow(system, found.index(max(found, key=len)))


@pytest.mark.parametrize(
  "system", support.slow_but(["megatron"], traces.SYSTEMS)
)
def test_a_preset_follows_every_recorded_run_and_the_guide_has_the_numbers(
  system,
):
  compared = []
  for group in range(len(traces.groups(system))):
    compared += traces.follow(system, group)
  row = (
    f"`{system}`",
    traces.load(system)["version"],
    str(len(compared)),
    str(sum(compared)),
    "0",
  )
  guide = documents.read("docs/porting/README.md")
  comparison = documents.section(guide, "How this was compared")
  assert f"| {' | '.join(row)} |" in comparison.splitlines()
