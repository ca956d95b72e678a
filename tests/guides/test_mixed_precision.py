"""mixed_precision.md, which_layers.md and precision_schedule.md."""

import ast
import dataclasses

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.truth.workloads import lenet5
import optax_lossscale as ols
from optax_lossscale import hardware
from tests import documents
from tests.autocast.programs import dtypes_of

PATH = "docs/guides/mixed_precision.md"


class MLP(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.LayerNorm()(nn.relu(nn.Dense(8, name="hidden")(x)))
    return nn.Dense(3, name="head")(x)


def loss_of_mlp(variables, x):
  return jnp.mean(MLP().apply(variables, x) ** 2)


def test_what_is_mixed_has_its_products_in_float16(monkeypatch):
  device = dataclasses.replace(
    hardware.probe(), preferred_dtype=jnp.dtype(jnp.bfloat16)
  )
  monkeypatch.setattr(hardware, "probe", lambda: device)
  given = {"nnx": nnx, "lenet": lenet5.LeNet5()}
  # The first block is of torch.
  with documents.reading(PATH, without="In PyTorch.*?Here", **given) as page:
    params, batch, loss_fn = page["params"], page["batch"], page["loss_fn"]
    adam = ols.loss_scaling(optax.adam(1e-3), page["rule"])
    page.run(count=1, opt_state=adam.init(params))
    np.testing.assert_allclose(page["loss"], loss_fn(params, batch), rtol=1e-3)

    page.run("A single layer", 1)
    images = jnp.ones((1, 32, 32, 1))
    variables = jax.eval_shape(page["lenet"].init, jax.random.key(0), images)
    found = dtypes_of(
      "conv_general_dilated", page["mixed_lenet"], variables, images
    )
    assert found == ["float16"] * 2 + ["float32"] * 4
    page.run("A single layer")
    inputs = jnp.ones((4, 5))
    assert page["mixed_head"](inputs).dtype == jnp.float32

    for count, dtype in ((1, "float16"), (None, "bfloat16")):
      page.run("Policies", count)
      found = dtypes_of("dot_general", page["mixed_loss_fn"], params, batch)
      assert set(found) == {dtype}

    variables = jax.jit(MLP().init)(jax.random.key(0), inputs)
    mixed_loss_fn = ols.autocast(loss_of_mlp, "O1")
    page.run(mixed_loss_fn=mixed_loss_fn, params=variables, batch=inputs)


def test_the_loss_of_a_page_is_tuned():
  batch, other = jnp.split(jax.random.normal(jax.random.key(1), (8, 5)), 2)
  names = {
    "loss_fn": loss_of_mlp,
    "params": jax.jit(MLP().init)(jax.random.key(0), batch),
    "batch": batch,
    "other_batch": other,
  }
  with documents.reading("docs/guides/which_layers.md", **names) as page:
    page.run()
  assert page["report"].overrides == {}
  tuned, params = page["tuned_loss_fn"], names["params"]
  assert set(dtypes_of("dot_general", tuned, params, batch)) == {"bfloat16"}


@pytest.mark.parametrize("name", ["float32", None])
def test_the_loss_stays_if_the_device_prefers_no_low_dtype(name, monkeypatch):
  found = dataclasses.replace(
    hardware.probe(), preferred_dtype=name and jnp.dtype(name)
  )
  monkeypatch.setattr(hardware, "probe", lambda: found)
  names = {"jnp": jnp, "ols": ols, "loss_fn": jnp.sum}
  exec(documents.block(documents.read(PATH), "Policies", "probe()"), names)
  assert "mixed_loss_fn" not in names


def test_five_lines_of_torch_are_beside_five_of_ours():
  torch, ours, *_ = documents.blocks(documents.read(PATH))
  assert len(ast.parse(torch).body) == len(ast.parse(ours).body) == 5


def test_a_schedule_counts_applied_steps_in_each_step():
  path = "docs/guides/precision_schedule.md"
  with documents.reading(path) as page:
    page.run(count=1)
    assert (page["state"].low, page["state"].steps) == (True, 1)
    page.run(count=1)
    given = [page[x] for x in ("params", "opt_state", "state", "batch")]
    *_, state, _ = page["train_step"](*given)
    assert (state.low, state.steps) == (True, 2)

    # The state of the wrapper may be anywhere.
    start = given[0]
    tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
    tx = optax.chain(ols.instruments.record(tx, 2), optax.identity())
    page.names |= {"params": start, "tx": tx, "opt_state": tx.init(start)}
    page.names["state"] = page["schedule"].init()
    page.run("In a step of your own")
    assert page["state"].steps == 1
