"""Optimizer states of checkpoints: with, without, and from an older version."""

from collections.abc import Hashable
from collections.abc import Mapping
from typing import Any

from chex import ArrayTree
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import trees
from optax_lossscale._step import states

__all__ = ["from_dicts", "with_loss_scaling", "without_loss_scaling"]

_NOTHING = object()
# A later version may add fields to these, which older checkpoints lack.
_GROWING = (states.LastStep, states.StepCounts)


def from_dicts(restored: object, target: trees.Tree) -> trees.Tree:
  """Returns the dicts and lists of a checkpoint in the structure of a target.

  In a later version of this library the state may have a new field, and a
  checkpoint of the earlier version cannot be restored into it. Restore it
  without a target, as dicts and lists, and pass it here: the new fields have
  the values of `target`.

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
  return _into(target, restored, ())


def _into(target: object, got: object, path: tuple[Hashable, ...]) -> Any:
  if jax.tree_util.all_leaves([target]):
    is_like = jax.tree_util.all_leaves([got]) and np.shape(target) == np.shape(
      got
    )
    if not is_like or _dtype(target) != _dtype(got):
      raise _unlike_target(_describe(target), _describe(got), path)
    return jnp.asarray(got) if isinstance(target, jax.Array) else got
  structure, children = _open(target)
  if jax.tree_util.all_leaves([got]) and jax.tree.leaves(target):
    raise _unlike_target(_describe(target), _describe(got), path)
  found = _by_name(got)
  values = []
  for key, child in children.items():
    name = leaves.path_name((key,))
    if name in found:
      values.append(_into(child, found.pop(name), (*path, key)))
    elif isinstance(target, _GROWING) or not jax.tree.leaves(child):
      values.append(child)
    else:
      raise _unlike_target(_describe(child), "nothing", (*path, key))
  if unknown := [name for name in found if jax.tree.leaves(found[name])]:
    raise _unlike_target("nothing", trees.listed(unknown), path)
  return jax.tree.unflatten(structure, values)


def _by_name(got: object) -> dict[str, object]:
  """Returns the children of a node by the names of their keys."""
  if jax.tree_util.all_leaves([got]):
    return {}
  return {
    leaves.path_name((key,)): child for key, child in _open(got)[1].items()
  }


def _unlike_target(
  expected: str, got: str, path: tuple[Hashable, ...]
) -> ValueError:
  return ValueError(
    "`restored` must have the structure of `target`, apart from new fields of "
    f"loss scaling, got {got} at {_name(leaves.path_name(path))} where "
    f"`target` has {expected}; pass a target for the same model, optimizer and "
    "rule."
  )


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
  return jax.tree.map(
    lambda x: x.inner_state if states.is_state(x) else x,
    opt_state,
    is_leaf=states.is_state,
  )


def with_loss_scaling(bare_state: object, opt_state: trees.Tree) -> trees.Tree:
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
    that is narrower than the wrapper's float32, as with float16 parameters, is
    widened, which is exact. State for Flax's `_overwrite_with_gradient`
    collection is left out, since that collection bypasses the wrapped
    optimizer.

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
    >>> ols.checkpoints.without_loss_scaling(opt_state)
    TraceState(trace=Array([1.], dtype=float32))
  """
  states.require_states(opt_state)
  present = states.find_states(bare_state)
  if present:
    raise ValueError(
      "`bare_state` must be a state without loss scaling, got one with it at "
      f"{_name(next(iter(present)))}; it needs nothing added, and "
      "without_loss_scaling(bare_state) takes it out."
    )
  return _fill(opt_state, bare_state, (), is_inner=False)


def _fill(
  expected: object, got: object, path: tuple[Hashable, ...], is_inner: bool
) -> Any:
  """Returns `expected` with the values of `got`, or raises."""
  if states.is_state(expected):
    inner_state = _fill(expected.inner_state, got, path, is_inner=True)
    return expected._replace(inner_state=inner_state)
  if jax.tree_util.all_leaves([expected]):
    return _fill_leaf(expected, got, path, is_inner)
  if (
    is_inner
    and isinstance(expected, optax.MaskedNode)
    and leaves.overwrites(path)
  ):
    # This leaf now bypasses the optimizer, which keeps no state for it.
    return expected
  if type(expected) is not type(got):
    raise _mismatch(expected, got, path)
  # Static fields of a node, such as the `tx` of a TrainState, are not part of a
  # checkpoint: `expected` keeps its own.
  structure, children = _open(expected)
  _, got_children = _open(got)
  for key in {**children, **got_children}:
    if key not in children or key not in got_children:
      raise _mismatch(
        children.get(key, _NOTHING),
        got_children.get(key, _NOTHING),
        (*path, key),
      )
  return jax.tree.unflatten(
    structure,
    [
      _fill(child, got_children[key], (*path, key), is_inner)
      for key, child in children.items()
    ],
  )


def _fill_leaf(
  expected: object, got: object, path: tuple[Hashable, ...], is_inner: bool
) -> object:
  if not jax.tree_util.all_leaves([got]):
    raise _mismatch(expected, got, path)
  if not _is_array(expected) and not _is_array(got):
    return got
  if not _is_array(got) or np.shape(expected) != np.shape(got):
    raise _mismatch(expected, got, path)
  # Reads the dtypes before converting `got`: JAX may narrow a NumPy array.
  wanted, dtype = _dtype(expected), _dtype(got)
  if wanted == dtype:
    return leaves.as_arrays(got) if is_inner else got
  # The wrapper runs the optimizer in float32, so its state is widened as well.
  is_float = jnp.issubdtype(dtype, jnp.floating)
  if not (is_inner and is_float and leaves.at_least_float32(dtype) == wanted):
    raise _mismatch(expected, got, path)
  return leaves.widen(leaves.as_arrays(got))


def _open(
  node: object,
) -> tuple[jax.tree_util.PyTreeDef, dict[Hashable, object]]:
  """Returns the structure of one node, and its children by their keys."""
  children, structure = jax.tree_util.tree_flatten_with_path(
    node, is_leaf=lambda x: x is not node
  )
  return structure, {path[0]: child for path, child in children}


def _is_array(x: object) -> bool:
  return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def _dtype(x: object) -> np.dtype:
  return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _mismatch(
  expected: object, got: object, path: tuple[Hashable, ...]
) -> ValueError:
  """Returns the error for the first place where two trees differ."""
  place = leaves.path_name(path)
  remedy = ""
  if isinstance(got, (dict, list)) and not isinstance(expected, type(got)):
    remedy = (
      "; a checkpoint must be restored into the structure of the optimizer's "
      "state: jax.eval_shape(inner.init, params)"
    )
  elif all(
    _is_array(x) and jnp.issubdtype(_dtype(x), jnp.floating)
    for x in (expected, got)
  ) and np.shape(expected) == np.shape(got):
    remedy = "; only floats are widened, to float32 inside of loss scaling"
  return ValueError(
    "`bare_state` must be the state of the optimizer that `opt_state` wraps, "
    f"got {_describe(got)} at {_name(place)} where it has "
    f"{_describe(expected)}{remedy}."
  )


def _name(place: str) -> str:
  return repr(place) if place else "its top"


def _describe(node: object) -> str:
  """Describes a node of a pytree, without its contents."""
  if node is _NOTHING:
    return "nothing"
  if node is None:
    return "None"
  if jax.tree_util.all_leaves([node]):
    if not _is_array(node):
      return arguments.shown(node)
    shape = ", ".join(map(str, np.shape(node)))
    return f"{_dtype(node).name}[{shape}]"
  if hasattr(node, "_fields"):
    return f"{type(node).__name__}({', '.join(node._fields)})"
  if isinstance(node, Mapping):
    return f"a {type(node).__name__} of {trees.listed(node)}"
  if isinstance(node, (tuple, list)):
    return f"a {type(node).__name__} of {len(node)}"
  return f"a {type(node).__name__}"
