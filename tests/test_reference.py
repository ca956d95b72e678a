"""The plain-Python models against the recorded originals, and worked by hand.

A sequence is a string, one character a step: `.` is clean, `x` overflows. The
expected scales are those after each step.
"""

import inspect
import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import reference
from tests.presets import traces

LARGEST = (2 - 2.0**-23) * 2.0**127


def _scales(model, steps):
  scales = []
  for step in steps:
    model.update(step == "x")
    scales.append(model.scale)
  return scales


# Rounding.


@given(st.floats(width=32), st.floats(width=32))
def test_float32_of_a_double_operation_is_the_float32_operation(a, b):
  with np.errstate(all="ignore"):
    product = np.float32(a) * np.float32(b)
    np.testing.assert_equal(reference.float32(a * b), float(product))
    if b != 0:
      quotient = np.float32(a) / np.float32(b)
      np.testing.assert_equal(reference.float32(a / b), float(quotient))


def test_float32_beyond_the_range_is_inf():
  assert reference.float32(LARGEST) == LARGEST
  assert reference.float32(2.0**128) == math.inf
  assert reference.float32(math.inf) == math.inf


def test_float32_below_the_range_is_zero():
  assert reference.float32(1.1 * 2.0**-149) == 2.0**-149
  assert reference.float32(2.0**-150) == 0.0


# The originals.


def _make_model(system, run):
  """Returns a model, of those arguments that do not switch its system off."""
  names = inspect.signature(reference.MODELS[system]).parameters
  arguments = {x: value for x, value in run["arguments"].items() if x in names}
  return reference.MODELS[system](**arguments)


def _assert_follows(model, overflows, recorded):
  """Asserts that a model moves S as recorded, and fails where that raised."""
  raised = recorded["raised"]
  steps = len(overflows) if raised is None else raised["step"]
  scales = []
  for overflow in overflows[:steps]:
    model.update(overflow)
    assert not model.failed
    scales.append(model.scale)
  expected = traces.scales(recorded["scales"], len(overflows))[:steps]
  np.testing.assert_array_equal(scales, expected)
  if raised is not None:
    model.update(overflows[steps])
    assert model.failed


@pytest.mark.parametrize("system", reference.MODELS)
def test_a_model_does_what_was_recorded_of_its_original(system):
  for run in traces.load(system)["runs"]:
    if False in (run["arguments"].get(x) for x in ("enable", "enabled")):
      continue
    overflows = traces.overflows_of(run).tolist()
    _assert_follows(_make_model(system, run), overflows, run)
    if "state_dict" not in run:
      continue
    half, model = len(overflows) // 2, _make_model(system, run)
    for overflow in overflows[:half]:
      model.update(overflow)
    saved = traces.state_dict(run["state_dict"])
    if system == "keras":  # Which numbers its variables.
      saved = traces.saved_dict(system, run)
    written = model.state_dict()
    # A model may have its arguments among them.
    assert written == written | saved
    if hasattr(model, "resume"):
      model.resume()
    _assert_follows(model, overflows[half:], run["resumed"])


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


# A count that is past its window. No recorded run has one.


@pytest.mark.parametrize(
  "make_model",
  [reference.Torch, reference.TorchSharded, reference.ApexHysteresis],
)
def test_torch_never_grows_with_a_tracker_above_the_interval(make_model):
  model = make_model(init_scale=2.0, growth_interval=3)
  model.growth_tracker = 5
  assert _scales(model, "....x...") == [2, 2, 2, 2, 1, 1, 1, 2]


def test_tensorflow_grows_at_once_with_a_count_above_the_period():
  model = reference.TensorFlow(4.0, increment_period=2)
  model.good_steps = 5
  assert _scales(model, "...") == [8, 8, 16]


def test_mindspore_waits_for_a_multiple_of_a_lowered_window():
  model = reference.MindSpore(16.0, scale_window=10)
  _scales(model, "....")
  model.scale_window = 3
  assert _scales(model, "..") == [16, 32]


def test_mindspore_cell_grows_at_once_with_a_lowered_window():
  model = reference.MindSporeCell(16.0, 2, 10)
  _scales(model, "....")
  model.scale_window = 3
  assert _scales(model, "....") == [32, 32, 32, 64]


def test_mindspore_amp_takes_a_counter_above_the_window_modulo_it():
  model = reference.MindSporeAmp(2.0, 2, 3)
  model.counter = 5
  assert _scales(model, "....") == [2, 2, 2, 4]


def test_jmp_takes_a_counter_above_the_period_modulo_it():
  model = reference.Jmp(2.0, period=3)
  model.counter = 5
  assert _scales(model, "....") == [2, 2, 2, 4]


# What no recorded run reaches.


def test_npu_exponential_grows_only_below_its_own_limit():
  limit = reference.float32(1.7e38)
  below = float(np.nextafter(np.float32(limit), np.float32(0)))
  assert _scales(reference.NpuExponential(below, 1), ".") == [2 * below]
  assert _scales(reference.NpuExponential(limit, 1), ".") == [limit]
  assert _scales(reference.TensorFlowContrib(limit, 1), ".") == [2 * limit]
