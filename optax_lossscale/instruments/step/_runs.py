"""Runs a step with several values of S, and judges what comes out."""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Path
from optax_lossscale._rules import fixed
from optax_lossscale._step import states
from optax_lossscale.instruments import shared
from optax_lossscale.instruments.step import _findings
from optax_lossscale.instruments.step import _next_values
from optax_lossscale.instruments.step import _verdicts
from optax_lossscale.instruments.step._findings import Kind
from optax_lossscale.instruments.step._findings import Law
from optax_lossscale.instruments.step._findings import LawName
from optax_lossscale.instruments.step._findings import Verdict
from optax_lossscale.instruments.step._verdicts import Outcome

# How many times S may be halved until the step does not overflow.
_MOST_HALVINGS = 40

# An S that is so much smaller shows what is added to scaled gradients in
# float32, unless it makes them smaller than the least amax.
_LOW = 2.0**-12
_LEAST = 2.0**-100

# How often S is doubled until float16 overflows, and where that ends.
_DOUBLINGS = (3, 6, 9, 12, 16, 20, 26, 32, 40)
_LARGEST = 2.0**100

# The number of steps after which parameters that have not moved are taken to be
# frozen.
_MORE_STEPS = 8

_found = _findings.found


class Run(NamedTuple):
  """The outputs of one run of the step, with a given S for each loss scale."""

  after: dict[str, object]  # The next values of arguments.
  watched: dict[Path, np.ndarray]  # The leaves of `after` to compare.
  others: dict[Path, object]  # The other outputs, each subtree by its path.
  states: dict[Path, states.LossScalingState]
  outcomes: dict[Path, Outcome]  # For each state by path.

  @property
  def overflows(self) -> bool:
    """True unless each S let its step be applied."""
    return not {*self.outcomes.values()} <= {Outcome.NOTHING, Outcome.APPLIED}

  def flat_others(self) -> dict[Path, np.ndarray]:
    return {
      path: x
      for place, tree in self.others.items()
      for path, x in _host_leaves(tree, place).items()
    }


@dataclasses.dataclass(frozen=True)
class Bound:
  """A step bound to its arguments, to be run with any S."""

  run: shared.Step
  named: dict[str, object]
  next_values: Mapping[str, Path]
  # The arguments whose next value is not guessed, as those of NNX objects.
  certain: frozenset[str]
  # The leaves that may depend on S or change on a skip.
  free: frozenset[Path]
  is_narrow: bool  # True if its dtypes may lose small numbers.

  @functools.cached_property
  def given(self) -> dict[Path, states.LossScalingState]:
    """The states of loss scaling among the arguments, by path."""
    return states.find_states(self.named)

  @functools.cached_property
  def paths(self) -> list[Path]:
    """The paths of the states whose S can be set."""
    return [
      x for x, y in self.given.items() if jax.tree.leaves(y.loss_scale_state)
    ]

  @functools.cached_property
  def before(self) -> dict[Path, np.ndarray]:
    """The leaves that neither S nor a skip may change."""
    return self._watched(self.named)

  @functools.cached_property
  def parameters(self) -> set[Path]:
    """The paths of floating leaves outside loss scaling's states."""
    return {
      path
      for path, x in self.before.items()
      if leaves.is_gradient(x) and not leaves.is_inside(path, *self.given)
    }

  @property
  def places(self) -> dict[str, str]:
    """The next values, as the report has them."""
    names = leaves.path_names(self.next_values.values())
    return {x: names[y] for x, y in self.next_values.items()}

  @property
  def starts_infinite(self) -> bool:
    return any(
      leaves.is_gradient(x) and not np.all(np.isfinite(x))
      for x in self.before.values()
    )

  def at(self, factors: Mapping[Path, jax.typing.ArrayLike]) -> Run:
    """Runs the step on copies of its arguments, each S times its factor."""
    outputs = outputs_of(self.run, self.named, factors)
    places = self.next_values.values()
    after = {name: outputs[place] for name, place in self.next_values.items()}
    new = states.find_states(after)
    outcomes = {x: _outcome(self.given[x], new[x]) for x in factors if x in new}
    others = {
      x: y for x, y in outputs.items() if not leaves.overlaps(x, places)
    }
    return Run(after, self._watched(after), others, new, outcomes)

  def later(self, found: Run) -> "Bound":
    """Returns the same step with the next values of a run as its arguments."""
    return dataclasses.replace(self, named=self.named | found.after)

  def moved(self, found: Run) -> set[Path]:
    return self.parameters & {*_differing(self.before, found.watched)}

  def _watched(self, named: Mapping[str, object]) -> dict[Path, np.ndarray]:
    return {
      path: x
      for name in self.next_values
      for path, x in _host_leaves(
        named[name], (jax.tree_util.DictKey(name),)
      ).items()
      if path not in self.free
    }


def outputs_of(
  run: shared.Step,
  named: dict[str, object],
  factors: Mapping[Path, jax.typing.ArrayLike] = {},
) -> dict[Path, object]:
  """Returns every subtree that a step returns, by its path."""

  def copy(path: Path, x: Any) -> object:
    x = jax.tree.map(
      lambda x: x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x, x
    )
    factor = factors.get(path)
    if factor is None:
      return x
    # `new` has the shape and sharding of S, so nothing recompiles.
    new = x.loss_scale_state.loss_scale * np.asarray(factor, np.float32)
    rule_state = states.replace_scale(x.loss_scale_state, new)
    return x._replace(loss_scale_state=rule_state)

  inputs = jax.tree.map_with_path(copy, named, is_leaf=states.is_state)
  return dict(leaves.subtrees(jax.block_until_ready(run(inputs))))


def report(step: Bound) -> _findings.StepReport:
  """Returns the report on the first step that moves the parameters."""
  if not step.paths:
    return _findings.StepReport((_found(Kind.SWITCHED_OFF, LawName.SCALE),), {})
  found, run = _judge(step)
  if found.ok and step.starts_infinite:
    # Next to a best value of inf, a first step shows little.
    later, _ = _judge(step.later(run))
    found = found if later.ok else later
  # A parameter that does not move, as at a learning rate of 0, hides mistakes.
  seen: set[Path] = set()
  for count in range(_findings.MOST_STEPS):
    seen |= step.moved(run)
    # Some parameters may be frozen and never move.
    is_late = seen and count >= _MORE_STEPS
    if is_late or seen >= step.parameters or not found.ok:
      return found
    step = step.later(run)
    run = step.at({})
    if step.moved(run) - seen:
      later, _ = _judge(step)
      halvings = found.halvings + later.halvings
      found = dataclasses.replace(later, halvings=halvings)
  if step.moved(run):
    return found
  still = _found(Kind.NOTHING_MOVES, LawName.INVARIANCE)
  others = (x for x in found.laws if x.name is not LawName.INVARIANCE)
  return dataclasses.replace(found, laws=(still, *others))


class _Start(NamedTuple):
  """The first run at an S that does not overflow, or the reason without one."""

  run: Run
  factors: dict[Path, float]
  halvings: int
  is_stalled: bool
  reason: Kind | None


def _start(step: Bound) -> _Start:
  """Halves S until the step does not overflow."""
  is_stalled = False
  for halvings in range(_MOST_HALVINGS + 1):
    factors = dict.fromkeys(step.paths, 0.5**halvings)
    run = step.at(factors)
    if not halvings:
      is_stalled = any(
        np.any(x.stalled & x.skipped) for x in run.states.values()
      )
    reason = Kind.OVERFLOWS if run.overflows else None
    if Outcome.REQUESTED in run.outcomes.values():
      reason = Kind.REQUESTED
    if reason is not Kind.OVERFLOWS:
      break
  return _Start(run, factors, halvings, is_stalled, reason)


def _judge(step: Bound) -> tuple[_findings.StepReport, Run]:
  """Returns the report on a single step, and the step's outputs."""
  start = _start(step)
  first = start.run
  if start.reason:
    law = _found(start.reason, LawName.SCALE)
    return _findings.StepReport((law,), step.places), first
  again = step.at(start.factors)
  is_repeatable = not _differing(first.watched, again.watched)
  skips = _skips(step, start)
  is_rough = step.is_narrow or not is_repeatable
  scales: dict[Path, Law] = {}
  invariances: list[Law] = []
  follows: list[Path] = []
  names = leaves.path_names(first.outcomes)
  for path, name in names.items():
    smaller, halvings = _vary(step, start, path)
    scale = _scale(step, path, start, smaller, halvings, skips, is_rough)
    runs = (first, again, *smaller)
    # The scale law reveals a solver that rounds in its own way.
    is_rounded = step.is_narrow or scale.verdict is Verdict.ROUNDING
    law = _invariance(step, runs, scale, skips, is_rounded)
    of = name if len(names) > 1 else ""
    scales[path] = dataclasses.replace(scale, path=of)
    is_exact = law.verdict is Verdict.EXACT
    invariances.append(dataclasses.replace(law, path="" if is_exact else of))
    several = [x.flat_others() for x in runs]
    follows += (
      x
      for x in several[0]
      if _verdicts.depends([y[x] for y in several], is_rounded)
    )
  if step.is_narrow and skips.outcomes == {Outcome.SKIPPED}:
    skips = _grow(step, start, scales, skips)
  stalled = [_found(Kind.STALLED, LawName.SCALE)] if start.is_stalled else []
  worst = min(invariances, key=lambda x: x.verdict.rank)
  skip = _verdicts.skip_law(*skips[1:], leaves.path_names(step.before))
  report = _findings.StepReport(
    (*stalled, *scales.values(), worst, skip),
    step.places,
    tuple(leaves.path_names(first.others)[x] for x in dict.fromkeys(follows)),
    is_repeatable,
    start.halvings,
  )
  return report, first


def _vary(
  step: Bound, start: _Start, path: Path
) -> tuple[list[Run], np.ndarray]:
  """Runs a step with one S halved, and halved again, and far smaller."""
  # Also returns how often each S is halved from run to run, int[members].

  def at(share: jax.typing.ArrayLike) -> Run:
    return step.at(start.factors | {path: share * start.factors[path]})

  shape = np.shape(start.run.states[path].amax)
  # Each member of an ensemble has its own S, and must use no other.
  halvings = 1 + np.arange(math.prod(shape)).reshape(shape) % 3
  half = at(0.5**halvings)
  amax = _on_host(half.states[path].amax)
  # Devices that step together report one amax, and share one S.
  if amax.size > 1 and np.all(amax == amax.flat[0]):
    halvings = np.ones(shape, int)
    half = at(0.5**halvings)
  runs = [half, at(0.25**halvings)]
  if not step.is_narrow:
    low = at(_LOW)
    # Below, float32 may lose gradients, too.
    if np.min(_on_host(low.states[path].amax)) > _LEAST and not low.overflows:
      runs.append(low)
  return runs, np.ravel(halvings)


def _scale(
  step: Bound,
  path: Path,
  start: _Start,
  smaller: Sequence[Run],
  halvings: np.ndarray,
  skips: "_Skips",
  is_rough: bool,
) -> Law:
  """Returns what is found of the scale law for one S."""
  if any(x.overflows for x in smaller):
    return _found(Kind.OVERFLOWS, LawName.SCALE)
  if skips.infinite.outcomes[path] is Outcome.APPLIED:
    return _found(Kind.SET_ASIDE, LawName.SCALE)
  if start.run.outcomes[path] is Outcome.NOTHING:
    return _found(Kind.NOTHING_SEEN, LawName.SCALE)
  several = (start.run, *smaller[:2])
  amaxes = np.array([np.ravel(x.states[path].amax) for x in several])
  law = _verdicts.scale_law(amaxes, halvings, is_rough)
  rule_state = step.given[path].loss_scale_state
  is_fixed = isinstance(rule_state, fixed.FixedLossScaleState)
  if law.verdict is not Verdict.WRONG:
    return law
  if is_fixed and np.all(_on_host(rule_state.loss_scale) == 1):
    return _found(Kind.CONSTANT, LawName.SCALE)
  if _next_values.argument_of(path) in skips.doubtful:
    unclear, remedy = Verdict.INCONCLUSIVE, _findings.CARRY
    return dataclasses.replace(law, verdict=unclear, remedy=remedy)
  return law


def _invariance(
  step: Bound,
  runs: Sequence[Run],
  scale: Law,
  skips: "_Skips",
  is_rounded: bool,
) -> Law:
  """Returns what is found of the invariance law for one S."""
  if scale.kind in (Kind.OVERFLOWS, Kind.CONSTANT):
    return _found(scale.kind, LawName.INVARIANCE)
  if not step.parameters:
    return _found(Kind.NOT_COMPARED, LawName.INVARIANCE)
  values = [step.before, *(x.watched for x in runs)]
  law = _verdicts.invariance_law(values, skips.doubtful, is_rounded)
  # The mistake is the same, so a second remedy would be redundant.
  is_second = scale.verdict is Verdict.WRONG
  return dataclasses.replace(law, remedy="") if is_second else law


class _Skips(NamedTuple):
  """The outcomes of steps with an overflow."""

  infinite: Run
  outcomes: set[Outcome]
  changed: list[Path]  # The leaves that a skip did not keep.
  doubtful: set[str]  # The arguments whose next value may be guessed wrong.


def _skips(step: Bound, start: _Start) -> _Skips:
  """Runs a step, and the one after it, with an S of inf."""
  # A momentum of 0 may stay 0 anyway, but not in the second step.
  later = step.later(start.run)
  clean = later.at(start.factors)
  runs = _at_infinity(step), _at_infinity(later)
  outcomes = {
    outcome
    for run, applied in zip(runs, (start.run, clean), strict=True)
    for path, outcome in run.outcomes.items()
    if applied.outcomes[path] is not Outcome.NOTHING
    # One state that skips may leave the update of another out.
    and not (
      outcome is Outcome.NOTHING and Outcome.SKIPPED in run.outcomes.values()
    )
  }
  none = _Skips(runs[0], outcomes, [], set())
  return _with_changed(none, step, later, clean, runs)


def _at_infinity(step: Bound) -> Run:
  """Runs a step with each S of inf, and sees what became of inf."""
  run = step.at(dict.fromkeys(step.paths, math.inf))

  def outcome(path: Path) -> Outcome:
    new, found = run.states[path], run.outcomes[path]
    is_finite = np.all(np.isfinite(_on_host(new.amax)))
    if found is Outcome.APPLIED and not is_finite:
      return Outcome.HIDDEN
    # A rule leaves an S of inf, as of a damaged checkpoint.
    is_kept = np.any(np.isinf(_on_host(new.loss_scale_state.loss_scale)))
    return Outcome.KEPT if found is Outcome.SKIPPED and is_kept else found

  return run._replace(outcomes={x: outcome(x) for x in run.outcomes})


def _with_changed(
  skips: _Skips, step: Bound, later: Bound, clean: Run, runs: Sequence[Run]
) -> _Skips:
  """Returns `skips` with what two more steps that skip changed."""
  changed = skips.changed
  for before, run in zip((step, later), runs, strict=True):
    if not {*run.outcomes.values()} & {Outcome.APPLIED, Outcome.OVERFLOW}:
      changed = changed + _differing(before.before, run.watched)
  doubtful = _doubtful(later, clean, runs[1], changed) - step.certain
  return skips._replace(
    changed=[x for x in step.before if x in changed],
    doubtful=skips.doubtful | doubtful,
  )


def _grow(
  step: Bound, start: _Start, scales: Mapping[Path, Law], skips: _Skips
) -> _Skips:
  """Runs a step with a growing S until its gradients overflow."""
  # The power of S with which amax grows, as far as it is known.
  powers = {
    path: int(x.verdict in (Verdict.EXACT, Verdict.ROUNDING))
    for path, x in scales.items()
    if x.kind is not Kind.CONSTANT
  }
  hidden = skips._replace(outcomes={Outcome.HIDDEN})
  if _hides_now(step, start, powers):
    return hidden
  scales_now = (step.given[x].loss_scale_state.loss_scale for x in powers)
  largest = max((np.max(_on_host(x)) for x in scales_now), default=0)
  for growth in (2.0**x for x in _DOUBLINGS):
    if largest * growth > _LARGEST:
      break
    factors = {path: start.factors[path] * growth for path in powers}
    run = step.at(start.factors | factors)
    outcomes = {*run.outcomes.values()} - {Outcome.NOTHING}
    if outcomes == {Outcome.SKIPPED}:
      later = step.later(start.run)
      # Here S is what halving it has left.
      again = later.at(dict.fromkeys(powers, growth))
      clean, runs = later.at(start.factors), (run, again)
      return _with_changed(skips, step, later, clean, runs)
    if outcomes & {Outcome.OVERFLOW, Outcome.REQUESTED}:
      break
    if outcomes == {Outcome.APPLIED} and any(
      _is_lost(path, start.run, run, power * growth)
      for path, power in powers.items()
    ):
      return hidden
  return skips


def _hides_now(step: Bound, start: _Start, paths: Collection[Path]) -> bool:
  """Returns whether an overflow at this S is hidden, unlike at a small one."""
  if all(np.all(_on_host(start.run.states[x].amax)) for x in paths):
    return False
  small = step.at({x: _LOW * y for x, y in start.factors.items()})
  return any(_is_lost(x, small, start.run, 0) for x in paths)


def _is_lost(path: Path, old: Run, new: Run, growth: float) -> bool:
  """Returns whether a larger S, by which amax should grow, made it smaller."""
  # A growth of 0 says that it need not grow, but may not vanish.
  before, after = (_on_host(x.states[path].amax) for x in (old, new))
  is_less = (after == 0) | (after < before * growth / 2)
  return bool(np.any((before > 0) & is_less))


def _outcome(
  old: states.LossScalingState, new: states.LossScalingState
) -> Outcome:
  """Returns what `update` did, derived from how its counts changed."""
  applied, skipped, requested = (
    np.any(_on_host(getattr(old, x)) != _on_host(getattr(new, x)))
    for x in ("applied_steps", "skipped_steps", "requested_skips")
  )
  if requested and not applied:
    return Outcome.REQUESTED
  if skipped:
    return Outcome.SEVERAL if applied else Outcome.SKIPPED
  if applied:
    return Outcome.OVERFLOW if np.any(new.overflow) else Outcome.APPLIED
  return Outcome.NOTHING


def _doubtful(
  later: Bound, clean: Run, skipped: Run, changed: Sequence[Path]
) -> set[str]:
  """Returns the arguments whose next value may have been guessed wrong."""
  # A skipped step returns its arguments, so unchanged ones were guessed right.

  def is_doubtful(name: str) -> bool:
    argument, after = later.named[name], _host_leaves(skipped.after[name])
    like = _next_values.form(argument)
    rivals = [
      _host_leaves(x)
      for y, x in later.named.items()
      if y != name and _next_values.form(x) == like
    ]
    # Outputs of zero may be a skip's updates; those that jump may be gradients.
    is_zero = not any(map(np.any, after.values()))
    return (
      (leaves.is_value(argument) and not shared.is_key(argument))
      or like in map(_next_values.form, skipped.others.values())
      or any(not _differing(x, after) for x in rivals)
      or is_zero
      or (bool(rivals) and _has_jumped(argument, clean.after[name]))
    )

  return set(filter(is_doubtful, {*map(_next_values.argument_of, changed)}))


def _has_jumped(old: object, new: object) -> bool:
  """Returns whether a step changes a tree by more than half its size."""
  pairs = [
    [np.asarray(y[x], np.result_type(y[x], np.float64)) for y in (a, b)]
    for a, b in [(_host_leaves(old), _host_leaves(new))]
    for x in a
    if leaves.is_gradient(a[x])
  ]
  apart = math.hypot(*(np.linalg.norm(x - y) for x, y in pairs))
  return apart > 0.5 * math.hypot(*(np.linalg.norm(x) for x, _ in pairs))


def _on_host(x: object) -> np.ndarray:
  """Returns `x` as a NumPy array; for a random key, its data."""
  return np.asarray(jax.random.key_data(x) if shared.is_key(x) else x)


def _host_leaves(tree: object, at: Path = ()) -> dict[Path, np.ndarray]:
  return {x: _on_host(y) for x, y in _next_values.compared(tree, at).items()}


def _differing(
  a: Mapping[Path, np.ndarray], b: Mapping[Path, np.ndarray]
) -> list[Path]:
  return [x for x in a if not _verdicts.is_same(a[x], b[x])]
