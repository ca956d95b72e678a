"""Gradients of a batch too large for one pass, computed in micro-batches."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math
import operator
from typing import Any
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import backward
from optax_lossscale._step import checks
from optax_lossscale._step import devices
from optax_lossscale._step import findings
from optax_lossscale._step import provenance
from optax_lossscale._step import reasons
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping


def accumulate(
  value_and_grad: backward.ScaledValueAndGrad,
  *,
  microbatches: int,
  drop: bool = False,
  batch_argnums: int | Sequence[int] | None = None,
  check: checks.Check = checks.nonfinite(),
  axis_name: devices.AxisNames | None = None,
) -> Callable[..., tuple[Any, ArrayTree, reasons.WindowOverflow]]:
  """Returns a function that computes scaled gradients in micro-batches.

  Use it for a batch that does not fit in memory. It calls what a
  `scaled_value_and_grad` returned (also with Equinox's `value_and_grad`, or
  that of `nnx`) for each micro-batch, in a single scan, always with the same S.
  Outside jit every operation is dispatched separately, so jit the step. The
  gradients are summed in float32, so the sum does not overflow. Each
  micro-batch is checked separately, because a sum can hide an overflow.

  By default one overflow voids the window: all gradients become inf or NaN,
  `update` skips the step, and S shrinks. With `drop`, micro-batches that
  overflowed are left out of the mean, and the step is applied with the others,
  if there are any. Pass `overflow` to `update`, or S will not move while
  micro-batches are dropped.

  Args:
    value_and_grad: what a `scaled_value_and_grad` returned for a loss that is
      the mean over its batch, or for `(loss, aux)`, where aux holds arrays.
      Every micro-batch has the same weight.
    microbatches: the number of micro-batches, which must divide the batch size.
    drop: whether an overflow drops only its micro-batch, not the whole window.
    batch_argnums: which positional arguments to split along the first axis of
      their leaves; None for all but those that are differentiated and, with
      `nnx`, those that hold variables. All other arguments, and keyword
      arguments, reach every micro-batch unchanged.
    check: what counts as an overflow. Pass the same check to `loss_scaling`,
      which sees only the accumulated gradients.
    axis_name: a mapped axis, or several, along which devices agree on whether a
      micro-batch overflowed. Required if `shard_map` shards the parameters.

  Returns:
    A function with the arguments of `value_and_grad` that returns `(loss,
    scaled_grads, overflow)`, or `((loss, aux), scaled_grads, overflow)`.

    - loss: float32[] or wider, the mean over all micro-batches; with `drop`,
      over those that did not overflow, if there are any.
    - aux: the aux of every micro-batch, stacked along a new first axis.
    - scaled_grads: float32 or wider. A leaf of Flax's
      `_overwrite_with_gradient` is passed from one micro-batch to the next, and
      its last value is returned. An overflow does not change it, and a value
      that is finite no longer is an overflow.
    - overflow: a `WindowOverflow` for `update`.

    Micro-batch i holds the examples i, i + microbatches, ..., so a batch that
    is sharded over devices stays in place. The variables of NNX objects (batch
    statistics, counts of random keys) pass from one micro-batch to the next,
    without the changes of one that overflowed. Other changes are lost.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: when called, as for `scaled_value_and_grad`; if `axis_name` is
      not a mapped axis, if the batch cannot be split, or, where JAX tracks what
      varies by device, if devices could drop different micro-batches.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(8.0))
    >>> params = jnp.float32(1.0)
    >>> opt_state = tx.init(params)
    >>> loss_fn = lambda params, batch: jnp.mean(params * batch)
    >>> value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
    >>> batch = jnp.array([1.0, 2.0, 3.0, jnp.inf])
    >>> loss, scaled_grads, overflow = ols.accumulate(
    ...   value_and_grad, microbatches=2, drop=True
    ... )(params, batch)
    >>> print(loss, scaled_grads, overflow.flags, overflow.valid)
    2.0 16.0 [False  True] 1
    >>> updates, opt_state = tx.update(
    ...   scaled_grads, opt_state, params, overflow=overflow
    ... )
    >>> print(updates, ols.get_loss_scale(opt_state))
    -1.0 4.0
  """
  if not isinstance(value_and_grad, backward.ScaledValueAndGrad):
    raise TypeError(
      "`value_and_grad` must be what a scaled_value_and_grad returns, got "
      f"{arguments.kind_of(value_and_grad)}; write "
      "accumulate(scaled_value_and_grad(loss_fn, opt_state), microbatches=4)"
      "(params, batch); for Equinox that takes value_and_grad="
      "eqx.filter_value_and_grad, and for Flax NNX there is "
      "nnx.scaled_value_and_grad(loss_fn, optimizer)."
    )
  given_argnums = getattr(value_and_grad.value_and_grad, "keywords", {})
  if "argnums" in given_argnums:
    raise ValueError(
      "`argnums` must go to scaled_value_and_grad, got "
      f"{given_argnums['argnums']} in the function that differentiates; write "
      "scaled_value_and_grad(loss_fn, opt_state, argnums=...)."
    )
  k = arguments.check_count("microbatches", microbatches, unit="micro-batches")
  drop = arguments.check_flag("drop", drop)
  requirements.check_check(check)
  names = devices.axis_names("axis_name", axis_name)
  has_aux = value_and_grad.has_aux

  @functools.wraps(value_and_grad, updated=())
  def accumulated(
    *args: object, **kwargs: object
  ) -> tuple[Any, ArrayTree, reasons.WindowOverflow]:
    devices.check_mapped("axis_name", names)
    bound = backward.Bound(*value_and_grad.bind(args, batch_argnums))
    loss_scale, places, like = bound.loss_scale, bound.places, bound.like
    split = _split({i: args[i] for i in places.batched}, k)

    def call(
      variables: object,
      overwritten: dict[int, object],
      batches: dict[int, object],
    ) -> tuple[Any, ArrayTree, object]:
      current = dict(enumerate(args)) | overwritten | batches
      result: tuple[Any, Any, Any] = bound.pure(
        variables, *current.values(), **kwargs
      )
      return result

    # Shaped like the gradients in `update`, to match a check's tree of dtypes.
    if like is None:
      _, like, _ = jax.eval_shape(
        lambda *x: call(x[0], {}, jax.tree.map(operator.itemgetter(0), x[1])),
        bound.variables,
        split,
      )
    is_kept = leaves.are_gradients(like)
    is_overwritten = jax.tree.map(operator.not_, is_kept)
    is_summed = jax.tree.map(
      lambda is_kept, x: is_kept and leaves.is_gradient(x), is_kept, like
    )
    passes_on = any(jax.tree.leaves(is_overwritten))

    def take_next(
      carry: _Carry, batches: dict[int, object]
    ) -> tuple[_Carry, _Outcome]:
      overwritten: dict[int, object] = {}
      if passes_on:
        changed = leaves.merge(is_overwritten, carry.overwritten, bound.given)
        changed = arguments.argnums_as_tuple(changed)
        overwritten = dict(zip(places.differentiated, changed, strict=True))
      value, scaled_grads, variables = call(
        carry.variables, overwritten, batches
      )
      summands = leaves.leave_out(is_summed, scaled_grads)
      next_values = leaves.leave_out(is_overwritten, scaled_grads)
      lost = _newly_lost(carry.overwritten, next_values) if passes_on else []
      # Not in order, or all gradients would wait for the one that comes last.
      finding = findings.examine(
        check, summands, lost, loss_scale=loss_scale, in_order=False
      )
      if names:
        finding = findings.agree(finding, names)
      together = jax.tree.leaves(summands)
      if drop:
        together.append(value[0] if has_aux else value)
      devices.refuse_split(finding.overflow, together, names)
      kept = skipping.select(
        finding.overflow,
        (carry.variables, carry.overwritten),
        (variables, next_values),
      )
      sums = _add(carry.sums, summands, finding.overflow if drop else None, k)
      outcome = _Outcome(value, finding.overflow, finding.amax)
      return _Carry(*kept, sums), outcome

    start = _Carry(
      bound.variables,
      leaves.leave_out(is_overwritten, bound.given if passes_on else like),
      jax.tree.map(
        lambda x: jnp.zeros_like(x, leaves.at_least_float32(x.dtype)),
        leaves.leave_out(is_summed, like),
      ),
    )
    end, outcomes = _scan(take_next, start, split, k)
    losses, aux = outcomes.value if has_aux else (outcomes.value, None)
    overflow = reasons.WindowOverflow(outcomes.overflow, outcomes.amax, drop)
    bound.store(
      skipping.select(overflow.is_void, bound.variables, end.variables)
    )
    valid = ~overflow.flags
    counted = valid | ~jnp.any(valid) if drop else jnp.full_like(valid, True)
    means = _means(end.sums, counted, overflow)
    if drop:
      means = promises.noted("dropped", means)
    # JAX returns float0 for a leaf that has no gradient.
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), like)
    others = leaves.merge(is_overwritten, end.overwritten, none)
    scaled_grads = leaves.merge(is_summed, means, others)
    kind = "dropping" if drop else "scaled"
    provenance.note(means, kind, loss_scale, value_and_grad.opt_state)
    loss = _mean_loss(losses, counted)
    return (loss, aux) if has_aux else loss, scaled_grads, overflow

  return accumulated


class _Carry(NamedTuple):
  """The scan's carry. Leaves that a field does not hold are masked nodes."""

  variables: object  # The latest values of the variables of objects.
  overwritten: ArrayTree  # The latest values of leaves that are not gradients.
  sums: ArrayTree  # Sums of the gradients.


class _Outcome(NamedTuple):
  """The value of `fun` and the check's findings for one micro-batch."""

  value: Any
  overflow: jax.Array
  amax: jax.Array


def _scan(
  take_next: Callable[[_Carry, dict[int, object]], tuple[_Carry, _Outcome]],
  carry: _Carry,
  batches: dict[int, object],
  microbatches: int,
) -> tuple[_Carry, _Outcome]:
  """Works like `lax.scan`, but runs a Python loop outside jit."""
  if interpreter.is_staged():
    end: tuple[_Carry, _Outcome] = lax.scan(
      take_next, carry, batches, microbatches
    )
    return end
  outcomes = []
  for i in range(microbatches):
    batch = jax.tree.map(operator.itemgetter(i), batches)
    carry, outcome = take_next(carry, batch)
    outcomes.append(outcome)
  return carry, jax.tree.map(lambda *x: jnp.stack(x), *outcomes)


def _newly_lost(old: ArrayTree, new: ArrayTree) -> list[jax.Array]:
  """Returns flags for next values that are not finite, though the old were."""
  # An FP8 layer clips its gradients, so only its history shows an inf.
  return [
    jnp.all(jnp.isfinite(x)) & ~jnp.all(jnp.isfinite(y))
    for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True)
    if leaves.is_gradient(x)
  ]


def _split(batches: dict[int, object], microbatches: int) -> dict[int, object]:
  """Splits arguments into micro-batches, along a new first axis."""
  sizes: dict[int, str] = {}

  def split_leaf(path: tuple[Any, ...], x: Any) -> jax.Array:
    place = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
    shape, dtype = np.shape(x), getattr(x, "dtype", np.dtype(type(x)))
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # A key of jax.random.PRNGKey is no scalar, nor are several a vector.
    is_key = is_typed or (dtype == np.uint32 and shape[-1:] in ((2,), (4,)))
    remedy = (
      "of a random key pass jax.random.split(jax.random.key(0), microbatches)"
      if is_key
      else "name the arguments to split in `batch_argnums`"
    )
    if not shape:
      raise ValueError(
        "the batch must have a first axis to split along, got a scalar as "
        f"{place}; {remedy}."
      )
    # There may be one random key per example, or one per micro-batch.
    if not is_typed:
      sizes.setdefault(shape[0], place)
    if len(sizes) > 1:
      raise ValueError(
        "the batch must have a first axis of one size, got "
        + " and ".join(f"{size} in {place}" for size, place in sizes.items())
        + f"; {remedy}."
      )
    x = jnp.asarray(x)  # `lax.scan` converts it too.
    devices = _devices(x)
    if shape[0] % (microbatches * devices):
      whole = "each device's share of the batch" if devices > 1 else "the batch"
      on = f" on {devices} devices" if devices > 1 else ""
      raise ValueError(
        f"`microbatches` must divide {whole}, got {microbatches} for "
        f"{shape[0]} examples{on} in {place}."
      )
    # Reshape with the batch axis first, so that it can stay sharded.
    x = x.reshape(shape[0] // microbatches, microbatches, *shape[1:])
    return x.swapaxes(0, 1)

  split: dict[int, object] = jax.tree.map_with_path(split_leaf, batches)
  return split


def _add(
  sums: ArrayTree,
  scaled_grads: ArrayTree,
  is_left_out: jax.Array | None,
  microbatches: int,
) -> ArrayTree:
  """Returns the sums with a micro-batch's gradients added."""

  def add_leaf(total: jax.Array, x: jax.Array) -> jax.Array:
    # Widen before dividing, since float16 might not hold the quotient. Divide
    # before adding, so that the sum of finite gradients is finite.
    summand = x.astype(total.dtype) / microbatches
    if is_left_out is None:
      return total + summand
    # Select rather than multiply, since 0 * inf is NaN.
    return total + jnp.where(is_left_out, jnp.zeros_like(total), summand)

  return jax.tree.map(add_leaf, sums, scaled_grads)


# Compiled even outside jit, or jax_debug_infs would find an inf that is unused.
@functools.partial(jax.jit, inline=True)
def _means(
  sums: ArrayTree, counted: jax.Array, overflow: reasons.WindowOverflow
) -> ArrayTree:
  """Returns the mean gradients, all inf or NaN if the window is void."""
  count = jnp.sum(counted)
  # Fill with NaN if a gradient was NaN, as in a single large batch.
  fill = jnp.where(jnp.any(jnp.isnan(overflow.amax)), jnp.nan, jnp.inf)

  def mean_leaf(total: jax.Array) -> jax.Array:
    real = jnp.finfo(total.dtype).dtype
    grow = len(counted) / count.astype(real)
    mean = leaves.without_inf(total * grow.astype(total.dtype))
    return jnp.where(overflow.is_void, fill.astype(mean.dtype), mean)

  return jax.tree.map(mean_leaf, sums)


def _mean_loss(losses: jax.Array, counted: jax.Array) -> jax.Array:
  """Returns the mean of the losses that count, in float32 or wider."""
  losses = losses.astype(leaves.at_least_float32(losses.dtype))
  total = jnp.sum(jnp.where(counted, losses, jnp.zeros_like(losses)))
  return total / jnp.sum(counted).astype(losses.dtype)


def _devices(x: jax.Array) -> int:
  """Returns how many devices of an explicit mesh share the examples."""
  sharding = jax.typeof(x).sharding
  axes = sharding.spec[0] or ()
  names = axes if isinstance(axes, tuple) else (axes,)
  return math.prod(sharding.mesh.shape[name] for name in names)
