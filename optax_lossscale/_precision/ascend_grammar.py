"""The grammar of Ascend's `accelerate_train_mode` and related settings."""

import fractions
import re
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown


class _Mode(NamedTuple):
  """A mode: the argument it needs, its default ratio and the ratio's bounds."""

  needs: str
  default: str
  least: str
  most: str


_DTYPES = {"fast": np.dtype(jnp.float16), "fast1": np.dtype(jnp.bfloat16)}
_MODES = {
  "step": _Mode("total_steps", "0.9", least="0.2", most="0.9"),
  "loss": _Mode("target_loss", "1.05", least="1.01", most="1.5"),
}
# The precision modes that Ascend allows beside `accelerate_train_mode`.
_BESIDE = {
  "precision_mode": ("allow_fp32_to_fp16", "must_keep_origin_dtype"),
  "precision_mode_v2": ("origin",),
}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")


def parse(text: Any) -> tuple[Any, str, fractions.Fraction]:
  """Returns the dtype, mode and ratio in an `accelerate_train_mode`."""
  if not isinstance(text, str):
    raise TypeError(
      "`accelerate_train_mode` must be a text such as 'fast|step|0.9', got "
      f"{shown(text)} of type {arguments.kind_of(text)}."
    )
  fields = text.split("|")
  if len(fields) not in (2, 3):
    raise ValueError(
      "`accelerate_train_mode` must be 'type|mode|ratio' or 'type|mode', such "
      f"as 'fast|step|0.9', got {shown(text)}."
    )
  kind, name, ratio = (*fields, "")[:3]
  if kind not in _DTYPES:
    raise ValueError(
      "the type in `accelerate_train_mode` must be 'fast' (float16) or 'fast1' "
      f"(bfloat16), got {shown(kind)} in {shown(text)}."
    )
  if name not in _MODES:
    raise ValueError(
      "the mode in `accelerate_train_mode` must be 'step' or 'loss', got "
      f"{shown(name)} in {shown(text)}."
    )
  return _DTYPES[kind], name, _parse_ratio(text, name, ratio)


def check_end(
  mode: str, *, total_steps: Any, target_loss: Any
) -> tuple[int | None, fractions.Fraction | None]:
  """Returns the checked total steps and target loss, one of which is None."""
  given = {"total_steps": total_steps, "target_loss": target_loss}
  needed = _MODES[mode].needs
  if given[needed] is None:
    raise ValueError(f"`{needed}` must be given in mode {mode!r}, got none.")
  for name, value in given.items():
    if name != needed and value is not None:
      raise ValueError(
        f"`{name}` must be left out in mode {mode!r}, which goes by "
        f"`{needed}`, got {shown(value)}."
      )
  if mode == "step":
    return arguments.check_steps("total_steps", total_steps), None
  if arguments.check_number("target_loss", target_loss) <= 0:
    raise ValueError(
      f"`target_loss` must be positive, got {shown(target_loss)}."
    )
  if isinstance(target_loss, fractions.Fraction):
    return None, target_loss
  # Read the decimal that was typed, as for the ratio: 7.1 is exactly 71/10.
  return None, fractions.Fraction(str(np.asarray(target_loss)[()]))


def keeps_origin_dtype(**modes: Any) -> bool:
  """Returns True if a mode says that operations keep their original dtypes."""
  for name, mode in modes.items():
    if mode is not None and not (
      isinstance(mode, str) and mode in ("", *_BESIDE[name])
    ):
      allowed = " or ".join(map(repr, _BESIDE[name]))
      raise ValueError(
        f"`{name}` must be {allowed} or empty beside `accelerate_train_mode`, "
        f"which sets the precision itself, got {shown(mode)}."
      )
  return not {"must_keep_origin_dtype", "origin"}.isdisjoint(modes.values())


def _parse_ratio(text: str, name: str, ratio: str) -> fractions.Fraction:
  mode = _MODES[name]
  # As fractions, 90 * 0.7 is exactly 63; in floating point it is less.
  default, least, most = map(
    fractions.Fraction, (mode.default, mode.least, mode.most)
  )
  if not ratio:
    return default
  number = fractions.Fraction(ratio) if _NUMBER.fullmatch(ratio) else None
  if number is None or not least <= number <= most:
    raise ValueError(
      "the ratio in `accelerate_train_mode` must be a number from "
      f"{mode.least} to {mode.most} in mode {name!r}, got {shown(ratio)} in "
      f"{shown(text)}."
    )
  return number
