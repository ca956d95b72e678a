"""Trains a workload in a setting, over all seeds."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from benchmarks.truth import settings
from benchmarks.truth import workload as workload_lib
import optax_lossscale as ols

# How often a run is scored, after its first score.
SCORES = 20


class Point(NamedTuple):
  """One seed at one step.

  Attributes:
    seed: of the parameters and batches.
    step: how many batches it has seen.
    score: in float32, on held-out data.
    skipped: how many of the steps were skipped.
    loss_scale: the S of the next step; 1 without loss scaling.
  """

  seed: int
  step: int
  score: float
  skipped: int
  loss_scale: float


class Trained(NamedTuple):
  """The result of a run.

  Attributes:
    points: of all seeds, from before the first step until after the last one.
    first: the parameters of the first seed before the first step.
    last: the same after the last step.
    digest: of the bits of all seeds' last parameters.
    found: by `tune_precision`, if it chose the precision.
  """

  points: list[Point]
  first: Any
  last: Any
  digest: str
  found: ols.instruments.TuningReport | None


def train(
  workload: workload_lib.Workload,
  setting: settings.Setting,
  *,
  steps: int | None = None,
  seeds: Sequence[int] | None = None,
) -> Trained:
  """Trains with all seeds.

  Args:
    workload: the model, its data, its loss and its score.
    setting: the precision and the loss scaling.
    steps: of each seed, if not as many as the workload says.
    seeds: if not the setting's.
  """
  seeds, found = seeds or setting.seeds, None
  if setting.tuned is not None:
    found = tune(workload, setting.tuned, steps)
    products = {"overrides": found.overrides}
    setting = dataclasses.replace(setting, dtype=found.dtype, products=products)
  # Otherwise float32 products are TF32 on some GPUs, and bfloat16 on TPUs.
  with jax.default_matmul_precision("highest"):
    init, advance, score = _program(workload, setting)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))
    state = init(keys)
    first = _of_first_seed(state[0])
    points: list[Point] = []
    ends = np.linspace(0, steps or workload.steps, SCORES + 1, dtype=int)
    begin = 0
    for end in np.unique(ends).tolist():
      if end:
        state = advance(keys, state, jnp.arange(begin, end))
      measured = (x.tolist() for x in jax.device_get(score(state)))
      points += [
        Point(seed, end, *values)
        for seed, *values in zip(seeds, *measured, strict=True)
      ]
      begin = end
  last = jax.device_get(state[0])
  bits = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(last))
  digest = hashlib.sha256(bits).hexdigest()
  return Trained(points, first, _of_first_seed(last), digest, found)


def tune(
  workload: workload_lib.Workload,
  arguments: Mapping[str, Any],
  steps: int | None,
) -> ols.instruments.TuningReport:
  """Returns what `tune_precision` finds after a training of another seed."""
  in_float32 = settings.SETTINGS[settings.REFERENCE]
  seeds = [2 * settings.SEEDS]  # Neither of a row nor of a null row.
  params = train(workload, in_float32, steps=steps, seeds=seeds).last
  first, second = (
    jax.jit(workload.draw)(jax.random.key(2**31 - x), params) for x in (1, 2)
  )
  return ols.instruments.tune_precision(
    workload.loss, params, first, confirm_args=(second,), **arguments
  )


def _program(
  workload: workload_lib.Workload, setting: settings.Setting
) -> tuple[Callable[..., Any], ...]:
  """Returns what starts, continues and scores the training of all seeds."""
  loss = lowered(workload, setting)
  check = ols.nonfinite()
  if setting.saturating:
    # The parameters are float32, so their gradients are in any precision.
    check = ols.saturated(setting.dtype)
  tx = ols.loss_scaling(
    setting.wrap(workload.optimizer), setting.rule, check=check
  )

  def init(key: jax.Array) -> Any:
    params = cast(workload.init(key), setting.parameters)
    return params, tx.init(params)

  def advance(key: jax.Array, state: Any, steps: jax.Array) -> Any:
    def step(state: Any, number: jax.Array) -> Any:
      params, opt_state = state
      batch = workload.draw(jax.random.fold_in(key, number), params)
      value_and_grad = ols.scaled_value_and_grad(loss, opt_state)
      _, scaled_grads = value_and_grad(params, batch)
      updates, opt_state = tx.update(scaled_grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), None

    return lax.scan(step, state, steps)[0]

  def score(state: Any) -> Any:
    params, opt_state = state
    metrics = ols.loss_scale_metrics(opt_state)
    found = workload.score(cast(params, jnp.float32))
    return found, metrics["skipped_steps"], metrics["loss_scale"]

  def over_seeds(fun: Callable[..., Any]) -> Callable[..., Any]:
    # One after another is faster on a CPU, and takes less memory.
    if jax.default_backend() != "cpu":
      return jax.vmap(fun)
    return lambda *args: lax.map(lambda x: fun(*x), args)

  return (
    jax.jit(over_seeds(init)),
    jax.jit(
      lambda keys, state, steps: over_seeds(
        lambda key, state: advance(key, state, steps)
      )(keys, state),
      donate_argnums=1,
    ),
    jax.jit(over_seeds(score)),
  )


def lowered(
  workload: workload_lib.Workload, setting: settings.Setting
) -> Callable[[workload_lib.Params, workload_lib.Batch], jax.Array]:
  """Returns the loss as a setting computes it."""
  loss = workload.loss
  if setting.dtype != jnp.float32:
    loss = ols.autocast(
      loss, settings.LEVEL, dtype=setting.dtype, **setting.products
    )
  if setting.saturating:
    loss = ols.hardware.emulate_saturation(loss)
  if setting.parameters == jnp.float32:
    return loss
  # The rest is as with float32 parameters; their gradients have 16 bits.
  return lambda params, batch: loss(cast(params, jnp.float32), batch)


def cast(params: workload_lib.Params, dtype: DTypeLike) -> workload_lib.Params:
  """Returns the parameters in a dtype."""
  return jax.tree.map(lambda x: x.astype(dtype), params)


def _of_first_seed(params: Any) -> Any:
  return jax.tree.map(lambda x: np.array(x[0]), params)
