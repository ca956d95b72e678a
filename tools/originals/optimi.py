"""Records how near optimi's Kahan summation stays to float32.

It needs torch (the wheel for a CPU will do), torch-optimi and NumPy, in an
environment of their own:

  python -m tools.originals.optimi

The network, Adam's settings and the count of steps are those of optimi's test
on a CPU. The tolerance is that of its test in bfloat16, which needs a GPU (see
tests/runner.py and tests/config.py there, at commit 17a3d5422f3e). But here
both runs get the gradients of the float32 run, in bfloat16. The trace holds,
for each width of the network, with Kahan summation and without: the largest
share of a weight's elements outside the tolerance after any step, and the share
that in the end is the bfloat16 nearest to float32. Both are for the first and
second weight.
"""

import importlib.metadata
import json
import pathlib

import numpy as np
import optimi
import torch

PATH = pathlib.Path(__file__).parents[2] / "tests/traces/optimi_kahan.json"
INPUTS, STEPS = 64, 20
ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6}
TOLERANCE = {"rtol": 1e-2, "atol": 1e-3}


class Network(torch.nn.Module):
  """The network of optimi's test, with weights drawn by NumPy."""

  def __init__(self, width: int, rng: np.random.Generator) -> None:
    super().__init__()
    self.norm = torch.nn.LayerNorm(INPUTS)
    self.fc1 = torch.nn.Linear(INPUTS, width, bias=False)
    self.fc2 = torch.nn.Linear(width, 1, bias=False)
    for layer in (self.fc1, self.fc2):
      size = layer.in_features
      drawn = rng.uniform(-1, 1, (size, layer.out_features)) / np.sqrt(size)
      layer.weight.data = torch.tensor(drawn.T).bfloat16().float()

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Returns one number for each row."""
    hidden = torch.nn.functional.mish(self.fc1(self.norm(x)))
    return self.fc2(hidden)


def run(width: int, *, kahan: bool) -> dict[str, object]:
  """Returns the shares of one run, and how far float32 has moved."""
  rng = np.random.default_rng(0)
  wide = Network(width, rng)
  low = Network(width, np.random.default_rng(0)).bfloat16()
  data = [rng.normal(size=(STEPS, 1, size)) for size in (INPUTS, 1)]
  x, y = (torch.tensor(numbers).bfloat16().float() for numbers in data)
  true = torch.optim.Adam(wide.parameters(), **ADAM)
  summed = optimi.Adam(low.parameters(), kahan_sum=kahan, **ADAM)
  pairs = [(wide.fc1, low.fc1), (wide.fc2, low.fc2)]
  first = wide.fc1.weight.detach().clone()
  outside = []
  for step in range(STEPS):
    loss = torch.nn.functional.mse_loss(wide(x[step]), y[step])
    loss.backward()
    for p, q in zip(wide.parameters(), low.parameters(), strict=True):
      q.grad = p.grad.bfloat16()
      p.grad = q.grad.float()
    for optimizer in (true, summed):
      optimizer.step()
      optimizer.zero_grad()
    outside.append(
      [
        1
        - torch.isclose(a.weight, b.weight.float(), **TOLERANCE).float().mean()
        for a, b in pairs
      ]
    )
  nearest = [a.weight.bfloat16() == b.weight for a, b in pairs]
  return {
    "outside": torch.tensor(outside).amax(0).tolist(),
    "nearest": [found.float().mean().item() for found in nearest],
    "moved": (wide.fc1.weight - first).abs().mean().item(),
  }


def main() -> None:
  """Writes the trace."""
  content = {
    "optimi": importlib.metadata.version("torch-optimi"),
    "torch": torch.__version__,
    "numpy": np.__version__,
    "widths": {
      width: {
        "kahan": run(width, kahan=True),
        "plain": run(width, kahan=False),
      }
      for width in (64, 128)
    },
  }
  PATH.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
  main()
