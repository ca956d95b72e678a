"""Under plain jit sharded arrays need no axis name, and nothing is gathered."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import AXIS_TYPES
from tests.support import to_bits

RULE = ols.DynamicLossScale(8.0)
SATURATED = ols.saturated(jnp.float16)

# How parameters and their gradients are laid out on a mesh of 4 by 2 devices.
LAYOUTS = {
  "data parallel": {"bias": jax.P(None), "kernel": jax.P(None, None)},
  "fully sharded": {
    "bias": jax.P(("data", "model")),
    "kernel": jax.P(("data", "model"), None),
  },
  "tensor parallel": {"bias": jax.P("model"), "kernel": jax.P(None, "model")},
  "both": {"bias": jax.P("model"), "kernel": jax.P("data", "model")},
}
SHAPES = {"bias": (8,), "kernel": (16, 8)}

BAD_VALUES = (np.nan, np.inf, -np.inf, 65504.0, -65504.0)

make_mesh = functools.partial(support.make_mesh, data=4, model=2)


def lay_out(tree, layout, mesh):
  """Returns arrays on the mesh; the layout is a name in `LAYOUTS` or a spec."""
  specs = LAYOUTS[layout] if isinstance(layout, str) else layout
  shardings = jax.tree.map(
    lambda spec: jax.NamedSharding(mesh, spec),
    specs,
    is_leaf=lambda x: isinstance(x, jax.P),
  )
  return jax.device_put(tree, shardings)


def make_params(dtype=jnp.float32):
  return {name: np.ones(shape, dtype) for name, shape in SHAPES.items()}


def make_step(tx):
  """Returns the update phase of a train step."""

  def step(params, state, scaled_grads):
    updates, state = tx.update(scaled_grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def loss_fn(params, batch):
  return jnp.mean((batch @ params["kernel"] + params["bias"]) ** 2)


def is_equal_everywhere(x):
  """Returns whether all devices hold the same copy of an array."""
  copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
  return x.is_fully_replicated and len(copies) == 1


def check_skipped_together(old, new):
  """Checks that a step left parameters and optimizer alone on all devices."""
  (params, state), (new_params, new_state) = old, new
  assert new_state.skipped
  assert ols.get_loss_scale(new_state) == ols.get_loss_scale(state) / 2
  scalars = jax.tree.leaves(new_state._replace(inner_state=None))
  assert all(map(is_equal_everywhere, scalars))
  assert all(len(x.sharding.device_set) == 8 for x in scalars)
  assert to_bits(params) == to_bits(new_params)
  assert to_bits(state.inner_state) == to_bits(new_state.inner_state)


def with_value_in_shard(leaf, shard, value):
  """Returns a copy of `leaf` whose last element in a shard is `value`."""
  leaf = leaf.copy()
  part = leaf[shard.index]
  part[(-1,) * part.ndim] = value
  return leaf


@pytest.mark.parametrize("layout", support.slow_but(["both"], LAYOUTS))
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_guarantee_10_a_bad_element_in_any_shard_skips_the_step(
  axis_type, layout
):
  mesh = make_mesh(axis_type)
  tx = ols.loss_scaling(optax.adam(0.5), RULE, check=SATURATED)
  step = jax.jit(make_step(tx))
  scaled_grads = {**make_params(), "bias": np.ones(SHAPES["bias"], np.float16)}
  with jax.set_mesh(mesh):
    params = lay_out(make_params(), layout, mesh)
    clean = lay_out(scaled_grads, layout, mesh)
    before = params, tx.init(params)
    # Each value in each leaf, and one in each of its shards.
    places = itertools.product(SHAPES, range(8))
    for (name, device), value in zip(
      places, itertools.cycle(BAD_VALUES), strict=False
    ):
      shard = clean[name].addressable_shards[device]
      leaf = with_value_in_shard(scaled_grads[name], shard, value)
      bad = lay_out({**scaled_grads, name: leaf}, layout, mesh)
      after = step(*before, bad)
      check_skipped_together(before, after)
      assert after[1].nan == np.isnan(value)
    moved, state = step(*after, clean)
  assert (state.applied_steps, state.skipped_steps) == (1, 1)
  for old, new in zip(to_bits(params), to_bits(moved), strict=True):
    assert old != new


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_guarantee_10_a_bad_batch_on_any_device_skips_the_step(axis_type):
  mesh = make_mesh(axis_type)
  tx = ols.loss_scaling(optax.adam(0.5), RULE)

  @jax.jit
  def step(params, state, batch):
    grad = ols.scaled_value_and_grad(loss_fn, state)
    return make_step(tx)(params, state, grad(params, batch)[1])

  rows = jax.P(("data", "model"), None)
  batch = np.ones((16, 16), np.float32)
  with jax.set_mesh(mesh):
    params = lay_out(make_params(), "data parallel", mesh)
    before = params, tx.init(params)
    clean = lay_out(batch, rows, mesh)
    for shard, value in itertools.product(
      clean.addressable_shards, (np.nan, np.inf, -np.inf)
    ):
      bad = lay_out(with_value_in_shard(batch, shard, value), rows, mesh)
      after = step(*before, bad)
      check_skipped_together(before, after)
    _, state = step(*after, clean)
  assert state.applied_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ("value", "is_seen"),
  [(np.nan, True), (np.inf, True), (65504.0, False), (-65504.0, False)],
)
def test_what_saturates_on_one_device_is_lost_in_the_mean_of_all(
  value, is_seen
):
  """Records what a check sees of gradients that were averaged before it.

  Under plain jit XLA takes the mean over devices within the backward pass. A
  saturated value of one device is then divided by their number; NaN and inf
  stay what they are. Under `shard_map` the check looks at each device's own.
  """
  tx = ols.loss_scaling(
    optax.sgd(1.0), ols.FixedLossScale(1.0), check=SATURATED
  )
  mesh = support.make_mesh()

  def local_loss(params, row):
    return jnp.sum(params * row)  # Its gradient is the row.

  def step(params, state, batch):
    def mean_loss(params):
      return jnp.mean(jax.vmap(local_loss, in_axes=(None, 0))(params, batch))

    scaled_grads = ols.scaled_value_and_grad(mean_loss, state)(params)[1]
    return tx.update(scaled_grads, state, params)[1].overflow

  def own_step(params, state, batch):
    params = ols.make_varying(params, "data")
    grad = ols.scaled_value_and_grad(local_loss, state)
    return own_tx.update(grad(params, batch[0])[1], state)[1].overflow

  own_tx = ols.loss_scaling(
    optax.chain(ols.pmean_gradients("data"), optax.sgd(1.0)),
    ols.FixedLossScale(1.0),
    check=SATURATED,
    axis_name="data",
  )
  params = jnp.ones(3, jnp.float16)
  batch = np.ones((8, 3), np.float16)
  batch[5, 1] = value
  batch = lay_out(batch, jax.P("data", None), mesh)
  own_step = jax.shard_map(
    own_step,
    mesh=mesh,
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P(),
  )
  assert jax.jit(step)(params, tx.init(params), batch) == is_seen
  assert jax.jit(own_step)(params, own_tx.init(params), batch)


def shardings_of_state(tx, params):
  """Returns shardings: of the parameters for moments, replicated otherwise."""
  replicated = jax.NamedSharding(params["bias"].sharding.mesh, jax.P())
  return optax.tree.map_params(
    tx,
    lambda _, param: param.sharding,
    jax.eval_shape(tx.init, params),
    params,
    transform_non_params=lambda _: replicated,
  )


def check_shardings(state, params):
  """Checks that moments lie as their parameters do, and scalars everywhere."""
  adam = state.inner_state[0]
  for moments in (adam.mu, adam.nu):
    for name, moment in moments.items():
      sharding = params[name].sharding
      assert moment.sharding.is_equivalent_to(sharding, moment.ndim), name
  moments = {id(x) for x in jax.tree.leaves((adam.mu, adam.nu))}
  for x in jax.tree.leaves(state):
    assert id(x) in moments or is_equal_everywhere(x)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["eager", "jit"])
@pytest.mark.parametrize("layout", ["fully sharded", "tensor parallel", "both"])
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_the_inner_state_lies_as_the_parameters_do_and_nothing_is_gathered(
  axis_type, layout, init
):
  mesh = make_mesh(axis_type)
  tx = ols.loss_scaling(optax.adam(0.5), RULE, check=SATURATED)
  with jax.set_mesh(mesh):
    params = lay_out(make_params(), layout, mesh)
    scaled_grads = lay_out(make_params(np.float16), layout, mesh)
    if init == "eager":
      state = tx.init(params)
    else:
      shardings = shardings_of_state(tx, params)
      state = jax.jit(tx.init, out_shardings=shardings)(params)
    check_shardings(state, params)
    step = jax.jit(make_step(tx)).lower(params, state, scaled_grads).compile()
    for _ in range(2):
      params_after, state = step(params, state, scaled_grads)
      check_shardings(state, params)
      for name, x in params_after.items():
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim)
  # The flag and amax cross, one maximum for each leaf, and nothing else does.
  for line in support.between_devices(step):
    assert " all-reduce(" in line
    shapes = line.split(" = ")[1].split(" all-reduce(")[0]
    assert not re.search(r"\[\d+,", shapes), line


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fully sharded", "tensor parallel", "both"])
def test_a_whole_step_gathers_no_more_than_the_bare_optimizers(layout):
  mesh = make_mesh()
  inner = optax.adam(0.5)
  tx = ols.loss_scaling(inner, ols.FixedLossScale(1.0))

  def bare(params, state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    return make_step(inner)(params, state, grads)

  def scaling(params, state, batch):
    scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params, batch)[1]
    return make_step(tx)(params, state, scaled_grads)

  params = lay_out(make_params(), layout, mesh)
  batch = lay_out(np.ones((16, 16), np.float32), jax.P("data", None), mesh)

  def moved(step, state):
    step = jax.jit(step).lower(params, state, batch).compile()
    lines = support.between_devices(step)
    return [line for line in lines if " all-reduce(" not in line]

  assert len(moved(scaling, tx.init(params))) == len(
    moved(bare, inner.init(params))
  )


@pytest.mark.long
@pytest.mark.parametrize("devices", [0, 1, 8])
def test_what_is_compiled_grows_with_the_leaves_and_not_faster(devices):
  tx = ols.loss_scaling(optax.sgd(1e-3, momentum=0.9), ols.DynamicLossScale())

  def instructions(count):
    params = {f"layer_{i}": jnp.ones(8192) for i in range(count)}
    state = tx.init(params)
    if devices:
      mesh = support.make_mesh(data=devices)
      sharding = jax.NamedSharding(mesh, jax.P())
      params, state = jax.device_put((params, state), sharding)
    step = jax.jit(tx.update).lower(params, state, params).compile()
    return step.as_text().count(" = ")

  ten, hundred, thousand = map(instructions, (10, 100, 1000))
  assert thousand - hundred <= 1.1 * 10 * (hundred - ten)
