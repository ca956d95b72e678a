"""The recipes for checkpoints do what their page says."""

import dataclasses
import functools
import os

from flax import serialization
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import describe
from tests.support import to_bits

PAGE = documents.read("docs/guides/checkpoints.md")
PARAMS = {"kernel": jnp.arange(32.0).reshape(4, 8) / 64, "bias": jnp.zeros(8)}
# S is soon so large that float16 overflows, and again every few steps.
RULE = ols.DynamicLossScale(2.0**13, growth_interval=2)


def loss_fn(params, batch, key=None):
  x = batch.astype(jnp.float16)
  params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
  out = x @ params["kernel"] + params["bias"]
  if key is not None:
    out = out * jax.random.bernoulli(key, 0.9, out.shape)
  return jnp.sum(jnp.square(out.astype(jnp.float32)))


NAMES = {
  "AxisType": AxisType,
  "NamedSharding": NamedSharding,
  "PartitionSpec": PartitionSpec,
  "dataclasses": dataclasses,
  "jax": jax,
  "jnp": jnp,
  "ocp": ocp,
  "ols": ols,
  "optax": optax,
  "os": os,
  "serialization": serialization,
  "params": PARAMS,
  "batch": jnp.ones((2, 4)),
  "loss_fn": loss_fn,
  "inner": optax.adam(1e-2),
  "rule": RULE,
}


def run(title, **names):
  return documents.run(documents.section(PAGE, title), NAMES | names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns the folder of a run of 20 steps, and what the recipe defined."""
  folder = tmp_path_factory.mktemp("run")
  return folder, run("Save and resume with Orbax", folder=folder, steps=20)


@functools.cache
def wrapped():
  """Returns a wrapper and its state after a clean step."""
  tx = ols.loss_scaling(NAMES["inner"], RULE)
  opt_state = tx.init(PARAMS)
  scaled_grads = jax.tree.map(jnp.ones_like, PARAMS)
  _, opt_state = tx.update(scaled_grads, opt_state, PARAMS)
  return {"tx": tx, "opt_state": opt_state, "scaled_grads": scaled_grads}


@pytest.mark.slow
def test_save_and_resume_with_orbax(saved, tmp_path):
  _, whole = saved
  run("Save and resume with Orbax", folder=tmp_path, steps=13)
  resumed = run("Save and resume with Orbax", folder=tmp_path, steps=20)
  skipped = resumed["state"]["opt_state"].skipped_steps
  assert 3 < skipped < 17
  assert describe(resumed["state"]) == describe(whole["state"])
  assert to_bits(resumed["state"]) == to_bits(whole["state"])
  with ocp.CheckpointManager(tmp_path) as manager:
    assert manager.all_steps() == [10, 20]


def test_resume_on_another_mesh(saved):
  folder, whole = saved
  names = run("Resume on another mesh", folder=folder, state=whole["state"])
  state = names["state"]
  assert to_bits(state) == to_bits(whole["state"])
  kernel = PartitionSpec(None, "model")
  assert state["params"]["kernel"].sharding.spec == kernel
  assert state["opt_state"].inner_state[0].mu["kernel"].sharding.spec == kernel
  assert ols.get_loss_scale(state["opt_state"]).sharding.is_fully_replicated
  state = whole["train_step"](state, NAMES["batch"])
  assert state["step"] == 21


def test_one_file(saved, tmp_path):
  _, whole = saved
  names = run("One file", folder=tmp_path, state=whole["state"])
  assert describe(names["state"]) == describe(whole["state"])
  assert to_bits(names["state"]) == to_bits(whole["state"])
  assert os.listdir(tmp_path) == ["state.msgpack"]


def test_a_save_that_fails_leaves_the_file_as_it_was(saved, tmp_path):
  _, whole = saved
  names = run("One file", folder=tmp_path, state=whole["state"])
  path = tmp_path / "state.msgpack"
  before = path.read_bytes()
  with pytest.raises(TypeError):  # Half of it is written, and then a key comes.
    names["save"](path, whole["state"])
  assert path.read_bytes() == before


def test_a_checkpoint_from_before_loss_scaling(tmp_path):
  inner = NAMES["inner"]
  bare = {
    "params": jax.tree.map(lambda x: x + 1, PARAMS),
    "opt_state": inner.update(PARAMS, inner.init(PARAMS), PARAMS)[1],
  }
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(7, args=ocp.args.StandardSave(bare))
  names = run(
    "A checkpoint from before loss scaling",
    bare_folder=tmp_path,
    tx=ols.loss_scaling(inner, RULE),
  )
  assert to_bits(names["params"]) == to_bits(bare["params"])
  opt_state = names["opt_state"]
  assert to_bits(opt_state.inner_state) == to_bits(bare["opt_state"])
  assert ols.get_loss_scale(opt_state) == RULE.init_scale


@pytest.mark.slow
def test_without_loss_scaling_again():
  inner, opt_state = NAMES["inner"], wrapped()["opt_state"]
  names = run("Removing loss scaling", opt_state=opt_state)
  grads = jax.grad(loss_fn)(PARAMS, NAMES["batch"])
  expected = inner.update(grads, opt_state.inner_state, PARAMS)
  got = names["updates"], names["inner_state"]
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  assert to_bits(got) == to_bits(expected)


@pytest.mark.parametrize(
  "clean_steps, loss_scale, expected",
  [(5, 2.0**4, 2.0**4), (200, 2.0**4, 2.0**5), (5, 2.0**20, 2.0**16)],
)
def test_other_arguments_in_mid_run(clean_steps, loss_scale, expected):
  state = wrapped()["opt_state"]
  rule_state = state.loss_scale_state._replace(
    loss_scale=jnp.float32(loss_scale), clean_steps=jnp.int32(clean_steps)
  )
  names = wrapped() | {"opt_state": state._replace(loss_scale_state=rule_state)}
  names = run("Changing arguments mid-run", **names)
  assert ols.get_loss_scale(names["opt_state"]) == expected
  assert names["opt_state"].applied_steps == 2


def test_another_rule_or_another_s():
  before = wrapped()["opt_state"]
  opt_states = {"generator": before, "critic": before}
  names = run(
    "Changing the rule or S mid-run", opt_state=before, opt_states=opt_states
  )
  opt_state = names["opt_state"]
  assert ols.get_loss_scale(opt_state) == ols.get_loss_scale(before)
  assert to_bits(opt_state.inner_state) == to_bits(before.inner_state)
  names["tx"].update(PARAMS, opt_state, PARAMS)
  loss_scales = {
    name: ols.get_loss_scale(state)
    for name, state in names["opt_states"].items()
  }
  assert loss_scales == {"generator": 2.0**13, "critic": 2.0**32}


def test_setting_by_the_name_of_s_also_sets_what_is_called_so():
  tx = ols.loss_scaling(optax.trace(0.5), RULE)
  opt_state = tx.init({"loss_scale": jnp.zeros(2)})
  opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(1.0))
  assert np.shape(opt_state.inner_state.trace["loss_scale"]) == ()
