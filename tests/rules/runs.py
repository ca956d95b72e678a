"""Steps for rules that read amax, and what rules and models make of them."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

FLOAT16_MAX = 65504.0
SUBNORMAL = 2.0**-130

# (overflow, scaled amax) of everything that a step can be: zeros, ordinary,
# just below and just above a power of two's share of the limit, what a backend
# may flush to 0; an infinity, a NaN, a saturated value, and what only the
# caller knows.
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
  runs = list(itertools.product(STEPS, repeat=length))
  overflows = np.asarray([[step[0] for step in run] for run in runs])
  amaxes = np.asarray([[step[1] for step in run] for run in runs], np.float32)
  return overflows, amaxes


def random_true_amax(seed, length):
  """Returns unscaled amax that drifts, float32[length], with all that happens.

  Zeros, NaN, infinities and spikes of 12 bits are in it, some in rows.
  """
  rng = np.random.default_rng(seed)
  drift = np.cumsum(rng.normal(0, 0.1, length))
  true_amax = np.exp2(-6 + drift + rng.normal(0, 1, length))
  for value, count in ((0, 20), (np.nan, 10), (np.inf, 10)):
    starts = rng.integers(0, length, count)
    for start in starts:
      true_amax[start : start + rng.integers(1, 5)] = value
  true_amax[rng.integers(0, length, 20)] *= 2.0**12
  return true_amax.astype(np.float32)


def trajectories(rule, overflows, amaxes):
  """Returns S after each step and whether it was stalled, for every run.

  Args:
    rule: the rule; one rule is one compilation.
    overflows: bool[runs, steps].
    amaxes: float32[runs, steps], scaled, whatever S is.
  """
  found = _trajectories(rule, overflows, amaxes)
  return jax.tree.map(np.asarray, found)


def trajectory(rule, state, overflows, amaxes=None):
  """Returns S after each step of one run and whether the step was stalled."""

  def step(state, inputs):
    overflow, amax = inputs
    stalled = rule.stalled(state, overflow)
    state = rule.update(state, overflow, amax=amax)
    return state, (state.loss_scale, stalled)

  return jax.lax.scan(step, state, (overflows, amaxes))[1]


@functools.partial(jax.jit, static_argnums=0)
def _trajectories(rule, overflows, amaxes):
  run = functools.partial(trajectory, rule, rule.init())
  return jax.vmap(run)(overflows, amaxes)


def closed_loop(rule, true_amax, others=None):
  """Returns whether each step overflowed, its amax, and S after it.

  The steps overflow as S has it: beyond the largest float16, amax is inf.

  Args:
    rule: the rule.
    true_amax: float32[steps], unscaled.
    others: bool[steps], overflows that only the caller knows, or None.
  """
  if others is None:
    others = np.zeros(len(true_amax), bool)
  return jax.tree.map(np.asarray, _closed_loop(rule, true_amax, others))


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


def expected(make_model, overflows, amaxes):
  """Returns what `trajectories` returns, from a model in plain Python."""
  shape = overflows.shape
  scales, stalled = np.empty(shape, np.float32), np.empty(shape, bool)
  for i in range(shape[0]):
    model = make_model()
    steps = zip(overflows[i].tolist(), amaxes[i].tolist(), strict=True)
    for j, (overflow, amax) in enumerate(steps):
      model.update(overflow, amax)
      scales[i, j], stalled[i, j] = model.scale, model.stalled
  return scales, stalled


def assert_as_the_model(rule, make_model, overflows, amaxes):
  """Asserts that a rule moves S bit for bit as its model does."""
  found_scales, found_stalled = trajectories(rule, overflows, amaxes)
  scales, stalled = expected(make_model, overflows, amaxes)
  np.testing.assert_array_equal(found_scales, scales)
  np.testing.assert_array_equal(found_stalled, stalled)
