"""Applies a rule to all operations, including those in calls and control flow.

A rule for every operation must also reach the operations in the body of a scan
or in the branches of a cond. This module rebuilds such equations with JAX's
public functions, with the rule applied inside their bodies.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

from chex import ArrayTree
import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._base.leaves import Tree
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._jaxpr.interpreter import Arrays
from optax_lossscale._jaxpr.interpreter import Value

# The outputs of operations, and what a rule counted in them.
_Counted = tuple[Arrays, ArrayTree]


class CountingRule:
  """How to evaluate each operation, and how to combine the counts."""

  # The count before any operation. A count is a pytree of arrays, always with
  # the same structure, shapes and dtypes. This base class counts nothing, so
  # its counts are empty.
  zero: ArrayTree = ()

  def apply(
    self,
    around: tuple[core.JaxprEqn, ...],
    equation: core.JaxprEqn,
    inputs: Arrays,
  ) -> _Counted:
    """Returns the outputs of an operation, and its count."""
    del around  # The equations that contain the operation, outermost first.
    return interpreter.bind(equation, inputs), self.zero

  def join(self, counts: Sequence[ArrayTree]) -> ArrayTree:
    """Combines the counts of operations that run one after another."""
    del counts
    return self.zero

  def join_round(
    self, counts: ArrayTree, more: ArrayTree, *, is_over: bool
  ) -> ArrayTree:
    """Adds the count of a loop's body or condition to the count so far."""
    del is_over
    return self.join([counts, more])

  def join_devices(self, count: ArrayTree, axes: Sequence[str]) -> ArrayTree:
    """Combines the counts of several devices into one shared count."""
    del axes
    return count


class Sum(CountingRule):
  """A rule that adds up its counts, which are int32[]."""

  def join(self, counts: Sequence[ArrayTree]) -> ArrayTree:
    """See the base class."""
    add = lambda x, y: on_this_mesh(x) + on_this_mesh(y)  # noqa: E731
    add_trees = functools.partial(jax.tree.map, add)
    return functools.reduce(add_trees, counts, self.zero)

  def join_devices(self, count: ArrayTree, axes: Sequence[str]) -> ArrayTree:
    """See the base class."""
    return jax.tree.map(lambda x: lax.psum(x, axes), count)


def evaluate(
  jaxpr: core.Jaxpr,
  arguments: Arrays,
  rule: CountingRule,
  consts: Arrays | None = None,
  around: tuple[core.JaxprEqn, ...] = (),
) -> tuple[list[Array], Any]:
  """Returns the outputs of a jaxpr, and what `rule` counted in all of it."""
  # Custom derivative rules are lost, because a function that has one is
  # evaluated without it. Evaluate the differentiated function instead. Custom
  # `vmap` rules are also lost, so apply `vmap` first.
  counts = []

  def apply(equation: core.JaxprEqn, inputs: Arrays) -> Arrays:
    if calls.form(equation) is None:
      outputs, count = rule.apply(around, equation, inputs)
    else:
      bodies, inside = calls.bodies(equation), (*around, equation)
      outputs, count = _rebuild(
        equation,
        inputs,
        lambda i, inputs: evaluate(bodies[i].jaxpr, inputs, rule, None, inside),
        rule,
      )
    counts.append(count)
    return outputs

  outputs = interpreter.evaluate(jaxpr, arguments, apply, consts)
  return outputs, rule.join(counts)


# Evaluates the body at a position in `calls.bodies`, and returns its outputs.
Interpret = Callable[[int, Sequence[Value]], Sequence[Value]]
# Does so, and also returns the body's count.
_InterpretAndCount = Callable[[int, Arrays], _Counted]


class _Rebuilt(NamedTuple):
  """An equation to rebuild, and how to evaluate its bodies."""

  equation: core.JaxprEqn
  inputs: Arrays
  interpret: _InterpretAndCount
  rule: CountingRule


def rebuild(
  equation: core.JaxprEqn,
  inputs: Arrays,
  interpret: Interpret[Array],
) -> Arrays:
  """Evaluates an equation, using `interpret` to evaluate its bodies."""
  outputs, _ = _rebuild(
    equation, inputs, lambda *of_body: (interpret(*of_body), ()), CountingRule()
  )
  return outputs


def _rebuild(
  equation: core.JaxprEqn,
  inputs: Arrays,
  interpret: _InterpretAndCount,
  rule: CountingRule,
) -> _Counted:
  """Returns the outputs of an equation, and what was counted in its bodies."""
  call = _CALLS.get(calls.form(equation))
  if call is not None:
    with interpreter.inside(equation):
      return call(_Rebuilt(equation, inputs, interpret, rule))
  count = rule.zero

  def keep_count(place: int, inputs: Arrays) -> Arrays:
    nonlocal count
    outputs, count = interpret(place, inputs)
    return outputs

  return in_place(equation, inputs, keep_count), count


def in_place(
  equation: core.JaxprEqn,
  inputs: Sequence[Value],
  interpret: Interpret[Value],
  change: Callable[[Callable[[Array], Array], Any], Any] = lambda f, x: f(x),
) -> list[Value]:
  """Returns the outputs of an equation by evaluating its only body instead."""
  # `change` applies a function of one array to an input or output.
  parameters = equation.params
  form = calls.form(equation)
  (body,) = calls.bodies(equation)
  inputs = [inputs[place] for place in body.inputs]

  def lay_out(
    values: Sequence[Value], shardings: Sequence[object]
  ) -> list[Value]:
    """Gives values the shardings that a jitted function specifies for them."""
    return [
      change(functools.partial(_lay, sharding=sharding), value)
      if isinstance(sharding, jax.sharding.Sharding)
      else value
      for value, sharding in zip(values, shardings, strict=True)
    ]

  with interpreter.inside(equation):
    if form is calls.Form.JIT:
      inputs = lay_out(inputs, parameters["in_shardings"])
      return lay_out(interpret(0, inputs), parameters["out_shardings"])
    if (
      form is calls.Form.REMAT
      and parameters["differentiated"]
      and parameters["prevent_cse"]
    ):
      # As in JAX's own lowering, the compiler must not merge recomputed values
      # with the originals. Each input has its own barrier: under `shard_map`, a
      # shared barrier would make all inputs vary if one of them does.
      inputs = [change(lax.optimization_barrier, x) for x in inputs]
    return list(interpret(0, inputs))


def _lay(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
  if isinstance(sharding, jax.NamedSharding) and (
    jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  ):
    # On an explicit mesh, a sharding is part of the array's type, not a hint.
    return jax.jit(_same, out_shardings=sharding)(array)
  return lax.with_sharding_constraint(array, sharding)


def _same(array: jax.Array) -> jax.Array:
  return array


def _cond(of: _Rebuilt) -> _Counted:
  """Rebuilds `lax.cond`, `lax.switch` and `lax.platform_dependent`."""
  equation, inputs, interpret, rule = of
  index, *operands = inputs

  def evaluate_branch(place: int, *operands: Array) -> _Counted:
    outputs, counts = interpret(place, operands)
    return outputs, rule.join([_varying(rule.zero), counts])

  functions = [
    functools.partial(evaluate_branch, place)
    for place in range(len(calls.bodies(equation)))
  ]
  result: _Counted
  platforms = equation.params.get("branches_platforms")
  if platforms is None:
    result = lax.switch(index, functions, *operands)
  else:
    # JAX compiles only the branch for the current platform. The code of other
    # branches may not even compile there.
    of_platform = {
      platform: function
      for function, of_branch in zip(functions, platforms, strict=True)
      for platform in of_branch or ("default",)
    }
    result = lax.platform_dependent(*operands, **of_platform)
  return result


def _scan(of: _Rebuilt) -> _Counted:
  """Rebuilds `lax.scan`, or a `fori_loop` of known length."""
  equation, inputs, interpret, rule = of
  parameters = equation.params
  carried = calls.carried(equation)
  consts = inputs[: carried.start]

  def run_round(state: _Counted, x: list[Array]) -> tuple[_Counted, Arrays]:
    carry, counts = state
    outputs, more = interpret(0, [*consts, *carry, *x])
    counts = rule.join_round(counts, more, is_over=True)
    return (outputs[: len(carried)], counts), outputs[len(carried) :]

  first: _Counted = (
    list(inputs[carried.start : carried.stop]),
    _varying(rule.zero),
  )
  (carry, counts), ys = lax.scan(
    run_round,
    first,
    list(inputs[carried.stop :]),
    length=parameters["length"],
    reverse=parameters["reverse"],
    unroll=parameters["unroll"],
  )
  return [*carry, *ys], counts


def _while_loop(of: _Rebuilt) -> _Counted:
  """Rebuilds `lax.while_loop`, or a `fori_loop` of unknown length."""
  equation, inputs, interpret, rule = of
  bodies = calls.bodies(equation)
  start = calls.carried(equation).start

  # Body 0 is the condition, and body 1 is the loop's body.
  def run(place: int, carry: Arrays) -> _Counted:
    consts = [inputs[i] for i in bodies[place].inputs if i < start]
    return interpret(place, [*consts, *carry])

  # The body also evaluates the condition, so that the loop carries its count.
  def run_round(
    state: tuple[Array, list[Array], ArrayTree],
  ) -> tuple[Array, list[Array], ArrayTree]:
    goes_on, carry, counts = state
    outputs, in_round = run(1, carry)
    # Under `vmap` each example has its own condition, and examples whose loop
    # is over keep their values.
    outputs = [
      _where_goes_on(goes_on, new, old)
      for new, old in zip(outputs, carry, strict=True)
    ]
    counts = rule.join_round(counts, in_round, is_over=True)
    # The count of a condition belongs to the iteration that follows.
    (goes_on,), in_test = run(0, outputs)
    counts = rule.join_round(counts, in_test, is_over=False)
    return goes_on, outputs, counts

  carry = list(inputs[start:])
  (goes_on,), in_test = run(0, carry)
  counts = rule.join_round(_varying(rule.zero), in_test, is_over=False)
  _, carry, counts = lax.while_loop(
    lambda state: jnp.any(state[0]), run_round, (goes_on, carry, counts)
  )
  return carry, counts


def _where_goes_on(goes_on: Array, new: Array, old: Array) -> Array:
  if jnp.ndim(goes_on) == 0:
    return new  # The loop ends when `goes_on` is False.
  shape = goes_on.shape + (1,) * (jnp.ndim(new) - goes_on.ndim)
  return jnp.where(goes_on.reshape(shape), new, old)


def _shard_map(of: _Rebuilt) -> _Counted:
  """Rebuilds `jax.shard_map`, or `jax.pmap`, which is built on it."""
  equation, inputs, interpret, rule = of
  parameters = equation.params
  axes = tuple(parameters["newly_manual_axes"])

  def of_device(*inputs: Array) -> _Counted:
    outputs, counts = interpret(0, inputs)
    counts = rule.join([_varying(rule.zero), counts])
    return list(outputs), rule.join_devices(counts, axes)

  result: _Counted = jax.shard_map(
    of_device,
    mesh=parameters["mesh"],
    in_specs=tuple(parameters["in_specs"]),
    out_specs=(
      list(parameters["out_specs"]),
      jax.tree.map(lambda _: jax.P(), rule.zero),
    ),
    axis_names=set(axes),
    check_vma=parameters["check_vma"],
  )(*inputs)
  return result


_CALLS: Mapping[calls.Form | None, Callable[[_Rebuilt], _Counted]] = {
  calls.Form.COND: _cond,
  calls.Form.SCAN: _scan,
  calls.Form.WHILE: _while_loop,
  calls.Form.SHARD_MAP: _shard_map,
}


def _varying(zero: Tree) -> Tree:
  """Returns `zero` as a value that may differ between devices."""
  # A value has one type in all rounds and branches. Under `shard_map` it says
  # along which axes the value may vary, as one plus 0 times a position does.
  for axis in jax.sharding.get_abstract_mesh().manual_axes:
    position = lax.axis_index(axis)
    zero = jax.tree.map(lambda x, p=position: x + 0 * p, zero)
  return zero


def on_this_mesh(count: jax.Array) -> jax.Array:
  """Moves a count that was made on another mesh to the current one."""
  # Inside `jax.sharding.auto_axes` and the like, the mesh has axes of other
  # types than outside, and the type of a count includes its mesh.
  mesh = jax.sharding.get_abstract_mesh()
  mesh_there = jax.typeof(count).sharding.mesh
  if mesh.empty or mesh_there.empty or mesh_there == mesh:
    return count
  here: jax.Array = jax.sharding.reshard(
    count, jax.NamedSharding(mesh, jax.P())
  )
  return here
