"""How trees differ, in words; gradients and states that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._base import trees

PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros(2)}


@pytest.mark.parametrize(
  ("got", "words"),
  [
    (PARAMS, None),
    ({"a": jnp.zeros(3)}, "nothing at 'b'"),
    (
      {"a": jnp.zeros(3), "c": jnp.zeros(2)},
      "nothing at 'b' and something at 'c' where nothing belongs",
    ),
    (PARAMS | {"b": jnp.zeros(4)}, "shape (4,) at 'b' and not (2,)"),
    (
      {f"x{i}": jnp.zeros(1) for i in range(7)} | PARAMS,
      "something at 'x0', 'x1', 'x2', 'x3' and 3 more where nothing belongs",
    ),
  ],
  ids=["same", "missing", "missing and extra", "shape", "many"],
)
def test_a_difference_is_told_by_path(got, words):
  assert trees.difference(PARAMS, got) == words


def test_containers_differ_where_paths_do_not():
  assert "list" not in str(trees.difference([1], [1]))
  words = trees.difference([jnp.zeros(1)], (jnp.zeros(1),))
  assert words == "PyTreeDef((*,)) and not PyTreeDef([*])"


def scaling(inner):
  return ols.loss_scaling(inner, ols.FixedLossScale())


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  ("inner", "passes_params", "message"),
  [
    (optax.sgd(0.1), True, "fit the parameters, got nothing at 'b' and"),
    (optax.adam(0.1), True, "fit the parameters, got nothing at 'b' and"),
    (optax.adam(0.1), False, "fit the state, got nothing at '0/mu/b', '0/nu/b"),
  ],
  ids=["sgd", "adam", "adam-without-params"],
)
def test_gradients_that_do_not_fit(inner, passes_params, message, jit):
  tx = scaling(inner)
  update = jax.jit(tx.update) if jit else tx.update
  params = PARAMS if passes_params else None
  with pytest.raises(ValueError, match=message):
    update({"a": jnp.zeros(3), "c": jnp.zeros(2)}, tx.init(PARAMS), params)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (4,)], ids=str)
@pytest.mark.parametrize(
  "inner",
  [optax.sgd(0.1), optax.adam(0.1), optax.sgd(0.1, momentum=0.9)],
  ids=["sgd", "adam", "momentum"],
)
def test_a_gradient_of_another_shape_is_not_broadcast(inner, shape):
  tx = scaling(inner)
  scaled_grads = PARAMS | {"a": jnp.zeros(shape)}
  with pytest.raises(
    ValueError, match=r"`updates` must have.*'a' and not \(3,\)"
  ):
    tx.update(scaled_grads, tx.init(PARAMS), PARAMS)


@pytest.mark.slow
def test_gradients_for_each_example_are_for_the_optimizer_to_sum():
  inner = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)
  scaled_grads = jax.tree.map(lambda x: jnp.ones((5, *x.shape)), PARAMS)
  tx = scaling(inner)
  updates, _ = tx.update(scaled_grads, tx.init(PARAMS), PARAMS)
  assert updates["a"].shape == (3,)
  # One that only unscales hands them on.
  unscaled, _ = scaling(optax.identity()).update(
    scaled_grads, scaling(optax.identity()).init(PARAMS), PARAMS
  )
  assert unscaled["a"].shape == (5, 3)
  with pytest.raises(ValueError, match="to have a batch dimension"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_gradients_for_each_example_are_not_blamed_for_something_else():
  private = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)
  tx = scaling(optax.chain(private, optax.adamw(0.1)))
  scaled_grads = jax.tree.map(lambda x: jnp.ones((5, *x.shape)), PARAMS)
  with pytest.raises(ValueError, match="not passing `params`"):
    tx.update(scaled_grads, tx.init(PARAMS))


def test_an_update_of_another_shape_is_not_broadcast():
  first = optax.stateless(lambda u, _: jax.tree.map(lambda x: x[:1], u))
  tx = scaling(first)
  with pytest.raises(ValueError, match=r"updates of `inner` .* \(1,\) at 'a'"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [False, True])
def test_an_update_of_one_number_fits_a_parameter_of_one_number(jit):
  """DoG makes an update of shape (1,) for a scalar."""
  inner = optax.scale_by_distance_over_gradients()
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0))
  update = jax.jit(tx.update) if jit else tx.update
  params = bare_params = {"a": jnp.ones(3), "b": jnp.float32(2.0)}
  state, bare_state = tx.init(params), inner.init(params)
  for i in range(3):
    gradients = {"a": jnp.ones(3) * (i + 1), "b": jnp.float32(i - 0.5)}
    updates, state = update(
      jax.tree.map(lambda x: 8 * x, gradients), state, params
    )
    params = optax.apply_updates(params, updates)
    assert [x.shape for x in jax.tree.leaves(params)] == [(3,), ()]
    bare_updates, bare_state = inner.update(gradients, bare_state, bare_params)
    bare_params = optax.apply_updates(bare_params, bare_updates)
    np.testing.assert_allclose(params["a"], bare_params["a"], rtol=1e-7)
    np.testing.assert_allclose(params["b"], bare_params["b"], rtol=1e-7)
  assert bare_params["b"].shape == (1,)
  updates, _ = update({"a": jnp.ones(3), "b": jnp.nan}, state, params)
  assert updates["b"].shape == () and jnp.signbit(updates["b"])


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adam(0.1)])
def test_a_parameter_without_a_gradient_has_none(inner):
  trained = {"a": PARAMS["a"], "b": None}
  tx = scaling(inner)
  updates, _ = tx.update(trained, tx.init(trained), PARAMS)
  assert updates["b"] is None


def test_the_state_of_another_optimizer():
  tx, other = scaling(optax.adam(0.1)), scaling(optax.sgd(0.1))
  with pytest.raises(
    ValueError, match="`state` must be that of this optimizer"
  ):
    tx.update(PARAMS, other.init(PARAMS), PARAMS)
  larger = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), PARAMS)
  with pytest.raises(
    ValueError, match=r"got shape \(2, 3\) at '0/mu/a' and not"
  ):
    tx.update(PARAMS, tx.init(larger), PARAMS)


@pytest.mark.parametrize(
  ("inner", "params", "message"),
  [
    (optax.adamw(0.1), None, "not passing `params`"),
    (optax.polyak_sgd(), PARAMS, "value"),
    (
      optax.lookahead(optax.polyak_sgd(), 5, 0.5),
      optax.LookaheadParams.init_synced(PARAMS),
      "value",
    ),
  ],
  ids=["adamw", "polyak", "lookahead"],
)
def test_other_errors_of_the_optimizer_stay_what_they_are(
  inner, params, message
):
  tx = scaling(inner)
  state = tx.init(PARAMS if params is None else params)
  with pytest.raises((TypeError, ValueError), match=message):
    tx.update(PARAMS, state, params)


@pytest.mark.parametrize("loss_scale", [2, np.float16(2.0)], ids=repr)
def test_a_loss_scale_of_another_dtype_is_refused(loss_scale):
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  state = tx.init(PARAMS)
  rule_state = state.loss_scale_state._replace(loss_scale=loss_scale)
  with pytest.raises(ValueError, match=r"float32\[\].*to keep S"):
    tx.update(PARAMS, state._replace(loss_scale_state=rule_state), PARAMS)


def test_a_state_restored_without_a_target_is_told_from_a_bare_one():
  state = scaling(optax.sgd(0.1)).init(PARAMS)
  with pytest.raises(ValueError, match="restored into the structure"):
    ols.get_loss_scale({"opt_state": state._asdict()})
  with pytest.raises(ValueError, match=r"checkpoints\.with_loss_scaling"):
    ols.get_loss_scale(state.inner_state)
