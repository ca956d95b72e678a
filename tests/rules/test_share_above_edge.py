"""Graphcore's rule: a share of gradients above an edge."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import amax_rules as reference
from tests.rules import runs

Histogram = ols.rules.HistogramLossScale
Counts = ols.rules.HistogramCounts

EDGE = 8188.0  # An eighth of 65504.


@pytest.mark.slow
@pytest.mark.parametrize(
  "arguments",
  [
    {},
    {"update_period": 3, "init_scale": 2.0**-13, "bin_edge_location": 2.0**-12},
    {"init_scale": 2.0, "min_scale": 0.75, "max_scale": 5.0},
    {
      "init_scale": support.LARGEST,
      "min_scale": support.SMALLEST,
      "max_scale": 2.0**127,
    },
  ],
  ids=support.name,
)
def test_every_short_run_gives_the_scales_of_the_model(arguments):
  runs.assert_as_the_model(
    Histogram(**arguments),
    lambda: reference.Histogram(**arguments),
    *runs.every_short_run(3),
  )


def test_long_random_runs_give_the_scales_of_the_model():
  rule = Histogram(2.0**20, update_period=2)
  true_amax = runs.random_true_amax(0, 3000)
  overflows, amaxes, scales = runs.closed_loop(rule, true_amax)
  expected, _ = runs.expected(
    lambda: reference.Histogram(2.0**20, update_period=2),
    overflows[None],
    amaxes[None],
  )
  np.testing.assert_array_equal(scales, expected[0])


def test_counts_decide_as_in_the_model():
  rule = Histogram(1024.0, threshold_upper_count_proportion=0.25)
  update = jax.jit(rule.update)
  for below in range(8):
    for above in range(8):
      counts = Counts(jnp.float32(below), jnp.float32(above))
      state = update(rule.init(), False, amax=1.0, measured=counts)
      model = reference.Histogram(1024.0, threshold_upper_count_proportion=0.25)
      model.move(False, 1.0, below, above)
      # At exactly a quarter the share is not above it.
      assert state.loss_scale == model.scale


def test_without_counts_an_amax_at_the_edge_halves_the_scale():
  rule = Histogram(1024.0)
  below = float(np.nextafter(np.float32(EDGE), np.float32(0)))
  for amax, scale in ((below, 2048.0), (EDGE, 512.0)):
    assert rule.update(rule.init(), False, amax=amax).loss_scale == scale


def test_every_element_is_counted_once_by_its_magnitude():
  gradients = {
    "half": jnp.asarray([0, EDGE, -EDGE, 8184, jnp.inf, jnp.nan], jnp.float16),
    "float": jnp.asarray([[EDGE, 8187.9995], [-1e30, 1e-30]], jnp.float32),
    "complex": jnp.asarray([EDGE * 1j, 8000 + 8000j], jnp.complex64),
    "integer": jnp.full(3, 10_000),
    "none": None,
    "empty": jnp.zeros((0, 2)),
  }
  counts = jax.jit(Histogram().measure)(gradients)
  # 8188 is 8192 rounded down to what float16 has: a multiple of 4.
  assert (counts.below, counts.at_or_above) == (5, 7)
  assert counts.below.dtype == counts.at_or_above.dtype == jnp.float32


def test_a_large_model_may_have_an_outlier():
  few, many = jnp.zeros(99), jnp.zeros(100_000)
  rule = Histogram(2.0**10, threshold_upper_count_proportion=1e-3)
  for gradients, scale in ((few, 2.0**9), (many, 2.0**11)):
    tx = ols.loss_scaling(optax.sgd(1.0), rule)
    state = tx.init(gradients)
    _, state = jax.jit(tx.update)(gradients.at[7].set(10_000.0), state)
    assert ols.get_loss_scale(state) == scale


def test_all_devices_count_together():
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rule = Histogram(2.0**10, threshold_upper_count_proportion=0.1)
  tx = ols.loss_scaling(optax.sgd(1.0), rule, axis_name="data")

  def step(gradients, state):
    return tx.update(gradients, state)[1]

  mapped = jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P()
    )
  )
  state = tx.init(jnp.zeros(2))
  # One of 16 elements is below a tenth, though half of its device's.
  gradients = jnp.zeros(16).at[3].set(10_000.0)
  assert ols.get_loss_scale(mapped(gradients, state)) == 2.0**11
  gradients = gradients.at[15].set(10_000.0)
  assert ols.get_loss_scale(mapped(gradients, state)) == 2.0**9


def test_an_overflow_halves_the_scale_whatever_the_period_and_the_counts():
  rule = Histogram(1024.0, update_period=100)
  none_above = Counts(jnp.float32(10), jnp.float32(0))
  for amax in (1.0, math.inf, math.nan):
    state = rule.update(rule.init(), True, amax=amax, measured=none_above)
    assert state.loss_scale == 512.0


def test_counts_alone_are_enough():
  rule = Histogram(1024.0)
  counts = Counts(jnp.float32(10), jnp.float32(0))
  state = rule.update(rule.init(), False, measured=counts)
  assert state.loss_scale == 2048.0


def test_steps_between_decisions_leave_the_scale():
  steps = np.zeros((1, 6), bool)
  scales, _ = runs.trajectories(
    Histogram(1.0, update_period=3), steps, np.ones((1, 6), np.float32)
  )
  assert scales[0].tolist() == [1, 1, 2, 2, 2, 4]
