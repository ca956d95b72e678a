"""What is known of each value of a step, without running the step.

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
import fractions
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
from optax_lossscale._base import named_calls
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._step import states
from optax_lossscale.instruments import _degrees
from optax_lossscale.instruments._degrees import ANY
from optax_lossscale.instruments._degrees import FREE
from optax_lossscale.instruments._degrees import Place
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
_FOLDED: Mapping[str, Callable[..., _degrees.Number]] = {
  "add": operator.add,
  "eq": operator.eq,
  "ge": operator.ge,
  "gt": operator.gt,
  "le": operator.le,
  "lt": operator.lt,
  "max": max,
  "min": min,
  "mul": operator.mul,
  "ne": operator.ne,
  "neg": operator.neg,
  "sub": operator.sub,
}
_EXTREMES = _names("pmax pmin reduce_and reduce_max reduce_min reduce_or")
# Operations between devices whose results differ.
_EXCHANGES = _names("all_to_all ppermute ragged_all_to_all reduce_scatter")
_LOGIC = _names("and not or reduce_and reduce_or")
# Operations that choose by size, and those that choose the largest.
_LARGEST = _names("cummax max reduce_max")
_ORDERED = _LARGEST | _names("cummin min reduce_min sort top_k")
# Operations whose results are seldom negative.
_POSITIVE = _names("abs reduce_max sqrt square")
# A value that stands in for 0 may go through these before it divides.
_KEEPS_STAND_IN = (
  _RESHAPES
  | _COPIES
  | _names("convert_element_type integer_pow neg sqrt square rsqrt")
)


class Mark(NamedTuple):
  """A place where inf may be told from other values, or left out.

  Attributes:
    is_sure: whether that is certain.
    place: the operation.
    kind: "taken", "dropped" by `accumulate`, or "order" for a comparison of
      sizes.
    finite: the truth of a test that says that values are finite, if one does.
    of: the key of the value that is tested.
  """

  is_sure: bool
  place: Place = ()
  kind: str = "taken"
  finite: bool | None = None
  of: int | None = None

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Mark) and self.is_sure == other.is_sure

  def __hash__(self) -> int:
    return hash(self.is_sure)


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
  moves: frozenset[Hashable] = frozenset()


@dataclasses.dataclass(frozen=True)
class Value:
  """What is known of a value.

  Attributes:
    degree: how it grows with S.
    identity: the argument that it is, bit for bit.
    constant: the number that all its elements are.
    scale: the state whose S it is.
    scales: the states whose S it was computed from.
    reads: those of some arguments that it was computed from.
    varies: the axes of a mesh along which devices may disagree on it.
    mixed: those over whose devices scaled values were put together in it.
    is_pure: whether it was computed from S and numbers alone.
    tested: where it was decided by which scaled values are finite.
    taken: where inf and NaN may have been taken out of it.
    zero_of: the key of the value that it compares with 0.
    stands_in: the key of the value for which a number stands in where it is 0.
    key: a number that copies of the value share.
    place: the operation that made it.
    grown: the operation that gave it its degree, if its inputs had others.
  """

  degree: _degrees.Degree = FREE
  identity: Identity | None = None
  constant: _degrees.Number | None = None
  scale: Scale | None = None
  scales: frozenset[str] = frozenset()
  reads: frozenset[str] = frozenset()
  varies: frozenset[str] = frozenset()
  mixed: frozenset[str] = frozenset()
  is_pure: bool = False
  tested: Mark | None = None
  taken: Mark | None = None
  zero_of: int | None = None
  stands_in: int | None = None
  key: int = dataclasses.field(default=-1, compare=False)
  place: Place = dataclasses.field(default=(), compare=False)
  grown: Place = dataclasses.field(default=(), compare=False)

  def but(self, **changes: Any) -> "Value":
    """Returns the value with changes."""
    return dataclasses.replace(self, **changes)


class Event(NamedTuple):
  """A named call that was reached, with the values that it was given."""

  kind: str
  call: named_calls.NamedCall
  values: Sequence[Value]
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
    self._symbols: dict[Hashable, _degrees.Symbol] = {}
    self._keys = itertools.count()
    self._around: Place = ()
    # By number and place, since a loop's body is interpreted several times.
    self.events: dict[Hashable, Event] = {}

  def run(self, jaxpr: core.Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """Returns what is known of a closed jaxpr's outputs."""
    consts = [self.number(x) for x in jaxpr.consts]
    return interpreter.evaluate(
      jaxpr, inputs, self._equation, consts, lambda x: self.number(x.val)
    )

  def symbol(self, words: str, key: Hashable) -> _degrees.Symbol:
    """Returns the symbol of an S; the same one for the same key."""
    number = len(self._symbols)
    return self._symbols.setdefault(key, _degrees.Symbol(words, number))

  def argument(self, index: int, rank: int, state: str, words: str) -> Value:
    """Returns an argument that is the S of a state."""
    unit = self.symbol(words, ("in", index)), tuple(range(rank))
    return Value(
      ((unit, fractions.Fraction(1)),),
      identity=Identity(index),
      scale=Scale(state, "old"),
      scales=frozenset([state]),
      is_pure=True,
      key=next(self._keys),
    )

  def number(self, x: jax.typing.ArrayLike) -> Value:
    """Returns what is known of an array of the program."""
    is_small = math.prod(np.shape(x)) <= _MOST_ELEMENTS
    dtype = jnp.result_type(x)
    is_shape = isinstance(x, jax.ShapeDtypeStruct)
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    if not is_small or is_shape or is_key:
      return Value(key=next(self._keys))
    array = np.asarray(x)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    if is_float:
      array = array.astype(np.complex128 if array.dtype.kind == "c" else float)
    is_any = is_float and bool(np.all((array == 0) | ~np.isfinite(array)))
    is_real = array.size > 0 and array.dtype.kind != "c"
    is_one = is_real and bool(np.all(array == array.flat[0]))
    return Value(
      ANY if is_any else FREE,
      constant=array.flat[0].item() if is_one else None,
      is_pure=True,
      key=next(self._keys),
    )

  # ---- Equations.

  def _equation(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    number = named_calls.number_of(equation)
    if number is not None:
      outputs = self._named_call(number, equation, inputs)
      if outputs is not None:
        return outputs
    form = calls.form(equation)
    if form is None:
      return self._operation(equation, inputs)
    around, self._around = self._around, (*self._around, equation)
    try:
      by_form: dict[calls.Form, Callable[..., Sequence[Value]]] = {
        calls.Form.COND: self._cond,
        calls.Form.SCAN: self._scan,
        calls.Form.WHILE: self._while,
        calls.Form.SHARD_MAP: self._shard_map,
        calls.Form.SOLVE: self._solve,
      }
      return by_form.get(form, self._call)(equation, inputs)
    finally:
      self._around = around

  def _operation(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    """Returns the outputs of an operation that holds no jaxpr."""
    name = equation.primitive.name
    if name in _COPIES:
      return inputs
    place = (*self._around, equation)
    made = self._made(inputs, place)
    if made.taken is None and _loses(equation, inputs):
      made = made.but(taken=Mark(False, place))
    variables = (*equation.invars, *equation.outvars)
    if not all(isinstance(x.aval, jax.core.ShapedArray) for x in variables):
      # A reference may hold anything by now.
      degree = Unknown("it is read from a reference", False, place)
      return [made.but(degree=degree) for _ in equation.outvars]
    axes = _mesh_axes(equation)
    if axes and any(unit[1] for x in inputs for unit in _units(x)):
      reason = "devices mix members that have an S of their own"
      made = made.but(degree=Unknown(reason, False, place))
      return [made for _ in equation.outvars]
    if name == "axis_index":
      return [made.but(is_pure=False, varies=axes)]
    if not (inputs and equation.outvars):
      return [made for _ in equation.outvars]
    if axes:
      # What was put together from all devices is the same on all.
      varies = made.varies if name in _EXCHANGES else made.varies - axes
      mixed = made.mixed | (axes if made.scales else frozenset())
      made = made.but(varies=varies, mixed=mixed)
    known = self._known(equation, inputs)
    if known is not None:
      is_number = known.constant is not None
      return [known.but(varies=made.varies) if is_number else known]
    if name == "select_n":
      return [self._select(equation, inputs, made)]
    if name == "convert_element_type":
      return [self._convert(equation, inputs[0], made)]
    if name in ("slice", "gather", "dynamic_slice") and inputs[0].scale:
      return [self._part(equation, inputs[0], made)]
    degrees = self._result_degrees(equation, inputs, place)
    outputs = [
      made.but(
        degree=degree,
        key=next(self._keys),
        grown=_grown(degree, inputs, place),
      )
      for degree, _ in zip(degrees, equation.outvars, strict=True)
    ]
    if len(outputs) == 1:
      outputs = [self._marked(equation, inputs, outputs[0])]
    return outputs

  def _made(self, inputs: Sequence[Value], place: Place) -> Value:
    """Returns what the inputs alone say of a result."""
    return Value(
      scales=frozenset().union(*(x.scales for x in inputs)),
      reads=frozenset().union(*(x.reads for x in inputs)),
      varies=frozenset().union(*(x.varies for x in inputs)),
      mixed=frozenset().union(*(x.mixed for x in inputs)),
      is_pure=all(x.is_pure for x in inputs),
      tested=_worst(x.tested for x in inputs),
      taken=_worst(x.taken for x in inputs),
      key=next(self._keys),
      place=place,
    )

  def _result_degrees(
    self, equation: core.JaxprEqn, inputs: Sequence[Value], place: Place
  ) -> Sequence[_degrees.Degree]:
    name, count = equation.primitive.name, len(equation.outvars)
    degrees = [x.degree for x in inputs]
    is_mixed = count > 1 and any(
      _degrees.moved(equation, i, x) is None for i, x in enumerate(degrees)
    )
    if is_mixed:
      reason = f"`{name}` mixes members that have an S of their own"
      return [Unknown(reason, False, place)] * count
    if count > 1 and _degrees.unknown(degrees) is None:
      if name == "sort":
        return degrees
      if name in ("top_k", "approx_top_k", "svd", "qr"):
        grown = 1 if name == "qr" else 0
        return [degrees[0] if i == grown else FREE for i in range(count)]
      if name == "eigh":
        ranks = [_degrees.aval(x).ndim for x in equation.outvars]
        return [degrees[0] if x < max(ranks) else FREE for x in ranks]
    numbers = [x.constant for x in inputs]
    sources = [x.place for x in inputs]
    found = _degrees.result(equation, degrees, numbers, place, sources)
    return [found] * count

  def _known(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Value | None:
    """Returns a result that is an input or a number, or else None."""
    name = equation.primitive.name
    dtype = _degrees.aval(equation.outvars[0]).dtype
    constants = [x.constant for x in inputs]
    if name == "select_n" and constants[0] is not None:
      return inputs[1 + int(constants[0])]
    if name in ("and", "or") and dtype.kind == "b":
      for constant, other in zip(constants, inputs[::-1], strict=True):
        if constant is not None:
          decides = bool(constant) is (name == "or")
          return self.number(name == "or") if decides else other
    if name == "not" and dtype.kind == "b" and constants[0] is not None:
      return self.number(not constants[0])
    is_empty = 0 in _degrees.aval(equation.invars[0]).shape
    if name in _EXTREMES and constants[0] is not None and not is_empty:
      return inputs[0].but(identity=None)
    folded = self._folded(equation, constants)
    if folded is not None:
      return folded
    if name in ("add", "add_any", "sub") and _is_zero(constants[1]):
      return inputs[0]
    if name in ("add", "add_any") and _is_zero(constants[0]):
      return inputs[1]
    if name in ("mul", "div") and _is_one(constants[1]):
      return inputs[0]
    if name == "mul" and _is_one(constants[0]):
      return inputs[1]
    is_float = leaves.is_gradient(equation.invars[0].aval)
    if name in operation_table.COMPARISONS & _FOLDED.keys() and not is_float:
      apart = _apart(*inputs)
      return None if apart is None else self.number(_FOLDED[name](apart, 0))
    return None

  def _folded(
    self, equation: core.JaxprEqn, constants: Sequence[_degrees.Number | None]
  ) -> Value | None:
    """Returns the number that an operation on numbers gives."""
    name, aval = equation.primitive.name, _degrees.aval(equation.outvars[0])
    is_whole = all(not leaves.is_gradient(x.aval) for x in equation.invars)
    if name == "mul" and is_whole and 0 in map(_number, constants):
      return self.number(np.zeros((), aval.dtype))
    if any(x is None for x in constants):
      return None
    if name == "reduce_sum" and is_whole:
      before = _degrees.aval(equation.invars[0]).size
      count = before // max(math.prod(aval.shape), 1)
      return self.number(np.asarray(constants[0] * count).astype(aval.dtype))
    if name not in _FOLDED:
      return None
    with np.errstate(all="ignore"):
      result = np.asarray(_FOLDED[name](*constants)).astype(aval.dtype)
    return self.number(result)

  def _marked(
    self, equation: core.JaxprEqn, inputs: Sequence[Value], made: Value
  ) -> Value:
    """Returns the result with its identity and its marks."""
    name, first, place = equation.primitive.name, inputs[0], made.place
    if name in _RESHAPES:
      before, after = map(
        _degrees.aval, (equation.invars[0], equation.outvars[0])
      )
      identity = None
      if before.size == after.size:
        identity = _reshaped(first.identity, before.shape, after.shape)
      return first.but(degree=made.degree, identity=identity, place=place)
    if name in ("random_wrap", "random_unwrap"):
      is_key = name == "random_wrap"
      change = _undone if is_key else _formed
      return made.but(identity=change(first.identity, "data"))
    if name in ("slice", "transpose"):
      before, after = map(
        _degrees.aval, (equation.invars[0], equation.outvars[0])
      )
      order = equation.params.get("permutation", range(before.ndim))
      if before.shape == after.shape and [*order] == [*range(before.ndim)]:
        return first
    if name in ("add", "add_any", "sub"):
      made = made.but(identity=_added(equation, inputs))
    if name in _LOGIC:
      made = made.but(tested=_logic(name, made.tested, inputs))
    is_test = name == "is_finite" or name in operation_table.COMPARISONS
    if is_test:
      made = made.but(
        taken=None,
        tested=made.tested or _tested(equation, inputs, place),
        zero_of=_zero_of(name, inputs),
      )
    if name in ("max", "min", "clamp"):
      made = made.but(
        identity=_projected(inputs),
        taken=made.taken or _bounded(name, inputs, place),
      )
    if name == "mul" and all(x.identity for x in inputs):
      made = made.but(identity=_perhaps(inputs))  # Such as with a mask.
    if name in ("mul", "div", "dot_general", "conv_general_dilated"):
      # What is not finite stays so if it is multiplied by anything.
      parts = inputs[:1] if name == "div" else inputs
      scaled = [x.taken for x in parts if x.scales and not x.is_pure]
      kept = any(x is None for x in scaled)
      made = made.but(taken=None if kept else made.taken)
    stands_in = [x.stands_in for x in inputs if x.stands_in is not None]
    if stands_in:
      made = self._standing_in(equation, inputs, made, stands_in[0])
    return made

  def _standing_in(
    self,
    equation: core.JaxprEqn,
    inputs: Sequence[Value],
    made: Value,
    stands_in: int,
  ) -> Value:
    """Returns a result of a value in which a number stands in for 0."""
    name = equation.primitive.name
    if name in _KEEPS_STAND_IN:
      return made.but(stands_in=stands_in)
    if name in ("mul", "div"):
      # 0 / 0 and 0 * 1 / 0 are meant to be 0, whatever stands in.
      others = [x for x in inputs if x.stands_in is None]
      is_zero = any(not _degrees.is_free(x.degree) for x in others)
      return made.but(stands_in=None if is_zero else stands_in)
    if isinstance(made.degree, Unknown):
      return made
    reason = "a number stands in for a value that grows with S, where it is 0"
    return made.but(degree=Unknown(reason, False, made.place))

  def _select(
    self, equation: core.JaxprEqn, inputs: Sequence[Value], made: Value
  ) -> Value:
    condition, *choices = inputs
    place = made.place
    if isinstance(condition.degree, Unknown):
      return made.but(degree=condition.degree)
    joined = self._join(choices, place, "are chosen between", made=made)
    taken = joined.taken
    mark = _lost(condition.tested, choices)
    if mark:
      taken = _worst([mark._replace(place=place), taken])
    if mark and mark.kind != "order":
      # The old value may have been chosen, which no run could tell from it.
      joined = joined.but(
        identity=joined.identity or _perhaps(choices),
        scale=_untold(joined.scale, choices),
      )
    degrees = self._result_degrees(equation, inputs, place)
    joined = joined.but(
      degree=joined.degree if joined.scale else degrees[0],
      taken=taken,
      tested=None
      if leaves.is_gradient(equation.outvars[0].aval)
      else made.tested,
      place=place,
    )
    return self._guarded(condition, choices, joined)

  def _guarded(
    self, condition: Value, choices: Sequence[Value], joined: Value
  ) -> Value:
    """Returns a choice of another number where a value is 0."""
    zero = condition.zero_of
    scaled = [x for x in choices if not _degrees.is_free(x.degree)]
    free = [x for x in choices if _degrees.is_free(x.degree)]
    if zero is None or len(scaled) != 1 or not free:
      stands_in = [x.stands_in for x in choices if x.stands_in is not None]
      return joined.but(stands_in=stands_in[0]) if stands_in else joined
    (value,) = scaled
    if zero not in (value.key, value.stands_in):
      return joined
    is_any = all(x.degree == ANY for x in free)
    return joined.but(degree=value.degree, stands_in=None if is_any else zero)

  def _convert(
    self, equation: core.JaxprEqn, value: Value, made: Value
  ) -> Value:
    before, after = (
      _degrees.aval(x[0]).dtype for x in (equation.invars, equation.outvars)
    )
    if before == after:
      return value
    if value.constant is not None:
      with np.errstate(all="ignore"):
        number = np.asarray(value.constant).astype(after)
        is_kept = after.kind in "fb" or np.all(number == value.constant)
      if not is_kept and not jnp.issubdtype(after, jnp.inexact):
        return made.but(identity=_cast(value.identity, before, after))
      # A number that depends on S is one that was known only to be 0 or 1.
      return self.number(number).but(
        identity=_cast(value.identity, before, after)
      )
    is_float = jnp.issubdtype(after, jnp.inexact)
    degree = value.degree
    if not is_float and after.kind == "b":
      degree = degree if isinstance(degree, Unknown) else FREE
      return made.but(degree=degree, zero_of=value.key)
    if not is_float and not (_degrees.is_free(degree)):
      if not isinstance(degree, Unknown):
        grows = _degrees.in_words(degree)
        degree = Unknown(
          f"what {grows} becomes an integer",
          True,
          made.place,
          ((grows, value.place),),
        )
      return made.but(degree=degree)
    return value.but(
      degree=FREE if degree == ANY and not is_float else degree,
      identity=_cast(value.identity, before, after),
      scale=value.scale if is_float else None,
      place=made.place,
    )

  def _part(self, equation: core.JaxprEqn, value: Value, made: Value) -> Value:
    """Returns a part of an S that differs between members."""
    before, after = map(
      _degrees.aval, (equation.invars[0], equation.outvars[0])
    )
    name, params = equation.primitive.name, equation.params
    axes = _units(value)[0][1] if _units(value) else ()
    starts = params.get("start_indices") or (0,) * before.ndim
    ends = params.get("limit_indices") or before.shape
    steps = params.get("strides") or (1,) * before.ndim
    counts = [
      -(-(b - a) // c) for a, b, c in zip(starts, ends, steps, strict=True)
    ]
    if not axes or (
      name != "gather" and all(before.shape[x] == after.shape[x] for x in axes)
    ):
      is_whole = name != "gather" and before.shape == after.shape
      return value if is_whole else value.but(identity=None)
    if name != "slice" or len(_units(value)) != 1:
      reason = "a part of S is taken that depends on the data"
      return made.but(degree=Unknown(reason, False, made.place))
    ((symbol, _),) = _units(value)
    key = repr((value.degree, starts, ends, steps))
    words = f"{symbol.words}{[*starts]}".replace(" ", "")
    unit = self.symbol(words, key), tuple(x for x in axes if counts[x] > 1)
    degree = _degrees.renamed(value.degree, lambda _: unit)
    return made.but(degree=degree or value.degree, scale=value.scale)

  def _join(
    self,
    values: Sequence[Value],
    place: Place,
    reason: str,
    *,
    is_branch: bool = False,
    made: Value | None = None,
  ) -> Value:
    """Returns what is known of a value that is one of several."""
    made = made or self._made(values, place)
    degrees = list(dict.fromkeys(x.degree for x in values if x.degree != ANY))
    unknown = _degrees.unknown(degrees)
    degree: _degrees.Degree = degrees[0] if degrees else ANY
    scale = _either([x.scale for x in values], is_branch=is_branch)
    if unknown:
      degree = unknown
    elif scale and len(degrees) > 1:
      # One S or another is an S of its own from here on.
      assert isinstance(degree, tuple)
      symbol = self.symbol("an S chosen by a condition", ids(place))
      axes = degree[0][0][1] if degree else ()
      degree = (((symbol, axes), fractions.Fraction(1)),)
    elif len(degrees) > 1:
      grows = {
        _degrees.in_words(x.degree): x.place for x in values if x.degree != ANY
      }
      degree = Unknown(reason, True, place, tuple(grows.items()))
    else:
      scale = scale if all(x.scale for x in values) else None

    def common(field: str) -> Any:
      found = {getattr(x, field) for x in values}
      return found.pop() if len(found) == 1 else None

    constant = common("constant")
    if any(type(x.constant) is not type(constant) for x in values):
      constant = None
    return made.but(
      degree=degree,
      identity=common("identity"),
      constant=constant,
      scale=scale,
      zero_of=common("zero_of"),
      stands_in=common("stands_in"),
      place=next((x.place for x in values if x.place), place),
      grown=next((x.grown for x in values if x.grown), ()),
    )

  # ---- Calls, branches and loops.

  def _call(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    (body,) = calls.bodies(equation)
    return self.run(body.jaxpr, [inputs[i] for i in body.inputs])

  def _solve(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    """Returns the solution of equations that are linear."""
    made = self._made(inputs, self._around)
    split = sum(equation.params["const_lengths"])
    degrees = [x.degree for x in inputs]
    matrix, right = degrees[:split], degrees[split:]
    degree = _degrees.unknown(degrees)
    distinct = {x for x in right if x != ANY}
    if degree is None and any(axes for x in inputs for _, axes in _units(x)):
      degree = Unknown("a solver mixes members", False, self._around)
    if degree is None and (
      not all(map(_degrees.is_free, matrix)) or len(distinct) > 1
    ):
      degree = Unknown("a solver's matrix depends on S", False, self._around)
    found = degree or next(iter(distinct), ANY)
    return [
      made.but(degree=found, key=next(self._keys)) for _ in equation.outvars
    ]

  def _cond(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    index = inputs[0]
    bodies = calls.bodies(equation)
    if index.constant is not None:
      bodies = [bodies[min(max(int(index.constant), 0), len(bodies) - 1)]]
    updating = [x for x in bodies if _updates(x.jaxpr, self._named)]
    if self._overflowing and updating:
      # Where nothing is updated, nothing overflows.
      bodies = updating
    results = [self.run(x.jaxpr, [inputs[i] for i in x.inputs]) for x in bodies]
    place = self._around
    outputs = [
      self._join(x, place, "are chosen between", is_branch=not index.tested)
      for x in zip(*results, strict=True)
    ]
    if isinstance(index.degree, Unknown):
      outputs = [x.but(degree=index.degree) for x in outputs]
    if index.tested:
      is_sure = index.tested.is_sure and index.tested.finite is not None
      mark = index.tested._replace(is_sure=is_sure, place=place)
      outputs = [
        x.but(
          taken=_worst([mark, x.taken]),
          scale=_untold(x.scale, several),
          identity=x.identity or _perhaps(several),
        )
        for x, several in zip(outputs, zip(*results, strict=True), strict=True)
      ]
    return outputs

  def _loop(
    self,
    equation: core.JaxprEqn,
    start: Sequence[Value],
    others: Sequence[Value],
    body: Callable[[Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]],
    *,
    members: Collection[_degrees.Symbol] = (),
    runs: bool = False,
  ) -> tuple[list[Value], list[Value]]:
    """Returns what a loop carries in the end, and what its rounds give."""
    place = self._around
    outside = {x[0] for v in (*start, *others) for x in _units(v)}
    # The S of each round, by its position, if S moves in the loop.
    rounds: dict[int, _degrees.Symbol] = {}
    carry = list(start)
    outputs: Sequence[Value] = ()
    given: Sequence[Value] = ()
    ends: dict[_degrees.Symbol, _degrees.Symbol] = {}
    following: list[Value] = []
    settled = True
    for _ in range(_MOST_ROUNDS):
      outputs, given = body(carry)
      moving = [
        i
        for i, (old, new) in enumerate(zip(carry, outputs, strict=True))
        if old.scale
        and new.scale
        and i not in rounds
        and old.degree != new.degree
        and _units(old)
        and _units(new)
      ]
      if moving:
        begins = {}
        for i in moving:
          rounds[i] = self.symbol("the S of a round", (ids(place), i))
        for i in rounds:
          begins[_units(start[i])[0][0]] = rounds[i]
        carry = [_renamed(x, begins, outside, place) for x in start]
        carry = [
          x.but(identity=None) if i in rounds else x
          for i, x in enumerate(carry)
        ]
        continue
      # What has the degree of the next S is right in the next round.
      ends = {
        units[0][0]: symbol
        for i, symbol in rounds.items()
        if len(units := _units(outputs[i])) == 1
      }
      following = [_renamed(x, ends, outside, place) for x in outputs]
      joined = [
        self._join([old, new], place, "are carried by a loop", is_branch=True)
        for old, new in zip(carry, following, strict=True)
      ]
      if joined == carry:
        break
      carry = joined
    else:
      reason = "a loop carries values that no rule settles"
      carry = [x.but(degree=Unknown(reason, False, place)) for x in carry]
      settled = False
    after = {
      symbol: self.symbol("the S after the loop", (ids(place), i, "after"))
      for i, symbol in rounds.items()
    }
    known = outside - {*rounds.values()}
    # A loop that runs ends with what its body gives.
    last = following if runs and settled else carry
    finished = [
      _renamed(x, after, known, place).but(key=next(self._keys)) for x in last
    ]
    for i in rounds:
      stage = outputs[i].scale
      finished[i] = finished[i].but(scale=stage)
    # What a round gives may be of the members that it is given.
    known = known.union(members)
    return finished, [_renamed(x, {}, known, place) for x in given]

  def _scan(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    (body,) = calls.bodies(equation)
    carried = calls.carried(equation)
    place = self._around
    consts, start = (
      inputs[: carried.start],
      inputs[carried.start : carried.stop],
    )
    slices = [self._slice_of(x, place) for x in inputs[carried.stop :]]
    count = len(start)

    def run(carry: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
      outputs = self.run(body.jaxpr, [*consts, *carry, *slices])
      return outputs[:count], outputs[count:]

    end, given = self._loop(
      equation,
      start,
      [*consts, *inputs[carried.stop :]],
      run,
      members={x[0] for v in slices for x in _units(v)},
      runs=equation.params["length"] > 0,
    )
    return [*end, *(self._stack_of(x, place) for x in given)]

  def _slice_of(self, value: Value, place: Place) -> Value:
    """Returns what a round of a scan sees of an array."""

    def rename(unit: _degrees.Unit) -> _degrees.Unit:
      symbol, axes = unit
      rest = tuple(x - 1 for x in axes if x != 0)
      if 0 not in axes:
        return symbol, rest
      key = ids(place), symbol, "member"
      return self.symbol(f"the {symbol.words} of a round", key), rest

    return value.but(
      degree=_degrees.renamed(value.degree, rename) or value.degree,
      identity=_formed(value.identity, "slice", ids(place)),
      key=next(self._keys),
    )

  def _stack_of(self, value: Value, place: Place) -> Value:
    """Returns the array of what the rounds of a scan give."""
    members = {
      symbol: key[1]
      for key, symbol in self._symbols.items()
      if isinstance(key, tuple) and key[0] == ids(place) and key[-1] == "member"
    }

    def rename(unit: _degrees.Unit) -> _degrees.Unit:
      symbol, axes = unit
      rest = tuple(x + 1 for x in axes)
      if symbol in members:
        return members[symbol], (0, *rest)
      return symbol, rest

    return value.but(
      degree=_degrees.renamed(value.degree, rename) or value.degree,
      identity=_undone(value.identity, "slice", ids(place)),
      scale=value.scale if value.scale and value.scale.stage == "new" else None,
      key=next(self._keys),
    )

  def _while(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    test, body = calls.bodies(equation)
    start = calls.carried(equation).start
    consts = inputs[:start]
    goes_on: list[Value] = []

    def run(carry: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
      values = [*consts, *carry]
      goes_on[:] = self.run(test.jaxpr, [values[i] for i in test.inputs])
      return self.run(body.jaxpr, [values[i] for i in body.inputs]), ()

    end, _ = self._loop(equation, inputs[start:], consts, run)
    (condition,) = goes_on
    if isinstance(condition.degree, Unknown):
      return [x.but(degree=condition.degree) for x in end]
    if condition.tested:
      mark = Mark(False, self._around)
      return [x.but(taken=x.taken or mark) for x in end]
    return end

  def _shard_map(
    self, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value]:
    (body,) = calls.bodies(equation)
    inner = map(_degrees.aval, body.jaxpr.jaxpr.invars)
    specs = equation.params["in_specs"]
    outputs = self.run(body.jaxpr, [*map(_to_device, inputs, specs, inner)])
    return [*map(_from_devices, outputs, equation.params["out_specs"])]

  # ---- The library's own calls.

  def _named_call(
    self, number: int, equation: core.JaxprEqn, inputs: Sequence[Value]
  ) -> Sequence[Value] | None:
    call = self._named[number]
    positions = list(jax.tree.leaves(call.inputs))
    if len(positions) != len(inputs):
      return None  # A derivative of the call.
    place = (*self._around, equation)
    event = Event(call.kind, call, inputs, place)
    self.events[number, ids(place)] = event
    if call.kind == "dropped":
      mark = Mark(True, place, "dropped")
      return [x.but(taken=x.taken or mark) for x in inputs]
    if call.kind == "arguments":
      return inputs
    if call.kind == "skip":
      return [self.number(False)]
    if call.kind == "examine":
      return self._examined(event, len(equation.outvars))
    if call.kind == "schedule":
      # The count that it was given before leaves its state as it is.
      steps, old, new = call.inputs
      count = inputs[steps] if isinstance(steps, int) else Value()
      given = count.identity
      is_same = given is not None and given == Identity(given.argument)
      kept = jax.tree.leaves(old if is_same else new)
      return [inputs[x] for x in kept]
    assert call.kind == "move"
    return self._moved(event, equation)

  def _examined(self, event: Event, count: int) -> Sequence[Value]:
    place, (loss_scale, *_) = event.place, event.call.inputs
    scale = None if loss_scale is None else event.values[loss_scale]
    path = scale.scale.path if scale and scale.scale else None
    overflows = bool(self._overflowing) and (
      path is None or path in self._overflowing
    )
    made = self._made(event.values, place).but(tested=None, taken=None)
    flag = self.number(overflows).but(varies=made.varies, mixed=made.mixed)
    grows = (
      scale.degree if scale else Unknown("amax grows with S", False, place)
    )
    share = Unknown("the range that is used depends on S", False, place)
    finding = event.call.outputs
    outputs = [made.but(degree=share, key=next(self._keys))] * count
    outputs[finding.overflow] = flag
    outputs[finding.dropped] = self.number(False).but(varies=made.varies)
    outputs[finding.amax] = made.but(degree=grows)
    return outputs

  def _moved(self, event: Event, equation: core.JaxprEqn) -> Sequence[Value]:
    place, call = event.place, event.call
    old = call.inputs[0]
    before = event.values[position_of_scale(old)]
    new_state, stalled = call.outputs
    made = self._made(event.values, place).but(tested=None, taken=None)
    reason = "the rule's state depends on S"
    outputs = [
      made.but(degree=Unknown(reason, False, place), key=next(self._keys))
      for _ in equation.outvars
    ]
    outputs[stalled] = made.but(degree=FREE)
    position = position_of_scale(new_state)
    axes = tuple(range(_degrees.aval(equation.outvars[position]).ndim))
    symbol = self.symbol("the next S", (ids(place), "next"))
    is_one = before.degree == FREE and before.scale is not None
    outputs[position] = made.but(
      degree=FREE if is_one else (((symbol, axes), fractions.Fraction(1)),),
      scale=before.scale
      and before.scale._replace(
        stage="new", moves=before.scale.moves | {ids(place)}
      ),
      is_pure=True,
    )
    return outputs


def position_of_scale(rule_state: object) -> int:
  """Returns the position of S in the state of a rule."""
  # No position is negative.
  marked = jax.tree.leaves(states.replace_scale(rule_state, -1))
  return int(jax.tree.leaves(rule_state)[marked.index(-1)])


def _updates(jaxpr: core.Jaxpr, named: Sequence[named_calls.NamedCall]) -> bool:
  """Returns whether `update` of loss_scaling runs in a jaxpr."""
  for equation in jaxpr.eqns:
    number = named_calls.number_of(equation)
    if number is not None and named[number].kind == "move":
      return True
    if any(_updates(x.jaxpr, named) for x in calls.bodies(equation)):
      return True
  return False


def ids(place: Place) -> tuple[int, ...]:
  return tuple(map(id, place))


def _grown(
  degree: _degrees.Degree, inputs: Sequence[Value], place: Place
) -> Place:
  """Returns the operation that gave a result its degree."""
  if all(_degrees.is_free(x.degree) for x in (*inputs, Value(degree))):
    same = inputs
  else:
    same = [x for x in inputs if x.degree == degree != FREE]
    if not same:
      return place
  return next((x.grown for x in same if x.grown), ())


def _units(value: Value) -> list[_degrees.Unit]:
  degree = value.degree
  return [unit for unit, _ in degree] if isinstance(degree, tuple) else []


def _worst(marks: Iterable[Mark | None]) -> Mark | None:
  found = [x for x in marks if x is not None]
  return next((x for x in found if x.is_sure), found[0] if found else None)


def _is_nonfinite(value: Value) -> bool:
  """Returns whether a value is a number that is inf or NaN."""
  is_zero = _is_zero(value.constant)
  return value.is_pure and value.degree == ANY and not is_zero


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


def _perhaps(choices: Sequence[Value]) -> Identity | None:
  """Returns the identity of a value that may be what one choice is."""
  first = next((x.identity for x in choices if x.identity), None)
  return first and first._replace(is_sure=False)


def _projected(inputs: Sequence[Value]) -> Identity | None:
  """Returns the identity of an argument that may be within bounds anyway."""
  known = [x for x in inputs if x.identity is not None]
  bounds = [x for x in inputs if x.identity is None]
  is_bounded = all(x.is_pure and _degrees.is_free(x.degree) for x in bounds)
  return _perhaps(known) if len(known) == 1 and is_bounded else None


def _untold(scale: Scale | None, choices: Sequence[Value]) -> Scale | None:
  """Returns the S that a test for inf chose."""
  stages = {x.scale.stage for x in choices if x.scale}
  if scale is None or len(stages) == 1:
    return scale
  return scale._replace(stage="untold")


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
  if any(x is None for x in scales):
    return None
  found = {x for x in scales if x is not None}
  if len({x.path for x in found}) > 1:
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
  value: Value,
  names: Mapping[_degrees.Symbol, _degrees.Symbol],
  known: set[_degrees.Symbol],
  place: Place,
) -> Value:
  """Returns a value as another round sees it; some S are no more."""

  def rename(unit: _degrees.Unit) -> _degrees.Unit | None:
    symbol = names.get(unit[0])
    if symbol is None and unit[0] not in known:
      return None
    return symbol or unit[0], unit[1]

  degree = _degrees.renamed(value.degree, rename)
  if degree is None:
    reason = (
      "it is kept from one round of a loop to the next, where S is another"
    )
    source = value.place or place
    grows = ((_degrees.in_words(value.degree), source),)
    degree = Unknown(reason, True, source, grows)
  return value.but(degree=degree)


def _number(x: object) -> object:
  return None if isinstance(x, bool) else x


def _is_zero(x: object) -> bool:
  return not isinstance(x, bool) and isinstance(x, (int, float)) and x == 0


def _is_one(x: object) -> bool:
  return not isinstance(x, bool) and isinstance(x, (int, float)) and x == 1


def _apart(first: Value, second: Value) -> int | None:
  """Returns by how much a known value is larger than another, or None."""
  a, b = first.identity, second.identity
  if a is None or b is None or not (a.is_sure and b.is_sure):
    return None
  if a == b:
    return 0
  if _undone(a, "plus one") == b:
    return 1
  return -1 if _undone(b, "plus one") == a else None


def _added(equation: core.JaxprEqn, inputs: Sequence[Value]) -> Identity | None:
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
  identity: Identity | None, before: Sequence[int], after: Sequence[int]
) -> Identity | None:
  """Returns the identity of a reshaped array, and of one reshaped back."""
  before, after = tuple(before), tuple(after)
  if identity is None or before == after:
    return identity
  is_reshaped = identity.forms[-1:] and identity.forms[-1][0] == "shape"
  kept = identity if is_reshaped else _formed(identity, "shape", before)
  return _undone(identity, "shape", after) or kept


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
  if jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(
    narrow, jnp.floating
  ):
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp
  if jnp.issubdtype(wide, jnp.integer) and jnp.issubdtype(narrow, jnp.integer):
    c, d = jnp.iinfo(wide), jnp.iinfo(narrow)
    return int(c.min) <= int(d.min) and int(c.max) >= int(d.max)
  return False


def _tested(
  equation: core.JaxprEqn, inputs: Sequence[Value], place: Place
) -> Mark | None:
  """Returns a mark if a test may tell which scaled values are finite."""
  name, variables = equation.primitive.name, equation.invars
  is_nan = name in ("ne", "eq") and variables[0] is variables[-1]
  has_inf = any(
    isinstance(x.constant, float) and math.isinf(x.constant) for x in inputs
  )
  scaled = [x for x in inputs if x.scales and not x.is_pure]
  grows = any(not _degrees.is_free(x.degree) for x in scaled)
  if scaled and (name == "is_finite" or is_nan or has_inf):
    finite = name in ("is_finite", "lt") or (name == "eq") is is_nan
    is_first = inputs[0] is scaled[0]
    known = finite if is_first or name in ("eq", "ne") else None
    return Mark(grows, place, finite=known, of=scaled[0].key)
  # What is inf is also larger than others.
  is_order = name in ("gt", "ge", "lt", "le")
  return Mark(False, place, "order") if is_order and grows else None


def _logic(
  name: str, tested: Mark | None, inputs: Sequence[Value]
) -> Mark | None:
  """Returns a mark for the logic of tests: what their truth still says."""
  if tested is None or name == "not":
    if tested is None or tested.finite is None:
      return tested
    return tested._replace(finite=not tested.finite)
  told = name in ("and", "reduce_and")
  # "And" says that all is finite, and "or" that something is not.
  marks = [x.tested for x in inputs if x.tested]
  known = [x for x in marks if x.finite is told]
  return known[0] if known else tested._replace(finite=None)


def _lost(tested: Mark | None, choices: Sequence[Value]) -> Mark | None:
  """Returns a mark if a choice by a test leaves an inf out."""
  if tested is None or any(map(_is_nonfinite, choices)):
    return None
  if tested.finite is None or len(choices) != 2:
    return tested._replace(is_sure=False)
  chosen = choices[0 if tested.finite else 1]
  if chosen.key == tested.of:
    return None
  is_other = chosen.scales and not chosen.is_pure and chosen.taken is None
  return tested._replace(is_sure=tested.is_sure and not is_other)


def _zero_of(name: str, inputs: Sequence[Value]) -> int | None:
  """Returns the key of a value that is compared with 0."""
  if len(inputs) != 2:
    return None
  for value, zero in (inputs, inputs[::-1]):
    if not _is_zero(zero.constant):
      continue
    source = operation_table.name_of(value.place[-1]) if value.place else ""
    if name in ("eq", "ne") or source in ("abs", "sqrt", "square"):
      return value.key
  return None


def _loses(equation: core.JaxprEqn, inputs: Sequence[Value]) -> bool:
  """Returns whether an operation may leave an inf out."""
  name, first = equation.primitive.name, inputs[:1]
  scaled = [not (x.is_pure or _degrees.is_free(x.degree)) for x in inputs]
  if name in _ORDERED:
    # The largest of absolute values is inf if one of them is.
    is_positive = (
      first
      and first[0].place
      and (first[0].place[-1].primitive.name in _POSITIVE)
    )
    return any(scaled) and not (name in _LARGEST and is_positive)
  # 1 / inf is 0.
  if name == "div":
    return bool(scaled[1] and not scaled[0])
  if name == "integer_pow":
    return bool(scaled[0] and equation.params["y"] < 0)
  if name in ("gather", "dynamic_slice"):
    return any(scaled[1:])
  return name in ("rsqrt", "sign") and any(scaled)


def _bounded(name: str, inputs: Sequence[Value], place: Place) -> Mark | None:
  """Returns a mark if a bound takes the place of inf."""
  values = [inputs[1]] if name == "clamp" else inputs
  bounds = [x for x in inputs if x.is_pure and x.degree != ANY]
  scaled = [x for x in values if x.scales and not x.is_pure]
  if not bounds or not scaled:
    return None
  if _degrees.is_cast(name, [x.constant for x in inputs]):
    return None
  # A lower bound takes nothing from an absolute value.
  sources = [x.place[-1].primitive.name for x in scaled if x.place]
  if name == "max" and all(x in _POSITIVE for x in sources):
    return None
  is_sure = any(not _degrees.is_free(x.degree) for x in scaled)
  return Mark(is_sure and name != "max", place)


def _names_of(spec: jax.P, axis: int) -> tuple[str, ...]:
  """Returns the mesh axes along which an array's axis is split."""
  part = spec[axis] if axis < len(spec) else None
  if part is None:
    return ()
  return tuple(part) if isinstance(part, tuple) else (part,)


def _to_device(value: Value, spec: jax.P, inner: jax.core.ShapedArray) -> Value:
  """Returns what a device sees of an array.

  If each device has an S of its own, as under pmap, they are equal: that each
  step keeps them equal is part of the proof.
  """
  meshed = [_names_of(spec, axis) for axis in range(inner.ndim)]

  def rename(unit: _degrees.Unit) -> _degrees.Unit:
    is_single = [bool(meshed[x]) and inner.shape[x] == 1 for x in unit[1]]
    axes = zip(unit[1], is_single, strict=True)
    return unit[0], tuple(x for x, is_one in axes if not is_one)

  varies = frozenset(name for names in meshed for name in names)
  return value.but(
    degree=_degrees.renamed(value.degree, rename) or value.degree,
    identity=_formed(value.identity, "local", str(spec)),
    varies=frozenset() if value.scale else varies,
  )


def _from_devices(value: Value, spec: jax.P) -> Value:
  """Returns an array that devices give parts of."""
  split = {x for axis in range(len(spec)) for x in _names_of(spec, axis)}
  return value.but(
    identity=_undone(value.identity, "local", str(spec)),
    varies=value.varies - split,
  )
