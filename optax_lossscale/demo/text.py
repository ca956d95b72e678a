"""A small causal transformer over the sources of Python's own library."""

from collections.abc import Iterator
import pathlib
import sysconfig

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale.demo import task

SYMBOLS = "\t\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(SYMBOLS)  # One symbol for every other character.
CONTEXT = 64

_CHARACTERS = 4_000_000
_SKIPPED_FOLDERS = {
  "encodings",  # A million characters of tables, all alike.
  "idlelib",
  "lib2to3",
  "site-packages",
  "test",
  "tests",
}


def make_task(*, quick: bool = False) -> task.Task:
  """Returns the task: predict each character from those before it."""
  data = encode(read_sources())
  training, held_out = split(data)
  sequences = 192 if quick else 768

  def batches(seed: int) -> Iterator[task.Batch]:
    rng = np.random.default_rng(seed)
    while True:
      starts = rng.integers(len(training) - CONTEXT, size=sequences)
      yield windows(training, starts)

  starts = np.linspace(0, len(held_out) - CONTEXT - 1, 4 * 768, dtype=int)
  return task.Task(
    name="text",
    description=(
      "Causal transformer on Python's own sources, "
      f"{sequences * CONTEXT:,} characters a batch"
    ),
    model=lambda dtype: Transformer(dtype=dtype),
    optimizer=optax.adam(3e-3),
    batches=batches,
    held_out=[windows(held_out, some) for some in np.split(starts, 4)],
    score=optax.losses.softmax_cross_entropy_with_integer_labels,
    score_name="held-out loss per character",
    more_is_better=False,
    steps=30 if quick else 60,
  )


def read_sources() -> str:
  """Returns the beginning of the standard library's sources, in path order."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  sources: list[str] = []
  total = 0
  for path in sorted(library.rglob("*.py")):
    if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
      sources.append(path.read_text(encoding="utf-8", errors="replace"))
      total += len(sources[-1])
      if total >= _CHARACTERS:
        return "".join(sources)[:_CHARACTERS]
  raise FileNotFoundError(
    f"this Python's standard library holds {total:,} characters of sources in "
    f"{library}, and this task reads {_CHARACTERS:,}"
  )


def encode(text: str) -> np.ndarray:
  """Returns the symbol of each character."""
  table = np.full(128, UNKNOWN, np.uint8)
  table[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS))
  codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
  return table[np.minimum(codes, 127)]  # 127 itself is not printable.


def split(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first nine tenths, to train on, and the last tenth."""
  start = len(data) - len(data) // 10
  return data[:start], data[start:]


class Transformer(nn.Module):
  """Pre-norm causal transformer."""

  dtype: DTypeLike  # Of operations and activations; parameters are float32.
  width: int = 64
  layers: int = 2
  heads: int = 4  # Each is width / heads wide.

  @nn.compact
  def __call__(self, symbols: jax.Array) -> jax.Array:
    """Returns the logits of each position's next symbol."""
    length = symbols.shape[-1]
    x = nn.Embed(UNKNOWN + 1, self.width, dtype=self.dtype)(symbols)
    x += nn.Embed(CONTEXT, self.width, dtype=self.dtype)(jnp.arange(length))
    mask = nn.make_causal_mask(symbols, dtype=bool)
    for _ in range(self.layers):
      y = nn.LayerNorm(dtype=self.dtype)(x)
      x += nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(
        y, mask=mask
      )
      y = nn.LayerNorm(dtype=self.dtype)(x)
      y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
      x += nn.Dense(self.width, dtype=self.dtype)(y)
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(UNKNOWN + 1, dtype=self.dtype)(x)


def windows(
  data: np.ndarray, starts: np.ndarray, length: int = CONTEXT
) -> task.Batch:
  """Returns `length` symbols from each start, and each one's next."""
  found = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
  return found[:, :-1], found[:, 1:]
