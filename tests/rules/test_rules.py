"""What every rule that reads amax has in common with all rules."""

import inspect
import itertools
import math
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.rules import runs
from tests.support import describe

RULES = {
  "headroom": ols.rules.HeadroomLossScale(window=3),
  "log_max": ols.rules.LogMaxLossScale(),
  "warm_start": ols.rules.WarmStart(ols.DynamicLossScale(growth_interval=2)),
  "warm_headroom": ols.rules.WarmStart(ols.rules.HeadroomLossScale(window=2)),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def values(tree):
  return [np.asarray(x).tolist() for x in jax.tree.leaves(tree)]


# The state.


@each_rule
def test_update_keeps_structure_and_strong_types(rule):
  before = describe(rule.init())
  assert not any(weak for _, _, weak in before[1])
  for overflow, amax in [(False, 1.0), (True, np.float32(np.inf))]:
    assert describe(rule.update(rule.init(), overflow, amax=amax)) == before
  traced = jax.eval_shape(
    lambda state, amax: rule.update(state, True, amax=amax), rule.init(), 1.0
  )
  assert describe(traced) == before


@each_rule
def test_the_state_is_the_same_with_64_bit_types_enabled(rule):
  narrow = describe(rule.init())
  with jax.enable_x64(True):
    state = rule.init()
    assert describe(state) == narrow
    update = jax.jit(rule.update)
    assert describe(update(state, True, amax=jnp.float64(2.0))) == narrow


@each_rule
@pytest.mark.usefixtures("strict_promotion")
def test_no_step_promotes_a_dtype_implicitly(rule):
  state = jax.jit(rule.update)(rule.init(), False, amax=jnp.float32(1))
  assert rule.stalled(state, True) | (state.inv_scale > 0)


@each_rule
def test_the_state_survives_serialization_and_the_rule_pickling(rule):
  state = rule.update(rule.init(), False, amax=1.0)
  stored = flax.serialization.to_bytes(state)
  restored = flax.serialization.from_bytes(rule.init(), stored)
  assert values(restored) == values(state)
  assert pickle.loads(pickle.dumps(rule)) == rule
  assert hash(pickle.loads(pickle.dumps(rule))) == hash(rule)


@pytest.mark.slow
@each_rule
def test_rules_run_side_by_side_under_vmap(rule):
  overflows, amaxes = np.asarray([False, True]), np.float32([8, np.inf])
  together, _ = runs.trajectories(rule, overflows[:, None], amaxes[:, None])
  update = jax.jit(rule.update)
  for i, (overflow, amax) in enumerate(zip(overflows, amaxes, strict=True)):
    alone = update(rule.init(), overflow, amax=amax)
    assert together[i, 0] == alone.loss_scale


@each_rule
def test_the_wrapper_trains_in_a_scan_and_compiles_once(rule):
  tx = ols.loss_scaling(optax.sgd(0.5), rule)
  traces = []

  @jax.jit
  def train(state, factors):
    traces.append(rule)

    def step(state, factor):
      scaled_grads = (
        factor * ols.get_loss_scale(state) * jnp.ones(2, jnp.float16)
      )
      return tx.update(scaled_grads.astype(jnp.float16), state)[
        1
      ], state.overflow

    return jax.lax.scan(step, state, factors)[0]

  state = tx.init(jnp.zeros(2, jnp.float16))
  for _ in range(2):
    state = train(state, jnp.float32([1, 0.5, 100, 1, jnp.nan, 1]))
  assert len(traces) == 1
  assert state.applied_steps + state.skipped_steps == 12
  assert optax.tree.get(state, "loss_scale") == ols.get_loss_scale(state)


@each_rule
def test_a_missing_amax_is_an_error(rule):
  with pytest.raises(ValueError, match="`amax` must be passed to update"):
    rule.update(rule.init(), True)


# The flag.


@pytest.mark.parametrize(
  "rule",
  [
    *RULES.values(),
    ols.DynamicLossScale(),
    ols.FixedLossScale(),
    ols.presets.megatron(),
    ols.presets.megatron_constant(initial_scale=8.0),
  ],
  ids=support.name,
)
def test_a_flag_in_an_array_of_one_element_moves_the_rule_as_a_scalar(rule):
  state = rule.init()
  for overflow in (True, False):
    # As Megatron's `found_inf`.
    found_inf = np.array([overflow], np.float32)
    moved = rule.update(state, found_inf, amax=1.0)
    support.assert_same_bits(moved, rule.update(state, overflow, amax=1.0))
    support.assert_same_bits(
      rule.stalled(state, found_inf), rule.stalled(state, overflow)
    )


@pytest.mark.parametrize(
  "rule",
  [*RULES.values(), ols.DynamicLossScale(), ols.presets.megatron()],
  ids=support.name,
)
def test_several_flags_are_an_error_that_names_the_remedy(rule):
  for flags in (np.zeros(2), np.zeros(0)):
    with pytest.raises(ValueError, match="`overflow` must be one flag") as info:
      rule.update(rule.init(), flags, amax=1.0)
    assert f"got an array of shape {flags.shape}" in str(info.value)
    assert "pass jnp.any(overflow)" in str(info.value)


# The scale.


@each_rule
def test_guarantee_4_the_scale_stays_usable_on_every_sequence(rule):
  extremes = np.asarray(
    [0, runs.SUBNORMAL, 2.0**-126, 3e38, np.inf, np.nan, 1], np.float32
  )
  amaxes = np.stack(
    [
      np.resize(extremes[list(order)], 120)
      for order in itertools.permutations(range(7), 2)
    ]
    + [np.full(120, x) for x in extremes]
  )
  overflows = ~(amaxes <= runs.FLOAT16_MAX)
  scales, _ = runs.trajectories(rule, overflows, amaxes)
  assert np.all((scales >= 2.0**-126) & (scales <= 2.0**127))


@pytest.mark.parametrize(
  "make_rule",
  [
    lambda low, high: ols.rules.HeadroomLossScale(
      low, window=2, min_scale=low, max_scale=high
    ),
    lambda low, high: ols.rules.LogMaxLossScale(scale_min=low, scale_max=high),
  ],
  ids=["headroom", "log_max"],
)
@pytest.mark.parametrize("bounds", [(0.125, 0.5), (3.0, 1000.0)])
def test_the_bounds_hold_and_an_overflow_at_the_floor_is_stalled(
  make_rule, bounds
):
  rule = make_rule(*bounds)
  # So small that the S which it leaves room for is beyond float32.
  up = [(False, 2.0**-125)] * 40
  down = [(True, math.inf)] * 200
  overflows, amaxes = zip(*up, *down, strict=True)
  scales, stalled = runs.trajectories(
    rule, np.asarray([overflows]), np.asarray([amaxes], np.float32)
  )
  assert (scales[0, 39], scales[0, -1]) == bounds[::-1]
  assert not np.any(stalled[0, :41])
  assert stalled[0, -1]
  assert not rule.stalled(rule.init(), False)


# Arguments.


@pytest.mark.parametrize(
  ("rule", "arguments", "error", "message"),
  [
    ("Headroom", {"headroom": -1}, ValueError, "`headroom` must be between"),
    ("Headroom", {"headroom": 1.5}, TypeError, "integer number of bits, got 1"),
    ("Headroom", {"window": 0}, ValueError, "`window` must be between 1 and"),
    ("Headroom", {"dtype": int}, TypeError, "`dtype` must be a floating-point"),
    (
      "Headroom",
      {"init_scale": 2.0, "max_scale": 1.0},
      ValueError,
      "`min_scale` <= `init_scale` <= `max_scale` must hold, got",
    ),
    ("Headroom", {"min_scale": 2.0**-130}, ValueError, "at least 2**-126"),
    ("LogMax", {"beta1": 1}, ValueError, "`beta1` must be at least 0 and"),
    ("LogMax", {"beta2": 1 - 1e-9}, ValueError, "below 1 (in float32)"),
    ("LogMax", {"overflow_std_dev": -1}, ValueError, "must not be negative"),
    ("LogMax", {"log_max": math.inf}, ValueError, "must be finite"),
    (
      "LogMax",
      {"scale_min": 4.0, "scale_max": 2.0},
      ValueError,
      "`scale_min` <= `scale_max` must hold, got `scale_min`=4.0",
    ),
  ],
)
def test_arguments_out_of_range_are_refused(rule, arguments, error, message):
  with pytest.raises(error) as raised:
    getattr(ols.rules, f"{rule}LossScale")(**arguments)
  assert message in str(raised.value)


@pytest.mark.parametrize(
  ("arguments", "error"),
  [
    ({"probe_scale": 0}, ValueError),
    ({"headroom": 127}, ValueError),
    ({"dtype": "f16"}, TypeError),
  ],
  ids=support.name,
)
def test_arguments_of_a_warm_start_are_checked(arguments, error):
  with pytest.raises(error, match=f"`{next(iter(arguments))}`"):
    ols.rules.WarmStart(ols.FixedLossScale(), **arguments)


@pytest.mark.parametrize(
  "rule",
  [
    ols.rules.HeadroomLossScale,
    ols.rules.LogMaxLossScale,
    ols.rules.WarmStart,
  ],
)
def test_guarantee_16_arguments_after_the_first_are_keyword_only(rule):
  first, *others = inspect.signature(rule).parameters.values()
  assert first.name in ("init_scale", "rule") or first.kind == (
    first.KEYWORD_ONLY
  )
  assert {other.kind for other in others} == {first.KEYWORD_ONLY}


def test_numpy_arguments_make_the_rule_of_the_python_ones():
  of_numpy = ols.rules.HeadroomLossScale(
    np.float32(8), headroom=np.int64(2), window=np.int32(5), dtype="float16"
  )
  of_python = ols.rules.HeadroomLossScale(8.0, headroom=2, window=5)
  assert (of_numpy, repr(of_numpy)) == (of_python, repr(of_python))
