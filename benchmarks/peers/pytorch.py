"""PyTorch on the CPU: its fused optimizer, and the same under `GradScaler`.

The calls are those of PyTorch's "Automatic Mixed Precision examples", after the
backward pass: `scaler.step(optimizer)`, `scaler.update()`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers import contender
from benchmarks.peers import settings


def bare() -> contender.Contender:
  """Returns PyTorch's fused AdamW."""
  return _PyTorch(unscales=False)


def grad_scaler() -> contender.Contender:
  """Returns PyTorch's fused AdamW under `torch.amp.GradScaler`."""
  return _PyTorch(unscales=True)


class _PyTorch(contender.Contender):
  """A list of parameters with gradients, an optimizer and maybe a scaler."""

  # A gradient in PyTorch has the dtype of its parameter.
  gradient_dtypes = ("float32",)

  def __init__(self, *, unscales: bool) -> None:
    import torch

    self.unscales = unscales
    self._torch = torch
    self._params: list[Any] = []
    self._optimizer: Any = None
    self._scaler: Any = None

  def start(self, params: contender.Arrays) -> None:
    """Begins anew. See `Contender.start`."""
    torch = self._torch
    self.stop()
    self._params = [torch.from_numpy(np.array(leaf)) for leaf in params]
    for param in self._params:
      param.requires_grad_()
      param.grad = torch.zeros_like(param)
    self._optimizer = torch.optim.AdamW(
      self._params,
      lr=settings.LEARNING_RATE,
      betas=(settings.B1, settings.B2),
      eps=settings.EPS,
      weight_decay=settings.WEIGHT_DECAY,
      fused=True,
    )
    self._scaler = torch.amp.GradScaler("cpu", init_scale=settings.LOSS_SCALE)
    # The scaler makes its tensors when it first scales a loss.
    self._scaler.scale(torch.zeros(()))

  def prepare(self, scaled_grads: contender.Arrays) -> None:
    """Writes the gradients, which the last step has unscaled in place."""
    for param, leaf in zip(self._params, scaled_grads, strict=True):
      param.grad.copy_(self._torch.from_numpy(np.array(leaf)))

  def step(self, scaled_grads: contender.Arrays) -> None:
    """Makes a step. See `Contender.step`."""
    del scaled_grads
    if self.unscales:
      self._scaler.step(self._optimizer)
      self._scaler.update()
    else:
      self._optimizer.step()

  def parameters(self) -> list[np.ndarray]:
    """Returns copies of the parameters."""
    return [param.detach().numpy().copy() for param in self._params]

  def reference(
    self, params: contender.Arrays, gradients: Sequence[Any]
  ) -> list[np.ndarray]:
    """Returns the parameters after one step. See `Contender.reference`."""
    self.start(params)
    self.prepare(gradients)
    self.step(gradients)
    return self.parameters()

  def stop(self) -> None:
    """Lets go of the memory."""
    self._params = []
    self._optimizer = self._scaler = None
