"""`probe`: this CPU against NumPy, and other hardware emulated or faked."""

import subprocess
import sys
import types

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.hardware import _probe
from tests import support

DTYPES = ("float16", "bfloat16", "float32", *support.SIGNED_FLOAT8)
LOW = tuple(x for x in DTYPES if x != "float32")
SOME = ("float16", "float32", "float8_e4m3fn")


@pytest.fixture(scope="module")
def seen():
  return ols.hardware.probe()


@pytest.fixture(scope="module")
def outputs():
  """This CPU's results, for tests to change into those of other hardware."""
  return _probe._run([*DTYPES], None)[1]


@pytest.fixture
def faked(monkeypatch, outputs):
  """Returns a function that probes with other outputs of a dtype."""

  def find(name, **values):
    changed = {**outputs, name: {**outputs[name], **values}}
    device = jax.devices()[0]
    monkeypatch.setattr(_probe, "_run", lambda *_: (device, changed))
    found = ols.hardware.probe()
    return found.dtypes[name], found.check(name)

  return find


@pytest.fixture
def emulated(monkeypatch):
  """Returns a function that probes with another program."""

  def find(program):
    monkeypatch.setattr(_probe, "_compute", program)
    return ols.hardware.probe()

  return find


def numpy_results(name):
  """Returns the overflow of a product and of a cast, and 0/0, by NumPy."""
  dtype = jnp.dtype(name)
  too_large = np.float32(3.4028234e38 if name == "bfloat16" else 1e6)
  with np.errstate(all="ignore"):
    product = np.array(jnp.finfo(dtype).max, dtype) * np.array(2, dtype)
    undefined = np.array(0, dtype) / np.array(0, dtype)
    cast = np.nan if name == "float32" else too_large.astype(dtype)
  return [float(x) for x in (product, cast, undefined)]


def subnormal_of(name):
  dtype = jnp.dtype(name)
  return np.array(float(jnp.finfo(dtype).smallest_normal) / 2, dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_results_of_a_cpu_are_those_of_numpy_and_of_single_operations(
  name, seen
):
  found = seen.dtypes[name]
  results = [np.nan if x is None else x for x in found[:3]]
  np.testing.assert_array_equal(results, numpy_results(name))
  subnormal = subnormal_of(name)
  product = np.asarray(lax.mul(subnormal, np.ones((), subnormal.dtype)))
  assert found.keeps_subnormals == (product == subnormal)
  # A wider result comes from a program with a wider dtype.
  operands = [np.ones((), subnormal.dtype)] * 2
  program = jax.jit(lambda x, y: (x + y) - x).lower(*operands).compile()
  assert not found.widened or " convert(" in program.as_text()


def test_a_nan_is_kept_where_jax_keeps_it(seen, outputs):
  x = np.array([np.nan] + [1] * 4095, np.float32)
  maxima = [jnp.max(x), jnp.maximum(x[:1], 1)[0], jnp.maximum(1, x[:1])[0]]
  expected = np.isnan(maxima)
  np.testing.assert_array_equal(np.isnan(outputs["maxima"]), expected)
  assert seen.max_keeps_nan == bool(expected.all())


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_saturation_mode_is_reported_for_its_dtype_alone(name, emulated, seen):
  program = ols.hardware.emulate_saturation(
    _probe._compute, dtypes=(jnp.dtype(name),)
  )
  found = emulated(program)
  largest = float(jnp.finfo(name).max)
  cast = None if name == "float32" else largest
  assert found.dtypes[name][:3] == (largest, cast, 0.0)
  assert found.check(name) == ols.saturated(name)
  # The clamp turns NaN into 0.
  assert found.max_keeps_nan == (name != "float32" and seen.max_keeps_nan)
  for other in {*DTYPES} - {name}:
    assert str(found.dtypes[other][:3]) == str(seen.dtypes[other][:3])
    assert found.check(other) == ols.nonfinite()


def test_a_program_that_computes_in_float32_throughout_is_seen(emulated):
  original = _probe._compute

  def widened(operands, with_nan):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    outputs = original(wide, with_nan)
    for name, own in operands.items():
      # Only what leaves the program is rounded, and float32 is not.
      back = outputs[name].pop("round_trip")
      dtype = own["one"].dtype
      rounded = {k: x.astype(dtype) for k, x in outputs[name].items()}
      outputs[name] = rounded | {"round_trip": back}
    return outputs

  found = emulated(widened).dtypes
  for name in LOW:
    assert found[name].widened and found[name].elides_casts, name
  assert not found["float32"].widened


@pytest.mark.parametrize("name", SOME)
def test_a_clipped_product_or_cast_wants_saturated(name, faked):
  largest = jnp.finfo(name).max
  found, check = faked(name, product=largest)
  assert found.product == largest
  assert check == ols.saturated(name)
  found, check = faked(name, cast=largest)
  if name == "float32":  # It is not cast to itself.
    assert (found.cast, check) == (None, ols.nonfinite())
  else:
    assert (found.cast, check) == (largest, ols.saturated(name))
  for result in (np.inf, np.nan):
    _, check = faked(name, product=result, cast=result, undefined=0)
    assert check == ols.nonfinite()


@pytest.mark.parametrize("name", SOME)
def test_other_properties_are_read_off_the_outputs(name, faked):
  assert faked(name, undefined=0)[0].undefined == 0
  subnormal = subnormal_of(name)
  assert faked(name, subnormal=subnormal)[0].keeps_subnormals is True
  assert faked(name, subnormal=subnormal * 0)[0].keeps_subnormals is False
  if name != "float32":
    number = np.float32(1 + float(jnp.finfo(name).eps) / 4)
    assert faked(name, round_trip=number)[0].elides_casts is True
    assert faked(name, round_trip=np.float32(1))[0].elides_casts is False
  # Half a step is lost by rounding down, kept, or becomes a whole step.
  half_step = float(jnp.finfo(name).eps) / 2
  for share in (0, 1, 2):
    difference = np.array(share * half_step, jnp.dtype(name))
    assert faked(name, difference=difference)[0].widened is (share == 1)


def test_only_a_float8_may_be_rejected(emulated, seen):
  original = _probe._compute

  def rejecting(dtype):
    def program(numbers, with_nan):
      if dtype in numbers:
        raise NotImplementedError(f"no {dtype}")
      return original(numbers, with_nan)

    return emulated(program)

  found = rejecting("float8_e4m3fn")
  left = {k: x for k, x in seen.dtypes.items() if k != "float8_e4m3fn"}
  assert str(found.dtypes) == str(left)
  assert "\nfloat8_e4m3fn       not supported\n" in str(found)
  assert "not supported" not in str(seen)
  assert found.check("float8_e4m3fn") == ols.nonfinite()
  with pytest.raises(NotImplementedError, match="no bfloat16"):
    rejecting("bfloat16")


@pytest.mark.parametrize(
  ("platform", "capability", "expected"),
  [
    # tests/guides/test_checks.py has the rows of the page.
    ("gpu", "6.1", None),
    ("cuda", "10.0", "bfloat16"),
    ("gpu", "gfx942", None),
    ("xpu", "12.55", None),
  ],
)
def test_the_preferred_dtype_follows_the_compute_capability(
  platform, capability, expected
):
  given = {} if capability is None else {"compute_capability": capability}
  device = types.SimpleNamespace(platform=platform, **given)
  found = _probe._preferred_dtype(device)
  assert found == (expected and jnp.dtype(expected))


def test_dtypes_that_were_not_observed_are_taken_for_ieee(seen):
  assert seen.check(jnp.float64) == ols.nonfinite()
  with pytest.raises(TypeError, match="`dtype` must be a floating-point dtype"):
    seen.check(jnp.int8)


def test_an_observation_is_the_same_wherever_it_is_made(seen, monkeypatch):
  found = []

  @jax.jit
  def step(x):
    found.append(ols.hardware.probe())
    return x

  step(1.0)
  with jax.debug_nans(True), jax.debug_infs(True):
    found.append(ols.hardware.probe())
  with jax.numpy_dtype_promotion("strict"):
    found.append(ols.hardware.probe(jax.devices()[3]))
  # The program is compiled once; jit finds it under the function's name.
  monkeypatch.delattr(_probe.jnp, "maximum")
  found.append(ols.hardware.probe())
  assert {repr(x) for x in found} == {repr(seen)}


def test_the_observed_device_is_the_one_that_is_passed():
  device = jax.devices()[3]
  assert _probe._run(["float32"], device)[0] == device
  with jax.default_device(device):
    assert _probe._run(["float32"], None)[0] == device
  with pytest.raises(TypeError, match="`device` must be a jax.Device, such"):
    ols.hardware.probe("cuda")


def test_the_table_has_a_row_for_each_dtype_in_80_columns(seen):
  assert len(str(seen).splitlines()) == 2 + len(DTYPES) + 2
  made_up = _probe.Hardware(
    device="made up",
    preferred_dtype=None,
    max_keeps_nan=True,
    dtypes={
      "float16": _probe.Arithmetic(65504, 65504, 0, False, True, True),
      "float32": _probe.Arithmetic(np.inf, None, np.nan, True, None, False),
    },
  )
  lines = str(made_up).splitlines()
  assert lines[:4] == [
    "made up, through JAX's compiler",
    "dtype               largest*2  too large  0/0  subnormals  cast back  "
    "wider sums",
    "float16             65504      65504      0    flushed     elided     yes",
    "float32             inf                   nan  kept                   "
    "unknown",
  ]
  assert lines[-2:] == [
    "NaN in a maximum: kept",
    "preferred dtype, by the kind of device: unknown",
  ]
  assert all(len(x) <= 80 for x in [*lines, *str(seen).splitlines()])


@pytest.mark.slow
def test_importing_the_library_starts_no_backend():
  program = (
    "import jax, optax_lossscale; jax.config.update('jax_num_cpu_devices', 3);"
    "assert jax.device_count() == 3"
  )
  subprocess.run([sys.executable, "-c", program], check=True)
