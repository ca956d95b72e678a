"""Master weights: narrow parameters that follow a wider copy of themselves."""

from typing import Literal
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._precision import narrow_parameters
from optax_lossscale._precision import rounding
from optax_lossscale._step import requirements
from optax_lossscale._step import states

_NAME = "master_weights"
_REST = 'master_weights(..., store="remainder")'


@states.stores("copies")
class MasterWeightsState(NamedTuple):
  """State of `master_weights`: the masters and the inner optimizer's state.

  Attributes:
    master: the parameters in the wider dtype; a masked node for each leaf that
      has no master.
    inner_state: the wrapped optimizer's state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = optax.chain(ols.master_weights(optax.sgd(0.5)))
    >>> state = tx.init({"w": jnp.ones(1, jnp.float16)})
    >>> print(optax.tree.get(state, "master"))
    {'w': Array([1.], dtype=float32)}
  """

  master: optax.Params
  inner_state: optax.OptState

  def wide(self, params: optax.Params) -> optax.Params:
    """Returns the masters, as for a checkpoint in float32.

    Args:
      params: the parameters that belong to this state.

    Returns:
      A tree like `params`, with the parameter itself where it has no master.
    """
    return _wide(_COPY, self.master, params)


@states.stores("narrow")
class RemainderState(NamedTuple):
  """State of `master_weights` with `store="remainder"`."""

  # int16, the bits of each master below those of its parameter; a masked node
  # for each leaf that is its own master. Not named `master`, so that no
  # checkpoint of the one passes for the other.
  remainder: optax.Params
  inner_state: optax.OptState  # The wrapped optimizer's state.

  def wide(self, params: optax.Params) -> optax.Params:
    """Returns the masters, as `MasterWeightsState.wide` does."""
    return _wide(_REMAINDER, self.remainder, params)


_AnyState = MasterWeightsState | RemainderState


def master_weights(
  inner: optax.GradientTransformation | optax.MultiSteps,
  dtype: DTypeLike = jnp.float32,
  store: Literal["copy", "remainder"] = "copy",
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it updates a float32 copy of the parameters.

  The next float16 after 1.0 is 1.001, and the next bfloat16 is 1.008. Adding
  less than half that gap has no effect, however often. This wrapper adds
  updates to the master, a wider copy in the optimizer's state. Its updates take
  the parameter to the number nearest to the master, or close to it if that is
  below half or above twice the parameter.

  With `store="remainder"` the master is the parameter together with 16 more
  bits, which are 0 at first, so that it takes 2 bytes of state instead of 4.
  The parameter is then the number nearest to the master, away from zero if two
  are. With bfloat16 that is every bit of float32. With float16 it is too above
  2**-17, and below it the master is a multiple of 2**-40.
  docs/guides/sixteen_bit_parameters.md says what large updates do.

  A parameter stops at the largest value of its dtype, and so does the master,
  unless it is a copy. Finite masters and updates never make a parameter inf.

  The inner optimizer, including any weight decay, sees the master as its
  parameters. Nothing that changes updates may come after this wrapper in a
  chain, because the parameters would then no longer follow the master. The
  wrapper works inside or outside `loss_scaling`, with the same result.

  If something else changes the parameters, the next step moves them back,
  unless the master is set too: `optax.tree.set(opt_state, master=...)`. With
  remainders the master moves along.

  Args:
    inner: the optimizer, any optax transformation or `optax.MultiSteps`. It
      gets gradients in float32 or wider. If it contains `loss_scaling`, it gets
      them unchanged, because `loss_scaling` checks them in their own dtype.
    dtype: the master's dtype, float32 or wider, unless the parameter's is
      wider.
    store: what the state keeps, a "copy" of the master or its "remainder".

  Returns:
    A transformation whose state is a `MasterWeightsState`, or with remainders a
    like one with a field `remainder` instead of `master`. Every real floating
    parameter has a master, which for a float32 parameter is simply a copy, or
    with remainders the parameter itself. The inner optimizer handles all other
    parameters directly. The leaves of Flax's `_overwrite_with_gradient`
    collection bypass the inner optimizer, as in `loss_scaling`. Updates have
    the parameters' dtypes.

  Raises:
    TypeError: if `inner` is not an optimizer or `dtype` is not a floating-point
      dtype; from `update`, if `state` is not the one that `init` made.
    ValueError: if `dtype` is narrower than float32, or is float64 while JAX has
      float64 disabled or with remainders; if `store` is unknown; from `init`,
      if remainders are for parameters in 8 bits; from `update`, if `params` is
      None.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def train(tx):
    ...   params = jnp.ones(1, jnp.float16)
    ...   state = tx.init(params)
    ...   for _ in range(64):
    ...     grads = jnp.full(1, 2.0**-13, jnp.float16)
    ...     updates, state = tx.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    ...   return params
    >>> print(1 - train(optax.sgd(1.0)))
    [0.]
    >>> print(1 - train(ols.master_weights(optax.sgd(1.0))))
    [0.007812]

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.1.
  """
  inner = requirements.as_optimizer("inner", inner)
  dtype = arguments.check_dtype("dtype", dtype, example="jnp.float32")
  if formats.is_low(dtype):
    raise ValueError(
      "`dtype` must be at least as wide as float32, since small updates are to "
      f"add up in it, got {dtype}; parameters keep the dtype that they have."
    )
  arguments.check_enabled("dtype", dtype)
  arguments.check_choice("store", store, ("copy", "remainder"))
  is_copy = store == "copy"
  kind: type[_AnyState] = MasterWeightsState if is_copy else RemainderState
  if not is_copy and dtype != jnp.float32:
    raise ValueError(
      '`dtype` must be float32 with store="remainder", since a remainder has '
      f'16 bits, got {dtype}; or take store="copy".'
    )

  def widen(x: jax.Array) -> jax.Array:
    # JAX does not promote float8.
    wide = np.promote_types(dtype, leaves.at_least_float32(x.dtype))
    return (
      leaves.in_dtype(x, wide) if is_copy or rounding.is_narrow(x, _REST) else x
    )

  def init(params: optax.Params) -> _AnyState:
    wide, inner_state = narrow_parameters.init(inner, _NAME, widen, params)
    if is_copy:
      return MasterWeightsState(jax.tree.map(_first_copy, wide), inner_state)
    own = leaves.leave_out(leaves.are_gradients(params), params)
    return RemainderState(jax.tree.map(_first_remainder, own), inner_state)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, _AnyState]:
    if not isinstance(state, kind):
      raise TypeError(
        f"`state` must be the {kind.__name__} that init made, as "
        f"store={store!r} has it, got {arguments.kind_of(state)}."
      )
    updates, kept, inner_state, _ = narrow_parameters.update(
      inner,
      _COPY if is_copy else _REMAINDER,
      state[0],
      updates,
      state.inner_state,
      params,
      extra_args,
    )
    return updates, kind(kept, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _wide(
  store: narrow_parameters.Store, kept: optax.Params, params: optax.Params
) -> optax.Params:
  """Returns the masters from what is kept and the parameters."""

  def read(kept: jax.Array, param: jax.Array) -> jax.Array:
    if narrow_parameters.is_absent(kept):
      return param
    if kept.dtype == jnp.int16 and not rounding.is_narrow(param, _REST):
      raise ValueError(
        "`params` must be the 16-bit parameters that belong to the state, got "
        f"one in {param.dtype}."
      )
    return store.read(kept, param)

  return narrow_parameters.over(read, kept, params)


def _first_copy(x: object) -> object:
  if not leaves.is_real(x):
    return optax.MaskedNode()
  # Copy even a float32 parameter, because the master may be donated together
  # with it, or with whatever the inner optimizer keeps of it.
  return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, copy=True)


def _first_remainder(x: object) -> object:
  if not rounding.is_narrow(x, _REST):
    return optax.MaskedNode()
  return jnp.zeros_like(x, jnp.int16)


def _move_copy(
  _: jax.Array, master: jax.Array, param: jax.Array, skipped: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the update that takes a parameter to its next master's rounding."""
  # It depends only on the next master, not on the old master or the update, so
  # XLA can update the master in place.
  # A parameter that was cast in this program must be seen as it is stored.
  wide = bits.rounded(param.astype(master.dtype), param.dtype)
  # Around this wrapper, `loss_scaling` gets the way in float32 and does the
  # rest, so the rest is the same here.
  dtype = leaves.at_least_float32(param.dtype)
  way = bits.within(master - wide, formats.largest(dtype), master, wide)
  way = jnp.where(
    skipped | (master == wide), jnp.asarray(-0.0, master.dtype), way
  )
  way = bits.rounded(way, dtype).astype(dtype)
  return way if dtype == param.dtype else bits.reaching(way, param), master


def _move_by_remainder(
  old: jax.Array, master: jax.Array, param: jax.Array, skipped: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the update to the parameter nearest to a master, and the rest."""
  wide, dtype = rounding.seen(param), param.dtype
  master = bits.within(master, rounding.largest_master(dtype))
  update = bits.update_to(rounding.nearest(master, dtype), wide, dtype)
  update = jnp.where(skipped, -0.0, update)
  # Far away no update may lead there, so take the place where the sum arrives.
  new = rounding.remainder(master, bits.rounded(wide + update, dtype), dtype)
  return update.astype(dtype), jnp.where(skipped, old, new)


_COPY = narrow_parameters.Store(lambda master, _: master, _move_copy)
_REMAINDER = narrow_parameters.Store(
  lambda kept, param: rounding.master(rounding.seen(param), kept, param.dtype),
  _move_by_remainder,
)
