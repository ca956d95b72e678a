"""The rule that keeps bits free, against its model and what it promises."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import amax_rules as reference
from tests.rules import runs

Headroom = ols.rules.HeadroomLossScale


def scales_of(rule, steps):
  """Returns S after each of some (overflow, scaled amax), as exponents."""
  overflows, amaxes = zip(*steps, strict=True)
  scales, _ = runs.trajectories(
    rule,
    np.asarray([overflows]),
    np.asarray([amaxes], np.float32),
  )
  return np.log2(scales[0]).tolist()


def lost_steps(rule, true_amax):
  overflows, _, _ = runs.closed_loop(rule, np.asarray(true_amax, np.float32))
  return np.flatnonzero(overflows).tolist()


# Against the model.


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "length"),
  [
    ({"window": 2}, 4),
    ({"window": 3, "headroom": 0, "init_scale": 2.0**32}, 4),
    ({"window": 1, "headroom": 3, "init_scale": 3.0}, 3),
    ({"window": 2, "min_scale": 0.75, "max_scale": 5.0}, 3),
  ],
  ids=support.name,
)
def test_every_short_run_gives_the_scales_of_the_model(arguments, length):
  runs.assert_as_the_model(
    Headroom(**arguments),
    lambda: reference.Headroom(**arguments),
    *runs.every_short_run(length),
  )


@pytest.mark.parametrize(
  "arguments",
  [
    {},
    {"window": 7, "headroom": 3, "init_scale": 2.0**40},
    {
      "window": 20,
      "headroom": 0,
      "min_scale": support.SMALLEST,
      "max_scale": support.LARGEST,
    },
  ],
  ids=support.name,
)
def test_long_random_runs_give_the_scales_of_the_model(arguments):
  rule = Headroom(**arguments)
  true_amax = runs.random_true_amax(0, 3000)
  others = np.random.default_rng(1).random(3000) < 0.003
  overflows, amaxes, scales = runs.closed_loop(rule, true_amax, others)
  expected, _ = runs.expected(
    lambda: reference.Headroom(**arguments),
    overflows[None],
    amaxes[None],
  )
  np.testing.assert_array_equal(scales, expected[0])


@pytest.mark.parametrize(
  "dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
)
def test_the_limit_is_the_largest_of_the_dtype_to_the_last_bit(dtype):
  limit = np.float32(jnp.finfo(dtype).max)
  rule = Headroom(headroom=0, window=1, dtype=dtype, min_scale=2.0**-126)
  doublings = np.arange(1, 5)
  fits = np.ldexp(limit, -doublings)
  above = (fits.view(np.uint32) + np.uint32(1)).view(np.float32)
  amaxes = np.concatenate([fits, above])[:, None]
  scales, _ = runs.trajectories(rule, np.zeros(amaxes.shape, bool), amaxes)
  exponents = np.log2(scales[:, 0])
  np.testing.assert_array_equal(exponents, [*doublings, *doublings - 1])


def test_a_float64_computation_has_bounds_only():
  with jax.enable_x64(True):
    rule = Headroom(dtype=jnp.float64, window=1)
    state = jax.jit(rule.update)(rule.init(), False, amax=1.0)
    assert state.loss_scale == 2.0**126
    assert state.loss_scale.dtype == jnp.float32


# What it promises.


def test_a_first_scale_of_two_to_the_32_costs_two_steps():
  for true_amax in (2.0**-4, 1.0, 100.0):
    lost = lost_steps(Headroom(2.0**32), np.full(50, true_amax))
    assert len(lost) <= 2


def test_gradients_that_grow_slower_than_the_headroom_lose_no_step():
  true_amax = np.exp2(np.linspace(-20, 20, 60))
  assert lost_steps(Headroom(headroom=1), true_amax) == []


def test_the_largest_window_is_kept_in_a_quarter_of_a_mebibyte():
  state = Headroom(window=2**16).init()
  assert support.size(state) < 2**18 + 100


@pytest.mark.parametrize("window", [2**16 + 1, 2**31 - 1])
def test_a_window_that_the_state_would_be_too_large_for_is_refused(window):
  match = f"`window` must be at most .*got {window}: the state has an entry"
  with pytest.raises(ValueError, match=match):
    Headroom(window=window)


def test_one_spike_counts_for_the_window_and_no_longer():
  rule = Headroom(window=3, headroom=1)
  true_amax = np.asarray([1, 1, 2, 1, 1, 1, 1], np.float32)
  _, _, scales = runs.closed_loop(rule, true_amax)
  assert np.log2(scales).tolist() == [14, 14, 13, 13, 13, 14, 14]


def test_overflows_in_a_row_take_the_scale_on_down():
  steps = [(False, 1.0)] + [(True, math.inf)] * 4
  assert scales_of(Headroom(headroom=1), steps) == [14, 13, 11, 8, 4]


@pytest.mark.parametrize(
  "amax", [runs.FLOAT16_MAX, 1.0, 0.0, math.nan, math.inf]
)
def test_an_overflow_halves_the_scale_or_more_whatever_amax_says(amax):
  steps = [(False, 1.0), (True, amax)]
  expected = 13 - 2 if amax == runs.FLOAT16_MAX else 13 - 1
  assert scales_of(Headroom(headroom=2), steps) == [13, expected]


def test_an_amax_beyond_the_limit_says_by_how_much():
  steps = [(False, 1.0), (True, 65504.0 * 16)]
  assert scales_of(Headroom(headroom=1), steps) == [14, 9]


def test_an_amax_that_is_not_finite_is_an_overflow_by_itself():
  steps = [(False, 1.0), (False, math.nan), (False, math.inf)]
  assert scales_of(Headroom(headroom=1), steps) == [14, 13, 11]


def test_zeros_let_the_scale_leap_until_something_is_known():
  zeros, known = [(False, 0.0)] * 3, [(False, 1.0)]
  rule = Headroom(2.0**-14, max_scale=2.0**30)
  assert scales_of(rule, zeros + known) == [2, 18, 30, 30]


def test_zeros_between_other_steps_change_nothing():
  steps = [(False, 1.0), (False, 0.0), (False, 0.0)]
  assert scales_of(Headroom(window=3), steps) == [14, 14, 14]


def test_zeros_for_a_window_let_the_scale_leap_again():
  steps = [(False, 1.0)] + [(False, 0.0)] * 3
  assert scales_of(Headroom(window=2), steps) == [14, 14, 30, 32]


def test_a_leap_stays_below_what_has_just_overflowed():
  steps = [(True, math.inf), (False, 0.0), (False, 0.0)]
  rule = Headroom(2.0**20, window=3, headroom=1)
  assert scales_of(rule, steps) == [4, 19, 19]


def test_an_overflow_before_any_amax_is_known_is_forgotten_with_the_first():
  steps = [(True, math.nan), (False, 2.0**-20)]
  assert scales_of(Headroom(), steps) == [-14, 20]


def test_a_jump_of_amax_is_followed_as_soon_as_it_is_seen():
  true_amax = np.asarray([1.0] * 3 + [2.0**8] * 8, np.float32)
  overflows, _, scales = runs.closed_loop(Headroom(window=8), true_amax)
  # From 2**14 to 2**4 in four steps, where it sees that 2**6 has its bit.
  assert np.flatnonzero(overflows).tolist() == [3, 4, 5, 6]
  assert np.log2(scales)[2:].tolist() == [14, 13, 11, 8, 4] + [6] * 4


def test_what_amax_does_not_show_is_remembered_and_tried_again_slowly():
  rule, true_amax = Headroom(window=10), 2.0**-10
  update = jax.jit(rule.update)
  state, scales = rule.init(), []
  for _ in range(300):
    # Something overflows above 2**12; amax would allow 2**24.
    overflow = state.loss_scale > 2.0**12
    scales.append(float(state.loss_scale))
    amax = jnp.where(overflow, jnp.inf, true_amax * state.loss_scale)
    state = update(state, overflow, amax=amax)
  lost = np.flatnonzero(np.asarray(scales) > 2.0**12)
  # Five to come down to 2**9, then one of each 41 that are above 2**12.
  assert lost.tolist() == [1, 2, 3, 4, 5, 166, 207, 248, 289]


def test_overflows_that_come_one_by_one_take_the_scale_16_bits_down_at_most():
  rule = Headroom(window=10)
  update, state = jax.jit(rule.update), rule.init()
  for i in range(400):
    is_bad = i % 8 == 5
    amax = jnp.where(is_bad, jnp.nan, 2.0**-10 * state.loss_scale)
    state = update(state, is_bad, amax=amax)
  assert state.loss_scale == 2.0 ** (24 - 16)


def test_a_subnormal_amax_counts_as_zero():
  steps = [(False, runs.SUBNORMAL)]
  assert scales_of(Headroom(), steps) == scales_of(Headroom(), [(False, 0.0)])


def test_a_scale_set_by_hand_that_is_no_power_of_two_costs_one_bit_at_most():
  rule = Headroom(window=1, headroom=1)
  state = rule.init()._replace(loss_scale=jnp.float32(3.0))
  # True amax is 0.984375, which has one bit left at 2**15.
  state = rule.update(state, False, amax=2.953125)
  assert state.loss_scale == 2.0**14
  state = rule.update(state, False, amax=0.984375 * 2.0**14)
  assert state.loss_scale == 2.0**15


def test_another_headroom_holds_from_the_next_step_on():
  state = Headroom(headroom=1).init()
  state = Headroom(headroom=1).update(state, False, amax=1.0)
  amax = state.loss_scale
  state = Headroom(headroom=5).update(state, False, amax=amax)
  assert state.loss_scale == 2.0**10


# In training.


def test_a_tap_shows_an_overflow_that_the_parameters_hide():
  half = jnp.float16

  def loss_fn(params, found):
    # The gradient of what the tap is on is 2**12 times that of the parameter:
    # a layer scale, as in many a deep model.
    hidden = (params * half(2.0**-12)).astype(half)
    hidden = ols.hardware.amax_tap(hidden, found)
    return jnp.sum(hidden.astype(jnp.float32))

  params = jnp.ones(2, half)
  rule = Headroom(headroom=1, window=4)
  tx = ols.loss_scaling(optax.sgd(1.0), rule, check=ols.nonfinite(half))

  @jax.jit
  def step(state, found):
    loss = ols.scaled_value_and_grad(loss_fn, state, argnums=(0, 1))
    _, (scaled_grads, seen) = loss(params, jnp.float32(0))
    return tx.update(scaled_grads, state, params, amax=seen * found)[1], seen

  seen_by_tap, hidden = tx.init(params), tx.init(params)
  for _ in range(4):
    seen_by_tap, seen = step(seen_by_tap, jnp.float32(1))
    assert jnp.isfinite(seen)
    assert not seen_by_tap.overflow
    hidden, _ = step(hidden, jnp.float32(0))
  assert ols.get_loss_scale(seen_by_tap) == 2.0**14
  # Without the tap, S follows the parameters' small gradients up to where the
  # activation's are inf.
  assert ols.get_loss_scale(hidden) > 2.0**16
