"""Evaluates a program in mixed precision, including the bodies that it holds.

Most calls are evaluated in place, so everything known about a value holds
inside the call as well. Derivative rules, loops and branches must remain
functions, which take and return arrays. If iterations or branches must agree on
a dtype, the arrays have the dtypes of the original program.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._autocast import _demand
from optax_lossscale._autocast import _derivative_rules
from optax_lossscale._autocast import _operation
from optax_lossscale._autocast import _value
from optax_lossscale._autocast import levels
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr import throughout
from optax_lossscale._jaxpr.interpreter import Array

_Values = Sequence[_value.Value]

# Primitives that hold a jaxpr but count as one operation, because their jaxpr
# only combines two numbers.
_COMBINING = operation_table.names("""
  reduce reduce_window scatter scatter-add scatter-max scatter-min scatter-mul
  select_and_scatter select_and_gather_add
""")


@dataclasses.dataclass(frozen=True)
class MixedProgram:
  """Evaluates jaxprs in mixed precision."""

  recipe: levels.Recipe
  # The scope that contains the jaxprs.
  scope: str = ""
  # The operations found so far that `autocast` cannot look into.
  unknown: set[str] = dataclasses.field(default_factory=set)

  def evaluate(
    self,
    jaxpr: core.Jaxpr,
    inputs: _Values,
    uses: Sequence[_demand.Use],
    consts: _Values | None = None,
  ) -> list[_value.Value]:
    """Returns the outputs of a jaxpr, given how the caller uses them."""
    demand = _demand.find_demand(jaxpr, self.recipe, self.scope, uses)
    if consts is None:
      consts = [
        _value.given(x, v.aval)
        for x, v in zip(jaxpr.consts, jaxpr.jaxpr.constvars, strict=True)
      ]

    def rule(
      equation: core.JaxprEqn, inputs: Sequence[_value.Value]
    ) -> _Values:
      values = [
        x if isinstance(x, _value.Value) else _value.constant(x, atom.aval)
        for x, atom in zip(inputs, equation.invars, strict=True)
      ]
      scope = scopes.join(self.scope, str(equation.source_info.name_stack))
      inner = dataclasses.replace(self, scope=scope)
      if calls.castable_bodies(equation):
        call = _CALLS.get(calls.form(equation), _in_place)
        uses = demand.outputs[id(equation)]
        return call(_Held(inner, equation, values, uses))
      decision = self.recipe.decide(operation_table.name_of(equation), scope)
      if id(equation) in demand.in_float32 and not decision.is_override:
        # The operation runs in float32 because of the operations that follow.
        uses = demand.outputs[id(equation)]
        why = "no product follows"
        if any(use.leads_to_product for use in uses):
          why = decision.why or "only used in float32"
        decision = decision._replace(treatment=levels.Treatment.BLACK, why=why)
      if _is_unknown(equation):
        where = f" in {scope}" if scope else ""
        self.unknown.add(f"{equation.primitive.name}{where}")
        decision = decision._replace(
          treatment=levels.Treatment.WRITTEN, why="unknown operation"
        )
      with scopes.note(decision.why):
        return _operation.evaluate(
          equation, values, decision, self.recipe.dtypes
        )

    outputs = interpreter.evaluate(jaxpr, inputs, rule, consts)
    return [
      x if isinstance(x, _value.Value) else _value.constant(x, atom.aval)
      for x, atom in zip(outputs, jaxpr.jaxpr.outvars, strict=True)
    ]


def _is_unknown(equation: core.JaxprEqn) -> bool:
  """Returns whether an operation holds a jaxpr but is in no table."""
  name = equation.primitive.name
  if name in calls.TABLE or name in _COMBINING:
    return False
  parameters = equation.params.values()
  several = [x if isinstance(x, (tuple, list)) else [x] for x in parameters]
  return any(map(calls.is_jaxpr, itertools.chain(*several)))


class _Held(NamedTuple):
  """An equation that holds bodies, with everything needed to evaluate it."""

  program: MixedProgram  # Evaluates the bodies, in the scope of the equation.
  equation: core.JaxprEqn
  inputs: _Values
  uses: Sequence[_demand.Use]  # How the equation's outputs are used.


def _in_place(of: _Held) -> list[_value.Value]:
  program, equation, inputs, uses = of
  return throughout.in_place(
    equation,
    inputs,
    lambda body, inputs: program.evaluate(body.jaxpr, inputs, uses),
    lambda function, x: x.received(function(x.array)),
  )


def _remat(of: _Held) -> list[_value.Value]:
  program, equation, inputs, uses = of
  parameters = equation.params
  if parameters["differentiated"]:
    return _in_place(of)
  (body,) = calls.bodies(equation)
  outlines: list[_value.Value] = []

  def run(*arrays: Array) -> list[Array]:
    received = _value.received(inputs, arrays)
    outputs = program.evaluate(body.jaxpr, received, uses)
    outlines[:] = [x.outline for x in outputs]
    return _value.arrays(outputs)

  with interpreter.inside(equation):
    arrays = jax.checkpoint(
      run, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"]
    )(*_value.arrays(inputs))
  return _value.received(outlines, arrays)


def _derivative_rule(
  keep: Callable[..., list[_value.Value]], of: _Held
) -> list[_value.Value]:
  program, equation, inputs, uses = of

  def interpret(jaxpr: core.Jaxpr, inputs: _Values) -> list[_value.Value]:
    # A product follows the derivative if one follows the function.
    leads = any(use.leads_to_product for use in uses)
    of_rule = _demand.Use(leads, in_float32=not leads)
    return program.evaluate(jaxpr, inputs, [of_rule] * len(jaxpr.out_avals))

  with interpreter.inside(equation):
    return keep(equation, inputs, interpret)


def _around_bodies(of: _Held) -> list[_value.Value]:
  """Rebuilds a loop, a `cond` or a `shard_map` around its lowered bodies."""
  program, equation, inputs, uses = of
  inputs = [*inputs]
  use = None
  num_agreed = 0
  if calls.is_loop(equation):
    use, _ = _demand.in_loop(equation, program.recipe, program.scope, uses)
    for place in calls.carried(equation):
      # A carried value counts as computed, even if its initial value is given.
      x = _as_written(inputs[place])
      inputs[place] = _value.Value(x.array, x.written, span=x.span)
      num_agreed += 1
  elif calls.form(equation) is calls.Form.COND:
    num_agreed = len(uses)
  spans: list[_value.Span] = [None] * len(uses)

  def interpret(body: calls.Body, arrays: Sequence[Array]) -> Sequence[Array]:
    received = _value.received([inputs[i] for i in body.inputs], arrays)
    of_outputs = uses if use is None else [use] * len(body.jaxpr.out_avals)
    outputs = program.evaluate(body.jaxpr, received, of_outputs)
    outputs[:num_agreed] = map(_as_written, outputs[:num_agreed])
    if len(outputs) == len(spans):  # Skips the condition of a loop.
      spans[:] = [
        _value.union([span, x.span])
        for span, x in zip(spans, outputs, strict=True)
      ]
    return _value.arrays(outputs)

  arrays = throughout.rebuild(equation, _value.arrays(inputs), interpret)
  return [
    _value.Value(array, getattr(variable.aval, "dtype", None), span=span)
    for variable, array, span in zip(
      equation.outvars, arrays, spans, strict=True
    )
  ]


def _as_written(x: _value.Value) -> _value.Value:
  array = x.in_dtype(x.written) if x.is_float else x.array
  return _value.Value(array, x.written, x.kind, span=x.span)


_CALLS: Mapping[calls.Form | None, Callable[[_Held], list[_value.Value]]] = {
  calls.Form.REMAT: _remat,
  calls.Form.CUSTOM_JVP: functools.partial(
    _derivative_rule, _derivative_rules.custom_jvp
  ),
  calls.Form.CUSTOM_VJP: functools.partial(
    _derivative_rule, _derivative_rules.custom_vjp
  ),
  calls.Form.COND: _around_bodies,
  calls.Form.SCAN: _around_bodies,
  calls.Form.WHILE: _around_bodies,
  calls.Form.SHARD_MAP: _around_bodies,
}
