"""The text form of a rule: `none`, `fixed:1024`, `dynamic:growth_interval=20`.

A name, which may be a preset's, then its arguments in any order, by name or the
first one without; a preset's by name only. A number is a Python literal or a
power of two literals, as in `2**15`.
"""

import ast
from collections.abc import Callable
import inspect
import math
from typing import NamedTuple

import optax_lossscale as ols
from optax_lossscale.presets._checkpoints import PRESETS

_NONE = "none"
_OWN = {"fixed": ols.FixedLossScale, "dynamic": ols.DynamicLossScale}
_RULES: dict[str, Callable[..., ols.LossScale]] = {**_OWN, **PRESETS}


class LossScaleOption(NamedTuple):
  """A rule as the user wrote it, and the rule; None is no loss scaling."""

  text: str
  rule: ols.LossScale | None


def parse(text: str) -> LossScaleOption:
  """Returns the rule that a text stands for.

  Args:
    text: as the module tells it.

  Raises:
    ValueError: if the text is not of this form, or the rule refuses an
      argument; the rule's own words are passed on.
  """
  name, _, rest = text.partition(":")
  if name == _NONE and not rest:
    return LossScaleOption(text, None)
  if name not in _RULES:
    raise ValueError(
      f"unknown rule {text!r}; choose from {', '.join((_NONE, *_RULES))}, "
      "with arguments as in fixed:1024 or dynamic:growth_interval=200"
    )
  arguments = _parse_arguments(name, rest)
  try:
    return LossScaleOption(text, _RULES[name](**arguments))
  except (TypeError, ValueError) as error:
    raise ValueError(f"{text!r}: {error}") from error


def _parse_arguments(rule: str, text: str) -> dict[str, float | bool]:
  names = [
    name
    for name in inspect.signature(_RULES[rule]).parameters
    if not name.startswith("_")
  ]
  arguments: dict[str, float | bool] = {}
  for item in text.split(",") if text else ():
    name, equals, value = (part.strip() for part in item.partition("="))
    if not equals and rule in _OWN:
      name, value = names[0], name
    elif not equals:
      raise ValueError(
        f"{rule} takes its arguments by name, as in {rule}:{names[0]}=1"
      )
    if name not in names:
      raise ValueError(
        f"{rule} has no argument {name!r}; choose from {', '.join(names)}"
      )
    number = _parse_value(name, value)
    if name in arguments:
      raise ValueError(f"{rule} got {name!r} twice")
    arguments[name] = number
  return arguments


def _parse_value(name: str, text: str) -> float | bool:
  try:
    return _evaluate(ast.parse(text, mode="eval").body)
  # Deep nesting ends in RecursionError or MemoryError inside the parser.
  except (
    SyntaxError,
    ValueError,
    ArithmeticError,
    RecursionError,
    MemoryError,
  ):
    raise ValueError(
      f"{name} must be a number such as 1024, 0.5 or 2**15, got {text!r}"
    ) from None


def _evaluate(node: ast.expr) -> float | bool:
  match node:
    case ast.Constant(bool() | int() | float() as value):
      return value
    case ast.UnaryOp(ast.USub(), operand):
      return -_evaluate(operand)
    case ast.BinOp(ast.Constant() as left, ast.Pow(), right):
      base, exponent = _evaluate(left), _evaluate(right)
      # As floats first: an integer power could take all memory.
      if math.isfinite(float(base) ** float(exponent)):
        return base**exponent
  raise ValueError
