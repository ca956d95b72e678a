"""Where a system would have ended the run: noted in jit, raised outside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from tests import reference

# The systems that end runs, and what the error says.
_AT_MINIMUM = "overflowed with the loss scale at its minimum.*DeepSpeed"
FAILING = {
  "deepspeed": _AT_MINIMUM,
  "deepspeed_legacy": _AT_MINIMUM,
  "fairseq": "to `min_loss_scale` or below.*fairseq",
  "mindspore": "more than 1000 steps in a row overflowed.*MindSpore",
}
# One step before the end: a single overflow is too many.
AT_THE_END = {
  "deepspeed": {"init_scale": 1.0, "delayed_shift": 1},
  "deepspeed_legacy": {"init_scale": 1.0},
  "fairseq": {"init_scale": 1.0, "min_loss_scale": 0.5},
}
# Arguments without a default.
REQUIRED = {
  "jmp": {"loss_scale": 8.0},
  "megatron_constant": {"initial_scale": 8.0},
  "mindspore_amp": {"scale_value": 8.0, "scale_factor": 2, "scale_window": 7},
  "mindspore_cell": {
    "loss_scale_value": 8.0,
    "scale_factor": 2,
    "scale_window": 7,
  },
  "npu_exponential": {"init_loss_scale": 8.0, "incr_every_n_steps": 7},
  "npu_fixed": {"loss_scale": 8.0},
  "tf_exponential": {"init_loss_scale": 8.0, "incr_every_n_steps": 7},
}


@functools.cache
def _updates(rule):
  """Returns a function from a state and overflows to all states after it."""

  def step(state, overflow):
    state = rule.update(state, overflow)
    return state, state

  return jax.jit(lambda state, overflows: jax.lax.scan(step, state, overflows))


def _states(rule, steps, state=None):
  """Returns the states after each step; `.` is clean, `x` overflows.

  All sequences are of one length, so that a rule is compiled once.
  """
  overflows = np.array([step == "x" for step in steps.ljust(12, ".")])
  _, states = _updates(rule)(rule.init() if state is None else state, overflows)
  return [jax.tree.map(lambda x, i=i: x[i], states) for i in range(len(steps))]


def _opt_state(rule, state=None):
  """Returns an optimizer's state around a rule's."""
  opt_state = ols.loss_scaling(optax.sgd(0.1), rule).init(jnp.ones(1))
  if state is None:
    return opt_state
  return optax.tree.set(opt_state, loss_scale_state=state)


def _fails(rule, state):
  try:
    ols.raise_if_failed(_opt_state(rule, state))
  except FloatingPointError:
    return True
  return False


def _failures(rule, steps):
  """Returns a string, `!` where `raise_if_failed` raises after the step."""
  states = _states(rule, steps)
  return "".join("-!"[_fails(rule, state)] for state in states)


def _failed(system):
  """Returns a rule, and an optimizer's state in which it has failed."""
  rule = getattr(presets, system)(**AT_THE_END[system])
  return rule, _opt_state(rule, rule.update(rule.init(), True))


def test_raise_if_failed_has_one_door():
  assert "raise_if_failed" in ols.__all__
  assert not hasattr(presets, "raise_if_failed")


# What test_models.py does not reach. DeepSpeed.


def test_deepspeed_fails_at_a_minimum_that_float32_rounds():
  rule = presets.deepspeed(init_scale=0.5, min_scale=0.3, delayed_shift=1)
  assert _failures(rule, "xx") == "-!"


# fairseq.


def test_fairseq_fails_where_s_would_reach_the_minimum():
  rule = presets.fairseq(init_scale=4.0, min_loss_scale=1.0)
  assert _failures(rule, ".xx") == "--!"


def test_fairseq_fails_where_s_would_fall_below_the_minimum():
  rule = presets.fairseq(init_scale=4.0, min_loss_scale=1.5)
  assert _failures(rule, ".xx") == "--!"


def test_fairseq_does_not_fail_just_above_the_minimum():
  rule = presets.fairseq(
    init_scale=4.0, min_loss_scale=float(np.nextafter(np.float32(1), 0))
  )
  assert _failures(rule, ".xxx") == "---!"


# MindSpore.


def test_mindspore_fails_on_the_1001st_overflow_in_a_row():
  rule = presets.mindspore()
  overflows = np.array([True] * 1000 + [False] + [True] * 1001)
  _, states = _updates(rule)(rule.init(), overflows)
  assert not states.failure[:-1].any()
  state = jax.tree.map(lambda x: x[-2], states)
  assert not _fails(rule, state)
  assert _fails(rule, rule.update(state, True))
  assert not _fails(rule, rule.update(state, False))


def test_mindspore_fails_after_a_resumption_in_the_row():
  rule = presets.mindspore()
  written = presets.to_state_dict(rule, rule.init()) | {
    "cur_iter": 1001,
    "last_overflow_iter": 1000,
    "bad_step": 1000,
  }
  _, state = presets.from_state_dict(rule, written)
  assert not _fails(rule, state)
  assert _fails(rule, rule.update(state, True))


# The others.


@pytest.mark.parametrize(
  "system", [x for x in reference.MODELS if x not in FAILING]
)
def test_no_other_system_ever_fails(system):
  rule = getattr(presets, system)(**REQUIRED.get(system, {}))
  state = rule.init()
  for _ in range(3):
    state = rule.update(state, True)
  ols.raise_if_failed(_opt_state(rule, state))
  # Without the field there is nothing that could fail later.
  assert getattr(state, "failure", None) is None


@pytest.mark.parametrize(
  "rule", [ols.DynamicLossScale(2.0**-14), ols.FixedLossScale()], ids=str
)
def test_no_own_rule_fails(rule):
  state = rule.update(rule.init(), True)
  assert rule.stalled(state, True)
  ols.raise_if_failed(_opt_state(rule, state))


@pytest.mark.parametrize(
  "rule",
  [
    presets.mindspore_fixed(),
    presets.npu_fixed(loss_scale=8.0),
    presets.megatron_constant(initial_scale=8.0),
    presets.apex(loss_scale=8.0),
    presets.paddle(use_dynamic_loss_scaling=False),
    presets.torch(enabled=False),
  ],
  ids=str,
)
def test_a_preset_that_never_moves_s_is_stalled_by_every_overflow(rule):
  state = rule.init()
  for overflow in (True, False, True):
    assert rule.stalled(state, overflow) == overflow
    state = rule.update(state, overflow)
    assert state.loss_scale == rule.init().loss_scale


@pytest.mark.parametrize("system", FAILING)
def test_the_first_state_has_not_failed(system):
  ols.raise_if_failed(_opt_state(getattr(presets, system)()))


# What is raised, and when.


@pytest.mark.parametrize("system", AT_THE_END)
def test_a_failure_stays(system):
  rule = getattr(presets, system)(**AT_THE_END[system], scale_window=1)
  steps = "x.....x..."
  assert _failures(rule, steps) == "!" * len(steps)
  # S moves on, so that it is not by S that the failure is known.
  assert _states(rule, steps)[-1].loss_scale > 1.0


@pytest.mark.parametrize("system", FAILING)
def test_the_error_says_the_condition_the_system_and_s(system):
  rule = getattr(presets, system)()
  code = {"fairseq": 2, "mindspore": 3}.get(system, 1)
  if system in AT_THE_END:
    rule, opt_state = _failed(system)
    assert opt_state.loss_scale_state.failure == code
  else:
    state = rule.init()._replace(failure=jnp.int32(code))
    opt_state = _opt_state(rule, state)
  scale = float(ols.get_loss_scale(opt_state))
  with pytest.raises(
    FloatingPointError, match=rf"{FAILING[system]}.*; S is {scale}\.$"
  ):
    ols.raise_if_failed(opt_state)


@pytest.mark.parametrize("system", AT_THE_END)
def test_s_is_held_where_the_system_would_have_raised(system):
  rule, opt_state = _failed(system)
  assert ols.get_loss_scale(opt_state) == rule.init().loss_scale


@pytest.mark.parametrize("system", AT_THE_END)
def test_the_state_is_not_changed(system):
  _, opt_state = _failed(system)
  before = jax.device_get(opt_state)
  for _ in range(2):  # It raises as often as it is called.
    with pytest.raises(FloatingPointError):
      ols.raise_if_failed(opt_state)
  assert jax.device_get(opt_state) == before


def test_a_failure_is_found_at_any_depth():
  rule, _ = _failed("deepspeed")
  tx = optax.chain(optax.identity(), ols.loss_scaling(optax.sgd(0.1), rule))
  opt_state = tx.init(jnp.ones(1))
  ols.raise_if_failed({"step": 3, "opt_state": opt_state})
  _, opt_state = tx.update(jnp.array([jnp.nan]), opt_state)
  with pytest.raises(FloatingPointError, match="DeepSpeed"):
    ols.raise_if_failed({"step": 3, "opt_state": opt_state})


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_failure_among_several_scales_is_found(place):
  _, failed = _failed("fairseq")
  states = [
    _opt_state(presets.deepspeed()),
    _opt_state(ols.FixedLossScale()),
  ]
  ols.raise_if_failed(states)
  states.insert(place, failed)
  with pytest.raises(FloatingPointError, match="fairseq.*; S is 1.0"):
    ols.raise_if_failed(states)


def test_one_failure_among_runs_that_vmap_stacked_is_found():
  rule = presets.deepspeed(init_scale=2.0, delayed_shift=1)
  states = [rule.init()]
  for _ in range(2):
    states.append(rule.update(states[-1], True))
  opt_states = [_opt_state(rule, state) for state in states]
  ols.raise_if_failed(_stack(opt_states[:2]))
  with pytest.raises(FloatingPointError, match="DeepSpeed"):
    ols.raise_if_failed(_stack(opt_states))


def _stack(trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.parametrize("opt_state", [None, {"w": np.ones(2)}, ()], ids=str)
def test_a_tree_without_a_loss_scale_is_refused(opt_state):
  with pytest.raises(ValueError, match="`opt_state` must hold .*wrap the opt"):
    ols.raise_if_failed(opt_state)


@pytest.mark.parametrize(
  "rule", [presets.deepspeed(), ols.FixedLossScale()], ids=str
)
def test_the_state_of_a_rule_alone_is_refused(rule):
  with pytest.raises(
    ValueError, match="`opt_state` must hold the state of `lo"
  ):
    ols.raise_if_failed(rule.init())


# Inside jit.


@pytest.mark.parametrize("system", FAILING)
def test_a_traced_state_is_refused_with_the_remedy(system):
  opt_state = _opt_state(getattr(presets, system)())
  with pytest.raises(TypeError, match="`opt_state` .* traced .*outside jit"):
    jax.eval_shape(ols.raise_if_failed, opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("system", AT_THE_END)
def test_nothing_raises_inside_jit_and_steps_are_skipped(system):
  rule = getattr(presets, system)(**AT_THE_END[system])
  tx = ols.loss_scaling(optax.sgd(0.1), rule)

  @jax.jit
  def step(params, opt_state):
    scaled_grads = jnp.full_like(params, jnp.inf)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = jnp.ones(2)
  opt_state = tx.init(params)
  for _ in range(3):
    params, opt_state = step(params, opt_state)
  np.testing.assert_array_equal(params, [1.0, 1.0])
  assert opt_state.skipped_steps == 3
  assert opt_state.stalled
  with pytest.raises(FloatingPointError):
    ols.raise_if_failed(opt_state)


def test_a_run_goes_on_after_the_advice_of_the_error():
  def make(raises):
    rule = presets.deepspeed(
      init_scale=1.0, delayed_shift=1, raise_error_at_min_scale=raises
    )
    return ols.loss_scaling(optax.sgd(0.1), rule)

  bad = jnp.full(1, jnp.inf)
  _, opt_state = make(True).update(bad, make(True).init(bad))
  with pytest.raises(
    FloatingPointError, match="raise_error_at_min_scale=False"
  ):
    ols.raise_if_failed(opt_state)
  _, opt_state = make(False).update(bad, opt_state)
  ols.raise_if_failed(opt_state)
  assert opt_state.skipped_steps == 2
