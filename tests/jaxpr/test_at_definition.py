"""Select at definition against the plain way: update, then jnp.where."""

import functools

import chex
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr.at_definition import select_at_definition
from tests import optimizers
from tests import reference
from tests.support import assert_same_bits
from tests.support import describe
from tests.support import make_mesh
from tests.support import slow_but
from tests.support import to_bits
from tests.support import to_numpy

RULE = ols.FixedLossScale(1.0)  # Unscales exactly.
PARAMS = jnp.array([0.5, -0.25, 1.0])
GRADS = jnp.array([1.0, -2.0, 0.5])


def plain_update(inner, grads, state, params, bad, **extra):
  """Returns what the plain way makes of a step: a where on every leaf."""
  updates, new = inner.update(grads, state, params, **extra)

  def choose(old, new):
    dtype = jnp.asarray(old).dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
      new = jnp.asarray(new, dtype)
    return jnp.where(bad, old, new)

  zeros = jax.tree.map(lambda x: jnp.full_like(x, -0.0), updates)
  return (
    jax.tree.map(functools.partial(jnp.where, bad), zeros, updates),
    jax.tree.map(choose, state, new),
  )


def wrapped_update(tx, scaled_grads, state, params, bad, **extra):
  """Returns updates and inner state of a step of the wrapper."""
  updates, state = tx.update(scaled_grads, state, params, overflow=bad, **extra)
  return updates, state.inner_state


def make(init, update):
  """Returns a transformation from a function of updates, state, parameters."""

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    return update(updates, state, params)

  return optax.GradientTransformationExtraArgs(init, update_fn)


def momentum(init):
  """Returns a decorator for an update whose state `init` makes."""
  return lambda update: make(lambda _: init(), update)


@momentum(lambda: jnp.full(3, 4.0))
def read_by_the_updates(updates, state, params):
  state = jnp.sin(state * 0.5 + updates)
  return jnp.tanh(state) + state, state


@momentum(lambda: {"kept": jnp.full(3, 4.0), "new": jnp.zeros(3)})
def passed_through(updates, state, params):
  return updates, {"kept": state["kept"], "new": updates}


@momentum(lambda: {"a": jnp.ones(3), "b": jnp.float32(5), "c": jnp.int32(6)})
def constant(updates, state, params):
  return updates, {"a": np.full(3, 7, np.float32), "b": 8.0, "c": jnp.int32(9)}


@momentum(lambda: (jnp.full(3, 4.0), jnp.full(3, 5.0), jnp.full(3, 6.0)))
def one_value_in_slots(updates, state, params):
  new = jnp.sin(updates + state[0])
  return new * 2, (new, new, updates)


@momentum(lambda: (jnp.full(3, 4.0), jnp.full(3, 5.0), jnp.full(3, 6.0)))
def swapped(updates, state, params):
  return state[0] * updates, (state[1], state[2], state[0])


@momentum(lambda: (jnp.full(3, 4.0, jnp.float16), jnp.int32(3), jnp.int8(1)))
def another_dtype(updates, state, params):
  new = jnp.sin(updates + state[0])
  count = state[1] + 1.5
  return new * count, (new, count, state[2] + jnp.int32(2))


@momentum(lambda: jnp.full((), 3.0))
def weakly_typed(updates, state, params):
  new = jnp.where(updates[0] > 0, 1.0, 2.0)
  looped = jax.lax.while_loop(lambda c: c < 9.0, lambda c: c * 2.0, new)
  looped, _ = jax.lax.scan(lambda c, _: (c * 0.5, None), looped, length=2)
  return updates * looped * new, new


@momentum(lambda: (jnp.full(3, 4.0), jnp.full(3, 5.0)))
def jitted_inside(updates, state, params):
  @jax.jit
  def function(updates, state):
    new = jnp.sin(updates + state)
    return new, jnp.cos(new) * new

  new, derived = function(updates, state[0])
  return derived, (new, derived + state[1])


@momentum(lambda: tuple(jnp.full(3, float(i)) for i in range(7)))
def all_kinds_jitted(updates, state, params):
  closed_over = jnp.arange(3.0)

  @jax.jit
  def function(updates, state):
    new = jnp.sin(updates + state[0])
    array = np.full(3, 9, np.float32)
    again = jax.jit(lambda x: (x + closed_over, x, x))(new)
    return new, (new, new, array, state[0], *again), jnp.cos(new)

  new, state, derived = function(updates, state)
  return new + derived, state


@momentum(lambda: (jnp.full(3, 4.0), jnp.full(3, 5.0), jnp.full(3, 6.0)))
def made_by_loops(updates, state, params):
  scanned, _ = jax.lax.scan(
    lambda c, y: (c * 0.5 + y, None), state[0], jnp.stack([updates, updates])
  )
  looped = jax.lax.while_loop(
    lambda c: c[0] < 50, lambda c: c * 2 + 1, state[1]
  )
  chosen = jax.lax.cond(updates[0] > 0, jnp.sin, jnp.cos, state[2])
  return scanned + looped + chosen, (scanned, looped, chosen)


@momentum(lambda: {"key": jax.random.key(5), "raw": jax.random.PRNGKey(6)})
def random_keys(updates, state, params):
  key, noise = jax.random.split(state["key"])
  raw = jax.random.split(state["raw"])[0]
  noise = jax.random.normal(noise, (3,)) + jax.random.uniform(raw, (3,))
  return updates + noise, {"key": key, "raw": raw}


@momentum(lambda: {"empty": jnp.zeros((0, 3)), "none": None, "flag": True})
def odd_leaves(updates, state, params):
  return updates, {
    "empty": state["empty"] + updates,
    "none": None,
    "flag": jnp.all(updates > 0),
  }


@momentum(lambda: jnp.full(3, 1 + 2j))
def complex_state(updates, state, params):
  state = state * 0.5 + jax.lax.complex(updates, updates)
  return state.real, state


@momentum(lambda: (jnp.full(3, 4.0), jnp.full(3, 5.0)))
def rematerialized(updates, state, params):
  new = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(state[0] + updates)
  return jnp.cos(new), (new, jax.checkpoint(jnp.cos)(new) + state[1])


stateless = optax.stateless(lambda updates, params: updates * 2)

HAND_WRITTEN = {
  "all_kinds_jitted": all_kinds_jitted,
  "another_dtype": another_dtype,
  "complex_state": complex_state,
  "constant": constant,
  "jitted_inside": jitted_inside,
  "made_by_loops": made_by_loops,
  "odd_leaves": odd_leaves,
  "one_value_in_slots": one_value_in_slots,
  "passed_through": passed_through,
  "random_keys": random_keys,
  "read_by_the_updates": read_by_the_updates,
  "rematerialized": rematerialized,
  "stateless": stateless,
  "swapped": swapped,
  "weakly_typed": weakly_typed,
}

each_inner = pytest.mark.parametrize("name", HAND_WRITTEN)
jitted_or_not = pytest.mark.parametrize("jitted", [False, True])


def jitted_update(inner):
  return optax.GradientTransformationExtraArgs(
    inner.init, jax.jit(inner.update)
  )


@functools.cache
def compiled_steps(name, jitted):
  """Returns the state, and the compiled step in both ways."""
  inner = HAND_WRITTEN[name]
  tx = ols.loss_scaling(jitted_update(inner) if jitted else inner, RULE)
  return (
    tx.init(PARAMS),
    jax.jit(functools.partial(wrapped_update, tx)),
    jax.jit(functools.partial(plain_update, inner)),
  )


def drawn(like):
  """Draws an array of any numbers; most are such that no step overflows."""
  finite = st.floats(-1e4, 1e4, width=16)
  # A product with 1 may make subnormal numbers 0.
  wide = st.floats(width=32, allow_subnormal=False)
  number = st.one_of(finite, finite, finite, wide)

  def make(values):
    with np.errstate(over="ignore"):
      return jnp.asarray(np.reshape(values, like.shape).astype(like.dtype))

  return st.lists(number, min_size=like.size, max_size=like.size).map(make)


@pytest.mark.slow
@jitted_or_not
@each_inner
@given(grads=drawn(GRADS), flag=st.booleans())
@settings(max_examples=25)
def test_a_step_is_that_of_the_plain_way(name, jitted, grads, flag):
  state, step, plain_step = compiled_steps(name, jitted)
  got = step(grads, state, PARAMS, flag)
  bad = flag or not np.isfinite(grads).all()
  expected = plain_step(grads, state.inner_state, PARAMS, bad)
  assert describe(got[1]) == describe(state.inner_state)
  assert to_bits(got) == to_bits(expected)
  if bad:
    assert to_bits(got[1]) == to_bits(state.inner_state)


@pytest.mark.slow
@each_inner
def test_an_eager_step_is_the_compiled_one(name):
  state, step, _ = compiled_steps(name, False)
  tx = ols.loss_scaling(HAND_WRITTEN[name], RULE)
  for bad in (True, False):
    eager = wrapped_update(tx, GRADS, state, PARAMS, bad)
    compiled = step(GRADS, state, PARAMS, bad)
    assert describe(eager) == describe(compiled)
    if bad:
      assert to_bits(eager) == to_bits(compiled)
    for x, y in zip(*map(jax.tree.leaves, (eager, compiled)), strict=True):
      np.testing.assert_allclose(*map(to_numpy, (x, y)), rtol=1e-6)


def all_equations(jaxpr):
  """Yields the equations of a jaxpr and of the functions called in it."""
  for equation in jaxpr.eqns:
    yield equation
    if "jaxpr" in equation.params and equation.primitive.name == "jit":
      yield from all_equations(equation.params["jaxpr"])


def count(jaxpr, name):
  return [eqn.primitive.name for eqn in all_equations(jaxpr)].count(name)


def uses(jaxpr, name):
  """Returns how often the output of the one equation `name` is read."""
  (made,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
  inputs = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
  atoms = inputs + list(jaxpr.jaxpr.outvars)
  return sum(atom is made.outvars[0] for atom in atoms)


def select_jaxpr(update, old):
  """Returns how an update that makes updates and a state is selected."""

  def function(bad, old):
    return select_at_definition(
      lambda: update(old),
      old,
      lambda old, new: jnp.where(bad, old, jnp.asarray(new, old.dtype)),
    )

  return jax.make_jaxpr(function)(True, old)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_new_value_is_read_by_nothing_but_its_select(wrap):
  def update(old):
    new = jnp.sin(old)
    return jnp.cos(new) + new, new

  jaxpr = select_jaxpr(wrap(update), PARAMS)
  assert uses(jaxpr, "sin") == 1
  assert count(jaxpr, "select_n") == 1


def test_a_value_in_two_jitted_functions_is_selected_inside_both():
  def update(old):
    @jax.jit
    def outer(x):
      new, rest = jax.jit(lambda x: (jnp.sin(x), jnp.tan(x)))(x)
      return jnp.cos(new) + rest, new

    return outer(old)

  jaxpr = select_jaxpr(update, PARAMS)
  assert uses(jaxpr, "sin") == 1
  assert uses(jaxpr, "tan") == 1
  assert count(jaxpr, "select_n") == 1


@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_every_leaf_is_selected_once(name):
  inner = optimizers.OPTIMIZERS[name]()
  params = optimizers.make_params()
  state = inner.init(params)
  bare = jax.make_jaxpr(inner.update)(params, state, params)
  jaxpr = select_jaxpr(lambda old: inner.update(params, old, params), state)
  leaves = len(jax.tree.leaves(state))
  assert count(jaxpr, "select_n") == count(bare, "select_n") + leaves


def test_a_jitted_function_that_makes_no_state_is_left_as_it_is():
  def update(old):
    return jax.jit(jnp.cos)(old), jnp.sin(old)

  names = [eqn.primitive.name for eqn in select_jaxpr(update, PARAMS).eqns]
  assert "jit" in names
  assert "cos" not in names


def test_a_value_of_another_dtype_is_read_as_it_was_made():
  def update(old):
    new = jnp.sin(old["single"])
    return jnp.cos(new), {"single": old["single"], "half": new}

  old = {"single": PARAMS, "half": PARAMS.astype(jnp.float16)}
  jaxpr = select_jaxpr(update, old)
  (cosine,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cos"]
  (sine,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sin"]
  assert cosine.invars[0] is sine.outvars[0]


def test_the_compiled_step_of_the_wrapper_selects_at_definition():
  tx = ols.loss_scaling(jitted_inside, RULE)
  jaxpr = jax.make_jaxpr(tx.update)(GRADS, tx.init(PARAMS))
  assert uses(jaxpr, "sin") == 1


def test_an_eager_step_records_nothing():
  seen = []

  def update(updates, state, params):
    seen.append(updates)
    return updates, state

  tx = ols.loss_scaling(make(lambda _: (), update), RULE)
  tx.update(GRADS, tx.init(PARAMS))
  assert not isinstance(seen[0], jax.core.Tracer)


def test_updates_are_those_for_the_kept_state_alone():
  selected = jax.jit(
    lambda bad, old: select_at_definition(
      lambda: (old * 2, old + 1),
      old,
      lambda old, new: jnp.where(bad, old, new),
    )
  )
  assert selected(False, jnp.ones(2))[1].tolist() == [2.0, 2.0]
  assert selected(True, jnp.ones(2))[1].tolist() == [1.0, 1.0]


def test_the_update_is_called_once_per_compilation():
  calls = []

  def update(updates, state, params):
    calls.append(updates)
    return updates, state + 1

  tx = ols.loss_scaling(make(lambda _: jnp.int32(0), update), RULE)
  step = jax.jit(tx.update)
  _, state = step(GRADS, tx.init(PARAMS))
  _, state = step(GRADS, state)
  assert len(calls) == 1
  assert state.inner_state == 2


@pytest.mark.parametrize("params", [{}, (), {"a": None}, {"a": {}}])
def test_empty_parameters_pass(params):
  tx = ols.loss_scaling(optax.adam(0.1), RULE)
  state = tx.init(params)
  for bad in (True, False):
    updates, after = jax.jit(tx.update)(params, state, params, overflow=bad)
    assert updates == params
    assert optax.tree.get(after, "count") == (not bad)


def test_float0_updates_pass():
  params = {"float": jnp.ones(2), "int": jnp.arange(3)}
  tx = ols.loss_scaling(optax.identity(), RULE)

  @jax.jit
  def step(params, state):
    grads = jax.grad(lambda p: jnp.sum(p["float"] ** 2), allow_int=True)(params)
    updates, state = tx.update(grads, state, params)
    assert updates["int"].dtype == jax.dtypes.float0
    return updates["float"], state

  updates, _ = step(params, tx.init(params))
  assert updates.tolist() == [2.0, 2.0]


def test_float0_in_the_state_passes():
  zero = np.zeros(2, jax.dtypes.float0)
  inner = make(lambda _: zero, lambda updates, state, params: (updates, state))
  tx = ols.loss_scaling(inner, RULE)

  @jax.jit
  def step(scaled_grads):
    updates, state = tx.update(scaled_grads, tx.init(scaled_grads))
    assert state.inner_state.dtype == jax.dtypes.float0
    return updates

  assert step(GRADS).tolist() == GRADS.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("make_constant", [np.full, jnp.full])
def test_constant_updates_are_zeroed_on_a_skip(dtype, make_constant):
  inner = make(
    lambda _: optax.EmptyState(),
    lambda updates, state, params: (make_constant(3, 0.5, dtype), state),
  )
  tx = ols.loss_scaling(inner, RULE)
  step = jax.jit(functools.partial(wrapped_update, tx))
  updates, _ = step(GRADS, tx.init(GRADS), None, True)
  assert updates.dtype == dtype
  assert np.all(updates == 0)
  assert np.all(np.signbit(np.float32(updates.real)))
  updates, _ = step(GRADS, tx.init(GRADS), None, False)
  assert np.all(updates == 0.5)


def test_guarantee_13_extra_arguments_arrive_as_they_are():
  seen = {}

  def update(updates, state, params=None, **extra_args):
    seen.update(extra_args)
    return updates * extra_args["array"], state + extra_args["number"]

  inner = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(3), update)
  tx = ols.loss_scaling(inner, RULE)

  def function(x):
    return x * 2

  @jax.jit
  def step(scaled_grads, state, array):
    seen.clear()
    updates, state = tx.update(
      scaled_grads, state, array=array, number=2, function=function, none=None
    )
    assert seen["function"] is function
    assert seen["array"] is array
    assert seen["none"] is None
    assert seen["number"] == 2
    return updates, state

  updates, state = step(GRADS, tx.init(PARAMS), jnp.full(3, 3.0))
  assert updates.tolist() == (GRADS * 3).tolist()
  assert state.inner_state.tolist() == [2.0] * 3


WRAPPERS = {
  "apply_if_finite": optimizers.OPTIMIZERS["apply_if_finite"],
  "jitted_adam": lambda: optax.GradientTransformation(
    optax.adam(1e-2).init, jax.jit(optax.adam(1e-2).update)
  ),
  "lbfgs": optimizers.OPTIMIZERS["lbfgs"],
  "multi_steps": optimizers.OPTIMIZERS["multi_steps"],
  "plateau": optimizers.OPTIMIZERS["plateau"],
  "scheduled": lambda: optax.inject_hyperparams(optax.adamw)(
    optax.linear_schedule(0.1, 0.01, 3),
    weight_decay=lambda count: 0.1 / (count + 1),
  ),
}


MIXED = {
  "bias": jnp.array([0.5, -0.0, 3.0], jnp.float16),
  "kernel": jnp.array([[0.25, -1.5], [0.0, 2.0]], jnp.bfloat16),
  "scalar": jnp.float32(0.1),
}
DYNAMIC = {"init_scale": 2.0**10, "growth_interval": 2}


def as_float32(tree):
  return jax.tree.map(jnp.float32, tree)


@functools.cache
def mixed_steps(name):
  """Returns both optimizers, and their compiled steps in mixed precision."""
  tx = ols.loss_scaling(WRAPPERS[name](), ols.DynamicLossScale(**DYNAMIC))
  inner = optimizers.bare(WRAPPERS[name]())

  def arguments(true):
    return {
      "value": true["scalar"],
      "grad": true,
      "value_fn": lambda x: optax.tree.norm(x, squared=True),
    }

  def step(scaled, state, params, true):
    return tx.update(scaled, state, params, **arguments(true))

  def plain_step(scaled, state, params, true):
    finite = jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), scaled)
    bad = ~jnp.all(jnp.stack(jax.tree.leaves(finite)))
    updates, state = plain_update(
      inner, true, state, as_float32(params), bad, **arguments(true)
    )
    updates = jax.tree.map(lambda x, p: x.astype(p.dtype), updates, params)
    return updates, state, bad

  return tx, inner, jax.jit(step), jax.jit(plain_step)


@pytest.mark.parametrize("name", slow_but(["multi_steps"], WRAPPERS))
@given(
  st.lists(
    st.fixed_dictionaries({x: drawn(MIXED[x]) for x in MIXED}),
    min_size=1,
    max_size=4,
  )
)
@settings(max_examples=25)
def test_a_run_in_mixed_precision_is_that_of_the_plain_way(name, gradients):
  tx, inner, step, plain_step = mixed_steps(name)
  params, state = MIXED, tx.init(MIXED)
  plain_state = jax.tree.map(jnp.asarray, inner.init(as_float32(MIXED)))
  model, applied = reference.Dynamic(**DYNAMIC), 0
  for scaled in gradients:
    true = jax.tree.map(lambda x: jnp.float32(x) / model.scale, scaled)
    updates, state = step(scaled, state, params, true)
    expected, plain_state, bad = plain_step(scaled, plain_state, params, true)
    assert_same_bits(updates, expected)
    assert_same_bits(state.inner_state, plain_state)
    model.update(bool(bad))
    applied += not bad
    assert (ols.get_loss_scale(state), state.applied_steps) == (
      model.scale,
      applied,
    )
    params = optax.apply_updates(params, updates)


def meta_loss(make_tx, learning_rate):
  """Returns the loss after two steps, as a function of the learning rate."""
  tx = make_tx(
    optax.chain(
      optax.scale_by_adam(eps_root=1e-6),
      optax.scale_by_learning_rate(learning_rate),
    )
  )
  params = optimizers.make_params()
  state = tx.init(params)
  for _ in range(2):
    grads = jax.grad(optimizers.loss_fn)(params)
    updates, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
  return optimizers.loss_fn(params)


@pytest.mark.slow
@pytest.mark.parametrize(
  "transform",
  [
    jax.grad,
    lambda f: jax.jit(jax.grad(f)),
    lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (1.0,))[1]),
  ],
)
def test_the_gradient_through_a_step_is_that_of_the_bare_optimizer(transform):
  got = transform(
    functools.partial(meta_loss, lambda tx: ols.loss_scaling(tx, RULE))
  )(0.1)
  expected = transform(functools.partial(meta_loss, lambda tx: tx))(0.1)
  assert abs(expected) > 0.1
  np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_custom_derivative_in_the_optimizer_is_still_used(wrap):
  @jax.custom_vjp
  def seven(x):
    return x * 1.0

  seven.defvjp(lambda x: (x, None), lambda _, tangent: (7 * tangent,))

  @momentum(lambda: jnp.zeros(3))
  def inner(updates, state, params):
    new = wrap(seven)(updates)
    return new, new

  tx = ols.loss_scaling(inner, RULE)

  def function(scaled_grads):
    updates, state = tx.update(scaled_grads, tx.init(PARAMS))
    return jnp.sum(updates), jnp.sum(state.inner_state)

  for which in (0, 1):
    slope = jax.jit(jax.grad(lambda x, which=which: function(x)[which]))(GRADS)
    assert slope.tolist() == [7.0] * 3


def test_nothing_flows_through_a_skipped_step():
  tx = ols.loss_scaling(optax.trace(0.5), RULE)

  def function(scaled_grads, bad):
    _, state = tx.update(scaled_grads, tx.init(PARAMS), overflow=bad)
    return jnp.sum(state.inner_state.trace)

  slope = jax.jit(jax.grad(function))
  assert slope(GRADS, False).tolist() == [1.0] * 3
  assert slope(GRADS, True).tolist() == [0.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_steps_are_taken_side_by_side_under_vmap(batched, transform):
  tx = ols.loss_scaling(jitted_inside, RULE)
  state = tx.init(PARAMS)
  grads = jnp.stack([GRADS, GRADS * 2])
  bads = jnp.array([True, False]) if batched else jnp.array(True)
  updates, after = transform(
    jax.vmap(
      functools.partial(wrapped_update, tx),
      in_axes=(0, None, None, 0 if batched else None),
    )
  )(grads, state, PARAMS, bads)
  for i in range(2):
    expected = jax.jit(functools.partial(plain_update, jitted_inside))(
      grads[i], state.inner_state, PARAMS, bads[i] if batched else bads
    )
    got = jax.tree.map(lambda x, i=i: x[i], (updates, after))
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [True, False])
def test_an_effect_in_the_optimizer_happens_once_per_step(bad):
  seen = []

  @momentum(lambda: jnp.zeros(3))
  def inner(updates, state, params):
    @jax.jit
    def function(x):
      jax.debug.callback(lambda _: seen.append("inside"), x, ordered=True)
      return x + 1

    jax.debug.callback(lambda _: seen.append("before"), state, ordered=True)
    new = function(state)
    jax.debug.callback(lambda _: seen.append("after"), new, ordered=True)
    return updates, new

  tx = ols.loss_scaling(inner, RULE)
  jax.jit(functools.partial(wrapped_update, tx))(
    GRADS, tx.init(PARAMS), None, bad
  )
  jax.effects_barrier()
  assert seen == ["before", "inside", "after"]


def mean(updates, state, params=None):
  return jax.lax.pmean(updates, "data"), state


MEAN_THEN_ADAM = optax.chain(
  optax.GradientTransformation(lambda _: optax.EmptyState(), mean),
  jitted_update(optax.adam(0.1)),
)


def check_distributed(step):
  """Checks two steps on eight devices, the second of them skipped by one."""
  tx = ols.loss_scaling(optax.adam(0.1), ols.DynamicLossScale(8.0))
  batch = jnp.arange(24.0).reshape(8, 3) - 7
  expected, _ = tx.update(jnp.mean(batch, 0), tx.init(PARAMS), PARAMS)
  updates, state = step(batch, tx.init(PARAMS), PARAMS)
  np.testing.assert_allclose(updates.reshape(-1, 3)[0], expected, rtol=1e-5)
  bad_updates, after = step(
    batch.at[5, 1].set(jnp.nan), tx.init(PARAMS), PARAMS
  )
  assert np.all(bad_updates == 0)
  assert np.all(after.skipped)
  assert not np.any(state.skipped)
  for leaf in jax.tree.leaves(after.inner_state):
    assert not np.any(leaf)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_skip_together_under_shard_map(check_vma):
  tx = ols.loss_scaling(
    MEAN_THEN_ADAM, ols.DynamicLossScale(8.0), axis_name="data"
  )

  def step(batch, _, params):
    return tx.update(batch[0], tx.init(params), params)

  check_distributed(
    jax.jit(
      jax.shard_map(
        step,
        mesh=make_mesh("Auto"),
        in_specs=(jax.P("data"), jax.P(), jax.P()),
        out_specs=(jax.P(), jax.P()),
        check_vma=check_vma,
      )
    )
  )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_state_is_selected_under_an_eager_shard_map(check_vma):
  def function(x, old, bad):
    def update():
      new = jax.lax.pmean(x, "data") + old
      return new * 2, new

    return select_at_definition(
      update, old, lambda old, new: jnp.where(bad, old, new)
    )[1]

  shard = functools.partial(
    jax.shard_map,
    mesh=make_mesh("Auto"),
    in_specs=(jax.P("data"), jax.P(), jax.P()),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  x, old = jnp.arange(8.0), jnp.ones(1)
  assert shard(function)(x, old, jnp.array(True)).tolist() == [1.0]
  assert shard(function)(x, old, jnp.array(False)).tolist() == [4.5]


def test_devices_skip_together_under_pmap():
  tx = ols.loss_scaling(
    MEAN_THEN_ADAM, ols.DynamicLossScale(8.0), axis_name="data"
  )

  def step(batch, _, params):
    return tx.update(batch, tx.init(params), params)

  check_distributed(jax.pmap(step, axis_name="data", in_axes=(0, None, None)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "clipped", "sgd"])
def test_a_state_on_an_explicit_mesh_keeps_its_sharding(name):
  tx = ols.loss_scaling(jitted_update(optimizers.OPTIMIZERS[name]()), RULE)
  with jax.set_mesh(make_mesh("Explicit")):
    params = {
      "bias": jax.device_put(jnp.ones(3), jax.P(None)),
      "kernel": jax.device_put(jnp.ones((8, 3)), jax.P("data", None)),
    }
    state = jax.jit(tx.init)(params)
    step = jax.jit(functools.partial(wrapped_update, tx))
    for bad in (False, True):
      _, after = step(params, state, params, bad)
      assert [x.sharding for x in jax.tree.leaves(after)] == [
        x.sharding for x in jax.tree.leaves(state.inner_state)
      ]
  assert to_bits(after) == to_bits(state.inner_state)


@pytest.mark.parametrize("bad", [True, False])
def test_a_state_laid_out_by_a_jitted_function_stays_there(bad):
  sharding = jax.NamedSharding(make_mesh("Auto"), jax.P("data"))

  @momentum(lambda: jnp.zeros(8))
  def inner(updates, state, params):
    state = jax.jit(lambda x: x + 1, out_shardings=sharding)(state)
    return updates * state, state

  tx = ols.loss_scaling(inner, RULE)
  step = jax.jit(functools.partial(wrapped_update, tx))
  text = step.lower(jnp.ones(8), tx.init(None), None, bad).as_text()
  plain = jax.jit(functools.partial(plain_update, inner))
  expected = plain.lower(jnp.ones(8), jnp.zeros(8), None, bad).as_text()
  assert text.count('{"data"}') == expected.count('{"data"}') > 0
  _, after = step(jnp.ones(8), tx.init(None), None, bad)
  assert after.tolist() == [float(not bad)] * 8


@pytest.mark.parametrize("outside", [True, False])
def test_a_float64_optimizer_is_selected_in_float64(outside):
  def update(updates, state, params):
    with jax.enable_x64(True):
      wide = jnp.sin(state.astype("float64") + 1e-9)
      return updates, wide if outside else wide.astype("float32")

  with jax.enable_x64(outside):
    dtype = "float64" if outside else "float32"
    inner = make(lambda _: jnp.ones(3, dtype), update)
    tx = ols.loss_scaling(inner, RULE)
    step = jax.jit(functools.partial(wrapped_update, tx))
    plain = jax.jit(functools.partial(plain_update, inner))
    for bad in (True, False):
      got = step(jnp.ones(3, dtype), tx.init(None), None, bad)
      expected = plain(jnp.ones(3, dtype), jnp.ones(3, dtype), None, bad)
      assert {str(x.dtype) for x in got} == {dtype}
      assert to_bits(got) == to_bits(expected)


def test_a_donated_state_is_written_in_place():
  tx = ols.loss_scaling(optax.adam(0.1), ols.DynamicLossScale(8.0))
  params = jnp.ones(7)
  old = tx.init(params)
  bits = to_bits(old.inner_state)
  step = jax.jit(lambda s: tx.update(params * jnp.nan, s), donate_argnums=0)
  header = step.lower(old).compile().as_text()
  aliased = header.split("entry_computation_layout")[0].count("may-alias")
  assert aliased >= len(jax.tree.leaves(old.inner_state))
  assert to_bits(step(old)[1].inner_state) == bits


def test_a_step_in_control_flow_is_the_step():
  tx = ols.loss_scaling(jitted_inside, RULE)
  state = tx.init(PARAMS)
  expected = jax.jit(tx.update)(GRADS, state)
  by_cond = jax.lax.cond(True, tx.update, lambda g, s: (g, s), GRADS, state)
  by_loop = jax.lax.while_loop(
    lambda c: c[1].applied_steps < 1,
    lambda c: tx.update(GRADS, c[1]),
    (GRADS, state),
  )
  for got in (by_cond, by_loop):
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
  "name", ["all_kinds_jitted", "weakly_typed", "swapped"]
)
def test_what_is_recorded_passes_the_checks_of_jax(name):
  tx = ols.loss_scaling(HAND_WRITTEN[name], RULE)
  with jax.enable_checks(True), jax.checking_leaks():
    jax.jit(tx.update)(GRADS, tx.init(PARAMS))


@pytest.mark.slow
def test_the_step_works_with_jit_disabled():
  tx = ols.loss_scaling(jitted_inside, RULE)
  with jax.disable_jit():
    eager = jax.jit(tx.update)(GRADS, tx.init(PARAMS))
    shapes = jax.eval_shape(tx.update, GRADS, tx.init(PARAMS))
  assert describe(eager) == describe(shapes)


def test_guarantee_10_an_old_state_may_differ_by_device_and_the_new_not():
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def update(updates, state, params):
    mean = jax.lax.pmean(updates, "data")  # The same on all devices.
    return updates * mean, mean

  tx = ols.loss_scaling(
    make(jnp.zeros_like, update), ols.FixedLossScale(8.0), axis_name="data"
  )

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
  def step(scaled_grads):
    updates, state = tx.update(scaled_grads, tx.init(scaled_grads))
    return updates, state.inner_state

  scaled_grads = jnp.arange(1.0, 9.0)
  updates, state = step(scaled_grads)
  assert updates.tolist() == (scaled_grads / 8 * 4.5 / 8).tolist()
  assert state.tolist() == [4.5 / 8] * 8
  updates, state = step(scaled_grads.at[3].set(jnp.inf))
  assert state.tolist() == [0.0] * 8
  assert np.all(np.signbit(updates))


@pytest.mark.parametrize(
  "transform", slow_but([jax.jit], [jax.jit, lambda function: function])
)
def test_guarantee_10_a_skip_may_differ_by_device_where_the_state_does_not(
  transform,
):
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  # One model a device: no axis name, so each decides for itself.
  tx = ols.loss_scaling(optax.sgd(4.0, momentum=0.9), ols.FixedLossScale(8.0))

  def step(scaled_grads):
    state = tx.init(scaled_grads)
    scale = ols.make_varying(state.loss_scale_state, "data")
    updates, state = tx.update(
      scaled_grads, state._replace(loss_scale_state=scale)
    )
    return updates, state.skipped[None]

  spread = jax.shard_map(
    step, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  updates, skipped = transform(spread)(jnp.ones(8).at[3].set(jnp.nan))
  expected = np.array([-0.5, -0.5, -0.5, -0.0, -0.5, -0.5, -0.5, -0.5])
  np.testing.assert_allclose(updates, expected, rtol=1e-5)
  assert skipped.tolist() == [i == 3 for i in range(8)]
