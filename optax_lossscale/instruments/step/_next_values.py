"""Which output of a step is the next value of which argument.

Leaves may be arrays, or the shapes and dtypes of arrays that nothing has run.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import difflib
import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._step import states
from optax_lossscale.instruments import shared

# For states that also count skipped steps, the fields that a skip must keep.
_KEPT = {
  states.LossScalingState: ("inner_state", "applied_steps"),
  shared.RecordState: ("recorded_state",),
  # Around loss scaling, `inject_hyperparams` also counts skipped steps.
  optax.InjectStatefulHyperparamsState: ("inner_state",),
}
# linen.TrainState counts all steps here, including skipped ones.
_ATTEMPTS = (jax.tree_util.GetAttrKey("attempts"),)

# How many leaves a line of the report names.
_MOST_NAMED = 4

RETURN = (
  "it must be an argument, and its next value be returned, unless an "
  "nnx.Optimizer holds it"
)

Path = leaves.Path

# Leads from arguments, by name or position, to the outputs of a step.
Carry = Mapping[Any, int | str]


def match(
  named: Mapping[str, object],
  outputs: Mapping[Path, object],
  carry: Carry | None,
  known: Mapping[str, Path],
) -> dict[str, Path]:
  """Returns, by argument, the path of the output that is its next value.

  The outputs are all subtrees of what the step returns, by their paths. Those
  that are `known` are taken as they are.
  """
  by_position = dict(enumerate(named))
  chosen = {by_position.get(x, x): str(y) for x, y in (carry or {}).items()}
  found = dict(known)
  forms = {place: form(x) for place, x in outputs.items()}
  # The optimizer's state first, since it holds trees like the parameters.
  for name in sorted(named, key=lambda x: not states.find_states(named[x])):
    like = form(named[name])
    # Single numbers look alike, such as a learning rate and a loss.
    is_number = _is_plain(named[name]) and not np.shape(named[name])
    places = [] if is_number or not like[1] else [*outputs]
    if carry is not None:
      text = chosen.get(name)
      places = [
        x for x in outputs if text in (place_name(x), jax.tree_util.keystr(x))
      ]
      alike = [jax.tree_util.keystr(x) for x in places if forms[x] == like]
      if len(alike) > 1:
        raise ValueError(
          f"`carry` must lead to one output, got {text!r}, the text of "
          f"{' and '.join(alike)}; write one of these."
        )
    for place in places:
      is_like = forms.get(place) == like and name not in found
      if is_like and not overlaps(place, found.values()):
        found[name] = place
  if carry is not None and found.keys() != chosen.keys():
    raise ValueError(
      "`carry` must lead from arguments to outputs of the same structure, "
      f"shapes and dtypes, got {arguments.shown(carry)}; the arguments are "
      f"{', '.join(named)}, the outputs "
      f"{', '.join(place_name(x) for x in outputs if len(x) == 1)}."
    )
  new = states.find_states({x: outputs[y] for x, y in found.items()})
  missing = [
    leaves.path_name(path)
    for path, x in states.find_states(named).items()
    if path not in new and jax.tree.leaves(x.loss_scale_state)
  ]
  # With `carry`, the step need not return a state that it only reads.
  if missing and (carry is None or not new):
    got = "no output of its structure, shapes and dtypes"
    if carry:
      got = f"`carry` without it, {arguments.shown(carry)}"
    raise ValueError(
      "`step` must return the next value of the argument that holds the "
      f"state of loss_scaling, {missing[0]}, got {got}; {RETURN}."
    )
  return {name: found[name] for name in named if name in found}


def _is_plain(tree: object) -> bool:
  """Returns whether an argument is a single array or number, but no key."""
  return is_value(tree) and not shared.is_key(tree)


def may_change(
  named: Mapping[str, object], patterns: Sequence[str]
) -> set[Path]:
  """Returns the leaves that `may_change` names; a pattern may name none."""
  names = leaves.path_names(x for x, _ in jax.tree.leaves_with_path(named))
  found: set[Path] = set()
  if not isinstance(patterns, (str, Sequence, Set, type(None))):
    raise TypeError(
      '`may_change` must be a list of names and patterns, such as ["*/rngs/*"],'
      f" got {arguments.shown(patterns)}."
    )
  # A string is a single pattern, not a sequence of letters.
  for x in [patterns] if isinstance(patterns, str) else patterns or ():
    chosen = {
      path
      for path, name in names.items()
      if leaves.is_at(path, x)  # Brackets are literal here.
      or name == x
      or ({*str(x)} & {*"*?["} and _matches(name, str(x)))
    }
    if not chosen and not {*str(x)} & {*"*?["}:
      texts = [*names.values()]
      alike = difflib.get_close_matches(str(x), texts, len(texts), 0)
      raise ValueError(
        "`may_change` must name leaves of the arguments, or be a pattern, got "
        f"{arguments.shown(x)}; they are {listed(alike)}."
      )
    found |= chosen
  return found


def _matches(name: str, pattern: str) -> bool:
  """Returns whether a pattern names a leaf or something around it."""
  return any(fnmatch.fnmatch(name, x) for x in (pattern, f"{pattern}/*"))


def form(tree: object) -> tuple[object, Sequence[object]]:
  """Returns a tree's structure, and the shapes and dtypes of its leaves."""
  values = filter(is_value, jax.tree.leaves(tree))
  forms = [(np.shape(x), jnp.result_type(x)) for x in values]
  return jax.tree.structure(tree), forms


def subtrees(tree: object, at: Path = ()) -> Iterator[tuple[Path, object]]:
  """Yields the path and value of each subtree, outer ones first."""
  yield at, tree
  children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
  for path, child in children:
    if child is not tree:
      yield from subtrees(child, (*at, *path))


def compared(tree: object, at: Path = ()) -> dict[Path, Any]:
  """Returns a tree's arrays by path, except those of loss scaling itself."""
  found: dict[Path, Any] = {}
  for path, x in jax.tree.leaves_with_path(tree, is_leaf=_counts_skips):
    if _counts_skips(x):
      for field in _KEPT[type(x)]:
        key = jax.tree_util.GetAttrKey(field)
        found |= compared(getattr(x, field), (*at, *path, key))
    elif is_value(x) and path[-1:] != _ATTEMPTS:
      found[*at, *path] = x
  return found


def _counts_skips(x: object) -> bool:
  """Returns whether a state has fields that a skipped step may move."""
  return type(x) in _KEPT and bool(states.find_states(x))


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


def argument_of(path: Path) -> str:
  """Returns the argument that a leaf is in."""
  return leaves.path_name(path[:1])


def place_name(place: Path) -> str:
  """Returns the text of an output; a step's only output is called 0."""
  return leaves.path_name(place) or "0"


def listed(names: Sequence[str]) -> str:
  """Returns text that lists the first names and counts the others."""
  more = len(names) - _MOST_NAMED
  named = ", ".join(names[:_MOST_NAMED])
  return f"{named} and {more} more" if more > 0 else named
