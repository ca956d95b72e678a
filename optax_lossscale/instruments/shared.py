"""Shared by the rooms: a bound step, and gradients by name."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
import sys
from typing import NamedTuple
from typing import TypeGuard

from chex import ArrayTree
import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Path

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
  """Returns a step as a function of a dict of arguments, and that dict."""
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
  # The last result is which output is which object of Flax NNX, since a step
  # changes those in place. They exist only in a program that has imported it.
  if "flax.nnx" not in sys.modules:
    return call, named, {}
  from optax_lossscale.instruments import _nnx_step

  return _nnx_step.returning(call, named)


def is_key(x: object) -> TypeGuard[jax.Array]:
  """Returns whether a value is a random key with a dtype of its own."""
  return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def by_path(tree: object, *left_out: type) -> dict[Path, jax.Array]:
  """Returns a tree's gradients by path, except inside `left_out` classes."""
  found = jax.tree.leaves_with_path(
    leaves.as_arrays(tree), is_leaf=lambda x: isinstance(x, left_out)
  )
  # Flax's `_overwrite_with_gradient` bypasses the wrapper.
  return {
    path: leaf
    for path, leaf in found
    if leaves.is_gradient(leaf) and not leaves.overwrites(path)
  }


def named(tree: object) -> dict[str, jax.Array]:
  """Returns the gradients of a tree by name, such as "Dense_0/kernel"."""
  found = by_path(tree)
  return {name: found[x] for x, name in leaves.path_names(found).items()}
