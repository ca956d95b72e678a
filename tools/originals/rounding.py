"""Records the stochastic rounding of torchao, draw by draw counted.

It needs torch (the wheel for a CPU will do) and torchao, in an environment of
their own:

  python -m tools.originals.rounding

The trace holds numbers with their bits, and how many of 4,096 draws each of the
results got.
"""

import collections
import importlib.metadata
import json
import pathlib

import torch
from torchao.optim import quant_utils

DRAWS = 4096
PATH = pathlib.Path(__file__).parents[2] / "tests/traces/torchao_rounding.json"
# Parts of the way from a bfloat16 to the next, as the lower 16 bits.
PARTS = (0, 1, 0x0100, 0x4000, 0x5555, 0x8000, 0xC000, 0xFFFF)
# The upper 16 bits: both ends of the smallest normal binade, 1 and its
# neighbors, a power of two, pi, the largest below the next binade, large ones.
STARTS = (
  0x0080,
  0x00FF,
  0x3F7F,
  0x3F80,
  0x3F81,
  0x4000,
  0x4049,
  0x40FF,
  0x7E80,
)


def main() -> None:
  """Writes the trace."""
  torch.manual_seed(0)
  rows = []
  for sign in (0, 0x8000):
    for start in STARTS:
      for part in PARTS:
        bits = (start | sign) << 16 | part
        signed = bits - 2**32 if bits >= 2**31 else bits
        x = torch.full((DRAWS,), signed, dtype=torch.int32).view(torch.float32)
        found = quant_utils._fp32_to_bf16_sr(x).view(torch.int16)
        counts = collections.Counter(y & 0xFFFF for y in found.tolist())
        rows.append([bits, sorted(counts.items())])
  content = {
    "torchao": importlib.metadata.version("torchao"),
    "torch": torch.__version__,
    "draws": DRAWS,
    "rows": rows,
  }
  PATH.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
  main()
