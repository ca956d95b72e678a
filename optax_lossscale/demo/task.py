"""What a training task is made of."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

import flax.linen as nn
import jax
from jax.typing import DTypeLike
import numpy as np
import optax

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
  """A model, an optimizer and real data: inputs and integer labels.

  Attributes:
    name: as on the command line.
    description: a line for people.
    model: makes the model that computes in a dtype; its parameters are float32
      in any case.
    optimizer: without loss scaling.
    batches: makes the endless training batches of a seed.
    held_out: batches that no seed trains on.
    score: float[...] from logits and labels; its mean over `held_out` is what
      the comparison is about.
    score_name: what that mean is called.
    steps: how many it takes unless told otherwise.
    note: what is to be said under the table, if anything.
  """

  name: str
  description: str
  model: Callable[[DTypeLike], nn.Module]
  optimizer: optax.GradientTransformation
  batches: Callable[[int], Iterator[Batch]]
  held_out: Sequence[Batch]
  score: Callable[[jax.Array, jax.Array], jax.Array]
  score_name: str
  steps: int
  note: str = ""
