"""Python's own sources as sequences of symbols, and models of them."""

import collections
import functools
import pathlib
import re
import sysconfig
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.truth import workload

Sequences = tuple[jax.Array, jax.Array]

_SYMBOLS = "\t\n" + "".join(map(chr, range(32, 127)))
CHARACTERS = len(_SYMBOLS) + 1  # One stands for all others.

_LENGTH = 4_000_000
_SKIPPED_FOLDERS = {
  "encodings",  # A million characters of tables, all alike.
  "idlelib",
  "lib2to3",
  "site-packages",
  "test",
  "tests",
}


class Data(NamedTuple):
  """Sequences of symbols, each with the symbols that follow.

  Attributes:
    training: uint16[symbols].
    held_out: uint16[symbols], which no seed trains on.
    length: of a sequence.
  """

  training: jax.Array
  held_out: jax.Array
  length: int

  def draw(self, key: jax.Array, sequences: int) -> Sequences:
    """Returns random sequences of the training data, and what follows."""
    return self._draw(self.training, key, sequences)

  def test(self, sequences: int) -> Sequences:
    """Returns sequences of the held-out data, and what follows."""
    return self._draw(self.held_out, jax.random.key(2**31), sequences)

  def _draw(
    self, symbols: jax.Array, key: jax.Array, sequences: int
  ) -> Sequences:
    last = len(symbols) - self.length
    starts = jax.random.randint(key, (sequences, 1), 0, last)
    found = symbols[starts + jnp.arange(self.length + 1)].astype(jnp.int32)
    return found[:, :-1], found[:, 1:]


@functools.cache
def characters(length: int) -> Data:
  """Returns the data as characters."""
  return _make(_encode(_read_sources()), length)


@functools.cache
def words(length: int, *, most: int) -> Data:
  """Returns the data as its most frequent words; one stands for all others.

  A word is a name or a number, a run of spaces, or one other character.
  """
  found = re.findall(r"\w+|[ ]+|.|\n", _read_sources())
  counts = collections.Counter(found).most_common(most - 1)
  table = {word: i for i, (word, _) in enumerate(counts)}
  return _make(np.array([table.get(x, most - 1) for x in found]), length)


def make_workload(
  model: nn.Module,
  data: Data,
  *,
  sequences: int,
  description: str,
  score_name: str,
  steps: int,
  sixteen_bit: bool = False,
) -> workload.Workload:
  """Returns the training of a language model on the mean cross-entropy."""
  held_out = data.test(sequences)

  def loss(params, batch):
    inputs, labels = batch
    logits = model.apply(params, inputs)
    return jnp.mean(
      optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    )

  return workload.Workload(
    description=description,
    elements=sequences * data.length,
    init=lambda key: model.init(key, held_out[0][:1]),
    draw=lambda key, params: data.draw(key, sequences),
    loss=loss,
    score=lambda params: loss(params, held_out),
    score_name=score_name,
    matters=0.02,
    rate=3e-3,
    steps=steps,
    sixteen_bit=sixteen_bit,
    on_sources=True,
  )


def _make(symbols: np.ndarray, length: int) -> Data:
  held_out = len(symbols) // 10
  symbols = jnp.asarray(symbols, jnp.uint16)
  return Data(symbols[:-held_out], symbols[-held_out:], length)


def _read_sources() -> str:
  """Returns the beginning of the standard library's sources, in path order."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  sources: list[str] = []
  total = 0
  for path in sorted(library.rglob("*.py")):
    if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
      sources.append(path.read_text(encoding="utf-8", errors="replace"))
      total += len(sources[-1])
      if total >= _LENGTH:
        return "".join(sources)[:_LENGTH]
  raise FileNotFoundError(
    f"{library} holds {total:,} characters of Python's sources, and the "
    f"workloads read {_LENGTH:,}."
  )


def _encode(text: str) -> np.ndarray:
  """Returns the symbol of each character."""
  numbers = {symbol: number for number, symbol in enumerate(_SYMBOLS)}
  return np.array([numbers.get(x, len(_SYMBOLS)) for x in text])
