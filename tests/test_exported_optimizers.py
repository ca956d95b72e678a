"""Every optimizer that optax exports, found by looking, so none is missed."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import optimizers

# What has a `learning_rate` and is no optimizer that takes plain gradients.
LEFT_OUT = {
  "optax._deprecated_dpsgd": "optax calls it private and deprecated",
  "optax.scale_by_learning_rate": "it is the last link of the others",
  "contrib.dpsgd": "it takes one gradient per example",
  "contrib.schedule_free": "it takes another optimizer; its aliases are here",
}


def exported():
  """Returns every function of optax that makes an optimizer from a rate."""
  found = {}
  for place, module in (("optax", optax), ("contrib", optax.contrib)):
    for name, function in inspect.getmembers(module, inspect.isfunction):
      if "learning_rate" in inspect.signature(function).parameters:
        found[f"{place}.{name}"] = function
  return found


EXPORTED = exported()


def test_what_is_left_out_is_still_exported():
  assert set(LEFT_OUT) <= set(EXPORTED)


@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(set(EXPORTED) - set(LEFT_OUT)))
def test_guarantees_6_and_8_hold_for(name):
  tx = ols.loss_scaling(
    EXPORTED[name](learning_rate=2.0**-6), ols.DynamicLossScale(1024.0)
  )

  traces = []

  @jax.jit
  def step(params, state, bad):
    traces.append(params)
    loss, grads = ols.scaled_value_and_grad(optimizers.loss_fn, state)(params)
    extra_args = {
      "value": loss,
      "grad": ols.unscale(grads, state),
      "value_fn": optimizers.loss_fn,
    }
    if name == "contrib.sophia":  # It estimates the Hessian of this.
      extra_args["obj_fn"] = optimizers.loss_fn
    grads = jax.tree.map(
      lambda x: jnp.where(bad, jnp.nan, x).astype(jnp.float16), grads
    )
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), updates, state

  for dtype in (jnp.float32, jnp.float16):
    params = optimizers.make_params(dtype)
    first = tx.init(params)
    params, updates, state = step(params, first, False)
    assert (state.applied_steps, state.skipped_steps) == (1, 0)
    assert optimizers.describe(state) == optimizers.describe(first)
    for leaf in jax.tree.leaves(updates):
      assert leaf.dtype == dtype
      assert np.all(np.isfinite(np.asarray(leaf, np.float32)))

    after, _, skipped = step(params, state, True)
    assert (skipped.applied_steps, skipped.skipped_steps) == (1, 1)
    to_bits = optimizers.to_bits
    assert to_bits(skipped.inner_state) == to_bits(state.inner_state)
    assert to_bits(after) == to_bits(params)
  assert len(traces) == 2  # One for each dtype.
