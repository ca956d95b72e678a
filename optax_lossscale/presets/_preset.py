"""The rule that a preset returns: a row of the table, filled and checked."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import operator
from typing import Any

import jax

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._rules import base
from optax_lossscale._rules import engine
from optax_lossscale._rules import loss_scales
from optax_lossscale.presets import _table


@dataclasses.dataclass(frozen=True, repr=False)
class PresetLossScale(base.LossScale):
  """Another system's rule, under that system's own argument names.

  Attributes:
    system: the preset's name, by which the state dictionary is written.
    arguments: the arguments that the preset was called with, and their values.
    machine: what moves S.
    skip: whether an overflow skips the step.
  """

  system: str
  arguments: tuple[tuple[str, Any], ...]
  machine: engine.Engine | loss_scales.FixedLossScale

  def init(self) -> Any:
    """Returns the state before the first step."""
    return self.machine.init()

  def update(
    self,
    state: Any,
    overflow: jax.Array | bool,
    *,
    amax: jax.Array | None = None,
  ) -> Any:
    """Returns the state after a step. See `LossScale.update`."""
    del amax
    return self.machine.update(state, overflow)

  def stalled(self, state: Any, overflow: jax.Array | bool) -> jax.Array:
    """Returns bool[]: S cannot follow. See `LossScale.stalled`."""
    return self.machine.stalled(state, overflow)

  def __repr__(self) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
    return f"presets.{self.system}({arguments})"


def dynamic(system: str, arguments: Mapping[str, Any]) -> PresetLossScale:
  """Returns the rule that a row of the table makes of arguments."""
  row = _table.SYSTEMS[system]
  checked: dict[str, Any] = {}
  cells: dict[str, Any] = {}
  for column, cell in row.columns.items():
    if not isinstance(cell, _table.Argument):
      cells[column] = cell
      continue
    value = arguments[cell.name]
    if value is None and cell.is_optional:
      continue
    # An argument in several columns is of the kind of the first.
    if cell.name not in checked:
      check = cell.check or _CHECKS[column]
      checked[cell.name] = check(cell.name, value)
    value = checked[cell.name]
    cells[column] = cell.convert(value) if cell.convert else value
  _check_start(row, cells)
  return PresetLossScale(
    system, _as_given(arguments, checked), engine.Engine(**cells)
  )


def fixed(
  system: str,
  arguments: Mapping[str, Any],
  scale: str,
  *,
  least: float = 0.0,
  skip: bool = True,
) -> PresetLossScale:
  """Returns the rule of a system whose S does not move."""
  loss_scale = _arguments.check_scale(scale, arguments[scale])
  _check_least(scale, loss_scale, least)
  return PresetLossScale(
    system,
    _as_given(arguments, {scale: loss_scale}),
    loss_scales.FixedLossScale(loss_scale),
    skip=skip,
  )


def switched_off(
  system: str,
  arguments: Mapping[str, Any],
  scale: str | None = None,
  *,
  skip: bool = False,
) -> PresetLossScale:
  """Returns the rule of a scaler in the table that is told to leave S alone."""
  rule = dynamic(system, arguments)
  loss_scale = 1.0 if scale is None else dict(rule.arguments)[scale]
  return dataclasses.replace(
    rule, machine=loss_scales.FixedLossScale(loss_scale), skip=skip
  )


def _as_given(
  arguments: Mapping[str, Any], checked: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
  """Returns the checked arguments, integers where they came as such."""
  return tuple(
    (name, value if type(value) is int else checked.get(name, value))
    for name, value in arguments.items()
  )


def _check_start(row: _table.Row, cells: Mapping[str, Any]) -> None:
  init_scale = row.columns["init_scale"].name
  _check_least(init_scale, cells["init_scale"], row.least_init_scale)
  if not row.starts_within_bounds:
    return
  for bound, word, is_beyond in (
    ("min_scale", "most", operator.gt),
    ("max_scale", "least", operator.lt),
  ):
    value = cells.get(bound)
    if value is not None and is_beyond(value, cells["init_scale"]):
      name = row.columns[bound].name
      raise ValueError(
        f"`{name}` must be at {word} `{init_scale}`, got `{name}`={value!r} "
        f"and `{init_scale}`={cells['init_scale']!r}."
      )


def _check_least(name: str, value: float, least: float) -> None:
  if value < least:
    raise ValueError(f"`{name}` must be at least {least:g}, got {value!r}.")


def _check_steps(name: str, value: Any) -> int:
  # Megatron keeps its window as a float, 1000.0.
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  return _arguments.check_count(name, value)


def _check_share(name: str, value: Any) -> float:
  number = _arguments.check_number(name, value)
  if not 0 <= number <= 1:
    raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")
  return number


def _check_refill(name: str, value: Any) -> Any:
  if value not in ("growth", "clean"):
    raise ValueError(
      f"`{name}` must be 'growth', as the code does, or 'clean', as its "
      f"documentation says, got {value!r}."
    )
  return value


# What kind of value a column takes, unless the argument says otherwise.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
  "init_scale": _arguments.check_scale,
  "growth_factor": _arguments.check_growth_factor,
  "backoff_factor": _arguments.check_backoff_factor,
  "growth_interval": _check_steps,
  "hysteresis": _check_steps,
  "min_scale": _arguments.check_not_negative,
  "max_scale": _arguments.check_scale,
  "hold_below": _arguments.check_not_negative,
  "tolerance": _check_share,
  "refill": _check_refill,
  "notes_failure": _arguments.check_flag,
}
