"""The page on GPUs without bfloat16: its table, its two steps, its advice."""

import re
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.hardware import _probe
from tests import documents
from tests.autocast.programs import dtypes_of

PAGE = documents.read("docs/guides/float16_gpus.md")
PARAMS = {"w": jnp.full((4, 3), 0.25)}
BATCH = jnp.linspace(-1, 1, 8).reshape(2, 4)


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] - 1) ** 2)


def test_the_table_names_the_dtype_that_the_library_prefers():
  rows = re.findall(r"^\| (.+) \| (\d\.\d) \| (\w+) \|$", PAGE, re.MULTILINE)
  assert len(rows) == 5
  for _, capability, expected in rows:
    device = types.SimpleNamespace(
      platform="gpu", compute_capability=capability
    )
    assert str(_probe._preferred_dtype(device)) == expected
    # The page's rule, but for cards without matrix units.
    assert (expected == "bfloat16") == (float(capability) >= 8)


def test_the_device_is_asked(capsys):
  section = documents.section(PAGE, "Do I have one?")
  documents.run(section, {"jax": jax, "ols": ols})
  capability, preferred = capsys.readouterr().out.splitlines()
  if jax.default_backend() == "cpu":
    assert (capability, preferred) == ("not an NVIDIA GPU", "float32")


def test_the_extra_is_for_cuda_12():
  text = (documents.ROOT / "pyproject.toml").read_text()
  extras = tomllib.loads(text)["project"]["optional-dependencies"]
  assert any(x.startswith("jax[cuda12]") for x in extras["cuda"])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_both_steps_train(name):
  names = {"inner": optax.sgd(0.1), "jax": jax, "jnp": jnp, "optax": optax}
  names |= {"loss_fn": loss_fn, "ols": ols, "params": PARAMS}
  code = documents.block(PAGE, "From bfloat16 to float16", f"dtype=jnp.{name}")
  names = documents.run(f"```python\n{code}```", names)
  state = PARAMS, names["opt_state"]
  first, *_, last = (
    (state := names["train_step"](*state[:2], BATCH))[-1] for _ in range(20)
  )
  assert last < first / 2
  found = dtypes_of("dot_general", names["train_step"], *state[:2], BATCH)
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
