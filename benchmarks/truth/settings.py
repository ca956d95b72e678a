"""The precisions and loss scales in which each workload is trained."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

import optax_lossscale as ols

LEVEL = "O1"
SEEDS = 5

# The loss scales at which the gradient's error is measured.
SCREENED = (1, 2**5, 2**10, 2**15)


@dataclasses.dataclass(frozen=True)
class Setting:
  """How to train."""

  description: str
  dtype: DTypeLike = jnp.float32  # Of the products, at `LEVEL`.
  rule: ols.LossScale | None = None  # None is without loss scaling.
  # float16 saturates, as on an Ascend 910A, instead of overflowing.
  saturating: bool = False
  first_seed: int = 0
  parameters: DTypeLike = jnp.float32  # Stored, and widened for the loss.
  # Other arguments of `autocast`.
  products: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Arguments of `tune_precision`, which finds `dtype` and `products`.
  tuned: Mapping[str, Any] | None = None
  # Makes the optimizer from that of the workload.
  wrap: Callable[
    [optax.GradientTransformation], optax.GradientTransformation
  ] = lambda inner: inner

  @property
  def seeds(self) -> range:
    """The seeds of parameters and batches."""
    return range(self.first_seed, self.first_seed + SEEDS)


REFERENCE = "float32"
UNSCALED = "float16"
DEFAULT = "dynamic"
REMAINDER = "remainder"

SETTINGS: Mapping[str, Setting] = {
  # With S = 1, since without loss scaling XLA makes another program, whose
  # last bits may differ.
  REFERENCE: Setting("float32, S = 1 throughout", rule=ols.FixedLossScale(1.0)),
  "bfloat16": Setting(
    "bfloat16 without loss scaling, where no step is skipped", jnp.bfloat16
  ),
  UNSCALED: Setting(
    "float16 without loss scaling, where no step is skipped", jnp.float16
  ),
  "fixed": Setting(
    "float16, S = 2^15 throughout", jnp.float16, ols.FixedLossScale(2.0**15)
  ),
  DEFAULT: Setting(
    "float16, the dynamic default", jnp.float16, ols.DynamicLossScale()
  ),
  "headroom": Setting(
    "float16, HeadroomLossScale", jnp.float16, ols.rules.HeadroomLossScale()
  ),
  "saturating": Setting(
    "float16 on emulated saturating hardware, the dynamic default and the "
    "check for saturation",
    jnp.float16,
    ols.DynamicLossScale(),
    saturating=True,
  ),
  "null-scaled": Setting(
    "float32, S = 2^10 throughout", rule=ols.FixedLossScale(2.0**10)
  ),
  "null-seeds": Setting(
    "float32, S = 1 throughout, five other seeds",
    rule=ols.FixedLossScale(1.0),
    first_seed=SEEDS,
  ),
}

_sixteen_bit = functools.partial(
  Setting, dtype=jnp.bfloat16, parameters=jnp.bfloat16
)

# Parameters and products in bfloat16, without loss scaling.
SIXTEEN_BIT: Mapping[str, Setting] = {
  "nearest": _sixteen_bit("`optax.adam`, and sums to the nearest bfloat16"),
  "copy": _sixteen_bit("`ols.master_weights`", wrap=ols.master_weights),
  REMAINDER: _sixteen_bit(
    '`ols.master_weights(..., store="remainder")`',
    wrap=lambda inner: ols.master_weights(inner, store="remainder"),
  ),
  "stochastic": _sixteen_bit(
    "`ols.stochastic_rounding`", wrap=ols.stochastic_rounding
  ),
  "remainder-low": _sixteen_bit(
    "remainders around `ols.low_precision_state`",
    wrap=lambda inner: ols.master_weights(
      ols.low_precision_state(inner), store="remainder"
    ),
  ),
  "stochastic-low": _sixteen_bit(
    "stochastic rounding around `ols.low_precision_state`",
    wrap=lambda inner: ols.stochastic_rounding(ols.low_precision_state(inner)),
  ),
}

_E4M3 = jnp.float8_e4m3fn

# Products in other formats, without loss scaling.
PRODUCTS: Mapping[str, Setting] = {
  "float32-results": Setting(
    "bfloat16, `preferred_element_type=jnp.float32`",
    jnp.bfloat16,
    products={"preferred_element_type": jnp.float32},
  ),
  "float8": Setting(
    "bfloat16, `dot_dtype=jnp.float8_e4m3fn`",
    jnp.bfloat16,
    products={"dot_dtype": _E4M3},
  ),
  "float8-e4m3": Setting(
    "the same with gradients in e4m3 too",
    jnp.bfloat16,
    products={"dot_dtype": (_E4M3, _E4M3)},
  ),
}

# The findings of `tune_precision`, with S = 1 as in float32.
_tuned = functools.partial(Setting, rule=ols.FixedLossScale(1.0))
TUNED: Mapping[str, Setting] = {
  "tuned": _tuned(
    "found by `tune_precision`", tuned={"dtypes": (jnp.bfloat16,)}
  ),
  "tuned-float8": _tuned(
    "the same with bfloat16 and float8",
    tuned={"dtypes": (jnp.bfloat16, _E4M3)},
  ),
}

ALL: Mapping[str, Setting] = {
  **SETTINGS,
  **SIXTEEN_BIT,
  **PRODUCTS,
  **TUNED,
}

# These guard the verdict: it must find no difference in them.
NULLS = ("null-scaled", "null-seeds")

# For workloads whose screen shows nothing to cure.
_FEW = (REFERENCE, UNSCALED, DEFAULT, *NULLS)


def of(*, full: bool, sixteen_bit: bool) -> list[str]:
  """Returns the names of the settings of a workload.

  Args:
    full: all, or those that show that it needs no loss scaling.
    sixteen_bit: also those with parameters in bfloat16, and other products.
  """
  scaling = SETTINGS if full else _FEW
  others = {**SIXTEEN_BIT, **PRODUCTS} if sixteen_bit else {}
  return [*scaling, *others, *TUNED]
