"""The plain-Python models against sequences worked by hand.

A sequence is a string, one character a step: `.` is clean, `x` overflows. The
expected scales are those after each step.
"""

import copy
import math
import random

import numpy as np
import pytest

from tests import reference

LARGEST = (2 - 2.0**-23) * 2.0**127


def _scales(model, steps):
  scales = []
  for step in steps:
    model.update(step == "x")
    scales.append(model.scale)
  return scales


def _failures(model, steps):
  failures = []
  for step in steps:
    model.update(step == "x")
    failures.append(model.failed)
  return failures


# Rounding.


def test_float32_of_a_double_product_is_the_float32_product():
  rng = random.Random(0)
  for _ in range(1000):
    a, b = np.float32(rng.uniform(0, 4)), np.float32(rng.uniform(0, 4))
    assert reference.float32(float(a) * float(b)) == float(a * b)


def test_float32_of_a_double_quotient_is_the_float32_quotient():
  rng = random.Random(0)
  for _ in range(1000):
    a, b = np.float32(rng.uniform(0, 4)), np.float32(rng.uniform(1, 4))
    assert reference.float32(float(a) / float(b)) == float(a / b)


def test_float32_beyond_the_range_is_inf():
  assert reference.float32(LARGEST) == LARGEST
  assert reference.float32(2.0**128) == math.inf
  assert reference.float32(math.inf) == math.inf


def test_float32_below_the_range_is_zero():
  assert reference.float32(1.1 * 2.0**-149) == 2.0**-149
  assert reference.float32(2.0**-150) == 0.0


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


@pytest.mark.parametrize(
  "make_model",
  [reference.Torch, reference.TorchSharded, reference.ApexHysteresis],
)
def test_torch_never_grows_with_a_tracker_above_the_interval(make_model):
  model = make_model(init_scale=2.0, growth_interval=3)
  model.growth_tracker = 5
  assert _scales(model, "....x...") == [2, 2, 2, 2, 1, 1, 1, 2]


def test_torch_keeps_the_factor_in_double():
  # 65536 * 0.8 = 52428.8 lies next to 13421773 / 256, and 0.8 times that is
  # 10737418.4 / 256.
  model = reference.Torch(init_scale=65536.0, backoff_factor=0.8)
  assert _scales(model, "xx") == [13421773 / 256, 10737418 / 256]


def test_torch_restarts_the_tracker_on_a_refused_growth():
  model = reference.Torch(init_scale=2.0**127, growth_interval=2)
  _scales(model, "..")
  assert model.growth_tracker == 0


def test_torch_sharded_takes_the_backoff_factor_first():
  model = reference.TorchSharded(8.0, 0.25, 4.0, 1)
  assert _scales(model, "x..") == [2, 8, 32]


def test_torch_sharded_counts_as_torch():
  model = reference.TorchSharded(init_scale=2.0, growth_interval=2)
  assert _scales(model, "..x.x..") == [2, 4, 2, 2, 1, 1, 2]


def test_torch_sharded_grows_to_inf():
  model = reference.TorchSharded(init_scale=2.0**127, growth_interval=1)
  assert _scales(model, ".x") == [math.inf, math.inf]


def test_torch_sharded_rounds_the_factor_first():
  model = reference.TorchSharded(init_scale=65536.0, backoff_factor=0.8)
  assert _scales(model, "xx") == [13421773 / 256, 10737419 / 256]


# Apex.


def test_apex_grows_and_backs_off():
  model = reference.Apex(init_scale=8.0, scale_window=2)
  assert _scales(model, ".x..x") == [8, 4, 4, 8, 4]


def test_apex_bounds_the_first_scale_by_the_maximum():
  assert reference.Apex(init_scale=2.0**30).scale == 2.0**24


def test_apex_does_not_bound_the_first_scale_by_the_minimum():
  model = reference.Apex(init_scale=0.5, min_loss_scale=2.0)
  assert _scales(model, ".x") == [0.5, 2]


def test_apex_clamps_at_both_bounds():
  model = reference.Apex(
    init_scale=8.0, scale_window=1, min_loss_scale=3.0, max_loss_scale=12.0
  )
  assert _scales(model, "..xxx") == [12, 12, 6, 3, 3]


def test_apex_holds_a_double_without_a_floor():
  model = reference.Apex(init_scale=2.0**-149)
  assert _scales(model, "xx") == [2.0**-150, 2.0**-151]


def test_apex_with_a_number_ignores_overflows_windows_and_bounds():
  model = reference.Apex(128.0, scale_window=1, max_loss_scale=64.0)
  assert _scales(model, "x.x") == [128, 128, 128]
  assert model.unskipped == 3


def test_apex_hysteresis_is_refilled_by_a_clean_step():
  model = reference.ApexHysteresis(init_scale=16.0, hysteresis=2)
  assert _scales(model, "x.xx.x") == [16, 16, 16, 8, 8, 8]


def test_apex_hysteresis_is_not_refilled_by_a_backoff():
  model = reference.ApexHysteresis(init_scale=16.0, hysteresis=2)
  assert _scales(model, "xxxx") == [16, 8, 4, 2]


def test_apex_hysteresis_restarts_growth_on_a_forgiven_overflow():
  model = reference.ApexHysteresis(
    init_scale=8.0, growth_interval=2, hysteresis=2
  )
  assert _scales(model, ".x..") == [8, 8, 8, 16]


def test_apex_hysteresis_refuses_a_growth_to_inf():
  model = reference.ApexHysteresis(init_scale=2.0**127, growth_interval=1)
  assert _scales(model, ".x") == [2.0**127, 2.0**126]


def test_apex_hysteresis_keeps_the_factor_in_double():
  model = reference.ApexHysteresis(init_scale=65536.0, backoff_factor=0.8)
  assert _scales(model, "xx") == [13421773 / 256, 10737418 / 256]


def test_apex_hysteresis_is_one_after_a_restart_of_nemo():
  model = reference.ApexHysteresis(init_scale=16.0, hysteresis=3)
  model.resume()
  assert _scales(model, "x.xxx") == [8, 8, 8, 8, 4]


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


def test_megatron_as_documented_counts_consecutive_overflows():
  model = reference.Megatron(initial_scale=16.0, refill="clean")
  assert _scales(model, "x.xx.xxx") == [16, 16, 16, 8, 8, 8, 4, 2]


def test_megatron_refuses_another_refill():
  with pytest.raises(ValueError, match="`refill` must be .*'backoff'"):
    reference.Megatron(refill="backoff")


def test_megatron_constant_is_constant():
  assert _scales(reference.MegatronConstant(8.0), "x.x") == [8, 8, 8]


# ColossalAI.


def test_colossalai_does_not_refill_hysteresis_on_a_clean_step():
  model = reference.ColossalAI(initial_scale=16.0, growth_interval=3)
  assert _scales(model, "x.xx") == [16, 16, 8, 4]


def test_colossalai_refills_hysteresis_on_growth():
  model = reference.ColossalAI(initial_scale=16.0, growth_interval=3)
  assert _scales(model, "xx...xx") == [16, 8, 8, 8, 16, 16, 8]


def test_colossalai_clamps_at_both_bounds():
  model = reference.ColossalAI(
    initial_scale=4.0, growth_interval=1, min_scale=2.0, max_scale=6.0
  )
  assert _scales(model, "..xxxx") == [6, 6, 6, 3, 2, 2]


def test_colossalai_has_no_bounds_by_default():
  model = reference.ColossalAI(initial_scale=2.0**-148, hysteresis=1)
  assert _scales(model, "xx") == [2.0**-149, 0]
  model = reference.ColossalAI(initial_scale=2.0**127, growth_interval=1)
  assert _scales(model, ".") == [math.inf]


def test_colossalai_takes_a_maximum_of_zero_as_none():
  model = reference.ColossalAI(
    initial_scale=4.0, growth_interval=1, max_scale=0
  )
  assert _scales(model, ".") == [8]


def test_colossalai_rounds_the_factor_first():
  model = reference.ColossalAI(
    initial_scale=65536.0, backoff_factor=0.8, hysteresis=1
  )
  assert _scales(model, "xx") == [13421773 / 256, 10737419 / 256]


def test_colossalai_loses_both_counts_in_a_restart():
  model = reference.ColossalAI(initial_scale=16.0, growth_interval=3)
  assert _scales(model, "x..") == [16, 16, 16]
  model.resume()
  assert _scales(model, "..x") == [16, 16, 16]


# DeepSpeed.


def test_deepspeed_grows_first_after_window_plus_one_clean_steps():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=2)
  assert _scales(model, ".......") == [16, 16, 32, 32, 64, 64, 128]


def test_deepspeed_before_0_17_1_grows_after_window_clean_steps():
  model = reference.DeepSpeedLegacy(init_scale=16.0, scale_window=2)
  assert _scales(model, ".......") == [16, 32, 32, 64, 64, 128, 128]


def test_deepspeed_with_a_window_of_one_grows_from_the_second_clean_step_on():
  model = reference.DeepSpeed(init_scale=16.0, scale_window=1)
  assert _scales(model, "...") == [16, 32, 64]


def test_deepspeed_before_0_17_1_with_a_window_of_one_grows_at_once():
  model = reference.DeepSpeedLegacy(init_scale=16.0, scale_window=1)
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


def test_deepspeed_fails_on_a_backoff_at_the_minimum_and_stays_there():
  model = reference.DeepSpeed(init_scale=2.0, delayed_shift=1)
  assert _failures(model, "x.xx.") == [False, False, True, True, True]
  assert model.scale == 1


def test_deepspeed_does_not_fail_while_hysteresis_forgives():
  model = reference.DeepSpeed(init_scale=1.0, delayed_shift=2)
  assert _failures(model, "xx") == [False, True]


def test_deepspeed_does_not_fail_if_told_not_to():
  model = reference.DeepSpeed(
    init_scale=1.0, delayed_shift=1, raise_error_at_min_scale=False
  )
  assert _failures(model, "xx") == [False, False]


def test_deepspeed_legacy_backs_off_at_once_and_grows_after_window_steps():
  model = reference.DeepSpeedLegacy(init_scale=16.0, scale_window=2)
  assert _scales(model, "x...x..") == [8, 8, 16, 16, 8, 8, 16]


def test_deepspeed_legacy_divides_by_its_factor():
  model = reference.DeepSpeedLegacy(5.0, scale_factor=3.0, scale_window=2)
  # 5 * (1 / 3) is one double less.
  assert _scales(model, "x") == [5 / 3]
  model = reference.DeepSpeedLegacy(5.0, scale_factor=3.0, scale_window=2)
  assert _scales(model, "..") == [5, 15]


def test_deepspeed_legacy_fails_at_the_minimum_too():
  model = reference.DeepSpeedLegacy(init_scale=2.0)
  assert _failures(model, "xx") == [False, True]


# fairseq.


def test_fairseq_grows_at_each_multiple_of_the_window():
  model = reference.Fairseq(init_scale=16.0, scale_window=2)
  assert _scales(model, "......") == [16, 32, 32, 64, 64, 128]


def test_fairseq_counts_the_window_from_the_last_overflow():
  model = reference.Fairseq(init_scale=16.0, scale_window=2)
  assert _scales(model, "...x..") == [16, 32, 32, 16, 16, 32]


@pytest.mark.parametrize("make_model", [reference.Fairseq, reference.Metaseq])
def test_fairseq_tolerates_a_part_of_the_steps_since_the_last_change(
  make_model,
):
  # One of three, then two of four; after the backoff one of one, one of two.
  model = make_model(init_scale=16.0, tolerance=0.5)
  assert _scales(model, "..xxx.x") == [16, 16, 16, 8, 4, 4, 2]


@pytest.mark.parametrize("make_model", [reference.Fairseq, reference.Metaseq])
def test_fairseq_clears_the_overflows_on_a_backoff(make_model):
  # One of one, then one of three.
  model = make_model(init_scale=16.0, tolerance=0.5)
  assert _scales(model, "x..x") == [8, 8, 8, 8]


@pytest.mark.parametrize("make_model", [reference.Fairseq, reference.Metaseq])
def test_fairseq_does_not_clear_the_tolerated_overflows_on_growth(make_model):
  # One of two is tolerated. Growth leaves it counted, and restarts the steps,
  # so that the next overflow makes two of two.
  model = make_model(init_scale=16.0, scale_window=2, tolerance=0.9)
  assert _scales(model, ".x...x") == [16, 16, 16, 32, 32, 16]


def test_fairseq_restarts_the_window_on_a_tolerated_overflow():
  model = reference.Fairseq(init_scale=16.0, scale_window=2, tolerance=0.9)
  assert _scales(model, ".x..") == [16, 16, 16, 32]


def test_fairseq_clamps_a_backoff_at_the_threshold():
  model = reference.Fairseq(init_scale=4.0, threshold=1.5)
  assert _scales(model, "xxx") == [2, 1.5, 1.5]


def test_fairseq_fails_at_the_minimum_and_keeps_the_scale_before():
  model = reference.Fairseq(init_scale=2.0, min_loss_scale=0.5)
  assert _failures(model, "xx.") == [False, True, True]
  assert model.scale == 1


def test_fairseq_counts_the_step_that_fails_as_an_overflow():
  model = reference.Fairseq(init_scale=1.0, scale_window=2, min_loss_scale=0.5)
  assert _scales(model, ".x..") == [1, 1, 1, 2]


def test_fairseq_divides_a_double():
  model = reference.Fairseq(init_scale=5.0, scale_factor=3.0)
  assert _scales(model, "x") == [5 / 3]
  model = reference.Fairseq(init_scale=2.0**127, scale_window=1)
  assert _scales(model, ".") == [2.0**128]


def test_fairseq_loses_its_counts_in_a_restart():
  model = reference.Fairseq(init_scale=16.0, scale_window=3, tolerance=0.5)
  assert _scales(model, "..x") == [16, 16, 16]
  model.resume()
  assert _scales(model, "..x") == [16, 16, 16]


# metaseq.


def test_metaseq_stretches_the_window_on_growth():
  # After 2, 4 and 8 clean steps, all counted from the start.
  model = reference.Metaseq(scale_window=2)
  assert _scales(model, "........") == [4, 8, 8, 16, 16, 16, 16, 32]


def test_metaseq_shrinks_the_window_on_a_backoff():
  model = reference.Metaseq(scale_window=2)
  assert _scales(model, "..x..") == [4, 8, 4, 4, 8]


def test_metaseq_rounds_the_window_down_but_not_below_one():
  assert _scales(reference.Metaseq(scale_window=3), "x.") == [2, 4]
  assert _scales(reference.Metaseq(scale_window=3), "xx.") == [2, 1, 2]


def test_metaseq_leaves_the_window_on_a_tolerated_overflow():
  model = reference.Metaseq(scale_window=2, tolerance=0.9)
  assert _scales(model, ".x..") == [4, 4, 4, 8]


def test_metaseq_clamps_a_backoff_at_the_threshold():
  model = reference.Metaseq(threshold=1.5)
  assert _scales(model, "xxx") == [2, 1.5, 1.5]


def test_metaseq_holds_the_scale_at_the_minimum_without_failing():
  model = reference.Metaseq(init_scale=2.0**-4)
  assert _failures(model, "xxx") == [False, False, False]
  assert model.scale == 2.0**-5


def test_metaseq_shrinks_the_window_of_a_held_scale():
  model = reference.Metaseq(init_scale=2.0**-5, scale_window=4)
  assert _scales(model, "xx.") == [2.0**-5, 2.0**-5, 2.0**-4]


def test_metaseq_counts_a_held_backoff_as_a_change():
  # Of the three steps since then, one overflows.
  model = reference.Metaseq(init_scale=2.0, min_loss_scale=2.0, tolerance=0.5)
  model.update(True)
  model.min_loss_scale = 0.5
  assert _scales(model, "..x") == [2, 2, 2]


def test_metaseq_starts_with_its_first_window_after_a_restart():
  model = reference.Metaseq(scale_window=2)
  assert _scales(model, "...") == [4, 8, 8]
  model.resume()
  assert _scales(model, "..") == [8, 16]


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


# TensorFlow 1 on Ascend.


def test_npu_exponential_adds_up_bad_steps_until_a_backoff_or_a_growth():
  model = reference.NpuExponential(64.0, 2, decr_ratio=0.5)
  assert _scales(model, "x.xx..xx") == [64, 64, 32, 32, 32, 64, 64, 32]


def test_npu_exponential_restarts_good_steps_on_a_tolerated_overflow():
  model = reference.NpuExponential(64.0, 2)
  assert _scales(model, ".x..") == [64, 64, 64, 128]


def test_npu_exponential_grows_only_below_its_own_limit():
  limit = reference.float32(1.7e38)
  below = float(np.nextafter(np.float32(limit), np.float32(0)))
  assert _scales(reference.NpuExponential(below, 1), ".") == [2 * below]
  assert _scales(reference.NpuExponential(limit, 1), ".") == [limit]
  assert _scales(reference.TensorFlowContrib(limit, 1), ".") == [2 * limit]


def test_npu_exponential_clears_bad_steps_on_a_refused_growth():
  model = reference.NpuExponential(2.0**127, 2, decr_ratio=0.5)
  assert _scales(model, "x..xx") == [2.0**127] * 4 + [2.0**126]


def test_npu_exponential_clamps_at_one():
  model = reference.NpuExponential(1.1, 9, decr_every_n_nan_or_inf=1)
  assert _scales(model, "xx") == [1, 1]


def test_npu_fixed_is_constant():
  assert _scales(reference.NpuFixed(8.0), "x.x") == [8, 8, 8]


# TensorFlow 2.


def test_tensorflow_grows_and_backs_off():
  model = reference.TensorFlow(4.0, increment_period=2)
  assert _scales(model, "..x.x..") == [4, 8, 4, 4, 2, 2, 4]


def test_tensorflow_grows_at_once_with_a_count_above_the_period():
  model = reference.TensorFlow(4.0, increment_period=2)
  model.good_steps = 5
  assert _scales(model, "...") == [8, 8, 16]


def test_tensorflow_divides_in_float32():
  # 5 / 3 lies next to 13981013 / 2**23; 5 times the float32 above 1 / 3, which
  # is 11184811 / 2**25, lies next to 13981014 / 2**23.
  model = reference.TensorFlow(5.0, multiplier=3.0)
  assert _scales(model, "x") == [13981013 / 2**23]


def test_tensorflow_clamps_at_one():
  model = reference.TensorFlow(1.5)
  assert _scales(model, "xx") == [1, 1]


def test_tensorflow_refuses_a_growth_to_inf_and_restarts_the_count():
  model = reference.TensorFlow(2.0**127, increment_period=2)
  assert _scales(model, "..") == [2.0**127, 2.0**127]
  assert model.good_steps == 0


# MindSpore.


def test_mindspore_grows_at_each_multiple_of_the_window():
  model = reference.MindSpore(16.0, scale_window=2)
  assert _scales(model, "...x...") == [16, 32, 32, 16, 16, 32, 32]


def test_mindspore_waits_for_a_multiple_of_a_lowered_window():
  model = reference.MindSpore(16.0, scale_window=10)
  _scales(model, "....")
  model.scale_window = 3
  assert _scales(model, "..") == [16, 32]


def test_mindspore_multiplies_a_double_by_the_reciprocal():
  model = reference.MindSpore(5.0, scale_factor=3, scale_window=1)
  assert _scales(model, "x.") == [5 * (1 / 3), 5 * (1 / 3) * 3]
  assert 5 * (1 / 3) < 5 / 3


def test_mindspore_has_a_floor_of_one_and_no_cap():
  model = reference.MindSpore(1.5)
  assert _scales(model, "xx") == [1, 1]
  model = reference.MindSpore(2.0**127, scale_window=1)
  assert _scales(model, ".") == [2.0**128]


def test_mindspore_fails_on_the_1001st_overflow_in_a_row():
  model = reference.MindSpore()
  assert _failures(model, 1001 * "x" + ".") == 1000 * [False] + [True, True]


def test_mindspore_ends_the_row_at_a_clean_step():
  model = reference.MindSpore()
  assert not any(_failures(model, 1000 * "x" + "." + 1000 * "x"))


def test_mindspore_fixed_is_constant():
  assert _scales(reference.MindSporeFixed(), "x.x") == [128, 128, 128]


def test_mindspore_amp_grows_and_backs_off():
  model = reference.MindSporeAmp(4.0, 2, 2)
  assert _scales(model, "..x.x..") == [4, 8, 4, 4, 2, 2, 4]


def test_mindspore_amp_divides_in_float32():
  model = reference.MindSporeAmp(5.0, 3, 9)
  assert _scales(model, "x") == [13981013 / 2**23]


def test_mindspore_amp_clamps_at_one_and_refuses_a_growth_to_inf():
  assert _scales(reference.MindSporeAmp(1.5, 2, 9), "xx") == [1, 1]
  assert _scales(reference.MindSporeAmp(2.0**127, 2, 1), ".") == [2.0**127]


def test_mindspore_amp_takes_a_counter_above_the_window_modulo_it():
  model = reference.MindSporeAmp(2.0, 2, 3)
  model.counter = 5
  assert _scales(model, "....") == [2, 2, 2, 4]


def test_mindspore_cell_grows_and_backs_off():
  model = reference.MindSporeCell(4.0, 2, 2)
  assert _scales(model, "...x.x..") == [4, 8, 8, 4, 4, 2, 2, 4]


def test_mindspore_cell_grows_at_once_with_a_lowered_window():
  model = reference.MindSporeCell(16.0, 2, 10)
  _scales(model, "....")
  model.scale_window = 3
  assert _scales(model, "....") == [32, 32, 32, 64]


def test_mindspore_cell_multiplies_by_the_float32_reciprocal():
  model = reference.MindSporeCell(5.0, 3, 9)
  assert _scales(model, "x") == [13981014 / 2**23]


def test_mindspore_cell_clamps_at_one_and_grows_to_inf():
  assert _scales(reference.MindSporeCell(1.5, 2, 9), "xx") == [1, 1]
  assert _scales(reference.MindSporeCell(2.0**127, 2, 1), ".") == [math.inf]


# PaddlePaddle.


@pytest.mark.parametrize("make_model", [reference.Paddle, reference.PaddleOp])
def test_paddle_counts_bad_steps_in_a_row_and_clears_them_on_a_backoff(
  make_model,
):
  model = make_model(init_loss_scaling=16.0, decr_every_n_nan_or_inf=2)
  assert _scales(model, "x.xxxxx") == [16, 16, 16, 8, 8, 4, 4]


@pytest.mark.parametrize("make_model", [reference.Paddle, reference.PaddleOp])
def test_paddle_restarts_good_steps_on_a_tolerated_overflow(make_model):
  model = make_model(
    init_loss_scaling=8.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=2
  )
  assert _scales(model, ".x..") == [8, 8, 8, 16]


@pytest.mark.parametrize("make_model", [reference.Paddle, reference.PaddleOp])
def test_paddle_rounds_the_ratio_first(make_model):
  model = make_model(init_loss_scaling=65536.0, decr_ratio=0.8)
  assert _scales(model, "xx") == [13421773 / 256, 10737419 / 256]


def test_paddle_has_neither_floor_nor_cap():
  model = reference.Paddle(init_loss_scaling=2.0**-148)
  assert _scales(model, "xx") == [2.0**-149, 0]
  model = reference.Paddle(init_loss_scaling=2.0**127, incr_every_n_steps=1)
  assert _scales(model, ".x") == [math.inf, math.inf]


def test_paddle_without_dynamic_loss_scaling_is_constant():
  model = reference.Paddle(
    init_loss_scaling=8.0, incr_every_n_steps=1, use_dynamic_loss_scaling=False
  )
  assert _scales(model, "x.x") == [8, 8, 8]


def test_paddle_op_clamps_at_one():
  model = reference.PaddleOp(init_loss_scaling=1.5)
  assert _scales(model, "xx") == [1, 1]


def test_paddle_op_refuses_a_growth_to_inf_and_restarts_the_count():
  model = reference.PaddleOp(init_loss_scaling=2.0**127, incr_every_n_steps=2)
  assert _scales(model, "..") == [2.0**127, 2.0**127]
  assert model.num_good_steps == 0


# Flax.


def test_flax_grows_after_one_step_more_than_the_interval():
  model = reference.Flax(scale=8.0, growth_interval=2)
  assert _scales(model, "......") == [8, 8, 16, 16, 16, 32]


def test_flax_restarts_the_count_on_an_overflow_where_growth_is_due():
  model = reference.Flax(scale=8.0, growth_interval=2)
  assert _scales(model, "..x...") == [8, 8, 4, 4, 4, 8]


def test_flax_grows_to_the_largest_float32():
  model = reference.Flax(scale=2.0**127, growth_interval=1)
  assert _scales(model, "....") == [2.0**127, LARGEST, LARGEST, LARGEST]


def test_flax_clamps_at_its_minimum_which_is_the_smallest_normal_float32():
  assert _scales(reference.Flax(2.0**-126), "x") == [2.0**-126]
  model = reference.Flax(scale=2.0, minimum_scale=0.75)
  assert _scales(model, "xx") == [1, 0.75]
  model = reference.Flax(2.0**-149, minimum_scale=None)
  assert _scales(model, "x") == [0]


def test_flax_rounds_the_factor_first():
  model = reference.Flax(scale=65536.0, backoff_factor=0.8)
  assert _scales(model, "xx") == [13421773 / 256, 10737419 / 256]


# JMP.


def test_jmp_grows_and_backs_off():
  model = reference.Jmp(4.0, period=2)
  assert _scales(model, "..x.x..") == [4, 8, 4, 4, 2, 2, 4]


def test_jmp_divides_in_float32():
  model = reference.Jmp(5.0, factor=3)
  assert _scales(model, "x") == [13981013 / 2**23]


def test_jmp_clamps_at_its_minimum_and_refuses_a_growth_to_inf():
  assert _scales(reference.Jmp(1.5), "xx") == [1, 1]
  assert _scales(reference.Jmp(1.5, min_loss_scale=0.5), "xx") == [0.75, 0.5]
  assert _scales(reference.Jmp(2.0**127, period=1), ".") == [2.0**127]


def test_jmp_takes_a_counter_above_the_period_modulo_it():
  model = reference.Jmp(2.0, period=3)
  model.counter = 5
  assert _scales(model, "....") == [2, 2, 2, 4]


# Checkpoints: a model, the steps that it takes, and what it then saves.

CHECKPOINTS = {
  "torch": (
    reference.Torch(8.0, growth_interval=9),
    "x..",
    {
      "scale": 4.0,
      "growth_factor": 2.0,
      "backoff_factor": 0.5,
      "growth_interval": 9,
      "_growth_tracker": 2,
    },
  ),
  "torch_sharded": (
    reference.TorchSharded(8.0, growth_interval=9),
    "x..",
    {
      "scale": 4.0,
      "growth_factor": 2.0,
      "backoff_factor": 0.5,
      "growth_interval": 9,
      "_growth_tracker": 2,
    },
  ),
  "megatron": (
    reference.Megatron(8.0),
    "xxx..",
    {"scale": 2.0, "growth_tracker": 2, "hysteresis_tracker": -1},
  ),
  "megatron_constant": (reference.MegatronConstant(8.0), "x.", {}),
  "deepspeed": (
    reference.DeepSpeed(8.0, scale_window=9),
    "x..",
    {
      "cur_scale": 8.0,
      "cur_iter": 3,
      "last_overflow_iter": 0,
      "scale_factor": 2.0,
      "scale_window": 9,
      "min_scale": 1.0,
      "delayed_shift": 2,
      "cur_hysteresis": 1,
      "consecutive_hysteresis": False,
      "raise_error_at_min_scale": True,
      "dynamic": True,
    },
  ),
  "deepspeed_legacy": (
    reference.DeepSpeedLegacy(12.0, scale_factor=3.0),
    ".x.",
    {
      "cur_scale": 4.0,
      "cur_iter": 3,
      "last_overflow_iter": 1,
      "scale_factor": 3.0,
      "scale_window": 1000,
      "min_scale": 1.0,
      "delayed_shift": 1,
      "cur_hysteresis": 1,
      "consecutive_hysteresis": False,
      "raise_error_at_min_scale": True,
      "dynamic": True,
    },
  ),
  "apex": (
    reference.Apex(init_scale=8.0),
    "x..",
    {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 2}},
  ),
  "apex_hysteresis": (
    reference.ApexHysteresis(8.0, growth_interval=9, hysteresis=3),
    "..xx",
    {
      "scale": 8.0,
      "growth_factor": 2.0,
      "backoff_factor": 0.5,
      "growth_interval": 9,
      "_growth_tracker": 0,
      "_hysteresis_tracker": 1,
    },
  ),
  "fairseq": (reference.Fairseq(8.0), "x..", {"loss_scale": 4.0}),
  "metaseq": (reference.Metaseq(8.0), "x..", {"loss_scale": 4.0}),
  "colossalai": (
    reference.ColossalAI(8.0),
    "xx.",
    {
      "scale": 4.0,
      "growth_factor": 2.0,
      "backoff_factor": 0.5,
      "hysteresis": 2,
    },
  ),
  "npu_exponential": (
    reference.NpuExponential(8.0, 9),
    "x..",
    {"loss_scale": 8.0, "good_steps": 2, "bad_steps": 1},
  ),
  "npu_fixed": (reference.NpuFixed(8.0), "x.", {}),
  "tf_exponential": (
    reference.TensorFlowContrib(8.0, 9),
    "x..",
    {"loss_scale": 8.0, "good_steps": 2, "bad_steps": 1},
  ),
  "tensorflow": (
    reference.TensorFlow(8.0),
    "x..",
    {"current_loss_scale": 4.0, "good_steps": 2},
  ),
  "keras": (
    reference.Keras(8.0),
    "x..",
    {"step_counter": 2, "dynamic_scale": 4.0},
  ),
  "mindspore": (
    reference.MindSpore(8.0),
    ".xx",
    {
      "loss_scale": 2.0,
      "scale_window": 2000,
      "scale_factor": 2,
      "increase_ratio": 2,
      "decrease_ratio": 0.5,
      "cur_iter": 4,
      "last_overflow_iter": 3,
      "bad_step_max": 1000,
      "bad_step": 2,
    },
  ),
  "mindspore_fixed": (
    reference.MindSporeFixed(8.0, drop_overflow_update=False),
    "x.",
    {"_loss_scale": 8.0, "_drop_overflow_update": False},
  ),
  "mindspore_amp": (
    reference.MindSporeAmp(8.0, 2, 9),
    "x..",
    {"scale_value": 4.0, "counter": 2},
  ),
  "mindspore_cell": (
    reference.MindSporeCell(8.0, 2, 9),
    "x..",
    {
      "scale_sense": 4.0,
      "current_iterator_step": 4,
      "last_overflow_iterator_step": 1,
    },
  ),
  "paddle": (
    reference.Paddle(8.0, decr_every_n_nan_or_inf=3),
    "..xx",
    {
      "scale": 8.0,
      "incr_ratio": 2.0,
      "decr_ratio": 0.5,
      "incr_every_n_steps": 2000,
      "decr_every_n_nan_or_inf": 3,
      "incr_count": 0,
      "decr_count": 2,
      "use_dynamic_loss_scaling": True,
    },
  ),
  "paddle_op": (
    reference.PaddleOp(8.0, decr_every_n_nan_or_inf=3),
    "..xx",
    {"loss_scaling_0": 8.0, "num_good_steps_0": 0, "num_bad_steps_0": 2},
  ),
  "flax": (reference.Flax(8.0), "x..", {"fin_steps": 2, "scale": 4.0}),
  "jmp": (
    reference.Jmp(8.0),
    "x..",
    {
      "loss_scale": 4.0,
      "counter": 2,
      "period": 2000,
      "factor": 2,
      "min_loss_scale": 1.0,
    },
  ),
}


@pytest.mark.parametrize("preset", reference.MODELS)
def test_a_model_saves_what_its_original_saves(preset):
  model, steps, expected = CHECKPOINTS[preset]
  model = copy.copy(model)
  _scales(model, steps)
  assert type(model) is reference.MODELS[preset]
  assert model.state_dict() == expected


# Together.


def _one_rule_in_every_dialect(interval):
  """Models that are the same rule: no hysteresis, factors 2 and 1/2."""
  return [
    reference.Dynamic(2.0**15, growth_interval=interval, min_scale=1.0),
    reference.Torch(2.0**15, growth_interval=interval),
    reference.TorchSharded(2.0**15, growth_interval=interval),
    reference.Apex(
      init_scale=2.0**15,
      scale_window=interval,
      min_loss_scale=1.0,
      max_loss_scale=2.0**126,
    ),
    reference.ApexHysteresis(2.0**15, growth_interval=interval),
    reference.Megatron(2.0**15, growth_interval=interval, hysteresis=1),
    reference.DeepSpeedLegacy(2.0**15, scale_window=interval),
    reference.Fairseq(2.0**15, scale_window=interval),
    reference.ColossalAI(2.0**15, growth_interval=interval, hysteresis=1),
    reference.NpuExponential(2.0**15, interval, 1, decr_ratio=0.5),
    reference.TensorFlowContrib(2.0**15, interval, 1, decr_ratio=0.5),
    reference.TensorFlow(2.0**15, interval),
    reference.Keras(2.0**15, dynamic_growth_steps=interval),
    reference.MindSpore(2.0**15, scale_window=interval),
    reference.MindSporeAmp(2.0**15, 2, interval),
    reference.MindSporeCell(2.0**15, 2, interval),
    reference.Paddle(2.0**15, incr_every_n_steps=interval),
    reference.PaddleOp(2.0**15, incr_every_n_steps=interval),
    reference.Flax(2.0**15, growth_interval=interval - 1),
    reference.Jmp(2.0**15, period=interval),
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
