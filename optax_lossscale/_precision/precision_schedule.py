"""The precision schedule: first low precision, then full precision."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fractions
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._autocast import full_precision
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._precision import ascend_grammar
from optax_lossscale._step import backward
from optax_lossscale._step import devices
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states


class PrecisionScheduleState(NamedTuple):
  """State of a `PrecisionSchedule`.

  Attributes:
    low: bool[], whether the next step is in low precision. Once False, it stays
      False.
    steps: int32[], the number of finished steps last passed to `update` in mode
      "step"; 0 in mode "loss".
  """

  low: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
  """Low precision first and full precision at the end, with a one-way switch.

  Made by `precision_schedule`, which explains what it is for.

  Attributes:
    dtype: the low precision, float16 or bfloat16.
    mode: what the switch depends on, "step" or "loss".
    ratio: the share of `total_steps` or multiple of `target_loss` to switch at.
    total_steps: the number of steps of the whole training; None in mode "loss".
    target_loss: the loss that training ends at; None in mode "step".
    steps_per_call: the number of steps between two updates of the state.
    keeps_origin_dtype: whether `loss_fn` itself may compute in low precision.
  """

  dtype: Any
  mode: str
  ratio: fractions.Fraction
  total_steps: int | None
  target_loss: fractions.Fraction | None
  steps_per_call: int
  keeps_origin_dtype: bool

  def init(self) -> PrecisionScheduleState:
    """Returns the state before the first step.

    Training starts in low precision, unless it has too few steps for that.
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
    """Returns the state for the next step. Pure, so it also works in jit.

    Args:
      state: the previous state. A run that saved none resumes from
        `update(init(), step=n)`.
      step: integer[], for mode "step", the number of steps applied so far.
      loss: float[], for mode "loss", the unscaled loss of an applied step. 0
        means that the loss is unknown, as for a skipped step. A NaN never
        causes the switch.

    Raises:
      TypeError: if `state` is not a schedule's state, `step` is not an integer
        scalar, or `loss` is not a real scalar.
      ValueError: unless exactly the argument that the mode needs is given.
    """
    _check_state(state)
    fed = {"step": step, "loss": loss}
    names = [name for name, value in fed.items() if value is not None]
    if names != [self.mode]:
      got = " and ".join(f"{name}=" for name in names)
      raise ValueError(
        f"a schedule of mode {self.mode!r} must be updated with `{self.mode}`, "
        f"got {got or 'neither `step` nor `loss`'}."
      )
    if self.mode == "step":
      step = _check_step(step)
      return PrecisionScheduleState(
        low=state.low & ~_is_at_least(step, self._first_full_step),
        steps=_as_count(step),
      )
    assert self.target_loss is not None
    loss = arguments.as_real_scalar("loss", loss)
    limit = _round_down(self.target_loss * self.ratio, loss.dtype)
    # 0 means that the loss is unknown.
    return state._replace(low=state.low & ~((loss != 0) & (loss <= limit)))

  def is_scaled(self, state: PrecisionScheduleState) -> jax.Array:
    """Returns whether the next step's loss is scaled, which only float16 needs.

    Args:
      state: the schedule's state.

    Returns:
      bool[].
    """
    _check_state(state)
    return jnp.logical_and(state.low, self.dtype == jnp.float16)

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    opt_state: optax.OptState,
    state: PrecisionScheduleState,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    level: str = "O1",
    overrides: Mapping[str, DTypeLike] | None = None,
    operations: Mapping[str, Sequence[str]] | None = None,
    path: str | None = None,
  ) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that computes loss and gradients in either precision.

    In a train step of your own, call this instead of `scaled_value_and_grad`,
    and `update_optimizer` instead of `tx.update`, because gradients are scaled
    only while the precision is low:

      value_and_grad = schedule.value_and_grad(loss_fn, opt_state, state)
      loss, scaled_grads = value_and_grad(params, batch)
      updates, opt_state = schedule.update_optimizer(
        tx, scaled_grads, opt_state, params, state
      )

    The loss is `autocast(loss_fn, level, dtype=schedule.dtype)` in low
    precision and `loss_fn` itself in full precision. Both are compiled into one
    program that chooses by `state.low`, so the switch does not recompile.

    Args:
      loss_fn: a function of float32 parameters that returns a float32 loss, or
        `(loss, aux)`. If the parameters are float16 (`master_weights`), the
        function must cast them itself.
      opt_state: the optimizer's state. If the low precision is float16, it must
        contain the loss scale.
      state: the schedule's state before the step, here and in
        `update_optimizer`.
      argnums: the positional arguments to differentiate with respect to.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      level: as in `autocast`.
      overrides: as in `autocast`.
      operations: as in `autocast`.
      path: the loss scale to use if there are several. See `get_loss_scale`.

    Returns:
      A function that takes the arguments of `loss_fn` and returns `(loss,
      gradients)` or `((loss, aux), gradients)`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `autocast` rejects its arguments, or they lower nothing; if
        `opt_state` holds no loss scale, or several; when called, if `loss_fn`
        is already under `autocast`, or computes products in low precision
        because of the dtype of a layer or of the parameters.
    """
    _check_state(state)
    low_loss_fn = _make_low(
      loss_fn, self.dtype, level, overrides=overrides, operations=operations
    )
    in_full = full_precision.in_full_precision(
      jax.value_and_grad(loss_fn, argnums, has_aux=has_aux),
      keeps_products=self.keeps_origin_dtype,
    )
    may_be_scaled = self.dtype == jnp.float16
    if may_be_scaled:
      backward.check_arguments(opt_state, argnums, path)

    @functools.wraps(loss_fn)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
      in_low = jax.value_and_grad(low_loss_fn, argnums, has_aux=has_aux)
      if may_be_scaled:
        in_low = backward.at_scale(
          states.scale_in_use(opt_state, path), low_loss_fn, argnums, has_aux
        )
      _refuse_frozen(state.low)
      value_and_gradients: tuple[Any, Any] = lax.cond(
        state.low,
        lambda: in_low(*args, **kwargs),
        lambda: in_full(*args, **kwargs),
      )
      return value_and_gradients

    return value_and_grad_fun

  def update_optimizer(
    self,
    tx: optax.GradientTransformation,
    gradients: Any,
    opt_state: optax.OptState,
    params: Any,
    state: PrecisionScheduleState,
    **extra_args: Any,
  ) -> tuple[Any, Any]:
    """Returns `tx.update(gradients, opt_state, params)` in either precision.

    If the loss was not scaled, S is 1 for this step, and the rule's state does
    not change. Non-finite gradients still skip the step.

    Args:
      tx: the optimizer, with or without `loss_scaling` anywhere inside.
      gradients: the gradients from `value_and_grad` with the same `state`.
      opt_state: the optimizer's state.
      params: the parameters.
      state: the schedule's state before the step.
      **extra_args: the other arguments of `tx.update`.

    Returns:
      The updates and the optimizer's next state.

    Raises:
      TypeError: if `tx` is not an optimizer, `state` is not the schedule's
        state, or S is not a leaf of the rule's state.
      ValueError: if `optax.MultiSteps` wraps `loss_scaling`, or if devices that
        share an S could be in different precisions.
    """
    is_scaled = self.is_scaled(state)
    optimizer = requirements.as_optimizer("tx", tx)
    requirements.check_accumulation(opt_state)

    # Keyed by path, because an outer optimizer may add to its own state.
    rule_states: dict[Any, Any] = {}

    # Gradients that are not scaled need S = 1 in the state during the step.
    # `put_back` then restores the rule's own state.
    def swap(path: Any, node: Any) -> Any:
      if not states.is_state(node):
        return node
      _refuse_different(is_scaled, node)
      rule_state = rule_states[path] = node.loss_scale_state
      return node._replace(
        loss_scale_state=states.replace_scale(
          rule_state, jnp.where(is_scaled, rule_state.loss_scale, 1)
        )
      )

    def put_back(path: Any, node: Any) -> Any:
      if not states.is_state(node):
        return node
      if path not in rule_states:
        raise ValueError(
          "`tx` must keep the state of loss_scaling where it is, got it back "
          f"at {leaves.path_name(path)!r}; make loss_scaling outermost."
        )
      return node._replace(
        loss_scale_state=skipping.select(
          ~is_scaled, rule_states[path], node.loss_scale_state
        ),
        # If the loss was not scaled, a smaller S would not help.
        last_step=node.last_step._replace(
          stalled=jnp.where(is_scaled, node.stalled, node.overflow)
        ),
      )

    visit = functools.partial(jax.tree.map_with_path, is_leaf=states.is_state)
    updates, new_state = optimizer.update(
      gradients, visit(swap, opt_state), params, **extra_args
    )
    return updates, visit(put_back, new_state)

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
    """Returns a complete train step that works in both precisions.

    It combines `value_and_grad`, `update_optimizer` and `update`. The structure
    of parameters and optimizer state does not change at the switch.

    Args:
      loss_fn: as in `value_and_grad`; its first argument is the parameters.
      tx: the optimizer, for float16 with `loss_scaling` outermost: momentum
        around it would see scaled gradients before the switch and unscaled ones
        after. For no scaling, use `FixedLossScale(1.0)`.
      level: as in `autocast`.
      overrides: as in `autocast`.
      operations: as in `autocast`.
      has_aux: whether `loss_fn` returns `(loss, aux)`. A skipped step also
        returns its own aux: see `select_on_skip`.
      axis_name: the mapped axis, or axes, over which `tx` detects overflows and
        averages gradients under `shard_map`. Each device then computes its own
        gradients. The loss is averaged, but aux is not.

    Returns:
      A pure function from `(params, opt_state, state, *args, **kwargs)` to
      `(params, opt_state, state, loss)`, for jit, `lax.scan` or `shard_map`;
      with `has_aux`, the last result is `(loss, aux)`. It also updates the
      schedule's state, in which only applied steps count.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: as in `value_and_grad`; when called, if `optax.MultiSteps`
        wraps `loss_scaling`, or if an optimizer without `loss_scaling` is given
        FP8's `_overwrite_with_gradient` collection.

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
    options: dict[str, Any] = {
      "level": level,
      "overrides": overrides,
      "operations": operations,
    }
    _make_low(loss_fn, self.dtype, **options)  # Reports errors early.
    requirements.as_optimizer("tx", tx)
    names = devices.axis_names("axis_name", axis_name)

    def train_step(
      params: Any, opt_state: Any, state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
      value_and_gradients = self.value_and_grad(
        loss_fn, opt_state, state, has_aux=has_aux, **options
      )
      local = devices.make_varying(params, names) if names else params
      value, gradients = value_and_gradients(local, *args, **kwargs)
      loss = value[0] if has_aux else value
      if names:
        loss = lax.pmean(loss, names)

      is_wrapped = bool(states.find_states(opt_state))
      is_gradient = leaves.are_gradients(params)
      # A bare optimizer would treat those leaves' new values as gradients.
      if not (is_wrapped or all(jax.tree.leaves(is_gradient))):
        raise ValueError(
          "`tx` must hold loss_scaling where parameters are in Flax's "
          "_overwrite_with_gradient collection, which then goes around the "
          "optimizer; wrap it: loss_scaling(inner, FixedLossScale(1.0))."
        )
      updates, new_state = self.update_optimizer(
        tx, gradients, opt_state, params, state
      )
      applied = jnp.full((), True)
      if is_wrapped:
        # Read from the counter: an outer wrapper may have rejected the step.
        before, after = map(states.find_state, (opt_state, new_state))
        applied = after.applied_steps != before.applied_steps
      params = leaves.apply_updates(params, updates)

      if self.mode == "step":
        steps = optax.safe_increment(state.steps)
        state = self.update(state, step=jnp.where(applied, steps, state.steps))
      else:
        # 0 means that the loss is unknown.
        state = self.update(state, loss=jnp.where(applied, loss, 0))
      return params, new_state, state, (loss, value[1]) if has_aux else loss

    return train_step

  @property
  def _first_full_step(self) -> int:
    """The number of finished steps after which a "step" schedule switches."""
    assert self.total_steps is not None
    return max(
      0,
      min(
        math.floor(self.total_steps * self.ratio),
        # The last call is in full precision in any case.
        self.total_steps - self.steps_per_call,
      ),
    )


def precision_schedule(
  accelerate_train_mode: str,
  *,
  total_steps: int | None = None,
  target_loss: float | None = None,
  steps_per_call: int = 1,
  precision_mode: str | None = None,
  precision_mode_v2: str | None = None,
) -> PrecisionSchedule:
  """Returns a schedule from low to full precision. Experimental.

  The first part of training is in low precision, which is faster on hardware
  that supports it. The rest is in full precision, so that training ends at
  about the same loss as without the schedule. The run must also converge
  without the schedule. Use the schedule for runs of more than an hour: a short
  run may save less time than it takes to compile both precisions.

  The schedule is a pure state machine. `state.low` is True if the next step is
  in low precision. Once it is False, it stays False.

  Args:
    accelerate_train_mode: "type|mode|ratio" or "type|mode", in Ascend's
      grammar. The type is "fast" (float16) or "fast1" (bfloat16). In mode
      "step", full precision begins after `floor(total_steps * ratio)` steps,
      or at the latest with the last call; the ratio is 0.2 to 0.9 (default
      0.9). In mode "loss", it begins when the loss is `target_loss * ratio` or
      less; the ratio is 1.01 to 1.5 (default 1.05). Both products are exact.
    total_steps: for mode "step", the number of applied steps in the whole
      training. Loop until `state.steps` reaches it: a loop of `total_steps`
      calls counts skipped steps as well and may end before the switch.
    target_loss: for mode "loss", the positive loss that training without the
      schedule ends at. A low loss on a single batch causes the switch, so if
      batches differ much, pass `update` a mean over several steps.
    steps_per_call: the number of steps between two updates of the state. The
      switch may come up to `steps_per_call - 1` steps late. Leave it out for
      `make_train_step`, which updates the state after each step.
    precision_mode: the setting of that name in the Ascend script. With
      "must_keep_origin_dtype", `loss_fn` itself may compute products in low
      precision, even at the end of training, when the loss is not scaled. With
      "allow_fp32_to_fp16" or no mode, training ends in float32. Other values
      are errors, as on Ascend.
    precision_mode_v2: the newer setting; "origin" is "must_keep_origin_dtype".

  Returns:
    A `PrecisionSchedule`. Its `make_train_step` makes a complete train step;
    for a step of your own, it has `value_and_grad`, `update_optimizer`, and
    `init` and `update` for its state.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if the mode does not follow the grammar, its argument is missing
      or that of the other mode is given, or a precision mode contradicts it.

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
    Ascend, `accelerate_train_mode` of TF Adapter, also experimental there.
  """
  dtype, mode, ratio = ascend_grammar.parse(accelerate_train_mode)
  total, target = ascend_grammar.check_end(
    mode, total_steps=total_steps, target_loss=target_loss
  )
  keeps_origin_dtype = ascend_grammar.keeps_origin_dtype(
    precision_mode=precision_mode, precision_mode_v2=precision_mode_v2
  )
  return PrecisionSchedule(
    dtype=dtype,
    mode=mode,
    ratio=ratio,
    total_steps=total,
    target_loss=target,
    steps_per_call=arguments.check_count("steps_per_call", steps_per_call),
    keeps_origin_dtype=keeps_origin_dtype,
  )


def _check_state(state: Any) -> None:
  """Raises if `state` is not a schedule's state."""
  if not isinstance(state, PrecisionScheduleState):
    raise TypeError(
      "`state` must be the state that the schedule's init made, got "
      f"{arguments.kind_of(state)}."
    )


def _make_low(
  loss_fn: Callable[..., Any], dtype: Any, level: str, **options: Any
) -> Callable[..., Any]:
  """Returns `loss_fn` in low precision, or raises if nothing is lowered."""
  arguments.check_function(loss_fn)
  # Checked here too, because a jitted `loss_fn` is traced only once.
  as_written = full_precision.without_autocast(loss_fn)
  low_loss_fn = autocast(as_written, level, dtype=dtype, **options)
  if low_loss_fn is as_written:
    raise ValueError(
      "`level` must lower something in the first part of training, got 'O0'; "
      "take 'O1', or name in `overrides` the scopes to lower."
    )
  return low_loss_fn


def _refuse_frozen(low: Any) -> None:
  """Raises if a compiled function would treat the state as a constant."""
  # A function recorded outside of jit runs right away.
  is_compiled = interpreter.is_staged() and not interpreter.is_recording()
  if is_compiled and not isinstance(low, jax.core.Tracer):
    raise ValueError(
      "`state` must be an argument of the function that JAX is tracing (jit, "
      "scan ...), got one that was closed over: what is compiled would never "
      "switch. Pass it in, and return the new one."
    )


def _refuse_different(
  is_scaled: jax.Array, state: states.LossScalingState
) -> None:
  """Raises if devices that share an S could be in different precisions."""
  axes = devices.axes_beyond(is_scaled, states.get_loss_scale(state))
  if axes:
    names = devices.listed(axes)
    raise ValueError(
      "`state` must be the same on all devices that share a loss scale, got "
      f"one that varies along {names}; reduce what it depends on, such as a "
      f"loss: jax.lax.pmean(loss, {names})."
    )


def _check_step(step: Any) -> Any:
  """Returns `step` as an int or an integer array."""
  if not isinstance(step, jax.Array):
    return arguments.check_steps("step", step)
  if step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
    raise TypeError(
      "`step` must be an integer number of steps, got "
      f"{step.dtype}{list(step.shape)}."
    )
  return step


def _is_at_least(steps: Any, least: int) -> Any:
  """Returns bool[], whether at least `least` steps are finished."""
  if not isinstance(steps, jax.Array):
    return np.bool_(steps >= least)
  if least > jnp.iinfo(steps.dtype).max:
    return np.bool_(False)
  # Compare in the dtype of `steps`: JAX reads a Python number as an int32.
  return steps >= np.asarray(least, steps.dtype)


def _as_count(steps: Any) -> jax.Array:
  """Returns `steps` as int32[], limited to the largest int32."""
  largest = arguments.LARGEST_COUNT
  if not isinstance(steps, jax.Array):
    return jnp.full((), min(steps, largest), jnp.int32)
  if jnp.iinfo(steps.dtype).max > largest:
    steps = jnp.minimum(steps, jnp.asarray(largest, steps.dtype))
  return jnp.asarray(steps, jnp.int32)


def _round_down(limit: fractions.Fraction, dtype: Any) -> Any:
  """Returns the largest number of a dtype that is not above a positive limit.

  A number of that dtype is at most the limit iff it is at most this result.
  """
  largest = jnp.finfo(dtype).max
  if limit >= fractions.Fraction(float(largest)):
    return largest
  nearest = np.dtype(dtype).type(float(limit))
  if fractions.Fraction(float(nearest)) > limit:
    return np.nextafter(nearest, nearest.dtype.type(0))
  return nearest
