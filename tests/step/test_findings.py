"""The amax that a rule gets, of the gradients and from elsewhere."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

AUTO = (jax.sharding.AxisType.Auto,)


class SeenState(NamedTuple):
  loss_scale: jax.Array
  seen_amax: jax.Array


@dataclasses.dataclass(frozen=True)
class KeepsAmax(ols.LossScale):
  """A user's rule that keeps the last amax."""

  def init(self):
    return SeenState(jnp.float32(1), jnp.float32(0))

  def update(self, state, overflow, *, amax=None):
    return state._replace(seen_amax=amax)


def update_once(rule, scaled_grads, check=ols.nonfinite(), **extra):  # noqa: B008
  tx = ols.loss_scaling(optax.sgd(0.1), rule, check=check)
  params = jax.tree.map(jnp.zeros_like, scaled_grads)
  return tx.update(scaled_grads, tx.init(params), params, **extra)[1]


@pytest.mark.parametrize(
  ("amax", "largest"),
  [
    (7.0, 7.0),
    (1.0, 4.0),
    (-7.0, 7.0),
    (np.float32(7), 7.0),
    ({"a": jnp.float32(5), "b": [jnp.array([6.0, 1.0])]}, 6.0),
    (jnp.zeros(0), 4.0),
    ({}, 4.0),
  ],
  ids=["larger", "smaller", "negative", "numpy", "tree", "empty", "no leaf"],
)
def test_amax_from_elsewhere_counts_with_the_gradients(amax, largest):
  scaled_grads = jnp.array([4.0, -1.0], jnp.float16)
  state = update_once(KeepsAmax(), scaled_grads, amax=amax)
  assert state.amax == state.loss_scale_state.seen_amax == largest
  assert not state.overflow
  assert state.headroom == pytest.approx(math.log2(65504 / largest), abs=1e-5)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_amax_from_elsewhere_that_is_not_finite_is_an_overflow(value):
  amax = {"a": jnp.float32(value), "b": jnp.ones(40)}
  state = update_once(ols.DynamicLossScale(8.0), jnp.ones(2), amax=amax)
  assert state.skipped
  assert state.loss_scale_state.loss_scale == 4.0
  assert state.nan == math.isnan(value)


@pytest.mark.parametrize(
  ("check", "amax", "overflows"),
  [
    (ols.saturated("float16"), 65504.0, True),
    (ols.saturated("float16"), 65472.0, False),
    (ols.nonfinite("float16"), 65504.0, False),
    (ols.nonfinite("float16"), 65505.0, True),
    (ols.nonfinite("float16"), [1.0, np.float64(1e300)], True),
    (ols.nonfinite(), 1e30, False),
    (ols.saturated(lambda path: "float16" if "a" in path else None), 7e4, True),
  ],
)
def test_amax_from_elsewhere_beyond_what_the_check_allows_is_an_overflow(
  check, amax, overflows
):
  scaled_grads = {"a": jnp.ones(1), "b": jnp.ones(1)}
  state = update_once(ols.DynamicLossScale(8.0), scaled_grads, check, amax=amax)
  assert state.skipped == overflows
  assert state.overflow == overflows
  assert state.loss_scale_state.loss_scale == (4.0 if overflows else 8.0)


def test_amax_of_narrow_gradients_has_their_limit():
  scaled_grads = jnp.ones(1, jnp.float16)
  assert update_once(KeepsAmax(), scaled_grads, amax=1e5).overflow


@pytest.mark.slow
def test_a_float64_amax_beyond_float32_is_not_reported_as_inf():
  largest = float(jnp.finfo(jnp.float32).max)
  for amax in (1e300, np.float64(-1e300), np.array([1e300, 1.0])):
    state = update_once(KeepsAmax(), jnp.ones(1), amax=amax)
    assert state.amax == largest
    assert not state.overflow
  with jax.enable_x64(True):
    amax = jnp.array(1e300, jnp.float64)
    assert update_once(KeepsAmax(), jnp.ones(1), amax=amax).amax == largest


def test_amax_from_elsewhere_is_agreed_on():
  mesh = jax.make_mesh((4,), ("data",), axis_types=AUTO)
  tx = ols.loss_scaling(optax.sgd(0.1), KeepsAmax(), axis_name="data")
  state = tx.init(jnp.zeros(1))

  @jax.jit
  @jax.shard_map(
    mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P()
  )
  def update(amax, state):
    local = ols.make_varying(jnp.ones(1), "data")
    return tx.update(local, state, amax=amax)[1].amax

  assert update(jnp.array([1.0, 2.0, 17.0, 3.0]), state) == 17.0


@pytest.mark.parametrize(
  "amax",
  ["1.0", True, np.array([True]), jnp.array(True), {"a": None}, object()],
)
def test_what_is_no_magnitude_is_refused(amax):
  with pytest.raises(TypeError, match="`amax` must be a number, an array"):
    update_once(KeepsAmax(), jnp.ones(1), amax=amax)


@pytest.mark.parametrize(
  "count",
  [2**31, 2**63, 2**64, -(2**63), 10**400, np.int64(2**32)],
  ids=support.name,
)
def test_any_integer_but_0_is_an_overflow(count):
  assert update_once(KeepsAmax(), jnp.ones(2), overflow=count).overflow


@pytest.mark.parametrize(
  "amax", [10**400, -(10**400), 10**30000, 2**128], ids=int.bit_length
)
def test_an_amax_beyond_float32_that_is_an_integer_is_refused(amax):
  with pytest.raises(ValueError, match="`amax` must be finite in float32"):
    update_once(KeepsAmax(), jnp.ones(2), amax=amax)


@pytest.mark.parametrize(
  "value",
  [
    b"8",
    bytearray(b"8"),
    memoryview(b"8"),
    np.timedelta64(5, "s"),
    np.datetime64("2020"),
    np.array([None]),
  ],
  ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("name", ["overflow", "amax"])
def test_what_is_no_number_is_none_from_elsewhere(name, value):
  with pytest.raises(TypeError, match=f"`{name}` must be a "):
    update_once(KeepsAmax(), jnp.ones(2), **{name: value})
