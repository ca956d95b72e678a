"""The page on clipping clips what it says, and the wrong orders do not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.guides import guarded
from tests.guides.guarded import batch_of
from tests.guides.guarded import CLEAN
from tests.guides.guarded import loss_fn
from tests.guides.guarded import PARAMS
from tests.guides.guarded import trained
from tests.support import assert_same_bits

PAGE = documents.read("docs/guides/clipping.md")
SCALE = 2.0**15
GRADS = {"w": jnp.array([3.0, 4.0])}  # Their norm is 5.


def names_with(inner=None, **names):
  """Returns what the page takes for granted."""
  inner = inner or optax.sgd(0.1)
  rule = ols.DynamicLossScale(SCALE)
  return {
    "inner": inner,
    "jax": jax,
    "jnp": jnp,
    "loss_fn": loss_fn,
    "ols": ols,
    "optax": optax,
    "params": PARAMS,
    "rule": rule,
    "tx": ols.loss_scaling(inner, rule),
    **names,
  }


@functools.cache
def moving():
  """Returns the names after the section with a limit that moves."""
  section = documents.section(PAGE, "Clipping to a moving limit")
  first, step = documents.blocks(section)
  return guarded.names_with_step(first, documents.BACKWARD + step)


def scaled(grads):
  return jax.tree.map(lambda x: x * SCALE, grads)


def norm_of_update(tx, scaled_grads):
  """Returns the norm of the first update, and the wrapper's state after it."""
  updates, state = jax.jit(tx.update)(scaled_grads, tx.init(GRADS), GRADS)
  return optax.tree.norm(updates), state


def test_inside_the_wrapper_the_limits_are_those_of_the_bare_optimizer():
  (code,) = documents.blocks(PAGE.partition("## ")[0])
  names = documents.run(f"```python\n{code}```", names_with())
  for size in (0.0, 2.0**-100, 1.0, 1000.0):
    grads = jax.tree.map(lambda x, size=size: x * size, GRADS)
    update = jax.jit(names["tx"].update)
    updates, _ = update(scaled(grads), names["tx"].init(GRADS), GRADS)
    inner = names["inner"]
    expected, _ = jax.jit(inner.update)(grads, inner.init(GRADS), GRADS)
    assert_same_bits(updates, expected)
    assert np.isfinite(updates["w"]).all()


ORDERS = re.findall(
  r"^\| `(.+)` \| (\S+) \| (\w+) \|$",
  documents.section(PAGE, "The wrong order"),
  re.MULTILINE,
)


@pytest.mark.parametrize(("code", "norm", "on_inf"), ORDERS)
def test_each_order_does_as_the_table_says(code, norm, on_inf):
  names = names_with()
  tx = eval(code, names)
  found, _ = norm_of_update(tx, scaled(GRADS))
  assert f"{found:.2g}" == norm
  _, state = norm_of_update(tx, {"w": jnp.array([3.0, jnp.inf])})
  overflow = optax.tree.get(state, "overflow")
  assert on_inf == ("skipped" if overflow else "applied")


def test_the_table_has_the_right_order_first():
  assert len(ORDERS) == 4
  (code, norm, _), *_ = ORDERS
  bare = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
  updates, _ = bare.update(GRADS, bare.init(GRADS))
  assert code.startswith("ols.loss_scaling(")
  np.testing.assert_allclose(optax.tree.norm(updates), float(norm), rtol=1e-6)


def test_adam_hides_that_the_limit_is_divided_by_s():
  clip = optax.clip_by_global_norm(1.0)
  rule = ols.DynamicLossScale(SCALE)
  right = ols.loss_scaling(optax.chain(clip, optax.adam(0.1)), rule)
  wrong = optax.chain(clip, ols.loss_scaling(optax.adam(0.1), rule))
  for tx in (right, wrong):
    norm, _ = norm_of_update(tx, scaled(GRADS))
    np.testing.assert_allclose(norm, 0.1 * 2**0.5, rtol=1e-2)


def test_the_norm_is_that_of_unscaled_gradients():
  code, *_ = documents.blocks(documents.section(PAGE, "The true gradient norm"))
  names = names_with(scaled_grads=scaled(GRADS), params=GRADS)
  names["opt_state"] = names["tx"].init(GRADS)
  exec(code, names)
  assert names["norm"] == 5


def test_a_norm_above_the_limit_is_clipped_to_it():
  names = moving()
  before = trained(names, CLEAN)
  _, opt_state, guard_state = trained(names, [*CLEAN, 30.0])
  assert opt_state.applied_steps == len(CLEAN) + 1
  limit = names["guard"].limit(before[2])
  newest = guard_state.values[(guard_state.accepted - 1) % 64]
  np.testing.assert_allclose(newest, limit, rtol=1e-6)
  # What Adam averages has moved by a tenth of a gradient of this norm.
  old, new = (
    optax.tree.get(x.inner_state, "mu")["w"] for x in (before[1], opt_state)
  )
  clipped = (new - 0.9 * old) / 0.1
  np.testing.assert_allclose(optax.tree.norm(clipped), limit, rtol=1e-3)
  grads = jax.grad(loss_fn)(before[0], batch_of(30.0, len(CLEAN)))
  assert optax.tree.norm(grads) > 10 * limit


def test_gradients_of_zero_are_not_clipped_to_nan():
  names = moving()
  sizes = [0.0] * 30 + [1.0] * 12
  params, opt_state, guard_state = trained(names, sizes)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  # A limit of 0 ends with the patience.
  assert guard_state.restarts == 1
  assert opt_state.applied_steps == len(sizes)


def test_a_change_of_level_is_not_clipped_for_ever():
  names = moving()
  state = names["guard_state"]
  applied = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale()).init(
    PARAMS
  )
  for step in range(60):
    state = names["guard"].update(state, 1.0 if step < 40 else 30.0, applied)
  assert state.restarts == 1
  assert state.spikes == names["guard"].patience
  assert names["guard"].limit(state) > 30
