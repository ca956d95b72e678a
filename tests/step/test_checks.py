"""Checks of gradients: each kind of overflow, amax, and the range in use."""

import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import findings
from optax_lossscale._step import reasons
from tests import support
from tests.support import SMALLEST

F16_MAX, BF16_MAX, F32_MAX = (
  float(jnp.finfo(x).max) for x in ("float16", "bfloat16", "float32")
)
BF16 = jnp.bfloat16
nonfinite, saturated = ols.nonfinite, ols.saturated
FLOATS = ("float16", "bfloat16", "float32", "float64")
WITH_INF = (*FLOATS, "complex64", "complex128", "float8_e5m2")
WITHOUT_INF = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")


@pytest.mark.usefixtures("full_compilation")  # Vectorized kernels treat NaN.
@pytest.mark.parametrize("dtype", [*WITH_INF, *WITHOUT_INF])
def test_guarantee_5_nan_inf_and_saturation_are_seen_at_every_place(dtype):
  size = 5_000

  @jax.jit
  def find(place, value):
    leaf = jnp.where(jnp.arange(size) == place, value, jnp.ones((), dtype))
    # The examination must read the leaf from memory, as it reads a gradient.
    tree = {"clean": jnp.ones(7), "leaf": jax.lax.optimization_barrier(leaf)}
    return [
      findings.examine(check, tree) for check in (nonfinite(), saturated())
    ]

  with jax.enable_x64(True):
    largest = float(jnp.finfo(dtype).max)
    values = [np.nan, largest, -largest]
    values += [np.inf, -np.inf] if dtype in WITH_INF else []
    if dtype.startswith("complex"):
      values = [y for x in values for y in (complex(x, 1), complex(1, x))]
    for value in values:
      magnitude = np.max(np.abs([np.real(value), np.imag(value)]))
      for place in (0, size // 2, size - 1):
        found, judged = find(place, jnp.asarray(value).astype(dtype))
        assert found.overflow == (not np.isfinite(magnitude))
        assert judged.overflow, (value, place)
        # amax is float32, and a number stays a number.
        is_large = F32_MAX < magnitude < np.inf
        np.testing.assert_equal(
          float(found.amax), F32_MAX if is_large else magnitude
        )


NO_GRADIENTS = {
  "none": None,
  "integers": jnp.full(2, 70_000),
  "float0": np.zeros(2, jax.dtypes.float0),
  "key": jax.random.key(0),
  "masked": optax.MaskedNode(),
}
F32, ONE = np.float32, np.ones(1, np.float32)
MANY = (np.float16([6e4]), F32([7e4]), np.int32([2**30]))
# A check and a tree of gradients; then whether they overflow, and amax.
EXAMINED = {
  "complex": (nonfinite(), np.complex64([3 + 4j, -1 - 4.5j]), False, 4.5),
  "several dtypes": (nonfinite(), MANY, False, 7e4),
  "nothing": (saturated(), {}, False, 0.0),
  "None": (saturated(), {"a": None}, False, 0.0),
  "no elements": (saturated(), np.zeros((0, 3), F32), False, 0.0),
  "no gradients": (saturated("float16"), [NO_GRADIENTS, ONE], False, 1.0),
  "beyond it": (nonfinite(jnp.float16), F32([65505]), True, 65505.0),
  "below it": (saturated("float16"), F32([65503]), False, 65503.0),
  "inf, a wide check": (nonfinite("float64"), F32([np.inf]), True, np.inf),
  # 65536 is the bfloat16 next to 65504, and above it.
  "a bfloat16 below": (nonfinite("float16"), BF16(65280.0), False, 65280.0),
  "a bfloat16 above": (nonfinite("float16"), BF16(65536.0), True, 65536.0),
}


@pytest.mark.parametrize(
  ("check", "tree", "overflow", "amax"), EXAMINED.values(), ids=EXAMINED
)
def test_an_examination_finds_overflow_and_amax(check, tree, overflow, amax):
  found = findings.examine(check, tree)
  assert found.overflow == overflow
  np.testing.assert_equal(np.asarray(found.amax), np.float32(amax))


def test_float64_beyond_float32_is_not_reported_as_inf():
  values = (1e300, np.float64(-1e300), np.array([1e300, 1.0]))
  for amax in values:
    found = findings.examine(nonfinite(), jnp.ones(1), amax=amax)
    assert found.amax == F32_MAX
    assert not found.overflow
  with jax.enable_x64(True):
    wide = jnp.asarray([-1e300])
    for found in (
      findings.examine(nonfinite(), wide),
      findings.examine(nonfinite(), jnp.ones(1), amax=wide),
      # No float32 can reach the limit of float64.
      findings.examine(saturated(), wide / 1e200, amax=F32_MAX),
    ):
      assert not found.overflow
      assert found.amax == F32_MAX
      assert found.amax.dtype == jnp.float32
    assert findings.examine(saturated("float64"), wide).range_used == SMALLEST


@pytest.mark.parametrize(
  "dtype",
  support.slow_but(
    ["float16", "float8_e5m2", "float8_e4m3fn"],
    ["float16", "bfloat16", *support.FLOAT8],
  ),
)
def test_guarantee_5_every_value_is_judged_as_numpy_judges_it(dtype):
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  unsigned = np.dtype(f"uint{8 * kind.itemsize}")
  values = np.arange(np.iinfo(unsigned).max + 1).astype(unsigned).view(kind)
  with np.errstate(invalid="ignore"):
    magnitudes = np.abs(values.astype(np.float32))
  is_finite = np.isfinite(magnitudes)
  is_largest = magnitudes == magnitudes[is_finite].max()
  narrow, wide = jnp.asarray(values), jnp.asarray(values.astype(np.float32))

  def find(check, values):
    return jax.vmap(functools.partial(findings.examine, check))(values)

  @jax.jit
  def find_all():
    return [
      (find(make(), narrow), find(make(dtype), wide))
      for make in (nonfinite, saturated)
    ]

  expected = (~is_finite, ~is_finite | is_largest)
  for (own, named), overflow in zip(find_all(), expected, strict=True):
    np.testing.assert_array_equal(own.overflow, overflow)
    np.testing.assert_array_equal(named.overflow, overflow)
    np.testing.assert_array_equal(own.amax, magnitudes)


@pytest.mark.parametrize(
  ("largest", "scale", "fits"),
  [
    (np.float32(F32_MAX / 8), 0.125, True),
    (np.nextafter(np.float32(F32_MAX / 8), np.float32(np.inf)), 0.125, False),
    (np.float32(F32_MAX), 1.0, True),
    (np.float16(65504), 2.0**-112, True),
    (np.float16(65504), 2.0**-113, False),
    (np.complex64(complex(1, -F32_MAX / 8)), 0.125, True),
    (np.complex64(complex(1, -F32_MAX / 4)), 0.125, False),
    (np.float64(1e300), 0.125, True),
    (np.float64(1e308), 0.125, False),
    (np.complex128(complex(1e300, 1)), 0.125, True),
  ],
)
def test_guarantee_5_a_quotient_beyond_the_range_of_its_dtype_is_an_overflow(
  largest, scale, fits
):
  with jax.enable_x64(largest.dtype in ("float64", "complex128")):
    gradient = jnp.ones(3, largest.dtype).at[1].set(largest)
    loss_scale = jnp.float32(scale)
    found = findings.examine(nonfinite(), gradient, loss_scale=loss_scale)
    assert found.overflow == (not fits)
    assert not findings.examine(nonfinite(), gradient).overflow
    quotient = ols.unscale(gradient, loss_scale)
    assert jnp.all(jnp.isfinite(quotient)) == fits


# A dtype for each leaf.


class Layer(NamedTuple):
  """Holds a layer's gradients, or their dtypes."""

  kernel: Any
  bias: Any


class CallableLayer(Layer):
  """A tree that can be called, like the layers of some libraries."""

  def __call__(self, x):
    return x


# Computed in float16, in float32, and in bfloat16, all stored in float32.
LAYERS = {
  "half": Layer(jnp.ones((2, 3)), jnp.ones(3)),
  "rest": {"single": [jnp.ones(2), jnp.ones(2)], "brain": jnp.ones(5)},
}
LIMITS = {
  "half/kernel": F16_MAX,
  "half/bias": F16_MAX,
  "rest/single/0": F32_MAX,
  "rest/single/1": F32_MAX,
  "rest/brain": BF16_MAX,
}
# The same dtypes, given in several ways.
PER_LEAF = {
  "tree": {
    "half": Layer(jnp.float16, "float16"),
    "rest": {"single": [None, jnp.float32], "brain": jnp.bfloat16},
  },
  "prefix": {"half": np.float16, "rest": {"single": None, "brain": "bfloat16"}},
  "function": lambda path: {
    "half/kernel": np.float16,
    "half/bias": jnp.dtype("float16"),
    "rest/brain": ml_dtypes.bfloat16,
  }.get(path),
  "partial": jax.tree_util.Partial(
    lambda dtypes, path: dtypes.get(path.rpartition("/")[0], dtypes.get(path)),
    {"half": "float16", "rest/brain": "bfloat16"},
  ),
}


def with_one_bad_leaf(bad_path, value):
  """Returns `LAYERS` with the last element of one leaf replaced."""

  def replace(path, leaf):
    path = jax.tree_util.keystr(path, simple=True, separator="/")
    return leaf.at[..., -1].set(value) if path == bad_path else leaf

  return jax.tree.map_with_path(replace, LAYERS)


@pytest.mark.parametrize("way", PER_LEAF)
def test_each_leaf_is_judged_by_the_dtype_that_computed_it(way):
  check = saturated(PER_LEAF[way])
  assert not findings.examine(check, LAYERS).overflow
  for path, limit in LIMITS.items():
    for value in (-F16_MAX, BF16_MAX, jnp.nan):
      found = findings.examine(check, with_one_bad_leaf(path, value))
      assert found.overflow == (not abs(value) < limit), (path, value)


def test_a_tree_that_can_be_called_is_a_tree():
  check = saturated(CallableLayer("float16", None))
  largest, one = jnp.full(2, 65504.0), jnp.ones(2)
  assert not findings.examine(check, CallableLayer(one, largest)).overflow
  assert findings.examine(check, CallableLayer(largest, one)).overflow


def test_a_function_is_asked_for_the_paths_of_gradients_only():
  paths = []
  scaled_grads = {
    "params": {"Dense_0": {"kernel": jnp.ones(2), "bias": None}},
    "complex": [jnp.ones(1, complex), jnp.arange(3)],
    **NO_GRADIENTS,
  }
  findings.examine(saturated(paths.append), scaled_grads)
  assert sorted(paths) == ["complex/0", "params/Dense_0/kernel"]


def test_leaves_of_one_limit_are_read_together_however_it_is_given():
  scaled_grads = [jnp.ones(5000), jnp.ones(7), jnp.ones(5000)]

  def lowered(dtype):
    check = saturated(dtype)
    return (
      jax.jit(lambda x: findings.examine(check, x))
      .lower(scaled_grads)
      .as_text()
    )

  uniform = lowered("float16")
  assert lowered(["float16"] * 3) == uniform
  assert lowered(lambda path: "float16") == uniform
  assert lowered(["float16", None, "float16"]) != uniform


def test_checks_are_frozen_equal_and_hashable():
  def half(path):
    return jnp.float16

  for one, same in (
    (saturated(jnp.float16), saturated("float16")),
    (saturated((jnp.float16, None)), saturated(("float16", None))),
    (saturated(half), saturated(half)),
  ):
    assert one == same and hash(one) == hash(same)
  assert saturated(jnp.float16) != nonfinite(jnp.float16)
  with pytest.raises(AttributeError):
    nonfinite().dtype = jnp.float16


@pytest.mark.parametrize(
  ("dtype", "got"),
  [
    (jnp.int32, "int32"),
    ("half precision", "half"),
    ("f16", "float128"),
    (jnp.ones(2), ""),
    ({"a": [None, Layer(jnp.int32, "float16")]}, ".*'a/1/kernel'"),
    ({"a": [None, Layer(2.0, "float16")]}, ".*'a/1/kernel'"),
    ({"a": [None, Layer(len, "float16")]}, ".*'a/1/kernel'"),
  ],
)
def test_a_check_refuses_anything_but_floating_dtypes(dtype, got):
  for make in (nonfinite, saturated):
    with pytest.raises(TypeError, match=rf"`dtype` must be a floating.*{got}"):
      make(dtype)


@pytest.mark.parametrize("wrong", [jnp.int32, "float61", 16, {}])
def test_what_a_function_returns_is_checked_while_tracing(wrong):
  check = saturated(lambda path: wrong if path == "half/bias" else None)
  with pytest.raises(TypeError, match=r"`dtype` must be .*got .*'half/bias'"):
    jax.eval_shape(functools.partial(findings.examine, check), LAYERS)


@pytest.mark.parametrize(
  "dtype",
  [
    {"half": jnp.float16},
    {"half": Layer({"w": None}, None), "rest": None},
    [jnp.float16, None],
  ],
  ids=["missing", "deeper", "list"],
)
def test_dtypes_that_do_not_fit_the_gradients_are_shown_beside_them(dtype):
  with pytest.raises(ValueError, match="`dtype` must be a tree of") as caught:
    findings.examine(saturated(dtype), LAYERS)
  given = jax.tree.structure(dtype, is_leaf=lambda x: x is None)
  assert f"got {given} for gradients {jax.tree.structure(LAYERS)}" in str(
    caught.value
  )


# Flags and numbers from the caller.


@pytest.mark.parametrize(
  ("amax", "largest"),
  [
    (7.0, 7.0),
    (1.0, 4.0),
    (-7.0, 7.0),
    (np.float32(7), 7.0),
    ({"a": jnp.float32(5), "b": [jnp.array([6.0, 1.0])]}, 6.0),
    (jnp.zeros(0), 4.0),
    ({}, 4.0),
    (math.inf, math.inf),
    ({"a": jnp.float32(-math.inf), "b": jnp.ones(40)}, math.inf),
    ([math.nan, 1.0], math.nan),
  ],
)
def test_amax_from_elsewhere_counts_with_the_gradients(amax, largest):
  gradients = jnp.array([4.0, -1.0], jnp.float16)
  found = findings.examine(nonfinite(), gradients, amax=amax)
  np.testing.assert_equal(float(found.amax), largest)
  assert found.overflow == (not math.isfinite(largest))


@pytest.mark.parametrize(
  ("check", "amax", "overflow"),
  [
    (saturated("float16"), 65504.0, True),
    (saturated("float16"), 65472.0, False),
    (nonfinite("float16"), 65504.0, False),
    (nonfinite("float16"), 65505.0, True),
    (nonfinite("float16"), [1.0, np.float64(1e300)], True),
    (nonfinite(), 1e30, False),
    (saturated(lambda path: "float16" if path == "0" else None), 7e4, True),
  ],
)
def test_amax_from_elsewhere_is_held_against_the_smallest_limit(
  check, amax, overflow
):
  found = findings.examine(check, [jnp.ones(1), jnp.ones(1)], amax=amax)
  assert found.overflow == overflow
  narrow = [jnp.ones(1, jnp.float16), jnp.ones(1)]
  assert findings.examine(nonfinite(), narrow, amax=1e5).overflow


def test_amax_may_be_traced_and_in_a_box():
  examine = jax.jit(
    lambda x: (
      findings.examine(nonfinite(), jnp.ones(2), amax=support.Boxed(x)).amax
    )
  )
  assert examine(jnp.float32(3)) == 3


NOT_NUMBERS = {
  "text": "8",
  "bytes": b"8",
  "memoryview": memoryview(b"8"),
  "datetime": np.datetime64("2020"),
  "objects": np.array([None]),
  "function": jnp.isnan,
}
REFUSED = {
  "overflow": {**NOT_NUMBERS, "None": None, "dict": {"a": 1}, "list": [None]},
  "skip": {**NOT_NUMBERS, "None": None, "dict": {"a": 1}, "list": [True, None]},
  "amax": {
    **NOT_NUMBERS,
    "bool": True,
    "bools": np.array([True]),
    "flag": jnp.array(True),
    "tree of None": {"a": None},
    "object": object(),
  },
}


@pytest.mark.parametrize(
  ("name", "value"),
  [
    pytest.param(name, value, id=f"{name}={kind}")
    for name, values in REFUSED.items()
    for kind, value in values.items()
  ],
)
def test_anything_but_numbers_is_refused_from_elsewhere(name, value):
  with pytest.raises(TypeError, match=f"`{name}` must be a (bool, a )?number"):
    if name == "skip":
      reasons.requested(value)
    else:
      findings.examine(nonfinite(), jnp.ones(2), **{name: value})


def test_reasons_of_loss_scaling_are_no_reasons_to_skip():
  flags, amax = jnp.array([True, False]), jnp.ones(2)
  window = ols.WindowOverflow(flags, amax, drop=True)
  for reason in (window, ols.hardware.FloatStatus(1, 0), [window]):
    with pytest.raises(TypeError, match="`skip` .*pass it as overflow="):
      reasons.requested(reason)
  # A NamedTuple would pass for a list of flags.
  with pytest.raises(TypeError, match="list of flags, got a StubState"):
    reasons.requested(support.Stub().init())


@pytest.mark.parametrize(
  "amax", [10**400, -(10**400), 2**128], ids=int.bit_length
)
def test_an_integer_amax_beyond_float32_is_refused(amax):
  with pytest.raises(ValueError, match="`amax` must be finite in float32"):
    findings.examine(nonfinite(), jnp.ones(2), amax=amax)


# The share of the range that a step used.

SEVERAL = nonfinite({"a": "float16", "b": "bfloat16", "c": None})
LEAVES = {"a": 8 * ONE, "b": ONE * F32(2.0**100), "c": ONE}
BOTH = nonfinite(["bfloat16", "float16"])
# A check, gradients, the amax from elsewhere, and the share.
USED = {
  "named dtype": (saturated("float16"), F32([0, -4096]), None, 4096 / F16_MAX),
  "own dtype": (nonfinite(), [BF16(1024)], None, 1024 / BF16_MAX),
  # An unknown dtype is reported as float16, and nothing is enforced.
  "unknown dtype": (nonfinite(), F32([1e5]), None, 1e5 / F16_MAX),
  "tightest leaf": (SEVERAL, LEAVES, None, 8 / F16_MAX),
  "float32 beside": (nonfinite(), [np.float16(1), F32(1e9)], None, 1 / F16_MAX),
  "amax": (nonfinite(), ONE, 8 * F16_MAX, 8.0),
  "amax, smallest limit": (BOTH, [ONE, ONE], 512.0, 512 / F16_MAX),
  # The reciprocal of this limit is subnormal.
  "near the limit": (nonfinite("bfloat16"), F32([1e38]), None, 1e38 / BF16_MAX),
  "subnormal": (nonfinite("float16"), F32([2.0**-149]), None, SMALLEST),
  "0": (nonfinite(), 0 * ONE, None, SMALLEST),
  "inf": (saturated("float16"), np.inf * ONE, None, np.inf),
  "NaN": (saturated("float16"), np.nan * ONE, None, np.nan),
}


@pytest.mark.parametrize(
  ("check", "tree", "amax", "expected"), USED.values(), ids=USED
)
def test_the_share_of_the_range_that_is_used(check, tree, amax, expected):
  found = jax.jit(functools.partial(findings.examine, check))(tree, amax=amax)
  np.testing.assert_allclose(found.range_used, expected, rtol=1e-6)
