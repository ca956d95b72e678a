"""A run may go on with the same state and other arguments of its rule."""

import jax.numpy as jnp
import pytest

import optax_lossscale as ols

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


# Each name of an interval, and two groups of systems. The first compares its
# count with the interval by ==, so S never grows once the count is past a new
# interval. The second compares by >=.
INTERVALS = {
  "growth_interval": (
    "torch megatron colossalai apex_hysteresis flax",
    "",
  ),
  "scale_window": ("apex", "deepspeed deepspeed_legacy fairseq"),
  "incr_every_n_steps": ("paddle paddle_op", "tf_exponential npu_exponential"),
  "increment_period": ("", "tensorflow"),
  "dynamic_growth_steps": ("keras", ""),
}
REQUIRED = {
  "tf_exponential": {"init_loss_scale": 1024.0},
  "npu_exponential": {"init_loss_scale": 1024.0},
}


@pytest.mark.parametrize(
  ("system", "interval", "grows"),
  [
    (system, interval, grows)
    for interval, groups in INTERVALS.items()
    for grows, systems in enumerate(groups)
    for system in systems.split()
  ],
)
def test_a_count_past_a_new_interval_is_compared_as_the_system_does(
  system, interval, grows
):
  preset, required = getattr(ols.presets, system), REQUIRED.get(system, {})
  rule = preset(**required, **{interval: 8})
  state = first = rule.init()
  changed = preset(**required, **{interval: 3})
  for step in range(10):
    state = (rule if step < 5 else changed).update(state, False)
  assert (state.loss_scale > first.loss_scale) == bool(grows)


def test_an_interval_that_moves_with_s_is_part_of_the_state():
  state = first = ols.presets.metaseq(scale_window=8).init()
  changed = ols.presets.metaseq(scale_window=2)
  grown = []
  for _ in range(8):
    state = changed.update(state, False)
    grown.append(float(state.loss_scale / first.loss_scale))
  assert grown == [1.0] * 7 + [2.0]
