"""Evaluates a program in mixed precision, including the bodies that it holds.

Most calls are evaluated in place. Derivative rules, loops and branches remain
functions of arrays. Where iterations or branches must agree on a dtype, the
arrays have the dtypes of the original program.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax.extend import core

from optax_lossscale._autocast import _derivative_rules
from optax_lossscale._autocast import _operation
from optax_lossscale._autocast import _plan
from optax_lossscale._autocast import _value
from optax_lossscale._autocast import levels
from optax_lossscale._autocast import marks
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr import throughout
from optax_lossscale._jaxpr.interpreter import Array

_Values = Sequence[_value.Value]


@dataclasses.dataclass(frozen=True)
class MixedProgram:
  """Evaluates jaxprs in mixed precision."""

  recipe: levels.Recipe
  # The operations evaluated so far that `autocast` cannot look into.
  unknown: set[str] = dataclasses.field(default_factory=set)

  def evaluate(
    self, jaxpr: core.Jaxpr, plan: _plan.Plan, inputs: _Values
  ) -> _Values:
    """Returns the outputs of a jaxpr, evaluated as planned."""
    avals = (variable.aval for variable in jaxpr.jaxpr.constvars)
    consts = list(map(_value.make_given, jaxpr.consts, avals))
    steps = iter(plan.steps)

    def rule(equation: core.JaxprEqn, inputs: _Values) -> _Values:
      step = next(steps)
      if step.decision is None:
        evaluate_call = _CALLS.get(calls.form(equation), _evaluate_in_place)
        if scopes.mark_on(equation).startswith(scopes.CHOICE):
          evaluate_call = _choose
        return evaluate_call(_Call(self, equation, step, inputs))
      if step.decision.why == levels.OPAQUE:
        where = f" in {step.scope}" if step.scope else ""
        self.unknown.add(f"{step.name}{where}")
      with scopes.note(step.decision.why):
        return _operation.evaluate(
          equation, inputs, step.decision, self.recipe.dtypes
        )

    return interpreter.evaluate(
      jaxpr, inputs, rule, consts, _value.make_constant
    )


class _Call(NamedTuple):
  """An equation that holds bodies, with everything needed to evaluate it."""

  program: MixedProgram
  equation: core.JaxprEqn
  step: _plan.Step
  inputs: _Values

  def evaluate_body(self, place: int, inputs: _Values) -> _Values:
    """Returns the outputs of the body at a position in `calls.bodies`."""
    body, plan = calls.bodies(self.equation)[place], self.step.bodies[place]
    return self.program.evaluate(body.jaxpr, plan, inputs)


def _evaluate_in_place(of: _Call) -> _Values:
  return throughout.in_place(
    of.equation,
    of.inputs,
    of.evaluate_body,
    lambda function, x: x.with_array(function(x.array)),
  )


def _choose(of: _Call) -> _Values:
  """Evaluates a marked call in the dtype of its scope."""
  names = scopes.mark_on(of.equation).removeprefix(scopes.CHOICE).split()
  dtype = of.program.recipe.dtype_of_marked(of.step.scope)
  if dtype.name not in names:
    raise ValueError(
      f"`overrides` must leave a marked function in "
      f"{' or '.join(dict.fromkeys(names))}, which it takes, got {dtype.name} "
      f"for it in the scope {of.step.scope!r}."
    )
  place = names.index(dtype.name)
  body = calls.bodies(of.equation)[place]
  with interpreter.inside(of.equation):
    return of.evaluate_body(place, [of.inputs[i] for i in body.inputs])


def _keep_remat(of: _Call) -> _Values:
  parameters = of.equation.params
  if parameters["differentiated"]:
    return _evaluate_in_place(of)
  itself = _as_function(of)
  with interpreter.inside(of.equation):
    arrays = jax.checkpoint(
      itself.run,
      prevent_cse=parameters["prevent_cse"],
      policy=parameters["policy"],
    )(*_value.get_arrays(of.inputs))
  return _value.with_arrays(itself.outputs, arrays)


def _as_function(of: _Call) -> _derivative_rules.Function:
  # JAX keeps the function, which must not keep the inputs' tracers alive.
  evaluate = functools.partial(of._replace(inputs=()).evaluate_body, 0)
  return _derivative_rules.Function(of.inputs, evaluate)


def _keep_rule(of: _Call) -> _Values:
  program, equation, step, inputs = of
  is_jvp = calls.form(equation) is calls.Form.CUSTOM_JVP
  keep = _derivative_rules.keep_jvp if is_jvp else _derivative_rules.keep_vjp

  def evaluate_rule(jaxpr: core.Jaxpr, inputs: _Values) -> _Values:
    # A product follows the derivative if one follows the function.
    use = _plan.share_use(step.outputs)
    recipe = program.recipe.for_jvp_rule() if is_jvp else program.recipe
    plan = _plan.make_plan(jaxpr, recipe, step.scope, use)
    return program.evaluate(jaxpr, plan, inputs)

  itself = _as_function(of)
  lowering = functools.partial(marks.lowering, program.recipe)
  with interpreter.inside(equation):
    function = keep(equation, itself, evaluate_rule, lowering)
    arrays = function(*_value.get_arrays(inputs))
  return _value.with_arrays(itself.outputs, arrays)


def _rebuild(of: _Call) -> _Values:
  """Rebuilds a loop, a `cond` or a `shard_map` around its lowered bodies."""
  equation, inputs = of.equation, [*of.inputs]
  num_agreed = 0
  if calls.is_loop(equation):
    for place in calls.carried(equation):
      # A carried value counts as computed, even if its initial value is given.
      x = _restore_dtype(inputs[place])
      inputs[place] = dataclasses.replace(x, kind=_value.Kind.COMPUTED)
      num_agreed += 1
  elif calls.form(equation) is calls.Form.COND:
    num_agreed = len(equation.outvars)
  spans: list[_value.Span] = [None] * len(equation.outvars)

  def evaluate_body(place: int, arrays: Sequence[Array]) -> list[Array]:
    places = calls.bodies(equation)[place].inputs
    received = _value.with_arrays([inputs[i] for i in places], arrays)
    outputs = [*of.evaluate_body(place, received)]
    outputs[:num_agreed] = map(_restore_dtype, outputs[:num_agreed])
    if len(outputs) == len(spans):  # Skips the condition of a loop.
      spans[:] = [
        _value.join_spans([span, x.span])
        for span, x in zip(spans, outputs, strict=True)
      ]
    return _value.get_arrays(outputs)

  arrays = throughout.rebuild(
    equation, _value.get_arrays(inputs), evaluate_body
  )
  return _value.make_outputs(equation, arrays, spans)


def _restore_dtype(x: _value.Value) -> _value.Value:
  return _value.Value(x.restore(), x.written, x.kind, span=x.span)


_CALLS: Mapping[calls.Form | None, Callable[[_Call], _Values]] = {
  calls.Form.REMAT: _keep_remat,
  calls.Form.CUSTOM_JVP: _keep_rule,
  calls.Form.CUSTOM_VJP: _keep_rule,
  calls.Form.COND: _rebuild,
  calls.Form.SCAN: _rebuild,
  calls.Form.WHILE: _rebuild,
  calls.Form.SHARD_MAP: _rebuild,
}
