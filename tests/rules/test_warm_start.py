"""A first S from the first step's amax."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import reference as engines
from tests import support
from tests.reference import amax_rules as reference
from tests.rules import runs

WarmStart = ols.rules.WarmStart


class DynamicModel(engines.Dynamic):
  """The model of the dynamic rule, which is told of amax and does not look."""

  def update(self, overflow, amax):
    del amax
    super().update(overflow)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "length"),
  [
    ({}, 3),
    ({"probe_scale": 2.0**32, "headroom": 0}, 4),
    ({"probe_scale": 2.0**-120}, 3),
  ],
  ids=support.name,
)
def test_every_short_run_gives_the_scales_of_the_model(arguments, length):
  rule = WarmStart(
    ols.DynamicLossScale(growth_interval=2, min_scale=2.0**-126), **arguments
  )
  runs.assert_as_the_model(
    rule,
    lambda: reference.WarmStart(
      lambda scale: DynamicModel(scale, growth_interval=2, min_scale=2.0**-126),
      **arguments,
    ),
    *runs.every_short_run(length),
  )


@pytest.mark.parametrize("true_amax", [2.0**-20, 2.0**-5, 1.0, 2.0**12])
@pytest.mark.parametrize(
  "rule",
  [
    ols.presets.megatron(),
    ols.DynamicLossScale(2.0**32),
    ols.FixedLossScale(),
    ols.rules.LogMaxLossScale(overflow_std_dev=6.0),
  ],
  ids=lambda rule: type(rule).__name__,
)
def test_a_probe_at_two_to_the_32_costs_at_most_two_steps(rule, true_amax):
  rule = WarmStart(rule, probe_scale=2.0**32)
  amaxes = np.full(20, true_amax, np.float32)
  overflows, _, _ = runs.closed_loop(rule, amaxes)
  assert sum(overflows) <= 2


def test_a_probe_at_one_costs_nothing():
  rule = WarmStart(ols.presets.megatron())
  overflows, _, scales = runs.closed_loop(rule, np.full(5, 2.0**-3, np.float32))
  assert not any(overflows)
  assert scales.tolist() == [2.0**16] * 5


@pytest.mark.parametrize("true_amax", [2.0**-20, 1.0, 2.0**12])
def test_many_steps_of_zeros_cost_at_most_two_steps(true_amax):
  rule = WarmStart(ols.FixedLossScale())
  amaxes = np.append(np.zeros(20), np.full(10, true_amax)).astype(np.float32)
  overflows, _, scales = runs.closed_loop(rule, amaxes)
  assert max(scales[:20]) == 2.0**32
  assert sum(overflows) <= 2


def test_a_probe_above_two_to_the_32_stays_there_while_gradients_are_zero():
  rule = WarmStart(ols.FixedLossScale(), probe_scale=2.0**40)
  state = rule.update(rule.init(), False, amax=0.0)
  assert state.loss_scale == 2.0**40


def test_a_run_that_the_rules_system_would_end_is_found():
  rule = WarmStart(ols.presets.deepspeed(delayed_shift=1), probe_scale=2.0)
  tx = ols.loss_scaling(optax.sgd(0.1), rule)
  state = tx.init(jnp.ones(1))
  update = jax.jit(tx.update)
  for gradient in (2.0**13, jnp.inf, jnp.inf):
    ols.raise_if_failed(state)
    _, state = update(jnp.array([gradient]), state)
  with pytest.raises(FloatingPointError, match="where DeepSpeed ends the run"):
    ols.raise_if_failed(state)


def test_a_warm_start_of_a_preset_is_saved_as_the_preset():
  rule = WarmStart(ols.presets.megatron())
  state = rule.update(rule.init(), False, amax=1.0)
  state = rule.update(state, True, amax=jnp.inf)
  saved = ols.presets.to_state_dict(rule, state)
  assert saved == ols.presets.to_state_dict(rule.rule, state.rule_state)
  assert "hysteresis_tracker" in saved
  restored_rule, restored = ols.presets.from_state_dict(rule, saved)
  assert restored_rule is rule
  chex.assert_trees_all_equal(restored, state)
  with pytest.raises(ValueError, match="one that still probes"):
    ols.presets.to_state_dict(rule, rule.init())


def test_a_warm_start_of_another_rule_is_saved_under_its_own_keys():
  rule = WarmStart(ols.DynamicLossScale())
  saved = ols.presets.to_state_dict(rule, rule.init())
  assert not ols.presets.from_state_dict(rule, saved)[1].is_warm


def test_the_first_scale_has_the_bits_that_were_asked_for():
  for headroom in range(5):
    rule = WarmStart(ols.FixedLossScale(), headroom=headroom)
    state = rule.update(rule.init(), False, amax=1.0)
    assert state.loss_scale == 2.0 ** (15 - headroom)


def test_the_scale_is_found_as_that_of_any_rule():
  tx = ols.loss_scaling(optax.adam(0.1), WarmStart(ols.DynamicLossScale()))
  state = tx.init(jnp.zeros(2))
  _, state = jax.jit(tx.update)(jnp.asarray([1.0, 0.5]), state)
  assert ols.get_loss_scale(state) == 2.0**13
  assert optax.tree.get(state, "loss_scale") == 2.0**13


def test_an_overflow_of_the_smallest_probe_is_stalled():
  rule = WarmStart(ols.FixedLossScale(), probe_scale=2.0**-126)
  assert rule.stalled(rule.init(), True)
  assert not rule.stalled(rule.init(), False)
  warm = rule.update(rule.init(), False, amax=1.0)
  # From then on the rule says it: a fixed one cannot move S.
  assert rule.stalled(warm._replace(is_warm=jnp.full((), True)), True)


def test_the_rule_decides_whether_an_overflow_is_skipped():
  for skip in (True, False):
    assert WarmStart(ols.FixedLossScale(skip=skip)).skip is skip


@pytest.mark.parametrize("rule", [None, 1024.0, ols.DynamicLossScale])
def test_what_is_no_rule_is_refused(rule):
  with pytest.raises(TypeError, match="`rule` must be a LossScale, got"):
    WarmStart(rule)


def test_a_warm_start_of_a_warm_start_is_refused():
  with pytest.raises(ValueError, match="`rule` must not be a WarmStart"):
    WarmStart(WarmStart(ols.FixedLossScale()))


def test_a_state_in_which_nobody_can_set_the_scale_is_refused():
  class State(NamedTuple):
    log2_scale: jax.Array

    @property
    def loss_scale(self):
      return jnp.exp2(self.log2_scale)

  @dataclasses.dataclass(frozen=True)
  class Odd(ols.LossScale):
    def init(self):
      return State(jnp.float32(10))

    def update(self, state, overflow, *, amax=None):
      return state

  with pytest.raises(TypeError, match="must hold S as a leaf"):
    WarmStart(Odd())


def test_skip_is_no_argument():
  with pytest.raises(TypeError, match="skip"):
    WarmStart(ols.FixedLossScale(), skip=False)


# When it helps: the first steps of a critic whose gradients grow.


def lost_steps(rule, growth, first):
  """Returns which of 48 steps a critic in float16 loses.

  Args:
    rule: the rule.
    growth: by how many bits the returns grow a step, as an actor's do.
    first: how large they are at first.
  """
  keys = jax.random.split(jax.random.key(0), 3)
  params = {
    "hidden": jax.random.normal(keys[0], (4, 32)) / 2,
    "value": jax.random.normal(keys[1], (32, 1)) / 8,
  }
  x = jax.random.normal(keys[2], (256, 4))
  tx = ols.loss_scaling(optax.adam(3e-4), rule)

  def loss_fn(params, returns):
    values = jax.nn.swish(x @ params["hidden"]) @ params["value"]
    return jnp.mean((values[:, 0] - returns) ** 2)

  def step(carry, count):
    params, state = carry
    returns = first * jnp.exp2(growth * count) * (1 + x[:, 0])
    value_and_grad = ols.scaled_value_and_grad(
      ols.autocast(loss_fn, "O1"), state
    )
    _, scaled_grads = value_and_grad(params, returns)
    updates, state = tx.update(scaled_grads, state, params)
    return (optax.apply_updates(params, updates), state), state.skipped

  train = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(48)))
  _, skipped = train((params, tx.init(params)))
  return np.flatnonzero(skipped)


@pytest.mark.slow
def test_no_step_is_lost_where_the_first_s_alone_is_too_large():
  plain = ols.DynamicLossScale()
  assert lost_steps(plain, growth=0, first=400.0).tolist() == [*range(9)]
  assert lost_steps(WarmStart(plain), growth=0, first=400.0).size == 0


@pytest.mark.slow
def test_a_step_is_lost_for_each_bit_that_gradients_grow_by_afterwards():
  plain = ols.DynamicLossScale()
  lost = lost_steps(WarmStart(plain), growth=1 / 4, first=4.0)
  # After the spare bits, one in four steps, as without a warm start.
  assert lost[0] >= 4 * WarmStart(plain).headroom
  assert set(np.diff(lost)) == {4}
  without = lost_steps(plain, growth=1 / 4, first=4.0)
  assert lost.tolist() == without[-lost.size :].tolist()
  by_amax = ols.rules.HeadroomLossScale()
  assert lost_steps(by_amax, growth=1 / 4, first=4.0).size == 0
