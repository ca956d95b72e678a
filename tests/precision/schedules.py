"""Precision schedules and their model: what both say of the same numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests.reference import ascend

NAN, INF = math.nan, math.inf
LARGEST_INT32 = 2**31 - 1

# What a schedule of each mode is made with beside its text.
NEEDS = {"step": {"total_steps": 20}, "loss": {"target_loss": 2.0}}

LATCHES = {
  "step": ("fast|step|0.8", {"total_steps": 40}),
  "loss": ("fast1|loss|1.5", {"target_loss": 2.0}),
}
each_mode = pytest.mark.parametrize("mode", LATCHES)


def schedule_and_model(text, **arguments):
  """Returns a schedule and the model of it."""
  return (
    ols.presets.accelerate_train_mode(text, **arguments),
    ascend.AccelerateTrainMode(text, **arguments),
  )


def latch(mode):
  text, arguments = LATCHES[mode]
  return ols.presets.accelerate_train_mode(text, **arguments)


def latch_of_model(mode):
  text, arguments = LATCHES[mode]
  return ascend.AccelerateTrainMode(text, **arguments)


def mode_of(schedule):
  """What it is updated with."""
  return "step" if schedule.until_loss is None else "loss"


def lows_of_model(model, fed):
  """What the model says at first and after each number."""
  at_first = 0 if model.mode == "step" else 0.0
  return [model.check(**{model.mode: number}) for number in (at_first, *fed)]


def scanned(schedule, fed):
  """What the schedule says at first and after each number, by `lax.scan`."""
  mode = mode_of(schedule)

  def body(state, number):
    state = schedule.update(state, **{mode: number})
    return state, state.low

  first = schedule.init()
  _, lows = jax.lax.scan(body, first, fed)
  return [bool(first.low), *np.asarray(lows).tolist()]


def one_by_one(update, state, mode, fed):
  """What it says of a state and after each number, called from Python."""
  lows = [bool(state.low)]
  for number in fed:
    state = update(state, **{mode: number})
    lows.append(bool(state.low))
  return lows


def switches(schedule, numbers):
  """Whether each number, fed to the first state, switches it: bool[n]."""
  first, mode = schedule.init(), mode_of(schedule)
  assert first.low

  def low(number):
    return schedule.update(first, **{mode: number}).low

  # Without jit, which would compile anew for every schedule.
  return ~np.asarray(jax.vmap(low)(jnp.asarray(numbers)))
