"""Counts of elements by exponent and every amax, compared with NumPy."""

import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.instruments import leaf_stats
from optax_lossscale.instruments.run import _leaf_stats
from tests import support

HALF = ols.nonfinite(jnp.float16)
# Leaves that are not gradients.
LEFT_OUT = {
  "integer": np.arange(3),
  "none": None,
  "masked": optax.MaskedNode(),
  "_overwrite_with_gradient": {"scale": np.full(5, np.inf, np.float32)},
}
RNG = np.random.default_rng(0)
NORMALS = RNG.normal(size=5000) * np.exp(RNG.normal(size=5000) * 9)
NORMALS = NORMALS.astype(np.float32)


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
  expected = {
    "counts": np.bincount(np.clip(exponents, -149, 127) + 149, minlength=277),
    "zeros": np.sum(values == 0),
    "subnormals": np.sum((finite > 0) & (finite < smallest)),
    "nonfinite": np.sum(~np.isfinite(values)),
  }
  for name, count in expected.items():
    found = getattr(stats, name)
    assert found.dtype == jnp.uint32
    np.testing.assert_array_equal(found, count[None], err_msg=name)
  wide = np.float64 if own == np.float64 else np.float32
  largest = np.max(values, initial=0)  # NaN if there is one.
  np.testing.assert_array_equal(stats.amax, wide([largest]), strict=True)
  assert stats.total == values.size


def every(dtype):
  """Returns every number of a dtype of 8 or 16 bits."""
  bits = 8 * np.dtype(dtype).itemsize
  return np.arange(2**bits, dtype=f"uint{bits}").view(dtype)


def around_every_exponent(dtype):
  """Returns the numbers around each power of two, 0 and inf included."""
  info = np.finfo(dtype)
  unsigned = np.dtype(f"uint{info.bits}")
  subnormal = [2**k for k in range(info.nmant)]
  normal = [k << info.nmant for k in range(1, info.maxexp - info.minexp + 2)]
  powers = np.array([0, 1, *subnormal, *normal], unsigned)
  bits = np.concatenate([powers, powers + unsigned.type(1), powers[2:] - 1])
  sign = unsigned.type(1 << (info.bits - 1))
  return np.concatenate([bits, bits | sign]).view(dtype)


@pytest.fixture(params=["cpu", "accelerator"])
def counted(request, monkeypatch):
  """Returns `leaf_stats` with the algorithm for a CPU or an accelerator."""
  if request.param == "accelerator":
    monkeypatch.setattr(_leaf_stats, "_by_scatter", _leaf_stats._by_comparison)
  _leaf_stats._row.clear_cache()
  yield leaf_stats
  _leaf_stats._row.clear_cache()


@pytest.mark.parametrize(
  "dtype", [np.float16, ml_dtypes.float8_e4m3fn, np.float32]
)
def test_every_number_counts_at_its_exponent(counted, dtype):
  is_wide = dtype is np.float32
  x = around_every_exponent(dtype) if is_wide else every(dtype)
  check_row(counted(jnp.asarray(x)), x)
  finite = x[np.isfinite(magnitudes(x))]
  check_row(counted(jnp.asarray(finite)), finite)


def test_float64_beyond_float32_counts_at_the_ends(counted):
  x = around_every_exponent(np.float64)
  finite = x[np.isfinite(x)]
  with jax.enable_x64(True):
    check_row(counted(jnp.asarray(x)), x)
    both = counted([jnp.float32([3.0]), jnp.asarray(finite)])
    np.testing.assert_array_equal(both.amax, [3.0, np.max(finite)])
    assert math.isfinite(both.headroom()["1"]) and both.headroom()["1"] < 1
    assert both.first_to_overflow() == "1"


def test_each_part_of_a_complex_number_counts(counted):
  x = np.complex64([1 + 4j, complex(0, np.inf), complex(np.nan, 2.0**-140)])
  check_row(counted(jnp.asarray(x)), x)
  check_row(counted(jnp.asarray(x[:1])), x[:1])


def test_each_leaf_has_a_row_with_its_path():
  tree = {
    "Dense_0": {"bias": 0.25, "kernel": jnp.asarray(NORMALS)},
    "list": [jnp.asarray(NORMALS[:7]).astype(jnp.float16), np.complex64([1j])],
  }
  stats = jax.jit(leaf_stats)({**tree, **LEFT_OUT})
  assert stats.paths == ("Dense_0/bias", "Dense_0/kernel", "list/0", "list/1")
  dtypes = [x.name for x in stats.dtypes]
  assert dtypes == ["float32", "float32", "float16", "float32"]
  for path, leaf in zip(stats.paths, jax.tree.leaves(tree), strict=True):
    row = stats.leaf(path)
    assert row.paths == (path,)
    check_row(row, leaf if path != "Dense_0/bias" else np.float32(leaf))
  with pytest.raises(ValueError, match="`path` must be that of a leaf, got 'x"):
    stats.leaf("x")


@pytest.mark.parametrize("tree", [None, LEFT_OUT])
def test_a_tree_without_gradients_has_no_rows(tree):
  stats = leaf_stats(tree)
  assert stats.counts.shape == (0, 277) and stats.amax.shape == (0,)
  assert stats.total == stats.share(-149, 128) == stats.share_lost() == 0
  assert stats.headroom() == {}
  with pytest.raises(ValueError, match="must have a floating or complex leaf"):
    stats.first_to_overflow()


def test_the_stats_of_steps_add_up():
  steps = np.float32([[1, -4], [np.nan, 2], [np.inf, 3]])
  stats = [leaf_stats({"w": jnp.asarray(step)}) for step in steps]
  check_row(functools.reduce(operator.add, stats), steps)

  @jax.jit
  def scanned(steps):
    def step(total, x):
      return total + leaf_stats({"w": x}), None

    return jax.lax.scan(step, leaf_stats({"w": steps[0]}), steps[1:])[0]

  check_row(scanned(steps[[0, 2]]), steps[[0, 2]])
  with pytest.raises(ValueError, match="must be of the same leaves, got"):
    _ = stats[0] + leaf_stats({"b": jnp.ones(2)})
  with pytest.raises(ValueError, match=r"float32.* and .*float16"):
    _ = stats[0] + leaf_stats({"w": jnp.ones(2, jnp.float16)})
  with pytest.raises(TypeError, match="unsupported operand"):
    _ = stats[0] + 1


def test_more_elements_than_a_uint32_holds_are_refused():
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


def test_the_counts_take_one_loop_and_little_memory():
  x = jax.ShapeDtypeStruct((1000, 1001), jnp.float32)
  jitted = jax.jit(leaf_stats).lower(x).compile()
  assert support.temporaries(jitted) < x.size * x.dtype.itemsize / 20
  assert len(re.findall(r" while\(", jitted.as_text())) == 1


def test_sharded_arrays_are_counted_where_they_are():
  mesh = support.make_mesh("Explicit", data=4, model=2)
  x = NORMALS[:960].reshape(48, 20)
  sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", "model")))
  jitted = jax.jit(leaf_stats).lower(sharded).compile()
  found = jitted(sharded)
  check_row(found, x)
  assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(found))
  moved = support.between_devices(jitted)
  assert moved and all(" all-reduce" in line for line in moved)


def test_the_devices_of_a_shard_map_count_together():
  x = NORMALS[:4000].copy()
  x[-1] = np.nan  # Only the last device has it.
  mapped = support.on_each_device(
    lambda x: leaf_stats({"w": x, "b": jnp.ones(3)}, axis_name="data"), jax.P()
  )
  stats = jax.jit(mapped)(jnp.asarray(x))
  check_row(stats.leaf("w"), x)
  # An array that all devices hold counts once for each.
  check_row(stats.leaf("b"), np.ones(24, np.float32))


def test_the_rows_of_a_vmap_count_together_or_alone():
  x = NORMALS.reshape(2, 2500)
  rows = jax.vmap(leaf_stats)(jnp.asarray(x))
  check_row(jax.tree.map(lambda counts: counts[1], rows), x[1])
  with pytest.raises(ValueError, match=r"got `amax` of shape \(2, 1\)"):
    rows.share(0, 1)
  together = jax.vmap(
    functools.partial(leaf_stats, axis_name="i"), axis_name="i", out_axes=None
  )
  check_row(together(jnp.asarray(x)), x)
  with pytest.raises(ValueError, match="`axis_name` must name an axis of"):
    leaf_stats(x, axis_name="i")


def test_traced_stats_cannot_be_read():
  with pytest.raises(TypeError, match="got a traced one; return it from"):
    jax.jit(lambda x: leaf_stats(x).share(0, 1))(jnp.ones(3))


def test_a_share_includes_its_lower_end_only():
  stats = leaf_stats(
    [jnp.array([0.0, 0, np.inf, 0.25, 0.5]), [0.75, 1.0, -1.5]]
  )
  assert stats.share(-1, 0) == 2 / 8
  assert stats.share(-2, 1) == 5 / 8
  assert stats.share(0, 0) == stats.share(3, 100) == 0
  np.testing.assert_array_equal(stats.exponents, np.arange(-149, 128))


@pytest.mark.parametrize(
  ("name", "limit"),
  [("float16", 2.0**-25), ("bfloat16", 2.0**-134), ("float8_e4m3fn", 2.0**-10)],
)
def test_elements_below_half_the_smallest_number_are_lost(name, limit):
  x = np.exp2(np.arange(-149, 128)).astype(np.float32)
  x = np.concatenate([x, NORMALS, np.float32([0, -0.0, np.inf, np.nan])])
  nonzero = magnitudes(x)[x != 0]
  stats = leaf_stats(x)
  for scale in (1.0, 2.0**15, 2.0**126, 2.0**-126):
    lost = np.sum(nonzero * scale < limit) / nonzero.size
    assert stats.share_lost(name, scale) == pytest.approx(lost, rel=1e-12)
  # An S between two powers of two loses a part of one exponent.
  whole = stats.share_lost(name), stats.share_lost(name, 2.0)
  assert whole[0] > stats.share_lost(name, 1.5) > whole[1]


def test_the_share_lost_of_one_leaf_or_all_uses_s_from_a_state():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(2.0))
  stats = leaf_stats(
    {"a": jnp.array([2.0**-26, 0.0]), "b": jnp.array([2.0**-27, 1.0, 1.0])}
  )
  assert stats.share_lost() == 2 / 4
  state = tx.init(jnp.zeros(1))
  assert stats.share_lost(loss_scale=state) == 1 / 4
  assert stats.leaf("a").share_lost(loss_scale=state) == 0
  assert stats.leaf("b").share_lost(loss_scale=state) == 1 / 3


def test_a_dtype_that_cannot_hold_0_is_refused():
  with pytest.raises(ValueError, match="`dtype` must be able to hold 0"):
    leaf_stats(jnp.ones(1)).share_lost("float8_e8m0fnu")


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
def test_any_amax_has_a_headroom(amax, headroom):
  found = leaf_stats({"a": np.float32([amax])}).headroom(HALF)
  np.testing.assert_equal(found, {"a": headroom})


def test_the_headroom_is_that_of_each_leafs_computation():
  stats = leaf_stats(
    {"integer": jnp.arange(3), "w": [jnp.float16([2.0]), jnp.array([2.0**60])]}
  )
  half, single = (
    math.log2(float(jnp.finfo(dtype).max)) for dtype in ("float16", "float32")
  )
  for dtype, limits in (
    (None, (half, single)),
    ("float16", (half, half)),
    ({"integer": None, "w": "float16"}, (half, half)),
    ({"w": ["float8_e5m2", None]}, (math.log2(57344.0), single)),
    (lambda path: "float16" if path == "w/1" else None, (half, half)),
  ):
    found = stats.headroom(ols.saturated(dtype))
    expected = {"w/0": limits[0] - 1, "w/1": limits[1] - 60}
    assert found == pytest.approx(expected, rel=1e-12)
  with pytest.raises(ValueError, match="prefix of .* got none for .* 'w/0'"):
    stats.headroom(ols.nonfinite({"w": {"0": None}, "w/": None}))
  with pytest.raises(TypeError, match="`check` must be made by"):
    stats.headroom(jnp.float16)


def test_leaves_at_paths_of_one_text_have_dtypes_of_their_own():
  tree = {"a": {"b": jnp.float32([2.0])}, "a/b": jnp.float32([2.0])}
  half, brain = (math.log2(float(jnp.finfo(x).max)) - 1 for x in DTYPES)
  expected = {"['a']['b']": half, "['a/b']": brain}
  asked = []
  for dtype in (
    dict(zip(("a", "a/b"), DTYPES, strict=True)),  # A prefix.
    {"a": {"b": DTYPES[0]}, "a/b": DTYPES[1]},
    lambda path: asked.append(path) or DTYPES["'a/b'" in path],
  ):
    check = ols.saturated(dtype)
    assert leaf_stats(tree).headroom(check) == pytest.approx(expected)
    for name, is_over in (("float16", True), ("bfloat16", False)):
      large = jax.tree.map(lambda x: jnp.full(1, 65504.0), tree)
      large["a/b"] = large["a/b"] if name == "bfloat16" else tree["a/b"]
      large["a"] = tree["a"] if name == "bfloat16" else large["a"]
      _, state = ols.loss_scaling(
        optax.sgd(1.0), ols.FixedLossScale(), check=check
      ).update(large, INIT(tree), tree)
      assert state.overflow == is_over
  assert {*asked} == {*expected}


def test_a_dtype_is_for_the_leaves_inside_of_its_key():
  tree = {"a": {"b": {"c": jnp.ones(1)}}, "a/b": {"d": jnp.ones(1)}}
  found = leaf_stats(tree).headroom(
    ols.nonfinite({"a": "float16", "a/b": None})
  )
  assert found["a/b/c"] < 16 < 127 < found["a/b/d"]


DTYPES = ("float16", "bfloat16")
INIT = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale()).init


@pytest.mark.parametrize(
  ("leaves", "path"),
  [
    ({"a": [1.0], "b": [-16376.0, 2], "c": [8.0]}, "b"),
    ({"a": [1.0], "b": [np.inf], "c": [np.inf]}, "b"),
    ({"a": [np.nan], "b": [1.0, -np.inf], "c": [2.0]}, "b"),
    ({"a": [70000.0], "b": [np.nan], "c": [np.nan]}, "b"),
    ({"a": [0.0], "b": [2.0], "c": [2.0]}, "b"),
  ],
  ids=["largest", "inf", "inf before nan", "nan", "equals"],
)
def test_the_first_leaf_to_overflow_is_named(leaves, path):
  stats = leaf_stats({x: jnp.float32(leaf) for x, leaf in leaves.items()})
  assert stats.first_to_overflow(HALF) == path
