"""A first S from the first step's amax."""

import pytest

import optax_lossscale as ols
from tests import support
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


def test_a_tiny_amax_finds_the_largest_s():
  rule = WarmStart(ols.FixedLossScale(), probe_scale=2.0**32)
  assert runs.scales_of(rule, [(False, 2.0**-126)]).tolist() == [126]


def test_an_overflow_stalls_the_smallest_probe_and_then_the_rule_decides():
  rule = WarmStart(ols.FixedLossScale(), probe_scale=2.0**-126)
  state = rule.init()
  assert rule.stalled(state, True)
  assert not rule.stalled(state, False)
  warm = rule.update(state, False, amax=1.0)
  assert rule.stalled(warm, True)
  assert not rule.stalled(WarmStart(ols.FixedLossScale()).init(), True)


# The arguments.


def test_the_rule_decides_whether_an_overflow_is_skipped():
  for skip in (True, False):
    assert WarmStart(ols.FixedLossScale(skip=skip)).skip is skip


@pytest.mark.parametrize(
  ("rule", "text"),
  [
    (None, "`rule` must be a LossScale, got"),
    (ols.DynamicLossScale, "`rule` must be a LossScale, got"),
    (WarmStart(ols.FixedLossScale()), "`rule` must not be a WarmStart"),
    (support.Exponent(), "must hold S as a leaf"),
  ],
)
def test_what_cannot_start_warm_is_refused(rule, text):
  with pytest.raises((TypeError, ValueError), match=text):
    WarmStart(rule)
