"""The precision schedule against a model of it in plain Python."""

import copy
import dataclasses
import fractions
import functools
import inspect
import io
import math
import pickle
from typing import NamedTuple

import flax.serialization
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.reference import ascend
from tests.support import describe
from tests.support import same_bits

NAN, INF = math.nan, math.inf
LARGEST_INT32 = 2**31 - 1
F16, BF16 = jnp.float16, jnp.bfloat16

# Whole trainings.
#
# The loss is x * weight + offset + root. The derivative of the root is 0 if it
# is positive, and NaN if it is 0. All numbers are exact in bfloat16, so the
# model is exact as well.


class Batch(NamedTuple):
  x: float
  offset: float = 8.0
  root: float = 1.0


BATCHES = {
  "1": Batch(1.0),
  "2": Batch(2.0),
  "-1/4": Batch(-0.25),
  "loss at the target": Batch(0.0, offset=0.5),
  "loss of zero": Batch(0.0, offset=-1.0),
  "loss below the target, gradient NaN": Batch(0.0, offset=0.5, root=0.0),
  "inf": Batch(INF),
  "NaN": Batch(NAN),
}
TARGET = 1.5  # For schedules that follow the loss.
RATE = 0.25
SCHEDULES = {
  "by steps in float16": ols.PrecisionSchedule(F16, until_step=3),
  "by steps in bfloat16": ols.PrecisionSchedule(BF16, until_step=3),
  "by loss in float16": ols.PrecisionSchedule(F16, until_loss=TARGET),
  "by loss in bfloat16": ols.PrecisionSchedule(BF16, until_loss=TARGET),
  "by hand": ols.PrecisionSchedule(F16, until_step=3),
}
# S reaches the largest power of two in float16 after two clean steps.
RULE = support.Stub(2.0**13)
TX = ols.loss_scaling(optax.sgd(lambda _: RATE), RULE)


def loss_fn(weight, batch):
  product = batch.x[None, None] @ weight
  return product[0, 0] + batch.offset + jnp.sqrt(batch.root + 0 * weight[0, 0])


def train_step_by_hand(schedule):
  def step(params, opt_state, state, batch):
    value_and_grad = schedule.value_and_grad(loss_fn, opt_state, state)
    loss, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = schedule.optimizer(TX, state).update(
      scaled_grads, opt_state, params
    )
    params = optax.apply_updates(params, updates)
    state = schedule.update(state, step=opt_state.applied_steps)
    return params, opt_state, state, loss

  return step


@functools.cache
def compiled(name):
  """Returns a function that runs a schedule's train step on many batches."""
  schedule = SCHEDULES[name]
  step = schedule.make_train_step(loss_fn, TX)
  if name == "by hand":
    step = train_step_by_hand(schedule)

  def body(carry, batch):
    *carry, loss = step(*carry, batch)
    params, opt_state, state = carry
    seen = {
      "loss": loss,
      "weight": params[0, 0],
      "scale": ols.get_loss_scale(opt_state),
      "low": state.low,
      "steps": state.steps,
      "applied": opt_state.applied_steps,
      "skipped": opt_state.skipped,
      "stalled": opt_state.stalled,
      "counted": optax.tree.get(opt_state.inner_state, "count"),
    }
    return tuple(carry), seen

  return jax.jit(functools.partial(lax.scan, body))


def start(name):
  params = jnp.ones((1, 1))
  return params, TX.init(params), SCHEDULES[name].init()


@dataclasses.dataclass
class Model:
  """The same training, in Python's own numbers."""

  schedule: ols.PrecisionSchedule
  weight: float = 1.0
  scale: float = RULE.start
  low: bool = True
  applied: int = 0

  def step(self, batch):
    is_scaled = self.low and self.schedule.dtype == F16
    loss = batch.x * self.weight + batch.offset + batch.root
    overflow = not (math.isfinite(batch.x) and batch.root)
    if is_scaled:
      # The cotangent of the product, or the gradient itself, overflows.
      overflow |= max(1, abs(batch.x)) * self.scale > 65504
      self.scale *= 0.5 if overflow else 2
    if not overflow:
      self.applied += 1
      self.weight -= RATE * batch.x
      if self.schedule.until_loss is None:
        self.low &= self.applied < self.schedule.until_step
      else:
        self.low &= loss == 0 or loss > TARGET
    return {
      "loss": loss,
      "weight": self.weight,
      "scale": self.scale,
      "low": self.low,
      "steps": self.applied if self.schedule.until_loss is None else 0,
      "applied": self.applied,
      "skipped": overflow,
      "stalled": overflow and not is_scaled,
      "counted": self.applied,
    }


def through_flax(state):
  return flax.serialization.from_bytes(
    state, flax.serialization.to_bytes(state)
  )


def through_numpy(state):
  leaves, structure = jax.tree.flatten(state)
  file = io.BytesIO()
  np.savez(file, *leaves)
  file.seek(0)
  return jax.tree.unflatten(structure, np.load(file).values())


ROUND_TRIPS = {
  "pickle": lambda state: pickle.loads(pickle.dumps(state)),
  "flax": through_flax,
  "numpy": through_numpy,
}
four_batches = st.lists(st.sampled_from(list(BATCHES)), min_size=4, max_size=4)


@pytest.mark.parametrize("name", SCHEDULES)
@given(four_batches, st.sampled_from(list(ROUND_TRIPS)), four_batches)
@settings(max_examples=40)
@example(["1", "2", "1", "1"], "flax", ["1", "2", "NaN", "-1/4"])
@example(["1"] * 4, "flax", ["loss at the target", "2", "inf", "1"])
def test_a_training_is_that_of_the_model_before_and_after_a_checkpoint(
  name, first, round_trip, second
):
  run, model, carry = compiled(name), Model(SCHEDULES[name]), start(name)
  for names in (first, second):
    batches = [BATCHES[x] for x in names]
    stacked = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *batches)
    carry, seen = run(carry, stacked)
    expected = [model.step(batch) for batch in batches]
    for key, values in jax.device_get(seen).items():
      want = np.asarray([x[key] for x in expected], values.dtype)
      np.testing.assert_array_equal(values, want, err_msg=key)
    loaded = ROUND_TRIPS[round_trip](carry)
    assert same_bits(loaded, carry)
    carry = jax.tree.map(jnp.asarray, loaded)
  assert run._cache_size() == 1


def test_each_of_several_seeds_switches_at_its_own_time():
  schedule = SCHEDULES["by loss in float16"]
  step = jax.vmap(schedule.make_train_step(loss_fn, TX))
  carry = jax.tree.map(lambda x: jnp.stack([x, x]), start("by loss in float16"))
  batch = Batch(jnp.zeros(2), jnp.array([0.5, 0.75]), jnp.ones(2))
  *_, state, losses = jax.jit(step)(*carry, batch)
  np.testing.assert_array_equal(losses, [1.5, 1.75])
  np.testing.assert_array_equal(state.low, [False, True])


def test_a_train_step_also_runs_operation_by_operation():
  schedule = ols.PrecisionSchedule(F16, until_step=1)
  step, model = schedule.make_train_step(loss_fn, TX), Model(schedule)
  carry = (*start("by steps in float16")[:2], schedule.init())
  for batch in (Batch(1.0), Batch(2.0)):
    *carry, loss = step(*carry, jax.tree.map(jnp.asarray, batch))
    expected = model.step(batch)
    assert loss == expected["loss"]
    assert carry[0] == expected["weight"]
  assert not carry[2].low


# Numbers of every type, next to the limit.

INTEGERS = (
  *(jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32),
  *(np.int8, np.uint16, np.int64, np.uint64, np.asarray, int, jnp.int64),
)
limits = st.one_of(
  st.integers(0, 300),
  st.builds(
    lambda bits, offset: 2**bits + offset,
    st.sampled_from([7, 8, 15, 16, 31, 32, 62, 70]),
    st.integers(-2, 2),
  ),
)


def assert_switches(schedule, update, kind, number, expected, **later):
  """Asserts what an update with a number does, and that it is final.

  Args:
    schedule: a precision schedule.
    update: its `update`, perhaps jitted.
    kind: the number's type.
    number: an integer or a float.
    expected: whether the schedule is low after it.
    **later: what the schedule is updated with next, which must not matter.
  """
  x64 = kind in (jnp.int64, jnp.float64)
  (name,) = later
  first = schedule.init()
  with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
    state = update(first, **{name: kind(number)})
    assert describe(state) == describe(first)
    assert bool(state.low) == expected
    assert schedule.update(state, **later).low == state.low
  if name == "step":
    assert state.steps == min(number, LARGEST_INT32)
  else:
    assert state.steps == 0


def integer_near(limit, kind, offset):
  """Returns the integer that is nearest to `limit + offset` in a type."""
  largest = 2**70
  if kind is np.asarray:
    kind = np.int64
  if kind is not int:
    largest = int(jnp.iinfo(kind).max)
  return max(0, min(limit + offset, largest))


@given(limits, st.sampled_from(INTEGERS), st.integers(-2, 2))
@settings(max_examples=150)
@example(270, jnp.uint8, 0)  # In eight bits, 270 is 14.
@example(2**31, jnp.uint32, 0)
@example(2**40, jnp.int64, 0)
def test_a_step_of_any_type_switches_at_the_limit(limit, kind, offset):
  schedule = ols.PrecisionSchedule(F16, until_step=limit)
  number = integer_near(limit, kind, offset)
  assert schedule.init().low == (limit > 0)
  assert_switches(
    schedule, schedule.update, kind, number, number < limit, step=0
  )


@given(limits, st.sampled_from(INTEGERS[:6]), st.integers(-2, 2))
@settings(max_examples=12)
def test_a_traced_step_switches_at_the_limit(limit, kind, offset):
  schedule = ols.PrecisionSchedule(F16, until_step=limit)
  number = integer_near(limit, kind, offset)
  assert_switches(
    schedule, jax.jit(schedule.update), kind, number, number < limit, step=0
  )


FLOATS = (
  *(jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64),
  *(np.float16, np.float32, np.float64, float, np.asarray),
)
targets = st.one_of(
  st.fractions(fractions.Fraction(1, 1000), 70000),
  st.floats(1e-30, 3.3e38),
  st.builds(
    lambda digits, exponent: float(f"{digits}e{exponent}"),
    st.integers(1, 9999),
    st.integers(-30, 34),
  ),
)
SPECIAL = (NAN, -NAN, 0.0, -0.0, INF, -INF, -1.0)


def loss_near(limit, kind, offset):
  """Returns a float, so many numbers of its type from a limit."""
  kind = np.float64 if kind in (float, np.asarray) else kind
  dtype = np.dtype(kind)
  with np.errstate(over="ignore", under="ignore"):
    number = np.asarray(float(limit), np.float64).astype(dtype)
    towards = np.asarray(INF if offset > 0 else -INF, dtype)
    for _ in range(abs(offset)):
      number = np.nextafter(number, towards)
  return number[()]


def is_low_after(loss, target):
  """Returns the answer of exact arithmetic."""
  loss = float(loss)
  return not (loss != 0 and loss <= target)


@given(
  targets,
  st.sampled_from(FLOATS),
  st.one_of(st.integers(-3, 3), st.sampled_from(SPECIAL)),
)
@settings(max_examples=250)
@example(7.1, np.float64, 0)
@example(7.1, jnp.float64, 1)
@example(3.3e38, jnp.float32, INF)
def test_a_loss_of_any_type_switches_at_the_decimal_number(target, kind, loss):
  schedule = ols.PrecisionSchedule(F16, until_loss=target)
  # The decimal that Python writes for a float; no float is 7.1.
  limit = target
  if isinstance(target, float):
    limit = fractions.Fraction(repr(target))
  if isinstance(loss, int):
    loss = loss_near(limit, kind, loss)
  assert_switches(
    schedule, schedule.update, kind, loss, is_low_after(loss, limit), loss=NAN
  )


@pytest.mark.parametrize("kind", [jnp.float16, jnp.float32, jnp.float64])
def test_a_traced_loss_switches_at_the_decimal_number(kind):
  schedule = ols.PrecisionSchedule(F16, until_loss=7.455)
  update, limit = jax.jit(schedule.update), fractions.Fraction("7.455")
  near = [loss_near(limit, kind, offset) for offset in range(-2, 3)]
  for loss in (*near, *SPECIAL):
    expected = is_low_after(loss, limit)
    assert_switches(schedule, update, kind, loss, expected, loss=NAN)


def test_a_python_integer_is_a_loss():
  schedule = ols.PrecisionSchedule(F16, until_loss=3)
  for update in (schedule.update, jax.jit(schedule.update)):
    lows = [bool(update(schedule.init(), loss=x).low) for x in (4, 0, 3)]
    assert lows == [True, True, False]


def test_a_negative_traced_step_does_not_switch():
  schedule = ols.PrecisionSchedule(F16, until_step=18)
  for step in (-1, -(2**31)):
    assert schedule.update(schedule.init(), step=jnp.int32(step)).low


# The schedule that Ascend's text describes.


@given(st.integers(0, 3000), st.integers(20, 90), st.integers(1, 40))
@example(90, 70, 1)  # In floats, 90 * 0.7 is below 63.
@example(20, 90, 4)
@example(0, 20, 1)
def test_the_steps_of_ascend_end_at_the_step_of_its_model(total, ratio, call):
  arguments = f"fast|step|{ratio / 100}", total
  schedule = ols.presets.accelerate_train_mode(
    arguments[0], total_steps=total, steps_per_call=call
  )
  for step in {0, schedule.until_step - 1, schedule.until_step} - {-1}:
    model = ascend.AccelerateTrainMode(*arguments, steps_per_call=call)
    assert model.check(step=step) == (step < schedule.until_step)


@given(st.integers(101, 150), st.floats(1e-30, 1e30))
@example(105, 7.1)
def test_the_loss_of_ascend_is_the_exact_product_of_its_model(ratio, target):
  text = f"fast1|loss|{ratio / 100}"
  schedule = ols.presets.accelerate_train_mode(text, target_loss=target)
  model = ascend.AccelerateTrainMode(text, target_loss=target)
  assert schedule.until_loss == model.switch_loss


# The arguments.

HALF = fractions.Fraction(1, 2)
NOT_INTEGERS = (20.0, "20", True, np.bool_(True), np.float32(20), [20], HALF)
NOT_NUMBERS = ("2.0", True, 1j, [2.0], np.ones(1), np.bool_(True))
NOT_POSITIVE = (0, -0.0, -2.0, NAN, INF, -INF, 10**400, -HALF)
WRONG = [
  *[({"until_step": x}, TypeError, "an integer.*got") for x in NOT_INTEGERS],
  *[({"until_step": x}, ValueError, "not be neg.*got") for x in (-1, -(2**40))],
  *[({"until_loss": x}, TypeError, "a number, got") for x in NOT_NUMBERS],
  *[({"until_loss": x}, ValueError, ".*got") for x in NOT_POSITIVE],
  *[
    ({"dtype": x, "until_step": 1}, error, ".*float16, bfloat16, got")
    for x, error in {
      "float32": ValueError,
      "float8_e5m2": ValueError,
      "int16": TypeError,
      "fast|step|0.9": TypeError,
      None: TypeError,
    }.items()
  ],
  *[
    ({"allow_low_products": x, "until_step": 1}, TypeError, "True or")
    for x in (None, 1)
  ],
]


@pytest.mark.parametrize(
  ("arguments", "error", "message"), WRONG, ids=lambda x: str(x)[:30]
)
def test_a_wrong_argument_is_refused_by_its_name(arguments, error, message):
  name = next(iter(arguments))
  with pytest.raises(error, match=f"`{name}` must .*{message}"):
    ols.PrecisionSchedule(**{"dtype": F16, **arguments})


@pytest.mark.parametrize(
  ("until", "got"),
  [
    ({}, "neither"),
    ({"until_step": None, "until_loss": None}, "neither"),
    ({"until_step": 0, "until_loss": 1.0}, "both"),
  ],
  ids=str,
)
def test_exactly_one_end_of_the_low_part_must_be_given(until, got):
  with pytest.raises(ValueError, match=f"`until_step` or .*got {got}; pass"):
    ols.PrecisionSchedule(F16, **until)


@pytest.mark.parametrize("name", ["until_step", "until_loss"])
def test_an_argument_must_be_known_when_the_schedule_is_made(name):
  with pytest.raises(TypeError, match=f"`{name}` "):
    jax.jit(lambda x: ols.PrecisionSchedule(F16, **{name: x}) and 0)(2)


def test_all_arguments_but_the_first_are_keyword_only():
  for function in (ols.PrecisionSchedule, SCHEDULES["by hand"].update):
    first, *others = inspect.signature(function).parameters.values()
    assert first.kind == first.POSITIONAL_OR_KEYWORD
    assert {other.kind for other in others} == {first.KEYWORD_ONLY}


@pytest.mark.parametrize(
  "loss", [7.1, np.float64(7.1), fractions.Fraction(71, 10)], ids=repr
)
def test_the_attributes_are_exact_and_of_one_type(loss):
  schedule = ols.PrecisionSchedule("bfloat16", until_loss=loss)
  assert schedule.dtype == np.dtype(BF16)
  assert isinstance(schedule.dtype, np.dtype)
  assert schedule.until_step is None
  assert schedule.until_loss == fractions.Fraction(71, 10)
  schedule = ols.PrecisionSchedule(F16, until_step=np.uint8(9))
  assert (schedule.until_step, schedule.until_loss) == (9, None)
  assert type(schedule.until_step) is int
  assert schedule.allow_low_products is False


DIFFERENT = [
  (F16, {"until_step": 20}),
  (BF16, {"until_step": 20}),
  (F16, {"until_step": 21}),
  (F16, {"until_step": 20, "allow_low_products": True}),
  (F16, {"until_loss": 20}),
  (BF16, {"until_loss": 20}),
  (F16, {"until_loss": 20.5}),
]


def test_schedules_with_equal_arguments_are_one_static_argument():
  schedules, again = (
    [ols.PrecisionSchedule(dtype, **options) for dtype, options in DIFFERENT]
    for _ in range(2)
  )
  copies = [*again, *map(copy.deepcopy, again)]
  copies += map(pickle.loads, map(pickle.dumps, again))
  assert {*schedules, *copies} == {*schedules}
  assert len({*schedules}) == len({*map(repr, schedules)}) == len(DIFFERENT)
  init = jax.jit(lambda schedule: schedule.init(), static_argnums=0)
  for schedule in (*schedules, *copies):
    assert init(schedule).low
  assert init._cache_size() == len(DIFFERENT)


# Updates.


@pytest.mark.parametrize(
  ("name", "fed", "got"),
  [
    ("step", {"loss": 0.0}, "loss"),
    ("step", {"step": 0, "loss": 0.0}, "loss"),
    ("step", {"step": None, "loss": None}, "neither"),
    ("loss", {"step": 0}, "step"),
    ("loss", {"step": 3, "loss": 1.0}, "step"),
    ("loss", {}, "neither"),
  ],
  ids=support.name,
)
def test_an_update_with_the_wrong_number_names_the_right_one(name, fed, got):
  schedule = SCHEDULES[{"step": "by hand"}.get(name, "by loss in float16")]
  with pytest.raises(ValueError, match=f"`until_{name}` .*`{name}`.* .*{got}"):
    schedule.update(schedule.init(), **fed)


NO_SCALARS = ("1", 1j, [1], (1,), {}, b"1", np.ones(1, int), np.ones(0))
BOOLS = (True, np.bool_(True), np.ones((), bool))
TRACED = [
  *(((), bool), ((), jnp.complex64), ((1,), jnp.int32), ((0,), jnp.float16)),
]
FLOATS_AS_STEPS = (1.0, np.float32(1), NAN, HALF, np.ones((), np.float32))


@pytest.mark.parametrize(
  ("name", "message", "others"),
  [
    ("step", "an integer.* got", (*FLOATS_AS_STEPS, jnp.ones(()))),
    ("loss", "a .*scalar, got", ()),
  ],
  ids=["step", "loss"],
)
def test_a_number_must_be_a_real_scalar(name, message, others):
  schedule = SCHEDULES["by hand" if name == "step" else "by loss in float16"]
  traced = [jnp.ones(shape, dtype) for shape, dtype in TRACED]
  for x in (*NO_SCALARS, *BOOLS, *traced, *others):
    with pytest.raises(TypeError, match=f"`{name}` must be {message}"):
      schedule.update(schedule.init(), **{name: x})
  for x in traced:
    with pytest.raises(TypeError, match=f"`{name}` must be {message}"):
      jax.jit(schedule.update)(schedule.init(), **{name: x})


@pytest.mark.parametrize("step", [-1, -(2**40), np.int8(-1)])
def test_a_negative_step_is_an_error_where_it_is_known(step):
  schedule = SCHEDULES["by hand"]
  with pytest.raises(ValueError, match="`step` must not be negative, got"):
    schedule.update(schedule.init(), step=step)


def test_the_state_is_a_bool_and_an_int32_in_two_buffers():
  schedule = SCHEDULES["by hand"]
  first = schedule.init()
  assert first._fields == ("low", "steps")
  assert [(x.shape, x.dtype) for x in first] == [((), bool), ((), jnp.int32)]
  for x64 in (False, True):
    with jax.enable_x64(x64):
      for state in (
        schedule.init(),
        jax.jit(schedule.init)(),
        schedule.update(first, step=2),
        jax.jit(schedule.update)(first, step=2),
      ):
        assert describe(state) == describe(first)
        assert all(isinstance(x, jax.Array) for x in state)
  update = jax.jit(schedule.update, donate_argnums=0)
  assert not update(update(schedule.init(), step=1), step=9).low


# The optimizer of a step whose loss was not scaled.

PARAMS = {"w": jnp.array([1.0, -0.0, 3.0]), "b": jnp.array([0.5], F16)}
GRADIENTS = {"w": jnp.array([1e-3, -2.0, 1e5]), "b": jnp.array([0.25], F16)}


def update(tx, gradients, state, params, *, scaled, **extra_args):
  """Updates in the low part of training, or in the full one."""
  schedule = SCHEDULES["by hand"]
  precision = schedule.init()._replace(low=jnp.asarray(scaled))
  return schedule.optimizer(tx, precision).update(
    gradients, state, params, **extra_args
  )


def test_an_unscaled_step_is_that_of_the_optimizer_alone():
  inner = optax.adam(0.5)
  tx = ols.loss_scaling(inner, RULE)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
  state, bare = tx.init(PARAMS), inner.init(wide)
  updates, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
  wide_gradients = jax.tree.map(lambda x: x.astype(jnp.float32), GRADIENTS)
  expected, bare = inner.update(wide_gradients, bare, wide)
  expected["b"] = expected["b"].astype(F16)
  assert same_bits(updates, expected)
  assert same_bits(after.inner_state, bare)
  assert same_bits(after.loss_scale_state, state.loss_scale_state)
  assert after.amax == 1e5
  assert not after.stalled


@pytest.mark.parametrize("check", [ols.nonfinite(F16), ols.saturated(F16)])
def test_the_check_limits_unscaled_gradients_too(check):
  tx = ols.loss_scaling(optax.sgd(1.0), RULE, check=check)
  state = tx.init(PARAMS)
  _, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
  assert after.skipped
  assert same_bits(after.loss_scale_state, state.loss_scale_state)


def test_a_damaged_scale_waits_for_a_scaled_step():
  state = optax.tree.set(TX.init(PARAMS), loss_scale=jnp.float32(NAN))
  _, after = update(TX, GRADIENTS, state, PARAMS, scaled=False)
  assert not after.skipped and jnp.isnan(ols.get_loss_scale(after))
  _, after = update(TX, GRADIENTS, after, PARAMS, scaled=True)
  assert after.skipped and after.stalled
  assert ols.get_loss_scale(after) == RULE.start


def test_the_scale_is_swapped_wherever_it_is_and_nothing_else_is():
  seen = []

  def inner_update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), inner_update
  )
  rule = ols.rules.WarmStart(ols.DynamicLossScale(8.0, growth_interval=1))
  tx = optax.chain(ols.loss_scaling(inner, rule), optax.trace(0.5))
  state = tx.init(PARAMS)
  updates, after = update(tx, GRADIENTS, state, PARAMS, scaled=False, value=3.0)
  np.testing.assert_array_equal(updates["w"], GRADIENTS["w"])
  assert seen == [{"value": 3.0}]
  assert same_bits(after[0].loss_scale_state, state[0].loss_scale_state)
  assert not same_bits(after[1], state[1])


def test_other_transformations_may_change_the_structure_of_their_state():
  grows = optax.GradientTransformation(
    lambda params: {},
    lambda updates, state, params=None: (updates, {"seen": jnp.ones(())}),
  )
  for tx in (optax.chain(TX, grows), optax.chain(grows, optax.sgd(1.0))):
    state = tx.init(PARAMS)
    _, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
    assert any(part == {"seen": 1.0} for part in after)


def test_a_rule_that_computes_its_scale_is_refused():
  class State(NamedTuple):
    exponent: jax.Array

    @property
    def loss_scale(self):
      return jnp.exp2(self.exponent)

  class Exponent(ols.LossScale):
    def init(self):
      return State(jnp.float32(3))

    def update(self, state, overflow, *, amax=None):
      return state

  tx = ols.loss_scaling(optax.sgd(1.0), Exponent())
  with pytest.raises(TypeError, match="S as a leaf.*a State"):
    update(tx, GRADIENTS, tx.init(PARAMS), PARAMS, scaled=False)


def test_a_transformation_that_moves_the_state_of_loss_scaling_is_refused():
  tx = optax.GradientTransformation(
    lambda params: {"before": TX.init(params)},
    lambda updates, state, params: (
      updates,
      {"after": TX.update(updates, state["before"], params)[1]},
    ),
  )
  with pytest.raises(ValueError, match="`tx` must keep .*'after'; make"):
    update(tx, GRADIENTS, tx.init(PARAMS), PARAMS, scaled=True)


def test_devices_must_agree_on_whether_a_step_was_scaled():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  state = tx.init(jnp.zeros(()))

  def step(scaled):
    return update(tx, jnp.ones(()), state, None, scaled=scaled[0])[0][None]

  mapped = support.on_each_device(step, support.SPREAD)
  with pytest.raises(
    ValueError, match="`state` must be the same.*pmean\\(loss, 'data'"
  ):
    jax.eval_shape(mapped, jnp.arange(8) < 4)
