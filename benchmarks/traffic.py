"""The update phase against the bandwidth of the device's memory.

An update does little arithmetic on each number, so at best it takes as long as
moving its bytes. The bare AdamW reads parameters, two moments and gradients,
and writes parameters and moments. With loss scaling the gradients are read
twice: all of them are looked at before the first parameter may move.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import rounds as rounds_lib
import optax_lossscale as ols

GRADIENT_DTYPES = ("float32", "float16")
_COPY = "copy of one array"


@dataclasses.dataclass
class Phase:
  """Something whose bytes are known, ready to be timed.

  Attributes:
    step: from the state to the next one; compiled, and the state is donated.
    state: on the device.
    traffic: the bytes that a step must read and write.
    temporaries: the bytes that the compiled step takes beside its arguments and
      results; None if the backend does not say.
  """

  step: Callable[[Any], Any]
  state: Any
  traffic: int
  temporaries: int | None

  def run(self, calls: int) -> None:
    """Steps `calls` times, and waits once, at the end.

    So the host's work overlaps with the device's, as in training.
    """
    for _ in range(calls):
      self.state = self.step(self.state)
    jax.block_until_ready(self.state)


def measure(
  params: Any, *, rounds: int, calls: int, copy_bytes: int, seed: int
) -> dict[str, Any]:
  """Times copies and updates in turns.

  Args:
    params: a float32 tree; only its shapes are used.
    rounds: how many turns each one has.
    calls: steps in each turn.
    copy_bytes: size of the array to copy, which should be much larger than
      every cache.
    seed: of the gradients and of the order in each round.

  Returns:
    For JSON, by what was timed: `traffic` in bytes, `seconds` of a step,
    `bandwidth` in bytes per second, and `time_over_limit`, a step's time over
    that of moving as many bytes by the copy of one array in the same round; as
    quartiles, lower one, median, upper one.
  """
  phases = {_COPY: _copy(jnp.zeros(max(1, copy_bytes // 4)))}
  phases["copy of AdamW's state"] = _copy(
    {name: _ones(params) for name in ("params", "mu", "nu")}
  )
  for dtype in GRADIENT_DTYPES:
    gradients = _gradients(params, dtype, seed)
    for name, tx, reads in _optimizers():
      phases[f"{name}, {dtype} gradients"] = _update(tx, gradients, reads)
  turns = {
    name: rounds_lib.Turn(lambda phase=phase: phase.run(calls))
    for name, phase in phases.items()
  }
  seconds = {
    name: [duration / calls for duration in durations]
    for name, durations in rounds_lib.interleave(
      turns, rounds, seed=seed
    ).items()
  }
  return {
    name: _figures(phase, seconds[name], phases[_COPY], seconds[_COPY])
    for name, phase in phases.items()
  }


def _figures(
  phase: Phase,
  seconds: Sequence[float],
  copy: Phase,
  copy_seconds: Sequence[float],
) -> Mapping[str, Any]:
  limits = [phase.traffic * each / copy.traffic for each in copy_seconds]
  return {
    "traffic": phase.traffic,
    "temporaries": phase.temporaries,
    "seconds": rounds_lib.quartiles(seconds),
    "bandwidth": rounds_lib.quartiles(
      [phase.traffic / each for each in seconds]
    ),
    "time_over_limit": rounds_lib.quartiles(rounds_lib.ratios(seconds, limits)),
  }


def _optimizers() -> list[tuple[str, optax.GradientTransformation, int]]:
  """Returns name, optimizer, and how often it must read the gradients."""
  adamw = optax.adamw(3e-4)
  return [
    ("adamw", adamw, 1),
    (
      "loss_scaling(adamw)",
      ols.loss_scaling(adamw, ols.DynamicLossScale()),
      2,
    ),
  ]


def _copy(tree: Any) -> Phase:
  """Returns the phase that reads and writes every number of `tree` once."""

  def step(tree: Any, zero: jax.Array) -> Any:
    # An argument, so that the compiler cannot know that nothing changes.
    return jax.tree.map(lambda x: x + zero, tree)

  return _phase(step, tree, jnp.zeros(()), 2 * _bytes(tree))


def _update(
  tx: optax.GradientTransformation, gradients: Any, reads: int
) -> Phase:
  """Returns the phase that updates parameters and moments."""
  params = _ones(gradients)

  def step(state: Any, gradients: Any) -> Any:
    params, opt_state = state
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  state = params, jax.jit(tx.init)(params)
  # Parameters and two moments, each read and written.
  traffic = 2 * 3 * _bytes(params) + reads * _bytes(gradients)
  return _phase(step, state, gradients, traffic)


def _phase(
  step: Callable[[Any, Any], Any], state: Any, operand: Any, traffic: int
) -> Phase:
  compiled = jax.jit(step, donate_argnums=0).lower(state, operand).compile()
  memory = compiled.memory_analysis()
  return Phase(
    step=lambda state: compiled(state, operand),
    state=state,
    traffic=traffic,
    temporaries=None if memory is None else memory.temp_size_in_bytes,
  )


def _gradients(params: Any, dtype: str, seed: int) -> Any:
  """Returns numbers of the size that scaled gradients have."""
  leaves, structure = jax.tree.flatten(params)

  @jax.jit
  def make(key: jax.Array) -> Any:
    numbers = jax.random.normal(key, (sum(leaf.size for leaf in leaves),))
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    return structure.unflatten(
      numbers[end - leaf.size : end].reshape(leaf.shape).astype(dtype)
      for leaf, end in zip(leaves, ends, strict=True)
    )

  return make(jax.random.key(seed))


def _ones(tree: Any) -> Any:
  """Returns a float32 tree of the same shapes, in memory of its own."""
  return jax.jit(
    lambda: jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), tree)
  )()


def _bytes(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
