"""Leaves of trees: which are gradients, their dtypes, where trees differ."""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
import functools
import operator
from typing import TypeGuard
from typing import TypeVar

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import promises
from optax_lossscale._base.arguments import shown

# The type of a tree, for functions that change only its leaves.
Tree = TypeVar("Tree")

# The keys of JAX that lead to a leaf. Two paths may have the same text.
Path = tuple[Hashable, ...]

Shape = tuple[int, ...]

# An error names this many leaves and counts the others.
_MOST_NAMED = 4

# Flax keeps the scales and amax histories of FP8 layers in a collection of this
# name, which it spells with the underscore. Differentiating with respect to
# a leaf of that collection returns its next value instead of a gradient.
OVERWRITE_WITH_GRADIENT = {
  "_overwrite_with_gradient",
  "overwrite_with_gradient",
}


def is_gradient(x: object) -> TypeGuard[jax.Array]:
  """Returns whether a leaf is a floating or complex array."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_real(x: object) -> TypeGuard[jax.Array]:
  """Returns whether a leaf is a floating array."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def is_none(x: object) -> bool:
  """Returns whether `x` is None, for use as `is_leaf`."""
  return x is None


def path_name(path: Path) -> str:
  """Returns the path of a leaf as text, such as "params/Dense_0/kernel"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def path_names(paths: Iterable[Path]) -> dict[Path, str]:
  """Returns the text of each path, in a longer form where two are equal."""
  # A key may contain a slash, as in `{"net/linear": x, "net": {"linear": y}}`.
  short = {path: path_name(path) for path in paths}
  counts = collections.Counter(short.values())
  names = {
    path: text if counts[text] == 1 else jax.tree_util.keystr(path)
    for path, text in short.items()
  }
  if len({*names.values()}) < len(names):  # A key is like a longer form.
    return {path: jax.tree_util.keystr(path) for path in names}
  return names


def is_at(path: Path, text: object) -> bool:
  """Returns whether a path, or the beginning of one, has this text."""
  beginnings = [path[:i] for i in range(1, len(path) + 1)] or [path]
  return isinstance(text, str) and any(
    text in (path_name(x), jax.tree_util.keystr(x)) for x in beginnings
  )


def as_arrays(tree: Tree) -> Tree:
  """Returns `tree` with Python and NumPy numbers as strongly typed arrays."""
  # Otherwise a number could be overlooked, or a weak type recompile a step.

  def as_array(x: object) -> object:
    if isinstance(x, (bool, int, float, complex)):
      try:
        return jnp.asarray(x, jnp.result_type(x))
      except OverflowError as error:
        rule = "an integer in a tree must fit into JAX's"
        raise ValueError(f"{rule}, got {shown(x)}.") from error
    if isinstance(x, (np.ndarray, np.generic)):
      # float0 and text are not numbers to JAX.
      is_number = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
      return jnp.asarray(x) if is_number else x
    if isinstance(x, jax.Array) and getattr(x, "weak_type", False):
      return jnp.asarray(x, x.dtype)
    return x

  return jax.tree.map(as_array, tree)


def are_gradients(tree: object) -> object:
  """Returns a tree of bools, False in Flax's `_overwrite_with_gradient`."""
  return jax.tree.map_with_path(lambda path, _: not overwrites(path), tree)


def leave_out(mask: object, tree: Tree) -> Tree:
  """Returns `tree` with masked nodes where the mask is False."""
  if tree is None or all(jax.tree.leaves(mask)):
    return tree
  return jax.tree.map(
    lambda is_kept, leaf: leaf if is_kept else optax.MaskedNode(), mask, tree
  )


def merge(mask: object, kept: Tree, left_out: object) -> Tree:
  """Returns one tree: `kept` where the mask is True, `left_out` elsewhere."""
  if all(jax.tree.leaves(mask)):
    return kept
  return jax.tree.map(
    lambda is_kept, a, b: a if is_kept else b, mask, kept, left_out
  )


def at_least_float32(dtype: DTypeLike) -> DTypeLike:
  """Returns float32 for a narrower dtype, and other dtypes unchanged."""
  return jnp.float32 if formats.is_low(dtype) else dtype


def widen(tree: Tree) -> Tree:
  """Returns `tree` with all real leaves in float32 or wider."""
  # In float16, the squares that optimizers compute would become 0 or inf.

  def widen_leaf(x: object) -> object:
    if not is_gradient(x) or x.dtype == at_least_float32(x.dtype):
      return x
    return in_dtype(x, at_least_float32(x.dtype))

  return jax.tree.map(widen_leaf, tree)


def in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns an array or a `jax.ShapeDtypeStruct`, converted to a dtype."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  return jnp.asarray(x, dtype)


def _quotients(tree: Tree, loss_scale: jax.Array) -> Tree:
  """Returns the plain quotients, as `unscale` promises."""
  return jax.tree.map(
    lambda x: x / loss_scale.astype(x.dtype) if is_gradient(x) else x,
    widen(tree),
  )


@promises.promise("unscale", assume=_quotients)
def unscale(tree: Tree, loss_scale: jax.Array) -> Tree:
  """Returns the gradients in `tree` divided by S, in float32 or wider."""
  # The inverse of an S above 2**126 is subnormal, and a backend may flush it to
  # 0. So 1/S is applied as two factors.
  quarter = jnp.where(loss_scale > 2.0**126, jnp.float32(0.25), 1)

  @functools.cache
  def factors(dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    # Invert in the leaf's own dtype, so that float64 loses no precision.
    return 1 / (loss_scale * quarter).astype(dtype), quarter.astype(dtype)

  def unscale_leaf(x: object) -> object:
    if not is_gradient(x):
      return x
    # Widen before multiplying: in float16 either 1/S or the product may be 0.
    x = jnp.asarray(x, at_least_float32(x.dtype))
    inverse, shift = factors(jnp.finfo(x.dtype).dtype)
    if jnp.iscomplexobj(x):
      # Multiply each part, since a complex 1/S would make inf * 0 = NaN.
      return jax.lax.complex(x.real * inverse * shift, x.imag * inverse * shift)
    # With x first, XLA would compile two kernels more for each shape on a CPU.
    return jax.lax.mul(jax.lax.mul(inverse, x), shift)

  return jax.tree.map(unscale_leaf, tree)


def narrow_like(
  updates: Tree, params: object, *, to_sums: bool = False
) -> Tree:
  """Returns `updates` in the dtypes of `params`, where both leaves are real."""
  # With `to_sums` narrow parameters come nearest to their sums in float32.

  def narrow_leaf(update: object, param: object) -> object:
    if not (is_real(update) and is_real(param)):
      return update
    is_narrower = formats.is_low(param.dtype) and (
      param.dtype.itemsize < update.dtype.itemsize
    )
    if to_sums and is_narrower and update.shape == param.shape:
      return bits.reaching(update, param)
    update = jnp.asarray(update, param.dtype)
    # An update of one element could change the shape of its parameter.
    if update.size == param.size == 1 and update.shape != param.shape:
      update = update.reshape(param.shape)
    return update

  # A parameter whose update is None need not be an array.
  return jax.tree.map(narrow_leaf, updates, params, is_leaf=is_none)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
  """Returns updated parameters; leaves that are not gradients are replaced."""
  is_gradient = are_gradients(params)
  new = optax.apply_updates(
    leave_out(is_gradient, params), leave_out(is_gradient, updates)
  )
  return merge(is_gradient, new, updates)


def overwrites(path: Path) -> bool:
  """Returns whether a path leads through `_overwrite_with_gradient`."""
  return any(
    getattr(key, "key", getattr(key, "name", None)) in OVERWRITE_WITH_GRADIENT
    for key in path
  )


@promises.promise("finite", assume=lambda x: x)
def without_inf(x: jax.Array) -> jax.Array:
  """Returns a mean of finite numbers, which rounding may have made inf."""
  return jnp.nan_to_num(x)


def difference(
  expected: object,
  got: object,
  fits: Callable[[Shape, Shape], bool] = operator.eq,
) -> str | None:
  """Returns how a tree differs from the expected one; None if it does not."""
  # Compares the leaves by path, then the containers, and last the shapes.
  structures: list[object] = list(map(jax.tree.structure, (got, expected)))
  if structures[0] == structures[1]:
    return mismatched_shape(expected, got, fits)
  paths, got_paths = (
    [path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]
    for tree in (expected, got)
  )
  parts = []
  if missing := [path for path in paths if path not in got_paths]:
    parts.append(f"nothing at {listed(missing, _MOST_NAMED)}")
  if extra := [path for path in got_paths if path not in paths]:
    place = listed(extra, _MOST_NAMED)
    parts.append(f"something at {place} where nothing belongs")
  return " and ".join(parts) or " and not ".join(
    shown(x, 500) for x in structures
  )


def is_for_each_example(got: Shape, expected: Shape) -> bool:
  """Returns whether shapes match, apart from a possible first axis."""
  # Some optimizers take one gradient per example, along a first axis.
  return expected in (got, got[1:])


def mismatched_shape(
  expected: object,
  got: object,
  fits: Callable[[Shape, Shape], bool] = operator.eq,
) -> str | None:
  """Returns the first leaf whose shape does not fit; None if all do."""
  # Some optimizers require trees of other structures, so these are no mismatch.
  # None in place of a leaf fits.
  structures: list[object] = [
    jax.tree.structure(x, is_leaf=is_none) for x in (expected, got)
  ]
  if structures[0] != structures[1]:
    return None
  wanted = jax.tree.leaves(expected, is_leaf=is_none)
  found = jax.tree.leaves_with_path(got, is_leaf=is_none)
  for leaf, (path, x) in zip(wanted, found, strict=True):
    is_there = leaf is not None and x is not None
    if is_there and not fits(np.shape(x), np.shape(leaf)):
      place = path_name(path)
      return f"shape {np.shape(x)} at {place!r} and not {np.shape(leaf)}"
  return None


def check_structure(rule: str, new: object, old: object) -> None:
  """Raises if two trees differ in structure or in the shapes of leaves."""
  if (found := difference(old, new)) is not None:
    raise ValueError(f"{rule}, got {found}.")


def check_kept(name: str, new: object, old: object) -> None:
  """Raises unless the new state of `name` has the structure of the old one."""
  rule = f"the state of `{name}` must keep the structure that its init made"
  check_structure(rule, new, old)


def listed(names: Collection[object], most: int = 20) -> str:
  """Returns text that lists the first `most` names and counts the others."""
  named = ", ".join(map(repr, list(names)[:most]))
  more = len(names) - most
  return f"{named} and {more} more" if more > 0 else named


def subtrees(tree: object, at: Path = ()) -> Iterator[tuple[Path, object]]:
  """Yields the path and value of each subtree, outer ones first."""
  yield at, tree
  children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
  for path, child in children:
    if child is not tree:
      yield from subtrees(child, (*at, *path))


def is_value(x: object) -> bool:
  """Returns whether `x` is an array or a number, or the form of one."""
  # Text, dates and objects have no values to compare.
  kind = getattr(getattr(x, "dtype", np.dtype("O")), "kind", "V")
  return kind not in "OSTUMm" or isinstance(x, (bool, int, float, complex))


def is_inside(path: Path, *outer: Path) -> bool:
  """Returns whether a path is one of the others, or leads into one."""
  return any(path[: len(x)] == x for x in outer)


def overlaps(path: Path, places: Iterable[Path]) -> bool:
  """Returns whether a path is inside any of the others, or around one."""
  return any(is_inside(path, x) or is_inside(x, path) for x in places)
