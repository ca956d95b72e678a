"""The checks that a user can choose from. Each defines an overflow."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves


@dataclasses.dataclass(frozen=True)
class Check:
  """The definition of an overflow, made by `nonfinite` or `saturated`.

  Attributes:
    saturating: whether the largest finite value counts as an overflow.
    dtype: the computation's dtype, a tree of dtypes, or a function from a
      leaf's path to a dtype; None means the leaf's own dtype.

  Examples:
    >>> import optax_lossscale as ols
    >>> check: ols.Check = ols.saturated("float16")
    >>> print(check.saturating, check.dtype)
    True float16
  """

  saturating: bool
  dtype: Any = None

  def __post_init__(self) -> None:
    arguments.check_fields(self, saturating=arguments.check_flag)
    if not is_function(self.dtype):
      dtype = jax.tree.map_with_path(
        _as_dtype, self.dtype, is_leaf=leaves.is_none
      )
      object.__setattr__(self, "dtype", dtype)


def nonfinite(dtype: Any = None) -> Check:
  """Returns the check for hardware that produces inf and NaN (IEEE 754).

  A step overflows if a scaled gradient is NaN, infinite, or beyond the largest
  finite value of the dtype in which it was computed.

  Args:
    dtype: the dtype that the gradients were computed in, if they are stored in
      a wider one; by default each leaf's own. It is not needed to find inf and
      NaN. A float32 gradient beyond its range counts as an overflow, even if it
      is correct (see docs/checks.md). To set it per leaf, pass a tree of dtypes
      whose structure is a prefix of the gradients', or a function from a leaf's
      path, such as "params/Dense_0/kernel", to a dtype. Where two paths have
      one text, as keys with slashes may cause, both are as "['a']['b']". None
      for a leaf means its own dtype.

  Returns:
    A check to pass to `loss_scaling`.

  Raises:
    TypeError: if `dtype`, or a leaf of it, is not a floating-point dtype; from
      `update`, if the function returns anything but such a dtype or None.
    ValueError: from `update`, if the tree's structure does not fit.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> check = ols.nonfinite()
    >>> tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), check=check)
    >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.zeros(1)))
    >>> print(state.overflow, state.nan)
    True True
  """
  return Check(saturating=False, dtype=dtype)


def saturated(dtype: Any = None) -> Check:
  """Returns the check for hardware that clips instead of producing inf.

  In saturation mode an overflow produces the largest finite value, 65504 in
  float16, instead of inf. So a step overflows if a scaled gradient reaches that
  value; NaN and inf count as well. A true value between 65488 and 65520 also
  rounds to 65504, a false alarm that costs one step.

  Args:
    dtype: the computation's dtype, as for `nonfinite`. Float32 gradients do
      not reveal the dtype they were computed in, so name it here, also with
      Flax's FP8 layers (see docs/guides/fp8.md).

  Returns:
    A check to pass to `loss_scaling`.

  Raises:
    TypeError: as for `nonfinite`.
    ValueError: as for `nonfinite`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> check = ols.saturated(jnp.float16)
    >>> tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), check=check)
    >>> _, state = tx.update(jnp.array([65504.0]), tx.init(jnp.zeros(1)))
    >>> print(state.overflow, state.nan)
    True False
  """
  return Check(saturating=True, dtype=dtype)


def with_computation_dtypes(
  check: Check, scaled_grads: object
) -> list[tuple[jax.Array, np.dtype | None]]:
  """Pairs each gradient with its computation's dtype, or None for its own."""
  if is_function(check.dtype):
    found = jax.tree.leaves_with_path(scaled_grads)
    names = leaves.path_names(path for path, _ in found)
    return [
      (leaf, _as_dtype(path, check.dtype(names[path])))
      for path, leaf in found
      if leaves.is_gradient(leaf)
    ]
  dtypes = jax.tree.leaves(check.dtype, is_leaf=leaves.is_none)
  structure: jax.tree_util.PyTreeDef = jax.tree.structure(
    check.dtype, is_leaf=leaves.is_none
  )
  try:
    subtrees = structure.flatten_up_to(scaled_grads)
  except ValueError as error:
    raise ValueError(
      "`dtype` must be a tree of dtypes whose structure is a prefix of the "
      f"gradients', got {structure} for gradients "
      f"{jax.tree.structure(scaled_grads)}."
    ) from error
  return [
    (leaf, dtype)
    for dtype, subtree in zip(dtypes, subtrees, strict=True)
    for leaf in filter(leaves.is_gradient, jax.tree.leaves(subtree))
  ]


def _as_dtype(path: leaves.Path, dtype: object) -> np.dtype | None:
  """Returns the dtype that a caller set for a leaf; None stays None."""
  if dtype is None:
    return None
  place = f" for {leaves.path_name(path)!r}" if path else ""
  return arguments.check_dtype("dtype", dtype, place=place)


def is_function(dtype: object) -> bool:
  """Returns whether `dtype` is a function; a type and a layer are not."""
  # jax.tree_util.Partial is a pytree, but counts as a function here.
  is_tree = not jax.tree_util.all_leaves([dtype])
  is_partial = isinstance(dtype, functools.partial)
  return callable(dtype) and (
    is_partial or not (is_tree or isinstance(dtype, type))
  )
