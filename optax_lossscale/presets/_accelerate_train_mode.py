"""Ascend's `accelerate_train_mode`, and the settings beside it."""

import fractions
import functools
import math
import re

import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale._precision import precision_schedule

_DTYPES = {"fast": np.dtype(jnp.float16), "fast1": np.dtype(jnp.bfloat16)}
# The argument that a mode needs, its default ratio and the ratio's bounds.
_MODES = {
  "step": ("total_steps", "0.9", "0.2", "0.9"),
  "loss": ("target_loss", "1.05", "1.01", "1.5"),
}
# The precision modes that Ascend allows beside `accelerate_train_mode`.
_BESIDE = {
  "precision_mode": ("allow_fp32_to_fp16", "must_keep_origin_dtype"),
  "precision_mode_v2": ("origin",),
}
_TEXT = re.compile(r"(fast1?)\|(step|loss)(?:\|([0-9]+\.?[0-9]*|\.[0-9]+|))?")


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
      precision; the only other value is "allow_fp32_to_fp16".
    precision_mode_v2: the newer setting; "origin" is "must_keep_origin_dtype".
    steps_per_call: the number of steps between two updates of the state, by
      which the switch may be late; 1 for `make_train_step`.

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
  if parts := _TEXT.fullmatch(text):
    kind, mode, number = parts.groups()
    # As fractions, 90 * 0.7 is exactly 63; in floating point it is less.
    default, least, most = map(fractions.Fraction, _MODES[mode][1:])
    ratio = fractions.Fraction(number) if number else default
    if least <= ratio <= most:
      return _DTYPES[kind], mode, ratio
  bounds = " and ".join(
    f"from {least} to {most} in mode {mode!r}"
    for mode, (_, _, least, most) in _MODES.items()
  )
  raise ValueError(
    "`text` must be 'type|mode|ratio' or 'type|mode', with the type 'fast' "
    "(float16) or 'fast1' (bfloat16), the mode 'step' or 'loss', and as the "
    f"ratio a number {bounds}, such as 'fast|step|0.9', got {shown(text)}."
  )


def _check_needed(mode: str, **given: object) -> None:
  """Raises unless only the argument that the mode needs is given."""
  needed = _MODES[mode][0]
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
