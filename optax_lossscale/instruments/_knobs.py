"""What the arguments of a rule are called, and the rule with another value."""

import dataclasses
from typing import Any
from typing import NamedTuple

from optax_lossscale._rules import base
from optax_lossscale._rules import loss_scales
from optax_lossscale.presets import declaration

# The fields of rules that are dataclasses of their own, and what they do.
_COLUMNS = {
  "init_scale": "init_scale",
  "growth_interval": "growth_interval",
  "hysteresis": "hysteresis",
  "min_scale": "min_scale",
  "scale_min": "min_scale",
  "max_scale": "max_scale",
  "scale_max": "max_scale",
  "headroom": "headroom",
}
# What presets call the S that stays.
_FIXED_SCALES = frozenset({"loss_scale", "initial_scale", "init_loss_scaling"})


class Knob(NamedTuple):
  """An argument of a rule, under the rule's own name for it."""

  name: str
  value: Any


def knobs(rule: base.LossScale) -> dict[str, Knob]:
  """Returns the arguments that can be turned, by what they do."""
  inner = _inner(rule)
  if inner is not None:
    # The first S is not the inner rule's affair there.
    return {c: k for c, k in knobs(inner).items() if c != "init_scale"}
  if isinstance(rule, declaration.PresetLossScale):
    found = _of_preset(rule)
  elif isinstance(rule, loss_scales.FixedLossScale):
    found = {"scale": Knob("scale", rule.scale)}
  elif dataclasses.is_dataclass(rule):
    found = {
      _COLUMNS[field.name]: Knob(field.name, getattr(rule, field.name))
      for field in dataclasses.fields(rule)
      if field.init and field.name in _COLUMNS
    }
  else:
    found = {}
  # A bound of 0 is none to the systems that take it.
  return {
    column: knob
    for column, knob in found.items()
    if knob.value or (column == "headroom" and knob.value == 0)
  }


def turn(rule: base.LossScale, knob: Knob, value: Any) -> base.LossScale:
  """Returns the rule with another value of one argument."""
  inner = _inner(rule)
  if inner is not None:
    changes: dict[str, Any] = {"rule": turn(inner, knob, value)}
  elif isinstance(rule, declaration.PresetLossScale):
    arguments = {**dict(rule.arguments), knob.name: value}
    return declaration.PRESETS[rule.system].function(**arguments)
  else:
    changes = {knob.name: value}
  turned: base.LossScale = dataclasses.replace(rule, **changes)
  return turned


def _of_preset(rule: declaration.PresetLossScale) -> dict[str, Knob]:
  arguments = dict(rule.arguments)
  if isinstance(rule.machine, loss_scales.FixedLossScale):
    # One argument is S, under a name of the system's own.
    fixed = [
      Knob(name, value)
      for name, value in arguments.items()
      if name in _FIXED_SCALES
      and type(value) in (int, float)
      and value == rule.machine.scale
    ]
    return {"scale": fixed[0]} if fixed else {}
  columns = declaration.PRESETS[rule.system].columns
  return {
    column: Knob(cell.name, arguments[cell.name])
    for column, cell in columns.items()
    if isinstance(cell, declaration.Argument)
  }


def _inner(rule: base.LossScale) -> base.LossScale | None:
  """Returns the rule inside of a rule, such as of a warm start."""
  inner = getattr(rule, "rule", None)
  return inner if isinstance(inner, base.LossScale) else None
