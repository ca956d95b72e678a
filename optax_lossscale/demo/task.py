"""A training task: a model, an optimizer and data."""

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
Measure = Callable[[jax.Array, jax.Array], jax.Array]  # Of logits and labels.

cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels


@dataclasses.dataclass(frozen=True)
class Task:
  """A model, an optimizer and real data: inputs and integer labels."""

  name: str  # As on the command line.
  description: str  # A line for people.
  # Makes the model that computes in a dtype, with float32 parameters.
  model: Callable[[DTypeLike], nn.Module]
  optimizer: optax.GradientTransformation  # Without loss scaling.
  # Makes the endless training batches of a seed.
  batches: Callable[[int], Iterator[Batch]]
  held_out: Sequence[Batch]  # Batches that no seed trains on.
  score: Measure  # Compared by its mean over `held_out`.
  score_name: str  # The name of that mean.
  steps: int  # How many it takes unless told otherwise.
  # Trained on by its mean over a batch.
  loss: Measure = cross_entropy
  more_is_better: bool = True  # Of the score.
  note: str = ""  # Said if a run is in float16 without loss scaling.
