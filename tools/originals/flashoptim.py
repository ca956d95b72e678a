"""Prints what flashoptim_jax stores, learns, and compiles to, beside this.

It needs flashoptim-jax in an environment with this package's `test` extra, and
compilers in OPTAX_LOSSSCALE_COMPILERS (see docs/guides/compile.md):

  python -m tools.originals.flashoptim

The training is that of docs/guides/sixteen_bit_parameters.md, with AdamW and
three seeds. A CPU keeps casts to bfloat16; "without casts" is a program from
which they have been taken, as XLA does for GPUs.
"""

from collections.abc import Callable
import functools
import re
from typing import Any

import flashoptim_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from tests import documents
from tests import excess_precision

TARGETS = ("v100", "h200", "b200", "v5e", "tpu7x")
PARAMS = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
ADAMW = optax.adamw(1e-4)
Step = Callable[..., tuple[Any, Any]]


def make(tx: optax.GradientTransformation) -> tuple[Callable[..., Any], Step]:
  """Returns init and step of an optax transformation."""

  def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return tx.init, step


def contenders() -> dict[str, tuple[Callable[..., Any], Step]]:
  """Returns init and step of each."""
  small = ols.low_precision_state(ADAMW)
  found = {
    "to the nearest": make(ADAMW),
    "a remainder": make(ols.master_weights(ADAMW, store="remainder")),
    "stochastic": make(ols.stochastic_rounding(ADAMW)),
    "stochastic, bfloat16 moments": make(ols.stochastic_rounding(small)),
  }
  for moments, quantize in (("8-bit", True), ("float32", False)):
    for bits in (None, 24, 32):
      tx = flashoptim_jax.flash_adamw(
        1e-4, quantize=quantize, master_weight_bits=bits, fused=False
      )
      name = f"flash, {moments} moments, {bits or 16} bits"
      found[name] = tx.init, tx.step
      if bits:
        step = excess_precision.unrounded(tx.step)
        found[f"{name}, without casts"] = tx.init, step
  return found


def train(page: dict[str, Any], init: Any, step: Step, seed: int) -> jax.Array:
  """Returns the mean loss of the last 200 steps."""

  def advance(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
    batch = jax.random.randint(key, (128,), 0, len(page["images"]))
    x, y = page["images"][batch], page["labels"][batch]
    loss, grads = jax.value_and_grad(page["loss_fn"])(carry[0], x, y)
    return step(*carry, grads), loss

  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), page["init"](seed))
  keys = jax.random.split(jax.random.key(seed + 1), 3000)
  _, losses = jax.lax.scan(advance, (narrow, init(narrow)), keys)
  return losses[-200:].mean()


def main() -> None:
  """Prints the tables."""
  text = documents.read("docs/guides/sixteen_bit_parameters.md")
  # Without the training that follows.
  code = documents.blocks(text)[0].partition("adam = ")[0]
  page = documents.run(f"```python\n{code}```", {})
  for name, (init, step) in contenders().items():
    stored = jax.tree.leaves((PARAMS, jax.eval_shape(init, PARAMS)))
    each = sum(x.size * x.dtype.itemsize for x in stored) / PARAMS.size
    run = jax.jit(functools.partial(train, page, init, step))
    losses = [run(seed) for seed in range(3)]
    print(f"{name:50} {each:6.3f} bytes, loss", *np.round(losses, 4))
  tx = flashoptim_jax.flash_adamw(1e-4, fused=False, master_weight_bits=32)
  args = PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS
  report = ols.instruments.compile_report(tx.step, *args, targets=TARGETS)
  for target, found in report.steps.items():
    lost = re.findall(r"subtract\((%[\w.]+), \1\)", found.text)
    print(f"{target:6} x - x: {len(lost)}")


if __name__ == "__main__":
  main()
