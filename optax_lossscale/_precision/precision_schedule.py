"""Precision schedules, made from Ascend's `accelerate_train_mode`."""

import fractions
import re
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._precision import _schedule


class _Mode(NamedTuple):
  """A mode: the argument that it needs, and its ratio.

  Attributes:
    needs: the name of the argument.
    default: the ratio where none is given.
    least: the smallest ratio.
    most: the largest ratio.
  """

  needs: str
  default: str
  least: str
  most: str


_DTYPES = {"fast": np.dtype(jnp.float16), "fast1": np.dtype(jnp.bfloat16)}
_MODES = {
  "step": _Mode("total_steps", "0.9", least="0.2", most="0.9"),
  "loss": _Mode("target_loss", "1.05", least="1.01", most="1.5"),
}
# What may be set beside it.
_BESIDE = {
  "precision_mode": ("allow_fp32_to_fp16", "must_keep_origin_dtype"),
  "precision_mode_v2": ("origin",),
}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")


def precision_schedule(
  accelerate_train_mode: str,
  *,
  total_steps: int | None = None,
  target_loss: float | None = None,
  steps_per_call: int = 1,
  precision_mode: str | None = None,
  precision_mode_v2: str | None = None,
) -> _schedule.PrecisionSchedule:
  """Returns when to go from low precision to full precision. Experimental.

  The first part of training is in low precision, which is faster where the
  hardware is, and the rest in full precision, so that it ends where it would
  have ended. The run must converge without it. It is meant for runs of more
  than an hour; what a short one gains may be less than what it costs to compile
  the step twice.

  What it returns is a pure state machine, `init` and `update`, whose
  `state.low` tells what the next step is in. The switch is a latch. Gradients
  in both precisions are made by `value_and_grad`, a whole train step by
  `make_train_step`.

  Args:
    accelerate_train_mode: "type|mode|ratio" or "type|mode", in Ascend's
      grammar. The type is "fast", float16, or "fast1", bfloat16. In mode "step"
      full precision begins after `floor(total_steps * ratio)` steps, and with
      the last call at the latest, the ratio being from 0.2 to 0.9 (0.9). In
      mode "loss" it begins when the loss is `target_loss * ratio` or less, the
      ratio being from 1.01 to 1.5 (1.05). The products are exact.
    total_steps: of the whole training, for mode "step": as all that counts
      here, applied steps. A loop of so many steps, skipped ones included, ends
      before the schedule does, and maybe before the switch.
    target_loss: a positive loss, for mode "loss": the one that training without
      the schedule ends at. A single batch below it switches, so feed a mean
      over steps where batches differ much.
    steps_per_call: how many steps you make between two updates of the state.
      The switch may come late by one less. `make_train_step` updates it after
      each step, so leave it out there.
    precision_mode: what else the Ascend script sets. "must_keep_origin_dtype"
      allows products that the loss computes in low precision by itself, at the
      end of training too, where they are not scaled. "allow_fp32_to_fp16" or
      nothing: float32 at the end. Another one is an error, as there.
    precision_mode_v2: likewise; "origin" is "must_keep_origin_dtype".

  Returns:
    A `PrecisionSchedule`, with `init`, `update`, `value_and_grad`,
    `make_train_step`, and the `dtype` of the low precision.

  Raises:
    TypeError: if an argument is of another type.
    ValueError: if the mode is not of the grammar, what it needs is missing or
      of another mode, or something else sets the precision.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> schedule = ols.precision_schedule("fast|step|0.9", total_steps=10)
    >>> state = schedule.init()
    >>> for step in (1, 8, 9, 10):
    ...   state = schedule.update(state, step=step)
    ...   print(step, state.low)
    1 True
    8 True
    9 False
    10 False
    >>> schedule = ols.precision_schedule("fast1|loss|1.5", target_loss=2.0)
    >>> state = schedule.init()
    >>> for loss in (3.5, 3.0, 3.5):
    ...   state = schedule.update(state, loss=jnp.float32(loss))
    ...   print(loss, state.low)
    3.5 True
    3.0 False
    3.5 False

  References:
    Ascend, `accelerate_train_mode` of TF Adapter, where it is experimental too.
  """
  dtype, mode, ratio = parse(accelerate_train_mode)
  total, target = _check_end(
    mode, total_steps=total_steps, target_loss=target_loss
  )
  keeps_origin_dtype = _keeps_origin_dtype(
    precision_mode=precision_mode, precision_mode_v2=precision_mode_v2
  )
  return _schedule.PrecisionSchedule(
    dtype=dtype,
    mode=mode,
    ratio=ratio,
    total_steps=total,
    target_loss=target,
    steps_per_call=arguments.check_count("steps_per_call", steps_per_call),
    keeps_origin_dtype=keeps_origin_dtype,
  )


def parse(text: Any) -> tuple[Any, str, fractions.Fraction]:
  """Returns the dtype, the mode and the ratio."""
  if not isinstance(text, str):
    raise TypeError(
      "`accelerate_train_mode` must be a text such as 'fast|step|0.9', got "
      f"{text!r} of type {type(text).__name__}."
    )
  fields = text.split("|")
  if len(fields) not in (2, 3):
    raise ValueError(
      "`accelerate_train_mode` must be 'type|mode|ratio' or 'type|mode', such "
      f"as 'fast|step|0.9', got {text!r} with {_count(len(fields), 'field')}."
    )
  kind, name, ratio = (*fields, "")[:3]
  if kind not in _DTYPES:
    raise ValueError(
      "the type in `accelerate_train_mode` must be 'fast' (float16) or 'fast1' "
      f"(bfloat16), got {kind!r} in {text!r}."
    )
  if name not in _MODES:
    raise ValueError(
      "the mode in `accelerate_train_mode` must be 'step' or 'loss', got "
      f"{name!r} in {text!r}."
    )
  return _DTYPES[kind], name, _parse_ratio(text, name, ratio)


def _check_end(
  mode: str, *, total_steps: Any, target_loss: Any
) -> tuple[int | None, fractions.Fraction | None]:
  """Returns where training ends: its steps in mode "step", else its loss."""
  given = {"total_steps": total_steps, "target_loss": target_loss}
  needed = _MODES[mode].needs
  if given[needed] is None:
    raise ValueError(f"`{needed}` must be given in mode {mode!r}, got none.")
  for name, value in given.items():
    if name != needed and value is not None:
      raise ValueError(
        f"`{name}` must be left out in mode {mode!r}, which goes by "
        f"`{needed}`, got {value!r}."
      )
  if mode == "step":
    return arguments.check_steps("total_steps", total_steps), None
  return None, _check_target(target_loss)


def _keeps_origin_dtype(**modes: Any) -> bool:
  """Returns whether operations keep the dtypes that they are written in."""
  for name, mode in modes.items():
    if mode is not None and not (
      isinstance(mode, str) and mode in ("", *_BESIDE[name])
    ):
      allowed = " or ".join(map(repr, _BESIDE[name]))
      raise ValueError(
        f"`{name}` must be {allowed} or empty beside `accelerate_train_mode`, "
        f"which sets the precision itself, got {mode!r}."
      )
  return not {"must_keep_origin_dtype", "origin"}.isdisjoint(modes.values())


def _parse_ratio(text: str, name: str, ratio: str) -> fractions.Fraction:
  mode = _MODES[name]
  # As fractions: 90 * 0.7 is 63, and less in floating point.
  default, least, most = map(
    fractions.Fraction, (mode.default, mode.least, mode.most)
  )
  if not ratio:
    return default
  number = fractions.Fraction(ratio) if _NUMBER.fullmatch(ratio) else None
  if number is None or not least <= number <= most:
    raise ValueError(
      "the ratio in `accelerate_train_mode` must be a number from "
      f"{mode.least} to {mode.most} in mode {name!r}, got {ratio!r} in "
      f"{text!r}."
    )
  return number


def _check_target(target_loss: Any) -> fractions.Fraction:
  if arguments.check_number("target_loss", target_loss) <= 0:
    raise ValueError(f"`target_loss` must be positive, got {target_loss!r}.")
  if isinstance(target_loss, fractions.Fraction):
    return target_loss
  # The decimal that a person wrote, as the ratio is one: 7.1 is 71/10.
  return fractions.Fraction(str(np.asarray(target_loss)[()]))


def _count(number: int, noun: str) -> str:
  return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
