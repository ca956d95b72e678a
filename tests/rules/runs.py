"""Sequences of steps, and the S of rules and models on them."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

FLOAT16_MAX = 65504.0
SUBNORMAL = 2.0**-130

# The kinds of steps, as (overflow, scaled amax): a zero; ordinary; just below
# and just above the limit divided by a power of two; a number that a backend
# may flush to 0. Then an infinity, a NaN, a saturated value, and an overflow
# that amax does not show.
STEPS = (
  (False, 0.0),
  (False, 24.0),
  (False, 65504.0 / 1024),
  (False, float(np.nextafter(np.float32(65504.0 / 1024), np.float32(np.inf)))),
  (False, SUBNORMAL),
  (True, math.inf),
  (True, math.nan),
  (True, FLOAT16_MAX),
  (True, 24.0),
)


def every_short_run(length):
  """Returns all runs of so many steps: overflow and amax, [runs, length]."""
  steps = np.asarray(list(itertools.product(STEPS, repeat=length)))
  return steps[:, :, 0].astype(bool), steps[:, :, 1].astype(np.float32)


def random_true_amax(seed, length):
  """Returns an unscaled amax that drifts, float32[length].

  It has zeros, NaN and infinities, some of them in a row, and spikes of 12
  bits.
  """
  rng = np.random.default_rng(seed)
  drift = np.cumsum(rng.normal(0, 0.1, length))
  true_amax = np.exp2(-6 + drift + rng.normal(0, 1, length))
  for value, count in ((0, 20), (np.nan, 10), (np.inf, 10)):
    for start in rng.integers(0, length, count):
      true_amax[start : start + rng.integers(1, 5)] = value
  true_amax[rng.integers(0, length, 20)] *= 2.0**12
  return true_amax.astype(np.float32)


def trajectory(rule, state, overflows, amaxes=None):
  """Returns S after each step of one run and whether the step was stalled."""

  def step(state, inputs):
    overflow, amax = inputs
    stalled = rule.stalled(state, overflow)
    state = rule.update(state, overflow, amax=amax)
    return state, (state.loss_scale, stalled)

  return jax.lax.scan(step, state, (overflows, amaxes))[1]


def trajectories(rule, overflows, amaxes=None):
  """Returns S after each step and whether it was stalled, for every run.

  Args:
    rule: the rule.
    overflows: bool[runs, steps].
    amaxes: float32[runs, steps], scaled, whatever S is.
  """
  return jax.device_get(_trajectories(rule, overflows, amaxes))


@functools.partial(jax.jit, static_argnums=0)
def _trajectories(rule, overflows, amaxes):
  run = functools.partial(trajectory, rule, rule.init())
  return jax.vmap(run)(overflows, amaxes)


def closed_loop(rule, true_amax, others=None):
  """Returns whether each step overflowed, its amax, and S after it.

  A step overflows if S times the true amax is beyond the largest float16.

  Args:
    rule: the rule.
    true_amax: float32[steps], unscaled.
    others: bool[steps], overflows that amax does not show, or None.
  """
  true_amax = np.asarray(true_amax, np.float32)
  if others is None:
    others = np.zeros(len(true_amax), bool)
  return jax.device_get(_closed_loop(rule, true_amax, others))


@functools.partial(jax.jit, static_argnums=0)
def _closed_loop(rule, true_amax, others):
  def step(state, inputs):
    true_amax, other = inputs
    amax = true_amax * state.loss_scale
    amax = jnp.where(amax > FLOAT16_MAX, jnp.inf, amax)
    overflow = ~jnp.isfinite(amax) | other
    moved = rule.update(state, overflow, amax=amax)
    return moved, (overflow, amax, moved.loss_scale)

  return jax.lax.scan(step, rule.init(), (true_amax, others))[1]


def scales_of(rule, steps):
  """Returns log2(S) after each of some steps (overflow, scaled amax)."""
  overflows, amaxes = zip(*steps, strict=True)
  amaxes = np.asarray([amaxes], np.float32)
  return np.log2(trajectories(rule, np.asarray([overflows]), amaxes)[0][0])


def assert_follows(rule, make_model, overflows, amaxes):
  """Asserts that a rule moves S bit for bit like its model on every run."""
  assert rule.init().loss_scale == make_model().scale
  scales, stalled = trajectories(rule, overflows, amaxes)
  for i in range(len(overflows)):
    model = make_model()
    steps = zip(overflows[i].tolist(), amaxes[i].tolist(), strict=True)
    for j, (overflow, amax) in enumerate(steps):
      model.update(overflow, amax)
      found = scales[i, j], stalled[i, j]
      assert found == (model.scale, model.stalled), (overflows[i], amaxes[i], j)
