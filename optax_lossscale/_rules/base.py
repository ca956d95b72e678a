"""The base class of rules for the loss scale S, to subclass for a new rule."""

import abc
import dataclasses
import functools
import inspect
import types
from typing import Any
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_lossscale._base import arguments

# The methods of torch's GradScaler, each with its equivalent here.
_OF_A_SCALER = {
  "scale": "scaled_value_and_grad(loss_fn, opt_state)",
  "get_scale": "get_loss_scale(opt_state)",
  "loss_scale": "get_loss_scale(opt_state)",
  "unscale": "unscale(scaled_grads, opt_state)",
  "unscale_": "unscale(scaled_grads, opt_state)",
  "adjust": "tx.update(scaled_grads, opt_state, params)",
  "step": "tx.update(scaled_grads, opt_state, params)",
  "state_dict": "opt_state = tx.init(params), and save opt_state",
  "load_state_dict": "tx.init(params), and restore opt_state into that",
}


@dataclasses.dataclass(frozen=True)
class LossScale(abc.ABC):
  """A rule for the loss scale S: where S starts and how each step moves it.

  To write a rule, subclass this as a frozen dataclass with the configuration.
  The state is any pytree of arrays with an attribute `loss_scale`, float32[].
  The whole library accepts your rule just like its own.

  Attributes:
    skip: whether an overflow skips the step. If False, the inner update runs
      anyway, and the overflow is only passed to the rule and reported.

  Examples:
    >>> import dataclasses
    >>> from typing import NamedTuple
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> class HalvingState(NamedTuple):
    ...   loss_scale: jax.Array
    >>> @dataclasses.dataclass(frozen=True)
    ... class Halving(ols.LossScale):
    ...   start: float = 1024.0
    ...
    ...   def init(self):
    ...     return HalvingState(jnp.float32(self.start))
    ...
    ...   def update(self, state, overflow, *, amax=None):
    ...     halved = state.loss_scale / 2
    ...     return HalvingState(jnp.where(overflow, self.start, halved))
    >>> rule = Halving()
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    512.0
  """

  skip: bool = dataclasses.field(default=True, kw_only=True)

  def __post_init__(self) -> None:
    arguments.check_fields(self, skip=arguments.check_flag)

  # Type checkers know the arguments of each rule, and would take a rule to have
  # every name.
  if not TYPE_CHECKING:

    def __new__(cls, *args: object, **kwargs: object) -> "LossScale":
      _, *names = (parameters := inspect.signature(cls.__init__).parameters)
      kinds = {x.kind for x in parameters.values()}
      if inspect.Parameter.VAR_KEYWORD not in kinds:
        arguments.check_known(cls.__name__, names, kwargs, of_others=True)
      return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
      if name not in _OF_A_SCALER:
        return object.__getattribute__(self, name)  # Raises what it raised.
      raise AttributeError(
        f"a {type(self).__name__} has no `{name}`, since a rule holds no "
        "state; with tx = loss_scaling(optax.adam(1e-3), rule) write "
        f"{_OF_A_SCALER[name]}."
      )

  def __init_subclass__(cls, **kwargs: object) -> None:
    super().__init_subclass__(**kwargs)
    init = vars(cls).get("init")
    if not isinstance(init, types.FunctionType):
      return

    @functools.wraps(init)
    def explained(self: LossScale, *args: object) -> Any:
      if args:
        raise TypeError(
          "a rule must be inside of loss_scaling, got a "
          f"{type(self).__name__} in the place of an optimizer; write "
          "loss_scaling(optax.adam(1e-3), rule)."
        )
      return init(self)

    type.__setattr__(cls, "init", explained)

  @abc.abstractmethod
  def init(self) -> Any:
    """Returns the state before the first step; `loss_scale` is its S."""

  @abc.abstractmethod
  def update(
    self,
    state: Any,
    overflow: ArrayLike,
    *,
    amax: ArrayLike | None = None,
  ) -> Any:
    """Returns the state after a step.

    It runs inside jit, so it must be pure and branch with `jnp.where`.

    Args:
      state: the state that the step used.
      overflow: bool[], whether the step's gradients were unusable.
      amax: float32[], the largest absolute value among the scaled gradients,
        NaN if any gradient was NaN; None if it was not measured.
    """

  def stalled(self, state: Any, overflow: ArrayLike) -> jax.Array:
    """Returns bool[], True if S should move but cannot, as at its floor.

    The wrapper reports this. A rule that never moves S stalls on any overflow.

    Args:
      state: the state that the step used.
      overflow: bool[], whether the step's gradients were unusable.
    """
    del state, overflow
    return jnp.full((), False)
