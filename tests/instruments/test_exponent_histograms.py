"""Every element in its place, against NumPy; one pass; wherever it lives."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import ml_dtypes
import numpy as np
import optax
import pytest

from optax_lossscale import instruments
from optax_lossscale.instruments import _exponent_histograms
from tests import support

EIGHT_BITS = tuple(map(jnp.dtype, support.FLOAT8))
# What is not looked at: no floating or complex arrays, or not gradients.
PASSED_BY = {
  "integer": np.arange(3),
  "none": None,
  "masked": optax.MaskedNode(),
  "_overwrite_with_gradient": {"scale": np.ones(5, np.float32)},
}


def expected(x):
  """Returns a histogram of an array by NumPy, in float64."""
  x = np.asarray(x)
  parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
  smallest = float(ml_dtypes.finfo(parts[0].dtype).smallest_normal)
  # float32 and wider hold every other dtype; Python does not flush to 0.
  with np.errstate(invalid="ignore"):
    values = np.abs(np.concatenate([y.ravel() for y in parts]).astype(float))
  finite = values[np.isfinite(values)]
  exponents = np.frexp(finite[finite > 0])[1] - 1
  return instruments.ExponentHistogram(
    np.bincount(np.clip(exponents, -149, 127) + 149, minlength=277),
    np.sum(values == 0),
    np.sum((finite > 0) & (finite < smallest)),
    np.sum(~np.isfinite(values)),
  )


def check_equal(found, model):
  for name, a, b in zip(found._fields, found, model, strict=True):
    assert a.dtype == jnp.uint32
    np.testing.assert_array_equal(a, b, err_msg=name)


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


@pytest.fixture(params=["by_scatter", "by_comparison"])
def histogram(request, monkeypatch):
  """Returns `exponent_histogram` as a CPU does it, or an accelerator."""
  if request.param == "by_comparison":
    monkeypatch.setattr(
      _exponent_histograms, "_by_scatter", _exponent_histograms._by_comparison
    )
  _exponent_histograms._histogram.clear_cache()
  yield instruments.exponent_histogram
  _exponent_histograms._histogram.clear_cache()


@functools.cache
def normals():
  rng = np.random.default_rng(0)
  return (rng.normal(size=5000) * np.exp(rng.normal(size=5000) * 9)).astype(
    np.float32
  )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_number_is_in_its_place(histogram, dtype):
  x = every(dtype)
  check_equal(histogram(jnp.asarray(x)), expected(x))


def test_float32_numbers_around_each_exponent_are_in_their_places(histogram):
  # This backend takes the smallest of them for 0.
  assert not jnp.float32(2.0**-149) > 0
  x = around_every_exponent(np.float32)
  check_equal(histogram(jnp.asarray(x)), expected(x))


def test_float64_numbers_beyond_float32_are_counted_at_its_ends(histogram):
  x = around_every_exponent(np.float64)
  with jax.enable_x64(True):
    check_equal(histogram(jnp.asarray(x)), expected(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_8_bit_number_is_in_its_place(dtype):
  x = every(dtype)
  found = instruments.exponent_histogram(jnp.asarray(x))
  check_equal(found, expected(x))


def test_each_part_of_a_complex_number_is_counted(histogram):
  x = np.complex64([1 + 4j, complex(0, np.inf), complex(np.nan, 2.0**-140)])
  check_equal(histogram(jnp.asarray(x)), expected(x))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 3 * 1024, 4999])
def test_arrays_of_any_size_are_counted_whole(size):
  x = normals()[:size]
  found = instruments.exponent_histogram(jnp.asarray(x))
  check_equal(found, expected(x))
  assert found.total == size


@pytest.mark.slow
def test_arrays_of_any_rank_are_counted_whole(histogram):
  x = normals()
  for shape in ((5, 4, 250), (2500, 2), (1, 5000)):
    check_equal(histogram(jnp.asarray(x.reshape(shape))), expected(x))
  check_equal(histogram(jnp.float32(3.0)), expected(np.float32(3.0)))


def test_leaves_of_all_dtypes_are_added_up():
  x = normals()
  tree = {
    "a": jnp.asarray(x),
    "b": [jnp.asarray(x[:7]).astype(jnp.float16), 0.25, np.float32(8.0)],
    "c": jnp.asarray(x[:2000]).astype(jnp.bfloat16),
  }
  parts = [tree["a"], tree["b"][0], np.float32([0.25, 8]), tree["c"]]
  total = jax.tree.map(lambda *counts: sum(counts), *map(expected, parts))
  check_equal(instruments.exponent_histogram({**tree, **PASSED_BY}), total)


@pytest.mark.parametrize("tree", [{}, None, (), PASSED_BY])
def test_a_tree_without_gradients_has_an_empty_histogram(tree):
  found = instruments.exponent_histogram(tree)
  check_equal(found, expected(np.zeros(0)))
  assert found.total == 0
  assert found.share(-149, 128) == 0.0
  assert instruments.histogram_by_leaf(tree) == {}


def test_a_share_is_that_of_all_elements_within_two_powers_of_two():
  x = jnp.array([0.0, 0.0, jnp.inf, 0.25, 0.5, 0.75, 1.0, -1.5])
  found = instruments.exponent_histogram(x)
  assert found.total == 8
  assert found.share(-1, 0) == 2 / 8
  assert found.share(-2, 1) == 5 / 8
  assert found.share(0, 0) == found.share(3, 100) == 0
  np.testing.assert_array_equal(found.exponents, np.arange(-149, 128))


def test_a_histogram_is_the_same_under_jit_and_over_steps():
  x = jnp.asarray(normals())

  @jax.jit
  def twice(x):
    first = instruments.exponent_histogram(x)
    return jax.tree.map(jnp.add, first, instruments.exponent_histogram(-x))

  model = jax.tree.map(lambda count: 2 * count, expected(x))
  check_equal(twice(x), model)


def test_a_histogram_under_vmap_is_that_of_each_row():
  x = normals().reshape(2, 2500)
  rows = jax.vmap(instruments.exponent_histogram)(jnp.asarray(x))
  for i in range(2):
    row = jax.tree.map(lambda counts, i=i: counts[i], rows)
    check_equal(row, expected(x[i]))


def test_too_many_elements_for_a_uint32_are_refused():
  half = jax.ShapeDtypeStruct((2**31,), jnp.float16)
  jax.eval_shape(instruments.histogram_by_leaf, [half, half])
  with pytest.raises(ValueError, match=r"`tree` .* got 4294967296; call hist"):
    jax.eval_shape(instruments.exponent_histogram, [half, half])


def test_histograms_by_leaf_have_the_paths_of_the_leaves():
  x = jnp.asarray(normals())
  tree = {"Dense_0": {"bias": x[:3], "kernel": x}, "list": [x[3:9]]}
  found = jax.jit(instruments.histogram_by_leaf)({**tree, **PASSED_BY})
  assert list(found) == ["Dense_0/bias", "Dense_0/kernel", "list/0"]
  for histogram, leaf in zip(
    found.values(), jax.tree.leaves(tree), strict=True
  ):
    check_equal(histogram, expected(leaf))


def test_leaves_whose_paths_are_written_alike_are_kept_apart():
  tree = {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(2)}
  found = instruments.histogram_by_leaf(tree)
  assert sorted(x.total for x in found.values()) == [1, 2]


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
  jitted = jax.jit(instruments.exponent_histogram).lower(x).compile()
  assert support.temporaries(jitted) < 20_000
  # One loop is one look at each element.
  assert len(re.findall(r" while\(", jitted.as_text())) == 1


SPECS = [("data",), (None, "model"), (("data", "model"),)]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", SPECS)
def test_sharded_arrays_are_counted_where_they_are(histogram, axis_type, spec):
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  x = normals()[:960].reshape(48, 20)
  sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
  jitted = jax.jit(histogram).lower(sharded).compile()
  found = jitted(sharded)
  check_equal(found, expected(x))
  assert all(leaf.is_fully_replicated for leaf in found)
  moved = support.between_devices(jitted)
  assert len(moved) > 0
  assert all(" all-reduce" in line for line in moved)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_of_a_shard_map_add_their_histograms_up(histogram, check_vma):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def count(x):
    return jax.lax.psum(histogram(x), "data")

  x = normals()[:4000]
  mapped = jax.shard_map(
    count,
    mesh=mesh,
    in_specs=jax.P("data"),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  check_equal(jax.jit(mapped)(jnp.asarray(x)), expected(x))


def test_the_numbers_of_a_traced_histogram_cannot_be_read():
  def read(x):
    return instruments.exponent_histogram(x).share(0, 1)

  with pytest.raises(TypeError, match="got a traced one; return it from"):
    jax.jit(read)(jnp.ones(3))


def test_the_numbers_of_stacked_histograms_cannot_be_read():
  one = instruments.exponent_histogram(jnp.ones(3))
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), one)
  with pytest.raises(ValueError, match=r"got `counts` of shape \(2, 277\)"):
    stacked.share(0, 1)
  with pytest.raises(ValueError, match="of several that are stacked take one"):
    _ = stacked.total
  assert jax.tree.map(lambda x: x.sum(0), stacked).total == 6
