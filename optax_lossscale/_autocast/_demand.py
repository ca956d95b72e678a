"""Finds how a program uses each value, reading its equations backwards.

An operation gets its dtype when it is evaluated, from its name, its scope and
its inputs, none of which show what comes later. This module therefore looks
ahead, for a matrix product and for uses that are not in float32.
"""

from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import NamedTuple

from jax.extend import core
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import bits
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes


class Use(NamedTuple):
  """How the rest of a program uses a value."""

  # True if a product depends on the value, directly or indirectly.
  leads_to_product: bool = False
  # True if every operation that uses the value runs in float32.
  in_float32: bool = True

  def __or__(self, other: "Use") -> "Use":
    """Combines two uses of the same value."""
    return Use(
      self.leads_to_product or other.leads_to_product,
      self.in_float32 and other.in_float32,
    )


@dataclasses.dataclass(frozen=True)
class Demand:
  """How a jaxpr uses its values, as found by `find_demand`."""

  # The ids of the equations that run in float32 because of what follows them.
  in_float32: frozenset[int]
  # For the id of each equation, how the equation's outputs are used.
  outputs: dict[int, list[Use]]
  # How the inputs of the jaxpr are used.
  inputs: list[Use]
  # True if the jaxpr contains a product in low precision.
  has_product: bool


# These operations save nothing for the backward pass, so float32 costs no extra
# memory. The same holds for multiplication by a constant. (`reduce_max` is
# listed for softmax, which does not differentiate its maximum.)
_LINEAR = operation_table.names("""
  add add_any concatenate neg pad reduce_max select_n stack stop_gradient sub
""")
_LINEAR_WITH_CONSTANT = operation_table.names("div mul")
# Nonlinear operations. A sum that follows is the only user of their results.
_BEFORE_SUMS = operation_table.names("cube square")


def find_demand(
  jaxpr: core.Jaxpr, recipe: levels.Recipe, scope: str, outputs: Sequence[Use]
) -> Demand:
  """Returns how a jaxpr uses its values."""
  uses: dict[core.Var, Use] = {}
  constants = _constants(jaxpr)
  in_float32 = set()
  of_outputs = {}
  has_product = False

  def note(atom: core.Var | core.Literal, use: Use) -> None:
    if isinstance(atom, core.Var):
      uses[atom] = uses.get(atom, Use()) | use

  for atom, use in zip(jaxpr.jaxpr.outvars, outputs, strict=True):
    note(atom, use)
  for equation in reversed(jaxpr.jaxpr.eqns):
    after = [uses.get(variable, Use()) for variable in equation.outvars]
    of_outputs[id(equation)] = after
    where = scopes.join(scope, str(equation.source_info.name_stack))
    if calls.castable_bodies(equation):
      of_inputs, product = _call(equation, recipe, where, after)
    else:
      of_input, product, full = _operation(
        equation,
        recipe,
        where,
        functools.reduce(operator.or_, after, Use()),
        constants,
      )
      of_inputs = [of_input] * len(equation.invars)
      if full:
        in_float32.add(id(equation))
    has_product |= product
    for atom, use in zip(equation.invars, of_inputs, strict=True):
      note(atom, use)
  return Demand(
    frozenset(in_float32),
    of_outputs,
    [uses.get(variable, Use()) for variable in jaxpr.jaxpr.invars],
    has_product,
  )


def in_loop(
  equation: core.JaxprEqn,
  recipe: levels.Recipe,
  scope: str,
  after: Sequence[Use],
) -> tuple[Use, bool]:
  """Returns one use for a loop's values, and whether the loop has a product."""
  has_product = any(
    find_demand(
      body.jaxpr, recipe, scope, [Use()] * len(body.jaxpr.out_avals)
    ).has_product
    for body in calls.bodies(equation)
  )
  leads = has_product or any(use.leads_to_product for use in after)
  return Use(leads, in_float32=not leads), has_product


def _call(
  equation: core.JaxprEqn,
  recipe: levels.Recipe,
  scope: str,
  after: Sequence[Use],
) -> tuple[list[Use], bool]:
  """Returns how a call uses its inputs, and whether it contains a product."""
  if calls.is_loop(equation):
    use, has_product = in_loop(equation, recipe, scope, after)
    return [use] * len(equation.invars), has_product
  has_product = False
  of_inputs = [Use()] * len(equation.invars)
  for body in calls.bodies(equation):
    demand = find_demand(body.jaxpr, recipe, scope, after)
    has_product |= demand.has_product
    for place, use in zip(body.inputs, demand.inputs, strict=True):
      of_inputs[place] |= use
  return of_inputs, has_product


def _operation(
  equation: core.JaxprEqn,
  recipe: levels.Recipe,
  scope: str,
  after: Use,
  constants: set[core.Var],
) -> tuple[Use, bool, bool]:
  """Returns the inputs' use, and if an operation is a product or in float32."""
  name = operation_table.name_of(equation)
  decision = recipe.decide(name, scope)
  treatment = decision.treatment
  is_move = operation_table.moves(equation) or name == "convert_element_type"
  if is_move and name not in _LINEAR | operation_table.JOINS:
    return after, False, False
  is_product = treatment is levels.Treatment.WHITE or (
    name in levels.PRODUCTS
    and treatment in (levels.Treatment.LOW, levels.Treatment.LOW_BUT_NORMS)
  )
  leads = is_product or after.leads_to_product
  if treatment is levels.Treatment.WRITTEN:
    return Use(leads), False, False
  in_float32 = treatment is levels.Treatment.BLACK
  if name in levels.SUMS:
    # The inputs of a sum are in float32, whatever the dtype of its result.
    return Use(leads), False, not leads and not decision.is_override
  if not (decision.is_override or is_product):
    is_linear = (
      name in _LINEAR | _BEFORE_SUMS
      or _is_guard(equation)
      or (
        name in _LINEAR_WITH_CONSTANT
        and any(
          isinstance(atom, core.Literal) or atom in constants
          for atom in equation.invars
        )
      )
    )
    in_float32 |= not leads or (is_linear and after.in_float32)
  # An operation without float outputs does not need inputs in low precision.
  is_float = any(
    bits.part_dtype(variable.aval) for variable in equation.outvars
  )
  return Use(leads, in_float32 or not is_float), is_product, in_float32


def _is_guard(equation: core.JaxprEqn) -> bool:
  """Returns whether this is the `max` with -inf that every softmax has."""
  return equation.primitive.name == "max" and any(
    isinstance(atom, core.Literal) and np.all(np.asarray(atom.val) == -np.inf)
    for atom in equation.invars
  )


def _constants(jaxpr: core.Jaxpr) -> set[core.Var]:
  """Returns the variables of a jaxpr that depend only on literals."""
  constants: set[core.Var] = set()
  for equation in jaxpr.jaxpr.eqns:
    if equation.invars and all(
      isinstance(atom, core.Literal) or atom in constants
      for atom in equation.invars
    ):
      constants.update(equation.outvars)
  return constants
