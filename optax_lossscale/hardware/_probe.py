"""Observes what a device does with numbers that do not fit."""

import dataclasses
import functools
import math
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import switches
from optax_lossscale._base import tables
from optax_lossscale._step import checks

_REQUIRED = ("float16", "bfloat16", "float32")
_HEADER = (
  *("dtype", "largest*2", "too large", "0/0", "subnormals"),
  *("cast back", "wider sums"),
)


class Arithmetic(NamedTuple):
  """The behavior of a device in one dtype.

  Attributes:
    product: the largest value times 2: inf or NaN, or finite if it is clipped.
    cast: 1e6 cast to this dtype, for bfloat16 the largest float32. None for
      float32.
    undefined: 0/0, which is NaN, or 0 in saturation mode.
    keeps_subnormals: whether a subnormal value times 1 stayed the same.
    elides_casts: whether a float32 that was cast to this dtype and back in one
      program was not rounded. None for float32.
    widened: whether (1 + x) - 1 was x, although 1 + x does not fit, so that the
      sum must have been wider. False proves nothing: it is "unknown".
  """

  product: float
  cast: float | None
  undefined: float
  keeps_subnormals: bool
  elides_casts: bool | None
  widened: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Hardware:
  """The findings of `probe`; print it for a table.

  Attributes:
    device: the device's name, as JAX has it.
    preferred_dtype: the dtype to train in, by the kind of device, since no
      observation shows the speed of its matrix units. None if it is unknown.
    max_keeps_nan: whether a maximum over float32 values with a NaN is NaN.
    dtypes: what was observed in each dtype, by name, except for the float8
      dtypes that the device or the compiler rejects.
  """

  device: str
  preferred_dtype: np.dtype | None
  max_keeps_nan: bool
  dtypes: dict[str, Arithmetic]

  def check(self, dtype: DTypeLike) -> checks.Check:
    """Returns `saturated(dtype)` if an overflow was clipped, or `nonfinite()`.

    Args:
      dtype: the dtype that the gradients are computed in. One that was not
        observed, such as float64, gets `nonfinite()`.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype.
    """
    dtype = arguments.check_dtype("dtype", dtype)
    seen = self.dtypes.get(dtype.name)
    overflows = (seen.product, seen.cast) if seen else ()
    is_clipped = any(x is not None and math.isfinite(x) for x in overflows)
    return checks.saturated(dtype) if is_clipped else checks.nonfinite()

  def __repr__(self) -> str:
    rows = [_HEADER, *(_row(name, x) for name, x in self.dtypes.items())]
    rows += [
      (x, "not supported")
      for x in formats.SIGNED_FLOAT8
      if x not in self.dtypes
    ]
    preferred = getattr(self.preferred_dtype, "name", "unknown")
    lines = [
      f"{self.device}, through JAX's compiler",
      *tables.aligned(rows, "<" * len(_HEADER)),
      f"NaN in a maximum: {'kept' if self.max_keeps_nan else 'dropped'}",
      f"preferred dtype, by the kind of device: {preferred}",
    ]
    return "\n".join(lines)


def probe(device: jax.Device | None = None) -> Hardware:
  """Observes what a device does with numbers that do not fit.

  Some hardware turns an overflow into inf and some clips it, and each needs its
  own check. This runs one small program, and so sees the compiler and the
  device together. No result proves that float16 is computed natively.

  Args:
    device: the device to observe; by default JAX's default device.

  Returns:
    The findings; print them for a table, or take `probe().check(dtype)`.

  Raises:
    TypeError: if `device` is not a `jax.Device`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> check = ols.hardware.probe().check(jnp.float16)
    >>> print(check == ols.nonfinite())
    True
  """
  if not (device is None or isinstance(device, jax.Device)):
    raise TypeError(
      "`device` must be a jax.Device, such as jax.devices()[0], got "
      f"{arguments.shown(device)}."
    )
  names = [*_REQUIRED, *formats.SIGNED_FLOAT8]
  try:
    used, outputs = _run(names, device)
  except Exception:
    # A backend may raise anything for a dtype that it lacks. If the reason was
    # another one, this raises it again.
    names = [x for x in names if x in _REQUIRED or _is_accepted(x, device)]
    used, outputs = _run(names, device)
  return Hardware(
    device=used.device_kind,
    preferred_dtype=_preferred_dtype(used),
    max_keeps_nan=bool(np.isnan(outputs["maxima"]).all()),
    dtypes={name: _read(name, outputs[name]) for name in names},
  )


def _run(
  names: list[str], device: jax.Device | None
) -> tuple[jax.Device, dict[str, Any]]:
  """Returns a device and what the probe computed there, as NumPy arrays."""
  # XLA's CPU backend keeps a NaN in a short maximum, but not in a long one.
  with_nan = np.array([np.nan] + [1.0] * 4095, np.float32)
  # The caller may be tracing.
  with jax.ensure_compile_time_eval(), switches.lifted():
    # Arguments, since a compiler could compute with constants by itself.
    by_dtype = {name: _operands(name) for name in names}
    operands = jax.device_put((by_dtype, with_nan), device)
    (used,) = operands[1].devices()
    return used, jax.device_get(jax.jit(_compute)(*operands))


def _is_accepted(name: str, device: jax.Device | None) -> bool:
  try:
    return bool(_run([name], device))
  except Exception:
    return False


def _operands(name: str) -> dict[str, np.ndarray]:
  """Returns the operands for a dtype; the last two are float32."""
  finfo = jnp.finfo(name)
  step = float(finfo.eps)
  own = functools.partial(np.array, dtype=finfo.dtype)
  too_large = np.finfo(np.float32).max if name == "bfloat16" else 1e6
  return {
    "largest": own(float(finfo.max)),
    "two": own(2),
    # Two zeros, since a compiler may know x / x without dividing.
    "zero": own(0),
    "other_zero": own(0),
    "one": own(1),
    "subnormal": own(float(finfo.smallest_normal) / 2),
    "half_step": own(step / 2),
    "too_large": np.array(too_large, np.float32),
    "between": np.array(1 + step / 4, np.float32),
  }


def _compute(
  operands: dict[str, dict[str, jax.Array]], with_nan: jax.Array
) -> dict[str, object]:
  """Computes everything that is observed."""
  nan, one = with_nan[:2]
  maxima = jnp.max(with_nan), jnp.maximum(nan, one), jnp.maximum(one, nan)
  outputs: dict[str, object] = {"maxima": maxima}
  for name, x in operands.items():
    dtype = x["one"].dtype
    outputs[name] = {
      "product": x["largest"] * x["two"],
      "cast": x["too_large"].astype(dtype),
      "undefined": x["zero"] / x["other_zero"],
      "subnormal": x["subnormal"] * x["one"],
      # Without a barrier, so that a compiler can elide these casts.
      "round_trip": x["between"].astype(dtype).astype(jnp.float32),
      "difference": (x["one"] + x["half_step"]) - x["one"],
    }
  return outputs


def _read(name: str, outputs: dict[str, np.ndarray]) -> Arithmetic:
  """Compares what the probe computed in a dtype with its operands."""
  before = _operands(name)
  is_cast = name != "float32"
  return Arithmetic(
    product=float(outputs["product"]),
    cast=float(outputs["cast"]) if is_cast else None,
    undefined=float(outputs["undefined"]),
    keeps_subnormals=bool(outputs["subnormal"] == before["subnormal"]),
    elides_casts=(
      bool(outputs["round_trip"] == before["between"]) if is_cast else None
    ),
    widened=bool(outputs["difference"] == before["half_step"]),
  )


def _row(name: str, seen: Arithmetic) -> tuple[str, ...]:
  """Returns the cells of a dtype in the table."""
  return (
    name,
    *("" if x is None else f"{x:.5g}" for x in seen[:3]),
    "kept" if seen.keeps_subnormals else "flushed",
    {None: "", True: "elided", False: "rounded"}[seen.elides_casts],
    "yes" if seen.widened else "unknown",
  )


def _preferred_dtype(device: jax.Device) -> np.dtype | None:
  """Returns the dtype that a device is fast in; None if that is unknown."""
  name = {"cpu": "float32", "tpu": "bfloat16"}.get(device.platform)
  # NVIDIA's GPUs multiply in float16 since 7.0 and in bfloat16 since 8.0. For
  # AMD's GPUs it is a name, such as gfx942.
  capability = str(getattr(device, "compute_capability", ""))
  is_nvidia = device.platform in ("gpu", "cuda") and re.fullmatch(
    r"\d+\.\d+", capability
  )
  if is_nvidia and float(capability) >= 7:
    name = "bfloat16" if float(capability) >= 8 else "float16"
  return None if name is None else jnp.dtype(name)
