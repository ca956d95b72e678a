"""One battery of properties, for every optimizer of optax.

It looks for what optax exports, so it also tries what a later version adds.
"""

import functools
import inspect

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import optimizers
from tests import support

pytestmark = [
  pytest.mark.filterwarnings("ignore:Specifying a key will be required"),
  pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def exported():
  """Returns factories of the optimizers that optax exports, by name.

  They need nothing but a `learning_rate`. `OPTIMIZERS` has the others.
  """
  found = {}
  for module in (optax, optax.contrib):
    for name, function in inspect.getmembers(module, is_function):
      signature = inspect.signature(function)
      required = [
        x.name for x in signature.parameters.values() if x.default is x.empty
      ]
      if (
        required in ([], ["learning_rate"])
        and "GradientTransformation" in str(signature.return_annotation)
        and name not in optimizers.OPTIMIZERS
        and not name.startswith(("_", "scale_by_"))
      ):
        found[name] = functools.partial(function, *[2.0**-6][: len(required)])
  return found


def is_function(x):
  return inspect.isfunction(x) or isinstance(x, functools.partial)


INNERS = optimizers.OPTIMIZERS | exported()

# The others use nothing of JAX that these do not.
MOST_DIFFERENT = {
  "adafactor",
  "adam",
  "apply_if_finite",
  "backtracking",
  "lbfgs",
  "mechanize",
  "multi_steps",
  "noisy_sgd",
}

each_optimizer = pytest.mark.parametrize(
  "name", support.slow_but(MOST_DIFFERENT, optimizers.OPTIMIZERS)
)
each_exported = pytest.mark.parametrize(
  "name", support.slow_but(MOST_DIFFERENT, INNERS)
)


@functools.cache
def wrapped(name):
  return ols.loss_scaling(INNERS[name](), support.Stub(8.0))


def extra_args(name, loss, grads):
  """Returns what line searches and schedules on the loss ask for."""
  arguments = {"value": loss, "grad": grads, "value_fn": optimizers.loss_fn}
  if name == "sophia":  # It estimates the Hessian of this.
    arguments["obj_fn"] = optimizers.loss_fn
  return arguments


def scaled_step(name, params, opt_state, bad):
  """Runs a step on float16 gradients; a `bad` one has NaN and inf in them.

  Returns the parameters, the state, the updates, and what the bare optimizer
  takes: the true gradients in float32, and the loss.
  """
  loss, scaled_grads = ols.scaled_value_and_grad(optimizers.loss_fn, opt_state)(
    params
  )
  # The barrier keeps a GPU from computing with what float16 does not hold.
  scaled_grads = lax.optimization_barrier(
    jax.tree.map(jnp.float16, scaled_grads)
  )
  true_grads = ols.unscale(scaled_grads, opt_state)
  scaled_grads["bias"] = jnp.where(bad, jnp.nan, scaled_grads["bias"])
  scaled_grads["kernel"] = jnp.where(bad, -jnp.inf, scaled_grads["kernel"])
  updates, opt_state = wrapped(name).update(
    scaled_grads, opt_state, params, **extra_args(name, loss, true_grads)
  )
  params = optax.apply_updates(params, updates)
  return params, opt_state, updates, (true_grads, loss)


@functools.cache
def jitted_step(name):
  """Returns the compiled step, and a list with an entry for each trace of it.

  The tests of one optimizer share it.
  """
  traces = []

  def step(params, opt_state, bad):
    traces.append(bad)
    return scaled_step(name, params, opt_state, bad)

  return jax.jit(step), traces


@each_exported
def test_guarantee_6_a_skipped_step_changes_no_bit(name):
  step, _ = jitted_step(name)
  params = optimizers.make_params(jnp.float16)
  opt_state = wrapped(name).init(params)
  for bad in (False, False, True, True, False):
    after, new_state, updates, _ = step(params, opt_state, bad)
    assert new_state.skipped == bad
    assert support.describe(new_state) == support.describe(opt_state)
    assert support.describe(updates) == support.describe(params)
    if bad:
      for update in jax.tree.leaves(updates):
        assert np.all(np.asarray(update) == 0)
        assert np.all(np.signbit(update))
      support.assert_same_bits(new_state.inner_state, opt_state.inner_state)
      support.assert_same_bits(after, params)
    params, opt_state = after, new_state
  assert (opt_state.applied_steps, opt_state.skipped_steps) == (3, 2)
  assert ols.get_loss_scale(opt_state) == 8.0 * 2**3 / 2**2


@each_optimizer
def test_guarantee_8_an_applied_step_is_the_bare_one_on_float32_copies(name):
  # S and all factors are powers of two, so scaling rounds nothing. The two
  # programs differ, and so may the last bit.
  inner = optimizers.bare(INNERS[name]())

  @jax.jit
  def bare_step(params, state, grads, loss):
    params = jax.tree.map(jnp.float32, params)
    return inner.update(grads, state, params, **extra_args(name, loss, grads))

  params = optimizers.make_params(jnp.float16)
  opt_state = wrapped(name).init(params)
  for _ in range(2):
    after, new_state, updates, inputs = jitted_step(name)[0](
      params, opt_state, False
    )
    expected = bare_step(params, opt_state.inner_state, *inputs)
    jax.tree.map(assert_close, new_state.inner_state, expected[1])
    for x, y in zip(*map(jax.tree.leaves, (updates, expected[0])), strict=True):
      np.testing.assert_allclose(x, y, rtol=2.0**-10, atol=2.0**-24)
    params, opt_state = after, new_state


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@each_optimizer
def test_guarantee_8_the_state_is_float32_and_updates_are_like_the_parameters(
  name, dtype
):
  params = optimizers.make_params(dtype)
  wide = optimizers.bare(INNERS[name]()).init(optimizers.make_params())
  opt_state = wrapped(name).init(params)
  # `init` also works on shapes alone.
  from_shapes = jax.eval_shape(
    wrapped(name).init, jax.eval_shape(lambda: params)
  )
  assert support.describe(from_shapes) == support.describe(opt_state)
  assert [x.dtype for x in jax.tree.leaves(opt_state.inner_state)] == [
    jnp.asarray(x).dtype for x in jax.tree.leaves(wide)
  ]
  step = functools.partial(scaled_step, name)
  _, after, updates, _ = jax.eval_shape(step, params, opt_state, False)
  assert support.describe(after) == support.describe(opt_state)
  assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}


@each_optimizer
def test_guarantee_9_one_compilation_and_a_scan(name):
  step, traces = jitted_step(name)
  params = optimizers.make_params(jnp.float16)
  carry = params, wrapped(name).init(params)
  for bad in (False, True, False):
    carry = step(*carry, bad)[:2]
  assert len(traces) == 1  # By this test and by all that share the step.

  def body(carry, bad):
    return step(*carry, bad)[:2], None

  # A scan refuses a carry whose types change.
  jax.eval_shape(lambda *x: jax.lax.scan(body, *x), carry, jnp.array([False]))


def test_tree_map_params_reaches_the_parameters_in_the_state():
  tx = wrapped("schedule_free")
  opt_state = tx.init(optimizers.make_params())
  moved = optax.tree_map_params(tx, lambda x: x + 1, opt_state)
  assert support.describe(moved) == support.describe(opt_state)
  support.assert_same_bits(moved.loss_scale_state, opt_state.loss_scale_state)
  assert not support.same_bits(moved.inner_state, opt_state.inner_state)


def assert_close(actual, desired):
  """Asserts that two arrays differ by at most 1e-6 of the largest element."""
  actual, desired = map(support.to_numpy, (actual, desired))
  largest = np.max(np.abs(desired), initial=0)
  np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-6 * largest)
