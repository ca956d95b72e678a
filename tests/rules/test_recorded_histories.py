"""Rules on the amax of two training runs, against the rule that counts."""

import functools
import math
import pathlib

import numpy as np
import pytest

import optax_lossscale as ols
from tests.reference import amax_rules
from tests.rules import runs

each_history = pytest.mark.parametrize("task", ["digits", "text"])


@functools.cache
def true_amax(task):
  path = pathlib.Path(__file__).parents[1] / "traces" / f"amax_{task}.csv"
  columns = np.genfromtxt(path, delimiter=",", names=True)
  return (columns["amax"] / columns["loss_scale"]).astype(np.float32)


@functools.cache
def replay(task, rule):
  """Returns the steps that a rule loses, and the mean headroom of the others.

  What a lost step changes in the training after it does not show here.
  """
  overflows, amaxes, _ = runs.closed_loop(rule, true_amax(task))
  headroom = np.log2(runs.FLOAT16_MAX / amaxes[~overflows].astype(float))
  return int(np.sum(overflows)), float(np.mean(headroom))


def dynamic(interval, init_scale=2.0**15):
  return ols.DynamicLossScale(init_scale, growth_interval=interval)


HEADROOM = ols.rules.HeadroomLossScale()


@each_history
@pytest.mark.parametrize("interval", [200, 2000])
def test_the_defaults_lose_nothing_and_leave_fewer_bits_unused(task, interval):
  lost, headroom = replay(task, HEADROOM)
  _, unused = replay(task, dynamic(interval))
  assert lost == 0
  assert headroom < unused


@each_history
def test_an_interval_that_leaves_fewer_bits_unused_loses_steps(task):
  _, headroom = replay(task, HEADROOM)
  lost, unused = replay(task, dynamic(50))
  assert unused < headroom
  assert lost >= 7


@each_history
def test_a_first_scale_of_two_to_the_32_costs_one_step_instead_of_15(task):
  assert replay(task, dynamic(2000, 2.0**32))[0] == 15
  assert replay(task, ols.rules.HeadroomLossScale(2.0**32))[0] == 1


@each_history
def test_a_warm_start_spares_the_skipped_steps_of_the_beginning(task):
  rule = ols.presets.megatron()
  assert replay(task, rule)[0] == 16
  assert replay(task, ols.rules.WarmStart(rule))[0] == 0


@each_history
def test_log_max_loses_nothing_and_uses_the_bits_above_its_old_ceiling(task):
  lost, headroom = replay(task, ols.rules.LogMaxLossScale())
  assert lost == 0
  model = amax_rules.LogMaxOriginal()
  unused = []
  for amax in true_amax(task).tolist():
    unused.append(math.log2(runs.FLOAT16_MAX / (amax * model.scale)))
    model.update(False, amax * model.scale)
  assert headroom < np.mean(unused) - 1.5
