"""One gradient out of several backward passes, over micro-batches."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arguments
from optax_lossscale import _checks
from optax_lossscale import _devices
from optax_lossscale import _gradients
from optax_lossscale import _leaves
from optax_lossscale import _microbatches
from optax_lossscale import _requirements
from optax_lossscale import _select
from optax_lossscale import _state


def accumulated_value_and_grad(
  fun: Callable[..., Any],
  opt_state: Any,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  microbatches: int,
  drop: bool = False,
  batch_argnums: int | Sequence[int] | None = None,
  check: _checks.Check = _checks.nonfinite(),  # noqa: B008 - it is frozen.
  axis_name: Any = None,
  allow_int: bool = False,
  path: str | None = None,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
  """Returns a function for the loss and its scaled gradients, batch by batch.

  For a batch that does not fit the memory: it is `scaled_value_and_grad` of the
  mean of `fun` over micro-batches, which are computed one after the other, in
  one scan. S is the same in all of them. The gradients are summed up in
  float32, so that their sum overflows nowhere, and each micro-batch is looked
  at for itself: in the sum an overflow might not show, and one step later it
  would still be there.

  What one overflow costs is your choice. As it is, the window is void: all
  gradients are then inf, `update` skips the step, and S shrinks. With `drop`,
  the micro-batches that overflowed are left out of the mean, and the rest
  makes a step, if there is any; tell `update`, so that S shrinks all the same:

    loss, grads, overflow = value_and_grad(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, dropped=overflow)

  Args:
    fun: a function that returns a real scalar, the mean over its batch, or
      `(loss, aux)` with `has_aux`. Each micro-batch counts the same.
    opt_state: the state of an optimizer that holds `loss_scaling`, or a scale.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: whether `fun` returns a pair of the loss and auxiliary data.
    microbatches: how many there are. It divides the batch.
    drop: whether a micro-batch that overflows is left out; else all are void.
    batch_argnums: which positional arguments are split along the first axis of
      their leaves; None for all but those of `argnums`. The other arguments,
      and those passed by name, are given to each micro-batch as they are.
    check: what counts as an overflow: the check of `loss_scaling`, since that
      sees only what comes out here.
    axis_name: a mapped axis, or several, over which the devices decide together
      about each micro-batch. It is for gradients of which JAX sums some over
      the devices and leaves others with each: parameters that are sharded
      under `shard_map`.
    allow_int: whether to allow differentiation with respect to integers.
    path: which scale, if `opt_state` holds several. See `get_loss_scale`.

  Returns:
    A function with the arguments of `fun` that returns `(loss,
    scaled_gradients, overflow)`, or `((loss, aux), ...)`.
    loss: float32[] or wider, the mean over the micro-batches that count, or
      over all if none does.
    aux: with a leading axis for the micro-batches.
    scaled_gradients: float32 or wider. Leaves of Flax's
      `_overwrite_with_gradient` collection are no gradients: they pass from one
      micro-batch to the next, and the last one's is returned.
    overflow: bool[microbatches], which of them overflowed; `~overflow` are
      valid. `update` takes it, as `overflow=` (not needed, since the gradients
      show it) or with `drop` as `dropped=`.

    Micro-batch i has the examples i, i + microbatches, ..., so that a batch
    that is sharded over devices stays where it is.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if `opt_state` holds no scale or several; when called, if the
      batch has no first axis, or axes of different sizes, or is not divided by
      `microbatches`, or if a function being traced has closed over `opt_state`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(8.0))
    >>> params = jnp.float32(1.0)
    >>> opt_state = tx.init(params)
    >>> loss_fn = lambda params, batch: jnp.mean(params * batch)
    >>> value_and_grad = ols.accumulated_value_and_grad(
    ...   loss_fn, opt_state, microbatches=2, drop=True
    ... )
    >>> batch = jnp.array([1.0, 2.0, 3.0, jnp.inf])
    >>> loss, grads, overflow = value_and_grad(params, batch)
    >>> print(loss, grads, overflow)
    2.0 16.0 [False  True]
    >>> updates, opt_state = tx.update(
    ...   grads, opt_state, params, dropped=overflow
    ... )
    >>> print(updates, ols.get_loss_scale(opt_state))
    -1.0 4.0
  """
  k = _arguments.check_count("microbatches", microbatches)
  drop = _arguments.check_flag("drop", drop)
  _requirements.check_check(check)
  names = _devices.axis_names("axis_name", axis_name)
  # A scale on its own, since the scan is a function being traced.
  loss_scale = _state.get_loss_scale(opt_state, path=path)
  value_and_grad = _gradients.scaled_value_and_grad(
    fun, loss_scale, _as_tuple(argnums), has_aux, allow_int=allow_int
  )

  @functools.wraps(fun)
  def accumulated(*args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
    _state.refuse_frozen(opt_state, path)
    places = _find_places(argnums, batch_argnums, len(args))
    given = _leaves.as_arrays(tuple(args[i] for i in places.differentiated))
    is_overwritten, is_summed = _kinds(given)

    def add(carry: _Carry, batches: dict[int, Any]) -> tuple[_Carry, _Outcome]:
      current = dict(enumerate(args)) | batches
      changed = _leaves.merge(is_overwritten, carry.overwritten, given)
      current |= zip(places.differentiated, changed, strict=True)
      value, gradients = value_and_grad(*current.values(), **kwargs)

      summands = _leaves.leave_out(is_summed, gradients)
      # In the form that `update` is given, for a tree of dtypes in the check.
      finding = _checks.examine(check, _like(argnums, summands))
      if names:
        finding = _checks.agree(finding, names)
      overflow = finding.overflow
      overwritten = _leaves.leave_out(is_overwritten, gradients)
      return (
        _Carry(
          _select.select(overflow, carry.overwritten, overwritten),
          _microbatches.add(carry.sums, summands, overflow & drop, k),
        ),
        _Outcome(value, overflow, finding.amax),
      )

    end, outcomes = lax.scan(
      add,
      _Carry(
        _leaves.leave_out(is_overwritten, given),
        _microbatches.zeros(_leaves.leave_out(is_summed, given)),
      ),
      _microbatches.split({i: args[i] for i in places.batched}, k),
      length=k,
    )
    losses, aux = outcomes.value if has_aux else (outcomes.value, None)
    valid = ~outcomes.overflow
    counted = valid | ~jnp.any(valid) if drop else jnp.full_like(valid, True)
    is_void = ~(jnp.any(valid) if drop else jnp.all(valid))
    means = _microbatches.void(
      _microbatches.means(end.sums, counted), is_void, outcomes.amax
    )
    others = _leaves.merge(is_overwritten, end.overwritten, _float0(given))
    gradients = _leaves.merge(is_summed, means, others)
    loss = _microbatches.mean_loss(losses, counted)
    return (
      (loss, aux) if has_aux else loss,
      _like(argnums, gradients),
      outcomes.overflow,
    )

  return accumulated


class _Places(NamedTuple):
  """Which positional arguments are differentiated, and which are split."""

  differentiated: tuple[int, ...]
  batched: tuple[int, ...]


class _Carry(NamedTuple):
  """What passes from one micro-batch to the next.

  Attributes:
    overwritten: the leaves that are no gradients, masked nodes elsewhere.
    sums: of the gradients, masked nodes elsewhere.
  """

  overwritten: Any
  sums: Any


class _Outcome(NamedTuple):
  """What one micro-batch comes to: the value of `fun`, and the check's."""

  value: Any
  overflow: jax.Array
  amax: jax.Array


def _find_places(argnums: Any, batch_argnums: Any, count: int) -> _Places:
  """Returns the places of arguments among so many."""
  differentiated = _positions("argnums", argnums, count)
  if batch_argnums is None:
    batched = tuple(i for i in range(count) if i not in differentiated)
  else:
    batched = _positions("batch_argnums", batch_argnums, count)
  both = sorted({*differentiated} & {*batched})
  if both:
    raise ValueError(
      "`batch_argnums` must name other arguments than `argnums`, got "
      f"{', '.join(map(str, both))} in both."
    )
  if not batched:
    raise ValueError(
      "`fun` must be given a batch beside what it is differentiated by, got "
      f"{count} positional arguments with argnums={argnums!r}; pass the batch "
      "by position."
    )
  return _Places(differentiated, batched)


def _positions(name: str, argnums: Any, count: int) -> tuple[int, ...]:
  """Returns the places that a caller named, none of them negative."""
  numbers = tuple(
    _arguments.check_integer(name, number) for number in _as_tuple(argnums)
  )
  for number in numbers:
    if not -count <= number < count:
      raise ValueError(
        f"`{name}` must name positional arguments of the call, got {number} "
        f"for {count} of them."
      )
  return tuple(number % count for number in numbers)


def _as_tuple(argnums: Any) -> tuple[Any, ...]:
  return tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)


def _like(argnums: Any, gradients: tuple[Any, ...]) -> Any:
  """Returns gradients by argument in the form that JAX gives for `argnums`."""
  return gradients if isinstance(argnums, (tuple, list)) else gradients[0]


def _kinds(given: Any) -> tuple[Any, Any]:
  """Returns two trees of bools: what has a next value, what a gradient."""
  is_kept = _leaves.resolve_mask(None, given)
  return (
    jax.tree.map(lambda is_kept: not is_kept, is_kept),
    jax.tree.map(
      lambda is_kept, x: is_kept and _leaves.is_gradient(x), is_kept, given
    ),
  )


def _float0(given: Any) -> Any:
  """Returns what JAX gives for a gradient where there is none."""
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), given)
