"""The plain-Python models against sequences worked by hand.

A sequence is a string, one character a step: `.` is clean, `x` overflows. The
expected scales are those after each step.
"""

import math
import random

import numpy as np
import pytest

from tests import reference


def _scales(model, steps):
  scales = []
  for step in steps:
    model.update(step == "x")
    scales.append(model.scale)
  return scales


# Rounding.


def test_float32_of_a_double_product_is_the_float32_product():
  rng = random.Random(0)
  for _ in range(1000):
    a, b = np.float32(rng.uniform(0, 4)), np.float32(rng.uniform(0, 4))
    assert reference.float32(float(a) * float(b)) == float(a * b)


def test_float32_beyond_the_range_is_inf():
  assert reference.float32(2.0**128) == math.inf


# This library's rule.


def test_dynamic_grows_on_each_growth_interval_th_clean_step():
  model = reference.Dynamic(init_scale=8.0, growth_interval=3)
  assert _scales(model, ".......") == [8, 8, 16, 16, 16, 32, 32]


def test_dynamic_counts_clean_steps_from_the_last_overflow():
  model = reference.Dynamic(init_scale=8.0, growth_interval=3)
  assert _scales(model, "..x...") == [8, 8, 4, 4, 4, 8]


def test_dynamic_shrinks_from_the_hysteresis_th_overflow_in_a_row_on():
  model = reference.Dynamic(init_scale=64.0, hysteresis=2)
  assert _scales(model, "xxxx") == [64, 32, 16, 8]


def test_dynamic_ends_the_row_at_a_clean_step():
  model = reference.Dynamic(init_scale=64.0, hysteresis=2)
  assert _scales(model, "x.x.xx.x") == [64, 64, 64, 64, 64, 32, 32, 32]


def test_dynamic_restarts_the_clean_count_on_a_tolerated_overflow():
  model = reference.Dynamic(init_scale=8.0, growth_interval=2, hysteresis=2)
  assert _scales(model, ".x..") == [8, 8, 8, 16]


def test_dynamic_clamps_at_both_bounds():
  model = reference.Dynamic(
    init_scale=4.0, growth_interval=1, min_scale=1.5, max_scale=10.0
  )
  assert _scales(model, "...xxxx") == [8, 10, 10, 5, 2.5, 1.5, 1.5]


def test_dynamic_is_stalled_on_an_overflow_that_finds_the_scale_at_the_floor():
  model = reference.Dynamic(init_scale=4.0, min_scale=2.0)
  stalled = []
  for overflow in [True, True, False, True]:
    model.update(overflow)
    stalled.append(model.stalled)
  assert stalled == [False, True, False, True]


# PyTorch.


def test_torch_grows_and_backs_off():
  model = reference.Torch(init_scale=2.0, growth_interval=2)
  assert _scales(model, "..x.x..") == [2, 4, 2, 2, 1, 1, 2]


def test_torch_refuses_a_growth_to_inf():
  model = reference.Torch(init_scale=2.0**126, growth_interval=1)
  assert _scales(model, "...x") == [2.0**127, 2.0**127, 2.0**127, 2.0**126]


def test_torch_has_no_floor_and_reaches_zero():
  model = reference.Torch(init_scale=2.0**-148)
  assert _scales(model, "xxx") == [2.0**-149, 0.0, 0.0]


def test_torch_never_grows_with_a_tracker_above_the_interval():
  model = reference.Torch(init_scale=2.0, growth_interval=3)
  model.growth_tracker = 5
  assert _scales(model, "....x...") == [2, 2, 2, 2, 1, 1, 1, 2]


def test_torch_keeps_the_factor_in_double():
  # 65536 * 0.8 = 52428.8 lies next to 13421773 / 256, and 0.8 times that is
  # 10737418.4 / 256.
  model = reference.Torch(init_scale=65536.0, backoff_factor=0.8)
  assert _scales(model, "xx") == [13421773 / 256, 10737418 / 256]


# Megatron.


def test_megatron_does_not_refill_hysteresis_on_a_clean_step():
  model = reference.Megatron(initial_scale=16.0, growth_interval=3)
  assert _scales(model, "x.xx") == [16, 16, 8, 4]


def test_megatron_refills_hysteresis_on_growth():
  model = reference.Megatron(initial_scale=16.0, growth_interval=3)
  assert _scales(model, "xx...xx") == [16, 8, 8, 8, 16, 16, 8]


def test_megatron_backs_off_on_each_overflow_after_a_clean_step():
  model = reference.Megatron(initial_scale=16.0, growth_interval=3)
  assert _scales(model, "xx.x..x") == [16, 8, 8, 4, 4, 4, 2]


def test_megatron_stays_at_the_minimum():
  model = reference.Megatron(initial_scale=4.0, min_scale=1.5, hysteresis=1)
  assert _scales(model, "xxx") == [2, 1.5, 1.5]


def test_megatron_grows_to_inf():
  model = reference.Megatron(initial_scale=2.0**127, growth_interval=1)
  assert _scales(model, ".x") == [math.inf, math.inf]


def test_megatron_rounds_the_factor_first():
  # With the float32 above 0.8 the second product is 10737418.56 / 256.
  model = reference.Megatron(
    initial_scale=65536.0, backoff_factor=0.8, hysteresis=1
  )
  assert _scales(model, "xx") == [13421773 / 256, 10737419 / 256]


# DeepSpeed.


def test_deepspeed_grows_first_after_window_plus_one_clean_steps():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=2)
  assert _scales(model, ".......") == [16, 16, 32, 32, 64, 64, 128]


def test_deepspeed_before_0_17_1_grows_after_window_clean_steps():
  model = reference.DeepSpeed(
    init_scale=16.0, scale_window=2, before_0_17_1=True
  )
  assert _scales(model, ".......") == [16, 32, 32, 64, 64, 128, 128]


def test_deepspeed_with_a_window_of_one_grows_from_the_second_clean_step_on():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=1)
  assert _scales(model, "...") == [16, 32, 64]


def test_deepspeed_before_0_17_1_with_a_window_of_one_grows_at_once():
  model = reference.DeepSpeed(
    init_scale=16.0, scale_window=1, before_0_17_1=True
  )
  assert _scales(model, "...") == [32, 64, 128]


def test_deepspeed_counts_the_window_from_the_last_overflow():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=2, delayed_shift=1)
  assert _scales(model, "..x...") == [16, 16, 8, 8, 8, 16]


def test_deepspeed_does_not_refill_hysteresis_on_a_backoff_or_a_clean_step():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=2)
  assert _scales(model, "x.xx.x") == [16, 16, 8, 4, 4, 2]


def test_deepspeed_refills_hysteresis_on_growth():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=2)
  assert _scales(model, "xx...xx") == [16, 8, 8, 8, 16, 16, 8]


def test_deepspeed_with_consecutive_hysteresis_refills_it_on_a_clean_step():
  model = reference.DeepSpeed(
    init_scale=16.0, scale_window=9, consecutive_hysteresis=True
  )
  assert _scales(model, "x.xx.xx") == [16, 16, 16, 8, 8, 8, 4]


def test_deepspeed_raises_a_scale_below_the_minimum_on_a_backoff():
  model = reference.DeepSpeed(init_scale=0.25, min_scale=1.0, delayed_shift=1)
  assert _scales(model, ".x") == [0.25, 1]


def test_deepspeed_holds_a_double():
  model = reference.DeepSpeed(init_scale=2.0**127, scale_window=1)
  assert _scales(model, "...") == [2.0**127, 2.0**128, 2.0**129]


# Keras.


def test_keras_grows_and_backs_off():
  model = reference.Keras(initial_scale=4.0, dynamic_growth_steps=2)
  assert _scales(model, "..x.x..") == [4, 8, 4, 4, 2, 2, 4]


def test_keras_has_no_floor():
  model = reference.Keras(initial_scale=2.0**-148)
  assert _scales(model, "xx") == [2.0**-149, 0]


def test_keras_has_no_cap():
  model = reference.Keras(initial_scale=2.0**127, dynamic_growth_steps=1)
  assert _scales(model, ".x") == [math.inf, math.inf]


# TensorFlow 1.


def test_tensorflow_contrib_adds_up_bad_steps_across_clean_ones():
  model = reference.TensorFlowContrib(64.0, 3, decr_ratio=0.5)
  assert _scales(model, "x.x") == [64, 64, 32]


def test_tensorflow_contrib_clears_bad_steps_on_a_backoff():
  model = reference.TensorFlowContrib(64.0, 3, decr_ratio=0.5)
  assert _scales(model, "xxxxx") == [64, 32, 32, 16, 16]


def test_tensorflow_contrib_clears_bad_steps_on_growth():
  model = reference.TensorFlowContrib(64.0, 2, decr_ratio=0.5)
  assert _scales(model, "x..xx") == [64, 64, 128, 128, 64]


def test_tensorflow_contrib_restarts_good_steps_on_a_tolerated_overflow():
  model = reference.TensorFlowContrib(64.0, 2)
  assert _scales(model, ".x..") == [64, 64, 64, 128]


def test_tensorflow_contrib_clamps_at_one():
  model = reference.TensorFlowContrib(1.0, 9, decr_every_n_nan_or_inf=1)
  assert _scales(model, "xx") == [1, 1]


def test_tensorflow_contrib_clears_bad_steps_on_a_refused_growth():
  model = reference.TensorFlowContrib(2.0**127, 2, decr_ratio=0.5)
  assert _scales(model, "x..xx") == [2.0**127] * 4 + [2.0**126]


def test_tensorflow_contrib_rounds_the_ratio_first():
  model = reference.TensorFlowContrib(65536.0, 9, decr_every_n_nan_or_inf=1)
  assert _scales(model, "xx") == [13421773 / 256, 10737419 / 256]


# Together.


def _one_rule_in_every_dialect(interval):
  """Models that are the same rule: no hysteresis, factors 2 and 1/2."""
  return [
    reference.Dynamic(2.0**15, growth_interval=interval, min_scale=1.0),
    reference.Torch(2.0**15, growth_interval=interval),
    reference.Megatron(2.0**15, growth_interval=interval, hysteresis=1),
    reference.DeepSpeed(
      2.0**15, scale_window=interval, delayed_shift=1, before_0_17_1=True
    ),
    reference.Keras(2.0**15, dynamic_growth_steps=interval),
    reference.TensorFlowContrib(2.0**15, interval, 1, decr_ratio=0.5),
  ]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_all_models_agree_within_the_bounds_where_the_rules_are_the_same(
  interval,
):
  rng = random.Random(interval)
  models = _one_rule_in_every_dialect(interval)
  for _ in range(3000):
    scale = models[0].scale
    # Steered away from the bounds, where the systems do differ.
    overflow = scale > 1.0 and (scale > 2.0**100 or rng.random() < 0.3)
    for model in models:
      model.update(overflow)
    assert {model.scale for model in models} == {models[0].scale}
