"""Select at definition against the plain way: update, then `jnp.where`."""

import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr.at_definition import select_at_definition
from tests import support

RULE = ols.FixedLossScale(1.0)  # Unscales exactly.
GRADS = jnp.array([1.0, -2.0, 0.5])


def choose(bad, old, new):
  if not jnp.issubdtype(old.dtype, jax.dtypes.extended):
    new = jnp.asarray(new, old.dtype)
  return jnp.where(bad, old, new)


def at_once(update):
  """Returns a function of a flag and an old state that skips by the flag."""
  return lambda bad, old: select_at_definition(
    lambda: update(old), old, functools.partial(choose, bad)
  )


def afterwards(update):
  """Returns such a function that selects after the update."""

  def function(bad, old):
    result, new = update(old)
    return result, jax.tree.map(functools.partial(choose, bad), old, new)

  return function


# Updates ----------------------------------------------------------------------

# For each, an old state and a function that returns a result and a new state.
UPDATES = {}


def updates(*old):
  """Returns a decorator that registers an update of this old state."""

  def register(function):
    UPDATES[function.__name__] = old, function
    return function

  return register


ONES, TWOS, THREES = jnp.ones(3), jnp.full(3, 2.0), jnp.full(3, 3.0)


@updates(ONES, jnp.float32(5), jnp.int32(6))
def constants(old):
  return GRADS, (np.full(3, 7, np.float32), 8.0, jnp.int32(9))


@updates(ONES, TWOS, THREES)
def one_value_in_several_slots(old):
  new = jnp.sin(GRADS + old[0])
  return new * 2, (new, new, GRADS)


@updates(jnp.full(3, 4.0, jnp.float16), jnp.int32(3), jnp.int8(1))
def another_dtype(old):
  new = jnp.sin(GRADS + old[0])
  count = old[1] + 1.5
  return new * count, (new, count, old[2] + jnp.int32(2))


@updates(jnp.full((), 3.0))
def weakly_typed(old):
  new = jnp.where(old[0] > 0, 1.0, 2.0)
  looped, _ = lax.scan(lambda c, _: (c * 0.5, None), new, length=2)
  return GRADS * looped * new, (new,)


@updates(*[jnp.full(3, float(i)) for i in range(7)])
def every_kind_in_nested_calls(old):
  @jax.jit
  def function(old):
    new = jnp.sin(GRADS + old[0])
    array = np.full(3, 9, np.float32)
    again = jax.jit(lambda x: (x + ONES, x, x))(new)
    return new, (new, new, array, old[0], *again), jnp.cos(new)

  new, state, derived = function(old)
  return new + derived, state


@updates(jax.random.key(5), jax.random.PRNGKey(6))
def random_keys(old):
  key, noise = jax.random.split(old[0])
  raw = jax.random.split(old[1])[0]
  return jax.random.normal(noise) + jax.random.uniform(raw), (key, raw)


@updates(jnp.zeros((0, 3)), jnp.bool_(True), jnp.full(3, 1 + 2j))
def odd_leaves(old):
  new = old[2] * 0.5 + lax.complex(GRADS, GRADS)
  return new.real, (old[0] + GRADS, jnp.all(GRADS > 0), new)


@pytest.mark.parametrize("name", UPDATES)
def test_a_selected_update_is_update_and_then_where(name):
  old, update = UPDATES[name]
  step, plain_step = jax.jit(at_once(update)), jax.jit(afterwards(update))
  for bad in (True, False):
    got, expected = step(bad, old), plain_step(bad, old)
    support.assert_same_bits(got[1], old if bad else expected[1])
    if not bad:
      support.assert_same_bits(got[0], expected[0])
  shapes = jax.eval_shape(at_once(update), True, old)
  plain_shapes = jax.eval_shape(afterwards(update), True, old)
  assert support.describe(shapes) == support.describe(plain_shapes)


# Positions of the selects -----------------------------------------------------


def count(jaxpr, name):
  return [e.primitive.name for e in support.equations(jaxpr)].count(name)


def uses(jaxpr, name):
  """Returns how often the output of the one equation `name` is read."""
  (made,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
  inputs = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
  atoms = inputs + list(jaxpr.jaxpr.outvars)
  return sum(atom is made.outvars[0] for atom in atoms)


def selecting(update, old):
  """Returns the jaxpr of a selected update."""
  return jax.make_jaxpr(at_once(update))(True, old)


def test_only_its_select_reads_a_new_value():
  @jax.jit
  def update(old):
    new, rest = jax.jit(lambda x: (jnp.sin(x), jnp.tan(x)))(old)
    return jax.jit(jnp.cos)(new) + rest, new

  jaxpr = selecting(update, ONES)
  assert uses(jaxpr, "sin") == 1
  assert uses(jaxpr, "tan") == 1
  assert count(jaxpr, "select_n") == 1
  # A call that makes no state stays a call.
  names = [equation.primitive.name for equation in jaxpr.eqns]
  assert "jit" in names and "cos" not in names


def test_a_value_of_another_dtype_is_read_as_it_was_made():
  def update(old):
    new = jnp.sin(old["single"])
    return jnp.cos(new), {"single": old["single"], "half": new}

  old = {"single": ONES, "half": ONES.astype(jnp.float16)}
  jaxpr = selecting(update, old)
  (cosine,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cos"]
  (sine,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sin"]
  assert cosine.invars[0] is sine.outvars[0]


def test_a_check_sees_the_recorded_update_before_it_is_evaluated():
  seen = []

  def check(jaxpr):
    seen.extend(eqn.primitive.name for eqn in jaxpr.eqns)
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    select_at_definition(lambda: ((), jnp.sin(ONES)), ONES, max, check)
  assert seen == ["sin"]


def test_a_state_is_selected_in_an_eager_shard_map():
  def update(x, old):
    new = lax.pmean(x, "data") + old
    return new * 2, new

  def function(x, old, bad):
    return at_once(functools.partial(update, x))(bad, old)[1]

  specs = (support.SPREAD, jax.P(), jax.P())
  mapped = support.on_each_device(function, jax.P(), in_specs=specs)
  x, old = jnp.arange(8.0), jnp.ones(1)
  assert mapped(x, old, jnp.array(True)).tolist() == [1.0]
  assert mapped(x, old, jnp.array(False)).tolist() == [4.5]


# The step of the wrapper ------------------------------------------------------


def momentum(update):
  """Returns an optimizer whose state is an array like its parameters."""

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    return update(updates, state)

  return optax.GradientTransformationExtraArgs(jnp.zeros_like, update_fn)


def test_only_a_compiled_step_is_recorded():
  seen = []

  def update(updates, state):
    seen.append(updates)
    new = jnp.sin(updates + state)
    return jnp.cos(new) * new, new

  tx = ols.loss_scaling(momentum(update), RULE)
  eager = tx.update(GRADS, tx.init(GRADS))
  assert not isinstance(seen[0], jax.core.Tracer)
  jaxpr = jax.make_jaxpr(tx.update)(GRADS, tx.init(GRADS))
  assert uses(jaxpr, "sin") == 1
  chex.assert_trees_all_close(
    eager, jax.jit(tx.update)(GRADS, tx.init(GRADS)), rtol=1e-6
  )


def test_guarantee_10_an_old_state_may_differ_by_device_and_the_new_not():
  def update(updates, state):
    mean = lax.pmean(updates, "data")  # The same on all devices.
    return updates * mean, mean

  tx = ols.loss_scaling(
    momentum(update), ols.FixedLossScale(8.0), axis_name="data"
  )

  def step(scaled_grads):
    updates, state = tx.update(scaled_grads, tx.init(scaled_grads))
    return updates, state.inner_state

  step = jax.jit(support.on_each_device(step, support.SPREAD))
  scaled_grads = jnp.arange(1.0, 9.0)
  updates, state = step(scaled_grads)
  assert updates.tolist() == (scaled_grads / 8 * 4.5 / 8).tolist()
  assert state.tolist() == [4.5 / 8] * 8
  updates, state = step(scaled_grads.at[3].set(jnp.inf))
  assert state.tolist() == [0.0] * 8
  assert np.all(np.signbit(updates))


def test_guarantee_10_a_skip_may_differ_by_device_where_the_state_does_not():
  # Each device has its own model, so no axis name lets them agree.
  tx = ols.loss_scaling(optax.sgd(4.0, momentum=0.9), ols.FixedLossScale(8.0))

  def step(scaled_grads):
    state = tx.init(scaled_grads)
    scale = ols.make_varying(state.loss_scale_state, "data")
    updates, state = tx.update(
      scaled_grads, state._replace(loss_scale_state=scale)
    )
    return updates, state.skipped[None]

  spread = support.on_each_device(step, support.SPREAD)
  updates, skipped = jax.jit(spread)(jnp.ones(8).at[3].set(jnp.nan))
  expected = np.array([-0.5, -0.5, -0.5, -0.0, -0.5, -0.5, -0.5, -0.5])
  np.testing.assert_allclose(updates, expected, rtol=1e-5)
  assert skipped.tolist() == [i == 3 for i in range(8)]
