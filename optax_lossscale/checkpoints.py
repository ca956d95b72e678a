"""Optimizer states of checkpoints: with, without, and from an older version."""

import functools
from typing import Any
from typing import TypeGuard

from chex import ArrayTree
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import states

__all__ = ["from_dicts", "with_loss_scaling", "without_loss_scaling"]

_NOTHING = object()
# A later version may add fields to these, which older checkpoints lack.
_GROWING = (states.LastStep, states.StepCounts)


def from_dicts(restored: object, target: Tree) -> Tree:
  """Returns the dicts and lists of a checkpoint in the structure of a target.

  In a later version of this library the state may have a new field. Restore an
  earlier checkpoint without a target, as dicts and lists, and pass it here: the
  new fields have the values of `target`.

  Args:
    restored: what Orbax restores without a target, or
      `flax.serialization.msgpack_restore` or `to_state_dict` returns: dicts by
      the names of fields, and lists or dicts from "0" on for tuples.
    target: the same pytree as the program makes it, such as
      `{"params": params, "opt_state": tx.init(params)}`.

  Returns:
    A pytree like `target` with the arrays of `restored`.

  Raises:
    ValueError: if `restored` lacks anything but new fields of this library, if
      it has something that `target` has not, or if shapes or dtypes differ. The
      error names the first difference.

  Examples:
    >>> from flax import serialization
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.trace(0.5), ols.FixedLossScale(8.0))
    >>> opt_state = tx.init(jnp.zeros(1))
    >>> _, later = tx.update(jnp.ones(1), opt_state)
    >>> saved = serialization.to_state_dict(later)
    >>> del saved["last_step"]["range_used"]
    >>> opt_state = ols.checkpoints.from_dicts(saved, opt_state)
    >>> print(opt_state.applied_steps, opt_state.amax, opt_state.range_used)
    1 1.0 0.0
  """
  return _fill(target, restored, (), by_name=True)


def without_loss_scaling(opt_state: optax.OptState) -> Any:
  """Returns the state of the same optimizer without loss scaling.

  It undoes `with_loss_scaling`, whose example shows both. The optimizer keeps
  its moments and counts. A checkpoint from before loss scaling was added can be
  restored into the result, unless parameters are narrower than float32, or some
  bypass the wrapper: then restore into jax.eval_shape(inner.init, params).

  Args:
    opt_state: the state of an optimizer that holds `loss_scaling`, or any
      pytree around it, of arrays or of `jax.ShapeDtypeStruct`.

  Returns:
    The same pytree with each `LossScalingState` replaced by its inner state.
    The arrays are not copied.

  Raises:
    ValueError: if there is no `LossScalingState`.
  """
  states.require_states(opt_state)
  return states.replace_states(lambda _, x: x.inner_state, opt_state)


def with_loss_scaling(bare_state: object, opt_state: Tree) -> Tree:
  """Wraps an optimizer state that was made before loss scaling was added.

  Training continues from an old checkpoint with its moments and counts. It
  checks structure, shapes and dtypes, since Orbax and others silently restore
  arrays of the wrong shape.

  Args:
    bare_state: the state of the optimizer without loss scaling, or any pytree
      around it, with the structure that the optimizer gave it.
    opt_state: the same pytree with loss scaling in it: what `tx.init(params)`
      returns, or a state whose S should be kept.

  Returns:
    `opt_state` with all values of `bare_state`. Only the loss scale, the last
    step's flags and the wrapper's counts are those of `opt_state`. A bare state
    that is narrower than float32, as with float16 parameters, is widened. State
    for Flax's `_overwrite_with_gradient` collection is left out.

  Raises:
    ValueError: if `opt_state` holds no `LossScalingState`, if `bare_state`
      holds one, or if the two differ in structure, shapes or dtypes. The error
      names the first difference.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> inner = optax.trace(0.5)
    >>> _, bare_state = inner.update(jnp.array([1.0]), inner.init(jnp.zeros(1)))
    >>> tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0))
    >>> opt_state = tx.init(jnp.zeros(1))
    >>> opt_state = ols.checkpoints.with_loss_scaling(bare_state, opt_state)
    >>> print(opt_state.inner_state.trace, ols.get_loss_scale(opt_state))
    [1.] 8.0
  """
  states.require_states(opt_state)
  present = states.find_states(bare_state)
  if present:
    raise ValueError(
      "`bare_state` must be a state without loss scaling, got one with it at "
      f"{_name(next(iter(present)))}; it needs nothing added, and "
      "without_loss_scaling(bare_state) takes it out."
    )
  return _fill(opt_state, bare_state, ())


# With `by_name`, containers may have other types, and `got` may lack new fields
# of loss scaling. Otherwise `got` lacks loss scaling itself.
def _fill(
  expected: object,
  got: object,
  path: leaves.Path,
  *,
  by_name: bool = False,
  is_inner: bool = False,
) -> Any:
  """Returns `expected` with the values of `got`, which must fit."""
  if states.is_state(expected) and not by_name:
    inner_state = _fill(expected.inner_state, got, path, is_inner=True)
    return expected._replace(inner_state=inner_state)
  if (
    is_inner
    and isinstance(expected, optax.MaskedNode)
    and leaves.overwrites(path)
  ):
    # This leaf now bypasses the optimizer, which keeps no state for it.
    return expected
  if _is_leaf(expected):
    filled = _fill_leaf(expected, got, is_inner)
    if filled is _NOTHING:
      raise _mismatch(expected, got, path, by_name)
    return filled
  if _is_leaf(got) or not (by_name or type(expected) is type(got)):
    raise _mismatch(expected, got, path, by_name)
  # Static fields of a node, such as the `tx` of a TrainState, are not part of a
  # checkpoint: `expected` keeps its own.
  structure, children = _open(expected)
  _, found = _open(got)
  for key in {**children, **found}:
    child, value = children.get(key, _NOTHING), found.get(key, _NOTHING)
    is_growing = isinstance(expected, _GROWING)
    if not _may_pair(child, value, by_name, is_growing):
      raise _mismatch(child, value, (*path, key), by_name)
  fill = functools.partial(_fill, by_name=by_name, is_inner=is_inner)
  return jax.tree.unflatten(
    structure,
    [
      fill(child, found[key], (*path, key)) if key in found else child
      for key, child in children.items()
    ],
  )


def _may_pair(
  child: object, value: object, by_name: bool, is_growing: bool
) -> bool:
  """Returns whether a child and its value are there, or one may be absent."""
  if child is not _NOTHING and value is not _NOTHING:
    return True
  is_new = is_growing and value is _NOTHING
  is_empty = not (jax.tree.leaves(child) and jax.tree.leaves(value))
  return by_name and (is_new or is_empty)


def _fill_leaf(expected: object, got: object, is_inner: bool) -> object:
  """Returns `got` in the form of a leaf; `_NOTHING` if it does not fit."""
  # Reads the dtypes before converting `got`: JAX may narrow a NumPy array.
  is_same = _dtype(expected) == _dtype(got)
  # The wrapper runs the optimizer in float32, so its state is widened too.
  is_widened = (
    is_inner
    and _is_array(got)
    and leaves.is_real(got)
    and leaves.at_least_float32(got.dtype) == _dtype(expected)
  )
  is_shaped = _is_leaf(got) and np.shape(expected) == np.shape(got)
  if not (is_shaped and (is_same or is_widened)):
    return _NOTHING
  if isinstance(expected, (jax.Array, jax.ShapeDtypeStruct)):
    got = leaves.as_arrays(got)
  return got if is_same else leaves.widen(got)


def _open(
  node: object,
) -> tuple[jax.tree_util.PyTreeDef, dict[jax.tree_util.DictKey, object]]:
  """Returns the structure of one node, and its children by their names."""
  children, structure = jax.tree_util.tree_flatten_with_path(
    node, is_leaf=lambda x: x is not node
  )
  return structure, {
    jax.tree_util.DictKey(leaves.path_name(path)): child
    for path, child in children
  }


def _is_leaf(x: object) -> bool:
  return jax.tree_util.all_leaves([x])


def _dtype(x: object) -> np.dtype | None:
  """Returns the dtype of an array or a number, and None for anything else."""
  if isinstance(x, (bool, int, float, complex)):
    return jnp.result_type(x)
  return x.dtype if _is_array(x) else None


def _is_array(x: object) -> TypeGuard[jax.Array]:
  # Other objects may have a dtype and a shape, such as datasets in a file.
  kinds = jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct
  return isinstance(x, kinds)


def _mismatch(
  expected: object, got: object, path: leaves.Path, by_name: bool
) -> ValueError:
  """Returns the error for the first place where two trees differ."""
  rule = (
    "`bare_state` must be the state of the optimizer that `opt_state` wraps"
  )
  owner, remedy = "it", ""
  if by_name:
    rule = (
      "`restored` must have the structure of `target`, apart from new fields "
      "of loss scaling"
    )
    owner = "`target`"
    remedy = "; pass a target for the same model, optimizer and rule"
  elif isinstance(got, (dict, list)) and not isinstance(expected, type(got)):
    remedy = (
      "; a checkpoint must be restored into the structure of the optimizer's "
      "state: jax.eval_shape(inner.init, params)"
    )
  elif leaves.is_real(expected) and _is_array(got) and leaves.is_real(got):
    remedy = "; only floats are widened, to float32 inside of loss scaling"
  return ValueError(
    f"{rule}, got {_describe(got)} at {_name(path)} where "
    f"{owner} has {_describe(expected)}{remedy}."
  )


def _name(path: leaves.Path) -> str:
  return repr(leaves.path_name(path)) if path else "its top"


def _describe(node: object) -> str:
  """Describes a node of a pytree, without its contents."""
  if node is _NOTHING:
    return "nothing"
  if node is None:
    return "None"
  if _is_leaf(node):
    if (dtype := _dtype(node)) is None:
      return arguments.shown(node)
    return f"{dtype.name}[{', '.join(map(str, np.shape(node)))}]"
  names = [key.key for key in _open(node)[1]]
  return f"{type(node).__name__}({leaves.listed(names)})"
