"""Tests that all rules share."""

import dataclasses
import inspect
import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import rules
from tests import support
from tests.rules import runs

AMAX_RULES = {
  "headroom": rules.HeadroomLossScale(window=3),
  "log_max": rules.LogMaxLossScale(),
  "warm_start": rules.WarmStart(ols.DynamicLossScale(growth_interval=2)),
  "warm_headroom": rules.WarmStart(rules.HeadroomLossScale(window=2)),
}
RULES = {
  "dynamic": ols.DynamicLossScale(
    growth_interval=2, hysteresis=2, growth_factor=1.1, backoff_factor=0.8
  ),
  "fixed": ols.FixedLossScale(),
  **AMAX_RULES,
}
CLASSES = [ols.DynamicLossScale, ols.FixedLossScale]
CLASSES += [rules.HeadroomLossScale, rules.LogMaxLossScale, rules.WarmStart]
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_amax_rule = pytest.mark.parametrize(
  "rule", AMAX_RULES.values(), ids=AMAX_RULES
)
each_class = pytest.mark.parametrize("rule_class", CLASSES)


# The state.


@each_rule
def test_a_step_keeps_structure_and_strong_types_even_with_64_bits(rule):
  before = support.describe(rule.init())
  assert not any(weak for _, _, weak in before[1])
  assert rule.init().loss_scale.dtype == jnp.float32
  for overflow, amax in [(False, 1.0), (True, np.float32(np.inf))]:
    after = rule.update(rule.init(), overflow, amax=amax)
    assert support.describe(after) == before
  with jax.enable_x64(True):
    state = rule.init()
    assert support.describe(state) == before
    after = jax.eval_shape(rule.update, state, True, amax=jnp.float64(2.0))
    assert support.describe(after) == before
    assert state.inv_scale.dtype == jnp.float32


@each_rule
@pytest.mark.usefixtures("strict_promotion")
def test_no_step_promotes_a_dtype_implicitly(rule):
  state = jax.eval_shape(rule.init)
  amax = jax.ShapeDtypeStruct((), jnp.float32)
  state = jax.eval_shape(rule.update, state, True, amax=amax)
  stalled = jax.eval_shape(rule.stalled, state, True)
  assert (stalled.shape, stalled.dtype) == ((), jnp.bool_)


@each_rule
def test_inv_scale_is_the_float32_reciprocal(rule):
  state = rule.init()
  for scale in (3.0, 2.0**-126, 1.1 * 2.0**100):
    if isinstance(rule, rules.WarmStart):
      inner = state.rule_state._replace(loss_scale=jnp.float32(scale))
      state = state._replace(rule_state=inner)
    else:
      state = state._replace(loss_scale=jnp.float32(scale))
    expected = np.float32(1) / np.float32(scale)
    support.assert_same_bits(state.inv_scale, expected)


@each_rule
def test_s_is_the_same_in_and_out_of_jit_and_vmap(rule):
  overflows = np.array([False, True, True, True, False, False, False, True])
  amaxes = np.where(overflows, np.inf, 24.0).astype(np.float32)
  mapped, _ = runs.trajectories(rule, overflows[None], amaxes[None])
  update = jax.jit(rule.update)
  eager, traced = rule.init(), rule.init()
  for i, (overflow, amax) in enumerate(zip(overflows, amaxes, strict=True)):
    eager = rule.update(eager, bool(overflow), amax=amax)
    traced = update(traced, overflow, amax=amax)
    assert mapped[0, i] == traced.loss_scale == eager.loss_scale


@each_rule
def test_a_flag_in_an_array_of_one_element_works_like_a_scalar(rule):
  state = rule.init()
  for overflow in (True, False):
    # Megatron's `found_inf` has this form.
    found_inf = np.array([overflow], np.float32)
    moved = rule.update(state, found_inf, amax=1.0)
    support.assert_same_bits(moved, rule.update(state, overflow, amax=1.0))
    support.assert_same_bits(
      rule.stalled(state, found_inf), rule.stalled(state, overflow)
    )


@pytest.mark.parametrize("name", [x for x in RULES if x != "fixed"])
def test_several_flags_are_an_error_that_names_the_remedy(name):
  rule = RULES[name]
  for flags in (np.zeros(2), np.zeros(0)):
    with pytest.raises(ValueError, match="`overflow` must be one flag") as info:
      rule.update(rule.init(), flags, amax=1.0)
    assert f"got an array of shape {flags.shape}" in str(info.value)
    assert "pass jnp.any(overflow)" in str(info.value)


@each_amax_rule
def test_a_missing_amax_is_an_error(rule):
  with pytest.raises(ValueError, match="`amax` must be passed to update"):
    rule.update(rule.init(), True)


# The bounds of S.


@each_amax_rule
def test_guarantee_4_the_scale_stays_usable_on_every_sequence(rule):
  extremes = np.float32([0, runs.SUBNORMAL, 2.0**-126, 3e38, np.inf, np.nan, 1])
  amaxes = np.stack(
    [
      np.resize(extremes[list(order)], 120)
      for order in itertools.permutations(range(7), 2)
    ]
    + [np.full(120, x) for x in extremes]
  )
  overflows = ~(amaxes <= runs.FLOAT16_MAX)
  scales, _ = runs.trajectories(rule, overflows, amaxes)
  assert np.all((scales >= 2.0**-126) & (scales <= 2.0**127))


# The arguments, and the rule as a value.

DYNAMIC, FIXED, HEADROOM, LOG_MAX, WARM_START = CLASSES


@pytest.mark.parametrize(
  ("rule_class", "arguments", "words"),
  [
    (DYNAMIC, {"growth_factor": 1}, "must be above 1"),
    (DYNAMIC, {"backoff_factor": 1}, "must be between 0 and 1"),
    (DYNAMIC, {"skip": 1}, "must be True or False"),
    (FIXED, {"skip": None}, "must be True or False"),
    (HEADROOM, {"headroom": -1}, "must be between 0 and 126 bits"),
    (HEADROOM, {"headroom": 1.5}, "must be an integer number of bits, got 1"),
    (HEADROOM, {"window": 0}, "must be between 1 and"),
    (HEADROOM, {"window": 2**16 + 1}, "must be at most 2**16 steps, got 65537"),
    (HEADROOM, {"dtype": int}, "must be a floating-point"),
    (HEADROOM, {"max_scale": 0.5}, "must hold, got"),
    (HEADROOM, {"min_scale": 2.0**-130}, "must be at least 2**-126"),
    (HEADROOM, {"skip": 1}, "must be True or False"),
    (LOG_MAX, {"beta1": 1}, "must be at least 0 and below 1 (in float32)"),
    (LOG_MAX, {"beta2": 1 - 1e-9}, "below 1 (in float32)"),
    (LOG_MAX, {"overflow_std_dev": -1}, "must not be negative"),
    (LOG_MAX, {"log_max": math.inf}, "must be finite"),
    (LOG_MAX, {"scale_min": 4.0, "scale_max": 2.0}, "must hold, got"),
    (LOG_MAX, {"skip": 1}, "must be True or False"),
    (WARM_START, {"probe_scale": 0}, "must be positive"),
    (WARM_START, {"headroom": 127}, "must be between 0 and 126 bits"),
    (WARM_START, {"dtype": "f16"}, "must be a"),
  ],
)
def test_an_argument_out_of_range_is_refused(rule_class, arguments, words):
  first = [ols.FixedLossScale()] if rule_class is WARM_START else []
  with pytest.raises((TypeError, ValueError)) as raised:
    rule_class(*first, **arguments)
  assert f"`{next(iter(arguments))}`" in str(raised.value)
  assert words in str(raised.value)


@each_class
def test_guarantee_16_arguments_after_the_first_are_keyword_only(rule_class):
  first, *others = inspect.signature(rule_class).parameters.values()
  # LogMax has no argument that comes first.
  assert (first.kind == first.KEYWORD_ONLY) == (
    rule_class is rules.LogMaxLossScale
  )
  assert {other.kind for other in others} == {first.KEYWORD_ONLY}


@each_rule
def test_a_rule_is_a_frozen_value(rule):
  for same in (pickle.loads(pickle.dumps(rule)), dataclasses.replace(rule)):
    assert (same, hash(same)) == (rule, hash(rule))
  with pytest.raises(dataclasses.FrozenInstanceError):
    rule.skip = False
  assert rule.skip is True


# The base class.


def test_a_subclass_must_have_both_methods():
  class OnlyInit(ols.LossScale):
    def init(self):
      return ols.FixedLossScale().init()

  with pytest.raises(TypeError, match="update"):
    OnlyInit()


def test_a_method_of_torchs_scaler_is_answered_with_its_equivalent():
  with pytest.raises(AttributeError, match=r"no `unscale_`.*write unscale\("):
    ols.DynamicLossScale().unscale_(None)
  with pytest.raises(AttributeError, match="object has no attribute 'other'$"):
    ols.DynamicLossScale().other()
