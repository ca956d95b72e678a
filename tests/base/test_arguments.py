"""Checks of arguments: what is refused, and how the error shows it."""

import fractions
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import experimental
from optax_lossscale import instruments
from optax_lossscale import presets
from optax_lossscale.cli import _loss_scale
from tests import support


def _refused(error, name, value):
  """Expects an error that names the argument and shows what it got."""
  match = rf"(?s)(?=.*`{name}`)(?=.*got .*{re.escape(repr(value))})"
  return pytest.raises(error, match=match)


# Values of the right type that are refused, for each argument of a rule. Some
# are out of bounds only in float32.
OUT_OF_BOUNDS = {
  "growth_factor": [1.0, 0.5, 1.00000001, 1e39, math.nan],
  "backoff_factor": [1.0, 2.0, 0.0, -0.5, 0.99999999, 1e-50, math.nan],
  "growth_interval": [0, -1, 2**31],
  "hysteresis": [0, 2**31],
  "min_scale": [0.0, -1.0, 2.0**-127, 4.0, -math.inf],
  "max_scale": [0.5, 2.0**128, math.nan],
  "init_scale": [0.0, 0.25, 8.0, math.inf],
}
WRONG_TYPES = ["2.0", None, True, np.True_, 1j, np.complex64(2), [2.0]]
WRONG_TYPES += [np.timedelta64(5, "s"), np.array(b"8")]


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_a_wrong_number_is_refused(name):
  bounds = {"init_scale": 1.0, "min_scale": 0.5, "max_scale": 2.0}
  for value in OUT_OF_BOUNDS[name]:
    with _refused(ValueError, name, value):
      ols.DynamicLossScale(**bounds | {name: value})
  more = [1.5, 2.0] if name in ("growth_interval", "hysteresis") else []
  for value in [*WRONG_TYPES, *more]:
    with _refused(TypeError, name, value):
      ols.DynamicLossScale(**{name: value})
  with pytest.raises(ValueError, match=f"`{name}`"):
    ols.DynamicLossScale(**{name: 10**400})
  with pytest.raises(ValueError, match=f"`{name}` .*of more than 4300 digits"):
    ols.DynamicLossScale(**{name: 10**30000})


# The least and the largest S, as programs print them. Read as float64, some of
# these texts are out of bounds.
LIMITS = np.float32([support.SMALLEST, np.finfo(np.float32).max])
PRINTED = [
  f(x) for x in LIMITS for f in (str, "{:.9g}".format, "{:.17g}".format)
]


def from_history(text, tmp_path):
  path = tmp_path / "history.csv"
  path.write_text(f"loss_scale,amax\n{text},1\n")
  return instruments.read_history(path).loss_scale[0]


TAKES_SCALE = {
  "rule": lambda x: ols.FixedLossScale(float(x)).init().loss_scale,
  "bounds": lambda x: (
    ols.DynamicLossScale(float(x), min_scale=float(x), max_scale=float(x))
    .init()
    .loss_scale
  ),
  "preset": lambda x: presets.flax(scale=float(x)).init().loss_scale,
  "number": lambda x: ols.get_loss_scale(float(x)),
  "double": lambda x: ols.get_loss_scale(np.float64(x)),
  "system": lambda x: (
    (
      presets.from_state_dict("flax", {"fin_steps": 0, "scale": float(x)})[1]
    ).loss_scale
  ),
  "fields": lambda x: (
    (
      presets.from_state_dict(ols.FixedLossScale(), {"loss_scale": float(x)})[1]
    ).loss_scale
  ),
  "history": from_history,
  "command line": lambda x: _loss_scale.parse(f"fixed:{x}").init().loss_scale,
  "cotangent": lambda x: jax.grad(
    lambda y: experimental.scale_cotangent(y, float(x))
  )(1.0),
}


@pytest.mark.parametrize("take", TAKES_SCALE)
def test_the_printed_limits_are_scales(take, tmp_path):
  more = (tmp_path,) if take == "history" else ()
  found = [np.float32(TAKES_SCALE[take](text, *more)) for text in PRINTED]
  assert found == [x for x in LIMITS for _ in range(3)]


def test_a_fixed_scale_must_be_a_normal_float32():
  for value in (0.0, 2.0**-127, 2.0**128, math.nan):
    with _refused(ValueError, "scale", value):
      ols.FixedLossScale(value)
  for scale in (support.SMALLEST, support.LARGEST):
    assert ols.FixedLossScale(scale).init().loss_scale == scale


STATE = ols.rules.HeadroomLossScale().init()
SCHEDULE = ols.PrecisionSchedule("float16", until_loss=1.0)


@pytest.mark.parametrize(
  "take",
  [
    lambda x: ols.rules.HeadroomLossScale().update(STATE, False, amax=x),
    lambda x: SCHEDULE.update(SCHEDULE.init(), loss=x),
    lambda x: ols.experimental.scale_cotangent(1.0, x),
  ],
)
def test_a_number_beyond_every_float_is_refused(take):
  for number in (10**400, -(10**30000), fractions.Fraction(10**400)):
    with pytest.raises(ValueError, match="finite in float32, got"):
      take(number)


@pytest.mark.parametrize(
  "take",
  [lambda x: ols.unscale({"w": x}, 8.0), ols.instruments.leaf_stats],
)
def test_an_integer_beyond_int32_in_a_tree_is_refused(take):
  for number in (2**31, -(2**63), 10**400, 10**30000):
    with pytest.raises(ValueError, match="in a tree must fit into .*, got"):
      take(number)


LONG = {
  "a text": "x" * 10**4,
  "an integer": 10**4000,
  "a list": [0.5] * 1000,
  "an array": np.zeros(900),
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG.keys())
def test_an_error_shows_the_beginning_of_what_is_long(value):
  inner, rule = optax.identity(), ols.FixedLossScale()
  for refuse in (
    lambda x: ols.DynamicLossScale(growth_interval=x),
    lambda x: ols.loss_scaling(x, rule),
    lambda x: ols.loss_scaling(inner, rule, axis_name=[x, None]),
    ols.get_policy,
    lambda x: ols.autocast(abs, overrides=x),
    lambda x: ols.presets.from_state_dict("flax", {"scale": x}),
  ):
    with pytest.raises((TypeError, ValueError)) as error:
      refuse(value)
    assert len(str(error.value)) < 600


def test_a_long_array_is_shown_with_its_shape():
  with pytest.raises(
    TypeError, match=r"(?s)got Array.*\.\.\. \(shape \(900,\)\)"
  ):
    ols.FixedLossScale(jnp.zeros(900))


def with_traced(function):
  """Calls a function with a traced float32[]."""

  def as_loss(x):
    function(x)
    return x

  jax.jit(as_loss)(jnp.float32(1.5))


def test_a_traced_value_is_shown_by_its_shape_and_dtype():
  def check(x):
    with pytest.raises(TypeError) as error:
      ols.DynamicLossScale(growth_interval=x)
    assert str(error.value) == (
      "`growth_interval` must be an integer number of steps, got a traced "
      "float32[] of type jax.Array."
    )

  with_traced(check)


@pytest.mark.parametrize(
  "value", [None, {}, {1}, object(), len, 1j, "1", [True], [None]]
)
@pytest.mark.parametrize("name", ["overflow", "amax"])
def test_a_rule_takes_a_flag_and_a_number(name, value):
  rule = ols.rules.HeadroomLossScale()
  given = {"overflow": False, "amax": 1.0, name: value}
  error = ValueError if (name, value) == ("amax", None) else TypeError
  with pytest.raises(error, match=f"^`{name}` must be "):
    rule.update(rule.init(), given["overflow"], amax=given["amax"])
