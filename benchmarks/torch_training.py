"""GPT-2 in training in torch: autocast, GradScaler, fused AdamW."""

from collections.abc import Sequence
import itertools
from typing import Any

import torch

from benchmarks import gpt2
from benchmarks import jax_training
from benchmarks import torch_gpt2


class Training:
  """One contender. It waits for the loss once a step, as a logger does."""

  def __init__(
    self,
    size: gpt2.Size,
    params: Any,
    batches: Sequence[gpt2.Batch],
    *,
    dtype: str,
    init_scale: float | None,
    device: str,
  ) -> None:
    """Puts everything on the device.

    Args:
      size: of the model.
      params: where it starts, as Flax holds them.
      batches: taken in turns.
      dtype: of autocast; none with float32.
      init_scale: the first S of a GradScaler; None is no loss scaling.
      device: "cuda" or "cpu".
    """
    torch.set_float32_matmul_precision("high")  # TF32, as JAX has it.
    self._device, self._dtype = device, getattr(torch, dtype)
    self._allocated = _allocated(device)
    model = torch_gpt2.GPT2(size)
    model.load_state_dict(torch_gpt2.from_flax(params))
    model.to(device)
    self._optimizer = torch.optim.AdamW(
      model.parameters(),
      lr=jax_training.ADAMW["learning_rate"],
      betas=(jax_training.ADAMW["b1"], jax_training.ADAMW["b2"]),
      eps=jax_training.ADAMW["eps"],
      weight_decay=jax_training.ADAMW["weight_decay"],
      fused=True,
    )
    # Disabled it hands everything through, which is how its users switch it.
    self._scaler = torch.amp.GradScaler(
      device, init_scale=init_scale or 1.0, enabled=init_scale is not None
    )
    self._model = model
    self._batches = itertools.cycle(
      [
        tuple(torch.from_numpy(part).long().to(device) for part in batch)
        for batch in batches
      ]
    )
    if device == "cuda":
      torch.cuda.reset_peak_memory_stats()

  def step(self) -> float:
    """Trains on the next batch, and returns its loss."""
    self._optimizer.zero_grad(set_to_none=True)
    with torch.autocast(
      self._device, self._dtype, enabled=self._dtype != torch.float32
    ):
      loss = self._model(*next(self._batches))
    self._scaler.scale(loss).backward()
    self._scaler.step(self._optimizer)
    self._scaler.update()
    return loss.item()  # Waits for the optimizer too: there is one queue.

  def figures(self) -> dict[str, int]:
    """Returns the most bytes at a time; empty where torch does not count.

    Right as long as no other contender has stepped since this one was made.
    """
    if self._device != "cuda":
      return {}
    return {"peak": torch.cuda.max_memory_allocated() - self._allocated}

  def loss_scaling(self) -> dict[str, float]:
    """Returns where S is; empty without loss scaling."""
    if not self._scaler.is_enabled():
      return {}
    return {"loss_scale": self._scaler.get_scale()}


def _allocated(device: str) -> int:
  return torch.cuda.memory_allocated() if device == "cuda" else 0
