"""The laws of a correct step, proved from its jaxpr."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
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
from optax_lossscale._rules import fixed
from optax_lossscale._step import reasons
from optax_lossscale._step import states
from optax_lossscale.instruments import shared
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _interpret
from optax_lossscale.instruments.step import _next_values
from optax_lossscale.instruments.step import _promised
from optax_lossscale.instruments.step import _verdicts
from optax_lossscale.instruments.step._next_values import Pair as _Pair
from optax_lossscale.instruments.step._promised import Position
from optax_lossscale.instruments.step._values import Fact
from optax_lossscale.instruments.step._values import Identity
from optax_lossscale.instruments.step._values import Scale
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._verdicts import Line
from optax_lossscale.instruments.step._verdicts import Proved

# Where a state of loss scaling holds the optimizer's.
_INNER = jax.tree_util.GetAttrKey("inner_state")

# A proof is tried for each truth of as many flags among the arguments.
_MOST_FLAGS = 3


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
  """The verdict on each law, and the outputs that are next values.

  Attributes:
    laws: the laws.
    next_values: for each argument, the output that is its next value.
    certain: the arguments whose next value is not only guessed.
    follows: the other outputs that depend on S.
    assumptions: the library's functions that the proof does not look into.
  """

  laws: tuple[Proved, ...]
  next_values: Mapping[str, Path]
  certain: frozenset[str]
  follows: tuple[str, ...]
  assumptions: tuple[str, ...]


def trace(run: shared.Step, named: Mapping[str, object]) -> Traced:
  """Traces a step for a proof; its arguments may be shapes."""
  shapes: list[Any] = []

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
  return hasattr(x, "dtype") and _next_values.is_value(x)


class _Problem(NamedTuple):
  """A mistake in a step, or one that cannot be ruled out.

  Attributes:
    verdict: "refuted" if it is certain, "open" if no run could tell, or else
      "unknown".
    text: what it is.
    remedy: how to fix it.
    where: the lines of the program.
  """

  verdict: str
  text: str
  remedy: str
  where: tuple[Line, ...] = ()


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
  def states(self) -> dict[Path, Any]:
    return _next_values.moving_states(self.traced.inputs)

  @functools.cached_property
  def names(self) -> dict[Path, str]:
    names = leaves.path_names(_next_values.compared(self.traced.inputs))
    return names | leaves.path_names(self.states)

  @functools.cached_property
  def positions(self) -> dict[Path, Any]:
    return dict(_next_values.subtrees(self.traced.outputs))

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
    return [x for x in found if not _next_values.is_inside(x, *self.states)]

  def flags(self) -> list[int]:
    # A flag is an argument such as `train`.
    avals = self.traced.jaxpr.in_avals
    return [
      int(x)
      for path, x in _positioned(self.traced.inputs).items()
      if avals[x].dtype == bool and not avals[x].shape
      if not _next_values.is_inside(path, *self.states)
    ]

  def is_guessed(self, path: Path) -> bool:
    return _next_values.argument_of(path) in self.guessed

  def pairs_of(self, name: str, place: Path) -> list[_Pair]:
    before = _next_values.compared({name: self.traced.inputs[name]})
    after = _next_values.compared({name: self.positions[place]})
    return [_Pair(x, before[x], after[x]) for x in before if x in after]

  def run(
    self,
    overflowing: Collection[Path | _degrees.Place] = (),
    flags: Mapping[int, bool] | None = None,
  ) -> tuple[Sequence[_interpret.Event], list[Value]]:
    """Interprets the step, given the states that overflow."""
    # Each argument is known to be itself, and its results to read it.
    values = {
      int(x): Value(
        constant=(flags or {}).get(x),
        identity=Identity(int(x)),
        facts=frozenset([Fact("reads", _next_values.argument_of(path))]),
      )
      for path, x in _positioned(self.traced.inputs).items()
    }
    for path, state in self.states.items():
      # The step before measured these with its own S.
      for x in (state.amax, state.range_used):
        if isinstance(x, Position):
          reason = "it is of the S of the step before"
          values[x] = values[x].but(degree=_degrees.Unknown(reason, False))
      # Each state has a symbol for its S, and each copy of a model its own S.
      position = _interpret.position_of_scale(state.loss_scale_state)
      words = "S" if len(self.states) == 1 else f"S of {self.names[path]}"
      axes = tuple(range(self.traced.jaxpr.in_avals[position].ndim))
      degree = _degrees.of((_degrees.Symbol(words, position), axes))
      values[position] = values[position].but(
        degree=_degrees.FREE if path in self.ones else degree,
        scale=Scale(path, "old"),
        facts=frozenset([Fact("scale", path)]),
      )
    calls = self.traced.trace.calls
    machine = _interpret.Interpreter(calls, frozenset(overflowing))
    outputs = machine.run(self.traced.jaxpr, [*values.values()])
    return [*machine.events.values()], outputs


class _Case(NamedTuple):
  """A step, given some flags' truth.

  Attributes:
    step: the step.
    flags: the flags' truth by position.
    events: the promised calls of a step that is applied.
    applied: the outputs of such a step.
    skipped: those if a state overflows, by its path.
  """

  step: _Step
  flags: Mapping[int, bool]
  events: Sequence[_interpret.Event]
  applied: Sequence[Value]
  skipped: Mapping[Path, Sequence[Value]]

  def of_kind(self, *kinds: str) -> list[_interpret.Event]:
    """Returns the promised calls of some kinds."""
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
    laws = [Proved("scale", *_verdicts.SWITCHED_OFF)]
    if any(call.kind == "skip" for call in traced.trace.calls):
      laws.append(Proved("skip", *_verdicts.SKIPS_UNSEEN))
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
  flags = step.flags()
  if 0 < len(flags) <= _MOST_FLAGS and not _holds(laws):
    cases = []
    for truths in itertools.product((True, False), repeat=len(flags)):
      cases += _judge(step, dict(zip(flags, truths, strict=True)))
    if _holds(cases):
      laws = [x for x in cases if x.verdict == "proved"] or cases
      laws = list({(x.law, x.path): x for x in laws}.values())
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


def _holds(laws: Sequence[Proved]) -> bool:
  return all(x.verdict in ("proved", "not applied") for x in laws)


def _judge(step: _Step, flags: Mapping[int, bool]) -> list[Proved]:
  """Returns what is proved of a step, given some flags' truth."""
  events, applied = step.run((), flags)
  gates: dict[Path | None, list[_interpret.Event]] = {}
  for x in events:
    if x.is_gate:
      gates.setdefault(
        _path_of(x.values[x.call.inputs["loss_scale"]]), []
      ).append(x)
  if not gates:
    text = "`update` of loss_scaling does not run."
    if any(call.kind == "examine" for call in step.traced.trace.calls):
      text = (
        "`update` of loss_scaling is inside a function that rewrites it, such "
        "as `autocast`; give that function the loss function alone."
      )
    return [Proved("scale", "unknown", text)]
  skipped = {path: step.run({path}, flags)[1] for path in gates if path}
  skips = [x for x in events if x.kind == "skip"]
  case = _Case(step, flags, events, applied, skipped)
  return [
    *(_scale_law(path, found, step, skips) for path, found in gates.items()),
    *_arguments_law(case),
    _invariance_law(case),
    _skip_law(case),
  ]


def _split(case: _Case) -> Iterator[_Problem]:
  """Yields the values that devices share although they may disagree."""
  alone = {
    axis: x.place
    for x in case.of_kind("move")
    for axis in x.values[x.call.inputs["overflow"]].all_of("varies")
  }
  for path, _, after in case.step.pairs:
    name = case.step.names[path]
    for axis in case.applied[after].all_of("mixed") & alone.keys():
      text = (
        f"{name} mixes the gradients of all devices along {axis!r}, and each "
        "device skips for itself"
      )
      yield _Problem("refuted", text, _verdicts.ALONE, _lines([alone[axis]]))
    for axis in case.applied[after].all_of("varies"):
      text = f"{name} is returned as one, but may differ along {axis!r}"
      where = _lines([case.applied[after].place])
      yield _Problem("open", text, _verdicts.ALONE, where)


def _moved_path(move: _interpret.Event) -> Path | None:
  """Returns the state that a call of a rule moves."""
  position = _interpret.position_of_scale(move.call.inputs["state"])
  return _path_of(move.values[position])


def _path_of(loss_scale: Value) -> Path | None:
  return loss_scale.scale and loss_scale.scale.path


def _scale_law(
  path: Path | None,
  gates: Sequence[_interpret.Event],
  step: _Step,
  skips: Sequence[_interpret.Event],
) -> Proved:
  """Returns whether S times true gradients enter `update`, with every inf."""
  # A step may be skipped because of its loss.
  is_doubted = any(x.mark("doubted") for skip in skips for x in skip.values)
  names: list[str] = []
  problems: list[_Problem] = []
  for gate in gates:
    given = gate.call.inputs
    loss_scale, overflow = given["loss_scale"], given["overflow"]
    told = _told(overflow, [x for _, x in gate.of(overflow)])
    for name, value in gate.of(given["scaled_grads"]):
      names.append(name)
      if is_doubted:
        value = value.but(facts=value.facts - {Fact("taken", None)})
      problem = _problem(value, gate.values[loss_scale], gate.place, told)
      if problem:
        of = f"The gradient {name or 'of the parameter'} "
        problems.append(problem._replace(text=of + problem.text))
  one = len(names) == 1
  each = "The gradient" if one else f"Each of the {len(names)} gradients"
  text = f"{each} that `update` is given is S times the true one."
  place = "" if path is None or len(step.states) == 1 else step.names[path]
  return _law("scale", problems, text, place)


def _told(overflow: object, flags: Sequence[Value]) -> str:
  """Returns what the caller says of an overflow, if anything.

  It is "dropped" with the micro-batches that overflow, "finite" if a test of
  finiteness decides, or "tested" if another test may.
  """

  def tells(x: object) -> bool:
    return isinstance(x, reasons.WindowOverflow)

  if any(map(tells, jax.tree.leaves(overflow, is_leaf=tells))):
    return "dropped"
  tests = [test for x in flags if (test := x.mark("tested"))]
  if any(x.finite is not None for x in tests):
    return "finite"
  return "tested" if tests else ""


def _problem(
  value: Value,
  loss_scale: Value,
  gate: _degrees.Place,
  told: str,
) -> _Problem | None:
  """Returns what is wrong with a gradient that enters `update`."""
  for x in (value, loss_scale):
    if isinstance(x.degree, _degrees.Unknown):
      text, where = _explained(x)
      verb = "is not" if x.degree.is_sure else "may not be"
      text = f"{verb} S times a true one: {text}"
      return _Problem(_sure(x.degree.is_sure), text, _verdicts.INSIDE, where)
  given, used = map(_degrees.without_axes, (value.degree, loss_scale.degree))
  if value.degree != _degrees.ANY and given != used:
    text = (
      f"{_degrees.in_words(value.degree)}, but `update` divides it by what "
      f"{_degrees.in_words(loss_scale.degree)}"
    )
    is_twice = given == _degrees.power(used, 2)
    remedy = _verdicts.TWICE if is_twice else _verdicts.NOT_SCALED
    where = _lines([value.grown or value.place or gate, gate])
    return _Problem("refuted", text, remedy, where)
  taken, dropped = value.mark("taken"), value.mark("dropped")
  # The caller may have seen an inf before.
  if taken and (taken.detail or told in ("", "tested")):
    is_sure = bool(taken.detail) and not told
    verb = "has lost" if is_sure else "may have lost"
    text = f"{verb} its inf and NaN, which `update` has to see"
    remedy = _verdicts.HIDDEN if is_sure else _verdicts.TOLD
    is_open = bool(told) is bool(taken.detail)
    verdict = "refuted" if is_sure else "open" if is_open else "unknown"
    return _Problem(verdict, text, remedy, _lines([taken.place]))
  if dropped and told != "dropped":
    text = "leaves out micro-batches, which `overflow=` must say"
    where = _lines([dropped.place])
    verdict = "open" if told else "refuted"
    return _Problem(verdict, text, _verdicts.DROPPED, where)
  return None


def _sure(is_sure: bool) -> str:
  return "refuted" if is_sure else "unknown"


def _law(
  law: str, problems: Sequence[_Problem], proved: str, path: str = ""
) -> Proved:
  """Returns the verdict for the first problem, if possible a certain one."""
  if not problems:
    return Proved(law, "proved", proved, path=path)
  order = ("refuted", "open", "unknown")
  worst = min(problems, key=lambda x: order.index(x.verdict))
  more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
  return Proved(law, worst.verdict, f"{worst.text}{more}.", *worst[2:], path)


def _dependence(
  name: str,
  value: Value,
  remedy: str,
  events: Iterable[_interpret.Event],
  *,
  is_sure: bool = True,
) -> _Problem | None:
  """Returns how a value depends on S that must not, if it does."""
  if _degrees.is_free(value.degree):
    return None
  text, where = _explained(value)
  is_sure = is_sure and getattr(value.degree, "is_sure", True)
  verb = "depends" if is_sure else "may depend"
  text = f"{name} {verb} on S: {text}"
  where = where or _lines([x.place for x in events])
  return _Problem(_sure(is_sure), text, remedy, where)


def _arguments_law(case: _Case) -> list[Proved]:
  """Returns whether the other arguments of `update` do not depend on S."""
  given = [
    (name.partition("/")[2] if event.kind == "arguments" else "skip", x, event)
    for event in case.of_kind("arguments", "skip")
    for name, x in event.of(event.call.inputs)
  ]
  problems = [
    _dependence(f"`{name}=`", x, _verdicts.GIVEN, [event])
    for name, x, event in given
  ]
  text = "No argument of `update` but the gradients depends on S."
  found = [x for x in problems if x]
  return [_law("arguments", found, text)] if given else []


def _invariance_law(case: _Case) -> Proved:
  """Returns whether no next value depends on S, and S is the rule's."""
  step = case.step
  if not step.parameters:
    return Proved("invariance", "unknown", _verdicts.NOT_COMPARED[1])
  problems = [
    _dependence(
      step.names[path],
      case.applied[after],
      _verdicts.PASSED_BY,
      case.of_kind("move"),
      is_sure=not step.is_guessed(path),
    )
    for path, _, after in step.pairs
    # The statistics of FP8 layers follow S, since they see scaled gradients.
    if not leaves.overwrites(path)
  ]
  problems += [*_next_scales(case), *_still(case), *_split(case)]
  text = f"None of {len(step.pairs)} next values depends on S."
  return _law("invariance", [x for x in problems if x], text)


def _still(case: _Case) -> Iterator[_Problem]:
  """Yields the problem that a step that is applied changes nothing."""
  pairs, names = case.step.pairs, case.step.names
  kept = {
    x.path
    for x in pairs
    if case.applied[x.after].identity == Identity(x.before)
  }
  inner = [
    [x.path for x in pairs if _next_values.is_inside(x.path, (*y, _INNER))]
    for y in case.skipped
  ]
  for group in (case.step.parameters, *inner):
    if group and kept.issuperset(group):
      text = f"A step that is applied returns the old {names[group[0]]}"
      yield _Problem("refuted", text, _verdicts.RETURNED)


def _next_scales(case: _Case) -> Iterator[_Problem]:
  """Yields what is wrong with the S of each state that is returned."""
  step = case.step
  after: dict[Path, states.LossScalingState] = {}
  for name, place in step.next_values.items():
    after |= states.find_states({name: step.positions[place]})
  for path in step.states:
    if path not in after or path not in case.skipped or path in step.ones:
      continue
    position = _interpret.position_of_scale(after[path].loss_scale_state)
    value, skipped = case.applied[position], case.skipped[path][position]
    scale, places, verdict = value.scale, [value.place], "refuted"
    lost = [
      x.place
      for x in case.of_kind("move")
      if _moved_path(x) == path and scale and x.place not in scale.moves
    ]
    if scale is None:
      text = "is not what the rule makes of this one"
      verdict = "refuted" if getattr(value.degree, "is_sure", True) else "open"
    elif scale.path != path:
      text = f"is that of {step.names[scale.path]}"
    elif scale.stage == "old":
      text = "is the old one, so S never moves"
    elif scale.stage == "untold":
      text = "is the rule's only where the gradients are finite"
    elif scale.stage == "either":
      text, verdict = "is the rule's or the old one, by a condition", "open"
    elif lost:
      text, places = "knows nothing of an `update` whose state is lost", lost
    elif skipped.scale and skipped.scale.stage == "old":
      text = "is the old one if the step is skipped, so S cannot fall"
      places = [skipped.place]
    else:
      continue
    of = f" of {step.names[path]}" if len(step.states) > 1 else ""
    text = f"The next S{of} {text}"
    yield _Problem(verdict, text, _verdicts.RETURNED, _lines(places))


def _skip_law(case: _Case) -> Proved:
  """Returns whether a step that overflows keeps all values, bit for bit."""
  step, applied, skipped = case.step, case.applied, case.skipped
  _, outputs = step.run(step.states.keys(), case.flags)
  are_skipped = [
    outputs[x.skipped].constant
    for x in states.find_states(step.traced.outputs).values()
    if isinstance(x.skipped, Position)
  ]
  if are_skipped and all(x is False for x in are_skipped):
    text = "The rule has skip=False, so that overflows are applied."
    return Proved("skip", "not applied", text)
  problems = [_changed(case, outputs[x.after], x) for x in step.pairs]
  for path, alone in skipped.items() if len(skipped) > 1 else ():
    # Values that only this state's gradients move must stay if it skips. Else
    # this is what other states move, perhaps by values of this one.
    problems += [
      _changed(case, alone[x.after], x, f", though {step.names[path]} skips")
      for x in step.pairs
      if (scales := applied[x.after].scales) == {path}
      or (path in scales and not alone[x.after].scales)
    ]
    for other in skipped.keys() - {path}:
      which = f"only {step.names[path]} skips"
      problems += _undone(case, alone, other, which, _verdicts.TOGETHER)
  problems += _undone_by_one(case)
  count = len(step.pairs)
  text = f"If `update` sees an overflow, all {count} next values stay."
  return _law("skip", [x for x in problems if x], text)


def _undone_by_one(case: _Case) -> Iterator[_Problem]:
  """Yields what is undone by half if one of a state's updates is skipped."""
  places: dict[Path, list[_degrees.Place]] = {}
  for x in filter(lambda x: x.is_gate, case.events):
    path = _path_of(x.values[x.call.inputs["loss_scale"]])
    places.setdefault(path or (), []).append(x.place)
  for path, updates in places.items():
    for place in updates if len(updates) > 1 else ():
      _, alone = case.step.run({place}, case.flags)
      which = f"only one of {len(updates)} updates of a step is skipped"
      yield from _undone(case, alone, path, which, _verdicts.EACH)


def _undone(
  case: _Case, alone: Sequence[Value], path: Path, which: str, remedy: str
) -> Iterator[_Problem]:
  """Yields a state whose parameters stay on a skip, while its moments move."""

  def argument(pair: _Pair) -> int | None:
    identity = alone[pair.after].identity
    return identity and identity.argument

  inner = [
    x
    for x in case.step.pairs
    if _next_values.is_inside(x.path, (*path, _INNER))
  ]
  moved = [
    x
    for x in case.step.pairs
    if x.path in case.step.parameters
    if path in case.applied[x.after].scales
  ]
  stay = all(alone[x.after].identity == Identity(x.before) for x in moved)
  is_half = stay and any(argument(x) != x.before for x in inner)
  if moved and is_half and not any(case.step.is_guessed(x.path) for x in moved):
    name = case.step.names.get(path, "")
    text = (
      f"If {which}, the parameters that {name} moves stay, but not its "
      "optimizer's state"
    )
    where = _lines([alone[x.after].place for x in moved])
    yield _Problem("refuted", text, remedy, where)


def _changed(
  case: _Case, value: Value, pair: _Pair, more: str = ""
) -> _Problem | None:
  """Returns how a skipped step may change a value."""
  identity, flag = Identity(pair.before), case.flags.get(pair.before)
  name = case.step.names[pair.path]
  if value.identity == identity or (
    flag is not None and value.constant is flag
  ):
    unseen = value.mark("unseen")
    text = f"{name} may take inf from gradients that no `update` sees"
    where = _lines([unseen.place] if unseen else [])
    problem = _Problem("open", text, _verdicts.PASSED_BY, where)
    return problem if unseen else None
  text = f"If the step is skipped, {name} may change{more}"
  # A product with 0 may be NaN; a condition of the user's may be right; it may
  # be written otherwise.
  is_sure = value.identity != identity._replace(is_sure=False)
  is_sure = is_sure and not case.step.is_guessed(pair.path)
  return _Problem(_sure(is_sure), text, _verdicts.MOVES, _lines([value.place]))


def _follows(step: _Step) -> Iterator[str]:
  """Yields the outputs other than next values that depend on S."""
  _, outputs = step.run()
  places = step.next_values.values()
  found = _positioned(step.traced.outputs)
  for path, name in leaves.path_names(found).items():
    is_free = _degrees.is_free(outputs[found[path]].degree)
    if not is_free and not _next_values.overlaps(path, places):
      yield name


def _positioned(tree: object) -> dict[Path, Position]:
  """Returns the positions in a tree by path."""
  found = jax.tree.leaves_with_path(tree)
  return {path: x for path, x in found if isinstance(x, Position)}


def _explained(value: Value) -> tuple[str, tuple[Line, ...]]:
  """Returns why a value has no fitting degree, and the lines that say so."""
  degree = value.degree
  if not isinstance(degree, _degrees.Unknown):
    return f"it {_degrees.in_words(degree)}", _lines([value.place])
  lines = _lines([*(x for _, x in degree.operands), degree.place])
  if len(degree.operands) < 2:
    return degree.reason, lines
  said = {
    line: f"{_verdicts.source(line)} {grows}"
    for grows, place in degree.operands
    for line in _lines([place])
  }
  if len(said) < len(degree.operands):
    both = " and ".join(f"what {grows}" for grows, _ in degree.operands)
    return f"{both} {degree.reason}", lines
  return f"{'; '.join(said.values())}; they {degree.reason}", lines


def _lines(places: Sequence[_degrees.Place]) -> tuple[Line, ...]:
  """Returns the user's lines of operations, each once."""
  found: dict[Line, None] = {}
  for place in places:
    source = shared.user_line(place) if place else None
    if source and shared.is_own_line(source):
      file, _, line = source.rpartition(":")
      text = linecache.getline(file, int(line)).strip()
      found[file, int(line), text] = None
  return tuple(found)
