"""The precision schedule by steps, against the plain-Python model."""

import fractions
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests.precision.schedules import LARGEST_INT32
from tests.precision.schedules import lows_of_model
from tests.precision.schedules import NAN
from tests.precision.schedules import scanned
from tests.precision.schedules import schedule_and_model
from tests.precision.schedules import switches
from tests.reference import ascend
from tests.support import describe

# The model, against numbers worked by hand.


def test_the_model_multiplies_exactly():
  assert ascend.AccelerateTrainMode("fast|step|0.7", 90).switch_step == 63
  assert int(90 * 0.7) == 62
  loss = ascend.AccelerateTrainMode("fast|loss|1.05", target_loss=7.1)
  assert loss.switch_loss == fractions.Fraction(7455, 1000)


def test_the_model_of_ten_steps_has_nine_low_ones():
  model = ascend.AccelerateTrainMode("fast|step|0.9", 10)
  assert lows_of_model(model, range(1, 10)) == [True] * 9 + [False]


def test_the_model_makes_the_last_call_in_full_precision():
  for total_steps in (0, 1):
    model = ascend.AccelerateTrainMode("fast|step", total_steps)
    assert lows_of_model(model, ()) == [False]
  # The ratio alone would switch at 18, and the last call begins at 16.
  model = ascend.AccelerateTrainMode("fast|step|0.9", 20, steps_per_call=4)
  assert lows_of_model(model, (4, 8, 12, 16)) == [True] * 4 + [False]


# The first state.


@pytest.mark.parametrize("total_steps", [0, 1, 2, 3, 10, 11, 2**31, 2**70])
@pytest.mark.parametrize("steps_per_call", [1, 2, 10, LARGEST_INT32])
def test_the_first_call_is_in_the_precision_of_the_model(
  total_steps, steps_per_call
):
  for ratio in ("0.2", "0.5", "0.9"):
    schedule, model = schedule_and_model(
      f"fast|step|{ratio}",
      total_steps=total_steps,
      steps_per_call=steps_per_call,
    )
    assert bool(schedule.init().low) == model.check(step=0)


# Steps, against the model.


def floor_in_floats(total, hundredths):
  return int(total * (hundredths / 100))


@functools.cache
def low_state():
  """A low state as a checkpoint gives it back, in NumPy, which is quicker."""
  first = ols.PrecisionSchedule(jnp.float16, until_step=1).init()
  return jax.tree.map(lambda leaf: np.asarray(leaf)[()], first)


def assert_switches_with_the_model(total, hundredths, steps_per_call):
  schedule, model = schedule_and_model(
    f"fast|step|{hundredths / 100}",
    total_steps=total,
    steps_per_call=steps_per_call,
  )
  first_full = max(0, min(model.switch_step, total - steps_per_call))
  state = low_state()
  for step in (max(0, first_full - 1), first_full):
    state = schedule.update(state, step=step)
    assert bool(state.low) == model.check(step=step), (schedule, step)
  assert not state.low


@pytest.mark.slow
def test_every_total_up_to_100_and_every_ratio_switch_at_the_exact_step():
  for total, hundredths in itertools.product(range(101), range(20, 91)):
    assert_switches_with_the_model(total, hundredths, steps_per_call=1)


@pytest.mark.parametrize("steps_per_call", [1, 40])
def test_every_product_that_is_wrong_in_floats_is_exact(steps_per_call):
  wrong = [
    (total, hundredths)
    for total, hundredths in itertools.product(range(2001), range(20, 91))
    if floor_in_floats(total, hundredths) != total * hundredths // 100
  ]
  assert (90, 70) in wrong
  for total, hundredths in wrong:
    assert_switches_with_the_model(total, hundredths, steps_per_call)


@pytest.mark.slow
@pytest.mark.parametrize(
  "total_steps, steps_per_call",
  [(1, 1), (2, 1), (3, 2), (10, 1), (63, 5), (90, 1), (100, 30), (101, 300)],
)
def test_a_whole_training_is_in_the_precision_of_the_model(
  total_steps, steps_per_call
):
  finished = np.arange(steps_per_call, total_steps + 2, steps_per_call)
  for ratio in ("0.2", "0.7", "0.9"):
    schedule, model = schedule_and_model(
      f"fast1|step|{ratio}",
      total_steps=total_steps,
      steps_per_call=steps_per_call,
    )
    lows = scanned(schedule, finished.astype(np.int32))
    assert lows == lows_of_model(model, finished.tolist())


def test_with_several_steps_per_call_the_switch_is_late_by_less_than_a_call():
  late, full = set(), np.arange(42)
  for steps_per_call, total in itertools.product((1, 2, 3, 7), range(21, 42)):
    schedule = ols.presets.accelerate_train_mode(
      "fast|step|0.5", total_steps=total, steps_per_call=steps_per_call
    )
    calls = full[::steps_per_call][switches(schedule, full)[::steps_per_call]]
    late.add((steps_per_call, int(calls[0]) - total // 2))
  assert late == {(n, by) for n in (1, 2, 3, 7) for by in range(n)}


# Steps of every kind.

INTEGERS = (
  *(jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32),
  *(np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64),
  *(np.uint64, np.asarray, int),
)
each_integer = pytest.mark.parametrize(
  "kind", INTEGERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}"
)


@pytest.mark.slow
@each_integer
@pytest.mark.parametrize("jit", [False, True])
def test_steps_of_every_integer_type_switch_at_the_same_step(
  kind, jit, strict_promotion
):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=115)
  update = jax.jit(schedule.update) if jit else schedule.update
  for step in (0, 1, 114, 115, 116, 127):
    state = update(schedule.init(), step=kind(step))
    assert bool(state.low) == (step < 115)
    assert describe(state) == describe(schedule.init())
    assert state.steps == step


@each_integer
def test_a_switch_beyond_the_range_of_the_type_is_not_reached(kind):
  # In eight bits 270 is 14.
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=270)
  for step in (14, 15, 127):
    assert schedule.update(schedule.init(), step=kind(step)).low
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=2**70)
  for update in (schedule.update, jax.jit(schedule.update)):
    assert update(schedule.init(), step=kind(127)).low


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind, largest",
  [
    (jnp.int8, 127),
    (jnp.uint8, 255),
    (jnp.int16, 2**15 - 1),
    (jnp.uint16, 2**16 - 1),
    (jnp.int32, LARGEST_INT32),
    (jnp.uint32, 2**32 - 1),
  ],
)
def test_the_largest_number_of_a_type_is_exact(kind, largest):
  numbers = jnp.asarray([0, largest - 1, largest], kind)
  for switch, expected in [
    (largest - 1, [False, True, True]),
    (largest, [False, False, True]),
    (largest + 1, [False, False, False]),
  ]:
    schedule, model = schedule_and_model(
      "fast|step|0.9", total_steps=math.ceil(fractions.Fraction(switch * 10, 9))
    )
    assert model.switch_step == switch
    assert switches(schedule, numbers).tolist() == expected
    for number, switched in zip(numbers, expected, strict=True):
      state = schedule.update(schedule.init(), step=number)
      assert bool(state.low) != switched


@pytest.mark.parametrize(
  "step", [2**31, 2**32, 2**32 + 5, 2**63, 2**70, np.int64(2**32)], ids=repr
)
def test_a_step_beyond_int32_is_compared_exactly(step):
  for total, low in [(10, False), (step, False), (2 * int(step), True)]:
    schedule, model = schedule_and_model("fast|step", total_steps=total)
    state = schedule.update(schedule.init(), step=step)
    assert bool(state.low) == low == model.check(step=int(step))


@pytest.mark.parametrize("step", [2**31, 2**32, 2**70, np.int64(2**32)])
def test_the_counter_stops_at_the_largest_int32(step):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=2**80)
  state = schedule.update(schedule.init(), step=step)
  assert state.steps == LARGEST_INT32
  assert describe(state) == describe(schedule.init())
  for largest in (LARGEST_INT32, 2**32 - 1):
    state = jax.jit(schedule.update)(schedule.init(), step=jnp.uint32(largest))
    assert state.steps == LARGEST_INT32


def test_steps_in_int64_are_compared_exactly():
  with jax.enable_x64(True):
    schedule, model = schedule_and_model(
      "fast|step|0.7", total_steps=90 * 2**40
    )
    steps = jnp.asarray([0, 2**31, 2**32, 63 * 2**40 - 1, 63 * 2**40])
    assert steps.dtype == jnp.int64
    assert model.switch_step == 63 * 2**40
    assert switches(schedule, steps).tolist() == [False] * 4 + [True]
    state = jax.jit(schedule.update)(schedule.init(), step=steps[2])
    assert state.steps == LARGEST_INT32
    assert describe(state) == describe(schedule.init())


# What must not be fed.


@pytest.mark.parametrize(
  "step",
  [
    *(1.0, np.float32(1), NAN, "1", True, np.bool_(True), 1j, [1], (1,), {}),
    *(np.ones(1, int), np.ones((), np.float32), np.ones((), bool)),
    *(fractions.Fraction(1), b"1"),
  ],
  ids=repr,
)
def test_a_step_must_be_an_integer_scalar(step):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=18)
  with pytest.raises(TypeError, match="`step` must be an integer.* got"):
    schedule.update(schedule.init(), step=step)


@pytest.mark.parametrize(
  "shape, dtype",
  [
    *(((), jnp.float32), ((), jnp.bfloat16), ((), bool), ((), jnp.complex64)),
    *(((1,), jnp.int32), ((1, 1), jnp.uint8), ((0,), jnp.int32)),
  ],
)
def test_a_traced_step_must_be_an_integer_scalar(shape, dtype):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=18)
  step = jnp.ones(shape, dtype)
  for update in (schedule.update, jax.jit(schedule.update)):
    with pytest.raises(TypeError, match="`step` must be an integer.* got"):
      update(schedule.init(), step=step)


@pytest.mark.parametrize("step", [-1, -(2**40), np.int8(-1)])
def test_a_negative_step_is_an_error_where_it_is_known(step):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=18)
  with pytest.raises(ValueError, match="`step` must not be negative, got"):
    schedule.update(schedule.init(), step=step)


def test_a_negative_step_that_is_not_known_does_not_switch():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=18)
  for step in (-1, -(2**31)):
    state = jax.jit(schedule.update)(schedule.init(), step=jnp.int32(step))
    assert state.low
