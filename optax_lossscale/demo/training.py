"""The train step, and a run of it from the first batch to the held-out score.

`make_train_step` is the example: a train step as in any optax program, with
`scaled_value_and_grad` in the place of `jax.value_and_grad` and the optimizer
wrapped in `loss_scaling`.
"""

from collections.abc import Callable
import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale._precision import precision_schedule
from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import task as task_lib

LossFn = Callable[[optax.Params, task_lib.Batch], jax.Array]
StepResult = tuple[optax.Params, optax.OptState, dict[str, jax.Array]]
TrainStep = Callable[..., StepResult]


def make_loss_fn(
  model: nn.Module, loss: task_lib.Measure = task_lib.cross_entropy
) -> LossFn:
  """Returns the mean of a loss of logits and labels over a batch."""

  def loss_fn(params: optax.Params, batch: task_lib.Batch) -> jax.Array:
    inputs, labels = batch
    # In float32, where the softmax is taken.
    logits = jnp.asarray(model.apply(params, inputs), jnp.float32)
    return jnp.mean(loss(logits, jnp.asarray(labels)))

  return loss_fn


def make_train_step(
  loss_fn: LossFn, tx: optax.GradientTransformation
) -> TrainStep:
  """Returns a train step with loss scaling, or with it switched off."""

  @jax.jit
  def train_step(
    params: optax.Params, opt_state: optax.OptState, batch: task_lib.Batch
  ) -> StepResult:
    value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
    loss, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    metrics = {"loss": loss, **ols.loss_scale_metrics(opt_state)}
    return params, opt_state, metrics

  return train_step


def make_accelerated_train_step(
  schedule: precision_schedule.PrecisionSchedule,
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  *,
  level: str,
) -> TrainStep:
  """Returns a train step in low precision that becomes float32 on the way.

  Its state is that of the optimizer and that of the schedule.
  """
  two_precisions = schedule.make_train_step(loss_fn, tx, level=level)

  @jax.jit
  def train_step(
    params: optax.Params, state: tuple[Any, Any], batch: task_lib.Batch
  ) -> tuple[optax.Params, tuple[Any, Any], dict[str, jax.Array]]:
    opt_state, schedule_state = state
    low = schedule_state.low
    params, opt_state, schedule_state, loss = two_precisions(
      params, opt_state, schedule_state, batch
    )
    metrics = {"loss": loss, "low": low, **ols.loss_scale_metrics(opt_state)}
    return params, (opt_state, schedule_state), metrics

  return train_step


def train(
  run: run_lib.Run,
  task: task_lib.Task,
  *,
  seed: int,
  steps: int,
  on_step: Callable[[run_lib.Step], None],
  saturating: bool = False,
) -> tuple[float, float]:
  """Trains a model; returns its held-out scores before and after.

  A seed gives the same first parameters and the same batches in every run. The
  scores are computed in the precisions of the first and of the last step.
  """
  # Autocast expects a model in float32.
  written_in = run.precision if run.level is None else "float32"
  model = task.model(jnp.dtype(written_in))
  lower = functools.partial(_as_computed, run, saturating=saturating)
  params = model.init(jax.random.key(seed), task.held_out[0][0][:1])
  check = ols.nonfinite()
  if run.check == "saturated":
    # The parameters are float32, so their gradients are in any precision.
    check = ols.saturated(run.lowest_precision)
  tx = ols.loss_scaling(task.optimizer, run.rule, check=check)
  state: Any = tx.init(params)
  loss_scale = ols.get_loss_scale(state)
  loss_fn = make_loss_fn(model, task.loss)
  schedule = run.make_schedule(steps)
  if schedule is None:
    train_step = make_train_step(lower(loss_fn), tx)
  else:
    state = state, schedule.init()
    train_step = make_accelerated_train_step(
      schedule, loss_fn, tx, level=run.level or "O1"
    )

  score = make_loss_fn(model, task.score)
  low_score = jax.jit(lower(score))
  start = _on_held_out(low_score, params, task)
  batches = itertools.islice(task.batches(seed), steps)
  for step, batch in enumerate(batches, 1):
    params, state, made = train_step(params, state, batch)
    metrics = jax.device_get(made)
    on_step(_recorded(run, step, loss_scale, metrics))
    loss_scale = metrics["loss_scale"]
  last_score = low_score if _is_low(metrics) else jax.jit(score)
  return start, _on_held_out(last_score, params, task)


def _on_held_out(
  score: LossFn, params: optax.Params, task: task_lib.Task
) -> float:
  return float(np.mean([score(params, batch) for batch in task.held_out]))


def _as_computed(run: run_lib.Run, fun: LossFn, *, saturating: bool) -> LossFn:
  """Returns `fun` at the level of the run, on the hardware of the run."""
  if run.level is not None:
    fun = ols.autocast(fun, run.level, dtype=jnp.dtype(run.precision))
  # Around autocast, so that what it made float16 saturates too. The other
  # dtypes do not saturate, so this leaves their runs unchanged.
  if saturating and run.lowest_precision == "float16":
    fun = ols.saturating(fun)
  return fun


def _recorded(
  run: run_lib.Run,
  step: int,
  loss_scale: Any,
  metrics: dict[str, Any],
) -> run_lib.Step:
  """Returns what is kept of a step before which S was `loss_scale`."""
  is_low = _is_low(metrics)
  recorded = run_lib.Step(
    step,
    precision=run.lowest_precision if is_low else "float32",
    loss=float(metrics["loss"]),
  )
  if run.rule is None:
    return recorded
  return recorded._replace(
    # Steps in float32 are not scaled.
    loss_scale=float(loss_scale) if is_low else None,
    overflow=bool(metrics["overflow"]),
    skipped=bool(metrics["skipped"]),
    amax=float(metrics["amax"]),
  )


def _is_low(metrics: dict[str, Any]) -> bool:
  """Returns whether a step was in the precision that its run is named after."""
  return bool(metrics.get("low", True))
