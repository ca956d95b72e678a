"""Interprets a step's jaxpr with abstract values, without running the step.

This module knows calls, branches and loops, and the library's own decisions,
which are the promised calls of `_base/promises.py`. `_transfer.py` has the
rules of operations. That the step of some state overflows, or does not, is a
hypothesis.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import operator
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr.axes import aval
from optax_lossscale._step import states
from optax_lossscale.instruments.step import _constants
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _identity
from optax_lossscale.instruments.step import _loops
from optax_lossscale.instruments.step import _promised
from optax_lossscale.instruments.step import _transfer
from optax_lossscale.instruments.step import _values
from optax_lossscale.instruments.step._values import FREE
from optax_lossscale.instruments.step._values import Identity
from optax_lossscale.instruments.step._values import Mark
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import Place
from optax_lossscale.instruments.step._values import Source
from optax_lossscale.instruments.step._values import Symbol
from optax_lossscale.instruments.step._values import Unknown
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values


class Event(NamedTuple):
  """A promised call that was reached, with the values that it was given."""

  kind: str
  call: _promised.Promised
  values: Values
  place: Place

  @property
  def is_gate(self) -> bool:
    """Whether `update` examines here; `accumulate` does so in no order."""
    return (
      self.kind == "examine"
      and self.call.static["in_order"]
      and self.call.inputs["loss_scale"] is not None
    )

  def of(self, tree: object) -> list[tuple[str, Value]]:
    """Returns the names and values of a tree of positions."""
    found = jax.tree.leaves_with_path(tree)
    names = leaves.path_names(path for path, _ in found)
    return [
      (names[path], self.values[x])
      for path, x in found
      if isinstance(x, _promised.Position)
    ]


class Interpreter:
  """Interprets a jaxpr."""

  # The states whose paths are in `overflowing` overflow, and the updates whose
  # places are.

  def __init__(
    self,
    promised: Sequence[_promised.Promised],
    overflowing: frozenset[leaves.Path | Place] = frozenset(),
  ) -> None:
    self._promised = promised
    self._overflowing = overflowing
    self._around: Place = ()
    # By number and place, since a loop's body is interpreted several times.
    self.events: dict[tuple[int, Place], Event] = {}
    self._rules: Mapping[
      calls.Form, Callable[[core.JaxprEqn, Values], Values]
    ] = {
      calls.Form.COND: self._cond,
      calls.Form.SCAN: self._scan,
      calls.Form.SHARD_MAP: self._shard_map,
      calls.Form.SOLVE: self._solve,
      calls.Form.WHILE: self._while,
    }

  def run(self, jaxpr: core.Jaxpr, inputs: Values) -> list[Value]:
    """Returns what is known of a closed jaxpr's outputs."""
    number, rule = _constants.number, self._equation
    consts = [*map(number, jaxpr.consts)]
    value_of = lambda x: number(x.val)  # noqa: E731
    return interpreter.evaluate(jaxpr, inputs, rule, consts, value_of)

  def _equation(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    place = (*self._around, equation)
    number = promises.number_of(equation)
    if number is not None:
      outputs = self._promised_call(number, inputs, place)
      if outputs is not None:
        return outputs
    form = calls.form(equation)
    if form is None:
      return _transfer.transfer(Operation(equation, inputs, place))
    # The places of its operations begin with this call.
    around, self._around = self._around, place
    results = self._rules.get(form, self._call)(equation, inputs)
    self._around = around
    return results

  # ---- Calls and branches.

  def _call(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    (body,) = calls.bodies(equation)
    return self.run(body.jaxpr, [inputs[i] for i in body.inputs])

  def _solve(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    """Returns the solution of equations that are linear."""
    split, place = sum(equation.params["const_lengths"]), self._around
    reason = "a solver's matrix depends on S"
    degree = _degrees.unknown(x.degree for x in inputs) or _degrees.join(
      inputs[split:], reason, place, is_sure=False
    )
    are_free = all(_degrees.is_free(x.degree) for x in inputs[:split])
    if any(axes for x in inputs for _, axes in x.units):
      reason, are_free = "a solver mixes members", False
    if not are_free and not isinstance(degree, Unknown):
      degree = Unknown(reason, False, place)
    made = _values.made(inputs, place)
    return [made.but(degree=degree) for _ in equation.outvars]

  def _cond(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    index, place = inputs[0], self._around
    bodies = calls.bodies(equation)
    # JAX clamps an index, too.
    if index.constant is not None:
      bodies = [bodies[min(max(int(index.constant), 0), len(bodies) - 1)]]
    updating = [x for x in bodies if _updates(x.jaxpr, self._promised)]
    results: list[Values] = [
      self.run(x.jaxpr, [inputs[i] for i in x.inputs]) for x in bodies
    ]
    if self._overflowing and updating:
      # `update` only sees an overflow in a branch that updates.
      results = _seen(results, [x in updating for x in bodies], place)
    if index.constant is not None:
      return [_values.passed(x, index) for x in results[0]]
    # Where no branch updates, the old S is chosen by a condition alone.
    is_branch = bool(updating)
    return [
      _transfer.choose(index, choices, output, place, is_branch=is_branch)
      for choices, output in zip(
        zip(*results, strict=True), equation.outvars, strict=True
      )
    ]

  def _shard_map(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    (body,) = calls.bodies(equation)
    inner = map(aval, body.jaxpr.jaxpr.invars)
    specs = equation.params["in_specs"]
    outputs = self.run(body.jaxpr, [*map(_to_device, inputs, specs, inner)])
    return [
      x.but(
        identity=_identity.undone(x.identity, "local", str(spec)),
        # An array has the parts of all devices.
        sources=x.sources
        - {Source("varies", name) for name in jax.tree.leaves((*spec,))},
      )
      for x, spec in zip(outputs, equation.params["out_specs"], strict=True)
    ]

  # ---- Loops; `_loops.py` says why their rules are sound.

  def _scan(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    (body,) = calls.bodies(equation)
    carried, place = calls.carried(equation), self._around
    consts, arrays = inputs[: carried.start], inputs[carried.stop :]
    slices = [_slice_of(x, place) for x in arrays]

    def run(carry: Values) -> tuple[Values, Values]:
      outputs = self.run(body.jaxpr, [*consts, *carry, *slices])
      return outputs[: len(carried)], outputs[len(carried) :]

    # A scan of no rounds gives back what it is given.
    end, given = _loops.run(
      place,
      [inputs[i] for i in carried],
      [*consts, *arrays],
      run,
      members={x for v in slices for x, _ in v.units},
      runs=equation.params["length"] > 0,
    )
    return end + [_stack_of(x, place) for x in given]

  def _while(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    test, body = calls.bodies(equation)
    start = calls.carried(equation).start
    consts = inputs[:start]
    goes_on: list[Value] = []

    def run(carry: Values) -> tuple[Values, Values]:
      values = [*consts, *carry]
      goes_on[:] = self.run(test.jaxpr, [values[i] for i in test.inputs])
      return self.run(body.jaxpr, [values[i] for i in body.inputs]), ()

    # The test is interpreted with the same values as the round that follows.
    end, _ = _loops.run(self._around, inputs[start:], consts, run)
    (condition,) = goes_on
    if isinstance(condition.degree, Unknown):
      return [x.but(degree=condition.degree) for x in end]
    # A loop until values are finite leaves out those that are not.
    if condition.mark("tested"):
      taken = Mark("taken", False, self._around)
      return [x if x.lost else x.marked(taken) for x in end]
    return end

  # ---- The library's own calls.

  def _promised_call(
    self, number: int, inputs: Values, place: Place
  ) -> Values | None:
    call = self._promised[number]
    if len(jax.tree.leaves(call.inputs)) != len(inputs):
      return None  # A derivative of the call.
    event = Event(call.kind, call, inputs, place)
    self.events[number, place] = event
    match call.kind:
      case "loss":
        return [x.marked(Mark("loss", True, place)) for x in inputs]
      case "dropped":
        return [x.marked(Mark("dropped", True, place)) for x in inputs]
      case "arguments":
        return inputs
      case "skip":
        return [_constants.number(False)]
      case "schedule":
        return _scheduled(event)
      case "examine":
        return _examined(event, self._overflowing)
    # A kind without a rule here must not pass for one.
    assert call.kind == "move"
    return _moved(event)


def _updates(jaxpr: core.Jaxpr, promised: Sequence[_promised.Promised]) -> bool:
  """Returns whether `update` of loss_scaling runs in a jaxpr."""
  numbers = map(promises.number_of, jaxpr.eqns)
  return any(
    x is not None and promised[x].kind == "move" for x in numbers
  ) or any(
    _updates(x.jaxpr, promised) for y in jaxpr.eqns for x in calls.bodies(y)
  )


def _seen(
  results: Sequence[Values], are_seen: Sequence[bool], place: Place
) -> list[Values]:
  """Returns the results of branches that update, if a step overflows."""
  # Another branch may use gradients by itself, whose inf none has seen.
  others = itertools.compress(results, map(operator.not_, are_seen))
  unseen = {
    i: Mark("unseen", True, place)
    for result in others
    for i, x in enumerate(result)
    if x.may_be_inf and _degrees.is_free(x.degree)
  }
  return [
    [x.marked(unseen.get(i)) for i, x in enumerate(result)]
    for result in itertools.compress(results, are_seen)
  ]


def _to_device(value: Value, spec: jax.P, inner: jax.core.ShapedArray) -> Value:
  """Returns what a device sees of an array."""
  # If each device has an S of its own, as under pmap, they are equal: that each
  # step keeps them equal is part of the proof.
  # None has no leaves.
  meshed = [jax.tree.leaves(x) for x in (*spec, *[None] * inner.ndim)]

  def on_device(unit: _values.Unit) -> _values.Unit:
    symbol, axes = unit
    return symbol, tuple(x for x in axes if not meshed[x] or inner.shape[x] > 1)

  found = value.unsourced("varies").but(
    degree=_degrees.rename(value.degree, on_device),
    identity=_identity.formed(value.identity, "local", str(spec)),
  )
  if value.scale:
    return found
  return found.sourced(*(Source("varies", x) for y in meshed for x in y))


def _slice_of(value: Value, place: Place) -> Value:
  """Returns what a round of a scan is given of an array."""

  def member(unit: _values.Unit) -> _values.Unit:
    symbol, axes = unit
    if 0 in axes:
      # Each round has the S of one member.
      words = f"the {symbol.words} of a round"
      symbol = Symbol(words, (place, symbol, "member"))
    return symbol, tuple(x - 1 for x in axes if x != 0)

  return value.but(
    degree=_degrees.rename(value.degree, member),
    identity=_identity.formed(value.identity, "slice", place),
    key=object(),
  )


def _stack_of(value: Value, place: Place) -> Value:
  """Returns the array of what the rounds of a scan leave."""

  def members(unit: _values.Unit) -> _values.Unit:
    symbol, axes = unit[0], tuple(x + 1 for x in unit[1])
    match symbol.key:
      case (around, Symbol() as array, "member") if around == place:
        return array, (0, *axes)
    return symbol, axes

  is_new = value.scale and value.scale.stage == "new"
  return value.but(
    degree=_degrees.rename(value.degree, members),
    identity=_identity.undone(value.identity, "slice", place),
    scale=value.scale if is_new else None,
    key=object(),
  )


def _scheduled(event: Event) -> list[Value]:
  """Returns the state of a schedule, given a count of steps."""
  given = event.call.inputs
  steps, old, new = (given[x] for x in ("step", "old", "new"))
  count = event.values[steps].identity if isinstance(steps, int) else None
  # The count that it was given before leaves its state as it is.
  is_same = count is not None and count == Identity(count.argument)
  return [event.values[x] for x in jax.tree.leaves(old if is_same else new)]


def _made(event: Event) -> Value:
  """Returns a result of `update`, which is told of every inf."""
  found = _values.made(event.values, event.place)
  return found.unmarked("tested", "taken", "dropped")


def _examined(
  event: Event, overflowing: frozenset[leaves.Path | Place]
) -> list[Value]:
  """Returns what `update` finds in gradients, given which overflow."""
  place, loss_scale = event.place, event.call.inputs["loss_scale"]
  made, finding = _made(event), event.call.outputs
  scale = None if loss_scale is None else event.values[loss_scale]
  path = scale.scale.path if scale and scale.scale else None
  # A call without an S sees the overflow of any state.
  overflows = bool(overflowing & {path, place})
  overflows |= path is None and bool(overflowing)
  grows = scale.degree if scale else Unknown("amax grows with S", False, place)
  share = Unknown("the range that is used depends on S", False, place)
  gate = [] if path is None else [Source("gate", path)]
  # A gate decides whether a step overflows, and no argument.
  flag = made.unsourced("scale", "reads").sourced(*gate)
  told = _constants.number(overflows).marked(*flag.marks)
  dropped = _constants.number(False).marked(*flag.marks)
  outputs = [made.but(degree=share)] * len(place[-1].outvars)
  outputs[finding.overflow] = told.sourced(*flag.sources)
  outputs[finding.dropped] = dropped.sourced(*flag.unsourced("mixed").sources)
  outputs[finding.amax] = made.but(degree=grows)
  return outputs


def _moved(event: Event) -> list[Value]:
  """Returns the state that a rule makes of another, with the next S."""
  place, (new, stalled) = event.place, event.call.outputs
  made, variables = _made(event), event.place[-1].outvars
  before = event.values[position_of_scale(event.call.inputs["state"])]
  hidden = Unknown("the rule's state depends on S", False, place)
  outputs = [made.but(degree=hidden)] * len(variables)
  outputs[stalled] = made
  position = position_of_scale(new)
  axes = tuple(range(aval(variables[position]).ndim))
  degree = _degrees.of((Symbol("the next S", (place, "next")), axes))
  scale = before.scale
  if scale:
    scale = scale._replace(stage="new", moves=scale.moves | {place})
  # An S that is 1 for ever is a number like any other.
  is_one = before.degree == FREE and scale
  outputs[position] = made.unsourced("reads").but(
    degree=FREE if is_one else degree, scale=scale
  )
  return outputs


def position_of_scale(rule_state: object) -> int:
  """Returns the position of S in the state of a rule."""
  # No position is negative.
  marked = jax.tree.leaves(states.replace_scale(rule_state, -1))
  return int(jax.tree.leaves(rule_state)[marked.index(-1)])
