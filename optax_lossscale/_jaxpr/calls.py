"""The one table of primitives that hold jaxprs."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import enum
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._base import promises

# Since jax 0.11 this is `core.Jaxpr` itself. JAX's type stubs lack the name.
_ClosedJaxpr: Any = core.ClosedJaxpr  # type: ignore[attr-defined]


class Form(enum.Enum):
  """The kinds of equations that hold jaxprs."""

  # A plain call.
  CALL = enum.auto()
  # A jitted function, which may specify where its values are placed.
  JIT = enum.auto()
  # A function that a backend or `vmap` may replace with another one.
  REPLACEABLE = enum.auto()
  # A function that the backward pass recomputes.
  REMAT = enum.auto()
  # Functions with custom derivative rules.
  CUSTOM_JVP = enum.auto()
  CUSTOM_VJP = enum.auto()
  # A choice of branches, two kinds of loop, and a function run on each device.
  COND = enum.auto()
  SCAN = enum.auto()
  WHILE = enum.auto()
  SHARD_MAP = enum.auto()
  # A linear solver, whose derivative is another solve. A solver must keep its
  # precision: in float16, it may wait forever for a small residual.
  SOLVE = enum.auto()


class Body(NamedTuple):
  """A closed jaxpr, and the positions of its inputs among the equation's."""

  jaxpr: core.Jaxpr
  inputs: Sequence[int]


def _only(equation: core.JaxprEqn) -> list[Body]:
  # The jaxpr is found by its type, since JAX has renamed some parameters.
  (jaxpr,) = filter(is_jaxpr, equation.params.values())
  return [Body(close(jaxpr), range(len(equation.invars)))]


def _branches(equation: core.JaxprEqn) -> list[Body]:
  operands = range(1, len(equation.invars))  # Input 0 is the branch index.
  return [Body(close(x), operands) for x in equation.params["branches"]]


def _test_and_round(equation: core.JaxprEqn) -> list[Body]:
  parameters = equation.params
  num_test = parameters["cond_nconsts"]
  carry = carried(equation)
  return [
    Body(close(parameters["cond_jaxpr"]), [*range(num_test), *carry]),
    Body(close(parameters["body_jaxpr"]), range(num_test, carry.stop)),
  ]


def _solver(equation: core.JaxprEqn) -> list[Body]:
  """Returns the forward solve, the third of a solver's four functions."""
  lengths = equation.params["const_lengths"]
  start = lengths.matvec + lengths.vecmat
  consts = range(start, start + lengths.solve)
  right_hand_side = range(sum(lengths), len(equation.invars))
  return [
    Body(close(equation.params["jaxprs"].solve), [*consts, *right_hand_side])
  ]


class Call(NamedTuple):
  """The form of a primitive, and a function that finds the jaxprs it runs."""

  form: Form
  bodies: Callable[[core.JaxprEqn], list[Body]] = _only


# The keys are names, since some primitives are not public.
TABLE: Mapping[str, Call] = {
  primitives.call_p.name: Call(Form.CALL),
  primitives.closed_call_p.name: Call(Form.CALL),
  primitives.jit_p.name: Call(Form.JIT),
  "composite": Call(Form.REPLACEABLE),
  "custom_vmap_call": Call(Form.REPLACEABLE),
  primitives.remat_p.name: Call(Form.REMAT),
  primitives.custom_jvp_call_p.name: Call(Form.CUSTOM_JVP),
  primitives.custom_vjp_call_p.name: Call(Form.CUSTOM_VJP),
  primitives.cond_p.name: Call(Form.COND, _branches),
  primitives.scan_p.name: Call(Form.SCAN),
  primitives.while_p.name: Call(Form.WHILE, _test_and_round),
  "shard_map": Call(Form.SHARD_MAP),
  primitives.linear_solve_p.name: Call(Form.SOLVE, _solver),
}


def form(equation: core.JaxprEqn) -> Form | None:
  """Returns the form of an equation, or None if it does not hold a jaxpr."""
  call = TABLE.get(equation.primitive.name)
  return call and call.form


def bodies(equation: core.JaxprEqn) -> list[Body]:
  """Returns the jaxprs that an equation runs."""
  call = TABLE.get(equation.primitive.name)
  return call.bodies(equation) if call else []


def castable_bodies(equation: core.JaxprEqn) -> list[Body]:
  """Returns an equation's jaxprs, or [] if they must keep their precision."""
  return [] if form(equation) is Form.SOLVE else bodies(equation)


def is_by_platform(equation: core.JaxprEqn) -> bool:
  """Returns whether the platform that is compiled for chooses a branch."""
  return equation.params.get("branches_platforms") is not None


def transparent_body(equation: core.JaxprEqn) -> core.Jaxpr | None:
  """Returns the jaxpr of an equation that merely calls it, or else None."""
  # A jitted function that places its values is no mere call: the placement
  # would be lost if its equations were evaluated one by one.
  get = equation.params.get
  shardings = *get("in_shardings", ()), *get("out_shardings", ())
  layouts = *get("in_layouts", ()), *get("out_layouts", ())
  places = any(isinstance(x, jax.sharding.Sharding) for x in shardings) or any(
    x is not None for x in layouts
  )
  is_promised = promises.number_of(equation) is not None
  if places or is_promised or form(equation) not in (Form.CALL, Form.JIT):
    return None
  (body,) = bodies(equation)
  return body.jaxpr


def is_loop(equation: core.JaxprEqn) -> bool:
  """Returns whether an equation is a scan or a while loop."""
  return form(equation) in (Form.SCAN, Form.WHILE)


def carried(equation: core.JaxprEqn) -> range:
  """Returns the positions of the inputs that a loop carries."""
  parameters = equation.params
  if form(equation) is Form.WHILE:
    num_consts = parameters["cond_nconsts"] + parameters["body_nconsts"]
    return range(num_consts, len(equation.invars))
  if "num_carry" in parameters:
    num_consts, num_carry = parameters["num_consts"], parameters["num_carry"]
  else:
    # Since jax 0.11, `num_consts` and `num_carry` are the lengths of parts of a
    # tree, whose class is not public.
    num_consts, num_carry, _ = map(len, parameters["ft_in"].unpack())
  return range(num_consts, num_consts + num_carry)


def close(jaxpr: core.Jaxpr) -> core.Jaxpr:
  """Returns a jaxpr that has `consts`, wrapping one that does not."""
  return jaxpr if hasattr(jaxpr, "consts") else _ClosedJaxpr(jaxpr, ())


def is_jaxpr(x: object) -> bool:
  """Returns whether a parameter of an equation is a jaxpr."""
  return isinstance(x, (core.Jaxpr, _ClosedJaxpr))
