"""The interpreter: evaluates a jaxpr one equation at a time."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
from typing import Any

import jax
from jax.extend import core
from jax.extend import source_info_util
from jax.extend.core import primitives

# `core.Jaxpr` below is what `jax.make_jaxpr` returns; up to jax 0.10 that was
# named `ClosedJaxpr`, with the same attributes.

# Takes an equation and the values of its inputs, returns those of its outputs.
Rule = Callable[[core.JaxprEqn, Sequence[Any]], Sequence[Any]]


def evaluate(
  jaxpr: core.Jaxpr,
  arguments: Sequence[Any],
  rule: Rule,
  consts: Sequence[Any] | None = None,
) -> list[Any]:
  """Returns the outputs of a jaxpr, each equation evaluated by `rule`."""
  values: dict[core.Var, Any] = {}
  if consts is None:
    consts = jaxpr.consts

  def read(atom: core.Var | core.Literal) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  values.update(zip(jaxpr.jaxpr.constvars, consts, strict=True))
  values.update(zip(jaxpr.jaxpr.invars, arguments, strict=True))
  for equation in jaxpr.eqns:
    outputs = rule(equation, [read(atom) for atom in equation.invars])
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.jaxpr.outvars]


def bind(equation: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
  """Returns the outputs of one equation as it is."""
  primitive = equation.primitive
  parameters = primitive.get_bind_params(equation.params)
  with context(equation):
    outputs = primitive.bind(*inputs, **parameters)
  return outputs if primitive.multiple_results else [outputs]


def inner_jaxpr(equation: core.JaxprEqn) -> core.Jaxpr | None:
  """Returns the jaxpr of a call of a jitted function, None for anything else.

  Also None where the call says where its values lie: that would be lost if its
  equations were evaluated one by one.
  """
  if equation.primitive is not primitives.jit_p:
    return None
  for name in ("in_shardings", "out_shardings"):
    if any(isinstance(x, jax.sharding.Sharding) for x in equation.params[name]):
      return None
  for name in ("in_layouts", "out_layouts"):
    if any(x is not None for x in equation.params[name]):
      return None
  jaxpr: core.Jaxpr = equation.params["jaxpr"]
  return jaxpr


@contextlib.contextmanager
def inside(call: core.JaxprEqn) -> Iterator[None]:
  """Restores what holds inside of a jitted function, to evaluate its jaxpr."""
  function = f"jit({call.params['name']})"
  with context(call), jax.named_scope(function):
    yield


@contextlib.contextmanager
def context(equation: core.JaxprEqn) -> Iterator[None]:
  """Restores the scopes, settings and lines of code of an equation.

  So profilers, errors and `where_overflow` show the user's lines.
  """
  scope = str(equation.source_info.name_stack)
  with (
    equation.ctx.manager,
    source_info_util.user_context(equation.source_info.traceback),
    jax.named_scope(scope) if scope else contextlib.nullcontext(),
  ):
    yield
