"""The GPT-2 of `gpt2.py` in torch, with the same names and the same weights."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import gpt2


class Block(nn.Module):
  """Attention and a two-layer network, each after a layer norm."""

  def __init__(self, size: gpt2.Size) -> None:
    super().__init__()
    self.heads = size.heads
    self.norm_1 = nn.LayerNorm(size.width)
    self.query_key_value = nn.Linear(size.width, 3 * size.width)
    self.attended = nn.Linear(size.width, size.width)
    self.norm_2 = nn.LayerNorm(size.width)
    self.up = nn.Linear(size.width, 4 * size.width)
    self.down = nn.Linear(4 * size.width, size.width)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Returns the residual stream after this block.

    Args:
      x: [batch, positions, width], the residual stream before it.
    """
    batch, length, width = x.shape
    y = self.query_key_value(self.norm_1(x))
    y = y.view(batch, length, 3, self.heads, width // self.heads)
    query, key, value = y.permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(
      query, key, value, is_causal=True
    )
    x = x + self.attended(y.transpose(1, 2).reshape(x.shape))
    y = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
    return x + self.down(y)


class GPT2(nn.Module):
  """The model, with its embedding as its output layer, without dropout."""

  def __init__(self, size: gpt2.Size) -> None:
    super().__init__()
    self.tokens = nn.Embedding(size.vocabulary, size.width)
    self.positions = nn.Embedding(size.context, size.width)
    self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
    self.norm = nn.LayerNorm(size.width)

  def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy over all positions.

    Args:
      tokens: int[batch, positions].
      labels: int[batch, positions], each position's next token.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    x = self.tokens(tokens) + self.positions(positions)
    for block in self.blocks:
      x = block(x)
    logits = functional.linear(self.norm(x), self.tokens.weight)
    return functional.cross_entropy(
      logits.view(-1, logits.shape[-1]), labels.reshape(-1)
    )


def from_flax(tree: Any) -> dict[str, torch.Tensor]:
  """Returns Flax parameters, or gradients, by the names that torch uses.

  Args:
    tree: what `gpt2.init` returned, or a tree like it.
  """
  tensors = {}
  for module, leaves in _modules(tree["params"]):
    for leaf, array in leaves.items():
      name, value = "bias", np.array(array)
      if leaf != "bias":
        name = "weight"
        value = value.T.copy() if leaf == "kernel" else value
      tensors[f"{module}.{name}"] = torch.from_numpy(value)
  return tensors


def _modules(params: Any) -> list[tuple[str, Any]]:
  """Returns each layer's name in torch and its leaves."""
  modules = []
  for name, child in params.items():
    if name.startswith("block_"):
      block = name.removeprefix("block_")
      modules += [
        (f"blocks.{block}.{layer}", leaves) for layer, leaves in child.items()
      ]
    else:
      modules.append((name, child))
  return modules
