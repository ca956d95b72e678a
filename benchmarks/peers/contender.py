"""What a contender can do, and how one that is written in JAX does it."""

import abc
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compilation

Arrays = Sequence[Any]


class Contender(abc.ABC):
  """An optimizer step, from the scaled gradients to the next parameters.

  Attributes:
    unscales: whether it takes gradients of S times the loss, and skips on
      overflow. A bare optimizer does not.
    gradient_dtypes: of the gradients that it takes.
  """

  unscales = True
  gradient_dtypes: tuple[str, ...] = ("float16", "float32")

  @abc.abstractmethod
  def start(self, params: Arrays) -> None:
    """Begins anew.

    Args:
      params: the first parameters, float32; they are copied.
    """

  def compile(self, scaled_grads: Arrays) -> compilation.Compilation | None:
    """Compiles the step ahead; returns None where nothing is compiled.

    Args:
      scaled_grads: like those that `step` will be given.
    """
    del scaled_grads
    return None

  def prepare(self, scaled_grads: Arrays) -> None:  # noqa: B027 - may be empty.
    """Does what comes before a step and is not part of it.

    Args:
      scaled_grads: those that `step` will be given.
    """

  @abc.abstractmethod
  def step(self, scaled_grads: Arrays) -> None:
    """Makes a step, and returns when it is done.

    Args:
      scaled_grads: they stay as they are.
    """

  @abc.abstractmethod
  def parameters(self) -> list[np.ndarray]:
    """Returns copies of the parameters."""

  @abc.abstractmethod
  def reference(self, params: Arrays, gradients: Arrays) -> list[np.ndarray]:
    """Returns the parameters after one step, whatever the gradients' dtype.

    Args:
      params: before the step.
      gradients: of the loss.
    """

  @abc.abstractmethod
  def stop(self) -> None:
    """Lets go of the memory."""


class State(NamedTuple):
  """What a step in JAX is given and returns, all of it donated.

  Attributes:
    params: a list of float32 arrays.
    opt_state: the optimizer's.
    loss_scale: what the peer keeps beside it, to move S.
  """

  params: Any
  opt_state: Any
  loss_scale: Any = ()


class JaxContender(Contender):
  """A pure function, compiled ahead, whose state is donated.

  Attributes:
    init: makes the state from the parameters.
    update: the step: the next state from the state and the scaled gradients.
    unscales: as in `Contender`.
  """

  def __init__(
    self,
    init: Callable[[list[jax.Array]], State],
    update: Callable[[State, list[jax.Array]], State],
    *,
    unscales: bool = True,
  ) -> None:
    self.init = init
    self.update = update
    self.unscales = unscales
    self._state: State | None = None
    self._compiled: Any = None

  def start(self, params: Arrays) -> None:
    """Begins anew. See `Contender.start`."""
    self._state = None
    self._state = self._first_state(params)

  def compile(self, scaled_grads: Arrays) -> compilation.Compilation:
    """Compiles the step. See `Contender.compile`."""
    self._compiled, cost = compilation.compile_ahead(
      self.update, self._state, scaled_grads
    )
    return cost

  def step(self, scaled_grads: Arrays) -> None:
    """Makes a step. See `Contender.step`."""
    self._state = self._compiled(self._state, scaled_grads)
    jax.block_until_ready(self._state)

  def parameters(self) -> list[np.ndarray]:
    """Returns copies of the parameters."""
    assert self._state is not None  # `start` comes first.
    # Copies, since a view of a buffer would keep it from being donated.
    return [np.array(leaf) for leaf in self._state.params]

  def reference(self, params: Arrays, gradients: Arrays) -> list[np.ndarray]:
    """Returns the parameters after one step. See `Contender.reference`."""
    update = jax.jit(self.update, donate_argnums=0)
    state = update(self._first_state(params), list(gradients))
    return [np.array(leaf) for leaf in state.params]

  def stop(self) -> None:
    """Lets go of the memory."""
    self._state = self._compiled = None

  def _first_state(self, params: Arrays) -> State:
    # Some peers start from Python or NumPy scalars. As arrays they have the
    # type that comes back from the step.
    state: State = jax.tree.map(
      jnp.asarray, self.init([jnp.array(leaf) for leaf in params])
    )
    return state
