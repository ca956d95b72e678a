"""The ring of the last steps: what it keeps, in which order, at what cost."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments

GRADIENTS = [1.0, 2.0, np.inf, 3.0, np.nan, 5.0, 7.0]


def make(capacity, rule=None):
  rule = rule or ols.DynamicLossScale(8.0)
  tx = ols.loss_scaling(optax.adam(0.1), rule)
  return instruments.record(tx, capacity)


def run(tx, scaled_grads, state=None):
  state = tx.init(jnp.zeros(1)) if state is None else state
  update = jax.jit(tx.update)
  for gradient in scaled_grads:
    _, state = update(jnp.array([gradient], jnp.float32), state, jnp.zeros(1))
  return state


def model(gradients):
  """The steps in plain Python: S, amax, overflow; S halves on an overflow."""
  scale, steps = 8.0, []
  for i, gradient in enumerate(gradients, 1):
    overflow = not np.isfinite(gradient)
    steps.append((i, scale, gradient, overflow))
    scale /= 2 if overflow else 1
  return steps


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1, 3, 7, 20])
def test_history_is_the_last_steps_in_order(capacity):
  history = instruments.get_history(run(make(capacity), GRADIENTS))
  expected = model(GRADIENTS)[-capacity:]
  for column, values in zip(history, zip(*expected, strict=True), strict=True):
    np.testing.assert_array_equal(column, values)


def test_history_is_empty_before_the_first_step():
  history = instruments.get_history(make(4).init(jnp.zeros(1)))
  assert [len(column) for column in history] == [0, 0, 0, 0]


def test_recording_changes_no_bit_of_training():
  plain = ols.loss_scaling(optax.adam(0.1), ols.DynamicLossScale(8.0))
  recorded = run(make(4), GRADIENTS).recorded_state
  chex.assert_trees_all_equal(run(plain, GRADIENTS), recorded)


def test_everything_finds_the_scale_in_a_record():
  state = run(make(4), [np.inf])
  assert ols.get_loss_scale(state) == 4.0
  assert ols.loss_scale_metrics(state)["skipped"]
  assert ols.select_on_skip(state, new=1, old=2) == 2
  loss, _ = ols.scaled_value_and_grad(jnp.sum, state)(jnp.ones(2))
  assert loss == 2.0


def test_a_record_may_be_anywhere_in_a_chain():
  inner = optax.chain(
    instruments.record(
      ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(4.0)), 3
    ),
    optax.identity(),
  )
  state = run(inner, [1.0, 2.0])
  np.testing.assert_array_equal(instruments.get_history(state).amax, [1.0, 2.0])


@pytest.mark.slow
def test_an_unscaled_step_is_recorded_with_a_scale_of_1():
  tx = make(3)
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=2)
  state, precision = tx.init(jnp.zeros(1)), schedule.init()
  for step in range(3):
    _, state = schedule.optimizer(tx, precision).update(
      jnp.ones(1), state, jnp.zeros(1)
    )
    precision = schedule.update(precision, step=2 + step)
  history = instruments.get_history(state)
  np.testing.assert_array_equal(history.loss_scale, [8.0, 1.0, 1.0])


def test_extra_arguments_go_on():
  tx = make(3)
  state = tx.init(jnp.zeros(1))
  _, state = tx.update(jnp.ones(1), state, jnp.zeros(1), overflow=True)
  assert instruments.get_history(state).overflow.tolist() == [True]


def test_steps_in_a_scan_are_recorded():
  tx = make(20)

  def step(state, gradient):
    return tx.update(gradient[None], state, jnp.zeros(1))[1], None

  scaled_grads = jnp.array(GRADIENTS, jnp.float32)
  state, _ = jax.lax.scan(step, tx.init(jnp.zeros(1)), scaled_grads)
  history = instruments.get_history(state)
  np.testing.assert_array_equal(history.amax, GRADIENTS)


def test_a_record_of_another_capacity_is_refused():
  state = run(make(10), GRADIENTS)
  with pytest.raises(ValueError, match="got 5 for a record of 10 steps; take"):
    run(make(5), [1.0], state)
  fresh = make(5).init(jnp.zeros(1))
  state = fresh._replace(recorded_state=state.recorded_state)
  history = instruments.get_history(run(make(5), [9.0], state))
  assert (history.amax, history.loss_scale) == ([9.0], [2.0])


def test_nothing_of_a_step_goes_to_the_host():
  tx = make(100)
  state = tx.init(jnp.zeros(1))
  text = jax.jit(tx.update).lower(jnp.ones(1), state, jnp.zeros(1)).as_text()
  assert "callback" not in text
  assert "outfeed" not in text


def test_the_ring_is_written_in_place_where_the_state_is_donated():
  capacity = 100_000
  tx = make(capacity)
  state = tx.init(jnp.zeros(1))
  step = jax.jit(
    lambda gradient, state: tx.update(gradient, state, jnp.zeros(1))[1],
    donate_argnums=1,
  )
  memory = step.lower(jnp.ones(1), state).compile().memory_analysis()
  assert memory.temp_size_in_bytes < capacity


@pytest.mark.slow
def test_runs_side_by_side_are_read_one_by_one():
  tx = make(4)
  state = jax.vmap(tx.init)(jnp.zeros((2, 1)))
  scaled_grads = jnp.array([[1.0], [2.0]])
  _, state = jax.vmap(tx.update)(scaled_grads, state, jnp.zeros((2, 1)))
  with pytest.raises(ValueError, match=r"must be the state of one run.*\(2,\)"):
    instruments.get_history(state)
  second = jax.tree.map(lambda x: x[1], state)
  assert instruments.get_history(second).amax.tolist() == [2.0]


def test_an_optimizer_of_nnx_is_recorded():
  optimizer = nnx.Optimizer(
    model := nnx.Linear(1, 1, rngs=nnx.Rngs(0)), make(4), wrt=nnx.Param
  )
  scaled_grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
  optimizer.update(model, scaled_grads)
  assert instruments.get_history(optimizer.opt_state).amax.tolist() == [1.0]


def test_several_records_are_told_by_their_path():
  states = {"a": run(make(2), [1.0]), "b": run(make(2), [3.0])}
  assert instruments.get_history(states, path="b").amax.tolist() == [3.0]
  for path in (None, "c"):
    with pytest.raises(ValueError, match="there are records at 'a', 'b'"):
      instruments.get_history(states, path=path)


def test_without_a_record_the_error_says_how_to_make_one():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale())
  with pytest.raises(ValueError, match="LossScalingState without one; wrap"):
    instruments.get_history(tx.init(jnp.zeros(1)))


def test_history_inside_jit_is_an_error():
  with pytest.raises(ValueError, match="read the history outside of jit"):
    jax.jit(instruments.get_history)(make(2).init(jnp.zeros(1)))


def test_an_optimizer_without_loss_scaling_cannot_be_recorded():
  tx = instruments.record(optax.sgd(1.0), 4)
  with pytest.raises(ValueError, match="must hold the state of `loss_scaling`"):
    tx.init(jnp.zeros(1))


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity):
  with pytest.raises(ValueError, match="`capacity`"):
    make(capacity)


def test_the_headroom_of_what_is_not_a_positive_number_is_unknown():
  amax = np.float32([0.0, np.inf, np.nan, 65504 / 8, 65504 * 2])
  history = instruments.History(np.arange(5), np.ones(5), amax, amax > 65504)
  unknown = [np.nan] * 3
  np.testing.assert_array_equal(history.headroom(), [*unknown, 3.0, -1.0])


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_requested_skip_leaves_the_record_bit_for_bit(steps):
  tx = make(3)
  state = run(tx, [np.inf] * steps)
  _, after = tx.update(jnp.ones(1), state, jnp.zeros(1), skip=True)
  history, same = map(instruments.get_history, (after, state))
  chex.assert_trees_all_equal(history, same)
  # An overflow is recorded all the same.
  _, after = tx.update(jnp.full(1, np.inf), state, jnp.zeros(1), skip=True)
  assert instruments.get_history(after).step[-1] == steps + 1
