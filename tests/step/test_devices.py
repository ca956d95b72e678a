"""Devices that share an S stay in step, however arrays are spread over them."""

import itertools
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._base import bits as _bits
from tests import support

RULE = support.Stub(8.0)
SATURATED = ols.saturated(jnp.float16)
BAD_VALUES = (np.nan, np.inf, -np.inf, 65504.0, -65504.0)

# Before or after the gradients are unscaled.
ORDERS = ("unscale, then average", "average, then unscale")

# How a step is mapped (`check_vma`, or None for pmap), over which axes of the
# mesh, and in which order it averages.
MAPPINGS = {
  "shard_map": (True, {"data": 8}, ORDERS[0]),
  "shard_map over two axes": (True, {"data": 4, "model": 2}, ORDERS[1]),
  "shard_map unchecked": (False, {"data": 8}, ORDERS[1]),
  "pmap": (None, {"data": 8}, ORDERS[0]),
}

each_mapping = pytest.mark.parametrize("mapping", MAPPINGS)
each_order = pytest.mark.parametrize("order", ORDERS)


def per_device(function, axes, check_vma=True, replicated=0):
  """Returns `function` on every device, its results stacked by device.

  All devices share the first `replicated` arguments. The others have a leading
  axis of devices. `check_vma` is that of `shard_map`, or None for `pmap`.
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


def averaging(order, names, inner=None, rule=None, **kwargs):
  """Returns `loss_scaling` that averages over devices in this order."""
  inner, rule = inner or optax.identity(), rule or ols.FixedLossScale(8.0)
  if order == "average, then unscale":
    # It needs no `axis_name`: devices agree along the axes of the average.
    return ols.loss_scaling(inner, rule, average_scaled=names, **kwargs)
  inner = optax.chain(ols.pmean_gradients(names), inner)
  return ols.loss_scaling(inner, rule, axis_name=names, **kwargs)


def first_update(tx, axes):
  """Returns a function of each device's gradients: its first update."""
  return per_device(lambda x: tx.update(x, tx.init(x)), axes)


# Agreement.


@each_mapping
def test_guarantee_10_one_devices_overflow_skips_the_step_on_all(mapping):
  check_vma, axes, order = MAPPINGS[mapping]
  tx = averaging(order, tuple(axes), optax.adam(0.5), RULE, check=SATURATED)
  params = {"half": jnp.ones(3, jnp.float16), "single": jnp.ones((2, 2))}

  def train(every_gradients):
    def step(carry, scaled_grads):
      params, state = carry
      updates, state = tx.update(scaled_grads, state, params)
      carry = optax.apply_updates(params, updates), state
      return carry, carry

    return lax.scan(step, (params, tx.init(params)), every_gradients)[1]

  train = per_device(train, axes, check_vma)
  rng = np.random.default_rng(0)
  places = [("half", (1,)), ("single", (1, 0))]
  for i, ((name, place), value) in enumerate(
    itertools.product(places, BAD_VALUES)
  ):
    scaled_grads = {  # Of eight devices and three steps.
      name: rng.integers(-64, 64, (8, 3, *x.shape)).astype(x.dtype)
      for name, x in params.items()
    }
    # NaN outlives the inf of another device.
    scaled_grads["half"][7 - i % 8, 1, 0] = np.inf if np.isnan(value) else 1
    scaled_grads[name][(i % 8, 1, *place)] = value
    after, state = jax.tree.map(np.asarray, train(scaled_grads))
    for x in jax.tree.leaves((after, state)):
      assert {x[0].tobytes()} == {copy.tobytes() for copy in x}
    assert state.skipped[0].tolist() == [False, True, False]
    assert state.loss_scale_state.loss_scale[0].tolist() == [16.0, 8.0, 16.0]
    assert state.nan[0, 1] == np.isnan(value)
    np.testing.assert_array_equal(state.amax[0, 1], abs(value))
    for x in jax.tree.leaves((after, state.inner_state)):
      first, skipped, last = x[0]
      assert first.tobytes() == skipped.tobytes() != last.tobytes()


def test_averages_over_different_axes_than_the_agreement():
  tx = averaging(ORDERS[1], "data", axis_name="model")
  update = first_update(tx, {"data": 4, "model": 2})
  updates, state = update(8 * jnp.arange(8.0))
  assert updates.tolist() == [3.0, 4.0] * 4
  assert state.amax.tolist() == [56.0] * 8
  for device in range(8):
    _, state = update(jnp.ones(8).at[device].set(jnp.nan))
    assert np.all(state.skipped)


@pytest.mark.parametrize(
  ("given", "missing", "remedy", "by_flag"),
  [
    (None, r"\('data', 'model'\)", r"\('data', 'model'\)", False),
    ("data", "'model'", r"\('data', 'model'\)", True),
    (["model"], "'data'", r"\('model', 'data'\)", False),
  ],
  ids=["none", "model, for the caller's flag", "data"],
)
def test_guarantee_10_a_missing_axis_name_is_refused(
  given, missing, remedy, by_flag
):
  tx = ols.loss_scaling(optax.sgd(1.0), RULE, axis_name=given)

  def update(state, x):
    if by_flag:
      return tx.update(jnp.ones(()), state, overflow=x > 0)
    return tx.update(x, state)

  with pytest.raises(
    ValueError, match=f"flag that varies along {missing} .*axis_name={remedy}"
  ):
    per_device(update, {"data": 4, "model": 2}, replicated=1)(
      tx.init(jnp.ones(())), jnp.ones(8)
    )


@pytest.mark.parametrize("check_vma", [False, None], ids=["shard_map", "pmap"])
def test_an_axis_name_is_asked_for_where_jax_tracks_nothing(check_vma):
  """With () each device decides for itself: it may have its own model."""
  text = (
    r"`axis_name` must say .* along 'data' here, .*, axis_name='data'\); or"
  )

  def scales(axis_name):
    tx = ols.loss_scaling(optax.sgd(1.0), RULE, axis_name=axis_name)

    def update(state, x):
      return ols.get_loss_scale(tx.update(x, state)[1])

    update = per_device(update, {"data": 8}, check_vma, replicated=1)
    scaled_grads = jnp.ones(8).at[3].set(jnp.inf)
    return update(tx.init(jnp.ones(2)), scaled_grads).tolist()

  alone = [16.0, 16.0, 16.0, 4.0, 16.0, 16.0, 16.0, 16.0]
  with pytest.warns(ols.WiringWarning, match=text) as told:
    assert scales(None) == alone
  assert len(told) == 1
  assert scales(()) == alone
  assert scales("data") == [4.0] * 8


def test_no_axis_name_is_asked_for_where_devices_cannot_differ():
  tx = ols.loss_scaling(optax.sgd(1.0), RULE)
  state, scaled_grads = tx.init(jnp.ones(())), jnp.ones(8)
  # Devices cannot reduce over an axis without a name: each has its own model.
  jax.pmap(lambda x: tx.update(x, state)[0])(scaled_grads)
  # JAX tracks that the mean is the same on all devices.
  tracked = support.on_each_device(
    lambda x: tx.update(lax.pmean(x[0], "data"), state)[0], jax.P()
  )
  assert "axis_index" not in str(jax.make_jaxpr(tracked)(scaled_grads))
  averaged = averaging(ORDERS[1], "data", rule=RULE)
  jax.pmap(lambda x: averaged.update(x, state)[0], axis_name="data")(
    scaled_grads
  )


# Averages.


def regression_loss(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


@each_mapping
def test_averaged_gradients_make_the_step_of_one_device_in_float64(mapping):
  check_vma, axes, order = MAPPINGS[mapping]
  tx = averaging(order, tuple(axes), optax.sgd(0.5))

  def step(params, state, batch):
    local = ols.make_varying(params, tuple(axes))
    grad = ols.scaled_value_and_grad(regression_loss, state)
    return tx.update(grad(local, batch)[1], state, params)[0]

  # So few bits that float16 holds each product and each sum.
  params = {"w": jnp.array([1.0, -2.0, 3.0], jnp.float16)}
  batch = np.random.default_rng(0).integers(-2, 3, (8, 2, 3)) / 2
  updates = per_device(step, axes, check_vma, replicated=2)(
    params, tx.init(params), jnp.asarray(batch, jnp.float16)
  )
  rows = batch.reshape(16, 3)
  residuals = rows @ np.asarray(params["w"], np.float64)
  expected = -0.5 * 2 / 16 * rows.T @ residuals
  assert updates["w"].tolist() == [expected.tolist()] * 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
def test_an_average_of_the_largest_values_is_finite(dtype):
  tx = averaging(ORDERS[1], "data", rule=ols.FixedLossScale(1.0))
  largest = jnp.finfo(dtype).max
  # In float16 a seventh of the largest value is rounded up.
  values = jnp.broadcast_to(jnp.array([largest, -largest], dtype), (7, 2))
  updates, state = first_update(tx, {"data": 7})(values)
  assert not np.any(state.overflow)
  np.testing.assert_allclose(updates, np.float32(values), rtol=2e-2)


def test_each_devices_share_of_an_average_is_rounded_once():
  tx = averaging(ORDERS[1], "data", rule=ols.FixedLossScale(1.0))
  values = np.arange(1024.0, 2048.0, dtype=np.float16)
  own = jnp.zeros((3, values.size), jnp.float16).at[1].set(values)
  updates, _ = first_update(tx, {"data": 3})(own)
  expected = (values.astype(np.float64) / 3).astype(np.float16)
  np.testing.assert_array_equal(updates[0], expected)


def test_without_skip_the_average_of_an_overflow_is_not_finite():
  tx = averaging(ORDERS[1], "data", rule=ols.FixedLossScale(1.0, skip=False))
  scaled_grads = jnp.ones((8, 3)).at[5, 1].set(jnp.inf).at[2, 2].set(jnp.nan)
  updates, state = first_update(tx, {"data": 8})(scaled_grads)
  assert np.all(state.overflow)
  np.testing.assert_array_equal(updates, [[1.0, np.inf, np.nan]] * 8)


@pytest.mark.parametrize(
  ("order", "dtype", "on_the_wire"),
  [
    (ORDERS[0], jnp.float16, "f32"),
    (ORDERS[1], jnp.float16, "f16"),
    (ORDERS[1], jnp.float8_e4m3fn, "f32"),  # A sum needs more than 8 bits.
  ],
  ids=["unscaled", "scaled", "scaled float8"],
)
def test_gradients_travel_in_the_dtype_of_the_order(order, dtype, on_the_wire):
  axes = {"data": 4, "model": 2}
  update = first_update(averaging(order, tuple(axes)), axes)
  scaled_grads = jnp.tile(jnp.arange(8.0)[:, None], 5).astype(dtype)
  lines = support.between_devices(update.lower(scaled_grads).compile())
  shapes = sorted(line.split(" = ")[1].split("{")[0] for line in lines)
  # All findings travel together: the flag, amax, and the share of the range.
  assert shapes == sorted([f"{on_the_wire}[5]", "u32[3]"])


@pytest.mark.usefixtures("strict_promotion")
@each_order
def test_gradients_of_each_dtype_are_averaged_without_promotion(order):
  dtypes = ("float16", "bfloat16", "float32", "complex64")
  scaled_grads = {x: jnp.arange(8.0).astype(x)[:, None] for x in dtypes}
  scaled_grads["complex64"] *= 1 - 2j
  updates, _ = first_update(averaging(order, "data"), {"data": 8})(scaled_grads)
  for dtype, update in updates.items():
    mean = 3.5 / 8 * (1 - 2j if dtype == "complex64" else 1)
    assert update.tolist() == [[mean]] * 8, dtype


@each_order
def test_guarantee_12_leaves_that_are_not_gradients_are_not_averaged(order):
  tx = averaging(order, "data")
  others = {"integer": jnp.array([3]), "masked": optax.MaskedNode(), "no": None}

  def update(own):
    tree = own | others | {"float0": np.zeros(2, jax.dtypes.float0)}
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert updates.pop("float0").dtype == jax.dtypes.float0
    return updates | {"key": jax.random.key_data(updates["key"])}

  keys = jax.random.split(jax.random.key(0), 8)
  each = 8 * jnp.arange(8.0)
  own = {"gradient": each, "key": keys, "_overwrite_with_gradient": each}
  updates = per_device(update, {"data": 8})(own)
  assert updates.pop("gradient").tolist() == [3.5] * 8
  expected = own | {"key": jax.random.key_data(keys)} | others
  expected["integer"] = jnp.array([[3]] * 8)
  del expected["gradient"]
  support.assert_same_bits(updates, expected)


@each_order
def test_guarantee_10_gradients_are_not_reduced_twice(order):
  tx = averaging(order, ("data", "model"))

  def update(own):
    # As JAX does with the gradients of replicated parameters.
    gradients = {"w": lax.psum(own, "model")}
    return tx.update(gradients, tx.init(gradients))

  what = "pmean_gradients" if order == ORDERS[0] else "average_scaled"
  with pytest.raises(
    ValueError,
    match=rf"`{what}` must be given.*got one at \['w'\] that does not along "
    r"'model'.*make_varying\(params, \('data', 'model'\)\).*pmean of the loss",
  ):
    per_device(update, {"data": 4, "model": 2})(jnp.ones(8))


# Averages over axes that the wrapper does not know.


def by_hand(axis):
  """Averages as `pmean_gradients` does, in a transformation of the user's."""
  return optax.stateless(lambda updates, _: lax.pmean(updates, axis))


def in_a_branch(axis):
  return optax.stateless(
    lambda updates, _: lax.cond(
      updates > 0, lambda x: lax.pmean(x, axis), lambda x: x, updates
    )
  )


def vmapped(function):
  return jax.vmap(function, axis_name="data")


def jit_of_vmapped(function):
  return jax.jit(vmapped(function))


def over_two_axes(function):
  by_model = jax.vmap(vmapped(function), in_axes=(0, None), axis_name="model")
  return jax.jit(lambda x, state: by_model(x[None], state)[0])


def updates_beside_nan(average, axis_name, mapping):
  """Returns the updates of two devices; the first one has a NaN."""
  inner = optax.chain(average, optax.sgd(1.0))
  tx = ols.loss_scaling(inner, RULE, axis_name=axis_name)
  state = jax.vmap(tx.init)(jnp.ones(2))
  update = mapping(lambda x, state: tx.update(x, state)[0])
  return update(jnp.array([jnp.nan, 8.0]), state)


# The mapping, the average, the axis that is known, and the one that is not.
UNKNOWN = {
  "vmap": (vmapped, ols.pmean_gradients, None, "data"),
  "vmap of jit": (
    lambda f: vmapped(jax.jit(f)),
    ols.pmean_gradients,
    None,
    "data",
  ),
  "jit of vmap": (jit_of_vmapped, ols.pmean_gradients, None, "data"),
  "pmap": (
    lambda f: jax.pmap(f, axis_name="data", devices=jax.devices()[:2]),
    ols.pmean_gradients,
    None,
    "data",
  ),
  "by hand": (jit_of_vmapped, by_hand, None, "data"),
  "in a branch": (jit_of_vmapped, in_a_branch, None, "data"),
  "one of two axes": (over_two_axes, by_hand, "data", "model"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_average_over_an_axis_that_the_wrapper_does_not_know_warns(name):
  mapping, average, known, unknown = UNKNOWN[name]
  every = (known, unknown) if known else unknown
  text = rf"(over|along) '{unknown}'.* axis_name={re.escape(repr(every))}"
  with pytest.warns(ols.WiringWarning, match=text) as told:
    updates_beside_nan(average(every), known, mapping)
  assert len(told) == 1
  updates = updates_beside_nan(average(every), every, mapping)
  assert updates.tolist() == [-0.0, -0.0]
  # With () the caller says that the gradients are the same everywhere.
  updates_beside_nan(average(every), (), mapping)


@pytest.mark.parametrize("average", [by_hand, ols.pmean_gradients])
@pytest.mark.parametrize("mapping", [vmapped, jit_of_vmapped])
def test_an_average_does_not_warn_where_no_step_is_skipped(mapping, average):
  inner = optax.chain(average("data"), optax.sgd(1.0))
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0, skip=False))
  update = mapping(lambda x: tx.update(x, tx.init(x))[0])
  assert update(jnp.array([8.0, 24.0])).tolist() == [-2.0, -2.0]


def test_a_sum_does_not_warn_where_jax_knows_that_devices_agree():
  def slice_and_gather(updates, _):
    own = updates * (jnp.arange(8) == lax.axis_index("data"))
    return lax.psum(own, "data")

  tx = ols.loss_scaling(optax.stateless(slice_and_gather), RULE)
  update = support.on_each_device(
    lambda x: tx.update(x, tx.init(x))[0], jax.P(), in_specs=jax.P()
  )
  assert jax.jit(update)(jnp.full(8, 8.0)).tolist() == [1.0] * 8


def test_an_optimizer_with_devices_of_its_own_does_not_warn():
  mean = support.on_each_device(lambda x: lax.pmean(x, "data"), jax.P())
  tx = ols.loss_scaling(optax.stateless(lambda x, _: mean(x)), RULE)
  updates = jax.jit(tx.update)(8 * jnp.arange(8.0), tx.init(jnp.ones(8)))[0]
  assert updates.tolist() == [3.5]


@pytest.mark.parametrize("mapping", [vmapped, jit_of_vmapped])
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


# Names of axes, and values that vary along them.


@pytest.mark.parametrize("check_vma", [True, False, None])
def test_any_leaf_is_made_to_vary(check_vma):
  axes = {"data": 8} if check_vma is None else {"data": 4, "model": 2}
  is_tracked = frozenset(axes if check_vma else ())

  def make_varying(own):
    tree = {
      "float": jnp.ones(2, jnp.float16),
      "integer": jnp.array([3]),
      "key": jax.random.key(7),
      "none": None,
      "number": 2.0,
      "own": own,
      "part": lax.psum(own, "data"),
    }
    varying = ols.make_varying({**tree, "function": jax.nn.relu}, list(axes))
    assert varying.pop("function") is jax.nn.relu
    for leaf in jax.tree.leaves(varying):
      assert _bits.varying_axes(leaf) == is_tracked
    for x in (tree, varying):
      x["key"] = jax.random.key_data(x["key"])
    return tree, varying

  tree, varying = per_device(make_varying, axes, check_vma)(jnp.arange(8.0))
  support.assert_same_bits(varying, tree)


AGREEING = ols.loss_scaling(optax.sgd(1.0), RULE, axis_name="data")
NO_NAME = "`axis_name` must name a mapped axis, or several in a tuple or list"
NO_AXIS = "`axis_name` must name an axis of .* got 'data'"
REFUSED = {
  "none": (lambda x: ols.pmean_gradients(None), f"{NO_NAME}.* got None"),
  "empty": (lambda x: ols.pmean_gradients(()), NO_NAME),
  "none in a list": (lambda x: ols.pmean_gradients(["data", None]), NO_NAME),
  "a set": (lambda x: ols.pmean_gradients({"data"}), NO_NAME),
  "average_scaled": (
    lambda x: ols.loss_scaling(optax.sgd(1.0), RULE, average_scaled={"x"}),
    "`average_scaled` must name .* got {'x'}",
  ),
  "make_varying": (lambda x: ols.make_varying(x, "data"), NO_AXIS),
  "pmean_gradients": (
    lambda x: ols.pmean_gradients("data").update(x, ()),
    NO_AXIS,
  ),
  "update": (lambda x: AGREEING.update(x, AGREEING.init(x)), NO_AXIS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_name_a_mapped_axis_is_refused(name):
  function, message = REFUSED[name]
  with pytest.raises((TypeError, ValueError), match=message):
    jax.jit(function)(jnp.ones(3))


# Plain jit, where sharded arrays need no axis name.

MATRICES = {
  "bias": np.ones(8, np.float16),
  "kernel": np.ones((16, 8), np.float32),
}
BY_BOTH = ("data", "model")
# How they lie on a mesh of 4 by 2 devices.
LAYOUTS = {
  "Auto": {"bias": jax.P("model"), "kernel": jax.P("data", "model")},
  "Explicit": {"bias": jax.P(BY_BOTH), "kernel": jax.P(BY_BOTH, None)},
}


@pytest.mark.parametrize("axis_type", LAYOUTS)
def test_guarantee_10_a_bad_element_in_any_shard_skips_the_step(axis_type):
  mesh = support.make_mesh(axis_type, data=4, model=2)
  tx = ols.loss_scaling(optax.adam(0.5), RULE, check=SATURATED)

  def lay_out(tree):
    specs = LAYOUTS[axis_type]
    return {
      name: jax.device_put(x, jax.NamedSharding(mesh, specs[name]))
      for name, x in tree.items()
    }

  def step(params, state, scaled_grads):
    updates, state = tx.update(scaled_grads, state, params)
    return optax.apply_updates(params, updates), state

  with jax.set_mesh(mesh):
    params = clean = lay_out(MATRICES)
    state = tx.init(params)
    compiled = jax.jit(step).lower(params, state, clean).compile()
    # Each value in each leaf, and one in each of its shards.
    for (name, device), value in zip(
      itertools.product(MATRICES, range(8)), itertools.cycle(BAD_VALUES)
    ):
      leaf = MATRICES[name].copy()
      part = leaf[clean[name].addressable_shards[device].index]
      part[(-1,) * part.ndim] = value
      bad = lay_out({**MATRICES, name: leaf})
      after, new_state = compiled(params, state, bad)
      assert new_state.skipped and new_state.nan == np.isnan(value)
      assert ols.get_loss_scale(new_state) == 4.0
      support.assert_same_bits(after, params)
      support.assert_same_bits(new_state.inner_state, state.inner_state)
    _, state = compiled(params, new_state, clean)
  assert state.applied_steps == 1
  # Moments lie as their parameters do, and S is on all devices.
  for name, x in state.inner_state[0].mu.items():
    assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim)
  assert ols.get_loss_scale(state).is_fully_replicated
  # The maxima of all leaves cross together, along one axis after the other.
  lines = support.between_devices(compiled)
  assert len(lines) == (2 if axis_type == "Auto" else 1)
  for line in lines:
    shapes, reduces, _ = line.split(" = ")[1].partition(" all-reduce(")
    assert reduces and not re.search(r"\[\d+,", shapes), line
