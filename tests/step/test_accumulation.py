"""Several micro-batches to a step: their mean, their overflows, their S."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import to_bits

RULE = ols.DynamicLossScale(8.0, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}
# Exact in binary, so that sums in any order are the same.
BATCH = np.arange(24, dtype=np.float32).reshape(8, 3) / 8 - 1


def loss_fn(params, batch):
  return jnp.mean(batch @ params["w"] + params["b"] * batch[:, 0])


def make(rule=RULE, inner=None, **options):
  tx = ols.loss_scaling(inner or optax.sgd(1.0), rule, **options)
  return tx, tx.init(PARAMS)


def bad_batch(*rows, value=np.inf):
  batch = BATCH.copy()
  batch[list(rows)] = value
  return batch


def exact_gradients(batch):
  """Returns the gradients of the loss in float64."""
  batch = np.asarray(batch, np.float64)
  return {"w": batch.mean(0), "b": batch[:, 0].mean()}


@functools.cache
def step(drop=False, k=4, check=None):
  """Returns a compiled step of SGD."""
  check = check or ols.nonfinite()
  tx, _ = make(check=check)

  @jax.jit
  def run(params, state, batch):
    loss, grads, overflow = ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, state),
      microbatches=k,
      drop=drop,
      check=check,
    )(params, batch)
    updates, state = tx.update(grads, state, params, overflow=overflow)
    return (loss, grads, overflow), updates, state

  return run


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 12])
def test_the_mean_over_micro_batches_is_that_of_the_batch(k):
  batch = np.concatenate([BATCH, BATCH[:4] / 2])
  _, state = make()
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, state), microbatches=k
  )
  loss, grads, overflow = value_and_grad(PARAMS, batch)
  np.testing.assert_allclose(loss, loss_fn(PARAMS, batch), rtol=1e-6)
  for name, expected in exact_gradients(batch).items():
    np.testing.assert_allclose(grads[name], 8 * expected, rtol=1e-6)
  np.testing.assert_array_equal(overflow.flags, [False] * k)


def test_guarantee_11_the_loss_scale_is_frozen_for_the_window():
  _, state = make()
  scales = []
  for i in range(5):
    (_, grads, _), updates, state = step()(PARAMS, state, BATCH)
    scales.append(float(grads["w"][0] / -updates["w"][0]))
    assert state.applied_steps == i + 1
  # It moves once a window, on the third clean one.
  assert scales == [8.0, 8.0, 8.0, 16.0, 16.0]


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("row", range(4))
def test_guarantee_11_an_overflow_voids_its_window_and_no_later_one(row, value):
  _, state = make()
  (_, _, overflow), updates, after = step()(
    PARAMS, state, bad_batch(row, value=value)
  )
  np.testing.assert_array_equal(overflow.flags, np.arange(4) == row)
  assert after.skipped
  assert after.nan == np.isnan(value)
  assert to_bits(updates) == to_bits(
    jax.tree.map(lambda x: jnp.full_like(x, -0.0), PARAMS)
  )
  assert ols.get_loss_scale(after) == 4.0
  (loss, _, overflow), updates, after = step()(PARAMS, after, BATCH)
  assert not after.skipped
  assert not overflow
  np.testing.assert_array_equal(loss, loss_fn(PARAMS, BATCH))
  for name, expected in exact_gradients(BATCH).items():
    np.testing.assert_array_equal(updates[name], -expected)


@pytest.mark.filterwarnings("ignore:`overflow` must be passed")
@pytest.mark.parametrize("drop", [False, True])
def test_an_overflow_shows_in_the_gradients_when_nobody_tells_update(drop):
  tx, state = make()
  rows = range(8) if drop else [2]
  _, grads, _ = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, state), microbatches=4, drop=drop
  )(PARAMS, bad_batch(*rows))
  _, after = tx.update(grads, state, PARAMS)
  assert after.skipped
  assert not after.nan


@pytest.mark.parametrize("rows", [(1,), (0, 3), (1, 5), (0, 1, 2)])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_bad_micro_batch_is_dropped_and_the_rest_makes_a_step(rows, value):
  # Row i is in micro-batch i modulo 4.
  kept = [i for i in range(8) if i % 4 not in {row % 4 for row in rows}]
  _, state = make()
  (loss, _, overflow), updates, after = step(drop=True)(
    PARAMS, state, bad_batch(*rows, value=value)
  )
  assert overflow.valid == len(kept) / 2
  np.testing.assert_allclose(loss, loss_fn(PARAMS, BATCH[kept]), rtol=1e-6)
  for name, expected in exact_gradients(BATCH[kept]).items():
    np.testing.assert_allclose(updates[name], -expected, rtol=1e-6)
  assert not after.skipped
  assert after.overflow
  assert after.applied_steps == 1
  # The rule is told all the same.
  assert ols.get_loss_scale(after) == 4.0


def test_where_all_micro_batches_are_bad_the_step_is_skipped():
  _, state = make()
  batch = bad_batch(*range(8), value=np.nan)
  (loss, _, overflow), updates, after = step(drop=True)(PARAMS, state, batch)
  assert np.all(overflow.flags)
  assert np.isnan(loss)
  assert after.skipped
  assert after.nan
  assert np.all(updates["w"] == 0)
  assert ols.get_loss_scale(after) == 4.0


@pytest.mark.parametrize(
  ("drop", "large", "expected"),
  [(False, [0], 15001.5), (True, [0], 2.0), (True, [0, 1, 2, 3], 60000.0)],
)
def test_the_loss_is_the_mean_over_what_counts(drop, large, expected):
  def fun(params, x):
    return jnp.mean(jnp.float16(params) * jnp.float16(x)).astype(jnp.float32)

  # These fit float16, and 8 times as much does not.
  batch = np.full(4, 2.0, np.float32)
  batch[large] = 60000.0
  loss, _, overflow = ols.accumulate(
    ols.scaled_value_and_grad(fun, 8.0), microbatches=4, drop=drop
  )(jnp.float32(1.0), batch)
  assert np.flatnonzero(overflow.flags).tolist() == large
  assert loss == expected


@pytest.mark.slow
def test_what_is_saturated_does_not_hide_in_the_mean():
  check = ols.saturated(jnp.float16)
  _, state = make(check=check)
  batch = np.zeros_like(BATCH)
  batch[1] = 65504.0 / 8 * 2  # Two rows to a micro-batch, S of 8.
  (_, _, overflow), _, after = step(check=check)(PARAMS, state, batch)
  assert overflow.flags.tolist() == [False, True, False, False]
  assert after.skipped
  (_, grads, _), _, after = step(drop=True, check=check)(PARAMS, state, batch)
  assert not after.skipped
  np.testing.assert_array_equal(grads["w"], [0, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", [3, 7, 8])  # 7 times a seventh is rounded up.
@pytest.mark.parametrize("drop", [False, True])
def test_the_sum_overflows_nowhere_where_no_summand_does(dtype, k, drop):
  largest = jnp.finfo(dtype).max
  params = jnp.ones((2,), dtype)
  _, grads, overflow = ols.accumulate(
    ols.scaled_value_and_grad(lambda params, x: jnp.sum(params * x[0]), 1.0),
    microbatches=k,
    drop=drop,
  )(params, jnp.full((k, 2), largest))
  assert not overflow
  assert grads.dtype == jnp.float32
  np.testing.assert_allclose(grads, np.float32(largest), rtol=1e-6)


@pytest.mark.slow
def test_float64_and_complex_gradients_keep_their_precision():
  with jax.enable_x64(True):
    batch = jnp.array([1 + 3 * 2.0**-40, 1.0, 1.0])
    accumulated = ols.accumulate(
      ols.scaled_value_and_grad(
        lambda p, x: jnp.sum(jnp.real(p["c"] * 1j)) * x[0] + p["d"] * x[0], 4.0
      ),
      microbatches=3,
    )
    params = {"c": jnp.complex64(1 + 1j), "d": jnp.float64(1.0)}
    loss, grads, _ = accumulated(params, batch)
    assert loss.dtype == grads["d"].dtype == jnp.float64
    np.testing.assert_allclose(grads["d"], 4 * (1 + 2.0**-40), rtol=1e-15)
    assert grads["c"].dtype == jnp.complex64
    np.testing.assert_allclose(grads["c"], 4j, rtol=1e-6)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("drop", [False, True])
def test_it_promotes_nothing_implicitly(drop):
  def mean(params, x):
    return jnp.mean(params * x)

  params = jnp.ones((), jnp.float16)
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(mean, 8.0), microbatches=3, drop=drop
  )
  loss, grads, _ = value_and_grad(params, jnp.ones((3,), jnp.float16))
  assert (loss.dtype, grads.dtype) == (jnp.float32, jnp.float32)


def test_a_float16_loss_has_its_mean_in_float32():
  loss, _, _ = ols.accumulate(
    ols.scaled_value_and_grad(lambda p, x: (p * x[0]).astype(jnp.float16), 8.0),
    microbatches=2,
  )(jnp.float32(1.0), jnp.array([2048.0, 2050.0]))
  assert (loss.dtype, float(loss)) == (jnp.float32, 2049.0)


def test_it_is_traced_once_and_compiled_as_one_scan():
  traced = []

  def counted(params, batch):
    traced.append(batch.shape)
    return loss_fn(params, batch)

  _, state = make()

  @jax.jit
  def run(params, state, batch):
    return ols.accumulate(
      ols.scaled_value_and_grad(counted, state), microbatches=4
    )(params, batch)

  run(PARAMS, state, BATCH)
  assert traced == [(2, 3)]
  primitives = [
    str(equation.primitive)
    for equation in jax.make_jaxpr(run)(PARAMS, state, BATCH)
    .eqns[0]
    .params["jaxpr"]
    .eqns
  ]
  assert primitives.count("scan") == 1
  assert "while" not in primitives


def test_auxiliary_data_comes_with_an_axis_for_the_micro_batches():
  def with_aux(params, batch):
    return loss_fn(params, batch), {"first": batch[0, 0]}

  (loss, aux), _, _ = ols.accumulate(
    ols.scaled_value_and_grad(with_aux, 1.0, has_aux=True), microbatches=4
  )(PARAMS, BATCH)
  np.testing.assert_allclose(loss, loss_fn(PARAMS, BATCH), rtol=1e-6)
  np.testing.assert_array_equal(aux["first"], BATCH[:4, 0])


@pytest.mark.parametrize("argnums", [1, (1,), [1, 0], -2])
def test_argnums_are_those_of_jax(argnums):
  def fun(rate, params, batch):
    return loss_fn(params, batch) * rate

  rate = jnp.float32(0.5)
  _, grads, _ = ols.accumulate(
    ols.scaled_value_and_grad(fun, 1.0, argnums),
    microbatches=2,
    batch_argnums=2,
  )(rate, PARAMS, BATCH)
  expected = jax.grad(fun, argnums)(rate, PARAMS, BATCH)
  assert jax.tree.structure(grads) == jax.tree.structure(expected)
  for x, y in zip(
    jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_batches_keys_and_what_is_given_whole():
  def noisy(params, x, batch, keys, *, rate):
    noise = jax.random.normal(keys[0], ())
    return jnp.mean(x) * batch["y"][0] * noise * params * rate

  keys = jax.random.split(jax.random.key(0), 2)
  x, y = jnp.arange(4.0), jnp.array([1.0, 2.0, 3.0, 4.0])
  loss, _, _ = ols.accumulate(
    ols.scaled_value_and_grad(noisy, 1.0), microbatches=2, batch_argnums=(2, 3)
  )(jnp.float32(1.0), x, {"y": y, "none": None}, keys, rate=jnp.ones(3)[0])
  noise = [jax.random.normal(key, ()) for key in keys]
  expected = (1.5 * 1.0 * noise[0] + 1.5 * 2.0 * noise[1]) / 2
  np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize(
  "value_and_grad",
  [
    jax.value_and_grad,
    functools.partial(jax.value_and_grad, holomorphic=False),
  ],
  ids=["jax", "another"],
)
def test_guarantee_12_next_values_pass_from_one_micro_batch_to_the_next(
  value_and_grad,
):
  @jax.custom_vjp
  def observe(amax, x):
    del amax
    return x

  observe.defvjp(
    lambda amax, x: (x, (amax, jnp.max(jnp.abs(x)))),
    lambda kept, g: (kept[0] * 2 + kept[1], g),
  )

  def fun(params, batch):
    amax = params["_overwrite_with_gradient"]["amax"]
    return jnp.mean(observe(amax, batch * params["w"]))

  params = {"w": jnp.float32(1.0), "_overwrite_with_gradient": {}}
  params["_overwrite_with_gradient"]["amax"] = jnp.float32(1.0)
  run = ols.accumulate(
    ols.scaled_value_and_grad(fun, 8.0),
    microbatches=3,
    drop=True,
    check=ols.nonfinite(),
  )
  _, grads, _ = run(params, jnp.array([1.0, 2.0, 3.0]))
  # ((1 * 2 + 1) * 2 + 2) * 2 + 3, neither scaled nor summed.
  assert grads["_overwrite_with_gradient"]["amax"] == 19.0
  _, grads, overflow = run(params, jnp.array([1.0, jnp.inf, 3.0]))
  assert overflow.flags.tolist() == [False, True, False]
  assert grads["_overwrite_with_gradient"]["amax"] == (1 * 2 + 1) * 2 + 3
  assert grads["w"] == 16.0
  # A value that was not finite before says nothing about this batch.
  params["_overwrite_with_gradient"]["amax"] = jnp.float32(jnp.inf)
  assert not run(params, jnp.array([1.0, 2.0, 3.0]))[2]


def test_guarantee_12_a_next_value_that_is_lost_is_an_overflow():
  @jax.custom_vjp
  def clip(amax, x):
    del amax
    return x

  # What FP8 layers do: the history shows an inf that the gradient does not.
  clip.defvjp(
    lambda amax, x: (x, None), lambda _, g: (jnp.max(g), jnp.clip(g, -2, 2))
  )

  def fun(params, batch):
    amax = params["_overwrite_with_gradient"]
    return jnp.sum(clip(amax, params["w"]) * batch)

  params = {"w": jnp.float32(1), "_overwrite_with_gradient": jnp.float32(1)}
  value_and_grad = ols.scaled_value_and_grad(fun, 8.0)
  run = ols.accumulate(value_and_grad, microbatches=3, drop=True)
  _, grads, overflow = run(params, jnp.array([1.0, jnp.inf, 3.0]))
  assert overflow.flags.tolist() == [False, True, False]
  assert grads["_overwrite_with_gradient"] == 24.0


def test_integers_and_empty_leaves_pass():
  params = {"w": jnp.float32(2.0), "n": jnp.arange(3), "none": None}
  _, grads, _ = ols.accumulate(
    ols.scaled_value_and_grad(
      lambda params, x: params["w"] * x[0] * params["n"][1], 1.0, allow_int=True
    ),
    microbatches=2,
  )(params, jnp.array([1.0, 3.0]))
  expected = jax.grad(lambda p: p["w"] * p["n"][1], allow_int=True)(params)
  assert grads["n"].dtype == expected["n"].dtype == jax.dtypes.float0
  assert grads["n"].shape == (3,)
  assert grads["w"] == 2.0
  assert grads["none"] is None


def test_a_check_per_leaf_sees_the_paths_that_update_sees():
  seen = []

  def dtype_of(path):
    seen.append(path)
    return "float16" if path == "w" else None

  check = ols.nonfinite(dtype_of)
  batch = np.full((2, 3), 1e4, np.float32)
  tx, state = make(check=check)
  _, grads, overflow = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, state), microbatches=2, check=check
  )(PARAMS, batch)
  assert overflow.flags.tolist() == [True, True]
  assert set(seen) == {"w", "b"}
  tx.update(grads, state, PARAMS, overflow=overflow)
  assert set(seen) == {"w", "b"}


@pytest.mark.slow
def test_seeds_are_trained_side_by_side_under_vmap():
  _, state = make()
  run = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, ols.get_loss_scale(state)),
    microbatches=4,
    drop=True,
  )
  batches = np.stack([BATCH, bad_batch(1)])
  _, _, overflow = jax.vmap(run, in_axes=(None, 0))(PARAMS, batches)
  assert overflow.flags.tolist() == [[False] * 4, [False, True, False, False]]


def mesh_of(devices, kind):
  return jax.make_mesh(
    (devices,),
    ("data",),
    (getattr(jax.sharding.AxisType, kind),),
    devices=jax.devices()[:devices],
  )


@functools.cache
def on_devices(drop):
  """Returns a step on two devices, each of which has its own batch."""
  inner = optax.chain(ols.pmean_gradients("data"), optax.sgd(1.0))
  tx, _ = make(inner=inner, axis_name="data")

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh_of(2, "Auto"),
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=(jax.P(), jax.P(), jax.P("data")),
  )
  def run(params, state, batch):
    local = ols.make_varying(params, "data")
    _, grads, overflow = ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, state), microbatches=2, drop=drop
    )(local, batch)
    updates, state = tx.update(grads, state, params, overflow=overflow)
    return updates, state, overflow

  return tx, run


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
def test_devices_agree_on_what_one_of_them_dropped(drop):
  tx, run = on_devices(drop)
  # The second device's second micro-batch: rows 5 and 7.
  updates, after, overflow = run(PARAMS, tx.init(PARAMS), bad_batch(5))
  assert overflow.flags.tolist() == [False, False, False, True]
  assert after.skipped != drop
  assert ols.get_loss_scale(after) == 4.0
  if drop:
    expected = (BATCH[:4].mean(0) + BATCH[[4, 6]].mean(0)) / 2
    np.testing.assert_allclose(updates["w"], -expected, rtol=1e-6)


def test_the_step_is_skipped_where_a_device_has_nothing_left():
  tx, run = on_devices(True)
  _, after, _ = run(PARAMS, tx.init(PARAMS), bad_batch(4, 5))
  assert after.skipped


def test_parameters_split_over_devices_decide_together():
  """Sharded parameters keep their gradients, those of others are summed."""
  tx, _ = make(axis_name="data")

  @functools.partial(
    jax.shard_map,
    mesh=mesh_of(2, "Auto"),
    in_specs=({"b": jax.P(), "w": jax.P("data")}, jax.P(), jax.P("data")),
    out_specs=({"b": jax.P(), "w": jax.P("data")}, jax.P()),
  )
  def run(params, state, batch):
    _, grads, overflow = ols.accumulate(
      ols.scaled_value_and_grad(
        lambda p, x: jnp.mean(x) * (p["w"][0] + p["b"]), state
      ),
      microbatches=2,
      drop=True,
      axis_name="data",
    )(params, batch)
    return grads, overflow

  params = {"b": jnp.float32(1.0), "w": jnp.ones(2)}
  batch = jnp.array([1.0, jnp.inf, 3.0, 4.0])
  grads, overflow = jax.jit(run)(params, tx.init(params), batch)
  assert overflow.flags.tolist() == [False, True]
  np.testing.assert_array_equal(grads["w"], [8.0, 24.0])
  assert grads["b"] == 32.0


@pytest.mark.parametrize("drop", [False, True])
def test_devices_that_share_parameters_must_not_decide_alone(drop):
  @functools.partial(
    jax.shard_map,
    mesh=mesh_of(2, "Auto"),
    in_specs=({"b": jax.P(), "w": jax.P("data")}, jax.P("data")),
    out_specs=jax.P(),
  )
  def run(params, batch):
    _, grads, _ = ols.accumulate(
      ols.scaled_value_and_grad(
        lambda p, x: jnp.mean(x) * (p["w"][0] + p["b"]), 1.0
      ),
      microbatches=2,
      drop=drop,
    )(params, batch)
    return grads["b"]

  params = {"b": jnp.float32(1.0), "w": jnp.ones(2)}
  with pytest.raises(ValueError, match="pass axis_name='data' to accumulate"):
    run(params, jnp.ones(4))


def test_devices_that_share_a_loss_must_not_drop_alone():
  @functools.partial(
    jax.shard_map,
    mesh=mesh_of(2, "Auto"),
    in_specs=(jax.P("data"), jax.P()),
    out_specs=jax.P("data"),
  )
  def run(params, batch):
    def fun(params, x):
      return jax.lax.psum(params[0], "data") * x[0]

    return ols.accumulate(
      ols.scaled_value_and_grad(fun, 1.0), microbatches=2, drop=True
    )(params, batch)[1]

  with pytest.raises(ValueError, match="share a loss or gradients must decide"):
    run(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_sharded_batch_stays_where_it_is(kind):
  mesh = mesh_of(4, kind)
  batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
  params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
  _, state = make()

  @jax.jit
  def run(params, batch, scale):
    return ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, scale), microbatches=2
    )(params, batch)

  scale = jax.device_put(
    ols.get_loss_scale(state), jax.NamedSharding(mesh, jax.P())
  )
  with jax.set_mesh(mesh):
    compiled = run.lower(params, batch, scale).compile()
    _, grads, _ = run(params, batch, scale)
  for name, expected in exact_gradients(BATCH).items():
    np.testing.assert_allclose(grads[name], 8 * expected, rtol=1e-6)
  for word in ("all-to-all", "all-gather", "collective-permute"):
    assert word not in compiled.as_text()


def test_an_overflow_is_a_flag_for_python_and_for_jax():
  overflow = make_overflow([False, True, False], drop=True)
  assert overflow
  assert jnp.any(overflow)
  assert jnp.where(overflow, 1, 2) == 1
  assert jnp.logical_or(overflow, False)
  np.testing.assert_array_equal(overflow, True)
  assert overflow.valid == 2
  assert not make_overflow([False] * 3)
  jitted = jax.jit(lambda x: x)(overflow)
  assert jitted.drop
  assert jitted.flags.tolist() == [False, True, False]


def make_overflow(flags, drop=False, amax=1.0):
  run = ols.accumulate(
    ols.scaled_value_and_grad(lambda p, x: p * x[0], 1.0),
    microbatches=len(flags),
    drop=drop,
  )
  batch = jnp.where(jnp.array(flags), jnp.inf, amax)
  return run(jnp.float32(1.0), batch)[2]


def test_update_takes_several_reasons_in_a_list():
  tx, state = make()
  grads = {"w": jnp.full(3, 8.0), "b": jnp.float32(8.0)}
  dropped = make_overflow([False, True], drop=True)
  _, after = tx.update(grads, state, PARAMS, overflow=[dropped, False])
  assert (after.skipped, after.overflow) == (False, True)
  _, after = tx.update(grads, state, PARAMS, overflow=[dropped, jnp.ones(3)])
  assert after.skipped
  _, after = tx.update(grads, state, PARAMS, overflow=[])
  assert not after.overflow
  with pytest.raises(TypeError, match="or a list of these, got 'yes'"):
    tx.update(grads, state, PARAMS, overflow=[dropped, "yes"])


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
def test_amax_is_that_of_the_micro_batches_and_not_of_their_mean(drop):
  _, state = make()
  # Opposite gradients, of which the mean is 0.
  batch = np.zeros_like(BATCH)
  batch[0], batch[1] = 64.0, -64.0
  (_, grads, overflow), _, after = step(drop)(PARAMS, state, batch)
  np.testing.assert_array_equal(grads["w"], [0, 0, 0])
  assert overflow.amax.tolist() == [256.0, 256.0, 0.0, 0.0]
  assert after.amax == 256.0


def test_a_nan_that_was_dropped_is_told_apart_from_inf():
  _, state = make()
  for value in (np.nan, np.inf):
    _, _, after = step(drop=True)(PARAMS, state, bad_batch(1, value=value))
    assert not after.skipped
    assert after.nan == np.isnan(value)
    assert not np.isfinite(after.amax)


def call(batch=BATCH, argnums=0, **options):
  options = {"microbatches": 2} | options
  value_and_grad = ols.scaled_value_and_grad(loss_fn, 1.0, argnums)
  return ols.accumulate(value_and_grad, **options)(PARAMS, batch)


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    (
      {"microbatches": 3},
      ValueError,
      "`microbatches` must divide the batch, got 3 for 8 examples in "
      "argument 1",
    ),
    ({"microbatches": 0}, ValueError, "`microbatches` must be between 1 and"),
    ({"microbatches": 2.0}, TypeError, "`microbatches` must be an integer"),
    ({"drop": "yes"}, TypeError, "`drop` must be True or False"),
    ({"check": ols.nonfinite}, TypeError, r"`check` must be made by"),
    (
      {"batch": {"x": BATCH, "y": BATCH[:4]}},
      ValueError,
      r"one size, got 8 in argument 1\['x'\] and 4 in argument 1\['y'\]",
    ),
    (
      {"batch": {"x": BATCH, "rate": 0.5}},
      ValueError,
      r"a scalar as argument 1\['rate'\]; name the arguments",
    ),
    (
      {"batch": {"x": BATCH, "key": jax.random.key(0)}},
      ValueError,
      r"a scalar as argument 1\['key'\]; of a random key pass",
    ),
    (
      {"batch": {"x": BATCH, "z": jax.random.PRNGKey(0)}},
      ValueError,
      r"8 in argument 1\['x'\] and 2 in argument 1\['z'\]; of a random key ",
    ),
    ({"batch_argnums": 0}, ValueError, "other arguments than `argnums`, got 0"),
    (
      {"batch_argnums": 2},
      ValueError,
      "`batch_argnums` must name positional arguments of the call, got 2 for 2",
    ),
    ({"argnums": (0, 1)}, ValueError, "must be given a batch beside"),
    ({"argnums": 0.5}, TypeError, "`argnums` must be an integer"),
    (
      {"argnums": (0, -2)},
      ValueError,
      "`argnums` must name each argument once",
    ),
  ],
  ids=range(14),
)
def test_errors_name_the_rule_what_came_and_the_remedy(options, error, message):
  with pytest.raises(error, match=message):
    call(**options)


@pytest.mark.parametrize(
  ("function", "got"),
  [
    (loss_fn, "got function"),
    (jax.value_and_grad(loss_fn), "got function"),
    (1024.0, "got float"),
  ],
  ids=["loss", "jax", "S"],
)
def test_what_scales_no_loss_is_refused(function, got):
  remedy = (
    r"accumulate\(scaled_value_and_grad\(loss_fn, opt_state\).*"
    r"nnx\.scaled_value_and_grad\(loss_fn, optimizer\)\."
  )
  with pytest.raises(
    TypeError, match=f"`value_and_grad` must .* {got}.*{remedy}"
  ):
    ols.accumulate(function, microbatches=2)


def test_argnums_in_the_function_that_differentiates_are_refused():
  value_and_grad = ols.scaled_value_and_grad(
    loss_fn,
    8.0,
    value_and_grad=functools.partial(jax.value_and_grad, argnums=1),
  )
  with pytest.raises(ValueError, match="`argnums` must go to scaled_value_and"):
    ols.accumulate(value_and_grad, microbatches=2)


def test_examples_that_devices_would_have_to_exchange_are_refused():
  mesh = mesh_of(4, "Explicit")
  with jax.set_mesh(mesh):
    batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(ValueError, match="got 8 for 8 examples on 4 devices"):
      call(batch, microbatches=8)


def test_an_object_that_the_loss_changes_is_refused():
  class Box(nnx.Module):
    def __init__(self):
      self.w, self.seen = nnx.Param(jnp.ones(3)), nnx.BatchStat(jnp.zeros(()))

  def fun(box, batch):
    box.seen[...] = jnp.mean(batch)
    return jnp.sum(box.w[...])

  for value_and_grad in (
    ols.accumulate(ols.scaled_value_and_grad(fun, 1.0), microbatches=2),
    ols.scaled_value_and_grad(fun, 1.0),
  ):
    with pytest.raises(ValueError, match="must not change its arguments"):
      value_and_grad(Box(), BATCH)


def test_an_axis_that_is_none_is_refused():
  _, state = make()
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, state), microbatches=2, axis_name="nope"
  )
  message = "`axis_name` must name an axis .* got 'nope', which is not one"
  with pytest.raises(ValueError, match=message):
    value_and_grad(PARAMS, BATCH)
  with pytest.raises(ValueError, match=message):
    jax.jit(value_and_grad)(PARAMS, BATCH)


@pytest.mark.parametrize("drop", [False, True])
def test_outside_of_jit_a_second_call_compiles_nothing(drop):
  """And gives what is compiled as one scan, with a random key too."""
  _, state = make()

  def noisy_loss_fn(params, batch, keys):
    assert isinstance(batch, jax.Array)
    noise = jax.random.normal(keys[0], batch.shape[:1])
    aux = {"count": jnp.int32(len(batch)), "key": keys[0]}
    return loss_fn(params, batch) + jnp.mean(noise) * params["b"], aux

  def call(params, batch, keys):
    return ols.accumulate(
      ols.scaled_value_and_grad(noisy_loss_fn, state, has_aux=True),
      microbatches=4,
      drop=drop,
    )(params, batch, keys)

  batch = bad_batch(1)
  keys = jax.random.split(jax.random.key(0), 4)
  call(PARAMS, batch, keys)
  names = []
  with support.listening_to_compilations(names):
    eager = call(PARAMS, batch, keys)
  assert not names
  (loss, aux), grads, overflow = eager
  (jit_loss, jit_aux), jit_grads, jit_overflow = jax.jit(
    lambda opt_state: ols.accumulate(
      ols.scaled_value_and_grad(noisy_loss_fn, opt_state, has_aux=True),
      microbatches=4,
      drop=drop,
    )(PARAMS, batch, keys)
  )(state)
  support.assert_same_bits((aux, overflow.flags), (jit_aux, jit_overflow.flags))
  for x, y in zip(
    jax.tree.leaves((loss, grads, overflow.amax)),
    jax.tree.leaves((jit_loss, jit_grads, jit_overflow.amax)),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_state_that_jit_has_closed_over_is_refused():
  _, state = make()
  run = jax.jit(
    ols.accumulate(ols.scaled_value_and_grad(loss_fn, state), microbatches=2)
  )
  with pytest.raises(ValueError, match="`opt_state` must be an argument"):
    run(PARAMS, BATCH)


def test_a_state_without_a_scale_is_refused():
  with pytest.raises(ValueError, match="must hold the state of `loss_scaling`"):
    ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, optax.sgd(1.0).init(PARAMS)),
      microbatches=2,
    )
