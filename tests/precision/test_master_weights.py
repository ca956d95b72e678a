"""Master weights, inside and outside of loss scaling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import describe
from tests.support import to_bits

RULE = ols.FixedLossScale(1024.0)
SGD = optax.sgd(1.0)
MASTER = ols.master_weights(SGD)
# Less than half the way from 1.0 to the next float16, up or down.
SMALL = 2.0**-13

POSITIONS = {
  "alone": ols.master_weights,
  "inside": lambda inner: ols.loss_scaling(ols.master_weights(inner), RULE),
  "outside": lambda inner: ols.master_weights(ols.loss_scaling(inner, RULE)),
}
SCALING = ["inside", "outside"]

each_position = pytest.mark.parametrize("position", POSITIONS)


def master_of(state):
  return optax.tree.get(state, "master")


def take_step(tx, params, state, gradients):
  """Runs one step on true gradients, which are scaled in their own dtype."""
  scaled = jax.tree.map(
    lambda x: (x * support.scale_of(state)).astype(x.dtype), gradients
  )
  updates, state = tx.update(scaled, state, params)
  return optax.apply_updates(params, updates), state


def test_inside_and_outside_are_the_same_bit_for_bit():
  rng = np.random.default_rng(0)
  start = {
    x: jnp.asarray(rng.normal(size=200), x) for x in ("float16", "float32")
  }
  gradients = {
    x: jnp.asarray(rng.normal(size=(12, 200)), "float16") for x in start
  }
  gradients["float16"] = gradients["float16"].at[5, 3].set(jnp.inf)
  every = {position: [] for position in SCALING}
  for position, seen in every.items():
    tx = POSITIONS[position](optax.adamw(1e-2))
    step = jax.jit(functools.partial(take_step, tx))
    params, state = start, tx.init(start)
    for i in range(12):
      of_step = jax.tree.map(lambda x, i=i: x[i], gradients)
      params, state = step(params, state, of_step)
      kept = [optax.tree.get(state, name) for name in ("master", "mu", "nu")]
      seen.append(to_bits((params, kept)))
    assert ols.loss_scale_metrics(state)["skipped_steps"] == 1
  assert every["inside"] == every["outside"]


# Optimizers around `master_weights`, with their float32 updates.
AROUND = {
  "trust ratio": lambda tx: optax.chain(optax.scale_by_trust_ratio(), tx),
  "weight decay": lambda tx: optax.chain(optax.add_decayed_weights(1e-5), tx),
  "moments": lambda tx: optax.chain(optax.trace(0.9), tx),
  "a condition": lambda tx: optax.apply_if_finite(tx, 3),
  "hyperparameters": lambda tx: optax.inject_hyperparams(lambda s: tx)(s=1.0),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_neighbor_inside_loss_scaling_works_in_float32(around):
  wrap = AROUND[around]
  tx = ols.loss_scaling(wrap(MASTER), RULE)
  bare = wrap(SGD)
  # In float16 the square of the norm is inf, and 1e-5 of 1e-3 is 0.
  params = {"large": jnp.full(512, 20.0), "small": jnp.full(4, 2.0**-10)}
  narrow = jax.tree.map(lambda x: x.astype(jnp.float16), params)
  state, expected = tx.init(narrow), bare.init(params)
  for _ in range(3):
    gradients = jax.tree.map(lambda x: 0.25 * jnp.ones_like(x), params)
    narrow, state = take_step(tx, narrow, state, gradients)
    updates, expected = bare.update(gradients, expected, params)
    params = optax.apply_updates(params, updates)
  for name, master in optax.tree.get(state, "master").items():
    np.testing.assert_allclose(master, params[name], rtol=1e-6)
    np.testing.assert_array_equal(narrow[name], master.astype(jnp.float16))


def test_outside_gradients_are_checked_in_their_own_dtype():
  inner = ols.loss_scaling(optax.sgd(1.0), RULE, check=ols.saturated())
  tx = ols.master_weights(inner)
  params = jnp.ones(2, jnp.float16)
  gradients = jnp.array([1.0, 65504.0], jnp.float16)
  _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  assert state.inner_state.skipped  # 65504 is nothing special in float32.


@each_position
def test_the_inner_optimizer_sees_the_master_and_float32_gradients(position):
  calls = []
  tx = POSITIONS[position](
    optax.chain(support.recording(calls), optax.sgd(1.0))
  )
  params = {"half": jnp.ones(1, jnp.float16), "single": jnp.ones(1)}
  gradients = jax.tree.map(lambda x: x * jnp.asarray(-SMALL, x.dtype), params)
  state = tx.init(params)
  for _ in range(2):
    params, state = take_step(tx, params, state, gradients)
  assert params["half"] == 1
  for name in params:
    np.testing.assert_array_equal(calls[0][1][name], [1.0])
    np.testing.assert_array_equal(calls[2][1][name], [1 + SMALL])
    np.testing.assert_array_equal(calls[2][0][name], [-SMALL])
  assert {x.dtype for call in calls for x in jax.tree.leaves(call[:2])} == {
    jnp.dtype("float32")
  }
  scaled = jax.tree.map(lambda x: x * support.scale_of(state), gradients)
  tx.update(scaled, state, params, value=7.0)
  assert calls[-1][2]["value"] == 7.0


@each_position
def test_leaves_that_are_no_real_numbers_have_no_master(position):
  calls = []
  params = {
    "weight": jnp.ones(1, jnp.float16),
    "none": None,
    "masked": optax.MaskedNode(),
    "integer": jnp.array([2**30, 7]),
    "flag": jnp.array(True),
    "key": jax.random.key(0),
    "complex": jnp.array([1j]),
    "empty": jnp.zeros((0,), jnp.float16),
  }
  tx = POSITIONS[position](support.recording(calls))
  state = tx.init(params)
  gradients = {**params, "integer": np.zeros(2, jax.dtypes.float0)}
  updates, state = tx.update(gradients, state, params)
  assert jax.tree.structure(updates) == jax.tree.structure(params)
  assert [x.shape for x in jax.tree.leaves(master_of(state))] == [(0,), (1,)]
  for name in ("integer", "flag", "key", "complex"):
    assert isinstance(master_of(state)[name], optax.MaskedNode)
    assert all(call[1][name] is params[name] for call in calls)
  assert updates["integer"].dtype == jax.dtypes.float0
  assert updates["key"] == params["key"]
  np.testing.assert_array_equal(
    updates["complex"] * support.scale_of(state), [1j]
  )


def test_parameters_without_a_gradient_need_not_be_arrays():
  half = jnp.ones(1, jnp.float16)
  params = {"weight": half, "frozen": half, "activation": jax.nn.relu}
  state = MASTER.init({**params, "activation": None})
  gradients = {"weight": half, "frozen": None, "activation": None}
  updates, state = MASTER.update(gradients, state, params)
  assert updates["activation"] is updates["frozen"] is None
  assert updates["weight"] == -1
  assert (state.master["frozen"], state.master["weight"]) == (1.0, 0.0)


@each_position
def test_fp8_collections_bypass_the_inner_optimizer(position):
  params = {
    "params": {"kernel": jnp.ones(1, jnp.float16)},
    "_overwrite_with_gradient": {"scale": jnp.array([3.0])},
  }
  calls = []
  tx = POSITIONS[position](support.recording(calls))
  state = tx.init(params)
  gradients = jax.tree.map(lambda x: x * 2, params)
  update = jax.jit(tx.update)
  updates, state = update(gradients, state, params)
  after = updates["_overwrite_with_gradient"]["scale"]
  np.testing.assert_array_equal(after, [6.0])
  assert all(len(jax.tree.leaves(call[1])) == 1 for call in calls)
  assert len(jax.tree.leaves(master_of(state))) == 1
  if position in SCALING:
    gradients = jax.tree.map(lambda x: x * jnp.inf, params)
    updates, _ = update(gradients, state, params)
    after = updates["_overwrite_with_gradient"]["scale"]
    np.testing.assert_array_equal(after, [3.0])


def test_a_neighbor_of_loss_scaling_sees_fp8_collections_from_the_start():
  calls = []
  scaled = ols.loss_scaling(SGD, RULE)
  tx = ols.master_weights(optax.chain(scaled, support.recording(calls)))
  params = {"w": jnp.ones(1), "_overwrite_with_gradient": jnp.ones(1)}
  jax.eval_shape(tx.update, params, tx.init(params), params)
  assert all(len(jax.tree.leaves(call[1])) == 2 for call in calls[-2:])


def test_parameters_and_state_can_be_donated():
  # Schedule-free keeps the parameters that it was given.
  tx = ols.master_weights(optax.contrib.schedule_free_sgd(0.5))
  params = {"single": jnp.ones(4), "half": jnp.ones(4, jnp.float16)}
  state = tx.init(params)
  step = jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1))
  for _ in range(2):
    params, state = step(params, state, {"single": 1.0, "half": 1.0})
  assert master_of(state)["half"].dtype == jnp.float32


GROUPS = {"a": "first", "b": "second"}


def test_groups_that_scale_on_their_own_skip_on_their_own():
  scaled = ols.loss_scaling(SGD, RULE)
  tx = ols.master_weights(
    optax.partition({"first": scaled, "second": scaled}, GROUPS)
  )
  params = {name: jnp.ones(1, jnp.float16) for name in GROUPS}
  gradients = {**params, "a": params["a"] * jnp.inf}
  updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
  assert (updates["a"], updates["b"]) == (0.0, -(2.0**-10))
  assert (state.master["a"], state.master["b"]) == (1.0, 1 - 2.0**-10)


@pytest.mark.slow
def test_the_master_is_updated_in_place():
  params = {f"layer_{i}": jnp.ones(20_000, jnp.float16) for i in range(3)}

  def temporaries(tx):
    step = functools.partial(take_step, tx)
    return support.temporaries(
      support.compile_donated(step, params, tx.init(params), params)
    )

  inner = optax.adamw(1e-3)
  extra = temporaries(POSITIONS["inside"](inner)) - temporaries(
    ols.loss_scaling(inner, RULE)
  )
  assert extra <= 0.01 * support.size(params)


def test_parameters_that_something_else_has_changed_return_to_the_master():
  params = jnp.array([1.0, 2.0], jnp.float16)
  gradients = jnp.array([0.5, 0.0], jnp.float16)
  params, _ = take_step(MASTER, params * 8, MASTER.init(params), gradients)
  np.testing.assert_array_equal(params, [0.5, 2.0])


def test_a_master_that_is_nan_is_never_hidden_by_clean_parameters():
  params = jnp.array([1.0, 2.0, 3.0], jnp.float16)
  gradients = jnp.array([jnp.nan, jnp.inf, 1.0], jnp.float16)
  state = MASTER.update(gradients, MASTER.init(params), params)[1]
  after, state = take_step(MASTER, params, state, jnp.ones(3, jnp.float16))
  np.testing.assert_array_equal(after, [jnp.nan, -jnp.inf, 1.0])
  np.testing.assert_array_equal(state.master, [jnp.nan, -jnp.inf, 1.0])


def test_a_zero_keeps_its_sign():
  params = jnp.array([0.0, -0.0], jnp.float16)
  after, _ = take_step(
    MASTER, params, MASTER.init(params), jnp.zeros(2, jnp.float16)
  )
  assert np.signbit(after).tolist() == [False, True]


def test_the_way_from_a_float64_master_is_rounded_the_same_in_both_positions():
  with jax.enable_x64(True):
    inner = ols.master_weights(SGD, jnp.float64)
    params = jnp.ones(1, jnp.float16)
    # Above a tie in float16, but in float32 the tie itself.
    master = jnp.array([1 + 0.125 * (1 + 2.0**-11 + 2.0**-40)])
    ends = []
    for tx in (inner, ols.loss_scaling(inner, RULE)):
      state = optax.tree.set(tx.init(params), master=master)
      ends.append(jax.jit(tx.update)(params * 0, state, params)[0])
    assert ends == [0.125, 0.125]


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize(
  ("dtype", "expected"),
  [
    ("float64", "float64"),
    ("float32", "float32"),
    ("float8_e4m3fn", "float32"),
  ],
)
def test_a_master_is_at_least_as_wide_as_its_parameter(dtype, expected):
  with jax.enable_x64(True):
    params = jnp.ones(1, dtype)
    updates, state = MASTER.update(params, MASTER.init(params), params)
  assert state.master.dtype == expected
  assert updates.dtype == params.dtype


@pytest.mark.usefixtures("strict_promotion")
def test_nothing_is_promoted_implicitly():
  tx = ols.master_weights(optax.identity())
  params = {"half": jnp.ones(2, jnp.float16), "single": jnp.ones(2)}
  updates, state = jax.jit(tx.update)(params, tx.init(params), params)
  np.testing.assert_array_equal(updates["half"], [1.0, 1.0])
  np.testing.assert_array_equal(state.master["single"], [2.0, 2.0])


def test_python_and_numpy_parameters_have_a_master():
  params = {"python": 1.0, "numpy": np.ones(2, np.float16)}
  updates, state = MASTER.update(params, MASTER.init(params), params)
  assert describe(state.master["python"])[1] == [((), jnp.float32, False)]
  assert updates["python"] == -1.0
  assert updates["numpy"].dtype == jnp.float16


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    ((optax.adam,), TypeError, "`inner` must be .* got adam; call it"),
    ((jnp.float32, SGD), TypeError, "`inner` must be an optax .* got float32"),
    ((SGD, RULE), TypeError, "`dtype` must be .* jnp.float32, got Fixed"),
    ((SGD, jnp.int32), TypeError, "`dtype` must be .* got int32"),
    ((SGD, "float16"), ValueError, "as wide as float32.*got float16; para"),
    ((SGD, "float64"), ValueError, "that JAX has enabled, got float64"),
  ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
  with pytest.raises(error, match=message):
    ols.master_weights(*arguments)


def test_update_refuses_no_parameters_and_other_states():
  params = jnp.ones(1, jnp.float16)
  with pytest.raises(ValueError, match="`params` must be passed to update, "):
    MASTER.update(params, MASTER.init(params))
  with pytest.raises(TypeError, match="`state` must be the MasterWeightsState"):
    MASTER.update(params, SGD.init(params), params)
