"""The cost of loss scaling in the compiled program: memory, traffic, size."""

import functools

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from tests import support

RULE = support.Stub(1024.0)


def make_step(tx):
  """Returns the update phase of a train step."""

  def step(params, state, scaled_grads):
    updates, state = tx.update(scaled_grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def make_leaves(count, size, dtype=jnp.float32):
  """Returns a dict of equal arrays."""
  return {f"layer_{i}": jnp.ones(size, dtype) for i in range(count)}


@functools.cache
def compiled(tx, size, count):
  """Returns the compiled step for float16 gradients of float32 parameters."""
  params = make_leaves(count, size)
  grads = make_leaves(count, size, jnp.float16)
  return support.compile_donated(make_step(tx), params, tx.init(params), grads)


ADAMW = optax.adamw(1e-3)
SCALED_ADAMW = ols.loss_scaling(ADAMW, RULE)


def test_a_step_keeps_no_second_copy_of_anything():
  bare, scaling = (compiled(x, 100_000, 8) for x in (ADAMW, SCALED_ADAMW))
  extra = support.temporaries(scaling) - support.temporaries(bare)
  assert extra <= 0.01 * 8 * 100_000 * 4


def test_guarantee_9_nothing_is_sent_to_the_host():
  assert support.to_the_host(compiled(SCALED_ADAMW, 100_000, 8)) == []


def test_small_leaves_are_copied_at_most_once():
  step = compiled(SCALED_ADAMW, 4000, 40)
  assert support.temporaries(step) <= 1.1 * 40 * 4000 * 4


def test_accumulation_frees_each_gradient_before_the_next():
  def loss_fn(params, x):
    # Gradients arrive in neither this order nor the reverse of it.
    for i in (3, 6, 0, 5, 2, 7, 1, 4):
      x = jnp.tanh(x @ params[f"layer_{i}"])
    return jnp.mean(x)

  @jax.jit
  def gradients(params, x):
    return ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, jnp.float32(2.0**10)), microbatches=2
    )(params, x)

  params = make_leaves(8, (256, 256))
  step = gradients.lower(params, jnp.ones((4, 256))).compile()
  assert support.temporaries(step) <= 0.6 * support.size(params)


def test_guarantee_9_a_sharded_step_is_compiled_as_often_as_the_bare_one():
  sharding = jax.NamedSharding(support.make_mesh(), support.SPREAD)

  def compilations(tx):
    params = jax.device_put(make_leaves(3, (16, 4)), sharding)
    state = tx.init(params)
    step = jax.jit(make_step(tx), donate_argnums=(0, 1))
    names = []
    with support.listening_to_compilations(names):
      for bad in (0.0, jnp.inf, 0.0, jnp.nan, 0.0):
        scaled_grads = jax.device_put(make_leaves(3, (16, 4)), sharding)
        scaled_grads["layer_1"] += bad
        params, state = step(params, state, scaled_grads)
    return names.count("step")

  assert compilations(SCALED_ADAMW) == compilations(ADAMW)


def equations(tx, count, size):
  """Returns the names of all equations of the step, those in calls too."""
  params = make_leaves(count, size)
  jaxpr = jax.make_jaxpr(make_step(tx))(params, tx.init(params), params)
  return [x.primitive.name for x in support.equations(jaxpr)]


def test_a_leaf_adds_at_most_three_times_the_equations_of_the_bare_step():
  few, more, most, bare, more_bare = (
    len(equations(tx, count, 5000))
    for tx, count in (
      *((SCALED_ADAMW, 16), (SCALED_ADAMW, 32), (SCALED_ADAMW, 64)),
      *((ADAMW, 16), (ADAMW, 32)),
    )
  )
  assert most - more <= 2 * (more - few)
  assert more - few <= 3 * (more_bare - bare)


def test_a_leaf_is_unscaled_and_selected_by_six_equations_and_no_call():
  # Two products with the factors of 1/S, a select for each of the two moments
  # and one for the update, whose -0.0 is the sixth. A function that jnp jits
  # would be a call. The check of a leaf takes other equations.
  expected = {
    "mul": 2,
    "div": 0,
    "select_n": 3,
    "broadcast_in_dim": 1,
    "jit": 0,
  }

  def added(count):
    found, bare = (equations(tx, count, 1000) for tx in (SCALED_ADAMW, ADAMW))
    return [found.count(name) - bare.count(name) for name in expected]

  per_leaf = [(x - y) / 16 for x, y in zip(added(32), added(16), strict=True)]
  assert per_leaf == list(expected.values())


def test_many_small_leaves_are_read_by_a_few_kernels():
  tx = ols.loss_scaling(optax.sgd(1e-3), RULE)

  def kernels(count):
    scaled_grads = make_leaves(count, 1000)
    overflow = jax.jit(lambda *x: tx.update(*x)[1].overflow)
    lowered = overflow.lower(scaled_grads, tx.init(scaled_grads))
    return lowered.compile().as_text().count(" fusion(")

  assert kernels(300) <= kernels(3) + 8
