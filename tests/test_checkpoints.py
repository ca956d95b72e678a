"""Checkpoints: what they keep, and those from before loss scaling."""

import functools
import pickle

from flax import nnx
from flax import serialization
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from tests import optimizers
from tests import support
from tests.support import assert_same_bits
from tests.support import describe
from tests.support import to_bits

RULES = {
  "dynamic": ols.DynamicLossScale(8.0, growth_interval=2, hysteresis=2),
  "fixed": ols.FixedLossScale(8.0),
  # Between them these have every field that a rule may leave out.
  "deepspeed": ols.presets.deepspeed(),
  "metaseq": ols.presets.metaseq(tolerance=0.5),
}
WRAPPED = ols.loss_scaling(optax.adam(0.5), ols.FixedLossScale(8.0))


# Saving and restoring.


def through_orbax(state, folder):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(folder / "state", abstract(state))


def through_bytes(state, folder):
  del folder
  target = jax.tree.map(jnp.zeros_like, state)
  return serialization.from_bytes(target, serialization.to_bytes(state))


def through_pickle(state, folder):
  del folder
  return pickle.loads(pickle.dumps(state))


WAYS = through_orbax, through_bytes, through_pickle
# Every way with one rule, and every rule by one way.
ROWS = [("dynamic", way) for way in WAYS]
ROWS += [(rule, through_bytes) for rule in RULES if rule != "dynamic"]


def abstract(tree):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )


def make_params():
  return {
    "half": jnp.array([1.0, -0.0, 2.0**-24], jnp.float16),
    "bfloat16": jnp.array([2.0**-130, 3.0], jnp.bfloat16),
    "float32": jnp.array([2.0**-140, 0.1]),
  }


@functools.cache
def trained(rule):
  """Returns parameters and state after an applied step and a skipped one."""
  inner = ols.master_weights(optax.adam(0.1))
  tx = optax.chain(ols.loss_scaling(inner, RULES[rule]))
  params = make_params()
  opt_state = tx.init(params)
  for value in (3.0, jnp.nan):
    scaled_grads = jax.tree.map(
      lambda x, value=value: jnp.full_like(x, value), params
    )
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
  return {"params": params, "opt_state": opt_state, "step": jnp.int32(2)}


def assert_equal(got, expected):
  """Asserts that strong types are the same as well."""
  assert_same_bits(got, expected)
  assert describe(got) == describe(expected)


@pytest.mark.parametrize(
  ("rule", "through"), ROWS, ids=[f"{x}-{way.__name__}" for x, way in ROWS]
)
def test_guarantee_15_the_state_survives_bit_for_bit(rule, through, tmp_path):
  state = trained(rule)
  assert_equal(through(state, tmp_path), state)


def test_guarantee_15_no_step_is_compiled_again(tmp_path):
  @jax.jit
  def step(opt_state):
    return WRAPPED.update(jnp.ones(2), opt_state)[1]

  # Orbax binds arrays to devices. If they were not bound before, the next
  # step is compiled again, though not traced again.
  opt_state = jax.device_put(WRAPPED.init(jnp.ones(2)), jax.devices()[0])
  opt_state = step(opt_state)
  restored = through_orbax(opt_state, tmp_path)
  names = []
  with support.listening_to_compilations(names):
    jax.block_until_ready(step(restored))
  assert names == []


# Checkpoints from before loss scaling, and after it.


def scrambled(tree):
  """Returns other values, with which no optimizer starts; from shapes alone."""

  def scramble(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.key(3)
    return np.asarray(np.arange(x.size).reshape(x.shape) + 3, x.dtype)

  return jax.tree.map(scramble, tree)


def as_bare(name):
  return optimizers.bare(optimizers.OPTIMIZERS[name]())


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_guarantee_15_a_bare_state_goes_in_and_out_bit_for_bit(name):
  params = optimizers.make_params()
  tx = ols.loss_scaling(optimizers.OPTIMIZERS[name](), ols.DynamicLossScale())
  opt_state = jax.eval_shape(tx.init, params)
  bare_state = scrambled(jax.eval_shape(as_bare(name).init, params))
  wrapped = ols.checkpoints.with_loss_scaling(bare_state, opt_state)
  assert jax.tree.structure(wrapped) == jax.tree.structure(opt_state)
  assert describe(wrapped) == describe(opt_state)
  taken_out = ols.checkpoints.without_loss_scaling(wrapped)
  assert jax.tree.structure(taken_out) == jax.tree.structure(bare_state)
  assert to_bits(taken_out) == to_bits(bare_state)


def test_the_loss_scale_and_the_counts_are_those_of_the_wrapped_state():
  opt_state = trained("dynamic")["opt_state"]
  bare_state = scrambled(ols.checkpoints.without_loss_scaling(opt_state))
  wrapped = ols.checkpoints.with_loss_scaling(bare_state, opt_state)
  assert_equal(wrapped[0].inner_state, bare_state[0])
  assert opt_state[0].skipped_steps == 1
  kept = wrapped[0]._replace(inner_state=opt_state[0].inner_state)
  assert_equal(kept, opt_state[0])


NESTS = {
  "inject_hyperparams": lambda tx: optax.inject_hyperparams(
    lambda rate: optax.chain(tx, optax.scale(rate))
  )(rate=0.5),
  "multi_transform": lambda tx: optax.multi_transform(
    {"one": tx, "other": optax.sgd(0.5)}, {"bias": "one", "kernel": "other"}
  ),
  "masked": lambda tx: optax.masked(tx, {"bias": True, "kernel": False}),
}


@pytest.mark.parametrize("nest", NESTS)
def test_the_wrapper_is_found_in_any_nest(nest):
  params = optimizers.make_params()
  inner = optax.adam(0.5)
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0))
  opt_state = NESTS[nest](tx).init(params)
  bare_state = scrambled(NESTS[nest](inner).init(params))
  taken_out = ols.checkpoints.without_loss_scaling(opt_state)
  assert jax.tree.structure(taken_out) == jax.tree.structure(bare_state)
  wrapped = ols.checkpoints.with_loss_scaling(bare_state, opt_state)
  assert describe(wrapped) == describe(opt_state)
  assert ols.get_loss_scale(wrapped) == 8
  assert_equal(ols.checkpoints.without_loss_scaling(wrapped), bare_state)


def test_a_whole_train_state_is_wrapped_and_unwrapped():
  params = {"w": jnp.ones(2)}

  def create(tx):
    return train_state.TrainState.create(
      apply_fn=None, params=params, tx=tx
    ).replace(step=7)

  bare = create(optax.adam(0.5))
  bare = bare.replace(
    params=scrambled(params), opt_state=scrambled(bare.opt_state)
  )
  wrapped = ols.checkpoints.with_loss_scaling(bare, create(WRAPPED))
  # A checkpoint has no static fields.
  assert wrapped.tx is WRAPPED
  assert wrapped.step == 7
  assert_equal(wrapped.params, bare.params)
  assert_equal(wrapped.opt_state.inner_state, bare.opt_state)
  taken_out = ols.checkpoints.without_loss_scaling(wrapped)
  assert_equal(taken_out.opt_state, bare.opt_state)


def test_an_nnx_optimizer_continues_with_loss_scaling():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  bare = nnx.Optimizer(model, optax.adam(0.5), wrt=nnx.Param)
  bare.opt_state = scrambled(bare.opt_state)
  optimizer = nnx.Optimizer(model, WRAPPED, wrt=nnx.Param)
  optimizer.opt_state = ols.checkpoints.with_loss_scaling(
    bare.opt_state, optimizer.opt_state
  )
  assert to_bits(optimizer.opt_state.inner_state) == to_bits(bare.opt_state)
  taken_out = ols.checkpoints.without_loss_scaling(optimizer.opt_state)
  assert jax.tree.structure(taken_out) == jax.tree.structure(bare.opt_state)


def test_float16_moments_become_float32():
  params = {"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.bfloat16)}
  bare_state = scrambled(optax.adam(0.5).init(params))
  assert bare_state[0].mu["w"].dtype == jnp.float16
  wrapped = ols.checkpoints.with_loss_scaling(bare_state, WRAPPED.init(params))
  assert describe(wrapped) == describe(WRAPPED.init(params))
  for leaf, bare_leaf in zip(
    jax.tree.leaves(wrapped.inner_state),
    jax.tree.leaves(bare_state),
    strict=True,
  ):
    np.testing.assert_array_equal(leaf, np.float32(bare_leaf))


def test_guarantee_12_moments_of_leaves_that_bypass_the_wrapper_are_left_out():
  params = {
    "params": {"w": jnp.ones(2)},
    "_overwrite_with_gradient": {"amax": jnp.ones(3)},
  }
  bare_state = scrambled(optax.adam(0.5).init(params))
  wrapped = ols.checkpoints.with_loss_scaling(bare_state, WRAPPED.init(params))
  assert jax.tree.structure(wrapped) == jax.tree.structure(WRAPPED.init(params))
  moments = wrapped.inner_state[0].mu
  assert_equal(moments["params"], bare_state[0].mu["params"])
  assert moments["_overwrite_with_gradient"]["amax"] == optax.MaskedNode()
  # An optimizer that was given the gradients alone, as Flax's TrainState does.
  assert_equal(
    ols.checkpoints.with_loss_scaling(
      ols.checkpoints.without_loss_scaling(wrapped), WRAPPED.init(params)
    ),
    wrapped,
  )


def test_shapes_alone_make_a_target_to_restore_into(tmp_path):
  params = {"w": jnp.ones(2)}
  bare_state = scrambled(optax.adam(0.5).init(params))
  opt_state = jax.eval_shape(WRAPPED.init, params)
  target = ols.checkpoints.without_loss_scaling(opt_state)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", bare_state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", target)
  assert_equal(restored, bare_state)
  shapes = ols.checkpoints.with_loss_scaling(target, opt_state)
  assert jax.tree.structure(shapes) == jax.tree.structure(opt_state)
  assert jax.tree.leaves(shapes) == jax.tree.leaves(opt_state)


def test_numpy_numbers_become_strong_arrays():
  bare_state = optax.adam(0.5).init(jnp.ones(2))
  saved = jax.tree.map(np.asarray, scrambled(bare_state))
  saved = (saved[0]._replace(count=7), saved[1])
  wrapped = ols.checkpoints.with_loss_scaling(saved, WRAPPED.init(jnp.ones(2)))
  assert describe(wrapped) == describe(WRAPPED.init(jnp.ones(2)))
  assert wrapped.inner_state[0].count == 7


# Errors.


class Dataset:
  """Like the array of a file that is not read yet."""

  def __init__(self, dtype, shape):
    self.dtype, self.shape = np.dtype(dtype), shape

  def __repr__(self):
    return f"Dataset({self.dtype})"


def adam_state(**changes):
  """Returns the state of bare Adam, with other fields."""
  adam, empty = optax.adam(0.5).init({"w": jnp.ones(3)})
  return (adam._replace(**changes), empty)


MISFITS = {
  "another shape": (
    adam_state(nu={"w": jnp.ones(4)}),
    r"got float32\[4\] at '0/nu/w' where it has float32\[3\]",
  ),
  "an absent leaf": (
    adam_state(mu={}),
    r"got nothing at '0/mu/w' where it has float32\[3\]",
  ),
  "float64": (
    adam_state(mu={"w": np.ones(3)}),
    r"got float64\[3\] at '0/mu/w' where it has float32\[3\]; only floats",
  ),
  "a count in floats": (
    adam_state(count=np.float16(3)),
    r"got float16\[\] at '0/count' where it has int32\[\]",
  ),
  "no array": (adam_state(mu={"w": "mu"}), r"got 'mu' at '0/mu/w'"),
  "a dataset": (
    adam_state(mu={"w": Dataset("float16", (3,))}),
    r"got Dataset\(.* at '0/mu/w' where it has float32\[3\]\.$",
  ),
  "a tree for a leaf": (
    adam_state(mu={"w": {"a": 1}}),
    r"got dict\('a'\) at '0/mu/w' where it has float32\[3\]",
  ),
  "another optimizer": (
    optax.sgd(0.5, momentum=0.5).init({"w": jnp.ones(3)}),
    r"got TraceState\('trace'\) at '0' where it has ScaleByAdamState\('count'",
  ),
  "no target": (
    [{"count": 0, "mu": {}, "nu": {}}, None],
    r"got list\('0', '1'\) at its top where it has tuple\('0', '1'\); .*must "
    r"be restored into the structure .*jax.eval_shape\(inner.init, params\)",
  ),
  "loss scaling": (
    WRAPPED.init({"w": jnp.ones(3)}),
    "without loss scaling, got one with it at its top",
  ),
}


@pytest.mark.parametrize("bare_state, message", MISFITS.values(), ids=MISFITS)
def test_a_bare_state_that_does_not_fit_is_refused(bare_state, message):
  opt_state = WRAPPED.init({"w": jnp.ones(3)})
  with pytest.raises(ValueError, match=f"`bare_state` must be .*{message}"):
    ols.checkpoints.with_loss_scaling(bare_state, opt_state)


@pytest.mark.parametrize(
  "expected, message",
  [
    (jnp.ones(2), r"got float16\[2\] at 'ema' where it has float32\[2\]"),
    (optax.MaskedNode(), r"got float16\[2\] at 'ema' where it has MaskedNode"),
  ],
  ids=["widened", "left out"],
)
def test_a_leaf_outside_of_loss_scaling_must_fit_exactly(expected, message):
  bare = {"ema": jnp.ones(2, jnp.float16), "opt_state": adam_state()}
  opt_state = WRAPPED.init({"w": jnp.ones(3)})
  with pytest.raises(ValueError, match=message):
    ols.checkpoints.with_loss_scaling(
      bare, {"ema": expected, "opt_state": opt_state}
    )


@pytest.mark.parametrize(
  "function",
  [
    ols.checkpoints.without_loss_scaling,
    functools.partial(ols.checkpoints.with_loss_scaling, adam_state()),
  ],
  ids=["without", "with"],
)
def test_a_state_without_loss_scaling_is_refused(function):
  with pytest.raises(ValueError, match="`opt_state` must hold the state of"):
    function(adam_state())


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("rule", ["dynamic", "metaseq"])
def test_a_checkpoint_that_lacks_new_fields_is_filled(rule, tmp_path):
  """An earlier version of the library saved none of these fields."""
  inner = optax.chain(optax.clip(1.0), optax.trace(0.5))
  tx = optax.chain(ols.loss_scaling(inner, RULES[rule]), optax.identity())
  params = {"a": jnp.ones(2), "b": [jnp.ones(1), jnp.ones(3)]}
  fresh = {"params": params, "opt_state": tx.init(params)}
  _, opt_state = tx.update(params, fresh["opt_state"], params)
  saved = {"params": params, "opt_state": opt_state}
  if rule == "dynamic":  # Orbax has lists where Flax has dicts.
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp_path / "state", saved)
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(tmp_path / "state")
    of_loss_scaling = restored["opt_state"][0]
  else:
    restored = serialization.msgpack_restore(serialization.to_bytes(saved))
    of_loss_scaling = restored["opt_state"]["0"]
  whole = ols.checkpoints.from_dicts(restored, fresh)
  assert_same_bits(whole, saved)
  del of_loss_scaling["last_step"]["amax"]
  del of_loss_scaling["counts"]["requested_skips"]
  filled = ols.checkpoints.from_dicts(restored, fresh)["opt_state"][0]
  assert filled.applied_steps == 1 and filled.requested_skips == 0
  assert filled.amax == 0 and filled.range_used == opt_state[0].range_used


@pytest.mark.parametrize(
  ("change", "got"),
  [
    (
      lambda x: x["inner_state"]["0"].pop("mu"),
      "nothing at 'inner_state/0/mu'",
    ),
    (
      lambda x: x.update(more=jnp.ones(2)),
      r"float32\[2\] at 'more' where `target` has nothing",
    ),
    (
      lambda x: x["inner_state"]["0"].update(mu=jnp.ones(2)),
      r"float32\[2\] at 'inner_state/0/mu' where `target` has float32\[3\]",
    ),
    (
      lambda x: x["counts"].update(applied_steps=jnp.float32(1)),
      r"float32\[\] at 'counts/applied_steps' where `target` has int32",
    ),
    (
      lambda x: x["inner_state"]["0"].update(mu=Dataset("float32", (3,))),
      r"Dataset\(.* at 'inner_state/0/mu' where `target` has float32\[3\]",
    ),
    (
      lambda x: x.update(counts=3.0),
      r"float32\[\] at 'counts' where `target` has StepCounts",
    ),
  ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, got):
  saved = serialization.to_state_dict(WRAPPED.init(jnp.ones(3)))
  change(saved)
  with pytest.raises(ValueError, match=f"`restored` must have .* got {got}"):
    ols.checkpoints.from_dicts(saved, WRAPPED.init(jnp.ones(3)))
