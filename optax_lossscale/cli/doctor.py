"""`optax-lossscale doctor`: versions, devices, and what to use here."""

import collections
import functools
from importlib import metadata
import platform
from typing import Any

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale.cli import _parser

_LEGEND = """\
largest*2, too large: the results of a product and of a cast that overflow; a
number means that the device clips. 0/0: nan, or 0 if the device clips.
subnormals: kept, or flushed to 0. cast back: whether a cast to the dtype and
back is rounded, or both casts are elided. wider sums: yes if a sum had more
digits than the dtype."""
_ADVICE = {
  "float32": "Train in float32, without loss scaling.",
  "bfloat16": "Train in bfloat16, without loss scaling.",
  "float16": "Train in float16 with ols.DynamicLossScale().",
  "unknown": "Measure which is faster here, bfloat16 or float16.",
}


def add_parser(subparsers: Any) -> None:
  """Adds the `doctor` sub-command to the parser."""
  parser = subparsers.add_parser(
    "doctor",
    help="say which check and dtype to use on this device",
    description="Prints versions, devices, what the default device does with "
    "numbers that do not fit, and which check and dtype to use.",
  )
  parser.set_defaults(run=functools.partial(_run, parser))


def _run(parser: _parser.Parser, _: object) -> int:
  """Prints the versions first, since JAX may find no device."""
  print(f"python {platform.python_version()}")
  print(f"optax_lossscale {ols.__version__}")
  for name in ("jax", "jaxlib", "optax", "flax", "chex"):
    print(f"{name} {metadata.version(name)}")
  try:
    kinds = collections.Counter(x.device_kind for x in jax.devices())
  except (RuntimeError, AssertionError) as error:
    parser.error(f"JAX starts no device; is JAX_PLATFORMS right? {error}")
  counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
  seen = ols.hardware.probe()
  print(f"devices: {counts}\n\n{seen}\n\n{_LEGEND}\n")
  if seen.check(jnp.float16).saturating:
    print("For float16 use check=ols.saturated(jnp.float16) here.")
  else:
    print("For float16 the default check is the right one here.")
  print(_ADVICE[getattr(seen.preferred_dtype, "name", "unknown")])
  return 0
