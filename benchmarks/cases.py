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
  """Parameters in leaves, and the dtype of their gradients.

  Attributes:
    name: as on the command line.
    shapes: of the leaves.
    gradients: the dtype of the gradients; the parameters are float32.
  """

  name: str
  shapes: tuple[tuple[int, ...], ...]
  gradients: str

  @property
  def parameters(self) -> int:
    """How many there are in all leaves."""
    return sum(map(math.prod, self.shapes))

  @property
  def leaves(self) -> int:
    """How many leaves hold them."""
    return len(self.shapes)

  @property
  def parameter_bytes(self) -> int:
    """What they take."""
    return self.parameters * np.dtype(np.float32).itemsize

  @property
  def title(self) -> str:
    """The case in words."""
    by_size = sorted({*self.shapes}, key=math.prod)
    first, last = (" x ".join(map(str, x)) for x in (by_size[0], by_size[-1]))
    shape = first if first == last else f"{first} to {last}"
    return (
      f"{self.parameters:,} float32 parameters in {self.leaves} leaves of "
      f"{shape}, {self.gradients} gradients"
    )

  def make_params(self) -> list[np.ndarray]:
    """Returns the first parameters."""
    generator = np.random.default_rng(0)
    return [
      generator.standard_normal(shape, np.float32) * np.float32(0.02)
      for shape in self.shapes
    ]

  def make_scaled_grads(self) -> list[jax.Array]:
    """Returns gradients of S times the loss."""
    generator = np.random.default_rng(1)
    size = np.float32(_GRADIENT_SIZE * settings.LOSS_SCALE)
    return [
      jnp.asarray(
        generator.standard_normal(shape, np.float32) * size,
        self.gradients,
      )
      for shape in self.shapes
    ]


def unscaled(scaled_grads: list[jax.Array]) -> list[jax.Array]:
  """Returns the gradients of the loss, float32.

  Args:
    scaled_grads: of S times the loss.
  """
  return [
    leaf.astype(jnp.float32) / settings.LOSS_SCALE for leaf in scaled_grads
  ]


def overflowing(scaled_grads: list[jax.Array]) -> list[jax.Array]:
  """Returns the same gradients, but the very last one is inf."""
  *others, last = scaled_grads
  return [*others, last.at[(-1,) * last.ndim].set(jnp.inf)]


def _transformer() -> tuple[tuple[int, ...], ...]:
  """Returns the shapes of six blocks and an embedding, in the order of use."""
  width, block = 768, []
  for columns, rows in ((3, 1), (1, 1), (4, 1), (1, 4)):
    block += [(width,), (rows * width, columns * width), (columns * width,)]
  return ((8192, width), *6 * block)


_SHAPES = {
  "10": 10 * ((2500, 2000),),
  "73": _transformer(),
  "100": 100 * ((1000, 500),),
  "100-small": 100 * ((32, 32),),
  "1000-small": 1000 * ((32, 32),),
}
NAMES = tuple(_SHAPES)


def make_case(name: str, gradients: str, *, tiny: bool = False) -> Case:
  """Returns a case.

  Args:
    name: one of `NAMES`; without "small" it has about 50 million parameters.
    gradients: their dtype.
    tiny: a tenth of the leaves, tiny ones, to see it work.
  """
  shapes = _SHAPES[name]
  if tiny:
    shapes = (len(shapes) // 10 + 1) * ((16, 8),)
  return Case(name, shapes, gradients)
