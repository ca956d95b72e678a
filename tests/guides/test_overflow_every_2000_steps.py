"""The page on regular overflows prints what it shows, and its causes hold."""

import numpy as np

import optax_lossscale as ols
from tests import documents

PAGE = documents.read("docs/guides/overflow_every_2000_steps.md")


def test_the_page_prints_what_it_shows(capsys):
  names = documents.run(PAGE, {"np": np, "ols": ols})
  assert capsys.readouterr().out == "".join(documents.blocks(PAGE, "text"))
  # Steps that differ by chance: one in 2001, at most.
  lost = names["replays"]["every 2000 steps"].lost_steps
  assert lost / len(names["step"]) < 1 / 2001
  scales = names["replays"]["every 2000 steps"].history.loss_scale
  assert set(scales[-4100:]) == {2.0**17, 2.0**18}


def replayed(log2_amax, bad, rule):
  """Returns the steps on which a rule overflows, from 1."""
  step = np.arange(1, len(log2_amax) + 1)
  history = ols.instruments.History(
    step=step,
    loss_scale=np.ones(step.size, np.float32),
    amax=np.float32(np.where(bad, np.nan, 2.0**log2_amax)),
    overflow=bad,
  )
  found = ols.instruments.replay(rule, history)
  return step[found.history.overflow], found


def test_the_causes_of_other_distances_are_those_of_the_table():
  clean, none = np.full(600, -2.0), np.zeros(600, bool)
  interval = {"growth_interval": 100}
  # The first S was too large.
  lost, _ = replayed(clean, none, ols.DynamicLossScale(2.0**21))
  assert lost.tolist() == [1, 2, 3, 4]
  # S tries the next power of two.
  lost, found = replayed(clean, none, ols.DynamicLossScale(**interval))
  assert np.diff(lost).tolist() == [101, 101]
  # A bad batch, far below the largest S.
  bad = none.copy()
  bad[[40, 60]] = True
  lost, found = replayed(clean, bad, ols.DynamicLossScale(**interval))
  assert lost[:2].tolist() == [41, 61]
  assert found.history.loss_scale[60] == 2.0**14
  # Every step is NaN: S falls and falls, and stalls at its floor.
  bad = np.arange(600) >= 150
  lost, found = replayed(clean, bad, ols.DynamicLossScale(**interval))
  assert lost.tolist() == list(range(151, 601))
  assert found.stalled_steps > 400
  # A fixed S cannot react.
  _, found = replayed(clean, none, ols.FixedLossScale(2.0**20))
  assert found.stalled_steps == found.lost_steps == 600
