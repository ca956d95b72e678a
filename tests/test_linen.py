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
from tests.support import Stub
from tests.support import to_bits

FP8 = "_overwrite_with_gradient"

# The factor of the loss at each step; two of five steps overflow.
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
  return ols.loss_scaling(inner, Stub(8.0), axis_name=axis_name)


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
  # A step whose gradients are not finite makes such statistics as well.
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
def test_an_applied_step_moves_everything_and_a_skipped_one_only_the_scale():
  for before, after, applied in zip(
    states(), states()[1:], APPLIED, strict=False
  ):
    for old, new in zip(moving_parts(before), moving_parts(after), strict=True):
      assert same_bits(old, new) == (not applied)
    assert after.loss_scale == before.loss_scale * (2.0 if applied else 0.5)
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


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_guarantee_10_parameters_and_their_average_stay_sharded(axis_type):
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
  assert (state.step, state.attempts, state.loss_scale) == (1, 2, 8.0)


def test_guarantee_10_one_device_of_shard_map_skips_the_step_on_all():
  state = new_state(Model("data").apply, optimizer("data"))

  @jax.jit
  @jax.shard_map(
    mesh=make_mesh(),
    in_specs=(jax.P(), jax.P("data"), jax.P("data")),
    out_specs=jax.P(),
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
  assert copies == [8.0] * 8


PARAMS = jnp.array([1.0, 2.0])
GOOD, BAD = jnp.array([8.0, 16.0]), jnp.array([8.0, jnp.inf])


class Averaged(ols.linen.TrainState):
  mean: Any
  window: int = struct.field(pytree_node=False)


def averaged_state(tx=None, params=PARAMS, mean=0.0):
  if tx is None:
    tx = ols.loss_scaling(optax.sgd(1.0), Stub(8.0))
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


def test_a_skip_keeps_params_when_a_transformation_follows_the_wrapper():
  rule = Stub(8.0)
  tx = optax.chain(
    ols.loss_scaling(optax.sgd(1.0), rule), optax.add_decayed_weights(0.5)
  )
  state = averaged_state(tx)
  skipped = state.apply_gradients(grads=BAD)
  np.testing.assert_array_equal(skipped.params, [1.0, 2.0])
  applied = skipped.apply_gradients(grads=4 * GOOD / 8)
  np.testing.assert_array_equal(applied.params, [0.5, 1.0])
  assert (applied.step, applied.attempts) == (1, 2)


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


@pytest.mark.parametrize(
  ("name", "new"),
  [("overflow", True), ("opt_state", ()), ("step", 3), ("window", 8)],
)
def test_a_keyword_that_names_no_field_of_the_subclass_is_refused(name, new):
  rule = f"new values for mean, got `{name}`.*extra_args={{'{name}'"
  with pytest.raises(TypeError, match=rule):
    averaged_state().apply_gradients(grads=GOOD, **{name: new})


@pytest.mark.parametrize("name", ["window", "decay"])
def test_replace_if_applied_refuses_fields_without_arrays(name):
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
def test_an_optimizer_must_hold_one_loss_scaling(make_tx, message):
  with pytest.raises(ValueError, match=f"`tx` must {message}"):
    averaged_state(make_tx())


class Fp8Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    dense = functools.partial(
      nn.Dense, dtype=jnp.bfloat16, dot_general_cls=nn.Fp8DirectDotGeneralOp
    )
    return dense(16, name="second")(nn.relu(dense(16, name="first")(x)))


@pytest.mark.parametrize("wrap", [dict, core.freeze])
def test_guarantee_12_fp8_values_are_overwritten_and_kept_on_a_skip(wrap):
  params = wrap({"params": PARAMS, FP8: jnp.ones(1)})
  state = averaged_state(params=params)
  for gradient in (GOOD, BAD):
    scaled_grads = wrap({"params": gradient, FP8: gradient[1:]})
    new = state.apply_gradients(grads=scaled_grads)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    np.testing.assert_array_equal(new.params["params"], [0.0, 0.0])
    np.testing.assert_array_equal(new.params[FP8], [16.0])
    state = new


def test_fp8_collections_stay_out_of_the_optimizers_state():
  variables = jax.jit(Fp8Model().init)(jax.random.key(0), jnp.ones((16, 16)))
  arguments = {"apply_fn": None, "params": variables, "tx": optimizer()}
  ours = ols.linen.TrainState.create(**arguments).opt_state
  stock = train_state.TrainState.create(**arguments).opt_state
  assert_same_bits(ours, stock)
  paths = [path for path, _ in jax.tree.leaves_with_path(ours)]
  assert not any(FP8 in jax.tree_util.keystr(path) for path in paths)


@pytest.mark.parametrize(
  "others", [{"params": PARAMS, "adapters": PARAMS}, {"adapters": PARAMS}]
)
def test_collections_beside_params_and_fp8_are_refused(others):
  names = sorted([FP8, *others])
  with pytest.raises(
    ValueError, match=rf"'params'\], got .{', '.join(map(repr, names))}"
  ):
    averaged_state(params={**others, FP8: jnp.ones(1)})


def test_fp8_collections_must_be_in_both_gradients_and_parameters():
  params = {"params": PARAMS, FP8: jnp.ones(1)}
  with pytest.raises(ValueError, match=f"got {FP8} in `params` alone"):
    averaged_state(params=params).apply_gradients(grads={"params": GOOD})
  with pytest.raises(ValueError, match=f"got {FP8} in `grads` alone"):
    averaged_state().apply_gradients(grads={"params": GOOD, FP8: GOOD})
