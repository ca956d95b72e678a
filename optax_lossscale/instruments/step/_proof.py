"""The laws of a correct step, proved from its jaxpr."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import enum
import functools
import itertools
import linecache
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._base import leaves
from optax_lossscale._base.leaves import Path
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import source_lines
from optax_lossscale._rules import fixed
from optax_lossscale._step import reasons
from optax_lossscale._step import states
from optax_lossscale.instruments import shared
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _findings
from optax_lossscale.instruments.step import _interpret
from optax_lossscale.instruments.step import _next_values
from optax_lossscale.instruments.step import _promised
from optax_lossscale.instruments.step import _values
from optax_lossscale.instruments.step._findings import Kind
from optax_lossscale.instruments.step._findings import Law
from optax_lossscale.instruments.step._findings import LawName
from optax_lossscale.instruments.step._findings import Verdict
from optax_lossscale.instruments.step._next_values import Pair as _Pair
from optax_lossscale.instruments.step._promised import Position
from optax_lossscale.instruments.step._values import Identity
from optax_lossscale.instruments.step._values import Mark
from optax_lossscale.instruments.step._values import Place
from optax_lossscale.instruments.step._values import Scale
from optax_lossscale.instruments.step._values import Source
from optax_lossscale.instruments.step._values import Value

# Where a state of loss scaling holds the optimizer's.
_INNER = jax.tree_util.GetAttrKey("inner_state")

# A proof is tried for each truth of as many flags among the arguments.
_MOST_FLAGS = 3

_found = _findings.found
_SCALE, _INVARIANCE, _SKIP = LawName.SCALE, LawName.INVARIANCE, LawName.SKIP
# What a value depends on S by: certainly, and perhaps.
_DEPENDENCE = {
  LawName.ARGUMENTS: (Kind.ARGUMENT_DEPENDS, Kind.ARGUMENT_MAY_DEPEND),
  LawName.INVARIANCE: (Kind.VALUE_DEPENDS, Kind.VALUE_MAY_DEPEND),
}
# What is wrong with a next S that is not, or not certainly, the rule's.
_STAGES = {
  "old": Kind.S_NEVER_MOVES,
  "untold": Kind.S_NOT_TOLD,
  "either": Kind.S_CHOSEN,
}


class Traced(NamedTuple):
  """A step's jaxpr, and trees with positions among its inputs and outputs."""

  jaxpr: core.Jaxpr
  # The arguments and the output, with positions in the place of arrays.
  inputs: Mapping[str, object]
  outputs: object
  # The output with shapes and dtypes in the place of arrays.
  shapes: object
  # The calls that the proof does not look into.
  trace: _promised.Trace


class Proof(NamedTuple):
  """The verdict on each law, and the outputs that are next values."""

  laws: tuple[Law, ...]
  # For each argument, the output that is its next value.
  next_values: Mapping[str, Path]
  certain: frozenset[str]  # The arguments whose next value is not a guess.
  follows: tuple[str, ...]  # The other outputs that depend on S.
  assumptions: tuple[str, ...]  # The library's functions taken at their word.


def trace(run: shared.Step, named: Mapping[str, object]) -> Traced:
  """Traces a step for a proof; its arguments may be shapes."""
  shapes: list[object] = []

  def arrays_of(named: Mapping[str, object]) -> list[object]:
    returned = run(named)
    # No tracer may outlive its trace.
    shapes[:] = [jax.tree.map(_shape, returned)]
    return [x for x in jax.tree.leaves(returned) if _has_value(x)]

  with _promised.proving() as found:
    program = interpreter.record(arrays_of, (dict(named),), {}, may_change=True)
  inputs = _positions(dict(named), interpreter.is_array)
  outputs = _positions(shapes[0], _has_value)
  return Traced(program.jaxpr, inputs, outputs, shapes[0], found)


def _shape(x: Any) -> object:
  aval = jax.typeof(x) if _has_value(x) else None
  return x if aval is None else jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _positions(tree: Any, is_array: Callable[[object], bool]) -> Any:
  """Returns a tree with positions in the place of its arrays."""
  count = itertools.count()
  # Any other leaf might be a number, which would look like a position.
  return jax.tree.map(
    lambda x: Position(next(count)) if is_array(x) else object(), tree
  )


def _has_value(x: object) -> bool:
  return hasattr(x, "dtype") and leaves.is_value(x)


@dataclasses.dataclass(frozen=True)
class _Step:
  """A traced step, and how its outputs lead back to its arguments."""

  # Nothing is interpreted before `run`, so a step can be made with first
  # guesses, and then be replaced by one with the corrected next values.
  traced: Traced
  # Leaves that may depend on S or change on a skip.
  free: Collection[Path]
  next_values: Mapping[str, Path]
  # Arguments whose next value may be another output.
  guessed: Collection[str]
  # The states whose S is always 1, a number like any other.
  ones: Collection[Path] = ()

  @functools.cached_property
  def states(self) -> dict[Path, states.LossScalingState]:
    return _next_values.moving_states(self.traced.inputs)

  @functools.cached_property
  def names(self) -> dict[Path, str]:
    names = leaves.path_names(_next_values.compared(self.traced.inputs))
    return names | leaves.path_names(self.states)

  @functools.cached_property
  def positions(self) -> dict[Path, object]:
    return dict(leaves.subtrees(self.traced.outputs))

  @functools.cached_property
  def pairs(self) -> list[_Pair]:
    # Arguments without a next value, such as a batch, have no pairs.
    found = [y for x in self.next_values.items() for y in self.pairs_of(*x)]
    return [x for x in found if x.path not in self.free]

  @functools.cached_property
  def parameters(self) -> list[Path]:
    # Loss scaling holds the moments, which are no parameters.
    avals = self.traced.jaxpr.in_avals
    found = [x.path for x in self.pairs if leaves.is_gradient(avals[x.before])]
    return [x for x in found if not leaves.is_inside(x, *self.states)]

  def flags(self) -> list[int]:
    # A flag is an argument such as `train`.
    avals = self.traced.jaxpr.in_avals
    return [
      int(x)
      for path, x in _positioned(self.traced.inputs).items()
      if avals[x].dtype == bool and not avals[x].shape
      if not leaves.is_inside(path, *self.states)
    ]

  def is_guessed(self, path: Path) -> bool:
    return _next_values.argument_of(path) in self.guessed

  def pairs_of(self, name: str, place: Path) -> list[_Pair]:
    before = _next_values.compared({name: self.traced.inputs[name]})
    after = _next_values.compared({name: self.positions[place]})
    return [_Pair(x, before[x], after[x]) for x in before if x in after]

  def run(
    self,
    overflowing: Collection[Path | _values.Place] = (),
    flags: Mapping[int, bool] | None = None,
  ) -> tuple[Sequence[_interpret.Event], list[Value]]:
    """Interprets the step, given the states that overflow."""
    # Each argument is known to be itself, and its results to read it.
    values = {
      int(x): Value(
        constant=(flags or {}).get(x),
        identity=Identity(int(x)),
        sources=frozenset([Source("reads", _next_values.argument_of(path))]),
      )
      for path, x in _positioned(self.traced.inputs).items()
    }
    for path, state in self.states.items():
      # The step before measured these with its own S.
      for x in (state.amax, state.range_used):
        if isinstance(x, Position):
          reason = "it is of the S of the step before"
          values[x] = values[x].but(degree=_values.Unknown(reason, False))
      # Each state has a symbol for its S, and each copy of a model its own S.
      position = _interpret.position_of_scale(state.loss_scale_state)
      words = "S" if len(self.states) == 1 else f"S of {self.names[path]}"
      axes = tuple(range(self.traced.jaxpr.in_avals[position].ndim))
      degree = _degrees.of((_values.Symbol(words, position), axes))
      values[position] = values[position].but(
        degree=_values.FREE if path in self.ones else degree,
        scale=Scale(path, "old"),
        sources=frozenset([Source("scale", path)]),
      )
    calls = self.traced.trace.calls
    machine = _interpret.Interpreter(calls, frozenset(overflowing))
    outputs = machine.run(self.traced.jaxpr, [*values.values()])
    return [*machine.events.values()], outputs


class _Case(NamedTuple):
  """A step, given some flags' truth."""

  step: _Step
  flags: Mapping[int, bool]  # The truth of flags by position.
  events: Sequence[_interpret.Event]  # Promised calls of an applied step.
  applied: Sequence[Value]  # The outputs of such a step.
  skipped: Mapping[Path, Sequence[Value]]  # Those if this state overflows.

  def of_kind(self, *kinds: str) -> list[_interpret.Event]:
    return [x for x in self.events if x.kind in kinds]


def prove(
  traced: Traced,
  named: Mapping[str, object],
  next_values: Mapping[str, Path],
  certain: Collection[str],
  free: Collection[Path],
) -> Proof:
  """Proves or refutes the laws of a step that was traced."""
  # The next values of arguments that are not `certain` were guessed, and the
  # leaves that are `free` may depend on S or change on a skip.
  step = _Step(traced, free, next_values, next_values.keys() - certain)
  if not step.states:
    laws = [_found(Kind.SWITCHED_OFF, _SCALE)]
    if any(call.kind == "skip" for call in traced.trace.calls):
      laws.append(_found(Kind.SKIPS_UNSEEN, _SKIP))
    return Proof(tuple(laws), {}, frozenset(), (), ())
  events, applied = step.run()
  if step.guessed:
    # Both kinds of steps together show which outputs are next values.
    _, skipped = step.run(step.states.keys())
    returned = _next_values.Returned(named, step.pairs_of, skipped, applied)
    found, guessed = _next_values.identify(
      traced.shapes, next_values, step.guessed, returned
    )
    step = dataclasses.replace(step, next_values=found, guessed=guessed)
  ones = frozenset(filter(None, map(_moved_at_one, events)))
  step = dataclasses.replace(step, ones=ones)
  laws = _judge(step, {})
  if not _findings.all_hold(laws):
    laws = _judge_by_flags(step) or laws
  return Proof(
    tuple(laws),
    step.next_values,
    frozenset(step.next_values.keys() - step.guessed),
    tuple(_follows(step)),
    tuple(traced.trace.trusted),
  )


def _moved_at_one(event: _interpret.Event) -> Path | None:
  """Returns the state that a call moves, if its rule never leaves S = 1."""
  rule = event.call.static["rule"] if event.kind == "move" else None
  is_one = isinstance(rule, fixed.FixedLossScale) and rule.scale == 1
  return _moved_path(event) if is_one else None


def _judge_by_flags(step: _Step) -> list[Law]:
  """Returns the laws if they hold for each truth of the step's flags."""
  flags = step.flags()
  if not 0 < len(flags) <= _MOST_FLAGS:
    return []
  cases: list[Law] = []
  for truths in itertools.product((True, False), repeat=len(flags)):
    cases += _judge(step, dict(zip(flags, truths, strict=True)))
  if not _findings.all_hold(cases):
    return []
  laws = [x for x in cases if x.verdict is Verdict.PROVED] or cases
  return list({(x.name, x.path): x for x in laws}.values())


def _judge(step: _Step, flags: Mapping[int, bool]) -> list[Law]:
  """Returns the proof of each law, given some flags' truth."""
  events, applied = step.run((), flags)
  gates: dict[Path | None, list[_interpret.Event]] = {}
  for x in events:
    if x.is_gate:
      gates.setdefault(_gate_path(x), []).append(x)
  if not gates:
    calls = step.traced.trace.calls
    is_rewritten = any(call.kind == "examine" for call in calls)
    kind = Kind.UPDATE_REWRITTEN if is_rewritten else Kind.NO_UPDATE
    return [_found(kind, _SCALE)]
  skipped = {path: step.run({path}, flags)[1] for path in gates if path}
  case = _Case(step, flags, events, applied, skipped)
  return [
    *(_scale_law(case, path, several) for path, several in gates.items()),
    *_arguments_law(case),
    _invariance_law(case),
    _skip_law(case),
  ]


def _moved_path(move: _interpret.Event) -> Path | None:
  position = _interpret.position_of_scale(move.call.inputs["state"])
  return _path_of(move.values[position])


def _gate_path(gate: _interpret.Event) -> Path | None:
  return _path_of(gate.values[gate.call.inputs["loss_scale"]])


def _path_of(loss_scale: Value) -> Path | None:
  return loss_scale.scale and loss_scale.scale.path


def _scale_law(
  case: _Case, path: Path | None, gates: Sequence[_interpret.Event]
) -> Law:
  """Returns whether S times true gradients enter `update`, with every inf."""
  step = case.step
  # A step may be skipped because of its loss.
  is_doubted = any(
    x.mark("doubted") for y in case.of_kind("skip") for x in y.values
  )
  count = 0
  problems: list[Law | None] = []
  for gate in gates:
    notice = _notice(gate)
    for name, value in gate.of(gate.call.inputs["scaled_grads"]):
      count += 1
      if is_doubted:
        value = value.but(marks=value.marks - {Mark("taken", None)})
      name = name or "of the parameter"
      problem = _not_scaled(name, value, gate) or _lost(name, value, notice)
      problems.append(problem)
  kind = Kind.GRADIENT_IS_SCALED if count == 1 else Kind.GRADIENTS_ARE_SCALED
  place = "" if path is None or len(step.states) == 1 else step.names[path]
  holds = _found(kind, _SCALE, path=place, count=count)
  return _findings.worst(filter(None, problems), holds)


class _Notice(enum.Enum):
  """What the caller of `update` says of an overflow."""

  NONE = enum.auto()
  TESTED = enum.auto()  # A test that may be one of finiteness decides it.
  FINITE = enum.auto()  # A test of finiteness decides it.
  DROPPED = enum.auto()  # Micro-batches that overflow were left out.


def _notice(gate: _interpret.Event) -> _Notice:
  overflow = gate.call.inputs["overflow"]

  def is_window(x: object) -> bool:
    return isinstance(x, reasons.WindowOverflow)

  if any(map(is_window, jax.tree.leaves(overflow, is_leaf=is_window))):
    return _Notice.DROPPED
  tests = [y for _, x in gate.of(overflow) if (y := x.mark("tested"))]
  if any(x.finite is not None for x in tests):
    return _Notice.FINITE
  return _Notice.TESTED if tests else _Notice.NONE


def _not_scaled(name: str, value: Value, gate: _interpret.Event) -> Law | None:
  """Returns why a gradient is not S times a true one, if it is not."""
  loss_scale = gate.values[gate.call.inputs["loss_scale"]]
  for x in (value, loss_scale):
    if isinstance(x.degree, _values.Unknown):
      why, where = _explained(x)
      kind = Kind.NO_POWER if x.degree.is_sure else Kind.OPEN_POWER
      return _found(kind, _SCALE, where=where, name=name, why=why)
  given, used = map(_degrees.without_axes, (value.degree, loss_scale.degree))
  if value.degree == _values.ANY or given == used:
    return None
  is_twice = given == _degrees.power(used, 2)
  kind = Kind.SCALED_TWICE if is_twice else Kind.OTHER_POWER
  where = _lines([value.grown or value.place or gate.place, gate.place])
  grows, by = map(_degrees.in_words, (value.degree, loss_scale.degree))
  return _found(kind, _SCALE, where=where, name=name, grows=grows, by=by)


def _lost(name: str, value: Value, notice: _Notice) -> Law | None:
  """Returns where a gradient has lost an inf that `update` has to see."""
  taken, dropped = value.mark("taken"), value.mark("dropped")
  is_told = notice is not _Notice.NONE
  # The caller may have seen an inf before.
  is_seen = notice in (_Notice.FINITE, _Notice.DROPPED)
  if taken and (taken.is_sure or not is_seen):
    where = _lines([taken.place])
    if taken.is_sure and not is_told:
      return _found(Kind.INF_LOST, _SCALE, where=where, name=name)
    # Runs can only show whether a test sees an inf that may have been lost.
    is_open = bool(taken.is_sure) or not is_told
    verdict = Verdict.OPEN if is_open else Verdict.UNKNOWN
    return _found(Kind.INF_MAYBE_LOST, _SCALE, verdict, where, name=name)
  if dropped and notice is not _Notice.DROPPED:
    verdict = Verdict.OPEN if is_told else Verdict.REFUTED
    where = _lines([dropped.place])
    return _found(Kind.DROPPED, _SCALE, verdict, where, name=name)
  return None


def _dependence(
  law: LawName, name: str, value: Value, places: Sequence[Place], is_sure: bool
) -> Iterator[Law]:
  """Yields how a value depends on S that must not, if it does."""
  if _degrees.is_free(value.degree):
    return
  why, where = _explained(value)
  depends, may_depend = _DEPENDENCE[law]
  is_sure = is_sure and getattr(value.degree, "is_sure", True)
  kind, where = depends if is_sure else may_depend, where or _lines(places)
  yield _found(kind, law, where=where, name=name, why=why)


def _arguments_law(case: _Case) -> list[Law]:
  """Returns whether the other arguments of `update` do not depend on S."""
  law = LawName.ARGUMENTS
  events = case.of_kind("arguments", "skip")
  given = [(event, *x) for event in events for x in event.of(event.call.inputs)]
  problems: list[Law] = []
  for event, name, value in given:
    name = name.partition("/")[2] if event.kind == "arguments" else "skip"
    problems += _dependence(law, name, value, [event.place], is_sure=True)
  holds = _found(Kind.ARGUMENTS_ARE_FREE, law)
  return [_findings.worst(problems, holds)] if given else []


def _invariance_law(case: _Case) -> Law:
  """Returns whether no next value depends on S, and S is the rule's."""
  step, law = case.step, LawName.INVARIANCE
  if not step.parameters:
    return _found(Kind.NOT_COMPARED, law, Verdict.UNKNOWN)
  problems: list[Law] = []
  moves = [x.place for x in case.of_kind("move")]
  for path, _, after in step.pairs:
    name, value = step.names[path], case.applied[after]
    is_sure = not step.is_guessed(path)
    # The statistics of FP8 layers follow S, since they see scaled gradients.
    if not leaves.overwrites(path):
      problems += _dependence(law, name, value, moves, is_sure)
  problems += [*_next_scales(case), *_still(case), *_split(case)]
  holds = _found(Kind.VALUES_ARE_FREE, law, count=len(step.pairs))
  return _findings.worst(problems, holds)


def _next_scales(case: _Case) -> Iterator[Law]:
  """Yields what is wrong with the S of each state that is returned."""
  step = case.step
  new = {x: step.positions[place] for x, place in step.next_values.items()}
  after = states.find_states(new)
  for path in step.states:
    if path in after and path in case.skipped and path not in step.ones:
      rule_state = after[path].loss_scale_state
      position = _interpret.position_of_scale(rule_state)
      yield from _next_scale(case, path, position)


def _next_scale(case: _Case, path: Path, position: int) -> Iterator[Law]:
  """Yields what is wrong with the next S of a state, if anything is."""
  value, skipped = case.applied[position], case.skipped[path][position]
  scale, places, verdict, other = value.scale, [value.place], None, ""
  if scale is None:
    kind = Kind.S_FOREIGN
    if not getattr(value.degree, "is_sure", True):
      verdict = Verdict.OPEN
  elif scale.path != path:
    kind, other = Kind.S_OF_ANOTHER, case.step.names[scale.path]
  elif scale.stage in _STAGES:
    kind = _STAGES[scale.stage]
  elif lost := [
    x.place
    for x in case.of_kind("move")
    if _moved_path(x) == path and x.place not in scale.moves
  ]:
    kind, places = Kind.S_MISSES_UPDATE, lost
  elif skipped.scale and skipped.scale.stage == "old":
    kind, places = Kind.S_CANNOT_FALL, [skipped.place]
  else:
    return
  names = case.step.names
  of = f" of {names[path]}" if len(case.step.states) > 1 else ""
  yield _found(kind, _INVARIANCE, verdict, _lines(places), of=of, other=other)


def _still(case: _Case) -> Iterator[Law]:
  """Yields the problem that a step that is applied changes nothing."""
  pairs, names = case.step.pairs, case.step.names
  kept = {
    x.path
    for x in pairs
    if case.applied[x.after].identity == Identity(x.before)
  }
  inner = [
    [x.path for x in pairs if leaves.is_inside(x.path, (*y, _INNER))]
    for y in case.skipped
  ]
  for group in (case.step.parameters, *inner):
    if group and kept.issuperset(group):
      yield _found(Kind.OLD_RETURNED, _INVARIANCE, name=names[group[0]])


def _split(case: _Case) -> Iterator[Law]:
  """Yields the values that devices share although they may disagree."""
  alone = {
    axis: x.place
    for x in case.of_kind("move")
    for axis in x.values[x.call.inputs["overflow"]].all_of("varies")
  }
  for path, _, after in case.step.pairs:
    name, value = case.step.names[path], case.applied[after]
    mixed = (Kind.DEVICES_MIXED, value.all_of("mixed") & alone.keys())
    varies = (Kind.DEVICES_MAY_DIFFER, value.all_of("varies"))
    for kind, axes in (mixed, varies):
      for axis in axes:
        place = alone[axis] if kind is Kind.DEVICES_MIXED else value.place
        where = _lines([place])
        yield _found(kind, _INVARIANCE, where=where, name=name, axis=axis)


def _skip_law(case: _Case) -> Law:
  """Returns whether a step that overflows keeps all values, bit for bit."""
  step = case.step
  _, outputs = step.run(step.states.keys(), case.flags)
  are_skipped = [
    outputs[x.skipped].constant
    for x in states.find_states(step.traced.outputs).values()
    if isinstance(x.skipped, Position)
  ]
  if are_skipped and all(x is False for x in are_skipped):
    return _found(Kind.NEVER_SKIPS, _SKIP)
  problems = [
    y for x in step.pairs for y in _changed(case, outputs[x.after], x)
  ]
  problems += [*_changed_by_others(case), *_undone_by_one(case)]
  holds = _found(Kind.KEPT, _SKIP, count=len(step.pairs))
  return _findings.worst(problems, holds)


def _changed_by_others(case: _Case) -> Iterator[Law]:
  """Yields what the skip of one state alone changes, or keeps by half."""
  step = case.step
  for path, alone in case.skipped.items() if len(case.skipped) > 1 else ():
    name = step.names[path]
    # Values that only this state's gradients move must stay if it skips. Else
    # this is what other states move, perhaps by values of this one.
    for x in step.pairs:
      scales = case.applied[x.after].scales
      if scales == {path} or (path in scales and not alone[x.after].scales):
        yield from _changed(case, alone[x.after], x, name)
    for other in case.skipped.keys() - {path}:
      yield from _undone(case, alone, other, Kind.HALF_BY_ANOTHER, other=name)


def _undone_by_one(case: _Case) -> Iterator[Law]:
  """Yields what is undone by half if one of a state's updates is skipped."""
  places: dict[Path, list[Place]] = {}
  for x in case.events:
    if x.is_gate:
      places.setdefault(_gate_path(x) or (), []).append(x.place)
  for path, updates in places.items():
    for place in updates if len(updates) > 1 else ():
      _, alone = case.step.run({place}, case.flags)
      count = len(updates)
      yield from _undone(case, alone, path, Kind.HALF_BY_ONE, count=count)


def _undone(
  case: _Case,
  alone: Sequence[Value],
  path: Path,
  kind: Kind,
  other: str = "",
  count: int = 1,
) -> Iterator[Law]:
  """Yields a state whose parameters stay on a skip, while its moments move."""
  step = case.step
  inner = (*path, _INNER)
  moved = [
    x
    for x in step.pairs
    if x.path in step.parameters and path in case.applied[x.after].scales
  ]
  stay = all(alone[x.after].identity == Identity(x.before) for x in moved)
  is_half = stay and not all(
    (y := alone[x.after].identity) and y.argument == x.before
    for x in step.pairs
    if leaves.is_inside(x.path, inner)
  )
  if moved and is_half and not any(step.is_guessed(x.path) for x in moved):
    where = _lines([alone[x.after].place for x in moved])
    name = step.names.get(path, "")
    yield _found(kind, _SKIP, where=where, name=name, other=other, count=count)


def _changed(
  case: _Case, value: Value, pair: _Pair, other: str = ""
) -> Iterator[Law]:
  """Yields how a value may change though the step, or another state, skips."""
  identity, flag = Identity(pair.before), case.flags.get(pair.before)
  name = case.step.names[pair.path]
  is_flag = flag is not None and value.constant is flag
  if value.identity == identity or is_flag:
    if unseen := value.mark("unseen"):
      where = _lines([unseen.place])
      yield _found(Kind.INF_UNSEEN, _SKIP, where=where, name=name)
    return
  # A product with 0 may be NaN; a condition of the user's may be right; it may
  # be written otherwise.
  is_sure = value.identity != identity._replace(is_sure=False)
  is_sure = is_sure and not case.step.is_guessed(pair.path)
  kind = Kind.MAY_CHANGE_THOUGH if other else Kind.MAY_CHANGE
  verdict = Verdict.REFUTED if is_sure else Verdict.UNKNOWN
  where = _lines([value.place])
  yield _found(kind, _SKIP, verdict, where, name=name, other=other)


def _follows(step: _Step) -> Iterator[str]:
  """Yields the outputs other than next values that depend on S."""
  _, outputs = step.run()
  places = step.next_values.values()
  found = _positioned(step.traced.outputs)
  for path, name in leaves.path_names(found).items():
    is_free = _degrees.is_free(outputs[found[path]].degree)
    if not is_free and not leaves.overlaps(path, places):
      yield name


def _positioned(tree: object) -> dict[Path, Position]:
  found = jax.tree.leaves_with_path(tree)
  return {path: x for path, x in found if isinstance(x, Position)}


def _explained(value: Value) -> tuple[str, tuple[_findings.Line, ...]]:
  """Returns why a value has no fitting degree, and the lines that say so."""
  degree = value.degree
  if not isinstance(degree, _values.Unknown):
    return f"it {_degrees.in_words(degree)}", _lines([value.place])
  lines = _lines([*(x for _, x in degree.operands), degree.place])
  if len(degree.operands) < 2:
    return degree.reason, lines
  said = {
    line: f"{_findings.source(line)} {grows}"
    for grows, place in degree.operands
    for line in _lines([place])
  }
  if len(said) < len(degree.operands):
    both = " and ".join(f"what {grows}" for grows, _ in degree.operands)
    return f"{both} {degree.reason}", lines
  return f"{'; '.join(said.values())}; they {degree.reason}", lines


def _lines(places: Sequence[Place]) -> tuple[_findings.Line, ...]:
  """Returns the user's lines of operations, each once."""
  found: dict[_findings.Line, None] = {}
  for place in places:
    source = source_lines.user_line(place) if place else None
    if source and source_lines.is_own_line(source):
      file, _, line = source.rpartition(":")
      text = linecache.getline(file, int(line)).strip()
      found[file, int(line), text] = None
  return tuple(found)
