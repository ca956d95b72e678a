"""Ascend's `accelerate_train_mode`, and the settings beside it."""

import fractions
import functools
import math
import re
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale._precision import precision_schedule


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


def accelerate_train_mode(
  text: str,
  *,
  total_steps: int | None = None,
  target_loss: float | None = None,
  precision_mode: str | None = None,
  precision_mode_v2: str | None = None,
  steps_per_call: int = 1,
) -> precision_schedule.PrecisionSchedule:
  """TF Adapter's `accelerate_train_mode`, for Ascend, as a precision schedule.

  Args:
    text: "type|mode|ratio" or "type|mode", in Ascend's grammar. The type is
      "fast" (float16) or "fast1" (bfloat16). In mode "step", full precision
      begins after `floor(total_steps * ratio)` steps, or at the latest with the
      last call; the ratio is 0.2 to 0.9 (default 0.9). In mode "loss", it
      begins when the loss is `target_loss * ratio` or less; the ratio is 1.01
      to 1.5 (default 1.05). Both products are exact.
    total_steps: for mode "step", the number of applied steps in all.
    target_loss: for mode "loss", the positive loss that training without the
      schedule ends at.
    precision_mode: the setting of that name in the Ascend script. With
      "must_keep_origin_dtype", `loss_fn` itself may compute products in low
      precision. With "allow_fp32_to_fp16" or no mode, training ends in float32.
      Other values are errors, as on Ascend.
    precision_mode_v2: the newer setting; "origin" is "must_keep_origin_dtype".
    steps_per_call: the number of steps between two updates of the state. The
      switch may come up to `steps_per_call - 1` steps late. Leave it out for
      `make_train_step`, which updates the state after each step.

  Returns:
    A `PrecisionSchedule`.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if the text does not follow the grammar, the argument of its
      mode is missing or that of the other mode is given, or a precision mode
      contradicts it.

  Examples:
    >>> import optax_lossscale as ols
    >>> preset = ols.presets.accelerate_train_mode
    >>> preset("fast|step|0.9", total_steps=10).until_step
    9
    >>> preset("fast1|loss|1.5", target_loss=2.0).until_loss
    Fraction(3, 1)

  References:
    Ascend, `accelerate_train_mode` of TF Adapter, experimental there too.
  """
  dtype, mode, ratio = _parse(text)
  _check_needed(mode, total_steps=total_steps, target_loss=target_loss)
  per_call = arguments.check_count("steps_per_call", steps_per_call)
  keeps = _keeps_origin_dtype(
    precision_mode=precision_mode, precision_mode_v2=precision_mode_v2
  )
  make = functools.partial(
    precision_schedule.PrecisionSchedule, dtype, allow_low_products=keeps
  )
  if mode == "step":
    total = arguments.check_steps("total_steps", total_steps)
    # The last call is in full precision in any case.
    first_full = min(math.floor(total * ratio), total - per_call)
    return make(until_step=max(0, first_full))
  # The target must be finite in float32, but its multiple need not be.
  arguments.check_number("target_loss", target_loss)
  target = precision_schedule.exact_loss("target_loss", target_loss)
  return make(until_loss=target * ratio)


def _parse(text: object) -> tuple[DTypeLike, str, fractions.Fraction]:
  """Returns the dtype, mode and ratio in an `accelerate_train_mode`."""
  if not isinstance(text, str):
    raise TypeError(
      "`text` must be an `accelerate_train_mode` such as 'fast|step|0.9', got "
      f"{shown(text)} of type {arguments.kind_of(text)}."
    )
  fields = text.split("|")
  if len(fields) not in (2, 3):
    raise ValueError(
      "`text` must be 'type|mode|ratio' or 'type|mode', such as "
      f"'fast|step|0.9', got {shown(text)}."
    )
  kind, name, ratio = (*fields, "")[:3]
  if kind not in _DTYPES:
    raise ValueError(
      "the type in `text` must be 'fast' (float16) or 'fast1' "
      f"(bfloat16), got {shown(kind)} in {shown(text)}."
    )
  if name not in _MODES:
    raise ValueError(
      "the mode in `text` must be 'step' or 'loss', got "
      f"{shown(name)} in {shown(text)}."
    )
  return _DTYPES[kind], name, _parse_ratio(text, name, ratio)


def _check_needed(mode: str, **given: object) -> None:
  """Raises unless only the argument that the mode needs is given."""
  needed = _MODES[mode].needs
  if given[needed] is None:
    raise ValueError(f"`{needed}` must be given in mode {mode!r}, got none.")
  for name, value in given.items():
    if name != needed and value is not None:
      raise ValueError(
        f"`{name}` must be left out in mode {mode!r}, which goes by "
        f"`{needed}`, got {shown(value)}."
      )


def _keeps_origin_dtype(**modes: object) -> bool:
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
      "the ratio in `text` must be a number from "
      f"{mode.least} to {mode.most} in mode {name!r}, got {shown(ratio)} in "
      f"{shown(text)}."
    )
  return number
