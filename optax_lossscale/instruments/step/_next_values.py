"""Which output of a step is the next value of which argument.

Leaves may be arrays, or the shapes and dtypes of arrays that nothing has run.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import difflib
import fnmatch
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._step import states
from optax_lossscale.instruments import shared
from optax_lossscale.instruments.step._values import Identity
from optax_lossscale.instruments.step._values import Unknown
from optax_lossscale.instruments.step._values import Value

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
Arguments = Mapping[str, object]
# All subtrees of what a step returns, by their paths.
Outputs = Mapping[Path, object]
# The outputs that are next values, by argument.
Places = Mapping[str, Path]
# Leads from arguments, by name or position, to outputs; None if forms do.
Carry = Mapping[Any, int | str] | None


class Pair(NamedTuple):
  """The positions of an argument's leaf and of its next value."""

  path: Path
  before: int
  after: int


class Returned(NamedTuple):
  """The outputs of a skipped and of an applied step, and what they tell."""

  named: Arguments
  # Gives the leaves that an argument and an output have in common.
  pairs: Callable[[str, Path], Sequence[Pair]]
  skipped: list[Value]
  applied: list[Value]

  def shown(self, name: str, places: Sequence[Path]) -> list[Path]:
    """Returns the outputs that a skip shows to be next values, best first."""
    kept = [x for x in places if self.is_kept(name, x)]
    moved = [x for x in kept if self.is_moved(name, x)]
    # A first guess that reads the argument is better than a mere copy.
    is_better = places[0] not in kept and self.is_read(name, places[0])
    return moved if is_better else moved or kept

  def is_likely(self, name: str, rivals: list[Path], found: Places) -> bool:
    """Returns whether nothing speaks against a guess that a skip moves."""
    tree, place = self.named[name], found[name]
    # Nothing else has the form of a state of loss scaling.
    return bool(states.find_states(tree)) or (
      self.is_read(name, place)
      and not self.is_gradient(name, place)
      and not _is_plain(tree)
      and all(leaves.overlaps(x, found.values()) for x in rivals)
    )

  def is_next_number(self, name: str, place: Path) -> bool:
    """Returns whether a number moves, and is kept on a skip or counts."""
    is_own = self.is_kept(name, place) or self.is_count(name, place)
    return is_own and self.is_moved(name, place)

  def is_kept(self, name: str, place: Path) -> bool:
    # A skipped step returns nothing else that is an argument, except copies.
    return self._is_old(name, place, self.skipped)

  def is_moved(self, name: str, place: Path) -> bool:
    # A copy is the argument also if the step is applied.
    return not self._is_old(name, place, self.applied)

  def is_read(self, name: str, place: Path) -> bool:
    # A next value is computed from the old one.
    after = [self.applied[x.after] for x in self.pairs(name, place)]
    return any(name in x.all_of("reads") for x in after)

  def is_gradient(self, name: str, place: Path) -> bool:
    # Gradients grow with S, and the updates of a skipped step are 0.
    degrees = [self.skipped[x.after].degree for x in self.pairs(name, place)]
    return all(x and not isinstance(x, Unknown) for x in degrees)

  def is_count(self, name: str, place: Path) -> bool:
    # A count of steps reads only itself. A count of examples reads the batch.
    after = [self.applied[x.after] for x in self.pairs(name, place)]
    tree = self.named[name]
    is_whole = _is_number(tree) and jnp.result_type(tree).kind in "iu"
    return is_whole and [x.all_of("reads") for x in after] == [{name}]

  def _is_old(self, name: str, place: Path, outputs: list[Value]) -> bool:
    old = [Identity(x.before) for x in self.pairs(name, place)]
    new = [outputs[x.after].identity for x in self.pairs(name, place)]
    # An argument without arrays says nothing.
    return bool(old) and new == old


def match(
  named: Arguments, outputs: Outputs, carry: Carry, known: Places
) -> dict[str, Path]:
  """Returns, by argument, the path of the output that is its next value."""
  # Those that are `known` are taken as they are.
  places, chosen = alike(named, outputs), _chosen(named, carry)
  if carry is None:
    places = {x: y for x, y in places.items() if _is_distinct(named[x])}
  else:
    places = {x: _at(chosen.get(x), y) for x, y in places.items()}
  found = _disjoint(places, known)
  if carry is not None and found.keys() != chosen.keys():
    raise ValueError(
      "`carry` must lead from arguments to outputs of the same structure, "
      f"shapes and dtypes, got {arguments.shown(carry)}; the arguments are "
      f"{', '.join(named)}, the outputs "
      f"{', '.join(place_name(x) for x in outputs if len(x) == 1)}."
    )
  _check_states(named, {x: outputs[y] for x, y in found.items()}, carry)
  return {name: found[name] for name in named if name in found}


def alike(named: Arguments, outputs: Outputs) -> dict[str, list[Path]]:
  """Returns, by argument, the outputs of its structure, shapes and dtypes."""
  forms = {place: form(x) for place, x in outputs.items()}
  found = {}
  # The optimizer's state first, since it holds trees like the parameters.
  for name in sorted(named, key=lambda x: not states.find_states(named[x])):
    like = form(named[name])
    found[name] = [place for place, x in forms.items() if x == like]
  return found


def _is_distinct(tree: object) -> bool:
  # Single numbers look alike, such as a learning rate and a loss.
  return not _is_number(tree) and bool(form(tree)[1])


def _is_number(tree: object) -> bool:
  return _is_plain(tree) and not np.shape(tree)


def _is_plain(tree: object) -> bool:
  # A single array or number, but no key: few outputs have the form of a key.
  return leaves.is_value(tree) and not shared.is_key(tree)


def _disjoint(places: dict[str, list[Path]], known: Places) -> dict[str, Path]:
  """Returns, by argument, the first place that no other argument has."""
  found = dict(known)
  for name, candidates in places.items():
    free = [x for x in candidates if not leaves.overlaps(x, found.values())]
    if free and name not in found:
      found[name] = free[0]
  return found


def _chosen(named: Arguments, carry: Carry) -> dict[object, str]:
  by_position = dict(enumerate(named))
  return {by_position.get(x, x): str(y) for x, y in (carry or {}).items()}


def _at(text: str | None, places: Sequence[Path]) -> list[Path]:
  """Returns the output that a text of `carry` names, if it is among these."""
  keystr = jax.tree_util.keystr
  found = [x for x in places if text in (place_name(x), keystr(x))]
  if len(found) > 1:
    raise ValueError(
      f"`carry` must lead to one output, got {text!r}, the text of "
      f"{' and '.join(map(keystr, found))}; write one of these."
    )
  return found


def _check_states(named: Arguments, after: Arguments, carry: Carry) -> None:
  # A state without an S belongs to loss scaling that is switched off.
  new = states.find_states(after)
  missing = [x for x in moving_states(named) if x not in new]
  # With `carry`, the step need not return a state that it only reads.
  if missing and (carry is None or not new):
    got = "no output of its structure, shapes and dtypes"
    if carry:
      got = f"`carry` without it, {arguments.shown(carry)}"
    raise ValueError(
      "`step` must return the next value of the argument that holds the state "
      f"of loss_scaling, {leaves.path_name(missing[0])}, got {got}; {RETURN}."
    )


def moving_states(tree: object) -> dict[Path, states.LossScalingState]:
  """Returns the states that have an S, by path; loss scaling may be off."""
  found = states.find_states(tree)
  return {x: y for x, y in found.items() if jax.tree.leaves(y.loss_scale_state)}


# A form gives only a first guess, because gradients, updates and predictions
# may look like the parameters. A skipped step tells them apart: it returns its
# arguments bit for bit, and computes everything else as an applied step does.
# So the next value is the output that is the argument if the step is skipped,
# and something else if it is applied.
#
# A first guess that a skip moves remains a guess. Perhaps the step is wrong,
# which the proof should say. Or another output is the next value, or none is.
# The guess counts as certain if nothing speaks against it. Otherwise the proof
# calls no law of this argument wrong.
def identify(
  shapes: object, guesses: Places, guessed: Collection[str], returned: Returned
) -> tuple[dict[str, Path], Collection[str]]:
  """Returns the next values that a skip shows, and the arguments in doubt."""
  # The whole output can only be a first guess.
  _, *parts = leaves.subtrees(shapes)
  places = alike(returned.named, dict(parts))
  shown = {x: returned.shown(x, [guesses[x], *places[x]]) for x in guessed}
  # All corrections come first, since they take and free what others need.
  found = {**guesses, **{x: y[0] for x, y in shown.items() if y}}
  doubtful = {
    x
    for x in guessed
    if not shown[x] and not returned.is_likely(x, places[x], found)
  }
  # Numbers have no first guess.
  numbers = {
    x: [y for y in places[x] if returned.is_next_number(x, y)]
    for x in returned.named
    if x not in guesses
  }
  return _disjoint(numbers, found), doubtful


def may_change(named: Arguments, patterns: Sequence[str]) -> set[Path]:
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
    # A pattern names a leaf or something around it. Brackets may be literal.
    globs = [str(x), f"{x}/*"] if {*str(x)} & {*"*?["} else []
    chosen = _leaves_at(x, globs, names)
    if not chosen and not globs:
      texts = [*names.values()]
      alike = difflib.get_close_matches(str(x), texts, len(texts), 0)
      raise ValueError(
        "`may_change` must name leaves of the arguments, or be a pattern, got "
        f"{arguments.shown(x)}; they are {listed(alike)}."
      )
    found |= chosen
  return found


def _leaves_at(
  name: object, globs: Sequence[str], names: Mapping[Path, str]
) -> set[Path]:
  """Returns the leaves that have a name, or match one of some patterns."""
  found = {x for x in names if leaves.is_at(x, name)}
  matching = {y for x in globs for y in fnmatch.filter(names.values(), x)}
  return found | {x for x, y in names.items() if y in matching}


def form(tree: object) -> tuple[object, Sequence[object]]:
  """Returns a tree's structure, and the shapes and dtypes of its leaves."""
  values = filter(leaves.is_value, jax.tree.leaves(tree))
  forms = [(np.shape(x), jnp.result_type(x)) for x in values]
  return jax.tree.structure(tree), forms


def compared(tree: object, at: Path = ()) -> dict[Path, Any]:
  """Returns a tree's arrays by path, except those of loss scaling itself."""
  found: dict[Path, Any] = {}
  for path, x in jax.tree.leaves_with_path(tree, is_leaf=_counts_skips):
    if _counts_skips(x):
      for field in _KEPT[type(x)]:
        key = jax.tree_util.GetAttrKey(field)
        found |= compared(getattr(x, field), (*at, *path, key))
    elif leaves.is_value(x) and path[-1:] != _ATTEMPTS:
      found[*at, *path] = x
  return found


def _counts_skips(x: object) -> bool:
  """Returns whether a state has fields that a skipped step may move."""
  return type(x) in _KEPT and bool(states.find_states(x))


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
