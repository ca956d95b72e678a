"""How to declare a preset: with a decorator on its signature and docstring.

  @preset(
    init_scale=Argument("first"),
    growth_factor=2.0,
    saves={"scale": Key("S", float)},
  )
  def system(*, first: float = 8.0, scale_window: int = 9) -> PresetLossScale:
    ...  # Nothing but the docstring, since the declaration makes the rule.

The declaration need not have arguments whose names say what they do (`_NAMES`).
The docstring need not describe arguments that are like those of other presets
(`_TEXTS`), nor have the lines that all presets share: they are added here.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import inspect
import operator
import re
from typing import Any
from typing import ParamSpec

import jax
from jax.typing import ArrayLike

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._rules import base
from optax_lossscale._rules import engine
from optax_lossscale._rules import fields
from optax_lossscale._rules import fixed
from optax_lossscale.presets import _keys

_P = ParamSpec("_P")

# The states of a preset: of its engine, or of its fixed S.
PresetState = engine.DynamicLossScaleState | fixed.FixedLossScaleState

# The names that other systems have for the engine's columns. An argument of
# such a name fills the column, unless a declaration says otherwise.
_NAMES = {
  "init_scale": "init_scale initial_scale init_loss_scale initial_loss_scale "
  "init_loss_scaling loss_scale_value",
  "growth_factor": "growth_factor scale_factor factor multiplier incr_ratio",
  "backoff_factor": "backoff_factor decr_ratio",
  "growth_interval": "growth_interval scale_window period increment_period "
  "incr_every_n_steps dynamic_growth_steps",
  "hysteresis": "hysteresis delayed_shift decr_every_n_nan_or_inf",
  "min_scale": "min_scale min_loss_scale threshold",
  "max_scale": "max_scale max_loss_scale",
  "tolerance": "tolerance",
}

# The description of the argument that fills a column or has this name, for
# docstrings that have no other.
_TEXTS = {
  "moves": "if False, S stays at its first value.",
  "scale": "the fixed S.",
  "skip": "if False, every step is applied, even on overflow.",
  "enabled": "if False, S stays at 1 and no step is skipped.",
  "init_scale": "the first S.",
  "growth_factor": "multiplies S on growth; above 1.",
  **dict.fromkeys(
    ("scale_factor", "factor", "multiplier"),
    "multiplies or divides S; above 1.",
  ),
  "backoff_factor": "multiplies S when S shrinks; between 0 and 1.",
  "growth_interval": "S grows after this many clean steps in a row.",
  "hysteresis": "S shrinks after this many overflows.",
  "refill": "whether a clean step resets the count of overflows.",
  "min_scale": "the floor; None or 0 for no floor.",
  "max_scale": "the ceiling; None for no ceiling.",
  "notes_failure": "whether `raise_if_failed` raises once a step has\n"
  "    overflowed with S at `min_scale`.",
  "tolerance": "the share of overflows at which S shrinks, between 0 and 1;\n"
  "    rounded to float32.",
}
_ENDS_OF_EVERY_PRESET = """\
Returns:
  The rule.

Raises:
  TypeError: if an argument has the wrong type.
  ValueError: if an argument is out of range.

Examples:
  >>> import optax_lossscale as ols
"""


@dataclasses.dataclass(frozen=True, repr=False)
class PresetLossScale(base.LossScale):
  """Another system's rule, under that system's own argument names.

  Attributes:
    system: the preset's name, which decides the form of the state dictionary.
    arguments: the names and values of the preset's arguments.
    skip: whether an overflow skips the step.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule: ols.presets.PresetLossScale = ols.presets.torch()
    >>> print(rule.system, rule.init().loss_scale)
    torch 65536.0
  """

  system: str
  arguments: tuple[tuple[str, object], ...]
  # The engine that moves S, or the rule of a fixed S.
  _machine: engine.Engine | fixed.FixedLossScale

  def init(self) -> PresetState:
    """Returns the state before the first step."""
    return self._machine.init()

  def update(
    self,
    state: Any,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> PresetState:
    """Returns the state after a step. See `LossScale.update`."""
    del amax
    return self._machine.update(state, overflow)

  def stalled(self, state: Any, overflow: ArrayLike) -> jax.Array:
    """Returns bool[], True if S cannot move. See `LossScale.stalled`."""
    return self._machine.stalled(state, overflow)

  def __repr__(self) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
    return f"presets.{self.system}({arguments})"


@dataclasses.dataclass(frozen=True)
class Argument:
  """A column of a declaration, filled from one of the system's arguments."""

  name: str
  # Maps the argument's value to the column's.
  convert: Callable[[Any], object] | None = None
  # Checks the value in place of the column's own check.
  check: Callable[[str, Any], object] | None = None
  is_optional: bool = False  # If None, the column keeps its default.


@dataclasses.dataclass(frozen=True)
class Preset:
  """A declared preset. See `preset`."""

  function: Callable[..., PresetLossScale]
  columns: Mapping[str, Any]
  switches: Mapping[str, object]
  saves: _keys.Keys
  starts_within_bounds: bool

  @functools.cached_property
  def parameters(self) -> Mapping[str, inspect.Parameter]:
    """The arguments in the signature."""
    return inspect.signature(self.function).parameters

  @functools.cached_property
  def required(self) -> list[str]:
    """The arguments that have no default."""
    return [x for x, p in self.parameters.items() if p.default is p.empty]

  @property
  def off_switch(self) -> str | None:
    """The argument that switches the scaler off, if any."""
    switch = self.switches["enabled"]
    return switch.name if isinstance(switch, Argument) else None

  def is_off(self, arguments: Mapping[str, object]) -> bool:
    """Returns True if the arguments switch the scaler off."""
    name = self.off_switch
    return name is not None and not arguments.get(name, True)

  def rule(
    self, args: tuple[object, ...], given: Mapping[str, object]
  ) -> PresetLossScale:
    """Returns the rule for a call with these arguments."""
    arguments = self._bind(args, given)
    checked: dict[str, object] = {}
    switches = _fill(self.switches, arguments, checked)
    cells = _fill(self.columns, arguments, checked)
    if self.starts_within_bounds:
      self._check_start(cells)
    scale, skip = switches["scale"], switches["skip"]
    if not switches["enabled"]:
      scale, skip = 1.0, False
    elif not switches["moves"]:
      scale = cells["init_scale"]
    machine: engine.Engine | fixed.FixedLossScale
    if scale is None:
      machine = engine.Engine(**cells)
    else:
      machine = fixed.FixedLossScale(scale)
    # Arguments that were integers stay integers.
    kept = checked | {x: y for x, y in arguments.items() if type(y) is int}
    values = tuple((x, kept.get(x, y)) for x, y in arguments.items())
    return PresetLossScale(self.function.__name__, values, machine, skip=skip)

  def _bind(
    self, args: tuple[object, ...], given: Mapping[str, object]
  ) -> dict[str, object]:
    """Returns all arguments of a call, in the signature's order."""
    name, parameters = self.function.__name__, self.parameters
    if args:
      raise TypeError(
        f"`{name}` takes its arguments by name, got {len(args)} by position; "
        f"write {name}({', '.join(f'{x}=...' for x in parameters)})."
      )
    _arguments.check_known(name, parameters, given)
    if missing := [x for x in self.required if x not in given]:
      raise TypeError(
        f"`{name}` must be given the arguments that have no default, got a "
        f"call missing {', '.join(map(repr, missing))}; pass "
        f"{', '.join(f'{x}=...' for x in missing)}."
      )
    return {x: given.get(x, p.default) for x, p in parameters.items()}

  def _check_start(self, cells: Mapping[str, Any]) -> None:
    """Raises if the first S is outside the system's own bounds."""
    init_scale = self.columns["init_scale"].name
    for bound, word, is_beyond in (
      ("min_scale", "most", operator.gt),
      ("max_scale", "least", operator.lt),
    ):
      value = cells.get(bound)
      if value is not None and is_beyond(value, cells["init_scale"]):
        name = self.columns[bound].name
        raise ValueError(
          f"`{name}` must be at {word} `{init_scale}`, got `{name}`={value!r} "
          f"and `{init_scale}`={cells['init_scale']!r}."
        )


PRESETS: dict[str, Preset] = {}
# A declaration may set these in addition to the fields of the engine.
_SWITCHES: dict[str, object] = {
  "scale": None,  # The fixed S, if S never moves.
  "moves": True,  # False keeps S at its first value.
  "skip": True,  # False also applies steps that overflow.
  "enabled": True,  # False keeps S at 1, skips no step and saves nothing.
}


def preset(
  *,
  # Maps the keys of a checkpoint, nested ones as "outer/inner", to the kinds in
  # `_keys`.
  saves: Mapping[str, object] | None = None,
  # Whether the first S must lie within the bounds.
  starts_within_bounds: bool = False,
  # Fields of `Engine` and `_SWITCHES`; constants or `Argument`s.
  **columns: object,
) -> Callable[[Callable[_P, PresetLossScale]], Callable[_P, PresetLossScale]]:
  """Declares the preset whose signature and docstring follow."""
  switches = {x: columns.pop(x, default) for x, default in _SWITCHES.items()}
  keys: dict[str, Any] = {
    name: _keys.Key(name, key) if key in _keys.READERS else key
    for name, key in (saves or {}).items()
  }

  def declare(
    function: Callable[_P, PresetLossScale],
  ) -> Callable[_P, PresetLossScale]:
    @functools.wraps(function)
    def make(*args: _P.args, **arguments: _P.kwargs) -> PresetLossScale:
      return declared.rule(args, arguments)

    parameters = inspect.signature(function).parameters
    cells = _named(parameters, columns, switches)
    declared = Preset(make, cells, switches, keys, starts_within_bounds)
    PRESETS[function.__name__] = declared
    make.__doc__ = _described(
      inspect.cleandoc(function.__doc__ or ""), declared
    )
    return make

  return declare


def _named(
  parameters: Mapping[str, inspect.Parameter],
  columns: Mapping[str, object],
  switches: Mapping[str, object],
) -> dict[str, object]:
  """Returns the columns, with those that arguments fill by their names."""
  cells = (*columns.values(), *switches.values())
  taken = {cell.name for cell in cells if isinstance(cell, Argument)}
  found: dict[str, object] = {}
  for column, names in _NAMES.items():
    # The order of columns is the order in which arguments are checked.
    if column in columns:
      found[column] = columns[column]
    for name in names.split():
      if name in parameters and name not in taken:
        is_optional = parameters[name].default is None
        found[column] = Argument(name, is_optional=is_optional)
  return {**found, **columns}


def _described(text: str, preset: Preset) -> str:
  """Returns a preset's docstring with all arguments and the shared sections."""
  before, examples, after = text.partition("\nExamples:\n")
  if not examples:
    return text
  summary, _, args = before.partition("\nArgs:\n")
  texts = {
    cell.name: _TEXTS[key]
    for column, cell in {**preset.columns, **preset.switches}.items()
    if isinstance(cell, Argument)
    for key in (column, cell.name)
    if key in _TEXTS
  }
  texts |= re.findall(r"^  (\w+): (.+(?:\n    .+)*)", args, re.MULTILINE)
  listed = "\n".join(f"  {name}: {texts[name]}" for name in preset.parameters)
  parts = summary.rstrip(), f"Args:\n{listed}", _ENDS_OF_EVERY_PRESET + after
  return "\n\n".join(parts)


def check_scale_from_one(name: str, value: object) -> float:
  """Returns a scale, or raises if it is below 1."""
  scale = _arguments.check_scale(name, value)
  if scale < 1:
    raise ValueError(f"`{name}` must be at least 1, got {value!r}.")
  return scale


def _fill(
  columns: Mapping[str, object],
  arguments: Mapping[str, object],
  checked: dict[str, object],
) -> dict[str, Any]:
  """Returns the columns' values, and adds checked arguments to `checked`."""
  cells: dict[str, Any] = {}
  for column, cell in columns.items():
    if not isinstance(cell, Argument):
      cells[column] = cell
      continue
    name, value = cell.name, arguments[cell.name]
    if value is None and cell.is_optional:
      continue
    # An argument that fills several columns is checked by the first of them.
    if name not in checked:
      checked[name] = (cell.check or _CHECKS[column])(name, value)
    convert = cell.convert
    cells[column] = convert(checked[name]) if convert else checked[name]
  return cells


def _check_steps(name: str, value: object) -> int:
  # Megatron keeps its window as a float, 1000.0.
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  return _arguments.check_count(name, value)


def _check_share(name: str, value: object) -> float:
  number = _arguments.check_number(name, value)
  if not 0 <= number <= 1:
    raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")
  return number


# The check of each column, for arguments without a check of their own.
_CHECKS: dict[str, Callable[[str, Any], object]] = {
  "scale": _arguments.check_scale,
  "moves": _arguments.check_flag,
  "skip": _arguments.check_flag,
  "enabled": _arguments.check_flag,
  "init_scale": _arguments.check_first_scale,
  "growth_factor": fields.check_growth_factor,
  "backoff_factor": fields.check_backoff_factor,
  "growth_interval": _check_steps,
  "hysteresis": _check_steps,
  "min_scale": _arguments.check_not_negative,
  "max_scale": _arguments.check_scale,
  "hold_below": _arguments.check_not_negative,
  "tolerance": _check_share,
  "notes_failure": _arguments.check_flag,
}
