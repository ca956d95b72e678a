"""When training goes from low precision to full precision."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fractions
import math
import numbers
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale import _arguments
from optax_lossscale.precision import _accelerate_train_mode
from optax_lossscale.precision import _two_precisions


class PrecisionScheduleState(NamedTuple):
  """State of a `PrecisionSchedule`.

  Attributes:
    low: bool[], whether the next step is in low precision. Once it is False it
      stays so.
    steps: int32[], how many steps a "step" schedule was told are finished; 0 in
      a "loss" schedule.
  """

  low: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
  """Low precision first, full precision at the end: a latch.

  Made by `precision_schedule`, which tells what it is for.

  Attributes:
    dtype: the low precision, float16 or bfloat16.
    mode: "step" or "loss", what the switch depends on.
    ratio: of the total steps, or of the target loss.
    total_steps: of the training; None in mode "loss".
    target_loss: which the training ends at; None in mode "step".
    steps_per_call: how many steps are made between two updates of the state.
  """

  dtype: Any
  mode: str
  ratio: fractions.Fraction
  total_steps: int | None
  target_loss: fractions.Fraction | None
  steps_per_call: int

  def init(self) -> PrecisionScheduleState:
    """Returns the state before the first step.

    It is low, unless a "step" schedule is too short to have such a part.
    """
    low = self.mode == "loss" or self._first_full_step > 0
    return PrecisionScheduleState(
      low=jnp.full((), low), steps=jnp.full((), 0, jnp.int32)
    )

  def update(
    self,
    state: PrecisionScheduleState,
    *,
    step: Any = None,
    loss: Any = None,
  ) -> PrecisionScheduleState:
    """Returns the state for the next step. Pure, and usable inside jit.

    Args:
      state: the state before.
      step: integer[], how many steps have been applied so far, in mode "step".
      loss: float[], the true loss of an applied step, in mode "loss". 0 stands
        for a loss that is not known, and NaN never switches.

    Raises:
      TypeError: if `step` is no integer scalar, or `loss` no real scalar.
      ValueError: if it is not given what its mode needs, and that alone.
    """
    fed = {"step": step, "loss": loss}
    if [name for name, value in fed.items() if value is not None] != [
      self.mode
    ]:
      got = [f"{name}=" for name, value in fed.items() if value is not None]
      raise ValueError(
        f"a schedule of mode {self.mode!r} must be updated with `{self.mode}`, "
        f"got {' and '.join(got) or 'neither `step` nor `loss`'}."
      )
    if self.mode == "step":
      steps = _check_step(step)
      return PrecisionScheduleState(
        low=state.low & ~_is_at_least(steps, self._first_full_step),
        steps=_as_count(steps),
      )
    loss = _check_loss(loss)
    reached = (loss != 0) & (loss <= _round_down(self._loss, loss.dtype))
    return PrecisionScheduleState(low=state.low & ~reached, steps=state.steps)

  def make_train_step(
    self,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    level: str = "O1",
    overrides: Mapping[str, DTypeLike] | None = None,
    operations: Mapping[str, Sequence[str]] | None = None,
    has_aux: bool = False,
    axis_name: Any = None,
  ) -> Callable[..., tuple[Any, Any, PrecisionScheduleState, Any]]:
    """Returns a train step that is compiled in both precisions.

    In the low part the loss is that of `autocast(loss_fn, level,
    dtype=schedule.dtype)`, in the rest that of `loss_fn` as it is written. Both
    are in one program, which chooses by `state.low`, so the switch compiles
    nothing. Parameters and the optimizer's state are the same before and after
    it. Only float16 is scaled: elsewhere S is 1 and the rule's state stays bit
    for bit, while steps that are not finite are skipped all the same.

    Args:
      loss_fn: the loss of parameters, in float32, and of what else the step is
        given; or `(loss, aux)`.
      tx: the optimizer. For float16 it holds `loss_scaling`; where no scaling
        is wanted, with `FixedLossScale(1.0)`.
      level: of `autocast`.
      overrides: of `autocast`.
      operations: of `autocast`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: the mapped axis, or several, over which `tx` agrees and
        averages under `shard_map`. Gradients are then each device's own, and
        the loss is averaged.

    Returns:
      A pure function `(params, opt_state, state, *args, **kwargs)` to `(params,
      opt_state, state, loss)`, for jit, `lax.scan` or `shard_map`; with
      `has_aux` the last is `(loss, aux)`. It updates the schedule's state
      itself: after each applied step, so it never switches late.

    Raises:
      TypeError: if an argument is not of its kind.
      ValueError: if `autocast` does not take its arguments; when called, if
        `loss_fn` computes products in low precision already, by `autocast`,
        by the dtype of a layer or of the parameters, or if float16 meets an
        optimizer without `loss_scaling`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_lossscale as ols
      >>> schedule = ols.precision_schedule("fast|step|0.5", total_steps=4)
      >>> tx = ols.loss_scaling(optax.sgd(0.25), ols.FixedLossScale(1024.0))
      >>> loss_fn = lambda params, x: jnp.sum((x @ params) ** 2)
      >>> train_step = jax.jit(schedule.make_train_step(loss_fn, tx))
      >>> params, x = jnp.ones((2, 1)), jnp.eye(2)
      >>> opt_state, state = tx.init(params), schedule.init()
      >>> for _ in range(4):
      ...   print(state.low, end=" ")
      ...   params, opt_state, state, loss = train_step(
      ...     params, opt_state, state, x
      ...   )
      ...   print(loss)
      True 2.0
      True 0.5
      False 0.125
      False 0.03125
    """
    return _two_precisions.make_train_step(
      self,
      loss_fn,
      tx,
      autocast={
        "level": level,
        "dtype": self.dtype,
        "overrides": overrides,
        "operations": operations,
      },
      has_aux=has_aux,
      axis_name=axis_name,
    )

  @property
  def _first_full_step(self) -> int:
    """How many finished steps make a "step" schedule switch."""
    assert self.total_steps is not None
    return max(
      0,
      min(
        math.floor(self.total_steps * self.ratio),
        # The last call is in full precision.
        self.total_steps - self.steps_per_call,
      ),
    )

  @property
  def _loss(self) -> fractions.Fraction:
    """The largest loss that makes a "loss" schedule switch."""
    assert self.target_loss is not None
    return self.target_loss * self.ratio


def precision_schedule(
  accelerate_train_mode: str,
  *,
  total_steps: int | None = None,
  target_loss: float | None = None,
  steps_per_call: int = 1,
  precision_mode: str | None = None,
  precision_mode_v2: str | None = None,
) -> PrecisionSchedule:
  """Returns when to go from low precision to full precision. Experimental.

  The first part of training is in low precision, which is faster where the
  hardware is, and the rest in full precision, so that it ends where it would
  have ended. The run must converge without it. It is meant for runs of more
  than an hour; what a short one gains may be less than what it costs to compile
  the step twice.

  What it returns is a pure state machine, `init` and `update`, whose
  `state.low` tells what the next step is in, and `make_train_step`, which
  builds a step of both precisions. The switch is a latch.

  Args:
    accelerate_train_mode: "type|mode|ratio" or "type|mode", in Ascend's
      grammar. The type is "fast", float16, or "fast1", bfloat16. In mode "step"
      full precision begins after `floor(total_steps * ratio)` steps, and with
      the last call at the latest, the ratio being from 0.2 to 0.9 (0.9). In
      mode "loss" it begins when the loss is `target_loss * ratio` or less, the
      ratio being from 1.01 to 1.5 (1.05). The products are exact.
    total_steps: of the whole training, for mode "step". Like all that counts
      here, applied ones: those that are skipped come on top.
    target_loss: a positive loss, for mode "loss": the one that training without
      the schedule ends at.
    steps_per_call: how many steps are made between two updates of the state.
      The switch may come late by one less.
    precision_mode: what else the Ascend script sets: "allow_fp32_to_fp16",
      "must_keep_origin_dtype" or nothing, which all mean the same here; another
      one lowers the precision of the whole run and is an error.
    precision_mode_v2: likewise, "origin" or nothing.

  Returns:
    A `PrecisionSchedule`, with `init`, `update`, `make_train_step` and the
    `dtype` of the low precision.

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
  dtype, mode, ratio = _accelerate_train_mode.parse(accelerate_train_mode)
  total, target = _accelerate_train_mode.check_end(
    mode, total_steps=total_steps, target_loss=target_loss
  )
  _accelerate_train_mode.check_precision_modes(
    precision_mode=precision_mode, precision_mode_v2=precision_mode_v2
  )
  return PrecisionSchedule(
    dtype=dtype,
    mode=mode,
    ratio=ratio,
    total_steps=total,
    target_loss=target,
    steps_per_call=_arguments.check_count("steps_per_call", steps_per_call),
  )


def _check_step(step: Any) -> Any:
  """Returns `step` as an int or an integer array."""
  if not isinstance(step, jax.Array):
    return _arguments.check_steps("step", step)
  if step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
    raise TypeError(
      "`step` must be an integer number of steps, got "
      f"{step.dtype}{list(step.shape)}."
    )
  return step


def _is_at_least(steps: Any, least: int) -> Any:
  """Returns bool[], whether that many steps or more are finished."""
  if not isinstance(steps, jax.Array):
    return np.bool_(steps >= least)
  if least > jnp.iinfo(steps.dtype).max:
    return np.bool_(False)
  # In the dtype of the steps, as JAX takes a Python number for an int32.
  return steps >= np.asarray(least, steps.dtype)


def _as_count(steps: Any) -> jax.Array:
  """Returns int32[]; what is above its largest value becomes that."""
  largest = _arguments.LARGEST_COUNT
  if not isinstance(steps, jax.Array):
    return jnp.full((), min(steps, largest), jnp.int32)
  if jnp.iinfo(steps.dtype).max > largest:
    steps = jnp.minimum(steps, jnp.asarray(largest, steps.dtype))
  return jnp.asarray(steps, jnp.int32)


def _check_loss(loss: Any) -> Any:
  """Returns `loss` as a NumPy or JAX array, float32 or float64, exactly."""
  rule = "`loss` must be a real scalar"
  if isinstance(loss, numbers.Real) and not isinstance(loss, bool):
    # Not in JAX, which would round it to float32.
    loss = np.asarray(loss if isinstance(loss, np.generic) else float(loss))
  if not isinstance(loss, (jax.Array, np.ndarray, np.generic)):
    raise TypeError(f"{rule}, got {loss!r} of type {type(loss).__name__}.")
  is_real = any(
    jnp.issubdtype(loss.dtype, kind) for kind in (jnp.integer, jnp.floating)
  )
  if loss.shape != () or not is_real:
    raise TypeError(f"{rule}, got {loss.dtype}{list(loss.shape)}.")
  is_double = loss.dtype == jnp.float64
  return loss if is_double else loss.astype(jnp.float32)


def _round_down(limit: fractions.Fraction, dtype: Any) -> Any:
  """Returns the largest number of a dtype that is not above a positive limit.

  A number is at most the limit exactly if it is at most this one.
  """
  largest = jnp.finfo(dtype).max
  if limit >= fractions.Fraction(float(largest)):
    return largest
  nearest = np.dtype(dtype).type(float(limit))
  if fractions.Fraction(float(nearest)) > limit:
    return np.nextafter(nearest, nearest.dtype.type(0))
  return nearest
