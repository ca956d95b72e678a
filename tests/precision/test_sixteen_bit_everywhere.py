"""16-bit parameters and states in frameworks, wrappers, checkpoints, meshes."""

from collections.abc import Callable
import functools
import pickle

import equinox as eqx
from flax import nnx
from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from tests import support
from tests.instruments.step import steps

RULE = ols.FixedLossScale(1024.0)
remainders = functools.partial(ols.master_weights, store="remainder")
by_chance = ols.stochastic_rounding
scaled = functools.partial(ols.loss_scaling, rule=RULE)
# One inside of loss scaling and one outside.
WAYS = {
  "remainder": lambda inner, **axis: scaled(remainders(inner), **axis),
  "stochastic": lambda inner, **axis: by_chance(scaled(inner, **axis)),
}
RATE = 2.0**-6


def alternating(several, without=()):
  """Returns pairs of a way and each of several; one way of each is not slow."""
  return [
    pytest.param(way, x, marks=[pytest.mark.slow] * ((i + j) % 2))
    for i, x in enumerate(several)
    for j, way in enumerate(WAYS)
    if (way, x) not in without
  ]


def inner(rate=RATE):
  """Returns an optimizer whose products are exact, in whatever program."""
  return ols.low_precision_state(optax.sgd(rate, momentum=0.5))


def normal(*shape):
  found = np.random.default_rng(0).normal(size=shape)
  return jnp.asarray(found, jnp.bfloat16)


START = {"bias": normal(64), "kernel": normal(64, 64)}
# Those of four steps, of which the third is skipped.
GRADIENTS = [
  {"bias": 1024 * bias, "kernel": 1024 * kernel}
  for bias, kernel in zip(
    normal(4, 64).at[2, 0].set(jnp.inf), normal(4, 64, 64), strict=True
  )
]
TWICE = [x for x in GRADIENTS[:2] for _ in range(2)]


def train(tx, gradients=GRADIENTS, params=START, state=None):
  """Returns parameters and state after a step on each of several gradients."""
  state = tx.init(params) if state is None else state
  update = jax.jit(tx.update)
  for grads in gradients:
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def export(params, state):
  """Returns the parameters in float32 for serving, if a state has them."""
  return [jax.jit(x.wide)(params) for x in support.owners_of_masters(state)]


def in_common(params, state):
  """Returns the bits that are the same wherever the steps are taken."""
  kept = [optax.tree.get(state, x) for x in ("rounding_count", "trace")]
  return support.to_bits([params, export(params, state), kept])


@functools.cache
def expected(way, steps=4):
  return in_common(*train(WAYS[way](inner()), GRADIENTS[:steps]))


def in_linen(tx):
  state = ols.linen.TrainState.create(apply_fn=None, params=START, tx=tx)
  step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  for grads in GRADIENTS:
    state = step(state, grads)
  return state.params, state.opt_state


def in_nnx(tx):
  model = nnx.Linear(64, 64, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  nnx.update(model, START)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = nnx.jit(nnx.Optimizer.update)
  for grads in GRADIENTS:
    step(optimizer, model, nnx.State(jax.tree.map(nnx.Param, grads)))
  return nnx.as_pure((nnx.state(model), optimizer.opt_state))


class Model(eqx.Module):
  bias: jax.Array
  kernel: jax.Array
  activation: Callable | None = jax.nn.relu  # A leaf that is no array.


def in_equinox(tx):
  model, update = Model(**START), eqx.filter_jit(tx.update)
  state = tx.init(eqx.filter(model, eqx.is_array))
  for grads in GRADIENTS:
    params = eqx.filter(model, eqx.is_array)
    updates, state = update(Model(**grads, activation=None), state, params)
    model = eqx.apply_updates(model, updates)
  return eqx.filter(model, eqx.is_array), state


inject, twice = optax.inject_hyperparams, optax.MultiSteps
PROGRAMS = {
  "linen": lambda way: in_linen(way(inner())),
  "nnx": lambda way: in_nnx(way(inner())),
  "equinox": lambda way: in_equinox(way(inner())),
  "record": lambda way: train(ols.instruments.record(way(inner()), 4)),
  "settings inside": lambda way: train(way(inject(inner)(RATE))),
  "settings around": lambda way: train(inject(lambda x: way(inner(x)))(RATE)),
  "accumulation inside": lambda way: train(way(twice(inner(), 2)), TWICE),
  "accumulation around": lambda way: train(twice(way(inner()), 2), TWICE),
}
# Its count is of all steps there, so it rounds otherwise.
OTHERWISE = ("stochastic", "accumulation inside")


@pytest.mark.parametrize(
  ("way", "program"), alternating(PROGRAMS, without=[OTHERWISE])
)
def test_frameworks_and_wrappers_change_no_bit(way, program):
  params, state = PROGRAMS[program](WAYS[way])
  assert {x.dtype for x in jax.tree.leaves(params)} == {START["bias"].dtype}
  wide = jax.tree.leaves(export(params, state))
  assert [x.dtype for x in wide] == [jnp.float32] * 2 * (way == "remainder")
  steps = 2 if "accumulation" in program else 4
  assert in_common(params, state) == expected(way, steps)
  if program == "record":
    overflow = ols.instruments.get_history(state).overflow
    assert overflow.tolist() == [False, False, True, False]


def placed(mesh, tree):
  """Returns a tree with each axis of an array over one of a mesh."""

  def place(x):
    spec = jax.P(*("model", "data")[: x.ndim])
    return jax.device_put(x, jax.NamedSharding(mesh, spec))

  return jax.tree.map(place, tree)


def assert_placed(mesh, *trees):
  for x in filter(jnp.ndim, jax.tree.leaves(trees)):
    assert x.sharding.is_equivalent_to(placed(mesh, x).sharding, x.ndim)


def through(kind, tree, target, folder):
  """Returns a tree, saved and restored where Orbax can have it elsewhere."""
  if kind == "pickle":
    return pickle.loads(pickle.dumps(tree))
  if kind == "bytes":
    return serialization.from_bytes(target, serialization.to_bytes(tree))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", tree)
    checkpointer.wait_until_finished()
    return checkpointer.restore(folder / "state", target)


SAVED = ["orbax Auto Explicit", "pickle Explicit Auto", "bytes Auto Auto"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", SAVED)
def test_a_sharded_run_goes_on_from_a_checkpoint_on_another_mesh(
  way, case, tmp_path
):
  kind, before, after = case.split()
  tx = WAYS[way](inner())
  mesh = support.make_mesh(before, data=4, model=2)
  with jax.set_mesh(mesh):
    params, gradients = placed(mesh, (START, GRADIENTS[:2]))
    state = tx.init(params)
    assert_placed(mesh, state)
    saved = train(tx, gradients, params, state)
    assert_placed(mesh, saved, export(*saved))
  mesh = support.make_mesh(after, data=2, model=4)
  with jax.set_mesh(mesh):
    target, gradients = placed(mesh, (saved, GRADIENTS[2:]))
    restored = through(kind, saved, target, tmp_path)
    if kind != "orbax":
      restored = placed(mesh, restored)
    support.assert_same_bits(restored, saved)
    found = train(tx, gradients, *restored)
    assert_placed(mesh, found, export(*found))
  assert in_common(*found) == expected(way)


@pytest.mark.parametrize("kind", ["orbax", "bytes"])
def test_no_checkpoint_of_one_store_passes_for_the_other(kind, tmp_path):
  copy, remainder = (
    {"state": tx(optax.sgd(RATE)).init(START)}
    for tx in (ols.master_weights, remainders)
  )
  own = through(kind, remainder, remainder, tmp_path)
  support.assert_same_bits(own, remainder)
  for name, saved, target in (("a", copy, remainder), ("b", remainder, copy)):
    with pytest.raises((KeyError, ValueError)):
      through(kind, saved, target, tmp_path / name)


MAPPINGS = {
  "vmap": jax.vmap,
  "shard_map": lambda function: support.on_each_device(
    lambda x: function(x[0], axis_name="data")[None], support.SPREAD
  ),
}


@pytest.mark.parametrize(("way", "mapping"), alternating(MAPPINGS))
def test_a_shard_and_a_member_of_a_batch_train_as_if_alone(way, mapping):
  def trained(x, **axis):
    return train(WAYS[way](inner(), **axis), 1024 * x[1:], x[0])[0]

  x = normal(8, 3, 64, 64)
  found = jax.jit(MAPPINGS[mapping](trained))(x)
  alone = jax.jit(trained)
  for i in (0, 7):
    support.assert_same_bits(found[i], alone(x[i]))


def test_the_average_of_a_shard_moves_in_bfloat16():
  adam = ols.low_precision_state(optax.adam(1e-3))
  tx = scaled(adam, axis_name="data")

  def scan(state, grads):
    step = lambda state, _: (tx.update(grads, state)[1], None)  # noqa: E731
    return jax.lax.scan(step, state, length=1000)[0]

  grads = jnp.full(4096, 1024.0)
  state = tx.init(grads)
  specs = jax.tree.map(lambda x: jax.P(*["data"][: x.ndim]), (state, grads))
  sharded = support.on_each_device(scan, specs[0], in_specs=specs)
  squares = optax.tree.get(jax.jit(sharded)(state, grads), "nu")
  assert squares.dtype == jnp.bfloat16
  average = np.mean(np.float32(squares))
  assert average == pytest.approx(1 - 0.999**1000, rel=0.01)


@pytest.mark.parametrize(
  "way",
  [
    lambda inner: scaled(by_chance(ols.low_precision_state(inner))),
    lambda inner: scaled(ols.master_weights(inner)),
    lambda inner: remainders(scaled(ols.low_precision_state(inner))),
  ],
)
def test_shapes_alone_prove_every_way(way):
  tx = way(optax.adam(1e-3))

  def loss_fn(params, x):
    return jnp.mean((x @ params["kernel"] + params["bias"]) * params["half"])

  params = START | {"half": jnp.ones(64, jnp.float16)}
  args = params, tx.init(params), START["kernel"]
  report = steps.proved(steps.make_step(tx, loss_fn), *args)
  laws = dict.fromkeys(steps.LAWS, "proved") | {"precision": "exact"}
  assert steps.verdicts(report) == laws
