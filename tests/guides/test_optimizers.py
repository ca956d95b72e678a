"""The recipes for optimizers, against the bare optimizer on true gradients.

On an applied step and on one that overflows. All optimizers are in
tests/step/test_contract.py; what goes wrong where the wrapper is not outermost
is in tests/step/test_chaining.py.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits
from tests.support import to_bits

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/optimizers.md")
SCALE = 2.0**15
RULE = ols.DynamicLossScale(SCALE, growth_interval=3)
PARAMS = {
  "bias": jnp.array([0.5, -0.25, 1.0]),
  "kernel": (jnp.arange(12.0) / 8 - 0.5).reshape(4, 3),
}
# A step that overflows is one whose gradients, or batch, are None here.
STEPS = (0, None, 1, 2, None, None, 3, 4)
APPLIED = (0, 1, 2, 3, 4)

# Those whose `tx` takes gradients and nothing else.
PLAIN = (
  "Gradient noise",
  "Weight decay",
  "Learning-rate schedules",
  "An average of the updates",
  "Sharpness-aware minimization",
  "Parameter groups",
  "Frozen parameters",
  "Accumulation with MultiSteps",
)
# Those that have a step of their own, on parameters and a state.
STEPPING = ("Differential privacy", "Sharpness-aware minimization in one step")
PARTS = dict(
  re.findall(r"^\| (?!part)([^`|]+) \| `(.+?)` \|", PAGE, re.MULTILINE)
)


def loss_fn(params, batch):
  x, y = batch[..., :4], batch[..., 4:]
  output = jnp.tanh(x @ params["kernel"] + params["bias"])
  return jnp.mean((output - y) ** 2)


@functools.cache
def recipe(title):
  """Returns what the code of a section defines."""
  names = {
    "functools": functools,
    "jax": jax,
    "jnp": jnp,
    "loss_fn": loss_fn,
    "ols": ols,
    "optax": optax,
    "params": PARAMS,
    "rule": RULE,
  }
  if title in PARTS:
    names["groups"] = {"bias": "rest", "kernel": "matrix"}
    names["is_frozen"] = {"bias": True, "kernel": False}
    exec(documents.block(PAGE, "Sharpness-aware minimization", ""), names)
    names["inner"] = eval(PARTS[title], names)
    names["tx"] = ols.loss_scaling(names["inner"], RULE)
    return names
  return documents.run(documents.section(PAGE, title), names)


def make_batch(i):
  """Returns a batch of its own for each number, and inf for None."""
  if i is None:
    return jnp.full((5, 7), jnp.inf)
  return jnp.asarray(np.random.RandomState(i).uniform(-1, 1, (5, 7)), "float32")


def make_gradients(i):
  if i is None:
    return {"bias": jnp.zeros(3), "kernel": jnp.full((4, 3), jnp.inf)}
  normal = np.random.RandomState(i).normal
  return jax.tree.map(
    lambda x: jnp.asarray(normal(size=x.shape), x.dtype), PARAMS
  )


def scaled(gradients, opt_state):
  loss_scale = ols.get_loss_scale(opt_state)
  return jax.tree.map(lambda x: x * loss_scale, gradients)


@jax.jit
def apply(params, updates):
  return optax.apply_updates(params, updates)


def train(update, state, steps=STEPS, params=PARAMS):
  """Returns parameters and state after gradients that are scaled on the way."""
  for i in steps:
    updates, state = update(scaled(make_gradients(i), state), state, params)
    params = apply(params, updates)
  return params, state


def train_bare(inner, steps=APPLIED, params=PARAMS):
  """Returns parameters and state after the same gradients, never scaled."""
  if isinstance(inner, optax.MultiSteps):
    inner = inner.gradient_transformation()
  update = jax.jit(inner.update)
  state = inner.init(params)
  for i in steps:
    updates, state = update(make_gradients(i), state, params)
    params = apply(params, updates)
  return params, state


def run_steps(step, carry, steps):
  """Returns the last carry, and all losses."""
  losses = []
  for i in steps:
    *carry, loss = step(*carry, make_batch(i))
    losses.append(float(loss))
  return carry, losses


PLACES = re.findall(
  r"^\| `(.+)` \| (\w+) \| (\w+) \|$",
  documents.section(PAGE, "Places in a chain"),
  re.MULTILINE,
)


@pytest.mark.parametrize(("code", "state_word", "params_word"), PLACES)
def test_on_a_skip_each_place_in_a_chain_does_as_the_page_says(
  code, state_word, params_word
):
  rule = ols.DynamicLossScale(8.0)
  tx = eval(code, {"optax": optax, "ols": ols, "rule": rule})
  update = jax.jit(tx.update)

  def neighbours(state):
    """Returns the arrays in the state that are not the wrapper's own."""
    is_own = lambda x: isinstance(x, ols.LossScalingState)  # noqa: E731
    found = jax.tree.leaves(state, is_leaf=is_own)
    return [x.inner_state if is_own(x) else x for x in found]

  def is_same(old, new):
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(np.array_equal(to_bits(x), to_bits(y)) for x, y in pairs)

  updates, state = update(make_gradients(0), tx.init(PARAMS), PARAMS)
  params = apply(PARAMS, updates)
  updates, new_state = update(make_gradients(None), state, params)
  old, new = neighbours(state), neighbours(new_state)
  moves = "stays" if is_same(old, new) else "moves"
  assert state_word == (moves if jax.tree.leaves(old) else "none")
  new_params = apply(params, updates)
  assert params_word == ("stay" if is_same(params, new_params) else "move")


@pytest.mark.parametrize(("code", "state_word", "params_word"), PLACES)
def test_check_step_finds_the_places_where_something_moves(
  code, state_word, params_word
):
  rule = ols.DynamicLossScale(8.0)
  tx = eval(code, {"optax": optax, "ols": ols, "rule": rule})
  names = {"jax": jax, "loss_fn": loss_fn, "ols": ols, "optax": optax, "tx": tx}
  step = documents.step(documents.STEP, names)
  given = PARAMS, tx.init(PARAMS), make_batch(0)
  report = ols.instruments.check_step(step, *given)
  moves = state_word == "moves" or params_word == "move"
  assert any(x.verdict == "wrong" for x in report.laws) == moves, report


def test_the_page_shows_every_outcome_of_a_place():
  assert len(PLACES) == 9
  assert {(x, y) for _, x, y in PLACES} == {
    ("stays", "stay"),
    ("none", "stay"),
    ("none", "move"),
    ("moves", "stay"),
    ("moves", "move"),
  }


@pytest.mark.slow
@pytest.mark.parametrize("title", PLAIN)
def test_all_is_as_if_a_skipped_step_had_not_been(title):
  """The authority is the optimizer alone, without S and those steps."""
  names = recipe(title)
  params, state = train(jax.jit(names["tx"].update), names["tx"].init(PARAMS))
  bare_params, bare_state = train_bare(names["inner"])
  assert (state.applied_steps, state.skipped_steps) == (5, 3)
  assert_same_bits(params, bare_params)
  assert_same_bits(state.inner_state, bare_state)


def bare_step(inner, extra_args=lambda loss, grads, batch: {}):
  """Returns the step that a program without loss scaling has."""
  inner = optax.with_extra_args_support(inner)

  @jax.jit
  def step(params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = inner.update(
      grads, state, params, **extra_args(loss, grads, batch)
    )
    return optax.apply_updates(params, updates), state, loss

  return step


def assert_steps_agree(title, bare, inner):
  """Asserts that a recipe's own step trains as the bare one does."""
  names = recipe(title)
  carry = (PARAMS, names["tx"].init(PARAMS))
  (params, state), losses = run_steps(names["train_step"], carry, STEPS)
  carry = (PARAMS, inner.init(PARAMS))
  (bare_params, bare_state), bare_losses = run_steps(bare, carry, APPLIED)
  assert (state.applied_steps, state.skipped_steps) == (5, 3)
  assert_same_bits(params, bare_params)
  assert_same_bits(state.inner_state, bare_state)
  assert (
    np.array(losses)[[i is not None for i in STEPS]].tolist() == bare_losses
  )


@pytest.mark.slow
def test_sam_in_one_step_is_that_of_optax():
  """The authority is the opaque mode in float32, where nothing overflows."""
  title = "Sharpness-aware minimization in one step"
  names = recipe(title)
  climb = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  inner = optax.contrib.sam(optax.adam(1e-3), climb, opaque_mode=True)
  bare = bare_step(
    inner,
    lambda loss, grads, batch: {
      "grad_fn": jax.grad(lambda params, _: loss_fn(params, batch))
    },
  )
  carry = (PARAMS, names["tx"].init(PARAMS))
  (params, state), _ = run_steps(names["train_step"], carry, STEPS)
  carry = (PARAMS, inner.init(PARAMS))
  (bare_params, bare_state), _ = run_steps(bare, carry, APPLIED)
  chex.assert_trees_all_close(
    (params, state.inner_state),
    (bare_params, bare_state.opt_state),
    rtol=1e-6,
    atol=0,
  )


@pytest.mark.parametrize("which", ["first", "second"])
def test_sam_in_one_step_skips_if_either_gradient_overflows(which):
  def steep(params, batch):
    # The climb goes from here to 0.5 and more, or from an inf to NaN.
    is_at_start = params["kernel"] < 0.495
    overflows = is_at_start if which == "first" else ~is_at_start
    return jnp.sum(jnp.where(overflows, jnp.inf, 1.0) * params["kernel"])

  title = "Sharpness-aware minimization in one step"
  names = dict(recipe(title), loss_fn=steep)
  names = documents.run(documents.section(PAGE, title), names)
  params = {"kernel": jnp.full((4, 3), 0.49)}
  state = names["tx"].init(params)
  new_params, after, _ = names["train_step"](params, state, None)
  assert after.skipped
  assert_same_bits(new_params, params)
  assert_same_bits(after.inner_state, state.inner_state)


def test_sams_own_second_gradient_is_seen_by_nobody():
  """Records why the opaque mode does not go inside as it is."""
  climb = optax.sgd(0.05)
  inner = optax.contrib.sam(optax.sgd(0.1), climb, opaque_mode=True)
  tx = ols.loss_scaling(inner, RULE)

  @jax.jit
  def step(scaled_grads, state):
    def grad_fn(params, i):
      return make_gradients(None)

    return tx.update(scaled_grads, state, PARAMS, grad_fn=grad_fn)

  state = tx.init(PARAMS)
  updates, state = step(scaled(make_gradients(0), state), state)
  assert not state.overflow
  assert np.isinf(updates["kernel"]).all()


# Where all gradients are 0, because S is too small.


def lost_loss_fn(params, batch):
  """Returns a loss of which no gradient of float16 survives an S below 4."""
  del batch
  half = jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float16) ** 2), params)
  return jnp.float32(1) + sum(map(jnp.float32, half.values())) * 2.0**-26


def is_finite(tree):
  return all(
    np.isfinite(x).all()
    for x in jax.tree.leaves(tree)
    if jnp.issubdtype(x.dtype, jnp.inexact)
  )


@pytest.mark.parametrize("size", [0.0, 2.0**-100], ids=["0", "its square is 0"])
@pytest.mark.parametrize("title", PLAIN)
def test_gradients_without_a_norm_leave_all_finite(title, size):
  tx = recipe(title)["tx"]
  params, state, update = PARAMS, tx.init(PARAMS), jax.jit(tx.update)
  for _ in range(4):
    gradients = jax.tree.map(lambda x: jnp.full_like(x, size), params)
    updates, state = update(scaled(gradients, state), state, params)
    params = apply(params, updates)
  assert (state.applied_steps, state.skipped_steps) == (4, 0)
  assert ols.get_loss_scale(state) == 2 * SCALE
  assert is_finite((params, state.inner_state))


@pytest.mark.slow
@pytest.mark.parametrize("title", STEPPING)
def test_s_grows_out_of_an_underflow_of_all_gradients(title):
  names = dict(recipe(title), loss_fn=lost_loss_fn)
  names["rule"] = ols.DynamicLossScale(1.0, growth_interval=1)
  names = documents.run(documents.section(PAGE, title), names)
  params, state = PARAMS, names["tx"].init(PARAMS)
  amaxes = []
  for _ in range(4):
    params, state, _ = names["train_step"](params, state, jnp.ones((2, 7)))
    amaxes.append(float(state.amax))
  assert amaxes[0] == 0 and amaxes[-1] > 0
  assert (state.applied_steps, state.skipped_steps) == (4, 0)
  assert ols.get_loss_scale(state) == 16
  assert is_finite((params, state.inner_state))


def test_sam_of_optax_divides_by_a_norm_of_0_and_that_is_applied():
  """Records why the recipe has a `normalize` of its own."""
  climb = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  inner = optax.contrib.sam(optax.sgd(0.1), climb, sync_period=2)
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, state = take(ols.loss_scaling(inner, RULE), zeros)
  assert not state.overflow and state.applied_steps == 1
  assert np.isnan(updates["kernel"]).all()


def test_sam_climbs_as_that_of_optax_where_there_is_a_norm():
  climb = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  inner = optax.contrib.sam(optax.sgd(0.1), climb, sync_period=2)
  params, state = train_bare(recipe("Sharpness-aware minimization")["inner"])
  bare_params, bare_state = train_bare(inner)
  assert_same_bits((params, state.cache), (bare_params, bare_state.cache))


def test_apply_if_finite_inside_sees_what_comes_in_and_not_what_comes_out():
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  normalize = optax.contrib.normalize()
  around = optax.apply_if_finite(optax.chain(normalize, optax.sgd(0.1)), 1)
  updates, _ = take(ols.loss_scaling(around, RULE), zeros)
  assert np.isnan(updates["kernel"]).all()
  after = optax.chain(normalize, optax.apply_if_finite(optax.sgd(0.1), 1))
  tx = ols.loss_scaling(after, RULE)
  updates, state = take(tx, zeros)
  assert not np.any(updates["kernel"])
  assert not state.overflow and state.applied_steps == 1
  updates, _ = jax.jit(tx.update)(zeros, state, PARAMS)
  assert np.isnan(updates["kernel"]).all()


@pytest.mark.slow
def test_differential_privacy_is_that_of_unscaled_gradients_per_example():
  names = recipe("Differential privacy")
  inner = names["inner"]

  @jax.jit
  def bare(params, state, batch):
    value_and_grad = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))
    losses, grads = value_and_grad(params, batch)
    updates, state = inner.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jnp.mean(losses)

  assert_steps_agree("Differential privacy", bare, inner)


def test_one_example_that_overflows_skips_the_private_step():
  names = recipe("Differential privacy")
  state = names["tx"].init(PARAMS)
  batch = make_batch(0).at[3, 0].set(jnp.inf)
  params, after, _ = names["train_step"](PARAMS, state, batch)
  assert after.skipped
  assert_same_bits((params, after.inner_state), (PARAMS, state.inner_state))


def test_schedule_free_evaluates_what_the_bare_optimizer_would():
  names = recipe("Schedule-free")
  tx, inner = names["tx"], optax.contrib.schedule_free_adamw(1e-3)
  params, state = train(jax.jit(tx.update), tx.init(PARAMS))
  bare_params, bare_state = train_bare(inner)
  evaluate = jax.jit(optax.contrib.schedule_free_eval_params)
  evaluated = evaluate(state.inner_state, params)
  assert_same_bits(evaluated, evaluate(bare_state, bare_params))
  assert to_bits(evaluated) != to_bits(params)


def test_a_rate_that_is_set_by_hand_compiles_nothing_again():
  names = recipe("Setting the rate by hand")
  update = jax.jit(names["tx"].update)
  state = names["tx"].init(PARAMS)
  for opt_state in (
    state,
    optax.tree.set(state, learning_rate=jnp.float32(0.05)),
  ):
    scaled_grads = scaled(make_gradients(0), opt_state)
    updates, _ = update(scaled_grads, opt_state, PARAMS)
  assert update._cache_size() == 1
  expected = jax.tree.map(lambda x: -jnp.float32(0.05) * x, make_gradients(0))
  assert_same_bits(updates, expected)


def test_a_window_of_micro_batches_takes_one_more_for_a_bad_one():
  tx = recipe("Accumulation with MultiSteps")["tx"]
  update = jax.jit(tx.update)
  params, state = train(update, tx.init(PARAMS), steps=(0, None, 1, 2))
  assert state.inner_state.gradient_step == 0
  assert_same_bits(params, PARAMS)
  _, state = train(update, tx.init(PARAMS), steps=(0, None, 1, 2, 3))
  assert state.inner_state.gradient_step == 1
  assert (state.applied_steps, state.skipped_steps) == (4, 1)


def test_frozen_parameters_stay_and_their_overflow_still_skips():
  names = recipe("Frozen parameters")
  update = jax.jit(names["tx"].update)
  params, state = train(update, names["tx"].init(PARAMS), steps=APPLIED)
  assert_same_bits(params["bias"], PARAMS["bias"])
  assert to_bits(params["kernel"]) != to_bits(PARAMS["kernel"])
  scaled_grads = dict(make_gradients(0), bias=jnp.full((3,), jnp.nan))
  _, state = update(scaled_grads, state, params)
  assert state.skipped


def test_a_snapshot_keeps_the_norm_of_the_last_applied_step():
  names = recipe("Looking inside")
  _, state = train(
    jax.jit(names["tx"].update), names["tx"].init(PARAMS), steps=(0, None)
  )
  norm = optax.tree.get(state, "norm")
  np.testing.assert_allclose(
    norm, optax.tree.norm(make_gradients(0)), rtol=1e-6
  )
  assert np.isinf(state.amax)


def test_a_snapshot_is_the_true_norm_on_a_step_on_which_s_grows():
  inner = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(1.0))
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(SCALE, growth_interval=1))
  gradients = make_gradients(0)
  state = tx.init(PARAMS)
  for _ in range(3):
    _, new_state = tx.update(scaled(gradients, state), state, PARAMS)
    assert ols.get_loss_scale(new_state) == 2 * ols.get_loss_scale(state)
    state = new_state
    norm = optax.tree.get(state, "norm")
    np.testing.assert_allclose(norm, optax.tree.norm(gradients), rtol=1e-6)


def test_monitor_changes_its_state_and_is_refused():
  tx = ols.loss_scaling(optax.monitor({"norm": optax.tree.norm}), RULE)
  with pytest.raises(ValueError, match="`inner` must keep the structure"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


# What goes wrong outside, where tests/step/test_chaining.py does not say it.


def outside(before=None, after=None, inner=None):
  """Returns a chain with something before or after the wrapper."""
  wrapper = ols.loss_scaling(inner or optax.sgd(1.0), RULE)
  return optax.chain(*(x for x in (before, wrapper, after) if x is not None))


def take(tx, gradients):
  """Returns updates and state after one step, of gradients that are scaled."""
  state = tx.init(PARAMS)
  return jax.jit(tx.update)(scaled(gradients, state), state, PARAMS)


def test_clipping_by_value_before_the_wrapper_hides_the_overflow():
  tx = outside(before=optax.clip(0.5))
  updates, state = take(tx, make_gradients(None))
  assert not ols.loss_scale_metrics(state)["overflow"]
  assert (updates["kernel"] == -0.5 / SCALE).all()


def test_clipping_by_norm_before_the_wrapper_clips_to_1_over_s():
  tx = outside(before=optax.clip_by_global_norm(1.0))
  updates, _ = take(tx, make_gradients(0))
  np.testing.assert_allclose(optax.tree.norm(updates), 1 / SCALE, rtol=1e-6)


@pytest.mark.slow
def test_noise_before_the_wrapper_is_divided_by_s():
  noise = optax.add_noise(eta=1.0, gamma=0.0, key=jax.random.key(0))
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  drawn, _ = noise.update(zeros, noise.init(PARAMS))
  updates, _ = take(outside(before=noise), zeros)
  assert_same_bits(updates, jax.tree.map(lambda x: -x / SCALE, drawn))


def test_weight_decay_before_the_wrapper_is_divided_by_s():
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, _ = take(outside(before=optax.add_decayed_weights(0.5)), zeros)
  expected = jax.tree.map(lambda x: -x * 0.5 / SCALE, PARAMS)
  for update, value in zip(
    jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(update, value)


@pytest.mark.parametrize(
  "after",
  [optax.add_decayed_weights(-0.5), optax.ema(0.9)],
  ids=["decay", "ema"],
)
def test_after_the_wrapper_parameters_move_on_a_skip(after):
  tx = outside(after=after)
  update, state = jax.jit(tx.update), tx.init(PARAMS)
  for i in (0, None):
    updates, state = update(scaled(make_gradients(i), state), state, PARAMS)
  assert ols.loss_scale_metrics(state)["skipped"]
  assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(updates))


def test_a_schedule_after_the_wrapper_counts_skipped_steps():
  tx = outside(after=optax.scale_by_schedule(lambda count: 1.0))
  _, state = take(tx, make_gradients(None))
  assert optax.tree.get(state, "count") == 1


def test_apply_if_finite_around_the_wrapper_keeps_s_from_shrinking():
  wrapper = ols.loss_scaling(optax.sgd(1.0), RULE)
  tx = optax.apply_if_finite(wrapper, max_consecutive_errors=3)
  update, state = jax.jit(tx.update), tx.init(PARAMS)
  scales = []
  for _ in range(5):
    _, state = update(make_gradients(None), state, PARAMS)
    scales.append(float(ols.get_loss_scale(state)))
  assert scales == [SCALE, SCALE, SCALE, SCALE / 2, SCALE / 4]


@pytest.mark.parametrize("title", PARTS)
def test_every_part_takes_a_skipped_step(title):
  tx, params = recipe(title)["tx"], PARAMS
  if title == "Lookahead":
    params = optax.LookaheadParams.init_synced(PARAMS)
  state = tx.init(params)
  inf, extra_args = jnp.float32(jnp.inf), {}
  if title.startswith(("Line", "Reducing")):
    extra_args = {"value": inf, "grad": PARAMS, "value_fn": lambda _: inf}
  updates, state = tx.update(make_gradients(None), state, params, **extra_args)
  assert state.skipped and not any(map(np.any, jax.tree.leaves(updates)))


def test_every_part_without_a_step_of_its_own_is_trained():
  assert PARTS.keys() >= {*PLAIN} and len(PARTS) == 16
