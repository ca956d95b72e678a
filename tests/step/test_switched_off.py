"""Without a rule the same lines do what the bare optimizer does."""

import functools
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import assert_same_bits

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), "b": jnp.ones(2)}
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BARE = optax.adamw(0.1)
OFF = ols.loss_scaling(BARE, None)
NAN = jax.tree.map(lambda x: x.at[0].set(jnp.nan), PARAMS)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def half_loss_fn(params, x):
  return jnp.float16(loss_fn(params, x))


def step(tx, params, opt_state, x, loss_fn=loss_fn):
  """The lines of a program with configurable precision."""
  loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x)
  updates, opt_state = tx.update(scaled_grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def bare_step(params, opt_state, x, loss_fn=loss_fn):
  loss, grads = jax.value_and_grad(loss_fn)(params, x)
  updates, opt_state = BARE.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def compiled(step, *args):
  """Returns what XLA makes of a step in place."""
  return support.compile_donated(step, *args).as_text()


def operations(text):
  """Returns how often each operation occurs in what XLA made."""
  # A flag that is written into its donated buffer.
  text = text.replace(" pred[] copy(", " ")
  names = re.findall(r"= [^=]*?\]\S* ([a-z][a-z-]*)\(", text)
  return {
    name: names.count(name)
    for name in names
    if name not in ("parameter", "tuple", "constant", "get-tuple-element")
  }


def more(ours, theirs):
  return {
    name: count - theirs.get(name, 0)
    for name, count in ours.items()
    if count > theirs.get(name, 0)
  }


def test_the_state_has_the_type_and_the_fields_that_it_has_with_a_rule():
  off, on = OFF.init(PARAMS), ols.loss_scaling(BARE, ols.FixedLossScale())
  assert type(off) is ols.LossScalingState
  on = on.init(PARAMS)
  assert_same_bits(
    off._replace(loss_scale_state=()), on._replace(loss_scale_state=())
  )
  assert jax.tree.leaves(off.loss_scale_state) == []


def test_it_trains_as_the_bare_optimizer_bit_for_bit():
  ours, theirs = (PARAMS, OFF.init(PARAMS)), (PARAMS, BARE.init(PARAMS))
  ours_step = jax.jit(functools.partial(step, OFF))
  for _ in range(3):
    *ours, loss = ours_step(*ours, X)
    *theirs, expected = jax.jit(bare_step)(*theirs, X)
    assert_same_bits((ours[0], loss), (theirs[0], expected))
  assert_same_bits(ours[1].inner_state, theirs[1])
  assert ours[1].applied_steps == 3


@pytest.mark.parametrize("loss_fn", [loss_fn, half_loss_fn])
def test_xla_makes_of_it_what_it_makes_of_the_bare_optimizer(loss_fn):
  ours = compiled(
    functools.partial(step, OFF, loss_fn=loss_fn), PARAMS, OFF.init(PARAMS), X
  )
  theirs = compiled(
    functools.partial(bare_step, loss_fn=loss_fn), PARAMS, BARE.init(PARAMS), X
  )
  ours, theirs = operations(ours), operations(theirs)
  # The count of applied steps, as Adam's own: one of each, in one kernel. And a
  # 0 that is copied: no step was skipped last.
  counting = ("compare", "add", "select", "fusion", "copy")
  assert more(ours, theirs) == dict.fromkeys(counting, 1)


def test_the_jaxpr_of_update_has_no_more_than_the_count():
  grads = jax.tree.map(jnp.ones_like, PARAMS)

  def count(tx):
    update = jax.make_jaxpr(tx.update)(grads, tx.init(PARAMS), PARAMS)
    return [equation.primitive.name for equation in support.equations(update)]

  ours, theirs = count(OFF), count(BARE)
  left = list(ours)
  for name in theirs:
    left.remove(name)
  assert len(left) <= 6, left
  assert "is_finite" not in left
  assert "max" not in left


def test_nothing_is_checked_and_nothing_is_skipped():
  _, state = OFF.update(NAN, OFF.init(PARAMS), PARAMS)
  _, expected = BARE.update(NAN, BARE.init(PARAMS), PARAMS)
  assert_same_bits(state.inner_state, expected)
  assert (state.applied_steps, state.skipped_steps) == (1, 0)
  metrics = ols.loss_scale_metrics(state)
  assert (metrics["loss_scale"], metrics["log2_scale"]) == (1, 0)
  assert not metrics["overflow"] | metrics["skipped"] | metrics["stalled"]
  ols.raise_if_failed(state, max_consecutive_skips=1)


def test_s_is_one_everywhere():
  state = OFF.init(PARAMS)
  assert ols.get_loss_scale(state) == 1
  assert ols.get_loss_scale(state).dtype == jnp.float32
  assert ols.scale_loss(jnp.float32(3.0), state) == 3
  assert_same_bits(ols.unscale(PARAMS, state), PARAMS)
  assert ols.select_on_skip(state, new=8, old=7) == 8


def test_a_state_that_is_closed_over_freezes_nothing():
  state = OFF.init(PARAMS)
  value_and_grad = jax.jit(ols.scaled_value_and_grad(loss_fn, state))
  assert_same_bits(
    value_and_grad(PARAMS, X), jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X)
  )


def test_what_is_selected_on_a_skip_costs_nothing():
  def stepped(params, opt_state, x, ema):
    params, opt_state, _ = step(OFF, params, opt_state, x)
    new = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, params)
    ema = ols.select_on_skip(opt_state, new=new, old=ema)
    return params, opt_state, ema

  def plain(params, opt_state, x, ema):
    params, opt_state, _ = bare_step(params, opt_state, x)
    ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, params)
    return params, opt_state, ema

  ours = compiled(stepped, PARAMS, OFF.init(PARAMS), X, PARAMS)
  theirs = compiled(plain, PARAMS, BARE.init(PARAMS), X, PARAMS)
  # The one that counts applied steps.
  assert more(operations(ours), operations(theirs))["select"] == 1


def test_overflow_and_amax_are_taken_and_ignored():
  updates, state = OFF.update(
    PARAMS, OFF.init(PARAMS), PARAMS, overflow=True, amax=jnp.inf
  )
  expected, _ = BARE.update(PARAMS, BARE.init(PARAMS), PARAMS)
  assert_same_bits(updates, expected)
  assert not state.skipped


def test_other_extra_arguments_reach_the_optimizer():
  seen = []

  def update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
  tx = ols.loss_scaling(inner, None)
  tx.update(PARAMS, tx.init(PARAMS), PARAMS, overflow=True, value=3.0)
  assert seen == [{"value": 3.0}]


def test_leaves_that_are_no_gradients_still_go_around():
  name = "_overwrite_with_gradient"
  params = {"w": jnp.ones(2), name: jnp.float32(3.0)}
  tx = ols.loss_scaling(optax.sgd(0.5), None)
  updates, _state = tx.update(
    {"w": jnp.ones(2), name: jnp.float32(5.0)}, tx.init(params), params
  )
  assert updates[name] == 5
  assert updates["w"].tolist() == [-0.5, -0.5]


def test_averaged_gradients_are_still_averaged():
  tx = ols.loss_scaling(optax.sgd(1.0), None, average_scaled="data")

  def update(gradient):
    return tx.update(gradient, tx.init(gradient))[0]

  averaged = jax.vmap(update, axis_name="data")(jnp.array([1.0, 3.0]))
  assert averaged.tolist() == [-2.0, -2.0]
  # And NaN stays NaN, since nothing skips the step.
  averaged = jax.vmap(update, axis_name="data")(jnp.array([1.0, jnp.nan]))
  assert np.isnan(averaged).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_parameters_have_the_state_of_the_bare_optimizer(dtype):
  params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
  ours, state = OFF.update(params, OFF.init(params), params)
  theirs, bare_state = BARE.update(params, BARE.init(params), params)
  assert_same_bits((ours, state.inner_state), (theirs, bare_state))


def test_master_weights_around_it_are_as_around_the_bare_optimizer():
  params = jax.tree.map(jnp.bfloat16, PARAMS)
  around, bare = ols.master_weights(OFF), ols.master_weights(BARE)
  ours, state = around.update(params, around.init(params), params)
  theirs, bare_state = bare.update(params, bare.init(params), params)
  assert_same_bits((ours, state.master), (theirs, bare_state.master))
  assert_same_bits(state.inner_state.inner_state, bare_state.inner_state)


def test_it_runs_in_a_scan_and_under_vmap():
  def body(carry, x):
    return step(OFF, *carry, x)[:2], None

  batches = jnp.stack([X, X + 1])
  (params, state), _ = jax.lax.scan(body, (PARAMS, OFF.init(PARAMS)), batches)
  assert state.applied_steps == 2

  def member(params):
    return jax.lax.scan(body, (params, OFF.init(params)), batches)[0]

  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
  params_of, states = jax.vmap(member)(stacked)
  np.testing.assert_allclose(params_of["w"][1], params["w"], rtol=1e-5)
  assert states.applied_steps.tolist() == [2, 2]


def test_accumulated_gradients_are_those_of_the_mean():
  state = OFF.init(PARAMS)
  loss, scaled_grads, overflow = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, state), microbatches=2
  )(PARAMS, X)
  expected = jax.value_and_grad(loss_fn)(PARAMS, X)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  np.testing.assert_allclose(scaled_grads["w"], expected[1]["w"], rtol=1e-5)
  _, state = OFF.update(scaled_grads, state, PARAMS, overflow=overflow)
  assert state.applied_steps == 1


def test_the_train_state_of_linen_takes_it():
  state = ols.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=OFF)

  @jax.jit
  def train_step(state):
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state.opt_state)(
      state.params, X
    )
    return state.apply_gradients(grads=scaled_grads)

  state = train_step(state)
  expected, _, _ = jax.jit(bare_step)(PARAMS, BARE.init(PARAMS), X)
  assert_same_bits(state.params, expected)
  assert (state.step, state.attempts, state.loss_scale) == (1, 1, 1)
  assert not state.skipped


def test_its_steps_are_recorded(capfd):
  tx = ols.instruments.record(OFF, capacity=2)

  @jax.jit
  def train_step(params, opt_state):
    params, opt_state, _ = step(tx, params, opt_state, X)
    ols.instruments.print_loss_scale(opt_state, every=1)
    return params, opt_state

  _, opt_state = train_step(PARAMS, tx.init(PARAMS))
  jax.effects_barrier()
  assert ols.instruments.get_history(opt_state).loss_scale.tolist() == [1]
  expected = "step 1: clean, loss scale now 1, 1 applied, 0 skipped (0.0 %)\n"
  assert capfd.readouterr().out == expected


def test_an_nnx_optimizer_takes_it():
  def train(tx, with_lines):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731

    @nnx.jit
    def train_step(model, optimizer, x):
      if not with_lines:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss
      with ols.nnx.undo_on_skip(optimizer, model):
        value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
        loss, grads = value_and_grad(model, x)
        optimizer.update(model, grads)
      return loss

    loss = train_step(model, optimizer, X)
    if with_lines:
      ols.raise_if_failed(optimizer.opt_state, max_consecutive_skips=1)
      metrics = ols.loss_scale_metrics(optimizer.opt_state)
      assert (metrics["loss_scale"], metrics["applied_steps"]) == (1, 1)
    return loss, nnx.as_pure(nnx.state(model, nnx.Param))

  assert_same_bits(train(OFF, True), train(BARE, False))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_precision_schedule_takes_it(dtype):
  schedule = ols.PrecisionSchedule(dtype, until_step=2)
  runs = []
  for tx in (OFF, ols.loss_scaling(BARE, ols.FixedLossScale(1.0))):
    train_step = jax.jit(schedule.make_train_step(loss_fn, tx))
    run = PARAMS, tx.init(PARAMS), schedule.init()
    for _ in range(4):
      *run, _ = train_step(*run, X)
    runs.append(run)
  ours, theirs = runs
  assert not ours[2].low
  assert ours[1].applied_steps == 4
  np.testing.assert_allclose(ours[0]["w"], theirs[0]["w"], rtol=1e-5)


def test_checkpoints_go_over_and_back():
  _, bare = BARE.update(PARAMS, BARE.init(PARAMS), PARAMS)
  state = ols.checkpoints.with_loss_scaling(bare, OFF.init(PARAMS))
  assert_same_bits(state.inner_state, bare)
  assert_same_bits(ols.checkpoints.without_loss_scaling(state), bare)


def test_a_run_goes_on_with_a_rule_and_without():
  on = ols.loss_scaling(BARE, ols.DynamicLossScale())
  _, state = OFF.update(PARAMS, OFF.init(PARAMS), PARAMS)
  with pytest.raises(ValueError, match="got NoLossScaleState") as to_on:
    on.update(PARAMS, state, PARAMS)
  # S was 1, which nobody would keep.
  assert str(to_on.value).endswith(
    "; to change the rule in mid-run, set its state: "
    "optax.tree.set(opt_state, loss_scale_state=rule.init())."
  )
  state = optax.tree.set(state, loss_scale_state=ols.DynamicLossScale().init())
  _, state = on.update(PARAMS, state, PARAMS)
  assert state.applied_steps == 2
  with pytest.raises(ValueError, match="got DynamicLossScaleState") as to_off:
    OFF.update(PARAMS, state, PARAMS)
  assert str(to_off.value).endswith(
    " where the rule has NoLossScaleState(); take "
    "checkpoints.with_loss_scaling(checkpoints.without_loss_scaling("
    "opt_state), tx.init(params))."
  )
  bare = ols.checkpoints.without_loss_scaling(state)
  state = ols.checkpoints.with_loss_scaling(bare, OFF.init(PARAMS))
  OFF.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("state", [BARE.init(PARAMS), None, {}], ids=str)
def test_another_state_is_refused(state):
  with pytest.raises(TypeError, match="`state` must be the LossScalingState"):
    OFF.update(PARAMS, state, PARAMS)


def test_a_state_that_was_restored_without_its_types_is_told():
  state = OFF.init(PARAMS)._replace(loss_scale_state={})
  with pytest.raises(ValueError, match="a checkpoint must be restored into"):
    OFF.update(PARAMS, state, PARAMS)


def test_what_else_is_passed_is_still_checked():
  with pytest.raises(TypeError, match="`check` must be made by"):
    ols.loss_scaling(BARE, None, check=3)
  with pytest.raises(TypeError, match="`inner` must be an optax"):
    ols.loss_scaling(ols.FixedLossScale(), None)
  with pytest.raises(ValueError, match="`inner` must not contain loss_scaling"):
    ols.loss_scaling(OFF, None).init(PARAMS)


@pytest.mark.parametrize("check_vma", [True, False])
def test_it_runs_on_many_devices(check_vma):
  tx = ols.loss_scaling(
    optax.chain(ols.pmean_gradients("data"), optax.sgd(1.0)),
    None,
    axis_name="data",
  )

  def train_step(x):
    params = ols.make_varying(jnp.float32(1.0), "data")
    state = tx.init(params)

    def body(carry, _):
      params, state = carry
      _, scaled_grads = ols.scaled_value_and_grad(lambda p: p * x[0], state)(
        params
      )
      updates, state = tx.update(scaled_grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(body, (params, state), length=2)
    return params[None], state.applied_steps

  mapped = support.on_each_device(
    train_step, (jax.P("data"), jax.P()), check_vma=check_vma
  )
  params, steps = jax.jit(mapped)(jnp.arange(8.0))
  assert params.tolist() == [-6.0] * 8
  assert steps == 2


def test_what_a_rule_would_refuse_in_update_is_refused_without_one():
  tx = ols.loss_scaling(optax.sgd(0.1), None)
  params = {"w": jnp.ones(2)}
  with pytest.raises(TypeError, match="did you mean overflow="):
    tx.update(params, tx.init(params), params, overflowed=True)
  with pytest.raises(TypeError, match="must be the scaled gradients, got None"):
    tx.update(None, tx.init(params), params)
