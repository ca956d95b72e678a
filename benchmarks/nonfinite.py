"""Whether the wrapper sees every NaN and inf on this device.

Bit patterns are placed in otherwise finite gradients of many sizes, and the
compiled update of `loss_scaling` must skip that step, and no other.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import itertools
import math
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

DTYPES = ("float16", "bfloat16", "float32")
# Around the sizes at which kernels change: vectors, warps, blocks, and more
# than one block can hold.
SIZES = (1, 2, 7, 31, 33, 1000, 1025, 4097, 65537, 1_000_003, 10_000_000)


def values(dtype: str) -> dict[str, int]:
  """Returns the bit patterns to place, by name; among them a finite one.

  Args:
    dtype: a floating-point dtype.
  """
  info = jnp.finfo(dtype)
  sign = 1 << (info.bits - 1)
  infinity = ((1 << info.nexp) - 1) << info.nmant
  # The first bit of the mantissa tells a quiet NaN from a signalling one.
  quiet = infinity | 1 << (info.nmant - 1)
  return {
    "largest finite": infinity - 1,
    "inf": infinity,
    "-inf": infinity | sign,
    "NaN": quiet,
    "-NaN": quiet | sign,
    "NaN, all bits": infinity | sign | (1 << info.nmant) - 1,
    "signalling NaN": infinity | 1,
    "-signalling NaN": infinity | 1 | sign,
  }


def run(
  *,
  sizes: Sequence[int] = SIZES,
  dtypes: Sequence[str] = DTYPES,
  until: float = math.inf,
) -> tuple[int, list[str]]:
  """Places every value in every leaf and looks at what the wrapper answers.

  Args:
    sizes: of the leaves.
    dtypes: of the gradients.
    until: of `time.monotonic`; after it the search ends.

  Returns:
    How many cases there were, and a line for each that was answered wrongly.
  """
  rng = np.random.default_rng(0)
  tried, failures = 0, []
  # The largest first, of which a reduction makes several kernels.
  for size, dtype in itertools.product(sorted(sizes, reverse=True), dtypes):
    if tried and time.monotonic() > until:
      break
    answer = _make_answer(dtype, size)
    places = {0, size - 1, *rng.integers(size, size=2).tolist()}
    for place, value in itertools.product(sorted(places), values(dtype)):
      tried += 1
      wrong = _wrong(value, answer(place, value))
      if wrong:
        failures.append(f"{value} at {place} of {dtype}[{size}]: {wrong}")
  return tried, failures


def _make_answer(dtype: str, size: int) -> Callable[[int, str], dict[str, Any]]:
  """Returns a function from a place and a value to what the wrapper says."""
  unsigned = jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(1.0))
  # The leaf stands between others, as in a model.
  shapes = {"first": (3,), "leaf": (size,), "last": (4, 5)}
  params = {name: jnp.ones(shape) for name, shape in shapes.items()}
  state = jax.jit(tx.init)(params)

  @jax.jit
  def make() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
      name: jax.random.normal(key, shape).astype(dtype)
      for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

  # Placed as bits, on the device, apart from the update: arithmetic, and some
  # conversions, would make a quiet NaN of a signalling one.
  @functools.partial(jax.jit, donate_argnums=0)
  def place(
    leaf: jax.Array, index: jax.Array, bits: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    old = lax.bitcast_convert_type(leaf, unsigned)
    return (
      lax.bitcast_convert_type(old.at[index].set(bits), leaf.dtype),
      old[index],
    )

  @jax.jit
  def update(
    scaled_grads: Any, state: Any, params: Any
  ) -> dict[str, jax.Array]:
    updates, state = tx.update(scaled_grads, state, params)
    bits = [
      lax.bitcast_convert_type(leaf, jnp.uint32)
      for leaf in jax.tree.leaves(updates)
    ]
    # -0.0 is the sign bit alone.
    held = [jnp.all(leaf == jnp.uint32(1 << 31)) for leaf in bits]
    return {
      "overflow": state.overflow,
      "nan": state.nan,
      "skipped": state.skipped,
      "held": jnp.all(jnp.stack(held)),
    }

  scaled_grads = make()

  def answer(index: int, value: str) -> dict[str, Any]:
    bits = unsigned.type(values(dtype)[value])
    scaled_grads["leaf"], old = place(scaled_grads["leaf"], index, bits)
    answers = update(scaled_grads, state, params)
    scaled_grads["leaf"], placed = place(scaled_grads["leaf"], index, old)
    return jax.device_get({**answers, "placed": placed == bits})

  return answer


def _wrong(value: str, answers: dict[str, Any]) -> str:
  """Returns what is wrong with the answers; nothing if they are right."""
  if not answers["placed"]:
    return "the device did not keep the bits, so nothing was tested"
  finite = value == "largest finite"
  expected = {
    "overflow": not finite,
    "nan": "NaN" in value,
    "skipped": not finite,
    "held": not finite,
  }
  return ", ".join(
    f"{name} is {bool(answers[name])}"
    for name, right in expected.items()
    if bool(answers[name]) != right
  )
