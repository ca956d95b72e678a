"""The engine, where neither a preset nor the dynamic rule shows its choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._rules import engine as _engine
from tests import support


def doubling(growth_interval, **rest):
  return _engine.Engine(
    init_scale=2.0**24,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=growth_interval,
    **rest,
  )


@pytest.mark.parametrize(
  ("growth_test", "expected"),
  [
    ("at_least", [2, 2, 2, 4, 4]),
    ("equal", [1, 1, 1, 1, 1]),
    ("multiple", [1, 2, 2, 2, 4]),
  ],
)
def test_a_count_past_the_interval_grows_s_as_the_test_says(
  growth_test, expected
):
  engine = doubling(3, growth_test=growth_test)
  state = engine.init()._replace(clean_steps=jnp.int32(4))
  scales = []
  for _ in expected:
    state = engine.update(state, False)
    scales.append(float(state.loss_scale) / 2.0**24)
  assert scales == expected


def test_growth_needs_an_s_below_its_bound_and_not_at_it():
  engine = doubling(1, growth_below=2.0**24)
  assert engine.update(engine.init(), False).loss_scale == 2.0**24
  engine = doubling(1, growth_below=2.0**24 + 2)
  assert engine.update(engine.init(), False).loss_scale == 2.0**25


def test_a_shrink_restarts_the_share_of_overflows():
  engine = doubling(2000, tolerance=0.4)
  state, halvings = engine.init(), []
  for step in "..xx..xx":  # `x` overflows: 1 of 3 steps, then 2 of 4.
    state = engine.update(state, step == "x")
    halvings.append(24 - np.log2(state.loss_scale))
  assert halvings == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, -3.0])
def test_a_damaged_growth_interval_starts_over(bad):
  rule = ols.presets.metaseq(scale_window=2)
  damaged = rule.init()._replace(growth_interval=jnp.float32(bad))
  sound = rule.init()
  for overflow in (False, False, True, False, False, False):
    damaged = rule.update(damaged, overflow)
    sound = rule.update(sound, overflow)
  support.assert_same_bits(damaged, sound)


def test_no_counter_wraps_around():
  # Even after more overflows in a row than int32 counts, S shrinks.
  rule = ols.DynamicLossScale(hysteresis=2)
  state = rule.init()
  full = jax.tree.map(lambda x: jnp.full_like(x, 2**31 - 1), state)
  for overflow, scale in ((True, 2.0**14), (False, 2.0**16)):
    after = rule.update(full._replace(loss_scale=state.loss_scale), overflow)
    assert after.loss_scale == scale
    assert all(counter >= 0 for counter in jax.tree.leaves(after))


@pytest.mark.parametrize(
  ("scale", "overflow"), [(2.0**-126, True), (2.0**127, False)]
)
def test_an_s_that_would_leave_float32_is_held_and_stalled(scale, overflow):
  rule = ols.presets.torch(init_scale=scale, growth_interval=1)
  assert rule.stalled(rule.init(), overflow)
  assert not rule.stalled(rule.init(), not overflow)
  assert rule.update(rule.init(), overflow).loss_scale == scale
