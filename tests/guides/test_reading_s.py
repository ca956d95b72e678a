"""The picture of S shows the shapes that its section explains."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import optax_lossscale as ols
from tests import documents

PAGE = documents.section(
  documents.read("docs/guides/instruments.md"), "How to read the curve of S"
)


def test_the_picture_is_the_one_that_the_code_draws(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with mpl.rc_context({"backend": "agg"}):
    names = documents.run(PAGE, {"np": np, "ols": ols, "plt": plt})
    plt.close(names["figure"])
  drawn, stored = (
    plt.imread(path)
    for path in ("reading_s.png", documents.ROOT / "docs/images/reading_s.png")
  )
  assert drawn.shape == stored.shape
  # Another version of matplotlib may draw letters and edges otherwise. Other
  # noise differs by 0.007, and another interval by 0.0017.
  assert np.abs(drawn - stored).mean() < 0.0015

  history = names["replay"].history
  lost = history.step[history.overflow].tolist()
  exponents = np.log2(history.loss_scale)
  limits = exponents + history.headroom()

  def between(first, last):
    return exponents[first - 1 : last]

  # A cliff: each step is skipped, and halves S.
  start = lost.index(next(x for x in lost if x - 1 not in [0, *lost])) - 1
  assert np.diff(between(1, start + 1)).tolist() == [-1] * start
  # A sawtooth at the largest S.
  teeth = [x for x in lost if 30 < x <= 500]
  assert len(teeth) > 5
  assert np.nanmax(np.abs(between(31, 500) - limits[30:500])) < 3
  # Stairs, one for each interval, and a line at the ceiling.
  steps = np.flatnonzero(np.diff(between(510, 1400))) + 511
  assert (np.diff(steps) == 50).all()
  assert not [x for x in lost if 510 < x < 1500]
  assert set(between(1000, 1500)) == {24}
  assert np.nanmin(limits[1000:1499]) > 26
  # A notch, and a fall to the floor.
  assert 1500 in lost
  assert set(between(1501, 1550)) == {23} and exponents[1550] == 24
  assert lost[lost.index(1851) :] == list(range(1851, 2001))
  assert exponents[-1] == 0


def test_bad_batches_that_outrun_growth_take_s_down():
  step = np.arange(1, 1001)
  bad = step % 60 == 0
  history = ols.instruments.History(
    step=step,
    loss_scale=np.ones(step.size, np.float32),
    amax=np.float32(np.where(bad, np.nan, 2.0**-12)),
    overflow=bad,
  )

  def last(**arguments):
    rule = ols.DynamicLossScale(**arguments)
    replay = ols.instruments.replay(rule, history)
    return replay.history.loss_scale[-1]

  assert last(growth_interval=100) < 2.0**0
  assert last(growth_interval=50) >= 2.0**14
  assert last(growth_interval=100, hysteresis=2) == 2.0**15
