"""Equations that hold a jaxpr, by what `autocast` does with them."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes

# From jax 0.11 it is the same as `core.Jaxpr`, and no longer in the stubs.
_ClosedJaxpr: Any = core.ClosedJaxpr  # type: ignore[attr-defined]

# What these do is what their jaxpr does, once.
_ONCE = {
  primitives.jit_p: "jaxpr",
  primitives.remat_p: "jaxpr",
  primitives.call_p: "call_jaxpr",
  primitives.closed_call_p: "call_jaxpr",
  primitives.custom_jvp_call_p: "call_jaxpr",
  primitives.custom_vjp_call_p: "call_jaxpr",
}

# These hold a jaxpr, and are one operation all the same: what is in there says
# how to combine two numbers, or solves in the precision that it was written in.
_OPERATIONS = frozenset(
  [
    "custom_linear_solve",
    "reduce",
    "reduce_window",
    "scatter",
    "scatter-add",
    "scatter-max",
    "scatter-min",
    "scatter-mul",
    "select_and_scatter",
    "select_and_gather_add",
  ]
)


def bodies(equation: core.JaxprEqn) -> list[Any]:
  """Returns the jaxprs of an equation that `autocast` goes into."""
  primitive, parameters = equation.primitive, equation.params
  if primitive in _ONCE:
    return [close(parameters[_ONCE[primitive]])]
  if primitive.name == "shard_map":
    return [close(parameters["jaxpr"])]
  if primitive is primitives.cond_p:
    return [close(branch) for branch in parameters["branches"]]
  if primitive is primitives.scan_p:
    return [close(parameters["jaxpr"])]
  if primitive is primitives.while_p:
    return [close(parameters["cond_jaxpr"]), close(parameters["body_jaxpr"])]
  return []


def is_loop(equation: core.JaxprEqn) -> bool:
  """Returns whether what comes out of the body goes into it again."""
  return equation.primitive in (primitives.scan_p, primitives.while_p)


def is_unknown(equation: core.JaxprEqn) -> bool:
  """Returns whether an equation holds a jaxpr that nothing is known of."""
  return equation.primitive.name not in _OPERATIONS and any(
    is_jaxpr(x)
    for parameter in equation.params.values()
    for x in (
      parameter if isinstance(parameter, (tuple, list)) else [parameter]
    )
  )


def equations(
  jaxpr: Any, scope: str = ""
) -> Iterator[tuple[str, core.JaxprEqn]]:
  """Yields the scope and the equation of each operation of a jaxpr."""
  for equation in close(jaxpr).jaxpr.eqns:
    where = scopes.join(scope, str(equation.source_info.name_stack))
    inner = bodies(equation)
    if not inner:
      yield where, equation
    for body in inner:
      yield from equations(body, where)


def operations(jaxpr: Any) -> Iterator[tuple[str, str]]:
  """Yields the scope and the listed name of each operation of a jaxpr."""
  for scope, equation in equations(jaxpr):
    yield scope, operation_table.listed_name(equation)


def close(jaxpr: Any) -> Any:
  """Returns a jaxpr that has constants."""
  return jaxpr if hasattr(jaxpr, "consts") else _ClosedJaxpr(jaxpr, ())


def is_jaxpr(x: Any) -> bool:
  """Returns whether a parameter of an equation is a jaxpr."""
  return isinstance(x, (core.Jaxpr, _ClosedJaxpr))
