"""Records float8 operands, gradients and sums of torchao, qwix and an H100.

It needs torch (the wheel for a CPU will do), torchao, qwix and mmaemu, which
computes float8 products as an H100 PCIe does, in an environment of their own:

  python -m tools.originals.float8

The trace holds arrays as the hexadecimal of their bytes, little-endian:

- operands: float32 numbers, the power of two by which torchao scales their
  tensor, and the codes that it rounds them to. The maximum of a case named
  "above" is so little above the format's that torchao's logarithm of the scale
  is rounded up.
- layer: for each pair of formats, a SHA-256 of torchao's result and of its
  gradients of the input and the weight, in float32. The inputs have no small
  numbers but 0. So no sum is rounded, in whatever order.
- decibels: by how much the result and both gradients are above their error, for
  inputs of all sizes, with torchao's and qwix's scales.
- products: a SHA-256 of each operand's codes, and the first rows of the H100's
  sums, in one chain ("fast") and with float32 additions of chains ("full").
"""

from collections.abc import Callable
from collections.abc import Iterator
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any

from flax import linen
import jax
import jax.numpy as jnp
import mmaemu
import numpy as np
import qwix
import torch
from torchao.float8 import config as configs
from torchao.float8 import float8_linear
from torchao.float8 import float8_scaling_utils
from torchao.float8 import float8_training_tensor

PATH = pathlib.Path(__file__).parents[2] / "tests/traces/float8_originals.json"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, WIDTH, OUT = 64, 128, 96
SIDE, TERMS, ROWS = 64, (256, 4096), 8
SMALLEST = 2.0**-5  # Of the numbers that are no zeros in "layer".
# They are multiplied by these then, so that each needs its scale.
POWERS = 2.0**12, 2.0**-12, 2.0**-20
Arrays = list[np.ndarray]


def main() -> None:
  """Writes the trace."""
  names = "torch", "torchao", "qwix", "mmaemu", "jax", "flax", "numpy"
  normal = normals((TOKENS, WIDTH), (WIDTH, OUT), (TOKENS, OUT))
  coarse = [
    np.float32(np.where(np.abs(x) < SMALLEST, 0, x) * power)
    for x, power in zip(normal, POWERS, strict=True)
  ]
  content = {
    "versions": {name: importlib.metadata.version(name) for name in names},
    "operands": list(operands()),
    "layer": {
      name_of(dtype): [sha256(x) for x in torchao_layer(dtype)(*coarse)]
      for dtype in (E5M2, E4M3)
    },
    "decibels": {
      name: decibels(run(*normal), normal)
      for name, run in {
        "torchao": torchao_layer(E5M2),
        "torchao, no powers of two": torchao_layer(E5M2, powers=False),
        "qwix, tensors": qwix_layer(disable_channelwise_axes=True),
        "qwix, channels": qwix_layer(),
      }.items()
    },
    "products": [
      product(dtype, terms) for dtype in (E4M3, E5M2) for terms in TERMS
    ],
  }
  PATH.write_text(json.dumps(content, indent=0) + "\n")


def normals(*shapes: tuple[int, ...]) -> Arrays:
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def name_of(dtype: torch.dtype) -> str:
  return str(dtype).removeprefix("torch.")


def sha256(x: np.ndarray) -> str:
  if x.dtype == np.float32:
    x = x + np.float32(0)  # A zero has no sign then.
  return hashlib.sha256(x.tobytes()).hexdigest()


# Operands.


def in_float8(x: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, Any]:
  """Returns torchao's codes and the scale."""
  product = float8_training_tensor.ScaledMMConfig(emulate=True)
  found = float8_scaling_utils.hp_tensor_to_float8_dynamic(
    x,
    dtype,
    float8_training_tensor.LinearMMConfig(product, product, product),
    round_scales_to_power_of_2=True,
  )
  return found._data.view(torch.uint8).numpy(), found._scale.numpy()


def operands() -> Iterator[dict[str, str]]:
  """Yields the cases of both formats."""
  for dtype in (E4M3, E5M2):
    for kind, x in inputs(dtype):
      x = torch.tensor(np.float32(x))
      # torchao takes the maximum in the dtype of the tensor.
      given = x.bfloat16() if kind == "bfloat16" else x
      codes, scale = in_float8(given, dtype)
      yield {
        "kind": kind,
        "dtype": name_of(dtype),
        "x": given.float().numpy().tobytes().hex(),
        "scale": scale.tobytes().hex(),
        "codes": codes.tobytes().hex(),
      }


def inputs(dtype: torch.dtype) -> Iterator[tuple[str, np.ndarray]]:
  """Yields numbers, and what kind they are of."""
  rng = np.random.default_rng(0)
  codes = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
  values = np.unique(codes[np.isfinite(codes)])
  ties = (values[1:] + values[:-1]) / 2
  around = [np.nextafter(ties, np.float32(x)) for x in (-np.inf, np.inf)]
  ends = [values[0], -0.0, 0.0]
  for power in (0, -20):
    scale = 2.0**power
    yield "values", np.concatenate([values, ends]) * scale
    yield "ties", np.concatenate([ties, *around, ends]) * scale
  normal = rng.normal(size=(10, 32))
  for power, x in zip((-11, -8, -5, -2, 0, 3, 8, 20, 29), normal, strict=False):
    yield "normal", x * 10.0**power
  yield "bfloat16", normal[-1]
  yield "wide", normal.ravel()[:96] * np.exp2(rng.uniform(-32, 0, 96))
  parts = np.array([1, -0.3, 0.01, -1e-4])
  for power in (-35, -30, -3, 0, 9, 40, 100):
    # Both formats' largest is 1.75 times a power of two.
    for mantissa in (1, 1.75):
      amax = np.float32(mantissa * 2.0**power)
      step = np.spacing(amax)
      for ulps in (-1, 0, 1, 2, 8, 64):
        near = mantissa == 1.75 and 0 < ulps < 64
        yield ("above" if near else "edge"), parts * (amax + ulps * step)
  for amax in (1.01e-12, 1e-12, 1e30):
    yield "edge", parts * amax
  for amax in (1e-13, 1e-20, 1e-33, 0.0):
    yield "below 1e-12", parts * amax
  yield "not finite", np.array([1, np.inf, -np.inf, np.nan, 0.5])


# Gradients.


def torchao_layer(
  gradients: torch.dtype, *, powers: bool = True
) -> Callable[..., Arrays]:
  """Returns what computes the result and gradients of x @ w for a gradient."""
  config = configs.Float8LinearConfig(
    cast_config_grad_output=configs.CastConfig(target_dtype=gradients),
    emulate=True,
    round_scales_to_power_of_2=powers,
  )

  def run(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> Arrays:
    layer = torch.nn.Linear(*w.shape, bias=False)
    layer.weight.data = torch.tensor(w.T)
    layer = float8_linear.Float8Linear.from_float(layer, config)
    given = torch.tensor(x, requires_grad=True)
    result = layer(given)
    result.backward(torch.tensor(g))
    found = result.detach(), given.grad, layer.weight.grad.T.contiguous()
    return [x.numpy() for x in found]

  return run


def qwix_layer(**options: bool) -> Callable[..., Arrays]:
  """Returns what computes the same with qwix's rule."""
  rule = qwix.QtRule(
    weight_qtype=jnp.float8_e4m3fn,
    act_qtype=jnp.float8_e4m3fn,
    bwd_qtype=jnp.float8_e5m2,
    **options,
  )

  def run(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> Arrays:
    layer = qwix.quantize_model(
      linen.Dense(w.shape[1], use_bias=False), qwix.QtProvider([rule])
    )

    def result(x: jax.Array, w: jax.Array) -> jax.Array:
      return layer.apply({"params": {"kernel": w}}, x)

    found, pullback = jax.vjp(result, jnp.asarray(x), jnp.asarray(w))
    return [np.asarray(x) for x in (found, *pullback(g))]

  return run


def decibels(found: Arrays, given: Arrays) -> list[float]:
  """Returns the ratio of signal to noise of the result and both gradients."""
  x, w, g = map(np.float64, given)
  return [
    -20 * float(np.log10(np.linalg.norm(a - b) / np.linalg.norm(b)))
    for a, b in zip(found, (x @ w, g @ w.T, x.T @ g), strict=True)
  ]


# Sums.


def product(dtype: torch.dtype, terms: int) -> dict[str, Any]:
  """Returns the H100's first rows of a product with an E4M3 operand."""
  left, right = (
    in_float8(torch.tensor(x), format_)[0]
    for x, format_ in zip(
      normals((SIDE, terms), (SIDE, terms)), (dtype, E4M3), strict=True
    )
  )
  factors = torch.tensor(left).view(dtype), torch.tensor(right).view(E4M3)
  found = {
    name: mmaemu.accumulate(
      *factors, use_fast_accum=name == "fast", profile="hopper-ws0"
    )
    for name in ("fast", "full")
  }
  return {
    "dtype": name_of(dtype),
    "terms": terms,
    "operands": [sha256(left), sha256(right)],
    **{name: x[:ROWS].numpy().tobytes().hex() for name, x in found.items()},
  }


if __name__ == "__main__":
  main()
