"""The update phase and its check against the bandwidth of the memory.

An update does little arithmetic on each number, so at best it takes as long as
moving its bytes. The bare AdamW reads parameters, two moments and gradients,
and writes parameters and moments. With loss scaling the gradients are read
twice: all of them are looked at before the first parameter may move.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import flags
from benchmarks import kernels
from benchmarks import phase
from benchmarks import rounds as rounds_lib
import optax_lossscale as ols

# XLA then launches kernel by kernel.
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
_RATE = 3e-4
_ADAMW = optax.adamw(_RATE)
_SCALED = ols.loss_scaling(_ADAMW, ols.DynamicLossScale())


@dataclasses.dataclass
class Phase:
  """Something whose bytes are known, ready to be timed.

  Attributes:
    step: compiled, from the state and the operand to the next state.
    state: on the device, and donated; None if the operand is all it takes.
    operand: on the device.
    traffic: the bytes that a step must read and write.
  """

  step: Any
  state: Any
  operand: Any
  traffic: int

  def run(self, calls: int) -> None:
    """Steps `calls` times, and waits once, at the end.

    So the host's work overlaps with the device's, as in training.
    """
    for _ in range(calls):
      if self.state is None:
        result = self.step(self.operand)
      else:
        self.state = result = self.step(self.state, self.operand)
    jax.block_until_ready(result)


Makers = Mapping[str, Callable[[], Phase]]


def updates(params: Any) -> Makers:
  """Returns copies, checks and updates, by name, the most important first.

  Among them are updates whose leaves share their flag in other groups than the
  library's, and the bare optimizer whose leaves share the learning rate.

  Args:
    params: a float32 tree; only its shapes are used.
  """

  def update(dtype: str, tx: Any, step: Any = None, options: Any = None) -> Any:
    state = _ones(params), jax.jit(tx.init)(_ones(params))
    gradients = gradients_in(dtype)
    # Parameters and two moments, each read and written.
    reads = 1 if tx is _ADAMW else 2
    traffic = 6 * _bytes(state[0]) + reads * _bytes(gradients)
    step = step or phase.make(tx)
    return _phase(step, state, gradients, traffic, options)

  # A dozen updates with their own states fit a card; these are not donated.
  gradients_in = functools.cache(functools.partial(_ones, params))
  both = optax.chain(phase.CHECK, _ADAMW)
  partial = functools.partial
  makers: dict[str, Callable[[], Phase]] = {
    "copy of one array": partial(_one_array, params, writes=True),
    "sum of one array": partial(_one_array, params),
  }
  for dtype in ("float16", "float32"):
    makers |= {
      f"adamw, {dtype}": partial(update, dtype, _ADAMW),
      f"loss_scaling(adamw), {dtype}": partial(update, dtype, _SCALED),
      f"the check, {dtype}": partial(_check, params, dtype),
    }
    if dtype == "float16":
      step = flags.rate_from_array(_RATE)
      makers["adamw, one rate for all leaves"] = partial(
        update, dtype, _ADAMW, step
      )
      ways = (False, True) if flags.has_large(params) else (True,)
      for count, joins_large in itertools.product(flags.COUNTS, ways):
        step = flags.make(phase.CHECK, _ADAMW, count, joins_large=joins_large)
        leaves = "all leaves" if count == math.inf else f"{count} leaves"
        large = "together" if joins_large else "alone"
        makers[f"a flag for {leaves} of a shape, large ones {large}"] = partial(
          update, dtype, both, step
        )
  conditional = phase.make_conditional(phase.CHECK, _ADAMW)
  under_cond = partial(update, "float16", both, conditional)
  makers["adamw under lax.cond, float16"] = under_cond
  for name, make in list(makers.items()):
    if "adamw" in name and "float16" in name:
      makers[f"{name}, no command buffers"] = partial(
        make, options=NO_COMMAND_BUFFERS
      )
  return makers


def measure(
  makers: Makers, *, rounds: int, calls: int, until: float
) -> dict[str, Any]:
  """Times phases in turns.

  Args:
    makers: of the phases, by name, the most important first.
    rounds: how many turns each one has.
    calls: steps in each turn.
    until: of `time.monotonic`; after it nothing more is made.

  Returns:
    For JSON, by what was timed: `traffic` in bytes, `kernels`, `temporaries`
    and `peak`, `seconds` of a step, `bandwidth` in bytes per second, and
    `over_limit`, a step's time over that of moving as many bytes by the first
    phase in the same round; as quartiles, lower one, median, upper one. Or
    `left_out`, the reason.
  """
  phases: dict[str, Phase] = {}
  rows: dict[str, Any] = {}
  for name, make in makers.items():
    with rounds_lib.attempt(rows, name):
      rounds_lib.check_time(until)
      made = make()
      made.run(1)
      rows[name] = {"traffic": made.traffic, **kernels.figures(made.step)}
      phases[name] = made
  turns = {
    name: rounds_lib.Turn(functools.partial(made.run, calls))
    for name, made in phases.items()
  }
  times = rounds_lib.interleave(turns, rounds, until=until)
  first = next(iter(phases), "")
  for name, made in phases.items():
    # Bytes per second, in each round.
    limits = [phases[first].traffic * calls / each for each in times[first]]
    speeds = [made.traffic * calls / each for each in times[name]]
    rows[name] |= {
      "seconds": rounds_lib.quartiles([each / calls for each in times[name]]),
      "bandwidth": rounds_lib.quartiles(speeds),
      "over_limit": rounds_lib.quartiles(rounds_lib.ratios(limits, speeds)),
    }
  return rows


def _check(tree: Any, dtype: str) -> Phase:
  gradients = _ones(tree, dtype)
  return _phase(phase.check, None, gradients, _bytes(gradients))


def _one_array(tree: Any, writes: bool = False) -> Phase:
  """Returns the phase that reads as many numbers, and maybe writes them."""
  x = jnp.zeros(sum(leaf.size for leaf in jax.tree.leaves(tree)))
  if not writes:
    return _phase(jnp.sum, None, x, x.nbytes)
  # Zero is an argument, so that the compiler cannot know that nothing changes.
  return _phase(jnp.add, x, jnp.zeros(()), 2 * x.nbytes)


def _phase(
  step: Any, state: Any, operand: Any, traffic: int, options: Any = None
) -> Phase:
  arguments = (operand,) if state is None else (state, operand)
  jitted = jax.jit(step, donate_argnums=() if state is None else 0)
  compiled = jitted.lower(*arguments).compile(compiler_options=options)
  return Phase(compiled, state, operand, traffic)


def _ones(tree: Any, dtype: str = "float32") -> Any:
  """Returns a tree of the same shapes, in memory of its own."""
  return jax.jit(
    lambda: jax.tree.map(lambda x: jnp.ones(x.shape, dtype), tree)
  )()


def _bytes(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
