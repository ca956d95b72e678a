"""Finds facts about each value of a step, without running the step.

The step's jaxpr is interpreted with abstract values: how a value grows with S,
which argument it is, bit for bit, and whether it is a known number. That the
step of some state overflows, or does not, is a hypothesis. The library's own
decisions are the named calls of `_base/named_calls.py`.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import operator
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base import named_calls
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._step import states
from optax_lossscale.instruments import _degrees
from optax_lossscale.instruments._degrees import ANY
from optax_lossscale.instruments._degrees import aval
from optax_lossscale.instruments._degrees import FREE
from optax_lossscale.instruments._degrees import Place
from optax_lossscale.instruments._degrees import Symbol
from optax_lossscale.instruments._degrees import Unknown

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
_FOLDED: Mapping[str, Callable[..., Any]] = {
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
# The result of each operation from which all of its inputs follow.
_LOGIC = {"and": True, "reduce_and": True, "or": False, "reduce_or": False}
# Operations that choose by size, and those that choose the largest.
_LARGEST = _names("cummax max reduce_max")
_ORDERED = _LARGEST | _names("cummin min reduce_min sort top_k")
# Operations whose result is not finite if an input is not.
_SHOWING = (
  operation_table.MOVES
  | operation_table.REARRANGES
  | operation_table.REDUCTIONS
  | operation_table.BETWEEN_DEVICES
) - _names("clamp sign") | _names("""
  add add_any and cbrt cholesky complex convert_element_type
  conv_general_dilated cos cosh cumprod cumsum dot_general eig eigh fft log
  log1p log2 lu mul not or qr reduce_and reduce_or reduce_precision
  reduce_window_sum scatter-add scatter-mul sin sinh sqrt square sub svd tan
  triangular_solve tridiagonal_solve
""")
_ARITHMETIC = _names("add div mul sub")
# Operations whose result is 0 where the input is.
_ZERO_WITH = _names("abs reduce_max reduce_sum sqrt square")
# Operations whose results are seldom negative.
_POSITIVE = _names("abs reduce_max sqrt square")


@dataclasses.dataclass(frozen=True)
class Fact:
  """A fact about a value and about everything that is computed from it.

  The kinds, each with its detail:
    scale: it was computed from the S of this state.
    passed: so it was, but is chosen only if `update` of this state sees no
      overflow, so that no inf of its gradients can be in it.
    undefined: so it was, but is NaN if it is not finite, which few operations
      hide.
    gate: it says whether `update` of this state sees an overflow.
    reads: it was computed from this argument, or from the data.
    varies: devices may disagree on it along this axis of a mesh.
    mixed: scaled values were put together in it over this axis.
    tested: it was decided by which scaled values are finite.
    taken: inf and NaN may have been taken out of it.
    dropped: micro-batches with inf and NaN were taken out of it.
  The detail of the last three says whether that is certain. A test also has
  `of`, the key of the tested value, unless it only compared sizes. Its `finite`
  is the result that means "finite", if there is one.
  """

  kind: str
  detail: Hashable = True
  place: Place = dataclasses.field(default=(), compare=False)
  finite: bool | None = dataclasses.field(default=None, compare=False)
  of: object = dataclasses.field(default=None, compare=False)


class Identity(NamedTuple):
  """An argument that a value is, bit for bit.

  Attributes:
    argument: its position.
    forms: what was done to it, such as a cast that can be undone, each with
      what undoes it.
    is_sure: False if the value may only be the argument.
  """

  argument: int
  forms: tuple[tuple[str, Hashable], ...] = ()
  is_sure: bool = True


class Scale(NamedTuple):
  """Says that a value is the S of a state.

  Attributes:
    path: the state.
    stage: "old"; "new"; "either", by a condition; or "untold", if it is not new
      where an overflow was found by other means.
    moves: the calls of `update` that led to it.
  """

  path: str
  stage: str
  moves: frozenset[Place] = frozenset()


@dataclasses.dataclass(frozen=True)
class Value(_degrees.Operand):
  """A value: its degree, and the other facts known of it.

  Attributes:
    identity: the argument that it is, bit for bit.
    scale: the state whose S it is.
    facts: what its results inherit.
    zeros: the operations whose results are 0 where it is.
    zero_of: those of the value that it compares with 0.
    grown: the operation that gave it its degree, if its inputs had others.
    key: an object that only copies of the value share.
  """

  identity: Identity | None = None
  scale: Scale | None = None
  facts: frozenset[Fact] = frozenset()
  zeros: tuple[Place, ...] = dataclasses.field(default=(), compare=False)
  zero_of: tuple[Place, ...] = dataclasses.field(default=(), compare=False)
  grown: Place = dataclasses.field(default=(), compare=False)
  key: object = dataclasses.field(default_factory=object, compare=False)

  def but(self, **changes: Any) -> "Value":
    """Returns the value with changes."""
    return dataclasses.replace(self, **changes)

  def all_of(self, kind: str) -> set[Hashable]:
    """Returns the details of the facts of a kind."""
    return {x.detail for x in self.facts if x.kind == kind}

  def mark(self, *kinds: str) -> Fact | None:
    """Returns the fact of a kind, a certain one if there is one."""
    found = [x for x in self.facts if x.kind in kinds]
    return max(found, key=lambda x: bool(x.detail), default=None)

  def marked(self, *facts: Fact | None) -> "Value":
    """Returns the value with more facts."""
    return self.but(facts=frozenset(filter(None, facts)) | self.facts)

  def without(self, *kinds: str) -> "Value":
    """Returns the value without the facts of some kinds."""
    return self.but(
      facts=frozenset(x for x in self.facts if x.kind not in kinds)
    )

  @property
  def lost(self) -> Fact | None:
    """A fact that inf and NaN are missing in it, a certain one if there is."""
    return self.mark("taken", "dropped")

  @property
  def scales(self) -> set[Hashable]:
    """The states from whose S it was computed."""
    return {
      x.detail for x in self.facts if x.kind in ("scale", "passed", "undefined")
    }

  @property
  def may_be_inf(self) -> bool:
    """True for data of S that no gate has found to be finite."""
    return bool(self.all_of("scale")) and not self.is_pure

  @property
  def is_pure(self) -> bool:
    """True if it was computed from S and numbers alone."""
    return not self.all_of("reads")


Values = Sequence[Value]
# Results inherit this fact from arguments other than S.
DATA = Fact("reads", "data")


class Event(NamedTuple):
  """A named call that was reached, with the values that it was given."""

  kind: str
  call: named_calls.NamedCall
  values: Values
  place: Place

  def of(self, tree: object) -> list[tuple[str, Value]]:
    """Returns the names and values of a tree of positions."""
    return [
      (leaves.path_name(path), self.values[x])
      for path, x in jax.tree.leaves_with_path(tree)
      if isinstance(x, named_calls.Position)
    ]


class Interpreter:
  """Interprets a jaxpr; the states in `overflowing` overflow."""

  def __init__(
    self,
    named: Sequence[named_calls.NamedCall],
    overflowing: frozenset[str] = frozenset(),
  ) -> None:
    self._named = named
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
    number = named_calls.number_of(equation)
    if number is not None:
      outputs = self._named_call(number, equation, inputs)
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
    if _loses(equation, inputs) and not made.lost:
      made = made.marked(Fact("taken", False, place))
    variables = (*equation.invars, *equation.outvars)
    if not all(isinstance(x.aval, jax.core.ShapedArray) for x in variables):
      # A reference may hold anything by now.
      unknown = Unknown("it is read from a reference", False, place)
      return [made.but(degree=unknown)] * count
    axes = _mesh_axes(equation)
    if axes and any(unit[1] for x in inputs for unit in _units(x)):
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
    if any(axes for x in inputs for _, axes in _units(x)):
      reason, are_free = "a solver mixes members", False
    if not are_free and not isinstance(degree, Unknown):
      degree = Unknown(reason, False, place)
    return [_made(inputs, place).but(degree=degree) for _ in equation.outvars]

  def _cond(self, equation: core.JaxprEqn, inputs: Values) -> Values:
    index, place = inputs[0], self._around
    bodies = calls.bodies(equation)
    if index.constant is not None:
      bodies = [bodies[min(max(int(index.constant), 0), len(bodies) - 1)]]
    updating = [x for x in bodies if _updates(x.jaxpr, self._named)]
    if self._overflowing and updating:
      # An overflow can only be in a branch that updates.
      bodies = updating
    results = [self.run(x.jaxpr, [inputs[i] for i in x.inputs]) for x in bodies]
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
    outside = {x[0] for v in (*start, *others) for x in _units(v)}
    # The S of each round, by its position, if S moves in the loop.
    rounds: dict[int, Symbol] = {}
    carry = following = [*start]
    for _ in range(_MOST_ROUNDS):
      outputs, given = body(carry)
      moving = {
        i: Symbol("the S of a round", (place, i))
        for i, (old, new) in enumerate(zip(carry, outputs, strict=True))
        if old.scale and new.scale and i not in rounds
        if old.degree != new.degree and _units(old) and _units(new)
      }
      if moving:
        rounds |= moving
        begins = {_units(start[i])[0][0]: x for i, x in rounds.items()}
        carry = [_renamed(x, begins, outside, place) for x in start]
        for i in rounds:
          carry[i] = carry[i].but(identity=None)
        continue
      # A value with the degree of the next S is right in the next round.
      ends = {
        units[0][0]: symbol
        for i, symbol in rounds.items()
        if len(units := _units(outputs[i])) == 1
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
        identity=_formed(x.identity, "slice", place),
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
      members={x[0] for v in slices for x in _units(v)},
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
        identity=_undone(x.identity, "slice", place),
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
        identity=_undone(x.identity, "local", str(spec)),
        # An array has the parts of all devices.
        facts=x.facts
        - {Fact("varies", name) for name in jax.tree.leaves((*spec,))},
      )
      for x, spec in zip(outputs, equation.params["out_specs"], strict=True)
    ]

  # ---- The library's own calls.

  def _named_call(
    self, number: int, equation: core.JaxprEqn, inputs: Values
  ) -> Values | None:
    call = self._named[number]
    if len(jax.tree.leaves(call.inputs)) != len(inputs):
      return None  # A derivative of the call.
    place = (*self._around, equation)
    event = Event(call.kind, call, inputs, place)
    self.events[number, place] = event
    if call.kind == "dropped":
      return [x.marked(Fact("dropped", True, place)) for x in inputs]
    if call.kind == "arguments":
      return inputs
    if call.kind == "skip":
      return [_number(False)]
    if call.kind == "schedule":
      # The count that it was given before leaves its state as it is.
      steps, old, new = call.inputs
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
    if name == "sort" or name in operation_table.BETWEEN_DEVICES:
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
  if absorbing is not None and any(_is(x, absorbing) for x in constants):
    return _number(np.full((), absorbing, after.dtype))
  if name in _FOLDED and None not in constants:
    with np.errstate(all="ignore"):
      return _number(np.asarray(_FOLDED[name](*constants)).astype(after.dtype))
  is_sum = name == "reduce_sum" and first.constant is not None
  if is_sum and (not are_floats or first.constant == 0):
    count = aval(equation.invars[0]).size // max(after.size, 1)
    return _number(np.asarray(first.constant * count).astype(after.dtype))
  if name in _NEUTRAL:
    if _is(constants[1], _NEUTRAL[name]):
      return first
    if _is(constants[0], _NEUTRAL[name]) and name not in ("sub", "div"):
      return others[0]
  if name in operation_table.COMPARISONS & _FOLDED.keys() and not are_floats:
    apart = _apart(*inputs)
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
    identity = _reshaped(equation, first.identity)
    return first.but(degree=made.degree, identity=identity, place=place)
  if name == "random_wrap":
    made = made.but(identity=_undone(first.identity, "data"))
  if name == "random_unwrap":
    made = made.but(identity=_formed(first.identity, "data"))
  if name in ("add", "add_any", "sub"):
    made = made.but(identity=_added(equation, inputs))
  tested = made.mark("tested")
  if tested and name not in operation_table.REARRANGES:
    made = made.without("tested").marked(_logic(name, tested, inputs))
  if name == "is_finite" or name in operation_table.COMPARISONS:
    made = made.without("taken", "dropped")
    made = made.marked(None if tested else _tested(equation, inputs, place))
    zero_of = (
      (x.place, *x.zeros)
      for x, y in zip(inputs, inputs[::-1], strict=True)
      if _is(y.constant, 0)
    )
    made = made.but(zero_of=next(zero_of, ()))
  if name in ("max", "min", "clamp"):
    made = made.marked(None if made.lost else _bounded(name, inputs, place))
    made = made.but(identity=_projected(inputs))
  if operation_table.name_of(equation) in _ZERO_WITH:
    made = made.but(zeros=(first.place, *first.zeros))
  if name == "mul" and all(x.identity for x in inputs):
    made = made.but(identity=_perhaps(inputs))  # Such as with a mask.
  if name in _LOGIC or name == "not":
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
  if made.identity is None:
    made = made.but(identity=_rewritten(equation, inputs))
  if name in ("mul", "div", "dot_general", "conv_general_dilated"):
    # What is not finite stays so if it is multiplied by anything.
    parts, _ = _data_of(inputs[:1] if name == "div" else inputs)
    if not all(x.lost for x in parts):
      made = made.without("taken", "dropped")
  return made


def _select(equation: core.JaxprEqn, inputs: Values, place: Place) -> Value:
  (condition, *choices), (output,) = inputs, equation.outvars
  chosen = _chosen(condition, choices, output, place, is_branch=False)
  degree, zero = chosen.degree, condition.zero_of
  # A number may stand in for 0 where nothing will come of it.
  is_guard = any(x.place in zero for x in choices)
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
  lost = _lost(tested, choices) if tested else None
  if not tested or lost is None:
    return chosen
  chosen = chosen.marked(Fact("taken", lost, place))
  if not is_branch and tested.of is None:
    return chosen
  scale = chosen.scale
  if scale and len({x.scale.stage for x in choices if x.scale}) > 1:
    scale = scale._replace(stage="untold")
  # The old value may have been chosen, which no run could tell from it.
  identity = chosen.identity or _perhaps(choices)
  return chosen.but(identity=identity, scale=scale)


def _convert(equation: core.JaxprEqn, value: Value, made: Value) -> Value:
  before, after = (
    aval(x[0]).dtype for x in (equation.invars, equation.outvars)
  )
  if before == after:
    return value
  identity = _cast(value.identity, before, after)
  if value.constant is not None:
    with np.errstate(all="ignore"):
      number = np.asarray(value.constant).astype(after)
    is_float = jnp.issubdtype(after, jnp.inexact)
    if not is_float and after.kind != "b" and number != value.constant:
      return made.but(identity=identity)  # Each device has its own.
    # A number that depends on S is one that was known only to be 0 or 1.
    return _number(number).but(identity=identity)
  if jnp.issubdtype(after, jnp.inexact):
    scale = value.scale if _holds(after, before) else None
    return value.but(identity=identity, scale=scale, place=made.place)
  unknown = _degrees.unknown([value.degree])
  if after.kind == "b":
    zero_of = (value.place, *value.zeros)
    return made.but(degree=unknown or FREE, zero_of=zero_of)
  if _degrees.is_free(value.degree):
    return value.but(
      degree=FREE, identity=identity, scale=None, place=made.place
    )
  reason = f"what {_degrees.in_words(value.degree)} becomes an integer"
  unknown = unknown or _degrees.mismatch([value], reason, made.place)
  return made.but(degree=unknown)


def _part(equation: core.JaxprEqn, value: Value, made: Value) -> Value:
  """Returns a part of an S that differs between members."""
  name, params, units = equation.primitive.name, equation.params, _units(value)
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
    axes = next(axes for x in values for _, axes in _units(x))
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
  overflowing: frozenset[str],
) -> list[Value]:
  place, (loss_scale, *_) = event.place, event.call.inputs
  finding = event.call.outputs
  scale = None if loss_scale is None else event.values[loss_scale]
  path = scale.scale.path if scale and scale.scale else None
  overflows = bool(overflowing) and (path is None or path in overflowing)
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
  before = event.values[position_of_scale(event.call.inputs[0])]
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


def _updates(jaxpr: core.Jaxpr, named: Sequence[named_calls.NamedCall]) -> bool:
  """Returns whether `update` of loss_scaling runs in a jaxpr."""
  numbers = map(named_calls.number_of, jaxpr.eqns)
  return any(x is not None and named[x].kind == "move" for x in numbers) or any(
    _updates(x.jaxpr, named) for y in jaxpr.eqns for x in calls.bodies(y)
  )


def _units(value: Value) -> list[_degrees.Unit]:
  degree = value.degree
  return [unit for unit, _ in degree] if isinstance(degree, tuple) else []


def _is(constant: _degrees.Number | None, number: _degrees.Number) -> bool:
  """Returns whether a known number is another; no flag is a number."""
  is_alike = isinstance(constant, bool) == isinstance(number, bool)
  return is_alike and constant == number


def _is_nonfinite(value: Value) -> bool:
  """Returns whether a value is a number that is inf or NaN."""
  return value.is_pure and value.degree == ANY and not _is(value.constant, 0)


def _formed(
  identity: Identity | None, kind: str, detail: Hashable = None
) -> Identity | None:
  """Returns the identity of a form of a value."""
  if identity is None:
    return None
  return identity._replace(forms=(*identity.forms, (kind, detail)))


def _undone(
  identity: Identity | None, kind: str, detail: Hashable = None
) -> Identity | None:
  """Returns the identity of a value that is no more in a form."""
  if identity is None or identity.forms[-1:] != ((kind, detail),):
    return None
  return identity._replace(forms=identity.forms[:-1])


def _perhaps(choices: Iterable[Value]) -> Identity | None:
  """Returns the identity of a value that may be what one choice is."""
  first = next((x.identity for x in choices if x.identity), None)
  return first and first._replace(is_sure=False)


def _rewritten(equation: core.JaxprEqn, inputs: Values) -> Identity | None:
  """Returns the identity of what may be an argument, written otherwise."""
  name = equation.primitive.name
  parts = [x for x in inputs if x.identity]
  others = [x for x in inputs if not x.identity]
  identity = _perhaps(parts)
  is_own = len({x.identity and x.identity.argument for x in parts}) == 1
  is_own = is_own and not any(x.all_of("reads") or x.scales for x in others)
  if identity is None or not is_own:
    return None
  if name in _ARITHMETIC:
    first = parts[0].identity
    is_changed = first and first.is_sure and not first.forms and others
    return _formed(first, name) if is_changed else identity._replace(forms=())
  return identity._replace(forms=()) if name in operation_table.MOVES else None


def _projected(inputs: Values) -> Identity | None:
  """Returns the identity of an argument that may be within bounds anyway."""
  bounds = [x for x in inputs if x.identity is None]
  is_bounded = all(x.is_pure and _degrees.is_free(x.degree) for x in bounds)
  is_one = len(bounds) == len(inputs) - 1
  return _perhaps(inputs) if is_one and is_bounded else None


def _mesh_axes(equation: core.JaxprEqn) -> frozenset[str]:
  """Returns the axes of a mesh over which an operation works."""
  name, params = equation.primitive.name, equation.params
  if name != "axis_index" and name not in operation_table.BETWEEN_DEVICES:
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


def _apart(first: Value, second: Value) -> int | None:
  """Returns by how much a known value is larger than another, or None."""
  a, b = first.identity, second.identity
  if not (a and b and a.is_sure and b.is_sure):
    return None
  more, less = _formed(b, "plus one"), _undone(b, "plus one")
  return {b: 0, more: 1, less: -1}.get(a)


def _added(equation: core.JaxprEqn, inputs: Values) -> Identity | None:
  """Returns the identity of a sum in which only one part matters."""
  is_whole = not leaves.is_gradient(equation.invars[0].aval)
  is_sum = equation.primitive.name != "sub"
  for value, other in (inputs, inputs[::-1])[: 1 + is_sum]:
    if is_whole and is_sum and value.identity and other.constant == 1:
      return _formed(value.identity, "plus one")
    # 0 times what is unknown is 0, or NaN.
    if other.degree == ANY and value.identity:
      return _perhaps([value])
  return None


def _reshaped(
  equation: core.JaxprEqn, identity: Identity | None
) -> Identity | None:
  """Returns the identity of a reshaped array, and of one reshaped back."""
  before, after = map(aval, (equation.invars[0], equation.outvars[0]))
  if identity is None or before.size != after.size:
    return None
  if before.shape == after.shape:
    return identity
  is_reshaped = identity.forms and identity.forms[-1][0] == "shape"
  kept = identity if is_reshaped else _formed(identity, "shape", before.shape)
  return _undone(identity, "shape", after.shape) or kept


def _cast(
  identity: Identity | None, before: np.dtype, after: np.dtype
) -> Identity | None:
  """Returns the identity of a number in a dtype that holds it, and back."""
  return _undone(identity, "cast", after) or (
    _formed(identity, "cast", before) if _holds(after, before) else None
  )


def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
  """Returns whether a dtype has all numbers of another one of its kind."""
  if narrow.kind == "b":
    return True
  both = wide, narrow
  if all(jnp.issubdtype(x, jnp.floating) for x in both):
    a, b = map(jnp.finfo, both)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp
  if all(jnp.issubdtype(x, jnp.integer) for x in both):
    c, d = map(jnp.iinfo, both)
    return int(c.min) <= int(d.min) and int(c.max) >= int(d.max)
  return False


def _data_of(inputs: Values) -> tuple[list[Value], bool]:
  """Returns the values of S and data, and whether one does depend on S."""
  scaled = [x for x in inputs if x.may_be_inf]
  return scaled, any(not _degrees.is_free(x.degree) for x in scaled)


def _tested(
  equation: core.JaxprEqn, inputs: Values, place: Place
) -> Fact | None:
  """Returns a mark if a test may find out which scaled values are finite."""
  name, variables = equation.primitive.name, equation.invars
  is_nan = name in ("ne", "eq") and variables[0] is variables[-1]
  has_inf = any(
    isinstance(x.constant, float) and math.isinf(x.constant) for x in inputs
  )
  scaled, is_sure = _data_of(inputs)
  if scaled and (name == "is_finite" or is_nan or has_inf):
    finite = name in ("is_finite", "lt") or (name == "eq") is is_nan
    is_known = inputs[0] is scaled[0] or name in ("eq", "ne")
    known = finite if is_known else None
    return Fact("tested", is_sure, place, known, scaled[0].key)
  # An inf is also larger than other numbers, and differs from them.
  return Fact("tested", False, place) if scaled else None


def _logic(name: str, tested: Fact, inputs: Values) -> Fact:
  """Returns a mark for what is made of tests: what its truth still says."""
  if name == "not" and tested.finite is not None:
    return dataclasses.replace(tested, finite=not tested.finite)
  marks = [mark for x in inputs if (mark := x.mark("tested"))]
  known = [x for x in marks if x.finite is _LOGIC.get(name)]
  if len({id(x.of) for x in known}) > 1:
    # Which of several values is not finite, no truth says.
    return dataclasses.replace(known[0], of=object())
  return next(iter(known), dataclasses.replace(tested, finite=None))


def _lost(tested: Fact, choices: Values) -> bool | None:
  """Returns whether a choice surely leaves an inf out; None if it does not."""
  if any(map(_is_nonfinite, choices)):
    return None
  if tested.finite is None or len(choices) != 2:
    return False
  chosen = choices[0 if tested.finite else 1]
  if chosen.key is tested.of:
    return None
  is_other = _data_of([chosen])[0] and not chosen.lost
  return bool(tested.detail) and not is_other


def _loses(equation: core.JaxprEqn, inputs: Values) -> bool:
  """Returns whether an operation may leave an inf out."""
  name = equation.primitive.name
  scaled = [x.may_be_inf for x in inputs]
  if not any(scaled) or _degrees.is_cast(name, inputs):
    return False
  if name in _ORDERED:
    # The largest of absolute values is inf if one of them is.
    around = inputs[0].place[-1:]
    is_positive = bool(around) and around[0].primitive.name in _POSITIVE
    return not (name in _LARGEST and is_positive)
  # 1 / inf is 0.
  if name in ("div", "rem"):
    return not scaled[0]
  if name == "integer_pow":
    return bool(equation.params["y"] < 0)
  if name == "pow":
    exponent = inputs[1].constant
    return exponent is None or exponent <= 0
  if name in ("gather", "dynamic_slice"):
    return any(scaled[1:])
  is_float = leaves.is_gradient(equation.outvars[0].aval)
  is_test = name == "is_finite" or name in operation_table.COMPARISONS
  return not is_test and (name not in _SHOWING or not is_float)


def _bounded(name: str, inputs: Values, place: Place) -> Fact | None:
  """Returns a mark if a bound takes the place of inf."""
  bounds = [x for x in inputs if x.is_pure and x.degree != ANY]
  scaled, is_sure = _data_of(inputs[1:2] if name == "clamp" else inputs)
  # A lower bound takes nothing from an absolute value.
  sources = {x.place[-1].primitive.name for x in scaled if x.place}
  is_lower = name == "max" and sources <= _POSITIVE
  if not bounds or not scaled or is_lower or _degrees.is_cast(name, inputs):
    return None
  return Fact("taken", is_sure and name != "max", place)


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
      identity=_formed(value.identity, "local", str(spec)),
    )
    .marked(*(() if value.scale else facts))
  )
