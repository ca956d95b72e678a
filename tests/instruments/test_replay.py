"""A replay does what the wrapper does, and reads overflows as it says."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale import presets
from tests.instruments.histories import make_history
from tests.support import assert_same_bits

INF, NAN = math.inf, math.nan
# Amax over S: 11 bits each, as float16 has, and spread so that rules move.
UNSCALED = np.ldexp(
  np.float16(np.random.default_rng(0).integers(1024, 2048, 60)),
  np.random.default_rng(1).integers(-12, -6, 60),
)
UNSCALED[7], UNSCALED[20:22], UNSCALED[33] = 0, 64.0, 2.0**14
STEPS = len(UNSCALED)


class RuleState(NamedTuple):
  loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class LooksAtAmax(ols.LossScale):
  """A user's rule, and how often its update was traced."""

  factor: float = 16.0
  traced = 0

  def init(self):
    return RuleState(jnp.float32(2.0**20))

  def update(self, state, overflow, *, amax=None):
    type(self).traced += 1
    fits = state.loss_scale * jnp.where(amax < 256, self.factor, 1)
    return RuleState(jnp.where(overflow, state.loss_scale / 4, fits))


@dataclasses.dataclass(frozen=True)
class Falls(ols.LossScale):
  """A rule of a user who forgot a floor."""

  def init(self):
    return RuleState(jnp.float32(1.0))

  def update(self, state, overflow, *, amax=None):
    return RuleState(state.loss_scale * 2.0**-60)


class Unhashable(LooksAtAmax):
  __hash__ = None


RULES = {
  "fixed": ols.FixedLossScale(2.0**14, skip=False),
  "dynamic": ols.DynamicLossScale(
    2.0**24, growth_interval=3, hysteresis=2, min_scale=2.0**10
  ),
  "megatron": presets.megatron(growth_interval=2),
  "fairseq": presets.fairseq(scale_window=3, tolerance=0.25),
  "npu": presets.npu_exponential(
    init_loss_scale=2.0**20, incr_every_n_steps=4, decr_ratio=0.5
  ),
  "user": LooksAtAmax(),
}


def wrapped(rule, check, gradient_of):
  """Trains with the wrapper on gradients that are made of the history."""
  tx = ols.loss_scaling(optax.sgd(1.0), rule, check=check)

  @jax.jit
  def train(unscaled, is_nan):
    def step(state, x):
      scale = ols.get_loss_scale(state)
      gradient = jnp.where(x[1], jnp.nan, gradient_of(x[0] * scale))
      _, after = tx.update({"w": gradient}, state)
      return after, (scale, after.overflow, after.skipped, after.stalled)

    state = tx.init({"w": jnp.float32(0)})
    return jax.lax.scan(step, state, (unscaled, is_nan))[1]

  return train(np.float32(UNSCALED), np.arange(STEPS) == 40)


def to_float16(x):
  return x.astype(jnp.float16)


def clipped(x):
  return jnp.minimum(x, 65504).astype(jnp.float16)


@functools.cache
def the_history():
  """Recorded at an S of 1, where only the NaN is an overflow."""
  unscaled = UNSCALED.copy()
  unscaled[40] = NAN
  return make_history(unscaled)


def assert_outcome(replay, outcome):
  history = replay.history
  got = history.loss_scale, history.overflow, replay.skipped, replay.stalled
  assert_same_bits(got, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_replay_is_what_the_wrapper_does(name):
  rule = RULES[name]
  outcome = wrapped(rule, ols.nonfinite(), to_float16)
  assert 1 < np.sum(outcome[1]) < STEPS - 10
  assert_outcome(instruments.replay(rule, the_history()), outcome)


def test_replay_is_what_the_wrapper_does_on_saturating_hardware():
  rule = RULES["user"]
  outcome = wrapped(rule, ols.saturated(jnp.float16), clipped)
  replay = instruments.replay(
    rule, the_history(), check=ols.saturated(jnp.float16)
  )
  assert_outcome(replay, outcome)
  assert replay.history.amax[replay.history.overflow][0] == 65504


def test_recorded_run_replays_to_itself():
  rule = RULES["dynamic"]
  tx = instruments.record(ols.loss_scaling(optax.sgd(1.0), rule), 20)

  @jax.jit
  def train():
    def step(state, unscaled):
      gradient = to_float16(unscaled * ols.get_loss_scale(state))
      return tx.update({"w": gradient}, state)[1], None

    state = tx.init({"w": jnp.float32(0)})
    return jax.lax.scan(step, state, np.float32(UNSCALED[:20]))[0]

  recorded = instruments.get_history(train())
  assert np.any(np.isinf(recorded.amax))
  for kept, again in zip(
    recorded, instruments.replay(rule, recorded).history, strict=True
  ):
    np.testing.assert_array_equal(again, kept)


def fixed(exponent, history, **options):
  """The overflows and amax of a history at an S of 2**exponent."""
  rule = ols.FixedLossScale(2.0**exponent)
  replayed = instruments.replay(rule, history, **options).history
  return replayed.overflow.tolist(), replayed.amax.tolist()


def test_recorded_inf_overflows_from_its_scale_on():
  history = make_history([INF, 1.0], scale=2.0**10)
  assert fixed(11, history) == ([True, False], [INF, 2.0**11])
  assert fixed(10, history) == ([True, False], [INF, 2.0**10])
  # Below it is clean, with the largest amax that it can have had.
  assert fixed(9, history) == ([False, False], [65504 / 2, 2.0**9])


def test_overflow_with_amax_near_the_limit_is_of_the_scale():
  history = make_history([32753 / 2**10], scale=2.0**10, overflow=True)
  assert fixed(10, history) == ([True], [32753])
  assert fixed(9, history) == ([False], [32753 / 2])


def test_overflow_with_amax_a_bit_below_the_limit_is_one_at_every_scale():
  history = make_history([32752 / 2**10], scale=2.0**10, overflow=True)
  assert fixed(10, history) == ([True], [32752])
  assert fixed(0, history) == ([True], [32752 / 2**10])


def test_scale_that_differs_by_rounding_is_that_of_the_record():
  history = make_history([INF, 60.0], scale=2.0**10)
  rule = ols.FixedLossScale(2.0**10 * (1 - 1e-5))
  replay = instruments.replay(rule, history)
  assert replay.history.overflow.tolist() == [True, False]
  assert replay.history.amax.tolist() == [INF, 60 * 2.0**10]


@pytest.mark.slow
def test_clean_step_at_the_limit_is_clean_at_its_scale():
  # At these S, amax / S * S rounds to more than it was.
  scales = np.float32(np.random.default_rng(0).uniform(1, 2000, 16))
  lost = 0
  for scale in scales:
    history = make_history([1.0], scale=scale)._replace(
      amax=np.float32([65504])
    )
    replay = instruments.replay(ols.FixedLossScale(float(scale)), history)
    assert replay.history.amax.tolist() == [65504]
    lost += replay.lost_steps
  assert lost == 0


def test_recorded_saturation_overflows_from_its_scale_on():
  history = make_history([65504 / 2**10], scale=2.0**10, overflow=True)
  assert fixed(10, history, check=ols.saturated(jnp.float16)) == (
    [True],
    [65504],
  )
  assert fixed(11, history, check=ols.saturated(jnp.float16)) == (
    [True],
    [65504],
  )
  assert fixed(9, history, check=ols.saturated(jnp.float16)) == (
    [False],
    [65504 / 2],
  )
  assert fixed(10, history) == ([True], [INF])


def test_largest_finite_value_is_an_overflow_in_saturation_only():
  history = make_history([65504.0])
  assert fixed(0, history) == ([False], [65504])
  assert fixed(0, history, check=ols.saturated(jnp.float16)) == (
    [True],
    [65504],
  )


def test_nan_above_what_its_neighbours_stood_is_of_the_scale():
  history = make_history(
    [NAN, NAN, 1.0, 1.0, NAN, 1.0, NAN],
    scale=2.0 ** np.array([12, 11, 10, 10, 11, 10, 11]),
  )
  assert fixed(10, history)[0] == [False] * 7
  # The first one is known to overflow from 2**12 on only.
  assert fixed(11, history)[0] == [False, True, False, False, True, False, True]


def test_nan_where_its_neighbours_stood_as_much_stays():
  history = make_history([1.0, NAN, NAN, 1.0, NAN], scale=[8, 8, 4, 4, 4])
  overflow, amax = fixed(0, history)
  assert overflow == [False, True, True, False, True]
  assert np.isnan(amax).tolist() == overflow


def test_nan_where_its_neighbours_came_near_the_limit_is_of_the_scale():
  unscaled = [1.5, NAN, 1.5, NAN, NAN]
  history = make_history(unscaled, scale=2.0 ** np.array([15, 15, 14, 14, 13]))
  assert fixed(15, history)[0] == [False, True, False, True, True]
  assert fixed(13, history)[0] == [False, False, False, False, True]
  assert fixed(12, history)[0] == [False] * 5


def test_nan_above_its_neighbours_is_of_the_scale_whatever_stood_before():
  history = make_history(
    [1.0, 1.0, 1.0, NAN, 1.0], scale=2.0 ** np.array([9, 5, 5, 6, 5])
  )
  assert fixed(6, history)[0] == [False, False, False, True, False]
  assert fixed(5, history)[0] == [False] * 5


@pytest.mark.parametrize("place", [0, 5, 31])
def test_nan_stays_only_where_all_the_steps_around_it_left_six_bits(place):
  # One of the 16 before it, or of the 16 after it.
  for largest, stays in ((65504 / 64, True), (65504 / 63, False)):
    unscaled = np.full(33, 1.0)
    unscaled[16] = NAN
    unscaled[place + (place >= 16)] = largest
    overflow, _ = fixed(-1, make_history(unscaled))
    assert overflow[16] == stays
  unscaled = np.full(35, 1.0)
  unscaled[17] = NAN
  unscaled[[0, 34]] = 65504
  assert fixed(-1, make_history(unscaled))[0][17]


def test_nan_that_stays_while_the_scale_falls_is_of_the_model():
  exponents = 15.0 - np.maximum(np.arange(30) - 4, 0)
  unscaled = np.where(np.arange(30) < 5, 1.5, NAN)
  history = make_history(unscaled, scale=2.0**exponents)
  overflow, amax = fixed(-20, history)
  # From 2**9 on: there the steps before it would have had 6 bits.
  assert np.isnan(amax).tolist() == (exponents <= 9).tolist() == overflow


def test_nan_without_a_clean_step_is_of_the_scale():
  history = make_history([NAN, NAN], scale=[8, 4])
  assert fixed(2, history)[0] == [False, True]
  assert fixed(1, history)[0] == [False, False]


def test_amax_of_zero_never_overflows():
  assert fixed(100, make_history([0.0])) == ([False], [0])


def test_scaled_amax_is_exact_where_the_unscaled_one_is_no_float32():
  history = make_history([np.ldexp(1.5, -140)], scale=2.0**100)
  assert fixed(126, history) == ([False], [math.ldexp(1.5, -14)])
  history = make_history([2.0**130], scale=2.0**-10)
  assert fixed(-126, history) == ([False], [16.0])


@pytest.mark.parametrize(
  ("dtype", "largest"),
  [(jnp.bfloat16, 127), ("float32", 127), (jnp.float8_e5m2, 15)],
)
def test_dtype_says_where_it_overflows(dtype, largest):
  history, check = make_history([1.0]), ols.nonfinite(dtype)
  assert fixed(largest, history, check=check)[0] == [False]
  assert fixed(largest, make_history([2.0]), check=check)[0] == [True]


def test_unusable_scale_is_held_and_told():
  replay = instruments.replay(Falls(), make_history([1.0] * 4))
  exponents = np.log2(replay.history.loss_scale).tolist()
  assert exponents == [0, -60, -120, -120]
  assert replay.stalled.tolist() == [False, False, True, True]
  assert replay.stalled_steps == 2


def test_a_rule_is_compiled_once():
  rule = LooksAtAmax(factor=2.0)
  instruments.replay(rule, make_history([1.0, 2.0]))
  before = LooksAtAmax.traced
  equal = LooksAtAmax(factor=2.0)
  for unscaled, dtype in (([3.0, 4.0], jnp.float16), ([0.0, NAN], jnp.float32)):
    check = ols.nonfinite(dtype)
    instruments.replay(equal, make_history(unscaled), check=check)
  assert LooksAtAmax.traced == before


def test_rule_that_has_no_hash_is_replayed():
  history = make_history(UNSCALED[:4])
  with_hash = instruments.replay(LooksAtAmax(), history)
  without = instruments.replay(Unhashable(), history)
  assert without.history.loss_scale.tolist() == (
    with_hash.history.loss_scale.tolist()
  )


def test_replay_may_begin_with_another_scale():
  rule = ols.DynamicLossScale(2.0**15, growth_interval=1)
  history = make_history([1.0] * 3, first_step=900)
  replay = instruments.replay(rule, history, loss_scale=8.0)
  assert replay.history.loss_scale.tolist() == [8, 16, 32]
  assert replay.history.step.tolist() == [900, 901, 902]


def test_figures_of_a_replay():
  history = make_history([2.0**5, 0.0, 2.0**3, 2.0**6])
  replay = instruments.replay(ols.FixedLossScale(2.0**10), history)
  clean = [math.log2(65504) - exponent for exponent in (15, 13)]
  assert replay.lost_steps == 1
  assert replay.mean_headroom == pytest.approx(np.mean(clean))
  assert replay.least_headroom == pytest.approx(clean[0])
  assert replay.worst_headroom == pytest.approx(clean[1])
  # The one that was lost: a fixed S follows nothing.
  assert replay.stalled_steps == 1


def test_overflow_that_is_not_skipped_is_a_lost_step():
  rule = ols.FixedLossScale(2.0**20, skip=False)
  replay = instruments.replay(rule, make_history([1.0]))
  assert replay.lost_steps == 1 and not replay.skipped.any()


@pytest.mark.parametrize("unscaled", [[], [NAN], [0.0]])
def test_figures_without_a_clean_step(unscaled):
  replay = instruments.replay(ols.FixedLossScale(), make_history(unscaled))
  assert math.isnan(replay.mean_headroom)
  assert replay.lost_steps == sum(map(math.isnan, unscaled))


class _IntegerScale(ols.FixedLossScale):
  def init(self):
    return super().init()._replace(loss_scale=jnp.int32(8))


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    (lambda t: instruments.replay("dynamic", t), TypeError, "`rule`"),
    (lambda t: instruments.replay(_IntegerScale(), t), TypeError, "float32"),
    (
      lambda t: instruments.replay(ols.FixedLossScale(), [1]),
      TypeError,
      "list",
    ),
    (
      lambda t: instruments.replay(ols.FixedLossScale(), t, check="ieee"),
      TypeError,
      "`check` must be made by",
    ),
    (
      lambda t: instruments.replay(
        ols.FixedLossScale(), t, check=ols.nonfinite()
      ),
      TypeError,
      "`check` must name the one dtype",
    ),
    (
      lambda t: instruments.replay(ols.FixedLossScale(), t, loss_scale=0),
      ValueError,
      "`loss_scale`",
    ),
  ],
)
def test_bad_arguments_are_told(call, error, words):
  with pytest.raises(error, match=words):
    call(make_history([1.0]))
