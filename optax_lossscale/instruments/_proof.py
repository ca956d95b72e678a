"""The laws of a correct step, proved from its jaxpr."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import linecache
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._base import leaves
from optax_lossscale._base import named_calls
from optax_lossscale._base.named_calls import Position
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import source_lines
from optax_lossscale._rules import loss_scales
from optax_lossscale._step import findings
from optax_lossscale._step import states
from optax_lossscale.instruments import _degrees
from optax_lossscale.instruments import _interpret
from optax_lossscale.instruments import _next_values
from optax_lossscale.instruments import _verdicts
from optax_lossscale.instruments._interpret import Identity
from optax_lossscale.instruments._interpret import Value
from optax_lossscale.instruments._verdicts import Line
from optax_lossscale.instruments._verdicts import Proved

# A proof is tried for each truth of as many flags among the arguments.
_MOST_FLAGS = 3


class Traced(NamedTuple):
  """A step's jaxpr, and trees with positions among its inputs and outputs."""

  jaxpr: core.Jaxpr
  inputs: Mapping[str, object]
  outputs: object
  shapes: object
  trace: named_calls.Trace

  def named_inputs(self) -> dict[int, str]:
    """Returns the inputs' names by position."""
    return {
      int(x): leaves.path_name(path)
      for path, x in jax.tree.leaves_with_path(self.inputs)
      if isinstance(x, Position)
    }


class Proof(NamedTuple):
  """What a proof says of each law, and the outputs that are next values.

  Attributes:
    laws: the laws.
    next_values: for each argument, the output that is its next value.
    certain: the arguments whose next value is not only guessed.
    follows: the other outputs that depend on S.
    assumptions: the library's functions that the proof does not look into.
  """

  laws: tuple[Proved, ...]
  next_values: Mapping[str, str]
  certain: frozenset[str]
  follows: tuple[str, ...]
  assumptions: tuple[str, ...]


def trace(
  run: Callable[[Mapping[str, object]], object], named: Mapping[str, object]
) -> Traced:
  """Traces a step for a proof; its arguments may be shapes."""
  found: dict[str, Any] = {}

  def arrays_of(named: Mapping[str, object]) -> list[object]:
    outputs, treedef = jax.tree.flatten(run(named))
    places = [i for i, x in enumerate(outputs) if _has_value(x)]
    found.update(outputs=outputs, treedef=treedef, places=places)
    return [outputs[i] for i in places]

  with named_calls.proving() as found_calls:
    recording = interpreter.record(
      arrays_of, (dict(named),), {}, may_change=True
    )
  kept, tree = jax.tree.flatten(dict(named))
  counted = itertools.count()
  inputs = [
    Position(next(counted)) if interpreter.is_array(x) else _Opaque(x)
    for x in kept
  ]
  shapes, positions = list(found["outputs"]), list(found["outputs"])
  positions = [_Opaque(x) for x in positions]
  for i, place in enumerate(found["places"]):
    aval = recording.jaxpr.out_avals[i]
    shapes[place] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    positions[place] = Position(i)
  return Traced(
    recording.jaxpr,
    jax.tree.unflatten(tree, inputs),
    jax.tree.unflatten(found["treedef"], positions),
    jax.tree.unflatten(found["treedef"], shapes),
    found_calls,
  )


class _Opaque:
  """A leaf that is no array."""

  def __init__(self, value: object) -> None:
    self.value = value


def _has_value(x: object) -> bool:
  return hasattr(x, "dtype") and _next_values.is_value(x)


class _Problem(NamedTuple):
  """What is wrong with a step, or may be."""

  is_sure: bool
  text: str
  remedy: str
  where: tuple[Line, ...] = ()


class _Pair(NamedTuple):
  """A leaf of an argument, and that of its next value."""

  name: str
  before: int
  after: int


class _Step:
  """A traced step, and how its outputs lead back to its arguments."""

  def __init__(
    self,
    traced: Traced,
    named: Mapping[str, object],
    next_values: Mapping[str, str],
    certain: Collection[str],
    free: Collection[str],
  ) -> None:
    self.traced = traced
    self.states = {
      path: state
      for path, state in states.find_states(traced.inputs).items()
      if jax.tree.leaves(state.loss_scale_state)
    }
    self.scales = {
      _interpret.position_of_scale(x.loss_scale_state): path
      for path, x in self.states.items()
    }
    self.names = traced.named_inputs()
    self.ones: frozenset[str] = frozenset()
    self.positions = dict(_next_values.subtrees(traced.outputs))
    self.next_values = dict(next_values)
    # Arguments whose next value was guessed by its form alone.
    self.guessed = frozenset(next_values.keys() - certain)
    if self.guessed:
      self._match(named)
    self.pairs = [
      pair
      for name, place in self.next_values.items()
      for pair in self._pairs(name, place)
      if pair.name not in free
    ]
    self.parameters = [
      x.name
      for x in self.pairs
      if leaves.is_gradient(traced.jaxpr.in_avals[x.before])
      and not any(_inside(x.name, y) for y in self.states)
    ]
    self.flags = [
      i
      for i, x in enumerate(traced.jaxpr.jaxpr.invars)
      if _degrees.aval(x).dtype == bool
      and not _degrees.aval(x).shape
      and not any(_inside(self.names.get(i, ""), x) for x in self.states)
    ]

  def _match(self, named: Mapping[str, object]) -> None:
    """Corrects the next values by what a skipped step returns."""
    values = self.run(self.states.keys())[1]
    applied = self.run()[1]
    shapes = dict(_next_values.subtrees(self.traced.shapes))

    def is_kept(name: str, place: str) -> bool:
      pairs = self._pairs(name, place)
      return bool(pairs) and all(
        values[x.after].identity == Identity(x.before) for x in pairs
      )

    forms = {place: _next_values.form(shape) for place, shape in shapes.items()}
    for name in self.guessed:
      place, form = self.next_values[name], _next_values.form(named[name])
      others = [x for x, y in forms.items() if x and x != place and y == form]
      kept = [x for x in (place, *others) if is_kept(name, x)]
      if kept:
        self.next_values[name] = kept[0]
        self.guessed -= {name}
        continue
      pairs = self._pairs(name, place)
      after = [values[x.after] for x in pairs]
      tree = named[name]
      is_one = _next_values.is_value(tree) and not _next_values.is_key(tree)
      # Outputs of zero may be a skip's updates, and those that grow gradients.
      is_other = all(
        (isinstance(x.degree, tuple) and x.degree) or x.degree == _degrees.ANY
        for x in after
      )
      is_read = any(name in applied[x.after].all_of("reads") for x in pairs)
      taken = self.next_values.values()
      has_rival = any(not _next_values.overlaps(x, taken) for x in others)
      if states.find_states(tree) or (
        is_read and not (is_one or is_other or has_rival)
      ):
        self.guessed -= {name}
    # A number that only a skip returns is one, too.
    for name in named.keys() - self.next_values.keys():
      form = _next_values.form(named[name])
      for place, other in forms.items():
        pairs = self._pairs(name, place) if place and other == form else []
        if (
          pairs
          and not _next_values.overlaps(place, self.next_values.values())
          and is_kept(name, place)
          and any(
            applied[x.after].identity != Identity(x.before) for x in pairs
          )
        ):
          self.next_values[name] = place
          break

  def is_guessed(self, name: str) -> bool:
    """Returns whether a leaf's argument may have another next value."""
    return name.partition("/")[0] in self.guessed

  def _pairs(self, name: str, place: str) -> list[_Pair]:
    before = _next_values.named_leaves(self.traced.inputs[name], name)
    after = _next_values.named_leaves(self.positions[place], name)
    return [_Pair(x, before[x], after[x]) for x in before if x in after]

  def run(
    self,
    overflowing: Collection[str] = (),
    flags: Mapping[int, bool] | None = None,
  ) -> tuple[_interpret.Interpreter, list[Value]]:
    """Interprets the step, given the states that overflow."""
    machine = _interpret.Interpreter(
      self.traced.trace.calls, frozenset(overflowing)
    )
    before = {
      int(x)
      for state in self.states.values()
      for x in (state.amax, state.range_used)
      if isinstance(x, Position)
    }
    inputs = []
    for i, variable in enumerate(self.traced.jaxpr.jaxpr.invars):
      path = self.scales.get(i)
      name = self.names[i].partition("/")[0]
      value = Value(
        identity=Identity(i),
        constant=(flags or {}).get(i),
        facts=frozenset([_interpret.Fact("reads", name)]),
      )
      if i in before:
        reason = "it is of the S of the step before"
        value = value.but(degree=_degrees.Unknown(reason, False))
      if path is not None:
        words = "S" if len(self.scales) == 1 else f"S of {path}"
        axes = tuple(range(_degrees.aval(variable).ndim))
        degree = _degrees.of((_degrees.Symbol(words, i), axes))
        value = value.but(
          degree=_degrees.FREE if path in self.ones else degree,
          scale=_interpret.Scale(path, "old"),
          facts=frozenset([_interpret.Fact("scale", path)]),
        )
      inputs.append(value)
    return machine, machine.run(self.traced.jaxpr, inputs)


def prove(
  traced: Traced,
  named: Mapping[str, object],
  next_values: Mapping[str, str],
  certain: Collection[str],
  free: Collection[str],
) -> Proof:
  """Proves or refutes the laws of a step that was traced.

  The next values of arguments that are not `certain` were guessed, and the
  leaves that are `free` may depend on S or change on a skip.
  """
  step = _Step(traced, named, next_values, certain, free)
  if not step.states:
    law = Proved("scale", *_verdicts.SWITCHED_OFF)
    return Proof((law,), {}, frozenset(), (), ())
  machine, _ = step.run()
  # An S that is 1 for ever is a number like any other.
  step.ones = frozenset(
    scale.path
    for event in machine.events.values()
    if event.kind == "move" and _is_one(event.call.facts["rule"])
    if (
      scale := event.values[
        _interpret.position_of_scale(event.call.inputs[0])
      ].scale
    )
  )
  laws = _judge(step, {})
  flags = step.flags
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


def _is_one(rule: object) -> bool:
  return isinstance(rule, loss_scales.FixedLossScale) and rule.scale == 1


def _holds(laws: Sequence[Proved]) -> bool:
  return all(x.verdict in ("proved", "not applied") for x in laws)


def _judge(step: _Step, flags: Mapping[int, bool]) -> list[Proved]:
  """Returns what is proved of a step, given some flags' truth."""
  machine, outputs = step.run((), flags)
  events = list(machine.events.values())
  gates = [x for x in events if x.kind == "examine" and x.call.facts["is_gate"]]
  if not gates:
    text = "`update` of loss_scaling does not run."
    return [Proved("scale", "unknown", text)]
  found = [
    _scale_law(path, [x for x in gates if _path_of(x) == path], step)
    for path in dict.fromkeys(map(_path_of, gates))
  ]
  given = [x for x in events if x.kind in ("arguments", "skip")]
  found += _arguments_law(given)
  moves = [x for x in events if x.kind == "move"]
  skipped = {
    path: step.run({path}, flags)[1]
    for path in dict.fromkeys(map(_path_of, gates))
    if path
  }
  found += [_invariance_law(step, outputs, skipped, moves)]
  return [*found, _skip_law(step, outputs, skipped, flags)]


def _split(
  step: _Step, outputs: Sequence[Value], moves: Sequence[_interpret.Event]
) -> list[_Problem]:
  """Returns the values that devices share although each skips alone."""
  alone = {
    axis: x.place
    for x in moves
    for axis in x.values[x.call.inputs[1]].all_of("varies")
  }
  found = []
  for name, _, after in step.pairs:
    for axis in outputs[after].all_of("mixed") & alone.keys():
      text = (
        f"{name} is made of all devices' gradients along {axis!r}, each of "
        "which skips for itself"
      )
      where = _lines([alone[axis]])
      found.append(_Problem(True, text, _verdicts.ALONE, where))
  return found


def _moved_path(move: _interpret.Event) -> str | None:
  position = _interpret.position_of_scale(move.call.inputs[0])
  scale = move.values[position].scale
  return scale and scale.path


def _path_of(gate: _interpret.Event) -> str | None:
  loss_scale = gate.values[gate.call.inputs[0]]
  return loss_scale.scale.path if loss_scale.scale else None


def _scale_law(
  path: str | None, gates: Sequence[_interpret.Event], step: _Step
) -> Proved:
  """Returns whether S times true gradients enter `update`, with every inf."""
  count = 0
  problems: list[_Problem] = []
  place = "" if path is None or len(step.states) == 1 else path
  for gate in gates:
    loss_scale_position, gradients, overflow, _ = gate.call.inputs
    loss_scale = gate.values[loss_scale_position]
    windows = jax.tree.leaves(
      overflow, is_leaf=lambda x: isinstance(x, findings.WindowOverflow)
    )
    is_told = any(isinstance(x, findings.WindowOverflow) for x in windows)
    for name, value in gate.of(gradients):
      count += 1
      problem = _problem(value, loss_scale, gate, is_told=is_told)
      if problem:
        of = f"The gradient {name or 'of the parameter'} "
        problems.append(problem._replace(text=of + problem.text))
  if not problems:
    each = "The gradient" if count == 1 else f"Each of the {count} gradients"
    text = f"{each} that `update` is given is S times the true one."
    return Proved("scale", "proved", text, path=place)
  return _worst("scale", problems, place)


def _problem(
  value: Value,
  loss_scale: Value,
  gate: _interpret.Event,
  *,
  is_told: bool,
) -> _Problem | None:
  """Returns what is wrong with a gradient that enters `update`."""
  for x in (value, loss_scale):
    if isinstance(x.degree, _degrees.Unknown):
      text, where = _explained(x)
      verb = "is not" if x.degree.is_sure else "may not be"
      text = f"{verb} S times a true one: {text}"
      return _Problem(x.degree.is_sure, text, _verdicts.INSIDE, where)
  given, used = map(_degrees.without_axes, (value.degree, loss_scale.degree))
  if value.degree != _degrees.ANY and given != used:
    text = (
      f"{_degrees.in_words(value.degree)}, but `update` divides it by what "
      f"{_degrees.in_words(loss_scale.degree)}"
    )
    remedy = _verdicts.NOT_SCALED
    if given == _degrees.power(used, 2):
      remedy = _verdicts.TWICE
    where = _lines([value.grown or value.place or gate.place, gate.place])
    return _Problem(True, text, remedy, where)
  taken, dropped = value.mark("taken"), value.mark("dropped")
  if taken:
    verb = "has lost" if taken.detail else "may have lost"
    text = f"{verb} its inf and NaN, which `update` has to see"
    where = _lines([taken.place])
    return _Problem(bool(taken.detail), text, _verdicts.HIDDEN, where)
  if dropped and not is_told:
    text = "leaves out micro-batches, which `overflow=` must say"
    where = _lines([dropped.place])
    return _Problem(True, text, _verdicts.DROPPED, where)
  return None


def _worst(
  law: str,
  problems: Sequence[_Problem],
  path: str = "",
) -> Proved:
  """Returns the verdict for the first problem, if possible a certain one."""
  worst = next((x for x in problems if x.is_sure), problems[0])
  verdict = "refuted" if worst.is_sure else "unknown"
  more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
  return Proved(law, verdict, f"{worst.text}{more}.", *worst[2:], path)


def _arguments_law(events: Sequence[_interpret.Event]) -> list[Proved]:
  """Returns whether the other arguments of `update` do not depend on S."""
  problems, count = [], 0
  for event in events:
    for name, value in event.of(event.call.inputs):
      count += 1
      if _degrees.is_free(value.degree):
        continue
      text, where = _explained(value)
      sure = getattr(value.degree, "is_sure", True)
      name = name.partition("/")[2] if event.kind == "arguments" else "skip"
      text = f"`{name}=` {_depends(sure)} on S: {text}"
      where = where or _lines([event.place])
      problems.append(_Problem(sure, text, _verdicts.GIVEN, where))
  if problems:
    return [_worst("arguments", problems)]
  if not count:
    return []
  text = "What `update` is given beside the gradients does not depend on S."
  return [Proved("arguments", "proved", text)]


def _depends(is_sure: bool) -> str:
  return "depends" if is_sure else "may depend"


def _invariance_law(
  step: _Step,
  outputs: Sequence[Value],
  skipped: Mapping[str, Sequence[Value]],
  moves: Sequence[_interpret.Event],
) -> Proved:
  """Returns whether no next value depends on S, and S is the rule's."""
  problems: list[_Problem] = []
  if not step.parameters:
    return Proved("invariance", "unknown", _verdicts.NOT_COMPARED[1])
  for name, _, after in step.pairs:
    value = outputs[after]
    # The statistics of FP8 layers follow S, since they see scaled gradients.
    is_exempt = leaves.OVERWRITE_WITH_GRADIENT & {*name.split("/")}
    if _degrees.is_free(value.degree) or is_exempt:
      continue
    text, where = _explained(value)
    sure = getattr(value.degree, "is_sure", True) and not step.is_guessed(name)
    text = f"{name} {_depends(sure)} on S: {text}"
    problems.append(_Problem(sure, text, _verdicts.PASSED_BY, where))
  problems += _next_scales(step, outputs, skipped, moves)
  problems += _still(step, outputs, skipped.keys())
  problems += _split(step, outputs, moves)
  if problems:
    return _worst("invariance", problems)
  text = f"None of {len(step.pairs)} next values depends on S."
  return Proved("invariance", "proved", text)


def _still(
  step: _Step, outputs: Sequence[Value], used: Iterable[str]
) -> list[_Problem]:
  """Returns the problem that a step that is applied changes nothing."""
  kept = {
    x.name
    for x in step.pairs
    if outputs[x.after].identity == Identity(x.before)
  }
  groups = [step.parameters]
  groups += [
    [x.name for x in step.pairs if _inside(x.name, f"{y}/inner_state")]
    for y in used
  ]
  return [
    _Problem(
      True,
      f"A step that is applied returns the old {group[0]}",
      _verdicts.RETURNED,
    )
    for group in groups
    if group and kept.issuperset(group)
  ]


def _next_scales(
  step: _Step,
  outputs: Sequence[Value],
  skipped: Mapping[str, Sequence[Value]],
  moves: Sequence[_interpret.Event],
) -> list[_Problem]:
  """Returns what is wrong with the S of each state that is returned."""
  found = []
  after: dict[str, states.LossScalingState] = {}
  for name, place in step.next_values.items():
    after |= states.find_states({name: step.positions[place]})
  for path in step.states:
    if path not in after or path not in skipped or path in step.ones:
      continue
    position = _interpret.position_of_scale(after[path].loss_scale_state)
    value, if_skipped = outputs[position], skipped[path][position]
    lost = [
      x.place
      for x in moves
      if _moved_path(x) == path
      and value.scale
      and x.place not in value.scale.moves
    ]
    places, is_sure = [value.place], True
    if value.scale is None:
      text = "is not what the rule makes of this one"
      is_sure = getattr(value.degree, "is_sure", True)
    elif value.scale.path != path:
      text = f"is that of {value.scale.path}"
    elif value.scale.stage == "old":
      text = "is the old one, so S never moves"
    elif value.scale.stage == "untold":
      text = "is the rule's only where the gradients are finite"
    elif value.scale.stage != "new":
      text, is_sure = "is the rule's or the old one, by a condition", False
    elif lost:
      text, places = "knows nothing of an `update` whose state is lost", lost
    elif if_skipped.scale and if_skipped.scale.stage == "old":
      text = "is the old one if the step is skipped, so S cannot fall"
      places = [if_skipped.place]
    else:
      continue
    of = f" of {path}" if len(step.states) > 1 else ""
    text, where = f"The next S{of} {text}", _lines(places)
    found.append(_Problem(is_sure, text, _verdicts.RETURNED, where))
  return found


def _skip_law(
  step: _Step,
  applied: Sequence[Value],
  skipped: Mapping[str, Sequence[Value]],
  flags: Mapping[int, bool],
) -> Proved:
  """Returns whether a step that overflows keeps all values, bit for bit."""
  _, outputs = step.run(step.states.keys(), flags)
  after = states.find_states(step.positions)
  are_skipped = [
    outputs[x.skipped].constant
    for x in after.values()
    if isinstance(x.skipped, Position)
  ]
  if are_skipped and all(x is False for x in are_skipped):
    text = "The rule has skip=False, so that overflows are applied."
    return Proved("skip", "not applied", text)
  problems = [
    problem
    for x in step.pairs
    if (problem := _changed(step, outputs[x.after], x, flags))
  ]
  for path, alone in skipped.items() if len(skipped) > 1 else ():
    # What only this state's gradients move must stay if this state skips.
    problems += [
      problem._replace(text=f"{problem.text}, though {path} skips")
      for x in step.pairs
      # Else this is what other states move, perhaps by values of this one.
      if applied[x.after].all_of("scale") == {path}
      or (
        path in applied[x.after].all_of("scale")
        and not alone[x.after].is_scaled
      )
      if (problem := _changed(step, alone[x.after], x, flags))
    ]
  if problems:
    return _worst("skip", problems)
  text = (
    f"If `update` sees an overflow, all {len(step.pairs)} next values stay."
  )
  return Proved("skip", "proved", text)


def _changed(
  step: _Step, value: Value, pair: _Pair, flags: Mapping[int, bool]
) -> _Problem | None:
  """Returns how a skipped step may change a value."""
  identity = Identity(pair.before)
  is_flag = pair.before in flags and value.constant is flags[pair.before]
  if value.identity == identity or is_flag:
    return None
  text = f"If the step is skipped, {pair.name} may change"
  # A product with 0 may be NaN; a condition of the user's may be right.
  sure = value.identity != identity._replace(is_sure=False)
  sure = sure and not step.is_guessed(pair.name)
  return _Problem(sure, text, _verdicts.MOVES, _lines([value.place]))


def _follows(step: _Step) -> Iterator[str]:
  """Yields the outputs that depend on S and are no next values."""
  _, outputs = step.run()
  places = step.next_values.values()
  for path, x in jax.tree.leaves_with_path(step.traced.outputs):
    name = leaves.path_name(path)
    if isinstance(x, Position) and not (
      _next_values.overlaps(name, places) or _degrees.is_free(outputs[x].degree)
    ):
      yield name


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
    source = source_lines.user_line(place) if place else None
    if source and source_lines.is_own(source):
      file, _, line = source.rpartition(":")
      text = linecache.getline(file, int(line)).strip()
      found[file, int(line), text] = None
  return tuple(found)


def _inside(name: str, path: str) -> bool:
  return f"{name}/".startswith(f"{path}/")
