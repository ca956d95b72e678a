"""How `autocast` treats each operation: lists, levels and the caller's recipe.

Operations have the names of JAX's primitives, with four additions. "square" is
also `x * x` and `integer_pow` by 2, "cube" is `integer_pow` by 3, "reciprocal"
is `integer_pow` by -1 or a number divided by x, and "vecdot" is a `dot_general`
of vectors, which is a sum of products rather than a matrix product. The groups
follow PyTorch, Apex, MindSpore, TensorFlow and Paddle. Where these systems
differ, the majority decides, and a comment says so.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import enum
import functools
from typing import NamedTuple

import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale._base.formats import FLOAT8
from optax_lossscale._base.formats import FLOAT32
from optax_lossscale._base.formats import is_float8
from optax_lossscale._base.formats import LOW
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr.operations import Cast
from optax_lossscale._jaxpr.operations import NAMES
from optax_lossscale._jaxpr.operations import names

# Hardware computes matrix products and convolutions many times faster in low
# precision, while accumulating in float32. Other systems also list
# attention and recurrent cells, which in JAX consist of these operations.
PRODUCTS = names(Cast.PRODUCT)

# Functions that grow so fast that float16 overflows early (exp at 12), or whose
# slope near 0 or 1 matters. TensorFlow lets log follow its input. PyTorch runs
# squares and cubes in float32 if they are written as powers. Here squares and
# cubes follow their input, as they do in the activations of a layer with
# `dtype=`. Before a sum, however, squares and cubes are in float32. The inverse
# functions are steep at the ends of their domain, where float16 has few values.
STEEP = names(Cast.STEEP)

# Long sums lose small terms: in float16, 2048 + 1 is 2048. So every level
# accumulates sums in float32. The results of these sums also stay in float32,
# and so does the rest of a softmax, a mean or a norm.
SUMS = names(Cast.SUM)

# Functions computed by series or continued fractions with many terms. Nobody
# runs these in low precision, so no level does.
SPECIAL = names(Cast.SPECIAL)

# MindSpore's level "auto" runs BiasAdd, AddN and Concat in the widest dtype
# among their inputs, even if that is the dtype of a parameter.
PROMOTING = names(Cast.PROMOTES)

# Patterns for the scopes that stay in float32, each for one part of a scope.
# NORM_SCOPES matches the default names of Flax Linen's norms.
NORM_SCOPES = ("*Norm*", "*norm*")
LOSS_SCOPES = ("*Loss*", "*loss*", "*cross_entropy*")

# The reason for an operation that `autocast` cannot look into.
OPAQUE = "opaque, see ols.cast_inputs"
# How the reason for a product in 16 bits begins.
NOT_FLOAT8 = "not float8: "


class Treatment(enum.Enum):
  """How the dtype of an operation is chosen."""

  # In low precision.
  WHITE = "white"
  # In float32.
  BLACK = "black"
  # In the widest dtype of its inputs; added or multiplied parameters follow it.
  GRAY = "gray"
  # In the widest dtype of its inputs, including parameters.
  PROMOTE = "promote"
  # In low precision, unless it is part of a norm.
  LOW_BUT_NORMS = "low but norms"
  # In low precision, even if it is part of a norm.
  LOW = "low"
  # In the dtypes of the original program.
  WRITTEN = "written"


# The treatments that a caller may choose for an operation, by their names.
LISTS = {
  name: Treatment(name) for name in ("white", "black", "promote", "gray")
}


class Level(NamedTuple):
  """A level: the treatments of operations, by name and in scopes."""

  listed: Mapping[str, Treatment]
  # The treatment of operations that are on no list.
  rest: Treatment = Treatment.GRAY
  # Patterns for scopes that stay in float32, apart from white operations.
  scopes: tuple[str, ...] = ()

  @property
  def lowers_products(self) -> bool:
    """Whether any kind of product may be in low precision."""
    found = {self.listed.get(x, self.rest) for x in PRODUCTS}
    return not found <= {Treatment.WRITTEN, Treatment.BLACK}


_WHITE = dict.fromkeys(PRODUCTS, Treatment.WHITE)
_SPECIAL = {**_WHITE, **dict.fromkeys(SPECIAL, Treatment.BLACK)}
_BLACK = {**_SPECIAL, **dict.fromkeys(STEEP | SUMS, Treatment.BLACK)}
_PROMOTE = {**_BLACK, **dict.fromkeys(PROMOTING, Treatment.PROMOTE)}
_SCOPES = NORM_SCOPES + LOSS_SCOPES

LEVELS: Mapping[str, Level] = {
  "O0": Level({}, Treatment.WRITTEN),
  "O1": Level(_BLACK, Treatment.GRAY, _SCOPES),
  "O2": Level(_SPECIAL, Treatment.LOW_BUT_NORMS, _SCOPES),
  "O3": Level(_SPECIAL, Treatment.LOW, LOSS_SCOPES),
  "auto": Level(_PROMOTE, Treatment.GRAY, _SCOPES),
  # Paddle's level of this name, which has only a white list.
  "OD": Level(_WHITE, Treatment.WRITTEN),
}


def find_level(level: object) -> Level:
  """Returns the level with this name."""
  if not isinstance(level, str) or level not in LEVELS:
    alike = [x for x in LEVELS if x.lower() == str(level).lower()]
    remedy = f"; did you mean {alike[0]}?" if alike else "."
    if arguments.read_dtype(level)[0] is not None:
      remedy = "; pass a dtype as `dtype`."
    raise ValueError(
      f"`level` must be one of {', '.join(LEVELS)}, got {shown(level)}{remedy}"
    )
  return LEVELS[level]


class Formats(NamedTuple):
  """The dtypes of a product: its operands', its gradients' and its result's."""

  operands: np.dtype
  gradients: np.dtype
  result: np.dtype | None  # None for the low-precision dtype.

  @property
  def in_float8(self) -> bool:
    """Whether the operands have scales."""
    return is_float8(self.operands)

  def in_16_bits(self, dtype: np.dtype) -> "Formats | None":
    """Returns those of a product that stays in `dtype`; None if all are it."""
    if self.result is None:
      return None
    return Formats(dtype, dtype, self.result)


# Pairs of a scope pattern and the dtype of all operations in that scope, or the
# float8 of its products, or None if the level decides.
Overrides = tuple[tuple[str, np.dtype | None], ...]


def find_override(overrides: Overrides, scope: str) -> np.dtype | None:
  """Returns the dtype of the longest pattern that matches a scope, if any."""
  found = [x for x in overrides if scopes.matches(scope, x[0])]
  # Of two as long, "a" counts rather than "*".
  length = lambda x: (len(x[0]), -x[0].count("*"))  # noqa: E731
  return max(found, key=length, default=("", None))[1]


class Decision(NamedTuple):
  """The treatment of one operation, and the reason for it."""

  treatment: Treatment
  dtype: np.dtype  # The low-precision dtype.
  # True if a pattern of `overrides` matches the operation's scope.
  is_override: bool = False
  # The reason that `precision_report` shows, if any.
  why: str = ""
  # Those of a product, unless they are what JAX makes of the dtype.
  formats: Formats | None = None
  # True if the operation is part of a function that `cast_inputs` marks.
  is_marked: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The caller's settings for `autocast`."""

  level: Level  # With the caller's changes to its lists.
  dtype: np.dtype  # The low-precision dtype.
  overrides: Overrides
  # Of the products' operands and gradients, and of their results.
  dot_dtypes: tuple[np.dtype, np.dtype] | None = None
  result_dtype: np.dtype | None = None
  # In a rule for tangents, whose products are transposed: one with formats has
  # a derivative, but no transpose.
  in_jvp_rule: bool = False
  # The scopes that contain a product. Such scopes do not count as norms or
  # losses, whatever their names.
  product_scopes: frozenset[str] = frozenset()

  @functools.cached_property
  def dtypes(self) -> frozenset[np.dtype]:
    """The dtypes that the recipe converts from and to."""
    return frozenset([FLOAT32, self.dtype, *self.dtypes_of_marked])

  @property
  def dtypes_of_marked(self) -> tuple[np.dtype, ...]:
    """The dtypes that marked functions may have in some scope."""
    chosen = [None, *(dtype for _, dtype in self.overrides)]
    return tuple(dict.fromkeys(map(self._dtype_if_chosen, chosen)))

  def dtype_of_marked(self, scope: str) -> np.dtype:
    """Returns the dtype of a marked function in a scope."""
    return self._dtype_if_chosen(find_override(self.overrides, scope))

  def _dtype_if_chosen(self, dtype: np.dtype | None) -> np.dtype:
    """Returns that of a marked function, if an override chooses `dtype`."""
    if dtype is None:
      return self.dtype if self.level.lowers_products else FLOAT32
    return self.dtype if is_float8(dtype) else dtype

  @property
  def is_idle(self) -> bool:
    """True if the recipe changes nothing."""
    return not self.overrides and self.level == LEVELS["O0"]

  def of(self, operations: Collection[tuple[str, str]]) -> "Recipe":
    """Returns the recipe for a function that has these (scope, name) pairs."""
    _check_patterns(self.overrides, {scope for scope, _ in operations})
    known = NAMES.union(
      (name for _, name in operations),
      *(level.listed for level in LEVELS.values()),
    )
    for name in sorted(self.level.listed.keys() - known):
      # The cutoff is high, since 'matmul' is not a misspelled 'mul'.
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

  def for_jvp_rule(self) -> "Recipe":
    """Returns the recipe for a rule for tangents."""
    return dataclasses.replace(self, in_jvp_rule=True)

  def decide(self, operation: str, scope: str) -> Decision:
    """Returns how to treat an operation, given its name and its scope."""
    dtype, dot_dtypes = find_override(self.overrides, scope), self.dot_dtypes
    if dtype is not None and not is_float8(dtype):
      is_float32 = dtype == FLOAT32
      treatment = Treatment.BLACK if is_float32 else Treatment.LOW
      why = "overrides" if is_float32 else ""
      formats, not_float8 = self._formats(operation, dtype, None)
      return Decision(treatment, dtype, True, why or not_float8, formats)
    treatment = self.level.listed.get(operation, self.level.rest)
    if dtype is not None:
      dot_dtypes = dtype, FLOAT8[dtype.name]
      if operation in PRODUCTS:
        treatment = Treatment.WHITE
    why = "black list" if treatment is Treatment.BLACK else ""
    if treatment is not Treatment.WHITE and any(
      scopes.ends_in(x, self.level.scopes) and x not in self.product_scopes
      for x in scopes.ancestors(scope)
    ):
      treatment, why = Treatment.BLACK, "scope of a norm or loss"
    formats, not_float8 = self._formats(operation, self.dtype, dot_dtypes)
    return Decision(treatment, self.dtype, False, why or not_float8, formats)

  def _formats(
    self,
    operation: str,
    dtype: np.dtype,
    dot_dtypes: tuple[np.dtype, np.dtype] | None,
  ) -> tuple[Formats | None, str]:
    """Returns the formats of a product, if any, and why they are not float8."""
    if operation not in PRODUCTS:
      return None, ""
    if self.in_jvp_rule:
      return None, f"{NOT_FLOAT8}in a jvp rule" if dot_dtypes else ""
    formats = Formats(*(dot_dtypes or (dtype, dtype)), self.result_dtype)
    return (formats if formats != (dtype, dtype, None) else None), ""


def make_recipe(
  level: object,
  dtype: object,
  overrides: object,
  operations: object,
  preferred_element_type: object = None,
  dot_dtype: object = None,
) -> Recipe:
  """Returns the recipe for the arguments of `autocast`."""
  overrides = _check_mapping(
    "overrides", overrides, '{"LeNet5/conv1": jnp.float16}'
  )
  edits = _check_operations(operations)
  found = find_level(level)
  return Recipe(
    level=found._replace(listed={**found.listed, **edits}),
    dtype=_check_dtype("dtype", dtype, LOW),
    overrides=tuple(
      (x, value if value is None else _check_override(x, value))
      for x, value in overrides.items()
    ),
    dot_dtypes=None if dot_dtype is None else _check_dot_dtype(dot_dtype),
    result_dtype=None
    if preferred_element_type is None
    else _check_dtype(
      "preferred_element_type", preferred_element_type, ("float32",)
    ),
  )


def _check_patterns(
  overrides: Overrides, found_scopes: Collection[str]
) -> None:
  """Raises if a pattern matches no scope."""
  for pattern, _ in overrides:
    if any(scopes.matches(scope, pattern) for scope in found_scopes):
      continue
    there_are = "it has none: Flax Linen writes them, else jax.named_scope does"
    if known := {x for y in found_scopes for x in scopes.ancestors(y)}:
      there_are = f"the scopes are {', '.join(map(repr, sorted(known)))}"
    anywhere, hint = f"*{pattern}", ""
    if any(scopes.matches(scope, anywhere) for scope in found_scopes):
      hint = " It begins at the first part of a scope: "
      hint += f"{shown(anywhere)} would match."
    raise ValueError(
      "Each pattern of `overrides` must match a scope of the function, got "
      f"{shown(pattern)}; {there_are}.{hint}"
    )


def _check_dtype(name: str, dtype: object, known: Collection[str]) -> np.dtype:
  listed = ", ".join(known)
  found = arguments.check_dtype(name, dtype, example=listed)
  if found.name not in known:
    rule = f"one of {listed}" if len(known) > 1 else listed
    remedy = ""
    if found.name in FLOAT8 and "float32" not in known:
      remedy = "; for float8 products, pass dtype=jnp.bfloat16 and dot_dtype="
      remedy += f"jnp.{found.name}"
    raise ValueError(f"`{name}` must be {rule}, got {found.name}{remedy}.")
  return found


def _check_override(pattern: str, value: object) -> np.dtype:
  name = f"overrides[{shown(pattern)}]"
  return _check_dtype(name, value, (*LOW, "float32", *FLOAT8))


def _check_dot_dtype(value: object) -> tuple[np.dtype, np.dtype]:
  """Returns the formats of a product's operands and of its gradients."""
  pair = value if isinstance(value, (tuple, list)) else (value, None)
  if len(pair) != 2:
    raise ValueError(
      "`dot_dtype` must be one dtype, or two: for the operands and for the "
      f"gradients, got {shown(value)}."
    )
  operands = _check_dtype("dot_dtype", pair[0], tuple(FLOAT8))
  wide = FLOAT8[operands.name]
  if pair[1] is None:
    return operands, wide
  known = operands.name, wide.name
  return operands, _check_dtype("dot_dtype[1]", pair[1], known)


def _check_operations(operations: object) -> dict[str, Treatment]:
  """Returns the treatment of each operation that the caller lists."""
  example = '{"black": ["tanh"], "gray": ["exp"]}'
  checked: dict[str, Treatment] = {}
  lists = _check_mapping("operations", operations, example)
  for name, members in lists.items():
    if name not in LISTS:
      raise ValueError(
        "The lists of `operations` are "
        f"{', '.join(map(repr, LISTS))}, got {shown(name)}."
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
    for member in members:
      if checked.setdefault(member, LISTS[name]) is not LISTS[name]:
        raise ValueError(
          "An operation of `operations` must be in one list, got "
          f"{member!r} in {checked[member].value!r} and {name!r}."
        )
  return checked


def _check_mapping(
  name: str, value: object, example: str
) -> Mapping[str, object]:
  if value is None:
    return {}
  if not isinstance(value, Mapping) or not all(
    isinstance(key, str) for key in value
  ):
    raise TypeError(
      f"`{name}` must be a dict such as {example}, got {shown(value)}."
    )
  return value
