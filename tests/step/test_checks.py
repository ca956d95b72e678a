"""NaN, inf and saturation are seen in every leaf, at every place."""

import functools
from typing import Any
from typing import NamedTuple

import flax.linen as nn
from flax.linen import fp8_ops
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import findings
from tests import support

# Of what vectorized kernels do with NaN and inf.
pytestmark = pytest.mark.usefixtures("full_compilation")

WITH_INF = [
  "float16",
  "bfloat16",
  "float32",
  "float64",
  "complex64",
  "complex128",
  "float8_e5m2",
]
WITH_NAN = [*WITH_INF, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"]
SIZES = (3, 5_000, 200_000)


FLOAT8_WITH_INF = {"float8_e3m4", "float8_e4m3", "float8_e5m2"}


@functools.cache
def compiled_examine(dtype, size, check):
  """Returns a jitted examination of ones with one other element."""

  @jax.jit
  def examine(index, value):
    leaf = jnp.where(jnp.arange(size) == index, value, jnp.ones((), dtype))
    # The examination is to read the leaf from memory, as it reads a gradient.
    leaf = jax.lax.optimization_barrier(leaf)
    return findings.examine(check, {"clean": jnp.ones(7), "leaf": leaf})

  return examine


def findings_at_every_place(dtype, size, value, check):
  """Returns what the check finds with `value` first, middle and last."""
  examine = compiled_examine(dtype, size, check)
  value = jnp.asarray(value).astype(dtype)
  return [examine(index, value) for index in (0, size // 2, size - 1)]


def every_value(dtype):
  """Returns all values of a dtype of 16 bits or fewer, as NumPy's."""
  dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
  return np.arange(np.iinfo(unsigned).max + 1).astype(unsigned).view(dtype)


def expected_overflow(values, *, saturating):
  """Returns for each of all values of a dtype if it is one, by NumPy."""
  with np.errstate(invalid="ignore"):
    magnitudes = np.abs(values.astype(np.float64))
  finite = np.isfinite(magnitudes)
  if not saturating:
    return ~finite
  return ~finite | (magnitudes == magnitudes[finite].max())


def find_each(check, values):
  """Returns what the check finds in each of the values alone."""
  examine = jax.jit(jax.vmap(functools.partial(findings.examine, check)))
  return examine(jnp.asarray(values))


@functools.cache
def jitted_examine(way):
  """Returns the jitted examination with these dtypes per leaf."""
  return jax.jit(
    functools.partial(findings.examine, ols.saturated(PER_LEAF[way]))
  )


@functools.cache
def examine_on_each_device():
  """Returns the jitted examination of an array over eight devices."""
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  check = ols.saturated(jnp.float16)
  return jax.jit(
    jax.shard_map(
      lambda leaf: findings.agree(findings.examine(check, leaf), ("data",)),
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=jax.P(),
    )
  )


class Layer(NamedTuple):
  """What a layer's gradients or their dtypes are kept in."""

  kernel: Any
  bias: Any


class CallableLayer(Layer):
  """A tree that can be called, as the layers of some libraries."""

  def __call__(self, x):
    return x


# Computed in float16, in float32, and in bfloat16, all kept in float32.
LAYERS = {
  "half": Layer(jnp.ones((2, 3)), jnp.ones(3)),
  "rest": {
    "single": [jnp.ones(2), jnp.ones(2)],
    "brain": jnp.ones(5),
  },
}
HALF_PATHS = {"half/kernel", "half/bias"}

# The same dtypes, said in several ways.
PER_LEAF = {
  "tree": {
    "half": Layer(jnp.float16, "float16"),
    "rest": {"single": [None, jnp.float32], "brain": jnp.bfloat16},
  },
  "prefix": {
    "half": jnp.float16,
    "rest": {"single": None, "brain": "bfloat16"},
  },
  "function": lambda path: {
    "half/kernel": np.float16,
    "half/bias": jnp.dtype("float16"),
    "rest/brain": ml_dtypes.bfloat16,
  }.get(path),
  "partial": jax.tree_util.Partial(
    lambda half, path: half if path.startswith("half/") else None, "float16"
  ),
}


def paths_of(tree):
  """Returns the path of each leaf, as a function of the path gets it."""
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree.leaves_with_path(tree)
  ]


def with_one_bad_leaf(tree, bad_path, value):
  """Returns the tree with the last element of one leaf replaced."""

  def replace(path, leaf):
    path = jax.tree_util.keystr(path, simple=True, separator="/")
    return leaf.at[..., -1].set(value) if path == bad_path else leaf

  return jax.tree.map_with_path(replace, tree)


def make_shard_mapped(tx, state, check_vma):
  """Returns the jitted update's overflow, on eight devices."""
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def overflow(stacked):
    return tx.update(jax.tree.map(lambda x: x[0], stacked), state)[1].overflow

  return jax.jit(
    jax.shard_map(
      overflow,
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=jax.P(),
      check_vma=check_vma,
    )
  )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", WITH_NAN)
def test_guarantee_5_every_nan_is_seen(dtype, size):
  with jax.enable_x64(True):
    values = [np.nan]
    if dtype.startswith("complex"):
      values = [complex(np.nan, 1.0), complex(1.0, np.nan)]
    for value in values:
      for found in findings_at_every_place(dtype, size, value, ols.nonfinite()):
        assert found.overflow
        assert jnp.isnan(found.amax)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", WITH_INF)
def test_guarantee_5_every_inf_is_seen(dtype, size):
  with jax.enable_x64(True):
    values = [np.inf, -np.inf]
    if dtype.startswith("complex"):
      values = [complex(np.inf, 1.0), complex(1.0, -np.inf)]
    for value in values:
      for found in findings_at_every_place(dtype, size, value, ols.nonfinite()):
        assert found.overflow
        assert found.amax == jnp.inf


@pytest.mark.parametrize("dtype", WITH_NAN)
def test_guarantee_5_every_saturated_value_is_seen(dtype):
  size = 5_000  # Of the others NaN and inf tell.
  with jax.enable_x64(True):
    largest = float(jnp.finfo(dtype).max)
    for value in (largest, -largest):
      for found in findings_at_every_place(dtype, size, value, ols.saturated()):
        assert found.overflow
        assert not jnp.isnan(found.amax)
      for found in findings_at_every_place(dtype, size, value, ols.nonfinite()):
        assert not found.overflow


def test_inf_and_minus_inf_together_are_not_taken_for_nan():
  leaf = jnp.array([jnp.inf, 1.0, -jnp.inf])
  found = findings.examine(ols.nonfinite(), leaf)
  assert found.overflow
  assert found.amax == jnp.inf


def test_large_finite_values_are_no_overflow():
  leaf = jnp.full(5_000, jnp.finfo(jnp.float32).max)
  found = findings.examine(ols.nonfinite(), leaf)
  assert not found.overflow
  assert found.amax == jnp.finfo(jnp.float32).max


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WITH_NAN)
def test_amax_is_the_largest_magnitude(dtype):
  values = np.array([0.25, -3.5, 1.0])
  with jax.enable_x64(True):
    leaf = jnp.asarray(values).astype(dtype)
    assert findings.examine(ols.nonfinite(), leaf).amax == 3.5


def test_amax_of_a_complex_leaf_is_the_largest_part():
  leaf = jnp.array([3.0 + 4.0j, -1.0 - 4.5j])
  assert findings.examine(ols.nonfinite(), leaf).amax == 4.5


def test_amax_keeps_a_subnormal():
  leaf = jnp.asarray(2.0**-24, jnp.float16)
  assert findings.examine(ols.nonfinite(), leaf).amax == 2.0**-24


def test_amax_of_a_float64_leaf_is_inf_only_if_it_was():
  with jax.enable_x64(True):
    found = findings.examine(ols.nonfinite(), jnp.asarray([1e300]))
    assert not found.overflow
    assert found.amax == jnp.finfo(jnp.float32).max
    assert found.amax.dtype == jnp.float32


def test_amax_is_taken_over_leaves_of_several_dtypes():
  tree = {
    "half": jnp.asarray([60_000.0], jnp.float16),
    "single": jnp.asarray([70_000.0], jnp.float32),
    "integer": jnp.asarray([2**30]),
  }
  found = findings.examine(ols.nonfinite(), tree)
  assert not found.overflow
  assert found.amax == 70_000.0


@pytest.mark.parametrize(
  ("check", "value", "expected"),
  [
    (ols.nonfinite(jnp.float16), 65504.0, False),
    (ols.nonfinite(jnp.float16), 65505.0, True),
    (ols.saturated(jnp.float16), 65503.0, False),
    (ols.saturated(jnp.float16), 65504.0, True),
    (ols.saturated(jnp.float16), -65504.0, True),
    (ols.saturated("float16"), jnp.nan, True),
    (ols.nonfinite(jnp.float64), jnp.inf, True),
    (ols.saturated(jnp.float8_e4m3fn), 448.0, True),
  ],
)
def test_the_dtype_is_that_of_the_computation(check, value, expected):
  found = findings.examine(check, jnp.array([1.0, value], jnp.float32))
  assert found.overflow == expected


def test_empty_trees_and_leaves_have_no_overflow():
  for tree in ({}, None, jnp.zeros((0, 3)), {"a": None}):
    found = findings.examine(ols.saturated(), tree)
    assert not found.overflow
    assert found.amax == 0


@pytest.mark.usefixtures("strict_promotion")
def test_checks_promote_nothing_implicitly():
  tree = [jnp.ones(3, d) for d in ("float16", "bfloat16", "float32", "int8")]
  assert not jax.jit(findings.examine, static_argnums=0)(
    ols.saturated("float16"), tree
  ).overflow


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 65504.0])
@pytest.mark.parametrize("device", [0, 3, 7])
def test_devices_agree_on_what_one_of_them_found(value, device):
  mapped = examine_on_each_device()
  leaf = jnp.ones((8, 5_000), jnp.float16)
  assert not mapped(leaf).overflow
  found = mapped(leaf.at[device, 17].set(value))
  assert found.overflow
  assert np.array_equal(found.amax, jnp.float32(value), equal_nan=True)


@pytest.mark.parametrize(
  ("dtype", "said"),
  [(jnp.int32, "int32"), ("half precision", "half"), ("f16", "float128")],
)
@pytest.mark.parametrize("check", [ols.nonfinite, ols.saturated])
def test_a_check_refuses_what_is_no_floating_dtype(check, dtype, said):
  with pytest.raises(TypeError, match=f"`dtype` must be a floating.*{said}"):
    check(dtype)


def test_checks_are_frozen_equal_and_hashable():
  assert ols.saturated(jnp.float16) == ols.saturated("float16")
  assert hash(ols.saturated(jnp.float16)) == hash(ols.saturated("float16"))
  assert ols.saturated(jnp.float16) != ols.nonfinite(jnp.float16)
  with pytest.raises(AttributeError):
    ols.nonfinite().dtype = jnp.float16


@pytest.mark.slow
@pytest.mark.parametrize("make_check", [ols.nonfinite, ols.saturated])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *support.FLOAT8])
def test_every_value_there_is_is_judged_as_numpy_judges_it(dtype, make_check):
  values = every_value(dtype)
  found = find_each(make_check(), values)
  np.testing.assert_array_equal(
    found.overflow,
    expected_overflow(values, saturating=make_check is ols.saturated),
  )
  np.testing.assert_array_equal(
    found.amax, np.abs(values.astype(np.float32)), strict=True
  )


@pytest.mark.slow
@pytest.mark.parametrize("make_check", [ols.nonfinite, ols.saturated])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *support.FLOAT8])
def test_every_value_is_judged_alike_when_it_is_stored_wider(dtype, make_check):
  values = every_value(dtype)
  found = find_each(make_check(dtype), values.astype(np.float32))
  np.testing.assert_array_equal(
    found.overflow,
    expected_overflow(values, saturating=make_check is ols.saturated),
  )


@pytest.mark.parametrize("dtype", support.FLOAT8)
def test_float8_types_with_inf_are_those_known_to_have_it(dtype):
  has_inf = np.isinf(every_value(dtype).astype(np.float32)).any()
  assert has_inf == (dtype in FLOAT8_WITH_INF)


def test_gradients_of_float8_parameters_are_float8():
  params = jnp.ones(3, jnp.float8_e4m3fn)

  @jax.jit
  def examine(cotangent):
    _, pullback = jax.vjp(lambda w: w.astype(jnp.float16), params)
    (scaled_grads,) = pullback(cotangent)
    assert scaled_grads.dtype == params.dtype
    return findings.examine(ols.saturated(jnp.float16), scaled_grads).overflow

  assert not examine(jnp.full(3, 416.0, jnp.float16))
  assert examine(jnp.full(3, 448.0, jnp.float16))
  assert examine(jnp.full(3, 30_000.0, jnp.float16))


@pytest.mark.slow
@pytest.mark.parametrize("value", [jnp.inf, float(jnp.finfo("bfloat16").max)])
def test_an_fp8_layer_shows_an_overflow_in_its_amax_history_alone(value):
  layer = nn.Dense(
    3,
    use_bias=False,
    dtype=jnp.bfloat16,
    dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
  )
  x = jnp.ones((4, 8), jnp.bfloat16)
  variables = layer.init(jax.random.key(0), x)

  @jax.jit
  def gradients_of(variables, cotangent):
    return jax.vjp(lambda v: layer.apply(v, x), variables)[1](cotangent)[0]

  cotangent = jnp.ones((4, 3), jnp.bfloat16)
  overwritten = "_overwrite_with_gradient"
  for _ in range(2):  # The scale comes from the amax of the step before.
    clean = gradients_of(variables, cotangent)
    variables = {**variables, overwritten: clean[overwritten]}
  clean = gradients_of(variables, cotangent)
  bad = gradients_of(variables, cotangent.at[0, 0].set(value))

  np.testing.assert_array_equal(
    bad["params"]["kernel"], clean["params"]["kernel"]
  )
  (scalings,) = bad[overwritten].values()
  history = scalings["output_grad_amax_history"]
  assert findings.examine(ols.saturated("bfloat16"), history[0]).overflow


@pytest.mark.parametrize("bad_path", paths_of(LAYERS))
@pytest.mark.parametrize("way", PER_LEAF)
def test_each_leaf_is_judged_by_the_dtype_that_computed_it(way, bad_path):
  examine = jitted_examine(way)
  assert not examine(LAYERS).overflow
  found = examine(with_one_bad_leaf(LAYERS, bad_path, -65504.0))
  assert found.overflow == (bad_path in HALF_PATHS)
  assert found.amax == 65504.0
  assert examine(with_one_bad_leaf(LAYERS, bad_path, jnp.nan)).overflow


@pytest.mark.parametrize("way", ["tree", "prefix", "function"])
def test_leaves_computed_in_bfloat16_have_its_limit(way):
  largest = float(jnp.finfo(jnp.bfloat16).max)
  check = ols.saturated(PER_LEAF[way])
  scaled_grads = with_one_bad_leaf(LAYERS, "rest/brain", largest)
  assert findings.examine(check, scaled_grads).overflow
  scaled_grads = with_one_bad_leaf(LAYERS, "rest/single/0", largest)
  assert not findings.examine(check, scaled_grads).overflow


def test_the_other_check_takes_dtypes_per_leaf_as_well():
  check = ols.nonfinite({"half": "float16", "rest": None})
  for value, expected in ((65504.0, False), (65505.0, True)):
    scaled_grads = with_one_bad_leaf(LAYERS, "half/bias", value)
    assert findings.examine(check, scaled_grads).overflow == expected
  scaled_grads = with_one_bad_leaf(LAYERS, "rest/brain", 65505.0)
  assert not findings.examine(check, scaled_grads).overflow


def test_a_tree_that_can_be_called_is_a_tree():
  check = ols.saturated(CallableLayer("float16", None))
  scaled_grads = CallableLayer(jnp.ones(2), jnp.full(2, 65504.0))
  assert not findings.examine(check, scaled_grads).overflow
  scaled_grads = CallableLayer(jnp.full(2, 65504.0), jnp.ones(2))
  assert findings.examine(check, scaled_grads).overflow


def test_a_function_is_asked_for_the_paths_of_gradients_only():
  paths = []
  scaled_grads = {
    "params": {"Dense_0": {"kernel": jnp.ones(2), "bias": None}},
    "complex": [jnp.ones(1, complex), jnp.arange(3)],
    "integer": np.zeros(2, jax.dtypes.float0),
    "key": jax.random.key(0),
    "masked": optax.MaskedNode(),
  }
  findings.examine(ols.saturated(paths.append), scaled_grads)
  assert sorted(paths) == ["complex/0", "params/Dense_0/kernel"]


def test_leaves_that_are_no_gradients_need_no_dtype_and_may_have_one():
  scaled_grads = {
    "none": None,
    "integers": jnp.full(2, 70_000),
    "float0": np.zeros(2, jax.dtypes.float0),
    "key": jax.random.key(0),
    "masked": optax.MaskedNode(),
    "numbers": jnp.ones(2),
  }
  for dtype in (None, jnp.float16):
    check = ols.saturated(dict.fromkeys(scaled_grads, dtype))
    found = findings.examine(check, scaled_grads)
    assert not found.overflow
    assert found.amax == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("way", PER_LEAF)
def test_devices_agree_on_what_one_leaf_of_one_of_them_shows(way, check_vma):
  check = ols.saturated(PER_LEAF[way])
  tx = ols.loss_scaling(
    optax.sgd(1.0), ols.FixedLossScale(), check=check, axis_name="data"
  )
  overflow = make_shard_mapped(tx, tx.init(LAYERS), check_vma)
  clean = jax.tree.map(lambda x: jnp.stack([x] * 8), LAYERS)
  for bad_path in paths_of(LAYERS):
    for device in (0, 5, 7):
      bad = with_one_bad_leaf(LAYERS, bad_path, 65504.0)
      scaled_grads = jax.tree.map(
        lambda all_, one, device=device: all_.at[device].set(one), clean, bad
      )
      assert overflow(scaled_grads) == (bad_path in HALF_PATHS)


def test_leaves_of_one_limit_are_read_together_however_it_is_said():
  scaled_grads = [jnp.ones(5000), jnp.ones(7), jnp.ones(5000)]

  def lowered(dtype):
    check = ols.saturated(dtype)
    # Through one function, so that the texts name it alike.
    return jax.jit(lambda x: findings.examine(check, x)).lower(scaled_grads)

  uniform = lowered("float16").as_text()
  assert lowered(["float16"] * 3).as_text() == uniform
  assert lowered(lambda path: "float16").as_text() == uniform
  assert lowered(["float16", None, "float16"]).as_text() != uniform


@pytest.mark.parametrize(
  "dtype",
  [
    {"half": jnp.float16},
    {"half": [jnp.float16, None], "rest": None},
    {"half": Layer({"w": None}, None), "rest": None},
    [jnp.float16, None],
  ],
)
def test_dtypes_that_do_not_fit_the_gradients_are_shown_beside_them(dtype):
  check = ols.saturated(dtype)
  with pytest.raises(ValueError, match="`dtype` must be a tree of") as caught:
    findings.examine(check, LAYERS)
  assert str(jax.tree.structure(LAYERS)) in str(caught.value)
  said = jax.tree.structure(dtype, is_leaf=lambda x: x is None)
  assert f"got {said} for" in str(caught.value)


@pytest.mark.parametrize("wrong", [jnp.int32, "float61", 2.0, len])
@pytest.mark.parametrize("check", [ols.nonfinite, ols.saturated])
def test_a_check_names_the_leaf_that_has_no_floating_dtype(check, wrong):
  with pytest.raises(TypeError, match=r"`dtype` must be .*got .*'a/1/kernel'"):
    check({"a": [None, Layer(wrong, jnp.float16)]})


def test_a_check_refuses_arrays_in_place_of_their_dtypes():
  for wrong in (jnp.ones(2), LAYERS, np.ones(2, np.float16)):
    with pytest.raises(TypeError, match="`dtype` must be a floating-point"):
      ols.saturated(wrong)


@pytest.mark.parametrize("wrong", [jnp.int32, "float61", 16, {}])
def test_what_a_function_returns_is_checked_while_tracing(wrong):
  check = ols.saturated(lambda path: wrong if path == "half/bias" else None)
  with pytest.raises(TypeError, match=r"`dtype` must be .*got .*'half/bias'"):
    jax.jit(functools.partial(findings.examine, check))(LAYERS)


def test_checks_of_a_function_or_a_tuple_of_dtypes_are_hashable():
  def half(path):
    return jnp.float16

  assert hash(ols.saturated(half)) == hash(ols.saturated(half))
  assert ols.saturated((jnp.float16, None)) == ols.saturated(("float16", None))
  assert len({ols.saturated((jnp.float16,)), ols.saturated(("float16",))}) == 1


def test_bfloat16_does_not_round_the_limit_of_float16():
  # 65536 is the bfloat16 next to 65504, and above it.
  check = ols.nonfinite(jnp.float16)
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), check=check)
  for value, overflow in ((65280.0, False), (65536.0, True)):
    gradient = jnp.full(3, value, jnp.bfloat16)
    assert tx.update(gradient, tx.init(gradient))[1].overflow == overflow
