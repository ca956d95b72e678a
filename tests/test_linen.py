"""The train state for Flax Linen, and Flax's own with the same optimizer."""

import functools
from typing import Any

import chex
from flax import core
from flax import serialization
from flax import struct
import flax.linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.support import assert_same_bits
from tests.support import AXIS_TYPES
from tests.support import make_mesh
from tests.support import same_bits
from tests.support import slow_but
from tests.support import to_bits

FP8 = "_overwrite_with_gradient"

# What the loss is multiplied by, step for step: two of five overflow.
FACTORS = (1.0, np.inf, 1.0, np.nan, 1.0)
APPLIED = [bool(np.isfinite(factor)) for factor in FACTORS]

BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
  "y": np.arange(8) % 2,
}


class Model(nn.Module):
  axis_name: str | None = None

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(4, use_bias=False, dtype=jnp.float16)(x)
    x = nn.BatchNorm(
      not train, momentum=0.5, axis_name=self.axis_name if train else None
    )(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return jnp.float32(nn.Dense(2, dtype=jnp.float16)(x))


class State(ols.linen.TrainState):
  batch_stats: Any
  ema: Any
  key: jax.Array


@functools.cache
def optimizer(axis_name=None):
  """Returns Adam within loss scaling; one object, as jit compares them."""
  inner = optax.adam(0.1)
  if axis_name:
    inner = optax.chain(ols.pmean_gradients(axis_name), inner)
  return ols.loss_scaling(inner, ols.DynamicLossScale(8.0), axis_name=axis_name)


@functools.cache
def variables():
  return jax.jit(Model().init, static_argnums=2)(
    jax.random.key(0), BATCH["x"], False
  )


# A bound method differs at each access, and jit would compile anew.
APPLY = Model().apply


def new_state(apply_fn=APPLY, tx=None):
  return State.create(
    apply_fn=apply_fn,
    params=variables()["params"],
    tx=tx or optimizer(),
    batch_stats=variables()["batch_stats"],
    ema=jax.tree.map(jnp.copy, variables()["params"]),
    key=jax.random.PRNGKey(1),
  )


def loss_fn(params, apply_fn, batch_stats, key, batch, factor):
  """Returns the loss and the new batch statistics."""
  logits, new = apply_fn(
    {"params": params, "batch_stats": batch_stats},
    batch["x"],
    True,
    mutable=["batch_stats"],
    rngs={"dropout": key},
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  # So that a step without finite gradients makes such statistics as well.
  stats = jax.tree.map(lambda x: x * factor, new["batch_stats"])
  return jnp.mean(losses) * factor, stats


def train_step(state, factor, batch=BATCH):
  key, dropout_key = jax.random.split(state.key)
  rest = state.apply_fn, state.batch_stats, dropout_key, batch, factor
  value_and_grad = ols.scaled_value_and_grad(
    loss_fn, state.opt_state, has_aux=True
  )
  (_, batch_stats), scaled_grads = value_and_grad(state.params, *rest)
  state = state.apply_gradients(
    grads=scaled_grads, batch_stats=batch_stats, key=key
  )
  ema = optax.incremental_update(state.params, state.ema, 0.25)
  return state.replace_if_applied(ema=ema)


jitted_step = jax.jit(train_step)


def iterate(step, state):
  """Returns the state before the first step and after each."""
  states = [state]
  for factor in FACTORS:
    states.append(step(states[-1], jnp.float32(factor)))
  return states


@functools.cache
def states():
  return iterate(jitted_step, new_state())


def moving_parts(state):
  """Returns all that a skipped step must keep."""
  inner_state = optax.tree.get(state.opt_state, "inner_state")
  rest = state.params, state.batch_stats, state.ema, state.key, state.step
  return inner_state, *rest


@pytest.mark.slow
def test_an_applied_step_moves_all_and_a_skipped_one_nothing_but_the_scale():
  for before, after, applied in zip(
    states(), states()[1:], APPLIED, strict=False
  ):
    for old, new in zip(moving_parts(before), moving_parts(after), strict=True):
      assert same_bits(old, new) == (not applied)
    assert after.loss_scale == before.loss_scale * (1.0 if applied else 0.5)
    assert after.skipped == (not applied)


def test_step_counts_applied_steps_and_attempts_all():
  counts = [(int(x.step), int(x.attempts)) for x in states()]
  assert counts == [(0, 0), (1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]
  for state in states():
    for count in (state.step, state.attempts):
      assert (count.dtype, count.shape) == (jnp.int32, ())


@pytest.mark.slow
def test_the_step_is_bit_for_bit_the_one_written_by_hand():
  tx = optimizer()
  apply_fn = APPLY

  @jax.jit
  def by_hand(state, factor):
    params, opt_state = state["params"], state["opt_state"]
    key, dropout_key = jax.random.split(state["key"])
    (_, batch_stats), scaled_grads = ols.scaled_value_and_grad(
      loss_fn, opt_state, has_aux=True
    )(params, apply_fn, state["batch_stats"], dropout_key, BATCH, factor)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    new = {
      "params": params,
      "batch_stats": batch_stats,
      "key": key,
      "ema": optax.incremental_update(params, state["ema"], 0.25),
    }
    old = {name: state[name] for name in new}
    return {**ols.select_on_skip(opt_state, new, old), "opt_state": opt_state}

  names = ("params", "batch_stats", "key", "ema", "opt_state")
  plain = {name: getattr(new_state(), name) for name in names}
  for state, other in zip(states(), iterate(by_hand, plain), strict=True):
    assert_same_bits({name: getattr(state, name) for name in names}, other)


def test_it_trains_as_the_bare_optimizer_does_on_the_steps_that_are_finite():
  tx = optax.adam(0.1)

  @jax.jit
  def unscaled_step(params, opt_state, batch_stats, key, scale):
    key, dropout_key = jax.random.split(key)

    def scaled_loss_fn(params):
      loss, stats = loss_fn(params, APPLY, batch_stats, dropout_key, BATCH, 1.0)
      return loss * scale, stats

    grads, batch_stats = jax.grad(scaled_loss_fn, has_aux=True)(params)
    grads = jax.tree.map(lambda x: x / scale, grads)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, batch_stats, key

  parts = variables()["params"], tx.init(variables()["params"])
  parts = *parts, variables()["batch_stats"], jax.random.PRNGKey(1)
  ema, scale = parts[0], 8.0
  for applied in APPLIED:
    if applied:
      parts = unscaled_step(*parts, scale)
      ema = jax.tree.map(lambda x, mean: 0.25 * x + 0.75 * mean, parts[0], ema)
    else:
      scale /= 2
  params, _, batch_stats, key = parts
  last = states()[-1]
  assert last.loss_scale == scale
  found = last.params, last.batch_stats, last.ema, last.key
  chex.assert_trees_all_close(
    (params, batch_stats, ema, key), found, rtol=1e-5, atol=1e-6
  )


def test_guarantee_9_one_compilation_from_the_first_call():
  class Counting(ols.linen.TrainState):
    epoch: Any

  @jax.jit
  @chex.assert_max_traces(n=1)
  def step(state, scaled_grads):
    return state.apply_gradients(grads=scaled_grads, epoch=state.epoch + 1)

  # Python numbers and weak types would each be compiled for.
  state = Counting.create(
    apply_fn=None, params=jnp.full((), 4.0), tx=optimizer(), epoch=0
  )
  for scaled_grads in jnp.array([8.0, jnp.inf, 8.0]):
    state = step(state, scaled_grads)
  assert (state.step, state.epoch, state.attempts) == (2, 2, 3)


@pytest.mark.slow
def test_the_step_runs_within_scan():
  @jax.jit
  def scanned(state, factors):
    return jax.lax.scan(lambda s, x: (train_step(s, x), s.step), state, factors)

  last, steps = scanned(new_state(), jnp.array(FACTORS, jnp.float32))
  np.testing.assert_array_equal(steps, [0, 1, 1, 2, 2])
  assert (last.step, last.attempts) == (3, 5)
  chex.assert_trees_all_close(
    moving_parts(last), moving_parts(states()[-1]), rtol=1e-5, atol=1e-6
  )


def test_the_state_can_be_donated():
  # On copies, since the parameters are those of the other tests as well.
  state = jax.tree.map(jnp.copy, new_state())
  after = iterate(jax.jit(train_step, donate_argnums=0), state)
  for given in after[:-1]:
    assert all(x.is_deleted() for x in jax.tree.leaves(moving_parts(given)))
  assert_same_bits(after[-1], states()[-1])


def test_guarantee_15_the_state_goes_through_flax_serialization():
  saved = serialization.to_bytes(states()[2])
  restored = serialization.from_bytes(new_state(), saved)
  assert_same_bits(restored, states()[2])
  assert_same_bits(jitted_step(restored, jnp.float32(1.0)), states()[3])


def test_create_can_be_traced_for_its_shapes():
  shapes = jax.eval_shape(new_state)
  assert jax.tree.structure(shapes) == jax.tree.structure(new_state())
  for shape, x in zip(
    jax.tree.leaves(shapes), jax.tree.leaves(states()[-1]), strict=True
  ):
    assert (shape.shape, shape.dtype) == (x.shape, x.dtype)
    assert not shape.weak_type


def test_guarantee_10_a_state_sharded_under_jit_makes_the_same_steps():
  mesh = make_mesh()
  spread = jax.NamedSharding(mesh, jax.P("data"))
  everywhere = jax.NamedSharding(mesh, jax.P())
  batch = jax.device_put(BATCH, spread)
  state = jax.device_put(new_state(), everywhere)
  step = jax.jit(train_step)
  for factor, expected in zip(FACTORS, states()[1:], strict=True):
    state = step(state, jnp.float32(factor), batch)
    assert (state.step, state.skipped) == (expected.step, expected.skipped)
    for x in jax.tree.leaves(state):
      assert x.sharding.is_fully_replicated
      assert len(x.sharding.device_set) == 8
  chex.assert_trees_all_close(
    moving_parts(state), moving_parts(states()[-1]), rtol=1e-7, atol=0.01
  )


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_guarantee_10_sharded_parameters_and_their_average_stay_so(axis_type):
  class Averaging(ols.linen.TrainState):
    ema: jax.Array

  @jax.jit
  def step(state, batch):
    scaled_grads = ols.scaled_value_and_grad(
      lambda params: jnp.sum(params * batch), state.opt_state
    )(state.params)[1]
    state = state.apply_gradients(grads=scaled_grads)
    ema = optax.incremental_update(state.params, state.ema, 0.25)
    return state.replace_if_applied(ema=ema)

  mesh = make_mesh(axis_type)
  spread = jax.NamedSharding(mesh, jax.P("data"))
  batch = np.ones(16, np.float32)
  bad = batch.copy()
  bad[11] = np.nan
  with jax.set_mesh(mesh):
    params = jax.device_put(batch, spread)
    state = Averaging.create(
      apply_fn=None, params=params, tx=optimizer(), ema=params
    )
    for values in (batch, bad):
      state = step(state, jax.device_put(values, spread))
  assert state.params.sharding == state.ema.sharding == spread
  np.testing.assert_allclose(state.params, np.full(16, 0.9), rtol=1e-5)
  np.testing.assert_allclose(state.ema, np.full(16, 0.975), rtol=1e-5)
  assert (state.step, state.attempts, state.loss_scale) == (1, 2, 4.0)


@pytest.mark.parametrize("check_vma", slow_but([True], [True, False]))
def test_guarantee_10_one_device_of_shard_map_skips_the_step_on_all(check_vma):
  state = new_state(Model("data").apply, optimizer("data"))

  @jax.jit
  @jax.shard_map(
    mesh=make_mesh(),
    in_specs=(jax.P(), jax.P("data"), jax.P("data")),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  def step(state, factor, batch):
    key, dropout_key = jax.random.split(state.key)
    dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index("data"))
    params = ols.make_varying(state.params, "data")
    (_, batch_stats), scaled_grads = ols.scaled_value_and_grad(
      loss_fn, state.opt_state, has_aux=True
    )(params, state.apply_fn, state.batch_stats, dropout_key, batch, factor[0])
    batch_stats = jax.lax.pmean(batch_stats, "data")
    state = state.apply_gradients(
      grads=scaled_grads, batch_stats=batch_stats, key=key
    )
    ema = optax.incremental_update(state.params, state.ema, 0.25)
    return state.replace_if_applied(ema=ema)

  good = np.ones(8, np.float32)
  first = step(state, good, BATCH)
  assert (first.step, first.skipped) == (1, False)
  assert to_bits(first.batch_stats) != to_bits(state.batch_stats)
  bad = good.copy()
  bad[5] = np.nan
  second = step(first, bad, BATCH)
  assert_same_bits(moving_parts(second), moving_parts(first))
  assert (second.attempts, second.skipped) == (2, True)
  copies = [np.asarray(x.data) for x in second.loss_scale.addressable_shards]
  assert copies == [4.0] * 8


PARAMS = jnp.array([1.0, 2.0])
GOOD, BAD = jnp.array([8.0, 16.0]), jnp.array([8.0, jnp.inf])


class Averaged(ols.linen.TrainState):
  mean: Any
  window: int = struct.field(pytree_node=False)


def averaged_state(tx=None, params=PARAMS, mean=0.0):
  if tx is None:
    tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(8.0))
  return Averaged.create(
    apply_fn=None, params=params, tx=tx, mean=mean, window=4
  )


@pytest.mark.parametrize(
  "wrap",
  [dict, core.freeze, lambda x: x["a"], lambda x: (x["a"],)],
  ids=["dict", "FrozenDict", "array", "tuple"],
)
def test_params_may_be_any_pytree(wrap):
  state = averaged_state(params=wrap({"a": PARAMS}))
  for gradient, expected in [(GOOD, [0.0, 0.0]), (BAD, [0.0, 0.0])]:
    new = state.apply_gradients(grads=wrap({"a": gradient}))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    np.testing.assert_array_equal(jax.tree.leaves(new.params)[0], expected)
    state = new
  assert (state.step, state.attempts) == (1, 2)


def test_params_may_be_boxed_with_their_partitioning():
  box = functools.partial(nn.Partitioned, names=("data",))
  state = averaged_state(params={"a": box(PARAMS)})
  for gradient in (GOOD, BAD):
    state = state.apply_gradients(grads={"a": box(gradient)})
  assert state.params["a"].names == ("data",)
  np.testing.assert_array_equal(state.params["a"].value, [0.0, 0.0])
  assert (state.step, state.attempts) == (1, 2)


def test_params_may_be_more_than_what_gradients_are_taken_of():
  inner = optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5)
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(8.0))
  params = optax.LookaheadParams.init_synced(PARAMS)
  state = averaged_state(tx, params)
  for gradient in (GOOD, BAD):
    state = state.apply_gradients(grads=gradient)
  np.testing.assert_array_equal(state.params.fast, [0.0, 0.0])
  np.testing.assert_array_equal(state.params.slow, [1.0, 2.0])


def test_a_skip_keeps_params_also_where_something_follows_loss_scaling():
  rule = ols.DynamicLossScale(8.0)
  tx = optax.chain(
    ols.loss_scaling(optax.sgd(1.0), rule), optax.add_decayed_weights(0.5)
  )
  state = averaged_state(tx)
  skipped = state.apply_gradients(grads=BAD)
  np.testing.assert_array_equal(skipped.params, [1.0, 2.0])
  applied = skipped.apply_gradients(grads=4 * GOOD / 8)
  np.testing.assert_array_equal(applied.params, [0.5, 1.0])
  assert (applied.step, applied.attempts) == (1, 2)


def test_multi_steps_inside_drops_a_bad_micro_batch():
  inner = optax.MultiSteps(optax.sgd(1.0), 2)
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(8.0))
  state = averaged_state(tx)
  params, means = [], []
  for i, scaled_grads in enumerate((GOOD, BAD, GOOD / 2)):
    state = state.apply_gradients(grads=scaled_grads, mean=jnp.float32(i + 1))
    params.append(state.params.tolist())
    means.append(float(state.mean))
  assert params == [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]
  assert means == [1.0, 1.0, 3.0]
  assert (state.step, state.attempts) == (2, 3)


def test_a_rule_that_does_not_skip_applies_every_step():
  rule = ols.FixedLossScale(8.0, skip=False)
  state = averaged_state(ols.loss_scaling(optax.sgd(1.0), rule))
  state = state.apply_gradients(grads=BAD, mean=jnp.float32(1.0))
  np.testing.assert_array_equal(state.params, [0.0, -np.inf])
  assert (state.step, state.mean, state.skipped) == (1, 1.0, False)


@pytest.mark.parametrize("extra_args", [{"overflow": True}, {"amax": np.inf}])
def test_extra_args_reach_loss_scaling(extra_args):
  state = averaged_state()
  state = state.apply_gradients(grads=GOOD, extra_args=extra_args)
  np.testing.assert_array_equal(state.params, [1.0, 2.0])


def test_guarantee_13_extra_args_reach_the_optimizer():
  def update(updates, state, params=None, *, factor):
    return jax.tree.map(lambda x: -factor * x, updates), state

  inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
  state = averaged_state(ols.loss_scaling(inner, ols.FixedLossScale(8.0)))
  state = state.apply_gradients(grads=GOOD, extra_args={"factor": 0.5})
  np.testing.assert_array_equal(state.params, [0.5, 1.0])


def test_a_field_keeps_its_dtype():
  state = averaged_state(mean=jnp.zeros(2, jnp.float32))
  after = state.apply_gradients(grads=GOOD, mean=jnp.ones(2, jnp.float16))
  assert after.mean.dtype == jnp.float32
  np.testing.assert_array_equal(after.mean, [1.0, 1.0])


def test_a_static_field_stays_what_it_was_given():
  assert type(averaged_state().window) is int


@pytest.mark.parametrize(
  ("name", "new"),
  [("overflow", True), ("opt_state", ()), ("step", 3), ("window", 8)],
)
def test_what_is_no_field_that_a_step_replaces_is_refused(name, new):
  rule = f"new values for mean, got `{name}`.*extra_args={{'{name}'"
  with pytest.raises(TypeError, match=rule):
    averaged_state().apply_gradients(grads=GOOD, **{name: new})


@pytest.mark.parametrize("name", ["window", "decay"])
def test_replace_if_applied_refuses_what_is_no_array(name):
  with pytest.raises(TypeError, match=f"params, opt_state.*, got `{name}`"):
    averaged_state().replace_if_applied(**{name: 8})


@pytest.mark.parametrize("new", [None, jnp.zeros(3), {"a": 0.0}])
def test_a_field_of_another_structure_is_refused(new):
  with pytest.raises(ValueError, match="`mean` must keep its structure.* got"):
    averaged_state().apply_gradients(grads=GOOD, mean=new)


def test_a_rule_in_place_of_the_optimizer_is_refused():
  with pytest.raises(TypeError, match="`tx` must be an optax gradient transf"):
    averaged_state(ols.DynamicLossScale())


def scaling():
  return ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))


@pytest.mark.parametrize(
  ("make_tx", "message"),
  [
    (lambda: optax.sgd(1.0), "hold loss_scaling, got .* wrap it"),
    (
      lambda: optax.chain(scaling(), scaling()),
      r"hold loss_scaling once, got it at \['0', '1'\]",
    ),
    (lambda: optax.MultiSteps(scaling(), 2), "have optax.MultiSteps inside of"),
  ],
)
def test_an_optimizer_without_one_loss_scale_is_refused(make_tx, message):
  with pytest.raises(ValueError, match=f"`tx` must {message}"):
    averaged_state(make_tx())


class Fp8Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    dense = functools.partial(
      nn.Dense, dtype=jnp.bfloat16, dot_general_cls=nn.Fp8DirectDotGeneralOp
    )
    return dense(16, name="second")(nn.relu(dense(16, name="first")(x)))


FP8_INPUT = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)


@functools.cache
def fp8_step():
  """Returns a train step that works with either train state."""

  @jax.jit
  def step(state, factor):
    def loss_fn(params):
      out = jnp.float32(state.apply_fn(params, FP8_INPUT))
      return jnp.mean(out**2) * factor

    value_and_grad = ols.scaled_value_and_grad(loss_fn, state.opt_state)
    scaled_grads = value_and_grad(state.params)[1]
    return state.apply_gradients(grads=scaled_grads), scaled_grads

  return step


FP8_APPLY = Fp8Model().apply


@functools.cache
def fp8_variables():
  return jax.jit(Fp8Model().init)(jax.random.key(0), FP8_INPUT)


@functools.cache
def fp8_steps(kind, wrap=dict):
  """Returns states and gradients: two steps, a skipped one, one more."""
  state = kind.create(
    apply_fn=FP8_APPLY, params=wrap(fp8_variables()), tx=optimizer()
  )
  states, gradients = [state], []
  for factor in (1.0, 1.0, jnp.nan, 1.0):
    state, grads = fp8_step()(states[-1], jnp.float32(factor))
    states.append(state)
    gradients.append(grads)
  return states, gradients


def test_guarantee_12_fp8_values_are_overwritten_and_kept_on_a_skip():
  states, gradients = fp8_steps(ols.linen.TrainState)
  for before, after, grads in zip(states, states[1:], gradients, strict=False):
    if after.skipped:
      assert_same_bits(after.params, before.params)
      assert to_bits(grads[FP8]) != to_bits(before.params[FP8])
    else:
      assert_same_bits(after.params[FP8], grads[FP8])
  assert [bool(state.skipped) for state in states] == [0, 0, 0, 1, 0]
  assert bool(jnp.all(jnp.isfinite(optax.tree.norm(states[-1].params))))


@pytest.mark.parametrize("wrap", [dict, core.freeze])
def test_fp8_params_keep_their_kind_of_dict(wrap):
  params = wrap({"params": PARAMS, FP8: jnp.ones(1)})
  state = averaged_state(params=params)
  for gradient in (GOOD, BAD):
    scaled_grads = wrap({"params": gradient, FP8: gradient[:1]})
    new = state.apply_gradients(grads=scaled_grads)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    np.testing.assert_array_equal(new.params["params"], [0.0, 0.0])
    np.testing.assert_array_equal(new.params[FP8], [8.0])
    state = new


def test_fp8_collections_of_models_side_by_side_are_stored_as_well():
  state = averaged_state(params={"critic": {"params": PARAMS, FP8: PARAMS}})
  for gradient in (GOOD, BAD):
    scaled_grads = {"critic": {"params": gradient, FP8: gradient}}
    state = state.apply_gradients(grads=scaled_grads)
    np.testing.assert_array_equal(state.params["critic"]["params"], [0.0, 0.0])
    np.testing.assert_array_equal(state.params["critic"][FP8], GOOD)


def test_fp8_leaves_the_optimizer_the_state_of_flax_own_train_state():
  arguments = {"apply_fn": None, "params": fp8_variables(), "tx": optimizer()}
  ours = ols.linen.TrainState.create(**arguments).opt_state
  stock = train_state.TrainState.create(**arguments).opt_state
  assert_same_bits(ours, stock)
  paths = [path for path, _ in jax.tree.leaves_with_path(ours)]
  assert not any(FP8 in jax.tree_util.keystr(path) for path in paths)


@pytest.mark.parametrize(
  "others", [{"params": PARAMS, "adapters": PARAMS}, {"adapters": PARAMS}]
)
def test_fp8_params_that_no_optimizer_would_train_are_refused(others):
  names = sorted([FP8, *others])
  with pytest.raises(
    ValueError, match=rf"'params'\], got .{', '.join(map(repr, names))}"
  ):
    averaged_state(params={**others, FP8: jnp.ones(1)})


def test_fp8_gradients_of_the_parameters_alone_are_refused():
  params = {"params": PARAMS, FP8: jnp.ones(1)}
  with pytest.raises(ValueError, match=f"got {FP8} in `params` alone"):
    averaged_state(params=params).apply_gradients(grads={"params": GOOD})
  with pytest.raises(ValueError, match=f"got {FP8} in `grads` alone"):
    averaged_state().apply_gradients(grads={"params": GOOD, FP8: GOOD})


def test_flax_own_train_state_trains_alike_and_counts_attempts():
  @jax.jit
  def step(state, gradient):
    return state.apply_gradients(grads={"a": gradient})

  arguments = {"apply_fn": None, "params": {"a": PARAMS}, "tx": optimizer()}
  stock = train_state.TrainState.create(**arguments)
  ours = ols.linen.TrainState.create(**arguments)
  for gradient in (GOOD, BAD, GOOD):
    stock, ours = step(stock, gradient), step(ours, gradient)
    assert_same_bits(stock.params, ours.params)
    assert_same_bits(stock.opt_state, ours.opt_state)
    assert stock.step == ours.attempts
  assert (stock.step, ours.step) == (3, 2)
  assert ols.loss_scale_metrics(stock.opt_state)["applied_steps"] == 2


def test_flax_own_train_state_stores_fp8_values_of_a_skipped_step():
  """Pins what Flax does, since the wrapper never gets to see these values.

  A NaN in the history of a layer's largest gradients stays there, and while it
  does the scale for its gradients stands still.
  """
  states, gradients = fp8_steps(train_state.TrainState)
  before, skipped, after = states[2:]
  assert_same_bits(skipped.params["params"], before.params["params"])
  assert_same_bits(skipped.params[FP8], gradients[2][FP8])
  ours = fp8_steps(ols.linen.TrainState)[0][-1]
  history = "output_grad_amax_history"
  assert np.isnan(histories(after, history)).any()
  assert not np.isnan(histories(ours, history)).any()


def histories(state, name):
  """Returns what all layers have under one name, in one array."""
  layers = state.params[FP8].values()
  return np.stack([next(iter(layer.values()))[name] for layer in layers])
