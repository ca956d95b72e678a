"""A program in mixed precision: its equations, calls, branches and loops.

Calls that are nothing but their jaxpr are evaluated in place, so that what is
known of a value holds inside as well. Where a function of its own must remain
(a derivative rule, a loop, a branch), values go in and come out as arrays.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
import warnings

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale.jaxpr import _calls
from optax_lossscale.jaxpr import _control_flow
from optax_lossscale.jaxpr import _demand
from optax_lossscale.jaxpr import _derivative_rules
from optax_lossscale.jaxpr import _evaluate
from optax_lossscale.jaxpr import _mixed_operation
from optax_lossscale.jaxpr import _operations
from optax_lossscale.jaxpr import _throughout
from optax_lossscale.jaxpr import _value
from optax_lossscale.precision import _recipe
from optax_lossscale.precision import _scopes

_Values = Sequence[_value.Value]


@dataclasses.dataclass(frozen=True)
class MixedProgram:
  """Evaluates jaxprs in mixed precision.

  Attributes:
    recipe: of the `autocast`.
    scope: in which the jaxprs are.
    warned: the names of operations that a warning was given of.
  """

  recipe: _recipe.Recipe
  scope: str = ""
  warned: set[str] = dataclasses.field(default_factory=set)

  def evaluate(
    self,
    jaxpr: Any,
    inputs: _Values,
    uses: Sequence[_demand.Use],
    consts: _Values | None = None,
  ) -> list[_value.Value]:
    """Returns the outputs of a jaxpr.

    Args:
      jaxpr: with constants.
      inputs: the values of its inputs.
      uses: what becomes of its outputs.
      consts: values in place of the jaxpr's own constants.
    """
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
      scope = _scopes.join(self.scope, str(equation.source_info.name_stack))
      inner = dataclasses.replace(self, scope=scope)
      call = _CALLS.get(equation.primitive.name)
      if call is not None:
        return call(inner, equation, values, demand.outputs[id(equation)])
      if id(equation) in demand.is_full:
        decision = self.recipe.in_float32
      else:
        name = _operations.listed_name(equation)
        decision = self.recipe.decide(name, scope)
      if _calls.is_unknown(equation):
        self._warn(equation.primitive.name)
        decision = self.recipe.as_written
      return _mixed_operation.evaluate(
        equation, values, decision, self.recipe.dtypes
      )

    outputs = _evaluate.evaluate(jaxpr, inputs, rule, consts)
    return [
      x if isinstance(x, _value.Value) else _value.constant(x, atom.aval)
      for x, atom in zip(outputs, jaxpr.jaxpr.outvars, strict=True)
    ]

  def _warn(self, name: str) -> None:
    if name not in self.warned:
      self.warned.add(name)
      warnings.warn(
        f"`autocast` cannot look into the operation {name}, which runs as "
        "written.",
        stacklevel=2,
      )


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
  with _evaluate.inside(equation):
    inputs = _constrain(parameters["in_shardings"], inputs)
    outputs = program.evaluate(parameters["jaxpr"], inputs, uses)
    return _constrain(parameters["out_shardings"], outputs)


def _constrain(shardings: Sequence[Any], values: _Values) -> list[_value.Value]:
  """Returns values that lie where a jitted function says that they do."""
  return [
    _value.Value(_lay(value.array, sharding), value.written, value.kind)
    if isinstance(sharding, jax.sharding.Sharding)
    else value
    for sharding, value in zip(shardings, values, strict=True)
  ]


def _lay(array: Any, sharding: jax.sharding.Sharding) -> Any:
  if isinstance(sharding, jax.NamedSharding) and (
    jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  ):
    # Where it lies is a part of its type, and no advice.
    return jax.jit(_same, out_shardings=sharding)(array)
  return lax.with_sharding_constraint(array, sharding)


def _same(array: Any) -> Any:
  return array


def _in_place(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  (jaxpr,) = _calls.bodies(equation)
  with _evaluate.context(equation):
    return program.evaluate(jaxpr, inputs, uses)


def _remat(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  parameters = equation.params
  (jaxpr,) = _calls.bodies(equation)
  kinds: list[_value.Kind] = []

  def run(*arrays: Any) -> list[Any]:
    outputs = program.evaluate(jaxpr, _received(inputs, arrays), uses)
    kinds[:] = [x.kind for x in outputs]
    return _value.arrays(outputs)

  with _evaluate.context(equation):
    if parameters["differentiated"]:
      arrays = _throughout.recomputed(equation, _value.arrays(inputs))
      return program.evaluate(jaxpr, _received(inputs, arrays), uses)
    arrays = jax.checkpoint(
      run, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"]
    )(*_value.arrays(inputs))
  return _results(equation, arrays, kinds)


def _derivative_rule(
  keep: Callable[..., list[_value.Value]],
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  def interpret(jaxpr: Any, inputs: _Values) -> list[_value.Value]:
    jaxpr = _calls.close(jaxpr)
    # A derivative goes with the products that the function goes with.
    leads = any(use.leads_to_product for use in uses)
    of_rule = _demand.Use(leads, is_full=not leads)
    return program.evaluate(jaxpr, inputs, [of_rule] * len(jaxpr.out_avals))

  with _evaluate.context(equation):
    return keep(equation, inputs, interpret)


def _cond(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  def interpret(jaxpr: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    outputs = program.evaluate(
      _calls.close(jaxpr), _received(inputs[1:], arrays), uses
    )
    return _as_written(outputs), ()

  return _control(_control_flow.cond, equation, inputs, interpret)


def _scan(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  num_consts, num_carry = _control_flow.scan_lengths(equation)
  carry = slice(num_consts, num_consts + num_carry)
  inputs = [*inputs]
  inputs[carry] = _carried(inputs[carry])

  def interpret(jaxpr: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    outputs = program.evaluate(
      _calls.close(jaxpr),
      _received(inputs, arrays),
      _uses_in_loop(program, equation, uses, len(uses)),
    )
    return [
      *_as_written(outputs[:num_carry]),
      *_value.arrays(outputs[num_carry:]),
    ], ()

  return _control(_control_flow.scan, equation, inputs, interpret)


def _while(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  parameters = equation.params
  num_cond, num_body = parameters["cond_nconsts"], parameters["body_nconsts"]
  cond_consts = inputs[:num_cond]
  body_consts = inputs[num_cond : num_cond + num_body]
  carry = _carried(inputs[num_cond + num_body :])

  def interpret(jaxpr: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    is_body = jaxpr is parameters["body_jaxpr"]
    consts = body_consts if is_body else cond_consts
    outputs = program.evaluate(
      _calls.close(jaxpr),
      _received([*consts, *carry], arrays),
      _uses_in_loop(program, equation, uses, len(carry) if is_body else 1),
    )
    return _as_written(outputs), ()

  return _control(
    _control_flow.while_loop,
    equation,
    [*cond_consts, *body_consts, *carry],
    interpret,
  )


def _shard_map(
  program: MixedProgram,
  equation: core.JaxprEqn,
  inputs: _Values,
  uses: Sequence[_demand.Use],
) -> list[_value.Value]:
  def interpret(jaxpr: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    outputs = program.evaluate(
      _calls.close(jaxpr), _received(inputs, arrays), uses
    )
    return _value.arrays(outputs), ()

  return _control(_throughout.shard_map, equation, inputs, interpret)


def _control(
  call: _control_flow.Call,
  equation: core.JaxprEqn,
  inputs: _Values,
  interpret: _control_flow.Interpret,
) -> list[_value.Value]:
  """Returns the outputs of an equation around bodies that are evaluated."""
  with _evaluate.context(equation):
    arrays, _ = call(equation, _value.arrays(inputs), interpret, ())
  return _results(equation, arrays)


def _carried(values: _Values) -> list[_value.Value]:
  """Returns what a loop carries: of the dtypes that it is written for."""
  return [
    _value.Value(array, x.written)
    for x, array in zip(values, _as_written(values), strict=True)
  ]


def _uses_in_loop(
  program: MixedProgram,
  equation: core.JaxprEqn,
  uses: Sequence[_demand.Use],
  length: int,
) -> list[_demand.Use]:
  use, _ = _demand.in_loop(equation, program.recipe, program.scope, uses)
  return [use] * length


def _received(values: _Values, arrays: Sequence[Any]) -> list[_value.Value]:
  return [x.received(array) for x, array in zip(values, arrays, strict=True)]


def _as_written(values: _Values) -> list[Any]:
  return [x.in_dtype(x.written) if x.is_float else x.array for x in values]


def _results(
  equation: core.JaxprEqn,
  arrays: Sequence[Any],
  kinds: Sequence[_value.Kind] | None = None,
) -> list[_value.Value]:
  if kinds is None:
    kinds = [_value.Kind.COMPUTED] * len(arrays)
  return [
    _value.Value(array, getattr(variable.aval, "dtype", None), kind)
    for variable, array, kind in zip(
      equation.outvars, arrays, kinds, strict=True
    )
  ]


_CALLS: dict[str, _Call] = {
  "shard_map": _shard_map,
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
      (primitives.cond_p, _cond),
      (primitives.scan_p, _scan),
      (primitives.while_p, _while),
    )
  },
}
