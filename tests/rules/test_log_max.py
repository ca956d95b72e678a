"""LogMax, compared with its model and its promises."""

import math

import jax
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import amax_rules as reference
from tests.rules import runs

LogMax = ols.rules.LogMaxLossScale


def assert_follows(rule, make_model, overflows, amaxes):
  """Asserts that S is always one of the values that the model allows."""
  assert rule.init().loss_scale == make_model().scale
  scales, stalled = runs.trajectories(rule, overflows, amaxes)
  for i in range(len(overflows)):
    model = make_model()
    for j in range(overflows.shape[1]):
      model.update(bool(overflows[i, j]), float(amaxes[i, j]))
      assert math.log2(scales[i, j]) in model.exponents
      assert stalled[i, j] == model.stalled
      model.follow(float(scales[i, j]))


@pytest.mark.parametrize(
  "arguments",
  [
    {},
    {"beta1": 0.5, "beta2": 0.75, "scale_min": 0.25, "scale_max": 2.0**20},
    # It starts at its ceiling, and its floor is no power of two.
    {"scale_min": 0.3, "scale_max": 0.5},
  ],
)
def test_every_short_run_gives_the_scales_of_the_model(arguments):
  assert_follows(
    LogMax(**arguments),
    lambda: reference.LogMax(**arguments),
    *runs.every_short_run(3),
  )


def test_long_random_runs_give_the_scales_of_the_model():
  arguments = {"beta1": 0.9, "beta2": 0.99, "overflow_std_dev": 1.0}
  rule = LogMax(**arguments)
  others = np.random.default_rng(1).random(2000) < 0.003
  overflows, amaxes, scales = runs.closed_loop(
    rule, runs.random_true_amax(0, 2000), others
  )
  assert_follows(
    rule, lambda: reference.LogMax(**arguments), overflows[None], amaxes[None]
  )
  assert set(np.frexp(scales)[0]) == {0.5}  # Powers of two.


def test_gradients_that_grow_for_good_cost_one_step_a_bit():
  rng = np.random.default_rng(0)
  true_amax = np.exp2(rng.normal(-3.0, 1.0, 600)).astype(np.float32)
  true_amax[300:] *= 2.0**16
  overflows, _, _ = runs.closed_loop(LogMax(), true_amax)
  assert sum(overflows[300:]) <= 20


def test_an_amax_beyond_the_limit_says_by_how_much():
  rule = LogMax(beta1=0.0, beta2=0.0)
  update = jax.jit(rule.update)
  state = update(rule.init(), False, amax=1.0)
  # Without a memory S fits the last amax alone, strictly.
  assert update(state, False, amax=state.loss_scale).loss_scale == 2.0**15
  clipped = update(state, True, amax=runs.FLOAT16_MAX)
  assert clipped.loss_scale == state.loss_scale / 4
  beyond = update(state, True, amax=2.0**20)
  assert beyond.loss_scale == state.loss_scale / 32


@pytest.mark.parametrize(("log_max", "exponent"), [(16.0, 8), (128.0, 120)])
def test_the_limit_is_two_to_the_log_max(log_max, exponent):
  # An amax of 2**4 and 3.09 deviations of a bit: 7.09 bits, rounded up.
  state = LogMax(log_max=log_max).update(LogMax().init(), False, amax=16.0)
  assert state.loss_scale == 2.0**exponent


def test_the_first_state_has_no_inf_that_a_debugging_switch_would_stop():
  with jax.debug_infs(True):
    LogMax().init()
    ols.rules.WarmStart(LogMax()).init()


@pytest.mark.parametrize(
  ("field", "bad"),
  [
    ("mean", math.nan),
    ("slow_mean", math.inf),
    ("variance", -1.0),
    ("weight", -1.0),
    ("slow_weight", -1.0),
    ("log2_ceiling", math.nan),
  ],
)
def test_damaged_statistics_start_over_at_the_same_scale(field, bad):
  rule, step = LogMax(), jax.jit(LogMax().update)
  state = rule.init()
  for _ in range(30):
    state = step(state, False, amax=state.loss_scale / 4)
  fresh = rule.init()._replace(loss_scale=state.loss_scale)
  damaged = state._replace(**{field: np.float32(bad)})
  for _ in range(3):
    amax = fresh.loss_scale / 4
    damaged = step(damaged, False, amax=amax)
    fresh = step(fresh, False, amax=amax)
    support.assert_same_bits(damaged, fresh)
  assert fresh.loss_scale > 1000
