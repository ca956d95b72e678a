"""Advice on histories where the right answer is known."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale import presets
from optax_lossscale import rules
from tests import support
from tests.instruments.run.histories import make_history

INF, NAN = np.inf, np.nan
STEPS = 4000
AT = np.arange(STEPS)
# An S of 2**15 leaves 0.4 bits of headroom for 1.5, and 2**13 leaves 2.4.
FLAT = np.full(STEPS, 1.5)
FLAT_RUN = make_history(FLAT)
LARGE_RUN = make_history(FLAT * 2.0**20)
SHRINKING = make_history(2.0 ** -(AT / 100))
SPIKES = make_history(np.where(AT % 1001 == 0, 2.0**14, FLAT))
# Gradients that diverge. An interval above 300 saves a few of 44 lost steps,
# which is too little to propose it.
DIVERGING = make_history(
  2.0 ** np.concatenate([np.full(1000, -2.0), np.linspace(-2, 40, 300)])
)
SATURATED = ols.saturated(jnp.float16)
WIDE = ols.nonfinite(jnp.bfloat16)


def npu(init_scale=2.0**15, interval=1000):
  return presets.npu_exponential(
    init_loss_scale=init_scale,
    incr_every_n_steps=interval,
    decr_every_n_nan_or_inf=1,
    decr_ratio=0.5,
  )


@dataclasses.dataclass(frozen=True)
class Constant(ols.LossScale):
  """A user's rule without arguments to tune."""

  def init(self):
    return support.StubState(jnp.float32(2.0**20))

  def update(self, state, overflow, *, amax=None):
    return state


def lines(rule, history, *check):
  options = {"check": check[0]} if check else {}
  return [str(item) for item in instruments.advise(history, rule, **options)]


def replayed(rule, history, **options):
  """Returns the history of a run with this rule."""
  return instruments.replay(rule, history, **options).history


def assert_lines(found, beginnings):
  assert len(found) == len(beginnings), found
  for line, beginning in zip(found, beginnings, strict=True):
    assert line.startswith(beginning)


# Each rule, its history, and the beginning of each line of advice.
CHANGES = {
  "nothing to improve": (npu(), FLAT_RUN, []),
  "start too low": (npu(1.0), FLAT_RUN, ["init_loss_scale: 1 -> 2**13: "]),
  # Each interval loses the step on which S is too high; 4 of 4000 may be lost.
  "interval too short, wrapped": (
    rules.WarmStart(npu(interval=100)),
    FLAT_RUN,
    ["incr_every_n_steps: 100 -> 800: "],
  ),
  "interval too long": (
    npu(interval=2000),
    SHRINKING,
    ["incr_every_n_steps: 2000 -> 125: S could have been 2**"],
  ),
  # No longer interval fits into the run.
  "hysteresis loses steps": (
    presets.megatron(
      initial_scale=2.0**15, hysteresis=4, growth_interval=1000, refill="clean"
    ),
    make_history(2.0 ** (AT / 400)),
    ["hysteresis: 4 -> 1: "],
  ),
  "headroom loses steps": (
    rules.HeadroomLossScale(2.0**15, headroom=0, window=50),
    make_history(np.where(AT % 100 == 0, 2.0**3.5, 1) * FLAT),
    ["headroom: 0 -> 4: "],
  ),
  # A fixed S leaves two bits.
  "fixed S too low": (
    ols.FixedLossScale(2.0**4),
    SPIKES,
    ["scale: 2**4 -> 2**13: S could have been 2**11 times as large"],
  ),
  "fixed S nearly too low": (ols.FixedLossScale(2.0**12), FLAT_RUN, []),
  "fixed S too high, npu": (
    presets.npu_fixed(loss_scale=2.0**20),
    make_history(FLAT[:200]),
    ["loss_scale: 2**20 -> 2**13: 200 of 200 steps overflowed"],
  ),
  "fixed S too high, paddle": (
    presets.paddle(init_loss_scaling=2.0**20, use_dynamic_loss_scaling=False),
    FLAT_RUN,
    ["init_loss_scaling: 2**20 -> 2**13: "],
  ),
  "fixed S with rare overflows": (ols.FixedLossScale(2.0**13), SPIKES, []),
  "fixed S of a recorded overflow": (
    ols.FixedLossScale(2.0**20),
    make_history(np.full(150, INF), scale=2.0**20),
    ["scale: 2**20 -> 2**17: "],
  ),
  "ceiling, reached later": (
    ols.DynamicLossScale(growth_interval=100, max_scale=2.0**16),
    make_history(FLAT * np.where(AT < 1000, 1, 2.0**-12)),
    ["max_scale: 2**16 -> 2**25: S was at its ceiling", "growth_interval: 100"],
  ),
  "floor": (
    rules.LogMaxLossScale(scale_min=1.0),
    LARGE_RUN,
    ["scale_min: 1 -> 2**-5: "],
  ),
  # S stays above this floor.
  "floor, fairseq": (
    presets.fairseq(init_scale=1.0, min_loss_scale=0.5),
    LARGE_RUN,
    ["min_loss_scale: 0.5 -> 2**-6: ", "init_scale: 1 -> 2**-5: "],
  ),
  "floor without an argument": (
    npu(),
    LARGE_RUN,
    ["3985 steps overflowed with S at its floor, 1, and no argument lowers it"],
  ),
  "switched off": (presets.torch(enabled=False), LARGE_RUN, []),
  # Nothing is proposed for a start that is not in the history.
  "later part": (
    npu(2.0**32),
    make_history(FLAT, scale=2.0**15, first_step=5001),
    [],
  ),
  "run from a checkpoint": (
    npu(2.0**32),
    lambda: replayed(npu(2.0**32), FLAT_RUN, loss_scale=2.0**15),
    [],
  ),
  "run counted from 0": (
    npu(2.0**32),
    make_history(FLAT[:200], first_step=0),
    ["init_loss_scale: 2**32 -> 2**15: "],
  ),
  "too few steps": (
    ols.FixedLossScale(1.0),
    make_history(FLAT[:99]),
    ["99 steps are too few to propose anything"],
  ),
  "no steps": (ols.DynamicLossScale(), make_history([], first_step=100), []),
  "divergence": (
    presets.torch(growth_interval=300),
    lambda: replayed(presets.torch(growth_interval=300), DIVERGING),
    ["44 of 1300 steps overflowed, and no argument of the rule"],
  ),
  "rule without arguments": (
    Constant(),
    FLAT_RUN,
    ["4000 of 4000 steps overflowed (in a replay), and no argument"],
  ),
  "NaN at any S": (
    npu(),
    make_history(np.where(AT % 2500 == 1000, NAN, FLAT)),
    ["2 of 4000 steps had NaN gradients at an S that left"],
  ),
  # S may still be falling to one at which the steps are clean.
  "NaN from the first step on": (
    npu(2.0**32),
    make_history(
      np.full(150, NAN), scale=2.0 ** np.maximum(32.0 - np.arange(150), 0)
    ),
    ["118 steps overflowed with S at its floor, 1, and no argument"],
  ),
  "overflows of the caller": (
    ols.FixedLossScale(1024.0),
    make_history(
      np.full(200, 1.5), scale=1024.0, overflow=np.arange(200) % 20 == 10
    ),
    ["10 of 200 steps were overflows although amax was at most 1536: nothing"],
  ),
  "overflows that are applied": (Constant(skip=False), FLAT_RUN, []),
  "saturated": (
    ols.FixedLossScale(1.0),
    make_history(np.full(STEPS, 65504.0)),
    ["scale: 1 -> 0.25: "],
    SATURATED,
  ),
  # Unused range does no harm in a dtype with the range of float32.
  "bfloat16, fixed S": (ols.FixedLossScale(1.0), FLAT_RUN, [], WIDE),
  "bfloat16, S too high": (
    ols.FixedLossScale(2.0**127),
    make_history(FLAT * 4),
    ["scale: 2**127 -> 2**123: "],
    WIDE,
  ),
}
SLOW = {"headroom loses steps", "floor"}


@pytest.mark.parametrize("name", support.slow_but({*CHANGES} - SLOW, CHANGES))
def test_a_run_gets_its_advice(name):
  rule, history, beginnings, *check = CHANGES[name]
  history = history() if callable(history) else history
  assert_lines(lines(rule, history, *check), beginnings)


def test_a_nan_that_a_smaller_scale_may_cure_counts_like_inf():
  rule = ols.FixedLossScale(2.0**15)
  # S and amax are halved after the step that was NaN or inf.
  is_before = np.arange(200) < 100
  unscaled = np.where(np.arange(200) == 99, INF, 6e4 / 2**15)
  with_inf = make_history(unscaled, scale=np.where(is_before, 2.0**15, 2.0**14))
  with_nan = with_inf._replace(
    amax=np.where(np.isinf(with_inf.amax), NAN, with_inf.amax)
  )
  note, *changes = lines(rule, with_nan)
  assert changes == lines(rule, with_inf)
  assert "S or the model may have made these" in note
  assert "run such a batch again at S / 64, and if it is NaN again" in note


def test_a_reason_has_the_figures_of_both_replays():
  (line,) = lines(npu(2.0**32), FLAT_RUN)
  before, after = (instruments.replay(npu(x), FLAT_RUN) for x in (2**32, 2**15))
  assert line.partition(": 17 steps ")[2] == (
    "overflowed before the first clean one (in a replay); overflows "
    f"{before.lost_steps} -> {after.lost_steps} of 4000, mean headroom "
    f"{before.mean_headroom:.1f} -> {after.mean_headroom:.1f} bits"
  )


def test_figures_that_were_not_recorded_are_marked():
  # The figures of the first change were recorded.
  rule = npu(2.0**32, interval=100)
  first, second = lines(rule, replayed(rule, FLAT_RUN))
  assert "in a replay" not in first and "in a replay" in second
  # Another S without other overflows, and the same S with others.
  history = make_history(np.full(200, 2.0**-9))
  (line,) = lines(ols.FixedLossScale(8.0), history)
  assert " (in a replay); overflows" in line
  history = make_history(np.full(200, 65504.0))
  (line,) = lines(ols.FixedLossScale(1.0), history, SATURATED)
  assert " (in a replay); overflows" in line


def test_figures_are_at_best_if_many_steps_were_inf():
  rule = ols.FixedLossScale(2.0**20)
  for is_inf, figures in (
    (np.full(150, True), "150 -> 0 of 150 at best"),
    (np.arange(150) % 20 == 0, "8 -> 0 of 150"),
  ):
    history = make_history(np.where(is_inf, INF, 1e-2), scale=2.0**20)
    (line,) = lines(rule, history)
    assert f"overflows {figures}, mean headroom" in line


def run(unscaled_exponent, scale_exponent):
  """Returns a history with these log2 of amax / S and of S."""
  return make_history(2.0**unscaled_exponent, scale=2.0**scale_exponent)


def unscaled_run(moves):
  """Returns gradients of jax.grad, while S grows every 30 steps."""
  exponent = 15.0 + np.minimum(np.arange(1000) // 30, moves)
  return run(np.random.default_rng(0).normal(size=1000) - exponent, exponent)


def noisy_run():
  """Returns gradients of jax.grad whose noise lasts a step."""
  exponent = np.arange(120.0) // 20
  noise = np.array([2.0, 0.0, -2.0, 0.0, -2.0, 2.0, 0.0])
  return run(np.resize(noise, exponent.size) - exponent, exponent)


NOISE = np.random.default_rng(0).normal(size=300)
WILD = np.random.default_rng(0).normal(-10, 4, size=120)
S_OF_30, S_OF_5 = np.arange(300) // 30 - 9.0, np.arange(60) // 5 - 8.0
# Each run, and what its advice says if its gradients do not follow S.
FOLLOWING = {
  "never scaled": (unscaled_run(5), "over 5 moves of S, amax moved "),
  "never scaled, 4 moves": (unscaled_run(4), None),
  "scaled twice": (
    run(np.arange(200) // 20 - 12.0, np.arange(200) // 20 + 0.0),
    "amax moved 2.0 times as far",
  ),
  "never scaled, noise of a step": (noisy_run(), "moves of S"),
  "growing beside S": (run(np.arange(300) / 40 + NOISE - 10, S_OF_30), None),
  "falling S": (run(NOISE - 10, -S_OF_30), None),
  # S may follow amax in small moves, with a rule that looks at it.
  "small moves": (run(-np.arange(300) / 50, np.arange(300) / 100), None),
  # Only the small gradients near the limit are clean.
  "growing while S falls": (lambda: replayed(presets.torch(), DIVERGING), None),
  **{f"wild, {i}": (run(WILD[i : i + 60], S_OF_5), None) for i in (0, 20, 40)},
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_gradients_that_do_not_follow_s_are_reported_alone(name):
  history, text = FOLLOWING[name]
  history = history() if callable(history) else history
  found = lines(ols.DynamicLossScale(growth_interval=30), history)
  if text is None:
    assert not any("do not follow S" in line for line in found)
  else:
    assert_lines(found, ["these gradients do not follow S: "])
    assert text in found[0]
    assert "make them with scaled_value_and_grad(fun, opt_state)" in found[0]


def test_a_value_is_written_as_a_person_would():
  for value, text in (
    (2.0**15, "2**15"),
    (2**32, "2**32"),
    (1024, "1024"),
    (8.0, "8"),
    (1000.0, "1000"),
    (0.5, "0.5"),
  ):
    advice = instruments.Advice("x", value, 3, "since")
    assert str(advice) == f"x: {text} -> 3: since"


def test_wrong_arguments_are_refused():
  with pytest.raises(TypeError, match="History"):
    instruments.advise([1.0], ols.DynamicLossScale())
  with pytest.raises(TypeError, match="`rule`"):
    instruments.advise(FLAT_RUN, "dynamic")
