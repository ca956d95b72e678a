"""The precision schedule by the loss, against the plain-Python model."""

import fractions
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests.precision.schedules import INF
from tests.precision.schedules import lows_of_model
from tests.precision.schedules import NAN
from tests.precision.schedules import one_by_one
from tests.precision.schedules import schedule_and_model
from tests.precision.schedules import switches
from tests.reference import ascend
from tests.support import describe

# The model, against numbers worked by hand.


def test_the_model_of_a_loss_ignores_nan_and_zero_and_never_goes_back():
  model = ascend.AccelerateTrainMode("fast|loss|1.5", target_loss=2.0)
  fed = (NAN, 0.0, -0.0, INF, 3.5, 3.0, 3.5, NAN)
  assert lows_of_model(model, fed) == [True] * 6 + [False] * 3


# The first state.


def test_the_first_call_of_a_loss_schedule_is_low():
  assert ols.PrecisionSchedule(jnp.bfloat16, until_loss=2.0).init().low


# The target.


@pytest.mark.parametrize("kind", [float, np.float64])
def test_target_loss_is_the_decimal_number_that_is_written(kind):
  schedule = ols.presets.accelerate_train_mode(
    "fast|loss|1.05", target_loss=kind("7.1")
  )
  with jax.enable_x64(True):
    # 7.455 as a double is above 7455/1000, and the one before it is not.
    above = np.float64(7.455)
    assert fractions.Fraction(float(above)) > fractions.Fraction("7.455")
    below = np.nextafter(above, 0)
    assert switches(schedule, jnp.asarray([below, above])).tolist() == [
      True,
      False,
    ]


@pytest.mark.parametrize(
  "target", [2, np.float32(2), np.int32(2), jnp.float32(2), np.float16(2)]
)
def test_a_target_loss_of_every_kind_is_that_number(target):
  schedule = ols.presets.accelerate_train_mode(
    "fast|loss|1.5", target_loss=target
  )
  assert schedule == ols.presets.accelerate_train_mode(
    "fast|loss|1.5", target_loss=2.0
  )
  assert hash(schedule) is not None


# Losses, against the model.


def switches_of_model(model, numbers):
  """Whether each number switches a new model: bool[n]."""
  switched = []
  for number in numbers:
    model.low = True
    switched.append(not model.check(loss=float(number)))
  return switched


TARGETS = (
  *(("1.05", 7.1), ("1.5", 2.0), ("1.01", 0.1), ("1.3", 43690.0)),
  *(("1.5", 1e-6), ("1.01", 1e38), ("1.37", 3.3e38)),
)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("ratio, target", TARGETS)
def test_every_loss_of_16_bits_switches_with_the_model(dtype, ratio, target):
  schedule, model = schedule_and_model(f"fast|loss|{ratio}", target_loss=target)
  losses = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
  # Of NaN one will do, and a backend may flush what is subnormal in float32.
  with np.errstate(invalid="ignore"):
    losses = losses[~np.isnan(losses.astype(np.float32))]
  small = np.abs(losses.astype(np.float32)) < 2.0**-126
  losses = np.append(losses[~small | (losses == 0)], losses.dtype.type(NAN))
  # The model, at once. The limit in a double is as good as the limit, unless a
  # number of 16 bits is what it was rounded to.
  limit = float(model.switch_loss)
  assert limit == model.switch_loss or limit not in losses.astype(np.float64)
  expected = (losses != 0) & (losses.astype(np.float64) <= limit)
  assert 2**14 < expected.sum() < losses.size
  np.testing.assert_array_equal(switches(schedule, losses), expected)


def neighbours(exact, dtype):
  """Returns the numbers of a dtype around an exact one, three on each side."""
  nearest = dtype(float(exact))
  found = [nearest]
  for towards in (-INF, INF):
    number = nearest
    for _ in range(3):
      number = np.nextafter(number, dtype(towards))
      found.append(number)
  return np.sort(np.asarray(found))


def random_targets(count):
  """Ratios, and targets of a few digits and of as many as a float has."""
  rng = random.Random(0)
  for _ in range(count):
    digits = rng.choice([0, 1, 2, 16])
    target = f"{rng.uniform(1, 10):.{digits}f}e{rng.randrange(-30, 37)}"
    yield f"1.{rng.randrange(1, 51):02}", float(target)


def assert_exact_around_the_limit(dtype, switches, count):
  """Compares with the model where rounding anything would show."""
  surprises = 0
  for ratio, target in random_targets(count):
    schedule, model = schedule_and_model(
      f"fast|loss|{ratio}", target_loss=target
    )
    losses = neighbours(model.switch_loss, dtype)
    expected = switches_of_model(model, losses)
    assert 3 <= sum(expected) <= 4
    assert list(switches(schedule, losses)) == expected, (ratio, target)
    in_floats = losses <= dtype(target * float(ratio))
    surprises += expected != in_floats.tolist()
  # Where the product in floats would have switched at another loss.
  assert surprises > count // 20


def test_a_float32_loss_is_compared_with_the_exact_product():
  assert_exact_around_the_limit(np.float32, switches, 100)


def test_a_float64_loss_is_compared_with_the_exact_product():
  with jax.enable_x64(True):
    assert_exact_around_the_limit(np.float64, switches, 100)


@pytest.mark.parametrize("kind", [float, np.float64, np.asarray])
def test_a_loss_that_jax_does_not_hold_is_not_rounded_to_float32(kind):
  def switches(schedule, losses):
    first = schedule.init()
    return [not schedule.update(first, loss=kind(x)).low for x in losses]

  assert_exact_around_the_limit(np.float64, switches, 20)


def test_the_exact_product_survives_jit():
  schedule, model = schedule_and_model("fast|loss|1.05", target_loss=7.1)
  losses = neighbours(model.switch_loss, np.float32)
  lows = jax.jit(jax.vmap(lambda x: schedule.update(schedule.init(), loss=x)))(
    losses
  ).low
  assert (~np.asarray(lows)).tolist() == switches_of_model(model, losses)


SPECIAL = (NAN, -NAN, 0.0, -0.0, INF, -INF, -1.0, -1e30, 1e-30, 3e38, 2.0, 3.5)
FLOATS = (
  *(jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64),
  *(np.float16, np.float32, np.float64, float, np.asarray),
)
each_float = pytest.mark.parametrize(
  "kind", FLOATS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}"
)


@each_float
@pytest.mark.parametrize("jit", [False, True])
def test_a_loss_of_every_type_switches_with_the_model(
  kind, jit, strict_promotion
):
  schedule, model = schedule_and_model("fast|loss|1.5", target_loss=2.0)
  update = jax.jit(schedule.update) if jit else schedule.update
  with jax.enable_x64(kind is jnp.float64):
    for number in SPECIAL:
      if kind == np.float16 and number in (3e38, -1e30):
        continue  # NumPy warns of them.
      loss = kind(number)
      model.low = True
      state = update(schedule.init(), loss=loss)
      assert bool(state.low) == model.check(loss=float(loss)), loss
      assert describe(state) == describe(schedule.init())


def test_a_python_integer_is_a_loss_with_and_without_jit():
  schedule = ols.PrecisionSchedule(jnp.float16, until_loss=3)
  for update in (schedule.update, jax.jit(schedule.update)):
    lows = one_by_one(update, schedule.init(), "loss", [4, 0, 3, 5])
    assert lows == [True, True, True, False, False]


def test_an_infinite_loss_is_above_every_limit():
  # In float32 the limit is beyond the largest number.
  schedule = ols.presets.accelerate_train_mode(
    "fast|loss|1.5", target_loss=3e38
  )
  losses = np.asarray([INF, 3e38, np.finfo(np.float32).max], np.float32)
  assert switches(schedule, losses).tolist() == [False, True, True]
  with jax.enable_x64(True):
    losses = jnp.asarray([INF, 1e300, 4.6e38, 4.5e38])
    assert switches(schedule, losses).tolist() == [False, False, False, True]


def test_a_loss_below_zero_switches_and_zero_of_either_sign_does_not():
  schedule = ols.PrecisionSchedule(jnp.float16, until_loss=1e-3)
  losses = np.asarray([-1e-3, -INF, 0.0, -0.0, NAN], np.float32)
  expected = [True, True, False, False, False]
  assert switches(schedule, losses).tolist() == expected


# What must not be fed.


@pytest.mark.parametrize(
  "loss",
  [
    *("1.0", True, np.bool_(True), 1j, np.complex64(1), [1.0], (1.0,), {}),
    *(np.ones(1), np.ones((1, 1), np.float16), np.ones(0), b"1"),
  ],
  ids=repr,
)
def test_a_loss_must_be_a_real_scalar(loss):
  schedule = ols.PrecisionSchedule(jnp.float16, until_loss=2.1)
  with pytest.raises(TypeError, match="`loss` must be a .*scalar, got"):
    schedule.update(schedule.init(), loss=loss)


@pytest.mark.parametrize(
  "shape, dtype",
  [
    *(((), bool), ((), jnp.complex64), ((1,), jnp.float32)),
    *(((1, 1), jnp.bfloat16), ((0,), jnp.float16)),
  ],
)
def test_a_traced_loss_must_be_a_real_scalar(shape, dtype):
  schedule = ols.PrecisionSchedule(jnp.float16, until_loss=2.1)
  loss = jnp.ones(shape, dtype)
  for update in (schedule.update, jax.jit(schedule.update)):
    with pytest.raises(TypeError, match="`loss` must be a .*scalar, got"):
      update(schedule.init(), loss=loss)
