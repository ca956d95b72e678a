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


@pytest.fixture(scope="module")
def seen():
  return ols.hardware.probe()


@pytest.fixture(scope="module")
def outputs():
  """This CPU's results, for tests to change into those of other hardware."""
  return _probe._run([*DTYPES], None)[1]


@pytest.fixture
def faked(monkeypatch, outputs):
  """Returns a function: the findings if the outputs of a dtype were others."""

  def find(name, **values):
    changed = {**outputs, name: {**outputs[name], **values}}
    device = jax.devices()[0]
    monkeypatch.setattr(_probe, "_run", lambda *_: (device, changed))
    return ols.hardware.probe()

  return find


@pytest.fixture
def emulated(monkeypatch):
  """Returns a function: the findings if the probe were computed otherwise."""

  def find(probe):
    monkeypatch.setattr(_probe, "_compute", probe)
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


# --- This CPU, against NumPy and against operations run one at a time.


@pytest.mark.parametrize("name", DTYPES)
def test_overflows_and_undefined_results_of_a_cpu_are_numpys(name, seen):
  found = [np.nan if x is None else x for x in seen.dtypes[name][:3]]
  np.testing.assert_array_equal(found, numpy_results(name))


@pytest.mark.parametrize("name", DTYPES)
def test_subnormals_are_kept_where_a_single_product_keeps_them(name, seen):
  subnormal = subnormal_of(name)
  assert float(subnormal) > 0
  product = np.asarray(lax.mul(subnormal, np.ones((), subnormal.dtype)))
  assert product in (0, subnormal)
  assert seen.dtypes[name].keeps_subnormals == (product == subnormal)


def test_a_nan_is_kept_where_jax_keeps_it(seen, outputs):
  x = np.array([np.nan] + [1] * 4095, np.float32)
  maxima = [jnp.max(x), jnp.maximum(x[:1], 1)[0], jnp.maximum(1, x[:1])[0]]
  expected = np.isnan(maxima)
  np.testing.assert_array_equal(np.isnan(outputs["maxima"]), expected)
  assert seen.max_keeps_nan == bool(expected.all())


@pytest.mark.parametrize("name", DTYPES)
def test_a_wider_result_comes_from_a_program_with_a_wider_dtype(name, seen):
  operands = [np.ones((), jnp.dtype(name))] * 2
  program = jax.jit(lambda x, y: (x + y) - x).lower(*operands).compile()
  assert not seen.dtypes[name].widened or " convert(" in program.as_text()


def test_the_compiler_does_not_compute_what_is_observed():
  operands = {x: _probe._operands(x) for x in DTYPES}, np.ones(4096, "f4")
  text = jax.jit(_probe._compute).lower(*operands).compile().as_text()
  for operation in ("multiply", "divide", "add", "subtract", "convert"):
    assert f" {operation}(" in text


def test_no_barrier_stops_a_compiler_from_eliding_casts():
  operands = {x: _probe._operands(x) for x in DTYPES}, np.ones(4096, "f4")
  program = str(jax.make_jaxpr(_probe._compute)(*operands))
  assert "convert_element_type" in program
  assert "barrier" not in program and "reduce_precision" not in program


def test_every_signed_float8_of_jax_is_observed_and_names_are_in_order(seen):
  assert tuple(seen.dtypes) == DTYPES
  in_jax = {x for x in dir(jnp) if x.startswith("float8")}
  assert in_jax == {*support.FLOAT8}


# --- Other hardware, emulated by another program or by other outputs.


@pytest.mark.parametrize(
  "name", ["float16", "bfloat16", "float32", "float8_e5m2"]
)
def test_saturation_mode_is_reported_for_its_dtype_alone(name, emulated, seen):
  probe = ols.hardware.emulate_saturation(
    _probe._compute, dtypes=(jnp.dtype(name),)
  )
  found = emulated(probe)
  largest = float(jnp.finfo(name).max)
  cast = None if name == "float32" else largest
  assert found.dtypes[name][:3] == (largest, cast, 0.0)
  assert found.check(name) == ols.saturated(name)
  # The clamp reads the bits of every result, which must be rounded for it.
  assert not found.dtypes[name].elides_casts
  assert not found.dtypes[name].widened
  for other in {*DTYPES} - {name}:
    assert str(found.dtypes[other][:3]) == str(seen.dtypes[other][:3])
    assert found.check(other) == ols.nonfinite()


def test_a_nan_that_becomes_0_does_not_survive_a_maximum(emulated):
  probe = ols.hardware.emulate_saturation(
    _probe._compute, dtypes=(jnp.float32,)
  )
  assert not emulated(probe).max_keeps_nan


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


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("key", ["product", "cast"])
def test_a_clipped_result_of_either_kind_wants_saturated(name, key, faked):
  largest = float(jnp.finfo(name).max)
  found = faked(name, **{key: np.array(largest, jnp.dtype(name))})
  if (name, key) == ("float32", "cast"):  # float32 is not cast to itself.
    assert found.dtypes[name].cast is None
    assert found.check(name) == ols.nonfinite()
  else:
    assert getattr(found.dtypes[name], key) == largest
    assert found.check(name) == ols.saturated(name)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("product", [np.inf, np.nan])
def test_a_result_that_is_inf_or_nan_wants_nonfinite(name, product, faked):
  found = faked(name, product=np.float32(product), cast=np.float32(product))
  assert found.check(name) == ols.nonfinite()


@pytest.mark.parametrize("name", DTYPES)
def test_zero_for_an_undefined_result_is_reported(name, faked):
  found = faked(name, undefined=np.zeros((), jnp.dtype(name)))
  assert found.dtypes[name].undefined == 0.0
  assert found.check(name) == ols.nonfinite()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kept", [True, False])
def test_flushed_subnormals_are_reported(name, kept, faked):
  result = subnormal_of(name) * jnp.dtype(name).type(kept)
  found = faked(name, subnormal=result).dtypes[name]
  assert found.keeps_subnormals is kept


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("elided", [True, False])
def test_elided_casts_are_reported(name, elided, faked):
  number = np.float32(1 + float(jnp.finfo(name).eps) / 4)
  rounded = np.float32(number.astype(jnp.dtype(name)))
  assert rounded == 1
  found = faked(name, round_trip=number if elided else rounded).dtypes[name]
  assert found.elides_casts is elided


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("share", [0, 1, 2])
def test_a_sum_is_wider_only_if_it_was_not_rounded(name, share, faked):
  # Half a step is lost by rounding down, kept, or becomes a whole step.
  half_step = float(jnp.finfo(name).eps) / 2
  difference = np.array(share * half_step, jnp.dtype(name))
  found = faked(name, difference=difference).dtypes[name]
  assert found.widened is (share == 1)


@pytest.mark.parametrize("dropped", [None, 0, 1, 2])
def test_a_nan_that_any_maximum_drops_is_reported(dropped, faked, outputs):
  maxima = [np.float32(np.nan)] * 3
  if dropped is not None:
    maxima[dropped] = np.float32(1)
  outputs = {**outputs, "maxima": tuple(maxima)}
  device = jax.devices()[0]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_probe, "_run", lambda *_: (device, outputs))
    assert ols.hardware.probe().max_keeps_nan is (dropped is None)


# --- The whole.


def test_a_rejected_float8_is_the_only_one_that_is_lost(emulated, seen):
  original = _probe._compute

  def rejecting(numbers, with_nan):
    if "float8_e4m3fn" in numbers:
      raise NotImplementedError("float8_e4m3fn")
    return original(numbers, with_nan)

  found = emulated(rejecting)
  left = {k: x for k, x in seen.dtypes.items() if k != "float8_e4m3fn"}
  assert str(found.dtypes) == str(left)
  assert "\nfloat8_e4m3fn       not supported\n" in str(found)
  assert "not supported" not in str(seen)
  assert found.check("float8_e4m3fn") == ols.nonfinite()


@pytest.mark.parametrize("needed", ["float16", "bfloat16", "float32"])
def test_any_other_failure_is_raised(needed, emulated):
  def failing(numbers, with_nan):
    if needed in numbers:
      raise RuntimeError(f"no {needed}")
    return {name: jnp.zeros(()) for name in numbers}

  with pytest.raises(RuntimeError, match=f"no {needed}"):
    emulated(failing)


@pytest.mark.parametrize(
  ("platform", "capability", "expected"),
  [
    ("cpu", None, "float32"),
    ("tpu", None, "bfloat16"),
    ("gpu", "6.1", None),
    ("gpu", "7.0", "float16"),
    ("gpu", "7.5", "float16"),
    ("gpu", "8.0", "bfloat16"),
    ("cuda", "10.0", "bfloat16"),
    ("gpu", "gfx942", None),
    ("xpu", "12.55", None),
    ("npu", None, None),
  ],
)
def test_the_preferred_dtype_follows_the_compute_capability(
  platform, capability, expected
):
  given = {} if capability is None else {"compute_capability": capability}
  device = types.SimpleNamespace(platform=platform, **given)
  found = _probe._preferred_dtype(device)
  assert found == (expected and jnp.dtype(expected))


def test_a_dtype_that_is_not_observed_is_taken_for_ieee(seen):
  assert seen.check(jnp.float64) == ols.nonfinite()
  with pytest.raises(TypeError, match="`dtype` must be a floating-point dtype"):
    seen.check(jnp.int8)


def test_an_observation_is_the_same_wherever_it_is_made(seen):
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
  assert {repr(x) for x in found} == {repr(seen)}


def test_the_device_that_is_observed_is_the_one_that_is_passed():
  device = jax.devices()[3]
  assert _probe._run(["float32"], device)[0] == device
  with jax.default_device(device):
    assert _probe._run(["float32"], None)[0] == device


@pytest.mark.parametrize("device", ["cuda", 0, jnp.float16])
def test_what_is_no_device_is_refused(device):
  with pytest.raises(TypeError, match="`device` must be a jax.Device, such as"):
    ols.hardware.probe(device)


def test_the_program_is_compiled_once(seen, monkeypatch):
  def trace(*_):
    raise AssertionError("traced again")

  # jit has the program under the function's name, whatever it calls now.
  monkeypatch.setattr(_probe.jnp, "maximum", trace)
  assert str(ols.hardware.probe()) == str(seen)


def test_the_table_has_a_row_for_each_dtype_in_80_columns():
  seen = _probe.Hardware(
    device="made up",
    preferred_dtype=None,
    max_keeps_nan=True,
    dtypes={
      "float16": _probe.Arithmetic(65504, 65504, 0, False, True, True),
      "float32": _probe.Arithmetic(np.inf, None, np.nan, True, None, False),
    },
  )
  lines = str(seen).splitlines()
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
  assert all(len(x) <= 80 for x in lines)


def test_the_table_of_this_device_fits_into_80_columns(seen):
  lines = str(seen).splitlines()
  assert len(lines) == 2 + len(DTYPES) + 2
  assert all(len(x) <= 80 for x in lines)


@pytest.mark.slow
def test_importing_the_library_starts_no_backend():
  program = (
    "import jax, optax_lossscale; jax.config.update('jax_num_cpu_devices', 3);"
    "assert jax.device_count() == 3"
  )
  subprocess.run([sys.executable, "-c", program], check=True)
