"""Branches, loops and `shard_map` in mixed precision.

Values go into them as arrays and come out as arrays, in the dtypes that the
program is written for wherever another round or another branch must agree.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from jax.extend import core

from optax_lossscale._autocast import _demand
from optax_lossscale._autocast import _value
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import control_flow
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import tallies
from optax_lossscale._jaxpr import throughout

_Values = Sequence[_value.Value]
_Uses = Sequence[_demand.Use]


class Program(Protocol):
  """What evaluates the bodies."""

  def evaluate(
    self, jaxpr: Any, inputs: _Values, uses: _Uses
  ) -> list[_value.Value]:
    """Returns the outputs of a jaxpr."""

  def use_in_loop(self, equation: core.JaxprEqn, uses: _Uses) -> _demand.Use:
    """Returns what becomes of all values in the body of a loop."""


def cond(
  program: Program, equation: core.JaxprEqn, inputs: _Values, uses: _Uses
) -> list[_value.Value]:
  """`lax.cond` and the like; the branches return what they are written for."""

  def evaluate(jaxpr: Any, arrays: Sequence[Any]) -> list[_value.Value]:
    received = _value.received(inputs[1:], arrays)
    return _as_written(program.evaluate(jaxpr, received, uses))

  return _control(control_flow.cond, equation, inputs, evaluate)


def scan(
  program: Program, equation: core.JaxprEqn, inputs: _Values, uses: _Uses
) -> list[_value.Value]:
  """`lax.scan`; it carries what it is written for, and stacks what comes."""
  num_consts, num_carry = control_flow.scan_lengths(equation)
  carry = slice(num_consts, num_consts + num_carry)
  inputs = [*inputs]
  inputs[carry] = _carried(inputs[carry])
  inside = [program.use_in_loop(equation, uses)] * len(uses)

  def evaluate(jaxpr: Any, arrays: Sequence[Any]) -> list[_value.Value]:
    received = _value.received(inputs, arrays)
    outputs = program.evaluate(jaxpr, received, inside)
    return [*_as_written(outputs[:num_carry]), *outputs[num_carry:]]

  return _control(control_flow.scan, equation, inputs, evaluate)


def while_loop(
  program: Program, equation: core.JaxprEqn, inputs: _Values, uses: _Uses
) -> list[_value.Value]:
  """`lax.while_loop`; it carries what it is written for."""
  parameters = equation.params
  num_cond, num_body = parameters["cond_nconsts"], parameters["body_nconsts"]
  cond_consts = inputs[:num_cond]
  body_consts = inputs[num_cond : num_cond + num_body]
  carry = _carried(inputs[num_cond + num_body :])
  inside = program.use_in_loop(equation, uses)

  def evaluate(jaxpr: Any, arrays: Sequence[Any]) -> list[_value.Value]:
    consts = body_consts
    if jaxpr is calls.close(parameters["cond_jaxpr"]):
      consts = cond_consts
    received = _value.received([*consts, *carry], arrays)
    return _as_written(
      program.evaluate(jaxpr, received, [inside] * len(jaxpr.out_avals))
    )

  return _control(
    control_flow.while_loop,
    equation,
    [*cond_consts, *body_consts, *carry],
    evaluate,
  )


def shard_map(
  program: Program, equation: core.JaxprEqn, inputs: _Values, uses: _Uses
) -> list[_value.Value]:
  """`jax.shard_map` and `jax.pmap`."""

  def evaluate(jaxpr: Any, arrays: Sequence[Any]) -> list[_value.Value]:
    return program.evaluate(jaxpr, _value.received(inputs, arrays), uses)

  return _control(throughout.shard_map, equation, inputs, evaluate)


def _control(
  call: control_flow.Call,
  equation: core.JaxprEqn,
  inputs: _Values,
  evaluate: Callable[[Any, Sequence[Any]], list[_value.Value]],
) -> list[_value.Value]:
  """Returns the outputs of an equation around bodies that are evaluated."""
  spans: list[_value.Span] = [None] * len(equation.outvars)

  def interpret(jaxpr: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    outputs = evaluate(calls.close(jaxpr), arrays)
    if len(outputs) == len(spans):
      spans[:] = [
        _value.union([span, x.span])
        for span, x in zip(spans, outputs, strict=True)
      ]
    return _value.arrays(outputs), ()

  with interpreter.context(equation):
    arrays, _ = call(equation, _value.arrays(inputs), interpret, tallies.Sum())
  return [
    _value.Value(array, getattr(variable.aval, "dtype", None), span=span)
    for variable, array, span in zip(
      equation.outvars, arrays, spans, strict=True
    )
  ]


def _carried(values: _Values) -> list[_value.Value]:
  """Returns what a loop carries: computed, also where the start is given."""
  return [
    _value.Value(x.array, x.written, span=x.span) for x in _as_written(values)
  ]


def _as_written(values: _Values) -> list[_value.Value]:
  return [
    _value.Value(
      x.in_dtype(x.written) if x.is_float else x.array,
      x.written,
      x.kind,
      span=x.span,
    )
    for x in values
  ]
