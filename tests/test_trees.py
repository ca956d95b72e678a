"""How trees differ, in words, and gradients that do not fit."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _trees

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
  assert _trees.difference(PARAMS, got) == words


def test_containers_differ_where_paths_do_not():
  assert "list" not in str(_trees.difference([1], [1]))
  words = _trees.difference([jnp.zeros(1)], (jnp.zeros(1),))
  assert words == "PyTreeDef((*,)) and not PyTreeDef([*])"


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
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  update = jax.jit(tx.update) if jit else tx.update
  params = PARAMS if passes_params else None
  with pytest.raises(ValueError, match=message):
    update({"a": jnp.zeros(3), "c": jnp.zeros(2)}, tx.init(PARAMS), params)


def test_a_gradient_of_another_shape_is_not_broadcast():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale())
  gradients = PARAMS | {"a": jnp.zeros(1)}
  with pytest.raises(ValueError, match=r"shape \(1,\) at 'a' and not \(3,\)"):
    tx.update(gradients, tx.init(PARAMS), PARAMS)


def test_other_errors_of_the_optimizer_stay_what_they_are():
  tx = ols.loss_scaling(optax.adamw(0.1), ols.FixedLossScale())
  with pytest.raises(ValueError, match="not passing `params`"):
    tx.update(PARAMS, tx.init(PARAMS))
  needs_value = ols.loss_scaling(optax.polyak_sgd(), ols.FixedLossScale())
  with pytest.raises(TypeError, match="value"):
    needs_value.update(PARAMS, needs_value.init(PARAMS), PARAMS)
