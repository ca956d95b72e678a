"""docs/guides/accumulation.md: its windows make the step of the whole batch."""

import jax
import numpy as np
import optax

import optax_lossscale as ols
from tests import documents


def test_a_window_makes_the_step_of_the_whole_batch_on_every_way():
  with documents.reading(
    "docs/guides/accumulation.md", inner=optax.sgd(1.0)
  ) as page:
    start, batch, loss_fn = page["params"], page["batch"], page["loss_fn"]
    grads = jax.grad(loss_fn)(start, batch)
    expected = start["w"] - grads["w"]

    def assert_stepped(params):
      np.testing.assert_allclose(params["w"], expected, atol=1e-6)

    printed = page.run("A window of micro-batches")
    assert printed == "8 of 8 micro-batches were valid\n"
    assert_stepped(page["params"])

    value_and_grad = ols.scaled_value_and_grad(loss_fn, page["opt_state"])
    page.run("Dropping a bad micro-batch", value_and_grad=value_and_grad)
    bad_batch = np.where(np.arange(32)[:, None] == 11, np.inf, batch)
    *_, overflow = page["value_and_grad"](start, np.float32(bad_batch))
    assert overflow.valid == 7

    page.run("Noise, batch statistics, auxiliary data")
    state = page["tx"].init(start)
    _, state, statistics, _ = page["train_step"](
      start, state, np.float32(1), batch, jax.random.key(0)
    )
    assert state.applied_steps == 1
    # The batch has a mean of 0, and so has the noise.
    np.testing.assert_allclose(statistics, 0.9, atol=0.01)

    page.run("On many devices", params=start)
    state = page["tx"].init(start)
    params, *_ = page["train_step"](start, state, page["sharded"])
    assert_stepped(params)

    page.run("optax.MultiSteps")
    step = documents.step(documents.STEP, page.names)
    params, state = start, page["tx"].init(start)
    for i in range(8):
      params, state, _ = step(params, state, batch[i::8])
    assert (state.applied_steps, state.inner_state.gradient_step) == (8, 1)
    assert_stepped(params)
