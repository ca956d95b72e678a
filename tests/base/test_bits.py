"""One maximum that carries NaN, inf and amax, by the three ways to take it."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_dtypes
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._base import bits as _bits
from tests import support

pytestmark = [
  pytest.mark.usefixtures("full_compilation"),
]

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
EIGHT_BITS = tuple(map(jnp.dtype, support.FLOAT8))
# Around a block of 32 * 16, a block of blocks, and the size of small arrays.
SIZES = (1, 511, 512, 513, 4095, 4096, 4097, 16383, 16384, 16896, 40_001)


@functools.cache
def jitted_amax(way):
  """Returns the jitted amax, shared by the tests of one way."""
  return jax.jit(lambda arrays, way=way: _bits.amax(arrays))


@pytest.fixture(params=["by_folding", "by_leaf", "by_group"])
def amax(request, monkeypatch):
  """Returns the jitted amax by one way, which is taken when it is traced."""
  may_move = request.param == "by_leaf"
  monkeypatch.setattr(_bits, "_may_move", lambda x: may_move)
  if request.param == "by_group":
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    take_for_an_accelerator(monkeypatch)
  return jitted_amax(request.param)


def take_for_an_accelerator(monkeypatch):
  """Makes amax read arrays on a CPU as it does on an accelerator."""
  monkeypatch.setattr(
    jax.lax, "platform_dependent", lambda arrays, cpu, default: default(arrays)
  )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_is_the_largest_magnitude_wherever_it_is(amax, dtype):
  rng = np.random.default_rng(0)
  for size in SIZES:
    for place in {0, size // 2, size - 1, *rng.integers(size, size=4)}:
      x = rng.uniform(-1, 1, size).astype(dtype)
      x[place] = -3.0
      assert amax([jnp.asarray(x)]) == 3.0, (size, place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  "bad",
  support.slow_but([np.nan], [np.nan, -np.nan, np.inf, -np.inf]),
)
def test_guarantee_5_nan_and_inf_are_seen_wherever_they_are(amax, dtype, bad):
  rng = np.random.default_rng(1)
  for size in SIZES:
    for place in {0, size // 2, size - 1, *rng.integers(size, size=4)}:
      x = rng.normal(size=size).astype(dtype)
      x[place] = bad
      np.testing.assert_array_equal(
        np.float32(amax([jnp.asarray(x)])), np.abs(np.float32(bad))
      )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, *EIGHT_BITS])
def test_every_value_of_a_narrow_dtype_is_its_own_amax(amax, dtype):
  unsigned = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
  values = np.arange(np.iinfo(unsigned).max + 1).astype(unsigned).view(dtype)
  found = jax.vmap(lambda x: amax([x]))(jnp.asarray(values))
  assert found.dtype == _bits.carrier(dtype)
  np.testing.assert_array_equal(
    np.float32(found), np.abs(values.astype(np.float32))
  )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_the_largest_of_many_8_bit_values_is_found(amax, dtype):
  values = np.arange(256, dtype=np.uint8).view(dtype)
  values = values[~np.isnan(values.astype(np.float32))]
  magnitudes = np.abs(values.astype(np.float32))
  smallest = values[magnitudes.argmin()]
  for size in (512, 4097, 16896):
    for value, magnitude in zip(values, magnitudes, strict=True):
      x = np.full(size, smallest)
      x[size // 3] = value
      assert amax([jnp.asarray(x)]) == magnitude, (size, value)


def test_nan_is_told_from_inf_beside_it(amax):
  x = np.full(40_000, np.inf, np.float32)
  x[20_001] = np.nan
  assert np.isnan(amax([jnp.asarray(x)]))


@pytest.mark.slow
def test_every_array_of_a_size_counts(amax):
  for size in (4096, 5000, 65_536):
    arrays = [np.zeros(size, np.float32) for _ in range(18)]
    for largest, array in enumerate(arrays):
      place = largest * size // 18
      array[place] = largest + 1
      assert amax([jnp.asarray(x) for x in arrays]) == largest + 1
    arrays[17][size - 1] = np.nan
    assert np.isnan(amax([jnp.asarray(x) for x in arrays]))


def test_every_array_counts_and_empty_ones_do_not(amax):
  sizes = (0, 7, 5000, 0, 600, 70_000, 1)
  for largest in range(len(sizes)):
    arrays = [np.zeros((size, 1), np.float32) for size in sizes]
    arrays[largest][-1:] = 2.0
    expected = 2.0 if sizes[largest] else 0.0
    assert amax([jnp.asarray(x) for x in arrays]) == expected
  assert amax([jnp.zeros((0, 3)), jnp.zeros(0)]) == 0


def test_arrays_of_any_rank_are_read_whole(amax):
  for shape in ((), (3, 5, 7), (64, 2, 300), (1, 50_000)):
    x = np.zeros(shape, np.float16)
    x[tuple(n - 1 for n in shape)] = -0.5
    assert amax([jnp.asarray(x)]) == 0.5


def test_subnormals_and_zeros_are_kept_apart(amax):
  smallest = np.float32(np.finfo(np.float32).smallest_subnormal)
  assert amax([jnp.zeros(5000)]) == 0
  bits = np.asarray(amax([jnp.full(5000, -smallest)])).view(np.uint32)
  assert bits == 1


def test_amax_under_vmap_is_that_of_each_row(amax):
  x = np.random.default_rng(2).normal(size=(3, 5000)).astype(np.float32)
  x[1, 4999] = np.nan
  rows = jax.vmap(lambda row: amax([row, row[:9]]))(jnp.asarray(x))
  np.testing.assert_array_equal(rows, np.max(np.abs(x), axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [(), ("data",), (None, "data")])
@pytest.mark.parametrize("devices", [1, 8])
def test_arrays_of_a_mesh_are_read_in_their_own_shape(devices, spec, axis_type):
  mesh = jax.make_mesh(
    (devices,),
    ("data",),
    axis_types=(axis_type,),
    devices=jax.devices()[:devices],
  )
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  x = jax.device_put(jnp.ones((64, 200)).at[63, 199].set(-4.0), sharding)
  jitted = jax.jit(_bits.amax)
  assert jitted([x]) == 4.0
  # A mesh of one device has nowhere to move an array to.
  may_fold = devices == 1 and axis_type is AxisType.Auto
  assert ("reshape" in jitted.lower([x]).as_text()) == may_fold
  with jax.set_mesh(mesh):
    assert jitted([x]) == 4.0


def reductions(arrays, platform):
  """Returns the shapes that amax reduces, compiled for a platform."""
  traced = jax.jit(lambda arrays: _bits.amax(arrays)).trace(arrays)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  return re.findall(r"stablehlo.reduce.*: \(tensor<(\w+)xui", text)


def test_the_platform_that_is_compiled_for_decides(monkeypatch):
  arrays = [jnp.ones((64, 200))]
  for default in ("cpu", "gpu"):
    monkeypatch.setattr(jax, "default_backend", lambda default=default: default)
    for accelerator in ("cuda", "rocm", "tpu"):
      assert "64x200" in reductions(arrays, accelerator)
    assert "25x32x16" in reductions(arrays, "cpu")


def test_an_accelerator_reads_arrays_of_one_shape_together(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)

  def count(leaves, *shape):
    return len(reductions([jnp.ones(shape)] * leaves, "cuda"))

  # One for each group of eight, and one for all groups.
  assert [count(n, 65, 64) for n in (10, 100)] == [2 + 1, 13 + 1]
  # Small ones are copied into one array.
  assert [count(n, 64, 63) for n in (10, 100)] == [2, 2]
  # On several devices they may be sharded without showing it.
  monkeypatch.setattr(jax, "device_count", lambda: 8)
  assert [count(n, 65, 64) for n in (10, 100)] == [10 + 1, 100 + 1]
  assert [count(n, 64, 63) for n in (10, 100)] == [10 + 1, 100 + 1]


def test_shardings_that_only_jit_knows_move_nothing(monkeypatch):
  take_for_an_accelerator(monkeypatch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  specs = [("data",), (None, "data"), ()] * 2
  shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
  arrays = [np.ones((64, 200), np.float32) for _ in specs]
  jitted = jax.jit(lambda x: _bits.amax(x), in_shardings=[shardings])
  for line in support.between_devices(jitted.lower(arrays).compile()):
    assert "all-reduce(" in line


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_device_reads_its_own_part_like_a_whole_array(check_vma):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  read = jax.shard_map(
    lambda split, whole: _bits.amax([split, whole])[None],
    mesh=mesh,
    in_specs=(PartitionSpec("data"), PartitionSpec()),
    out_specs=PartitionSpec("data"),
    check_vma=check_vma,
  )
  split = jnp.ones((64, 800)).at[63, 799].set(-4.0)
  whole = jnp.full((5000,), 2.0)
  np.testing.assert_array_equal(jax.jit(read)(split, whole), [2.0] * 7 + [4.0])
  # Of its 8 x 800 elements, all but 256.
  assert "12x32x16" in jax.jit(read).lower(split, whole).as_text()


def test_an_array_that_is_sharded_inside_shard_map_moves_nothing():
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  read = jax.shard_map(
    lambda x: _bits.amax([x])[None],
    mesh=mesh,
    in_specs=PartitionSpec("data"),
    out_specs=PartitionSpec("data"),
    axis_names={"data"},
  )
  # `shard_map` splits the rows, and jit the columns.
  sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
  x = jax.device_put(jnp.ones((64, 800)).at[63, 799].set(-4.0), sharding)
  step = jax.jit(read).lower(x).compile()
  (line,) = support.between_devices(step)
  assert "all-reduce(" in line
  np.testing.assert_array_equal(step(x), [1.0] * 3 + [4.0])


@pytest.mark.parametrize("sharded", [0, 1])
def test_one_array_of_a_mesh_is_enough_to_reshape_none(sharded):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  arrays = [jnp.ones((64, 200)), jnp.ones((64, 200))]
  arrays[sharded] = jax.device_put(
    arrays[sharded], NamedSharding(mesh, PartitionSpec("data"))
  )
  assert reductions(arrays, "cpu") == ["64x200", "64x200", "2"]


@pytest.mark.parametrize("devices", [1, 8])
def test_an_accelerator_groups_where_no_sharding_can_hide(monkeypatch, devices):
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  mesh = jax.make_mesh(
    (1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
  )
  alone = NamedSharding(mesh, PartitionSpec())
  seen = [jax.device_put(jnp.ones((64, 200)), alone)] * 2
  assert reductions(seen, "cuda") == ["64x200", "1"]
  one_unseen = [seen[0], jnp.ones((64, 200))]
  groups = ["64x200", "1"] if devices == 1 else ["64x200", "64x200", "2"]
  assert reductions(one_unseen, "cuda") == groups


def test_nothing_to_group_needs_no_second_program():
  for arrays in ([jnp.ones(())] * 3, [jnp.ones(()), jnp.zeros(())]):
    assert "cond" not in str(jax.make_jaxpr(_bits.amax)(arrays))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_symbolic_size_can_be_exported(platform):
  (rows,) = jax.export.symbolic_shape("rows")
  x = jax.ShapeDtypeStruct((rows, 100), jnp.float16)
  for function in (
    lambda x: _bits.amax([x]),
    ols.instruments.leaf_stats,
  ):
    exported = jax.export.export(jax.jit(function), platforms=[platform])(x)
    if platform == "cpu":
      value = np.full((3, 100), 2.0, np.float16)
      support.assert_same_bits(exported.call(value), jax.jit(function)(value))


@pytest.mark.parametrize("in_order", [True, False])
def test_every_fold_is_a_loop_of_its_own(in_order):
  amax = jax.jit(functools.partial(_bits.amax, in_order=in_order))
  # The first folds have no rest, and XLA may then merge them with the second.
  compiled = amax.lower([jnp.ones((512, 512))] * 4).compile()
  loops = re.split(r"\n(?=%|ENTRY)", compiled.as_text())
  merged = [loop for loop in loops if loop.count(" reduce(") > 1]
  if jax.__version_info__ <= (0, 10, 2):
    # It drops the barriers first. Only the folds of whole arrays take long.
    merged = [loop for loop in merged if "[512,32,16]" in loop]
  assert not merged


def test_an_array_without_a_mesh_is_folded():
  assert "25x32x16" in reductions([jnp.ones((64, 200))], "cpu")


def test_trees_of_other_shapes_or_dtypes_do_not_have_the_same_bits():
  zeros = np.zeros((2, 3), np.float32)
  assert support.same_bits({"w": zeros}, {"w": jnp.array(zeros)})
  assert not support.same_bits(zeros, zeros.reshape(3, 2))
  assert not support.same_bits(zeros, zeros[None])
  assert not support.same_bits(zeros, zeros.astype(np.int32))
  assert not support.same_bits(zeros, -zeros)
  assert not support.same_bits([zeros], (zeros,))
