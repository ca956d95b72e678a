"""Branches and loops around bodies that are evaluated by a rule."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxpr import tallies

# Evaluates a jaxpr that an equation holds; returns its outputs and its count.
Interpret = Callable[[Any, Sequence[Any]], tuple[list[Any], Any]]
Call = Callable[
  [core.JaxprEqn, Sequence[Any], Interpret, tallies.Tally],
  tuple[list[Any], Any],
]


def cond(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  """`lax.cond`, `lax.switch` and `lax.platform_dependent`."""
  index, *operands = inputs
  branches = equation.params["branches"]

  def evaluate_branch(jaxpr: Any, *operands: Any) -> tuple[list[Any], Any]:
    outputs, counts = interpret(jaxpr, operands)
    return outputs, tally.join([varying(tally.zero), counts])

  functions = [functools.partial(evaluate_branch, x) for x in branches]
  result: tuple[list[Any], Any]
  platforms = equation.params.get("branches_platforms")
  if platforms is None:
    result = lax.switch(index, functions, *operands)
  else:
    # Of this JAX compiles one branch only: code for one kind of device may not
    # even compile for another.
    of_platform = {
      platform: function
      for function, of_branch in zip(functions, platforms, strict=True)
      for platform in of_branch or ("default",)
    }
    result = lax.platform_dependent(*operands, **of_platform)
  return result


def scan(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  """`lax.scan`, and `fori_loop` of known length."""
  parameters = equation.params
  num_consts, num_carry = scan_lengths(equation)
  consts = inputs[:num_consts]
  carry = list(inputs[num_consts : num_consts + num_carry])
  xs = list(inputs[num_consts + num_carry :])

  def body(state: Any, x: list[Any]) -> tuple[Any, list[Any]]:
    carry, counts = state
    outputs, more = interpret(parameters["jaxpr"], [*consts, *carry, *x])
    counts = tally.join_round(counts, more, is_over=True)
    return (outputs[:num_carry], counts), outputs[num_carry:]

  (carry, counts), ys = lax.scan(
    body,
    (carry, varying(tally.zero)),
    xs,
    length=parameters["length"],
    reverse=parameters["reverse"],
    unroll=parameters["unroll"],
  )
  return [*carry, *ys], counts


def scan_lengths(equation: core.JaxprEqn) -> tuple[int, int]:
  """Returns how many inputs of a scan are constants, and how many carried."""
  parameters = equation.params
  if "num_carry" in parameters:
    return parameters["num_consts"], parameters["num_carry"]
  # From jax 0.11 a scan holds them as the parts of a tree, which is not a
  # public class; a part's length is all that is read of it.
  consts, carry, _ = parameters["ft_in"].unpack()
  return len(consts), len(carry)


def while_loop(
  equation: core.JaxprEqn,
  inputs: Sequence[Any],
  interpret: Interpret,
  tally: tallies.Tally,
) -> tuple[list[Any], Any]:
  """`lax.while_loop`, and `fori_loop` of unknown length."""
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
    counts = tally.join_round(counts, in_body, is_over=True)
    # What the condition counts belongs to the round that it lets begin.
    goes_on, in_test = test(outputs)
    counts = tally.join_round(counts, in_test, is_over=False)
    return goes_on, outputs, counts

  carry = list(inputs[num_cond + num_body :])
  goes_on, in_test = test(carry)
  counts = tally.join_round(varying(tally.zero), in_test, is_over=False)
  _, carry, counts = lax.while_loop(
    lambda state: jnp.any(state[0]), body, (goes_on, carry, counts)
  )
  return carry, counts


def varying(zero: Any) -> Any:
  """Returns `zero` as a value that may differ between devices.

  What a loop carries and what branches return must have one type. Under
  `shard_map` the type says along which axes of the mesh a value may vary, and
  the position on an axis varies along it.
  """
  for axis in jax.sharding.get_abstract_mesh().manual_axes:
    position = lax.axis_index(axis)
    zero = jax.tree.map(lambda x, p=position: x + 0 * p, zero)
  return zero


def _where_goes_on(goes_on: Any, new: Any, old: Any) -> Any:
  if jnp.ndim(goes_on) == 0:
    return new  # The loop has ended where it is False.
  shape = goes_on.shape + (1,) * (jnp.ndim(new) - goes_on.ndim)
  return jnp.where(goes_on.reshape(shape), new, old)
