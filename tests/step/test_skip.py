"""`skip=`: a step is skipped for a reason that S has nothing to do with."""

import functools

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import assert_same_bits

PARAMS = {
  "half": jnp.array([1.0, -0.0, 0.5], jnp.float16),
  "single": jnp.array([[-0.0, 4.0]], jnp.float32),
}
RULE = ols.DynamicLossScale(8.0, growth_interval=2, hysteresis=2)
# A collection that is no gradient.
OTHER = "_overwrite_with_gradient"
RULES = {
  "dynamic": RULE,
  "fixed": ols.FixedLossScale(8.0),
  "deepspeed": ols.presets.deepspeed(init_scale=8.0),
  "npu": ols.presets.npu_exponential(init_loss_scale=8.0, incr_every_n_steps=2),
  "headroom": ols.rules.HeadroomLossScale(window=3),
  "log_max": ols.rules.LogMaxLossScale(),
  "warm_start": ols.rules.WarmStart(RULE),
}
# A row is a step: what its gradients are multiplied by, and `skip`.
STEPS = [
  (1.0, False),
  (0.5, True),
  (np.inf, False),
  (2.0, True),
  (1.0, False),
  (1e-3, True),
  (1.0, False),
  (np.nan, False),
  (1.0, False),
]


def wrapped(rule=RULE, **options):
  inner = optax.adam(0.5)
  return ols.loss_scaling(inner, rule, **options)


def scaled(factor, state):
  """Returns gradients times S, as a backward pass would."""
  loss_scale = ols.get_loss_scale(state)
  return jax.tree.map(
    lambda x: (factor * loss_scale * (0.5 + x)).astype(x.dtype), PARAMS
  )


@functools.cache
def trainer(rule):
  tx = wrapped(rule)

  @jax.jit
  def step(params, state, factor, skip):
    updates, state = tx.update(scaled(factor, state), state, params, skip=skip)
    return optax.apply_updates(params, updates), state

  def train(steps):
    params, state = PARAMS, tx.init(PARAMS)
    for factor, skip in steps:
      params, state = step(params, state, factor, skip)
    return params, state

  return train


@pytest.mark.parametrize(
  "rule",
  support.slow_but(["dynamic", "headroom", "warm_start"], RULES),
)
def test_the_steps_that_it_skips_might_as_well_not_have_been(rule):
  params, state = trainer(RULES[rule])(STEPS)
  left = [(factor, skip) for factor, skip in STEPS if not skip]
  expected_params, expected = trainer(RULES[rule])(left)
  assert_same_bits(
    (params, state.loss_scale_state, state.inner_state, state.applied_steps),
    (
      expected_params,
      expected.loss_scale_state,
      expected.inner_state,
      expected.applied_steps,
    ),
  )
  assert state.requested_skips == 3
  assert state.skipped_steps == expected.skipped_steps + 3
  assert expected.requested_skips == 0


@pytest.mark.parametrize("compiles", [True, False])
def test_it_skips_as_an_overflow_does(compiles):
  tx = wrapped()
  update = jax.jit(tx.update) if compiles else tx.update
  state = tx.init(PARAMS)
  _, state = update(scaled(1.0, state), state, PARAMS)
  updates, after = update(scaled(2.0, state), state, PARAMS, skip=True)
  assert_same_bits(updates, jax.tree.map(lambda x: x * 0 - 0.0, updates))
  assert all(np.signbit(x).all() for x in jax.tree.leaves(updates))
  assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
  assert_same_bits(
    (after.inner_state, after.loss_scale_state),
    (state.inner_state, state.loss_scale_state),
  )


def test_the_state_and_the_metrics_tell_it_from_an_overflow():
  tx = wrapped()
  state = tx.init(PARAMS)
  rows = []
  for factor, skip in [(1.0, True), (np.inf, False), (np.inf, True), (1, 0)]:
    _, state = tx.update(scaled(factor, state), state, PARAMS, skip=skip)
    metrics = ols.loss_scale_metrics(state)
    names = ("skipped", "overflow", "requested_skips", "consecutive_skips")
    rows.append([int(metrics[name]) for name in names])
  # With both, the overflow alone would have skipped the step.
  assert rows == [[1, 0, 1, 1], [1, 1, 1, 2], [1, 1, 1, 3], [0, 0, 1, 0]]
  assert metrics["skipped_steps"] == 3
  assert metrics["skip_rate"] == 0.75


def test_amax_and_headroom_show_the_step():
  tx = wrapped()
  updates = {"half": jnp.full(3, 2.0**10, jnp.float16)}
  _, skipped = tx.update(updates, tx.init(updates), skip=True)
  _, applied = tx.update(updates, tx.init(updates))
  for name in ("amax", "range_used", "headroom", "nan"):
    assert_same_bits(getattr(skipped, name), getattr(applied, name))
  assert skipped.amax == 2.0**10


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("rule", support.slow_but(["dynamic"], RULES))
def test_an_overflow_counts_for_the_rule_as_well(rule, skip):
  tx = wrapped(RULES[rule])
  state = tx.init(PARAMS)
  _, after = tx.update(scaled(np.inf, state), state, PARAMS, skip=skip)
  _, expected = tx.update(scaled(np.inf, state), state, PARAMS)
  assert_same_bits(after, expected)


@pytest.mark.parametrize(("factor", "moves"), [(1.0, False), (np.inf, True)])
def test_a_rule_that_skips_nothing_does_not_hold_it_back(factor, moves):
  rule = ols.DynamicLossScale(8.0, skip=False)
  tx = wrapped(rule)
  state = tx.init(PARAMS)
  updates, after = tx.update(scaled(factor, state), state, PARAMS, skip=True)
  assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
  assert_same_bits(after.inner_state, state.inner_state)
  assert after.skipped
  # Without `skip` the overflow would not have skipped it.
  assert after.requested_skips == 1
  assert after.overflow == moves
  assert ols.get_loss_scale(after) == (4.0 if moves else 8.0)


@pytest.mark.parametrize(
  ("flag", "expected"),
  [
    (True, True),
    (np.bool_(False), False),
    (0.25, True),
    (jnp.nan, True),
    (2**32, True),
    (jnp.array([0, 0, 3]), True),
    (jnp.zeros((2, 2)), False),
    ([], False),
    ([False, jnp.array([0.0, 1.0])], True),
    ((0, jnp.zeros(2)), False),
  ],
)
def test_it_is_set_if_any_flag_is_not_zero(flag, expected):
  tx = wrapped()
  state = tx.init(PARAMS)
  _, state = tx.update(scaled(1.0, state), state, skip=flag)
  assert state.skipped == state.requested_skips == expected
  assert not state.overflow


@pytest.mark.parametrize("factor", [1.0, np.inf, np.nan])
def test_a_flag_that_is_not_set_changes_nothing(factor):
  tx = wrapped()
  state = tx.init(PARAMS)
  scaled_grads = scaled(factor, state)
  assert_same_bits(
    tx.update(scaled_grads, state, PARAMS, skip=jnp.array(False)),
    tx.update(scaled_grads, state, PARAMS),
  )


@pytest.mark.parametrize("flag", [None, "yes", {"a": 1}, [True, None]])
def test_a_skip_that_is_no_flag_is_refused(flag):
  tx = wrapped()
  with pytest.raises(TypeError, match="`skip` must be a bool, a number or"):
    tx.update(PARAMS, tx.init(PARAMS), skip=flag)


def test_a_state_is_not_taken_for_a_list_of_flags():
  tx = wrapped()
  state = tx.init(PARAMS)
  with pytest.raises(TypeError, match="got a SpikeGuardState"):
    tx.update(PARAMS, state, skip=ols.experimental.SpikeGuard().init())


def test_the_overflow_of_a_window_is_no_reason_to_skip():
  tx = wrapped()
  state = tx.init(jnp.ones(()))
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(
      lambda params, batch: jnp.mean(params * batch), state
    ),
    microbatches=2,
  )
  _, scaled_grads, overflow = value_and_grad(
    jnp.ones(()), jnp.array([1.0, jnp.inf])
  )
  with pytest.raises(TypeError, match="pass it as overflow="):
    tx.update(scaled_grads, state, skip=overflow)


def test_dropped_micro_batches_count_for_the_rule_all_the_same():
  tx = wrapped(ols.DynamicLossScale(8.0))
  params = jnp.ones(())
  state = tx.init(params)
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(
      lambda params, batch: jnp.mean(params * batch), state
    ),
    microbatches=2,
    drop=True,
  )
  _, scaled_grads, overflow = value_and_grad(params, jnp.array([1.0, jnp.inf]))
  _, state = tx.update(
    scaled_grads, state, params, overflow=overflow, skip=True
  )
  assert state.overflow
  assert state.skipped
  assert state.requested_skips == 1
  assert ols.get_loss_scale(state) == 4


def taking_skip(updates, state, params=None, *, skip=False, **extra_args):
  del params, skip, extra_args
  return updates, state


@pytest.mark.parametrize("options", [{}, {"skip": True}])
def test_an_optimizer_that_takes_a_skip_of_its_own_is_refused(options):
  inner = optax.GradientTransformationExtraArgs(lambda params: (), taking_skip)
  tx = ols.loss_scaling(inner, RULE)
  with pytest.raises(TypeError, match="`inner` must not take a `skip` of its"):
    tx.update(PARAMS, tx.init(PARAMS), **options)


@pytest.mark.parametrize("name", ["skipped", "should_skip", "spike"])
def test_a_flag_under_another_name_is_refused(name):
  tx = wrapped()
  with pytest.raises(TypeError, match="did you mean skip=?"):
    tx.update(PARAMS, tx.init(PARAMS), **{name: True})


def test_an_optimizer_may_take_a_flag_of_that_name():
  def update(updates, state, params=None, *, should_skip):
    del params
    return updates, (should_skip,)

  inner = optax.GradientTransformationExtraArgs(
    lambda params: (jnp.array(False),), update
  )
  tx = ols.loss_scaling(inner, RULE)
  _, state = tx.update(PARAMS, tx.init(PARAMS), should_skip=jnp.array(True))
  assert state.inner_state[0]
  assert not state.skipped


def test_leaves_that_go_around_the_optimizer_keep_their_values():
  # A rule that skips nothing passes their next values on, unless it must skip.
  rule = ols.FixedLossScale(8.0, skip=False)
  tx = ols.loss_scaling(optax.sgd(0.5), rule)
  params = {"w": jnp.ones(2), OTHER: jnp.float32(3.0)}
  scaled_grads = {"w": jnp.ones(2), OTHER: jnp.float32(5.0)}
  state = tx.init(params)
  assert tx.update(scaled_grads, state, params, skip=False)[0][OTHER] == 5
  for flag, expected in ((jnp.array(False), 5), (True, 3)):
    assert (
      tx.update(scaled_grads, state, params, skip=flag)[0][OTHER] == expected
    )
  with pytest.raises(ValueError, match="`params` must be passed to update"):
    tx.update(scaled_grads, state, skip=True)


def test_without_a_flag_a_rule_that_skips_nothing_needs_no_params():
  rule = ols.FixedLossScale(8.0, skip=False)
  tx = ols.loss_scaling(optax.sgd(0.5), rule)
  scaled_grads = {"w": jnp.ones(2), OTHER: jnp.float32(5.0)}
  assert tx.update(scaled_grads, tx.init(scaled_grads))[0][OTHER] == 5


def test_a_rules_unusable_s_is_refused_where_no_flag_is_set():
  class Breaking(ols.LossScale):
    """Its next S is 0."""

    def init(self):
      return ols.FixedLossScale(8.0).init()

    def update(self, state, overflow, *, amax=None):
      return state._replace(loss_scale=jnp.float32(0))

  tx = wrapped(Breaking())
  state = tx.init(PARAMS)
  _, after = tx.update(scaled(1.0, state), state, skip=jnp.array(False))
  assert ols.get_loss_scale(after) == 8


def test_nothing_is_stalled_by_a_step_that_the_rule_does_not_see():
  class Breaking(ols.LossScale):
    """Its next S is not usable, and it says that it is stalled."""

    def init(self):
      return ols.FixedLossScale(8.0).init()

    def update(self, state, overflow, *, amax=None):
      return state._replace(loss_scale=jnp.float32(jnp.nan))

    def stalled(self, state, overflow):
      return jnp.array(True)

  tx = wrapped(Breaking())
  state = tx.init(PARAMS)
  _, after = tx.update(scaled(1.0, state), state, skip=True)
  assert not after.stalled
  assert tx.update(scaled(1.0, state), state)[1].stalled
  assert tx.update(scaled(np.inf, state), state, skip=True)[1].stalled


def test_an_unusable_s_is_replaced_on_such_a_step_too():
  tx = wrapped(ols.DynamicLossScale(8.0))
  state = tx.init(PARAMS)
  broken = optax.tree.set(state, loss_scale=jnp.float32(0))
  _, after = tx.update(PARAMS, broken, skip=True)
  assert ols.get_loss_scale(after) == 8
  assert after.stalled
  assert after.requested_skips == 0


# Without a rule.


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_it_skips_without_a_rule(skip, compiles):
  tx = ols.loss_scaling(optax.adam(0.5), None)
  params = {"w": jnp.array([1.0, -0.0]), OTHER: jnp.float32(3.0)}
  scaled_grads = {"w": jnp.ones(2), OTHER: jnp.float32(5.0)}
  state = tx.init(params)
  update = jax.jit(tx.update) if compiles else tx.update
  updates, after = update(scaled_grads, state, params, skip=jnp.array(skip))
  expected, applied = update(scaled_grads, state, params)
  if skip:
    kept = {"w": jnp.full(2, -0.0), OTHER: params[OTHER]}
    expected, applied = kept, state
  assert_same_bits(updates, expected)
  assert_same_bits(after.inner_state, applied.inner_state)
  names = ("skipped", "applied_steps", "skipped_steps", "requested_skips")
  counts = [int(getattr(after, name)) for name in names]
  assert counts == ([1, 0, 1, 1] if skip else [0, 1, 0, 0])
  assert after.consecutive_skips == skip
  assert not after.overflow


def test_without_a_rule_an_applied_step_ends_a_row_of_skips():
  tx = ols.loss_scaling(optax.sgd(0.5), None)
  state = tx.init(PARAMS)
  rows = []
  for skip in (True, True, False, jnp.array(True), jnp.array(False)):
    _, state = tx.update(PARAMS, state, PARAMS, skip=skip)
    rows.append(int(state.consecutive_skips))
  assert rows == [1, 2, 0, 1, 0]
  assert state.requested_skips == 3


def test_without_a_rule_no_check_looks_at_the_gradients():
  tx = ols.loss_scaling(
    optax.sgd(0.5), None, check=ols.saturated({"half": "float16"})
  )
  state = tx.init(PARAMS)
  assert tx.update(PARAMS, state, PARAMS, skip=[True])[1].requested_skips == 1


def test_without_a_rule_a_state_that_may_be_kept_must_keep_its_structure():
  inner = optax.GradientTransformation(
    lambda params: (), lambda updates, state, params=None: (updates, (updates,))
  )
  tx = ols.loss_scaling(inner, None)
  with pytest.raises(ValueError, match="state of `inner` must keep the struc"):
    tx.update(PARAMS, tx.init(PARAMS), skip=[False])


# On many devices.


@pytest.mark.parametrize(
  "rule", [RULE, pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  "check_vma", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_one_devices_flag_skips_the_step_on_all_in_the_one_collective(
  rule, check_vma
):
  tx = ols.loss_scaling(optax.sgd(0.5), rule, axis_name="data")
  params = jnp.ones(2)
  state = tx.init(params)

  def step(flag, gradient):
    _, after = tx.update(jnp.full(2, gradient[0]), state, params, skip=flag)
    mine = (after.skipped, after.overflow, after.requested_skips)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in mine])[None]

  mapped = support.on_each_device(
    step, support.SPREAD, check_vma, (support.SPREAD, support.SPREAD)
  )
  step = jax.jit(mapped).lower(jnp.zeros(8, bool), jnp.ones(8)).compile()
  assert len(support.between_devices(step)) == 1
  for place in (None, 3):
    flags = np.arange(8) == place
    expected = [1, 0, 1] if place else [0, 0, 0]
    assert np.asarray(step(flags, np.ones(8, np.float32))).tolist() == (
      [expected] * 8
    )
  if rule is not None:
    # One device overflows and another asks to skip.
    infinite = np.where(np.arange(8) == 5, np.inf, 1).astype(np.float32)
    rows = np.asarray(step(np.arange(8) == 3, infinite))
    assert rows.tolist() == [[1, 1, 0]] * 8


@pytest.mark.parametrize("rule", [RULE, None])
def test_one_members_flag_skips_the_step_for_all_along_a_named_axis(rule):
  tx = ols.loss_scaling(optax.sgd(0.5), rule, axis_name="data")
  state = tx.init(jnp.ones(2))
  update = lambda flag: tx.update(jnp.ones(2), state, skip=flag)[1]  # noqa: E731
  after = jax.vmap(update, axis_name="data")(jnp.array([False, True, False]))
  assert after.requested_skips.tolist() == [1, 1, 1]


@pytest.mark.parametrize("rule", [RULE, None])
def test_a_flag_that_varies_along_an_unnamed_axis_is_refused(rule):
  tx = ols.loss_scaling(optax.sgd(0.5), rule)
  state = tx.init(jnp.ones(2))
  step = support.on_each_device(
    lambda flag: tx.update(jnp.ones(2), state, skip=flag)[1].skipped[None],
    support.SPREAD,
  )
  with pytest.raises(ValueError, match="must skip together.*axis_name='data'"):
    jax.jit(step)(jnp.zeros(8, bool))


def test_runs_under_vmap_skip_on_their_own():
  tx = wrapped()
  states = jax.vmap(lambda _: tx.init(PARAMS))(jnp.arange(3))
  update = lambda state, skip: tx.update(scaled(1.0, state), state, skip=skip)  # noqa: E731
  _, after = jax.jit(jax.vmap(update))(states, jnp.array([False, True, False]))
  assert after.requested_skips.tolist() == [0, 1, 0]
  assert after.loss_scale_state.clean_steps.tolist() == [1, 0, 1]


# What follows the flag.


def test_select_on_skip_and_a_schedule_of_precision_follow():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=2)
  tx = wrapped()
  opt_state = tx.init(PARAMS)
  for low in (True, False):
    state = schedule.init()._replace(low=jnp.array(low))
    _, after = schedule.optimizer(tx, state).update(
      scaled(1.0, opt_state), opt_state, PARAMS, skip=True
    )
    assert ols.select_on_skip(after, new=8, old=7) == 7
    assert_same_bits(after.loss_scale_state, opt_state.loss_scale_state)
    assert not after.stalled


def test_the_train_state_of_linen_follows():
  state = ols.linen.TrainState.create(
    apply_fn=None, params=PARAMS, tx=wrapped()
  )
  scaled_grads = scaled(1.0, state.opt_state)
  after = state.apply_gradients(grads=scaled_grads, extra_args={"skip": True})
  assert_same_bits(after.params, PARAMS)
  assert (after.step, after.attempts, after.skipped) == (0, 1, True)


def test_a_model_of_nnx_follows():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  tx = ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(8.0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  before = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))
  with ols.nnx.undo_on_skip(optimizer, model):
    value_and_grad = ols.nnx.scaled_value_and_grad(
      lambda model, x: jnp.sum(model(x) ** 2), optimizer
    )
    _, scaled_grads = value_and_grad(model, jnp.eye(2))
    optimizer.update(model, scaled_grads, skip=True)
  assert_same_bits(nnx.as_pure(nnx.state(model)), before)


def test_a_chain_and_an_npu_optimizer_pass_it_on():
  manager = ols.presets.npu_fixed(loss_scale=8.0)
  for tx in (
    optax.chain(wrapped(), optax.identity()),
    ols.presets.npu_loss_scale_optimizer(optax.sgd(0.5), manager),
  ):
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, skip=True)
    assert ols.loss_scale_metrics(state)["requested_skips"] == 1


def test_an_error_about_many_skips_names_it():
  tx = wrapped()
  state = tx.init(PARAMS)
  for _ in range(3):
    _, state = tx.update(scaled(1.0, state), state, skip=True)
  with pytest.raises(FloatingPointError, match="because of `skip`, which the"):
    ols.raise_if_failed(state, max_consecutive_skips=2)


def test_that_error_does_not_blame_the_batch():
  tx = wrapped()
  _, state = tx.update(PARAMS, tx.init(PARAMS), skip=True)
  state = state._replace(
    counts=state.counts._replace(consecutive_skips=jnp.int32(2))
  )
  with pytest.raises(FloatingPointError, match="; look at what sets it; S is"):
    ols.raise_if_failed(state, max_consecutive_skips=1)


def test_a_printed_line_names_it(capfd):
  tx = wrapped()
  _, state = tx.update(PARAMS, tx.init(PARAMS), skip=True)
  ols.instruments.print_loss_scale(state, every=1)
  jax.effects_barrier()
  line = capfd.readouterr().out
  assert line.startswith("step 1: skipped by `skip`, loss scale now 8,")
  assert line.endswith("0 applied, 1 skipped (100.0 %)\n")


def test_a_record_leaves_it_out_so_that_a_replay_is_exact():
  tx = ols.instruments.record(wrapped(), capacity=4)
  state = tx.init(PARAMS)
  update = jax.jit(tx.update)
  scales = []
  for factor, skip in STEPS:
    if not skip:
      scales.append(float(ols.get_loss_scale(state)))
    _, state = update(scaled(factor, state), state, PARAMS, skip=skip)
  history = ols.instruments.get_history(state)
  assert history.step.tolist() == [3, 4, 5, 6]
  assert history.loss_scale.tolist() == scales[-4:]
  assert history.overflow.tolist() == [False, False, True, False]


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_record_stays_the_same_bit_for_bit(steps):
  tx = ols.instruments.record(wrapped(), capacity=3)
  state = tx.init(PARAMS)
  for _ in range(steps):
    _, state = tx.update(scaled(np.inf, state), state)
  _, after = tx.update(scaled(1.0, state), state, skip=True)
  same = after._replace(recorded_state=state.recorded_state)
  assert_same_bits(same, state)


# What it costs.


def test_without_it_the_program_has_one_counter_more_that_passes_through():
  tx = wrapped()
  state = tx.init(PARAMS)

  def update(state, scaled_grads, **skip):
    return tx.update(scaled_grads, state, PARAMS, **skip)[1]

  def count_of(**skip):
    program = jax.make_jaxpr(functools.partial(update, **skip))(state, PARAMS)
    taken, given = (
      jax.tree.unflatten(jax.tree.structure(state), x)
      for x in (
        program.jaxpr.invars[: len(jax.tree.leaves(state))],
        program.jaxpr.outvars,
      )
    )
    return taken.requested_skips, given.requested_skips, program

  taken, given, program = count_of()
  assert given is taken
  assert all(taken not in x.invars for x in program.jaxpr.eqns)
  # It would be seen.
  taken, given, _ = count_of(skip=jnp.array(False))
  assert given is not taken


def test_guarantee_9_a_scan_over_it_compiles_once_and_stays_on_the_device():
  tx = wrapped()
  traces = []

  def run(state, flags):
    def step(state, flag):
      traces.append(flag)
      return tx.update(scaled(1.0, state), state, skip=flag)[1], None

    return lax.scan(step, state, flags)[0]

  state = tx.init(PARAMS)
  compiled = jax.jit(run).lower(state, jnp.zeros(4, bool)).compile()
  assert support.to_the_host(compiled) == []
  state = compiled(state, np.array([True, False, True, True]))
  assert len(traces) == 1
  assert (state.requested_skips, state.consecutive_skips) == (3, 2)
