"""docs/guides/several_losses.md: whose S moves, and who skips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import relative_error

pytestmark = pytest.mark.slow

PATH = "docs/guides/several_losses.md"
page = functools.partial(documents.whole, PATH)


def run(title, words, **names):
  """Returns the names after a block of the page, with other names before."""
  names = page().names | names
  exec(documents.block(documents.read(PATH), title, words), names)
  return names


def test_the_page_prints_what_it_shows():
  assert page()["train_step"]._cache_size() == 1


def test_one_scale_is_shared_and_each_skips_separately():
  share, opt_state = page()["share"], page()["opt_state"]
  batch = page()["batch"]
  bad_batch = batch | {"real": batch["real"].at[0].set(1e6)}
  _, after = page()["train_step"](page()["params"], opt_state, bad_batch)
  shared = share(opt_state, after)
  skips = {name: bool(state.skipped) for name, state in shared.items()}
  assert skips == {"discriminator": True, "generator": False}
  scales = [float(ols.get_loss_scale(x)) for x in shared.values()]
  assert scales == [2.0**14, 2.0**14]


def test_a_sum_of_losses_moves_each_scale_by_its_own_loss():
  def loss_of(name):
    return lambda params, batch: jnp.sum(batch[name] * params["w"])

  params = {"w": jnp.ones(2)}
  losses = {name: loss_of(name) for name in ("actor", "critic")}
  names = run("A sum of losses, a scale each", "sum_step", losses=losses)
  sum_step = jax.jit(names["sum_step"])
  scales = {name: names["scaling"].init(params) for name in losses}
  given = params, names["tx"].init(params), scales
  batch = {"actor": jnp.float32(0.75), "critic": jnp.float32(-0.25)}
  _, state, _ = sum_step(*given, batch)
  assert state.applied_steps == 1 and state.amax == 0.5
  after, state, scales = sum_step(*given, batch | {"actor": jnp.inf})
  assert state.skipped and (after["w"] == 1).all()
  found = {name: ols.get_loss_scale(x) for name, x in scales.items()}
  assert found == {"actor": 2.0**14, "critic": 2.0**15}


def test_a_gradient_penalty_has_its_true_gradient():
  rng = np.random.default_rng(0)
  # Slopes as small as these become 0 in float16 unless they are scaled.
  params = [rng.normal(size=(3, 8)) * 1e-4, rng.normal(size=(8, 1)) * 1e-5]
  batch = {name: rng.normal(size=(5, 3)) for name in ("real", "noise")}
  batch["where"] = rng.uniform(size=(5, 1))
  params, batch = jax.tree.map(jnp.float32, (params, batch))
  in_float32 = run(
    "A gradient penalty", "def critic_loss", network=page()["network"]
  )
  in_float32["critic"] = page()["network"]
  expected = jax.grad(in_float32["critic_loss"])(params, batch, 1.0)

  critic_loss, scale = page()["critic_loss"], 2.0**15
  value_and_grad = ols.scaled_value_and_grad(critic_loss, scale)
  _, scaled_grads = value_and_grad(params, batch, scale)
  grads = ols.unscale(scaled_grads, scale)
  for found, true in zip(grads, expected, strict=True):
    assert relative_error(found, true) < 0.03
  # Without the inner scale, all slopes are 0.
  np.testing.assert_allclose(critic_loss(params, batch, 1.0), 10, rtol=1e-5)
