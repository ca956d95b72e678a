"""What `autocast` does with each operation: lists, levels, the caller's recipe.

Names are those of JAX's primitives, and a few more for what has none of its
own: "square" is also `x * x` and `integer_pow` by 2, "cube" is that by 3,
"reciprocal" that by -1 and a number divided by x, and "vecdot" a `dot_general`
of vectors, which is a sum of products rather than a matrix product. The groups
are those of PyTorch, Apex, MindSpore, TensorFlow and Paddle; where they differ
the majority decides, and the comment says so.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import enum
import functools
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes

FLOAT32 = np.dtype(np.float32)
_LOW = ("float16", "bfloat16")
_DTYPES = (*_LOW, "float32")

# Matrix products and convolutions. Hardware computes them many times faster in
# low precision, and accumulates in float32. Attention and the recurrent cells,
# which the other systems list as well, are made of these.
PRODUCTS = operation_table.names("""
  conv_general_dilated dot_general ragged_dot ragged_dot_general
""")

# They grow so fast that float16 overflows soon, exp at 12, or it is their slope
# near 0 or 1 that matters. TensorFlow lets log follow its input. Squares and
# cubes, which PyTorch has in float32 when they are written as powers, follow
# theirs: activations are made of them, which are in low precision in a layer
# with `dtype=`. In front of a sum they are in float32.
STEEP = operation_table.names("""
  cosh exp exp2 expm1 integer_pow log log1p log2 pow reciprocal rsqrt sinh tan
""")

# Steep at the ends of their range, where float16 has few values left.
INVERSES = operation_table.names("acos acosh asin asinh atanh erf_inv")

# Long sums lose the small summands: in float16 2048 + 1 is 2048. They are
# accumulated in float32 at every level; here are those whose result stays in
# float32 too. All of softmax, of a mean, of a norm goes on from there.
SUMS = operation_table.names("""
  cumlogsumexp cumprod cumsum psum psum_invariant reduce_prod reduce_scatter
  reduce_sum reduce_window_sum scatter-add scatter-mul vecdot
""")

# Series and continued fractions of many terms: nobody computes them in low
# precision, so no level does.
SPECIAL = operation_table.names("""
  bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma
  regularized_incomplete_beta zeta
""")

# What MindSpore's level "auto" runs in the widest dtype among its inputs, also
# where one of them is a parameter: BiasAdd, AddN and Concat.
PROMOTING = operation_table.names("add add_any concatenate")

# The scopes of what is kept in float32, as shell patterns for one part of a
# scope. Flax Linen calls them so unless the model's author names them.
NORM_SCOPES = ("*Norm*", "*norm*")
LOSS_SCOPES = ("*Loss*", "*loss*", "*cross_entropy*")


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
  """What is done with the operations of each list."""

  white: frozenset[str] = frozenset()
  black: frozenset[str] = frozenset()
  promote: frozenset[str] = frozenset()
  gray: frozenset[str] = frozenset()
  # What is done with all other operations.
  rest: Treatment = Treatment.GRAY
  # Parts of scopes inside of which float32 is kept; not for `white`.
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

_BLACK = STEEP | INVERSES | SUMS | SPECIAL
_SCOPES = NORM_SCOPES + LOSS_SCOPES

LEVELS: Mapping[str, Level] = {
  "O0": Level(rest=Treatment.WRITTEN),
  "O1": Level(white=PRODUCTS, black=_BLACK, scopes=_SCOPES),
  "O2": Level(
    white=PRODUCTS,
    black=SPECIAL,
    rest=Treatment.LOW_BUT_NORMS,
    scopes=_SCOPES,
  ),
  "O3": Level(
    white=PRODUCTS,
    black=SPECIAL,
    rest=Treatment.LOW,
    scopes=LOSS_SCOPES,
  ),
  "auto": Level(
    white=PRODUCTS,
    black=_BLACK,
    promote=PROMOTING,
    scopes=_SCOPES,
  ),
  # Paddle's: the white list alone.
  "OD": Level(white=PRODUCTS, rest=Treatment.WRITTEN),
}


def find_level(level: Any) -> Level:
  """Returns the level of a name."""
  if not isinstance(level, str) or level not in LEVELS:
    raise ValueError(
      f"`level` must be one of {', '.join(LEVELS)}, got {shown(level)}."
    )
  return LEVELS[level]


class Decision(NamedTuple):
  """What is done with one operation."""

  treatment: Treatment
  # Which one low precision is.
  dtype: Any
  # Whether the caller said so of the scope that it is in.
  is_override: bool = False
  # For a note, of BLACK alone.
  why: str = ""


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What `autocast` was asked for."""

  # With the lists as the caller edited them.
  level: Level
  # Of low precision.
  dtype: Any
  # By pattern, the dtype of all operations in the scope.
  overrides: tuple[tuple[str, Any], ...]
  # The operations that the caller put in other lists.
  edited: frozenset[str]
  # The scopes that have a product in them: norms and losses do not, whatever
  # they are called.
  product_scopes: frozenset[str] = frozenset()

  @functools.cached_property
  def dtypes(self) -> frozenset[Any]:
    """The dtypes among which the recipe moves values."""
    return frozenset(
      [FLOAT32, self.dtype, *(dtype for _, dtype in self.overrides)]
    )

  @property
  def is_idle(self) -> bool:
    """Whether there is nothing to do."""
    return not self.overrides and self.level == LEVELS["O0"]

  def of(
    self, operations: Collection[tuple[str, str]], names: frozenset[str]
  ) -> "Recipe":
    """Returns the recipe for a function."""
    _check_patterns(
      [pattern for pattern, _ in self.overrides],
      {scope for scope, _ in operations},
    )
    known = names.union(
      (name for _, name in operations),
      *(level.named for level in LEVELS.values()),
    )
    for name in sorted(self.edited - known):
      # Closer than elsewhere: 'matmul' is no misspelt 'mul'.
      remedy = arguments.did_you_mean(name, known, most=3, cutoff=0.75) or (
        "; a matrix product is 'dot_general', a softmax is made of 'exp', "
        "'reduce_sum' and 'div': jax.make_jaxpr shows those of a function."
      )
      raise ValueError(
        "The names in `operations` must be those of JAX's primitives, got "
        f"{shown(name)}{remedy}"
      )
    with_product = {
      ancestor
      for scope, name in operations
      if name in PRODUCTS
      for ancestor in scopes.ancestors(scope)
    }
    return dataclasses.replace(self, product_scopes=frozenset(with_product))

  def decide(self, operation: str, scope: str) -> Decision:
    """Returns what is done with an operation."""
    overrides = [x for x in self.overrides if scopes.matches(scope, x[0])]
    if overrides:
      _, dtype = max(overrides, key=lambda x: len(x[0]))
      is_float32 = dtype == FLOAT32
      treatment = Treatment.BLACK if is_float32 else Treatment.LOW
      why = "overrides" if is_float32 else ""
      return Decision(treatment, dtype, is_override=True, why=why)
    treatment = self.level.treatment(operation)
    why = "black list" if treatment is Treatment.BLACK else ""
    if treatment is not Treatment.WHITE and any(
      scopes.ends_in(x, self.level.scopes) and x not in self.product_scopes
      for x in scopes.ancestors(scope)
    ):
      treatment, why = Treatment.BLACK, "scope of a norm or loss"
    return Decision(treatment, self.dtype, why=why)


def make_recipe(
  level: Any, dtype: Any, overrides: Any, operations: Any
) -> Recipe:
  """Returns the recipe of what the caller of `autocast` passed."""
  overrides = _check_mapping(
    "overrides", overrides, '{"LeNet5/conv1": jnp.float16}'
  )
  edits = _check_operations(operations)
  return Recipe(
    level=find_level(level).edit(edits),
    dtype=_check_dtype("`dtype`", dtype, _LOW),
    overrides=tuple(
      (x, _check_dtype(f"`overrides[{shown(x)}]`", value, _DTYPES))
      for x, value in overrides.items()
    ),
    edited=frozenset().union(*edits.values()),
  )


def _check_patterns(
  patterns: Iterable[str], found_scopes: Collection[str]
) -> None:
  """Raises if a pattern matches nothing."""
  for pattern in patterns:
    if any(scopes.matches(scope, pattern) for scope in found_scopes):
      continue
    known = sorted(
      {x for scope in found_scopes for x in scopes.ancestors(scope)}
    )
    there_are = (
      f"the scopes are {', '.join(map(repr, known))}"
      if known
      else "it has none: Flax Linen writes them, elsewhere jax.named_scope does"
    )
    anywhere = f"*{pattern}"
    hint = (
      f" It begins at the first part of a scope: {shown(anywhere)} would match."
      if any(scopes.matches(scope, anywhere) for scope in found_scopes)
      else ""
    )
    raise ValueError(
      "Each pattern of `overrides` must match a scope of the function, got "
      f"{shown(pattern)}; {there_are}.{hint}"
    )


def _check_dtype(name: str, dtype: Any, known: Collection[str]) -> Any:
  found, got = arguments.read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"{name} must be a dtype, one of {', '.join(known)}, got {got}."
    )
  if found.name not in known:
    remedy = (
      "; float8 needs a scale for each tensor, which the layers for it keep, "
      "such as Flax's Fp8 operations"
      if jnp.finfo(found).bits == 8
      else ""
    )
    raise ValueError(
      f"{name} must be one of {', '.join(known)}, got {got}{remedy}."
    )
  return found


def _check_operations(operations: Any) -> dict[str, frozenset[str]]:
  example = '{"black": ["tanh"], "gray": ["exp"]}'
  checked: dict[str, frozenset[str]] = {}
  for name, members in _check_mapping(
    "operations", operations, example
  ).items():
    if name not in LIST_NAMES:
      raise ValueError(
        "The lists of `operations` are "
        f"{', '.join(map(repr, LIST_NAMES))}, got {shown(name)}."
      )
    if (
      isinstance(members, str)
      or not isinstance(members, Iterable)
      or not all(isinstance(member, str) for member in members)
    ):
      raise TypeError(
        f"`operations[{name!r}]` must be a list of names, such as {example}, "
        f"got {shown(members)}."
      )
    for other, others in checked.items():
      if twice := others & frozenset(members):
        raise ValueError(
          "An operation of `operations` must be in one list, got "
          f"{', '.join(sorted(map(repr, twice)))} in {other!r} and {name!r}."
        )
    checked[name] = frozenset(members)
  return checked


def _check_mapping(name: str, value: Any, example: str) -> Mapping[str, Any]:
  if value is None:
    return {}
  if not isinstance(value, Mapping) or not all(
    isinstance(key, str) for key in value
  ):
    raise TypeError(
      f"`{name}` must be a dict such as {example}, got {shown(value)}."
    )
  return value
