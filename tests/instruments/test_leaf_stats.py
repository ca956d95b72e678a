"""Every element in its place and every amax, against NumPy in float64."""

import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.instruments import _leaf_stats
from optax_lossscale.instruments import leaf_stats
from tests import support

HALF = ols.nonfinite(jnp.float16)
# What is not looked at: no floating or complex arrays, or not gradients.
PASSED_BY = {
  "integer": np.arange(3),
  "none": None,
  "masked": optax.MaskedNode(),
  "_overwrite_with_gradient": {"scale": np.full(5, np.inf, np.float32)},
}
COUNTS = ("counts", "zeros", "subnormals", "nonfinite")


def magnitudes(x):
  """Returns |x| as float64, the parts of complex numbers one by one."""
  x = np.asarray(x)
  parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
  with np.errstate(invalid="ignore"):
    return np.abs(np.concatenate([y.ravel() for y in parts]).astype(float))


def check_row(stats, x):
  """Checks the only row of `stats` against NumPy."""
  x = np.asarray(x)
  own = x.real.dtype
  values = magnitudes(x)
  finite = values[np.isfinite(values)]
  exponents = np.frexp(finite[finite > 0])[1] - 1
  smallest = float(ml_dtypes.finfo(own).smallest_normal)
  expected = (
    np.bincount(np.clip(exponents, -149, 127) + 149, minlength=277),
    np.sum(values == 0),
    np.sum((finite > 0) & (finite < smallest)),
    np.sum(~np.isfinite(values)),
  )
  for name, count in zip(COUNTS, expected, strict=True):
    found = getattr(stats, name)
    assert found.dtype == jnp.uint32
    np.testing.assert_array_equal(found, count[None], err_msg=name)
  wide = np.float64 if own == np.float64 else np.float32
  largest = np.max(values, initial=0)  # NaN if there is one.
  np.testing.assert_array_equal(stats.amax, wide([largest]), strict=True)


def every(dtype):
  """Returns every number of a dtype of 8 or 16 bits."""
  bits = 8 * np.dtype(dtype).itemsize
  return np.arange(2**bits, dtype=f"uint{bits}").view(dtype)


def around_every_exponent(dtype):
  """Returns the numbers around each power of two, those of 0 and inf too."""
  info = np.finfo(dtype)
  unsigned = np.dtype(f"uint{info.bits}")
  subnormal = [2**k for k in range(info.nmant)]
  normal = [k << info.nmant for k in range(1, info.maxexp - info.minexp + 2)]
  powers = np.array([0, 1, *subnormal, *normal], unsigned)
  bits = np.concatenate([powers, powers + unsigned.type(1), powers[2:] - 1])
  sign = unsigned.type(1 << (info.bits - 1))
  return np.concatenate([bits, bits | sign]).view(dtype)


@functools.cache
def normals():
  rng = np.random.default_rng(0)
  return (rng.normal(size=5000) * np.exp(rng.normal(size=5000) * 9)).astype(
    np.float32
  )


@pytest.fixture(params=["by_scatter", "by_comparison"])
def counted(request, monkeypatch):
  """Returns `leaf_stats` as a CPU does it, or an accelerator."""
  if request.param == "by_comparison":
    monkeypatch.setattr(_leaf_stats, "_by_scatter", _leaf_stats._by_comparison)
  _leaf_stats._row.clear_cache()
  yield leaf_stats
  _leaf_stats._row.clear_cache()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_number_is_in_its_place(counted, dtype):
  x = every(dtype)
  check_row(counted(jnp.asarray(x)), x)
  finite = x[np.isfinite(magnitudes(x))]
  check_row(counted(jnp.asarray(finite)), finite)


def test_numbers_around_each_exponent_are_in_their_places(counted):
  # This backend takes the smallest of them for 0.
  assert not jnp.float32(2.0**-149) > 0
  x = around_every_exponent(np.float32)
  check_row(counted(jnp.asarray(x)), x)


def test_float64_numbers_beyond_float32_are_counted_at_its_ends(counted):
  x = around_every_exponent(np.float64)
  with jax.enable_x64(True):
    check_row(counted(jnp.asarray(x)), x)
    finite = x[np.isfinite(x)]
    check_row(counted(jnp.asarray(finite)), finite)
    both = counted([jnp.float32([3.0]), jnp.asarray(finite)])
    np.testing.assert_array_equal(both.amax, [3.0, np.max(finite)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*map(jnp.dtype, support.FLOAT8)])
def test_every_8_bit_number_is_in_its_place(dtype):
  check_row(leaf_stats(jnp.asarray(every(dtype))), every(dtype))


def test_each_part_of_a_complex_number_is_counted(counted):
  x = np.complex64([1 + 4j, complex(0, np.inf), complex(np.nan, 2.0**-140)])
  check_row(counted(jnp.asarray(x)), x)
  check_row(counted(jnp.asarray(x[:1])), x[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
  "shape",
  [0, 1, 1023, 1024, 1025, 3072, 4999, (5, 4, 250), (2500, 2), (1, 5000), ()],
)
def test_arrays_of_any_size_and_rank_are_counted_whole(counted, shape):
  x = np.resize(normals()[1:], shape)
  found = counted(jnp.asarray(x))
  check_row(found, x)
  assert found.total == x.size


def test_each_leaf_has_a_row_with_its_path():
  x = normals()
  tree = {
    "Dense_0": {"bias": 0.25, "kernel": jnp.asarray(x)},
    "list": [jnp.asarray(x[:7]).astype(jnp.float16), np.complex64([1j])],
  }
  stats = jax.jit(leaf_stats)({**tree, **PASSED_BY})
  assert stats.paths == ("Dense_0/bias", "Dense_0/kernel", "list/0", "list/1")
  assert [x.name for x in stats.dtypes] == [
    *("float32", "float32", "float16", "float32")
  ]
  for path, leaf in zip(stats.paths, jax.tree.leaves(tree), strict=True):
    row = stats.leaf(path)
    assert row.paths == (path,)
    check_row(row, leaf if path != "Dense_0/bias" else np.float32(leaf))
  assert stats.total == 1 + 5000 + 7 + 2
  with pytest.raises(ValueError, match="`path` must be that of a leaf, got 'x"):
    stats.leaf("x")


def test_leaves_whose_paths_are_written_alike_are_kept_apart():
  stats = leaf_stats({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(2)})
  assert sorted(stats.leaf(path).total for path in stats.paths) == [1, 2]


@pytest.mark.parametrize("tree", [{}, None, (), PASSED_BY])
def test_a_tree_without_gradients_has_no_rows(tree):
  stats = leaf_stats(tree)
  assert stats.counts.shape == (0, 277) and stats.amax.shape == (0,)
  assert stats.total == stats.share(-149, 128) == stats.share_lost() == 0
  assert stats.headroom() == {}
  with pytest.raises(ValueError, match="must have a floating or complex leaf"):
    stats.first_to_overflow()


def test_stats_of_steps_add_up_and_keep_the_largest():
  steps = np.float32([[1, -4], [np.nan, 2], [np.inf, 3]])
  stats = [leaf_stats({"w": jnp.asarray(step)}) for step in steps]
  check_row(functools.reduce(operator.add, stats), steps)

  @jax.jit
  def scanned(steps):
    def step(total, x):
      return total + leaf_stats({"w": x}), None

    return jax.lax.scan(step, leaf_stats({"w": steps[0]}), steps[1:])[0]

  check_row(scanned(steps), steps)
  check_row(scanned(steps[[0, 2]]), steps[[0, 2]])
  with pytest.raises(ValueError, match="must be of the same leaves, got"):
    _ = stats[0] + leaf_stats({"b": jnp.ones(2)})
  with pytest.raises(ValueError, match=r"float32.* and .*float16"):
    _ = stats[0] + leaf_stats({"w": jnp.ones(2, jnp.float16)})
  with pytest.raises(TypeError, match="unsupported operand"):
    _ = stats[0] + 1


def test_too_many_elements_for_a_uint32_are_refused():
  half = jax.ShapeDtypeStruct((2**31,), jnp.float16)
  jax.eval_shape(leaf_stats, [half, half])
  whole = jax.ShapeDtypeStruct((2, 2**31), jnp.float16)
  with pytest.raises(ValueError, match=r"got 4294967296 at 'a'"):
    jax.eval_shape(leaf_stats, {"a": whole})
  with pytest.raises(ValueError, match=r"got 4294967296"):
    jax.eval_shape(
      jax.vmap(functools.partial(leaf_stats, axis_name="i"), axis_name="i"),
      whole,
    )


BFLOAT16 = pytest.param(
  jnp.bfloat16,
  marks=pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="XLA copied a bfloat16 array to float32 before jax 0.11.2",
  ),
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, BFLOAT16])
def test_nothing_as_large_as_the_gradients_is_written(dtype):
  x = jax.ShapeDtypeStruct((1000, 1001), dtype)
  jitted = jax.jit(leaf_stats).lower(x).compile()
  assert support.temporaries(jitted) < x.size * x.dtype.itemsize / 20
  # One loop counts each element once.
  assert len(re.findall(r" while\(", jitted.as_text())) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
  "spec", [("data",), (None, "model"), (("data", "model"),)]
)
def test_sharded_arrays_are_counted_where_they_are(counted, axis_type, spec):
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  x = normals()[:960].reshape(48, 20)
  sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
  jitted = jax.jit(counted).lower(sharded).compile()
  found = jitted(sharded)
  check_row(found, x)
  assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(found))
  moved = support.between_devices(jitted)
  assert len(moved) > 0
  assert all(" all-reduce" in line for line in moved)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("last", [1.0, np.inf, np.nan])
def test_devices_of_a_shard_map_count_together(counted, check_vma, last):
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  x = normals()[:4000].copy()
  x[-1] = last  # Only the last device has it.
  axes = ("data", "model")
  mapped = jax.shard_map(
    lambda x: counted({"w": x, "b": jnp.ones(3)}, axis_name=axes),
    mesh=mesh,
    in_specs=jax.P(axes),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  stats = jax.jit(mapped)(jnp.asarray(x))
  check_row(stats.leaf("w"), x)
  # What all devices hold counts once for each.
  check_row(stats.leaf("b"), np.ones(24, np.float32))


def test_rows_of_a_vmap_count_together_or_alone():
  x = normals().reshape(2, 2500)
  rows = jax.vmap(leaf_stats)(jnp.asarray(x))
  for i in range(2):
    check_row(jax.tree.map(lambda counts, i=i: counts[i], rows), x[i])
  with pytest.raises(ValueError, match=r"got `amax` of shape \(2, 1\)"):
    rows.share(0, 1)
  together = jax.vmap(
    functools.partial(leaf_stats, axis_name="i"), axis_name="i", out_axes=None
  )
  check_row(together(jnp.asarray(x)), x)
  with pytest.raises(ValueError, match="`axis_name` must name an axis of"):
    leaf_stats(x, axis_name="i")


def test_traced_stats_cannot_be_read():
  for read in (
    lambda stats: stats.total,
    lambda stats: stats.share(0, 1),
    lambda stats: stats.share_lost(),
    lambda stats: stats.headroom(),
    lambda stats: stats.first_to_overflow(),
  ):
    with pytest.raises(TypeError, match="got a traced one; return it from"):
      jax.jit(lambda x, read=read: read(leaf_stats(x)))(jnp.ones(3))


def test_a_share_is_that_of_all_elements_within_two_powers_of_two():
  stats = leaf_stats(
    [jnp.array([0.0, 0, np.inf, 0.25, 0.5]), [0.75, 1.0, -1.5]]
  )
  assert stats.total == 8
  assert stats.share(-1, 0) == 2 / 8
  assert stats.share(-2, 1) == 5 / 8
  assert stats.share(0, 0) == stats.share(3, 100) == 0
  np.testing.assert_array_equal(stats.exponents, np.arange(-149, 128))


# The dtypes of a computation, and half of their smallest number.
LIMITS = {
  "float16": 2.0**-25,
  "bfloat16": 2.0**-134,
  "float8_e4m3fn": 2.0**-10,
  "float8_e5m2": 2.0**-17,
  "float32": 2.0**-150,
}


@pytest.mark.parametrize("own", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LIMITS)
def test_the_share_lost_is_that_of_what_is_below_half_the_least(own, name):
  x = np.concatenate(
    [np.exp2(np.arange(-149, 128)), normals(), [0, -0.0, np.inf, np.nan]]
  )
  with np.errstate(over="ignore"):
    x = x.astype(jnp.dtype(own))
  nonzero = magnitudes(x)[magnitudes(x) != 0]
  stats = leaf_stats(jnp.asarray(x))
  for scale in (1.0, 2.0, 2.0**15, 2.0**-20, 2.0**126, 2.0**-126):
    lost = np.sum(nonzero * scale < LIMITS[name]) / nonzero.size
    assert stats.share_lost(name, scale) == pytest.approx(lost, rel=1e-12)


def test_a_cast_loses_what_is_counted_and_the_ties():
  x = normals() * np.float32(2.0**-20)
  with np.errstate(over="ignore"):
    lost = np.mean(x.astype(np.float16) == 0)
  assert 0.2 < lost < 0.8
  assert leaf_stats(x).share_lost() == pytest.approx(lost, rel=1e-12)
  tie = leaf_stats(jnp.float32([2.0**-25, 2.0**-26]))
  assert np.float16(np.float32(2.0**-25)) == 0 and tie.share_lost() == 0.5


@pytest.mark.parametrize("scale", [3.0, 1000.0, 1 / 3])
def test_within_an_exponent_the_share_is_in_proportion(scale):
  x = np.float32(
    2.0**-20 * np.exp(np.random.default_rng(1).normal(size=20_000))
  )
  x = x / np.float32(scale) * np.float32(2.0**-5)
  lost = np.mean(x.astype(float) * scale < 2.0**-25)
  assert leaf_stats(x).share_lost(loss_scale=scale) == pytest.approx(
    lost, abs=0.03
  )
  below, above = (
    leaf_stats(x).share_lost(loss_scale=2.0**k * scale) for k in (1, -1)
  )
  assert below < lost < above


def test_the_share_lost_is_of_one_leaf_or_all_at_the_s_of_a_state():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(2.0))
  stats = leaf_stats(
    {"a": jnp.array([2.0**-26, 0.0]), "b": jnp.array([2.0**-27, 1.0, 1.0])}
  )
  assert stats.share_lost() == 2 / 4
  state = tx.init(jnp.zeros(1))
  assert stats.share_lost(loss_scale=state) == 1 / 4
  assert stats.leaf("a").share_lost(loss_scale=state) == 0
  assert stats.leaf("b").share_lost(loss_scale=state) == 1 / 3


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
    leaf_stats(jnp.ones(1)).share_lost(**options)


@pytest.mark.parametrize(
  ("amax", "headroom"),
  [
    (np.inf, -math.inf),
    (np.nan, math.nan),
    (0.0, math.nan),
    (16376.0, 2.0),
    (131008.0, -1.0),
    # A subnormal number.
    (2.0**-149, math.log2(65504.0) + 149),
  ],
)
def test_headroom_is_told_of_any_amax(amax, headroom):
  found = leaf_stats({"a": np.float32([amax])}).headroom(HALF)
  np.testing.assert_equal(found, {"a": headroom})


def test_headroom_is_that_of_each_leafs_computation():
  stats = leaf_stats(
    {
      "_overwrite_with_gradient": {"scale": jnp.full(2, jnp.inf)},
      "integer": jnp.arange(3),
      "w": [jnp.float16([2.0]), jnp.array([2.0**60])],
    }
  )
  half = math.log2(65504.0)
  single = math.log2(float(jnp.finfo(jnp.float32).max))
  for dtype, limits in (
    (None, (half, single)),
    ("float16", (half, half)),
    ("float32", (half, single)),
    ({"integer": None, "w": "float16"}, (half, half)),
    ({"w": [None, "float16"]}, (half, half)),
    ({"w": ["float8_e5m2", None]}, (math.log2(57344.0), single)),
    (lambda path: "float16" if path == "w/1" else None, (half, half)),
    (
      jax.tree_util.Partial(lambda x, path: x, "bfloat16"),
      (half, math.log2(float(jnp.finfo(jnp.bfloat16).max))),
    ),
  ):
    found = stats.headroom(ols.saturated(dtype))
    expected = {"w/0": limits[0] - 1, "w/1": limits[1] - 60}
    assert found == pytest.approx(expected, rel=1e-12)
  with pytest.raises(ValueError, match="prefix of .* got none for .* 'w/1'"):
    stats.headroom(ols.nonfinite({"w": {"0": None}, "w/": None}))
  with pytest.raises(TypeError, match="`check` must be made by"):
    stats.headroom(jnp.float16)


def test_a_large_float64_keeps_its_headroom():
  with jax.enable_x64(True):
    stats = leaf_stats({"a": jnp.array([2.0**1000]), "b": jnp.array([1.0])})
    assert stats.headroom()["a"] == pytest.approx(24.0)
    assert stats.first_to_overflow() == "a"


@pytest.mark.parametrize(
  ("leaves", "path"),
  [
    ({"a": [1.0], "b": [-16376.0, 2], "c": [8.0]}, "b"),
    ({"a": [1.0], "b": [np.inf], "c": [np.inf]}, "b"),
    ({"a": [np.nan], "b": [1.0, -np.inf], "c": [2.0]}, "b"),
    ({"a": [70000.0], "b": [np.nan], "c": [np.nan]}, "b"),
    ({"a": [0.0], "b": [0.0]}, "a"),
    ({"a": [0.0], "b": [2.0], "c": [2.0]}, "b"),
  ],
  ids=["largest", "inf", "inf before nan", "nan", "zeros", "equals"],
)
def test_what_overflowed_comes_first_and_the_first_among_equals(leaves, path):
  stats = leaf_stats({x: jnp.float32(leaf) for x, leaf in leaves.items()})
  assert stats.first_to_overflow(HALF) == path
