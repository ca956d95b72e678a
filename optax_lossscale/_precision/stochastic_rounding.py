"""16-bit parameters and optimizer states that learn by stochastic rounding."""

from collections.abc import Callable
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Tree
from optax_lossscale._precision import narrow_parameters
from optax_lossscale._precision import rounding
from optax_lossscale._step import requirements
from optax_lossscale._step import states

# Arrays of fewer elements save too little to be rounded.
_SMALL = 4096
_NAME = "stochastic_rounding"
# Part of each key, so that one seed does not round both alike.
_PARAMETERS, _STATE = 0, 1


@states.stores("narrow")
class StochasticRoundingState(NamedTuple):
  """State of `stochastic_rounding`."""

  # uint32[], decides every rounding together with the count.
  rounding_seed: jax.Array
  rounding_count: jax.Array  # int32[], how many steps were applied.
  inner_state: optax.OptState  # The wrapped optimizer's state.


class LowPrecisionState(NamedTuple):
  """State of `low_precision_state`."""

  # uint32[], decides every rounding together with the count.
  state_seed: jax.Array
  state_count: jax.Array  # int32[], how many steps were applied.
  # The wrapped optimizer's state, with its large arrays in 16 bits.
  narrow_state: optax.OptState


def stochastic_rounding(
  inner: optax.GradientTransformation | optax.MultiSteps, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that 16-bit parameters learn without a float32 copy.

  An update of less than half the distance to the next bfloat16 is lost if the
  sum is rounded to the nearest. Here each new parameter becomes one of the two
  numbers around the target, with a chance proportional to the distance (in
  steps of 2**-24), so that the mean of many steps is that of float32. Nothing
  is kept but a seed and a count.

  The updates are rounded such that `optax.apply_updates` rounds no more, and no
  compiler drops that, unlike noise before a cast. A parameter stops at the
  largest value of its dtype, and no update is larger than that;
  docs/guides/sixteen_bit_parameters.md has the details.

  The inner optimizer sees float32 parameters and gradients. Nothing that
  changes updates may come after this wrapper in a chain. It works inside or
  outside `loss_scaling`.

  Args:
    inner: the optimizer, any optax transformation or `optax.MultiSteps`.
    seed: an integer. The same seed, count and tree give the same bits on every
      device, however the arrays are sharded by jit. Inside `shard_map` and
      `vmap` each shard and each member of a batch has the same chances, and so
      have two of these in `optax.partition`, unless their seeds differ.

  Returns:
    A transformation whose updates have the parameters' dtypes. Parameters in
    float32 or wider get the inner optimizer's updates unchanged. A skipped step
    leaves the count and every parameter as they are.

  Raises:
    TypeError: if `inner` is not an optimizer or `seed` is not an integer; from
      `update`, if `state` is not the one that `init` made.
    ValueError: from `init`, if a parameter is in 8 bits; from `update`, if
      `params` is None.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def train(tx):
    ...   params = jnp.ones(10_000, jnp.bfloat16)
    ...   state = tx.init(params)
    ...   for _ in range(64):
    ...     grads = jnp.full(10_000, 2.0**-13, jnp.bfloat16)
    ...     updates, state = tx.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    ...   return 1 - jnp.mean(params, dtype=jnp.float32)
    >>> print(f"{train(optax.sgd(1.0)):.3f}")
    0.000
    >>> print(f"{train(ols.stochastic_rounding(optax.sgd(1.0))):.3f}")
    0.008

  References:
    Ozkara et al., `Stochastic Rounding for LLM Training: Theory and Practice
    <https://arxiv.org/abs/2502.20566>`_, 2025.
  """
  inner = requirements.as_optimizer("inner", inner)
  first_seed = _check_seed(seed)

  def widen(x: jax.Array) -> jax.Array:
    return leaves.widen(x) if _is_narrow(x) else x

  def init(params: optax.Params) -> StochasticRoundingState:
    _, inner_state = narrow_parameters.init(inner, _NAME, widen, params)
    return StochasticRoundingState(
      jnp.uint32(first_seed), jnp.int32(0), inner_state
    )

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, StochasticRoundingState]:
    state = states.check_kind(state, StochasticRoundingState, "rounding_count")
    count = state.rounding_count
    keys = _keys(_PARAMETERS, state.rounding_seed, count, params)
    kept = jax.tree.map(
      lambda x, key: key if _is_narrow(x) else optax.MaskedNode(),
      leaves.leave_out(leaves.are_gradients(params), params),
      leaves.leave_out(leaves.are_gradients(params), keys),
    )
    updates, _, inner_state, skipped = narrow_parameters.update(
      inner, _BY_CHANCE, kept, updates, state.inner_state, params, extra_args
    )
    return updates, StochasticRoundingState(
      state.rounding_seed,
      jnp.where(skipped, count, optax.safe_increment(count)),
      inner_state,
    )

  return optax.GradientTransformationExtraArgs(init, update)


def low_precision_state(
  inner: optax.GradientTransformation | optax.MultiSteps,
  dtype: DTypeLike = jnp.bfloat16,
  *,
  seed: int = 0,
  mask: object | Callable[[optax.OptState], object] = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that its moments are stored in bfloat16.

  The inner optimizer gets its state, parameters and gradients in float32, and
  its next state is rounded stochastically. Rounding to the nearest number would
  stop the average of squares that Adam keeps: each step is 1/1000 of the way to
  the new square, and two bfloat16 are up to 1/128 apart. Arrays of fewer than
  4096 elements keep their dtype, and so do counts, keys and all that is not
  float32. A step that `loss_scaling` in `inner` skips changes no bit.

  Args:
    inner: the optimizer, any optax transformation or `optax.MultiSteps`, whose
      sum of gradients is rounded too.
    dtype: bfloat16. In float16 the squares of gradients below 1.7e-4 would be
      0.
    seed: an integer that decides every rounding.
    mask: True for what to store in `dtype`, by default all. As in
      `optax.masked` it is a tree of bools or a prefix of one, or a function
      that returns it, but of the state of `inner` rather than the parameters.
      The function gets shapes in float32. False is for what must be exact: the
      preconditioners of Shampoo and SOAP, and schedule-free's z.

  Returns:
    A transformation with a state of half the size, and updates in the dtypes of
    the parameters.

  Raises:
    TypeError: if `inner` is not an optimizer or `seed` is not an integer; from
      `init`, if `mask` is not of bools; from `update`, if `state` is not the
      one that `init` made.
    ValueError: if `dtype` is not bfloat16; from `init`, if `mask` is not like
      the state, or `inner` stores parameters in a way of its own.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.low_precision_state(optax.adam(1e-3))
    >>> state = tx.init({"w": jnp.ones(4096), "b": jnp.ones(64)})
    >>> print(optax.tree.get(state, "nu")["w"].dtype)
    bfloat16
    >>> print(optax.tree.get(state, "nu")["b"].dtype)
    float32
  """
  inner = requirements.as_optimizer("inner", inner)
  found, got = arguments.read_dtype(dtype)
  if found != jnp.bfloat16:
    why = ": the squares that Adam keeps would be 0 for gradients below 1.7e-4"
    raise ValueError(
      f"`dtype` must be bfloat16, got {got}"
      f"{why if found == jnp.float16 else ''}."
    )
  first_seed = _check_seed(seed)

  def narrow(
    state: optax.OptState, is_low: object, seed: jax.Array, count: jax.Array
  ) -> optax.OptState:
    keys = _keys(_STATE, seed, count, state)

    def narrow_leaf(is_low: bool, x: jax.Array, key: jax.Array) -> jax.Array:
      if not (is_low and x.dtype == jnp.float32):
        return x
      found = rounding.stochastic(x, rounding.chances(x.shape, key))
      return found.astype(jnp.bfloat16)

    return jax.tree.map(narrow_leaf, is_low, state, keys)

  def chosen(state: optax.OptState, dtype: DTypeLike, least: int) -> object:
    given: object = True if mask is None else mask
    if callable(given):
      given = given(leaves.widen(jax.eval_shape(lambda: state)))
    bools = jax.tree.leaves(given, is_leaf=lambda x: x is None)
    if not bools or not all(isinstance(x, (bool, np.bool_)) for x in bools):
      raise TypeError(f"`mask` must be of bools, got {arguments.shown(given)}.")
    try:
      given = jax.tree.broadcast(given, state)
    except ValueError as error:
      raise ValueError(
        "`mask` must be like the state of `inner`, or a prefix of it, got "
        f"{arguments.shown(given)} for {jax.tree.structure(state)}."
      ) from error
    return jax.tree.map(
      lambda is_low, x: (
        is_low and leaves.is_real(x) and x.dtype == dtype and x.size >= least
      ),
      given,
      state,
    )

  def init(params: optax.Params) -> LowPrecisionState:
    state = inner.init(leaves.widen(params))
    if narrow_parameters.has_scaling(state):
      state = inner.init(params)  # `loss_scaling` widens them itself.
    narrow_parameters.refuse_stores(
      state, "low_precision_state", "put it inside of that one"
    )
    state = leaves.as_arrays(state)
    is_low = chosen(state, jnp.float32, _SMALL)
    seed, count = jnp.uint32(first_seed), jnp.int32(0)
    return LowPrecisionState(seed, count, narrow(state, is_low, seed, count))

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, LowPrecisionState]:
    state = states.check_kind(state, LowPrecisionState, "state_count")
    old, count = state.narrow_state, state.state_count
    # The dtype says what `init` has rounded; inside `shard_map` the size is
    # that of a shard.
    is_low = chosen(old, jnp.bfloat16, 0)
    wide = jax.tree.map(
      lambda is_low, x: rounding.seen(x) if is_low else x, is_low, old
    )
    gradients = leaves.as_arrays(updates)
    scales = narrow_parameters.has_scaling(old)
    updates, wide = inner.update(
      gradients if scales else leaves.widen(gradients),
      wide,
      params if scales or params is None else leaves.widen(params),
      **extra_args,
    )
    if not scales:
      own = gradients if params is None else params
      updates = leaves.narrow_like(leaves.as_arrays(updates), own)
    wide = leaves.as_arrays(wide)
    skipped = narrow_parameters.is_skipped(wide)
    count = jnp.asarray(optax.safe_increment(count))
    new = jax.tree.map(
      lambda is_low, x, y: jnp.where(skipped, x, y) if is_low else y,
      is_low,
      old,
      narrow(wide, is_low, state.state_seed, count),
    )
    count = jnp.where(skipped, state.state_count, count)
    return updates, LowPrecisionState(state.state_seed, count, new)

  return optax.GradientTransformationExtraArgs(init, update)


def _move_by_chance(
  key: jax.Array, target: jax.Array, param: jax.Array, skipped: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns an update that takes a parameter to its target in the mean."""
  seen = rounding.seen(param)
  chance = rounding.chances(param.shape, key)
  found = rounding.stochastic_update(target, seen, param.dtype, chance)
  # Use -0.0 for no change: adding 0.0 would turn a -0.0 parameter into 0.0.
  found = jnp.where(skipped | (found == 0), -0.0, found)
  return found.astype(param.dtype), key


_BY_CHANCE = narrow_parameters.Store(
  lambda _, param: rounding.seen(param), _move_by_chance
)


def _keys(use: int, seed: jax.Array, count: jax.Array, tree: Tree) -> Tree:
  """Returns a key for each leaf of a tree."""
  base = rounding.key(use, seed, count)
  flat, structure = jax.tree.flatten(tree)
  found = [rounding.key(base, i) for i in range(len(flat))]
  return jax.tree.unflatten(structure, found)


def _check_seed(seed: object) -> int:
  """Returns a seed that fits in 32 bits; raises if it is not an integer."""
  return arguments.check_integer("seed", seed, unit="") % 2**32


def _is_narrow(x: object) -> bool:
  return rounding.is_narrow(x, _NAME)
