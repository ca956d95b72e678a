"""docs/guides/clipping.md: a clip inside sees true gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

PATH = "docs/guides/clipping.md"
RULE = ols.DynamicLossScale(2.0**15)
GRADS = {"w": jnp.array([3.0, 4.0])}  # Their norm is 5.
ORDERS = re.findall(
  r"^\| `(.+)` \| (\S+) \| (\w+) \|$", documents.read(PATH), re.MULTILINE
)


@pytest.mark.parametrize(("code", "norm", "on_inf"), ORDERS)
def test_each_order_does_as_the_table_says(code, norm, on_inf):
  tx = eval(code, {"ols": ols, "optax": optax, "rule": RULE})
  state = tx.init(GRADS)
  scaled_grads = {"w": GRADS["w"] * 2.0**15}
  updates, _ = tx.update(scaled_grads, state, GRADS)
  assert f"{optax.tree.norm(updates):.2g}" == norm
  _, state = tx.update({"w": jnp.array([3.0, jnp.inf])}, state, GRADS)
  overflow = optax.tree.get(state, "overflow")
  assert on_inf == ("skipped" if overflow else "applied")


def test_the_norm_is_true_and_a_spike_is_clipped_to_the_limit():
  assert len(ORDERS) == 4
  with documents.reading(PATH) as page:
    params = page["params"]
    page.run(count=1)
    title = "The true gradient norm"
    given = {"tx": page["tx"], "opt_state": page["tx"].init(params)}
    page.run(title, before=documents.BACKWARD, **given)
    grads = jax.grad(page["loss_fn"])(params, page["batch"])
    np.testing.assert_allclose(page["norm"], optax.tree.norm(grads), rtol=1e-6)

    title = "Clipping to a moving limit"
    guard = documents.spike_guard()
    page.run(title, 1, inner=optax.identity(), params=params, **guard)
    state = page["guard_state"]
    for _ in range(guard["WARMUP"]):
      state = guard["update_guard"](state, 1e-3, page["opt_state"])
    page.names["guard_state"] = state
    page.run(title, before=documents.BACKWARD)
    limit = guard["limit"](state)
    assert 0 < limit < page["norm"]
    clipped = optax.tree.norm(page["updates"])
    np.testing.assert_allclose(clipped, limit, rtol=1e-6)
    assert page["guard_state"].spikes == 1
