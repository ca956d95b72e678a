"""The recipes for skipped steps do what their page says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support
from tests.guides import guarded
from tests.guides.guarded import batch_of
from tests.guides.guarded import CLEAN
from tests.guides.guarded import loss_fn
from tests.guides.guarded import PARAMS
from tests.guides.guarded import trained
from tests.support import assert_same_bits

PAGE = documents.read("docs/guides/skipping.md")
RULE = ols.DynamicLossScale()
TX = ols.loss_scaling(optax.sgd(0.1), RULE)


AGAIN = "Trying the same batch again"


@functools.cache
def again(rule=RULE, loss_fn=loss_fn):
  """Returns what the section defines that tries a batch again."""
  tx = ols.loss_scaling(optax.adam(0.125), rule)
  names = {"functools": functools, "jax": jax, "jnp": jnp, "ols": ols}
  names |= {"loss_fn": loss_fn, "optax": optax, "tx": tx}
  names["train_step"] = documents.step(documents.STEP, names)
  return documents.run(documents.section(PAGE, AGAIN), names)


@functools.cache
def spikes():
  """Returns what the section on spikes of the norm defines."""
  section = documents.section(PAGE, "Spikes of the gradient norm")
  first, step = documents.blocks(section)
  return guarded.names_with_step(first, documents.BACKWARD + step)


@pytest.mark.parametrize(("size", "skipped"), [(99.0, False), (101.0, True)])
def test_a_large_norm_skips_the_step_and_leaves_s_alone(size, skipped):
  params = jnp.zeros(1)
  opt_state = TX.init(params)
  code = documents.block(PAGE, "Your own reasons to skip", "skip=")
  names = {"ols": ols, "optax": optax, "tx": TX, "params": params}
  names |= {"scaled_grads": jnp.array([size * 2**15]), "opt_state": opt_state}
  exec(code, names)
  assert names["grad_norm"] == size
  assert names["opt_state"].skipped == skipped
  assert ols.get_loss_scale(names["opt_state"]) == 2.0**15


def test_the_table_says_what_the_two_reasons_do():
  for reason, scale, counted in (("overflow", 4.0, 0), ("skip", 8.0, 1)):
    for skips in (True, False):
      rule = ols.DynamicLossScale(8.0, skip=skips)
      tx = ols.loss_scaling(optax.sgd(0.1), rule)
      state = tx.init(jnp.ones(1))
      _, state = tx.update(jnp.ones(1), state, **{reason: True})
      is_skipped = skips or reason == "skip"
      assert ols.get_loss_scale(state) == scale
      assert state.skipped == state.consecutive_skips == is_skipped
      assert state.skipped_steps == is_skipped
      assert state.requested_skips == counted


def test_a_spike_of_the_norm_is_skipped():
  names = spikes()
  before = trained(names, CLEAN)
  assert before[1].skipped_steps == 0
  params, opt_state, guard_state = trained(names, [*CLEAN, 30.0])
  assert opt_state.skipped
  assert opt_state.requested_skips == guard_state.spikes == 1
  assert_same_bits(
    (params, opt_state.inner_state, opt_state.loss_scale_state),
    (before[0], before[1].inner_state, before[1].loss_scale_state),
  )
  # In the warm-up it would have been applied.
  assert trained(names, [1.0, 30.0])[1].applied_steps == 2
  # The page's figures.
  assert names["guard"].patience == 10
  assert names["guard"].init().values.shape == (128,)
  assert np.isinf(names["guard"].limit(trained(names, CLEAN[:63])[2]))
  assert np.isfinite(names["guard"].limit(trained(names, CLEAN[:64])[2]))


def test_check_step_finds_the_step_right():
  names = spikes()
  report = ols.instruments.check_step(
    names["train_step"], *trained(names, [1.0, 1.0]), batch_of(1.0)
  )
  assert report.ok, str(report)
  assert report.next_values["guard_state"] == "2"


def test_a_step_that_overflows_leaves_the_guard_as_it_was():
  names = spikes()
  _, _, expected = trained(names, CLEAN)
  _, opt_state, guard_state = trained(names, [*CLEAN, np.inf])
  assert opt_state.overflow
  assert_same_bits(guard_state, expected)


# Trying the same batch again.


@pytest.mark.parametrize(
  ("start", "expected"), [(2.0**10, 1), (2.0**122, 4), (2.0**119, 1)]
)
def test_a_step_that_overflowed_is_tried_again(start, expected):
  names = again(ols.DynamicLossScale(start, max_scale=2.0**127))
  # Loss and gradient are 2^8, so S must be 2^119 at most.
  batch = jnp.full((2, 4), 8.0)
  opt_state = names["tx"].init(PARAMS)
  params, opt_state, loss, tries = names["try_step"](PARAMS, opt_state, batch)
  assert tries == expected
  assert loss == 2**8
  assert (opt_state.applied_steps, opt_state.skipped_steps) == (1, tries - 1)
  assert ols.get_loss_scale(opt_state) == start / 2 ** (tries - 1)
  # As if S had fitted at once.
  other = again(ols.DynamicLossScale(2.0**5))
  first = other["tx"].init(PARAMS)
  expected_params, *_ = other["try_step"](PARAMS, first, batch)
  assert_same_bits(params, expected_params)


def test_a_try_has_the_keys_and_the_loss_of_the_first():
  def noisy_loss_fn(params, batch):
    x, key = batch
    noise = jax.random.normal(key, x.shape)
    return jnp.float16(jnp.mean(((x + noise) @ params["w"]) ** 2))

  results = []
  for start in (2.0**17, 2.0**5):
    names = again(ols.DynamicLossScale(start), noisy_loss_fn)
    batch = jnp.full((2, 4), 8.0), jax.random.key(3)
    opt_state = names["tx"].init(PARAMS)
    step = names["try_step"]
    params, _, loss, tries = step(PARAMS, opt_state, batch, max_tries=12)
    results.append((params, loss))
    # A float16 loss holds an S of 2^15 at most.
    assert tries == (3 if start == 2.0**17 else 1)
  assert_same_bits(*results)


def test_it_ends_after_so_many_tries():
  names = again()
  opt_state = names["tx"].init(PARAMS)
  step = names["try_step"]
  params, after, _, tries = step(PARAMS, opt_state, batch_of(np.nan))
  assert tries == after.skipped_steps == 8
  # The page's figure.
  assert ols.get_loss_scale(opt_state) == ols.get_loss_scale(after) * 2**8
  assert_same_bits(params, PARAMS)
  assert step(PARAMS, opt_state, batch_of(np.nan), max_tries=3)[3] == 3


def test_it_ends_where_s_can_shrink_no_further():
  floor = ols.DynamicLossScale(2.0**5, min_scale=2.0**4)
  for rule, expected in ((floor, 2), (ols.FixedLossScale(), 1)):
    names = again(rule)
    opt_state = names["tx"].init(PARAMS)
    _, after, _, tries = names["try_step"](PARAMS, opt_state, batch_of(np.nan))
    assert tries == expected
    assert after.stalled


def test_the_program_has_one_loop_with_one_step_in_it():
  names = again()
  step = names["try_step"]
  opt_state = names["tx"].init(PARAMS)
  program = jax.make_jaxpr(step)(PARAMS, opt_state, batch_of(1.0))
  kinds = [x.primitive.name for x in support.equations(program)]
  assert kinds.count("while") == 1
  bare = jax.make_jaxpr(jax.value_and_grad(loss_fn))(PARAMS, batch_of(1.0))
  products = [x.primitive.name for x in support.equations(bare)]
  name = "dot_general"
  assert kinds.count(name) == products.count(name) > 0


def test_seeds_under_vmap_try_again_on_their_own():
  names = again()
  opt_state = names["tx"].init(PARAMS)
  batches = jnp.stack([batch_of(1.0), batch_of(np.nan)])
  _, after, _, tries = jax.vmap(names["try_step"], (None, None, 0))(
    PARAMS, opt_state, batches
  )
  assert tries.tolist() == [1, 8]
  assert after.applied_steps.tolist() == [1, 0]


@pytest.mark.parametrize("factor", [1.0, np.inf])
def test_an_average_of_the_parameters_moves_with_them(factor):
  params = jnp.ones(2)
  _, opt_state = TX.update(params * factor, TX.init(params), params)
  code = documents.block(PAGE, "Other values that a step changes", "new_ema")
  names = {"ols": ols, "opt_state": opt_state, "ema": 1.0, "new_ema": 2.0}
  exec(code, names)
  assert names["ema"] == (2.0 if factor == 1 else 1.0)


def test_a_running_mean_passes_over_the_nan_of_a_skipped_step():
  code = documents.block(PAGE, "Other values that a step changes", "mean_loss")
  params = jnp.ones(2)
  names = {"ols": ols, "opt_state": TX.init(params), "mean_loss": 4.0}
  for factor, expected in (
    (2.0, 3.8),
    (np.nan, 3.8),
    (np.inf, 3.8),
    (2.0, 3.62),
  ):
    names["loss"], scaled_grads = ols.scaled_value_and_grad(
      lambda params, factor: jnp.mean(params) * factor, names["opt_state"]
    )(params, jnp.float32(factor))
    _, names["opt_state"] = TX.update(scaled_grads, names["opt_state"], params)
    exec(code, names)
    np.testing.assert_allclose(names["mean_loss"], expected, rtol=1e-6)
  assert names["opt_state"].skipped_steps == 2
