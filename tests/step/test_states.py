"""The scale is found anywhere, whatever the parameters are called."""

import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.support import assert_same_bits


class Params(NamedTuple):
  loss_scale: jax.Array
  loss_scale_state: jax.Array
  inner_state: jax.Array


def scaling(scale=1024.0):
  return ols.loss_scaling(optax.adam(0.1), ols.FixedLossScale(scale))


NESTS = {
  "alone": scaling,
  "chain": lambda: optax.chain(optax.identity(), scaling()),
  "chain in a chain": lambda: optax.chain(
    optax.chain(scaling(), optax.identity()), optax.identity()
  ),
  "inject_hyperparams": lambda: optax.inject_hyperparams(
    lambda rate: ols.loss_scaling(optax.sgd(rate), ols.FixedLossScale())
  )(rate=0.1),
  "named_chain": lambda: optax.named_chain(
    ("first", optax.identity()), ("scaling", scaling())
  ),
  "around MultiSteps": lambda: ols.loss_scaling(
    optax.MultiSteps(optax.adam(0.1), 2), ols.FixedLossScale()
  ),
  "masked inside": lambda: ols.loss_scaling(
    optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda _: 1, tree)),
    ols.FixedLossScale(),
  ),
}


@pytest.mark.parametrize("nest", NESTS)
def test_guarantee_14_the_scale_is_found_in_any_nest(nest):
  params = {"loss_scale": jnp.ones(2), "nested": Params(*jnp.ones((3, 2)))}
  state = NESTS[nest]().init(params)
  assert ols.get_loss_scale(state) == 1024.0
  assert ols.get_loss_scale({"opt_state": state, "step": 3}) == 1024.0
  assert ols.loss_scale_metrics(state)["loss_scale"] == 1024.0
  assert ols.get_loss_scale(state).dtype == jnp.float32


def test_guarantee_14_a_parameter_of_that_name_is_no_scale():
  params = Params(*jnp.ones((3, 2)))
  state = optax.adam(0.1).init({"loss_scale": params})
  with pytest.raises(ValueError, match="got a tuple without one; wrap the opt"):
    ols.get_loss_scale(state)
  with pytest.raises(ValueError, match="got a Params without one"):
    ols.get_loss_scale(params)


def test_guarantee_14_two_scales_without_a_path_list_the_paths():
  params = jnp.ones(2)
  states = {
    "generator": optax.chain(optax.identity(), scaling(8.0)).init(params),
    "critic": scaling(16.0).init(params),
  }
  with pytest.raises(ValueError, match=r"got 2; .*'critic', 'generator/1'"):
    ols.get_loss_scale(states)
  assert ols.get_loss_scale(states, path="critic") == 16.0
  assert ols.get_loss_scale(states, path="generator/1") == 8.0
  assert ols.get_loss_scale(states, path="generator") == 8.0
  with pytest.raises(ValueError, match=r"at `path`, got 'gen'; .*'critic'"):
    ols.get_loss_scale(states, path="gen")


def test_guarantee_14_every_reader_takes_the_path():
  params = jnp.ones(2)
  states = (scaling(8.0).init(params), scaling(16.0).init(params))

  def loss_fn(params):
    return jnp.sum(params)

  loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, states, path="1")(
    params
  )
  np.testing.assert_array_equal(scaled_grads, [16.0, 16.0])
  assert ols.scale_loss(loss, states, path="1") == 32.0
  np.testing.assert_array_equal(
    ols.unscale(scaled_grads, states, path="1"), [1, 1]
  )
  assert ols.loss_scale_metrics(states, path="0")["loss_scale"] == 8.0
  assert ols.select_on_skip(states, 2, 1, path="0") == 2
  for reader in (ols.loss_scale_metrics, ols.get_loss_scale):
    with pytest.raises(ValueError, match="choose one by its path"):
      reader(states)


def test_many_states_are_told_by_the_first_of_them():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale())
  states = {f"member_{i}": tx.init(jnp.ones(1)) for i in range(200)}
  for path in (None, "x"):
    with pytest.raises(ValueError, match="'member_0', .* and 180 more") as got:
      ols.get_loss_scale(states, path=path)
    assert len(str(got.value)) < 600
  bare = ols.checkpoints.without_loss_scaling(states)
  with pytest.raises(ValueError, match=r"dict\(.* and 180 more"):
    ols.checkpoints.with_loss_scaling(bare, states["member_0"])
  recording = ols.instruments.record(tx, capacity=2)
  records = {name: recording.init(jnp.ones(1)) for name in states}
  with pytest.raises(ValueError, match="records at .* and 180 more"):
    ols.instruments.get_history(records)


def test_the_state_of_a_rule_alone_is_told_apart():
  with pytest.raises(ValueError, match="LossScaleState without one; for the S"):
    ols.get_loss_scale(ols.FixedLossScale().init())


@pytest.mark.parametrize(
  "rule",
  [
    ols.DynamicLossScale(),
    ols.presets.megatron(),
    ols.rules.HeadroomLossScale(),
    ols.rules.WarmStart(ols.FixedLossScale()),
  ],
  ids=lambda rule: type(rule).__name__,
)
def test_the_state_of_any_rule_alone_is_told_apart(rule):
  with pytest.raises(
    ValueError, match="; for the S of a rule's own state pass"
  ):
    ols.get_loss_scale(rule.init())


def test_the_state_of_a_rule_of_another_shape_gets_a_remedy():
  def wrapped(window):
    rule = ols.rules.HeadroomLossScale(window=window)
    return ols.loss_scaling(optax.sgd(0.1), rule)

  params = jnp.ones(2)
  state = wrapped(50).init(params)
  sizes = (
    r"State\(fitting_exponents int32\[50\]\) where the rule has "
    r"HeadroomLossScaleState\(fitting_exponents int32\[20\]\)"
  )
  remedy = r"optax\.tree\.set\(opt_state, loss_scale_state=rule\.init\(\)\), or"
  with pytest.raises(ValueError, match=rf"{sizes}; .*{remedy}"):
    wrapped(20).update(params, state)


def test_optax_reads_and_sets_the_fields_by_name():
  state = optax.chain(scaling()).init({"w": jnp.ones(2)})
  assert optax.tree.get(state, "loss_scale") == 1024.0
  assert optax.tree.get(state, "applied_steps") == 0
  other = ols.FixedLossScale(8.0).init()
  state = optax.tree.set(state, loss_scale_state=other)
  assert ols.get_loss_scale(state) == 8.0


def test_metrics_are_scalar_arrays_inside_jit():
  tx = scaling()
  state = tx.init(jnp.ones(2))
  _, state = tx.update(jnp.array([jnp.nan, 1.0]), state)
  metrics = jax.jit(ols.loss_scale_metrics)(state)
  assert {name: str(value.dtype) for name, value in metrics.items()} == {
    "loss_scale": "float32",
    "log2_scale": "float32",
    "inv_scale": "float32",
    "overflow": "bool",
    "nan": "bool",
    "inf": "bool",
    "skipped": "bool",
    "stalled": "bool",
    "amax": "float32",
    "headroom": "float32",
    "applied_steps": "int32",
    "skipped_steps": "int32",
    "requested_skips": "int32",
    "consecutive_skips": "int32",
    "skip_rate": "float32",
  }
  assert all(value.shape == () for value in metrics.values())
  assert metrics["inv_scale"] == 2.0**-10
  assert metrics["nan"] and metrics["skipped"]


def test_the_state_pickles_bit_for_bit():
  tx = scaling()
  state = tx.init({"w": jnp.ones(2)})
  _, state = tx.update({"w": jnp.array([jnp.nan, 1.0])}, state)
  loaded = pickle.loads(pickle.dumps(state))
  assert_same_bits(loaded, state)


def test_select_on_skip_moves_everything_or_nothing():
  tx = scaling()
  params = jnp.ones(2)
  new = {
    "mean": jnp.full(2, jnp.nan),
    "key": jax.random.key(1),
    "step": jnp.array(5),
    "rate": 0.5,
    "none": None,
  }
  old = {
    "mean": jnp.ones(2, jnp.float16),
    "key": jax.random.key(0),
    "step": jnp.array(4),
    "rate": 0.25,
    "none": None,
  }

  @jax.jit
  def step(scaled_grads, opt_state):
    _, opt_state = tx.update(scaled_grads, opt_state)
    return ols.select_on_skip(opt_state, new, old)

  kept = step(params * jnp.inf, tx.init(params))
  np.testing.assert_array_equal(kept["mean"], [1.0, 1.0])
  assert kept["mean"].dtype == jnp.float16
  assert (kept["step"], kept["rate"]) == (4, 0.25)
  assert kept["key"] == old["key"]
  moved = step(params, tx.init(params))
  assert np.all(np.isnan(moved["mean"]))
  assert (moved["step"], moved["rate"]) == (5, 0.5)
  assert moved["key"] == new["key"]


def test_select_on_skip_refuses_trees_that_differ():
  state = scaling().init(jnp.ones(2))
  with pytest.raises(ValueError, match="`new` and `old` must have the same"):
    ols.select_on_skip(state, {"a": 1}, {"b": 1})
