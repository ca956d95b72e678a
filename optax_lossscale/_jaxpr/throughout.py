"""The interpreter inside of calls and control flow, and what it counts there.

A rule that looks at every operation must also see those in the body of a scan
or in the branches of a cond. Here each of these is written again, with public
functions of JAX, around bodies that the rule has evaluated.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import control_flow
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import tallies

# Takes an equation and its inputs, returns its outputs and what it counted: a
# pytree of arrays, the same for every equation.
CountingRule = Callable[
  [core.JaxprEqn, Sequence[Any]], tuple[Sequence[Any], Any]
]

# Takes also the equations that hold this one, the outermost first.
PlacedRule = Callable[
  [tuple[core.JaxprEqn, ...], core.JaxprEqn, Sequence[Any]],
  tuple[Sequence[Any], Any],
]


def evaluate_throughout(
  jaxpr: core.Jaxpr,
  arguments: Sequence[Any],
  rule: CountingRule,
  zero: Any = (),
  consts: Sequence[Any] | None = None,
) -> tuple[list[Any], Any]:
  """Returns the outputs of a jaxpr, and what `rule` counted in all of it.

  Derivatives are not kept: a function with a rule of its own for them is
  evaluated as it is written. Evaluate the differentiated function instead. So
  is one with a rule of its own for `vmap`: map it before.
  """
  return tally_throughout(
    jaxpr,
    arguments,
    lambda around, equation, inputs: rule(equation, inputs),
    tallies.Sum(zero),
    consts,
  )


def tally_throughout(
  jaxpr: core.Jaxpr,
  arguments: Sequence[Any],
  rule: PlacedRule,
  tally: tallies.Tally,
  consts: Sequence[Any] | None = None,
  around: tuple[core.JaxprEqn, ...] = (),
) -> tuple[list[Any], Any]:
  """Returns the outputs of a jaxpr, and what `rule` counted in all of it."""
  counts = []

  def rule_throughout(
    equation: core.JaxprEqn, inputs: Sequence[Any]
  ) -> Sequence[Any]:
    call = _find_call(equation)
    if call is None:
      outputs, count = rule(around, equation, inputs)
    else:
      interpret = functools.partial(interpret_inside, equation)
      with interpreter.context(equation):
        outputs, count = call(equation, inputs, interpret, tally)
    counts.append(count)
    return outputs

  def interpret_inside(
    equation: core.JaxprEqn, inner: Any, inputs: Sequence[Any]
  ) -> tuple[list[Any], Any]:
    return tally_throughout(
      calls.close(inner), inputs, rule, tally, around=(*around, equation)
    )

  outputs = interpreter.evaluate(jaxpr, arguments, rule_throughout, consts)
  return outputs, tally.join(counts)


def _find_call(equation: core.JaxprEqn) -> control_flow.Call | None:
  primitive = equation.primitive
  return _CALLS.get(primitive) or _CALLS_BY_NAME.get(primitive.name)


def _inline(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: control_flow.Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  """A call that is nothing but its jaxpr."""
  del tally
  jaxpr = next(
    parameter
    for parameter in equation.params.values()
    if calls.is_jaxpr(parameter)
  )
  return interpret(jaxpr, inputs)


def _jit(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: control_flow.Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  del tally
  parameters = equation.params
  with interpreter.inside(equation):
    outputs, counts = interpret(
      parameters["jaxpr"], _constrain(parameters["in_shardings"], inputs)
    )
    return _constrain(parameters["out_shardings"], outputs), counts


def _remat(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: control_flow.Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  del tally
  return interpret(equation.params["jaxpr"], recomputed(equation, inputs))


def recomputed(equation: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
  """Returns the inputs of a remat, for its jaxpr to be evaluated in place."""
  parameters = equation.params
  if not (parameters["differentiated"] and parameters["prevent_cse"]):
    return inputs
  # As JAX lowers it: what is computed again must not be found to be the same as
  # what was computed before. One by one, or under `shard_map` all would vary as
  # any of them does.
  return [lax.optimization_barrier(x) for x in inputs]


def shard_map(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: control_flow.Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  """`jax.shard_map`, and `jax.pmap`, which is one."""
  parameters = equation.params
  axes = tuple(parameters["newly_manual_axes"])

  def body(*inputs: Any) -> tuple[list[Any], Any]:
    outputs, counts = interpret(parameters["jaxpr"], inputs)
    counts = tally.join([control_flow.varying(tally.zero), counts])
    return outputs, tally.join_devices(counts, axes)

  result: tuple[list[Any], Any] = jax.shard_map(
    body,
    mesh=parameters["mesh"],
    in_specs=tuple(parameters["in_specs"]),
    out_specs=(
      list(parameters["out_specs"]),
      jax.tree.map(lambda _: jax.P(), tally.zero),
    ),
    axis_names=set(axes),
    check_vma=parameters["check_vma"],
  )(*inputs)
  return result


def _linear_solve(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: control_flow.Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  """Forward it is the function that solves, which comes third of four."""
  del tally
  lengths = equation.params["const_lengths"]
  start = lengths.matvec + lengths.vecmat
  consts = inputs[start : start + lengths.solve]
  return interpret(
    equation.params["jaxprs"].solve, [*consts, *inputs[sum(lengths) :]]
  )


def _constrain(shardings: Sequence[Any], values: Sequence[Any]) -> list[Any]:
  """Returns values that lie where a jitted function says that they do."""
  return [
    lay(value, sharding)
    if isinstance(sharding, jax.sharding.Sharding)
    else value
    for sharding, value in zip(shardings, values, strict=True)
  ]


def lay(array: Any, sharding: jax.sharding.Sharding) -> Any:
  """Returns an array that lies where a sharding says."""
  if isinstance(sharding, jax.NamedSharding) and (
    jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  ):
    # Where it lies is a part of its type, and no advice.
    return jax.jit(_same, out_shardings=sharding)(array)
  return lax.with_sharding_constraint(array, sharding)


def _same(array: Any) -> Any:
  return array


_CALLS: dict[core.Primitive, control_flow.Call] = {
  primitives.jit_p: _jit,
  primitives.remat_p: _remat,
  primitives.cond_p: control_flow.cond,
  primitives.scan_p: control_flow.scan,
  primitives.while_p: control_flow.while_loop,
  primitives.call_p: _inline,
  primitives.closed_call_p: _inline,
  primitives.custom_jvp_call_p: _inline,
  primitives.custom_vjp_call_p: _inline,
  primitives.linear_solve_p: _linear_solve,
}

# These have no public handle.
_CALLS_BY_NAME: dict[str, control_flow.Call] = {
  "shard_map": shard_map,
  "custom_vmap_call": _inline,
  "composite": _inline,
}
