"""Checks of the factors and bounds that rules have."""

import functools

import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown


def check_growth_factor(name: str, value: object) -> float:
  """Returns `value` as a float, which must be above 1."""
  number = arguments.check_number(name, value)
  # Compare in float32, the dtype of S: 1 + 1e-9 is rounded to 1, and S would
  # never move.
  if np.float32(number) <= 1:
    raise ValueError(
      f"`{name}` must be above 1 (in float32), got {shown(value)}; for an S "
      "that never moves use FixedLossScale."
    )
  return number


def check_backoff_factor(name: str, value: object) -> float:
  """Returns `value` as a float, which must be between 0 and 1."""
  number = arguments.check_number(name, value)
  if not (arguments.is_usable_scale(number) and np.float32(number) < 1):
    raise ValueError(
      f"`{name}` must be between 0 and 1, both excluded (and a normal float32, "
      f"at least 2**-126), got {shown(value)}."
    )
  return number


def check_bounds(rule: object, *fields: str, interval: str = "") -> None:
  """Converts a rule's scales to floats; raises unless they are in order."""
  check_first = functools.partial(
    arguments.check_first_scale, interval=interval
  )
  checks = dict.fromkeys(fields, arguments.check_scale) | {
    "init_scale": check_first
  }
  arguments.check_fields(rule, **{name: checks[name] for name in fields})
  scales = [getattr(rule, name) for name in fields]
  # Compare in float32, the dtype of S.
  if sorted(map(np.float32, scales)) != [np.float32(x) for x in scales]:
    names = [f"`{name}`" for name in fields]
    got = ", ".join(map("{}={!r}".format, names, scales))
    raise ValueError(f"{' <= '.join(names)} must hold, got {got}.")
