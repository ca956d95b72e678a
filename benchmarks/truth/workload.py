"""A workload: a model, data, a loss and a score."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import optax

Params = Any
Batch = Any


@dataclasses.dataclass(frozen=True)
class Workload:
  """A training that `train` can run in any precision, from any seed.

  All functions are written in float32 and can be jitted. `loss` alone is
  lowered; batches and scores are computed in float32 in every setting.
  """

  # The model, the data and the loss, exactly, in one sentence.
  description: str
  # The mean or sum in the loss: how many elements it is over.
  elements: int
  # Makes the parameters from a random key.
  init: Callable[[jax.Array], Params]
  # Draws the batch of a step, from a random key. The parameters are for
  # reinforcement learning, where the policy makes the data.
  draw: Callable[[jax.Array, Params], Batch]
  loss: Callable[[Params, Batch], jax.Array]
  # The score of parameters on data that no seed trains on.
  score: Callable[[Params], jax.Array]
  score_name: str
  # The smallest difference between scores that matters to a user.
  matters: float
  # Adam's, which falls to 0 with the cosine.
  rate: float
  steps: int
  more_is_better: bool = False
  # Train in all settings, or only in those that show that it needs no loss
  # scaling.
  full: bool = True
  # Train with parameters in bfloat16 too, and with other products.
  sixteen_bit: bool = False
  betas: tuple[float, float] = (0.9, 0.999)
  # Whether the data are the sources of the Python that trains.
  on_sources: bool = False

  @property
  def optimizer(self) -> optax.GradientTransformation:
    """Adam, whose schedule counts the steps that are applied."""
    schedule = optax.cosine_decay_schedule(self.rate, self.steps)
    return optax.adam(schedule, *self.betas)
