"""Plans how to evaluate a program, reading its equations backwards.

The dtype of an operation depends not only on its name, scope and inputs but
also on what comes later: a matrix product, or uses that are not in float32.
"""

import collections
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import operator
from typing import NamedTuple

from jax.extend import core
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Flag

_Treatment = levels.Treatment


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
class Step:
  """How to evaluate one equation."""

  # The operation's name (see `operations.name_of`) and its scope.
  name: str
  scope: str
  # True if the equation is a product in low precision, or contains one.
  has_product: bool
  # True if float32 takes no more memory: the operation saves nothing for the
  # backward pass, or only for a sum, which is in float32.
  is_linear: bool
  # None if the equation holds bodies, each of which has a plan.
  decision: levels.Decision | None
  bodies: "Sequence[Plan]" = ()
  # How the equation uses its inputs, and how the program uses its outputs.
  inputs: Sequence[Use] = ()
  outputs: Sequence[Use] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
  """How to evaluate a jaxpr: one step for each equation, in their order."""

  steps: Sequence[Step]
  # How the jaxpr uses its inputs.
  inputs: Sequence[Use] = ()


# Those that save nothing for the backward pass, as does multiplication by a
# constant.
_LINEAR = operations.names(Flag.LINEAR)


def make_plan(
  jaxpr: core.Jaxpr, recipe: levels.Recipe, scope: str, use: Use
) -> Plan:
  """Returns the plan for a jaxpr, given its scope and its outputs' use."""
  plan = _decide(jaxpr, recipe, scope)
  return _add_uses(jaxpr, plan, itertools.repeat(use), only_inputs=False)


def share_use(uses: Sequence[Use], *, has_product: bool = False) -> Use:
  """Returns the one use of all values in a loop or of a derivative rule."""
  leads = has_product or any(use.leads_to_product for use in uses)
  return Use(leads, in_float32=not leads)


def _decide(jaxpr: core.Jaxpr, recipe: levels.Recipe, scope: str) -> Plan:
  """Returns a plan without uses, which has only the recipe's decisions."""
  # The use of a loop's values depends on whether the loop contains a product.
  # So all products are found first, and then each body is planned once.
  steps = []
  # The variables that depend only on literals.
  constants: set[core.Var] = set()
  for equation in jaxpr.jaxpr.eqns:
    name = operations.name_of(equation)
    where = scopes.join(scope, str(equation.source_info.name_stack))
    inside = recipe
    if calls.form(equation) is calls.Form.CUSTOM_JVP:
      inside = recipe.for_jvp_rule()
    marked = scopes.mark_on(equation) == scopes.KERNEL
    bodies = [
      _decide(body.jaxpr, inside, where)
      for body in calls.castable_bodies(equation)
    ]
    decision = None if bodies else recipe.decide(name, where)
    has_product = any(step.has_product for x in bodies for step in x.steps)
    if marked:
      # A kernel is for products, even if it hides them.
      written = levels.Decision(_Treatment.WRITTEN, recipe.dtype)
      decision, has_product = written._replace(is_marked=True), True
    elif decision is not None and not _only_moves(equation, name):
      has_product = decision.treatment is _Treatment.WHITE or (
        name in levels.PRODUCTS
        and decision.treatment in (_Treatment.LOW, _Treatment.LOW_BUT_NORMS)
      )
    are_constant = [
      isinstance(atom, core.Literal) or atom in constants
      for atom in equation.invars
    ]
    if are_constant and all(are_constant):
      constants.update(equation.outvars)
    is_linear = name in _LINEAR or _is_guard(equation)
    is_linear |= name in ("div", "mul") and any(are_constant)
    steps.append(Step(name, where, has_product, is_linear, decision, bodies))
  return Plan(steps)


def _add_uses(
  jaxpr: core.Jaxpr, plan: Plan, outputs: Iterable[Use], *, only_inputs: bool
) -> Plan:
  """Returns a plan with uses, and with the decisions that depend on them."""
  # If `only_inputs`, the caller needs only how the jaxpr uses its inputs.
  uses = collections.defaultdict[core.Var, Use](Use)

  def note(
    atoms: Sequence[core.Var | core.Literal], of_atoms: Iterable[Use]
  ) -> None:
    for atom, use in zip(atoms, of_atoms, strict=False):
      if isinstance(atom, core.Var):
        uses[atom] |= use

  note(jaxpr.jaxpr.outvars, outputs)
  steps = []
  equations = reversed(jaxpr.jaxpr.eqns)
  for equation, step in zip(equations, reversed(plan.steps), strict=True):
    after = [uses[variable] for variable in equation.outvars]
    step = dataclasses.replace(step, outputs=after)
    if step.decision is None:
      step = _plan_call(equation, step, only_inputs=only_inputs)
    else:
      step = _plan_operation(equation, step, step.decision)
    note(equation.invars, step.inputs)
    steps.append(step)
  return Plan(steps[::-1], [uses[variable] for variable in jaxpr.jaxpr.invars])


def _plan_call(
  equation: core.JaxprEqn, step: Step, *, only_inputs: bool
) -> Step:
  bodies = calls.bodies(equation)

  def add_uses(outputs: Iterable[Use], *, only_inputs: bool) -> list[Plan]:
    return [
      _add_uses(body.jaxpr, plan, outputs, only_inputs=only_inputs)
      for body, plan in zip(bodies, step.bodies, strict=True)
    ]

  if calls.is_loop(equation):
    use = share_use(step.outputs, has_product=step.has_product)
    plans = add_uses(itertools.repeat(use), only_inputs=only_inputs)
    inputs = [use] * len(equation.invars)
    return dataclasses.replace(step, bodies=plans, inputs=inputs)
  form = calls.form(equation)
  has_rule = form in (calls.Form.CUSTOM_JVP, calls.Form.CUSTOM_VJP)
  plans = add_uses(step.outputs, only_inputs=only_inputs or has_rule)
  inputs = [Use()] * len(equation.invars)
  for body, plan in zip(bodies, plans, strict=True):
    for place, use in zip(body.inputs, plan.inputs, strict=True):
      inputs[place] |= use
  if has_rule and not only_inputs:
    # The function is evaluated with the use that its rule has.
    use = share_use(step.outputs)
    plans = add_uses(itertools.repeat(use), only_inputs=False)
  return dataclasses.replace(step, bodies=plans, inputs=inputs)


def _plan_operation(
  equation: core.JaxprEqn, step: Step, decision: levels.Decision
) -> Step:
  after = functools.reduce(operator.or_, step.outputs, Use())
  use, in_float32 = _use_inputs(equation, step, decision, after)
  if _is_unknown(equation) and not decision.is_marked:
    decision = decision._replace(
      treatment=_Treatment.WRITTEN, why=levels.OPAQUE
    )
  elif in_float32 and not decision.is_override:
    why = "no product follows"
    if after.leads_to_product:
      why = decision.why or "only used in float32"
    decision = decision._replace(treatment=_Treatment.BLACK, why=why)
  inputs = [use] * len(equation.invars)
  return dataclasses.replace(step, decision=decision, inputs=inputs)


def _use_inputs(
  equation: core.JaxprEqn, step: Step, decision: levels.Decision, after: Use
) -> tuple[Use, bool]:
  """Returns how an operation uses its inputs, and if it runs in float32."""
  if _only_moves(equation, step.name):
    return after, False
  leads = step.has_product or after.leads_to_product
  if decision.treatment is _Treatment.WRITTEN:
    return Use(leads), False
  if step.name in levels.SUMS:
    # The inputs of a sum are in float32, whatever the dtype of its result.
    return Use(leads), not (leads or decision.is_override)
  in_float32 = decision.treatment is _Treatment.BLACK
  if not (decision.is_override or step.has_product):
    in_float32 |= not leads or (step.is_linear and after.in_float32)
  # An operation without float outputs does not need inputs in low precision.
  is_float = any(leaves.is_gradient(x.aval) for x in equation.outvars)
  return Use(leads, in_float32 or not is_float), in_float32


def _only_moves(equation: core.JaxprEqn, name: str) -> bool:
  is_move = operations.moves(equation) or name == "convert_element_type"
  is_join = operations.of(equation).elements is Elements.JOINS
  return is_move and not is_join and name not in _LINEAR


def _is_guard(equation: core.JaxprEqn) -> bool:
  """Returns whether this is the `max` with -inf that every softmax has."""
  return equation.primitive.name == "max" and any(
    isinstance(atom, core.Literal) and np.all(np.asarray(atom.val) == -np.inf)
    for atom in equation.invars
  )


def _is_unknown(equation: core.JaxprEqn) -> bool:
  """Returns whether an operation holds a jaxpr but is in no table."""
  if (
    equation.primitive.name in calls.TABLE
    or Flag.COMBINES in operations.of(equation).flags
  ):
    return False
  parameters = equation.params.values()
  several = [x if isinstance(x, (tuple, list)) else [x] for x in parameters]
  return any(map(calls.is_jaxpr, itertools.chain(*several)))
