"""Flax Linen: a train state that a skipped step leaves unchanged."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import Self

from flax import core
from flax.linen import fp8_ops
from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._step import by_hand
from optax_lossscale._step import requirements
from optax_lossscale._step import states

__all__ = ["TrainState"]

# The fields that `apply_gradients` itself sets.
_OWN_FIELDS = {"step", "params", "opt_state", "attempts"}


class TrainState(train_state.TrainState):
  """Flax's train state, for an optimizer that holds `loss_scaling`.

  Besides the parameters, training changes batch statistics, a moving average, a
  random key and the like. In this train state, all values change together or
  not at all, bit for bit, and `step` counts the applied steps.

  As in Flax's own train state, a subclass may add fields. Pass these fields to
  `create`, and their new values to `apply_gradients` or `replace_if_applied`.
  The new values of FP8's `_overwrite_with_gradient` collection are stored.

  Attributes:
    step: int32[], the number of applied steps, or of applied micro-batches with
      `optax.MultiSteps` inside `loss_scaling`.
    apply_fn: usually `model.apply`; not part of the pytree.
    params: what the loss is differentiated with respect to.
    tx: the optimizer; not part of the pytree.
    opt_state: the optimizer's state, for `scaled_value_and_grad`.
    attempts: int32[], the number of all steps, applied and skipped.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> class TrainState(ols.linen.TrainState):
    ...   batch_stats: jax.Array
    >>> state = TrainState.create(
    ...   apply_fn=None,
    ...   params=jnp.array([1.0, 2.0]),
    ...   tx=ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(8.0)),
    ...   batch_stats=jnp.zeros(()),
    ... )
    >>> for grads in jnp.array([8.0, 16.0]), jnp.array([8.0, jnp.inf]):
    ...   new_stats = jnp.mean(grads)
    ...   state = state.apply_gradients(grads=grads, batch_stats=new_stats)
    ...   print(state.params, state.batch_stats, state.loss_scale)
    [0.5 1. ] 12.0 8.0
    [0.5 1. ] 12.0 4.0
    >>> print(state.step, state.attempts, state.skipped)
    1 2 True
  """

  attempts: jax.Array

  @classmethod
  def create(
    cls,
    *,
    apply_fn: Callable[..., Any],
    params: Any,
    tx: optax.GradientTransformation | optax.MultiSteps,
    **kwargs: object,
  ) -> Self:
    """Returns the state before the first step.

    All numbers in the state become arrays, so the step compiles only once.

    Args:
      apply_fn: usually `model.apply`.
      params: a pytree; with FP8 layers, a dict of the collections "params", for
        the optimizer, and "_overwrite_with_gradient".
      tx: an optimizer that holds `loss_scaling` once, at any depth.
      **kwargs: the fields that a subclass adds.

    Raises:
      ValueError: if `tx` holds no `loss_scaling` or several, if
        `optax.MultiSteps` is around it, or if `params` has FP8's collection and
        another besides "params", which would not be trained.
      TypeError: if `tx` is not an optimizer, or a field is missing or unknown.
    """
    expected = {"params", fp8_ops.OVERWRITE_WITH_GRADIENT}
    if _has_fp8(params) and set(params) != expected:
      raise ValueError(
        "`params` with FP8 layers must have the collections "
        f"{sorted(expected)}, got {sorted(params)}; batch statistics and other "
        "values that no optimizer trains are fields of a subclass."
      )
    params = leaves.as_arrays(params)
    opt_state = requirements.as_optimizer("tx", tx).init(_optimized(params))
    _check_opt_state(opt_state)
    for name in kwargs.keys() & {*_array_fields(cls)}:
      kwargs[name] = leaves.as_arrays(kwargs[name])
    # Flax's field is for transformations, but takes whatever has an `update`.
    optimizer: Any = tx
    return cls(
      step=jnp.full((), 0, jnp.int32),
      apply_fn=apply_fn,
      params=params,
      tx=optimizer,
      opt_state=opt_state,
      attempts=jnp.full((), 0, jnp.int32),
      **kwargs,
    )

  @property
  def loss_scale(self) -> jax.Array:
    """float32[], S for the next backward pass."""
    return states.get_loss_scale(self.opt_state)

  @property
  def skipped(self) -> jax.Array:
    """bool[], True if the last step was skipped."""
    return states.find_state(self.opt_state).skipped

  def apply_gradients(
    self,
    *,
    grads: Any,
    extra_args: Mapping[str, object] | None = None,
    **kwargs: object,
  ) -> Self:
    """Returns the state after a step, which is applied or skipped.

    Args:
      grads: the scaled gradients of `params` that `scaled_value_and_grad`
        returned for `opt_state`.
      extra_args: keyword arguments for `tx.update`: `overflow`, `amax`, or
        those of the optimizer, such as `value`.
      **kwargs: new values for fields that a subclass adds, pytrees of arrays.
        On a skip these fields keep their old values. Pass values that depend on
        the new parameters to `replace_if_applied` afterwards.

    Returns:
      A state with the structure and the dtypes of this one.

    Raises:
      TypeError: if a keyword does not name a field that a subclass adds, or an
        argument has the wrong type.
      ValueError: if a new value differs from the old one in structure or shape,
        or if only one of `params` and `grads` has FP8's collection.
    """
    _check_fields(self, "apply_gradients", kwargs, _OWN_FIELDS)
    if _has_fp8(grads) != _has_fp8(self.params):
      has_it = "`grads`" if _has_fp8(grads) else "`params`"
      raise ValueError(
        "`grads` must have the collections of `params`, got "
        f"{fp8_ops.OVERWRITE_WITH_GRADIENT} in {has_it} alone; differentiate "
        "with respect to the whole of state.params."
      )
    if not isinstance(extra_args, Mapping | None):
      raise TypeError(
        "`extra_args` must be a dict of arguments of tx.update, got "
        f"{arguments.shown(extra_args)}."
      )
    # Gradients may have another structure, as those of optax's lookahead.
    is_tree = jax.tree.leaves(grads) and not jax.tree_util.all_leaves([grads])
    if not (is_tree or jax.tree_util.all_leaves([self.params])):
      raise TypeError(
        f"`grads` must be like `params`, a {arguments.kind_of(self.params)}, "
        f"got {arguments.kind_of(grads)}; pass what scaled_value_and_grad "
        "returned."
      )
    updates, opt_state = self.tx.update(
      _optimized(grads),
      self.opt_state,
      _optimized(self.params),
      **(extra_args or {}),
    )
    params = leaves.apply_updates(_optimized(self.params), updates)
    if _has_fp8(self.params):
      # The gradients of the other collection are its next values.
      params = core.copy(self.params, {**grads, "params": params})
    attempts = optax.safe_increment(self.attempts)
    attempted: Self = self.replace(opt_state=opt_state, attempts=attempts)
    step = optax.safe_increment(self.step)
    return attempted._select(step=step, params=params, **kwargs)

  def replace_if_applied(self, **kwargs: object) -> Self:
    """Returns the state with new values, or unchanged after a skipped step.

    It is for values that depend on the new parameters, such as an average.

    Args:
      **kwargs: new values for fields that are pytrees of arrays.

    Returns:
      A state with the structure and the dtypes of this one.

    Raises:
      TypeError: if a keyword does not name a field of arrays.
      ValueError: if a new value differs from the old one in structure or shape.
    """
    _check_fields(self, "replace_if_applied", kwargs)
    return self._select(**kwargs)

  def _select(self, **new: object) -> Self:
    old = {name: getattr(self, name) for name in new}
    for name in new:
      rule = f"`{name}` must keep its structure"
      leaves.check_structure(rule, new[name], old[name])
    return self.replace(**by_hand.select_on_skip(self.opt_state, new, old))


def _optimized(tree: Any) -> Any:
  """Returns the part of parameters or gradients that the optimizer gets."""
  # Flax's own train state passes the same part, so its `opt_state` is the same.
  return tree["params"] if _has_fp8(tree) else tree


def _has_fp8(tree: object) -> bool:
  return isinstance(tree, Mapping) and fp8_ops.OVERWRITE_WITH_GRADIENT in tree


def _array_fields(state: Any) -> list[str]:
  """Returns the fields that Flax does not mark as outside the pytree."""
  fields = dataclasses.fields(state)
  return [x.name for x in fields if x.metadata.get("pytree_node", True)]


def _check_fields(
  state: TrainState, method: str, new: Iterable[str], own: Collection[str] = ()
) -> None:
  """Raises if a new value is for a field that `method` cannot set."""
  allowed = [name for name in _array_fields(state) if name not in own]
  for name in new:
    if name not in allowed:
      raise TypeError(
        f"`{method}` of {type(state).__name__} takes new values for "
        f"{', '.join(allowed) or 'no field'}, got `{name}`. A subclass adds "
        "fields; arguments of tx.update go to apply_gradients as "
        f"extra_args={{'{name}': ...}}."
      )


def _check_opt_state(opt_state: object) -> None:
  """Raises if an optimizer's state does not fit a train state."""
  paths = leaves.path_names(states.find_states(opt_state))
  if not paths:
    raise ValueError(
      "`tx` must hold loss_scaling, got an optimizer without; wrap it: "
      "tx = loss_scaling(inner, rule)."
    )
  if len(paths) > 1:
    raise ValueError(
      f"`tx` must hold loss_scaling once, got it at {[*paths.values()]}; put "
      "what it wraps into one: loss_scaling(optax.multi_transform(...), rule)."
    )
  requirements.check_accumulation(opt_state)
