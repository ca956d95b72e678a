"""docs/guides/training_stacks.md: each step is that of float32, or skipped."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support

pytestmark = pytest.mark.slow

PATH = "docs/guides/training_stacks.md"
MODEL = "What FSDP, scanned layers and remat need"
X, Y = np.random.default_rng(0).normal(size=(2, 16, 32)).astype(np.float32)
BATCH = {"x": X, "y": Y}
NAMES = {"batch": BATCH}
# The norm is about 2 at first, so a clip of scaled gradients would show.
NAMES["inner"] = optax.chain(
  optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9)
)
# It overflows until S has halved a dozen times.
NAMES["rule"] = ols.DynamicLossScale(2.0**30)
SECTIONS = "MaxText", "levanter", "EasyDeL", "Tunix"


def test_each_stack_skips_and_then_makes_the_step_of_float32():
  with documents.reading(PATH, **NAMES) as page:
    for title in (MODEL, *SECTIONS):
      page.run(title)
      if title in SECTIONS:
        assert_trains(page, title)


def assert_trains(page, title):
  """Asserts that steps are skipped, and then the first is that of float32."""
  step, state_of = steps(page, title)
  start = support.to_bits(state_of()[0])
  for _ in range(30):
    before = jax.tree.map(jnp.copy, nnx.as_pure(state_of()[0]))
    metrics = step()
    params, opt_state = nnx.as_pure(state_of())
    if not opt_state.skipped:
      break
    assert support.to_bits(params) == start
  assert opt_state.applied_steps == 1 and opt_state.skipped_steps > 5
  assert ols.get_loss_scale(opt_state) > 2.0**10
  assert_sharded(params, opt_state)

  grads = true_grads(page, title)
  norm = optax.tree.norm(grads)
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-3)
  moved = jax.tree.leaves(optax.tree.sub(params, before))
  for found, grad in zip(moved, jax.tree.leaves(grads), strict=True):
    assert support.relative_error(found, -0.5 * grad / norm) < 0.01


def assert_sharded(params, opt_state):
  """Asserts that each matrix is over all devices, and each scalar on all."""
  for x in jax.tree.leaves((params, opt_state)):
    rows = x.sharding.shard_shape(x.shape)
    assert x.size == np.prod(rows) * (8 if x.ndim > 1 else 1)
    assert len(x.sharding.device_set) == 8


def steps(page, title):
  """Returns one whole step of a section, and what gives parameters and state.

  Both are of what the page has made.
  """
  names = page.names
  if title == "Tunix":
    model, optimizer = page["model"], page["optimizer"]

    def step():
      given = model, optimizer, page["grad_accumulator"], BATCH
      names["train_step"](*given, jnp.bool_(False))
      return names["train_step"](*given, jnp.bool_(True))

    return step, lambda: (nnx.state(model, nnx.Param), optimizer.opt_state)

  state = page["state"]

  def functional():
    nonlocal state
    state, metrics = names["train_step"](state, BATCH)
    return metrics

  if title == "MaxText":

    def on_objects():
      return names["on_objects"](state, BATCH)

    model, optimizer = state.model, state.optimizer
    return on_objects, lambda: (
      nnx.state(model, nnx.Param),
      optimizer.opt_state,
    )
  name = "model" if title == "levanter" else "graphstate"
  return functional, lambda: (getattr(state, name), state.opt_state)


def true_grads(page, title):
  """Returns the gradients of float32 on one device, without any scaling."""
  wide = documents.Page(PATH, page.names)
  wide.run(MODEL, swap={"jnp.float16": "jnp.float32"})
  if title == "levanter":
    model = page["EqxModel"](jax.random.key(0))
    return jax.grad(wide["loss_fn"])(model, BATCH)
  model = wide["Model"](nnx.Rngs(0))
  return nnx.as_pure(nnx.grad(wide["loss_fn"])(model, BATCH))
