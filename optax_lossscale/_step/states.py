"""The wrapper's state, and how to find it inside any optimizer's state."""

from collections.abc import Callable
import functools
from typing import Any
from typing import Literal
from typing import NamedTuple
from typing import TypeGuard
from typing import TypeVar

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._rules import fixed
from optax_lossscale._step import findings

_State = TypeVar("_State")
_Kind = TypeVar("_Kind", bound=type)

# An `opt_state` of one of these types is S itself rather than a state.
SCALES = (jax.Array, np.ndarray, np.generic, bool, int, float, str)

# Without a target, Orbax and flax.serialization return plain dicts and lists.
RESTORE = (
  "a checkpoint must be restored into the structure of the optimizer's state, "
  "with tx.init(params) as its target, or by checkpoints.from_dicts"
)

# NNX keeps each array in its own variable.
AS_PURE = "of an nnx.Optimizer pass nnx.as_pure(optimizer.opt_state)"


class LastStep(NamedTuple):
  """Facts about the last step; a later version may add some.

  Attributes:
    overflow: bool[], True if the last step's gradients were unusable, or if
      micro-batches that overflowed were left out of them.
    nan: bool[], True if any gradient was NaN. A backward pass may also turn inf
      into NaN. An overflow without NaN means inf, saturation, or the caller's
      flag.
    skipped: bool[], True if the last step was skipped.
    stalled: bool[], True if S could not react to the last step. Either the step
      overflowed while S was at the rule's floor, fixed, or not in use; or the
      rule's next S was unusable; or S itself was unusable, and the rule started
      over.
    amax: float32[], the largest absolute value among the last step's scaled
      gradients, those of its micro-batches, and the caller's `amax`; NaN if
      `nan`.
    range_used: float32[], the share of the dtype's range that the last step
      used, for the leaf that used most: its amax divided by the largest finite
      value of the computation's dtype; at least 2**-126. NaN or inf if amax is;
      0 before the first step. The dtype is taken to be float16 if the check
      names none and the gradients are float32 or wider.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(8.0))
    >>> print(tx.init(jnp.zeros(1)).last_step.overflow)
    False
  """

  overflow: jax.Array
  nan: jax.Array
  skipped: jax.Array
  stalled: jax.Array
  amax: jax.Array
  range_used: jax.Array


class StepCounts(NamedTuple):
  """Counts of steps; a later version may add some.

  Attributes:
    applied_steps: int32[], the number of steps that the inner optimizer made.
    skipped_steps: int32[], the number of steps that were not applied.
    requested_skips: int32[], how many of `skipped_steps` only the caller's
      `skip=` skipped. S stayed the same, unless an overflow that the rule does
      not skip was reported as well.
    consecutive_skips: int32[], the number of skipped steps in a row, the last
      step included; 0 if the last step was applied.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(8.0))
    >>> print(tx.init(jnp.zeros(1)).counts.applied_steps)
    0
  """

  applied_steps: jax.Array
  skipped_steps: jax.Array
  requested_skips: jax.Array
  consecutive_skips: jax.Array


class LossScalingState(NamedTuple):
  """The state of `loss_scaling`: S, the inner state, facts about the last step.

  The fields of `last_step` and `counts` are also attributes of the state.

  Attributes:
    loss_scale_state: the rule's state; its `loss_scale` is S for the next step.
    inner_state: the wrapped optimizer's state.
    last_step: a `LastStep`, the facts about the last step.
    counts: a `StepCounts`, how many steps were applied and skipped.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(8.0))
    >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.zeros(1)))
    >>> print(state.loss_scale_state.loss_scale, state.nan, state.skipped_steps)
    4.0 True 1
  """

  loss_scale_state: Any
  inner_state: optax.OptState
  last_step: LastStep
  counts: StepCounts

  @property
  def overflow(self) -> jax.Array:
    """bool[], as in `LastStep`."""
    return self.last_step.overflow

  @property
  def nan(self) -> jax.Array:
    """bool[], as in `LastStep`."""
    return self.last_step.nan

  @property
  def skipped(self) -> jax.Array:
    """bool[], as in `LastStep`."""
    return self.last_step.skipped

  @property
  def stalled(self) -> jax.Array:
    """bool[], as in `LastStep`."""
    return self.last_step.stalled

  @property
  def amax(self) -> jax.Array:
    """float32[], as in `LastStep`."""
    return self.last_step.amax

  @property
  def range_used(self) -> jax.Array:
    """float32[], as in `LastStep`."""
    return self.last_step.range_used

  @property
  def applied_steps(self) -> jax.Array:
    """int32[], as in `StepCounts`."""
    return self.counts.applied_steps

  @property
  def skipped_steps(self) -> jax.Array:
    """int32[], as in `StepCounts`."""
    return self.counts.skipped_steps

  @property
  def requested_skips(self) -> jax.Array:
    """int32[], as in `StepCounts`."""
    return self.counts.requested_skips

  @property
  def consecutive_skips(self) -> jax.Array:
    """int32[], as in `StepCounts`."""
    return self.counts.consecutive_skips

  @property
  def inv_scale(self) -> jax.Array:
    """float32[], 1/S; subnormal if S > 2**126, so 0 on some backends."""
    return 1 / jnp.asarray(self.loss_scale_state.loss_scale, jnp.float32)

  @property
  def headroom(self) -> jax.Array:
    """float32[], headroom in bits: how many more times S could have doubled.

    It equals -log2(range_used), 126 at most; NaN if amax is NaN or 0, as before
    the first step; -inf if amax is inf. A finite negative value means that the
    gradients do not fit float16, and the check names no other dtype.
    """
    # A NaN kept in the state would trip jax_debug_nans, so compute it here.
    used = jnp.asarray(self.range_used)
    is_known = (used > 0) & (bits.magnitude_bits(jnp.asarray(self.amax)) > 0)
    # Subtract from 0, since negation would give -0.0 at the limit.
    headroom = 0 - bits.log2(jnp.where(used > 0, used, 1))
    return jnp.where(is_known, headroom, jnp.nan)


def first_state(
  rule_state: ArrayTree, inner_state: optax.OptState
) -> LossScalingState:
  """Returns the state before the first step."""
  # An array of its own for each field, since a step may donate them all.
  none = functools.partial(jnp.full, (), 0)
  return LossScalingState(
    loss_scale_state=leaves.as_arrays(rule_state),
    inner_state=leaves.as_arrays(inner_state),
    last_step=LastStep(
      overflow=none(bool),
      nan=none(bool),
      skipped=none(bool),
      stalled=none(bool),
      amax=none(jnp.float32),
      range_used=none(jnp.float32),
    ),
    counts=StepCounts(*(none(jnp.int32) for _ in StepCounts._fields)),
  )


def after(
  state: LossScalingState,
  rule_state: ArrayTree,
  inner_state: optax.OptState,
  finding: findings.Finding,
  outcome: findings.Outcome,
  stalled: jax.Array,
) -> LossScalingState:
  """Returns the state after a step, given what was found and decided."""
  return LossScalingState(
    loss_scale_state=rule_state,
    inner_state=inner_state,
    last_step=LastStep(
      overflow=outcome.reported,
      nan=jnp.isnan(finding.amax),
      skipped=outcome.skipped,
      stalled=stalled,
      amax=finding.amax,
      range_used=finding.range_used,
    ),
    counts=_counts_after(state.counts, outcome.skipped, outcome.by_request),
  )


def after_unscaled(
  state: LossScalingState,
  inner_state: optax.OptState,
  skipped: jax.Array | None,
) -> LossScalingState:
  """Returns the state after a step without a rule; None is for no flag."""
  last = state.last_step
  is_skipped = jnp.zeros_like(last.skipped) if skipped is None else skipped
  return state._replace(
    inner_state=inner_state,
    last_step=last._replace(skipped=is_skipped),
    counts=_counts_after(state.counts, skipped, by_request=skipped),
  )


def _counts_after(
  counts: StepCounts,
  skipped: jax.Array | None,
  by_request: jax.Array | None,
) -> StepCounts:
  """Returns the counts after a step; None stands for a step without a skip."""
  if skipped is None:
    return counts._replace(
      applied_steps=jnp.asarray(optax.safe_increment(counts.applied_steps)),
      consecutive_skips=jnp.zeros_like(counts.consecutive_skips),
    )
  requested_skips = counts.requested_skips
  if by_request is not None:
    requested_skips = _count_if(by_request, requested_skips)
  return StepCounts(
    applied_steps=_count_if(~skipped, counts.applied_steps),
    skipped_steps=_count_if(skipped, counts.skipped_steps),
    requested_skips=requested_skips,
    consecutive_skips=jnp.where(
      skipped, optax.safe_increment(counts.consecutive_skips), 0
    ),
  )


@promises.promise("count", assume=lambda x, n: jnp.where(x, n + 1, n))
def _count_if(condition: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.where(condition, optax.safe_increment(count), count)


def find_states(tree: object) -> dict[leaves.Path, LossScalingState]:
  """Returns every `LossScalingState` in a pytree by its path."""
  nodes = jax.tree.leaves_with_path(tree, is_leaf=is_state)
  return {path: node for path, node in nodes if is_state(node)}


# The attribute of a state's class that `stores` sets.
_STORE = "_parameter_store"


def stores(how: Literal["copies", "narrow"]) -> Callable[[_Kind], _Kind]:
  """Marks the class of a state by how its optimizer stores parameters."""
  # "copies" are wider than the parameters. An optimizer that stores its share
  # in "narrow" parameters must see them in their own dtypes.

  def mark(kind: _Kind) -> _Kind:
    setattr(kind, _STORE, how)
    return kind

  return mark


def store_of(x: object) -> str | None:
  """Returns how the optimizer of a state stores parameters, if it is marked."""
  return getattr(type(x), _STORE, None)


def stores_in(tree: object) -> set[str | None]:
  """Returns the marks of all states in a tree, which never hold each other."""
  nodes = jax.tree.leaves(tree, is_leaf=lambda x: store_of(x) is not None)
  return set(map(store_of, nodes)) - {None}


def has_copies(inner_state: object) -> bool:
  """Returns whether an optimizer in it keeps copies of the parameters."""
  return "copies" in stores_in(inner_state)


def is_narrow_state(x: object) -> bool:
  """Returns whether x is the state of an optimizer of narrow parameters."""
  return store_of(x) == "narrow"


def keeps_narrow(inner_state: object) -> bool:
  """Returns whether an optimizer in it must see parameters as they are."""
  return "narrow" in stores_in(inner_state)


def require_states(
  opt_state: object, name: str = "opt_state"
) -> dict[leaves.Path, LossScalingState]:
  """Returns the states that `find_states` finds; raises if there are none."""
  if states := find_states(opt_state):
    return states
  nodes = jax.tree.leaves_with_path(opt_state)
  keys = [getattr(key, "key", None) for path, _ in nodes for key in path]
  # S in a rule's state is a scalar, but a parameter of that name rarely is.
  if getattr(getattr(opt_state, "loss_scale", None), "shape", None) == ():
    remedy = "for the S of a rule's own state pass its `loss_scale`"
  elif hasattr(opt_state, "init") and hasattr(opt_state, "update"):
    remedy = "pass what the optimizer's init made: opt_state = tx.init(params)"
  elif callable(opt_state):
    remedy = "the function comes first, then the state"
  elif "loss_scale_state" in keys:
    remedy = RESTORE
  else:
    remedy = (
      "pass the arguments in their order, or wrap the optimizer: tx = "
      "loss_scaling(inner, rule), opt_state = tx.init(params). The state of a "
      "run from before loss scaling goes on with "
      "checkpoints.with_loss_scaling(opt_state, tx.init(params))"
    )
  raise ValueError(
    f"`{name}` must hold the state of `loss_scaling`, got a "
    f"{arguments.kind_of(opt_state)} without one; {remedy}."
  )


def find_state(opt_state: object, path: str | None = None) -> LossScalingState:
  """Returns the only `LossScalingState` in `opt_state`, or that at `path`."""
  states = require_states(opt_state)
  chosen = [
    x for key, x in states.items() if path is None or leaves.is_at(key, path)
  ]
  if len(chosen) == 1:
    return chosen[0]
  got = len(chosen) or arguments.shown(path)
  raise ValueError(
    f"`opt_state` must hold one loss scale at `path`, got {got}; choose one by "
    "its path: path= one of "
    f"{leaves.listed(leaves.path_names(states).values())}."
  )


def refuse_stack(name: str, scalar: object) -> None:
  """Raises if a scalar of a state has a shape, as in a stack of states."""
  if shape := getattr(scalar, "shape", ()):
    raise ValueError(
      f"`{name}` must be the state of one run, got a stack of shape {shape}, "
      "as jax.vmap makes it: its flags would apply to the wrong axes of "
      "arrays. Call this inside the function that jax.vmap maps, or choose one "
      f"run: jax.tree.map(lambda x: x[0], {name})."
    )


def get_loss_scale(
  opt_state: optax.OptState, *, path: str | None = None
) -> jax.Array:
  """Returns the loss scale S, wherever it is in `opt_state`.

  Args:
    opt_state: any pytree that holds the state of `loss_scaling`; or a loss
      scale, which is returned.
    path: which scale, if `opt_state` holds several: one of the paths that the
      error lists, or the beginning of one.

  Returns:
    float32[], the S for the next backward pass.

  Raises:
    TypeError: if the scale that is passed is not a number.
    ValueError: if `opt_state` holds no scale, or several without a `path`, or
      if the scale that is passed is known to be unusable.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = optax.chain(ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale()))
    >>> print(ols.get_loss_scale(tx.init({"loss_scale": jnp.zeros(3)})))
    1024.0
  """
  return read_scale("opt_state", opt_state, path)


def read_scale(
  name: str, opt_state: optax.OptState, path: str | None = None
) -> jax.Array:
  """Returns S from the argument `name`, a state or S itself."""
  if not isinstance(opt_state, SCALES):
    require_states(opt_state, name)
    state = find_state(opt_state, path)
    return jnp.asarray(state.loss_scale_state.loss_scale, jnp.float32)
  if isinstance(opt_state, (jax.Array, np.ndarray, np.generic)):
    if opt_state.ndim != 0:
      raise ValueError(
        f"`{name}` as a loss scale must be a scalar, got an array of shape "
        f"{opt_state.shape}."
      )
    if not isinstance(opt_state, jax.core.Tracer):
      # A user's transfer guard is meant for data, not for this scalar.
      with jax.transfer_guard("allow"):
        arguments.check_scale(name, opt_state)
    return jnp.asarray(opt_state, jnp.float32)
  scale = arguments.check_scale(name, opt_state)
  return jnp.full((), scale, jnp.float32)


def scale_in_use(
  opt_state: optax.OptState, path: str | None = None
) -> jax.Array:
  """Returns S for a backward pass; raises if compiling would freeze it."""
  if not isinstance(opt_state, SCALES):
    opt_state = state_in_use(opt_state, path)
  return get_loss_scale(opt_state)


def state_in_use(
  opt_state: object, path: str | None = None
) -> LossScalingState:
  """Returns the one state, or raises if a compiled function would freeze it."""
  state = find_state(opt_state, path)
  refuse_stack("opt_state", state.skipped_steps)
  if not jax.tree.leaves(state.loss_scale_state):
    return state  # S is constant.
  loss_scale = state.loss_scale_state.loss_scale
  # Flax NNX keeps each array of a state in a variable of its own.
  if not isinstance(loss_scale, jax.Array) and hasattr(
    loss_scale, "__jax_array__"
  ):
    loss_scale = loss_scale.__jax_array__()
  # A function that is traced has closed over an S that is concrete. A function
  # recorded outside of jit runs right away, with this S.
  is_compiled = interpreter.is_staged() and not interpreter.is_recording()
  if is_compiled and not isinstance(loss_scale, jax.core.Tracer):
    raise ValueError(
      "`opt_state` must be an argument of the function that JAX is tracing "
      "(jit, scan, shard_map ...), or the optimizer that holds it, got one "
      "that was closed over: the compiled function would use its loss scale "
      f"{float(loss_scale)} for ever. Pass it in, as in "
      "jax.jit(lambda params, opt_state, batch: "
      "scaled_value_and_grad(loss_fn, opt_state)(params, batch)). If this "
      "constant is what you mean, pass get_loss_scale(opt_state)."
    )
  return state


def replace_scale(
  rule_state: leaves.Tree, loss_scale: ArrayLike
) -> leaves.Tree:
  """Returns a rule's state with S replaced, in whichever leaf holds it."""
  if isinstance(rule_state, fixed.NoLossScaleState):
    return rule_state  # S is always 1.
  # The attribute `loss_scale` leads to that leaf, since a rule that wraps
  # another holds S deeper inside, under any name.
  values, structure = jax.tree.flatten(rule_state)
  places = [object() for _ in values]
  try:
    place = jax.tree.unflatten(structure, places).loss_scale
    values[places.index(place)] = loss_scale
  except Exception as error:  # A computed S may fail on these placeholders.
    raise TypeError(
      "the state of `rule` must hold S as a leaf, where it can be set, got a "
      f"{type(rule_state).__name__} whose `loss_scale` is not a leaf of it; "
      f"store S itself in it, and {AS_PURE}."
    ) from error
  return jax.tree.unflatten(structure, values)


def is_state(x: object) -> TypeGuard[LossScalingState]:
  """Returns whether `x` is the wrapper's state, for use as `is_leaf`."""
  return isinstance(x, LossScalingState)


def replace_states(
  replace: Callable[[leaves.Path, LossScalingState], object], tree: Any
) -> Any:
  """Returns a tree with each state of loss scaling replaced, given its path."""
  return jax.tree.map_with_path(
    lambda path, x: replace(path, x) if is_state(x) else x,
    tree,
    is_leaf=is_state,
  )


def check_kind(state: object, kind: type[_State], scalar: str) -> _State:
  """Returns `state`, which must be one that init makes, with this scalar."""
  if not isinstance(state, kind):
    raise TypeError(
      f"`state` must be the {kind.__name__} that init made, got "
      f"{arguments.kind_of(state)}."
    )
  refuse_stack("state", getattr(state, scalar))
  return state
