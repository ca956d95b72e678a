"""The search for layers that bear low precision, by the gradient's error."""

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
from typing import cast
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax.extend import core
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._autocast import autocast
from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import switches
from optax_lossscale._base.arguments import shown
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale.instruments.function import _gradient_error

# The tolerance, relative to the difference between two batches, and without it.
# docs/guides/which_layers.md has the measurements behind the first.
_OF_NOISE, _OF_GRADIENT = 0.25, 0.01

# Equal layers that are too wrong together are halved up to so many times.
_HALVINGS = 3

# How often a step that breaks the tolerance is left out, to go on without it.
_LEFT_OUT = 3

# In float16 the least error at one of these S is rounding, which no S cures.
_LOSS_SCALES = {"float16": (1.0, 2.0**10, 2.0**15)}

_FLOAT32 = formats.FLOAT32
_KNOWN = {"float16", "bfloat16", *formats.FLOAT8}

# The dtype of the products in each scope.
_Choice = Mapping[str, np.dtype]
_Overrides = Mapping[str, np.dtype | None]


class TunedScope(NamedTuple):
  """The finding of `tune_precision` for a scope, or for equal ones.

  Attributes:
    scopes: their names; "" for products in no scope.
    share: of the work, which is the floating-point operations of all products
      of the gradient. A `while` loop counts once.
    errors: by dtype, the error of the whole gradient with these products alone
      in it.
    dtype: the dtype found, float32 included.
    why: why it is not the narrowest of `dtypes`, or an empty string.
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
    tolerance: as given, or the one that was taken.
    errors: the error of the gradient with these overrides, for each batch.
    error_of_all: the same for the first batch with every scope in the narrowest
      of `dtypes`.
    between_batches: how far the float32 gradients of the two batches are apart,
      as a part of their mean norm; None for one batch. It is the noise that
      training has anyway.
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
        ", ".join(map(_percent, x.errors.values())),
        f"{x.dtype}: {x.why}" if x.why else x.dtype,
      )
      for pattern, x in self.scopes.items()
    ]
    rows.insert(0, ("scope", "work", "error alone", "found"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"Error of the gradient; the tolerance is {self.tolerance:.2%}"]
    for first, *others, found in rows:
      cells = map(str.rjust, others, widths[1:])
      lines.append("  ".join([f"  {first:{widths[0]}}", *cells, found]))
    found, *confirmed = map(_percent, self.errors)
    lines.append(f"All low: {_percent(self.error_of_all)}. As found: {found}")
    if confirmed:
      lines[-1] += f", and {confirmed[0]} with the second batch"
      lines.append(f"The two batches differ by {self.between_batches:.2%}.")
    if max(self.errors) > self.tolerance:
      lines.append("Not within the tolerance: no scope here has that error.")
    lines.append(f"{self.lowered:.1%} of the work is below float32, by")
    dtypes = {x: x and f"jnp.{x.name}" for x in self.overrides.values()}
    listed = ", ".join(
      f'"{pattern}": {dtypes[x]}' for pattern, x in self.overrides.items()
    )
    setting = f"dtype=jnp.{self.dtype.name}, overrides={{{listed}}}"
    lines.append(f"  ols.autocast(loss_fn, {setting})")
    return "\n".join(lines)


@switches.lifted()
def tune_precision(
  loss_fn: Callable[..., Any],
  params: ArrayTree,
  *args: object,
  tolerance: float | None = None,
  dtypes: Sequence[DTypeLike] = (jnp.bfloat16,),
  confirm_args: Sequence[object] | None = None,
  has_aux: bool = False,
) -> TuningReport:
  """Finds which layers may be in low precision, by the error of the gradient.

  Which layers should stay in float32? This lowers the products of one scope at
  a time, as `autocast` does at O1, and compares the gradient with float32. Then
  it lowers the scopes together, in the order of their error for each
  floating-point operation that is in fewer bits, until their joint error, which
  is measured as well, reaches the tolerance. It leaves out a scope that breaks
  it and goes on, three times at most.

  The error is that of `gradient_error`. Near an optimum the gradient is small,
  and any rounding is a large part of it. But there the gradients of two batches
  differ as well, and training averages over that. So give a second batch of the
  size that a step averages over, and parameters of a late step: early ones
  forgive more.

  Each measurement compiles a gradient, and a line on stderr shows each. Layers
  whose names differ in numbers, and whose products are equal, are measured
  together. If they are too wrong, halves of them are, down to an eighth. One
  scanned body is one scope.

  The precision of float32 products is "highest", in the reference and beside
  lowered scopes. An error in float16 is the least of those at S = 1, 2^10 and
  2^15.

  Args:
    loss_fn: a function of parameters and anything else that computes a scalar
      loss in float32, not under `autocast` and without `dtype=` in layers. Its
      scopes are those of Flax Linen's modules and of `jax.named_scope`.
    params: float32 parameters, by which it differentiates.
    *args: the other arguments of `loss_fn`, such as a batch; bind keyword
      arguments with `functools.partial`.
    tolerance: the largest error of the gradient, as a part of its norm, below
      1. None is a quarter of the difference between the gradients of the two
      batches, or 0.01 without `confirm_args`.
    dtypes: float16 or bfloat16, float8_e4m3fn or float8_e4m3fnuz, or one of
      each. bfloat16 is added to float8 alone.
    confirm_args: `args` of another batch. The setting keeps the tolerance
      there, too.
    has_aux: whether the loss comes with auxiliary data.

  Returns:
    The report. `autocast(loss_fn, dtype=report.dtype,
    overrides=report.overrides)` is what it found.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `tolerance` is not between 0 and 1, `dtypes` has none or two
      of a kind, or `confirm_args` is not as long as `args`; if `loss_fn` does
      not compute in float32, has no product that `autocast` lowers, or has a
      gradient that is 0 or not finite; if the two batches have the same
      gradient; or under jit.

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
  arguments.check_flag("has_aux", has_aux)
  ladder = _check_dtypes(dtypes)
  limit = None
  if tolerance is not None:
    limit = arguments.check_number("tolerance", tolerance)
    if not 0 < limit < 1:
      raise ValueError(
        f"`tolerance` must be between 0 and 1, got {shown(tolerance)}."
      )
  batches = [(params, *args)]
  if confirm_args is not None:
    rule = "`confirm_args` must be a tuple of the arguments after `params`"
    if not isinstance(confirm_args, (tuple, list)):
      kind = arguments.kind_of(confirm_args)
      raise TypeError(f"{rule}, such as (batch,), got {kind}.")
    if len(confirm_args) != len(args):
      raise ValueError(f"{rule}, here {len(args)}, got {len(confirm_args)}.")
    batches.append((params, *confirm_args))
  return _Tuning(loss_fn, has_aux, batches, ladder, limit).report()


class _Group(NamedTuple):
  """Scopes that are measured together."""

  scopes: Sequence[str]
  # Of the gradient with them alone in a dtype, if that saves anything.
  errors: Mapping[np.dtype, float]


class _Step(NamedTuple):
  """The lowering of a group's products to its next dtype."""

  price: float
  group: int
  choice: _Choice


class _Tuning:
  """The measurements, and the choices that they lead to."""

  def __init__(
    self,
    loss_fn: Callable[..., object],
    has_aux: bool,
    batches: Sequence[tuple[object, ...]],
    ladder: Sequence[np.dtype],
    tolerance: float | None,
  ):
    self._loss_fn, self._has_aux, self._batches = loss_fn, has_aux, batches
    # The first is that of the level, and so of what no override names.
    self._ladder = ladder
    self._errors: dict[object, float] = {}
    self._references = [
      _gradient_error.compute_reference(loss_fn, has_aux, args, {})
      for args in batches
    ]
    self._noise, default = None, _OF_GRADIENT
    if len(batches) > 1:
      self._noise = _gradient_error.difference(*self._references)
      default = _OF_NOISE * self._noise
      if not self._noise:
        raise ValueError(
          "`confirm_args` must be another batch, got one of equal gradient."
        )
    self._tolerance = default if tolerance is None else tolerance
    # By dtype and scope: of the gradient's products, the floating-point
    # operations times the bytes of a number.
    self._costs = dict[np.dtype, collections.Counter[str]]()
    shapes: dict[str, list[object]] = {}
    for dtype in (_FLOAT32, *ladder):
      jaxpr = self._gradient({"*": self._override(dtype)}, 0).jaxpr
      costs = self._costs[dtype] = collections.Counter[str]()
      for scope, equation, around in scopes.operations(jaxpr):
        if equation.primitive.name in levels.PRODUCTS:
          costs[scope] += _cost(equation, around)
          if dtype == _FLOAT32:
            found = [str(x.aval) for x in equation.invars]
            shapes.setdefault(scope, []).append(found)
    # A derivative rule may have scopes that overrides do not reach.
    of_loss = interpreter.record(loss_fn, batches[0], {}).jaxpr
    reached = {scope for scope, *_ in scopes.operations(of_loss)}
    # The scopes with something to save, those of equal layers together.
    alike: dict[object, list[str]] = {}
    for scope, of_scope in shapes.items():
      costs_by_dtype = [x[scope] for x in self._costs.values()]
      if scope in reached and len(set(costs_by_dtype)) > 1:
        key = _without_numbers(scope), str(costs_by_dtype), str(of_scope)
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
    groups = [y for x in self._alike for y in self._measured_parts(x)]
    steps = []
    for number, group in enumerate(groups):
      before, price = _FLOAT32, 0.0
      for dtype, error in group.errors.items():
        if error > self._tolerance:
          break
        # A dtype comes after the wider ones.
        saved = self._saved(group.scopes, before, dtype)
        price = max(price, error / saved)
        steps.append(_Step(price, number, dict.fromkeys(group.scopes, dtype)))
        before = dtype
    choice: _Choice = {}
    steps.sort(key=lambda x: x.price)
    for _ in range(1 + _LEFT_OUT):
      if steps:
        most = self._most(choice, steps)
        choice = _after(choice, steps[:most])
        # The next one breaks the tolerance, and so do its group's others.
        others = steps[most + 1 :]
        steps = [x for x in others if x.group != steps[most].group]
    everything = dict.fromkeys(self._scopes, self._ladder[-1])
    return TuningReport(
      self._ladder[0],
      self._overrides(choice),
      self._tolerance,
      [self._error(choice, x, "as found") for x in range(len(self._batches))],
      self._error(everything, 0, "all low"),
      self._noise,
      {
        ", ".join(self._patterns(x.scopes)): self._explain(x, choice)
        for x in groups
      },
    )

  def _most(self, choice: _Choice, steps: Sequence[_Step]) -> int:
    """Returns how many of the next steps keep the tolerance, by bisection."""
    least, most = 0, len(steps)
    place = most
    while least < most:
      tried = _after(choice, steps[:place])
      what = f"{place} of {len(steps)} steps together"
      if all(
        self._error(tried, batch, what) <= self._tolerance
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
      why = f"{dtype.name} is too wrong when added"
      if error > self._tolerance:
        why = f"{dtype.name} is too wrong"
    return TunedScope(
      group.scopes,
      sum(costs[x] for x in group.scopes) / costs.total(),
      {x.name: error for x, error in group.errors.items()},
      found.name,
      why,
    )

  def _measured_parts(
    self, names: Sequence[str], halvings: int = _HALVINGS
  ) -> list[_Group]:
    """Returns equal layers as one group, or as parts if it is too wrong."""
    group = self._measure(names)
    middle = len(names) // 2
    is_good = all(x <= self._tolerance for x in group.errors.values())
    if is_good or not (middle and halvings):
      return [group]
    return [
      y
      for half in (names[:middle], names[middle:])
      for y in self._measured_parts(half, halvings - 1)
    ]

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
      gradient = self._gradient(overrides, batch)
      error = min(
        _gradient_error.distance(gradient.at(x), self._references[batch])
        for x in _LOSS_SCALES.get(self._ladder[0].name, (1.0,))
      )
      seconds = time.monotonic() - start
      sys.stderr.write(f" {_percent(error)} ({seconds:.0f} s)\n")
      self._errors[key] = error
    return self._errors[key]

  def _gradient(
    self, overrides: _Overrides, batch: int
  ) -> _gradient_error.Gradient:
    low = autocast.autocast(
      self._loss_fn, dtype=self._ladder[0], overrides=overrides
    )
    # Otherwise float32 is TF32 on some GPUs, and bfloat16 on TPUs.
    with jax.default_matmul_precision("highest"):
      return _gradient_error.Gradient(
        low, self._has_aux, self._batches[batch], {}
      )

  def _overrides(self, choice: _Choice) -> _Overrides:
    """Returns overrides that make a choice, by pattern where that is one."""
    wanted = {x: self._override(choice.get(x, _FLOAT32)) for x in self._scopes}
    each = {x: [x] for x in wanted}
    together: dict[str, Sequence[str]] = {}
    for group in self._alike:
      is_one = len({wanted[x] for x in group}) == 1
      together |= self._patterns(group) if is_one else {x: [x] for x in group}
    overrides: dict[str, np.dtype | None] = {}

    def is_as_wanted(scope: str) -> bool:
      found = levels.find_override(tuple(overrides.items()), scope)
      return found == wanted[scope]

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
    return None if dtype == self._ladder[0] else dtype

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


def _after(choice: _Choice, steps: Sequence[_Step]) -> _Choice:
  choices = choice, *(x.choice for x in steps)
  return {scope: dtype for x in choices for scope, dtype in x.items()}


def _percent(error: float) -> str:
  return f"{error:.2%}" if math.isfinite(error) else "overflow"


def _without_numbers(scope: str) -> str:
  return re.sub(r"\d+", "*", scope)


def _cost(equation: core.JaxprEqn, around: Sequence[core.JaxprEqn]) -> int:
  """Returns the operations of a product times the bytes of a number."""
  atoms = *equation.invars, *equation.outvars
  avals = [cast(jax.core.ShapedArray, x.aval) for x in atoms]
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
    f"{', '.join(formats.FLOAT8)}, or of both kinds"
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
  if all(map(formats.is_float8, found)):
    found.append(np.dtype(jnp.bfloat16))
  return sorted(found, key=lambda x: -x.itemsize)
