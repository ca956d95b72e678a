"""The precision schedule's state: its latch, in checkpoints, under `jit`."""

import copy
import io
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.precision.schedules import each_mode
from tests.precision.schedules import INF
from tests.precision.schedules import LARGEST_INT32
from tests.precision.schedules import latch
from tests.precision.schedules import latch_of_model
from tests.precision.schedules import lows_of_model
from tests.precision.schedules import NAN
from tests.precision.schedules import one_by_one
from tests.precision.schedules import scanned
from tests.precision.schedules import schedule_and_model

# The latch.


def random_numbers(mode, seed, count):
  """Steps or losses around the switch, in no order, most of them before it."""
  rng = np.random.default_rng(seed)
  if mode == "step":
    return rng.integers(0, rng.integers(5, 40), count).astype(np.int32)
  losses = rng.uniform(rng.uniform(2.5, 4), 9, count)
  special = rng.choice([NAN, 0.0, INF, -0.0], count)
  losses = np.where(rng.random(count) < 0.3, special, losses)
  return np.where(rng.random(count) < 0.01, 3.0, losses).astype(np.float32)


def random_sequences(mode, count, length):
  """Sequences and what the model says to them; some switch and some do not."""
  fed = np.stack([random_numbers(mode, seed, length) for seed in range(count)])
  lows = np.asarray(
    [lows_of_model(latch_of_model(mode), row.tolist()) for row in fed]
  )
  assert 0 < lows[:, -1].sum() < count
  return fed, lows


@each_mode
def test_random_sequences_switch_with_the_model_one_by_one(mode):
  schedule = latch(mode)
  fed, lows = random_sequences(mode, 6, 25)
  for update in (schedule.update, jax.jit(schedule.update)):
    for row, expected_lows in zip(fed, lows, strict=True):
      seen = one_by_one(update, schedule.init(), mode, row)
      assert seen == expected_lows.tolist()
      seen = one_by_one(update, schedule.init(), mode, row.tolist())
      assert seen == expected_lows.tolist()


@each_mode
def test_random_sequences_switch_with_the_model_under_scan_and_vmap(mode):
  schedule = latch(mode)
  fed, lows = random_sequences(mode, 200, 50)
  assert scanned(schedule, fed[0]) == lows[0].tolist()

  def body(states, numbers):
    states = jax.vmap(
      lambda state, number: schedule.update(state, **{mode: number})
    )(states, numbers)
    return states, states.low

  first = jax.tree.map(lambda x: jnp.tile(x, len(fed)), schedule.init())
  last, seen = jax.lax.scan(body, first, fed.T)
  np.testing.assert_array_equal(np.asarray(seen).T, lows[:, 1:])
  # As many switches as rows that were switched, and none back.
  assert np.all(np.diff(lows.astype(int), axis=1) <= 0)
  assert last.low.shape == last.steps.shape == (len(fed),)


@each_mode
def test_it_never_goes_back_whatever_comes(mode):
  schedule = latch(mode)
  switched = schedule.init()._replace(low=jnp.asarray(False))
  numbers = {
    "step": [0, 1, LARGEST_INT32, 0],
    "loss": [NAN, 0.0, INF, -INF, 9.0, 3.0, 1e30],
  }[mode]
  for update in (schedule.update, jax.jit(schedule.update)):
    lows = one_by_one(update, switched, mode, numbers)
    assert not any(lows)


def test_a_schedule_without_a_low_part_never_becomes_low():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=0)
  steps = np.asarray([0, 0, 1, 2, 0], np.int32)
  assert not any(scanned(schedule, steps))
  assert not any(one_by_one(schedule.update, schedule.init(), "step", steps))


def test_nan_never_switches_however_many_come():
  schedule = latch("loss")
  lows = scanned(schedule, np.full(1000, NAN, np.float32))
  assert all(lows)


def test_the_counter_is_the_step_that_was_told():
  schedule = latch("step")
  state = schedule.init()
  assert state.steps == 0
  for step in (3, 35, 2):
    state = schedule.update(state, step=step)
    assert state.steps == step


def test_the_counter_can_be_fed_back():
  schedule, model = schedule_and_model("fast|step|0.7", total_steps=90)

  def body(state, _):
    state = schedule.update(state, step=state.steps + 1)
    return state, state.low

  _, lows = jax.lax.scan(body, schedule.init(), length=90)
  assert np.asarray(lows).tolist() == lows_of_model(model, range(1, 91))[1:]


# What must not be fed.


@pytest.mark.parametrize(
  "mode, fed, got",
  [
    ("step", {"loss": 1.0}, "loss"),
    ("step", {"loss": 0.0}, "loss"),
    ("step", {"step": 0, "loss": 0.0}, "loss"),
    ("step", {"step": 3, "loss": 1.0}, "loss"),
    ("step", {}, "neither"),
    ("step", {"step": None, "loss": None}, "neither"),
    ("loss", {"step": 1}, "step"),
    ("loss", {"step": 0}, "step"),
    ("loss", {"step": 0, "loss": 0.0}, "step"),
    ("loss", {"step": 3, "loss": 1.0}, "step"),
    ("loss", {}, "neither"),
    ("loss", {"step": None, "loss": None}, "neither"),
  ],
  ids=support.name,
)
def test_an_update_with_what_it_does_not_take_names_what_it_needs(
  mode, fed, got
):
  schedule = latch(mode)
  state = schedule.init()
  for update in (schedule.update, jax.jit(schedule.update)):
    with pytest.raises(
      ValueError, match=f"`until_{mode}` .*`{mode}`.* got .*{got}"
    ):
      update(state, **fed)
  # What it was switched to does not matter.
  with pytest.raises(ValueError, match=f"`until_{mode}`"):
    schedule.update(state._replace(low=jnp.asarray(False)), **fed)


# In checkpoints, and in compiled functions.


def through_pickle(state, schedule):
  return pickle.loads(pickle.dumps(state))


def through_flax(state, schedule):
  written = flax.serialization.to_bytes(state)
  return flax.serialization.from_bytes(schedule.init(), written)


def through_state_dict(state, schedule):
  written = flax.serialization.to_state_dict(state)
  return flax.serialization.from_state_dict(schedule.init(), written)


def through_numpy(state, schedule):
  file = io.BytesIO()
  np.savez(file, **state._asdict())
  file.seek(0)
  return type(state)(**np.load(file))


def through_python(state, schedule):
  return type(state)(*(leaf.item() for leaf in state))


def through_a_copy(state, schedule):
  return copy.deepcopy(state)


ROUND_TRIPS = (
  *(through_pickle, through_flax, through_state_dict, through_numpy),
  *(through_python, through_a_copy),
)


@each_mode
@pytest.mark.parametrize(
  "round_trip", ROUND_TRIPS, ids=lambda function: function.__name__
)
def test_a_training_resumed_anywhere_switches_where_it_would_have(
  mode, round_trip
):
  schedule = latch(mode)
  numbers = {
    "step": np.arange(1, 41, dtype=np.int32)[28:36],
    "loss": np.asarray([9, 4, NAN, 3, 4, 0, NAN, 2], np.float32),
  }[mode]
  lows = lows_of_model(latch_of_model(mode), numbers.tolist())
  assert lows[0] and not lows[-1]
  update = jax.jit(schedule.update)
  state, states = schedule.init(), []
  for number in numbers:
    state = update(state, **{mode: number})
    states.append(state)
  for at, saved in enumerate(states):
    loaded = round_trip(saved, schedule)
    if round_trip is not through_python:
      support.assert_same_bits(loaded, saved)
    rest = numbers[at + 1 :]
    for again in (update, schedule.update):
      assert one_by_one(again, loaded, mode, rest) == lows[at + 1 :]
  # The whole state, after the last step of a training that was resumed.
  last = update(round_trip(states[-2], schedule), **{mode: numbers[-1]})
  support.assert_same_bits(last, states[-1])


# Python's and NumPy's, before and after the switch of `latch`.
NUMBERS = {
  "step": (1, 39, np.int64(2), np.int64(39), np.uint8(2)),
  "loss": (9.0, 1.0, np.float64(9), np.float64(1), np.float16(2)),
}


@each_mode
def test_the_state_is_a_bool_and_an_int32_from_first_to_last(mode):
  schedule = latch(mode)
  first = schedule.init()
  assert [(x.shape, x.dtype) for x in first] == [((), bool), ((), jnp.int32)]
  assert first._fields == ("low", "steps")
  assert not any(x.weak_type for x in first)
  assert all(isinstance(x, jax.Array) for x in first)
  for x64 in (False, True):
    with jax.enable_x64(x64):
      assert support.describe(schedule.init()) == support.describe(first)
      assert support.describe(jax.jit(schedule.init)()) == support.describe(
        first
      )
      for number in NUMBERS[mode]:
        state = schedule.update(schedule.init(), **{mode: number})
        assert support.describe(state) == support.describe(first)
        state = jax.jit(schedule.update)(schedule.init(), **{mode: number})
        assert support.describe(state) == support.describe(first)


@each_mode
def test_the_switch_compiles_nothing(mode):
  schedule = latch(mode)
  update = jax.jit(
    lambda state, number: schedule.update(state, **{mode: number})
  )
  kind = jnp.int32 if mode == "step" else jnp.float32
  state = schedule.init()
  for number in (50, 9, 33, 2, 31) if mode == "loss" else (1, 31, 32, 33, 5):
    state = update(state, kind(number))
  assert not state.low
  assert update._cache_size() == 1
  # Python numbers are of one type, whatever they are.
  for number in NUMBERS[mode][:2]:
    state = update(state, number)
  assert update._cache_size() == 2


@each_mode
def test_an_update_under_jit_does_not_ask_the_host(mode):
  schedule = latch(mode)
  kind = jnp.int32 if mode == "step" else jnp.float32
  state, number = schedule.init(), kind(3)
  update = jax.jit(
    lambda state, number: schedule.update(state, **{mode: number})
  )
  update(state, number)
  with jax.transfer_guard("disallow"):
    update(state, number)
  shapes = jax.eval_shape(update, state, number)
  assert [(x.shape, x.dtype) for x in shapes] == [((), bool), ((), jnp.int32)]


@each_mode
def test_an_update_leaves_the_state_before_it_alone(mode):
  schedule = latch(mode)
  first = schedule.init()
  before = support.to_bits(first)
  before_switch, after_switch = NUMBERS[mode][:2]
  schedule.update(first, **{mode: after_switch})
  assert support.to_bits(first) == before
  # Two buffers, so that a state can be donated.
  update = jax.jit(schedule.update, donate_argnums=0)
  state = update(schedule.init(), **{mode: before_switch})
  assert state.low
  assert not update(state, **{mode: after_switch}).low


@each_mode
def test_a_schedule_pickles_and_can_be_static(mode):
  schedule = latch(mode)
  update = jax.jit(
    lambda schedule, state, number: schedule.update(state, **{mode: number}),
    static_argnums=0,
  )
  for same in (
    schedule,
    latch(mode),
    pickle.loads(pickle.dumps(schedule)),
    copy.deepcopy(schedule),
  ):
    assert same == schedule
    assert hash(same) == hash(schedule)
    assert update(same, same.init(), np.float32(9) if mode == "loss" else 9).low
  assert update._cache_size() == 1
