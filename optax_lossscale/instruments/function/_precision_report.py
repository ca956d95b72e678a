"""Counts the operations in low precision, and explains the others."""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import textwrap
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import scopes

# The most rows of a table; a longer one is shortened by merging scopes.
_MOST_ROWS = 24


class PrecisionReport(NamedTuple):
  """The findings of `precision_report`; print it for a table.

  Attributes:
    products: the number of products in each dtype, such as {"float16": 11}.
    in_branches: how many products are in branches of a `cond`.
    counts: the number of operations of each name, by (scope, dtype, reason for
      float32). The reason ends with "in a loop" if the operations may run many
      times but count once, and with "in a branch" if they may not run.
  """

  products: Mapping[str, int]
  in_branches: int
  counts: Mapping[tuple[str, str, str], Mapping[str, int]]

  @property
  def line(self) -> str:
    """One line for a log: the products, then operations by dtype and reason."""
    low = {x: n for x, n in self.products.items() if formats.is_low(x)}
    parts = [
      f"{n} of {sum(self.products.values())} products in {dtype}"
      for dtype, n in (low or {"low precision": 0}).items()
    ]
    if self.in_branches:
      parts += [f"{self.in_branches} are in branches, and only one branch runs"]
    counts = [
      f"{' '.join(group).strip()}: {names.total()}"
      for group, names in _rows(self.counts, 0)
    ]
    return "; ".join([", ".join(parts), *counts])

  def __str__(self) -> str:
    depth = 1 + max((x.count("/") for x, _, _ in self.counts), default=0)
    while len(rows := _rows(self.counts, depth)) > _MOST_ROWS and depth:
      depth -= 1
    width = max((len(x) for (x, _, _), _ in rows), default=0)
    lines, group = [self.line.split("; ")[0]], None
    for (scope, *of_row), names in rows:
      if group != of_row:
        group = of_row
        lines += [", ".join(filter(None, group)) + ":"]
      start = f"  {scope:{width}}  "
      listed = ", ".join(f"{n} {x}" for x, n in names.most_common())
      room = max(80 - len(start), 24)
      lines += [start + textwrap.shorten(listed, room, placeholder=" ...")]
    if len(rows) < len(self.counts):
      lines += [f"Scopes are cut to {depth} parts; `counts` has all of them."]
    return "\n".join(lines)


def precision_report(fun: Callable[..., Any], *args: object) -> PrecisionReport:
  """Counts the operations of a function below float32, and explains the rest.

  This traces `fun`, without running it, and counts its floating-point
  operations but conversions, moves and comparisons, whatever lowered them. Pass
  a loss function, or the train step to see all of it.

  Operations in float32 come with `autocast`'s reason, such as "black list" (see
  docs/autocast.md); those of the backward pass have the forward pass's reason.
  "as written" marks operations that autocast leaves alone or does not see, such
  as the optimizer's. A product is in low precision if its result or all of its
  inputs are. A kernel that nothing can look into has its inputs' dtypes.

  Args:
    fun: any function that JAX can trace, jitted or not.
    *args: its arguments. Bind any keyword-only ones first, as in
      `functools.partial(fun, train=True)`.

  Returns:
    The report, of both branches with a precision schedule, whose `state.low`
    says which one runs next.

  Raises:
    TypeError: if `fun` is not a function, or needs an argument by keyword.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> mixed_fun = ols.autocast(lambda x: jnp.exp(x @ x) @ x, "O1")
    >>> ols.instruments.precision_report(mixed_fun, jnp.eye(2)).line
    '2 of 2 products in float16; float16: 2; float32 black list: 1'
  """
  arguments.check_function(fun)
  arguments.check_by_position(fun, "fun")

  @functools.wraps(fun)
  def arrays_of_fun(*args: object) -> list[jax.Array]:
    # Equinox's models, which a step returns, also hold strings and functions.
    leaves = jax.tree.leaves(fun(*args))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

  with scopes.noting(True):
    recording = interpreter.record(arrays_of_fun, args, {}, may_change=True)
  counts: dict[tuple[str, str, str], collections.Counter[str]] = {}
  products, in_branches = collections.Counter[str](), 0
  for scope, equation, around, name, dtype in computing(recording.jaxpr):
    is_in_branch = calls.Form.COND in map(calls.form, around)
    if name in levels.PRODUCTS:
      products[dtype.name] += 1
      in_branches += is_in_branch
    reasons = _reasons(equation, around, dtype)
    reasons += ["in a loop"] * any(map(calls.is_loop, around))
    reasons += ["in a branch"] * is_in_branch
    key = scope, dtype.name, ", ".join(reasons)
    if operations.is_opaque(equation):
      name += f"({', '.join(_dtypes(equation))})"
    counts.setdefault(key, collections.Counter())[name] += 1
  return PrecisionReport(dict(products), in_branches, counts)


def _reasons(
  equation: core.JaxprEqn, around: Sequence[core.JaxprEqn], dtype: np.dtype
) -> list[str]:
  """Returns why an operation has its dtype, or how it accumulates float8."""
  if operations.is_opaque(equation) and _dtypes(equation) == ["float32"]:
    return [levels.OPAQUE]
  # Only operations that autocast may lower have a note.
  notes = map(scopes.note_on, (*around, equation))
  note = next(filter(None, notes), "") if dtype.itemsize <= 4 else ""
  if not formats.is_low(dtype):
    return [note or "as written"]
  is_product = equation.primitive.name in levels.PRODUCTS
  if is_product and formats.is_float8(dtype):
    precision = equation.params["precision"]
    is_full = precision == (lax.Precision.HIGHEST,) * 2
    return ["full accumulation" if is_full else "fast accumulation"]
  return [note] if note.startswith(levels.NOT_FLOAT8) else []


def _dtypes(equation: core.JaxprEqn) -> list[str]:
  """Returns the float dtypes of an operation's inputs, each once."""
  found = (formats.part_dtype(atom.aval) for atom in equation.invars)
  return [*dict.fromkeys(x.name for x in found if x)]


def computing(
  jaxpr: core.Jaxpr,
) -> Iterator[
  # The scope, the equation, the equations around it, its name and its dtype.
  tuple[str, core.JaxprEqn, tuple[core.JaxprEqn, ...], str, np.dtype]
]:
  """Yields the floating-point operations of a jaxpr that compute something."""
  for scope, equation, around in scopes.operations(jaxpr):
    name = operations.name_of(equation)
    dtype = operations.dtype_of(equation)
    is_move = operations.moves(equation) or name == "convert_element_type"
    if not (is_move or dtype is None):
      yield scope, equation, around, name, dtype


def _rows(
  counts: Mapping[tuple[str, str, str], Mapping[str, int]], depth: int
) -> list[tuple[tuple[str, str, str], collections.Counter[str]]]:
  """Returns the sorted counts, with scopes cut to their first `depth` parts."""
  merged: dict[tuple[str, str, str], collections.Counter[str]] = {}
  for (scope, dtype, why), names in counts.items():
    key = "/".join(scope.split("/")[:depth]), dtype, why
    merged.setdefault(key, collections.Counter()).update(names)
  return sorted(
    merged.items(),
    key=lambda x: ("as written" in x[0][2], x[0][1:], -x[1].total()),
  )
