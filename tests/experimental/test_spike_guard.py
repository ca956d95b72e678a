"""`SpikeGuard`, against a float64 model and the defects of released guards."""

import functools
import statistics

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import experimental
from tests import support

TX = ols.loss_scaling(optax.sgd(0.5), support.Stub())
PARAMS = jnp.array([1.0, -0.0])


@functools.cache
def compiled(guard):
  """Returns one step, whose `overflow` is the wrapper's own finding."""

  @jax.jit
  def step(guard_state, value, overflow):
    opt_state = TX.init(PARAMS)
    spike = guard.is_spike(guard_state, value)
    _, opt_state = TX.update(PARAMS, opt_state, skip=spike, overflow=overflow)
    return spike, guard.update(guard_state, value, opt_state)

  return step


def watch(guard, values, overflows=(), state=None):
  """Returns which values are spikes, and the last state."""
  state = guard.init() if state is None else state
  found = []
  for number, value in enumerate(values):
    spike, state = compiled(guard)(
      state, np.float32(value), number in overflows
    )
    found.append(bool(spike))
  return found, state


def positions(found):
  return [number for number, spike in enumerate(found) if spike]


def model(guard, values):
  """Returns which values are spikes, and restarts, by the definition."""
  window, row, found, restarts = [], 0, [], 0
  warmup = guard.warmup or max(2, guard.window // 2)
  for value in map(float, values):
    if not np.isfinite(value):
      found.append(True)
      continue
    last = window[-guard.window :]
    limits = [np.inf]
    if len(window) >= warmup:
      if guard.sigma is not None:
        deviation = statistics.stdev(last)
        limits.append(statistics.fmean(last) + guard.sigma * deviation)
      if guard.factor is not None:
        limits.append(guard.factor * statistics.fmean(map(abs, last)))
    above = value > min(limits)
    if above and row >= guard.patience:
      window, row, above = [], 0, False
      restarts += 1
    row = row + 1 if above else 0
    if not above or guard.on_spike != "drop":
      clips = above and guard.on_spike == "clip"
      window.append(min(limits) if clips else value)
    found.append(above)
  return found, restarts


def series(steps=400):
  """Returns losses with noise, spikes, a change of level, NaN and inf."""
  rng = np.random.default_rng(0)
  values = 4 * np.exp(-np.arange(steps) / 200) + 0.1 * rng.normal(size=steps)
  values[steps // 2 :] += 3
  places = rng.choice(steps, 20, replace=False)
  values[places[:14]] += rng.uniform(0.3, 20, 14)
  values[places[14:]] = [np.nan, np.inf, np.nan, -np.inf, np.nan, np.inf]
  return np.float32(values)


@pytest.mark.parametrize(
  "guard",
  [
    experimental.SpikeGuard(),
    experimental.SpikeGuard(sigma=2.5, window=33, warmup=25, patience=4),
    experimental.SpikeGuard(sigma=6.0, window=16, on_spike="keep"),
    experimental.SpikeGuard(sigma=2.0, window=12, on_spike="clip", patience=3),
    experimental.SpikeGuard(sigma=None, factor=1.5, window=7, patience=3),
    experimental.SpikeGuard(sigma=4.0, factor=1.3, window=20, warmup=2),
    experimental.SpikeGuard(window=2),
  ],
  ids=["default", "patience", "keep", "clip", "factor", "both", "smallest"],
)
def test_it_finds_the_spikes_of_the_definition(guard):
  values = series()
  found, state = watch(guard, values)
  expected, restarts = model(guard, values)
  assert found == expected
  assert 6 < sum(expected) < 200
  assert state.spikes == sum(expected) - 6
  assert state.restarts == restarts


# At 2**126 and above, the reciprocal is subnormal.
@pytest.mark.parametrize("level", [5.0, 1e38])
def test_spikes_begin_above_the_limit(level):
  guard = experimental.SpikeGuard(sigma=6.0, window=64)
  noise = np.random.default_rng(0).normal(1.0, 0.02, 100)
  values = np.float32(level * noise)
  _, state = watch(guard, values)
  last = values[-64:].astype(np.float64)
  limit = np.float32(guard.limit(state))
  np.testing.assert_allclose(
    limit, last.mean() + 6 * last.std(ddof=1), rtol=1e-6
  )
  assert not guard.is_spike(state, limit)
  assert guard.is_spike(state, np.nextafter(limit, np.float32(np.inf)))


@pytest.mark.parametrize("sigma", [1.0, 6.0, 10.0])
@pytest.mark.parametrize("window", [2, 3, 33, 128, 1000, 1024])
def test_the_rounding_of_a_limit_is_within_its_bound(window, sigma):
  guard = experimental.SpikeGuard(sigma=sigma, window=window)
  rng = np.random.default_rng(0)
  shape = 100, window
  # Of equal values below the largest, each addition rounds the same way.
  equal = np.broadcast_to(rng.uniform(0.5, 1.0, (100, 1)), shape).copy()
  equal[:, 0] = 1
  others = rng.normal(size=shape), rng.normal(1.0, 1e-4, shape)
  rows = np.float32(
    np.concatenate([equal, rng.exponential(size=shape), *others])
  )
  full = guard.init()._replace(accepted=jnp.int32(window))
  limits = jax.jit(
    lambda rows: lax.map(lambda x: guard.limit(full._replace(values=x)), rows)
  )
  wide = rows.astype(np.float64)
  mean = wide.mean(1)
  # Equal values have a deviation by definition: 1e-6 of the mean.
  deviation = np.maximum(wide.std(1, ddof=1), 1e-6 * np.abs(mean))
  error = np.abs(np.float64(limits(rows)) - (mean + sigma * deviation))
  bound = 2.0**-20 * (np.abs(wide).mean(1) + sigma * deviation)
  assert np.all(error <= bound)


@pytest.mark.parametrize("level", [1e-36, 1e37])
def test_squares_that_leave_the_range_of_float32_do_no_harm(level):
  guard = experimental.SpikeGuard(window=8, warmup=4)
  found, _ = watch(guard, [level * x for x in (1, 1.1, 0.9, 1, 1, 1.1, 3, 1)])
  assert positions(found) == [6]


@pytest.mark.parametrize("level", [0.1, 0.0, -7.3])
def test_equal_values_are_no_spikes(level):
  guard = experimental.SpikeGuard(window=8, warmup=4)
  value = np.float32(level)
  found, state = watch(guard, [value] * 12)
  assert not any(found) and guard.is_spike(state, level + 0.01)
  # Nor is the next number, which rounding may make of the same one.
  above = np.nextafter(value, np.float32(np.inf))
  assert not level or not guard.is_spike(state, above)


def test_a_factor_is_of_the_mean_of_magnitudes():
  values = [-5.0, -5.1, -4.9, -5.0, -5.1, -4.9, -1.0, -5.0, 16.0, -9.0]
  guard = experimental.SpikeGuard(sigma=None, factor=3.0, window=8, warmup=4)
  assert positions(watch(guard, values)[0]) == [8]


@pytest.mark.parametrize(
  ("value", "before"), [(1.0, 6), (50.0, 6), (np.inf, 6), (50.0, 8)]
)
def test_it_is_the_same_bit_for_bit_after_an_overflow(value, before):
  guard = experimental.SpikeGuard(window=8, warmup=4, patience=2)
  values = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 7.0, 8.0][:before]
  _, state = watch(guard, values)
  _, after = watch(guard, [value], overflows=[0], state=state)
  support.assert_same_bits(after, state)


def test_a_step_that_another_reason_skips_is_not_seen():
  guard = experimental.SpikeGuard(window=8, warmup=4, patience=2)
  _, state = watch(guard, [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 7.0, 8.0])
  opt_state = TX.init(PARAMS)
  _, skipped = TX.update(PARAMS, opt_state, skip=True)
  # Out of patience, the guard would accept 9 and begin anew.
  for value in (1.0, 9.0):
    assert not guard.is_spike(state, value)
    support.assert_same_bits(guard.update(state, value, skipped), state)
  _, applied = TX.update(PARAMS, opt_state)
  assert guard.update(state, 1.0, applied).accepted == state.accepted + 1


def test_the_path_chooses_whose_overflow_counts():
  guard = experimental.SpikeGuard(window=8)
  clean = TX.init(PARAMS)
  _, overflowed = TX.update(PARAMS, clean, overflow=True)
  both = {"first": clean, "second": overflowed}
  assert guard.update(guard.init(), 1.0, both, path="first").accepted == 1
  assert guard.update(guard.init(), 1.0, both, path="second").accepted == 0


def test_all_devices_give_the_same_answer():
  # OLMo-core's ranks once compared losses of their own, and fell out of step.
  guard = experimental.SpikeGuard(window=8, warmup=4)
  tx = ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(), axis_name="data")
  _, state = watch(guard, [1.0, 1.1, 0.9, 1.0])

  def step(losses, shared):
    value = lax.pmean(losses[0], "data") if shared else losses[0]
    spike = guard.is_spike(state, value)
    _, opt_state = tx.update(PARAMS, tx.init(PARAMS), skip=spike)
    return guard.update(state, value, opt_state).values

  def mapped(shared):
    step_of_all = functools.partial(step, shared=shared)
    return jax.jit(support.on_each_device(step_of_all, jax.P()))

  # One device's 20 makes the mean a spike for all of them; its 1.5 does not.
  losses = np.where(np.arange(8) == 3, 20.0, 1.0).astype(np.float32)
  assert mapped(True)(losses)[4] == 0
  losses = np.where(np.arange(8) == 3, 1.5, 1.0).astype(np.float32)
  assert mapped(True)(losses)[4] == 1.0625
  with pytest.raises(ValueError, match=r"take jax.lax.pmean\(value, 'data'\)"):
    mapped(False)(losses)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize(
  "value", [3, np.float64(3.0), jnp.bfloat16(3.0), jnp.int32(3), 1e300]
)
def test_any_real_number_is_a_value(value):
  guard = experimental.SpikeGuard(window=8, warmup=4)
  state = guard.update(guard.init(), value, TX.init(PARAMS))
  largest = float(np.finfo(np.float32).max)
  assert float(state.values[0]) == min(float(value), largest)
  assert support.describe(state) == support.describe(guard.init())


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"sigma": None}, ValueError, "`sigma` or `factor` must say where"),
    ({"sigma": 0}, ValueError, "`sigma` must be above 0, got 0"),
    ({"factor": 1.0}, ValueError, "`factor` must be above 1, got 1.0"),
    ({"window": 1}, ValueError, "`window` must be between 2 and .* got 1"),
    ({"warmup": 0}, ValueError, "`warmup` must be between 2 and .* got 0"),
    ({"patience": 0}, ValueError, "`patience` must be between 1 and"),
    ({"on_spike": True}, ValueError, "`on_spike` must be 'drop', 'clip' or"),
  ],
)
def test_a_wrong_option_is_refused(options, error, message):
  with pytest.raises(error, match=message):
    experimental.SpikeGuard(**options)


@pytest.mark.parametrize("value", [None, True, jnp.ones(2)])
def test_a_value_that_is_no_number_is_refused(value):
  guard = experimental.SpikeGuard()
  with pytest.raises(TypeError, match="`value` must be a real scalar"):
    guard.is_spike(guard.init(), value)
  with pytest.raises(TypeError, match="`value` must be a real scalar"):
    guard.update(guard.init(), value, TX.init(PARAMS))


def test_another_state_is_refused():
  guard = experimental.SpikeGuard(window=8)
  with pytest.raises(TypeError, match="`state` must be the SpikeGuardState"):
    guard.is_spike(TX.init(PARAMS), 1.0)
  with pytest.raises(ValueError, match="`window` must stay what it was"):
    guard.limit(experimental.SpikeGuard(window=9).init())
  with pytest.raises(ValueError, match="`opt_state` must hold the state of"):
    guard.update(guard.init(), 1.0, optax.sgd(0.5).init(PARAMS))
