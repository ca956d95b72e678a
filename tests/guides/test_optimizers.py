"""docs/guides/optimizers.md: its parts, places in a chain, and steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits
from tests.support import same_bits

pytestmark = pytest.mark.slow

PATH = "docs/guides/optimizers.md"
PAGE = documents.read(PATH)
SCALE = 2.0**15
RULE = ols.DynamicLossScale(SCALE)
PARAMS = {
  "bias": jnp.array([0.5, -0.25, 1.0]),
  "kernel": (jnp.arange(12.0) / 8 - 0.5).reshape(4, 3),
}
GRADS = {"bias": jnp.ones(3), "kernel": jnp.linspace(-1, 1, 12).reshape(4, 3)}
BAD_GRADS = GRADS | {"kernel": jnp.full((4, 3), jnp.inf)}
PARTS = dict(
  re.findall(r"^\| (?!part)([^`|]+) \| `(.+?)` \|", PAGE, re.MULTILINE)
)
PLACES = re.findall(r"^\| `(.+)` \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)


def loss_fn(params, batch):
  output = jnp.tanh(batch[..., :4] @ params["kernel"] + params["bias"])
  return jnp.mean((output - batch[..., 4:]) ** 2)


def scaled(gradients):
  return jax.tree.map(lambda x: x * SCALE, gradients)


@pytest.mark.parametrize("title", PARTS)
def test_a_part_sees_true_gradients_and_a_skipped_step_leaves_it(title):
  assert len(PARTS) == 16
  names = {"jax": jax, "jnp": jnp, "optax": optax}
  names |= {"groups": {"bias": "rest", "kernel": "matrix"}}
  names |= {"is_frozen": {"bias": True, "kernel": False}}
  exec(documents.block(PAGE, "Sharpness-aware minimization", ""), names)
  inner = optax.with_extra_args_support(eval(PARTS[title], names))
  tx, params, extra_args = ols.loss_scaling(inner, RULE), PARAMS, {}
  if title == "Lookahead":
    params = optax.LookaheadParams.init_synced(PARAMS)
  if title.startswith(("Line", "Reducing")):
    value = jnp.float32(1.0)
    extra_args = {"value": value, "grad": GRADS, "value_fn": lambda _: value}
  expected = inner.update(GRADS, inner.init(params), params, **extra_args)
  state = tx.init(params)
  updates, state = tx.update(scaled(GRADS), state, params, **extra_args)
  assert_same_bits((updates, state.inner_state), expected)
  updates, after = tx.update(scaled(BAD_GRADS), state, params, **extra_args)
  assert after.skipped and not any(map(np.any, jax.tree.leaves(updates)))
  assert_same_bits(after.inner_state, state.inner_state)


@pytest.mark.parametrize(("code", "state_word", "params_word"), PLACES)
def test_check_step_finds_the_places_where_something_moves(
  code, state_word, params_word
):
  tx = eval(code, {"optax": optax, "ols": ols, "rule": RULE})

  def neighbours(state):
    """Returns the arrays in the state that are not the wrapper's own."""
    is_own = lambda x: isinstance(x, ols.LossScalingState)  # noqa: E731
    found = jax.tree.leaves(state, is_leaf=is_own)
    return [x.inner_state if is_own(x) else x for x in found]

  updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
  params = optax.apply_updates(PARAMS, updates)
  updates, new_state = tx.update(BAD_GRADS, state, params)
  old, new = neighbours(state), neighbours(new_state)
  found = "stays" if same_bits(old, new) else "moves"
  assert state_word == (found if jax.tree.leaves(old) else "none")
  new_params = optax.apply_updates(params, updates)
  assert params_word == ("stay" if same_bits(params, new_params) else "move")

  names = {"jax": jax, "loss_fn": loss_fn, "ols": ols, "optax": optax, "tx": tx}
  step = documents.step(documents.STEP, names)
  report = ols.instruments.check_step(
    step, PARAMS, tx.init(PARAMS), jnp.ones((5, 7))
  )
  moves = state_word == "moves" or params_word == "move"
  assert any(x.verdict == "wrong" for x in report.laws) == moves, report


def test_steps_per_example_and_with_sharpness_are_taken():
  assert {x[1:] for x in PLACES} == {
    ("stays", "stay"),
    ("none", "stay"),
    ("none", "move"),
    ("moves", "stay"),
    ("moves", "move"),
  }
  batch = jnp.linspace(-1, 1, 35).reshape(5, 7)
  expected = loss_fn(PARAMS, batch)
  with documents.reading(PATH, params=PARAMS, loss_fn=loss_fn) as page:

    def assert_takes_a_step(title):
      page.run(title)
      state = page["tx"].init(PARAMS)
      params, state, loss = page["train_step"](PARAMS, state, batch)
      assert state.applied_steps == 1 and not same_bits(params, PARAMS)
      np.testing.assert_allclose(loss, expected, rtol=1e-6)

    page.run(count=1)
    assert_takes_a_step("Differential privacy")
    page.run("Sharpness-aware minimization")
    # While S is too small, all gradients are 0.
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    normalized, _ = page["normalize"].update(zeros, optax.EmptyState())
    assert_same_bits(normalized, zeros)
    assert_takes_a_step("Sharpness-aware minimization in one step")
