"""Remainders and stochastic rounding, held to integers and NumPy's own sums."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from optax_lossscale._precision import rounding
from tests import documents
from tests import support

TRACE = documents.ROOT / "tests/traces/torchao_rounding.json"
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
each_dtype = pytest.mark.parametrize("dtype", NUMPY)


stochastic_update = jax.jit(rounding.stochastic_update, static_argnums=2)


@jax.jit
def codec(masters):
  """Returns the bfloat16 for each master, and the master read back."""
  param = rounding.nearest(masters, jnp.bfloat16)
  kept = rounding.remainder(masters, param, jnp.bfloat16)
  return param, kept, rounding.master(param, kept, jnp.bfloat16)


def check_codec(patterns):
  """Holds the codec to the rule of the original, on the bits of float32."""
  masters = patterns.view(np.float32)
  param, kept, back = map(np.asarray, codec(masters))
  usual = ~np.isnan(masters)
  # The original: the low half as int16, and the high half one up where that is
  # negative. It lets NaN wrap around to -0.0.
  low = patterns.astype(np.uint16).view(np.int16)
  high = (patterns >> 16).astype(np.uint16) + (low < 0)
  seen = (param.view(np.uint32) >> 16).astype(np.uint16)
  assert np.array_equal(seen[usual], high.astype(np.uint16)[usual])
  assert np.array_equal(kept[usual], low[usual])
  assert np.array_equal(back.view(np.uint32)[usual], patterns[usual])
  for x in (param, back):
    assert np.isnan(x[~usual]).all()


def test_a_bfloat16_and_its_remainder_are_every_bit_of_float32():
  lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
  highs = np.arange(2**16, dtype=np.uint32) << 16
  check_codec((highs[:, None] | np.uint32(lows)).ravel())


@pytest.mark.long
def test_all_masters_of_bfloat16_come_back():
  for start in range(0, 2**32, 2**26):
    check_codec(np.arange(start, start + 2**26, dtype=np.uint32))


def steps_of(x):
  """Returns the distances of numbers of a narrow dtype to the next ones."""
  with np.errstate(over="ignore"):
    after = np.nextafter(np.abs(x), x.dtype.type(np.inf))
  return np.float32(after) - np.float32(np.abs(x))


@pytest.mark.usefixtures("strict_promotion")
def test_a_float16_and_its_remainder_are_float32_down_to_2_to_the_minus_17():
  rng = np.random.default_rng(0)
  halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
  halves = halves[np.abs(halves) < 65504]
  step = steps_of(halves.astype(np.float16))
  # All float16, what is halfway to the next, and more in between.
  masters = np.concatenate(
    [halves + step * x for x in (0, 0.5, -0.5, *rng.uniform(-0.5, 0.5, 8))]
  ).astype(np.float32)
  most = rounding.largest_master(jnp.float16)
  masters = np.clip(masters, -most, most)

  @jax.jit
  def back(x):
    param = rounding.nearest(x, jnp.float16)
    kept = rounding.remainder(x, param, jnp.float16)
    return param, rounding.master(param, kept, jnp.float16)

  param, found = map(np.asarray, back(masters))
  assert np.array_equal(param.astype(np.float16), param)
  assert (
    np.abs(param - masters) <= steps_of(param.astype(np.float16)) / 2
  ).all()
  large = np.abs(masters) >= 2.0**-17
  bits = [x[large].view(np.uint32) for x in (found, masters)]
  assert np.array_equal(*bits)
  assert np.abs(found - masters).max() <= 2.0**-40
  # Halves go away from zero.
  assert back(jnp.float32(1 + 2**-11))[0] == 1 + 2**-10
  assert back(jnp.float32(-1 - 2**-11))[0] == -1 - 2**-10


@each_dtype
def test_no_master_is_larger_than_one_that_a_parameter_shows(dtype):
  dtype = jnp.dtype(dtype)
  most = np.float32(rounding.largest_master(dtype))
  beyond = np.nextafter(most, np.float32(np.inf))
  assert float(rounding.nearest(most, dtype)) == float(jnp.finfo(dtype).max)
  assert np.isinf(rounding.nearest(beyond, dtype))


def pairs(dtype, size=200_000):
  """Returns parameters and targets, a hair or many orders of size apart."""
  rng = np.random.default_rng(1)
  low, high = {"bfloat16": (-25, 25), "float16": (-7, 4)}[dtype]
  largest = float(jnp.finfo(dtype).max)
  sizes = rng.normal(size=size) * 10.0 ** rng.uniform(low, high, size)
  param = np.clip(sizes, -largest, largest).astype(NUMPY[dtype])
  away = [
    rng.normal(size=size) * 1e-3,
    rng.normal(size=size) / 3,
    rng.normal(size=size) * 10.0 ** rng.uniform(-6, 3, size),
  ]
  factor = 1 + np.choose(rng.integers(0, 3, size), away)
  target = np.float32(param.astype(np.float64) * factor)
  return param, np.clip(target, -largest / 4, largest / 4)


def landings(dtype, param, target, chance):
  """Returns where NumPy's sums arrive, and checks that updates are narrow."""
  update = np.asarray(
    stochastic_update(
      target,
      param.astype(np.float32),
      param.dtype,
      np.full_like(target, chance),
    )
  )
  narrow = update.astype(NUMPY[dtype])
  assert np.array_equal(narrow.astype(np.float32), update, equal_nan=True)
  return (param + narrow).astype(np.float32)


@each_dtype
def test_a_sum_arrives_on_either_side_of_its_target_and_near(dtype):
  param, target = pairs(dtype)
  # Chances are at most 1 - 2**-24.
  low, high = (landings(dtype, param, target, x) for x in (1 - 2.0**-24, 0.0))
  assert ((low <= target) & (target <= high)).mean() > 1 - 1e-5
  size = np.abs(np.float32(param))
  near = (np.sign(target) == np.sign(np.float32(param))) & (
    (np.abs(target) >= size / 2) & (np.abs(target) / 2 <= size)
  )
  # There they are neighbors: nothing is between them.
  between = np.nextafter(low.astype(NUMPY[dtype]), NUMPY[dtype](np.inf))
  is_next = (high == between.astype(np.float32)) | (high == low)
  assert near.mean() > 0.5 and is_next[near].all()
  # Elsewhere they are as near as numbers of the size of the update are.
  size += np.abs(target)
  assert (high - low <= 3 * steps_of(size.astype(NUMPY[dtype]))).all()


@each_dtype
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1 / 3, 0.999])
def test_the_mean_of_all_chances_is_the_target(dtype, share):
  eps = float(jnp.finfo(dtype).eps)
  param = np.array([1, -1, 2, 1.5, -3, 1000], np.float32).astype(NUMPY[dtype])
  for way in (1, -1, 40):
    goal = param.astype(np.float32) * (1 + way * eps * share)
    count = 4096
    chances = (np.arange(count) + 0.5) / count
    found = [landings(dtype, param, goal, x) for x in chances[::16]]
    off = np.mean(np.float64(found), axis=0) - goal
    step = np.abs(param.astype(np.float32)) * eps * 2
    assert (np.abs(off) <= step / 256).all()


@each_dtype
def test_stochastic_rounding_is_right_at_the_ends(dtype):
  finfo = jnp.finfo(dtype)
  largest, least = float(finfo.max), float(finfo.smallest_normal)
  narrow = NUMPY[dtype]
  cases = {
    # The parameter, the target, and where a sum may arrive.
    "the same": (1, 1.0, {1.0}),
    "a power of two": (1, 1 - 2.0**-30, {1.0, 1 - float(finfo.eps) / 2}),
    "the largest": (largest, largest, {largest}),
    "above the largest": (largest, np.float32(largest) * 1.0001, {largest}),
    "below the largest": (-largest, -largest, {-largest}),
    "from end to end": (largest, -largest, {0.0}),
    "inf": (1, np.inf, {np.inf}),
    "-inf": (1, -np.inf, {-np.inf}),
    "from inf": (np.inf, np.inf, {np.inf, np.nan}),
    # Below this a CPU makes the update 0.
    "normal": (512 * least, 640 * least, {640 * least}),
    "zero": (0, 0.0, {0.0}),
    "to zero": (1, 0.0, {0.0}),
  }
  if dtype == "float16":
    cases["subnormal"] = (2.0**-24, 1.5 * 2.0**-24, {2.0**-24, 2.0**-23})
    cases["below all"] = (0, -(2.0**-26), {0.0, -(2.0**-24)})
  for name, (param, target, expected) in cases.items():
    param, target = np.array([param]).astype(narrow), np.float32([target])
    for chance in (0.0, 0.3, 1 - 2.0**-24):
      (found,) = landings(dtype, param, target, chance)
      is_nan = np.isnan(found) and np.nan in expected
      assert is_nan or found in expected, name
  assert np.isnan(
    landings(dtype, np.ones(1, narrow), np.float32([np.nan]), 0.0)
  )


def test_draws_fall_as_those_of_torchao():
  trace = json.loads(TRACE.read_text())
  draws, rows = trace["draws"], trace["rows"]
  x = np.uint32([bits for bits, _ in rows]).view(np.float32)
  shape = (len(rows), draws)
  found = rounding.stochastic(
    jnp.broadcast_to(x[:, None], shape),
    rounding.chances(shape, rounding.key(7)),
  )
  uppers = np.asarray(found).view(np.uint32) >> 16
  for (bits, counts), upper in zip(rows, uppers, strict=True):
    theirs = dict(counts)
    share = (bits & 0xFFFF) / 2**16
    # Of the difference of two counts, six standard deviations.
    most = 6 * np.sqrt(2 * draws * share * (1 - share))
    assert {*upper} <= {*theirs} | {bits >> 16, (bits >> 16) + 1}
    for result, count in theirs.items():
      assert abs(np.sum(upper == result) - count) <= most, hex(bits)


def test_chances_are_evenly_spread_and_unlike_each_other():
  size = 1 << 16
  found = {
    (seed, count): np.asarray(
      rounding.chances((size,), rounding.key(seed, count))
    )
    for seed in (0, 1)
    for count in (0, 1, 2**31 - 1)
  }
  rows = np.stack([*found.values()])
  assert rows.dtype == np.float32 and 0 <= rows.min() < rows.max() < 1
  assert (rows * 2**24 == np.round(rows * 2**24)).all()
  # Within four standard deviations.
  assert (np.abs(rows.mean(axis=1) - 0.5) < 4 * np.sqrt(1 / 12 / size)).all()
  counts = np.stack([np.histogram(x, 256, (0, 1))[0] for x in rows])
  chi = ((counts - size / 256) ** 2 / (size / 256)).sum(axis=1)
  assert (np.abs(chi - 255) < 4 * np.sqrt(2 * 255)).all()
  # Neither those of another key, nor of the next element, nor 1024 later.
  later = np.concatenate([rows, np.roll(rows, 1, 1), np.roll(rows, 1024, 1)])
  alike = np.corrcoef(later)[: len(rows)] - np.eye(len(rows), len(later))
  assert np.abs(alike).max() < 5 / np.sqrt(size)


@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_chances_do_not_depend_on_the_sharding(axis_type):
  key = rounding.key(3, 4)
  whole = np.asarray(rounding.chances((16, 24), key))
  assert not np.array_equal(whole[0], whole[1])
  mesh = support.make_mesh(axis_type)
  for spec in (jax.P("data"), jax.P(None, "data"), jax.P()):
    sharding = jax.NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
      found = jax.jit(
        lambda: rounding.chances((16, 24), key), out_shardings=sharding
      )()
    assert np.array_equal(whole, found)
