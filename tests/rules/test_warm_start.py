"""A first S from the first step's amax."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.reference import amax_rules as reference
from tests.reference import dynamic
from tests.rules import runs

WarmStart = ols.rules.WarmStart


class DynamicModel(dynamic.Dynamic):
  """The model of the dynamic rule, which does not use amax."""

  def update(self, overflow, amax):
    del amax
    super().update(overflow)


@pytest.mark.parametrize(
  "arguments",
  [{}, {"probe_scale": 2.0**40, "headroom": 0}, {"probe_scale": 2.0**-120}],
)
def test_every_short_run_gives_the_scales_of_the_model(arguments):
  rule = WarmStart(
    ols.DynamicLossScale(growth_interval=2, min_scale=2.0**-126), **arguments
  )
  runs.assert_follows(
    rule,
    lambda: reference.WarmStart(
      lambda scale: DynamicModel(scale, growth_interval=2, min_scale=2.0**-126),
      **arguments,
    ),
    *runs.every_short_run(3),
  )


# log2(S) after each step of a warm start of a fixed S.
PROBES = {
  "an overflow leaps down, and the first clean amax is found after it": (
    2.0**32,
    [(True, np.inf), (True, 24.0), (False, 1.0), (False, 64.0)],
    [16, 0, 13, 13],
  ),
  "a tiny amax finds 2**126": (2.0**32, [(False, 2.0**-126)], [126]),
}


@pytest.mark.parametrize(
  ("probe", "steps", "expected"), PROBES.values(), ids=PROBES
)
def test_a_probe_ends_at_the_first_clean_amax(probe, steps, expected):
  rule = WarmStart(ols.FixedLossScale(), probe_scale=probe)
  assert runs.scales_of(rule, steps).tolist() == expected


def test_a_run_that_the_rules_system_would_end_is_found():
  rule = WarmStart(ols.presets.deepspeed(delayed_shift=1), probe_scale=2.0)
  tx = ols.loss_scaling(optax.sgd(0.1), rule)
  state = tx.init(jnp.ones(1))
  for gradient in (2.0**13, jnp.inf, jnp.inf):
    ols.raise_if_failed(state)
    _, state = tx.update(jnp.array([gradient]), state)
  with pytest.raises(FloatingPointError, match="where DeepSpeed ends the run"):
    ols.raise_if_failed(state)


def test_an_overflow_stalls_the_smallest_probe_and_then_the_rule_decides():
  rule = WarmStart(ols.FixedLossScale(), probe_scale=2.0**-126)
  state = rule.init()
  assert rule.stalled(state, True)
  assert not rule.stalled(state, False)
  warm = rule.update(state, False, amax=1.0)
  assert rule.stalled(warm, True)
  assert not rule.stalled(WarmStart(ols.FixedLossScale()).init(), True)


# The arguments.


def test_skip_is_not_an_argument():
  with pytest.raises(TypeError, match="skip"):
    WarmStart(ols.FixedLossScale(), skip=False)


def test_the_rule_decides_whether_an_overflow_is_skipped():
  for skip in (True, False):
    assert WarmStart(ols.FixedLossScale(skip=skip)).skip is skip


@pytest.mark.parametrize("rule", [None, 1024.0, ols.DynamicLossScale])
def test_anything_but_a_rule_is_refused(rule):
  with pytest.raises(TypeError, match="`rule` must be a LossScale, got"):
    WarmStart(rule)


def test_a_warm_start_of_a_warm_start_is_refused():
  with pytest.raises(ValueError, match="`rule` must not be a WarmStart"):
    WarmStart(WarmStart(ols.FixedLossScale()))


def test_a_rule_whose_scale_cannot_be_set_is_refused():
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
