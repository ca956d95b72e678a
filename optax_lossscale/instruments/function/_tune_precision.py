"""The search for layers that bear low precision, by the gradient's error."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math
import re
import sys
import time
from typing import Any
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
from optax_lossscale._base import tables
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
      as a part of their mean norm; None for one batch.
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
    rows = [("  scope", "work", "error alone", "found")]
    for pattern, x in self.scopes.items():
      errors = ", ".join(map(_percent, x.errors.values()))
      found = f"{x.dtype}: {x.why}" if x.why else x.dtype
      scope = f"  {pattern or '(no scope)'}"
      rows.append((scope, f"{x.share:.1%}", errors, found))
    lines = [f"Error of the gradient; the tolerance is {self.tolerance:.2%}"]
    lines += tables.aligned(rows, "<>><")
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

  This lowers the products of one scope at a time, as `autocast` does at O1, and
  compares the gradient with float32, as `gradient_error` does. Then it lowers
  the scopes together, those first that save the most for their error, until
  their joint error, measured again, reaches the tolerance. A scope that breaks
  the tolerance is left out, three times at most.

  Give a second batch of the size that a step averages over, and parameters of a
  late step. docs/guides/which_layers.md has the reasons and an example, and
  says which layers are measured together.

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
      each. bfloat16 is added to float8 alone. An error in float16 is the least
      of those at S = 1, 2^10 and 2^15.
    confirm_args: `args` of another batch, which also keeps the tolerance.
    has_aux: whether the loss comes with auxiliary data.

  Returns:
    The report, with the arguments `dtype` and `overrides` of `autocast`.

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
  # Otherwise float32 is TF32 on some GPUs, and bfloat16 on TPUs.
  with jax.default_matmul_precision("highest"):
    return _Tuning(loss_fn, has_aux, batches, ladder, limit).report()


class _Step(NamedTuple):
  """The lowering of the products in some scopes to their next dtype."""

  # Those of a group, which is measured together.
  scopes: Sequence[str]
  dtype: np.dtype
  # Of the gradient with them alone in that dtype.
  error: float
  # The error for what is saved. A step comes after the group's wider dtypes.
  price: float


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
    self._costs = {x: collections.Counter[str]() for x in (_FLOAT32, *ladder)}
    shapes = collections.defaultdict[str, list[str]](list)
    for dtype, costs in self._costs.items():
      jaxpr = self._gradient({"*": self._override(dtype)}, 0).jaxpr
      for scope, equation, around in scopes.operations(jaxpr):
        if equation.primitive.name in levels.PRODUCTS:
          costs[scope] += _cost(equation, around)
          if dtype == _FLOAT32:
            shapes[scope] += [str(x.aval) for x in equation.invars]
    self._alike = self._equal_layers(shapes)
    self._scopes = [x for group in self._alike for x in group]
    if not self._scopes:
      raise ValueError(
        "`loss_fn` must have products that `autocast` lowers, got none; see "
        "ols.instruments.precision_report(ols.autocast(loss_fn), ...)."
      )

  def _equal_layers(self, shapes: Mapping[str, list[str]]) -> list[list[str]]:
    """Returns the scopes with something to save, equal layers together."""
    # A derivative rule may have scopes that overrides do not reach.
    of_loss = interpreter.record(self._loss_fn, self._batches[0], {}).jaxpr
    reached = {scope for scope, *_ in scopes.operations(of_loss)}
    alike = collections.defaultdict[object, list[str]](list)
    for scope, of_scope in shapes.items():
      costs_by_dtype = [x[scope] for x in self._costs.values()]
      if scope in reached and len(set(costs_by_dtype)) > 1:
        key = _without_numbers(scope), str(costs_by_dtype), str(of_scope)
        alike[key].append(scope)
    return list(alike.values())

  def report(self) -> TuningReport:
    """Measures, chooses, and reports."""
    groups = [y for x in self._alike for y in self._measured(x)]
    steps = [
      step
      for group in groups
      for step in itertools.takewhile(self._is_good, group)
    ]
    choice: _Choice = {}
    steps.sort(key=lambda x: x.price)
    for _ in range(1 + _LEFT_OUT):
      most = self._most(choice, steps)
      choice = _after(choice, steps[:most])
      # The next one breaks the tolerance, and so do its group's others.
      others = steps[most + 1 :]
      steps = [x for x in others if x.scopes != steps[most].scopes]
    everything = dict.fromkeys(self._scopes, self._ladder[-1])
    return TuningReport(
      self._ladder[0],
      self._overrides(choice),
      self._tolerance,
      [self._error(choice, x, "as found") for x in range(len(self._batches))],
      self._error(everything, 0, "all low"),
      self._noise,
      {
        ", ".join(self._patterns(x[0].scopes)): self._explain(x, choice)
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

  def _explain(self, group: Sequence[_Step], choice: _Choice) -> TunedScope:
    """Returns what was found for a group."""
    names = group[0].scopes
    found, why = choice.get(names[0], _FLOAT32), ""
    for step in group:
      if step.dtype.itemsize < found.itemsize:
        added = " when added" if self._is_good(step) else ""
        why = f"{step.dtype.name} is too wrong{added}"
        break
    costs = self._costs[_FLOAT32]
    return TunedScope(
      names,
      sum(costs[x] for x in names) / costs.total(),
      {x.dtype.name: x.error for x in group},
      found.name,
      why,
    )

  def _is_good(self, step: _Step) -> bool:
    return step.error <= self._tolerance

  def _measured(
    self, names: Sequence[str], halvings: int = _HALVINGS
  ) -> list[list[_Step]]:
    """Returns equal layers as one group, or as parts if it is too wrong."""
    group, before, price = list[_Step](), _FLOAT32, 0.0
    for dtype in self._ladder:
      wide, narrow = self._costs[before], self._costs[dtype]
      if saved := sum(wide[x] - narrow[x] for x in names):
        what = f"{', '.join(self._patterns(names))} in {dtype.name}"
        error = self._error(dict.fromkeys(names, dtype), 0, what)
        price = max(price, error / saved)
        group.append(_Step(names, dtype, error, price))
        before = dtype
    middle = len(names) // 2
    if all(map(self._is_good, group)) or not (middle and halvings):
      return [group]
    halves = names[:middle], names[middle:]
    return [y for x in halves for y in self._measured(x, halvings - 1)]

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
    args = self._batches[batch]
    return _gradient_error.Gradient(low, self._has_aux, args, {})

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
  return {**choice, **{name: x.dtype for x in steps for name in x.scopes}}


def _percent(error: float) -> str:
  return f"{error:.2%}" if math.isfinite(error) else "overflow"


def _without_numbers(scope: str) -> str:
  return re.sub(r"\d+", "*", scope)


def _cost(equation: core.JaxprEqn, around: Sequence[core.JaxprEqn]) -> int:
  """Returns the operations of a product times the bytes of a number."""
  avals: list[Any] = [x.aval for x in (*equation.invars, *equation.outvars)]
  left, right, *_, result = avals
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
