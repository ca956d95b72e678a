"""What the update phase is measured on: parameters and scaled gradients."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import settings

# Of the gradients of the loss; those of S times the loss are then around 1.
_GRADIENT_SIZE = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
  """Parameters in leaves of one shape, and the dtype of their gradients.

  Attributes:
    name: as on the command line.
    leaves: how many.
    shape: of each leaf.
    gradients: the dtype of the gradients; the parameters are float32.
  """

  name: str
  leaves: int
  shape: tuple[int, ...]
  gradients: str

  @property
  def parameters(self) -> int:
    """How many there are in all leaves."""
    return self.leaves * math.prod(self.shape)

  @property
  def parameter_bytes(self) -> int:
    """What they take."""
    return self.parameters * np.dtype(np.float32).itemsize

  @property
  def title(self) -> str:
    """The case in words."""
    shape = " x ".join(map(str, self.shape))
    return (
      f"{self.parameters:,} float32 parameters in {self.leaves} leaves of "
      f"{shape}, {self.gradients} gradients"
    )

  def make_params(self) -> list[np.ndarray]:
    """Returns the first parameters."""
    generator = np.random.default_rng(0)
    return [
      generator.standard_normal(self.shape, np.float32) * np.float32(0.02)
      for _ in range(self.leaves)
    ]

  def make_scaled_gradients(self) -> list[jax.Array]:
    """Returns gradients of S times the loss."""
    generator = np.random.default_rng(1)
    size = np.float32(_GRADIENT_SIZE * settings.LOSS_SCALE)
    return [
      jnp.asarray(
        generator.standard_normal(self.shape, np.float32) * size,
        self.gradients,
      )
      for _ in range(self.leaves)
    ]


def unscaled(gradients: list[jax.Array]) -> list[jax.Array]:
  """Returns the gradients of the loss, float32.

  Args:
    gradients: of S times the loss.
  """
  return [leaf.astype(jnp.float32) / settings.LOSS_SCALE for leaf in gradients]


def overflowing(gradients: list[jax.Array]) -> list[jax.Array]:
  """Returns the same gradients, but the very last one is inf."""
  *others, last = gradients
  return [*others, last.at[(-1,) * last.ndim].set(jnp.inf)]


_LEAVES = {
  "10": (10, (2500, 2000)),
  "100": (100, (1000, 500)),
  "100-small": (100, (32, 32)),
  "1000-small": (1000, (32, 32)),
}
NAMES = tuple(_LEAVES)


def make_case(name: str, gradients: str, *, quick: bool = False) -> Case:
  """Returns a case.

  Args:
    name: one of `NAMES`; without "small" it has 50 million parameters.
    gradients: their dtype.
    quick: a tenth of the leaves, tiny ones, to see it work.
  """
  leaves, shape = _LEAVES[name]
  if quick:
    leaves, shape = leaves // 10 + 1, (16, 8)
  return Case(name, leaves, shape, gradients)
