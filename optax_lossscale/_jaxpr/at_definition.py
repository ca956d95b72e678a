"""Select at definition: the skip of a step that costs no memory.

A new state selected after the update that made it is there twice for a while,
and the compiler keeps both. Selected at the place where each value is defined,
it goes into the buffer of the old one, and what is computed from it reads the
selected value. On an applied step that is the same. On a skipped step all of it
is thrown away.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
from typing import Any

import jax
from jax.extend import core

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter

# Takes an old value and a new one, returns the one that is to be kept.
Select = Callable[[Any, Any], Any]


def select_at_definition(
  function: Callable[[], tuple[Any, Any]], old_state: Any, select: Select
) -> tuple[Any, Any]:
  """Returns what `function` returns, its state selected against the old one."""
  jaxpr, (result, state) = jax.make_jaxpr(function, return_shape=True)()
  split = len(jax.tree.leaves(result))
  olds = [None] * split + jax.tree.leaves(old_state)
  outputs, are_selected = _evaluate_selecting(jaxpr, [], olds, select)
  outputs = [
    new if old is None or is_selected else select(old, new)
    for old, new, is_selected in zip(olds, outputs, are_selected, strict=True)
  ]
  return (
    jax.tree.unflatten(jax.tree.structure(result), outputs[:split]),
    jax.tree.unflatten(jax.tree.structure(state), outputs[split:]),
  )


def find_definitions(
  jaxpr: core.Jaxpr, olds: Sequence[Any]
) -> dict[core.Var, Any]:
  """Returns the variables that can be selected where they are defined.

  Not among them: an output that is an input or a constant, which has no
  definition, and the second of two outputs that are one variable, which can be
  selected against one old value only. These take a select of their own.
  """
  defined = {
    variable for equation in jaxpr.eqns for variable in equation.outvars
  }
  old_of: dict[core.Var, Any] = {}
  for atom, old in zip(jaxpr.jaxpr.outvars, olds, strict=True):
    if (
      old is not None
      and not isinstance(atom, core.Literal)
      and atom in defined
      # Selected in another dtype, it would not fit where it is used.
      and getattr(atom.aval, "dtype", None) == old.dtype
    ):
      old_of.setdefault(atom, old)
  return old_of


def _evaluate_selecting(
  jaxpr: core.Jaxpr,
  inputs: Sequence[Any],
  olds: Sequence[Any],
  select: Select,
) -> tuple[list[Any], list[bool]]:
  """Returns the outputs of a jaxpr, and which of them are selected."""
  old_of = find_definitions(jaxpr, olds)
  selected: set[core.Var] = set()

  def rule(equation: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    olds = [old_of.get(variable) for variable in equation.outvars]
    if all(old is None for old in olds):
      return interpreter.bind(equation, inputs)
    inner = calls.transparent_body(equation)
    if inner is not None:
      # What the function returns is defined in there, and may be used there.
      with interpreter.inside(equation):
        outputs, are_selected = _evaluate_selecting(inner, inputs, olds, select)
    else:
      news = interpreter.bind(equation, inputs)
      outputs = [
        new if old is None else _select_if_it_fits(select, old, new)
        for old, new in zip(olds, news, strict=True)
      ]
      are_selected = [a is not b for a, b in zip(outputs, news, strict=True)]
    selected.update(itertools.compress(equation.outvars, are_selected))
    return outputs

  outputs = interpreter.evaluate(jaxpr, inputs, rule)
  return outputs, [
    not isinstance(atom, core.Literal)
    and atom in selected
    and old_of[atom] is old
    for atom, old in zip(jaxpr.jaxpr.outvars, olds, strict=True)
  ]


def _select_if_it_fits(select: Select, old: Any, new: Any) -> Any:
  """Returns the selected value, or `new` if that is of another type.

  Under `shard_map` a type says over which devices a value may vary. One that
  varies with the old value or with the skip would not fit where the new one is
  used; then the new one is selected at the end, as if it had no definition.
  """
  selected = select(old, new)
  return selected if _type(selected) == _type(new) else new


def _type(x: Any) -> Any:
  aval = jax.typeof(x)
  return aval.update(weak_type=False) if hasattr(aval, "weak_type") else aval
