"""What no preset shows of the engine; its rows are tested as presets."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._rules import engine as _engine
from tests import support


def doubling(growth_interval, hysteresis=1, **rest):
  return _engine.Engine(
    init_scale=2.0**24,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=growth_interval,
    hysteresis=hysteresis,
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
def test_a_count_that_is_past_the_interval(growth_test, expected):
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, -3.0])
def test_a_damaged_growth_interval_starts_over(bad):
  rule = ols.presets.metaseq(scale_window=2)
  damaged = rule.init()._replace(growth_interval=jnp.float32(bad))
  sound = rule.init()
  for overflow in (False, False, True, False, False, False):
    damaged = rule.update(damaged, overflow)
    sound = rule.update(sound, overflow)
  support.assert_same_bits(damaged, sound)
