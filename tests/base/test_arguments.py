"""The arguments of the rules: what is refused, and how the error says it."""

import fractions
import math
import re

import jax
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support


def _refused(error, name, value):
  """Expects an error that names the argument and tells what it got."""
  match = rf"(?s)(?=.*`{name}`)(?=.*got .*{re.escape(repr(value))})"
  return pytest.raises(error, match=match)


_FLOATS = [
  "init_scale",
  "growth_factor",
  "backoff_factor",
  "min_scale",
  "max_scale",
]
_INTEGERS = ["growth_interval", "hysteresis"]
_NOT_FINITE = [math.nan, math.inf, -math.inf]
_NOT_FLOATS = ["2.0", None, True, np.True_, 1j, np.complex64(2), [2.0]]
_NOT_FLOATS += [np.timedelta64(5, "s"), np.array(b"8"), bytearray(b"8")]
_NOT_INTEGERS = ["2", None, True, np.True_, 1.5, 2.0, [2]]


_INNER, _RULE = optax.identity(), ols.FixedLossScale()
_STATE = ols.rules.HeadroomLossScale().init()
_SCHEDULE = ols.PrecisionSchedule("float16", until_loss=1.0)
_FRACTION = fractions.Fraction(10**400)


@pytest.mark.parametrize("value", [1.0, 0.5, 0.0, -2.0])
def test_a_growth_factor_of_one_or_less_is_refused(value):
  with _refused(ValueError, "growth_factor", value):
    ols.DynamicLossScale(growth_factor=value)


@pytest.mark.parametrize("value", [1.0, 2.0, 0.0, -0.5])
def test_a_backoff_factor_outside_zero_and_one_is_refused(value):
  with _refused(ValueError, "backoff_factor", value):
    ols.DynamicLossScale(backoff_factor=value)


def test_a_growth_factor_that_float32_rounds_to_one_is_refused():
  with _refused(ValueError, "growth_factor", 1.00000001):
    ols.DynamicLossScale(growth_factor=1.00000001)


def test_a_backoff_factor_that_float32_rounds_to_one_is_refused():
  with _refused(ValueError, "backoff_factor", 0.99999999):
    ols.DynamicLossScale(backoff_factor=0.99999999)


def test_a_growth_factor_beyond_float32_is_refused():
  with _refused(ValueError, "growth_factor", 1e39):
    ols.DynamicLossScale(growth_factor=1e39)


def test_a_backoff_factor_that_float32_rounds_to_zero_is_refused():
  with _refused(ValueError, "backoff_factor", 1e-50):
    ols.DynamicLossScale(backoff_factor=1e-50)


@pytest.mark.parametrize("name, value", support.pairs(_INTEGERS, [0, -1]))
def test_a_count_below_one_is_refused(name, value):
  with _refused(ValueError, name, value):
    ols.DynamicLossScale(**{name: value})


@pytest.mark.parametrize("name", _INTEGERS)
def test_a_count_beyond_int32_is_refused(name):
  with _refused(ValueError, name, 2**31):
    ols.DynamicLossScale(**{name: 2**31})


@pytest.mark.parametrize(
  "name, value", support.pairs(_INTEGERS, _NOT_INTEGERS), ids=support.name
)
def test_a_count_that_is_not_an_integer_is_refused(name, value):
  with _refused(TypeError, name, value):
    ols.DynamicLossScale(**{name: value})


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0])
def test_a_floor_of_zero_or_less_is_refused(value):
  with _refused(ValueError, "min_scale", value):
    ols.DynamicLossScale(min_scale=value)


@pytest.mark.parametrize("value", [2.0**-127, 2.0**-149, 2.0**-200])
def test_a_floor_that_float32_holds_as_a_subnormal_is_refused(value):
  with _refused(ValueError, "min_scale", value):
    ols.DynamicLossScale(min_scale=value)


@pytest.mark.parametrize("value", [2.0**128, 2.0**200])
def test_a_cap_beyond_float32_is_refused(value):
  with _refused(ValueError, "max_scale", value):
    ols.DynamicLossScale(max_scale=value)


@pytest.mark.parametrize("value", [0.5, 8.0, 0.0, -2.0])
def test_an_initial_scale_outside_the_bounds_is_refused(value):
  with _refused(ValueError, "init_scale", value):
    ols.DynamicLossScale(value, min_scale=1.0, max_scale=4.0)


@pytest.mark.parametrize("value", [2.0**-15, 2.0**127])
def test_an_initial_scale_outside_the_default_bounds_is_refused(value):
  with _refused(ValueError, "init_scale", value):
    ols.DynamicLossScale(value)


def test_a_floor_above_the_cap_is_refused():
  with _refused(ValueError, "min_scale", 4.0):
    ols.DynamicLossScale(2.0, min_scale=4.0, max_scale=1.0)


@pytest.mark.parametrize("name, value", support.pairs(_FLOATS, _NOT_FINITE))
def test_a_number_that_is_not_finite_is_refused(name, value):
  with _refused(ValueError, name, value):
    ols.DynamicLossScale(**{name: value})


@pytest.mark.parametrize("name", _FLOATS)
def test_an_integer_beyond_every_float_is_refused(name):
  with pytest.raises(ValueError, match=f"`{name}`"):
    ols.DynamicLossScale(**{name: 10**400})


def test_a_traced_argument_is_refused():
  with pytest.raises(TypeError, match="`init_scale`"):
    jax.jit(lambda scale: ols.DynamicLossScale(scale).init())(8.0)


@pytest.mark.parametrize(
  "name, value", support.pairs(_FLOATS, _NOT_FLOATS), ids=support.name
)
def test_a_value_that_is_not_a_number_is_refused(name, value):
  with _refused(TypeError, name, value):
    ols.DynamicLossScale(**{name: value})


@pytest.mark.parametrize(
  "rule, value",
  support.pairs(
    [ols.DynamicLossScale, ols.FixedLossScale], [0, 1, "yes", None]
  ),
)
def test_a_skip_that_is_not_a_bool_is_refused(rule, value):
  with _refused(TypeError, "skip", value):
    rule(skip=value)


@pytest.mark.parametrize(
  "value", [0.0, -1.0, *_NOT_FINITE, 2.0**-127, 2.0**128]
)
def test_a_fixed_scale_that_is_no_normal_float32_is_refused(value):
  with _refused(ValueError, "scale", value):
    ols.FixedLossScale(value)


@pytest.mark.parametrize("value", _NOT_FLOATS, ids=support.name)
def test_a_fixed_scale_that_is_not_a_number_is_refused(value):
  with _refused(TypeError, "scale", value):
    ols.FixedLossScale(value)


@pytest.mark.parametrize("scale", [support.SMALLEST, support.LARGEST])
def test_a_fixed_scale_at_the_ends_of_the_range_is_allowed(scale):
  assert ols.FixedLossScale(scale).init().loss_scale == scale


@pytest.mark.parametrize("name", [*_FLOATS, *_INTEGERS])
def test_an_integer_that_python_does_not_write_is_refused(name):
  with pytest.raises(ValueError, match=f"`{name}` .*of more than 4300 digits"):
    ols.DynamicLossScale(**{name: 10**30000})


@pytest.mark.parametrize(
  "number", [10**400, -(10**30000), _FRACTION], ids=["int", "huge", "fraction"]
)
@pytest.mark.parametrize(
  "take",
  [
    lambda x: ols.DynamicLossScale(growth_factor=-x),
    lambda x: ols.rules.HeadroomLossScale().update(_STATE, False, amax=x),
    lambda x: _SCHEDULE.update(_SCHEDULE.init(), loss=x),
    lambda x: ols.presets.accelerate_train_mode("fast|loss", target_loss=x),
    lambda x: ols.experimental.scale_cotangent(1.0, x),
  ],
)
def test_a_number_beyond_every_float_is_refused(take, number):
  with pytest.raises(ValueError, match="finite in float32, got"):
    take(number)


@pytest.mark.parametrize(
  "number", [2**31, -(2**63), 10**400, 10**30000], ids=int.bit_length
)
@pytest.mark.parametrize(
  "take",
  [
    lambda x: ols.unscale({"w": x}, 8.0),
    ols.instruments.leaf_stats,
    lambda x: ols.instruments.swallowed_share(1.0, x),
  ],
)
def test_an_integer_beyond_int32_in_a_tree_is_refused(take, number):
  with pytest.raises(ValueError, match="in a tree must fit into .*, got"):
    take(number)


_LONG = {
  "a text": "x" * 10**6,
  "an integer": 10**4000,
  "a list": [0.5] * 10**5,
  "an array": np.zeros(900),
  "a tree": {f"layer {i}": {"kernel": i} for i in range(1000)},
}


@pytest.mark.parametrize("value", _LONG.values(), ids=_LONG.keys())
@pytest.mark.parametrize(
  "refuse",
  [
    lambda x: ols.DynamicLossScale(growth_interval=x),
    lambda x: ols.DynamicLossScale(x, skip=x),
    lambda x: ols.DynamicLossScale(skip=x),
    lambda x: ols.loss_scaling(x, _RULE),
    lambda x: ols.loss_scaling(_INNER, x),
    lambda x: ols.loss_scaling(_INNER, _RULE, check=x),
    lambda x: ols.loss_scaling(_INNER, _RULE, axis_name=[x, None]),
    lambda x: ols.get_policy(x),
    lambda x: ols.PrecisionSchedule(x, until_step=1),
    lambda x: ols.presets.accelerate_train_mode(x),
    lambda x: ols.autocast(abs, level=x),
    lambda x: ols.autocast(abs, overrides=x),
    lambda x: ols.autocast(abs, dtype=x),
    lambda x: ols.saturated(x),
    lambda x: ols.presets.from_state_dict(x, {}),
    lambda x: ols.presets.from_state_dict("flax", {"scale": x}),
    lambda x: ols.presets.megatron(refill=x),
    lambda x: ols.rules.HeadroomLossScale(headroom=x),
  ],
)
def test_an_error_repeats_the_beginning_of_what_is_long(refuse, value):
  with pytest.raises((TypeError, ValueError)) as error:
    refuse(value)
  assert len(str(error.value)) < 600


def test_a_long_array_is_shown_with_its_shape():
  with pytest.raises(
    TypeError, match=r"(?s)got Array.*\.\.\. \(shape \(900,\)\)"
  ):
    ols.FixedLossScale(jax.numpy.zeros(900))
