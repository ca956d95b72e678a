"""Float8 beside ml_dtypes, torchao, qwix and the sums of an H100."""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _products
from optax_lossscale._base import bits
from tests import documents

TRACE = json.loads(documents.read("tests/traces/float8_originals.json"))
FORMATS = ("float8_e4m3fn", "float8_e5m2")
E4M3, E5M2 = map(jnp.dtype, FORMATS)
SHAPES = (64, 128), (128, 96), (64, 96)  # Of x, w and the gradient of x @ w.
operand = jax.jit(_products._operand, static_argnums=1)


@functools.partial(jax.jit, static_argnums=3)
def layer(x, w, g, gradients=E5M2):
  """Returns x @ w and the gradients for that of the result, in float32."""
  low = ols.autocast(
    jnp.matmul,
    dtype=jnp.bfloat16,
    dot_dtype=(E4M3, gradients),
    preferred_element_type=jnp.float32,
  )
  result, pullback = jax.vjp(low, x, w)
  return result, *pullback(g)


def array(text, dtype=np.float32):
  return np.frombuffer(bytes.fromhex(text), dtype)


def in_float8(x, dtype):
  """Returns float8 numbers, and the power of two that scaled them."""
  found = operand(x, dtype)
  return np.asarray(found.array), 1 / np.float64(found.unscale)


def sha256(x):
  return hashlib.sha256(x.tobytes()).hexdigest()


def normals(*shapes):
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def decibels(found, true):
  noise = np.linalg.norm(np.float64(found) - true)
  return 20 * np.log10(np.linalg.norm(true) / noise)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_compiled_cast_to_float8_is_ml_dtypes(dtype):
  # Every sign and exponent, all codes and ties, and what is next to them.
  highs = np.arange(2**16, dtype=np.uint32) << 16
  lows = np.uint32([0, 1, 0x7FFF, 0x8000, 0xFFFF])
  x = (highs[:, None] | lows).ravel().view(np.float32)
  ours = np.asarray(jax.jit(lambda x: bits.rounded(x, dtype).astype(dtype))(x))
  with np.errstate(all="ignore"):
    theirs = x.astype(dtype)
  np.testing.assert_array_equal(np.float32(ours), np.float32(theirs))
  is_number = ~np.isnan(np.float32(theirs))
  codes = [y[is_number].view(np.uint8) for y in (ours, theirs)]
  assert np.array_equal(*codes)  # Zeros have a sign.


@functools.cache
def cases():
  """Returns numbers, the format, torchao's operand and ours, by kind."""
  found = {}
  for case in TRACE["operands"]:
    x, dtype = array(case["x"]), jnp.dtype(case["dtype"])
    given = x.astype(jnp.bfloat16) if case["kind"] == "bfloat16" else x
    theirs = array(case["codes"], dtype), np.float64(array(case["scale"])[0])
    row = x, dtype, theirs, in_float8(given, dtype)
    found.setdefault(case["kind"], []).append(row)
  return found


# How many cases there are of the kinds that are alike.
ALIKE = {"values": 4, "ties": 4, "normal": 18, "wide": 2, "edge": 132}
ALIKE["bfloat16"] = 2  # Given in bfloat16.


@pytest.mark.parametrize("kind", ALIKE)
def test_operands_are_torchaos_bit_for_bit(kind):
  assert len(cases()[kind]) == ALIKE[kind]
  for _, _, (codes, scale), (found, found_scale) in cases()[kind]:
    assert found_scale == scale
    assert found.tobytes() == codes.tobytes()


def test_a_maximum_just_above_the_largest_number_is_not_cut_off():
  factors = []
  for x, dtype, (codes, scale), (found, found_scale) in cases()["above"]:
    largest, amax = float(jnp.finfo(dtype).max), np.float64(x[0])
    assert found_scale * amax <= largest < 2 * found_scale * amax
    # torchao rounds the logarithm of its scale, so its numbers may be cut off.
    factors.append(scale / found_scale)
    assert codes[0] == (largest if factors[-1] == 2 else found[0])
  assert {*factors} == {1, 2}


def test_a_small_tensor_keeps_its_digits_below_torchaos_floor():
  for x, dtype, (codes, scale), (found, found_scale) in cases()["below 1e-12"]:
    # These are 1, -0.3, 0.01 and -0.0001, times the maximum.
    error = abs(np.float64(found) / found_scale - x)
    assert np.all(error <= abs(x) * (float(jnp.finfo(dtype).eps) / 2))
    assert scale < found_scale
    assert x[0] > 1e-14 or not np.any(codes[2:])


def test_what_is_not_finite_takes_no_other_number_with_it():
  for x, dtype, (codes, _), (found, scale) in cases()["not finite"]:
    assert np.isnan(np.float32(codes)).all()
    expected = (x * np.float32(scale)).astype(dtype)
    np.testing.assert_array_equal(np.float32(found), np.float32(expected))
    assert np.isfinite(np.float32(found[[0, -1]])).all()


@pytest.mark.parametrize("gradients", FORMATS)
def test_a_layer_and_its_gradients_are_torchaos_bit_for_bit(gradients):
  # Without small numbers no sum is rounded. These powers are out of range.
  inputs = [
    np.float32(np.where(np.abs(x) < 2.0**-5, 0, x) * 2.0**power)
    for x, power in zip(normals(*SHAPES), (12, -12, -20), strict=True)
  ]
  found = layer(*inputs, jnp.dtype(gradients))
  found = [sha256(np.asarray(x) + np.float32(0)) for x in found]
  assert found == TRACE["layer"][gradients]


def test_one_scale_for_a_tensor_costs_no_more_than_in_qwix():
  x, w, g = normals(*SHAPES)
  true = [np.matmul(*map(np.float64, y)) for y in ((x, w), (g, w.T), (x.T, g))]
  ours = [decibels(*y) for y in zip(layer(x, w, g), true, strict=True)]
  theirs = TRACE["decibels"]
  # Here sums are rounded, and torchao's order of terms is another one.
  np.testing.assert_allclose(ours, theirs["torchao"], rtol=0, atol=1e-4)
  assert np.min(np.subtract(ours, theirs["qwix, tensors"])) > -0.2
  # A scale for each row or column would add less than half a decibel.
  more = np.subtract(theirs["qwix, channels"], ours)
  assert np.min(more) > 0.2 and np.max(more) < 0.5


@pytest.mark.parametrize("terms", [256, 4096])
@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_have_the_bits_that_an_h100_drops(dtype, terms):
  (case,) = (
    x for x in TRACE["products"] if (x["dtype"], x["terms"]) == (dtype, terms)
  )
  left, right = normals((64, terms), (64, terms))
  operands = in_float8(left, jnp.dtype(dtype)), in_float8(right, E4M3)
  assert [sha256(x) for x, _ in operands] == case["operands"]
  (a, scale), (b, other_scale) = operands
  if dtype == E4M3:
    found = layer(left, right.T, np.ones((64, 64), np.float32))[0]
  else:  # As a gradient of the input.
    found = layer(np.ones((64, 64), np.float32), right, left)[1]
  found = np.float64(found[:8]) * scale * other_scale
  true = np.float64(a[:8]) @ np.float64(b).T
  full, fast = (array(case[x]).reshape(8, 64) for x in ("full", "fast"))
  assert decibels(found, true) > 130
  # It cuts sums off after 13 bits of fraction: in full accumulation those of
  # 128 terms, which it then adds in float32, and in fast accumulation all.
  assert 76 < decibels(full, found) < 82
  lost = decibels(full, true) - decibels(fast, true)
  assert (2 < lost < 6) if terms == 256 else (18 < lost < 22)
