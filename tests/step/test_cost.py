"""What loss scaling costs, as XLA compiles it: memory, traffic, size."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

RULE = ols.DynamicLossScale(1024.0)

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def make_step(tx):
  """Returns the update phase of a train step."""

  def step(params, state, scaled_grads):
    updates, state = tx.update(scaled_grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def make_leaves(count, size, dtype=jnp.float32):
  """Returns a dict of equal arrays."""
  return {f"layer_{i}": jnp.ones(size, dtype) for i in range(count)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  "inner",
  [optax.adamw(1e-3), optax.lion(1e-3), optax.sgd(1e-3, momentum=0.9)],
  ids=["adamw", "lion", "sgd"],
)
def test_a_step_keeps_no_second_copy_of_anything(inner, dtype):
  tx = ols.loss_scaling(inner, RULE)
  params = make_leaves(8, 100_000)
  grads = make_leaves(8, 100_000, dtype)
  bare = support.compile_donated(
    make_step(inner), params, inner.init(params), grads
  )
  scaling = support.compile_donated(
    make_step(tx), params, tx.init(params), grads
  )
  extra = support.temporaries(scaling) - support.temporaries(bare)
  assert extra <= 0.01 * support.size(params)


def test_small_leaves_are_copied_once_and_no_more():
  tx = ols.loss_scaling(optax.adamw(1e-3), RULE)
  params = make_leaves(40, 4000)
  step = support.compile_donated(make_step(tx), params, tx.init(params), params)
  assert support.temporaries(step) <= 1.1 * support.size(params)


def test_accumulation_lets_each_gradient_go_before_the_next():
  def loss_fn(params, x):
    # Gradients arrive in neither this order nor the reverse of it.
    for i in (3, 6, 0, 5, 2, 7, 1, 4):
      x = jnp.tanh(x @ params[f"layer_{i}"])
    return jnp.mean(x)

  @jax.jit
  def gradients(params, x):
    return ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, jnp.float32(2.0**10)), microbatches=2
    )(params, x)

  params = make_leaves(8, (256, 256))
  compiled = gradients.lower(params, jnp.ones((4, 256))).compile()
  assert support.temporaries(compiled) <= 0.6 * support.size(params)


def test_guarantee_9_nothing_is_sent_to_the_host():
  tx = ols.loss_scaling(optax.adamw(1e-3), RULE)
  params = make_leaves(3, 5000)
  step = support.compile_donated(
    make_step(tx), params, tx.init(params), make_leaves(3, 5000, jnp.float16)
  )
  assert support.to_the_host(step) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_all_leaves_share_one_reduction_over_devices(axis_type, count):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
  tx = ols.loss_scaling(optax.adamw(1e-3), RULE)
  with jax.set_mesh(mesh):
    params = shard(make_leaves(count, (16, 4)), mesh, "data")
    scaled_grads = {
      name: leaf.astype(DTYPES[i % 3])
      for i, (name, leaf) in enumerate(params.items())
    }
    step = support.compile_donated(
      make_step(tx), params, tx.init(params), shard(scaled_grads, mesh, "data")
    )
  (line,) = support.between_devices(step)
  assert "all-reduce(" in line
  assert reduced_elements(line) == count
  assert support.to_the_host(step) == []


def test_guarantee_9_a_sharded_step_is_compiled_as_often_as_the_bare_one():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  inner = optax.adamw(1e-3)

  def compilations(tx):
    params = shard(make_leaves(3, (16, 4)), mesh, "data")
    state = tx.init(params)
    step = jax.jit(make_step(tx), donate_argnums=(0, 1))
    names = []
    with support.listening_to_compilations(names):
      for bad in (0.0, jnp.inf, 0.0, jnp.nan, 0.0):
        scaled_grads = shard(make_leaves(3, (16, 4)), mesh, "data")
        scaled_grads["layer_1"] += bad
        params, state = step(params, state, scaled_grads)
    return names.count("step")

  assert compilations(ols.loss_scaling(inner, RULE)) == compilations(inner)


@pytest.mark.slow
def test_two_sharded_dimensions_make_two_reductions_over_devices():
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  tx = ols.loss_scaling(optax.adamw(1e-3), RULE)
  params = shard(make_leaves(40, (16, 4)), mesh, "data", "model")
  step = support.compile_donated(make_step(tx), params, tx.init(params), params)
  assert len(support.between_devices(step)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [("data",), ("model",), ("data", "model")])
def test_named_axes_are_agreed_over_at_once(spec, check_vma):
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  tx = ols.loss_scaling(optax.sgd(1e-3), RULE, axis_name=("data", "model"))
  scaled_grads = make_leaves(20, (16,))
  state = tx.init(scaled_grads)
  overflow = jax.shard_map(
    lambda scaled_grads, state: tx.update(scaled_grads, state)[1].overflow,
    mesh=mesh,
    in_specs=(PartitionSpec(spec), PartitionSpec()),
    out_specs=PartitionSpec(),
    check_vma=check_vma,
  )
  step = jax.jit(overflow).lower(scaled_grads, state).compile()
  (line,) = support.between_devices(step)
  assert reduced_elements(line) == 3  # The flag, amax, and the share used.

  scaled_grads["layer_7"] = scaled_grads["layer_7"].at[15].set(np.nan)
  assert jax.jit(overflow)(scaled_grads, state)


def test_a_leaf_adds_at_most_three_times_the_equations_of_the_bare_step():
  inner = optax.adamw(1e-3)
  tx = ols.loss_scaling(inner, RULE)

  def equations(tx, count):
    params = make_leaves(count, 5000)
    jaxpr = jax.make_jaxpr(make_step(tx))(params, tx.init(params), params)
    return len(list(support.equations(jaxpr)))

  few, more, most = (equations(tx, count) for count in (16, 32, 64))
  assert most - more <= 2 * (more - few)
  assert more - few <= 3 * (equations(inner, 32) - equations(inner, 16))


def test_many_small_leaves_are_read_by_a_few_kernels():
  tx = ols.loss_scaling(optax.sgd(1e-3), RULE)

  @jax.jit
  def overflow(scaled_grads, state):
    return tx.update(scaled_grads, state)[1].overflow

  def kernels(count):
    scaled_grads = make_leaves(count, 1000)
    hlo = (
      overflow.lower(scaled_grads, tx.init(scaled_grads)).compile().as_text()
    )
    return hlo.count(" fusion(")

  assert kernels(300) <= kernels(3) + 8


def shard(tree, mesh, *spec):
  """Returns a tree whose leaves are spread over a mesh."""
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.device_put(tree, sharding)


def reduced_elements(line):
  """Returns how many numbers an all-reduce in HLO reduces."""
  shapes = line.split(" all-reduce(")[0].split(" = ")[1]
  return sum(
    int(dimension.split("]")[0] or 1) for dimension in shapes.split("[")[1:]
  )
