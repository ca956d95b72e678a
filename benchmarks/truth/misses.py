"""How often a remainder cannot hold the master that an optimizer asks for."""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from benchmarks.truth import settings
from benchmarks.truth import training
from benchmarks.truth import workload as workload_lib
import optax_lossscale as ols


class Missed(NamedTuple):
  """One step of the first seed.

  Attributes:
    step: from 1.
    share: of the masters that are not where the optimizer puts them.
    error: the largest distance from there, relative to the update.
  """

  step: int
  share: float
  error: float


class _Asked(NamedTuple):
  """What the optimizer asks for."""

  update: optax.Updates
  master: optax.Params
  inner_state: optax.OptState


def count(
  workload: workload_lib.Workload, *, steps: int | None = None
) -> list[Missed]:
  """Trains the first seed with remainders, and counts their misses.

  Args:
    workload: the model, its data and its loss.
    steps: if not as many as the workload says.
  """
  loss = training.lowered(workload, settings.SIXTEEN_BIT[settings.REMAINDER])
  inner = workload.optimizer
  key = jax.random.key(0)

  def init(masters: optax.Params) -> _Asked:
    return _Asked(masters, masters, inner.init(masters))

  def ask(
    grads: optax.Updates, state: Any, masters: optax.Params
  ) -> tuple[optax.Updates, _Asked]:
    updates, inner_state = inner.update(grads, state.inner_state, masters)
    asked = optax.apply_updates(masters, updates)
    return updates, _Asked(updates, asked, inner_state)

  tx = ols.master_weights(
    optax.GradientTransformation(init, ask), store="remainder"
  )

  def step(state: Any, number: jax.Array) -> Any:
    params, opt_state = state
    batch = workload.draw(jax.random.fold_in(key, number), params)
    grads = jax.grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    asked = opt_state.inner_state
    off, moved = (
      jnp.concatenate([jnp.abs(x).ravel() for x in jax.tree.leaves(tree)])
      for tree in (
        optax.tree.sub(opt_state.wide(params), asked.master),
        asked.update,
      )
    )
    found = jnp.mean(off > 0), jnp.max(off / jnp.where(off > 0, moved, 1))
    return (params, opt_state), found

  @jax.jit
  def train() -> Any:
    params = training.cast(workload.init(key), jnp.bfloat16)
    numbers = jnp.arange(steps or workload.steps)
    return lax.scan(step, (params, tx.init(params)), numbers)[1]

  with jax.default_matmul_precision("highest"):
    shares, errors = jax.device_get(train())
  return [
    Missed(i + 1, float(share), float(error))
    for i, (share, error) in enumerate(zip(shares, errors, strict=True))
  ]
