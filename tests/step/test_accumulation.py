"""Several micro-batches to a step: their mean, their overflows, their S."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}
# Exact in binary, so that sums in any order are the same.
BATCH = np.arange(24, dtype=np.float32).reshape(8, 3) / 8 - 1

whether_to_drop = pytest.mark.parametrize("drop", [False, True])


def loss_fn(params, batch):
  return jnp.mean(batch @ params["w"] + params["b"] * batch[:, 0])


def make(**options):
  tx = ols.loss_scaling(optax.sgd(1.0), support.Stub(8.0), **options)
  return tx, tx.init(PARAMS)


def accumulating(fun=loss_fn, scale=8.0, k=4, argnums=0, **options):
  """Returns `accumulate` of the gradients of a function."""
  value_and_grad = ols.scaled_value_and_grad(fun, scale, argnums)
  return ols.accumulate(value_and_grad, microbatches=k, **options)


def bad_batch(*rows, value=np.inf):
  """Returns a batch; row i goes to micro-batch i modulo their number."""
  batch = BATCH.copy()
  batch[list(rows)] = value
  return batch


def exact_gradients(batch):
  """Returns the gradients of the loss in float64."""
  batch = np.asarray(batch, np.float64)
  return {"w": batch.mean(0), "b": batch[:, 0].mean()}


def assert_close(got, expected):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), got, expected
  )


@functools.cache
def step(drop=False):
  """Returns a compiled step of SGD."""
  tx, _ = make()

  @jax.jit
  def run(params, state, batch):
    loss, grads, overflow = accumulating(scale=state, drop=drop)(params, batch)
    updates, state = tx.update(grads, state, params, overflow=overflow)
    return (loss, grads, overflow), updates, state

  return run


# The mean.


@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_mean_over_micro_batches_is_that_of_the_batch(k):
  batch = np.concatenate([BATCH, BATCH[:4] / 2])
  loss, grads, overflow = accumulating(k=k)(PARAMS, batch)
  assert_close(loss, loss_fn(PARAMS, batch))
  assert_close(grads, {x: 8 * y for x, y in exact_gradients(batch).items()})
  np.testing.assert_array_equal(overflow.flags, [False] * k)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize(
  ("drop", "large", "expected"),
  [(False, [0], 15001.5), (True, [0], 2.0), (True, [0, 1, 2, 3], 60000.0)],
  ids=["all", "some", "all, as none is left"],
)
def test_the_loss_is_the_float32_mean_over_the_micro_batches_that_count(
  drop, large, expected
):
  # 60000 fits float16, and 8 times as much does not.
  batch = np.full(4, 2.0, np.float16)
  batch[large] = 60000.0
  run = accumulating(lambda params, x: params * x[0], drop=drop)
  loss, _, overflow = run(jnp.float16(1.0), batch)
  assert np.flatnonzero(overflow.flags).tolist() == large
  assert (loss.dtype, loss) == (jnp.float32, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@whether_to_drop
def test_the_sum_overflows_only_if_a_summand_does(drop, dtype):
  largest = jnp.finfo(dtype).max
  # Seven times a seventh is rounded up.
  run = accumulating(lambda p, x: jnp.sum(p * x[0]), 1.0, k=7, drop=drop)
  _, grads, overflow = run(jnp.ones(2, dtype), jnp.full((7, 2), largest))
  assert not overflow
  assert grads.dtype == jnp.float32
  assert_close(grads, np.full(2, largest, np.float32))


def test_float64_and_complex_gradients_keep_their_precision():
  def fun(params, x):
    imaginary = jnp.real(params["c"] * 1j)
    return (imaginary + params["d"]) * x[0]

  with jax.enable_x64(True):
    params = {"c": jnp.complex64(1 + 1j), "d": jnp.float64(1.0)}
    batch = jnp.array([1 + 3 * 2.0**-40, 1.0, 1.0])
    loss, grads, _ = accumulating(fun, 4.0, k=3)(params, batch)
    assert loss.dtype == grads["d"].dtype == jnp.float64
    np.testing.assert_allclose(grads["d"], 4 * (1 + 2.0**-40), rtol=1e-15)
    assert grads["c"].dtype == jnp.complex64
    np.testing.assert_allclose(grads["c"], 4j, rtol=1e-6)


# Overflows.


@pytest.mark.parametrize(("row", "value"), [(0, np.inf), (3, np.nan)])
def test_guarantee_11_an_overflow_voids_its_window_and_no_later_one(row, value):
  _, state = make()
  (_, grads, overflow), updates, after = step()(
    PARAMS, state, bad_batch(row, value=value)
  )
  np.testing.assert_array_equal(overflow.flags, np.arange(4) == row)
  assert not any(np.isfinite(x).any() for x in jax.tree.leaves(grads))
  assert after.skipped and after.nan == np.isnan(value)
  zeros = jax.tree.map(lambda x: jnp.full_like(x, -0.0), PARAMS)
  support.assert_same_bits(updates, zeros)
  assert ols.get_loss_scale(after) == 4.0
  (loss, _, overflow), updates, after = step()(PARAMS, after, BATCH)
  assert not after.skipped and not overflow
  np.testing.assert_array_equal(loss, loss_fn(PARAMS, BATCH))
  for name, expected in exact_gradients(BATCH).items():
    np.testing.assert_array_equal(updates[name], -expected)


@pytest.mark.parametrize(
  ("rows", "value"), [((1,), np.inf), ((1, 5), np.nan), ((0, 1, 2), np.inf)]
)
def test_a_bad_micro_batch_is_dropped_and_the_rest_makes_a_step(rows, value):
  kept = [i for i in range(8) if i % 4 not in {row % 4 for row in rows}]
  _, state = make()
  (loss, _, overflow), updates, after = step(drop=True)(
    PARAMS, state, bad_batch(*rows, value=value)
  )
  assert overflow.valid == len(kept) / 2
  assert_close(loss, loss_fn(PARAMS, BATCH[kept]))
  for name, expected in exact_gradients(BATCH[kept]).items():
    assert_close(updates[name], -expected)
  assert (after.skipped, after.overflow) == (False, True)
  # The rule is told all the same, and NaN is told from inf.
  assert ols.get_loss_scale(after) == 4.0
  assert after.nan == np.isnan(value)
  assert not np.isfinite(after.amax)


def test_the_step_is_skipped_if_all_micro_batches_are_dropped():
  _, state = make()
  batch = bad_batch(*range(8), value=np.nan)
  (loss, grads, overflow), _, after = step(drop=True)(PARAMS, state, batch)
  assert np.all(overflow.flags) and np.isnan(loss)
  # `update` would see it without being told.
  assert not np.isfinite(grads["w"]).any()
  assert after.skipped and after.nan
  assert ols.get_loss_scale(after) == 4.0


def test_a_check_per_leaf_sees_the_paths_that_update_sees():
  seen = []

  def dtype_of(path):
    seen.append(path)
    return "float16" if path == "w" else None

  check = ols.nonfinite(dtype_of)
  tx, state = make(check=check)
  batch = np.full((2, 3), 1e4, np.float32)
  run = accumulating(scale=state, k=2, check=check)
  _, grads, overflow = run(PARAMS, batch)
  assert overflow.flags.tolist() == [True, True]
  assert set(seen) == {"w", "b"}
  tx.update(grads, state, PARAMS, overflow=overflow)
  assert set(seen) == {"w", "b"}


def test_an_overflow_is_a_flag_and_one_of_several_reasons():
  tx, state = make()
  grads = jax.tree.map(lambda x: 8 * jnp.ones_like(x), PARAMS)
  _, _, dropped = accumulating(drop=True)(PARAMS, bad_batch(1))
  assert dropped and jnp.any(dropped) and jnp.where(dropped, 1, 2) == 1
  np.testing.assert_array_equal(dropped, True)
  assert jax.jit(lambda x: x)(dropped).drop
  for reasons, skipped, overflow in (
    ([dropped, False], False, True),
    ([dropped, jnp.ones(3)], True, True),
    ([], False, False),
  ):
    _, after = tx.update(grads, state, PARAMS, overflow=reasons)
    assert (after.skipped, after.overflow) == (skipped, overflow)
  with pytest.raises(TypeError, match="or a list of these, got 'yes'"):
    tx.update(grads, state, PARAMS, overflow=[dropped, "yes"])


# Arguments and results.


@pytest.mark.parametrize("argnums", [[1, 0], -2])
def test_argnums_are_those_of_jax(argnums):
  def fun(rate, params, batch):
    return loss_fn(params, batch) * rate

  run = accumulating(fun, 1.0, argnums=argnums, batch_argnums=2)
  _, grads, _ = run(jnp.float32(0.5), PARAMS, BATCH)
  assert_close(grads, jax.grad(fun, argnums)(jnp.float32(0.5), PARAMS, BATCH))


def test_auxiliary_data_gets_an_axis_for_the_micro_batches():
  def with_aux(params, batch):
    return loss_fn(params, batch), {"first": batch[0, 0]}

  value_and_grad = ols.scaled_value_and_grad(with_aux, 1.0, has_aux=True)
  run = ols.accumulate(value_and_grad, microbatches=4, drop=True)
  (loss, aux), _, _ = run(PARAMS, BATCH)
  assert_close(loss, loss_fn(PARAMS, BATCH))
  np.testing.assert_array_equal(aux["first"], BATCH[:4, 0])


def test_batches_and_keys_are_split_and_other_arguments_are_not():
  def noisy(params, x, batch, keys, *, rate):
    noise = jax.random.normal(keys[0], ())
    return jnp.mean(x) * batch["y"][0] * noise * params * rate

  keys = jax.random.split(jax.random.key(0), 2)
  x, y = jnp.arange(4.0), jnp.array([1.0, 2.0, 3.0, 4.0])
  run = accumulating(noisy, 1.0, k=2, batch_argnums=(2, 3))
  batch = {"y": y, "none": None}
  loss, _, _ = run(jnp.float32(1.0), x, batch, keys, rate=jnp.ones(3)[0])
  noise = [jax.random.normal(key, ()) for key in keys]
  assert_close(loss, (1.5 * 1.0 * noise[0] + 1.5 * 2.0 * noise[1]) / 2)


@jax.custom_vjp
def clip(amax, x):
  """An identity like that of FP8 layers, which clip their gradients.

  The gradient of its first argument is the next value of a history.
  """
  return x


clip.defvjp(
  lambda amax, x: (x, amax),
  lambda amax, g: (amax * 2 + jnp.max(g), jnp.clip(g, -16, 16)),
)


@pytest.mark.parametrize(
  "value_and_grad",
  [jax.value_and_grad, functools.partial(jax.value_and_grad)],
  ids=["jax", "another"],
)
def test_guarantee_12_next_values_pass_from_one_micro_batch_to_the_next(
  value_and_grad,
):
  def fun(params, batch):
    amax = params["_overwrite_with_gradient"]["amax"]
    return jnp.sum(clip(amax, params["w"]) * batch)

  def next_value(amax, batch):
    params = {"w": 1.0, "_overwrite_with_gradient": {"amax": jnp.float32(amax)}}
    scaling = ols.scaled_value_and_grad(fun, 8.0, value_and_grad=value_and_grad)
    run = ols.accumulate(scaling, microbatches=3, drop=True)
    _, grads, overflow = run(params, jnp.array(batch))
    amax = grads["_overwrite_with_gradient"]["amax"]
    return amax, grads["w"], overflow.flags.tolist()

  amax, w, overflow = next_value(1.0, [1.0, 2.0, 0.5])
  # It is neither scaled nor summed.
  assert amax == ((1 * 2 + 8) * 2 + 16) * 2 + 4
  assert (w, overflow) == ((8 + 16 + 4) / 3, [False] * 3)
  # Only the next value shows this overflow, since the gradient is clipped.
  amax, w, overflow = next_value(1.0, [1.0, np.inf, 0.5])
  assert (amax, overflow) == ((1 * 2 + 8) * 2 + 4, [False, True, False])
  assert w == (8 + 4) / 2
  # A value that was not finite before says nothing about this batch.
  assert next_value(np.inf, [1.0, 2.0, 0.5])[2] == [False] * 3


def test_guarantee_12_integers_and_empty_leaves_pass():
  params = {"w": jnp.float32(2.0), "n": jnp.arange(3), "none": None}
  value_and_grad = ols.scaled_value_and_grad(
    lambda p, x: p["w"] * x[0] * p["n"][1], 1.0, allow_int=True
  )
  run = ols.accumulate(value_and_grad, microbatches=2)
  _, grads, _ = run(params, jnp.array([1.0, 3.0]))
  assert (grads["n"].dtype, grads["n"].shape) == (jax.dtypes.float0, (3,))
  assert (grads["w"], grads["none"]) == (2.0, None)


# Compilation.


def test_it_is_traced_once_and_compiled_as_one_scan():
  traced = []

  def counted(params, batch):
    traced.append(batch.shape)
    return loss_fn(params, batch)

  jaxpr = jax.make_jaxpr(
    lambda state: accumulating(counted, state)(PARAMS, BATCH)
  )(make()[1])
  assert traced == [(2, 3)]
  names = [str(x.primitive) for x in support.equations(jaxpr)]
  assert (names.count("scan"), names.count("while")) == (1, 0)


@whether_to_drop
def test_outside_jit_a_second_call_compiles_nothing_and_gives_the_same(drop):
  _, state = make()

  def noisy_loss_fn(params, batch, keys):
    assert isinstance(batch, jax.Array)
    noise = jax.random.normal(keys[0], batch.shape[:1])
    aux = {"count": jnp.int32(len(batch)), "key": keys[0]}
    return loss_fn(params, batch) + jnp.mean(noise) * params["b"], aux

  def call(state):
    value_and_grad = ols.scaled_value_and_grad(
      noisy_loss_fn, state, has_aux=True
    )
    run = ols.accumulate(value_and_grad, microbatches=4, drop=drop)
    return run(PARAMS, bad_batch(1), keys)

  keys = jax.random.split(jax.random.key(0), 4)
  call(state)
  names = []
  with support.listening_to_compilations(names):
    (loss, aux), grads, overflow = call(state)
  assert not names
  (jit_loss, jit_aux), jit_grads, jit_overflow = jax.jit(call)(state)
  support.assert_same_bits((aux, overflow.flags), (jit_aux, jit_overflow.flags))
  assert_close((loss, grads, overflow), (jit_loss, jit_grads, jit_overflow))


# Several devices.


def test_seeds_are_trained_side_by_side_under_vmap():
  batches = np.stack([BATCH, bad_batch(1)])
  run = jax.vmap(accumulating(drop=True), in_axes=(None, 0))
  _, _, overflow = run(PARAMS, batches)
  assert overflow.flags.tolist() == [[False] * 4, [False, True, False, False]]


def on_two_devices(function, in_specs, out_specs):
  mesh = support.make_mesh(data=2)
  specs = {"in_specs": in_specs, "out_specs": out_specs}
  return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


def test_devices_agree_on_what_each_of_them_dropped():
  inner = optax.chain(ols.pmean_gradients("data"), optax.sgd(1.0))
  tx = ols.loss_scaling(inner, support.Stub(8.0), axis_name="data")

  def run(params, state, batch):
    local = ols.make_varying(params, "data")
    _, grads, overflow = accumulating(scale=state, k=2, drop=True)(local, batch)
    return *tx.update(grads, state, params, overflow=overflow), overflow

  in_specs = (jax.P(), jax.P(), support.SPREAD)
  run = on_two_devices(run, in_specs, (jax.P(), jax.P(), support.SPREAD))
  # The second device's second micro-batch has rows 5 and 7.
  updates, after, overflow = run(PARAMS, tx.init(PARAMS), bad_batch(5))
  assert overflow.flags.tolist() == [False, False, False, True]
  assert not after.skipped
  assert ols.get_loss_scale(after) == 4.0
  expected = (BATCH[:4].mean(0) + BATCH[[4, 6]].mean(0)) / 2
  assert_close(updates["w"], -expected)
  # A device that has nothing left skips the step on all.
  _, after, _ = run(PARAMS, tx.init(PARAMS), bad_batch(4, 5))
  assert after.skipped


# Each device has its own part of w. JAX sums the gradient of b over devices.
SPLIT_PARAMS = {"b": jnp.float32(1.0), "w": jnp.ones(2)}
SPLIT_SPECS = {"b": jax.P(), "w": support.SPREAD}


def split_loss_fn(params, x):
  return jnp.mean(x) * (params["w"][0] + params["b"])


def test_parameters_split_over_devices_decide_together():
  value_and_grad = accumulating(split_loss_fn, k=2, drop=True, axis_name="data")
  run = on_two_devices(
    lambda *x: value_and_grad(*x)[1:],
    (SPLIT_SPECS, support.SPREAD),
    (SPLIT_SPECS, jax.P()),
  )
  grads, overflow = run(SPLIT_PARAMS, jnp.array([1.0, jnp.inf, 3.0, 4.0]))
  assert overflow.flags.tolist() == [False, True]
  np.testing.assert_array_equal(grads["w"], [8.0, 24.0])
  assert grads["b"] == 32.0


def shared_loss_fn(params, x):
  return jax.lax.psum(jnp.sum(params["w"]), "data") * jnp.mean(x)


@pytest.mark.parametrize(
  ("fun", "drop", "batch_spec"),
  [
    (split_loss_fn, False, support.SPREAD),
    (split_loss_fn, True, support.SPREAD),
    (shared_loss_fn, True, jax.P()),
  ],
  ids=["gradient", "gradient to drop", "loss to drop"],
)
def test_devices_that_share_a_loss_or_a_gradient_must_not_decide_alone(
  fun, drop, batch_spec
):
  value_and_grad = accumulating(fun, k=2, drop=drop)
  run = on_two_devices(
    lambda *x: value_and_grad(*x)[1], (SPLIT_SPECS, batch_spec), SPLIT_SPECS
  )
  with pytest.raises(ValueError, match="pass axis_name='data' to accumulate"):
    run(SPLIT_PARAMS, jnp.ones(4))


@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_a_sharded_batch_stays_where_it_is(axis_type):
  mesh = support.make_mesh(axis_type, data=4)
  with jax.set_mesh(mesh):
    batch = jax.device_put(BATCH, jax.NamedSharding(mesh, support.SPREAD))
    params, scale = jax.device_put(
      (PARAMS, jnp.float32(8.0)), jax.NamedSharding(mesh, jax.P())
    )
    run = jax.jit(lambda scale, *x: accumulating(scale=scale, k=2)(*x))
    compiled = run.lower(scale, params, batch).compile()
    _, grads, _ = compiled(scale, params, batch)
  assert_close(grads, {x: 8 * y for x, y in exact_gradients(BATCH).items()})
  for line in support.between_devices(compiled):
    assert " all-reduce(" in line


# Errors.


REFUSED = {
  "divisor": ({"k": 3}, "must divide the batch, got 3 for 8 examples in arg"),
  "float": ({"k": 2.0}, "`microbatches` must be an integer"),
  "drop": ({"drop": "yes"}, "`drop` must be True or False"),
  "check": ({"check": ols.nonfinite}, "`check` must be made by"),
  "sizes": (
    {"batch": {"x": BATCH, "y": BATCH[:4]}},
    r"one size, got 8 in argument 1\['x'\] and 4 in argument 1\['y'\]; name",
  ),
  "scalar": (
    {"batch": {"x": BATCH, "rate": 0.5}},
    r"a scalar as argument 1\['rate'\]; name the arguments",
  ),
  "key": (
    {"batch": {"x": BATCH, "key": jax.random.key(0)}},
    r"a scalar as argument 1\['key'\]; of a random key pass",
  ),
  "raw key": (
    {"batch": {"x": BATCH, "z": jax.random.PRNGKey(0)}},
    r"8 in argument 1\['x'\] and 2 in argument 1\['z'\]; of a random key ",
  ),
  "batch_argnums": ({"batch_argnums": 0}, "than `argnums`, got 0"),
  "argnums": ({"argnums": (0, -2)}, "`argnums` must name each argument once"),
  "axis": ({"axis_name": "nope"}, "must name an axis .* got 'nope', which is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_rule_the_value_and_the_remedy(name):
  options, message = REFUSED[name]
  options = {"k": 2, "batch": BATCH} | options
  batch = options.pop("batch")
  with pytest.raises((TypeError, ValueError), match=message):
    accumulating(**options)(PARAMS, batch)


@pytest.mark.parametrize(
  ("function", "got"), [(loss_fn, "function"), (1024.0, "float")]
)
def test_a_function_that_does_not_scale_the_loss_is_refused(function, got):
  remedy = r"accumulate\(scaled_value_and_grad\(loss_fn, opt_state\).*nnx"
  with pytest.raises(
    TypeError, match=f"`value_and_grad` must .* got {got}.*{remedy}"
  ):
    ols.accumulate(function, microbatches=2)


class OnlyW(ols.ScaledValueAndGrad):
  """Differentiates in another way: with respect to a part of a model."""

  def at(self, loss_scale):
    def value_and_grad(params, batch):
      def scaled(w):
        loss = self.fun(params | {"w": w}, batch)
        return loss * loss_scale, loss

      (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params["w"])
      return loss, {"w": grads}

    return value_and_grad


def test_a_gradient_function_of_another_kind_is_accumulated():
  value_and_grad = OnlyW(loss_fn, 8.0)
  model = PARAMS | {"name": "no array"}
  loss, grads = value_and_grad(model, BATCH)
  assert_close(grads, {"w": 8 * exact_gradients(BATCH)["w"]})
  mean, means, _ = ols.accumulate(value_and_grad, microbatches=4)(model, BATCH)
  assert_close((mean, means), (loss, grads))


def test_argnums_in_the_function_that_differentiates_are_refused():
  differentiate = functools.partial(jax.value_and_grad, argnums=1)
  value_and_grad = ols.scaled_value_and_grad(
    loss_fn, 8.0, value_and_grad=differentiate
  )
  with pytest.raises(ValueError, match="`argnums` must go to scaled_value_and"):
    ols.accumulate(value_and_grad, microbatches=2)


def test_examples_that_devices_would_have_to_exchange_are_refused():
  mesh = support.make_mesh("Explicit", data=2)
  with jax.set_mesh(mesh):
    batch = jax.device_put(BATCH, jax.NamedSharding(mesh, support.SPREAD))
    with pytest.raises(
      ValueError, match="each device's share .* 8 for 8 examples on 2 devices"
    ):
      accumulating(k=8)(PARAMS, batch)
