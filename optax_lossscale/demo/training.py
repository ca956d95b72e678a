"""The train step, and a run of it from the first batch to the held-out score.

`make_train_step` is the example: a train step as in any optax program, with
`scaled_value_and_grad` in the place of `jax.value_and_grad` and the optimizer
wrapped in `loss_scaling`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale.demo import history
from optax_lossscale.demo import task as task_lib

# What the label of a run is made of, in this order.
PARTS = ("precision", "level", "loss scale", "check")

_CHECKS = {
  "nonfinite": lambda _: ols.nonfinite(),
  # The parameters are float32, so their gradients are in any precision.
  "saturated": ols.saturated,
}

LossFn = Callable[[optax.Params, task_lib.Batch], jax.Array]
StepResult = tuple[optax.Params, optax.OptState, dict[str, jax.Array]]
TrainStep = Callable[..., StepResult]


@dataclasses.dataclass(frozen=True)
class Run:
  """One way to train: a precision, a rule of loss scaling, a check, a level.

  Attributes:
    precision: the dtype that the model computes in, or that `level` lowers to.
    loss_scale: the rule as on the command line.
    rule: the rule; None is no loss scaling.
    check: "nonfinite" or "saturated"; None is the one that `loss_scaling` has
      by default, which the label does not name.
    level: of autocast, around a model that computes in float32; None is no
      autocast.
  """

  precision: str
  loss_scale: str
  rule: ols.LossScale | None
  check: str | None = None
  level: str | None = None

  @property
  def lowest_precision(self) -> str:
    """The lowest dtype in which something is computed; O0 lowers nothing."""
    return "float32" if self.level == "O0" else self.precision

  @property
  def parts(self) -> dict[str, str]:
    """What the label is made of, by what it is."""
    parts = (self.lowest_precision, self.level, self.loss_scale, self.check)
    return {
      name: part
      for name, part in zip(PARTS, parts, strict=True)
      if part is not None
    }

  @property
  def label(self) -> str:
    """What the run is called in the table, the plot and the files."""
    return ", ".join(self.parts.values())


def make_loss_fn(model: nn.Module) -> LossFn:
  """Returns the mean cross-entropy over all labels of a batch."""

  def loss_fn(params: optax.Params, batch: task_lib.Batch) -> jax.Array:
    inputs, labels = batch
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
      _logits(model, params, inputs), labels
    )
    return jnp.mean(losses)

  return loss_fn


def make_train_step(
  loss_fn: LossFn, tx: optax.GradientTransformation
) -> TrainStep:
  """Returns a train step with loss scaling.

  Args:
    loss_fn: the loss of parameters and a batch.
    tx: an optimizer wrapped in `loss_scaling`.
  """

  @jax.jit
  def train_step(
    params: optax.Params, opt_state: optax.OptState, batch: task_lib.Batch
  ) -> StepResult:
    loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    metrics = {"loss": loss, **ols.loss_scale_metrics(opt_state)}
    return params, opt_state, metrics

  return train_step


def make_plain_train_step(
  loss_fn: LossFn, tx: optax.GradientTransformation
) -> TrainStep:
  """Returns the same train step without loss scaling.

  Args:
    loss_fn: the loss of parameters and a batch.
    tx: the bare optimizer.
  """

  @jax.jit
  def train_step(
    params: optax.Params, opt_state: optax.OptState, batch: task_lib.Batch
  ) -> StepResult:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, {"loss": loss}

  return train_step


def train(
  run: Run,
  task: task_lib.Task,
  *,
  seed: int,
  steps: int,
  on_step: Callable[[history.Record], None],
  saturating: bool = False,
) -> float:
  """Trains a model and returns its score on the held-out batches.

  A seed gives the same first parameters and the same batches in every run.

  Args:
    run: the precision, the level and the rule.
    task: the model, the optimizer and the data.
    seed: of the parameters and the batches.
    steps: how many batches to train on.
    on_step: called with the record of each step, while the device computes the
      next one.
    saturating: whether what is float16 is computed, and scored, as hardware in
      saturation mode does it.
  """
  # What autocast lowers is written in float32.
  written_in = run.precision if run.level is None else "float32"
  model = task.model(jnp.dtype(written_in))
  loss_fn, score_fn = (
    _as_computed(run, fun, saturating=saturating)
    for fun in (make_loss_fn(model), _make_score_fn(model, task))
  )
  params = model.init(jax.random.key(seed), task.held_out[0][0][:1])
  loss_scale = None
  if run.rule is None:
    tx = task.optimizer
    opt_state = tx.init(params)
    train_step = make_plain_train_step(loss_fn, tx)
  else:
    check = _CHECKS[run.check or "nonfinite"](run.lowest_precision)
    tx = ols.loss_scaling(task.optimizer, run.rule, check=check)
    opt_state = tx.init(params)
    train_step = make_train_step(loss_fn, tx)
    loss_scale = float(ols.get_loss_scale(opt_state))

  batches = itertools.islice(task.batches(seed), steps)
  stepping = _steps(train_step, params, opt_state, batches)
  for step, outcome in enumerate(_one_behind(stepping), 1):
    params, metrics = outcome[0], jax.device_get(outcome[1])
    on_step(_record(run, seed, step, loss_scale, metrics))
    loss_scale = metrics.get("loss_scale")
  score = jax.jit(score_fn)
  return float(np.mean([score(params, batch) for batch in task.held_out]))


def _as_computed(run: Run, fun: LossFn, *, saturating: bool) -> LossFn:
  """Returns `fun` at the level of the run, and as its hardware computes it."""
  if run.level is not None:
    fun = ols.autocast(fun, run.level, dtype=jnp.dtype(run.precision))
  # Around autocast, so that what it made float16 saturates too. The other
  # dtypes do not saturate here, so their runs stay as they are.
  if saturating and run.lowest_precision == "float16":
    fun = ols.saturating(fun)
  return fun


def _steps(
  train_step: TrainStep,
  params: optax.Params,
  opt_state: optax.OptState,
  batches: Iterable[task_lib.Batch],
) -> Iterator[tuple[optax.Params, dict[str, Any]]]:
  """Yields the parameters after each step, and its metrics."""
  for batch in batches:
    params, opt_state, metrics = train_step(params, opt_state, batch)
    yield params, metrics


def _one_behind(items: Iterable[Any]) -> Iterator[Any]:
  """Yields each item after the next one has been made.

  The next step is then in the device's queue while the host waits for this one.
  """
  waiting: list[Any] = []
  for item in items:
    waiting.append(item)
    if len(waiting) > 1:
      yield waiting.pop(0)
  yield from waiting


def _record(
  run: Run,
  seed: int,
  step: int,
  loss_scale: float | None,
  metrics: dict[str, Any],
) -> history.Record:
  """Returns what is kept of a step that used `loss_scale`."""
  loss = float(metrics["loss"])
  if loss_scale is None:
    return history.Record(run.label, seed, step, loss)
  return history.Record(
    run.label,
    seed,
    step,
    loss,
    loss_scale=float(loss_scale),
    overflow=bool(metrics["overflow"]),
    skipped=bool(metrics["skipped"]),
    amax=float(metrics["amax"]),
  )


def _make_score_fn(model: nn.Module, task: task_lib.Task) -> LossFn:
  """Returns the mean score over a batch."""

  def score(params: optax.Params, batch: task_lib.Batch) -> jax.Array:
    inputs, labels = batch
    return jnp.mean(
      task.score(_logits(model, params, inputs), jnp.asarray(labels))
    )

  return score


def _logits(
  model: nn.Module, params: optax.Params, inputs: jax.Array | np.ndarray
) -> jax.Array:
  """Returns the model's output in float32, where the softmax is taken."""
  return jnp.asarray(model.apply(params, inputs), jnp.float32)
