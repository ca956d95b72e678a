"""What holds for every transformation that optax exports."""

import functools
import math

import chex
import jax
from jax.extend import core
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr import at_definition
from tests import exported
from tests import optimizers
from tests import support

pytestmark = [
  pytest.mark.filterwarnings("ignore:Specifying a key will be required"),
  pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

# Whose state keeps arrays as they are, or makes them in a branch or a loop.
# They have no definition among the equations of the update, and are selected
# after it.
WITHOUT_DEFINITION = {
  "contrib.cocob",
  "contrib.dog",
  "contrib.dowg",
  "contrib.galore",
  "contrib.madgrad",
  "contrib.mechanize",
  "contrib.prodigy",
  "contrib.scale_by_cocob",
  "contrib.scale_by_galore",
  "contrib.scale_by_madgrad",
  "contrib.sophia",
  "optax.apply_if_finite",
  "optax.conditionally_mask",
  "optax.conditionally_transform",
  "optax.lbfgs",
  "optax.novograd",
  "optax.scale_by_distance_over_gradients",
  "optax.scale_by_lbfgs",
  "optax.scale_by_novograd",
  "optax.scale_by_zoom_linesearch",
}
# `adam` is `scale_by_adam` and a learning rate, and so are the others: a pair
# needs one program.
STEPPED = [
  name
  for name in exported.NAMES
  if "scale_by_" not in name
  or name.replace("scale_by_", "") not in exported.NAMES
]
# What test_contract.py beside this has under these names is stepped there, with
# the same dtypes.
NARROW = [
  name
  for name in exported.OPTIMIZERS
  if name.partition(".")[2] not in optimizers.OPTIMIZERS
  or name == "contrib.schedule_free"
]
WITH_BRANCHES = (primitives.cond_p, primitives.scan_p, primitives.while_p)

# Some of those whose memory must not grow, so that it is asked of somebody.
ELEMENTWISE = {
  "optax.adam",
  "optax.adamw",
  "optax.adan",
  "optax.amsgrad",
  "optax.lion",
  "optax.nadam",
  "optax.radam",
  "optax.rmsprop",
  "optax.sgd",
  "optax.yogi",
}


def test_what_is_left_out_is_still_exported():
  for name in exported.LEFT_OUT:
    place, _, attribute = name.partition(".")
    assert hasattr(optax if place == "optax" else optax.contrib, attribute)


# One of them in every run, all where the slow tests are.
@pytest.mark.parametrize("name", support.slow_but(["contrib.ademamix"], NARROW))
def test_guarantees_6_and_8_hold_for(name):
  tx = ols.loss_scaling(exported.make_inner(name), ols.DynamicLossScale(1024.0))

  @jax.jit
  @chex.assert_max_traces(n=2)  # One for each dtype of the parameters.
  def step(params, state, bad):
    loss, scaled_grads = ols.scaled_value_and_grad(optimizers.loss_fn, state)(
      params
    )
    extra_args = exported.extra_args(
      name, optimizers.loss_fn, loss, ols.unscale(scaled_grads, state)
    )
    scaled_grads = jax.tree.map(
      lambda x: jnp.where(bad, jnp.nan, x).astype(jnp.float16), scaled_grads
    )
    updates, state = tx.update(scaled_grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), updates, state

  params = optimizers.make_params(jnp.float16)
  first = tx.init(params)
  params, updates, state = step(params, first, False)
  assert (state.applied_steps, state.skipped_steps) == (1, 0)
  assert support.describe(state) == support.describe(first)
  for leaf in jax.tree.leaves(updates):
    assert leaf.dtype == jnp.float16
    assert np.all(np.isfinite(np.asarray(leaf, np.float32)))

  after, _, skipped = step(params, state, True)
  assert (skipped.applied_steps, skipped.skipped_steps) == (1, 1)
  to_bits = support.to_bits
  assert to_bits(skipped.inner_state) == to_bits(state.inner_state)
  assert to_bits(after) == to_bits(params)

  # Of float32 parameters the dtypes alone; the next test runs such steps.
  params = optimizers.make_params(jnp.float32)
  first = tx.init(params)
  _, updates, state = jax.eval_shape(step, params, first, False)
  assert support.describe(state) == support.describe(first)
  assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {
    jnp.dtype("float32")
  }


@pytest.mark.long
@pytest.mark.parametrize("name", STEPPED)
def test_an_applied_step_is_the_bare_one_and_a_skip_costs_no_memory(
  name,
):
  inner = optax.with_extra_args_support(exported.make_inner(name))
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(1024.0))

  def bare_step(params, state, grads):
    loss = exported.loss_fn(params)
    updates, state = inner.update(
      grads,
      state,
      params,
      **exported.extra_args(name, exported.loss_fn, loss, grads),
    )
    return optax.apply_updates(params, updates), state

  def step(params, state, scaled_grads):
    loss = exported.loss_fn(params)
    grads = ols.unscale(scaled_grads, state)
    updates, state = tx.update(
      scaled_grads,
      state,
      params,
      **exported.extra_args(name, exported.loss_fn, loss, grads),
    )
    return optax.apply_updates(params, updates), state

  params = exported.make_params(128)
  grads = jax.grad(exported.loss_fn)(params)
  scaled_grads = jax.tree.map(lambda x: 1024 * x, grads)
  bare_state, state = inner.init(params), tx.init(params)
  bare = support.compile_donated(bare_step, params, bare_state, grads)
  scaling = support.compile_donated(step, params, state, scaled_grads)
  arguments = exported.extra_args(name, exported.loss_fn, 1.0, grads)
  update = functools.partial(inner.update, **arguments)
  elementwise = is_elementwise(
    jax.make_jaxpr(update)(grads, bare_state, params)
  )
  assert elementwise or name not in ELEMENTWISE
  if elementwise:
    extra = support.temporaries(scaling) - support.temporaries(bare)
    assert extra <= 0.02 * support.size(params)

  bare_params = params
  for _ in range(3):
    bare_params, bare_state = bare(*copy((bare_params, bare_state)), grads)
    params, state = scaling(*copy((params, state)), scaled_grads)
  assert (state.applied_steps, state.skipped_steps) == (3, 0)
  jax.tree.map(
    assert_close, (params, state.inner_state), (bare_params, bare_state)
  )

  scaled_grads["layer_1"] = scaled_grads["layer_1"].at[7, 7].set(jnp.inf)
  after, skipped = scaling(*copy((params, state)), scaled_grads)
  to_bits = support.to_bits
  assert (skipped.applied_steps, skipped.skipped_steps) == (3, 1)
  assert to_bits(skipped.inner_state) == to_bits(state.inner_state)
  assert to_bits(after) == to_bits(params)


@pytest.mark.long
def test_whose_state_is_not_selected_where_it_is_defined():
  found = set()
  params = exported.make_params(8)
  grads = jax.grad(exported.loss_fn)(params)
  for name in exported.NAMES:
    inner = optax.with_extra_args_support(exported.make_inner(name))
    state = inner.init(params)

    def update(inner=inner, name=name, state=state):
      unscaled = ols.unscale(grads, 1024.0)
      arguments = exported.extra_args(name, exported.loss_fn, 1.0, unscaled)
      return inner.update(unscaled, state, params, **arguments)

    jaxpr, (updates, _) = jax.make_jaxpr(update, return_shape=True)()
    olds = [None] * len(jax.tree.leaves(updates)) + jax.tree.leaves(state)
    made_within = {
      variable
      for equation in jaxpr.eqns
      if equation.primitive in WITH_BRANCHES
      for variable in equation.outvars
    }
    defined = [
      id(old)
      for variable, old in at_definition.find_definitions(jaxpr, olds).items()
      if variable not in made_within
    ]
    if any(id(x) not in defined for x in jax.tree.leaves(state) if x.ndim == 2):
      found.add(name)
  assert found == WITHOUT_DEFINITION


def copy(tree):
  """Returns a tree whose buffers may be given away."""
  return jax.tree.map(jnp.copy, tree)


def assert_close(actual, desired):
  """Raises if two arrays differ by more than 1e-6 of the largest element."""
  if jnp.issubdtype(desired.dtype, jax.dtypes.prng_key):
    actual, desired = map(jax.random.key_data, (actual, desired))
  largest = np.max(np.abs(desired), initial=0)
  np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-6 * largest)


def is_elementwise(jaxpr):
  """Returns whether no array is made out of a larger one, nor in a branch."""
  for equation in jaxpr.eqns:
    if equation.primitive in WITH_BRANCHES:
      return False  # What they return is selected after them.
    size_in = max((math.prod(x.aval.shape) for x in equation.invars), default=0)
    size_out = max(
      (math.prod(x.aval.shape) for x in equation.outvars), default=0
    )
    inner = core.jaxprs_in_params(equation.params)
    if size_out < size_in or not all(map(is_elementwise, inner)):
      return False
  return True
