"""Which layers may be in low precision, by the error of the gradient."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re
import sys
import time
from typing import Any
from typing import NamedTuple

from jax.extend import core
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._autocast import autocast
from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale.instruments import _gradient_error

# In float16 the least error at one of these S is rounding, which no S cures.
_LOSS_SCALES = {"float16": (1.0, 2.0**10, 2.0**15)}

_FLOAT32 = levels.FLOAT32
_KNOWN = {"float16", "bfloat16", *levels.FLOAT8}

# The dtype of the products in each scope.
_Choice = Mapping[str, np.dtype]
_Overrides = Mapping[str, np.dtype | None]


class TunedScope(NamedTuple):
  """What `tune_precision` found for the products in a scope, or in equal ones.

  Attributes:
    scopes: their names; "" for products in no scope.
    share: of the work, which is the floating-point operations of all products
      of the loss.
    errors: by dtype, the error of the whole gradient with these products alone
      in it.
    dtype: the dtype found, float32 included.
    why: why it is not the last of `dtypes`, or an empty string.
  """

  scopes: Sequence[str]
  share: float
  errors: Mapping[str, float]
  dtype: str
  why: str


@dataclasses.dataclass(frozen=True)
class TuningReport:
  """The findings of `tune_precision`; print it for a table and the setting.

  Attributes:
    dtype: for the argument `dtype` of `autocast`.
    overrides: for the argument `overrides` of `autocast`.
    tolerance: as given.
    errors: the error of the gradient with these overrides, for each batch.
    error_of_all: the same for the first batch with every scope in the last of
      `dtypes`.
    between_batches: how far the float32 gradients of two batches are apart, as
      a part of the first; None for one batch. It is the noise that training
      has anyway.
    scopes: what was found, by the pattern of each scope.
  """

  dtype: np.dtype
  overrides: Mapping[str, np.dtype | None]
  tolerance: float
  errors: Sequence[float]
  error_of_all: float
  between_batches: float | None
  scopes: Mapping[str, TunedScope]

  @property
  def lowered(self) -> float:
    """The share of the work below float32."""
    return math.fsum(
      x.share for x in self.scopes.values() if x.dtype != _FLOAT32.name
    )

  def __str__(self) -> str:
    rows = [
      (
        pattern or "(no scope)",
        f"{x.share:.1%}",
        ", ".join(f"{error:.2%}" for error in x.errors.values()),
        f"{x.dtype}, {x.why}" if x.why else x.dtype,
      )
      for pattern, x in self.scopes.items()
    ]
    rows.insert(0, ("scope", "work", "error alone", "found"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"Error of the gradient, of which {self.tolerance:.2%} may be"]
    for first, work, error, found in rows:
      cells = f"{first:{widths[0]}}  {work:>{widths[1]}}"
      lines.append(f"  {cells}  {error:>{widths[2]}}  {found}")
    found, *confirmed = (f"{x:.2%}" for x in self.errors)
    lines.append(f"All low: {self.error_of_all:.2%}. As found: {found}")
    if confirmed:
      lines[-1] += f", and {confirmed[0]} with the second batch"
      lines.append(f"The two batches differ by {self.between_batches:.2%}.")
    lines.append(f"{self.lowered:.1%} of the work is below float32, by")
    dtypes = {x: x and f"jnp.{x.name}" for x in self.overrides.values()}
    listed = ", ".join(
      f'"{pattern}": {dtypes[x]}' for pattern, x in self.overrides.items()
    )
    lines.append(f"  dtype=jnp.{self.dtype.name}, overrides={{{listed}}}")
    return "\n".join(lines)


def tune_precision(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  *args: object,
  tolerance: float = 0.01,
  dtypes: Sequence[DTypeLike] = (jnp.bfloat16,),
  confirm_args: Sequence[object] | None = None,
  has_aux: bool = False,
) -> TuningReport:
  """Finds which layers may be in low precision, by the error of the gradient.

  Which layers should stay in float32? For each scope that has products, this
  computes the gradient with these products alone lowered, as `autocast` does at
  O1, and compares with float32. Then it lowers the scopes in the order of their
  error for each floating-point operation that is in fewer bits, as many as keep
  the error of all together, which is measured as well, within the tolerance.

  The error is that of `gradient_error`, which an optimizer may not notice. Near
  an optimum the gradient is small, and any rounding is a large part of it. What
  training has anyway is the difference between the gradients of two batches:
  the report has it too, and a tolerance need not be far below it.

  Each measurement compiles a gradient, and a line on stderr shows each. Layers
  whose names differ in numbers, and whose products are equal, are measured
  together. If that is too much, halves of them are. One scanned body is one
  scope.

  Args:
    loss_fn: a function of parameters and anything else that computes a scalar
      loss in float32, not under `autocast` and without `dtype=` in layers. Its
      scopes are those of Flax Linen's modules and of `jax.named_scope`.
    params: float32 parameters, by which it differentiates.
    *args: the other arguments of `loss_fn`, such as a batch.
    tolerance: the largest error of the gradient, as a part of its norm.
    dtypes: float16 or bfloat16, float8_e4m3fn, or both. With float8 alone,
      bfloat16 is the dtype between the products.
    confirm_args: `args` of another batch. What is found keeps the tolerance
      there, too.
    has_aux: whether the loss comes with auxiliary data.

  Returns:
    The report. `autocast(loss_fn, dtype=report.dtype,
    overrides=report.overrides)` is what it found.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `tolerance` is not above 0, or `dtypes` has none or two of a
      kind; if `loss_fn` does not compute in float32, has no product that
      `autocast` lowers, or has a gradient that is 0 or not finite; or under
      jit.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss_fn(params, x):
    ...   with jax.named_scope("body"):
    ...     x = jnp.tanh(x @ params["body"])
    ...   with jax.named_scope("head"):
    ...     x = x @ params["head"]
    ...   return jnp.mean((x - 99) ** 2)  # Of numbers between 99 and 105.
    >>> head = 130 + jnp.arange(64.0).reshape(8, 8) / 8
    >>> params = {"body": jnp.eye(8), "head": head}
    >>> report = ols.instruments.tune_precision(loss_fn, params, jnp.eye(8))
    >>> report.overrides
    {'head': dtype('float32')}
  """
  arguments.check_function(loss_fn, "loss_fn")
  ladder = _check_dtypes(dtypes)
  limit = arguments.check_number("tolerance", tolerance)
  if not limit > 0:
    raise ValueError(f"`tolerance` must be above 0, got {shown(tolerance)}.")
  batches = [(params, *args)]
  if confirm_args is not None:
    if not isinstance(confirm_args, (tuple, list)):
      raise TypeError(
        "`confirm_args` must be a tuple of the arguments after `params`, such "
        f"as (batch,), got {arguments.kind_of(confirm_args)}."
      )
    batches.append((params, *confirm_args))
  return _Tuning(loss_fn, has_aux, batches, ladder, limit).report()


class _Group(NamedTuple):
  """Scopes that are measured together."""

  scopes: Sequence[str]
  # Of the gradient with them alone in a dtype, if that saves anything.
  errors: Mapping[np.dtype, float]


class _Tuning:
  """The measurements, and the choices that they lead to."""

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    has_aux: bool,
    batches: Sequence[tuple[Any, ...]],
    ladder: Sequence[np.dtype],
    tolerance: float,
  ):
    self._loss_fn, self._has_aux, self._batches = loss_fn, has_aux, batches
    self._ladder, self._tolerance = ladder, tolerance
    # The dtype of the level, and so of what no override names.
    self._level_dtype = ladder[0]
    if levels.is_float8(ladder[0]):
      self._level_dtype = np.dtype(jnp.bfloat16)
    self._errors: dict[object, float] = {}
    self._references = [
      _gradient_error.compute_reference(loss_fn, has_aux, args, {})
      for args in batches
    ]
    # By dtype and scope: of the products of the loss, the floating-point
    # operations times the bytes of a number.
    self._costs = dict[np.dtype, collections.Counter[str]]()
    shapes: dict[str, list[object]] = {}
    for dtype in (_FLOAT32, *ladder):
      low = self._low({"*": self._override(dtype)})
      jaxpr = interpreter.record(low, batches[0], {}).jaxpr
      costs = self._costs[dtype] = collections.Counter[str]()
      for scope, equation, around in scopes.operations(jaxpr):
        if equation.primitive.name in levels.PRODUCTS:
          costs[scope] += _cost(equation, around)
          if dtype == _FLOAT32:
            found = [str(x.aval) for x in equation.invars]
            shapes.setdefault(scope, []).append(found)
    # The scopes with something to save, those of equal layers together.
    alike: dict[object, list[str]] = {}
    for scope, of_scope in shapes.items():
      if self._saved([scope], _FLOAT32, ladder[-1]):
        key = _without_numbers(scope), str(of_scope)
        alike.setdefault(key, []).append(scope)
    self._alike = list(alike.values())
    self._scopes = [x for group in self._alike for x in group]
    if not self._scopes:
      raise ValueError(
        "`loss_fn` must have products that `autocast` lowers, got none; see "
        "ols.instruments.precision_report(ols.autocast(loss_fn), ...)."
      )

  def report(self) -> TuningReport:
    """Measures, chooses, and reports."""
    groups = [y for x in self._alike for y in self._split(self._measure(x))]
    # Each step lowers the products of a group to the next dtype.
    steps = []
    for group in groups:
      before, price = _FLOAT32, 0.0
      for dtype, error in group.errors.items():
        if error > self._tolerance:
          break
        # A dtype comes after the wider ones.
        saved = self._saved(group.scopes, before, dtype)
        price = max(price, error / saved)
        steps.append((price, dict.fromkeys(group.scopes, dtype)))
        before = dtype
    steps.sort(key=lambda x: x[0])
    choices: list[_Choice] = [{}]
    for _, step in steps:
      choices.append({**choices[-1], **step})
    choice = choices[self._most(choices)]
    everything = dict.fromkeys(self._scopes, self._ladder[-1])
    of_batches = self._references[::-1]
    return TuningReport(
      self._level_dtype,
      self._overrides(choice),
      self._tolerance,
      [self._error(choice, x, "as found") for x in range(len(self._batches))],
      self._error(everything, 0, "all low"),
      _gradient_error.distance(*of_batches) if len(of_batches) > 1 else None,
      {
        ", ".join(self._patterns(x.scopes)): self._explain(x, choice)
        for x in groups
      },
    )

  def _most(self, choices: Sequence[_Choice]) -> int:
    """Returns the last of the choices that keep the tolerance."""
    least, most = 0, len(choices) - 1
    place = most
    while least < most:
      what = f"{place} of {len(choices) - 1} steps together"
      if all(
        self._error(choices[place], batch, what) <= self._tolerance
        for batch in range(len(self._batches))
      ):
        least = place
      else:
        most = place - 1
      place = (least + most + 1) // 2
    return least

  def _explain(self, group: _Group, choice: _Choice) -> TunedScope:
    """Returns what was found for a group."""
    found, why = choice.get(group.scopes[0], _FLOAT32), ""
    costs = self._costs[_FLOAT32]
    for dtype, error in reversed([*group.errors.items()]):
      if dtype == found:
        break
      why = f"{dtype.name}: too much with the others"
      if error > self._tolerance:
        why = f"{dtype.name}: more than may be"
    return TunedScope(
      group.scopes,
      sum(costs[x] for x in group.scopes) / costs.total(),
      {x.name: error for x, error in group.errors.items()},
      found.name,
      why,
    )

  def _split(self, group: _Group) -> list[_Group]:
    """Returns a group, or parts of it if one part alone is too wrong."""
    middle = len(group.scopes) // 2
    wrong = [x for x, y in group.errors.items() if y > self._tolerance]
    if not (wrong and middle):
      return [group]
    halves = group.scopes[:middle], group.scopes[middle:]
    parts = list(map(self._measure, halves))
    if all(x.errors[wrong[0]] > self._tolerance for x in parts):
      return [group]
    return [y for x in parts for y in self._split(x)]

  def _measure(self, names: Sequence[str]) -> _Group:
    """Returns scopes with the error of each dtype that saves something."""
    errors, before = {}, _FLOAT32
    for dtype in self._ladder:
      if self._saved(names, before, dtype):
        what = f"{', '.join(self._patterns(names))} in {dtype.name}"
        errors[dtype] = self._error(dict.fromkeys(names, dtype), 0, what)
        before = dtype
    return _Group(names, errors)

  def _saved(
    self, names: Sequence[str], before: np.dtype, after: np.dtype
  ) -> int:
    """Returns how much less the products in some scopes cost."""
    return sum(self._costs[before][x] - self._costs[after][x] for x in names)

  def _error(self, choice: _Choice, batch: int, what: str) -> float:
    """Returns the error of the gradient with some scopes lowered."""
    overrides = self._overrides(choice)
    key = frozenset(overrides.items()), batch
    if key not in self._errors:
      start = time.monotonic()
      sys.stderr.write(f"Gradient {len(self._errors) + 1}, {what} ...")
      sys.stderr.flush()
      gradient = _gradient_error.Gradient(
        self._low(overrides), self._has_aux, self._batches[batch], {}
      )
      error = min(
        _gradient_error.distance(gradient.at(x), self._references[batch])
        for x in _LOSS_SCALES.get(self._level_dtype.name, (1.0,))
      )
      sys.stderr.write(f" {error:.2%} ({time.monotonic() - start:.0f} s)\n")
      self._errors[key] = error
    return self._errors[key]

  def _low(self, overrides: _Overrides) -> Callable[..., Any]:
    return autocast.autocast(
      self._loss_fn, dtype=self._level_dtype, overrides=overrides
    )

  def _overrides(self, choice: _Choice) -> _Overrides:
    """Returns the fewest overrides that make a choice."""
    wanted = {x: self._override(choice.get(x, _FLOAT32)) for x in self._scopes}
    each = {x: [x] for x in wanted}
    together: dict[str, Sequence[str]] = {}
    for group in self._alike:
      is_one = len({wanted[x] for x in group}) == 1
      together |= self._patterns(group) if is_one else {x: [x] for x in group}
    overrides: dict[str, np.dtype | None] = {}

    def is_as_wanted(scope: str) -> bool:
      found = levels.find_override(tuple(overrides.items()), scope)
      return (found[1] if found else None) == wanted[scope]

    for patterns in (together, each):
      overrides.clear()
      # A longer pattern counts rather than a shorter one.
      for pattern in sorted(patterns, key=len):
        if not all(map(is_as_wanted, patterns[pattern])):
          overrides[pattern or "*"] = wanted[patterns[pattern][0]]
      if all(map(is_as_wanted, wanted)):
        break
    return overrides

  def _override(self, dtype: np.dtype) -> np.dtype | None:
    return None if dtype == self._level_dtype else dtype

  def _patterns(self, group: Sequence[str]) -> dict[str, Sequence[str]]:
    """Returns patterns for scopes, and for each of them its scopes."""
    pattern = _without_numbers(group[0])
    if len(group) > 1 and not any(
      scopes.matches(x, pattern)
      for x in self._scopes
      if not set(group).intersection(scopes.ancestors(x))
    ):
      return {pattern: group}
    return {x: [x] for x in group}


def _without_numbers(scope: str) -> str:
  return re.sub(r"\d+", "*", scope)


def _cost(equation: core.JaxprEqn, around: Sequence[core.JaxprEqn]) -> int:
  """Returns the operations of a product times the bytes of a number."""
  avals: list[Any] = [x.aval for x in (*equation.invars, *equation.outvars)]
  (left, right), result = avals[:2], avals[-1]
  parameters = equation.params
  if equation.primitive.name == "conv_general_dilated":
    features = right.shape[parameters["dimension_numbers"].rhs_spec[0]]
    terms = right.size // max(features, 1)
  else:
    ragged = parameters.get("ragged_dot_dimension_numbers")
    numbers = ragged and ragged.dot_dimension_numbers
    (contracted, _), _ = numbers or parameters["dimension_numbers"]
    terms = math.prod(left.shape[x] for x in contracted)
  loops = (x.params.get("length", 1) for x in around if calls.is_loop(x))
  operations = result.size * terms * math.prod(loops)
  return int(operations * left.dtype.itemsize)


def _check_dtypes(dtypes: Sequence[DTypeLike]) -> list[np.dtype]:
  """Returns the dtypes, those with most bits first."""
  rule = (
    "`dtypes` must be a sequence of float16 or bfloat16, of one of "
    f"{', '.join(levels.FLOAT8)}, or of both kinds"
  )
  if isinstance(dtypes, str) or not isinstance(dtypes, Sequence):
    raise TypeError(f"{rule}, got {shown(dtypes)}; one dtype is [dtype].")
  found = [
    arguments.check_dtype(f"dtypes[{i}]", x, example="bfloat16")
    for i, x in enumerate(dtypes)
  ]
  names = ", ".join(x.name for x in found)
  one_of_a_kind = len({x.itemsize for x in found}) == len(found) > 0
  if not (one_of_a_kind and {x.name for x in found} <= _KNOWN):
    raise ValueError(f"{rule}, got {names or 'none'}.")
  return sorted(found, key=lambda x: -x.itemsize)
