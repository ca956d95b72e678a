"""Which operations are in low precision, which are not, and why?"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
import textwrap
from typing import Any
from typing import NamedTuple

from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes

# A longer table is made shorter by shorter scopes.
_MOST_ROWS = 24


class PrecisionReport(NamedTuple):
  """The findings of `precision_report`, to be printed.

  Attributes:
    products: how many there are in each dtype, such as {"float16": 11}.
    in_branches: how many of them are in branches of a `cond`.
    counts: of operations by name, by scope, dtype and reason for float32. The
      reason ends with "in a loop" if they run several times and count once,
      with "in a branch" if they may not run.
  """

  products: Mapping[str, int]
  in_branches: int
  counts: Mapping[tuple[str, str, str], Mapping[str, int]]

  @property
  def line(self) -> str:
    """The products, then all operations by dtype and reason, for a log."""
    low = {x: n for x, n in self.products.items() if operation_table.is_low(x)}
    parts = [
      f"{n} of {sum(self.products.values())} products in {dtype}"
      for dtype, n in (low or {"low precision": 0}).items()
    ]
    if self.in_branches:
      parts += [f"{self.in_branches} are in branches, of which one runs"]
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


def precision_report(
  fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> PrecisionReport:
  """Returns which operations of a function are below float32, and why not all.

  No result shows whether a model is in float16. This traces `fun` and counts
  the floating operations in its program, whatever lowered them: `autocast`,
  `dtype=` of a layer, the dtype of an argument. Nothing runs. Give it a loss
  function for the forward pass, the train step for all of it.

  Operations in float32 come with the reason of `autocast`, such as "black list"
  (docs/autocast.md explains them), backward with that of the forward pass. "as
  written" is what it leaves alone or does not see, such as the optimizer.
  Conversions do not count, nor does what only moves or compares values. A
  product is low if its result is, or if all of its inputs are.

  Args:
    fun: any function that JAX can trace, jitted or not. It is traced once more.
    *args: its arguments.
    **kwargs: more of them.

  Returns:
    The report: print it for a table, log its `line`, test its `products`. Under
    a precision schedule it has both branches; `state.low` of the schedule says
    which of them runs next.

  Raises:
    TypeError: if `fun` is not a function.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> mixed_fun = ols.autocast(lambda x: jnp.exp(x @ x) @ x, "O1")
    >>> ols.instruments.precision_report(mixed_fun, jnp.eye(2)).line
    '2 of 2 products in float16; float16: 2; float32 black list: 1'
  """
  arguments.check_function(fun)
  with scopes.noting(True):
    recording = interpreter.record(fun, args, kwargs, may_change=True)
  counts: dict[Any, collections.Counter[str]] = {}
  products, in_branches = collections.Counter[str](), 0
  for scope, equation, around in scopes.operations(recording.jaxpr):
    name = operation_table.name_of(equation)
    dtype = operation_table.dtype_of(equation)
    is_move = operation_table.moves(equation) or name == "convert_element_type"
    if is_move or dtype is None:
      continue
    is_in_branch = calls.Form.COND in map(calls.form, around)
    if name in levels.PRODUCTS:
      products[dtype.name] += 1
      in_branches += is_in_branch
    # A note is on what autocast may lower.
    note = scopes.note_on(equation) if dtype == levels.FLOAT32 else ""
    reasons = [] if operation_table.is_low(dtype) else [note or "as written"]
    reasons += ["in a loop"] * any(map(calls.is_loop, around))
    reasons += ["in a branch"] * is_in_branch
    key = scope, dtype.name, ", ".join(reasons)
    counts.setdefault(key, collections.Counter())[name] += 1
  return PrecisionReport(dict(products), in_branches, counts)


def _rows(counts: Mapping[Any, Any], depth: int) -> list[Any]:
  """Returns the counts in order, by so many of the first parts of scopes."""
  merged: dict[Any, collections.Counter[str]] = {}
  for (scope, dtype, why), names in counts.items():
    key = "/".join(scope.split("/")[:depth]), dtype, why
    merged.setdefault(key, collections.Counter()).update(names)
  return sorted(
    merged.items(),
    key=lambda x: ("as written" in x[0][2], x[0][1:], -x[1].total()),
  )
