"""Finds facts about each value of a step, without running the step.

The step's jaxpr is interpreted with abstract values: how a value grows with S,
which argument it is, bit for bit, and whether it is a known number. That the
step of some state overflows, or does not, is a hypothesis. The library's own
decisions are the promised calls of `_base/promises.py`.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math
import operator
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import collectives
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._step import states
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _finiteness
from optax_lossscale.instruments.step import _promised
from optax_lossscale.instruments.step import _values
from optax_lossscale.instruments.step._degrees import ANY
from optax_lossscale.instruments.step._degrees import aval
from optax_lossscale.instruments.step._degrees import FREE
from optax_lossscale.instruments.step._degrees import Place
from optax_lossscale.instruments.step._degrees import Symbol
from optax_lossscale.instruments.step._degrees import Unknown
from optax_lossscale.instruments.step._values import DATA
from optax_lossscale.instruments.step._values import Fact
from optax_lossscale.instruments.step._values import Identity
from optax_lossscale.instruments.step._values import Scale
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

# Arrays with more elements are not looked at.
_MOST_ELEMENTS = 1 << 16
_MOST_ROUNDS = 16

_names = operation_table.names
# Each output is the input at its position.
_COPIES = _names("""
  copy copy_p device_put mesh_cast name optimization_barrier pbroadcast pvary
  random_clone reshard sharding_constraint stop_gradient
""")
# Moves that keep the order of the elements.
_RESHAPES = _names("broadcast_in_dim expand_dims reshape squeeze")
_FOLDED: Mapping[str, Callable[..., jax.typing.ArrayLike]] = {
  **{x: getattr(np, x) for x in _names("abs sqrt square")},
  **{x: getattr(operator, x) for x in _names("add eq ge gt le lt mul ne")},
  **{"max": max, "min": min, "neg": operator.neg, "sub": operator.sub},
}
# Numbers that change nothing as the second input, or as one of the two.
_NEUTRAL = {"add": 0, "add_any": 0, "sub": 0, "mul": 1, "div": 1}
_NEUTRAL |= {"and": True, "or": False}
# Numbers that decide the result as either input, unless the other may be NaN.
_ABSORBING = {"mul": 0, "and": False, "or": True}
_EXTREMES = _names("pmax pmin reduce_and reduce_max reduce_min reduce_or")
# Operations of several results, with the one that grows as their input does.
_GROWING = {"top_k": 0, "approx_top_k": 0, "svd": 0, "eigh": 1, "qr": 1}
# Operations between devices whose results differ.
_EXCHANGES = _names("all_to_all ppermute ragged_all_to_all reduce_scatter")
# Operations whose result is 0 where the input is.
_ZERO_WITH = _names("abs reduce_max reduce_sum sqrt square")


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
  """Interprets a jaxpr.

  The states whose paths are in `overflowing` overflow, and the updates whose
  places are.
  """

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

  def run(self, jaxpr: core.Jaxpr, inputs: Values) -> list[Value]:
    """Returns what is known of a closed jaxpr's outputs."""
    consts = [_number(x) for x in jaxpr.consts]
    return interpreter.evaluate(
      jaxpr, inputs, self._equation, consts, lambda x: _number(x.val)
    )

  # ---- Equations.

  def _equation(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    number = promises.number_of(equation)
    if number is not None:
      outputs = self._promised_call(number, equation, inputs)
      if outputs is not None:
        return outputs
    form = calls.form(equation)
    if form is None:
      return self._operation(equation, inputs)
    around, self._around = self._around, (*self._around, equation)
    rule = getattr(self, f"_{form.name.lower()}", self._call)
    results: Values = rule(equation, inputs)
    self._around = around
    return results

  def _operation(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    """Returns the outputs of an operation that holds no jaxpr."""
    name, count = equation.primitive.name, len(equation.outvars)
    if name in _COPIES:
      return inputs
    place = (*self._around, equation)
    made = _made(inputs, place)
    if _finiteness.may_lose(equation, inputs) and not made.lost:
      made = made.marked(Fact("taken", False, place))
    variables = (*equation.invars, *equation.outvars)
    if not all(isinstance(x.aval, jax.core.ShapedArray) for x in variables):
      # A reference may hold anything by now.
      unknown = Unknown("it is read from a reference", False, place)
      return [made.but(degree=unknown)] * count
    axes = _mesh_axes(equation)
    if axes and any(unit[1] for x in inputs for unit in _values.units_of(x)):
      reason = "devices mix members that have an S of their own"
      return [made.but(degree=Unknown(reason, False, place))] * count
    if name == "axis_index":
      return [made.marked(DATA, *(Fact("varies", x) for x in axes))]
    if not (inputs and count):
      return [made] * count
    if axes and name not in _EXCHANGES:
      # A value that is put together from all devices is the same on all.
      agreed = {Fact("varies", x) for x in axes}
      made = made.but(facts=made.facts - agreed)
    if made.scales:
      made = made.marked(*(Fact("mixed", x) for x in axes))
    known = _known(equation, inputs)
    if known is not None:
      if known.constant is None:
        return [known]
      kept = (x for x in made.facts if x.kind in ("varies", "gate"))
      return [known.without("varies").marked(*kept)]
    if name == "select_n":
      return [_select(equation, inputs, place)]
    if name == "convert_element_type":
      return [_convert(equation, inputs[0], made)]
    is_part = name in ("slice", "gather", "dynamic_slice")
    if is_part and inputs[0].scale and not _degrees.fills(equation):
      return [_part(equation, inputs[0], made)]
    outputs: list[Value] = []
    for degree in _result_degrees(equation, inputs, place):
      same = [x for x in inputs if x.degree == degree]
      grown = (x.grown for x in same if x.grown)
      last = next(grown, () if same else place)
      outputs.append(made.but(degree=degree, grown=last, key=object()))
    return outputs if count > 1 else [_marked(equation, inputs, *outputs)]

  # ---- Calls, branches and loops.

  def _call(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    (body,) = calls.bodies(equation)
    return self.run(body.jaxpr, [inputs[i] for i in body.inputs])

  def _solve(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    """Returns the solution of equations that are linear."""
    split, place = sum(equation.params["const_lengths"]), self._around
    reason = "a solver's matrix depends on S"
    degree = _degrees.unknown(x.degree for x in inputs) or _degrees.joined(
      inputs[split:], reason, place, is_sure=False
    )
    are_free = all(_degrees.is_free(x.degree) for x in inputs[:split])
    if any(axes for x in inputs for _, axes in _values.units_of(x)):
      reason, are_free = "a solver mixes members", False
    if not are_free and not isinstance(degree, Unknown):
      degree = Unknown(reason, False, place)
    return [_made(inputs, place).but(degree=degree) for _ in equation.outvars]

  def _cond(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    index, place = inputs[0], self._around
    bodies = calls.bodies(equation)
    if index.constant is not None:
      bodies = [bodies[min(max(int(index.constant), 0), len(bodies) - 1)]]
    updating = [x for x in bodies if _updates(x.jaxpr, self._promised)]
    results = [self.run(x.jaxpr, [inputs[i] for i in x.inputs]) for x in bodies]
    if self._overflowing and updating:
      # `update` only sees an overflow in a branch that updates. Another branch
      # may use gradients by itself.
      are_seen = [x in updating for x in bodies]
      unseen = {
        i: Fact("unseen", True, place)
        for result in itertools.compress(results, map(operator.not_, are_seen))
        for i, x in enumerate(result)
        if x.may_be_inf and _degrees.is_free(x.degree)
      }
      results = [
        [x.marked(unseen.get(i)) for i, x in enumerate(result)]
        for result in itertools.compress(results, are_seen)
      ]
    if index.constant is not None:
      return [_passed(x, index) for x in results[0]]
    # Where no branch updates, the old S is chosen by a condition alone.
    is_branch = bool(updating)
    return [
      _chosen(index, choices, output, place, is_branch=is_branch)
      for choices, output in zip(
        zip(*results, strict=True), equation.outvars, strict=True
      )
    ]

  def _loop(
    self,
    start: Values,
    others: Values,
    body: Callable[[Values], tuple[Values, Values]],
    *,
    members: Collection[Symbol] = (),
    runs: bool = False,
  ) -> tuple[list[Value], list[Value]]:
    """Returns what a loop carries in the end, and what its rounds give."""
    place = self._around
    outside = {x[0] for v in (*start, *others) for x in _values.units_of(v)}
    # The S of each round, by its position, if S moves in the loop.
    rounds: dict[int, Symbol] = {}
    carry = following = [*start]
    for _ in range(_MOST_ROUNDS):
      outputs, given = body(carry)
      moving = {
        i: Symbol("the S of a round", (place, i))
        for i, (old, new) in enumerate(zip(carry, outputs, strict=True))
        if old.scale and new.scale and i not in rounds
        if old.degree != new.degree
        and _values.units_of(old)
        and _values.units_of(new)
      }
      if moving:
        rounds |= moving
        begins = {
          _values.units_of(start[i])[0][0]: x for i, x in rounds.items()
        }
        carry = [_renamed(x, begins, outside, place) for x in start]
        for i in rounds:
          carry[i] = carry[i].but(identity=None)
        continue
      # A value with the degree of the next S is right in the next round.
      ends = {
        units[0][0]: symbol
        for i, symbol in rounds.items()
        if len(units := _values.units_of(outputs[i])) == 1
      }
      following = [_renamed(x, ends, outside, place) for x in outputs]
      joined = [
        _join(x, place, "are carried by a loop")
        for x in zip(carry, following, strict=True)
      ]
      if joined == carry:
        break
      carry = joined
    else:
      reason = "a loop carries values that no rule settles"
      degree = Unknown(reason, False, place)
      carry = following = [x.but(degree=degree) for x in carry]
    after = {
      symbol: Symbol("the S after the loop", (place, i, "after"))
      for i, symbol in rounds.items()
    }
    known = outside - {*rounds.values()}
    # A loop that runs ends with what its body gives.
    finished = [
      _renamed(x, after, known, place).but(key=object())
      for x in (following if runs else carry)
    ]
    for i in rounds:
      finished[i] = finished[i].but(scale=outputs[i].scale)
    # What a round gives may be of the members that it is given.
    known |= {*members}
    return finished, [_renamed(x, {}, known, place) for x in given]

  def _scan(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    (body,) = calls.bodies(equation)
    carried, place = calls.carried(equation), self._around
    consts, count = inputs[: carried.start], len(carried)

    def slice_of(unit: _degrees.Unit) -> _degrees.Unit:
      symbol, axes = unit
      if 0 in axes:
        words = f"the {symbol.words} of a round"
        symbol = Symbol(words, (place, symbol, "member"))
      return symbol, tuple(x - 1 for x in axes if x != 0)

    slices = [
      x.but(
        degree=_degrees.renamed(x.degree, slice_of),
        identity=_values.formed(x.identity, "slice", place),
        key=object(),
      )
      for x in inputs[carried.stop :]
    ]

    def run(carry: Values) -> tuple[Values, Values]:
      outputs = self.run(body.jaxpr, [*consts, *carry, *slices])
      return outputs[:count], outputs[count:]

    start = [inputs[i] for i in carried]
    end, given = self._loop(
      start,
      [*consts, *inputs[carried.stop :]],
      run,
      members={x[0] for v in slices for x in _values.units_of(v)},
      runs=equation.params["length"] > 0,
    )

    def stack_of(unit: _degrees.Unit) -> _degrees.Unit:
      symbol, axes = unit[0], tuple(x + 1 for x in unit[1])
      match symbol.key:
        case (around, Symbol() as array, "member") if around == place:
          return array, (0, *axes)
      return symbol, axes

    return end + [
      x.but(
        degree=_degrees.renamed(x.degree, stack_of),
        identity=_values.undone(x.identity, "slice", place),
        scale=x.scale if x.scale and x.scale.stage == "new" else None,
        key=object(),
      )
      for x in given
    ]

  def _while(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    test, body = calls.bodies(equation)
    start = calls.carried(equation).start
    consts = inputs[:start]
    goes_on: list[Value] = []

    def run(carry: Values) -> tuple[Values, Values]:
      values = [*consts, *carry]
      goes_on[:] = self.run(test.jaxpr, [values[i] for i in test.inputs])
      return self.run(body.jaxpr, [values[i] for i in body.inputs]), ()

    end, _ = self._loop(inputs[start:], consts, run)
    (condition,) = goes_on
    if isinstance(condition.degree, Unknown):
      return [x.but(degree=condition.degree) for x in end]
    if condition.mark("tested"):
      taken = Fact("taken", False, self._around)
      return [x if x.lost else x.marked(taken) for x in end]
    return end

  def _shard_map(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    (body,) = calls.bodies(equation)
    inner = map(aval, body.jaxpr.jaxpr.invars)
    specs = equation.params["in_specs"]
    outputs = self.run(body.jaxpr, [*map(_to_device, inputs, specs, inner)])
    return [
      x.but(
        identity=_values.undone(x.identity, "local", str(spec)),
        # An array has the parts of all devices.
        facts=x.facts
        - {Fact("varies", name) for name in jax.tree.leaves((*spec,))},
      )
      for x, spec in zip(outputs, equation.params["out_specs"], strict=True)
    ]

  # ---- The library's own calls.

  def _promised_call(
    self, number: int, equation: core.JaxprEqn, inputs: Values
  ) -> Values | None:
    call = self._promised[number]
    if len(jax.tree.leaves(call.inputs)) != len(inputs):
      return None  # A derivative of the call.
    place = (*self._around, equation)
    event = Event(call.kind, call, inputs, place)
    self.events[number, place] = event
    if call.kind == "loss":
      return [x.marked(Fact("loss", True, place)) for x in inputs]
    if call.kind == "dropped":
      return [x.marked(Fact("dropped", True, place)) for x in inputs]
    if call.kind == "arguments":
      return inputs
    if call.kind == "skip":
      return [_number(False)]
    if call.kind == "schedule":
      # The count that it was given before leaves its state as it is.
      steps, old, new = (call.inputs[x] for x in ("step", "old", "new"))
      given = inputs[steps].identity if isinstance(steps, int) else None
      is_same = given is not None and given == Identity(given.argument)
      return [inputs[x] for x in jax.tree.leaves(old if is_same else new)]
    made = _made(inputs, place).without("tested", "taken", "dropped")
    if call.kind == "examine":
      return _examined(event, made, equation, self._overflowing)
    assert call.kind == "move"
    return _moved(event, made, equation)


def _made(inputs: Iterable[Value], place: Place) -> Value:
  """Returns what the inputs alone say of a result."""
  facts = frozenset[Fact]().union(*(x.facts for x in inputs))
  return Value(facts=facts, place=place)


def _result_degrees(
  equation: core.JaxprEqn, inputs: Values, place: Place
) -> Sequence[_degrees.Degree]:
  """Returns the degree of each result."""
  name, count = equation.primitive.name, len(equation.outvars)
  degrees = [x.degree for x in inputs]
  if count > 1 and _degrees.unknown(degrees) is None:
    if any(
      _degrees.moved(equation, i, x) is None for i, x in enumerate(degrees)
    ):
      reason = f"`{name}` mixes members that have an S of their own"
      return [Unknown(reason, False, place)] * count
    if name == "sort" or name in collectives.BETWEEN_DEVICES:
      return degrees
    if name in _GROWING:
      grown = _GROWING[name]
      return [degrees[0] if i == grown else FREE for i in range(count)]
  return [_degrees.result(equation, inputs, place)] * count


def _number(x: jax.typing.ArrayLike) -> Value:
  """Returns what is known of an array of the program."""
  dtype = jnp.result_type(x)
  is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
  is_large = math.prod(np.shape(x)) > _MOST_ELEMENTS
  if is_large or is_key or isinstance(x, jax.ShapeDtypeStruct):
    return Value(facts=frozenset([DATA]))
  array = np.asarray(x)
  is_float = jnp.issubdtype(dtype, jnp.inexact)
  if is_float:
    array = array.astype(np.complex128 if array.dtype.kind == "c" else float)
  is_any = is_float and bool(np.all((array == 0) | ~np.isfinite(array)))
  is_real = array.size > 0 and array.dtype.kind != "c"
  is_one = is_real and bool(np.all(array == array.flat[0]))
  constant = array.flat[0].item() if is_one else None
  return Value(ANY if is_any else FREE, constant)


def _known(equation: core.JaxprEqn, inputs: Values) -> Value | None:
  """Returns a result that is an input or a number, or else None."""
  name, params = equation.primitive.name, equation.params
  after = aval(equation.outvars[0])
  first, *others = inputs
  constants = [x.constant for x in inputs]
  if name == "select_n" and first.constant is not None:
    return _passed(others[int(first.constant)], first)
  if name in ("slice", "transpose"):
    order = params.get("permutation", range(after.ndim))
    is_whole = aval(equation.invars[0]).shape == after.shape
    return first if is_whole and [*order] == [*range(after.ndim)] else None
  is_empty = 0 in aval(equation.invars[0]).shape
  if name in _EXTREMES and first.constant is not None and not is_empty:
    return first.but(identity=None)
  if name == "not" and isinstance(first.constant, bool):
    return _number(not first.constant)
  are_floats = any(leaves.is_gradient(x.aval) for x in equation.invars)
  absorbing = None if are_floats else _ABSORBING.get(name)
  if absorbing is not None and any(
    _values.is_number(x, absorbing) for x in constants
  ):
    return _number(np.full((), absorbing, after.dtype))
  if name in _FOLDED and None not in constants:
    with np.errstate(all="ignore"):
      return _number(np.asarray(_FOLDED[name](*constants)).astype(after.dtype))
  is_sum = name == "reduce_sum" and first.constant is not None
  if is_sum and (not are_floats or first.constant == 0):
    count = aval(equation.invars[0]).size // max(after.size, 1)
    return _number(np.asarray(first.constant * count).astype(after.dtype))
  if name in _NEUTRAL:
    if _values.is_number(constants[1], _NEUTRAL[name]):
      return first
    if _values.is_number(constants[0], _NEUTRAL[name]) and name not in (
      "sub",
      "div",
    ):
      return others[0]
  if name in operation_table.COMPARISONS & _FOLDED.keys() and not are_floats:
    apart = _values.apart(*inputs)
    return None if apart is None else _number(_FOLDED[name](apart, 0))
  return None


def _passed(value: Value, condition: Value) -> Value:
  """Returns a value that is chosen where gates found gradients to be finite."""
  gates = condition.all_of("gate")
  passed = {
    Fact(x, path): Fact("passed", path)
    for path in gates
    for x in ("scale", "undefined")
  }
  facts = frozenset(passed.get(x, x) for x in value.facts)
  found = value.but(facts=facts)
  # Without an overflow nothing was lost.
  is_passed = gates and not found.may_be_inf
  return found.without("tested", "taken", "dropped") if is_passed else found


def _marked(equation: core.JaxprEqn, inputs: Values, made: Value) -> Value:
  """Returns the result with its identity and its marks."""
  name, first, place = equation.primitive.name, inputs[0], made.place
  if name in _RESHAPES:
    identity = _values.reshaped(equation, first.identity)
    return first.but(degree=made.degree, identity=identity, place=place)
  if name == "random_wrap":
    made = made.but(identity=_values.undone(first.identity, "data"))
  if name == "random_unwrap":
    made = made.but(identity=_values.formed(first.identity, "data"))
  if name in ("add", "add_any", "sub"):
    made = made.but(identity=_values.added(equation, inputs))
  tested = made.mark("tested")
  if tested and name not in operation_table.REARRANGES:
    made = made.without("tested").marked(
      _finiteness.combined(name, tested, inputs)
    )
  if name == "is_finite" or name in operation_table.COMPARISONS:
    made = made.without("taken", "dropped")
    made = made.marked(
      None if tested else _finiteness.tested_by(equation, inputs, place),
      _finiteness.doubted_by(equation, inputs, place),
    )
    zero_of = (
      (x.place, *x.zeros)
      for x, y in zip(inputs, inputs[::-1], strict=True)
      if _values.is_number(y.constant, 0)
    )
    made = made.but(zero_of=next(zero_of, ()))
  if name in ("max", "min", "clamp"):
    made = made.marked(
      None if made.lost else _finiteness.bounded(name, inputs, place)
    )
    made = made.but(identity=_values.projected(inputs))
  if operation_table.name_of(equation) in _ZERO_WITH:
    made = made.but(zeros=(first.place, *first.zeros))
  if name == "mul" and all(x.identity for x in inputs):
    made = made.but(identity=_values.perhaps(inputs))  # Such as with a mask.
  if name in _finiteness.LOGIC or name == "not":
    zeros = (x.zero_of for x in inputs if x.zero_of)
    made = made.but(zero_of=next(zeros, ()))
  if name in ("add", "add_any", "sub") and made.mark("taken"):
    # The other part may show the same inf.
    is_shown = any(x.may_be_inf and not x.lost for x in inputs)
    taken = Fact("taken", False, place)
    made = made.without("taken").marked(taken) if is_shown else made
  if name == "div" and _degrees.is_free(made.degree):
    # inf / inf is NaN.
    paths = first.all_of("scale") & inputs[1].all_of("scale")
    if all(x.may_be_inf for x in inputs):
      undefined = {Fact("scale", x): Fact("undefined", x) for x in paths}
      facts = frozenset(undefined.get(x, x) for x in made.facts)
      made = made.but(facts=facts)
  if name in ("mul", "div", "neg"):
    parts = inputs[:1] if name == "div" else inputs
    factors = (x.factors | {x.key} for x in parts if x.scales and not x.is_pure)
    made = made.but(factors=frozenset[object]().union(*factors))
  if made.identity is None:
    made = made.but(identity=_values.rewritten(equation, inputs))
  if name in ("mul", "div", "dot_general", "conv_general_dilated"):
    # What is not finite stays so if it is multiplied by anything.
    parts, _ = _finiteness.data_of(inputs[:1] if name == "div" else inputs)
    if not all(x.lost for x in parts):
      made = made.without("taken", "dropped")
  return made


def _select(equation: core.JaxprEqn, inputs: Values, place: Place) -> Value:
  (condition, *choices), (output,) = inputs, equation.outvars
  chosen = _chosen(condition, choices, output, place, is_branch=False)
  scaled = [x.may_be_inf for x in choices]
  if condition.mark("doubted") and any(scaled) and not all(scaled):
    # The loss is inf or NaN if they are, so they are left out as well.
    chosen = chosen.marked(None if chosen.lost else Fact("taken", None, place))
  degree, zero = chosen.degree, condition.zero_of
  # A number may stand in for 0 where nothing will come of it.
  is_guard = any(x.place in zero for x in choices)
  # A mask of positions packs values into one array.
  is_guard |= condition.is_pure and not condition.scales
  if isinstance(degree, Unknown) and is_guard:
    degree = dataclasses.replace(degree, is_sure=False)
  return chosen.but(degree=degree, place=place)


def _chosen(
  condition: Value,
  choices: Values,
  output: core.Var,
  place: Place,
  *,
  is_branch: bool,
) -> Value:
  """Returns a value that a condition chooses."""
  tested = condition.mark("tested")
  chosen = _join(
    choices, place, key=output, is_branch=is_branch and not tested
  ).marked(*condition.facts)
  told = chosen.mark("tested")
  chosen = chosen.without("tested")
  if told and not leaves.is_gradient(output.aval):
    # Either truth may be chosen.
    chosen = chosen.marked(dataclasses.replace(told, finite=None))
  if isinstance(condition.degree, Unknown):
    chosen = chosen.but(degree=condition.degree, scale=None)
  lost = _finiteness.loss_by(tested, choices) if tested else None
  if not tested or lost is None:
    return chosen
  chosen = chosen.marked(Fact("taken", lost, place))
  if not is_branch and tested.of is None:
    return chosen
  scale = chosen.scale
  if scale and len({x.scale.stage for x in choices if x.scale}) > 1:
    scale = scale._replace(stage="untold")
  # The old value may have been chosen, which no run could tell from it.
  identity = chosen.identity or _values.perhaps(choices)
  return chosen.but(identity=identity, scale=scale)


def _convert(equation: core.JaxprEqn, value: Value, made: Value) -> Value:
  before, after = (
    aval(x[0]).dtype for x in (equation.invars, equation.outvars)
  )
  if before == after:
    return value
  identity = _values.cast(value.identity, before, after)
  if value.constant is not None:
    with np.errstate(all="ignore"):
      number = np.asarray(value.constant).astype(after)
    is_float = jnp.issubdtype(after, jnp.inexact)
    if not is_float and after.kind != "b" and number != value.constant:
      return made.but(identity=identity)  # Each device has its own.
    # A number that depends on S is one that was known only to be 0 or 1.
    return _number(number).but(identity=identity)
  if jnp.issubdtype(after, jnp.inexact):
    scale = value.scale if _values.holds(after, before) else None
    return value.but(identity=identity, scale=scale, place=made.place)
  unknown = _degrees.unknown([value.degree])
  if after.kind == "b":
    zero_of = (value.place, *value.zeros)
    return made.but(degree=unknown or FREE, zero_of=zero_of)
  if _degrees.is_free(value.degree):
    return value.but(
      degree=FREE, identity=identity, scale=None, place=made.place
    )
  reason = f"a value that {_degrees.in_words(value.degree)} becomes an integer"
  unknown = unknown or _degrees.mismatch([value], reason, made.place)
  return made.but(degree=unknown)


def _part(equation: core.JaxprEqn, value: Value, made: Value) -> Value:
  """Returns a part of an S that differs between members."""
  name, params, units = (
    equation.primitive.name,
    equation.params,
    _values.units_of(value),
  )
  before, after = (
    aval(x[0]).shape for x in (equation.invars, equation.outvars)
  )
  axes = units[0][1] if units else ()
  is_moved = name != "gather"
  if not axes or (is_moved and all(before[x] == after[x] for x in axes)):
    is_whole = is_moved and before == after
    return value if is_whole else value.but(identity=None)
  if name != "slice" or len(units) != 1:
    reason = "a part of S is taken that depends on the data"
    return made.but(degree=Unknown(reason, False, made.place))
  where = [params[x] for x in ("start_indices", "limit_indices", "strides")]
  words = f"{units[0][0].words}{[*where[0]]}".replace(" ", "")
  symbol = Symbol(words, (value.degree, *where))
  part = symbol, tuple(x for x in axes if after[x] > 1)
  degree = _degrees.renamed(value.degree, lambda _: part)
  return made.but(degree=degree, scale=value.scale)


def _join(
  values: Values,
  place: Place,
  reason: str = "are chosen between",
  *,
  key: Hashable = None,
  is_branch: bool = True,
) -> Value:
  """Returns what is known of a value that is one of several."""
  scale = _either([x.scale for x in values], is_branch=is_branch)
  degree = _degrees.joined(values, reason, place)
  is_unknown = _degrees.unknown(x.degree for x in values)
  if scale and isinstance(degree, Unknown) and not is_unknown:
    # One S or another is an S of its own from here on.
    key = (place, scale.path, key)
    axes = next(axes for x in values for _, axes in _values.units_of(x))
    degree = _degrees.of((Symbol("an S chosen by a condition", key), axes))

  def common(field: str) -> Any:
    found = {(type(y), y) for x in values for y in [getattr(x, field)]}
    return found.pop()[1] if len(found) == 1 else None

  return _made(values, place).but(
    degree=degree,
    identity=common("identity"),
    constant=common("constant"),
    scale=scale,
    place=next((x.place for x in values if x.place), place),
    grown=next((x.grown for x in values if x.grown), ()),
  )


def _examined(
  event: Event,
  made: Value,
  equation: core.JaxprEqn,
  overflowing: frozenset[leaves.Path | Place],
) -> list[Value]:
  place, loss_scale = event.place, event.call.inputs["loss_scale"]
  finding = event.call.outputs
  scale = None if loss_scale is None else event.values[loss_scale]
  path = scale.scale.path if scale and scale.scale else None
  overflows = bool(overflowing & {path, place})
  overflows |= path is None and bool(overflowing)
  grows = scale.degree if scale else Unknown("amax grows with S", False, place)
  share = Unknown("the range that is used depends on S", False, place)
  gate = None if path is None else Fact("gate", path)
  flag = made.without("scale", "reads").marked(gate)
  outputs = [made.but(degree=share)] * len(equation.outvars)
  outputs[finding.overflow] = _number(overflows).marked(*flag.facts)
  outputs[finding.dropped] = _number(False).marked(*flag.without("mixed").facts)
  outputs[finding.amax] = made.but(degree=grows)
  return outputs


def _moved(event: Event, made: Value, equation: core.JaxprEqn) -> list[Value]:
  place, (new, stalled) = event.place, event.call.outputs
  before = event.values[position_of_scale(event.call.inputs["state"])]
  hidden = Unknown("the rule's state depends on S", False, place)
  outputs = [made.but(degree=hidden)] * len(equation.outvars)
  outputs[stalled] = made
  position = position_of_scale(new)
  axes = tuple(range(aval(equation.outvars[position]).ndim))
  degree = _degrees.of((Symbol("the next S", (place, "next")), axes))
  scale = before.scale
  if scale:
    scale = scale._replace(stage="new", moves=scale.moves | {place})
  is_one = before.degree == FREE and scale
  outputs[position] = made.without("reads").but(
    degree=FREE if is_one else degree, scale=scale
  )
  return outputs


def position_of_scale(rule_state: object) -> int:
  """Returns the position of S in the state of a rule."""
  # No position is negative.
  marked = jax.tree.leaves(states.replace_scale(rule_state, -1))
  return int(jax.tree.leaves(rule_state)[marked.index(-1)])


def _updates(jaxpr: core.Jaxpr, promised: Sequence[_promised.Promised]) -> bool:
  """Returns whether `update` of loss_scaling runs in a jaxpr."""
  numbers = map(promises.number_of, jaxpr.eqns)
  return any(
    x is not None and promised[x].kind == "move" for x in numbers
  ) or any(
    _updates(x.jaxpr, promised) for y in jaxpr.eqns for x in calls.bodies(y)
  )


def _mesh_axes(equation: core.JaxprEqn) -> frozenset[str]:
  """Returns the axes of a mesh over which an operation works."""
  name, params = equation.primitive.name, equation.params
  if name != "axis_index" and name not in collectives.BETWEEN_DEVICES:
    return frozenset()
  axes = params.get("axes", params.get("axis_name", ()))
  several = axes if isinstance(axes, (tuple, list, frozenset)) else (axes,)
  return frozenset(x for x in several if isinstance(x, str))


def _either(scales: Sequence[Scale | None], *, is_branch: bool) -> Scale | None:
  """Returns the S that is one of several: in a branch, one that may be new."""
  found = {x for x in scales if x is not None}
  if None in scales or len({x.path for x in found}) > 1:
    return None
  stages = {x.stage for x in found}
  stage = "new" if is_branch and stages <= {"old", "new"} else "either"
  stage = "untold" if "untold" in stages else stage
  return Scale(
    next(iter(found)).path,
    stages.pop() if len(stages) == 1 else stage,
    frozenset().union(*(x.moves for x in found)),
  )


def _renamed(
  value: Value, names: Mapping[Symbol, Symbol], known: set[Symbol], place: Place
) -> Value:
  """Returns a value as another round sees it; some S are no more."""

  def rename(unit: _degrees.Unit) -> _degrees.Unit | None:
    symbol, axes = unit
    if symbol not in known | names.keys():
      return None
    return names.get(symbol, symbol), axes

  degree = _degrees.renamed(value.degree, rename)
  if degree is None:
    reason = (
      "it is kept from one round of a loop to the next, where S is another"
    )
    source = value.place or place
    degree = _degrees.mismatch([value.but(place=source)], reason, source)
  return value.but(degree=degree)


def _to_device(value: Value, spec: jax.P, inner: jax.core.ShapedArray) -> Value:
  """Returns what a device sees of an array.

  If each device has an S of its own, as under pmap, they are equal: that each
  step keeps them equal is part of the proof.
  """
  # None has no leaves.
  meshed = [jax.tree.leaves(x) for x in (*spec, *[None] * inner.ndim)]

  def rename(unit: _degrees.Unit) -> _degrees.Unit:
    symbol, axes = unit
    return symbol, tuple(x for x in axes if not meshed[x] or inner.shape[x] > 1)

  facts = {Fact("varies", name) for names in meshed for name in names}
  return (
    value.without("varies")
    .but(
      degree=_degrees.renamed(value.degree, rename),
      identity=_values.formed(value.identity, "local", str(spec)),
    )
    .marked(*(() if value.scale else facts))
  )
