"""The last steps of a run: which are kept, in which order, at which cost."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from tests import support

GRADIENTS = [1.0, 2.0, np.inf, 3.0, np.nan, 5.0, 7.0]


def make(capacity):
  tx = ols.loss_scaling(optax.adam(0.1), support.Stub())
  return instruments.record(tx, capacity)


def run(tx, scaled_grads, state=None):
  state = tx.init(jnp.zeros(1)) if state is None else state
  update = jax.jit(tx.update)
  for gradient in scaled_grads:
    _, state = update(jnp.array([gradient], jnp.float32), state, jnp.zeros(1))
  return state


def test_a_history_holds_the_last_steps_in_order():
  tx = make(3)
  history = instruments.get_history(tx.init(jnp.zeros(1)))
  assert [len(column) for column in history] == [0, 0, 0, 0]
  history = instruments.get_history(run(tx, GRADIENTS))
  np.testing.assert_array_equal(history.step, [5, 6, 7])
  # S was doubled, doubled, halved and doubled before.
  np.testing.assert_array_equal(history.loss_scale, [32.0, 16.0, 32.0])
  np.testing.assert_array_equal(history.amax, GRADIENTS[-3:])
  np.testing.assert_array_equal(history.overflow, [True, False, False])


def test_extra_arguments_reach_the_optimizer():
  tx, x = make(3), jnp.ones(1)
  _, state = tx.update(x, tx.init(x), x, overflow=True)
  assert instruments.get_history(state).overflow.tolist() == [True]
  # The rule does not see a step that `skip=` skipped.
  _, state = tx.update(x, state, x, skip=jnp.array(True))
  _, state = tx.update(3 * x, state, x, skip=jnp.array(False))
  history = instruments.get_history(state)
  assert history.step.tolist() == [1, 2] and history.amax.tolist() == [1, 3]


def test_a_record_of_another_capacity_is_refused():
  state = run(make(10), GRADIENTS)
  with pytest.raises(ValueError, match="got 5 for a record of 10 steps; take"):
    run(make(5), [1.0], state)
  # The remedy in the error keeps the state of the optimizer.
  fresh = make(5).init(jnp.zeros(1))
  state = fresh._replace(recorded_state=state.recorded_state)
  history = instruments.get_history(run(make(5), [9.0], state))
  assert (history.amax, history.loss_scale) == ([9.0], [2.0**6])


def test_a_step_with_a_record_stays_on_the_device_and_writes_in_place():
  tx = make(100_000)
  state = tx.init(jnp.zeros(1))
  step = jax.jit(
    lambda gradient, state: tx.update(gradient, state, jnp.zeros(1))[1],
    donate_argnums=1,
  )
  compiled = step.lower(jnp.ones(1), state).compile()
  assert support.temporaries(compiled) < 100_000
  assert support.to_the_host(compiled) == []


def test_a_stack_of_runs_is_read_one_by_one():
  tx = make(4)
  state = jax.vmap(tx.init)(jnp.zeros((2, 1)))
  with pytest.raises(ValueError, match=r"must be the state of one run.*\(2,\)"):
    instruments.get_history(state)
  second = jax.tree.map(lambda x: x[1], state)
  assert instruments.get_history(second).amax.tolist() == []


def test_an_nnx_optimizer_is_recorded():
  optimizer = nnx.Optimizer(
    model := nnx.Linear(1, 1, rngs=nnx.Rngs(0)), make(4), wrt=nnx.Param
  )
  scaled_grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
  optimizer.update(model, scaled_grads)
  assert instruments.get_history(optimizer.opt_state).amax.tolist() == [1.0]


def test_one_of_several_records_is_chosen_by_its_path():
  states = {"a": run(make(2), [1.0]), "b": run(make(2), [3.0])}
  assert instruments.get_history(states, path="b").amax.tolist() == [3.0]
  for path in (None, "c"):
    with pytest.raises(ValueError, match="there are records at 'a', 'b'"):
      instruments.get_history(states, path=path)


def test_two_records_at_paths_of_one_text_are_two_records():
  states = {"a": {"b": run(make(2), [1.0])}, "a/b": run(make(2), [3.0])}
  for path, amax in (("['a']['b']", 1.0), ("['a/b']", 3.0), ("a", 1.0)):
    assert instruments.get_history(states, path=path).amax.tolist() == [amax]
  for path in (None, "a/b"):
    with pytest.raises(ValueError, match=r"'b'\]\", .*'a/b'"):
      instruments.get_history(states, path=path)


def test_what_cannot_be_recorded_or_read_is_refused():
  with pytest.raises(ValueError, match="read the history outside of jit"):
    jax.jit(instruments.get_history)(make(2).init(jnp.zeros(1)))
  tx = ols.loss_scaling(optax.sgd(1.0), support.Stub())
  with pytest.raises(ValueError, match="LossScalingState without one; wrap"):
    instruments.get_history(tx.init(jnp.zeros(1)))
  tx = instruments.record(optax.sgd(1.0), 4)
  with pytest.raises(ValueError, match="must hold the state of `loss_scaling`"):
    tx.init(jnp.zeros(1))
  with pytest.raises(ValueError, match="`capacity`"):
    make(0)


def test_the_headroom_is_unknown_without_a_positive_finite_amax():
  amax = np.float32([0.0, np.inf, np.nan, 65504 / 8, 65504 * 2])
  history = instruments.History(np.arange(5), np.ones(5), amax, amax > 65504)
  unknown = [np.nan] * 3
  np.testing.assert_array_equal(history.headroom(), [*unknown, 3.0, -1.0])


@pytest.mark.parametrize("steps", [1, 5])
def test_a_requested_skip_leaves_the_record_bit_for_bit(steps):
  tx = make(3)
  state = run(tx, [np.inf] * steps)
  _, after = tx.update(jnp.ones(1), state, jnp.zeros(1), skip=True)
  history, same = map(instruments.get_history, (after, state))
  chex.assert_trees_all_equal(history, same)
  # An overflow is recorded all the same.
  _, after = tx.update(jnp.full(1, np.inf), state, jnp.zeros(1), skip=True)
  assert instruments.get_history(after).step[-1] == steps + 1
