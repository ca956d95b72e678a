"""A replay does what the wrapper would, and reads overflows as documented."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from tests import support
from tests.instruments.run.histories import make_history

INF, NAN = math.inf, math.nan
HALF, SATURATED = ols.nonfinite(jnp.float16), ols.saturated(jnp.float16)
# amax / S of a run: 11 bits each, as in float16, and spread so that rules move.
UNSCALED = np.ldexp(
  np.float16(np.random.default_rng(0).integers(1024, 2048, 60)),
  np.random.default_rng(1).integers(-12, -6, 60),
)
UNSCALED[7], UNSCALED[20:22], UNSCALED[33] = 0, 64.0, 2.0**14


@dataclasses.dataclass(frozen=True)
class LooksAtAmax(ols.LossScale):
  """A user's rule that counts how often its update was traced."""

  factor: float = 16.0
  traced = 0

  def init(self):
    return support.StubState(jnp.float32(2.0**20))

  def update(self, state, overflow, *, amax=None):
    type(self).traced += 1
    fits = state.loss_scale * jnp.where(amax < 256, self.factor, 1)
    return support.StubState(jnp.where(overflow, state.loss_scale / 4, fits))


@dataclasses.dataclass(frozen=True)
class Falls(ols.LossScale):
  """A user's rule without a floor."""

  def init(self):
    return support.StubState(jnp.float32(1.0))

  def update(self, state, overflow, *, amax=None):
    return support.StubState(state.loss_scale * 2.0**-60)


class Unhashable(LooksAtAmax):
  __hash__ = None


@pytest.mark.parametrize(
  ("rule", "check"),
  [
    (ols.DynamicLossScale(2.0**24, growth_interval=3), HALF),
    (LooksAtAmax(), SATURATED),
  ],
  ids=["dynamic", "amax, saturated"],
)
def test_a_recorded_run_replays_to_itself(rule, check):
  tx = ols.loss_scaling(optax.sgd(1.0), rule, check=check)
  tx = instruments.record(tx, 20)
  largest = 65504 if check.saturating else INF

  @jax.jit
  def train():
    def step(state, unscaled):
      gradient = jnp.minimum(unscaled * ols.get_loss_scale(state), largest)
      return tx.update({"w": gradient.astype(jnp.float16)}, state)[1], None

    state = tx.init({"w": jnp.float32(0)})
    return jax.lax.scan(step, state, np.float32(UNSCALED[:20]))[0]

  recorded = instruments.get_history(train())
  assert 1 < np.sum(recorded.overflow) < 19
  again = instruments.replay(rule, recorded, check=check).history
  for column, expected in zip(again, recorded, strict=True):
    np.testing.assert_array_equal(column, expected)


def at(exponent, history, check=HALF):
  """Returns overflow and amax of a history at an S of 2**exponent."""
  rule = ols.FixedLossScale(2.0**exponent)
  replayed = instruments.replay(rule, history, check=check).history
  return replayed.overflow.tolist(), replayed.amax.tolist()


def of_one(amax, *, exponent=10, overflow=False):
  """Returns a history of one step, recorded at an S of 2**exponent."""
  scale = 2.0**exponent
  return make_history([amax / scale], scale=scale, overflow=overflow)


# Each recorded step, a check, another log2 of S, and overflow and amax there.
STEPS = {
  "inf, larger S": (of_one(INF), HALF, 11, True, INF),
  "inf, smaller S": (of_one(INF), HALF, 9, False, 65504 / 2),
  # S caused an overflow whose amax is less than a bit below the limit.
  "near the limit, same S": (
    of_one(32753, overflow=True),
    *(HALF, 10, True, 32753),
  ),
  "near the limit, smaller S": (
    of_one(32753, overflow=True),
    *(HALF, 9, False, 32753 / 2),
  ),
  "the caller's overflow": (
    of_one(32752, overflow=True),
    *(HALF, 0, True, 32752 / 2**10),
  ),
  "saturated, smaller S": (
    of_one(65504, overflow=True),
    *(SATURATED, 9, False, 65504 / 2),
  ),
  "saturated, other check": (
    of_one(65504, overflow=True),
    *(HALF, 10, True, INF),
  ),
  "largest value": (of_one(65504), HALF, 10, False, 65504),
  "largest value, saturated": (of_one(65504), SATURATED, 10, True, 65504),
  "subnormal amax / S": (
    make_history([np.ldexp(1.5, -140)], scale=2.0**100),
    *(HALF, 126, False, math.ldexp(1.5, -14)),
  ),
  "amax / S above float32": (
    make_history([2.0**130], scale=2.0**-10),
    *(HALF, -126, False, 16.0),
  ),
  "another dtype": (
    of_one(2.0**15),
    *(ols.nonfinite("float32"), 15, False, 2.0**20),
  ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_recorded_step_is_read_at_another_scale(name):
  history, check, exponent, overflow, amax = STEPS[name]
  assert at(exponent, history, check) == ([overflow], [amax])


def test_a_scale_that_differs_by_rounding_counts_as_the_recorded_one():
  history = make_history([INF, 60.0], scale=2.0**10)
  rule = ols.FixedLossScale(2.0**10 * (1 - 1e-5))
  replay = instruments.replay(rule, history)
  assert replay.history.overflow.tolist() == [True, False]
  assert replay.history.amax.tolist() == [INF, 60 * 2.0**10]


def test_a_clean_step_at_the_limit_stays_clean_at_its_scale():
  # At some of these S, amax / S * S rounds to more than amax.
  for scale in np.float32(np.random.default_rng(0).uniform(1, 2000, 16)):
    history = make_history([65504 / np.float64(scale)], scale=scale)
    history = history._replace(amax=np.float32([65504]))
    replay = instruments.replay(LooksAtAmax(), history, loss_scale=float(scale))
    assert replay.history.amax == 65504 and replay.lost_steps == 0


# Each history with NaN, and the steps that overflow at each log2 of S.
NANS = {
  "S was above that of clean steps": (
    make_history(
      [NAN, NAN, 1.0, 1.0, NAN, 1.0, NAN],
      scale=2.0 ** np.array([12, 11, 10, 10, 11, 10, 11]),
    ),
    # The first NaN says nothing about an S below 2**12.
    {10: [], 11: [1, 4, 6]},
  ),
  "steps with this S were clean": (
    make_history([1.0, NAN, NAN, 1.0, NAN], scale=[8, 8, 4, 4, 4]),
    {0: [1, 2, 4]},
  ),
  "clean steps were near the limit": (
    make_history(
      [1.5, NAN, 1.5, NAN, NAN], scale=2.0 ** np.array([15, 15, 14, 14, 13])
    ),
    {15: [1, 3, 4], 13: [4], 12: []},
  ),
  "only a distant step was clean at this S": (
    make_history(
      [1.0, 1.0, 1.0, NAN, 1.0], scale=2.0 ** np.array([9, 5, 5, 6, 5])
    ),
    {6: [3], 5: []},
  ),
  # From 2**9 on, the steps before it would have had 6 bits.
  "NaN while S fell": (
    make_history(
      np.where(np.arange(30) < 5, 1.5, NAN),
      scale=2.0 ** (15.0 - np.maximum(np.arange(30) - 4, 0)),
    ),
    {-20: [*range(10, 30)]},
  ),
}


@pytest.mark.parametrize("name", NANS)
def test_a_nan_is_of_the_scale_unless_clean_steps_around_it_disprove_that(name):
  history, by_exponent = NANS[name]
  found = {x: np.flatnonzero(at(x, history)[0]).tolist() for x in by_exponent}
  assert found == by_exponent


@pytest.mark.parametrize("place", [0, 31])
def test_a_nan_stays_if_16_clean_steps_on_each_side_left_six_bits(place):
  for largest, stays in ((65504 / 64, True), (65504 / 63, False)):
    unscaled = np.full(33, 1.0)
    unscaled[16] = NAN
    unscaled[place + (place >= 16)] = largest
    assert at(-1, make_history(unscaled))[0][16] == stays
  # Steps farther away do not matter.
  unscaled = np.full(35, 1.0)
  unscaled[17], unscaled[[0, 34]] = NAN, 65504
  assert at(-1, make_history(unscaled))[0][17]


def test_an_unusable_scale_is_held_and_counts_as_stalled():
  replay = instruments.replay(Falls(), make_history([1.0] * 4))
  exponents = np.log2(replay.history.loss_scale).tolist()
  assert exponents == [0, -60, -120, -120]
  assert replay.stalled.tolist() == [False, False, True, True]
  assert replay.stalled_steps == 2


def test_equal_rules_are_compiled_once():
  instruments.replay(LooksAtAmax(factor=2.0), make_history([1.0, 2.0]))
  before = LooksAtAmax.traced
  for unscaled, dtype in (([3.0, 4.0], jnp.float16), ([0.0, NAN], jnp.float32)):
    history, check = make_history(unscaled), ols.nonfinite(dtype)
    instruments.replay(LooksAtAmax(factor=2.0), history, check=check)
  assert LooksAtAmax.traced == before


def test_a_rule_without_a_hash_is_replayed():
  found = instruments.replay(Unhashable(), make_history([1.0, 2.0])).history
  assert found.loss_scale.tolist() == [2.0**20, 2.0**18]


def test_a_replay_may_begin_with_another_scale():
  rule = ols.DynamicLossScale(2.0**15, growth_interval=1)
  history = make_history([1.0] * 3, first_step=900)
  replay = instruments.replay(rule, history, loss_scale=8.0)
  assert replay.history.loss_scale.tolist() == [8, 16, 32]
  assert replay.history.step.tolist() == [900, 901, 902]


def test_the_figures_of_a_replay_are_those_of_its_steps():
  history = make_history([2.0**5, 0.0, 2.0**3, 2.0**6])
  replay = instruments.replay(ols.FixedLossScale(2.0**10), history)
  clean = [math.log2(65504) - exponent for exponent in (15, 13)]
  assert replay.lost_steps == 1 and replay.skipped.any()
  assert replay.mean_headroom == pytest.approx(np.mean(clean))
  assert replay.least_headroom == pytest.approx(clean[0])
  assert replay.worst_headroom == pytest.approx(clean[1])
  # A fixed S cannot react to the overflow.
  assert replay.stalled_steps == 1
  # An overflow that is not skipped is lost, too.
  rule = ols.FixedLossScale(2.0**10, skip=False)
  replay = instruments.replay(rule, history)
  assert replay.lost_steps == 1 and not replay.skipped.any()


@pytest.mark.parametrize("unscaled", [[], [NAN], [0.0]])
def test_the_mean_headroom_without_a_clean_step_is_unknown(unscaled):
  with jax.debug_nans(True):  # The NaN is that of the run.
    replay = instruments.replay(ols.FixedLossScale(), make_history(unscaled))
  assert math.isnan(replay.mean_headroom)
  assert replay.lost_steps == sum(map(math.isnan, unscaled))


class IntegerScale(ols.FixedLossScale):
  def init(self):
    return super().init()._replace(loss_scale=jnp.int32(8))


@pytest.mark.parametrize(
  ("changed", "error", "words"),
  [
    ({"rule": "dynamic"}, TypeError, "`rule`"),
    ({"rule": IntegerScale()}, TypeError, "float32"),
    ({"history": [1]}, TypeError, "`history` must be a History, got list"),
    ({"check": "ieee"}, TypeError, "`check` must be made by"),
    ({"check": ols.nonfinite()}, TypeError, "`check` must name the one dtype"),
    ({"loss_scale": 0}, ValueError, "`loss_scale`"),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_refused(changed, error, words):
  arguments = {"rule": ols.FixedLossScale(), "history": make_history([1.0])}
  with pytest.raises(error, match=words):
    instruments.replay(**arguments | changed)
