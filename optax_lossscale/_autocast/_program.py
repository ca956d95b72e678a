"""A program in mixed precision: its equations and calls.

Calls that are nothing but their jaxpr are evaluated in place, so that what is
known of a value holds inside as well. Where a function of its own must remain
(a derivative rule, a loop, a branch), values go in and come out as arrays.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast import _control
from optax_lossscale._autocast import _demand
from optax_lossscale._autocast import _derivative_rules
from optax_lossscale._autocast import _operation
from optax_lossscale._autocast import _recipe
from optax_lossscale._autocast import _value
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr import throughout

_Values = Sequence[_value.Value]


@dataclasses.dataclass(frozen=True)
class MixedProgram:
  """Evaluates jaxprs in mixed precision.

  Attributes:
    recipe: of the `autocast`.
    scope: in which the jaxprs are.
    unknown: the operations that could not be looked into.
  """

  recipe: _recipe.Recipe
  scope: str = ""
  unknown: set[str] = dataclasses.field(default_factory=set)

  def evaluate(
    self,
    jaxpr: Any,
    inputs: _Values,
    uses: Sequence[_demand.Use],
    consts: _Values | None = None,
  ) -> list[_value.Value]:
    """Returns the outputs of a jaxpr."""
    demand = _demand.find_demand(jaxpr, self.recipe, self.scope, uses)
    if consts is None:
      consts = [
        _value.given(x, v.aval)
        for x, v in zip(jaxpr.consts, jaxpr.jaxpr.constvars, strict=True)
      ]

    def rule(equation: core.JaxprEqn, inputs: Sequence[Any]) -> _Values:
      values = [
        x if isinstance(x, _value.Value) else _value.constant(x, atom.aval)
        for x, atom in zip(inputs, equation.invars, strict=True)
      ]
      scope = scopes.join(self.scope, str(equation.source_info.name_stack))
      inner = dataclasses.replace(self, scope=scope)
      call = _CALLS.get(equation.primitive.name)
      if call is not None:
        return call(inner, equation, values, demand.outputs[id(equation)])
      if id(equation) in demand.in_float32:
        decision = self.recipe.in_float32
      else:
        name = operation_table.listed_name(equation)
        decision = self.recipe.decide(name, scope)
      if calls.is_unknown(equation):
        where = f" in {scope}" if scope else ""
        self.unknown.add(f"{equation.primitive.name}{where}")
        decision = self.recipe.as_written
      return _operation.evaluate(equation, values, decision, self.recipe.dtypes)

    outputs = interpreter.evaluate(jaxpr, inputs, rule, consts)
    return [
      x if isinstance(x, _value.Value) else _value.constant(x, atom.aval)
      for x, atom in zip(outputs, jaxpr.jaxpr.outvars, strict=True)
    ]

  def use_in_loop(
    self, equation: core.JaxprEqn, uses: Sequence[_demand.Use]
  ) -> _demand.Use:
    """Returns what becomes of all values in the body of a loop."""
    use, _ = _demand.in_loop(equation, self.recipe, self.scope, uses)
    return use


# Each takes the program inside of an equation, the equation, the values of its
# inputs, and what becomes of its outputs.
_Call = Callable[
  [MixedProgram, core.JaxprEqn, _Values, Sequence[_demand.Use]],
  list[_value.Value],
]


def _jit(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  parameters = equation.params
  with interpreter.inside(equation):
    inputs = _constrain(parameters["in_shardings"], inputs)
    outputs = program.evaluate(parameters["jaxpr"], inputs, uses)
    return _constrain(parameters["out_shardings"], outputs)


def _constrain(shardings: Sequence[Any], values: _Values) -> list[_value.Value]:
  """Returns values that lie where a jitted function says that they do."""
  return [
    value.received(throughout.lay(value.array, sharding))
    if isinstance(sharding, jax.sharding.Sharding)
    else value
    for sharding, value in zip(shardings, values, strict=True)
  ]


def _in_place(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  (jaxpr,) = calls.bodies(equation)
  with interpreter.context(equation):
    return program.evaluate(jaxpr, inputs, uses)


def _remat(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  parameters = equation.params
  (jaxpr,) = calls.bodies(equation)
  outlines: list[_value.Value] = []

  def run(*arrays: Any) -> list[Any]:
    outputs = program.evaluate(jaxpr, _value.received(inputs, arrays), uses)
    outlines[:] = [x.outline for x in outputs]
    return _value.arrays(outputs)

  with interpreter.context(equation):
    if parameters["differentiated"]:
      arrays = throughout.recomputed(equation, _value.arrays(inputs))
      return program.evaluate(jaxpr, _value.received(inputs, arrays), uses)
    arrays = jax.checkpoint(
      run, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"]
    )(*_value.arrays(inputs))
  return _value.received(outlines, arrays)


def _derivative_rule(
  keep: Callable[..., list[_value.Value]],
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  def interpret(jaxpr: Any, inputs: _Values) -> list[_value.Value]:
    jaxpr = calls.close(jaxpr)
    # A derivative goes with the products that the function goes with.
    leads = any(use.leads_to_product for use in uses)
    of_rule = _demand.Use(leads, in_float32=not leads)
    return program.evaluate(jaxpr, inputs, [of_rule] * len(jaxpr.out_avals))

  with interpreter.context(equation):
    return keep(equation, inputs, interpret)


_CALLS: dict[str, _Call] = {
  "shard_map": _control.shard_map,
  **{
    primitive.name: call
    for primitive, call in (
      (primitives.jit_p, _jit),
      (primitives.remat_p, _remat),
      (primitives.call_p, _in_place),
      (primitives.closed_call_p, _in_place),
      (
        primitives.custom_jvp_call_p,
        functools.partial(_derivative_rule, _derivative_rules.custom_jvp),
      ),
      (
        primitives.custom_vjp_call_p,
        functools.partial(_derivative_rule, _derivative_rules.custom_vjp),
      ),
      (primitives.cond_p, _control.cond),
      (primitives.scan_p, _control.scan),
      (primitives.while_p, _control.while_loop),
    )
  },
}
