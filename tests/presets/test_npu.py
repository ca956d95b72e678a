"""npu_bridge's optimizer: its arguments, its check, and several workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from tests import support

LARGEST = 65504.0
EXPONENTIAL = presets.npu_exponential(
  init_loss_scale=8.0,
  incr_every_n_steps=1000,
  decr_every_n_nan_or_inf=1,
  decr_ratio=0.5,
)
optimizer = functools.partial(
  presets.npu_loss_scale_optimizer, optax.sgd(1.0), EXPONENTIAL
)


def first_step(tx, gradient):
  """Returns the update, whether the step was skipped, and S after it."""
  # An S for each worker, for workers that decide alone.
  state = ols.make_varying(tx.init(jnp.float32(0.0)), "data")
  update, state = tx.update(gradient, state)
  return update, state.skipped, ols.get_loss_scale(state)


def on_workers(mapping, tx):
  """Returns the first step, compiled for eight workers with a gradient each."""
  step = functools.partial(first_step, tx)
  if mapping == "pmap":
    return jax.pmap(step, axis_name="data")
  return jax.jit(
    support.on_each_device(
      lambda rows: jax.tree.map(lambda x: x[None], step(rows[0])),
      out_specs=support.SPREAD,
    )
  )


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    ((EXPONENTIAL, optax.sgd(1.0)), r"`opt` must .* got presets.npu_expo"),
    ((optax.adam, EXPONENTIAL), r"`opt` must .* got adam; call it"),
    ((optax.sgd(1.0), 0), r"`loss_scale_manager` must .* got 0; for"),
    (
      (optax.sgd(1.0), EXPONENTIAL, "data"),
      r"`is_distributed` must be True or False, got 'data'",
    ),
  ],
  ids=["swapped", "factory", "no rule", "axis"],
)
def test_a_wrong_argument_is_refused_under_its_own_name(arguments, match):
  with pytest.raises(TypeError, match=match):
    presets.npu_loss_scale_optimizer(*arguments)


@pytest.mark.parametrize("bad", [LARGEST, -np.inf, np.nan, 1e5])
def test_the_check_is_for_float16_in_saturation_mode(bad):
  # Also for float32 gradients, which a float32 parameter has.
  tx = optimizer()
  scaled_grads = jnp.array([1.0, bad], jnp.float32)
  updates, state = tx.update(scaled_grads, tx.init(jnp.zeros(2)))
  assert state.skipped
  assert np.all(updates == 0)


def test_another_check_can_be_passed():
  tx = optimizer(check=ols.nonfinite())
  _, state = tx.update(jnp.float32(LARGEST), tx.init(jnp.float32(0.0)))
  assert not state.skipped


# Several workers.


def test_one_bad_worker_skips_the_step_of_all():
  """Released code reduced "any worker finite" instead of "all finite"."""
  tx = optimizer(is_distributed=True, axis_name="data")
  step = on_workers("shard_map", tx)
  good = jnp.full(8, 8.0, jnp.float16)
  for bad in (good.at[5].set(LARGEST), (good * np.nan).at[5].set(8)):
    updates, skipped, scales = step(bad)
    assert np.all(skipped) and np.all(scales == 4.0)
    assert np.all(updates == 0)
  updates, skipped, scales = step(good)
  assert not np.any(skipped) and np.all(scales == 8.0)
  assert np.all(updates == -1.0)


def test_without_is_distributed_each_worker_decides_alone():
  # The axis stays, because a script changes only the flag.
  tx = optimizer(is_distributed=False, axis_name="data")
  step = on_workers("shard_map", tx)
  scaled_grads = jnp.full(8, 8.0, jnp.float16).at[5].set(LARGEST)
  _, skipped, scales = step(scaled_grads)
  assert skipped.tolist() == [worker == 5 for worker in range(8)]
  assert scales.tolist() == [4.0 if bad else 8.0 for bad in skipped]


@pytest.mark.parametrize(
  ("mapping", "axis_name"),
  [("shard_map", None), ("pmap", None), ("shard_map", ())],
)
def test_is_distributed_without_an_axis_is_an_error(mapping, axis_name):
  tx = optimizer(is_distributed=True, axis_name=axis_name)
  match = r"`axis_name` must .*axes data; .*is_distributed=True, axis_name='da"
  with pytest.raises(ValueError, match=match):
    on_workers(mapping, tx)(jnp.ones(8))


def test_workers_that_share_an_s_are_told_to_be_distributed():
  tx = optimizer(is_distributed=False, axis_name="data")
  state = tx.init(jnp.float32(0.0))
  step = support.on_each_device(
    lambda rows: tx.update(rows[0], state)[0][None], out_specs=support.SPREAD
  )
  match = r"varies along 'data' .*npu_loss_scale_optimizer\(\.\.\., is_dist"
  with pytest.raises(ValueError, match=match):
    jax.jit(step)(jnp.ones(8))
