"""The recipes for skipped steps do what their page says."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

PAGE = documents.read("docs/recipes/skipping.md")
TX = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())


@pytest.mark.parametrize(("size", "skipped"), [(99.0, False), (101.0, True)])
def test_a_large_norm_skips_the_step_and_lowers_s(size, skipped):
  params = jnp.zeros(1)
  opt_state = TX.init(params)
  code = documents.block(PAGE, "Your own reasons to skip", "overflow=")
  names = {"ols": ols, "optax": optax, "tx": TX, "params": params}
  names |= {"scaled_grads": jnp.array([size * 2**15]), "opt_state": opt_state}
  exec(code, names)
  assert names["grad_norm"] == size
  assert names["opt_state"].skipped == skipped
  assert ols.get_loss_scale(names["opt_state"]) == 2.0 ** (
    14 if skipped else 15
  )


@pytest.mark.parametrize("factor", [1.0, np.inf])
def test_an_average_of_the_parameters_moves_with_them(factor):
  params = jnp.ones(2)
  _, opt_state = TX.update(params * factor, TX.init(params), params)
  code = documents.block(PAGE, "Other values that a step changes", "new_ema")
  names = {"ols": ols, "opt_state": opt_state, "ema": 1.0, "new_ema": 2.0}
  exec(code, names)
  assert names["ema"] == (2.0 if factor == 1 else 1.0)


def test_a_running_mean_passes_over_the_nan_of_a_skipped_step():
  code = documents.block(PAGE, "Other values that a step changes", "mean_loss")
  params = jnp.ones(2)
  names = {"ols": ols, "opt_state": TX.init(params), "mean_loss": 4.0}
  for factor, expected in (
    (2.0, 3.8),
    (np.nan, 3.8),
    (np.inf, 3.8),
    (2.0, 3.62),
  ):
    names["loss"], grads = ols.scaled_value_and_grad(
      lambda params, factor: jnp.mean(params) * factor, names["opt_state"]
    )(params, jnp.float32(factor))
    _, names["opt_state"] = TX.update(grads, names["opt_state"], params)
    exec(code, names)
    np.testing.assert_allclose(names["mean_loss"], expected, rtol=1e-6)
  assert names["opt_state"].skipped_steps == 2
