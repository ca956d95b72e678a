"""The text form of a rule: `none`, `fixed:1024`, `dynamic:growth_interval=20`.

The name of a rule or preset comes first, then its arguments in any order, each
with its name; the first argument of a rule may omit it. A number is a Python
literal or a power, as in `2**15`. A dtype is a name, and so may be any argument
whose default is a name. `warm_start:` goes before the text of another rule.
"""

import ast
from collections.abc import Callable
import inspect
import math
import re
from typing import NamedTuple

import optax_lossscale as ols
from optax_lossscale import rules
from optax_lossscale._base.arguments import did_you_mean
from optax_lossscale._base.arguments import shown
from optax_lossscale.presets.declaration import PRESETS

_NONE = "none"
_WARM_START = "warm_start"
_OWN: dict[str, Callable[..., ols.LossScale]] = {
  "fixed": ols.FixedLossScale,
  "dynamic": ols.DynamicLossScale,
  "headroom": rules.HeadroomLossScale,
  "log_max": rules.LogMaxLossScale,
}
_RULES: dict[str, Callable[..., ols.LossScale]] = {
  **_OWN,
  **{name: preset.function for name, preset in PRESETS.items()},
}


class LossScaleOption(NamedTuple):
  """The text of a rule, and the rule itself; None turns loss scaling off."""

  text: str
  rule: ols.LossScale | None


def parse(text: str) -> LossScaleOption:
  """Parses the text of a rule."""
  head, _, tail = text.partition(":")
  is_warm = head == _WARM_START
  own = tail if is_warm else text
  name, _, rest = own.partition(":")
  if is_warm and name in ("", _NONE, _WARM_START):
    raise ValueError(
      f"{shown(text)}: {_WARM_START} must come once, before a rule, as in "
      f"{_WARM_START}:dynamic:growth_interval=200"
    )
  if name == _NONE and not rest:
    return LossScaleOption(text, None)
  if re.fullmatch(r"[1-9][\d.e]*(\*\*\d+)?", own):
    raise ValueError(
      f"must be a rule, got {shown(own)}; fixed:{own} keeps that S, "
      f"dynamic:{own} starts from it"
    )
  if name not in _RULES:
    names = (_NONE, *_RULES, _WARM_START)
    raise ValueError(
      f"unknown rule {shown(own)}; choose from {', '.join(names)}, "
      "with arguments as in fixed:1024 or dynamic:growth_interval=200"
      f"{did_you_mean(name, names)}"
    )
  arguments = _parse_arguments(name, rest)
  try:
    rule = _RULES[name](**arguments)
    return LossScaleOption(text, rules.WarmStart(rule) if is_warm else rule)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{shown(text)}: {error}") from error


def _parse_arguments(rule: str, text: str) -> dict[str, float | bool | str]:
  parameters = inspect.signature(_RULES[rule]).parameters
  names = [name for name in parameters if not name.startswith("_")]
  has_first = rule in _OWN and (
    parameters[names[0]].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
  )
  arguments: dict[str, float | bool | str] = {}
  for item in text.split(",") if text else ():
    name, equals, value = (part.strip() for part in item.partition("="))
    if not equals and has_first:
      name, value = names[0], name
    elif not equals:
      raise ValueError(
        f"{rule} takes its arguments by name, as in {rule}:{names[0]}=1"
      )
    if name not in names:
      raise ValueError(
        f"{rule} has no argument {name!r}; choose from {', '.join(names)}"
        f"{did_you_mean(name, names)}"
      )
    takes_name = isinstance(parameters[name].default, str)
    is_name = name == "dtype" or (takes_name and value.isidentifier())
    parsed = value if is_name else _parse_value(name, value)
    if name in arguments:
      raise ValueError(f"{rule} got {name!r} twice")
    arguments[name] = parsed
  missing = [
    name
    for name, parameter in parameters.items()
    if parameter.default is parameter.empty and name not in arguments
  ]
  if missing:
    examples = ",".join(f"{name}={_example(name)}" for name in missing)
    raise ValueError(
      f"{rule} needs {' and '.join(missing)}, as in {rule}:{examples}"
    )
  return arguments


def _example(name: str) -> str:
  if "factor" in name:
    return "2"
  # All other required arguments are numbers of steps or values of S.
  return "1000" if "window" in name or "every" in name else "2**15"


def _parse_value(name: str, text: str) -> float | bool:
  try:
    return _evaluate(ast.parse(text, mode="eval").body)
  # Deep nesting makes the parser raise RecursionError or MemoryError.
  except (
    SyntaxError,
    ValueError,
    ArithmeticError,
    RecursionError,
    MemoryError,
  ):
    raise ValueError(
      f"{name} must be a number such as 1024, 0.5 or 2**15, got {shown(text)}"
    ) from None


def _evaluate(node: ast.expr) -> float | bool:
  match node:
    case ast.Constant(bool() | int() | float() as value):
      return value
    case ast.UnaryOp(ast.USub(), operand):
      return -_evaluate(operand)
    case ast.BinOp(ast.Constant() as left, ast.Pow(), right):
      base, exponent = _evaluate(left), _evaluate(right)
      # Tried as floats first, since an integer power could take all memory.
      if math.isfinite(float(base) ** float(exponent)):
        return base**exponent
  raise ValueError
