"""npu_bridge's optimizer: its three arguments, and what a skip leaves alone."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from tests.support import to_bits

WORKERS = 8
LARGEST = 65504.0
BAD_VALUES = [LARGEST, -LARGEST, np.inf, -np.inf, np.nan]
MAPPINGS = ["shard_map", "shard_map_unchecked", "pmap"]

each_mapping = pytest.mark.parametrize("mapping", MAPPINGS)


def exponential(init_loss_scale=8.0):
  """Returns a manager that halves S on every overflow."""
  return presets.npu_exponential(
    init_loss_scale=init_loss_scale,
    incr_every_n_steps=1000,
    decr_every_n_nan_or_inf=1,
    decr_ratio=0.5,
  )


def optimizer(opt=None, manager=None, *args, **kwargs):
  return presets.npu_loss_scale_optimizer(
    opt or optax.sgd(1.0), manager or exponential(), *args, **kwargs
  )


def mesh(axis_type=jax.sharding.AxisType.Auto):
  return jax.make_mesh((WORKERS,), ("data",), axis_types=(axis_type,))


def map_over_workers(mapping, function):
  """Returns the function of one worker's row, compiled for those of all."""
  if mapping == "pmap":
    return jax.pmap(function, axis_name="data")

  def function_of_rows(rows):
    return jax.tree.map(lambda x: x[None], function(rows[0]))

  return jax.jit(
    jax.shard_map(
      function_of_rows,
      mesh=mesh(),
      in_specs=jax.P("data"),
      out_specs=jax.P("data"),
      check_vma=mapping == "shard_map",
    )
  )


def one_step(tx, gradient):
  """Runs the first step of a scalar parameter."""
  params = jnp.float32(0.0)
  # An S for each worker, as the one that decides alone needs it.
  state = ols.make_varying(tx.init(params), "data")
  update, state = tx.update(gradient, state, params)
  return update, state.skipped, ols.get_loss_scale(state)


@functools.cache
def step_of_workers(mapping, is_distributed=True):
  tx = optimizer(is_distributed=is_distributed, axis_name="data")
  return map_over_workers(mapping, functools.partial(one_step, tx))


@functools.cache
def counting_step():
  """Returns an optimizer that counts steps in two places, and its step."""
  opt = optax.adam(optax.linear_schedule(0.5, 0.0, 4))
  tx = optimizer(opt, presets.npu_fixed(loss_scale=1024.0))
  return opt, tx, jax.jit(tx.update)


def train(update, state, params, scaled_grads):
  for gradient in scaled_grads:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


# The arguments.


def test_the_three_arguments_of_the_original_are_positional():
  parameters = inspect.signature(presets.npu_loss_scale_optimizer).parameters
  kinds = {name: x.kind for name, x in parameters.items()}
  positional = [k for k, v in kinds.items() if v is v.POSITIONAL_OR_KEYWORD]
  assert positional == ["opt", "loss_scale_manager", "is_distributed"]
  keyword_only = [k for k, v in kinds.items() if v is v.KEYWORD_ONLY]
  assert keyword_only == ["axis_name", "check"]
  assert parameters["is_distributed"].default is False


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    (
      (exponential(), optax.sgd(1.0)),
      r"`opt` must .* got presets.npu_expo.* first, then the rule",
    ),
    ((optax.adam, exponential()), r"`opt` must .* got adam; call it"),
    (
      (optax.EmptyState, exponential()),
      r"`opt` must .* got EmptyState; call it",
    ),
    ((optax.sgd(1.0), 0), r"`loss_scale_manager` must .* got 0; for"),
    (
      (optax.sgd(1.0), presets.npu_fixed),
      r"`loss_scale_manager` must .* got .*; call it: npu_fixed",
    ),
    (
      (optax.sgd(1.0), exponential(), "data"),
      r"`is_distributed` must be True or False, got 'data'",
    ),
  ],
  ids=["swapped", "factory", "class", "flag", "preset", "axis"],
)
def test_a_wrong_argument_is_refused_under_its_own_name(arguments, match):
  with pytest.raises(TypeError, match=match):
    presets.npu_loss_scale_optimizer(*arguments)


def test_an_axis_name_that_is_none_is_refused_even_if_it_is_not_used():
  with pytest.raises(TypeError, match="`axis_name` must name a mapped axis"):
    optimizer(is_distributed=False, axis_name=[["data"]])


@pytest.mark.parametrize("bad", [*BAD_VALUES, 1e5])
def test_the_check_is_for_float16_in_saturation_mode(bad):
  # Also in float32, the dtype of the gradients of float32 parameters.
  tx = optimizer()
  state = tx.init(jnp.zeros(2))
  _, state = tx.update(jnp.array([1.0, bad], jnp.float32), state)
  assert state.skipped


def test_the_check_can_be_another():
  tx = optimizer(check=ols.nonfinite())
  _, state = tx.update(jnp.float32(LARGEST), tx.init(jnp.float32(0.0)))
  assert not state.skipped


def test_a_flag_of_the_caller_is_or_ed_in():
  tx = optimizer(is_distributed=True)
  params = jnp.float32(0.0)
  _, state = tx.update(params, tx.init(params), params, overflow=jnp.array(1))
  assert state.skipped and ols.get_loss_scale(state) == 4.0


# Several workers.


@pytest.mark.slow
@each_mapping
def test_one_bad_worker_skips_the_step_of_all(mapping):
  """Released code reduced "any worker finite" instead of "all finite"."""
  step = step_of_workers(mapping)
  for worker in range(WORKERS):
    for bad in BAD_VALUES:
      scaled_grads = jnp.full(WORKERS, 8.0, jnp.float16).at[worker].set(bad)
      updates, skipped, scales = step(scaled_grads)
      assert np.all(skipped), (worker, bad)
      assert np.all(scales == 4.0), (worker, bad)
      assert np.all(updates == 0) and np.all(np.signbit(updates))


@each_mapping
def test_one_good_worker_does_not_apply_the_step(mapping):
  step = step_of_workers(mapping)
  for worker in range(WORKERS):
    scaled_grads = jnp.full(WORKERS, LARGEST, jnp.float16).at[worker].set(8.0)
    assert np.all(step(scaled_grads)[1]), worker


@each_mapping
def test_a_step_without_overflow_is_applied_by_all(mapping):
  largest_below = 65472.0  # The float16 number before the largest.
  scaled_grads = jnp.full(WORKERS, largest_below, jnp.float16)
  updates, skipped, scales = step_of_workers(mapping)(scaled_grads)
  assert not np.any(skipped)
  assert np.all(scales == 8.0)
  assert np.all(updates == -largest_below / 8)


@each_mapping
def test_without_is_distributed_each_worker_decides_alone(mapping):
  # The axis stays in place: a script toggles the flag alone.
  step = step_of_workers(mapping, is_distributed=False)
  scaled_grads = jnp.full(WORKERS, 8.0, jnp.float16).at[5].set(LARGEST)
  _, skipped, scales = step(scaled_grads)
  assert skipped.tolist() == [worker == 5 for worker in range(WORKERS)]
  assert scales.tolist() == [4.0 if bad else 8.0 for bad in skipped]


@each_mapping
def test_is_distributed_without_an_axis_is_an_error_under(mapping):
  tx = optimizer(is_distributed=True)
  step = map_over_workers(mapping, functools.partial(one_step, tx))
  match = r"`axis_name` must .*axes data; .*is_distributed=True, axis_name='da"
  with pytest.raises(ValueError, match=match):
    step(jnp.ones(WORKERS))


@pytest.mark.parametrize("axis_name", ["data", None])
@pytest.mark.parametrize("varying", ["gradients", "flag"])
def test_workers_that_share_an_s_are_told_to_be_distributed(axis_name, varying):
  tx = optimizer(optax.sgd(1.0), exponential(), False, axis_name=axis_name)
  state = tx.init(jnp.float32(0.0))

  def update(gradient):
    if varying == "flag":
      shared = jnp.float32(1.0)
      return tx.update(shared, state, overflow=gradient > 1)[0][None]
    return tx.update(gradient[0], state)[0][None]

  step = jax.shard_map(
    update, mesh=mesh(), in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  match = (
    r"got a flag that varies along 'data' .* axis_name='data'\), or "
    r"npu_loss_scale_optimizer\(\.\.\., is_distributed=True\) with that axis"
  )
  with pytest.raises(ValueError, match=match):
    jax.jit(step)(jnp.ones(WORKERS))


def test_no_axis_in_a_tuple_is_an_error_as_well():
  tx = optimizer(is_distributed=True, axis_name=())
  step = map_over_workers("pmap", functools.partial(one_step, tx))
  with pytest.raises(ValueError, match="`axis_name` must be given"):
    step(jnp.ones(WORKERS))


def test_the_error_lists_every_mapped_axis():
  auto = (jax.sharding.AxisType.Auto,) * 2
  step = jax.shard_map(
    functools.partial(one_step, optimizer(is_distributed=True)),
    mesh=jax.make_mesh((4, 2), ("data", "model"), axis_types=auto),
    in_specs=jax.P(),
    out_specs=jax.P(),
  )
  with pytest.raises(ValueError, match="mapped axes data, model;"):
    jax.jit(step)(jnp.float32(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_is_distributed_needs_no_axis_under_plain_jit(axis_type):
  tx = optimizer(is_distributed=True)
  axes = mesh(getattr(jax.sharding.AxisType, axis_type))
  sharding = jax.NamedSharding(axes, jax.P("data"))
  params = jax.device_put(jnp.zeros(WORKERS), sharding)
  update = jax.jit(tx.update)
  with jax.set_mesh(axes):
    state = tx.init(params)
    for worker in range(WORKERS):
      scaled_grads = jnp.full(WORKERS, 8.0).at[worker].set(LARGEST)
      updates, after = update(
        jax.device_put(scaled_grads, sharding), state, params
      )
      assert after.skipped, worker
      assert np.all(updates == 0), worker


# What a discarded step advances: nothing.


def test_a_discarded_step_leaves_no_trace_in_what_follows():
  _, tx, update = counting_step()
  good = [jnp.array([x, -x]) for x in (8.0, 24.0, 40.0)]
  bad = jnp.array([1.0, jnp.nan])
  params = jnp.array([1.0, 2.0])
  state = tx.init(params)
  expected, expected_state = train(update, state, params, good)
  params, state = train(
    update, state, params, [bad, good[0], bad, bad, good[1], good[2], bad]
  )
  assert to_bits(params) == to_bits(expected)
  assert to_bits(state.inner_state) == to_bits(expected_state.inner_state)
  assert (state.applied_steps, state.skipped_steps) == (3, 4)


def test_schedules_and_bias_corrections_count_applied_steps():
  opt, tx, update = counting_step()
  bad, good = jnp.array([1.0, LARGEST]), jnp.array([1024.0, -2048.0])
  params = jnp.array([1.0, 2.0])
  _, state = train(update, tx.init(params), params, [bad, good, bad, good])
  adam, schedule = state.inner_state
  assert (adam.count, schedule.count) == (2, 2)
  # The third applied step, against the bare optimizer's third.
  bare_state = opt.init(params)
  for _ in range(2):
    _, bare_state = opt.update(good / 1024, bare_state, params)
  np.testing.assert_allclose(
    update(good, state, params)[0],
    opt.update(good / 1024, bare_state, params)[0],
    rtol=1e-6,
  )


# Without the overflow check.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_without_the_overflow_check_gradients_are_unscaled_in_float32(dtype):
  # In float16 both 1/S and the result would be 0.
  scale = 2.0**26
  manager = presets.npu_fixed(loss_scale=scale, enable_overflow_check=False)
  tx = optimizer(manager=manager)
  params = jnp.zeros(2, jnp.float32)
  scaled_grads = jnp.array([1.0, -3.0], dtype)
  updates, _ = tx.update(scaled_grads, tx.init(params), params)
  np.testing.assert_array_equal(updates, [-(2.0**-26), 3 * 2.0**-26])


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_without_the_overflow_check_every_step_is_applied(bad):
  manager = presets.npu_fixed(loss_scale=8.0, enable_overflow_check=False)
  tx = optimizer(manager=manager)
  params = jnp.zeros(2)
  updates, state = tx.update(jnp.array([8.0, bad]), tx.init(params), params)
  np.testing.assert_array_equal(updates, [-1.0, -bad / 8])
  assert state.overflow and not state.skipped
  assert (state.applied_steps, ols.get_loss_scale(state)) == (1, 8.0)
