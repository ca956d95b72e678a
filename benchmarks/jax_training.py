"""GPT-2 in training in JAX: one compiled step, its state on the device."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import gpt2
from benchmarks import kernels
import optax_lossscale as ols

# As JAX calls them.
_PRECISIONS = {"tf32": "tensorfloat32", "float32": "float32"}
# AdamW's arguments, written out because the defaults of optax and torch differ.
ADAMW = {
  "learning_rate": 3e-4,
  "b1": 0.9,
  "b2": 0.999,
  "eps": 1e-8,
  "weight_decay": 0.01,
}


class Training:
  """One contender. It waits for the loss once a step, as a logger does."""

  def __init__(
    self,
    model: gpt2.GPT2,
    params: Any,
    batches: Sequence[gpt2.Batch],
    *,
    rule: ols.LossScale | None,
    float32_matmul: str = "default",
    options: Mapping[str, str] | None = None,
  ) -> None:
    """Puts everything on the device, and compiles.

    Args:
      model: with the dtype that it computes in.
      params: where it starts; they are copied.
      batches: taken in turns.
      rule: of the loss scaling; None is none.
      float32_matmul: "tf32", "float32", or "default".
      options: of the compiler.
    """
    tx = optax.adamw(**ADAMW)
    self._is_scaled = rule is not None
    if rule is not None:
      tx = ols.loss_scaling(tx, rule)
    batches = [jax.device_put(batch) for batch in batches]
    self._batches = itertools.cycle(batches)
    # Copies, since the step is given its state to overwrite.
    params = jax.tree.map(jnp.copy, params)
    self._state = params, jax.jit(tx.init)(params)
    step = make_step(gpt2.make_loss_fn(model), tx, is_scaled=self._is_scaled)
    with _matmul_precision(float32_matmul):
      lowered = jax.jit(step, donate_argnums=0).lower(self._state, batches[0])
      self._step = lowered.compile(compiler_options=options)

  def step(self) -> float:
    """Trains on the next batch, and returns its loss."""
    self._state, loss = self._step(self._state, next(self._batches))
    return float(loss)

  def figures(self) -> dict[str, int | None]:
    """Returns kernels and bytes, as the compiler planned them."""
    return kernels.figures(self._step)

  def loss_scaling(self) -> dict[str, float]:
    """Returns where S is; empty without loss scaling."""
    if not self._is_scaled:
      return {}
    metrics = ols.loss_scale_metrics(self._state[1])
    return {
      "loss_scale": float(metrics["loss_scale"]),
      "skipped_steps": int(metrics["skipped_steps"]),
    }


def make_step(
  loss_fn: gpt2.LossFn,
  tx: optax.GradientTransformation,
  *,
  is_scaled: bool,
) -> Callable[[Any, gpt2.Batch], tuple[Any, jax.Array]]:
  """Returns a step from (parameters, optimizer state) to the next, and a loss.

  Args:
    loss_fn: the loss of parameters and a batch.
    tx: the optimizer.
    is_scaled: whether it is wrapped in `loss_scaling`.
  """

  def step(state: Any, batch: gpt2.Batch) -> tuple[Any, jax.Array]:
    params, opt_state = state
    value_and_grad = (
      ols.scaled_value_and_grad(loss_fn, opt_state)
      if is_scaled
      else jax.value_and_grad(loss_fn)
    )
    loss, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return step


def _matmul_precision(choice: str) -> Any:
  if choice == "default":
    return contextlib.nullcontext()
  return jax.default_matmul_precision(_PRECISIONS[choice])
