"""What the README shows works as it stands there."""

import functools
import pathlib
import re

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.demo import digits
from tests.precision.programs import dtypes_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def python_blocks():
  return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_examples_run_one_after_the_other():
  model = nn.Dense(3, dtype=jnp.float16)
  batch = np.ones((4, 5), np.float32)
  params = model.init(jax.random.key(0), batch)

  def loss_fn(params, batch):
    return jnp.mean(jnp.float32(model.apply(params, batch)) ** 2)

  names = {"params": params, "loss_fn": loss_fn, "batch": batch}
  names |= {"jnp": jnp, "functools": functools}
  blocks = python_blocks()
  step, *precision = blocks[:4]
  policy, master_weights, schedule, scheduled_step = blocks[4:8]
  status, rehearsal, port, metrics, threshold, selection = blocks[8:14]
  devices, collection = blocks[14:]
  exec(step, names)
  before = loss_fn(params, batch)
  for _ in range(5):
    names["params"], names["opt_state"], loss = names["train_step"](
      names["params"], names["opt_state"], batch
    )
  assert loss < before
  assert names["opt_state"].applied_steps == 5

  names |= {"nnx": nnx, "lenet": digits.LeNet5(jnp.float32)}
  for block in precision:
    exec(block, names)
  np.testing.assert_allclose(names["loss"], loss, rtol=0.1)
  images = jnp.ones((1, digits.SIZE, digits.SIZE, 1))
  variables = names["lenet"].init(jax.random.key(0), images)
  found = dtypes_of(
    "conv_general_dilated", names["mixed_lenet"], variables, images
  )
  assert found == ["float16"] * 2 + ["float32"] * 4
  assert names["mixed_head"](batch).dtype == jnp.float32

  # What is written in float32, as these expect it.
  written = names | {"loss_fn": lambda params, x: jnp.mean(x @ params["w"])}
  written["params"] = {"w": jnp.ones((5, 3), jnp.float16)}
  exec(policy, written)
  assert written["params"]["w"].dtype == jnp.float32
  mixed = written["mixed_loss_fn"]
  found = dtypes_of("dot_general", mixed, written["params"], batch)
  assert found == ["float16"] * 2
  exec(master_weights, written)
  written["opt_state"] = written["tx"].init(written["params"])
  exec(schedule, written)
  assert (written["state"].low, written["state"].steps) == (True, 1)
  exec(scheduled_step, written)
  *_, state, _ = written["train_step"](
    *(written[x] for x in ("params", "opt_state", "state", "batch"))
  )
  assert (state.low, state.steps) == (True, 2)

  exec(status, names)
  assert not names["overflowed"]
  assert names["opt_state"].applied_steps == 6
  exec(rehearsal, names)
  assert jnp.isfinite(names["loss"])

  saved = {
    "scale": np.array([4096.0], np.float32),
    "growth_tracker": 499,
    "hysteresis_tracker": 2,
  }
  ported = names | {"checkpoint": {"optimizer": {"grad_scaler": saved}}}
  exec(port, ported)
  zeros = jax.tree.map(jnp.zeros_like, params)
  _, opt_state = ported["tx"].update(zeros, ported["opt_state"], params)
  assert ols.get_loss_scale(opt_state) == 8192.0

  _, names["grads"] = ols.scaled_value_and_grad(loss_fn, names["opt_state"])(
    names["params"], batch
  )
  exec(metrics, names)
  assert names["metrics"]["applied_steps"] == 6

  exec(threshold, names)
  assert not names["opt_state"].skipped

  names["ema"] = names["params"]
  names["new_ema"] = optax.apply_updates(names["params"], names["updates"])
  exec(selection, names)
  assert jax.tree.all(
    jax.tree.map(jnp.array_equal, names["ema"], names["new_ema"])
  )

  names["batch"] = np.ones((8, 5), np.float32)
  exec(devices, names)
  opt_state = names["tx"].init(params)
  _, opt_state, loss = names["train_step"](params, opt_state, names["batch"])
  assert opt_state.applied_steps == 1
  np.testing.assert_allclose(loss, before, rtol=1e-2)

  names["variables"] = {"params": jnp.ones(2), "_overwrite_with_gradient": 3.0}
  names["updates"] = {"params": jnp.ones(2), "_overwrite_with_gradient": 5.0}
  exec(collection, names)
  assert names["variables"]["_overwrite_with_gradient"] == 5.0
  assert jnp.all(names["variables"]["params"] == 2.0)


def test_the_train_step_is_that_of_the_demo():
  demo = (ROOT / "optax_lossscale/demo/training.py").read_text()
  body = re.search(r"def train_step.*?\n(.*?)  return", README, re.DOTALL)
  for line in body.group(1).splitlines():
    assert line.strip() in demo


def test_the_table_of_names_is_complete():
  table = README[README.index("## Names") : README.index("## The command")]
  for name in ols.__all__:
    assert f"`{name}" in table, name
