"""The engine holds other systems' rules as data, each against its own model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import _arguments
from optax_lossscale import _engine
from tests import reference

UNBOUNDED = {
  "min_scale": _arguments.SMALLEST_SCALE,
  "max_scale": _arguments.LARGEST_SCALE,
}
FLOOR_OF_ONE = {**UNBOUNDED, "min_scale": 1.0}


def doubling(growth_interval, hysteresis=1, **rest):
  return _engine.Engine(
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=growth_interval,
    hysteresis=hysteresis,
    **rest,
  )


# One row a system: what the engine is told, and the model that it must follow.
SYSTEMS = {
  "torch": (
    doubling(7, growth_test="equal", **UNBOUNDED),
    lambda s: reference.Torch(s, growth_interval=7),
  ),
  "Megatron": (
    doubling(
      7,
      hysteresis=3,
      growth_test="equal",
      refill=frozenset({"growth"}),
      **FLOOR_OF_ONE,
    ),
    lambda s: reference.Megatron(s, growth_interval=7, hysteresis=3),
  ),
  "DeepSpeed": (
    doubling(
      7,
      hysteresis=2,
      growth_test="multiple",
      refill=frozenset({"growth"}),
      initial_clean_steps=-1,
      **FLOOR_OF_ONE,
    ),
    lambda s: reference.DeepSpeed(s, scale_window=7),
  ),
  "DeepSpeed, consecutive hysteresis": (
    doubling(
      1,
      hysteresis=3,
      growth_test="multiple",
      refill=frozenset({"clean"}),
      initial_clean_steps=-1,
      **FLOOR_OF_ONE,
    ),
    lambda s: reference.DeepSpeed(
      s, scale_window=1, delayed_shift=3, consecutive_hysteresis=True
    ),
  ),
  "DeepSpeed before 0.17.1": (
    doubling(
      7,
      hysteresis=2,
      growth_test="multiple",
      refill=frozenset({"growth"}),
      **FLOOR_OF_ONE,
    ),
    lambda s: reference.DeepSpeed(s, scale_window=7, before_0_17_1=True),
  ),
  "Keras": (
    doubling(7, growth_test="equal", **UNBOUNDED),
    lambda s: reference.Keras(s, dynamic_growth_steps=7),
  ),
  "tf.contrib": (
    _engine.Engine(
      growth_factor=2.0,
      backoff_factor=0.8,
      growth_interval=7,
      hysteresis=2,
      growth_test="at_least",
      refill=frozenset({"growth", "backoff"}),
      **FLOOR_OF_ONE,
    ),
    lambda s: reference.TensorFlowContrib(s, 7),
  ),
}


def run_model(model, steps):
  """Returns overflows, the more the larger S is, and S after each of them."""
  generator = np.random.default_rng(0)
  overflows, scales = [], []
  for _ in range(steps):
    rate = np.interp(np.log2(model.scale), [0, 20, 50], [0.0, 0.1, 0.95])
    overflows.append(bool(generator.random() < rate))
    model.update(overflows[-1])
    scales.append(model.scale)
  return overflows, scales


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_is_a_row_of_the_engine(system):
  engine, make_model = SYSTEMS[system]
  overflows, expected = run_model(make_model(2.0**24), steps=20_000)
  # Inside the range where S and 1/S are normal no system needs a bound here.
  assert min(expected) > 2.0**-126 and max(expected) < 2.0**126
  assert len(set(expected)) > 5

  def step(state, overflow):
    state = engine.update(state, overflow)
    return state, state.loss_scale

  _, scales = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(
    engine.init(2.0**24), jnp.array(overflows)
  )
  np.testing.assert_array_equal(scales, np.float32(expected))


def test_an_unknown_growth_test_is_refused():
  with pytest.raises(ValueError, match="`growth_test` must be .*'sometimes'"):
    doubling(1, growth_test="sometimes", **UNBOUNDED)


def test_an_unknown_refill_is_refused():
  with pytest.raises(ValueError, match="`refill` must be .*'never'"):
    doubling(1, refill=frozenset({"never"}), **UNBOUNDED)


@pytest.mark.parametrize(
  ("growth_test", "expected"),
  [("at_least", 2.0), ("equal", 1.0), ("multiple", 1.0)],
)
def test_a_count_that_is_past_the_interval(growth_test, expected):
  engine = doubling(3, growth_test=growth_test, **UNBOUNDED)
  state = engine.init(1.0)._replace(clean_steps=jnp.int32(4))
  assert engine.update(state, False).loss_scale == expected
