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
import jax.numpy as jnp

from optax_lossscale.jaxpr import _evaluate

# Takes an equation and its inputs, returns its outputs and what it counted: a
# pytree of int32[], the same for every equation, to be added up.
CountingRule = Callable[
  [core.JaxprEqn, Sequence[Any]], tuple[Sequence[Any], Any]
]

# From jax 0.11 it is the same as `core.Jaxpr`, and no longer in the stubs.
_ClosedJaxpr: Any = core.ClosedJaxpr  # type: ignore[attr-defined]

# Evaluates a jaxpr of an equation with that rule.
_Interpret = Callable[[Any, Sequence[Any]], tuple[list[Any], Any]]
_Call = Callable[
  [core.JaxprEqn, Sequence[Any], _Interpret, Any], tuple[list[Any], Any]
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
  evaluated as it is written. Evaluate the differentiated function instead.

  Args:
    jaxpr: as for `evaluate`.
    arguments: one value for each of its inputs.
    rule: what to do with an equation that holds no jaxpr, or one that is not
      known here, such as a kernel: that is one operation.
    zero: the count of nothing, a pytree of int32[].
    consts: values in place of the jaxpr's own constants.
  """
  counts = zero

  def rule_throughout(
    equation: core.JaxprEqn, inputs: Sequence[Any]
  ) -> Sequence[Any]:
    nonlocal counts
    call = _find_call(equation)
    if call is None:
      outputs, more = rule(equation, inputs)
    else:
      with _evaluate.context(equation):
        outputs, more = call(equation, inputs, interpret, zero)
    counts = _add(counts, more)
    return outputs

  def interpret(inner: Any, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    # Up to jax 0.10 some equations hold a jaxpr that cannot have constants.
    if not hasattr(inner, "consts"):
      inner = _ClosedJaxpr(inner, ())
    return evaluate_throughout(inner, inputs, rule, zero)

  return _evaluate.evaluate(jaxpr, arguments, rule_throughout, consts), counts


def _find_call(equation: core.JaxprEqn) -> _Call | None:
  primitive = equation.primitive
  return _CALLS.get(primitive) or _CALLS_BY_NAME.get(primitive.name)


def _inline(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  """A call that is nothing but its jaxpr."""
  del zero
  jaxpr = next(
    parameter
    for parameter in equation.params.values()
    if isinstance(parameter, (core.Jaxpr, _ClosedJaxpr))
  )
  return interpret(jaxpr, inputs)


def _jit(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  del zero
  parameters = equation.params
  with _evaluate.inside(equation):
    outputs, counts = interpret(
      parameters["jaxpr"], _constrain(parameters["in_shardings"], inputs)
    )
    return _constrain(parameters["out_shardings"], outputs), counts


def _remat(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  del zero
  parameters = equation.params
  if parameters["differentiated"] and parameters["prevent_cse"]:
    # As JAX lowers it: what is computed again must not be found to be the same
    # as what was computed before. One by one, or under `shard_map` all would
    # vary as any of them does.
    inputs = [lax.optimization_barrier(x) for x in inputs]
  return interpret(parameters["jaxpr"], inputs)


def _cond(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  index, *operands = inputs
  branches = equation.params["branches"]
  platforms = equation.params.get("branches_platforms")
  if platforms is not None:
    return _platform_dependent(branches, platforms, operands, interpret)

  def evaluate_branch(jaxpr: Any, *operands: Any) -> tuple[list[Any], Any]:
    outputs, counts = interpret(jaxpr, operands)
    return outputs, _add(_varying(zero), counts)

  outputs: tuple[list[Any], Any] = lax.switch(
    index,
    [functools.partial(evaluate_branch, branch) for branch in branches],
    *operands,
  )
  return outputs


def _platform_dependent(
  branches: Sequence[Any],
  platforms: Sequence[Sequence[str] | None],
  operands: Sequence[Any],
  interpret: _Interpret,
) -> tuple[list[Any], Any]:
  """A cond of which JAX compiles one branch only, that for the platform.

  Code for one kind of device may not even compile for another.
  """
  functions = {
    platform: functools.partial(lambda jaxpr, *x: interpret(jaxpr, x), branch)
    for branch, of_branch in zip(branches, platforms, strict=True)
    for platform in of_branch or ("default",)
  }
  result: tuple[list[Any], Any] = lax.platform_dependent(*operands, **functions)
  return result


def _scan(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  parameters = equation.params
  num_consts, num_carry = _scan_lengths(equation)
  consts = inputs[:num_consts]
  carry = list(inputs[num_consts : num_consts + num_carry])
  xs = list(inputs[num_consts + num_carry :])

  def body(state: Any, x: list[Any]) -> tuple[Any, list[Any]]:
    carry, counts = state
    outputs, more = interpret(parameters["jaxpr"], [*consts, *carry, *x])
    return (outputs[:num_carry], _add(counts, more)), outputs[num_carry:]

  (carry, counts), ys = lax.scan(
    body,
    (carry, _varying(zero)),
    xs,
    length=parameters["length"],
    reverse=parameters["reverse"],
    unroll=parameters["unroll"],
  )
  return [*carry, *ys], counts


def _scan_lengths(equation: core.JaxprEqn) -> tuple[int, int]:
  """Returns how many inputs of a scan are constants, and how many carried."""
  parameters = equation.params
  if "num_carry" in parameters:
    return parameters["num_consts"], parameters["num_carry"]
  # From jax 0.11 a scan holds them as the parts of a tree, which is not a
  # public class; a part's length is all that is read of it.
  consts, carry, _ = parameters["ft_in"].unpack()
  return len(consts), len(carry)


def _while(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  parameters = equation.params
  num_cond, num_body = parameters["cond_nconsts"], parameters["body_nconsts"]
  cond_consts = inputs[:num_cond]
  body_consts = inputs[num_cond : num_cond + num_body]

  def test(carry: Sequence[Any]) -> tuple[Any, Any]:
    (goes_on,), counts = interpret(
      parameters["cond_jaxpr"], [*cond_consts, *carry]
    )
    return goes_on, counts

  # The condition is tested where the values are made, so that what it counts
  # can be carried along.
  def body(state: Any) -> Any:
    goes_on, carry, counts = state
    outputs, in_body = interpret(
      parameters["body_jaxpr"], [*body_consts, *carry]
    )
    # Under `vmap` there is a condition for each example, and those that are
    # through stay as they are.
    outputs = [
      _where_goes_on(goes_on, new, old)
      for new, old in zip(outputs, carry, strict=True)
    ]
    goes_on, in_test = test(outputs)
    return goes_on, outputs, _add(_add(counts, in_body), in_test)

  carry = list(inputs[num_cond + num_body :])
  goes_on, counts = test(carry)
  _, carry, counts = lax.while_loop(
    lambda state: jnp.any(state[0]),
    body,
    (goes_on, carry, _add(_varying(zero), counts)),
  )
  return carry, counts


def _where_goes_on(goes_on: Any, new: Any, old: Any) -> Any:
  if jnp.ndim(goes_on) == 0:
    return new  # The loop has ended where it is False.
  shape = goes_on.shape + (1,) * (jnp.ndim(new) - goes_on.ndim)
  return jnp.where(goes_on.reshape(shape), new, old)


def _shard_map(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: _Interpret,
  zero: Any,
) -> tuple[list[Any], Any]:
  parameters = equation.params
  axes = tuple(parameters["newly_manual_axes"])

  def body(*inputs: Any) -> tuple[list[Any], Any]:
    outputs, counts = interpret(parameters["jaxpr"], inputs)
    counts = _add(_varying(zero), counts)
    return outputs, jax.tree.map(lambda x: lax.psum(x, axes), counts)

  result: tuple[list[Any], Any] = jax.shard_map(
    body,
    mesh=parameters["mesh"],
    in_specs=tuple(parameters["in_specs"]),
    out_specs=(
      list(parameters["out_specs"]),
      jax.tree.map(lambda _: jax.P(), zero),
    ),
    axis_names=set(axes),
    check_vma=parameters["check_vma"],
  )(*inputs)
  return result


def _varying(zero: Any) -> Any:
  """Returns `zero` as a value that may differ between devices.

  What a loop carries and what branches return must have one type. Under
  `shard_map` the type says along which axes of the mesh a value may vary, and
  the position on an axis varies along it.
  """
  for axis in jax.sharding.get_abstract_mesh().manual_axes:
    position = lax.axis_index(axis)
    zero = jax.tree.map(lambda x, p=position: x + 0 * p, zero)
  return zero


def _add(counts: Any, more: Any) -> Any:
  return jax.tree.map(jnp.add, counts, more)


def _constrain(shardings: Sequence[Any], values: Sequence[Any]) -> list[Any]:
  """Returns values that lie where a jitted function says that they do."""
  return [
    lax.with_sharding_constraint(value, sharding)
    if isinstance(sharding, jax.sharding.Sharding)
    else value
    for sharding, value in zip(shardings, values, strict=True)
  ]


_CALLS: dict[core.Primitive, _Call] = {
  primitives.jit_p: _jit,
  primitives.remat_p: _remat,
  primitives.cond_p: _cond,
  primitives.scan_p: _scan,
  primitives.while_p: _while,
  primitives.call_p: _inline,
  primitives.closed_call_p: _inline,
  primitives.custom_jvp_call_p: _inline,
  primitives.custom_vjp_call_p: _inline,
}

# These have no public handle.
_CALLS_BY_NAME: dict[str, _Call] = {
  "shard_map": _shard_map,
  "custom_vmap_call": _inline,
  "composite": _inline,
}
