"""docs/guides/skipping.md: which steps are skipped, and what a skip keeps."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support

PATH = "docs/guides/skipping.md"
GUARD = documents.spike_guard()
TX = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())
PARAMS = jnp.ones(2)
LEVEL = [1.0, 1.1, 0.9, 1.0] * 16


@jax.jit
def watch(state, value, overflow=False, other=False):
  """Returns whether a value is a spike, and the guard's next state."""
  spike = GUARD["is_spike"](state, value)
  _, opt_state = TX.update(
    PARAMS, TX.init(PARAMS), skip=[spike, other], overflow=overflow
  )
  return spike, GUARD["update_guard"](state, value, opt_state)


def watched(values):
  """Returns which values are spikes, and the guard's last state."""
  state, found = GUARD["init_guard"](), []
  for value in values:
    spike, state = watch(state, np.float32(value))
    found.append(bool(spike))
  return found, state


def test_a_guard_accepts_a_lasting_change_of_level_after_its_patience():
  found, state = watched([*LEVEL, 3.9, 4.3, 4.3, np.nan, -np.inf, 1.0])
  assert found == [False] * 65 + [True] * 4 + [False]
  assert (state.accepted, state.spikes) == (66, 0)
  found, state = watched([*LEVEL, *[9.0] * 75, 35.9, 38.0])
  assert found == [False] * 64 + [True] * 10 + [False] * 66 + [True]
  # Only values of the new level count.
  assert (state.accepted, state.spikes) == (66, 1)
  assert not jnp.isin(1.1, state.values)


@pytest.mark.parametrize("value", [1.0, 50.0, np.inf, np.nan])
def test_a_guard_stays_the_same_on_a_step_that_others_skip(value):
  for spikes in ([], [50.0], [50.0] * 10):
    _, state = watched([*LEVEL, *spikes])
    given = state, np.float32(value)
    support.assert_same_bits(watch(*given, overflow=True)[1], state)
    if not watch(*given)[0]:
      support.assert_same_bits(watch(*given, other=True)[1], state)


def test_a_step_with_a_guard_is_proved():
  def step(params, opt_state, guard_state, batch):
    value_and_grad = ols.scaled_value_and_grad(jnp.vdot, opt_state)
    loss, scaled_grads = value_and_grad(params, batch)
    spike = GUARD["is_spike"](guard_state, loss)
    updates, opt_state = TX.update(scaled_grads, opt_state, params, skip=spike)
    guard_state = GUARD["update_guard"](guard_state, loss, opt_state)
    return optax.apply_updates(params, updates), opt_state, guard_state

  given = PARAMS, TX.init(PARAMS), GUARD["init_guard"](), PARAMS
  report = ols.instruments.check_step(step, *jax.eval_shape(lambda: given))
  assert report.ok


def test_norms_are_watched_and_a_batch_is_tried_again():
  with documents.reading(PATH) as page:
    start, batch = page["params"], page["batch"]
    page.run("Your own reasons to skip", before=documents.BACKWARD)
    assert page["opt_state"].applied_steps == 1
    grads = jax.grad(page["loss_fn"])(start, batch)
    np.testing.assert_allclose(
      page["grad_norm"], optax.tree.norm(grads), rtol=1e-6
    )

    title = "Spikes of the gradient norm"
    page.run(title, 1)
    state = page["init_guard"]()
    # The page's figures.
    assert (state.values.size, page["PATIENCE"]) == (128, 10)
    for norm in np.linspace(1e-4, 2e-4, 64):
      assert page["limit"](state) == np.finfo(np.float32).max
      state = page["update_guard"](state, norm, page["opt_state"])
    page.run(title, before=documents.BACKWARD, params=start, guard_state=state)
    assert page["opt_state"].requested_skips == 1
    np.testing.assert_array_equal(page["params"]["w"], start["w"])

    names = page.names | {
      "tx": ols.loss_scaling(page["inner"], page["rule"]),
      "loss_fn": lambda *given: page["loss_fn"](*given) * 2.0**118,
    }
    step = documents.step(documents.STEP, names)
    page.run("Trying the same batch again", train_step=step)
    # The gradient of this loss is inf with an S of 2^15.
    state = page["tx"].init(start)
    _, state, loss, tries = page["try_step"](start, state, batch)
    assert tries == 1 + np.log2(2.0**15 / ols.get_loss_scale(state)) > 1
    assert state.applied_steps == 1 and jnp.isfinite(loss)
    state = page["tx"].init(start)
    *_, tries = page["try_step"](start, state, batch * np.nan)
    assert tries == 8

    title = "A test that overflows"

    def loss_fn(params, batch):
      return page["loss_fn"](optax.tree.cast(params, jnp.float16), batch)

    step = documents.step(documents.STEP, names | {"loss_fn": loss_fn})
    given = {"params": start, "opt_state": page["tx"].init(start)}
    assert not step(*given.values(), batch)[1].skipped
    page.run(title, 1, train_step=step, batch=batch, **given)

    optimizer = nnx.Optimizer(
      nnx.Linear(2, 2, rngs=nnx.Rngs(0)), page["tx"], wrt=nnx.Param
    )
    page.run(title, optimizer=optimizer)
    assert ols.get_loss_scale(optimizer.opt_state) == 2.0**100

    page.run(
      "Other values that a step changes",
      **{"opt_state": state, "ema": 1.0, "new_ema": 2.0},
      **{"mean_loss": 4.0, "loss": 2.0},
    )
    assert page["ema"] == 2
    np.testing.assert_allclose(page["mean_loss"], 3.8, rtol=1e-6)
