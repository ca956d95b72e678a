"""The precision schedule against a model of it in plain Python."""

import copy
import dataclasses
import fractions
import functools
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

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
  "low, NaN gradient": Batch(0.0, offset=0.5, root=0.0),
  "inf": Batch(INF),
  "NaN": Batch(NAN),
}
TARGET = 1.5  # For schedules that follow the loss.
RATE = 0.25
SCHEDULES = {
  "by steps in float16": ols.PrecisionSchedule(F16, until_step=3),
  "by steps in bfloat16": ols.PrecisionSchedule(BF16, until_step=3),
  "by loss in float16": ols.PrecisionSchedule(F16, until_loss=TARGET),
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


# Batches of trainings that overflow, reach the target, or meet a NaN, early and
# late, and of some drawn ones.
TRAININGS = [
  ["1", "2", "1", "1", "1", "2", "NaN", "-1/4"],
  ["1", "1", "1", "1", "loss at the target", "2", "inf", "1"],
  ["inf", "loss of zero", "2", "NaN", "-1/4", "2", "2", "2"],
  [
    "low, NaN gradient",
    "1",
    "2",
    "1",
    "1",
    "NaN",
    "1",
    "inf",
  ],
  *np.random.default_rng(0).choice(list(BATCHES), (20, 8)).tolist(),
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_training_is_that_of_the_model(name):
  run = compiled(name)
  for names in TRAININGS:
    model, carry = Model(SCHEDULES[name]), start(name)
    batches = [BATCHES[x] for x in names]
    stacked = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *batches)
    _, seen = run(carry, stacked)
    expected = [model.step(batch) for batch in batches]
    for key, values in jax.device_get(seen).items():
      want = np.asarray([x[key] for x in expected], values.dtype)
      text = f"{key} of a training on {', '.join(names)}"
      np.testing.assert_array_equal(values, want, err_msg=text)
  assert run._cache_size() == 1


# Numbers of every type, next to the limit.


def assert_switches(schedule, update, number, expected, **later):
  """Asserts what an update with a number does, and that it is final.

  Args:
    schedule: a precision schedule.
    update: its `update`, perhaps jitted.
    number: an integer or a float of any type.
    expected: whether the schedule is low after it.
    **later: what the schedule is updated with next, which must not matter.
  """
  (name,) = later
  first = schedule.init()
  with jax.numpy_dtype_promotion("strict"):
    state = update(first, **{name: number})
    assert support.describe(state) == support.describe(first)
    assert bool(state.low) == expected, number
    assert schedule.update(state, **later).low == state.low
  steps = min(int(number), LARGEST_INT32) if name == "step" else 0
  assert state.steps == steps


LIMITS = (0, 1, 127, 128, 255, 270, 2**31 - 1, 2**31, 2**32, 2**63, 2**70)
INTEGERS = (jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, jnp.int64)
INTEGERS += (np.int8, np.uint64, np.asarray, int)


@pytest.mark.parametrize("kind", INTEGERS)
def test_a_step_of_any_type_switches_at_the_limit(kind):
  with jax.enable_x64(kind is jnp.int64):
    largest = 2**80
    if kind is not int:
      largest = int(jnp.iinfo(np.int64 if kind is np.asarray else kind).max)
    for limit in LIMITS:
      schedule = ols.PrecisionSchedule(F16, until_step=limit)
      assert schedule.init().low == (limit > 0)
      for number in (limit - 1, limit, limit + 1):
        number = max(0, min(number, largest))
        assert_switches(
          schedule, schedule.update, kind(number), number < limit, step=0
        )


@pytest.mark.parametrize("limit", [18, 270, 2**40])
def test_a_traced_step_switches_at_the_limit(limit):
  schedule = ols.PrecisionSchedule(F16, until_step=limit)
  update = jax.jit(schedule.update)
  for kind in (jnp.uint8, jnp.int32):
    for number in (limit - 1, limit, limit + 1):
      number = min(number, int(jnp.iinfo(kind).max))
      assert_switches(schedule, update, kind(number), number < limit, step=0)
  for step in (-1, -(2**31)):
    assert update(schedule.init(), step=jnp.int32(step)).low


TARGETS = (7.1, 7.455, 1e-30, 65504.5, 3.3e38, fractions.Fraction(1, 3))
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
FLOATS += (np.float16, np.float64, float, np.asarray)
SPECIAL = (NAN, -NAN, 0.0, -0.0, INF, -INF, -1.0)


def losses_near(limit, kind):
  """Returns the floats of a type that are next to a limit."""
  dtype = np.dtype(np.float64 if kind in (float, np.asarray) else kind)
  with np.errstate(over="ignore", under="ignore"):
    number = np.asarray(float(limit)).astype(dtype)
    below, above = (np.nextafter(number, dtype.type(x)) for x in (-INF, INF))
  return [x[()] for x in (below, number, above)]


def is_low_after(loss, target):
  """Returns the answer of exact arithmetic."""
  loss = float(loss)
  return not (loss != 0 and loss <= target)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_loss_of_any_type_switches_at_the_decimal_number(kind):
  with jax.enable_x64(kind is jnp.float64):
    for target in TARGETS:
      schedule = ols.PrecisionSchedule(F16, until_loss=target)
      # The decimal that Python writes for a float; no float is 7.1.
      is_float = isinstance(target, float)
      limit = fractions.Fraction(repr(target)) if is_float else target
      updates = [schedule.update]
      if target == 7.455 and isinstance(kind(1), jax.Array):
        updates.append(jax.jit(schedule.update))
      for update in updates:
        for loss in (*losses_near(limit, kind), *SPECIAL):
          expected = is_low_after(loss, limit)
          assert_switches(schedule, update, kind(loss), expected, loss=NAN)


def test_a_python_integer_is_a_loss():
  schedule = ols.PrecisionSchedule(F16, until_loss=3)
  for update in (schedule.update, jax.jit(schedule.update)):
    lows = [bool(update(schedule.init(), loss=x).low) for x in (4, 0, 3)]
    assert lows == [True, True, False]


# The arguments.

HALF = fractions.Fraction(1, 2)
NOT_INTEGERS = (20.0, "20", True, HALF)
NOT_NUMBERS = ("2.0", True, 1j, np.ones(1))
NOT_POSITIVE = (0, -2.0, NAN, INF, 10**400, -HALF)
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


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_a_wrong_argument_is_refused_by_its_name(arguments, error, message):
  name = next(iter(arguments))
  with pytest.raises(error, match=f"`{name}` must .*{message}"):
    ols.PrecisionSchedule(**{"dtype": F16, **arguments})


@pytest.mark.parametrize(
  ("until", "got"),
  [
    ({}, "neither"),
    ({"until_step": 0, "until_loss": 1.0}, "both"),
  ],
)
def test_exactly_one_end_of_the_low_part_must_be_given(until, got):
  with pytest.raises(ValueError, match=f"`until_step` or .*got {got}; pass"):
    ols.PrecisionSchedule(F16, **until)


@pytest.mark.parametrize(
  "loss", [7.1, np.float64(7.1), fractions.Fraction(71, 10)]
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


def test_schedules_with_equal_arguments_are_one_static_argument():
  options = [
    {"until_step": 20},
    {"until_step": 21},
    {"until_step": 20, "allow_low_products": True},
    {"until_loss": 20},
  ]
  schedules, again = (
    [ols.PrecisionSchedule(F16, **each) for each in options] for _ in range(2)
  )
  assert {*schedules, *again, *map(copy.deepcopy, again)} == {*schedules}
  assert len({*schedules}) == len({*map(repr, schedules)}) == len(options)
  assert ols.PrecisionSchedule(BF16, until_step=20) not in schedules
  init = jax.jit(lambda schedule: schedule.init(), static_argnums=0)
  for schedule in (*schedules, *again):
    assert init(schedule).low
  assert init._cache_size() == len(options)


# Updates.


@pytest.mark.parametrize(
  ("name", "fed", "got"),
  [
    ("step", {"loss": 0.0}, "loss"),
    ("step", {"step": 0, "loss": 0.0}, "loss"),
    ("loss", {"step": 0}, "step"),
    ("loss", {}, "neither"),
  ],
)
def test_an_update_with_the_wrong_number_names_the_right_one(name, fed, got):
  schedule = SCHEDULES[{"step": "by hand"}.get(name, "by loss in float16")]
  with pytest.raises(ValueError, match=f"`until_{name}` .*`{name}`.* .*{got}"):
    schedule.update(schedule.init(), **fed)


NO_SCALARS = ("1", 1j, [1], np.ones(1, int))
BOOLS = (True, np.ones((), bool))
TRACED = [((), bool), ((), jnp.complex64), ((1,), jnp.int32)]
FLOATS_AS_STEPS = (1.0, NAN, HALF, np.ones((), np.float32))


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
  assert [(x.shape, x.dtype) for x in first] == [((), bool), ((), jnp.int32)]
  with jax.enable_x64(True):
    for state in (schedule.init(), schedule.update(first, step=2)):
      assert support.describe(state) == support.describe(first)
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
  assert support.same_bits(updates, expected)
  assert support.same_bits(after.inner_state, bare)
  assert support.same_bits(after.loss_scale_state, state.loss_scale_state)
  assert after.amax == 1e5
  assert not after.stalled


def test_a_damaged_scale_waits_for_a_scaled_step():
  state = optax.tree.set(TX.init(PARAMS), loss_scale=jnp.float32(NAN))
  _, after = update(TX, GRADIENTS, state, PARAMS, scaled=False)
  assert not after.skipped and jnp.isnan(ols.get_loss_scale(after))
  _, after = update(TX, GRADIENTS, after, PARAMS, scaled=True)
  assert after.skipped and after.stalled
  assert ols.get_loss_scale(after) == RULE.start


def test_the_scale_is_swapped_wherever_it_is_and_nothing_else_is():
  calls = []
  rule = ols.rules.WarmStart(ols.DynamicLossScale(8.0, growth_interval=1))
  tx = optax.chain(
    ols.loss_scaling(support.recording(calls), rule), optax.trace(0.5)
  )
  state = tx.init(PARAMS)
  updates, after = update(tx, GRADIENTS, state, PARAMS, scaled=False, value=3.0)
  np.testing.assert_array_equal(updates["w"], GRADIENTS["w"])
  assert calls[-1].extra_args == {"value": 3.0}
  assert support.same_bits(after[0].loss_scale_state, state[0].loss_scale_state)
  assert not support.same_bits(after[1], state[1])


def test_other_transformations_may_change_the_structure_of_their_state():
  grows = optax.GradientTransformation(
    lambda params: {},
    lambda updates, state, params=None: (updates, {"seen": jnp.ones(())}),
  )
  off = ols.loss_scaling(optax.sgd(1.0), None)
  for tx in (
    optax.chain(TX, grows),
    optax.chain(grows, optax.sgd(1.0)),
    optax.chain(grows, off),
  ):
    state = tx.init(PARAMS)
    _, after = update(tx, GRADIENTS, state, PARAMS, scaled=False)
    assert any(part == {"seen": 1.0} for part in after)


def test_a_rule_that_computes_its_scale_is_refused():
  tx = ols.loss_scaling(optax.sgd(1.0), support.Exponent())
  with pytest.raises(TypeError, match="S as a leaf.*an? Expo"):
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
