"""The levels: what each does with the operations of every list."""

from collections.abc import Mapping
import dataclasses
import enum
from typing import Any

from optax_lossscale._autocast import _lists as lists


class Treatment(enum.Enum):
  """What is done with an operation."""

  # In low precision.
  WHITE = "white"
  # In float32.
  BLACK = "black"
  # In the widest dtype among its inputs; what is given from outside follows.
  GRAY = "gray"
  # In the widest dtype among its inputs, parameters among them.
  PROMOTE = "promote"
  # In low precision, unless it is part of a normalization.
  LOW_BUT_NORMS = "low but norms"
  # In low precision, whatever it is.
  LOW = "low"
  # As it stands in the program.
  WRITTEN = "written"


@dataclasses.dataclass(frozen=True)
class Level:
  """A recipe of mixed precision.

  Attributes:
    white: operations that run in low precision.
    black: operations that run in float32.
    promote: operations that run in the widest dtype among their inputs.
    gray: operations that follow their inputs.
    rest: what is done with all other operations.
    scopes: parts of scopes inside of which float32 is kept; not for `white`.
  """

  white: frozenset[str] = frozenset()
  black: frozenset[str] = frozenset()
  promote: frozenset[str] = frozenset()
  gray: frozenset[str] = frozenset()
  rest: Treatment = Treatment.GRAY
  scopes: tuple[str, ...] = ()

  @property
  def named(self) -> frozenset[str]:
    """All operations that are in a list."""
    return frozenset().union(*(getattr(self, name) for name in LIST_NAMES))

  def treatment(self, operation: str) -> Treatment:
    """Returns what is done with an operation outside of all scopes."""
    for name in LIST_NAMES:
      if operation in getattr(self, name):
        return Treatment(name)
    return self.rest

  def edit(self, operations: Mapping[str, frozenset[str]]) -> "Level":
    """Returns the level with operations in other lists."""
    named = frozenset().union(*operations.values())
    return dataclasses.replace(
      self,
      **{
        name: (getattr(self, name) - named) | operations.get(name, frozenset())
        for name in LIST_NAMES
      },
    )


LIST_NAMES = ("white", "black", "promote", "gray")

_BLACK = lists.STEEP | lists.INVERSES | lists.SUMS | lists.SPECIAL
_SCOPES = lists.NORM_SCOPES + lists.LOSS_SCOPES

LEVELS: Mapping[str, Level] = {
  "O0": Level(rest=Treatment.WRITTEN),
  "O1": Level(white=lists.PRODUCTS, black=_BLACK, scopes=_SCOPES),
  "O2": Level(
    white=lists.PRODUCTS,
    black=lists.SPECIAL,
    rest=Treatment.LOW_BUT_NORMS,
    scopes=_SCOPES,
  ),
  "O3": Level(
    white=lists.PRODUCTS,
    black=lists.SPECIAL,
    rest=Treatment.LOW,
    scopes=lists.LOSS_SCOPES,
  ),
  "auto": Level(
    white=lists.PRODUCTS,
    black=_BLACK,
    promote=lists.PROMOTING,
    scopes=_SCOPES,
  ),
  # Paddle's: the white list alone.
  "OD": Level(white=lists.PRODUCTS, rest=Treatment.WRITTEN),
}


def find_level(level: Any) -> Level:
  """Returns the level of a name."""
  if not isinstance(level, str) or level not in LEVELS:
    raise ValueError(
      f"`level` must be one of {', '.join(LEVELS)}, got {level!r}."
    )
  return LEVELS[level]
