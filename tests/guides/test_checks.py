"""The page on checks and dtypes: its first table, its steps, its advice."""

import re
import tomllib
import types

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.hardware import _probe
from tests import documents
from tests.autocast.programs import dtypes_of

PAGE = documents.read("docs/checks.md")
PARAMS = {"w": jnp.full((4, 3), 0.25)}
BATCH = jnp.linspace(-1, 1, 8).reshape(2, 4)


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] - 1) ** 2)


def run(title, **given):
  """Returns what the code of a section defines."""
  rule = ols.DynamicLossScale()
  tx = ols.loss_scaling(optax.sgd(0.1), rule)
  names = {"inner": optax.sgd(0.1), "jax": jax, "jnp": jnp, "ols": ols}
  names |= {"optax": optax, "loss_fn": loss_fn, "params": PARAMS, "tx": tx}
  names |= {"rule": rule, "batch": BATCH, "opt_state": tx.init(PARAMS)}
  return documents.run(documents.section(PAGE, title), names | given)


def test_the_table_names_the_dtype_that_the_library_prefers():
  rows = re.findall(r"^\| NVIDIA (.+?) \| (\w+) \|", PAGE, re.MULTILINE)
  assert len(rows) == 3
  for devices, expected in rows:
    for capability in re.findall(r"\((\d\.\d)\)", devices):
      device = types.SimpleNamespace(
        platform="gpu", compute_capability=capability
      )
      assert str(_probe._preferred_dtype(device)).lower() == expected
  for name in ("TPU", "CPU"):
    device = types.SimpleNamespace(platform=name.lower())
    expected = str(_probe._preferred_dtype(device))
    assert re.search(rf"^\| .*{name} \| {expected} \|", PAGE, re.MULTILINE)


def test_the_device_is_asked(capsys):
  names = run("If you do not know the hardware")
  assert names["check"] == ols.nonfinite()
  if jax.default_backend() == "cpu":
    assert capsys.readouterr().out == "float32\n"


def test_a_saturated_gradient_is_an_overflow_but_not_in_a_float32_head():
  first, by_path = documents.blocks(
    documents.section(PAGE, "Which check do I need?").partition("###")[0]
  )
  names = {"inner": optax.sgd(0.1), "jnp": jnp, "ols": ols}
  names["rule"] = ols.DynamicLossScale()
  grads = {"body": jnp.ones(2), "head": jnp.array([1, 65504.0])}
  by_path += "tx = ols.loss_scaling(inner, rule, check=check)"
  for code, overflows in ((first, True), (by_path, False)):
    exec(code, names)
    tx = names["tx"]
    _, state = tx.update(grads, tx.init(grads))
    assert state.overflow == overflows


def test_a_status_and_emulated_hardware_work_in_a_step():
  names = run("Overflows that gradients do not show")
  assert not names["status"]
  assert names["opt_state"].applied_steps == 1
  assert jnp.isfinite(run("Rehearse saturation mode")["loss"])


def test_the_extra_is_for_cuda_12():
  text = (documents.ROOT / "pyproject.toml").read_text()
  extras = tomllib.loads(text)["project"]["optional-dependencies"]
  assert any(x.startswith("jax[cuda12]") for x in extras["cuda"])


@pytest.mark.parametrize(
  ("other", "name"), [("+", "bfloat16"), ("-", "float16")]
)
def test_the_steps_before_and_after_the_change_train(other, name):
  (diff,) = documents.blocks(PAGE, "diff")
  lines = [x for x in diff.splitlines(True) if not x.startswith(other)]
  first, step = "".join(x[1:] or x for x in lines).split("\n\n")
  names = {"inner": optax.sgd(0.1), "jax": jax, "jnp": jnp, "optax": optax}
  names |= {"loss_fn": loss_fn, "ols": ols}
  names = documents.run(f"```python\n{first}\n```", names)
  train_step = documents.step(step, names)
  state = PARAMS, names["tx"].init(PARAMS)
  first, *_, last = (
    (state := train_step(*state[:2], BATCH))[-1] for _ in range(20)
  )
  assert last < first / 2
  found = dtypes_of("dot_general", train_step, *state[:2], BATCH)
  assert set(found) == {name}


def test_float16_holds_no_such_numbers_and_autocast_keeps_them_in_float32():
  with np.errstate(over="ignore"):
    assert np.float16(1e-8) == 0 and np.float16(-1e9) == -np.inf
    assert np.float16(7e4) == np.inf and jnp.bfloat16(7e4) < np.inf
  assert np.isnan(jax.nn.softmax(jnp.full(3, -jnp.inf)))[0]

  def masked_loss_fn(params, batch):
    logits = jnp.where(batch[:, :1] > 0, batch @ params["w"], -1e9)
    weights = jax.nn.softmax(logits)
    return jnp.mean(weights / (jnp.abs(weights * 0) + 1e-8))

  mixed = ols.autocast(masked_loss_fn, "O1", dtype=jnp.float16)
  np.testing.assert_allclose(
    mixed(PARAMS, BATCH), masked_loss_fn(PARAMS, BATCH), rtol=1e-2
  )


def test_a_check_that_names_float16_skips_steps_where_nothing_overflowed():
  x = jax.random.normal(jax.random.key(0), (64, 8))
  first_params = {"bias": jnp.zeros(1), "w": jnp.zeros((8, 1))}

  def loss_fn(params):
    product = ols.autocast(jnp.matmul)(x, params["w"])
    return jnp.mean((product + params["bias"] - x[:, :1] - 3) ** 2)

  skipped = []
  for check in (ols.nonfinite(jnp.float16), ols.nonfinite()):
    rule = ols.FixedLossScale(2.0**14)
    tx = ols.loss_scaling(optax.adam(1e-2), rule, check=check)

    def step(carry, _, tx=tx):
      params, opt_state = carry
      value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
      _, scaled_grads = value_and_grad(params)
      updates, opt_state = tx.update(scaled_grads, opt_state, params)
      grads_are_finite = optax.tree.norm(scaled_grads) < jnp.inf
      params = optax.apply_updates(params, updates)
      return (params, opt_state), grads_are_finite

    carry = first_params, tx.init(first_params)
    (_, opt_state), finite = lax.scan(step, carry, length=300)
    assert finite.all()
    skipped.append(int(opt_state.skipped_steps))
  assert skipped == [300, 0]
  assert (
    "`nonfinite(jnp.float16)` skipped 300 of 300 steps, with S fixed at 2^14, "
    "and `nonfinite()` none."
  ) in documents.one_line(PAGE)
