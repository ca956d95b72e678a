"""Shared by the rooms: a bound step, gradients by name, source lines."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import inspect
import pathlib
import re
import sys
import sysconfig
from typing import NamedTuple
from typing import TypeGuard

from chex import ArrayTree
import jax
from jax import lax
from jax.extend import core
from jax.extend import source_info_util
from jax.extend.core import primitives
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Path

# How many elements a CPU processes at a time. Intermediate values of so few fit
# in its cache, so no array as large as the gradients is needed.
_BLOCK = 1024

# A stack frame as JAX writes it: the line of code, column and function.
_FRAME = re.compile(r"(?P<line>.+?:\d+)(?::\d+)? \((?P<function>.*)\)")
_HERE = pathlib.Path(__file__).parents[1]
_INTERPRETERS = (str(_HERE / "_autocast"), str(_HERE / "_jaxpr"))

_LIBRARIES = (
  str(_HERE),
  sysconfig.get_path("purelib"),
  sysconfig.get_path("platlib"),
)

# A step as a function of its arguments by name.
Step = Callable[[Mapping[str, object]], object]


class RecordState(NamedTuple):
  """State of `record`: the optimizer's state and a ring buffer of steps.

  Attributes:
    recorded_state: the state of the recorded optimizer.
    recorded_steps: int32[], the number of steps so far that the rule saw.
    recorded_scale: float32[capacity], the S that the step used; 1 if its
      loss was not scaled.
    recorded_amax: float32[capacity], the amax of the step's scaled gradients.
    recorded_overflow: bool[capacity], True if the gradients were unusable.
  """

  recorded_state: optax.OptState
  recorded_steps: jax.Array
  recorded_scale: jax.Array
  recorded_amax: jax.Array
  recorded_overflow: jax.Array


def bind(
  step: object, args: Sequence[object], caller: str, name: str = "step"
) -> tuple[Step, dict[str, object], dict[str, Path]]:
  """Returns a step as a function of a dict of arguments, and that dict.

  The last result is which output is which object of Flax NNX, since a step
  changes those in place.
  """
  if not callable(step):
    raise TypeError(
      f"`{name}` must be the train step itself, got a "
      f"{arguments.kind_of(step)}; its arguments come after it: "
      f"{caller}(train_step, params, opt_state, batch)."
    )
  arguments.check_by_position(step, name)
  parameters = inspect.signature(step).parameters.values()
  names = [x.name for x in parameters if x.kind < x.VAR_POSITIONAL]
  # Arguments that the step takes as *args are named by their position.
  names = [*names, *map(str, range(len(names), len(args)))][: len(args)]

  def call(named: Mapping[str, object]) -> object:
    return step(*(named[name] for name in names))

  named = dict(zip(names, args, strict=True))
  # Objects of Flax NNX exist only in a program that has imported it.
  if "flax.nnx" not in sys.modules:
    return call, named, {}
  from optax_lossscale.instruments import _nnx_step

  return _nnx_step.returning(call, named)


def is_key(x: object) -> TypeGuard[jax.Array]:
  """Returns whether a value is a random key with a dtype of its own."""
  return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def by_path(tree: object, *left_out: type) -> dict[Path, jax.Array]:
  """Returns the gradients of a tree by path, except inside `left_out` classes.

  Flax's `_overwrite_with_gradient`, which bypasses the wrapper, is left out.
  """
  found = jax.tree.leaves_with_path(
    leaves.as_arrays(tree), is_leaf=lambda x: isinstance(x, left_out)
  )
  return {
    path: leaf
    for path, leaf in found
    if leaves.is_gradient(leaf) and not leaves.overwrites(path)
  }


def named(tree: object) -> dict[str, jax.Array]:
  """Returns the gradients of a tree by name, such as "Dense_0/kernel"."""
  found = by_path(tree)
  return {name: found[x] for x, name in leaves.path_names(found).items()}


def count(
  tally: Callable[..., jax.Array],
  arrays: Sequence[jax.Array],
  *,
  on_cpu: Callable[..., jax.Array] | None = None,
) -> jax.Array:
  """Counts the elements of arrays with `tally`, reading each element once.

  A CPU counts with `on_cpu` instead, if that is set.
  """
  on_cpu = on_cpu or tally
  # An accelerator reads and counts in one kernel, a block of a sharded array
  # could span devices, and the size may be a symbol in an exported program.
  if all(
    jax.typeof(x).sharding.mesh.empty and isinstance(x.size, int)
    for x in arrays
  ):
    on_cpu = functools.partial(_in_blocks, on_cpu)
  counts: jax.Array = lax.platform_dependent(*arrays, cpu=on_cpu, default=tally)
  return counts


def _in_blocks(
  tally: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
  """Returns the sum of the counts of the blocks of arrays."""
  flat = [x.reshape(-1) for x in arrays]
  blocks = flat[0].size // _BLOCK

  def add(i: jax.Array, counts: jax.Array) -> jax.Array:
    block = [lax.dynamic_slice(x, (i * _BLOCK,), (_BLOCK,)) for x in flat]
    return counts + tally(*block)

  rest = tally(*(x[blocks * _BLOCK :] for x in flat))
  return lax.fori_loop(0, blocks, add, rest) if blocks else rest


def user_line(equations: Sequence[core.JaxprEqn]) -> str | None:
  """Returns the user's line of code, or the nearest one, as "file:line"."""
  # The operation comes last, after the calls around it, outermost first.
  *around, equation = equations
  frames = _frames(equation)
  for call in reversed(around):
    if call.primitive is not primitives.jit_p:
      continue
    # JAX traces a jitted function once. A library's function that runs no code
    # of the user's has the frames of its first caller.
    name = call.params["name"]
    is_foreign = all(x.split(".")[-1] != name for _, x in frames)
    if is_foreign and any(is_own_line(x) for x, _ in _frames(call)):
      frames = _frames(call)
  if not frames or frames[0][0].startswith(_INTERPRETERS):
    # `autocast` or the like evaluated the equation; its frames say nothing.
    return None
  # The user's line is farther out than the library code that it calls.
  own = [x for x in frames if is_own_line(x[0])]
  outer = user_line(around) if not own and around else None
  return outer or (own or frames)[0][0]


def is_own_line(line: str) -> bool:
  """Returns whether a line is the user's, not one of an installed library."""
  return not line.startswith(_LIBRARIES)


def _frames(equation: core.JaxprEqn) -> list[tuple[str, str]]:
  """Returns lines of code and their functions, the innermost first."""
  text = source_info_util.summarize(equation.source_info, num_frames=1000)
  return [(x["line"], x["function"]) for x in _FRAME.finditer(text)][::-1]
