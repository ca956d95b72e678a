"""Devices that share an S stay in step: agreement, and both ways to average."""

import functools
import itertools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import devices as _devices
from optax_lossscale._step import findings
from tests import support

SATURATED = ols.saturated(jnp.float16)

# How a step is mapped, and over which axes of the mesh.
MAPPINGS = {
  "shard_map": (True, {"data": 8}),
  "shard_map over two axes": (True, {"data": 4, "model": 2}),
  "shard_map unchecked": (False, {"data": 8}),
  "shard_map over two axes, unchecked": (False, {"data": 4, "model": 2}),
  "pmap": (None, {"data": 8}),
}

# Before or after the gradients are unscaled.
ORDERS = ("unscale, then average", "average, then unscale")

INNERS = {
  "adam": optax.adam(0.5),
  # Of powers of two, so that no rounding hides behind another.
  "momentum": optax.sgd(0.5, momentum=0.5),
}

PARAMS = {
  "half": jnp.array([1.0, -2.0, 0.5], jnp.float16),
  "single": jnp.array([[1.0, -2.0], [0.25, 4.0]], jnp.float32),
}


def per_device(function, axes, check_vma=True, replicated=0):
  """Returns `function` on every device, its results stacked by device.

  Args:
    function: takes and returns pytrees; the arguments that are not replicated
      come in with a leading axis of devices.
    axes: the names and sizes of the mesh's axes.
    check_vma: as in `shard_map`; None for `pmap`.
    replicated: how many arguments, at the front, all devices share.
  """
  if check_vma is None:
    return jax.pmap(
      lambda *args: function(*args),
      axis_name=next(iter(axes)),
      in_axes=(*[None] * replicated, 0),
    )

  def local(*args):
    shared, own = args[:replicated], args[replicated:]
    own = jax.tree.map(lambda x: x[0], own)
    return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*shared, *own))

  names = tuple(axes)
  return jax.jit(
    jax.shard_map(
      local,
      mesh=support.make_mesh(**axes),
      in_specs=(*[jax.P()] * replicated, jax.P(names)),
      out_specs=jax.P(names),
      check_vma=check_vma,
    )
  )


def averaging(order, names, inner, rule, **kwargs):
  """Returns `loss_scaling` that averages over devices in this order."""
  if order == "average, then unscale":
    # Nothing said of the flag: what is averaged is agreed on as well.
    return ols.loss_scaling(inner, rule, average_scaled=names, **kwargs)
  inner = optax.chain(ols.pmean_gradients(names), inner)
  return ols.loss_scaling(inner, rule, axis_name=names, **kwargs)


@functools.cache
def trainer(mapping, order, inner):
  """Returns what three steps leave on each device, given its gradients."""
  check_vma, axes = MAPPINGS[mapping]
  rule = ols.DynamicLossScale(8.0)
  tx = averaging(order, tuple(axes), INNERS[inner], rule, check=SATURATED)

  def train(every_gradients):
    def step(carry, scaled_grads):
      params, state = carry
      updates, state = tx.update(scaled_grads, state, params)
      carry = optax.apply_updates(params, updates), state
      return carry, carry

    carry = (PARAMS, tx.init(PARAMS))
    return lax.scan(step, carry, every_gradients)[1]

  return per_device(train, axes, check_vma)


def gradients_of_three_steps(seed=0):
  """Returns scaled gradients by device and step, small numbers."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.integers(-64, 64, (8, 3, *x.shape)).astype(x.dtype)
    for name, x in PARAMS.items()
  }


def bits(x):
  x = np.ascontiguousarray(x)
  return x.view(np.uint8).reshape(*x.shape[:2], -1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
  "mapping", support.slow_but(["shard_map", "pmap"], MAPPINGS)
)
def test_guarantee_10_one_devices_overflow_skips_the_step_on_all(
  mapping, order
):
  train = trainer(mapping, order, "adam")
  places = [("half", (1,)), ("single", (1, 0))]
  values = (np.nan, np.inf, -np.inf, 65504.0, -65504.0)
  # Each value in each place twice, and any device has some.
  cases = 2 * list(itertools.product(places, values))
  for i, ((name, place), value) in enumerate(cases):
    device = i % 8
    scaled_grads = gradients_of_three_steps()
    scaled_grads[name][(device, 1, *place)] = value
    params, state = jax.tree.map(np.asarray, train(scaled_grads))
    for leaf in jax.tree.leaves((params, state)):
      assert np.all(bits(leaf) == bits(leaf)[:1])
    assert state.skipped[0].tolist() == [False, True, False]
    assert state.applied_steps[0].tolist() == [1, 1, 2]
    assert state.loss_scale_state.loss_scale[0].tolist() == [8.0, 4.0, 4.0]
    assert state.nan[0, 1] == np.isnan(value)
    np.testing.assert_array_equal(state.amax[0, 1], abs(value))
    for leaf in jax.tree.leaves((params, state.inner_state)):
      first, skipped, last = bits(leaf)[0]
      assert np.all(first == skipped)
      assert np.any(skipped != last)


def test_nan_on_one_device_outlives_inf_on_all_others():
  def agree(amax):
    overflow = amax > 1
    finding = findings.Finding(overflow, amax, ~overflow, amax)
    return findings.agree(finding, ("data",))

  for device in range(8):
    amax = jnp.full(8, jnp.inf).at[device].set(jnp.nan)
    found = per_device(agree, {"data": 8})(amax)
    assert np.all(found.overflow)
    assert np.all(np.isnan(found.amax))
    assert np.all(np.isnan(found.range_used))
    assert np.all(found.dropped)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_agreement_leaves_each_device_its_own_gradients(mapping):
  check_vma, axes = MAPPINGS[mapping]
  tx = ols.loss_scaling(
    optax.identity(), ols.FixedLossScale(8.0), axis_name=list(axes)
  )

  def update(scaled_grads):
    updates, state = tx.update(scaled_grads, tx.init(scaled_grads))
    return updates, state.amax

  scaled_grads = 8 * jnp.arange(8.0)
  updates, amax = per_device(update, axes, check_vma)(scaled_grads)
  assert updates.tolist() == list(range(8))
  assert amax.tolist() == [56.0] * 8


def regression_loss(params, batch):
  return jnp.mean((batch @ params) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_both_orders_make_the_step_of_one_device_in_float64(mapping, order):
  check_vma, axes = MAPPINGS[mapping]
  names = tuple(axes)
  tx = averaging(order, names, optax.sgd(0.5), ols.FixedLossScale(8.0))

  def step(params, state, batch):
    local = ols.make_varying(params, names)
    grad = ols.scaled_value_and_grad(regression_loss, state)
    return tx.update(grad(local, batch)[1], state, params)[0]

  # Few bits in all of them: float16 holds each product and each sum.
  params = jnp.array([1.0, -2.0, 3.0], jnp.float16)
  batch = np.random.default_rng(0).integers(-2, 3, (8, 2, 3)) / 2
  updates = per_device(step, axes, check_vma, replicated=2)(
    params, tx.init(params), jnp.asarray(batch, jnp.float16)
  )
  rows = batch.reshape(16, 3)
  expected = -0.5 * 2 / 16 * rows.T @ (rows @ np.asarray(params, np.float64))
  assert np.any(expected)
  assert updates.tolist() == [expected.tolist()] * 8


@pytest.mark.slow
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_both_orders_are_equal_when_nothing_overflows(mapping):
  scaled_grads = gradients_of_three_steps(seed=1)
  before, after = (
    trainer(mapping, order, "momentum")(scaled_grads) for order in ORDERS
  )
  assert before[1].applied_steps[0].tolist() == [1, 2, 3]
  for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True):
    assert np.all(bits(x) == bits(y))


@pytest.mark.slow
@pytest.mark.parametrize("devices", range(2, 9))
def test_an_average_of_the_largest_values_is_finite(devices):
  tx = ols.loss_scaling(
    optax.identity(), ols.FixedLossScale(1.0), average_scaled="data"
  )
  update = per_device(lambda x: tx.update(x, tx.init(x)), {"data": devices})
  rng = np.random.default_rng(devices)
  largest = np.full((devices, 1), 65504.0)
  near = rng.choice(np.arange(65504 - 32 * 8, 65505, 32), (devices, 500))
  values = np.concatenate([largest, -largest, near, -near], axis=1)
  updates, state = update(jnp.asarray(values, jnp.float16))
  assert not np.any(state.overflow)
  # The sum is rounded once for each device, by at most half of 32.
  expected = np.broadcast_to(values.mean(0), updates.shape)
  np.testing.assert_allclose(updates, expected, atol=16 * devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_what_one_device_adds_to_an_average_is_rounded_once(devices):
  tx = ols.loss_scaling(
    optax.identity(), ols.FixedLossScale(1.0), average_scaled="data"
  )
  update = per_device(lambda x: tx.update(x, tx.init(x))[0], {"data": devices})
  values = np.arange(1024.0, 2048.0, dtype=np.float16)
  own = jnp.zeros((devices, values.size), jnp.float16).at[1].set(values)
  expected = (values.astype(np.float64) / devices).astype(np.float16)
  np.testing.assert_array_equal(update(own)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32]
)
def test_an_average_of_the_largest_values_is_finite_in_every_dtype(dtype):
  tx = ols.loss_scaling(
    optax.identity(), ols.FixedLossScale(1.0), average_scaled="data"
  )
  update = per_device(lambda x: tx.update(x, tx.init(x)), {"data": 7})
  largest = jnp.full((7, 1), jnp.finfo(dtype).max, dtype)
  updates, state = update(largest)
  assert not np.any(state.overflow)
  np.testing.assert_allclose(updates, np.float32(largest), rtol=2e-2)


@pytest.mark.parametrize("order", ORDERS)
def test_without_skip_the_average_of_an_overflow_is_no_finite_number(order):
  rule = ols.FixedLossScale(1.0, skip=False)
  tx = averaging(order, "data", optax.identity(), rule)
  update = per_device(lambda x: tx.update(x, tx.init(x)), {"data": 8})
  scaled_grads = jnp.ones((8, 3)).at[5, 1].set(jnp.inf).at[2, 2].set(jnp.nan)
  updates, state = update(scaled_grads)
  assert np.all(state.overflow)
  expected = np.broadcast_to([1.0, np.inf, np.nan], (8, 3))
  np.testing.assert_array_equal(updates, expected)


@pytest.mark.parametrize(
  ("order", "dtype", "on_the_wire"),
  [
    (ORDERS[0], jnp.float16, "f32"),
    (ORDERS[1], jnp.float16, "f16"),
    # A sum needs more bits than 8 have.
    (ORDERS[1], jnp.float8_e4m3fn, "f32"),
  ],
)
def test_gradients_travel_in_the_dtype_of_the_order(order, dtype, on_the_wire):
  tx = averaging(order, "data", optax.identity(), ols.FixedLossScale(1.0))
  update = per_device(lambda x: tx.update(x, tx.init(x))[0], {"data": 8})
  scaled_grads = jnp.tile(jnp.arange(8.0)[:, None], 5).astype(dtype)
  lines = support.between_devices(update.lower(scaled_grads).compile())
  shapes = sorted(line.split(" = ")[1].split("{")[0] for line in lines)
  # The flag and amax, twice: of all, and of what has a known dtype.
  assert shapes == sorted([f"{on_the_wire}[5]", "u32[3]"])
  assert update(scaled_grads).tolist() == [[3.5] * 5] * 8


@pytest.mark.parametrize("order", ORDERS)
def test_a_complex_gradient_is_averaged(order):
  tx = averaging(order, "data", optax.identity(), ols.FixedLossScale(2.0))
  update = per_device(lambda x: tx.update(x, tx.init(x))[0], {"data": 8})
  scaled_grads = jnp.arange(8) * (4 - 8j)
  assert update(scaled_grads).tolist() == [7 - 14j] * 8


@pytest.mark.parametrize("order", ORDERS)
def test_guarantee_12_what_is_no_gradient_is_not_averaged(order):
  tx = averaging(order, "data", optax.identity(), ols.FixedLossScale(8.0))
  others = {
    "float0": np.zeros(2, jax.dtypes.float0),
    "integer": jnp.array([3, 4]),
    "masked": optax.MaskedNode(),
    "none": None,
  }

  def update(own):
    updates, _ = tx.update({**others, **own}, tx.init(own["gradient"]))
    assert updates.pop("float0").dtype == jax.dtypes.float0
    updates["key"] = jax.random.key_data(updates["key"])
    return updates

  keys = jax.random.split(jax.random.key(0), 8)
  updates = per_device(update, {"data": 8})(
    {"gradient": 8 * jnp.arange(8.0), "key": keys}
  )
  assert updates["gradient"].tolist() == [3.5] * 8
  assert updates["integer"].tolist() == [[3, 4]] * 8
  assert updates["none"] is None
  assert updates["masked"] == optax.MaskedNode()
  np.testing.assert_array_equal(updates["key"], jax.random.key_data(keys))


def test_leaves_that_go_around_the_wrapper_are_not_averaged():
  tx = ols.loss_scaling(
    optax.identity(), ols.FixedLossScale(8.0), average_scaled="data"
  )
  collection = "_overwrite_with_gradient"

  def update(x):
    tree = {"w": x, collection: x}
    return tx.update(tree, tx.init(tree), tree)[0]

  updates = per_device(update, {"data": 8})(8 * jnp.arange(8.0))
  assert updates["w"].tolist() == [3.5] * 8
  assert updates[collection].tolist() == (8 * jnp.arange(8.0)).tolist()


@pytest.mark.parametrize(
  "transform",
  support.slow_but([jax.jit], [jax.jit, lambda function: function]),
)
@pytest.mark.parametrize("order", ORDERS)
def test_guarantee_10_gradients_are_not_reduced_twice(order, transform):
  tx = averaging(order, "data", optax.sgd(1.0), ols.FixedLossScale(8.0))

  def step(params, state, batch):
    scaled_grads = ols.scaled_value_and_grad(
      lambda params, batch: regression_loss(params["w"], batch), state
    )(params, batch)[1]
    return tx.update(scaled_grads, state, params)[0]

  params = {"w": jnp.ones(3)}
  step = jax.shard_map(
    step,
    mesh=support.make_mesh(),
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P(),
  )
  what = "pmean_gradients" if order == ORDERS[0] else "average_scaled"
  with pytest.raises(
    ValueError,
    match=rf"`{what}` must be given.*got one at \['w'\] that does not along "
    r"'data'.*make_varying\(params, 'data'\).*pmean of the loss",
  ):
    transform(step)(params, tx.init(params), jnp.ones((16, 3)))


def test_a_gradient_reduced_over_one_axis_of_two_is_named():
  names = ("data", "model")
  tx = averaging(ORDERS[0], names, optax.sgd(1.0), ols.FixedLossScale(8.0))

  def update(gradient):
    return tx.update(lax.psum(gradient, "model"), tx.init(gradient))

  with pytest.raises(ValueError, match="at their root .* along 'model': JAX"):
    per_device(update, {"data": 4, "model": 2})(jnp.ones(8))


def test_averages_over_different_axes_than_the_agreement():
  tx = ols.loss_scaling(
    optax.identity(),
    ols.FixedLossScale(8.0),
    axis_name="model",
    average_scaled="data",
  )
  update = per_device(
    lambda x: tx.update(x, tx.init(x)), {"data": 4, "model": 2}
  )
  updates, state = update(8 * jnp.arange(8.0))
  assert updates.tolist() == [3.0, 4.0] * 4
  assert state.amax.tolist() == [56.0] * 8
  for device in range(8):
    _, state = update(jnp.ones(8).at[device].set(jnp.nan))
    assert np.all(state.skipped)


@pytest.mark.parametrize("what", ["gradients", "the caller's flag"])
@pytest.mark.parametrize(
  ("given", "missing", "remedy"),
  [
    (None, r"\('data', 'model'\)", r"\('data', 'model'\)"),
    ("data", "'model'", r"\('data', 'model'\)"),
    (["model"], "'data'", r"\('model', 'data'\)"),
  ],
)
def test_guarantee_10_a_missing_axis_name_is_refused(
  given, missing, remedy, what
):
  tx = ols.loss_scaling(
    optax.sgd(1.0), ols.DynamicLossScale(8.0), axis_name=given
  )

  def update(state, x):
    if what == "gradients":
      return tx.update(x, state)
    return tx.update(jnp.ones(()), state, overflow=x > 0)

  with pytest.raises(
    ValueError, match=f"flag that varies along {missing} .*axis_name={remedy}"
  ):
    per_device(update, {"data": 4, "model": 2}, replicated=1)(
      tx.init(jnp.ones(())), jnp.ones(8)
    )


@pytest.mark.parametrize("check_vma", [False, None])
def test_a_missing_axis_name_is_asked_for_if_jax_does_not_track(check_vma):
  """Under () each device decides for itself: it may have its own model."""
  text = (
    r"`axis_name` must say .* along 'data' here, .*, axis_name='data'\); or"
  )

  def scales(axis_name):
    rule = ols.DynamicLossScale(8.0)
    tx = ols.loss_scaling(optax.sgd(1.0), rule, axis_name=axis_name)

    def update(state, x):
      return tx.update(x, state)[1].loss_scale_state.loss_scale

    update = per_device(update, {"data": 8}, check_vma, replicated=1)
    scaled_grads = jnp.ones(8).at[3].set(jnp.inf)
    return update(tx.init(jnp.ones(2)), scaled_grads).tolist()

  alone = [8.0, 8.0, 8.0, 4.0, 8.0, 8.0, 8.0, 8.0]
  with pytest.warns(ols.WiringWarning, match=text) as told:
    assert scales(None) == alone
  assert len(told) == 1
  assert scales(()) == alone
  assert scales("data") == [4.0] * 8


def by_hand(axis):
  """Averages as `pmean_gradients` does, in a transformation of the user's."""
  return optax.stateless(lambda updates, _: lax.pmean(updates, axis))


def mapped_update(inner, axis_name, mapping):
  """Returns updates of two devices, of which the first has a NaN."""
  rule = ols.DynamicLossScale(8.0)
  tx = ols.loss_scaling(inner, rule, axis_name=axis_name)
  state = jax.vmap(tx.init)(jnp.ones(2))
  update = mapping(lambda x, state: tx.update(x, state)[0])
  return update(jnp.array([jnp.nan, 8.0]), state)


def vmapped(function):
  return jax.vmap(function, axis_name="data")


IN_A_CALL = {
  "vmap": (vmapped, ols.pmean_gradients),
  "vmap of jit": (lambda f: vmapped(jax.jit(f)), ols.pmean_gradients),
  "jit of vmap": (lambda f: jax.jit(vmapped(f)), ols.pmean_gradients),
  "pmap": (
    lambda f: jax.pmap(f, axis_name="data", devices=jax.devices()[:2]),
    ols.pmean_gradients,
  ),
  "by hand": (lambda f: jax.jit(vmapped(f)), by_hand),
}


@pytest.mark.parametrize("name", IN_A_CALL)
def test_an_average_over_an_axis_that_the_wrapper_does_not_know_is_told(name):
  mapping, mean = IN_A_CALL[name]
  inner = optax.chain(mean("data"), optax.sgd(1.0))
  text = "`axis_name` must (name every|say over which) .* axis_name='data'"
  with pytest.warns(ols.WiringWarning, match=text) as told:
    updates = mapped_update(inner, None, mapping)
  assert len(told) == 1
  assert np.isnan(updates[1])
  assert mapped_update(inner, "data", mapping).tolist() == [-0.0, -0.0]


def test_only_an_axis_that_is_not_named_is_told():
  inner = optax.chain(by_hand(("data", "model")), optax.sgd(1.0))
  text = r"a sum over 'model', which .* axis_name=\('data', 'model'\)"

  def mapping(f):
    by_model = jax.vmap(vmapped(f), in_axes=(0, None), axis_name="model")
    return jax.jit(lambda x, state: by_model(x[None], state))

  with pytest.warns(ols.WiringWarning, match=text):
    mapped_update(inner, "data", mapping)


def test_an_average_inside_a_loop_or_a_branch_is_told():
  def mean_of_the_last(updates, _):
    return lax.cond(
      updates > 0, lambda x: lax.pmean(x, "data"), lambda x: x, updates
    )

  inner = optax.chain(optax.stateless(mean_of_the_last), optax.sgd(1.0))
  with pytest.warns(ols.WiringWarning, match="over 'data'"):
    mapped_update(inner, None, lambda f: jax.jit(vmapped(f)))


def test_nothing_is_told_where_devices_are_known_to_agree():
  # The caller says that the gradients are the same everywhere.
  for mean in (by_hand, ols.pmean_gradients):
    inner = optax.chain(mean("data"), optax.sgd(1.0))
    for mapping in (vmapped, lambda f: jax.jit(vmapped(f))):
      mapped_update(inner, (), mapping)
  # Nothing is ever skipped.
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0, skip=False))
  update = jax.jit(vmapped(lambda x: tx.update(x, tx.init(x))[0]))
  assert update(jnp.array([8.0, 24.0])).tolist() == [-2.0, -2.0]

  # JAX knows that the gradients are the same: each device updates its slice.
  def slice_and_gather(updates, _):
    own = updates * (jnp.arange(8) == lax.axis_index("data"))
    return lax.psum(own, "data")

  inner = optax.chain(optax.stateless(slice_and_gather), optax.sgd(1.0))
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(8.0))
  update = jax.shard_map(
    lambda x: tx.update(x, tx.init(x))[0],
    mesh=support.make_mesh(data=8),
    in_specs=jax.P(),
    out_specs=jax.P(),
  )
  assert jax.jit(update)(jnp.full(8, 8.0)).tolist() == [-1.0] * 8


def test_an_optimizer_with_devices_of_its_own_is_not_told():
  mesh = support.make_mesh(data=8)
  mean = jax.shard_map(
    lambda x: lax.pmean(x, "data"),
    mesh=mesh,
    in_specs=jax.P("data"),
    out_specs=jax.P(),
  )
  inner = optax.chain(optax.stateless(lambda x, _: mean(x)), optax.sgd(1.0))
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(8.0))
  updates = jax.jit(tx.update)(8 * jnp.arange(8.0), tx.init(jnp.ones(8)))[0]
  assert updates.tolist() == [-3.5]


@pytest.mark.parametrize("mapping", [vmapped, lambda f: jax.jit(vmapped(f))])
def test_without_a_rule_only_a_requested_skip_divides_devices(mapping):
  inner = optax.chain(ols.pmean_gradients("data"), optax.sgd(1.0))

  def update(**options):
    tx = ols.loss_scaling(inner, None)
    state = jax.vmap(tx.init)(jnp.ones(2))
    step = mapping(lambda x, state: tx.update(x, state, **options)[0])
    return step(jnp.array([8.0, 8.0]), state)

  assert update().tolist() == [-8.0, -8.0]
  with pytest.warns(ols.WiringWarning, match="over 'data'"):
    update(skip=jnp.array(False))


def test_no_axis_is_asked_for_where_devices_cannot_meet_or_are_tracked():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(8.0))
  state, scaled_grads = tx.init(jnp.ones(())), jnp.ones(8)
  # An axis without a name is none to reduce over: one model a device.
  jax.pmap(lambda x: tx.update(x, state)[0])(scaled_grads)

  def update(x):
    return tx.update(lax.pmean(x[0], "data"), state)[0]

  tracked = jax.shard_map(
    update,
    mesh=support.make_mesh(data=8),
    in_specs=jax.P("data"),
    out_specs=jax.P(),
  )
  jaxpr = jax.make_jaxpr(tracked)(scaled_grads)
  assert "axis_index" not in str(jaxpr)
  averaged = ols.loss_scaling(
    optax.sgd(1.0), ols.DynamicLossScale(8.0), average_scaled="data"
  )
  jax.pmap(lambda x: averaged.update(x, state)[0], axis_name="data")(
    scaled_grads
  )


def test_one_model_a_device_decides_for_itself():
  tx = ols.loss_scaling(optax.adam(0.5), ols.DynamicLossScale(8.0))

  def train(every_gradients):
    state = ols.make_varying(tx.init(jnp.ones(())), "data")

    def step(state, gradient):
      state = ols.make_varying(tx.update(gradient, state)[1], "data")
      return state, ols.get_loss_scale(state)

    return lax.scan(step, state, every_gradients)[1]

  scaled_grads = jnp.ones((8, 2)).at[3, 0].set(jnp.inf).at[6, :].set(jnp.nan)
  scales = per_device(train, {"data": 8})(scaled_grads)
  expected = [[8.0, 8.0]] * 8
  expected[3], expected[6] = [4.0, 4.0], [4.0, 2.0]
  assert scales.tolist() == expected


def test_gradients_of_varying_parameters_are_each_devices_own():
  def gradients(params, batch):
    local = ols.make_varying(params, "data")
    return jax.grad(lambda p, x: jnp.sum(p["used"] * x))(local, batch)

  params = {"used": jnp.ones(()), "unused": jnp.ones(())}
  own = per_device(gradients, {"data": 8}, replicated=1)(
    params, jnp.arange(8.0)
  )
  assert own["used"].tolist() == list(range(8))
  assert own["unused"].tolist() == [0.0] * 8


@pytest.mark.parametrize("check_vma", [True, False, None])
def test_any_leaf_is_made_to_vary(check_vma):
  axes = {"data": 8} if check_vma is None else {"data": 4, "model": 2}
  is_tracked = frozenset(axes if check_vma else ())

  def make_varying(own):
    tree = {
      "float": jnp.ones(2, jnp.float16),
      "function": jax.nn.relu,
      "integer": jnp.array([3]),
      "key": jax.random.key(7),
      "none": None,
      "number": 2.0,
      "own": own,
      "part": lax.psum(own, "data"),
    }
    varying = ols.make_varying(tree, list(axes))
    assert varying.pop("function") is jax.nn.relu
    assert varying["none"] is None
    for leaf in jax.tree.leaves(varying):
      assert _devices.varying_axes(leaf) == is_tracked
    return {**varying, "key": jax.random.key_data(varying["key"])}

  varying = per_device(make_varying, axes, check_vma)(jnp.arange(8.0))
  assert varying["own"].tolist() == list(range(8))
  assert varying["integer"].tolist() == [[3]] * 8
  assert varying["number"].tolist() == [2.0] * 8
  key = jax.random.key_data(jax.random.key(7))
  np.testing.assert_array_equal(varying["key"], [key] * 8)


def test_what_is_made_to_vary_costs_nothing():
  def make_varying(params, own):
    return ols.make_varying(params, "data") * own

  step = per_device(make_varying, {"data": 8}, replicated=1)
  lowered = step.lower(jnp.ones(3), jnp.ones((8, 3)))
  assert support.between_devices(lowered.compile()) == []


@pytest.mark.parametrize("got", [None, (), ["data", None], {"data"}])
def test_pmean_gradients_refuses_what_names_no_axis(got):
  with pytest.raises(TypeError, match="`axis_name` must name a mapped axis"):
    ols.pmean_gradients(got)


@pytest.mark.parametrize("argument", ["axis_name", "average_scaled"])
def test_the_wrapper_refuses_what_names_no_axis(argument):
  with pytest.raises(TypeError, match=f"`{argument}` must name .* got {{'x'}}"):
    ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), **{argument: {"x"}})


@pytest.mark.slow
@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("order", ORDERS)
def test_averages_promote_nothing_implicitly(order):
  tx = averaging(order, "data", optax.identity(), ols.FixedLossScale(8.0))
  update = per_device(lambda x: tx.update(x, tx.init(x))[0], {"data": 8})
  scaled_grads = {
    dtype: jnp.ones((8, 2), dtype)
    for dtype in ("float16", "bfloat16", "float32", "complex64")
  }
  for dtype, updates in update(scaled_grads).items():
    assert updates.tolist() == [[0.125] * 2] * 8, dtype


def update_alone(gradient):
  rule = ols.FixedLossScale(8.0)
  tx = ols.loss_scaling(optax.sgd(1.0), rule, axis_name="data")
  return tx.update(gradient, tx.init(gradient))


@pytest.mark.parametrize(
  "function",
  [
    lambda x: ols.make_varying(x, "data"),
    lambda x: ols.pmean_gradients("data").update(x, ()),
    update_alone,
  ],
  ids=["make_varying", "pmean_gradients", "loss_scaling"],
)
def test_an_axis_that_is_not_there_is_named(function):
  with pytest.raises(ValueError, match="must name an axis of .* got 'data'"):
    jax.jit(function)(jnp.ones(3))
