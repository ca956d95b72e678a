"""The rule that keeps bits free, compared with its model and its promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import amax_rules as reference
from tests.rules import runs

Headroom = ols.rules.HeadroomLossScale


@pytest.mark.parametrize(
  ("arguments", "length"),
  [
    ({"window": 2}, 4),
    ({"window": 3, "headroom": 0, "init_scale": 2.0**32}, 3),
    ({"window": 2, "min_scale": 0.75, "max_scale": 5.0}, 3),
  ],
)
def test_every_short_run_gives_the_scales_of_the_model(arguments, length):
  runs.assert_follows(
    Headroom(**arguments),
    lambda: reference.Headroom(**arguments),
    *runs.every_short_run(length),
  )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
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


def test_an_amax_beyond_the_limit_says_by_how_much():
  steps = [(False, 1.0), (True, 65504.0 * 16)]
  assert runs.scales_of(Headroom(), steps).tolist() == [14, 9]


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
