"""What is lost, element by element against casts and sums of NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from tests import support

TARGETS = {
  "float16": np.float16,
  "bfloat16": ml_dtypes.bfloat16,
  "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
  "float8_e5m2": ml_dtypes.float8_e5m2,
  "float32": np.float32,
}
LARGEST = float(np.finfo(np.float32).max)


def just_above(product, count=8):
  """Yields factors with another one that make so little more than a product.

  Both have 24 bits, and the upper 32 bits of 64 do not show the difference.
  """
  factors = np.random.default_rng(4).integers(2**23, 2**24, 10_000).tolist()
  little = (m for m in factors if 0 < -product % m < product >> 30)
  return itertools.islice(little, count)


SCALES = [
  *(2.0**k for k in (0, 1, 15, 32, 100, 126, -1, -20, -126)),
  *(1 / 3, 1.1, 3.0, 1000.0, 65504.0, 1.5 * 2.0**100, LARGEST),
  *np.exp(np.random.default_rng(0).normal(size=24) * 20),
  *(m * 2.0**-123 for m in just_above(2**47)),
  *(m * 2.0**-123 for m in just_above(2**47 + 2**31)),
]
SCALES = [float(np.float32(scale)) for scale in SCALES]


def lost(x, dtype, loss_scale=1.0):
  """Returns where an element is not 0, but S times it is in a dtype."""
  x = np.asarray(x)
  wide = np.float64 if x.dtype == np.float64 else np.float32
  with np.errstate(all="ignore"):
    product = wide(loss_scale) * x.astype(wide)
    return (x != 0) & (product.astype(dtype) == 0)


def share(where, x):
  with np.errstate(invalid="ignore"):  # Some NaN are signalling ones.
    of = np.sum(x != 0)
  return np.float32(np.sum(where)) / np.float32(max(of, 1))


@functools.cache
def jitted(name):
  return jax.jit(
    functools.partial(instruments.underflow_share, dtype=TARGETS[name])
  )


def around_the_boundary(own, lost):
  """Returns the last numbers that are lost, and the first that are not."""
  unsigned = np.dtype(f"uint{8 * np.dtype(own).itemsize}")
  low, high = 0, int(np.array(np.inf, own).view(unsigned))
  while high - low > 1:  # `low` is lost, `high` is not.
    middle = (low + high) // 2
    is_lost = lost(np.array([middle], unsigned).view(own))[0]
    low, high = (middle, high) if is_lost else (low, middle)
  near = np.arange(max(low - 4, 0), low + 6).astype(unsigned)
  return near[near <= np.array(np.inf, own).view(unsigned)].view(own)


@pytest.mark.slow
@pytest.mark.parametrize("own", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", TARGETS)
def test_every_boundary_is_where_a_cast_has_it(own, name):
  for scale in SCALES:
    lost_here = functools.partial(lost, dtype=TARGETS[name], loss_scale=scale)
    # Of one length, so that it is compiled once.
    x = np.resize(around_the_boundary(own, lost_here), 10)
    found = jitted(name)(jnp.asarray(x), loss_scale=jnp.float32(scale))
    assert found == share(lost_here(x), x), f"{scale}"


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_boundary_of_float64_is_where_a_cast_has_it(name):
  # Through float32 a cast would round twice.
  half = float(ml_dtypes.finfo(TARGETS[name]).smallest_subnormal) / 2
  with jax.enable_x64(True):
    for scale in SCALES:

      def lost_here(x, scale=scale):
        return (x != 0) & (scale * x <= half)

      x = np.resize(around_the_boundary(np.float64, lost_here), 10)
      found = jitted(name)(jnp.asarray(x), loss_scale=jnp.float32(scale))
      assert found == share(lost_here(x), x), f"{scale}"


@pytest.mark.slow
@pytest.mark.parametrize("own", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", TARGETS)
def test_the_share_of_all_16_bit_numbers_is_that_of_casts(own, name):
  x = np.arange(2**16, dtype=np.uint16).view(own)
  for scale in (1.0, 1000.0):
    found = jitted(name)(jnp.asarray(x), loss_scale=jnp.float32(scale))
    assert found == share(lost(x, TARGETS[name], scale), x)
    assert found.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_share_of_float32_numbers_is_that_of_casts(name):
  rng = np.random.default_rng(1)
  exponents = rng.integers(-149, 128, size=4000)
  x = np.float32(rng.choice([1, -1, 1.5, 1.25], 4000)) * np.exp2(exponents)
  x = np.concatenate([x, [0, -0.0, np.inf, np.nan]]).astype(np.float32)
  for scale in (1.0, 3.0, 2.0**30):
    found = jitted(name)(jnp.asarray(x), loss_scale=jnp.float32(scale))
    assert found == share(lost(x, TARGETS[name], scale), x)


def test_subnormal_numbers_are_multiplied_where_the_backend_has_none():
  tiny = jnp.float32(2.0**-149)
  assert not tiny > 0
  for exponent, expected in ((124, 1.0), (125, 0.0)):
    scale = 2.0**exponent  # 2**-25 becomes 0, 2**-24 does not.
    assert instruments.underflow_share(tiny, loss_scale=scale) == expected


def test_all_leaves_count_by_their_elements():
  tree = {
    "a": jnp.array([2.0**-30, 1.0, 0.0]),
    "b": [jnp.full((2, 3), 2.0**-26, jnp.bfloat16), 1.0, np.float32(2.0**-40)],
    "complex": jnp.complex64([complex(2.0**-30, 1)]),
    "integer": jnp.arange(3),
    "none": None,
    "_overwrite_with_gradient": {"scale": jnp.ones(5)},
  }
  assert instruments.underflow_share(tree) == np.float32(9 / 12)


@pytest.mark.parametrize("tree", [{}, None, jnp.arange(3), jnp.zeros(3)])
def test_where_nothing_is_there_nothing_is_lost(tree):
  assert instruments.underflow_share(tree) == 0.0
  assert instruments.swallowed_share(tree, tree) == 0.0


def test_the_scale_may_be_the_state_that_holds_it():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(2.0))
  state = tx.init(jnp.zeros(1))
  x = jnp.array([2.0**-25, 2.0**-26])
  found = instruments.underflow_share(x, loss_scale=state)
  assert found == 0.5


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"dtype": int}, TypeError, "`dtype` must be a floating-point dtype"),
    ({"dtype": "float8_e8m0fnu"}, ValueError, "`dtype` must be able to hold 0"),
    ({"loss_scale": 0.0}, ValueError, "loss scale` must be positive"),
    ({"loss_scale": "x"}, TypeError, "loss scale` must be a number"),
  ],
)
def test_arguments_that_make_no_sense_are_refused(options, error, message):
  with pytest.raises(error, match=message):
    instruments.underflow_share(jnp.ones(1), **options)


def kept(params, updates):
  """Returns where a sum of NumPy leaves a parameter as it was."""
  with np.errstate(all="ignore"):
    new = (params + updates).astype(params.dtype)
  is_same = (new == params) | (np.isnan(new) & np.isnan(params))
  return (updates != 0) & is_same


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_updates_are_swallowed_where_a_sum_changes_nothing(dtype):
  shape = (60, 50)
  rng = np.random.default_rng(2)
  params = rng.normal(size=shape).astype(dtype)
  updates = np.exp2(rng.integers(-28, 2, size=shape)).astype(dtype)
  updates.flat[:2] = [0, -0.0]
  found = instruments.swallowed_share(jnp.asarray(params), jnp.asarray(updates))
  assert found == share(kept(params, updates), updates)
  assert 0 < found < 1


def test_an_update_of_half_a_step_is_swallowed_where_a_tie_goes_back():
  params = jnp.bfloat16([1.0, 1.0 + 2.0**-7])
  updates = jnp.full(2, 2.0**-8, jnp.bfloat16)
  assert instruments.swallowed_share(params, updates) == 0.5


def test_a_parameter_that_changes_its_sign_has_changed():
  params = jnp.array([1.0, -2.0])
  assert instruments.swallowed_share(params, -2 * params) == 0.0


def test_float32_updates_are_rounded_as_apply_updates_does():
  params = {"w": jnp.bfloat16([1.0, 1.0]), "none": None, "n": jnp.arange(2)}
  updates = {"w": jnp.array([2.0**-20, 1.0]), "none": None, "n": jnp.ones(2)}
  updates["n"] = updates["n"].astype(int)
  found = jax.jit(instruments.swallowed_share)(params, updates)
  assert found == 0.5


def test_a_complex_update_is_swallowed_if_both_its_parts_are():
  params = jnp.complex64([1 + 1j, 1 + 1j, 1 + 1j])
  updates = jnp.complex64([1e-12j, 1e-12 + 1j, 0])
  assert instruments.swallowed_share(params, updates) == 0.5


def test_updates_for_other_parameters_are_refused():
  with pytest.raises(ValueError, match=r"for the parameters, got one for 'b'"):
    instruments.swallowed_share({"a": jnp.ones(1)}, {"b": jnp.ones(1)})
  with pytest.raises(ValueError, match=r"the shapes .* got \(2,\) for"):
    instruments.swallowed_share({"a": jnp.ones(1)}, {"a": jnp.ones(2)})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shares_of_sharded_arrays_are_made_where_they_are(axis_type):
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
  x = np.exp2(np.random.default_rng(3).integers(-50, 1, size=(8, 30)))
  x = x.astype(np.float32)
  params = np.ones_like(x)
  sharded = [jax.device_put(array, sharding) for array in (params, x)]

  def shares(params, x):
    return (
      instruments.underflow_share(x),
      instruments.swallowed_share(params, x),
    )

  function = jax.jit(shares).lower(*sharded).compile()
  underflow, swallowed = function(*sharded)
  assert underflow == share(lost(x, np.float16), x)
  assert swallowed == share(kept(params, x), x)
  moved = support.between_devices(function)
  assert moved and all(" all-reduce" in line for line in moved)
