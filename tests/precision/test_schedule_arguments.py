"""The precision schedule's arguments, and the schedule as a value."""

import dataclasses
import fractions
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests.precision.schedules import each_mode
from tests.precision.schedules import INF
from tests.precision.schedules import latch
from tests.precision.schedules import NAN

# The arguments.


@pytest.mark.parametrize(
  ("until", "got"),
  [
    ({}, "neither"),
    ({"until_step": None, "until_loss": None}, "neither"),
    ({"until_step": 0, "until_loss": 1.0}, "both"),
  ],
  ids=["none", "nones", "both"],
)
def test_exactly_one_end_of_the_low_part_must_be_given(until, got):
  with pytest.raises(ValueError, match=f"`until_step` or .*got {got}; pass"):
    ols.PrecisionSchedule(jnp.float16, **until)


@pytest.mark.parametrize(
  ("dtype", "error"),
  [
    *((jnp.float32, ValueError), (jnp.float8_e5m2, ValueError)),
    *((jnp.int16, TypeError), ("fast|step|0.9", TypeError), (None, TypeError)),
  ],
  ids=str,
)
def test_the_dtype_must_be_a_low_precision(dtype, error):
  with pytest.raises(error, match="`dtype` must be .*float16, bfloat16, got"):
    ols.PrecisionSchedule(dtype, until_step=1)


@pytest.mark.parametrize(
  "value",
  [
    *(20.0, "20", True, np.bool_(True), np.float32(20), [20], np.asarray([20])),
    *(NAN, fractions.Fraction(20)),
  ],
  ids=repr,
)
def test_until_step_must_be_an_integer(value):
  with pytest.raises(TypeError, match="`until_step` must be an integer.*got"):
    ols.PrecisionSchedule(jnp.float16, until_step=value)


@pytest.mark.parametrize("value", [-1, -(2**40), np.int8(-1)], ids=repr)
def test_until_step_must_not_be_negative(value):
  with pytest.raises(ValueError, match="`until_step` must not be neg.*got"):
    ols.PrecisionSchedule(jnp.float16, until_step=value)


@pytest.mark.parametrize(
  "value", ["2.0", True, 1j, [2.0], np.ones(1), np.bool_(True)], ids=repr
)
def test_until_loss_must_be_a_number(value):
  with pytest.raises(TypeError, match="`until_loss` must be a number, got"):
    ols.PrecisionSchedule(jnp.float16, until_loss=value)


@pytest.mark.parametrize(
  "value",
  [
    *(0, 0.0, -0.0, -2.0, NAN, INF, -INF, np.float32(NAN), 10**400),
    *(fractions.Fraction(0), fractions.Fraction(-1, 3)),
  ],
  ids=lambda value: repr(value)[:20],
)
def test_until_loss_must_be_positive_and_finite(value):
  with pytest.raises(ValueError, match="`until_loss` must be .*got"):
    ols.PrecisionSchedule(jnp.float16, until_loss=value)


@pytest.mark.parametrize("value", [None, 1, "origin"], ids=repr)
def test_allow_low_products_must_be_a_flag(value):
  with pytest.raises(TypeError, match="`allow_low_products` must be True or"):
    ols.PrecisionSchedule(jnp.float16, until_step=1, allow_low_products=value)


@pytest.mark.parametrize("name", ["until_step", "until_loss"])
def test_an_argument_must_be_known_when_the_schedule_is_made(name):
  def make(value):
    ols.PrecisionSchedule(jnp.float16, **{name: value})

  with pytest.raises(TypeError, match=f"`{name}` "):
    jax.jit(make)(2)


def test_all_arguments_but_the_first_are_keyword_only():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=18)
  for function in (ols.PrecisionSchedule, schedule.update):
    first, *others = inspect.signature(function).parameters.values()
    assert first.kind == first.POSITIONAL_OR_KEYWORD
    assert {other.kind for other in others} == {first.KEYWORD_ONLY}


# The schedule as a value.


@each_mode
def test_a_schedule_is_frozen(mode):
  schedule = latch(mode)
  for field in dataclasses.fields(schedule):
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(schedule, field.name, None)


@pytest.mark.parametrize(
  "loss", [7.1, np.float64(7.1), fractions.Fraction(71, 10)], ids=repr
)
def test_the_attributes_are_exact_and_of_one_type(loss):
  schedule = ols.PrecisionSchedule("bfloat16", until_loss=loss)
  assert isinstance(schedule.dtype, np.dtype)
  assert schedule.dtype == jnp.bfloat16
  assert schedule.until_step is None
  assert schedule.until_loss == fractions.Fraction(71, 10)
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=np.uint8(9))
  assert (schedule.until_step, schedule.until_loss) == (9, None)
  assert type(schedule.until_step) is int
  assert schedule.allow_low_products is False


DIFFERENT = [
  (jnp.float16, {"until_step": 20}),
  (jnp.bfloat16, {"until_step": 20}),
  (jnp.float16, {"until_step": 21}),
  (jnp.float16, {"until_step": 20, "allow_low_products": True}),
  (jnp.float16, {"until_loss": 20}),
  (jnp.bfloat16, {"until_loss": 20}),
  (jnp.float16, {"until_loss": 20.5}),
]


def test_schedules_are_equal_and_hash_equally_if_their_arguments_are():
  schedules, again = (
    [ols.PrecisionSchedule(dtype, **options) for dtype, options in DIFFERENT]
    for _ in range(2)
  )
  assert schedules == again
  assert len({*schedules, *again}) == len(DIFFERENT)
  assert len({repr(schedule) for schedule in schedules}) == len(DIFFERENT)
  for schedule in schedules:
    assert schedules.count(schedule) == 1
    assert schedule != DIFFERENT


@each_mode
def test_the_representation_names_every_attribute(mode):
  schedule = latch(mode)
  for field in dataclasses.fields(schedule):
    assert f"{field.name}=" in repr(schedule)
  assert repr(schedule).startswith("PrecisionSchedule(")
