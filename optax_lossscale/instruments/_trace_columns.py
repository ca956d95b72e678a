"""The columns of a trace: from what a file holds to a History."""

from collections.abc import Callable
import itertools
from typing import Any
from typing import NamedTuple

import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale.instruments import _history

NAMES = ("step", "loss_scale", "overflow", "amax")
_FLAGS = {"0": False, "1": True, "false": False, "true": True}


class Columns(NamedTuple):
  """One run in a file, unparsed.

  Attributes:
    columns: by their names, each with an entry for every step.
    place: where an entry is, for an error: from its index and its column.
    run: its label, if it has one.
    seed: its seed as text, if it has one.
  """

  columns: dict[str, list[Any]]
  place: Callable[[int, str], str]
  run: str | None = None
  seed: str | None = None

  def scaled(self) -> "Columns":
    """Returns the steps that have an amax and were scaled."""
    kept = [
      i
      for i, values in enumerate(zip(*self.columns.values(), strict=True))
      if not any(
        _is_empty(value) and name in ("amax", "loss_scale")
        for name, value in zip(self.columns, values, strict=True)
      )
    ]
    return self._replace(
      columns={
        name: [values[i] for i in kept] for name, values in self.columns.items()
      },
      place=lambda i, column: self.place(kept[i], column),
    )

  def parse(self) -> _history.History:
    """Returns it as arrays."""
    count = len(self.columns["amax"])
    # What is too large for float32 is inf, as it is in a float32 amax.
    with np.errstate(over="ignore"):
      amax = np.array(self._parsed("amax", _parse_amax), np.float32)
    scale = np.ones(count, np.float32)
    if "loss_scale" in self.columns:
      scale = np.array(self._parsed("loss_scale", _parse_scale), np.float32)
    overflow = ~np.isfinite(amax)
    if "overflow" in self.columns:
      overflow |= np.array(self._parsed("overflow", _parse_flag), bool)
    step = list(range(1, count + 1))
    if "step" in self.columns:
      step = self._parsed("step", _parse_step)
      for i, (before, after) in enumerate(itertools.pairwise(step), start=1):
        if after <= before:
          raise ValueError(
            f"{self.place(i, 'step')}: steps must increase, got {after} after "
            f"{before}; several runs need a column `run`."
          )
    return _history.History(np.array(step, np.int64), scale, amax, overflow)

  def _parsed(self, column: str, parse: Callable[[Any], Any]) -> list[Any]:
    parsed = []
    for i, value in enumerate(self.columns[column]):
      try:
        parsed.append(parse(value))
      except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{self.place(i, column)}: {error}") from None
    return parsed


def shown(value: Any) -> str:
  """Returns a value for an error, cut short."""
  text = repr(value)
  return text if len(text) <= 40 else f"{text[:37]}..."


def _is_empty(value: Any) -> bool:
  return value is None or (isinstance(value, str) and not value.strip())


def _parse_number(value: Any) -> float:
  try:
    if isinstance(value, bool):
      raise TypeError
    return float(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"must be a number, got {shown(value)}.") from None


def _parse_amax(value: Any) -> float:
  number = _parse_number(value)
  if number < 0:
    raise ValueError(f"must not be negative, got {shown(value)}.")
  return number


def _parse_scale(value: Any) -> float:
  number = _parse_number(value)
  if not arguments.SMALLEST_SCALE <= number <= arguments.LARGEST_SCALE:
    raise ValueError(
      f"must be positive and a normal float32, got {shown(value)}."
    )
  return number


def _parse_flag(value: Any) -> bool:
  flag = _FLAGS.get(str(value).strip().lower())
  if flag is None:
    raise ValueError(f"must be 0 or 1, got {shown(value)}.")
  return flag


def _parse_step(value: Any) -> int:
  number = _parse_number(value)
  if not (number.is_integer() and 0 < number < 2**53):
    raise ValueError(f"must be a step, from 1, got {shown(value)}.")
  return int(number)
