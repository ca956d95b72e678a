"""The types that mypy sees behind the public names. Each line is a check."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def of_the_wrapper(
  state: ols.LossScalingState, opt_state: optax.OptState
) -> None:
  assert_type(state.overflow, jax.Array)
  assert_type(state.amax, jax.Array)
  assert_type(state.last_step.overflow, jax.Array)
  assert_type(ols.get_loss_scale(opt_state), jax.Array)
  assert_type(ols.loss_scale_metrics(opt_state), dict[str, jax.Array])
  assert_type(
    ols.select_on_skip(opt_state, {"step": 1}, {"step": 0}), dict[str, int]
  )


def of_the_instruments(params: dict[str, jax.Array]) -> None:
  stats = ols.instruments.leaf_stats(params)
  assert_type(stats + stats, ols.instruments.LeafStats)
  assert_type(stats.leaf("w").share_lost(), float)
  assert_type(stats.headroom(), dict[str, float])


def of_the_rules() -> None:
  assert_type(ols.DynamicLossScale().init().loss_scale, jax.Array)
  assert_type(ols.rules.HeadroomLossScale().init().loss_scale, jax.Array)
  assert_type(ols.presets.torch().init().loss_scale, jax.Array)
  assert_type(ols.nonfinite(jnp.float16), ols.Check)
  assert_type(ols.hardware.probe().check(jnp.float16), ols.Check)


def a_loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
  return jnp.sum(params["w"] * batch)


def of_wrapped_functions(params: dict[str, jax.Array]) -> None:
  assert_type(ols.autocast(a_loss)(params, batch=params["w"]), jax.Array)
  clipped = ols.hardware.emulate_saturation(a_loss)
  assert_type(clipped(params, batch=params["w"]), jax.Array)
  value, status = ols.hardware.float_status(a_loss)(params, params["w"])
  assert_type(value, jax.Array)
  assert_type(status.overflow, jax.Array)
  policy = ols.get_policy("mixed_float16")
  assert_type(policy.autocast(a_loss)(params, params["w"]), jax.Array)
  assert_type(policy.cast_to_compute(params), dict[str, jax.Array])
