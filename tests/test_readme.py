"""What the README shows works as it stands there."""

import ast
import dataclasses
import functools
import pathlib
import re
import shlex
from typing import Any

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import cli
from optax_lossscale.cli import _loss_scale
from optax_lossscale.demo import brier
from optax_lossscale.demo import digits
from tests import documents
from tests.autocast.programs import dtypes_of
from tests.demo import tiny
from tests.support import to_bits

README = documents.read("README.md")


block = functools.partial(documents.block, README)
STEP = block("optax_lossscale", "import optax_lossscale as ols\n\ntx = ")


def test_the_report_of_a_loss_is_the_one_that_is_shown(capsys):
  class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.LayerNorm()(nn.relu(nn.Dense(8, name="hidden")(x)))
      return nn.Dense(3, name="head")(x)

  batch = np.ones((4, 5), np.float32)
  params = MLP().init(jax.random.key(0), batch)
  names = {"ols": ols, "params": params, "batch": batch}
  names["mixed_loss_fn"] = ols.autocast(
    lambda params, batch: jnp.mean(MLP().apply(params, batch) ** 2), "O1"
  )
  exec(block("Mixed precision", "precision_report"), names)
  assert f"```text\n{capsys.readouterr().out}```" in README


@pytest.mark.slow
def test_the_examples_run_one_after_the_other():
  model = nn.Dense(3, dtype=jnp.float16)
  batch = np.ones((4, 5), np.float32)
  params = model.init(jax.random.key(0), batch)

  def loss_fn(params, batch):
    return jnp.mean(jnp.float32(model.apply(params, batch)) ** 2)

  names = {"params": params, "loss_fn": loss_fn, "batch": batch}
  names |= {"jnp": jnp, "functools": functools}
  exec(STEP, names)
  before = loss_fn(params, batch)
  for _ in range(5):
    names["params"], names["opt_state"], loss = names["train_step"](
      names["params"], names["opt_state"], batch
    )
  assert loss < before
  assert names["opt_state"].applied_steps == 5
  exec(block("optax_lossscale", "check_step"), names)
  assert names["report"].ok

  names |= {"nnx": nnx, "lenet": digits.LeNet5(jnp.float32)}
  mixed = functools.partial(block, "Mixed precision")
  exec(mixed("ols.autocast(loss_fn"), names)
  np.testing.assert_allclose(names["loss"], loss, rtol=0.1)
  exec(mixed("ols.autocast(lenet.apply"), names)
  images = jnp.ones((1, digits.SIZE, digits.SIZE, 1))
  variables = names["lenet"].init(jax.random.key(0), images)
  found = dtypes_of(
    "conv_general_dilated", names["mixed_lenet"], variables, images
  )
  assert found == ["float16"] * 2 + ["float32"] * 4
  exec(mixed("class Head"), names)
  assert names["mixed_head"](batch).dtype == jnp.float32

  # What is written in float32, as these expect it.
  written = names | {"loss_fn": lambda params, x: jnp.mean(x @ params["w"])}
  written["params"] = {"w": jnp.ones((5, 3), jnp.float16)}
  exec(mixed("ols.get_policy"), written)
  assert written["params"]["w"].dtype == jnp.float32
  found = dtypes_of(
    "dot_general", written["mixed_loss_fn"], written["params"], batch
  )
  assert found == ["float16"] * 2
  exec(mixed("ols.master_weights"), written)
  written["opt_state"] = written["tx"].init(written["params"])
  schedule = functools.partial(
    block, "Low precision for the first part of training"
  )
  exec(schedule("make_train_step"), written)
  assert (written["state"].low, written["state"].steps) == (True, 1)
  exec(schedule("schedule.value_and_grad"), written)
  *_, state, _ = written["train_step"](
    *(written[x] for x in ("params", "opt_state", "state", "batch"))
  )
  assert (state.low, state.steps) == (True, 2)

  exec(block("Which check do I need?", "ols.float_status"), names)
  assert not names["overflowed"]
  assert names["opt_state"].applied_steps == 6
  exec(block("Which check do I need?", "ols.saturating"), names)
  assert jnp.isfinite(names["loss"])

  saved = {
    "scale": np.array([4096.0], np.float32),
    "growth_tracker": 499,
    "hysteresis_tracker": 2,
  }
  ported = names | {"checkpoint": {"optimizer": {"grad_scaler": saved}}}
  exec(block("Concepts", "from_state_dict"), ported)
  zeros = jax.tree.map(jnp.zeros_like, params)
  _, opt_state = ported["tx"].update(zeros, ported["opt_state"], params)
  assert ols.get_loss_scale(opt_state) == 8192.0

  _, names["grads"] = ols.scaled_value_and_grad(loss_fn, names["opt_state"])(
    names["params"], batch
  )
  exec(block("Seeing it, and tuning it", "ols.loss_scale_metrics"), names)
  assert names["metrics"]["applied_steps"] == 7
  assert names["metrics"]["headroom"] > 0
  exec(block("Seeing it, and tuning it", "ols.raise_if_failed"), names)

  _, names["grads"] = ols.scaled_value_and_grad(loss_fn, names["opt_state"])(
    names["params"], batch
  )
  exec(block("Your own reasons to skip", "overflow=grad_norm"), names)
  assert not names["opt_state"].skipped

  names["ema"] = names["params"]
  names["new_ema"] = optax.apply_updates(names["params"], names["updates"])
  exec(block("What else a step changes", "new_ema"), names)
  assert jax.tree.all(
    jax.tree.map(jnp.array_equal, names["ema"], names["new_ema"])
  )

  exec(block("Accumulation", "microbatches=4"), names)
  assert names["overflow"].valid == 4
  assert not names["opt_state"].skipped

  names["batch"] = np.ones((8, 5), np.float32)
  exec(block("Many devices", "ols.pmean_gradients"), names)
  opt_state = names["tx"].init(params)
  _, opt_state, loss = names["train_step"](params, opt_state, names["batch"])
  assert opt_state.applied_steps == 1
  np.testing.assert_allclose(loss, before, rtol=1e-2)

  names["variables"] = {"params": jnp.ones(2), "_overwrite_with_gradient": 3.0}
  names["updates"] = {"params": jnp.ones(2), "_overwrite_with_gradient": 5.0}
  exec(block("FP8", "_overwrite_with_gradient"), names)
  assert names["variables"]["_overwrite_with_gradient"] == 5.0
  assert jnp.all(names["variables"]["params"] == 2.0)


def test_the_norm_that_is_logged_is_the_true_one_when_s_grows():
  seeing = block("Seeing it, and tuning it", "ols.loss_scale_metrics")
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(growth_interval=1))
  params = {"w": jnp.array([3.0, 4.0])}
  names = {"ols": ols, "optax": optax, "tx": tx, "params": params}
  names["opt_state"] = tx.init(params)
  for step in range(1, 4):
    _, names["grads"] = ols.scaled_value_and_grad(
      lambda params: jnp.sum(params["w"] ** 2) / 2, names["opt_state"]
    )(params)
    exec(seeing, names)
    assert names["metrics"]["grad_norm"] == 5
    assert names["metrics"]["loss_scale"] == 2.0 ** (15 + step)
  # After `update` it would be halved.
  with pytest.warns(ols.WiringWarning, match="from before `update`"):
    after = optax.tree.norm(ols.unscale(names["grads"], names["opt_state"]))
  assert after == 2.5


def test_a_running_mean_passes_over_the_nan_of_a_skipped_step():
  averaging = block("What else a step changes", "mean_loss")
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  params = jnp.ones(2)
  names = {"ols": ols, "opt_state": tx.init(params), "mean_loss": 4.0}
  for factor, expected in (
    (2.0, 3.8),
    (np.nan, 3.8),
    (np.inf, 3.8),
    (2.0, 3.62),
  ):
    names["loss"], grads = ols.scaled_value_and_grad(
      lambda params, factor: jnp.mean(params) * factor, names["opt_state"]
    )(params, jnp.float32(factor))
    _, names["opt_state"] = tx.update(grads, names["opt_state"], params)
    exec(averaging, names)
    np.testing.assert_allclose(names["mean_loss"], expected, rtol=1e-6)
  assert names["opt_state"].skipped_steps == 2


@pytest.mark.slow
def test_what_is_seen_and_advised(capfd):
  seeing = functools.partial(block, "Seeing it, and tuning it")
  rule = ols.DynamicLossScale(2.0**20)
  batch = np.ones((4, 5), np.float32)
  params = {"w": jnp.full((5, 3), 0.5)}

  def loss_fn(params, batch):
    hidden = jnp.float16(batch) @ jnp.float16(params["w"])
    return jnp.mean(jnp.float32(hidden) ** 2)

  names = {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax, "rule": rule}
  names |= {"params": params, "loss_fn": loss_fn, "batch": batch}
  record = seeing("ols.instruments.record")
  exec(record.replace("ols.DynamicLossScale()", "rule"), names)
  for _ in range(100):
    names["params"], names["opt_state"], _ = names["train_step"](
      names["params"], names["opt_state"], batch
    )
  with matplotlib.rc_context({"backend": "agg"}):
    exec(seeing("ols.instruments.history"), names)
    assert names["history"].overflow.sum() == 5
    exec(seeing("ols.instruments.advise"), names)
    _, names["grads"] = jax.value_and_grad(loss_fn)(params, batch)
    exec(seeing("ols.instruments.exponent_histogram"), names)
    matplotlib.pyplot.close("all")
  assert names["histogram"].total == 15
  assert names["lost"] == 0
  first = names["history"]._replace(loss_scale=np.float32([2.0**20]))
  overflow = seeing("ols.instruments.where_overflow")
  exec(overflow, names | {"history": first})
  exec(overflow, names)
  jax.effects_barrier()
  printed, advice, place, none = capfd.readouterr().out.splitlines()
  assert printed.startswith(
    "step 100: clean, loss scale now 32768, headroom 0.6 bits, 95 appl"
  )
  assert advice.startswith("init_scale: 2**20 -> 2**15: 5 steps overflowed")
  assert place.startswith("float16 overflow in ")
  assert none == "no operation overflowed"


@pytest.mark.slow
def test_the_table_of_rules_is_what_replays_show():
  section = documents.section(README, "Rules that look before they leap")
  rows = re.findall(r"^\| `(\S+)`(.*?) \| (.*) \|$", section, re.MULTILINE)
  text_of = {
    "megatron": "megatron:initial_scale=2**32,min_scale=1,growth_factor=2,"
    "backoff_factor=0.5,growth_interval=1000,hysteresis=2"
  }
  histories = [
    ols.instruments.read_history(f"tests/traces/amax_{name}.csv")
    for name in ("digits", "text")
  ]
  # A table before it says in words what the rules do.
  shown = {
    name: cells.split(" | ") for name, _, cells in rows if cells[0].isdigit()
  }
  assert len(shown) == 15
  for name, cells in shown.items():
    rule = _loss_scale.parse(text_of.get(name, name)).rule
    replays = [ols.instruments.replay(rule, x) for x in histories]
    expected = [
      cell
      for replay in replays
      for cell in (str(replay.lost_steps), f"{replay.mean_headroom:.1f}")
    ]
    assert cells == expected, name


def test_amax_inside_the_model_reaches_the_rule():
  rules = functools.partial(block, "Rules that look before they leap")
  params = {"w": jnp.full((5, 3), 0.5)}
  batch = {"x": jnp.ones((4, 5)), "y": jnp.ones(4)}
  names = {"jnp": jnp, "ols": ols, "optax": optax, "params": params}
  names |= {"batch": batch}
  exec(rules("ols.rules.HeadroomLossScale"), names)
  names["opt_state"] = names["tx"].init(params)
  exec(rules("ols.rules.amax_tap"), names)
  assert names["opt_state"].amax == max(
    names["amax"], jnp.abs(names["grads"]["w"]).max()
  )


class Network(nn.Module):
  """With batch statistics, as the recipe for Linen has them."""

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(4, dtype=jnp.float16)(x)
    return nn.Dense(2)(nn.BatchNorm(not train)(x))


def test_flax_linen():
  names = {"Any": Any, "jax": jax, "jnp": jnp, "ols": ols}
  names = documents.run(documents.section(README, "Flax Linen"), names)
  model = Network()
  x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  batch = {"x": x, "y": np.ones((4, 2), np.float32)}
  variables = model.init(jax.random.key(0), batch["x"], train=True)
  state = names["TrainState"].create(
    apply_fn=model.apply,
    tx=ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale()),
    **variables,
  )
  state, loss = names["train_step"](state, batch)
  after, _ = names["train_step"](state, batch | {"x": x * np.nan})
  _, next_loss = names["train_step"](after, batch)
  assert (after.step, after.attempts) == (1, 2)
  assert to_bits(after.batch_stats) == to_bits(state.batch_stats)
  assert next_loss < loss


def test_flax_nnx():
  model = nnx.Sequential(
    nnx.Linear(3, 4, dtype=jnp.float16, rngs=nnx.Rngs(0)),
    nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
  )
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  names = {"jnp": jnp, "nnx": nnx, "ols": ols, "optax": optax}
  names |= {"model": model, "tx": tx}
  names = documents.run(documents.section(README, "Flax NNX"), names)
  optimizer = names["optimizer"]
  x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  batch = {"x": x, "y": np.arange(4)}
  loss = names["train_step"](model, optimizer, batch)
  before = to_bits(nnx.state(model))
  names["train_step"](model, optimizer, batch | {"x": x * np.nan})
  assert to_bits(nnx.state(model)) == before
  assert names["train_step"](model, optimizer, batch) < loss
  metrics = ols.loss_scale_metrics(optimizer.opt_state)
  assert (optimizer.step[...], metrics["applied_steps"]) == (3, 2)


def test_flax_nnx_in_float32_with_dropout():
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
    nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
  )
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  names = {"jnp": jnp, "nnx": nnx, "ols": ols, "optax": optax}
  names |= {"model": model, "tx": tx}
  text = documents.section(README, "Flax NNX")
  mixed = 'ols.nnx.autocast(loss_fn, "O1")'
  assert f"pass `{mixed}` in the place of `loss_fn`" in documents.one_line(text)
  text = text.replace("grad(loss_fn, optimizer)", f"grad({mixed}, optimizer)")
  names = documents.run(text, names)
  x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  batch = {"x": x, "y": np.arange(4)}
  both = model, names["optimizer"]
  graphdef, state = nnx.split(both)
  jaxpr = jax.make_jaxpr(
    lambda state: names["train_step"](*nnx.merge(graphdef, state), batch)
  )(state)
  assert ":f16[4,4] = dot_general" in str(jaxpr)
  names["train_step"](*both, batch)
  assert names["optimizer"].opt_state.applied_steps[...] == 1
  assert model.layers[1].rngs.count[...] == 1


def test_checkpoints():
  inner, params = optax.adam(0.1), jnp.ones(3)
  tx = ols.loss_scaling(inner, ols.DynamicLossScale())
  _, bare_state = inner.update(params, inner.init(params))
  names = {"ols": ols, "params": params, "tx": tx, "bare_state": bare_state}
  names = documents.run(documents.section(README, "Checkpoints"), names)
  assert to_bits(names["opt_state"].inner_state) == to_bits(bare_state)
  assert to_bits(names["bare_state"]) == to_bits(bare_state)


@pytest.mark.parametrize("code", documents.blocks(README))
def test_every_block_is_run_by_one_of_these_tests(code):
  calls = [
    node.args[-1].value
    for node in ast.walk(ast.parse(pathlib.Path(__file__).read_text()))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Name)
    and node.args
    and isinstance(node.args[-1], ast.Constant)
  ]
  whole = ("Flax Linen", "Flax NNX", "Checkpoints")
  assert any(str(words) in code for words in calls) or any(
    code in documents.blocks(documents.section(README, title))
    for title in whole
  )


@pytest.mark.parametrize("around", ["recorded", "chained"])
def test_a_precision_schedule_counts_steps_wherever_loss_scaling_is(around):
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  if around == "recorded":
    tx = ols.instruments.record(tx, 2)
  else:
    tx = optax.chain(tx, optax.identity())
  params = jnp.ones((2, 2))
  schedule = ols.precision_schedule("fast|step", total_steps=10)
  names = {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax, "tx": tx}
  names |= {"schedule": schedule}
  names["loss_fn"] = lambda params, x: jnp.mean(x @ params)
  title = "Low precision for the first part of training"
  exec(block(title, "schedule.value_and_grad"), names)
  carry = params, tx.init(params), schedule.init()
  for x in (jnp.eye(2), jnp.eye(2) * jnp.inf, jnp.eye(2)):
    *carry, _ = names["train_step"](*carry, x)
  assert carry[-1].steps == 2


def commands():
  """Returns the words of every shell command, in the page's order."""
  return [
    shlex.split(command)
    for block in documents.blocks(README, "sh")
    for command in block.split("&&")
  ]


def test_every_command_is_that_of_the_environment_that_was_made():
  for program, *_ in commands():
    assert program == "python3" or program.startswith(".venv/bin/")


@pytest.mark.slow
def test_the_command_line_runs_as_typed_one_command_after_the_other(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  task = dataclasses.replace(tiny.make_task(), name="brier")
  monkeypatch.setattr(brier, "make_task", lambda *, quick: task)
  program = ".venv/bin/optax-lossscale"
  ours = [words[1:] for words in commands() if words[0] == program]
  assert [words[0] for words in ours] == ["train", "simulate"]
  for words in ours:
    assert cli.main(words) == 0


@pytest.mark.parametrize("page", re.findall(r"\]\((docs/[^)#]*\.md)", README))
def test_pages_that_are_linked_are_there(page):
  assert documents.read(page).startswith("# ")


def test_the_train_step_is_that_of_the_demo():
  demo = documents.read("optax_lossscale/demo/training.py")
  body = re.search(r"def train_step.*?\n(.*?)  return", STEP, re.DOTALL)
  for line in body.group(1).splitlines():
    assert line.strip() in demo


def test_the_table_of_names_is_complete():
  table = documents.section(README, "Names")
  for name in ols.__all__:
    assert f"`{name}" in table, name
