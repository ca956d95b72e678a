"""The rule that keeps bits free, compared with its model and its promises."""

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
INF = (True, math.inf)


def lost_steps(rule, true_amax):
  """Returns the indices of the steps that overflow."""
  return np.flatnonzero(runs.closed_loop(rule, true_amax)[0]).tolist()


@pytest.mark.parametrize(
  ("arguments", "length"),
  [
    ({"window": 2}, 4),
    ({"window": 3, "headroom": 0, "init_scale": 2.0**32}, 3),
    ({"window": 1, "headroom": 3, "init_scale": 3.0}, 3),
    ({"window": 2, "min_scale": 0.75, "max_scale": 5.0}, 3),
  ],
  ids=support.name,
)
def test_every_short_run_gives_the_scales_of_the_model(arguments, length):
  runs.assert_follows(
    Headroom(**arguments),
    lambda: reference.Headroom(**arguments),
    *runs.every_short_run(length),
  )


@pytest.mark.parametrize(
  "arguments",
  [
    {},
    {"window": 7, "headroom": 3, "init_scale": 2.0**40},
    {"window": 20, "headroom": 0, "min_scale": 2.0**-126},
  ],
  ids=support.name,
)
def test_long_random_runs_give_the_scales_of_the_model(arguments):
  rule = Headroom(**arguments)
  others = np.random.default_rng(1).random(2000) < 0.003
  overflows, amaxes, _ = runs.closed_loop(
    rule, runs.random_true_amax(0, 2000), others
  )
  runs.assert_follows(
    rule, lambda: reference.Headroom(**arguments), overflows[None], amaxes[None]
  )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
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


def test_the_largest_window_takes_a_quarter_of_a_mebibyte():
  state = Headroom(window=2**16).init()
  assert support.size(state) < 2**18 + 100


def test_a_first_scale_of_two_to_the_32_costs_two_steps():
  for true_amax in (2.0**-4, 1.0, 100.0):
    assert len(lost_steps(Headroom(2.0**32), np.full(50, true_amax))) <= 2


def test_gradients_that_grow_slower_than_the_headroom_lose_no_step():
  true_amax = np.exp2(np.linspace(-20, 20, 60))
  assert lost_steps(Headroom(headroom=1), true_amax) == []


# log2(S) after each step, from S = 1, or 2**14 after an amax of 1.
PROMISES = {
  "one overflow costs a bit and each further one a bit more": (
    Headroom(),
    [(False, 1.0), INF, INF, INF, INF],
    [14, 13, 11, 8, 4],
  ),
  "an amax that is not finite is an overflow by itself": (
    Headroom(),
    [(False, 1.0), (False, math.nan), (False, math.inf)],
    [14, 13, 11],
  ),
  "an amax beyond the limit says by how much": (
    Headroom(),
    [(False, 1.0), (True, 65504.0 * 16)],
    [14, 9],
  ),
  "an overflow halves S even if amax is small": (
    Headroom(),
    [(False, 1.0), (True, 1.0)],
    [14, 13],
  ),
  "zeros let S leap up to its bounds until something is known": (
    Headroom(2.0**-14, max_scale=2.0**30),
    [*[(False, 0.0)] * 3, (False, 1.0)],
    [2, 18, 30, 30],
  ),
  "a subnormal counts as a zero": (
    Headroom(),
    [(False, runs.SUBNORMAL)],
    [16],
  ),
  "zeros for a window let S leap again": (
    Headroom(window=2),
    [(False, 1.0)] + [(False, 0.0)] * 3,
    [14, 14, 30, 32],
  ),
  "a leap stays below an S that has just overflowed": (
    Headroom(2.0**20, window=3),
    [INF, (False, 0.0), (False, 0.0)],
    [4, 19, 19],
  ),
  "an overflow before any amax is forgotten with the first amax": (
    Headroom(),
    [(True, math.nan), (False, 2.0**-20)],
    [-14, 20],
  ),
}


@pytest.mark.parametrize(
  ("rule", "steps", "expected"), PROMISES.values(), ids=PROMISES
)
def test_the_rule_keeps_its_promise(rule, steps, expected):
  assert runs.scales_of(rule, steps).tolist() == expected


def test_one_spike_counts_for_the_window_and_no_longer():
  rule = Headroom(window=3, headroom=1)
  _, _, scales = runs.closed_loop(rule, [1, 1, 2, 1, 1, 1, 1])
  assert np.log2(scales).tolist() == [14, 14, 13, 13, 13, 14, 14]


def test_a_limit_that_amax_does_not_show_is_tried_again_slowly():
  rule, true_amax = Headroom(window=10), 2.0**-10
  update = jax.jit(rule.update)
  state, lost = rule.init(), []
  for i in range(300):
    # Something overflows above 2**12; amax would allow 2**24.
    overflow = state.loss_scale > 2.0**12
    lost += [i] * bool(overflow)
    amax = jnp.where(overflow, jnp.inf, true_amax * state.loss_scale)
    state = update(state, overflow, amax=amax)
  # Five to come down to 2**9, then one in every 41 steps.
  assert lost == [1, 2, 3, 4, 5, 166, 207, 248, 289]


def test_overflows_one_by_one_take_the_scale_down_by_16_bits_at_most():
  rule = Headroom(window=10)
  update, state = jax.jit(rule.update), rule.init()
  for i in range(200):
    is_bad = i % 8 == 5
    amax = jnp.where(is_bad, jnp.nan, 2.0**-10 * state.loss_scale)
    state = update(state, is_bad, amax=amax)
  assert state.loss_scale == 2.0 ** (24 - 16)


def test_another_headroom_holds_from_the_next_step_on():
  state = Headroom(headroom=1).init()
  state = Headroom(headroom=1).update(state, False, amax=1.0)
  state = Headroom(headroom=5).update(state, False, amax=state.loss_scale)
  assert state.loss_scale == 2.0**10


def test_a_tap_shows_an_overflow_that_the_parameters_hide():
  half = jnp.float16

  def loss_fn(params, found):
    # The activation's gradient is 2**12 times the parameter's, as behind a
    # layer scale in a deep model.
    hidden = (params * half(2.0**-12)).astype(half)
    hidden = ols.hardware.amax_tap(hidden, found)
    return jnp.sum(hidden.astype(jnp.float32))

  params = jnp.ones(2, half)
  rule = Headroom(headroom=1, window=4)
  tx = ols.loss_scaling(optax.sgd(1.0), rule, check=ols.nonfinite(half))

  @jax.jit
  def step(state, is_tapped):
    loss = ols.scaled_value_and_grad(loss_fn, state, argnums=(0, 1))
    _, (scaled_grads, seen) = loss(params, jnp.float32(0))
    amax = jnp.where(is_tapped, seen, 0)
    return tx.update(scaled_grads, state, params, amax=amax)[1]

  tapped, untapped = tx.init(params), tx.init(params)
  for _ in range(4):
    tapped, untapped = step(tapped, True), step(untapped, False)
    assert not tapped.overflow
  assert ols.get_loss_scale(tapped) == 2.0**14
  # Without the tap, S follows the parameters' small gradients up to a value at
  # which the activation's are inf.
  assert ols.get_loss_scale(untapped) > 2.0**16
