"""LogMax: corrected, and beside it as it was published."""

import itertools
import math

import jax
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import amax_rules as reference
from tests.rules import runs

LogMax = ols.rules.LogMaxLossScale


def normal_log_amax(seed, length, mean=-3.0, deviation=1.0):
  """Returns unscaled amax of which the logarithm is normal, float32[length]."""
  rng = np.random.default_rng(seed)
  return np.exp2(rng.normal(mean, deviation, length)).astype(np.float32)


def follow(rule, model, overflows, amaxes):
  """Asserts that S is after each step what the model allows it to be."""
  scales, stalled = runs.trajectories(rule, overflows, amaxes)
  for i in range(len(overflows)):
    steps = model()
    for j in range(overflows.shape[1]):
      steps.update(bool(overflows[i, j]), float(amaxes[i, j]))
      assert math.log2(scales[i, j]) in steps.exponents
      assert stalled[i, j] == steps.stalled
      steps.follow(float(scales[i, j]))


# Corrected.


@pytest.mark.parametrize(
  "arguments",
  [{}, {"beta1": 0.5, "beta2": 0.75, "scale_min": 0.25, "scale_max": 2.0**20}],
  ids=support.name,
)
def test_every_short_run_gives_the_scales_of_the_model(arguments):
  follow(
    LogMax(**arguments),
    lambda: reference.LogMax(**arguments),
    *runs.every_short_run(3),
  )


@pytest.mark.parametrize(
  "arguments",
  [{}, {"beta1": 0.9, "beta2": 0.99, "overflow_std_dev": 1.0}],
  ids=support.name,
)
def test_long_random_runs_give_the_scales_of_the_model(arguments):
  rule = LogMax(**arguments)
  others = np.random.default_rng(1).random(2000) < 0.003
  overflows, amaxes, _ = runs.closed_loop(
    rule, runs.random_true_amax(0, 2000), others
  )
  follow(
    rule,
    lambda: reference.LogMax(**arguments),
    overflows[None],
    amaxes[None],
  )


def test_the_share_of_lost_steps_is_at_most_that_of_the_model():
  true_amax = normal_log_amax(0, 20_000)
  overflows, _, _ = runs.closed_loop(LogMax(), true_amax)
  # 0.1 % is where the normal distribution has 3.09 deviations.
  assert np.sum(overflows[1000:]) <= 0.001 * 19_000


def test_one_overflow_costs_one_bit_for_a_hundred_steps():
  true_amax = normal_log_amax(0, 3000)
  true_amax[1500] = np.inf
  spared = true_amax.copy()
  spared[1500] = 0
  _, _, scales = runs.closed_loop(LogMax(), true_amax)
  _, _, without = runs.closed_loop(LogMax(), spared)
  bits = np.log2(without) - np.log2(scales)
  assert bits[1500] >= 1
  assert max(bits[1500:]) <= 2
  assert max(bits[1700:]) <= 1


def test_gradients_that_grow_for_good_cost_one_step_a_bit():
  for jump in (4, 10, 16):
    true_amax = normal_log_amax(0, 3000)
    true_amax[1000:] *= 2.0**jump
    overflows, _, _ = runs.closed_loop(LogMax(), true_amax)
    assert sum(overflows[1000:]) <= jump + 4


def test_overflows_in_a_row_take_the_scale_to_the_floor():
  true_amax = normal_log_amax(0, 300)
  true_amax[200:] = np.inf
  _, _, scales = runs.closed_loop(LogMax(), true_amax)
  ratios = scales[201:] / scales[200:-1]
  assert max(ratios) <= 1
  assert scales[-1] == 2.0**-14


def test_an_amax_beyond_the_limit_says_by_how_much():
  rule = LogMax(beta1=0.0, beta2=0.0)
  update = jax.jit(rule.update)
  state = update(rule.init(), False, amax=1.0)
  # Without a memory S fits the last x alone, strictly.
  assert update(state, False, amax=state.loss_scale).loss_scale == 2.0**15
  clipped = update(state, True, amax=runs.FLOAT16_MAX)
  assert clipped.loss_scale == state.loss_scale / 4
  beyond = update(state, True, amax=2.0**20)
  assert beyond.loss_scale == state.loss_scale / 32


def test_no_state_holds_an_inf_that_a_debugging_switch_would_stop():
  with jax.debug_infs(True):
    LogMax().init()
    ols.rules.WarmStart(LogMax()).init()


@pytest.mark.parametrize(
  ("field", "bad"),
  [
    *itertools.product(
      LogMax().init()._fields[1:], [math.nan, math.inf, -math.inf]
    ),
    *((field, -1.0) for field in ("variance", "weight", "slow_weight")),
  ],
)
def test_damaged_statistics_start_over_at_the_same_scale(field, bad):
  rule, step = LogMax(), jax.jit(LogMax().update)
  state = rule.init()
  for _ in range(100):
    state = step(state, False, amax=state.loss_scale / 4)
  fresh = rule.init()._replace(loss_scale=state.loss_scale)
  damaged = state._replace(**{field: np.float32(bad)})
  for _ in range(3):
    amax = fresh.loss_scale / 4
    damaged = step(damaged, False, amax=amax)
    fresh = step(fresh, False, amax=amax)
    support.assert_same_bits(damaged, fresh)
  assert fresh.loss_scale > 1000


def test_zeros_and_subnormal_amax_change_nothing():
  rule = LogMax()
  update = jax.jit(rule.update)
  state = update(rule.init(), False, amax=16.0)
  for amax in (0.0, runs.SUBNORMAL):
    after = update(state, False, amax=amax)
    assert [x.item() for x in after] == [x.item() for x in state]


def test_the_cut_off_is_log_max():
  state = LogMax().init()
  # 3.09 deviations of a bit are free above 16, and what is left of one.
  for log_max, exponent in ((10.0, 2), (16.0, 8), (128.0, 120)):
    state = LogMax(log_max=log_max).update(state, False, amax=16.0)
    assert state.loss_scale == 2.0**exponent
    state = LogMax().init()


def test_the_scale_is_always_a_power_of_two():
  _, _, scales = runs.closed_loop(LogMax(), runs.random_true_amax(2, 500))
  assert set(np.frexp(scales)[0]) == {0.5}


# As it was published: in the plain model of it.


def original_scales(true_amax, **arguments):
  """Returns S after each step, from unscaled amax."""
  model = reference.LogMaxOriginal(**arguments)
  scales = []
  for amax in map(float, true_amax):
    model.update(False, amax * model.scale)
    scales.append(model.scale)
  return scales


def test_one_overflow_does_not_pin_the_scale_as_it_does_the_original():
  # Constant gradients, so that nothing but the overflow moves S.
  true_amax = np.full(13_000, 2.0**-10, np.float32)
  true_amax[100] = np.inf
  original = original_scales(true_amax)
  assert original[99] == pytest.approx(2.0**14)
  assert original.count(1.0) == pytest.approx(11_010, abs=20)
  _, _, scales = runs.closed_loop(LogMax(), true_amax)
  assert min(scales[100:]) >= scales[99] / 4


def test_an_amax_of_zero_does_not_make_the_scale_nan_as_in_the_original():
  true_amax = np.float32([16.0, 0.0, 16.0, 16.0])
  original = original_scales(true_amax)
  assert np.isfinite(original[0]) and np.all(np.isnan(original[1:]))
  _, _, scales = runs.closed_loop(LogMax(), true_amax)
  assert np.all(np.isfinite(scales))


def test_the_original_cuts_off_at_16_and_stays_between_its_bounds():
  for log_max in (10.0, 16.0):
    (scale,) = original_scales([16.0], log_max=log_max)
    assert scale == pytest.approx(2.0**12)
  assert original_scales([2.0**-20]) == [2.0**14]
  assert original_scales([2.0**20]) == [1.0]
