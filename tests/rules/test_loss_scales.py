"""The rules that count overflows or keep S fixed."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._rules import engine
from tests import support
from tests.reference import dynamic
from tests.rules import runs

SEQUENCES = support.every_sequence(8)


def scales_of(rule, overflows, first=None):
  """Returns S after each step of one sequence, float32[steps]."""
  state = rule.init()
  if first is not None:
    state = state._replace(loss_scale=jnp.float32(first))
  run = jax.jit(lambda state, xs: runs.trajectory(rule, state, xs))
  return np.asarray(run(state, np.asarray(overflows, bool))[0])


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
def test_every_sequence_gives_the_scales_of_the_model(arguments):
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


def test_the_defaults_are_those_of_the_model():
  rule = ols.DynamicLossScale()
  for name, x in inspect.signature(dynamic.Dynamic).parameters.items():
    assert getattr(rule, name) == x.default
  assert rule.init().loss_scale == 2.0**15


def test_a_fixed_loss_scale_never_moves_and_stalls_on_overflow():
  rule = ols.FixedLossScale(3.0, skip=False)
  assert rule.skip is False
  state = rule.init()
  for overflow in (True, False, True):
    assert rule.stalled(state, overflow) == overflow
    state = rule.update(state, overflow)
    assert state.loss_scale == 3.0
  assert ols.FixedLossScale().init().loss_scale == 2.0**10


# A run may go on with the same state and other arguments.

# Changed arguments; the S, clean steps and overflows of the state; then the S
# after a clean step and after an overflow, and whether the overflow stalls.
CHANGES = {
  "another growth": ({"growth_factor": 4.0}, (8, 3, 0), 32, 4, False),
  "another backoff": ({"backoff_factor": 0.25}, (8, 3, 0), 16, 2, False),
  "a shorter interval": ({"growth_interval": 2}, (8, 5, 0), 16, 4, False),
  "a longer interval": ({"growth_interval": 6}, (8, 3, 0), 8, 4, False),
  "less hysteresis": ({"hysteresis": 2}, (8, 0, 4), 8, 4, False),
  "more hysteresis": ({"hysteresis": 4}, (8, 0, 2), 8, 8, False),
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


# Fields of an engine, steps (x overflows), and log2 of S after each, by hand.
# S starts at 2^4, grows or shrinks by 2, and grows on each second clean step.
ENGINES = {
  "a larger count of clean steps grows no S that waits for an equal one": (
    {"growth_test": "equal", "initial_clean_steps": 2},
    "..x...",
    (4, 4, 3, 3, 3, 3),
  ),
  "growth at every multiple of the interval": (
    {"growth_test": "multiple"},
    ".....x..",
    (4, 5, 5, 6, 6, 5, 5, 6),
  ),
  "0 clean steps are no multiple": (
    {"growth_test": "multiple", "initial_clean_steps": -1},
    "...x...",
    (4, 4, 5, 4, 4, 4, 5),
  ),
  "growth from below its bound alone": (
    {"growth_interval": 1, "growth_below": 2.0**5},
    "...",
    (5, 5, 5),
  ),
  "a larger count of overflows shrinks no S that waits for an equal one": (
    {"shrink_test": "equal", "hysteresis": 2, "refill": frozenset()},
    "xxx.x",
    (4, 3, 3, 3, 3),
  ),
  "a shrink starts the count of overflows anew": (
    {"hysteresis": 2, "refill": frozenset({"backoff"})},
    "x.x.xx",
    (4, 4, 3, 3, 3, 2),
  ),
  "growth starts the count of overflows anew": (
    {"hysteresis": 2, "refill": frozenset({"growth"})},
    "x..xxx",
    (4, 4, 5, 5, 4, 3),
  ),
  "S is held where it would fall below a bound": (
    {"hold_below": 2.0**3},
    "xxx",
    (3, 3, 3),
  ),
  "a share of overflows that equals the tolerance": (
    {"tolerance": 0.5, "growth_interval": 9},
    ".x..x",
    (4, 3, 3, 3, 3),
  ),
  "overflows from before a shrink do not count": (
    {"tolerance": 0.5, "growth_interval": 9},
    ".x...x.x",
    (4, 3, 3, 3, 3, 3, 3, 3),
  ),
  "an interval that grows and shrinks with S": (
    {"interval_factor": 2.0, "growth_interval": 1},
    ".......x....",
    (5, 5, 6, 6, 6, 6, 7, 6, 6, 6, 6, 7),
  ),
}


@pytest.mark.parametrize(
  ("fields", "steps", "exponents"), ENGINES.values(), ids=ENGINES
)
def test_a_choice_of_the_engine_moves_s(fields, steps, exponents):
  defaults = {"init_scale": 16.0, "growth_factor": 2.0, "growth_interval": 2}
  rule = engine.Engine(**(defaults | fields))
  state, found = rule.init(), []
  for step in steps:
    state = rule.update(state, step == "x")
    found.append(math.log2(state.loss_scale))
  assert found == list(exponents)


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


# Guarantees.


@pytest.mark.parametrize("growth_interval", [1, 2, 3, 10, 2000])
def test_guarantee_3_growth_on_exactly_the_growth_interval_th_clean_step(
  growth_interval,
):
  rule = ols.DynamicLossScale(growth_interval=growth_interval)
  # From the start, after a growth, and after an overflow.
  clean = [False] * growth_interval
  found = scales_of(rule, [*clean, *clean, True, *clean])
  growth = np.asarray([1.0] * (growth_interval - 1) + [2.0])
  expected = np.concatenate([growth, 2 * growth, [2.0], 2 * growth])
  np.testing.assert_array_equal(found, 2.0**15 * expected)


def test_guarantee_3_clean_steps_before_an_overflow_do_not_count():
  rule = ols.DynamicLossScale(growth_interval=3, hysteresis=2)
  found = scales_of(rule, [False, False, True] * 50)
  np.testing.assert_array_equal(found, np.full(150, 2.0**15))


@pytest.mark.parametrize(
  "factors",
  [(2.0, 0.5), (1.7, 0.3), (1e30, 1e-30), (3e38, 2e-38)],
)
def test_guarantee_4_500_overflows_and_500_growths_keep_a_usable_scale(factors):
  growth_factor, backoff_factor = factors
  rule = ols.DynamicLossScale(
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
    growth_interval=1,
    min_scale=support.SMALLEST,
    max_scale=support.LARGEST,
  )
  overflows = np.repeat([True, False, True], 500)
  for first in (support.SMALLEST, 1.0, support.LARGEST):
    found = scales_of(rule, overflows, first)
    # A comparison with NaN is false, so this excludes NaN.
    assert np.all((found >= support.SMALLEST) & (found <= support.LARGEST))
    ends = [support.SMALLEST, support.LARGEST, support.SMALLEST]
    assert found[[499, 999, 1499]].tolist() == ends


@pytest.mark.parametrize(
  "bounds", [(2.0**-10, 2.0**-2), (0.25, 2.0**20), (3.0, 3.0)]
)
def test_guarantee_4_bounds_below_one_hold_in_and_out_of_jit(bounds):
  low, high = bounds
  first = max(low, 2.0**-2)
  rule = ols.DynamicLossScale(
    first, growth_interval=1, min_scale=low, max_scale=high
  )
  found = scales_of(rule, [True] * 30 + [False] * 30)
  assert found[[29, 59]].tolist() == [low, high]
  state = rule.init()
  for _ in range(9):
    state = rule.update(state, True)
  assert state.loss_scale == low


def test_guarantee_4_the_default_bounds_are_below_one_and_of_a_normal_inverse():
  rule = ols.DynamicLossScale()
  assert 0 < rule.min_scale < 1
  assert 1 / rule.max_scale >= np.finfo(np.float32).smallest_normal


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
def test_guarantee_16_factors_default_to_powers_of_two(name):
  assert math.frexp(getattr(ols.DynamicLossScale(), name))[0] == 0.5
