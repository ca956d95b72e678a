"""docs/guides/checkpoints.md: what it saves comes back, and trains on."""

import dataclasses
import os
import subprocess
import sys

from flax import serialization
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support

PATH = "docs/guides/checkpoints.md"
# S is soon so large that float16 overflows, and again every few steps.
RULE = ols.DynamicLossScale(2.0**13, growth_interval=2)


def loss_fn(params, batch, key=None):
  out = jnp.float16(batch) @ jnp.float16(params["w"])
  if key is not None:
    out = out * jax.random.bernoulli(key, 0.9, out.shape)
  return jnp.sum(jnp.float32(out) ** 2)


NAMES = {
  "AxisType": AxisType,
  "NamedSharding": NamedSharding,
  "PartitionSpec": PartitionSpec,
  "dataclasses": dataclasses,
  "ocp": ocp,
  "os": os,
  "serialization": serialization,
  "loss_fn": loss_fn,
  "inner": optax.adam(1e-2),
  "rule": RULE,
}


@pytest.mark.slow
def test_save_and_resume_with_orbax(tmp_path):
  whole, killed, resumed = (documents.Page(PATH) for _ in range(3))
  training = documents.training() | NAMES
  for page, folder, steps in (
    (whole, tmp_path / "whole", 20),
    (killed, tmp_path / "killed", 13),
    (resumed, tmp_path / "killed", 20),
  ):
    page.names |= training
    page.run("Save and resume with Orbax", folder=folder, steps=steps)
  assert 3 < resumed["state"]["opt_state"].skipped_steps < 17
  assert support.to_bits(resumed["state"]) == support.to_bits(whole["state"])

  # A program with other devices, in which the library cannot be imported.
  saved = whole["state"]
  mesh = support.make_mesh()
  sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
  saved["params"] = jax.device_put(saved["params"], sharding)
  with ocp.CheckpointManager(tmp_path / "sharded") as manager:
    manager.save(20, args=ocp.args.StandardSave(saved))
  title = "Read it without this library"
  code = documents.block(documents.read(PATH), title, "import optax")
  code = f"""import sys; sys.modules["optax_lossscale"] = None
folder = {str(tmp_path / "sharded")!r}
{code}
for leaf in jax.tree.leaves((params, inner_state, loss_scale)):
  print(jax.device_get(leaf).tobytes().hex())
"""
  printed = subprocess.check_output([sys.executable, "-c", code], text=True)
  state = saved["opt_state"]
  read = saved["params"], state.inner_state, ols.get_loss_scale(state)
  assert printed.split() == [x.hex() for x in support.to_bits(read)]


def test_what_is_saved_comes_back_and_trains_on(tmp_path):
  with documents.reading(PATH, **NAMES) as page:
    params, tx = page["params"], ols.loss_scaling(NAMES["inner"], RULE)
    page.run("Save and resume with Orbax", folder=tmp_path, steps=10)
    saved = page["state"]

    page.run("Resume on another mesh")
    assert support.to_bits(page["state"]) == support.to_bits(saved)
    sharding = page["state"]["params"]["w"].sharding
    assert sharding.spec == PartitionSpec(None, "model")

    page.run("Read it without this library")
    support.assert_same_bits(
      page["inner_state"], saved["opt_state"].inner_state
    )
    assert page["loss_scale"] == ols.get_loss_scale(saved["opt_state"])

    page.run("One file")
    assert support.to_bits(page["state"]) == support.to_bits(saved)
    before = (tmp_path / "state.msgpack").read_bytes()
    with pytest.raises(TypeError):  # Half is written, and then a key comes.
      page["save"](tmp_path / "state.msgpack", saved)
    assert (tmp_path / "state.msgpack").read_bytes() == before

    inner = page["inner"]
    bare = {"params": params, "opt_state": inner.init(params)}
    folder = tmp_path / "bare"
    with ocp.CheckpointManager(folder) as manager:
      manager.save(7, args=ocp.args.StandardSave(bare))
    title = "A checkpoint from before loss scaling"
    page.run(title, tx=tx, bare_folder=folder)
    assert ols.get_loss_scale(page["opt_state"]) == RULE.init_scale

    page.run("Removing loss scaling", batch=page["batch"])
    grads = jax.grad(loss_fn)(params, page["batch"])
    expected = inner.update(grads, inner.init(params), params)
    support.assert_same_bits((page["updates"], page["inner_state"]), expected)

    # S is beyond the new bound, and comes within it.
    scaled_grads = jax.tree.map(jnp.ones_like, params)
    state = optax.tree.set(tx.init(params), loss_scale=jnp.float32(2.0**20))
    title = "Changing arguments mid-run"
    page.run(title, opt_state=state, scaled_grads=scaled_grads)
    assert ols.get_loss_scale(page["opt_state"]) == 2.0**16

    title = "Changing the rule or S mid-run"
    state = tx.init(params)
    page.run(
      title, opt_state=state, opt_states={"generator": state, "critic": state}
    )
    assert ols.get_loss_scale(page["opt_state"]) == RULE.init_scale
    page["tx"].update(scaled_grads, page["opt_state"], params)
    scales = jax.tree.map(
      ols.get_loss_scale,
      page["opt_states"],
      is_leaf=lambda x: isinstance(x, ols.LossScalingState),
    )
    assert scales == {"generator": 2.0**13, "critic": 2.0**32}
