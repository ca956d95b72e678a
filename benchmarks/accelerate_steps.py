"""The train steps of `python -m benchmarks accelerate`, timed in turns."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import compilation
from benchmarks import jax_training
from benchmarks import rounds as rounds_lib
from benchmarks.truth import workload as workload_lib
import optax_lossscale as ols

FLOAT32 = "float32"
TYPES = ("fast", "fast1")
_LEVEL = "O1"
_BATCHES = 4  # Taken in turns.


@dataclasses.dataclass(frozen=True)
class Contender:
  """A train step, from a state and a batch to the next state and a loss.

  Attributes:
    program: what is compiled; two contenders may share it.
    step: the step.
    state: the first one.
  """

  program: str
  step: Callable[[Any, workload_lib.Batch], tuple[Any, jax.Array]]
  state: Any


def make_contenders(
  workload: workload_lib.Workload,
) -> dict[str, Contender]:
  """Returns float32; and of each type the low precision and both parts.

  Args:
    workload: the model, the optimizer and the data.
  """
  loss_fn = workload.loss
  params = workload.init(jax.random.key(0))
  bare = workload.optimizer
  contenders = {
    FLOAT32: Contender(
      FLOAT32,
      jax_training.make_step(loss_fn, bare, is_scaled=False),
      (params, bare.init(params)),
    )
  }
  for kind in TYPES:
    # So long that it stays in the part that it is put in.
    schedule = ols.presets.accelerate_train_mode(
      f"{kind}|step", total_steps=2**30
    )
    is_scaled = schedule.dtype == jnp.float16
    tx = ols.loss_scaling(bare, ols.DynamicLossScale()) if is_scaled else bare
    cast = functools.partial(ols.autocast, level=_LEVEL, dtype=schedule.dtype)
    alone = f"{schedule.dtype.name}, {_LEVEL}"
    opt_state = tx.init(params)
    contenders[alone] = Contender(
      alone,
      jax_training.make_step(cast(loss_fn), tx, is_scaled=is_scaled),
      (params, opt_state),
    )
    step = _two_precisions(schedule.make_train_step(loss_fn, tx, cast=cast))
    for part, low in zip(parts(kind), (True, False), strict=True):
      state = schedule.init()._replace(low=jnp.full((), low))
      contenders[part] = Contender(kind, step, (params, opt_state, state))
  return contenders


def measure(
  workload: workload_lib.Workload, *, rounds: int, steps: int, compilations: int
) -> dict[str, dict[str, Any]]:
  """Returns the figures of each contender, for JSON, by its name.

  Args:
    workload: what is trained.
    rounds: turns of each contender.
    steps: in each turn.
    compilations: of each program.

  Returns:
    `compilations` of its program, the `seconds` of a step in each round, their
    `ratio` to float32 in the same round, the `last_loss`; and `low`, whether a
    schedule was in its low part to the end, None without one.
  """
  contenders = make_contenders(workload)
  batches = [
    workload.draw(jax.random.key(i), contenders[FLOAT32].state[0])
    for i in range(_BATCHES)
  ]
  programs, costs = _compile(contenders, batches[0], compilations)
  trainings = {
    name: _Training(programs[contender.program], contender.state, batches)
    for name, contender in contenders.items()
  }
  turns = rounds_lib.interleave(
    {
      name: rounds_lib.Turn(functools.partial(x.turn, steps))
      for name, x in trainings.items()
    },
    rounds,
  )
  seconds = {x: [s / steps for s in turns[x]] for x in turns}
  return {
    name: {
      "compilations": [
        cost._asdict() for cost in costs[contenders[name].program]
      ],
      "seconds": seconds[name],
      "ratio": rounds_lib.quartiles(
        rounds_lib.ratios(seconds[name], seconds[FLOAT32])
      )._asdict(),
      "last_loss": float(x.loss),
      "low": bool(x.state[2].low) if len(x.state) > 2 else None,
    }
    for name, x in trainings.items()
  }


def parts(kind: str) -> tuple[str, str]:
  """Returns the names of the two parts of a schedule.

  Args:
    kind: its type, "fast" or "fast1".
  """
  return f"{kind}, low part", f"{kind}, full part"


class _Training:
  """A contender in training.

  Attributes:
    state: the current one.
    loss: of the last step.
  """

  def __init__(
    self,
    step: Callable[[Any, Any], tuple[Any, jax.Array]],
    state: Any,
    batches: Sequence[Any],
  ) -> None:
    self._step = step
    # The step is given its state's memory, which the others start from too.
    self.state = jax.tree.map(jnp.copy, state)
    self.loss = jnp.zeros(())
    self._batches: Iterator[Any] = itertools.cycle(batches)

  def turn(self, steps: int) -> None:
    """Makes some steps, and waits for them."""
    for _ in range(steps):
      self.state, self.loss = self._step(self.state, next(self._batches))
    jax.block_until_ready((self.state, self.loss))


def _two_precisions(train_step: Callable[..., Any]) -> Callable[..., Any]:
  """Returns it as a step from one state to the next."""

  def step(state: Any, batch: workload_lib.Batch) -> tuple[Any, jax.Array]:
    *state, loss = train_step(*state, batch)
    return tuple(state), loss

  return step


def _compile(
  contenders: Mapping[str, Contender], batch: Any, compilations: int
) -> tuple[dict[str, Any], dict[str, list[compilation.Compilation]]]:
  """Returns the programs, and what each of their compilations cost."""
  sources = {x.program: x for x in contenders.values()}
  programs: dict[str, Any] = {}
  costs: dict[str, list[compilation.Compilation]] = {x: [] for x in sources}
  generator = random.Random(0)
  with compilation.without_persistent_cache():
    # The first compilation of a process starts XLA as well.
    first = contenders[FLOAT32]
    compilation.compile_ahead(first.step, first.state, batch)
    for _ in range(compilations):
      for name in generator.sample(list(sources), len(sources)):
        print(f"... compiling {name}", flush=True)
        programs[name], cost = compilation.compile_ahead(
          sources[name].step, sources[name].state, batch
        )
        costs[name].append(cost)
  return programs, costs
