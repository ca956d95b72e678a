"""The page on debugging finds the mistakes that it names."""

import logging
import re
import runpy

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.guides.test_something_is_wrong import GOOD
from tests.guides.test_something_is_wrong import loss_fn
from tests.guides.test_something_is_wrong import PARAMS
from tests.guides.test_something_is_wrong import ZERO

PAGE = documents.read("docs/guides/debugging.md")


def step_of(loss_fn, tx, code=documents.STEP):
  """Returns a step, by default the one that the pages take for granted."""
  names = {"jax": jax, "loss_fn": loss_fn, "ols": ols, "optax": optax}
  return documents.step(code, names | {"tx": tx})


def test_a_right_step_is_shown_as_the_page_shows_it(capsys):
  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())

  names = {"ols": ols, "train_step": step_of(ols.autocast(loss_fn), tx)}
  names |= {"params": PARAMS, "opt_state": tx.init(PARAMS), "batch": GOOD}
  text = documents.section(PAGE, "Run check_step")
  names = documents.run(text, names)
  assert f"```\n{capsys.readouterr().out}```" in text
  names["test_train_step"]()


def test_shapes_are_enough_for_a_large_model_and_name_a_wrong_line(capsys):
  path = documents.ROOT / "examples" / "check_by_shapes.py"
  text = documents.section(PAGE, "Shapes are enough")
  runpy.run_path(str(path), run_name="__main__")
  right, wrong = re.findall(
    r"^The loss scaling .*?^(?=$)",
    capsys.readouterr().out,
    re.DOTALL | re.MULTILINE,
  )
  assert right.startswith(
    "The loss scaling of this step is right, for all values."
  )
  assert documents.blocks(text, "text") == [wrong]

  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  names = {"jax": jax, "ols": ols, "tx": tx, "train_step": step_of(loss_fn, tx)}
  names |= jax.eval_shape(lambda: {"params": PARAMS, "batch": GOOD})
  report = documents.run(text, names)["report"]
  assert report.ok and all(x.verdict != "exact" for x in report.laws)


def test_a_step_that_was_not_lowered_is_found(caplog):
  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())

  text = documents.section(PAGE, "Is it float16 at all?")
  names = {"ols": ols, "logging": logging, "params": PARAMS, "batch": GOOD}
  names["opt_state"] = tx.init(PARAMS)
  caplog.set_level(logging.INFO)
  mixed_loss_fn = ols.autocast(loss_fn, "O1")
  documents.run(text, names | {"train_step": step_of(mixed_loss_fn, tx)})
  assert caplog.messages[-1].startswith("2 of 2 products in float16; ")
  with pytest.raises(AssertionError):
    documents.run(text, names | {"train_step": step_of(loss_fn, tx)})
  assert caplog.messages[-1].startswith("0 of 2 products in low precision; ")


def test_only_skipped_steps_are_printed(capfd):
  tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(1024.0))
  code = documents.blocks(documents.section(PAGE, "Printing from inside jit"))
  step = step_of(loss_fn, tx, documents.STEP + code[0])
  for batch in (GOOD, ZERO, GOOD):
    jax.block_until_ready(step(PARAMS, tx.init(PARAMS), batch))
  jax.effects_barrier()
  (line,) = capfd.readouterr().out.splitlines()
  assert line.startswith("skipped: loss ")
  assert line.endswith("S now 512.0, nan True, stalled False")


BY_HAND = "Gradients that are averaged by hand"


def test_averaged_by_hand_all_devices_skip_and_nothing_warns():
  first, before_update = documents.blocks(documents.section(PAGE, BY_HAND))
  names = {"ols": ols, "optax": optax, "rule": ols.DynamicLossScale(8.0)}
  tx = documents.run(f"```python\n{first}```", names)["tx"]
  code = documents.STEP.replace("updates,", f"{before_update}updates,")
  train_step = jax.pmap(step_of(jnp.dot, tx, code), axis_name="data")
  params = jnp.ones(2)
  given = jax.tree.map(lambda x: jnp.stack(8 * [x]), (params, tx.init(params)))
  batch = jnp.ones((8, 2)).at[3].set(jnp.nan)
  params, opt_state, _ = train_step(*given, batch)
  assert opt_state.loss_scale_state.loss_scale.tolist() == [4.0] * 8
  assert params.tolist() == [[1.0, 1.0]] * 8
