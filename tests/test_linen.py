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
from tests import support

FP8 = "_overwrite_with_gradient"

# The factor of the loss at each step; two of five steps overflow.
FACTORS = (1.0, np.inf, 1.0, np.nan, 1.0)
BATCH = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


class State(ols.linen.TrainState):
  batch_stats: Any
  ema: Any
  key: jax.Array


@functools.cache
def optimizer():
  """Returns Adam within loss scaling; one object, as jit compares them."""
  return ols.loss_scaling(optax.adam(0.1), support.Stub(8.0))


def new_state():
  params = {"w": jnp.ones((3, 2))}
  return State.create(
    apply_fn=None,
    params=params,
    tx=optimizer(),
    batch_stats={"mean": jnp.zeros(2)},
    ema=params,
    key=jax.random.PRNGKey(1),
  )


def loss_fn(params, batch_stats, key, batch, factor):
  """Returns the loss and the new batch statistics."""
  outputs = batch @ params["w"] + jax.random.uniform(key)
  # A step whose gradients are not finite makes such statistics as well.
  mean = (batch_stats["mean"] + outputs.mean(0)) / 2 * factor
  return jnp.mean(outputs**2) * factor, {"mean": mean}


@jax.jit
def jitted_step(state, factor):
  key, own_key = jax.random.split(state.key)
  value_and_grad = ols.scaled_value_and_grad(
    loss_fn, state.opt_state, has_aux=True
  )
  (_, batch_stats), scaled_grads = value_and_grad(
    state.params, state.batch_stats, own_key, BATCH, factor
  )
  state = state.apply_gradients(
    grads=scaled_grads, batch_stats=batch_stats, key=key
  )
  ema = optax.incremental_update(state.params, state.ema, 0.25)
  return state.replace_if_applied(ema=ema)


@functools.cache
def states():
  """Returns the state before the first step and after each."""
  states = [new_state()]
  for factor in FACTORS:
    states.append(jitted_step(states[-1], jnp.float32(factor)))
  return states


def moving_parts(state):
  """Returns all that a skipped step must keep."""
  inner_state = optax.tree.get(state.opt_state, "inner_state")
  rest = state.params, state.batch_stats, state.ema, state.key, state.step
  return inner_state, *rest


def test_an_applied_step_moves_everything_and_a_skipped_one_only_the_scale():
  for before, after, factor in zip(
    states(), states()[1:], FACTORS, strict=False
  ):
    applied = bool(np.isfinite(factor))
    for old, new in zip(moving_parts(before), moving_parts(after), strict=True):
      assert support.same_bits(old, new) == (not applied)
    assert after.loss_scale == before.loss_scale * (2.0 if applied else 0.5)
    assert after.skipped == (not applied)


def test_step_counts_applied_steps_and_attempts_all():
  counts = [(int(x.step), int(x.attempts)) for x in states()]
  assert counts == [(0, 0), (1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]
  for state in states():
    for count in (state.step, state.attempts):
      assert (count.dtype, count.shape) == (jnp.int32, ())


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
  support.assert_same_bits(restored, states()[2])
  support.assert_same_bits(jitted_step(restored, jnp.float32(1.0)), states()[3])


def test_create_can_be_traced_for_its_shapes():
  shapes = jax.eval_shape(new_state)
  assert jax.tree.structure(shapes) == jax.tree.structure(new_state())
  for shape, x in zip(
    jax.tree.leaves(shapes), jax.tree.leaves(states()[-1]), strict=True
  ):
    assert (shape.shape, shape.dtype) == (x.shape, x.dtype)
    assert not shape.weak_type


PARAMS = jnp.array([1.0, 2.0])
GOOD, BAD = jnp.array([8.0, 16.0]), jnp.array([8.0, jnp.inf])


class Averaged(ols.linen.TrainState):
  mean: Any
  window: int = struct.field(pytree_node=False)


def averaged_state(tx=None, params=PARAMS, mean=0.0):
  if tx is None:
    tx = ols.loss_scaling(optax.sgd(1.0), support.Stub(8.0))
  return Averaged.create(
    apply_fn=None, params=params, tx=tx, mean=mean, window=4
  )


@pytest.mark.parametrize(
  "wrap",
  [
    core.freeze,
    lambda x: x["a"],
    lambda x: (x["a"],),
    lambda x: {"a": nn.Partitioned(x["a"], names=("data",))},
  ],
  ids=["FrozenDict", "array", "tuple", "boxed with its partitioning"],
)
def test_params_may_be_any_pytree(wrap):
  state = averaged_state(params=wrap({"a": PARAMS}))
  for gradient, expected in [(GOOD, [0.0, 0.0]), (BAD, [0.0, 0.0])]:
    new = state.apply_gradients(grads=wrap({"a": gradient}))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    np.testing.assert_array_equal(jax.tree.leaves(new.params)[0], expected)
    state = new
  assert (state.step, state.attempts) == (1, 2)


def test_a_skip_keeps_params_when_a_transformation_follows_the_wrapper():
  rule = support.Stub(8.0)
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
  state = state.apply_gradients(grads=GOOD, extra_args=extra_args, mean=1.0)
  np.testing.assert_array_equal(state.params, [1.0, 2.0])
  assert state.mean == 0.0


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
  params = {"params": PARAMS, FP8: jnp.ones(1)}
  arguments = {"apply_fn": None, "params": params, "tx": optimizer()}
  ours = ols.linen.TrainState.create(**arguments).opt_state
  stock = train_state.TrainState.create(**arguments).opt_state
  support.assert_same_bits(ours, stock)
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
