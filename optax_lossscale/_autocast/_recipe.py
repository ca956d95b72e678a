"""The recipe of an `autocast`: its level, dtype, overrides and lists."""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import difflib
import functools
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import _levels
from optax_lossscale._autocast import _lists
from optax_lossscale._base import arguments
from optax_lossscale._jaxpr import scopes as _scopes

FLOAT32 = np.dtype(np.float32)
_LOW = ("float16", "bfloat16")
_DTYPES = (*_LOW, "float32")


class Decision(NamedTuple):
  """What is done with an operation.

  Attributes:
    treatment: in which precision it runs.
    dtype: which one low precision is.
    is_override: whether the caller said so of the scope it is in.
  """

  treatment: _levels.Treatment
  dtype: Any
  is_override: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What `autocast` was asked for.

  Attributes:
    level: with the lists as the caller edited them.
    dtype: of low precision.
    overrides: by pattern, the dtype of all operations in the scope.
    edited: the operations that the caller put in other lists.
    product_scopes: the scopes that have a product in them: norms and losses do
      not, whatever they are called.
  """

  level: _levels.Level
  dtype: Any
  overrides: tuple[tuple[str, Any], ...]
  edited: frozenset[str]
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
    return not self.overrides and self.level == _levels.LEVELS["O0"]

  def of(
    self, operations: Collection[tuple[str, str]], names: frozenset[str]
  ) -> "Recipe":
    """Returns the recipe for a function."""
    scopes = {scope for scope, _ in operations}
    _scopes.check_patterns([pattern for pattern, _ in self.overrides], scopes)
    known = names.union(
      (name for _, name in operations),
      *(level.named for level in _levels.LEVELS.values()),
    )
    for name in sorted(self.edited - known):
      close = difflib.get_close_matches(name, known, cutoff=0.75)
      remedy = (
        f"did you mean {', '.join(map(repr, close))}?"
        if close
        else "a matrix product is 'dot_general', a softmax is made of 'exp', "
        "'reduce_sum' and 'div': jax.make_jaxpr shows those of a function."
      )
      raise ValueError(
        "The names in `operations` must be those of JAX's primitives, got "
        f"{name!r}; {remedy}"
      )
    with_product = {
      ancestor
      for scope, name in operations
      if name in _lists.PRODUCTS
      for ancestor in _scopes.ancestors(scope)
    }
    return dataclasses.replace(self, product_scopes=frozenset(with_product))

  @property
  def in_float32(self) -> Decision:
    """What is done with an operation for what comes after it."""
    return Decision(_levels.Treatment.BLACK, self.dtype)

  @property
  def as_written(self) -> Decision:
    """What is done with an operation that nothing is known of."""
    return Decision(_levels.Treatment.WRITTEN, self.dtype)

  def decide(self, operation: str, scope: str) -> Decision:
    """Returns what is done with an operation."""
    overrides = [x for x in self.overrides if _scopes.matches(scope, x[0])]
    if overrides:
      _, dtype = max(overrides, key=lambda x: len(x[0]))
      is_float32 = dtype == FLOAT32
      treatment = (
        _levels.Treatment.BLACK if is_float32 else _levels.Treatment.LOW
      )
      return Decision(treatment, dtype, is_override=True)
    treatment = self.level.treatment(operation)
    if treatment is not _levels.Treatment.WHITE and any(
      _scopes.ends_in(x, self.level.scopes) and x not in self.product_scopes
      for x in _scopes.ancestors(scope)
    ):
      treatment = _levels.Treatment.BLACK
    return Decision(treatment, self.dtype)


def make_recipe(
  level: Any, dtype: Any, overrides: Any, operations: Any
) -> Recipe:
  """Returns the recipe of what the caller of `autocast` passed."""
  overrides = _check_mapping(
    "overrides", overrides, '{"LeNet5/conv1": jnp.float16}'
  )
  edits = _check_operations(operations)
  return Recipe(
    level=_levels.find_level(level).edit(edits),
    dtype=_check_dtype("`dtype`", dtype, _LOW),
    overrides=tuple(
      (pattern, _check_dtype(f"`overrides[{pattern!r}]`", value, _DTYPES))
      for pattern, value in overrides.items()
    ),
    edited=frozenset().union(*edits.values()),
  )


def _check_dtype(name: str, dtype: Any, known: Collection[str]) -> Any:
  found, shown = arguments.read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"{name} must be a dtype, one of {', '.join(known)}, got {shown}."
    )
  if found.name not in known:
    remedy = (
      "; float8 needs a scale for each tensor, which the layers for it keep, "
      "such as Flax's Fp8 operations"
      if jnp.finfo(found).bits == 8
      else ""
    )
    raise ValueError(
      f"{name} must be one of {', '.join(known)}, got {shown}{remedy}."
    )
  return found


def _check_operations(operations: Any) -> dict[str, frozenset[str]]:
  example = '{"black": ["tanh"], "gray": ["exp"]}'
  checked: dict[str, frozenset[str]] = {}
  for name, members in _check_mapping(
    "operations", operations, example
  ).items():
    if name not in _levels.LIST_NAMES:
      raise ValueError(
        "The lists of `operations` are "
        f"{', '.join(map(repr, _levels.LIST_NAMES))}, got {name!r}."
      )
    if (
      isinstance(members, str)
      or not isinstance(members, Iterable)
      or not all(isinstance(member, str) for member in members)
    ):
      raise TypeError(
        f"`operations[{name!r}]` must be a list of names, such as {example}, "
        f"got {members!r}."
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
      f"`{name}` must be a dict such as {example}, got {value!r}."
    )
  return value
