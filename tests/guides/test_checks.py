"""docs/checks.md: its tables, and its steps on any device."""

import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.hardware import _probe
from tests import documents
from tests.autocast.programs import dtypes_of

PATH = "docs/checks.md"
PAGE = documents.read(PATH)


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


def test_each_check_finds_what_the_page_says():
  with documents.reading(PATH) as page:
    printed = page.run("If you do not know the hardware")
    assert page["check"] == ols.nonfinite()
    if jax.default_backend() == "cpu":
      assert printed == "float32\n"

    # The head is in float32, where 65504 is a number like any other.
    grads = {"body": jnp.ones(2), "head": jnp.array([1, 65504.0])}
    page.run("Which check do I need?", 1)
    of_all = page["tx"]
    page.run("Which check do I need?", 1)
    by_path = ols.loss_scaling(page["inner"], page["rule"], check=page["check"])
    for tx, overflows in ((of_all, True), (by_path, False)):
      assert tx.update(grads, tx.init(grads))[1].overflow == overflows

    tx = ols.loss_scaling(page["inner"], page["rule"])
    given = {"tx": tx, "opt_state": tx.init(page["params"])}
    page.run("Overflows that gradients do not show", **given)
    assert not page["status"]
    assert page["opt_state"].applied_steps == 1
    page.run("Rehearse saturation mode")
    assert jnp.isfinite(page["loss"])


@pytest.mark.parametrize(
  ("other", "name"), [("+", "bfloat16"), ("-", "float16")]
)
def test_the_steps_before_and_after_the_change_train(other, name):
  (diff,) = documents.blocks(PAGE, "diff")
  lines = [x for x in diff.splitlines(True) if not x.startswith(other)]
  first, step = "".join(x[1:] or x for x in lines).split("\n\n")
  names = documents.run(f"```python\n{first}\n```", documents.training())
  train_step = documents.step(step, names)
  params, batch = names["params"], names["batch"]
  carry = params, names["tx"].init(params), None
  losses = []
  for _ in range(5):
    carry = train_step(*carry[:2], batch)
    losses.append(carry[2])
  assert losses[-1] < losses[0]
  found = dtypes_of("dot_general", train_step, *carry[:2], batch)
  assert set(found) == {name}


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
      return (optax.apply_updates(params, updates), opt_state), None

    carry = first_params, tx.init(first_params)
    (_, opt_state), _ = jax.lax.scan(step, carry, length=300)
    skipped.append(int(opt_state.skipped_steps))
  assert (
    f"`nonfinite(jnp.float16)` skipped {skipped[0]} of 300 steps, with S fixed "
    "at 2^14, and `nonfinite()` none."
  ) in documents.one_line(PAGE)
  assert skipped[1] == 0
