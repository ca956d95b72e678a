"""Bits of floats: amax by three ways, and roundings that XLA keeps.

The authority is NumPy, and the compiled program for what is read and moved.
"""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._base import bits as _bits
from tests import support

pytestmark = pytest.mark.usefixtures("full_compilation")

# Around a block of 32 * 16, a block of blocks, and the size of small arrays.
SIZES = (1, 511, 513, 4095, 4096, 4097, 16384, 16896, 40_001)


def every(dtype):
  """Returns every number of a dtype of 16 bits at most."""
  bits = jnp.finfo(dtype).bits
  unsigned = f"uint{max(bits, 8)}"
  return np.arange(2**bits, dtype=unsigned).view(np.dtype(dtype))


@functools.cache
def jitted_amax(way):
  """Returns the jitted amax, shared by the tests of one way."""
  return jax.jit(
    lambda arrays, way=way: _bits.amax(arrays, scale=jnp.float32(8))
  )


# The platform, and whether arrays may be sharded.
WAYS = {
  "by_folding": ("cpu", False),
  "by_leaf": ("cpu", True),
  "by_group": ("tpu", False),
  "by_row": ("cuda", False),
  "of_shards": ("rocm", True),
}


@pytest.fixture(params=WAYS)
def amax(request, monkeypatch):
  """Returns the jitted amax by one way, which is taken when it is traced."""
  platform, may_move = WAYS[request.param]
  monkeypatch.setattr(_bits, "_may_move", lambda x: may_move)
  monkeypatch.setattr(_bits, "_may_be_sharded_unseen", lambda x: may_move)
  support.take_for(platform, monkeypatch)
  return jitted_amax(request.param)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_guarantee_5_amax_nan_and_inf_are_seen_wherever_they_are(amax, dtype):
  rng = np.random.default_rng(1)
  for size in SIZES:
    x = rng.uniform(-1, 1, size).astype(dtype)
    for place in {0, size - 1, *rng.integers(size, size=2)}:
      for value in (-3.0, -np.inf, np.nan):
        changed = x.copy()
        changed[place] = value
        found = np.float32(amax([jnp.asarray(changed)]))
        np.testing.assert_array_equal(found, np.abs(value), f"{size}, {place}")


def test_every_array_counts_and_empty_ones_do_not(amax):
  # More of one size than share a kernel, and others of all sizes.
  sizes = *[5000] * 10, *[65_536] * 2, 0, 7, 600, 1
  for largest, size in enumerate(sizes):
    arrays = [np.zeros((size, 1), np.float32) for size in sizes]
    arrays[largest][-1:] = -2.0
    expected = 2.0 if size else 0.0
    assert amax([jnp.asarray(x) for x in arrays]) == expected, largest
  assert amax([jnp.zeros((0, 3)), jnp.zeros(0)]) == 0
  assert np.isnan(amax([jnp.full(40_000, jnp.inf).at[20_001].set(jnp.nan)]))
  assert amax([jnp.zeros((64, 2, 300)).at[63, 1, 299].set(-0.5)]) == 0.5


def test_subnormals_and_zeros_are_kept_apart(amax):
  smallest = np.float32(np.finfo(np.float32).smallest_subnormal)
  assert amax([jnp.zeros(5000)]) == 0
  bits = np.asarray(amax([jnp.full(5000, -smallest)])).view(np.uint32)
  assert bits == 1


@pytest.mark.parametrize(
  ("devices", "axis_type"), [(1, "Auto"), (8, "Auto"), (8, "Explicit")]
)
def test_arrays_of_a_mesh_are_read_in_their_own_shape(devices, axis_type):
  mesh = support.make_mesh(axis_type, data=devices)
  sharding = jax.NamedSharding(mesh, jax.P(None, "data"))
  x = jax.device_put(jnp.ones((64, 200)).at[63, 199].set(-4.0), sharding)
  jitted = jax.jit(_bits.amax)
  assert jitted([x]) == 4.0
  # A mesh of one device has nowhere to move an array to.
  assert ("reshape" in jitted.lower([x]).as_text()) == (devices == 1)
  with jax.set_mesh(mesh):
    assert jitted([x]) == 4.0


def reductions(arrays, platform):
  """Returns the shapes that amax reduces on a platform, and over what axes."""
  traced = jax.jit(lambda arrays: _bits.amax(arrays)).trace(arrays)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  found = re.findall(r"dimensions = \[([\d, ]+)\] : \(tensor<(\w+)xui", text)
  return [f"{shape} over {axes}" for axes, shape in found]


def test_the_platform_that_is_compiled_for_decides(monkeypatch):
  arrays = [jnp.ones((64, 200))]
  for default in ("cpu", "gpu"):
    monkeypatch.setattr(jax, "default_backend", lambda default=default: default)
    assert "64x200 over 0, 1" in reductions(arrays, "cuda")
    # The CPU's vectors hold the last axis.
    assert "25x32x16 over 1" in reductions(arrays, "cpu")


def test_an_accelerator_reads_arrays_together(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)

  def count(platform, *shapes, leaves=100):
    arrays = [jnp.ones(shape) for shape in shapes * leaves]
    return len(reductions(arrays, platform))

  # One for 64 arrays of one size, and one for what they leave.
  assert count("cuda", (65, 64), (64, 65)) == 4 + 1
  assert count("rocm", (64, 63), (7,)) == 1
  # A TPU would have to copy arrays of another shape.
  assert count("tpu", (65, 64), (64, 65)) == 2 + 2 + 1
  # On several devices they may be sharded without showing it.
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  assert count("tpu", (65, 64), (64, 65)) == 200


def assert_one_number_crosses(compiled):
  """Only all-reduces of scalars are between devices."""
  for line in support.between_devices(compiled):
    shapes, reduces, _ = line.split(" = ")[1].partition(" all-reduce(")
    assert reduces and not re.search(r"\[\d", shapes), line


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_shardings_that_only_jit_knows_move_nothing(platform, monkeypatch):
  support.take_for(platform, monkeypatch)
  mesh = support.make_mesh()
  specs = [("data",), (None, "data"), ()] * 2
  shardings = [jax.NamedSharding(mesh, jax.P(*spec)) for spec in specs]
  for shape in ((64, 200), (2048, 1024)):
    arrays = [np.ones(shape, np.float32) for _ in specs]
    jitted = jax.jit(
      lambda x: _bits.amax(x, scale=jnp.float32(8)), in_shardings=[shardings]
    )
    assert_one_number_crosses(jitted.lower(arrays).compile())


LAYOUTS = [
  ("data", "model"),
  (None, "data"),
  ("model", None),
  (("data", "model"), None),
]


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_gpu_splits_an_array_of_a_mesh_where_it_is_split(
  axis_type, monkeypatch
):
  support.take_for("cuda", monkeypatch)
  mesh = support.make_mesh(axis_type, data=4, model=2)
  values = [np.ones((256, 2048), np.float32) for _ in LAYOUTS]
  values[2][255, 2047] = -4.0
  arrays = [
    jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    for x, spec in zip(values, LAYOUTS, strict=True)
  ]
  with jax.set_mesh(mesh):
    jitted = jax.jit(lambda x: _bits.amax(x, scale=jnp.float32(8)))
    compiled = jitted.lower(arrays).compile()
  assert compiled(arrays) == 4.0
  assert_one_number_crosses(compiled)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_device_reads_its_own_part_like_a_whole_array(check_vma):
  read = support.on_each_device(
    lambda split, whole: _bits.amax([split, whole])[None],
    support.SPREAD,
    check_vma,
    (support.SPREAD, jax.P()),
  )
  split = jnp.ones((64, 800)).at[63, 799].set(-4.0)
  whole = jnp.full((5000,), 2.0)
  np.testing.assert_array_equal(jax.jit(read)(split, whole), [2.0] * 7 + [4.0])
  # Of its 8 x 800 elements, all but 256.
  assert "12x32x16" in jax.jit(read).lower(split, whole).as_text()


def test_a_scale_that_varies_along_other_axes_shares_no_operand():
  read = jax.shard_map(
    lambda x, scale: _bits.amax([x], scale=scale[0]),
    mesh=support.make_mesh(data=4, model=2),
    in_specs=(jax.P(), jax.P("data")),
    out_specs=jax.P(),  # Which amax would not fit if it varied like the scale.
    axis_names={"data"},
  )
  assert jax.jit(read)(jnp.ones((64, 800)), jnp.ones(4)) == 1.0


def test_an_array_that_is_sharded_inside_shard_map_moves_nothing():
  mesh = support.make_mesh(data=4, model=2)
  read = jax.shard_map(
    lambda x: _bits.amax([x])[None],
    mesh=mesh,
    in_specs=jax.P("data"),
    out_specs=jax.P("data"),
    axis_names={"data"},
  )
  # `shard_map` splits the rows, and jit the columns.
  sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
  x = jax.device_put(jnp.ones((64, 800)).at[63, 799].set(-4.0), sharding)
  step = jax.jit(read).lower(x).compile()
  (line,) = support.between_devices(step)
  assert "all-reduce(" in line
  np.testing.assert_array_equal(step(x), [1.0] * 3 + [4.0])


@pytest.mark.parametrize("sharded", [0, 1])
def test_one_array_of_a_mesh_is_enough_to_reshape_none(sharded):
  mesh = support.make_mesh()
  arrays = [jnp.ones((64, 200)), jnp.ones((64, 200))]
  arrays[sharded] = jax.device_put(
    arrays[sharded], jax.NamedSharding(mesh, jax.P("data"))
  )
  of_each = "64x200 over 0, 1"
  assert reductions(arrays, "cpu") == [of_each, of_each]
  assert "cond" not in str(jax.make_jaxpr(_bits.amax)([jnp.ones(())] * 3))


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


# All that have a sign. The last one has neither inf nor NaN.
NARROWER = ("float16", "bfloat16", *support.SIGNED_FLOAT8, "float4_e2m1fn")


def between(name, wide):
  """Returns every number of a dtype, every midpoint, and their neighbors."""
  with np.errstate(invalid="ignore"):
    numbers = np.unique(every(name).astype(np.float64))
  numbers = numbers[np.isfinite(numbers)]
  # From the midpoint of this number and the largest one, all are too large.
  beyond = 2 * numbers[-1] - numbers[-2]
  numbers = np.array([-beyond, *numbers, beyond])
  ends = [np.inf, np.nan, 0.0, 1e-30, 3e38]
  x = np.concatenate(
    [numbers, (numbers[1:] + numbers[:-1]) / 2, ends, np.negative(ends)]
  )
  with np.errstate(over="ignore"):
    x = x.astype(wide)
    return np.concatenate(
      [x, *(np.nextafter(x, wide(y)) for y in (9e99, -9e99))]
    )


def cast(x, name):
  with np.errstate(all="ignore"):
    return x.astype(jnp.dtype(name))


@pytest.mark.parametrize("name", NARROWER)
def test_a_rounding_is_the_cast_of_numpy(name):
  x = between(name, np.float32)
  found = np.asarray(jax.jit(lambda x: _bits.rounded(x, name))(x))
  assert found.dtype == np.float32
  expected = np.float32(cast(x, name))
  is_kept = np.isnan(x) | (x == 0)
  np.testing.assert_array_equal(found[~is_kept], expected[~is_kept])
  support.assert_same_bits(np.isnan(found[is_kept]), np.isnan(x[is_kept]))
  np.testing.assert_array_equal(
    np.signbit(found[x == 0]), np.signbit(x[x == 0])
  )
  # Casting what is rounded already gives the same bits, -0.0 included.
  is_nan = np.isnan(expected) | np.isnan(x)
  support.assert_same_bits(cast(found, name)[~is_nan], cast(x, name)[~is_nan])


def test_a_float64_is_rounded_once():
  x = between("float16", np.float64)
  with jax.enable_x64(True):
    found = np.asarray(jax.jit(lambda x: _bits.rounded(x, "float16"))(x))
    assert _bits.held(jnp.float64(0.1)) == 0.1
  assert found.dtype == np.float64
  np.testing.assert_array_equal(found, np.float64(cast(x, "float16")))
  np.testing.assert_array_equal(np.signbit(found), np.signbit(x))


@pytest.mark.parametrize("value", [1e-7, 70_000.0])
def test_the_derivative_of_a_rounding_is_that_of_a_cast(value):
  for derivative in (jax.grad, jax.jacfwd):
    found = derivative(lambda x: _bits.rounded(x, jnp.float16))(value)
    assert found == 1
