"""The text form of a rule: `fixed:1024`, `dynamic:growth_interval=20`.

The name of a rule or preset comes first, then its arguments in any order, each
with its name; the first argument of a rule may omit it. A number may be a
power, as in `2**15`. A dtype is a name, and so may be any argument whose
default is a name. `warm_start:` goes before the text of another rule.
"""

from collections.abc import Callable
import contextlib
import inspect
import math
import re

import optax_lossscale as ols
from optax_lossscale import rules
from optax_lossscale._base.arguments import did_you_mean
from optax_lossscale._base.arguments import shown
from optax_lossscale.presets.declaration import PRESETS

_WARM_START = "warm_start"
_RULES: dict[str, Callable[..., ols.LossScale]] = {
  "fixed": ols.FixedLossScale,
  "dynamic": ols.DynamicLossScale,
  "headroom": rules.HeadroomLossScale,
  "log_max": rules.LogMaxLossScale,
  **{name: preset.function for name, preset in PRESETS.items()},
}


def parse(text: str) -> ols.LossScale:
  """Parses the text of a rule."""
  head, _, tail = text.partition(":")
  is_warm = head == _WARM_START
  own = tail if is_warm else text
  name, _, rest = own.partition(":")
  if is_warm and name in ("", _WARM_START):
    raise ValueError(
      f"{shown(text)}: {_WARM_START} must come once, before a rule, as in "
      f"{_WARM_START}:dynamic:growth_interval=200"
    )
  if re.fullmatch(r"[1-9][\d.e]*(\*\*\d+)?", own):
    raise ValueError(
      f"must be a rule, got {shown(own)}; fixed:{own} keeps that S, "
      f"dynamic:{own} starts from it"
    )
  if name not in _RULES:
    names = (*_RULES, _WARM_START)
    raise ValueError(
      f"unknown rule {shown(own)}; choose from {', '.join(names)}, "
      "with arguments as in fixed:1024 or dynamic:growth_interval=200"
      f"{did_you_mean(name, names)}"
    )
  arguments = _parse_arguments(name, rest)
  try:
    rule = _RULES[name](**arguments)
    return rules.WarmStart(rule) if is_warm else rule
  except (TypeError, ValueError) as error:
    raise ValueError(f"{shown(text)}: {error}") from error


def _parse_arguments(rule: str, text: str) -> dict[str, float | bool | str]:
  parameters = inspect.signature(_RULES[rule]).parameters
  first = next(iter(parameters.values()))
  arguments: dict[str, float | bool | str] = {}
  for item in text.split(",") if text else ():
    name, equals, value = (part.strip() for part in item.partition("="))
    if not equals and first.kind is first.KEYWORD_ONLY:
      raise ValueError(
        f"{rule} takes its arguments by name, as in {rule}:{first.name}=1"
      )
    if not equals:
      name, value = first.name, name
    if name not in parameters:
      raise ValueError(
        f"{rule} has no argument {name!r}; choose from {', '.join(parameters)}"
        f"{did_you_mean(name, parameters)}"
      )
    takes_name = isinstance(parameters[name].default, str)
    is_name = name == "dtype" or (takes_name and value.isidentifier())
    parsed = value if is_name else _parse_value(name, value)
    if name in arguments:
      raise ValueError(f"{rule} got {name!r} twice")
    arguments[name] = parsed
  return arguments


def _parse_value(name: str, text: str) -> float | bool:
  if text in ("True", "False"):
    return text == "True"
  base, is_power, exponent = text.partition("**")
  with contextlib.suppress(ValueError, ArithmeticError):
    # As floats, since a power of integers could take all memory.
    value: float = float(base) ** (int(exponent) if is_power else 1)
    if math.isfinite(value):
      is_integer = value.is_integer() and abs(value) < 2**53
      return int(value) if is_integer else value
  raise ValueError(
    f"{name} must be a number such as 1024, 0.5 or 2**15, got {shown(text)}"
  )
