"""Chooses the dtype of one operation, and runs it in that dtype."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import _products
from optax_lossscale._autocast import _value
from optax_lossscale._autocast import levels
from optax_lossscale._base import leaves
from optax_lossscale._base.formats import FLOAT32
from optax_lossscale._base.formats import largest
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._jaxpr.operations import Cast
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Flag
from optax_lossscale._jaxpr.operations import Form

_Kind = _value.Kind
_Treatment = levels.Treatment
_Values = Sequence[_value.Value]

_OF_PARAMETERS = operations.names(Flag.PARAMETER, Elements.JOINS)
_REARRANGES = operations.names(Elements.PERMUTES) | {
  "reshard",
  "sharding_constraint",
}
_ARITHMETIC = ("add", "div", "mul", "neg", "sub")
# If an input of these operations contains a large number, so does the result.
# Other operations have a bounded result, or one whose magnitude is unknown.
_KEEP_SPAN = operations.names(Flag.SPAN, Elements.JOINS, Cast.PRODUCT, Cast.SUM)


def evaluate(
  equation: core.JaxprEqn,
  inputs: _Values,
  decision: levels.Decision,
  dtypes: frozenset[np.dtype],
) -> _Values:
  """Runs an operation as `decision` says, and returns its outputs."""
  row, moves = operations.of(equation), operations.moves(equation)
  if (
    decision.treatment is _Treatment.WRITTEN
    or Flag.BITS in row.flags
    or not _is_among(equation, dtypes)
  ):
    return _run_as_written(equation, inputs)
  if row.form is Form.CONVERTS:
    return _convert(equation, inputs)
  if operations.name_of(equation) in levels.SUMS:
    with scopes.note("a sum"):
      return _run_sum(equation, inputs, decision)
  if row.cast is Cast.PRODUCT:
    return _run_product(equation, inputs, decision)
  if row.elements is Elements.TESTS:
    return _run_in_dtype(equation, inputs, _find_widest(inputs), decision)
  is_join = row.elements is Elements.JOINS
  if moves and not (is_join or decision.treatment is _Treatment.BLACK):
    with scopes.note(_Kind.COMPUTED.value):
      return _run_move(equation, inputs)
  if moves or is_join or row.elements is Elements.EACH:
    dtype, kind = _choose(equation, inputs, decision)
    return _run_in_dtype(equation, inputs, dtype, decision, kind)
  return _run_as_written(equation, inputs)


def _is_among(equation: core.JaxprEqn, dtypes: frozenset[np.dtype]) -> bool:
  """Returns whether an operation uses floats, all of them in `dtypes`."""
  avals: list[Any] = [
    atom.aval for atom in (*equation.invars, *equation.outvars)
  ]
  # A `jax.Ref` cannot change its dtype.
  if not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
    return False
  floats = {aval.dtype for aval in avals if leaves.is_gradient(aval)}
  if equation.params.get("update_jaxpr") is not None and not (
    equation.primitive.name in levels.SUMS and floats == {FLOAT32}
  ):
    # The function that combines a scatter's values is recorded for one dtype.
    return False
  return bool(floats) and floats <= dtypes


def _run_as_written(equation: core.JaxprEqn, inputs: _Values) -> _Values:
  with interpreter.context(equation):
    arrays = [x.restore() for x in inputs]
  # Positions, noise and the like do not depend on the network's values.
  kind = _Kind.STATISTIC if _stay_float32(inputs) else _Kind.COMPUTED
  span = _find_span(equation, inputs)
  return [
    x if x.written == FLOAT32 else dataclasses.replace(x, span=None)
    for x in _bind(equation, arrays, kind, span)
  ]


def _convert(equation: core.JaxprEqn, inputs: _Values) -> _Values:
  """Evaluates a conversion that the program itself makes."""
  (x,) = inputs
  dtype = equation.params["new_dtype"]
  if not x.is_float or not leaves.is_gradient(equation.outvars[0].aval):
    # A mask follows the other inputs; positions and counts are statistics.
    is_mask = x.array.dtype == np.bool_
    kind = _Kind.GIVEN if is_mask else _Kind.STATISTIC
    (output,) = _bind(equation, [x.array], kind)
    return [dataclasses.replace(output, is_mask=is_mask)]
  if scopes.mark_on(equation) == scopes.RESTORED:
    # The program sees float32 again, and operations follow the lower dtype.
    return [dataclasses.replace(x, written=dtype, kind=_Kind.COMPUTED)]
  if x.written == dtype:
    return [x]
  with interpreter.context(equation):
    return [x.convert(dtype)]


def _run_product(
  equation: core.JaxprEqn, inputs: _Values, decision: levels.Decision
) -> _Values:
  parameters, preset = equation.params, lax.DotAlgorithmPreset
  algorithm = parameters.get("precision")
  kinds = str, lax.DotAlgorithm, preset
  if isinstance(algorithm, kinds) and algorithm != preset.DEFAULT:
    # An explicit algorithm fixes the dtypes of the inputs.
    return _run_as_written(equation, inputs)
  dtype, treatment = decision.dtype, decision.treatment
  if treatment in (_Treatment.GRAY, _Treatment.PROMOTE):
    dtype = _find_widest(inputs, promotes=treatment is _Treatment.PROMOTE)
  floats = [x for x in inputs if x.is_float]
  if treatment is _Treatment.BLACK or any(x.exceeds(dtype) for x in floats):
    dtype = FLOAT32
  formats, why = _find_formats(equation, inputs, decision, dtype)
  emitted = parameters["preferred_element_type"]
  # Only a product written in low precision may keep a wider result.
  is_wide = any(x.written != FLOAT32 for x in floats)
  with scopes.note(why):
    if formats:
      result = formats.result or (emitted if is_wide else None) or dtype
      with interpreter.context(equation):
        product = _products.multiply(equation, inputs, formats)
        arrays = [product.astype(result)]
      span = _find_span(equation, inputs)
      return _value.make_outputs(equation, arrays, [span])
    if emitted is not None and not is_wide:
      parameters = {**parameters, "preferred_element_type": dtype}
      equation = equation.replace(params=parameters)
    return _run_in_dtype(equation, inputs, dtype, decision)


def _find_formats(
  equation: core.JaxprEqn,
  inputs: _Values,
  decision: levels.Decision,
  dtype: np.dtype,
) -> tuple[levels.Formats | None, str]:
  """Returns the formats of a product, if any, and why they are not float8."""
  formats, why = decision.formats, ""
  if formats is None or dtype == FLOAT32:
    return None, ""
  if formats.in_float8:
    why = _products.reason_against_float8(equation, inputs)
  if not why:
    return formats, ""
  return formats.in_16_bits(dtype), f"{levels.NOT_FLOAT8}{why}"


def _run_sum(
  equation: core.JaxprEqn, inputs: _Values, decision: levels.Decision
) -> _Values:
  """Evaluates a sum in float32, whatever the dtypes of input and output."""
  treatment, dtype = decision.treatment, decision.dtype
  is_reduction = operations.of(equation).elements is Elements.REDUCES
  # A product of vectors, since those of matrices are not run as sums.
  is_reduction |= equation.primitive.name == "dot_general"
  is_low = treatment in (_Treatment.LOW, _Treatment.LOW_BUT_NORMS)
  # A sum may not fit in low precision, even if the mean made from it does.
  is_statistic = (is_reduction and is_low) or _stay_float32(inputs)
  kind = _Kind.STATISTIC if is_statistic else _Kind.COMPUTED
  outputs = _run_in_dtype(equation, inputs, FLOAT32, decision, kind)
  if treatment is _Treatment.GRAY:
    dtype = _find_widest(inputs, promotes=False)
  if (
    is_statistic
    or treatment in (_Treatment.BLACK, _Treatment.PROMOTE)
    or any(x.exceeds(dtype) for x in outputs)
  ):
    return outputs
  with interpreter.context(equation):
    return [_value.Value(x.in_dtype(dtype), x.written) for x in outputs]


def _run_move(equation: core.JaxprEqn, inputs: _Values) -> _Values:
  """Evaluates a move, which leaves each value in its current dtype."""
  name = equation.primitive.name
  outputs = _bind(equation, _value.get_arrays(inputs))
  floats = [x for x in inputs if x.is_float]
  # Each output is made from the input at the same position, or from the float.
  sources = inputs
  if len(inputs) != len(outputs):
    sources = [*floats, *inputs][:1] * len(outputs)
  is_one = len(floats) == len(outputs) == 1

  def follow(output: _value.Value, source: _value.Value) -> _value.Value:
    if not output.is_float:
      return output
    kind = source.kind
    if name == "gather" and kind is _Kind.GIVEN:
      # The rows of an embedding are activations rather than parameters.
      kind = _Kind.STATISTIC
    commutes = is_one and _commutes(equation, source)
    return dataclasses.replace(
      output,
      kind=kind,
      is_mask=source.is_mask,
      number=None if name in ("abs", "neg", "sign") else source.number,
      span=source.span,
      source=(equation, source) if commutes else None,
    )

  return list(map(follow, outputs, sources))


def _commutes(equation: core.JaxprEqn, source: _value.Value) -> bool:
  """Returns whether to convert a move's input rather than its output."""
  # A converted input can serve several moves. For a broadcast the output is
  # converted, so that the backward pass sums the gradient in float32.
  # (Constants are always converted first, since they have no backward pass.)
  is_given = (
    source.kind is _Kind.GIVEN and equation.primitive.name in _REARRANGES
  )
  is_source = source.kind is _Kind.CONSTANT or is_given
  return is_source and len(equation.invars) == 1


def _run_in_dtype(
  equation: core.JaxprEqn,
  inputs: _Values,
  dtype: np.dtype,
  decision: levels.Decision,
  kind: _value.Kind = _Kind.COMPUTED,
) -> _Values:
  """Returns the outputs of an operation that runs in `dtype`."""
  fits = all(x.fits(decision.dtype) for x in inputs if x.is_float)
  is_number = kind is _Kind.COMPUTED and not fits
  with scopes.note("a constant out of range" if is_number else kind.value):
    with interpreter.context(equation):
      arrays = [
        _convert_input(x, dtype, equation) if x.is_float else x.array
        for x in inputs
      ]
    span = _find_span(equation, inputs) if dtype == FLOAT32 else None
    return _bind(equation, arrays, kind, span)


def _convert_input(
  x: _value.Value, dtype: np.dtype, equation: core.JaxprEqn
) -> Array:
  """Converts an input for an operation that runs in `dtype`."""
  if _clips(x, dtype):
    limit = largest(dtype)
    clipped = np.clip(np.float32(x.number), -limit, limit).astype(dtype)
    return lax.broadcast(clipped, x.array.shape) if x.array.ndim else clipped
  output: Any = equation.outvars[0].aval
  if (
    x.kind is _Kind.GIVEN
    and operations.of(equation).elements is Elements.EACH
    and x.dtype != dtype
    and x.array.shape != output.shape
  ):
    # A bias, for example, is broadcast before it is converted, so that its
    # gradient is summed in float32.
    axes = tuple(range(output.ndim - x.array.ndim, output.ndim))
    array = lax.broadcast_in_dim(x.array, output.shape, axes)
    x = _value.Value(array, x.written)
  return x.in_dtype(dtype)


def _bind(
  equation: core.JaxprEqn,
  arrays: Sequence[Array],
  kind: _value.Kind = _Kind.COMPUTED,
  span: _value.Span = None,
) -> _Values:
  outputs = interpreter.bind(equation, arrays)
  return _value.make_outputs(equation, outputs, [span] * len(outputs), kind)


def _choose(
  equation: core.JaxprEqn, inputs: _Values, decision: levels.Decision
) -> tuple[np.dtype, _value.Kind]:
  """Returns the dtype that an operation runs in, and its result's kind."""
  floats = [x for x in inputs if x.is_float]
  treatment = decision.treatment
  kinds = {x.kind for x in floats}
  if kinds == {_Kind.CONSTANT}:
    return FLOAT32, _Kind.CONSTANT
  is_join = operations.of(equation).elements is Elements.JOINS
  if is_join and all(x.kind.is_neutral for x in floats):
    # For example, the biases of several gates are joined into one array.
    return _find_widest(floats), _Kind.GIVEN
  is_given = _stay_float32(floats)
  name = operations.name_of(equation)
  if treatment is _Treatment.BLACK:
    return FLOAT32, _Kind.STATISTIC if is_given else _Kind.COMPUTED
  if decision.is_override:
    # A sum may not fit in the dtype, even if the mean made from it does.
    is_given &= _Kind.STATISTIC in kinds and name in ("div", "mul")
  if is_given and treatment is not _Treatment.WHITE:
    return _find_widest(floats), _find_kind_in_norm(name, floats)
  if treatment in (_Treatment.GRAY, _Treatment.PROMOTE):
    # Treats a summand or factor as a parameter (a bias, a scale). A subtracted
    # value is a mean or a target, and a divisor may have any magnitude.
    promotes = treatment is _Treatment.PROMOTE or name not in _OF_PARAMETERS
    return _find_widest(floats, promotes=promotes), _Kind.COMPUTED
  return _lower(name, floats, decision, clips=is_join)


def _lower(
  name: str, floats: _Values, decision: levels.Decision, *, clips: bool
) -> tuple[np.dtype, _value.Kind]:
  """Returns low precision, or float32 within a norm or for lack of range."""
  kind, dtype = _Kind.COMPUTED, decision.dtype
  if decision.treatment is _Treatment.LOW_BUT_NORMS:
    kind = _find_kind_in_norm(name, floats)
  has_room = all(x.fits(dtype) or (clips and _clips(x, dtype)) for x in floats)
  is_low = kind is _Kind.COMPUTED and has_room
  return (dtype if is_low else FLOAT32), kind


def _clips(x: _value.Value, dtype: np.dtype) -> bool:
  """Returns whether a choice such as `select_n` clips a number to `dtype`."""
  # There, numbers out of range are intentional. Any other operation runs in
  # float32 if its numbers do not fit.
  return x.number is not None and x.exceeds(dtype)


def _stay_float32(inputs: _Values) -> bool:
  """Returns whether an operation with only these inputs may stay in float32."""
  return all(x.kind.stays_float32 for x in inputs if x.is_float)


def _find_span(equation: core.JaxprEqn, inputs: _Values) -> _value.Span:
  name = equation.primitive.name
  floats = [x for x in inputs if x.is_float]
  if name == "div":
    floats = floats[:1]
  elif name not in _KEEP_SPAN:
    return None
  found = _value.join_spans(x.span for x in floats)
  are_computed = sum(x.kind is _Kind.COMPUTED for x in floats) > 1
  if found is not None and (name == "div" or are_computed):
    # A small number does not matter beside computed values or after a division.
    return (found[1], found[1]) if found[1] > 1 else None
  return found


def _find_kind_in_norm(name: str, floats: _Values) -> _value.Kind:
  """Returns the kind of an operation's result: COMPUTED outside of norms."""
  # A norm subtracts a mean, squares and sums (these two are in float32 anyway),
  # takes a root and divides by it. After it, operations are lowered again.
  kinds = {x.kind for x in floats if not x.kind.is_neutral}
  if kinds <= {_Kind.STATISTIC, _Kind.ROOT}:
    is_root = name in ("sqrt", "rsqrt") or _Kind.ROOT in kinds
    return _Kind.ROOT if is_root else _Kind.STATISTIC
  is_centered = name == "sub" and (
    _Kind.STATISTIC in kinds or any(x.kind is _Kind.GIVEN for x in floats)
  )
  is_divided = name in ("mul", "div") and _Kind.ROOT in kinds
  is_inside = name in _ARITHMETIC and _Kind.COMPUTED not in kinds
  is_part = is_centered or is_divided or is_inside
  return _Kind.NORMALIZING if is_part else _Kind.COMPUTED


def _find_widest(inputs: _Values, *, promotes: bool = True) -> np.dtype:
  """Returns the widest dtype among the inputs that an operation follows."""
  # Constants follow the other inputs if they fit. Given values also follow the
  # other inputs, unless the operation `promotes`.
  floats = [x for x in inputs if x.is_float]
  computed = [x for x in floats if not x.kind.is_neutral]
  if promotes or not computed:
    computed += [x for x in floats if x.kind is _Kind.GIVEN]
  dtypes = [x.dtype for x in computed]
  dtypes += [
    x.written
    for x in floats
    if x.kind is _Kind.CONSTANT and not all(map(x.fits, dtypes))
  ]
  if not dtypes:
    dtypes = [x.dtype for x in floats]
  # The program did not write this promotion, so it is not a mistake there.
  with jax.numpy_dtype_promotion("standard"):
    return functools.reduce(jnp.promote_types, dtypes)
