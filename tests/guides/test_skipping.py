"""docs/guides/skipping.md: which steps are skipped, and what a skip keeps."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from tests import documents

PATH = "docs/guides/skipping.md"


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
    guard, state = page["guard"], page["guard_state"]
    # The page's figures.
    assert (state.values.size, guard.patience) == (128, 10)
    for norm in np.linspace(1e-4, 2e-4, 64):
      assert np.isinf(guard.limit(state))
      state = guard.update(state, norm, page["opt_state"])
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
