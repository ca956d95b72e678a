"""Advice on histories where the right answer is known."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale import presets
from tests import support
from tests.instruments.histories import make_history

NAN = math.nan
STEPS = 4000
# At 1.5 the largest power of two is 2**15: it leaves 0.4 bits.
FLAT = np.full(STEPS, 1.5)
SATURATED = ols.saturated(jnp.float16)

# Each system's first S and interval, in its words; other systems share these.
SYSTEMS = {
  "dynamic": (ols.DynamicLossScale, "init_scale", "growth_interval", {}),
  "torch": (presets.torch, "init_scale", "growth_interval", {}),
  "megatron": (
    presets.megatron,
    "initial_scale",
    "growth_interval",
    {"hysteresis": 1},
  ),
  "deepspeed": (
    presets.deepspeed,
    "init_scale",
    "scale_window",
    {"delayed_shift": 1},
  ),
  "fairseq": (presets.fairseq, "init_scale", "scale_window", {}),
  "npu": (
    presets.npu_exponential,
    "init_loss_scale",
    "incr_every_n_steps",
    {"decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5},
  ),
  "tensorflow": (
    presets.tensorflow,
    "initial_loss_scale",
    "increment_period",
    {},
  ),
  "keras": (presets.keras, "initial_scale", "dynamic_growth_steps", {}),
  "mindspore": (presets.mindspore, "init_loss_scale", "scale_window", {}),
  "paddle": (presets.paddle, "init_loss_scaling", "incr_every_n_steps", {}),
  "flax": (presets.flax, "scale", "growth_interval", {}),
  "jmp": (presets.jmp, "loss_scale", "period", {}),
}
FIXED = {
  "fixed": (ols.FixedLossScale, "scale"),
  "npu": (presets.npu_fixed, "loss_scale"),
  "mindspore": (presets.mindspore_fixed, "loss_scale"),
  "megatron": (presets.megatron_constant, "initial_scale"),
  "apex": (presets.apex, "loss_scale"),
}


def make_rule(system, init_scale=2.0**15, interval=1000, **more):
  make, init_name, interval_name, others = SYSTEMS[system]
  arguments = {init_name: init_scale, interval_name: interval}
  return make(**arguments | others | more)


def changes(history, rule, **options):
  return [
    (advice.argument, advice.old, advice.new)
    for advice in instruments.advise(history, rule, **options)
  ]


def with_advice(rule, advice):
  """The rule as a person would change it."""
  new = {item.argument: item.new for item in advice if item.argument}
  if dataclasses.is_dataclass(rule) and not hasattr(rule, "system"):
    return dataclasses.replace(rule, **new)
  return getattr(presets, rule.system)(**dict(rule.arguments) | new)


@pytest.mark.parametrize("system", ["dynamic", "npu"])
def test_a_good_run_needs_nothing(system):
  assert changes(make_history(FLAT), make_rule(system)) == []


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_start_that_is_far_too_high_is_the_first_scale_that_stood(system):
  name = SYSTEMS[system][1]
  rule = make_rule(system, init_scale=2.0**32)
  assert changes(make_history(FLAT), rule) == [(name, 2.0**32, 2.0**15)]


def test_reason_has_the_figures_of_both_replays():
  rule = make_rule("npu", init_scale=2.0**32)
  history = make_history(FLAT)
  advice = instruments.advise(history, rule)
  before = instruments.replay(rule, history)
  after = instruments.replay(with_advice(rule, advice), history)
  assert str(advice[0]) == (
    "init_loss_scale: 2**32 -> 2**15: 17 steps overflowed before the first "
    f"clean one (in a replay); overflows {before.lost_steps} -> "
    f"{after.lost_steps} of 4000, mean headroom {before.mean_headroom:.1f} -> "
    f"{after.mean_headroom:.1f} bits"
  )
  assert before.lost_steps - after.lost_steps == 17


@pytest.mark.slow
@pytest.mark.parametrize("system", ["npu", "flax"])
def test_a_short_interval_is_doubled_until_one_step_in_1000_is_lost(system):
  # S grows and falls back, so one step in each interval is lost: of 4000 steps
  # 39 with 100, and with 800 four, as many as may be.
  name = SYSTEMS[system][2]
  rule = make_rule(system, interval=100)
  assert changes(make_history(FLAT), rule) == [(name, 100, 800)]


def test_a_spike_every_500_steps_needs_an_interval_beyond_them():
  unscaled = FLAT.copy()
  unscaled[250::500] *= 2.0**6
  history = make_history(unscaled)
  rule = make_rule("npu", interval=100)
  advice = instruments.advise(history, rule)
  assert [item.argument for item in advice] == ["incr_every_n_steps"]
  assert advice[0].new > 500
  before = instruments.replay(rule, history).lost_steps
  after = instruments.replay(with_advice(rule, advice), history).lost_steps
  assert after < before / 4


def test_hysteresis_that_loses_steps_is_given_up():
  # Where no longer interval fits into the run.
  history = make_history(2.0 ** (np.arange(STEPS) / 400))
  rule = make_rule("megatron", hysteresis=4, refill="clean")
  assert changes(history, rule) == [("hysteresis", 4, 1)]


@pytest.mark.parametrize("system", ["dynamic", "npu"])
def test_a_start_that_is_far_too_low_is_raised(system):
  # 2**13 leaves 2.4 bits.
  name = SYSTEMS[system][1]
  rule = make_rule(system, init_scale=1.0)
  assert changes(make_history(FLAT), rule) == [(name, 1.0, 2.0**13)]


def test_an_interval_that_is_too_long_for_shrinking_gradients_is_halved():
  history = make_history(2.0 ** -(np.arange(STEPS) / 100))
  advice = instruments.advise(history, make_rule("npu", interval=2000))
  assert [item.argument for item in advice] == ["incr_every_n_steps"]
  rule = make_rule("npu", interval=advice[0].new)
  assert 2000 % advice[0].new == 0 and advice[0].new < 500
  replay = instruments.replay(rule, history)
  assert replay.mean_headroom < 6 and replay.lost_steps <= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIXED)
def test_a_fixed_scale_that_is_too_high_leaves_two_bits(kind):
  make, name = FIXED[kind]
  rule = make(**{name: 2.0**20})
  assert changes(make_history(FLAT), rule) == [(name, 2.0**20, 2.0**13)]


def test_a_fixed_scale_that_is_too_low_leaves_two_bits():
  rule = ols.FixedLossScale(2.0**4)
  assert changes(make_history(FLAT), rule) == [("scale", 2.0**4, 2.0**13)]
  assert changes(make_history(FLAT), ols.FixedLossScale(2.0**12)) == []


def test_one_spike_in_a_thousand_steps_does_not_lower_a_fixed_scale():
  unscaled = FLAT.copy()
  unscaled[::1001] = 2.0**14
  history = make_history(unscaled)
  assert changes(history, ols.FixedLossScale(2.0**13)) == []
  low = ols.FixedLossScale(2.0**4)
  assert changes(history, low) == [("scale", 2.0**4, 2.0**13)]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rule", "name"),
  [
    (ols.DynamicLossScale(2.0**8, max_scale=2.0**8), "max_scale"),
    (presets.apex(init_scale=2.0**8, max_loss_scale=2.0**8), "max_loss_scale"),
    (
      presets.colossalai(initial_scale=2.0**8, max_scale=2.0**8),
      "max_scale",
    ),
  ],
)
def test_a_ceiling_in_the_way_is_raised_with_the_start(rule, name):
  ceiling, start = changes(make_history(FLAT), rule)
  assert ceiling == (name, 2.0**8, 2.0**13)
  assert start[1:] == (2.0**8, 2.0**13)


def test_a_ceiling_that_is_reached_later_is_raised():
  unscaled = FLAT * np.where(np.arange(STEPS) < 1000, 1, 2.0**-12)
  rule = ols.DynamicLossScale(growth_interval=100, max_scale=2.0**16)
  assert changes(make_history(unscaled), rule)[0] == (
    "max_scale",
    2.0**16,
    2.0**25,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rule", "name"),
  [
    (ols.DynamicLossScale(1.0, min_scale=1.0), "min_scale"),
    (presets.megatron(initial_scale=1.0, hysteresis=1), "min_scale"),
    (presets.jmp(loss_scale=1.0, min_loss_scale=1.0), "min_loss_scale"),
    (ols.rules.LogMaxLossScale(scale_min=1.0), "scale_min"),
  ],
)
def test_a_floor_that_overflows_is_lowered(rule, name):
  advice = changes(make_history(FLAT * 2.0**20), rule)
  assert advice[0] == (name, 1.0, 2.0**-5)


def test_a_floor_that_the_scale_stays_above_is_lowered_further():
  rule = presets.fairseq(init_scale=1.0, min_loss_scale=0.5)
  advice = changes(make_history(FLAT * 2.0**20), rule)
  assert advice[0] == ("min_loss_scale", 0.5, 2.0**-6)


@pytest.mark.parametrize("system", ["npu", "mindspore"])
def test_a_floor_that_no_argument_lowers_is_told(system):
  (advice,) = instruments.advise(
    make_history(FLAT * 2.0**20), make_rule(system)
  )
  assert advice.argument is None
  assert "at its floor, 1, and no argument lowers it" in str(advice)


def test_nan_that_no_scale_mends_is_told_and_is_no_reason_for_another():
  unscaled = FLAT.copy()
  unscaled[[1000, 3500]] = NAN
  (advice,) = instruments.advise(make_history(unscaled), make_rule("npu"))
  assert advice.argument is None
  assert str(advice).startswith("2 of 4000 steps had NaN")


@pytest.mark.parametrize(
  "rule",
  [
    ols.DynamicLossScale(2.0**15),
    ols.FixedLossScale(2.0**15),
    make_rule("megatron", hysteresis=2),
    make_rule("npu", decr_every_n_nan_or_inf=2),
  ],
  ids=str,
)
def test_nan_that_a_smaller_scale_may_mend_is_advised_like_inf(rule):
  # S and amax are halved after the step that was NaN, or inf.
  is_before = np.arange(200) < 100
  scale = np.where(is_before, 2.0**15, 2.0**14)
  unscaled = np.full(200, 6e4 / 2**15)
  changes_of = {}
  for value in (NAN, math.inf):
    unscaled[99] = value
    history = make_history(unscaled, scale=scale)
    advice = instruments.advise(history, rule)
    changes_of[value] = [item[:3] for item in advice if item.argument]
    notes = [str(item) for item in advice if item.argument is None]
    assert not any("no loss scale" in note for note in notes)
    assert len(notes) == (value is NAN)
  assert changes_of[NAN] == changes_of[math.inf]
  unscaled[99] = NAN
  (note, *_) = instruments.advise(make_history(unscaled, scale=scale), rule)
  assert "S or the model may have made these" in str(note)
  assert "run such a batch again at S / 64, and if it is NaN again" in str(note)


@pytest.mark.slow
def test_nan_that_stays_however_small_the_scale_is_told():
  unscaled = FLAT.copy()
  unscaled[2000:2020] = NAN
  rule = make_rule("dynamic")
  history = instruments.replay(rule, make_history(unscaled)).history
  first, second = map(str, instruments.advise(history, rule)[:2])
  assert first.startswith(
    "14 of 4000 steps had NaN gradients at an S that left"
  )
  assert "most likely no loss scale mends these" in first
  # At the first ones S was still near the limit.
  assert second.startswith("6 of 4000 steps had NaN gradients")
  assert "S or the model may have made these" in second


def test_nan_that_drives_the_scale_down_needs_a_shorter_interval():
  unscaled = FLAT.copy()
  unscaled[100::300] = NAN
  note, change = instruments.advise(
    make_history(unscaled), make_rule("npu", interval=2000)
  )
  assert note.argument is None
  assert (change.argument, change.old) == ("incr_every_n_steps", 2000)
  assert change.new < 300


def test_a_recorded_overflow_is_mended_by_the_next_smaller_scale():
  history = make_history(np.full(150, math.inf), scale=2.0**20)
  rule = ols.FixedLossScale(2.0**20)
  assert changes(history, rule) == [("scale", 2.0**20, 2.0**17)]


def test_nothing_is_said_about_the_start_of_a_run_that_is_not_there():
  rule = make_rule("npu", init_scale=2.0**32)
  history = make_history(FLAT, scale=2.0**15, first_step=5001)
  assert changes(history, rule) == []


def test_a_run_begins_whether_its_steps_are_counted_from_0_or_from_1():
  rule = ols.DynamicLossScale(2.0**32)
  found = [
    changes(make_history(FLAT[:200], first_step=first), rule)
    for first in (0, 1)
  ]
  assert found == [[("init_scale", 2.0**32, 2.0**15)]] * 2


@pytest.mark.slow
def test_the_trial_of_a_later_part_begins_with_its_scale():
  history = make_history(FLAT, scale=1.0, first_step=5001)
  ((name, _, interval),) = changes(history, make_rule("npu"))
  assert name == "incr_every_n_steps" and interval < 500


@pytest.mark.slow
def test_headroom_that_spikes_need_is_left_to_them():
  unscaled = FLAT.copy()
  unscaled[50::100] *= 2.0**10
  rule = ols.DynamicLossScale(2.0**5, growth_interval=1000)
  assert changes(make_history(unscaled), rule) == []


def test_dtype_and_hardware_are_those_of_the_computation():
  history = make_history(np.full(STEPS, 65504.0))
  rule = ols.FixedLossScale(1.0)
  assert changes(history, rule) == []
  assert changes(history, rule, check=SATURATED) == [("scale", 1.0, 2.0**-2)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float32"])
def test_unused_range_is_no_harm_where_the_dtype_has_that_of_float32(dtype):
  for unscaled in (FLAT, 2.0 ** -(np.arange(STEPS) / 100)):
    for rule in (ols.FixedLossScale(1.0), make_rule("npu", interval=2000)):
      assert (
        changes(make_history(unscaled), rule, check=ols.nonfinite(dtype)) == []
      )


def test_a_scale_that_overflows_is_lowered_in_wide_dtypes_too():
  rule, check = ols.FixedLossScale(2.0**127), ols.nonfinite(jnp.bfloat16)
  advice = changes(make_history(FLAT * 4), rule, check=check)
  assert advice == [("scale", 2.0**127, 2.0**123)]


def callers_history(rule, scale):
  """A run of which the caller gave up every 20th step, at any S."""
  overflow = np.arange(STEPS) % 20 == 10
  history = make_history(np.full(STEPS, 0.9), scale=scale, overflow=overflow)
  return instruments.replay(rule, history).history


@pytest.mark.slow
@pytest.mark.parametrize(
  "rule",
  [ols.FixedLossScale(2048.0), make_rule("npu"), ols.DynamicLossScale()],
)
def test_overflows_of_the_caller_are_told_and_are_not_for_the_scale(rule):
  advice = instruments.advise(callers_history(rule, 1024.0), rule)
  assert "200 of 4000 steps were overflows although amax was" in str(advice[0])
  assert "overflow=" in str(advice[0])
  for item in advice:
    assert item.argument not in ("scale", "min_scale", "hysteresis")


def test_overflows_of_the_caller_are_told_with_their_largest_amax():
  overflow = np.arange(200) % 20 == 10
  history = make_history(np.full(200, 1.5), scale=1024.0, overflow=overflow)
  advice = instruments.advise(history, ols.FixedLossScale(1024.0))
  assert "although amax was at most 1536: nothing" in str(advice[0])


def test_run_that_goes_on_from_a_checkpoint_is_not_asked_for_its_start():
  rule = make_rule("npu", init_scale=2.0**32, interval=1000)
  history = instruments.replay(
    rule, make_history(FLAT), loss_scale=2.0**15
  ).history
  assert changes(history, rule) == []


@pytest.mark.parametrize("interval", [2000, 300])
def test_lost_steps_that_no_argument_keeps_are_told(interval):
  # A longer interval than 300 keeps a few steps of 44, which is no cure.
  log2 = np.concatenate([np.full(1000, -2.0), np.linspace(-2, 40, 300)])
  rule = presets.torch(growth_interval=interval)
  history = instruments.replay(rule, make_history(2.0**log2)).history
  (advice,) = instruments.advise(history, rule)
  assert advice.argument is None
  assert f"{np.sum(history.overflow)} of 1300 steps overflowed, and" in str(
    advice
  )


@pytest.mark.parametrize("skip", support.slow_but([False], [True, False]))
def test_steps_that_were_applied_are_not_called_lost(skip):
  unscaled = np.full(400, 2.0**-9)
  unscaled[40::60] = math.inf
  history = make_history(unscaled, scale=2.0**10)
  for rule in (
    ols.FixedLossScale(2.0**10, skip=skip),
    ols.DynamicLossScale(2.0**10, growth_interval=400, skip=skip),
  ):
    for advice in instruments.advise(history, rule):
      assert "lost" not in str(advice)


@pytest.mark.slow
def test_windows_that_dropped_a_micro_batch_are_overflows_and_not_lost():
  rule = ols.DynamicLossScale(2.0**10, growth_interval=400)
  tx = instruments.record(ols.loss_scaling(optax.sgd(0.0), rule), 400)

  def loss_fn(params, batch):
    return jnp.sum(jnp.float32(jnp.float16(batch) * jnp.float16(params)))

  def step(opt_state, batch):
    _, scaled_grads, overflow = ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, opt_state), microbatches=2, drop=True
    )(jnp.ones(()), batch)
    _, opt_state = tx.update(scaled_grads, opt_state, overflow=overflow)
    return opt_state, None

  batches = np.ones((400, 2), np.float32)
  batches[30::60, 1] = 1000
  opt_state, _ = jax.lax.scan(step, tx.init(jnp.ones(())), batches)
  assert optax.tree.get(opt_state, "skipped_steps") == 0
  history = instruments.get_history(opt_state)
  (advice,) = instruments.advise(history, rule)
  overflows = np.sum(history.overflow)
  assert str(advice).startswith(f"{overflows} of 400 steps overflowed, and no")
  assert overflows > 1 and "lost" not in str(advice)


def test_figures_that_were_not_recorded_are_said_to_be_of_a_replay():
  # The first is of the record; the second of a replay with the first.
  history = instruments.replay(
    make_rule("npu", 2.0**32, interval=100), make_history(FLAT)
  ).history
  first, second = instruments.advise(
    history, make_rule("npu", 2.0**32, interval=100)
  )
  assert "in a replay" not in str(first) and "in a replay" in str(second)
  (other,) = instruments.advise(history, make_rule("npu", 2.0**15, interval=50))
  assert "steps overflowed after the start (in a replay); " in str(other)


@pytest.mark.parametrize(
  ("unscaled", "rule", "options"),
  [
    # Another S that overflows no more, and the same S that does.
    (np.full(200, 2.0**-9), ols.FixedLossScale(8.0), {}),
    (np.full(200, 65504.0), ols.FixedLossScale(1.0), {"check": SATURATED}),
  ],
)
def test_figures_of_another_scale_or_check_are_of_a_replay(
  unscaled, rule, options
):
  (advice,) = instruments.advise(make_history(unscaled), rule, **options)
  assert " (in a replay); overflows" in str(advice)


def test_figures_of_a_run_that_hardly_had_a_clean_step_are_at_best():
  rule = ols.FixedLossScale(2.0**20)
  history = make_history(np.full(150, math.inf), scale=2.0**20)
  (advice,) = instruments.advise(history, rule)
  assert "overflows 150 -> 0 of 150 at best, mean headroom" in str(advice)
  history = make_history(
    np.where(np.arange(150) % 20, 1e-2, math.inf), scale=2.0**20
  )
  (advice,) = instruments.advise(history, rule)
  assert "overflows 8 -> 0 of 150, mean headroom" in str(advice)


def unscaled_history(moves, amax=1.0, first=15, each=30):
  """Gradients on which S has no influence, and S, which grows."""
  exponent = first + np.minimum(np.arange(STEPS // 4) // each, moves)
  rng = np.random.default_rng(0)
  amax = amax * 2.0 ** rng.normal(size=exponent.size)
  return make_history(amax * 2.0**-exponent, scale=2.0**exponent)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_that_do_not_follow_are_told_and_nothing_else(dtype):
  rule = ols.DynamicLossScale(growth_interval=30)
  (advice,) = instruments.advise(
    unscaled_history(20), rule, check=ols.nonfinite(dtype)
  )
  assert advice.argument is None
  assert str(advice).startswith(
    "these gradients do not follow S: over 20 moves of S, amax moved "
  )
  assert "make them with scaled_value_and_grad(fun, opt_state)" in str(advice)


def test_gradients_that_were_scaled_twice_do_not_follow_either():
  exponent = np.minimum(np.arange(200) // 20, 6)
  history = make_history(2.0**exponent * 2.0**-12, scale=2.0**exponent)
  (advice,) = instruments.advise(history, ols.DynamicLossScale(1.0))
  assert "over 6 moves of S, amax moved 2.0 times as far" in str(advice)


def is_told(history):
  rule = ols.DynamicLossScale(growth_interval=30)
  lines = map(str, instruments.advise(history, rule))
  return any("do not follow" in line for line in lines)


def test_below_five_moves_nothing_is_claimed_of_what_follows():
  assert not is_told(unscaled_history(4))
  assert is_told(unscaled_history(5))


@pytest.mark.parametrize("slope", [-1 / 40, 0, 1 / 40])
def test_gradients_that_grow_or_shrink_beside_the_scale_follow(slope):
  # S moves by a bit each 30 steps, and they by up to three quarters of one.
  exponent = np.arange(300) // 30 - 9
  noise = np.random.default_rng(0).normal(size=300)
  unscaled = 2.0 ** (slope * np.arange(300) + noise - 10)
  assert not is_told(make_history(unscaled, scale=2.0**exponent))


def test_small_moves_of_the_scale_say_nothing_of_what_follows():
  # A rule that looks at amax goes after gradients that shrink twice as fast.
  steps = np.arange(300)
  history = make_history(2.0 ** (-steps / 50), scale=2.0 ** (steps / 100))
  assert not is_told(history)


@pytest.mark.parametrize(("steps", "each"), [(1, 20), (2, 60)])
def test_noise_does_not_hide_that_gradients_do_not_follow(steps, each):
  exponent = np.arange(6 * each) // each
  noise = np.repeat([2.0, 0.0, -2.0, 0.0, -2.0, 2.0, 0.0], steps)
  noise = np.resize(noise, exponent.size)
  history = make_history(2.0 ** (noise - exponent), scale=2.0**exponent)
  assert is_told(history)


def test_gradients_that_grow_while_the_scale_falls_follow():
  # Of those near the limit only the small ones are clean.
  log2 = np.concatenate([np.full(1000, -2.0), np.linspace(-2, 40, 300)])
  history = instruments.replay(presets.torch(), make_history(2.0**log2)).history
  assert not is_told(history)


def test_gradients_that_vary_wildly_say_nothing_of_what_follows():
  rng = np.random.default_rng(0)
  unscaled = 2.0 ** rng.normal(-10, 4, size=120)
  told = 0
  for first in range(0, 60, 5):
    exponent = np.arange(60) // 5 - 8
    part = unscaled[first : first + 60]
    told += is_told(make_history(part, scale=2.0**exponent))
  assert told == 0


def test_nothing_is_proposed_from_a_few_steps():
  (advice,) = instruments.advise(
    make_history(FLAT[:99]), ols.FixedLossScale(1.0)
  )
  assert advice.argument is None and "99 steps are too few" in str(advice)
  assert changes(make_history(FLAT[:100]), ols.FixedLossScale(1.0)) == [
    ("scale", 1.0, 2.0**13)
  ]


def test_steps_that_were_nan_from_the_first_on_are_of_the_scale():
  scale = 2.0 ** np.maximum(32.0 - np.arange(150), 0)
  history = make_history(np.full(150, NAN), scale=scale)
  rule = make_rule("npu", init_scale=2.0**32)
  for advice in instruments.advise(history, rule):
    assert "NaN" not in str(advice)


def test_the_fixed_scale_of_a_later_part_is_the_rules_own():
  history = make_history(FLAT, first_step=5001)
  rule = ols.FixedLossScale(2.0**20)
  assert changes(history, rule) == [("scale", 2.0**20, 2.0**13)]


@pytest.mark.parametrize("first_step", [1, 100])
def test_an_empty_history_says_nothing(first_step):
  history = make_history([], first_step=first_step)
  assert instruments.advise(history, ols.DynamicLossScale()) == []


class OtherState(NamedTuple):
  loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Other(ols.LossScale):
  """A rule of a user, with nothing to turn."""

  def init(self):
    return OtherState(jnp.float32(2.0**20))

  def update(self, state, overflow, *, amax=None):
    return state


def test_lost_steps_of_a_rule_without_known_arguments_are_told():
  (advice,) = instruments.advise(make_history(FLAT), Other())
  assert advice.argument is None
  assert "4000 of 4000 steps overflowed (in a replay), and" in str(advice)


def test_switched_off_scaler_is_left_alone():
  rule = presets.torch(enabled=False)
  assert changes(make_history(FLAT * 2.0**20), rule) == []


@pytest.mark.slow
def test_headroom_of_a_statistical_rule_is_turned():
  from optax_lossscale import rules

  unscaled = FLAT * np.where(np.arange(STEPS) % 100 == 0, 2.0**3.5, 1)
  rule = rules.HeadroomLossScale(2.0**15, headroom=0, window=50)
  advice = changes(make_history(unscaled), rule)
  assert [item[:2] for item in advice] == [("headroom", 0)]
  assert 3 <= advice[0][2] <= 4


def test_a_warm_start_is_asked_for_the_rule_inside():
  from optax_lossscale import rules

  rule = rules.WarmStart(make_rule("npu", interval=100))
  assert changes(make_history(FLAT), rule) == [("incr_every_n_steps", 100, 800)]


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (2.0**15, "2**15"),
    (2.0**-14, "2**-14"),
    (2**32, "2**32"),
    (1024, "1024"),
    (8.0, "8"),
    (1000.0, "1000"),
    (0.5, "0.5"),
  ],
)
def test_values_are_written_as_people_write_them(value, text):
  advice = instruments.Advice("x", value, 3, "since")
  assert str(advice) == f"x: {text} -> 3: since"


def test_bad_arguments_are_told():
  with pytest.raises(TypeError, match="History"):
    instruments.advise([1.0], ols.DynamicLossScale())
  with pytest.raises(TypeError, match="`rule`"):
    instruments.advise(make_history(FLAT), "dynamic")
