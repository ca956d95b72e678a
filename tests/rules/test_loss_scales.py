"""The loss-scale rules, against the plain-Python model and the guarantees."""

import dataclasses
import functools
import inspect
import math
import pickle
from typing import NamedTuple

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import reference
from tests import support
from tests.rules import runs
from tests.support import describe


@functools.partial(jax.jit, static_argnums=0)
def _trajectories(rule, init_scales, overflows):
  """Scans a rule from every initial scale over every overflow sequence.

  Args:
    rule: The rule; static, so that one rule is one compilation.
    init_scales: float32[scales].
    overflows: bool[sequences, steps].

  Returns:
    The scale after each step, float32[scales, sequences, steps], and whether
    the step overflowed with the scale at the floor, bool of the same shape.
  """

  def trajectory(init_scale, overflows):
    state = rule.init()._replace(loss_scale=init_scale)
    return runs.trajectory(rule, state, overflows)

  over_sequences = jax.vmap(trajectory, in_axes=(None, 0))
  return jax.vmap(over_sequences, in_axes=(0, None))(init_scales, overflows)


def _scales(rule, overflows):
  """Returns the scale after each step of one sequence, float32[steps]."""
  init_scales = jnp.reshape(rule.init().loss_scale, (1,))
  return np.asarray(
    _trajectories(rule, init_scales, np.asarray([overflows], bool))[0][0, 0]
  )


_RULES = {
  "dynamic": ols.DynamicLossScale(growth_interval=2, hysteresis=2),
  "fixed": ols.FixedLossScale(),
}
_SEQUENCES = support.every_sequence(8)
_each_rule = pytest.mark.parametrize("rule", _RULES.values(), ids=_RULES.keys())


# Against the model.


# Near each other, so that factors lead past the bounds, or anywhere.
_SCALES = st.floats(0.1, 10.0) | st.floats(support.SMALLEST, 2.0**127)


@st.composite
def _arguments(draw):
  """Any configuration, of which a short sequence shows what it does."""
  lowest, first, highest = sorted(draw(_SCALES) for _ in range(3))
  return {
    "init_scale": first,
    "growth_factor": draw(st.floats(1.001, 8.0) | st.floats(8.0, 3e38)),
    "backoff_factor": draw(st.floats(0.1, 0.999) | st.floats(2e-38, 0.1)),
    "growth_interval": draw(st.integers(1, 4)),
    "hysteresis": draw(st.integers(1, 4)),
    "min_scale": lowest,
    "max_scale": highest,
  }


@given(_arguments())
@settings(max_examples=20)
def test_every_sequence_gives_the_scales_of_the_model(arguments):
  # Compiled, where XLA could take constant factors for something else.
  rule = ols.DynamicLossScale(**arguments)
  first = jnp.reshape(rule.init().loss_scale, (1,))
  (scales,), (stalled,) = _trajectories(rule, first, _SEQUENCES)
  models = [reference.Dynamic(**arguments) for _ in _SEQUENCES]
  for i, overflows in enumerate(_SEQUENCES.T.tolist()):
    for model, overflow in zip(models, overflows, strict=True):
      model.update(overflow)
    expected = np.float32([model.scale for model in models])
    support.assert_same_bits(scales[:, i], expected)
    np.testing.assert_array_equal(
      stalled[:, i], [model.stalled for model in models]
    )


def test_the_defaults_are_those_of_the_model():
  parameters = inspect.signature(reference.Dynamic).parameters
  rule = ols.DynamicLossScale()
  for name, parameter in parameters.items():
    assert getattr(rule, name) == parameter.default


# The state.


@_each_rule
def test_the_loss_scale_is_a_float32_scalar(rule):
  loss_scale = rule.init().loss_scale
  assert (loss_scale.shape, loss_scale.dtype) == ((), jnp.float32)


@_each_rule
def test_every_other_part_of_the_state_is_an_int32_scalar(rule):
  _, *counters = jax.tree.leaves(rule.init())
  assert {(x.shape, x.dtype) for x in counters} <= {((), np.dtype("int32"))}


@_each_rule
def test_the_state_starts_at_the_initial_scale(rule):
  initial = {"dynamic": 2.0**15, "fixed": 2.0**10}
  name = next(name for name in _RULES if _RULES[name] is rule)
  assert rule.init().loss_scale == initial[name]


@_each_rule
def test_the_state_is_strongly_typed(rule):
  assert not any(x.weak_type for x in jax.tree.leaves(rule.init()))


@_each_rule
def test_update_with_a_traced_overflow_keeps_structure_and_types(rule):
  before = jax.eval_shape(rule.init)
  after = jax.eval_shape(rule.update, before, True)
  assert describe(after) == describe(before)


@_each_rule
def test_update_with_a_python_overflow_keeps_structure_and_types(rule):
  before = jax.eval_shape(rule.init)
  after = jax.eval_shape(lambda state: rule.update(state, True), before)
  assert describe(after) == describe(before)


@_each_rule
def test_update_outside_jit_keeps_structure_and_types(rule):
  before = jax.eval_shape(rule.init)
  for overflow in [False, True, np.True_, jnp.asarray(True)]:
    assert describe(rule.update(rule.init(), overflow)) == describe(before)


@_each_rule
def test_the_state_is_the_same_with_64_bit_types_enabled(rule):
  narrow = describe(rule.init())
  with jax.enable_x64(True):
    state = rule.init()
    assert describe(state) == narrow
    assert describe(rule.update(state, True)) == narrow
    assert state.inv_scale.dtype == jnp.float32


@_each_rule
@pytest.mark.usefixtures("strict_promotion")
def test_no_step_promotes_a_dtype_implicitly(rule):
  state = rule.update(rule.init(), True)
  state = jax.jit(rule.update)(state, False)
  assert rule.stalled(state, True) | (state.inv_scale > 0)


@_each_rule
def test_update_is_traced_once(rule):
  traces = []

  @jax.jit
  def update(state, overflow):
    traces.append(overflow)
    return rule.update(state, overflow)

  state = rule.init()
  for overflow in [False, True, True, False, False, True]:
    state = update(state, overflow)
  assert len(traces) == 1


@pytest.mark.parametrize(
  "convert", [np.bool_, jnp.asarray], ids=["numpy", "jax"]
)
def test_python_and_array_overflows_agree(convert):
  rule = _RULES["dynamic"]
  state_of_python, state_of_array = rule.init(), rule.init()
  for overflow in [False, True, True, True, False, False, False, True]:
    state_of_python = rule.update(state_of_python, overflow)
    state_of_array = rule.update(state_of_array, convert(overflow))
    support.assert_same_bits(state_of_python, state_of_array)


def test_untraced_and_traced_overflows_agree():
  rule = ols.DynamicLossScale(
    growth_interval=2, hysteresis=2, growth_factor=1.1, backoff_factor=0.8
  )
  update = jax.jit(rule.update)
  eager, traced = rule.init(), rule.init()
  for overflow in [False, True, True, True, False, False, False, True]:
    eager = rule.update(eager, overflow)
    traced = update(traced, overflow)
    support.assert_same_bits(eager, traced)


@_each_rule
def test_amax_does_not_move_these_rules(rule):
  state = rule.init()
  for amax in [0.0, 65504.0, math.inf, math.nan]:
    for overflow in [True, True, False, False]:
      without = rule.update(state, overflow)
      state = rule.update(state, overflow, amax=jnp.asarray(amax, jnp.float32))
      support.assert_same_bits(state, without)


def test_no_counter_wraps_around():
  # A row of overflows longer than int32 counts still shrinks the scale.
  rule = ols.DynamicLossScale(hysteresis=2)
  state = rule.init()
  full = jax.tree.map(lambda x: jnp.full_like(x, 2**31 - 1), state)
  state = rule.update(full._replace(loss_scale=state.loss_scale), True)
  assert state.loss_scale == 2.0**14
  assert all(counter >= 0 for counter in jax.tree.leaves(state))


def test_the_longest_growth_interval_is_counted():
  rule = ols.DynamicLossScale(growth_interval=2**31 - 1)
  state = rule.init()
  for _ in range(3):
    state = jax.jit(rule.update)(state, False)
  assert state.loss_scale == 2.0**15


# The reciprocal.


def _normal_scales():
  """Positive float32 numbers with normal reciprocals: 20,000 and the ends."""
  rng = np.random.default_rng(0)
  exponents = rng.integers(-126, 126, 20_000)
  scales = np.ldexp(rng.uniform(1.0, 2.0, 20_000), exponents)
  powers = np.ldexp(1.0, np.arange(-126, 127))
  return np.concatenate([scales, powers]).astype(np.float32)


@_each_rule
def test_inv_scale_is_the_float32_reciprocal(rule):
  scales = _normal_scales()
  state = rule.init()._replace(loss_scale=jnp.asarray(scales))
  expected = np.float32(1) / scales
  support.assert_same_bits(state.inv_scale, expected)


@_each_rule
def test_inv_scale_under_jit_is_the_float32_reciprocal(rule):
  scales = _normal_scales()
  state = rule.init()._replace(loss_scale=jnp.asarray(scales))
  inv_scale = jax.jit(lambda state: state.inv_scale)(state)
  support.assert_same_bits(inv_scale, np.float32(1) / scales)


@_each_rule
def test_inv_scale_is_a_strongly_typed_float32(rule):
  inv_scale = rule.init().inv_scale
  assert (inv_scale.dtype, inv_scale.weak_type) == (jnp.float32, False)


# The floor.


def test_stalled_is_a_bool_scalar():
  rule = ols.DynamicLossScale()
  stalled = rule.stalled(rule.init(), True)
  assert (stalled.shape, stalled.dtype) == ((), jnp.bool_)


def test_an_overflow_stalls_exactly_at_min_scale():
  rule = ols.DynamicLossScale(init_scale=4.0, min_scale=1.0)
  state, seen = rule.init(), []
  for _ in range(4):
    seen.append(bool(rule.stalled(state, True)))
    state = rule.update(state, True)
  assert seen == [False, False, True, True]


def test_an_overflow_stalls_at_a_floor_that_float32_rounds():
  rule = ols.DynamicLossScale(init_scale=0.15, min_scale=0.1)
  state = rule.update(rule.init(), True)
  assert rule.stalled(state, True)


def test_a_clean_step_at_the_floor_does_not_stall():
  rule = ols.DynamicLossScale(init_scale=1.0, min_scale=1.0)
  assert not rule.stalled(rule.init(), False)


def test_growth_leaves_the_floor():
  rule = ols.DynamicLossScale(init_scale=1.0, growth_interval=1, min_scale=1.0)
  assert not rule.stalled(rule.update(rule.init(), False), True)


def test_a_fixed_loss_scale_is_stalled_by_every_overflow():
  rule = ols.FixedLossScale()
  stalled = rule.stalled(rule.init(), True)
  assert (stalled.shape, stalled.dtype) == ((), jnp.bool_)
  assert stalled
  assert not rule.stalled(rule.init(), False)


def test_a_fixed_scale_that_is_far_too_large_is_stalled_from_the_first_step():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(2.0**40))
  params = jnp.ones(2, jnp.float16)
  state = tx.init(params)

  def loss_fn(params):
    return jnp.float32(jnp.sum(params**2))

  for step in (1, 2):
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
    _, state = tx.update(scaled_grads, state, params)
    assert (state.skipped_steps, bool(state.stalled)) == (step, True)


def test_a_fixed_loss_scale_does_not_move():
  overflows = np.random.default_rng(0).random(1000) < 0.5
  scales = _scales(ols.FixedLossScale(3.0), overflows)
  np.testing.assert_array_equal(scales, np.full(1000, 3.0, np.float32))


# Guarantees.


@pytest.mark.parametrize("growth_interval", [1, 2, 3, 10, 2000])
def test_guarantee_3_growth_on_exactly_the_growth_interval_th_clean_step(
  growth_interval,
):
  rule = ols.DynamicLossScale(growth_interval=growth_interval)
  # From the start, after a growth, and after an overflow.
  clean = [False] * growth_interval
  scales = _scales(rule, [*clean, *clean, True, *clean])
  held = [1.0] * (growth_interval - 1)
  before_growth = np.asarray([*held, 2.0])
  expected = np.concatenate(
    [before_growth, 2 * before_growth, [2.0], 2 * before_growth]
  )
  np.testing.assert_array_equal(scales, 2.0**15 * expected)


def test_guarantee_3_clean_steps_before_an_overflow_do_not_count():
  rule = ols.DynamicLossScale(growth_interval=3, hysteresis=2)
  scales = _scales(rule, [False, False, True] * 50)
  np.testing.assert_array_equal(scales, np.full(150, 2.0**15))


@pytest.mark.parametrize(
  "factors",
  [(2.0, 0.5), (1.7, 0.3), (1e30, 1e-30), (3e38, 2e-38)],
  ids=support.name,
)
def test_guarantee_4_500_overflows_and_500_growths_keep_a_usable_scale(factors):
  growth_factor, backoff_factor = factors
  rule = ols.DynamicLossScale(
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
    growth_interval=1,
    min_scale=support.SMALLEST,
    max_scale=support.LARGEST,
  )
  from_bounds = np.asarray([support.SMALLEST, 1.0, support.LARGEST], np.float32)
  overflows = np.repeat(
    [[True, False, True], [False, True, False]], 500, axis=1
  )
  scales = np.asarray(_trajectories(rule, from_bounds, overflows)[0])
  # A comparison with NaN is false, so this also says that there is none.
  assert np.all((scales >= support.SMALLEST) & (scales <= support.LARGEST))
  assert np.all(np.float32(1) / scales >= support.SMALLEST)
  ends = scales[:, :, [499, 999, 1499]].tolist()
  down, up = (
    [support.SMALLEST, support.LARGEST, support.SMALLEST],
    [support.LARGEST, support.SMALLEST, support.LARGEST],
  )
  assert ends == [[down, up]] * 3


@pytest.mark.parametrize("bounds", [(2.0**-10, 2.0**-2), (0.25, 2.0**20)])
def test_guarantee_4_bounds_below_one_are_allowed(bounds):
  min_scale, max_scale = bounds
  rule = ols.DynamicLossScale(
    2.0**-2, growth_interval=1, min_scale=min_scale, max_scale=max_scale
  )
  scales = _scales(rule, [True] * 50 + [False] * 50)
  assert scales[[49, 99]].tolist() == [min_scale, max_scale]


def test_guarantee_4_bounds_survive_jit():
  rule = ols.DynamicLossScale(
    1.0, growth_interval=1, min_scale=0.25, max_scale=8.0
  )
  static = jax.jit(
    lambda rule, state, overflow: rule.update(state, overflow),
    static_argnums=0,
  )
  for update in [
    rule.update,
    jax.jit(rule.update),
    functools.partial(static, rule),
  ]:
    state = rule.init()
    for _ in range(5):
      state = update(state, True)
    assert state.loss_scale == 0.25
    for _ in range(7):
      state = update(state, False)
    assert state.loss_scale == 8.0


def test_guarantee_4_equal_bounds_hold_the_scale():
  rule = ols.DynamicLossScale(
    3.0, growth_interval=1, min_scale=3.0, max_scale=3.0
  )
  scales = _scales(rule, [True, False] * 20)
  np.testing.assert_array_equal(scales, np.full(40, 3.0))


def test_guarantee_4_the_default_floor_is_below_one():
  assert 0 < ols.DynamicLossScale().min_scale < 1


def test_guarantee_4_the_default_cap_has_a_normal_reciprocal():
  rule = ols.DynamicLossScale()
  assert 1 / rule.max_scale >= np.finfo(np.float32).smallest_normal


@pytest.mark.parametrize("rule", [ols.DynamicLossScale, ols.FixedLossScale])
def test_guarantee_16_arguments_after_the_first_are_keyword_only(rule):
  first, *others = inspect.signature(rule).parameters.values()
  assert first.kind == first.POSITIONAL_OR_KEYWORD
  assert {other.kind for other in others} == {first.KEYWORD_ONLY}


@pytest.mark.parametrize("rule", [ols.DynamicLossScale, ols.FixedLossScale])
def test_guarantee_16_a_second_positional_argument_is_refused(rule):
  with pytest.raises(TypeError, match="positional argument"):
    rule(2.0**15, 2.0)


def test_guarantee_16_amax_is_keyword_only():
  rule = ols.DynamicLossScale()
  with pytest.raises(TypeError, match="positional argument"):
    rule.update(rule.init(), True, 1.0)


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
def test_guarantee_16_factors_default_to_powers_of_two(name):
  assert math.frexp(getattr(ols.DynamicLossScale(), name))[0] == 0.5


def test_the_initial_scale_defaults_to_two_to_the_fifteen():
  assert ols.DynamicLossScale().init().loss_scale == 2.0**15


# The rule as a value.


@_each_rule
def test_a_rule_is_frozen(rule):
  with pytest.raises(dataclasses.FrozenInstanceError):
    rule.skip = False


def test_rules_with_equal_arguments_are_equal():
  assert ols.DynamicLossScale(8.0) == ols.DynamicLossScale(init_scale=8.0)


def test_rules_with_equal_arguments_have_equal_hashes():
  rules = {ols.DynamicLossScale(8.0), ols.DynamicLossScale(init_scale=8.0)}
  assert len(rules) == 1


@pytest.mark.parametrize(
  "arguments",
  [
    {"init_scale": 8.0},
    {"growth_factor": 4.0},
    {"backoff_factor": 0.25},
    {"growth_interval": 1000},
    {"hysteresis": 2},
    {"min_scale": 1.0},
    {"max_scale": 2.0**24},
    {"skip": False},
  ],
  ids=support.name,
)
def test_rules_with_different_arguments_differ(arguments):
  assert ols.DynamicLossScale(**arguments) != ols.DynamicLossScale()


def test_a_fixed_and_a_dynamic_rule_differ():
  assert ols.FixedLossScale(2.0**15) != ols.DynamicLossScale(2.0**15)


@_each_rule
def test_a_rule_pickles(rule):
  assert pickle.loads(pickle.dumps(rule)) == rule


@_each_rule
def test_a_state_pickles(rule):
  state = rule.update(rule.init(), True)
  restored = pickle.loads(pickle.dumps(state))
  support.assert_same_bits(restored, state)


@_each_rule
def test_a_rule_can_be_replaced_in_part(rule):
  replaced = dataclasses.replace(rule, skip=False)
  assert (replaced.skip, replaced != rule) == (False, True)


def test_numpy_arguments_make_the_rule_of_the_python_ones():
  of_numpy = ols.DynamicLossScale(
    np.float32(8.0), growth_interval=np.int64(3), skip=np.True_
  )
  of_python = ols.DynamicLossScale(8.0, growth_interval=3, skip=True)
  assert (of_numpy, repr(of_numpy)) == (of_python, repr(of_python))


def test_equal_static_rules_share_a_compilation():
  traces = []

  @functools.partial(jax.jit, static_argnums=0)
  def update(rule, state):
    traces.append(rule)
    return rule.update(state, True)

  for _ in range(2):
    rule = ols.DynamicLossScale(8.0)
    update(rule, rule.init())
  assert len(traces) == 1


@pytest.mark.parametrize("rule", [ols.DynamicLossScale, ols.FixedLossScale])
def test_skip_is_stored(rule):
  assert [rule(skip=skip).skip for skip in [False, True]] == [False, True]


@pytest.mark.parametrize("rule", [ols.DynamicLossScale, ols.FixedLossScale])
def test_skip_defaults_to_true(rule):
  assert rule().skip is True


@pytest.mark.parametrize("skip", [False, True])
def test_skip_does_not_change_how_the_scale_moves(skip):
  rule = ols.DynamicLossScale(8.0, growth_interval=2, skip=skip)
  scales = _scales(rule, [False, False, True, True])
  assert scales.tolist() == [8.0, 16.0, 8.0, 4.0]


def test_whole_numbers_may_be_integers():
  rule = ols.DynamicLossScale(
    8, growth_factor=2, growth_interval=1, min_scale=1, max_scale=16
  )
  assert _scales(rule, [False, True, True]).tolist() == [16.0, 8.0, 4.0]


# A rule of the user's own.


class _CountdownState(NamedTuple):
  loss_scale: jax.Array
  overflows_left: jax.Array


@dataclasses.dataclass(frozen=True)
class _Countdown(ols.LossScale):
  """Switches to a quarter of the scale at the third overflow."""

  def init(self):
    return _CountdownState(
      loss_scale=jnp.asarray(16.0, jnp.float32),
      overflows_left=jnp.asarray(3, jnp.int32),
    )

  def update(self, state, overflow, *, amax=None):
    overflows_left = state.overflows_left - jnp.asarray(overflow, jnp.int32)
    loss_scale = jnp.where(overflows_left == 0, 4.0, state.loss_scale)
    return _CountdownState(loss_scale.astype(jnp.float32), overflows_left)


def test_the_base_class_cannot_be_instantiated():
  with pytest.raises(TypeError, match="abstract"):
    ols.LossScale()


def test_a_subclass_without_update_cannot_be_instantiated():
  class OnlyInit(ols.LossScale):
    def init(self):
      return ols.FixedLossScale().init()

  with pytest.raises(TypeError, match="update"):
    OnlyInit()


@pytest.mark.parametrize("rule", [ols.DynamicLossScale, ols.FixedLossScale])
def test_the_rules_are_loss_scales(rule):
  assert issubclass(rule, ols.LossScale)


def test_a_subclass_of_the_users_own_moves_the_scale():
  scales = _scales(_Countdown(), [True, False, True, True, False])
  assert scales.tolist() == [16.0, 16.0, 16.0, 4.0, 4.0]


def test_a_subclass_of_the_users_own_skips_by_default():
  assert _Countdown().skip is True


def test_a_subclass_of_the_users_own_has_no_floor_by_default():
  rule = _Countdown()
  assert not rule.stalled(rule.init(), True)
