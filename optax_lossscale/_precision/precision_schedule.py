"""The precision schedule: first low precision, then full precision."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import fractions
import functools
from typing import Any
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._autocast import full_precision
from optax_lossscale._autocast import levels
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import averages
from optax_lossscale._step import backward
from optax_lossscale._step import devices
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states

# Returns a loss function in low precision.
_Cast = Callable[[Callable[..., Any]], Callable[..., Any]]


class PrecisionScheduleState(NamedTuple):
  """State of a `PrecisionSchedule`.

  Attributes:
    low: bool[], whether the next step is in low precision. Once False, it stays
      False.
    steps: int32[], the number of applied steps last passed to `update`; 0 if
      the schedule follows the loss.

  Examples:
    >>> import optax_lossscale as ols
    >>> state = ols.PrecisionSchedule("float16", until_step=9).init()
    >>> print(state.low, state.steps)
    True 0
  """

  low: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
  """Low precision first and full precision at the end. Experimental.

  Low precision is faster on hardware that supports it. Full precision at the
  end leads to about the same loss as without the schedule. `make_train_step`
  makes a complete train step; a step of your own uses `value_and_grad`,
  `optimizer` and `update`.

  Attributes:
    dtype: the low precision, float16 or bfloat16.
    until_step: full precision begins after this many applied steps. Loop until
      `state.steps` reaches the number of steps that you want.
    until_loss: full precision begins when the loss is this or less. The decimal
      number that is written is compared exactly, and so is a Fraction. If
      batches differ much, pass `update` a mean over several steps, since one
      low loss causes the switch.
    allow_low_products: whether `loss_fn` itself may compute products in low
      precision, even at the end of training, when the loss is not scaled.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `dtype` is another dtype, a number is out of range, or not
      exactly one of `until_step` and `until_loss` is given.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> schedule = ols.PrecisionSchedule(jnp.bfloat16, until_loss=3.0)
    >>> state = schedule.init()
    >>> for loss in (3.5, 3.0, 3.5):
    ...   state = schedule.update(state, loss=loss)
    ...   print(loss, state.low)
    3.5 True
    3.0 False
    3.5 False
  """

  dtype: DTypeLike
  _: dataclasses.KW_ONLY
  until_step: int | None = None
  until_loss: float | fractions.Fraction | None = None
  allow_low_products: bool = False

  def __post_init__(self) -> None:
    checks = {"until_step": arguments.check_steps, "until_loss": exact_loss}
    given = {x: checks[x] for x in checks if getattr(self, x) is not None}
    if len(given) != 1:
      raise ValueError(
        "`until_step` or `until_loss` must say when full precision begins, got "
        f"{'both' if given else 'neither'}; pass exactly one of them."
      )
    arguments.check_fields(
      self,
      dtype=lambda _, x: levels.make_recipe("O1", x, None, None).dtype,
      allow_low_products=arguments.check_flag,
      **given,
    )

  def init(self) -> PrecisionScheduleState:
    """Returns the state before the first step."""
    low = self.until_step is None or self.until_step > 0
    return PrecisionScheduleState(
      low=jnp.full((), low), steps=jnp.full((), 0, jnp.int32)
    )

  def update(
    self,
    state: PrecisionScheduleState,
    *,
    step: int | jax.Array | None = None,
    loss: ArrayLike | None = None,
  ) -> PrecisionScheduleState:
    """Returns the state for the next step. Pure, so it also works in jit.

    Args:
      state: the previous state. A run that saved none resumes from
        `update(init(), step=n)`.
      step: integer[], for `until_step`, the number of steps applied so far.
      loss: float[], for `until_loss`, the unscaled loss of an applied step. 0
        means that the loss is unknown, as for a skipped step. A NaN never
        causes the switch.

    Raises:
      TypeError: if `state` is not a schedule's state, `step` is not an integer
        scalar, or `loss` is not a real scalar.
      ValueError: unless exactly the argument that the schedule needs is given.
    """
    states.check_kind(state, PrecisionScheduleState, "low")
    needed = "step" if self.until_loss is None else "loss"
    fed = {"step": step, "loss": loss}.items()
    got = " and ".join(f"`{name}`" for name, x in fed if x is not None)
    if got != f"`{needed}`":
      raise ValueError(
        f"a schedule with `until_{needed}` must be updated with `{needed}`, "
        f"got {got or 'neither `step` nor `loss`'}."
      )
    if self.until_step is not None:
      is_over, steps = _compare(step, self.until_step)
      new = PrecisionScheduleState(low=state.low & ~is_over, steps=steps)
      return _counted(step, state, new)
    assert self.until_loss is not None
    known = arguments.as_real_scalar("loss", loss)
    limit = _round_down(fractions.Fraction(self.until_loss), known.dtype)
    # 0 means that the loss is unknown.
    return state._replace(low=state.low & ~((known != 0) & (known <= limit)))

  def is_scaled(self, state: PrecisionScheduleState) -> jax.Array:
    """Returns bool[], whether the next step's loss is scaled (only float16).

    Args:
      state: the schedule's state.
    """
    states.check_kind(state, PrecisionScheduleState, "low")
    return jnp.logical_and(state.low, self.dtype == jnp.float16)

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    opt_state: optax.OptState,
    state: PrecisionScheduleState,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    cast: _Cast | None = None,
    path: str | None = None,
  ) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that computes loss and gradients in either precision.

    In a train step of your own, call this instead of `scaled_value_and_grad`,
    and update `optimizer(tx, state)` instead of `tx`, because gradients are
    scaled only while the precision is low. Both precisions are in one program,
    so the switch does not recompile.

    Args:
      loss_fn: a function of float32 parameters that returns a float32 loss, or
        `(loss, aux)`. If the parameters are float16 (`master_weights`), the
        function must cast them itself.
      opt_state: the optimizer's state, which holds S if `dtype` is float16.
      state: the schedule's state before the step, here and in `optimizer`.
      argnums: as in `scaled_value_and_grad`, like `has_aux` and `path`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      cast: a function that returns `loss_fn` in the schedule's dtype, such as
        `functools.partial(ols.autocast, level="O2", dtype=jnp.float16)`; None
        for `autocast` at level "O1". Only float16 is scaled, so for bfloat16 it
        must not lower to float16.
      path: which scale, if there are several.

    Returns:
      A function that takes the arguments of `loss_fn` and returns `(loss,
      scaled_grads)` or `((loss, aux), scaled_grads)`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `cast` lowers nothing; if `opt_state` holds no loss scale,
        or several; when called, if `loss_fn` is under `autocast`, or a layer or
        the parameters make it compute products in low precision.
    """
    states.check_kind(state, PrecisionScheduleState, "low")
    low_loss_fn = self._make_low(loss_fn, cast)
    arguments.check_flag("has_aux", has_aux)
    backward.check_argnums(argnums, arguments.argnums_as_tuple(argnums))
    in_full = full_precision.in_full_precision(
      jax.value_and_grad(loss_fn, argnums, has_aux=has_aux),
      keeps_products=self.allow_low_products,
    )
    may_be_scaled = self.dtype == jnp.float16
    if may_be_scaled:
      backward.check_arguments(opt_state, argnums, path)

    @functools.wraps(loss_fn)
    def value_and_grad_fun(
      *args: object, **kwargs: object
    ) -> tuple[object, object]:
      in_low = jax.value_and_grad(low_loss_fn, argnums, has_aux=has_aux)
      if may_be_scaled:
        loss_scale = states.scale_in_use(opt_state, path)
        in_low = backward.ScaledValueAndGrad(
          low_loss_fn, loss_scale, argnums, has_aux
        ).at(loss_scale)
      _refuse_frozen(state.low)
      value_and_gradients: tuple[object, object] = lax.cond(
        state.low,
        lambda: in_low(*args, **kwargs),
        lambda: in_full(*args, **kwargs),
      )
      return value_and_gradients

    return value_and_grad_fun

  def optimizer(
    self, tx: optax.GradientTransformation, state: PrecisionScheduleState
  ) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` for the gradients of `value_and_grad`, in either precision.

    If the loss was not scaled, S is 1 for this step, and the rule's state does
    not change. Non-finite gradients still skip the step.

    Args:
      tx: the optimizer, with or without `loss_scaling` anywhere inside.
      state: the state that `value_and_grad` got, before the step.

    Returns:
      A transformation for this step, with the state of `tx`.

    Raises:
      TypeError: if `tx` is not an optimizer, or `state` is not a schedule's;
        from `update`, if S is not a leaf of the rule's state.
      ValueError: from `update`, if `optax.MultiSteps` wraps `loss_scaling`, or
        if devices that share an S could be in different precisions.
    """
    is_scaled = self.is_scaled(state)
    wrapped = requirements.as_optimizer("tx", tx)

    def update(
      updates: optax.Updates,
      state: optax.OptState,
      params: optax.Params | None = None,
      **extra_args: object,
    ) -> tuple[optax.Updates, optax.OptState]:
      requirements.check_accumulation(state)
      before = states.find_states(state)
      for node in before.values():
        _refuse_different(is_scaled, node)

      # Gradients that are not scaled need S = 1 in the state during the step.
      # `put_back` then restores the rule's own state.
      def swap(_: leaves.Path, node: states.LossScalingState) -> object:
        rule_state = node.loss_scale_state
        loss_scale = jnp.where(is_scaled, rule_state.loss_scale, 1)
        rule_state = states.replace_scale(rule_state, loss_scale)
        return node._replace(loss_scale_state=rule_state)

      def put_back(path: leaves.Path, node: states.LossScalingState) -> object:
        if path not in before:
          raise ValueError(
            "`tx` must keep the state of loss_scaling where it is, got it back "
            f"at {leaves.path_name(path)!r}; make loss_scaling outermost."
          )
        return node._replace(
          loss_scale_state=skipping.select(
            ~is_scaled, before[path].loss_scale_state, node.loss_scale_state
          ),
          # If the loss was not scaled, a smaller S would not help.
          last_step=node.last_step._replace(
            stalled=jnp.where(is_scaled, node.stalled, node.overflow)
          ),
        )

      updates, state = wrapped.update(
        updates, states.replace_states(swap, state), params, **extra_args
      )
      return updates, states.replace_states(put_back, state)

    return optax.GradientTransformationExtraArgs(wrapped.init, update)

  def make_train_step(
    self,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    cast: _Cast | None = None,
    has_aux: bool = False,
    axis_name: devices.AxisNames | None = None,
  ) -> Callable[
    ..., tuple[optax.Params, optax.OptState, PrecisionScheduleState, Any]
  ]:
    """Returns a complete train step that works in both precisions.

    Args:
      loss_fn: as in `value_and_grad`; its first argument is the parameters.
      tx: the optimizer, for float16 with `loss_scaling` outermost: momentum
        around it would see scaled gradients before the switch alone. For no
        scaling, use `FixedLossScale(1.0)`.
      cast: as in `value_and_grad`.
      has_aux: whether `loss_fn` returns `(loss, aux)`. A skipped step also
        returns its own aux: see `select_on_skip`.
      axis_name: the mapped axes over which `tx` averages gradients under
        `shard_map`. The loss is averaged too, but aux is not.

    Returns:
      A pure function from `(params, opt_state, state, *args, **kwargs)` to
      `(params, opt_state, state, loss)`, for jit, `lax.scan` or `shard_map`;
      with `has_aux`, to `(..., (loss, aux))`. Only applied steps count.

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
      >>> schedule = ols.PrecisionSchedule(jnp.float16, until_step=2)
      >>> tx = ols.loss_scaling(optax.sgd(0.25), ols.FixedLossScale(1024.0))
      >>> loss_fn = lambda params, x: jnp.sum((x @ params) ** 2)
      >>> train_step = jax.jit(schedule.make_train_step(loss_fn, tx))
      >>> params, x = jnp.ones((2, 1)), jnp.eye(2)
      >>> opt_state, state = tx.init(params), schedule.init()
      >>> carry = params, opt_state, state
      >>> for _ in range(3):
      ...   *carry, loss = train_step(*carry, x)
      ...   print(loss, carry[2].low)
      2.0 True
      0.5 False
      0.125 False
    """
    self._make_low(loss_fn, cast)  # Reports errors early.
    arguments.check_flag("has_aux", has_aux)
    requirements.as_optimizer("tx", tx)
    names = devices.axis_names("axis_name", axis_name)

    def train_step(
      params: optax.Params,
      opt_state: optax.OptState,
      state: PrecisionScheduleState,
      /,
      *args: object,
      **kwargs: object,
    ) -> tuple[optax.Params, optax.OptState, PrecisionScheduleState, object]:
      value_and_grad = self.value_and_grad(
        loss_fn, opt_state, state, has_aux=has_aux, cast=cast
      )
      local = averages.make_varying(params, names) if names else params
      value, scaled_grads = value_and_grad(local, *args, **kwargs)
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
      updates, new_state = self.optimizer(tx, state).update(
        scaled_grads, opt_state, params
      )
      applied = jnp.full((), True)
      if is_wrapped:
        # Read from the counter: an outer wrapper may have rejected the step.
        before, after = map(states.find_state, (opt_state, new_state))
        applied = after.applied_steps != before.applied_steps
      params = leaves.apply_updates(params, updates)

      if self.until_step is not None:
        steps = optax.safe_increment(state.steps)
        state = self.update(state, step=jnp.where(applied, steps, state.steps))
      else:
        # 0 means that the loss is unknown.
        state = self.update(state, loss=jnp.where(applied, loss, 0))
      return params, new_state, state, (loss, value[1]) if has_aux else loss

    return train_step

  def _make_low(
    self, loss_fn: Callable[..., Any], cast: _Cast | None
  ) -> Callable[..., Any]:
    """Returns `loss_fn` in low precision, or raises if nothing is lowered."""
    arguments.check_function(loss_fn, "loss_fn")
    if cast is None:
      cast = functools.partial(autocast, level="O1", dtype=self.dtype)
    arguments.check_function(cast, "cast")
    # Checked here too, because a jitted `loss_fn` is traced only once.
    as_written = full_precision.without_autocast(loss_fn)
    low_loss_fn: Callable[..., Any] = cast(as_written)
    if low_loss_fn is as_written:
      raise ValueError(
        "`cast` must lower something in the first part of training, got its "
        "argument back, as from autocast at 'O0'; take 'O1', or name in "
        "`overrides` the scopes to lower."
      )
    return low_loss_fn


def exact_loss(name: str, value: Any) -> fractions.Fraction:
  """Returns a positive loss exactly, as the decimal that was typed."""
  is_exact = isinstance(value, fractions.Fraction)
  if (value if is_exact else arguments.check_number(name, value)) <= 0:
    raise ValueError(
      f"`{name}` must be positive, got {arguments.shown(value)}."
    )
  # 7.1 is exactly 71/10, which no float is.
  return fractions.Fraction(value if is_exact else str(np.asarray(value)[()]))


def _refuse_frozen(low: object) -> None:
  """Raises if a compiled function would treat the state as a constant."""
  # A function recorded outside of jit runs right away.
  is_compiled = interpreter.is_staged() and not interpreter.is_recording()
  if is_compiled and not isinstance(low, jax.core.Tracer):
    raise ValueError(
      "`state` must be an argument of the function that JAX is tracing (jit, "
      "scan ...), got one that was closed over: the compiled function would "
      "never switch. Pass it in, and return the new one."
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


@promises.promise("schedule")
def _counted(
  step: object, old: PrecisionScheduleState, new: PrecisionScheduleState
) -> PrecisionScheduleState:
  """Returns the new state, which equals the old one for the same `step`."""
  del step, old
  return new


def _compare(
  step: object, least: int
) -> tuple[jax.Array | np.bool_, jax.Array]:
  """Returns whether `step` is at least `least`, and `step` as int32[]."""
  if not isinstance(step, jax.Array):
    count = arguments.check_steps("step", step)
    limited = min(count, arguments.LARGEST_COUNT)
    return np.bool_(count >= least), jnp.full((), limited, jnp.int32)
  if step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
    raise TypeError(
      "`step` must be an integer number of steps, got "
      f"{step.dtype}{list(step.shape)}."
    )
  # JAX reads a Python number as an int32, so numbers get the dtype of `step`.
  largest = int(jnp.iinfo(step.dtype).max)
  limit = step.dtype.type(min(largest, arguments.LARGEST_COUNT))
  is_over = (step >= step.dtype.type(min(least, largest))) & (least <= largest)
  return is_over, jnp.minimum(step, limit).astype(jnp.int32)


def _round_down(limit: fractions.Fraction, dtype: np.dtype) -> np.floating:
  """Returns the largest number of a dtype that is not above a limit."""
  # A number of that dtype is at most the limit iff it is at most this result.
  largest = fractions.Fraction(formats.largest(dtype))
  nearest = dtype.type(float(min(limit, largest)))
  is_above = fractions.Fraction(float(nearest)) > limit
  return np.nextafter(nearest, dtype.type(0)) if is_above else nearest
