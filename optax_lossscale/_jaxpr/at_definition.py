"""Select at definition: skips a step without using more memory.

A value that is selected where it is defined goes into the old value's buffer,
and later computations read it. On a skipped step, it is the old value, and the
results of those later computations are discarded.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
from typing import TypeVar

import jax
from jax.extend import core

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter

# Takes an old value and a new one, and returns the one to keep.
Select = Callable[[jax.Array, jax.Array], jax.Array]

_Result = TypeVar("_Result")
_State = TypeVar("_State")


def select_at_definition(
  function: Callable[[], tuple[_Result, _State]],
  old_state: _State,
  select: Select,
  check: Callable[[core.Jaxpr], None] = lambda jaxpr: None,
) -> tuple[_Result, _State]:
  """Returns the result of `function`, and its new state or the old one."""
  jaxpr, (result, state) = jax.make_jaxpr(function, return_shape=True)()
  check(jaxpr)  # Before it is evaluated.
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
  jaxpr: core.Jaxpr, olds: Sequence[jax.Array | None]
) -> dict[core.Var, jax.Array]:
  """Returns the old value of each output that can be selected at definition."""
  # Inputs and constants have no definition, and a variable that is two outputs
  # has only one old value. These outputs are selected after the update.
  defined = {
    variable for equation in jaxpr.eqns for variable in equation.outvars
  }
  old_of: dict[core.Var, jax.Array] = {}
  for atom, old in zip(jaxpr.jaxpr.outvars, olds, strict=True):
    if (
      old is not None
      and not isinstance(atom, core.Literal)
      and atom in defined
      # An old value of another dtype would not fit where the new one is used.
      and getattr(atom.aval, "dtype", None) == old.dtype
    ):
      old_of.setdefault(atom, old)
  return old_of


def _evaluate_selecting(
  jaxpr: core.Jaxpr,
  inputs: Sequence[jax.Array],
  olds: Sequence[jax.Array | None],
  select: Select,
) -> tuple[list[jax.Array], list[bool]]:
  """Returns the outputs of a jaxpr, and which of them are selected already."""
  old_of = find_definitions(jaxpr, olds)
  selected: set[core.Var] = set()

  def rule(
    equation: core.JaxprEqn, inputs: Sequence[jax.Array]
  ) -> Sequence[jax.Array]:
    olds = [old_of.get(variable) for variable in equation.outvars]
    if all(old is None for old in olds):
      return interpreter.bind(equation, inputs)
    inner = calls.transparent_body(equation)
    if inner is not None:
      # The outputs are defined inside the call, and may be used there too.
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


def _select_if_it_fits(
  select: Select, old: jax.Array, new: jax.Array
) -> jax.Array:
  """Returns the selected value, or `new` if the two have different types."""
  # Under `shard_map`, a type says over which devices a value may vary. If the
  # old value or the skip varies but `new` does not, select after the update.
  selected = select(old, new)
  return selected if _type(selected) == _type(new) else new


def _type(x: jax.Array) -> object:
  aval = jax.typeof(x)
  return aval.update(weak_type=False) if hasattr(aval, "weak_type") else aval
