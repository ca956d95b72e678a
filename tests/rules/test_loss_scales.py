"""The rules that count overflows or keep S fixed."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import dynamic
from tests.rules import runs

SEQUENCES = support.every_sequence(8)

# Compared with the model.

ARGUMENTS = {
  "powers of two": {"growth_interval": 2, "hysteresis": 2},
  "bounds": {
    **{"init_scale": 3.0, "growth_factor": 1.7, "backoff_factor": 0.3},
    **{"growth_interval": 1, "min_scale": 0.7, "max_scale": 9.0},
  },
  "extreme factors": {
    **{"growth_factor": 3e38, "backoff_factor": 2e-38, "growth_interval": 3},
    **{"min_scale": support.SMALLEST, "max_scale": 2.0**127},
  },
  "much hysteresis": {
    **{"growth_factor": 1.001, "backoff_factor": 0.999},
    **{"growth_interval": 4, "hysteresis": 3},
  },
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_guarantee_3_every_sequence_gives_the_scales_of_the_model(arguments):
  # Under jit XLA must not rewrite products with constant factors.
  rule = ols.DynamicLossScale(**arguments)
  found_scales, found_stalled = runs.trajectories(rule, SEQUENCES)
  models = [dynamic.Dynamic(**arguments) for _ in SEQUENCES]
  for i, overflows in enumerate(SEQUENCES.T.tolist()):
    for model, overflow in zip(models, overflows, strict=True):
      model.update(overflow)
    expected = np.float32([model.scale for model in models])
    support.assert_same_bits(found_scales[:, i], expected)
    stalled = [model.stalled for model in models]
    np.testing.assert_array_equal(found_stalled[:, i], stalled)


def test_guarantee_16_the_defaults_are_those_of_the_model():
  rule = ols.DynamicLossScale()
  for name, x in inspect.signature(dynamic.Dynamic).parameters.items():
    assert getattr(rule, name) == x.default
  assert rule.init().loss_scale == 2.0**15


# A run may go on with the same state and other arguments.

# Changed arguments; the S, clean steps and overflows of the state; then the S
# after a clean step and after an overflow, and whether the overflow stalls.
CHANGES = {
  "a shorter interval": ({"growth_interval": 2}, (8, 5, 0), 16, 4, False),
  "less hysteresis": ({"hysteresis": 2}, (8, 0, 4), 8, 4, False),
  "a floor above S": (
    {"init_scale": 16.0, "min_scale": 16.0},
    *((1, 0, 0), 16, 16, True),
  ),
  "a ceiling below S": (
    {"init_scale": 2.0, "max_scale": 2.0},
    *((8, 0, 0), 2, 2, False),
  ),
  "bounds on both sides": (
    {"init_scale": 4.0, "min_scale": 3.0, "max_scale": 6.0},
    *((8, 0, 0), 6, 4, False),
  ),
}


@pytest.mark.parametrize(
  ("changed", "counts", "after_clean", "after_overflow", "stalled"),
  CHANGES.values(),
  ids=CHANGES,
)
def test_other_arguments_of_a_dynamic_loss_scale_apply_from_the_next_step(
  changed, counts, after_clean, after_overflow, stalled
):
  rule = ols.DynamicLossScale(**({"growth_interval": 4} | changed))
  scale, clean_steps, overflows = counts
  state = ols.DynamicLossScale(float(scale)).init()
  state = state._replace(
    clean_steps=jnp.int32(clean_steps), overflows=jnp.int32(overflows)
  )
  assert rule.update(state, False).loss_scale == after_clean
  assert rule.update(state, True).loss_scale == after_overflow
  assert rule.stalled(state, True) == stalled
  assert not rule.stalled(state, False)


# The engine, where the rules do not show its choices.


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
def test_guarantee_4_an_s_that_would_leave_float32_is_held_and_stalled(
  scale, overflow
):
  rule = ols.presets.torch(init_scale=scale, growth_interval=1)
  assert rule.stalled(rule.init(), overflow)
  assert not rule.stalled(rule.init(), not overflow)
  assert rule.update(rule.init(), overflow).loss_scale == scale
